"""What the cache has done, as counters that only grow, and as the one document everything shows.

`Ledger` counts; the scheduler side's `snapshot` adds what is true now. Every queried token is counted exactly once,
when its fate is known: as vram_hit, ram_hit or computed; and every computed one under one reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from kvortex.cache.misses import Miss


class Refusal(Enum):
    """Why a block or a load was not moved. Every drop is counted under one of these."""

    RAM_PINNED = "ram_pinned"
    NOT_WORTH = "not_worth"
    SOURCE_REUSED = "source_reused"
    RESET = "reset"
    LAYOUT = "layout"
    ABORTED = "aborted"
    QUICKER_COMPUTED = "quicker_computed"


class Verification(Enum):
    """Which blocks get a checksum when they are stored: none, those of the sample (`keys.in_sample`), or all."""

    OFF = "off"
    SAMPLE = "sample"
    ALL = "all"


@dataclass(slots=True)
class TransferCount:
    """One direction's copies that ended well, summed over ranks; seconds are those of the slowest rank."""

    blocks: int = 0
    bytes: int = 0
    seconds: float = 0.0
    in_flight: int = 0

    def as_dict(self) -> dict[str, Any]:
        return {
            "blocks": self.blocks,
            "bytes": self.bytes,
            "seconds": round(self.seconds, 6),
            "in_flight": self.in_flight,
        }


@dataclass(slots=True)
class Ledger:
    """The counters of one engine. Scheduler thread writes, under the scheduler side's lock."""

    queried: int = 0
    vram_hit: int = 0
    ram_hit: int = 0
    missed: Counter[Miss] = field(default_factory=Counter)
    prompts: int = 0
    new_prompts: int = 0
    seen_tokens: int = 0
    store: TransferCount = field(default_factory=TransferCount)
    load: TransferCount = field(default_factory=TransferCount)
    with_step_blocks: int = 0
    ram_evicted: int = 0
    vram_evicted: int = 0
    vram_lost: int = 0
    dedup_references: int = 0
    dedup_unique: int = 0
    store_failures: int = 0
    load_failures: int = 0
    recomputed_tokens: int = 0
    verified_blocks: int = 0
    corrupt_blocks: int = 0
    checksum_failed_blocks: int = 0
    refused: Counter[Refusal] = field(default_factory=Counter)
    ignored_answers: int = 0

    @property
    def computed(self) -> int:
        """Tokens that no tier had: the sum over all reasons."""
        return self.missed.total()

    def count_tokens(self, *, vram_hit: int, ram_hit: int, missed: Mapping[Miss, int], seen_tokens: int) -> None:
        """A request's prompt tokens, once, when their fate is known.

        Args:
            missed: the others, by reason.
            seen_tokens: of its leading blocks that were seen before, whether or not they are held.
        """
        assert min(vram_hit, ram_hit, *missed.values()) >= 0, (vram_hit, ram_hit, missed)
        self.queried += vram_hit + ram_hit + sum(missed.values())
        self.vram_hit += vram_hit
        self.ram_hit += ram_hit
        self.missed.update(missed)
        self.prompts += 1
        self.new_prompts += seen_tokens == 0
        self.seen_tokens += seen_tokens

    def in_words(self) -> str:
        """Did it help?"""
        return (
            f"of {self.queried} prompt tokens {self.vram_hit} came from VRAM, {self.ram_hit} from RAM; stored "
            f"{self.store.blocks} blocks, loaded {self.load.blocks} in {self.load.seconds:.3f} s "
            f"({self.with_step_blocks} of them with their step), {self.vram_lost} VRAM blocks were taken before they "
            "were copied"
        )

    def as_dict(self) -> dict[str, Any]:
        """The counters in the shape of `/kvortex/stats`."""
        return {
            "tokens": {
                "queried": self.queried,
                "vram_hit": self.vram_hit,
                "ram_hit": self.ram_hit,
                "computed": self.computed,
            },
            "missed": {reason.value: self.missed[reason] for reason in Miss},
            "prompts": {"counted": self.prompts, "new": self.new_prompts, "seen_tokens": self.seen_tokens},
            "store": self.store.as_dict(),
            "load": self.load.as_dict() | {"with_step_blocks": self.with_step_blocks},
            "evicted": {
                "ram_blocks": self.ram_evicted,
                "vram_blocks": self.vram_evicted,
                "vram_uncopied_blocks": self.vram_lost,
            },
            "dedup": {"references": self.dedup_references, "unique_blocks": self.dedup_unique},
            "failures": {
                "store": self.store_failures,
                "load": self.load_failures,
                "recomputed_tokens": self.recomputed_tokens,
            },
            "ignored_answers": self.ignored_answers,
            "refused": {reason.value: self.refused[reason] for reason in Refusal},
        }

    def verify_as_dict(self) -> dict[str, Any]:
        """Blocks loaded whose checksum was right; blocks found changed in RAM; blocks of the loads that this failed."""
        return {
            "intact_blocks": self.verified_blocks,
            "corrupt_blocks": self.corrupt_blocks,
            "failed_load_blocks": self.checksum_failed_blocks,
        }
