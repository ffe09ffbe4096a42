"""The engines behind one HTTP server, and their statistics as one document. HTTP server process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvortex.cache.holdings import BlockOrder
from kvortex.vllm_plugin.stats_socket import ask_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

OF_ONE_ENGINE = frozenset({"kvortex", "vllm", "model", "uptime_s", "block_size", "ranks"})
"""Fields that are facts of the server, not sums over its engines."""


@dataclass(frozen=True, slots=True)
class Engines:
    """Names of the engines that this server's requests may run on."""

    engine_ids: tuple[str, ...]

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Engines | None:
        """None when the server runs without KVortex."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != "KVortexConnector":
            return None
        engine_id = str(transfer.engine_id)
        size = int(vllm_config.parallel_config.data_parallel_size)
        if size == 1:
            return cls((engine_id,))
        return cls(tuple(f"{engine_id}_dp{rank}" for rank in range(size)))

    def stats(self) -> dict[str, Any]:
        """One snapshot over all engines; blocks for a bounded time.

        Raises:
            StatsUnavailableError: an engine does not answer.
        """
        documents = [ask_engine(engine_id, "stats") for engine_id in self.engine_ids]
        total = documents[0]
        for document in documents[1:]:
            total = _added(total, document)
        return total

    def blocks(self, top: int, by: BlockOrder) -> dict[str, Any]:
        """What lies in the tiers of each engine; `top` blocks each.

        Raises:
            StatsUnavailableError: an engine does not answer.
        """
        answers = [ask_engine(engine_id, "blocks", top=top, by=by.value) for engine_id in self.engine_ids]
        return {"by": by.value, "top": top, "engines": answers}


def _added(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    total = dict(left)
    for name, value in right.items():
        if name in OF_ONE_ENGINE:
            continue
        total[name] = _added(left[name], value) if isinstance(value, dict) else left[name] + value
    return total
