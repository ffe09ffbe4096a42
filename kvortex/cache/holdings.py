"""What lies in each tier, by age and use: the document of `/kvortex/blocks`.

Read while the scheduler works, without its lock: a block that comes or goes meanwhile may or may not be in it. RAM's
slots are looked at in chunks, all of them; of VRAM, counts and the head of the queue of blocks to copy. All blocks of
an engine have one size. EngineCore process, any thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from kvortex.cache.index import BlockIndex
from kvortex.cache.residency import Residency
from kvortex.cache.slots import SlotState
from kvortex.keys import BlockKey, group_of

MOST_BLOCKS: Final = 1000
"""That one answer lists."""

AGES_S: Final = (60, 600, 3600, 21_600, 86_400)
USES: Final = (0, 1, 2, 4, 8)
_CHUNK: Final = 1 << 16
_SHOWN_HASH_BYTES: Final = 8


class BlockOrder(StrEnum):
    """Which blocks come first."""

    IDLE = "idle"
    """Unused longest."""
    AGE = "age"
    """Stored longest ago."""
    USES = "uses"
    """Asked for by the most requests since they were stored."""


def ram_holdings(index: BlockIndex, top: int, by: BlockOrder, block_bytes: int) -> dict[str, Any]:
    """RAM's blocks by the time since their last use and by uses, and the first `top` of them.

    `by_idle[i]` counts blocks unused for less than `under_s` and not less than the entry before; `by_uses[i]` those
    asked for at least `from_uses` times and less than in the entry behind.
    """
    usage = index.usage
    assert usage is not None, "the index of a server has its usage"
    states = np.frombuffer(index.slot_states(), np.uint8)
    stored_s, used_s = np.frombuffer(usage.stored_s), np.frombuffer(usage.used_s)
    uses = np.frombuffer(usage.uses, np.uint32)
    now_s = usage.clock()
    by_idle = np.zeros(len(AGES_S) + 1, np.int64)
    by_uses = np.zeros(len(USES), np.int64)
    first: list[tuple[float, int]] = []
    for start in range(0, len(states), _CHUNK):
        slots = start + np.flatnonzero(states[start : start + _CHUNK] == SlotState.READY)
        idle_s = now_s - used_s[slots]
        by_idle += np.bincount(np.searchsorted(AGES_S, idle_s, side="right"), minlength=len(by_idle))
        by_uses += np.bincount(np.searchsorted(USES, uses[slots], side="right") - 1, minlength=len(by_uses))
        orders: dict[BlockOrder, NDArray[Any]] = {
            BlockOrder.IDLE: idle_s,
            BlockOrder.AGE: now_s - stored_s[slots],
            BlockOrder.USES: uses[slots],
        }
        first = heapq.nlargest(top, [*first, *_largest(orders[by], slots, top)])
    listed = []
    for _, slot in first:
        key = index.key_at(slot)
        if key is not None:  # given up meanwhile
            listed.append(
                {
                    **_named(key),
                    "slot": slot,
                    "age_s": round(now_s - float(stored_s[slot]), 1),
                    "idle_s": round(now_s - float(used_s[slot]), 1),
                    "uses": int(uses[slot]),
                    "pins": index.pins_of(slot),
                }
            )
    return {
        "block_bytes": block_bytes,
        "capacity_blocks": index.num_slots,
        "examined_slots": len(states),
        "blocks": int(by_idle.sum()),
        "by_idle": [{"under_s": s, "blocks": int(n)} for s, n in zip([*AGES_S, None], by_idle, strict=True)],
        "by_uses": [{"from_uses": u, "blocks": int(n)} for u, n in zip(USES, by_uses, strict=True)],
        "first": listed,
    }


def vram_holdings(residency: Residency, in_use: Callable[[int], bool], top: int, block_bytes: int) -> dict[str, Any]:
    """VRAM's complete blocks by state, and the first `top` of those that wait to be copied, unused longest first."""
    waiting = residency.longest_unused(top)
    return {
        "block_bytes": block_bytes,
        "resident_blocks": residency.resident_blocks,
        "clean_blocks": residency.clean_blocks,
        "waiting_blocks": residency.queued_blocks,
        "first_waiting": [
            {
                **_named(candidate.key),
                "block_id": candidate.block_id,
                "idle_s": round(idle_s, 1),
                "in_use": in_use(candidate.block_id),
            }
            for candidate, idle_s in waiting
        ],
    }


def _largest(worth: NDArray[Any], slots: NDArray[np.int64], count: int) -> Sequence[tuple[float, int]]:
    if len(worth) > count:
        chosen = np.argpartition(worth, len(worth) - count)[-count:]
        worth, slots = worth[chosen], slots[chosen]
    return list(zip(worth.tolist(), slots.tolist(), strict=True))


def _named(key: BlockKey) -> dict[str, Any]:
    """The beginning of its hash tells a block from others; the whole hash finds nothing more."""
    return {"key": key[:_SHOWN_HASH_BYTES].hex(), "group": group_of(key)}
