"""Field trials of figures that are wrong, missing or growing, on the scheduler side over vLLM's own block pool."""

from __future__ import annotations

import importlib
import os
import warnings
from typing import Any

import pytest

from tests.fakes.growth import tables

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    mini = importlib.import_module("tests.fakes.mini_vllm")
    metrics = importlib.import_module("kvortex.vllm_plugin.metrics")

REQUESTS = int(os.environ.get("TRIAL_REQUESTS", "200"))


def samples(snapshot: dict[str, Any]) -> dict[str, float]:
    """As a scrape has them: name and labels to value."""
    found = {}
    for family in metrics.families(snapshot):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


# ---- B59


def key(number: int) -> Any:
    return mini.block_key(mini.hashes_of(number, 1)[0], 0)


def full_ram() -> tuple[Any, list[int]]:
    """RAM of 8 blocks after 20 were stored, one by one; the numbers of those that it holds."""
    vllm = mini.MiniVllm(num_blocks=12, num_slots=8, prefetch=False)
    for number in range(20):
        vllm.run(mini.request(f"r{number}", mini.hashes_of(number, 1)))
    return vllm, [number for number in range(20) if vllm.side._index.match([key(number)])]


def test_how_full_and_how_busy_are_two_figures_and_every_lost_block_has_a_reason() -> None:
    """Field trial B59."""
    vllm, kept = full_ram()
    assert len(kept) == 8
    held = [mini.request(f"held{number}", mini.hashes_of(number, 1)) for number in kept[-2:]]
    snapshot = vllm.side.snapshot()
    assert snapshot["evicted"]["ram_blocks"] == 12
    assert sum(snapshot["refused"].values()) == 0
    vllm.answers_held = True
    for block in vllm.pool.blocks:  # out of VRAM, so that they are loaded
        if block.block_hash is not None and block.ref_cnt == 0:
            vllm.pool._maybe_evict_cached_block(block)
    for asked in held:
        vllm.submit(asked)
    vllm.step()
    snapshot, scraped = vllm.side.snapshot(), samples(vllm.side.snapshot())
    ram = snapshot["tiers"]["ram"]
    assert (ram["used_blocks"], ram["capacity_blocks"], ram["pinned_blocks"]) == (8, 8, 2)
    assert ram["used_bytes"] == 8 * mini.BLOCK_BYTES == ram["capacity_bytes"]
    assert scraped["kvortex_ram_blocks{state=used}"] == scraped["kvortex_capacity_blocks{tier=ram}"] == 8
    assert scraped["kvortex_ram_blocks{state=pinned}"] == 2
    assert scraped["kvortex_evicted_blocks_total{tier=ram}"] == 12
    assert scraped["kvortex_ram_used_bytes{}"] == 8 * mini.BLOCK_BYTES
    assert snapshot["store"]["blocks"] == 20 == ram["used_blocks"] + snapshot["evicted"]["ram_blocks"]


def test_a_block_that_finds_every_slot_pinned_is_counted_as_that() -> None:
    """Field trial B59: what was dropped and why."""
    vllm, kept = full_ram()
    vllm.side._index.pin(vllm.side._index.match([key(kept[0])]))
    for number in kept[1:]:
        vllm.side._index.pin(vllm.side._index.match([key(number)]))
    before = vllm.side.snapshot()
    vllm.submit(mini.request("new", mini.hashes_of(99, 1)))
    for _ in range(5):
        vllm.step()
    after = vllm.side.snapshot()
    assert (before["refused"]["ram_pinned"], after["refused"]["ram_pinned"]) == (0, 1), "once, not once a step"
    assert samples(after)["kvortex_refused_blocks_total{reason=ram_pinned}"] == 1
    assert after["evicted"]["ram_blocks"] == before["evicted"]["ram_blocks"]
    assert after["tiers"]["ram"]["used_blocks"] == 8


def test_the_help_of_a_figure_says_which_of_the_two_it_is() -> None:
    helps = {family.name: family.documentation for family in metrics.families(full_ram()[0].side.snapshot())}
    assert "published" in helps["kvortex_ram_blocks"]
    assert "pinned by loads" in helps["kvortex_ram_blocks"]


# ---- B18


def serve(vllm: Any, first: int, count: int) -> None:
    for number in range(first, first + count):
        session = f"s{number % 97}" if number % 3 else None
        conversation = number if number % 2 else number % 40
        asked = mini.request(f"r{number}", mini.hashes_of(conversation, 1 + number % 6), session=session)
        if number % 11 == 0:
            vllm.submit(asked)
            vllm.abort(asked)
        else:
            vllm.run(asked)


def test_no_table_of_the_scheduler_side_grows_with_the_number_of_requests() -> None:
    """Field trial B18: once RAM and VRAM are full, nothing grows."""
    vllm = mini.MiniVllm(num_blocks=40, num_slots=60)
    serve(vllm, 0, REQUESTS)
    middle = tables(vllm.side)
    serve(vllm, REQUESTS, REQUESTS)
    end = tables(vllm.side)
    grown = {path: (middle.get(path, 0), length) for path, length in end.items() if length > middle.get(path, 0) + 60}
    assert not grown


def test_a_table_that_is_never_emptied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control: requests that are not forgotten when they end."""
    vllm = mini.MiniVllm(num_blocks=40, num_slots=60)

    class Keeps(dict):  # type: ignore[type-arg]
        def pop(self, key: Any, default: Any = None) -> Any:
            return self.get(key, default)

    vllm.side._requests = Keeps()
    serve(vllm, 0, 100)
    middle = tables(vllm.side)
    serve(vllm, 100, 100)
    assert tables(vllm.side)["SchedulerSide._requests"] > middle["SchedulerSide._requests"] + 60
