"""What an engine tells of itself: the documents of `/kvortex/stats` and `/kvortex/blocks`. EngineCore process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import kvortex
from kvortex.cache.gate import Gate
from kvortex.cache.holdings import BlockOrder, ram_holdings, vram_holdings
from kvortex.cache.index import BlockIndex
from kvortex.cache.prefetch.budget import PrefetchCount
from kvortex.cache.residency import Residency
from kvortex.cache.stats import Ledger
from kvortex.vllm_plugin.pool_view import PoolView
from kvortex.vllm_plugin.prefetcher import Prefetcher
from kvortex.vllm_plugin.request_log import RequestLog, counts

if TYPE_CHECKING:
    from kvortex.vllm_plugin.setup import EngineFacts


class Statistics:
    """Reads what the scheduler side counts and holds; changes nothing."""

    def __init__(
        self,
        facts: EngineFacts,
        index: BlockIndex,
        residency: Residency,
        ledger: Ledger,
        gate: Gate,
        view: PoolView,
        prefetcher: Prefetcher | None,
        request_log: RequestLog | None,
        clock: Callable[[], float],
    ) -> None:
        self._facts = facts
        self._index = index
        self._residency = residency
        self._ledger = ledger
        self._gate = gate
        self._view = view
        self._prefetcher = prefetcher
        self._request_log = request_log
        self._clock = clock
        self._started_at = clock()

    def snapshot(self, *, active: int) -> dict[str, Any]:
        """The document of `/kvortex/stats`. Under the scheduler side's lock.

        Args:
            active: requests that have come and not ended.
        """
        view, index, facts, prefetcher = self._view, self._index, self._facts, self._prefetcher
        return {
            "kvortex": kvortex.__version__,
            "vllm": facts.vllm_version,
            "model": facts.model,
            "uptime_s": round(self._clock() - self._started_at, 3),
            "block_size": facts.block_size,
            "ranks": facts.num_ranks,
            "tiers": {
                "vram": {
                    "capacity_bytes": view.capacity_blocks * facts.server_block_bytes,
                    "capacity_blocks": view.capacity_blocks,
                    "resident_blocks": self._residency.resident_blocks,
                    "clean_blocks": self._residency.clean_blocks,
                    "in_use_blocks": view.in_use_blocks,
                },
                "ram": {
                    "capacity_bytes": index.num_slots * facts.server_block_bytes,
                    "used_bytes": index.ready * facts.server_block_bytes,
                    "capacity_blocks": index.num_slots,
                    "used_blocks": index.ready,
                    "pinned_blocks": index.pinned,
                    "quarantined_blocks": index.quarantined,
                },
            },
            **self._ledger.as_dict(),
            "verify": {"mode": facts.settings.verify, **self._ledger.verify_as_dict()},
            "admission": {
                "waited": self._gate.waited,
                "overdue": self._gate.overdue,
                "seconds": round(self._gate.waited_s, 3),
            },
            "prefetch": (PrefetchCount() if prefetcher is None else prefetcher.budget.count).as_dict(),
            "sessions": {"known": 0 if prefetcher is None else len(prefetcher.book), "active": active},
            "request_log": counts() if self._request_log is None else self._request_log.counts(),
        }

    def blocks(self, top: int, by: BlockOrder) -> dict[str, Any]:
        """The engine's part of `/kvortex/blocks`. Without the lock."""
        block_bytes = self._facts.server_block_bytes
        return {
            "ram": ram_holdings(self._index, top, by, block_bytes),
            "vram": vram_holdings(self._residency, self._view.in_use, top, block_bytes),
        }
