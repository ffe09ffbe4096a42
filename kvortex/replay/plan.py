"""Which RAM size pays: a trace at several sizes, with the server's default policy, LRU and the bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kvortex.replay.conversations import Conversations, find_conversations
from kvortex.replay.models import ReplayedModel
from kvortex.replay.prefill import PrefillCost
from kvortex.replay.simulator import BELADY, DEFAULT, ReplayResult, replay
from kvortex.replay.trace import TracedRequest
from kvortex.sizes import counted, format_bytes

PAYS: Final = 0.01
"""A size pays that adds at least this share of the prompt tokens to what is found, for each doubling."""
_SMALLEST_SHARE: Final = 128


@dataclass(frozen=True, slots=True)
class PlannedSize:
    """One RAM size.

    Attributes:
        is_within_machine: this process may use that much here and now.
        fit_conversations: of the trace's median length.
    """

    ram_bytes: int
    is_within_machine: bool
    fit_conversations: int
    default: ReplayResult
    lru: ReplayResult
    bound: ReplayResult


@dataclass(frozen=True, slots=True)
class Recommendation:
    """`ram_bytes` is None where no size pays."""

    ram_bytes: int | None
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """
    Attributes:
        working_set_bytes: KV of all distinct blocks of the trace.
        endless: RAM for all of it.
        fit_vram: conversations of the trace's median length in VRAM.
        recommended: of all sizes; `recommended_here`: of those that this process may use here and now.
    """

    working_set_bytes: int
    machine_bytes: int
    vram_bytes: int
    fit_vram: int
    endless: ReplayResult
    conversations: Conversations
    sizes: tuple[PlannedSize, ...]
    recommended: Recommendation
    recommended_here: Recommendation

    @property
    def vram_hit_rate(self) -> float:
        """What VRAM alone finds."""
        return _vram_hit_rate(self.endless)

    @property
    def lru_instead(self) -> PlannedSize | None:
        """A size below the recommended one, at which `lru` finds PAYS more than the default policy: of these the one
        with which it finds most. None where there is none."""
        below = math.inf if self.recommended.ram_bytes is None else self.recommended.ram_bytes
        better = [
            size for size in self.sizes if size.ram_bytes < below and size.lru.hit_rate - size.default.hit_rate >= PAYS
        ]
        return max(better, key=lambda size: (size.lru.hit_rate, -size.ram_bytes), default=None)


@dataclass(frozen=True, slots=True)
class Planner:
    """What every replay of a plan has in common.

    Attributes:
        machine_bytes: RAM that this process may use.
        say: hears of progress.
    """

    requests: Sequence[TracedRequest]
    model: ReplayedModel
    vram_bytes: int
    machine_bytes: int
    prefill: PrefillCost | None
    warm_up: float
    say: Callable[[str], None]

    def plan(self, sizes: Sequence[int]) -> Plan:
        """
        Args:
            sizes: bytes, each at least one block. Without any: doublings, until LRU and the default policy find all
                that can be found, and what this machine has.
        """
        block_bytes = self.requests[0].block_tokens * self.model.token_bytes
        distinct = {block for request in self.requests for block in request.all_blocks}
        working_set_bytes = max(len(distinct), 1) * block_bytes
        endless = self._replayed(BELADY, working_set_bytes)
        conversations = find_conversations(self.requests)
        chosen = sorted(set(sizes)) or list(usual_sizes(working_set_bytes, block_bytes, self.machine_bytes))
        bytes_each = self.model.shape.bytes_for(conversations.median_tokens)
        planned = []
        for size in chosen:
            planned.append(self._planned(size, bytes_each))
            if not sizes and _finds_all(planned[-1], endless):
                break
        return Plan(
            working_set_bytes=working_set_bytes,
            machine_bytes=self.machine_bytes,
            vram_bytes=self.vram_bytes,
            fit_vram=self.vram_bytes // bytes_each,
            endless=endless,
            conversations=conversations,
            sizes=tuple(planned),
            recommended=recommend(planned, endless),
            recommended_here=recommend([size for size in planned if size.is_within_machine], endless),
        )

    def _planned(self, size: int, conversation_bytes: int) -> PlannedSize:
        self.say(f"{format_bytes(size)} of RAM, {counted(len(self.requests), 'request')}")
        default, lru, bound = (self._replayed(policy, size) for policy in (DEFAULT, "lru", BELADY))
        return PlannedSize(size, size <= self.machine_bytes, size // conversation_bytes, default, lru, bound)

    def _replayed(self, policy: str, ram_bytes: int) -> ReplayResult:
        return replay(
            self.requests,
            policy,
            ram_bytes=ram_bytes,
            vram_bytes=self.vram_bytes,
            token_bytes=self.model.token_bytes,
            prefill=self.prefill,
            warm_up=self.warm_up,
        )


def usual_sizes(working_set_bytes: int, block_bytes: int, machine_bytes: int) -> Iterator[int]:
    """1, 2, 4 ... 512 of a unit of a power of 1000, from about a hundredth of the working set to all of it, and in its
    place among them what the machine has, where that is less than all. Each holds at least a block."""
    machine = _in_round_units(machine_bytes)
    is_due = machine >= block_bytes
    for number in range(10 * 6):
        size = 2 ** (number % 10) * 1000 ** (number // 10)
        if size < max(block_bytes, working_set_bytes // _SMALLEST_SHARE):
            continue
        if is_due and machine <= size:
            is_due = False
            if machine < min(size, working_set_bytes):
                yield machine
        yield size
        if size >= working_set_bytes:
            return


def _in_round_units(num_bytes: int) -> int:
    unit = 10**9 if num_bytes >= 10**10 else 10**6 if num_bytes >= 10**7 else 1
    return num_bytes // unit * unit


def _finds_all(size: PlannedSize, endless: ReplayResult) -> bool:
    return min(size.default.hit_rate, size.lru.hit_rate) > endless.hit_rate - PAYS / 2


def recommend(sizes: Sequence[PlannedSize], endless: ReplayResult) -> Recommendation:
    """The smallest size to which no larger one adds PAYS for each doubling, by the default policy's hit rate.

    Args:
        sizes: ascending.
    """
    if not sizes:
        return Recommendation(None, "every size is more RAM than this process may use")
    if max(size.default.hit_rate for size in sizes) - _vram_hit_rate(endless) < PAYS:
        return Recommendation(None, _why_none(sizes, endless))
    chosen = next(i for i, size in enumerate(sizes) if not any(_pays(size, larger) for larger in sizes[i + 1 :]))
    return Recommendation(sizes[chosen].ram_bytes, _reason(sizes, chosen, endless))


def _why_none(sizes: Sequence[PlannedSize], endless: ReplayResult) -> str:
    vram_only = _vram_hit_rate(endless)
    best = max(sizes, key=lambda size: size.default.hit_rate)
    gain, there_are = max(0.0, best.default.hit_rate - vram_only), endless.hit_rate - vram_only
    finds = f"VRAM alone finds {vram_only:.1%} of the prompt tokens, an endless cache would find {endless.hit_rate:.1%}"
    if there_are < PAYS:
        return f"no size pays: prompts hardly repeat. {finds}"
    largest = format_bytes(sizes[-1].ram_bytes)
    return f"too little RAM: {largest} adds {gain * 100:.1f} of the {_points(there_are)} there are. {finds}"


def _pays(size: PlannedSize, larger: PlannedSize) -> bool:
    doublings = math.log2(larger.ram_bytes / size.ram_bytes)
    return larger.default.hit_rate - size.default.hit_rate >= PAYS * doublings


def _reason(sizes: Sequence[PlannedSize], chosen: int, endless: ReplayResult) -> str:
    size = sizes[chosen]
    before, rate = ("no RAM", _vram_hit_rate(endless))
    if chosen:
        before, rate = format_bytes(sizes[chosen - 1].ram_bytes), sizes[chosen - 1].default.hit_rate
    gain = f"from {before} to {format_bytes(size.ram_bytes)} gains {_points(size.default.hit_rate - rate)}"
    beyond = "no larger one was tried"
    if chosen + 1 < len(sizes):
        last = sizes[-1]
        more = _points(last.default.hit_rate - size.default.hit_rate)
        beyond = f"beyond, each doubling gains less than {_points(PAYS)} ({more} up to {format_bytes(last.ram_bytes)})"
    found = f"{size.default.hit_rate:.1%} of the prompt tokens are found, and {size.bound.hit_rate:.1%} at best"
    return f"{gain}; {beyond}. With it {found}; an endless cache would find {endless.hit_rate:.1%}"


def _points(share: float) -> str:
    return f"{share * 100:.1f} points" if round(share * 100, 1) != 1 else "1 point"


def _vram_hit_rate(result: ReplayResult) -> float:
    return result.vram_hit_tokens / result.queried_tokens if result.queried_tokens else 0.0
