"""The engines behind one HTTP server, and their statistics as one document. HTTP server process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvortex.cache.holdings import BlockOrder
from kvortex.config.settings import KVCacheSettings
from kvortex.hardware import usable_ram_bytes
from kvortex.vllm_plugin.stats_socket import ask_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Hinted = dict[str, Any]

OF_ONE_ENGINE = frozenset({"kvortex", "vllm", "model", "uptime_s", "block_size", "ranks", "mode"})
"""Fields that are facts of the server, not sums over its engines."""


@dataclass(frozen=True, slots=True)
class Engines:
    """The engines that this server's requests may run on.

    Attributes:
        engine_ids: their names.
        prefetch: whether they were told to prefetch.
        most_tokens: of a prompt that they take; None where that is not known.
    """

    engine_ids: tuple[str, ...]
    prefetch: bool = False
    most_tokens: int | None = None

    @classmethod
    def of(cls, vllm_config: VllmConfig) -> Engines | None:
        """None when the server runs without KVortex."""
        transfer = vllm_config.kv_transfer_config
        if transfer is None or transfer.kv_connector != "KVortexConnector":
            return None
        engine_id = str(transfer.engine_id)
        size = int(vllm_config.parallel_config.data_parallel_size)
        settings = KVCacheSettings.from_extra_config(
            transfer.kv_connector_extra_config, available_ram_bytes=usable_ram_bytes()
        )
        prefetch = settings.prefetch_enabled
        most_tokens = int(vllm_config.model_config.max_model_len)
        if size == 1:
            return cls((engine_id,), prefetch, most_tokens)
        return cls(tuple(f"{engine_id}_dp{rank}" for rank in range(size)), prefetch, most_tokens)

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

    def sessions(self, top: int, caller: str | None) -> dict[str, Any]:
        """The sessions heard of last, `top` of each engine; of one caller, or of all.

        Raises:
            StatsUnavailableError: an engine does not answer.
        """
        answers = [ask_engine(engine_id, "sessions", top=top, caller=caller) for engine_id in self.engine_ids]
        return {"top": top, "engines": answers}

    def hint(self, session: str | None, tokens: list[int] | None, cache_salt: str | None, caller: str) -> Hinted:
        """Tells every engine that a session or a prompt is about to come; one of them may have its blocks.

        Raises:
            StatsUnavailableError: an engine does not answer.
        """
        if tokens is not None:
            # To read and to hash more would take the engine's time, and no request can ask for it.
            tokens = tokens[: self.most_tokens]
        parameters = {"session": session, "tokens": tokens, "cache_salt": cache_salt, "caller": caller}
        answers = [ask_engine(engine_id, "hint", **parameters) for engine_id in self.engine_ids]
        return max(answers, key=lambda found: (found.get("ram_blocks", 0), found.get("vram_blocks", 0)))

    def may_prefetch(self) -> bool:
        """Whether an idle engine may have something to prefetch.

        Raises:
            StatsUnavailableError: an engine does not answer.
        """
        return any(ask_engine(engine_id, "may_prefetch")["due"] for engine_id in self.engine_ids)


def _added(left: dict[str, Any], right: dict[str, Any]) -> dict[str, Any]:
    total = dict(left)
    for name, value in right.items():
        if name in OF_ONE_ENGINE:
            continue
        total[name] = _added(left[name], value) if isinstance(value, dict) else left[name] + value
    return total
