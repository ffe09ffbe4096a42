"""Where prompt tokens came from and what was copied, as the server counts it: /kvortex/stats, else vLLM's /metrics."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any, Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

_DEADLINE_S: Final = 30.0
_BY_SOURCE: Final = "vllm:prompt_tokens_by_source"


class CountedBy(StrEnum):
    """Who counted."""

    KVORTEX = "/kvortex/stats"
    VLLM = "/metrics"


@dataclass(frozen=True, slots=True)
class PromptTokens:
    """Prompt tokens by where their KV came from."""

    vram: int
    ram: int
    computed: int

    @property
    def all(self) -> int:
        return self.vram + self.ram + self.computed

    def __sub__(self, earlier: PromptTokens) -> PromptTokens:
        return PromptTokens(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Copies:
    """What KVortex moved, in bytes, and the blocks whose copy failed."""

    stored_bytes: int
    loaded_bytes: int
    failed_blocks: int

    def __sub__(self, earlier: Copies) -> Copies:
        return Copies(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Prefetched:
    """Blocks that were brought before anybody asked: used, or for nothing; and all that were loaded from RAM."""

    issued: int
    used: int
    wasted: int
    loaded: int

    def __sub__(self, earlier: Prefetched) -> Prefetched:
        return Prefetched(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))


@dataclass(frozen=True, slots=True)
class Tiers:
    """Room for KV, in bytes."""

    vram_bytes: int
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class Counters:
    """A server's counters at one moment.

    Attributes:
        copies, tiers, prefetched: None where vLLM counted: it does not tell.
    """

    counted_by: CountedBy
    tokens: PromptTokens
    copies: Copies | None = None
    tiers: Tiers | None = None
    prefetched: Prefetched | None = None


async def read_counters(client: httpx.AsyncClient) -> Counters | None:
    """The counters now; None where the server has none, such as vLLM with --disable-log-stats."""
    stats = await _get(client, "/kvortex/stats")
    if stats is not None and (counters := of_kvortex(stats)) is not None:
        return counters
    metrics = await _get(client, "/metrics")
    return None if metrics is None else of_vllm(metrics)


async def _get(client: httpx.AsyncClient, path: str) -> str | None:
    try:
        response = await client.get(path, timeout=_DEADLINE_S)
    except httpx.RequestError:
        # The requests of the load tell that the server is gone; here it only means no counters.
        return None
    return response.text if response.status_code == 200 else None


def of_kvortex(document: str) -> Counters | None:
    """Counters from the document of /kvortex/stats; None if it is something else."""
    try:
        stats = json.loads(document)
        tokens = stats["tokens"]
        return Counters(
            CountedBy.KVORTEX,
            PromptTokens(int(tokens["vram_hit"]), int(tokens["ram_hit"]), int(tokens["computed"])),
            Copies(
                int(stats["store"]["bytes"]),
                int(stats["load"]["bytes"]),
                int(stats["failures"]["store"]) + int(stats["failures"]["load"]),
            ),
            Tiers(int(stats["tiers"]["vram"]["capacity_bytes"]), int(stats["tiers"]["ram"]["capacity_bytes"])),
            _prefetched(stats),
        )
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _prefetched(stats: dict[str, Any]) -> Prefetched | None:
    brought = stats.get("prefetch")
    if brought is None:
        return None
    issued, used, wasted = (int(brought[f"{name}_blocks"]) for name in ("issued", "used", "wasted"))
    return Prefetched(issued, used, wasted, int(stats["load"]["blocks"]))


def of_vllm(exposition: str) -> Counters | None:
    """Counters from vLLM's /metrics, over all its engines; None where it has no such series."""
    by_source: dict[str, int] = {}
    # The rest of the page need not be read, and may hold what this parser does not know.
    lines = [line for line in exposition.splitlines() if line.startswith(_BY_SOURCE + "_total{")]
    for family in text_string_to_metric_families("\n".join([*lines, ""])):
        for sample in family.samples:
            source = sample.labels.get("source", "")
            by_source[source] = by_source.get(source, 0) + int(sample.value)
    if not lines:
        return None
    tokens = PromptTokens(
        vram=by_source.get("local_cache_hit", 0),
        ram=by_source.get("external_kv_transfer", 0),
        computed=by_source.get("local_compute", 0),
    )
    return Counters(CountedBy.VLLM, tokens)
