"""What the counters say in words."""

from __future__ import annotations

from kvortex.cache.misses import Miss
from kvortex.cache.stats import Ledger


def test_the_end_is_told_with_every_number_in_its_place() -> None:
    ledger = Ledger(with_step_blocks=6, vram_lost=8)
    ledger.count_tokens(vram_hit=1, ram_hit=2, missed={Miss.NEW_PROMPT: 100}, seen_tokens=0)
    ledger.store.blocks, ledger.load.blocks, ledger.load.seconds = 4, 7, 0.5
    assert ledger.in_words() == (
        "of 103 prompt tokens 1 came from VRAM, 2 from RAM; stored 4 blocks, loaded 7 in 0.500 s (6 of them with their "
        "step), 8 VRAM blocks were taken before they were copied"
    )
