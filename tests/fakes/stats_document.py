"""Documents of /kvortex/stats as a server makes them, from numbers a test chooses."""

from __future__ import annotations

from typing import Any

from kvortex.cache.misses import Miss
from kvortex.cache.stats import Ledger
from kvortex.cache.verdict import judge


def stats_document(ledger: Ledger, *, uptime_s: float = 100.0, model: str = "stub/model") -> dict[str, Any]:
    """With 1,500 VRAM blocks and 8,000 RAM blocks of 1 MB."""
    vram = {"capacity_blocks": 1500, "resident_blocks": 300, "clean_blocks": 600, "in_use_blocks": 200}
    ram = {"capacity_blocks": 8000, "used_blocks": 2000, "pinned_blocks": 10, "quarantined_blocks": 0}
    document = {
        **{"kvortex": "0.1.0", "vllm": "0.32.0", "model": model, "uptime_s": uptime_s, "block_size": 128, "ranks": 1},
        "tiers": {
            "vram": {"capacity_bytes": 1500 * 10**6, **vram},
            "ram": {"capacity_bytes": 8000 * 10**6, "used_bytes": 2000 * 10**6, **ram},
        },
        **ledger.as_dict(),
        "verify": {"mode": "off", **ledger.verify_as_dict()},
        "prefetch": {"issued_blocks": 0, "used_blocks": 0, "wasted_blocks": 0, "late_blocks": 0},
        "sessions": {"known": 0, "active": 3},
        "admission": {"waited": 0, "overdue": 0, "seconds": 0.0},
    }
    return {**document, "verdict": judge(document).as_dict()}


def busy_ledger(scale: int = 1) -> Ledger:
    """Half from RAM, a tenth from VRAM; counters of `scale` times 1,000 tokens."""
    ledger = Ledger()
    missed = {Miss.NEW_TAIL: 200 * scale, Miss.EVICTED: 150 * scale, Miss.LAST_BLOCK: 50 * scale}
    ledger.count_tokens(vram_hit=100 * scale, ram_hit=500 * scale, missed=missed, seen_tokens=750 * scale)
    ledger.store.blocks, ledger.store.bytes = 40 * scale, 40 * scale * 10**6
    ledger.load.blocks, ledger.load.bytes = 70 * scale, 70 * scale * 10**6
    ledger.ram_evicted = 9 * scale
    return ledger
