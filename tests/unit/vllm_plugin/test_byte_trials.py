"""Field trials of wrong bytes, tried with the scheduler side, vLLM's block pool and the copy engine's own threads."""

from __future__ import annotations

import importlib
import itertools
import os
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kvortex.cache.index import KeyState
from kvortex.keys import block_key
from kvortex.messages import Direction
from tests.fakes.copy_engines import FailingMover, GatedMover, SkippingMover

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    mini = importlib.import_module("tests.fakes.mini_vllm")
    byte_vllm = importlib.import_module("tests.fakes.byte_vllm")

OPERATIONS = int(os.environ.get("TRIAL_OPERATIONS", "150"))
STEPS = 20_000
Made = Callable[..., Any]
GATES: list[GatedMover] = []
NUMBERS = itertools.count()


@pytest.fixture
def make() -> Iterator[Made]:
    made: list[Any] = []

    def new(*args: Any, **options: Any) -> Any:
        made.append(byte_vllm.ByteVllm(*args, **options))
        return made[-1]

    yield new
    for vllm in made:
        for gate in GATES:
            gate.open()
        vllm.close()
    GATES.clear()


def ask(vllm: Any, conversation: int, count: int, name: str = "") -> Any:
    asked = mini.request(name or f"r{next(NUMBERS)}", mini.hashes_of(conversation, count))
    vllm.run(asked, steps=STEPS)
    return asked


def evict(vllm: Any, blocks: int) -> None:
    """Other prompts, until the pool has none of the earlier ones."""
    for _ in range(2):
        ask(vllm, 9000 + next(NUMBERS), blocks - 2)


# ---- B06


def test_a_ram_of_fewer_slots_than_a_prompt_gives_what_it_has_and_never_what_nobody_wrote(make: Made) -> None:
    """Field trial B06: four slots of 0xEE, a prompt of eight blocks."""
    vllm = make(40, 4)
    for _ in range(3):
        asked = ask(vllm, 1, 8)
        assert asked.hit_blocks <= 8
        vllm.check_ended()
        evict(vllm, 40)
    vllm.check_ended()
    assert vllm.side._index.num_slots == 4


