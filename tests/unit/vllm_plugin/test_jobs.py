"""Orders and their answers: several ranks, answers twice, late or never."""

from __future__ import annotations

import pytest

from kvortex.cache.residency import Candidate
from kvortex.keys import BlockKey
from kvortex.messages import Direction, JobId, JobResult, Outcome, StepReport
from kvortex.vllm_plugin.jobs import JobBook, LoadJob, StoreJob
from tests.fakes.clock import FakeClock


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(32, "big") + bytes(4))


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def book(clock: FakeClock) -> JobBook:
    return JobBook(num_ranks=2, timeout_s=10.0, clock=clock)


def store(book: JobBook, *blocks: int) -> StoreJob:
    return book.start_store([Candidate(b, key(b), b) for b in blocks], slots=[b + 100 for b in blocks], written_by=1)


def load(book: JobBook, request: str, *blocks: int, refused: bool = False, with_step: bool = False) -> LoadJob:
    keys = [key(b) for b in blocks]
    return book.start_load(
        request,
        list(blocks),
        [b + 100 for b in blocks],
        keys,
        local_tokens=0,
        ram_tokens=16 * len(blocks),
        computed_tokens=1,
        refused=refused,
        with_step=with_step,
    )


def result(job_id: JobId, outcome: Outcome = Outcome.DONE, seconds: float = 1.0) -> JobResult:
    return JobResult(job_id, Direction.STORE, outcome, seconds, 0, "why" if outcome is not Outcome.DONE else "")


def test_a_job_ends_when_every_rank_has_answered(book):
    job = store(book, 1)
    assert book.answer(0, result(job.job_id, seconds=1.0)) is None
    assert book.answer(1, result(job.job_id, seconds=3.0)) is job
    assert not job.failed
    assert job.seconds == 3.0, "the slowest rank's"
    assert book.unanswered == 0


def test_one_rank_that_answers_twice_does_not_stand_for_another(book):
    """Field trial B19: with the second rank's bytes still moving, the block must not be published."""
    job = store(book, 1)
    book.answer(0, result(job.job_id))
    assert book.answer(0, result(job.job_id)) is None
    assert book.unanswered == 1
    assert book.ignored_answers == 1


def test_an_answer_after_the_end_is_counted_and_ignored(book):
    job = store(book, 1)
    book.answer(0, result(job.job_id))
    book.answer(1, result(job.job_id))
    assert book.answer(1, result(job.job_id)) is None
    assert book.ignored_answers == 1


def test_one_rank_that_failed_fails_the_job_and_its_reason_is_kept(book):
    job = store(book, 1)
    book.answer(0, result(job.job_id, Outcome.FAILED))
    ended = book.answer(1, result(job.job_id))
    assert ended is job
    assert job.failed
    assert "rank 0" in job.detail
    assert "why" in job.detail


def test_a_plan_holds_each_order_once(book):
    store(book, 1, 2)
    load(book, "a", 3)
    load(book, "b", 4, refused=True)
    plan = book.take_plan()
    assert [o.gpu_blocks.tolist() for o in plan.stores] == [[1, 2]]
    assert [o.gpu_blocks.tolist() for o in plan.loads] == [[3]]
    assert [o.gpu_blocks.tolist() for o in plan.refused] == [[4]]
    assert sorted(plan.requests.values()) == ["a", "b"]
    assert not book.take_plan().stores


def test_a_key_is_loading_until_the_last_load_of_it_ends(book):
    first, second = load(book, "a", 1), load(book, "b", 1)
    for rank in (0, 1):
        book.answer(rank, result(first.job_id))
    assert book.loading(key(1))
    for rank in (0, 1):
        book.answer(rank, result(second.job_id))
    assert not book.loading(key(1))
    assert not book.loading(None)


def test_a_block_reused_while_its_store_is_under_way_is_lost(book):
    job = store(book, 1, 2)
    book.source_reused(2)
    book.source_reused(77)
    assert job.lost == {1}


def test_a_block_reused_after_its_store_ended_loses_nothing(book):
    job = store(book, 1)
    for rank in (0, 1):
        book.answer(rank, result(job.job_id))
    book.source_reused(1)
    assert job.lost == set()


def test_a_block_stored_again_for_another_key_belongs_to_the_later_store(book):
    first = store(book, 1)
    book.source_reused(1)
    second = store(book, 1)
    for rank in (0, 1):
        book.answer(rank, result(first.job_id))
    book.source_reused(1)
    assert first.lost == {0}
    assert second.lost == {0}


def test_a_reset_loses_every_source(book):
    job = store(book, 1, 2)
    book.forget_sources()
    assert job.lost == {0, 1}


def test_a_store_without_an_answer_is_overdue_once_and_still_awaited(book, clock):
    job = store(book, 1)
    later = store(book, 2)
    clock.advance(19.0)
    assert book.overdue_stores() == []
    clock.advance(1.5)
    assert book.overdue_stores() == [job, later]
    assert book.overdue_stores() == []
    assert job.overdue
    assert book.unanswered == 2
    for rank in (0, 1):
        ended = book.answer(rank, result(job.job_id))
    assert ended is job
    assert job.failed, "it was given up: a late success does not count"


def test_nothing_is_kept_of_jobs_that_ended(book):
    for number in range(1000):
        job = store(book, number % 7) if number % 2 else load(book, "r", number % 5)
        book.take_plan()
        for rank in (0, 1):
            book.answer(rank, result(job.job_id))
    assert book.unanswered == 0
    assert not book._source_of
    assert not book._loading
    assert not book._store_deadlines


def test_reports_of_several_ranks_merge():
    one, two = result(JobId(1)), result(JobId(2))
    merged = StepReport({0: [one]}).merge(StepReport({1: [one], 0: [two]}))
    assert merged.results == {0: [one, two], 1: [one]}
