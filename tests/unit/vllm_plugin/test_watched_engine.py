"""The trials' watcher knows which GPU blocks have to hold a slot's bytes, whatever was computed since."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from kvortex.messages import Direction
from kvortex.transfer.base import KVLayout
from kvortex.transfer.cpu import CpuCopyEngine
from kvortex.transfer.slab import HostSlab
from tests.unit.transfer.builders import LOAD, STORE, fill_random, order, packed, wait_answers

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what vLLM and its imports deprecate is not ours
    pytest.importorskip("vllm", reason="vLLM is not installed")
    WatchedEngine = importlib.import_module("tests.gpu.watched_engine").WatchedEngine


@pytest.fixture
def layout() -> KVLayout:
    layout = packed(6, [64, 128])
    fill_random(layout, 0)
    return layout


@pytest.fixture
def watch(layout: KVLayout) -> Iterator[Any]:
    slab = HostSlab(4, layout.block_bytes)
    watch = WatchedEngine(CpuCopyEngine(layout, slab, num_threads=1), layout, slab)
    yield watch
    watch.close(10)


def copy(watch: Any, job_id: int, direction: Direction, block: int, slot: int) -> None:
    watch.submit([order(job_id, direction, [(block, slot)])])
    wait_answers(watch, 1)


def test_a_stored_block_and_the_blocks_loaded_from_its_slot_are_copies(watch: Any) -> None:
    copy(watch, 1, STORE, 0, 3)
    copy(watch, 2, LOAD, 5, 3)
    assert watch.is_copy(0, 3)
    assert watch.is_copy(5, 3)
    assert watch.num_unequal([(0, 3), (5, 3)]) == 0
    assert not watch.is_copy(0, 2)
    assert not watch.is_copy(1, 3)


def test_a_block_handed_out_again_is_no_copy_until_it_is_loaded(watch: Any, layout: KVLayout) -> None:
    copy(watch, 1, STORE, 0, 3)
    watch.forget([0])
    layout.regions[0][0] += 1  # computed again, rounded otherwise
    assert not watch.is_copy(0, 3)
    assert watch.num_unequal([(0, 3)]) == 1
    copy(watch, 2, LOAD, 0, 3)
    assert watch.is_copy(0, 3)
    assert watch.num_unequal([(0, 3)]) == 0


def test_what_was_stored_in_a_slot_before_is_no_copy_of_what_it_holds_now(watch: Any) -> None:
    copy(watch, 1, STORE, 0, 3)
    copy(watch, 2, STORE, 1, 3)
    assert not watch.is_copy(0, 3)
    assert watch.is_copy(1, 3)


def test_bytes_that_change_under_a_copy_are_found(watch: Any, layout: KVLayout) -> None:
    copy(watch, 1, STORE, 0, 3)
    layout.regions[1][0, -1] += 1
    assert watch.is_copy(0, 3)
    assert watch.num_unequal([(0, 3)]) == 1


def test_no_pairs_are_no_difference(watch: Any) -> None:
    assert watch.num_unequal([]) == 0