class FailsOneLoad:
    """Raises for one of the blocks that are loaded, counted from when it is told."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._lock = threading.Lock()
        self.left: int | None = None

    def copy_piece(self, direction: Direction, gpu_blocks: Any, slots: Any) -> None:
        if direction is Direction.LOAD and self.left is not None:
            with self._lock:
                self.left -= 1
                if self.left == -1:
                    raise OSError("no memory to read with")
        self._inner.copy_piece(direction, gpu_blocks, slots)


@pytest.mark.parametrize("bad", [0, 4, 7])
def test_a_load_that_fails_midway_is_a_miss_as_a_whole(make: Made, bad: int) -> None:
    """Field trial B06: of eight blocks one cannot be read; none of the other seven is taken for valid."""
    movers: list[FailsOneLoad] = []

    def fails(real: Any) -> Any:
        movers.append(FailsOneLoad(real))
        return movers[0]

    vllm = make(40, 100, mover=fails)
    ask(vllm, 1, 8)
    evict(vllm, 40)
    before = vllm.side.snapshot()
    movers[0].left = bad
    asked = ask(vllm, 1, 8)
    after = vllm.side.snapshot()
    assert asked.hit_blocks == 0
    assert after["failures"]["load"] - before["failures"]["load"] == 8
    assert after["missed"]["load_failed"] == 8 * mini.BLOCK_SIZE
    assert ask(vllm, 1, 8).hit_blocks == 8, "what was computed again is there"
    vllm.check_ended()


def test_the_trials_see_a_block_that_was_said_to_be_read_and_was_not(make: Made) -> None:
    """Their control."""
    movers: list[Any] = []

    def skips(real: Any) -> Any:
        movers.append(SkippingMover(real, []))
        return movers[0]

    vllm = make(40, 100, mover=skips)
    ask(vllm, 1, 8)
    evict(vllm, 40)
    movers[0]._skipped_blocks = set(range(41))
    with pytest.raises(AssertionError, match="reads what is not its own"):
        ask(vllm, 1, 8)
    movers[0]._skipped_blocks = set()
    vllm.unanswered = 0


# ---- B07


def test_sessions_that_come_back_find_their_own_blocks_and_in_order(make: Made) -> None:
    """Field trial B07: 32 sessions of 64 blocks, RAM for 8, a slow writer; each hit checks key and place.

    TRIAL_OPERATIONS=10000 is the trial at its full length."""
    rng = random.Random(7)
    vllm = make(260, 8 * 64, num_threads=8, mover=lambda real: byte_vllm.SlowMover(real, Direction.STORE, 0.001))
    for number in range(0, OPERATIONS, 3):
        # The recent ones more often, or nothing would hit.
        sessions = [*rng.sample(range(number // 40 % 25, number // 40 % 25 + 7), 2), rng.randrange(32)]
        asked = [
            mini.request(f"{number}-{i}", mini.hashes_of(session, rng.choice([8, 32, 64])))
            for i, session in enumerate(sessions)
        ]
        vllm.run(*asked, steps=STEPS)
    vllm.check_ended()
    stats = vllm.side.snapshot()
    assert stats["tokens"]["ram_hit"] > 0
    assert stats["evicted"]["ram_blocks"] > 0
    assert stats["failures"] == {"store": 0, "load": 0, "recomputed_tokens": 0}


# ---- B08


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_being_written_is_neither_found_nor_written_twice(make: Made, fails: bool) -> None:
    """Field trial B08: three states. While the copy of three blocks is held: no hit, no second slot."""

    def gated(real: Any) -> Any:
        inner = FailingMover(real, range(41), OSError("told to fail")) if fails else real
        GATES.append(GatedMover(inner))
        return GATES[0]

    vllm = make(40, 20, mover=gated)
    asked = mini.request("first", mini.hashes_of(1, 3))
    vllm.submit(asked)
    for _ in range(3):
        vllm.step()
    GATES[0].wait_begun(1)
    keys = [block_key(h, 0) for h in asked.block_hashes]
    index = vllm.side._index
    for name in ("second", "third"):
        again = mini.request(name, asked.block_hashes)
        again.skip_reading_prefix_cache = name == "third"  # it computes the same blocks once more, in others of VRAM
        vllm.submit(again)
        for _ in range(3):
            vllm.step()
        assert {index.state_of(key) for key in keys} == {KeyState.WRITING}
        assert index.match(keys) == []
        assert (index.writing, index.ready) == (3, 0)
    GATES[0].open()
    vllm.run(steps=STEPS)
    wanted = KeyState.ABSENT if fails else KeyState.READY
    if fails:
        assert vllm.side.snapshot()["failures"]["store"] >= 3
    assert {index.state_of(key) for key in keys} == {wanted}
    assert index.ready == (0 if fails else 3)
    vllm.check_ended()


# ---- B13


def held_load(make: Made) -> tuple[Any, Any, Any]:
    """A request whose load is held by its mover, in a RAM that is full."""

    def gated(real: Any) -> Any:
        GATES.append(GatedMover(real, held_blocks=[]))
        return GATES[0]

    vllm = make(40, 90, mover=gated, num_threads=12)
    ask(vllm, 1, 8)
    evict(vllm, 40)
    asked = mini.request("slow", mini.hashes_of(1, 8))
    GATES[0]._held_blocks = set(range(41))
    vllm.submit(asked)
    vllm.step()
    assert asked.blocks, "it was not admitted"
    GATES[0]._held_blocks = {block.block_id for block in asked.blocks[:8]}
    return vllm, GATES[0], asked


def press(vllm: Any) -> None:
    """More new blocks than RAM has slots, while the load is held."""
    for number in range(12):
        other = mini.request(f"other{number}", mini.hashes_of(100 + number, 8))
        vllm.submit(other)
        for _ in range(200):
            vllm.clock.advance(0.01)
            vllm.step()
            if not other.blocks and other not in vllm.waiting and not vllm._stores and vllm.unanswered <= 1:
                break
        else:
            raise AssertionError(vllm.unanswered)


def test_blocks_under_a_slow_read_are_neither_evicted_nor_written_over(make: Made) -> None:
    """Field trial B13."""
    vllm, gate, asked = held_load(make)
    assert asked.request_id in vllm.loading
    assert vllm.side._index.pinned == 8
    press(vllm)
    assert vllm.side.snapshot()["evicted"]["ram_blocks"] > 0
    assert vllm.side._index.pinned == 8
    gate.open()
    vllm.run(steps=STEPS)
    assert asked.hit_blocks == 8, "and it was read, not computed"
    vllm.check_ended()


def test_without_pins_the_trial_sees_foreign_bytes(make: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control."""
    from kvortex.cache.index import BlockIndex

    monkeypatch.setattr(BlockIndex, "pin", lambda *_: None)
    monkeypatch.setattr(BlockIndex, "unpin", lambda *_: None)
    vllm, gate, _ = held_load(make)
    press(vllm)
    gate.open()
    with pytest.raises(AssertionError, match="reads what is not its own"):
        vllm.run(steps=STEPS)
    vllm.unanswered = 0
