"""`kvortex_*` on vLLM's `/metrics`: read from the same snapshot as `/kvortex/stats`, at each scrape.

Names are base units with `_total` for counters; labels tell tier and outcome. HTTP server process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvortex.errors import KVortexError

logger = logging.getLogger(__name__)


def families(stats: dict[str, Any]) -> Iterator[Metric]:
    """The metric families of one snapshot."""
    tokens = CounterMetricFamily(
        "kvortex_prompt_tokens", "Prompt tokens by where their KV came from", labels=["source"]
    )
    for source, field in (("vram", "vram_hit"), ("ram", "ram_hit"), ("computed", "computed")):
        tokens.add_metric([source], stats["tokens"][field])
    yield tokens
    yield CounterMetricFamily(
        "kvortex_queried_tokens", "Prompt tokens asked of the cache", value=stats["tokens"]["queried"]
    )
    missed = CounterMetricFamily("kvortex_missed_tokens", "Prompt tokens computed, by reason", labels=["reason"])
    for reason, count in stats["missed"].items():
        missed.add_metric([reason], count)
    yield missed
    prompts = CounterMetricFamily(
        "kvortex_prompts", "Prompts, by whether their first block was seen before", labels=["beginning"]
    )
    prompts.add_metric(["new"], stats["prompts"]["new"])
    prompts.add_metric(["seen"], stats["prompts"]["counted"] - stats["prompts"]["new"])
    yield prompts
    yield CounterMetricFamily(
        "kvortex_seen_tokens",
        "Prompt tokens in leading blocks seen before: what a cache without limit would have given",
        value=stats["prompts"]["seen_tokens"],
    )

    for direction, what in (("store", "VRAM to RAM"), ("load", "RAM to VRAM")):
        count = stats[direction]
        yield CounterMetricFamily(f"kvortex_{direction}_blocks", f"Blocks copied, {what}", value=count["blocks"])
        yield CounterMetricFamily(f"kvortex_{direction}_bytes", f"Bytes copied, {what}", value=count["bytes"])
        yield CounterMetricFamily(
            f"kvortex_{direction}_seconds", f"Time of copies from order to end, {what}", value=count["seconds"]
        )
        yield GaugeMetricFamily(
            f"kvortex_{direction}_in_flight_blocks", f"Blocks ordered and not ended, {what}", value=count["in_flight"]
        )

    capacity = GaugeMetricFamily("kvortex_capacity_bytes", "Room for KV blocks", labels=["tier"])
    capacity_blocks = GaugeMetricFamily("kvortex_capacity_blocks", "Room for KV blocks", labels=["tier"])
    for tier in ("vram", "ram"):
        capacity.add_metric([tier], stats["tiers"][tier]["capacity_bytes"])
        capacity_blocks.add_metric([tier], stats["tiers"][tier]["capacity_blocks"])
    yield capacity
    yield capacity_blocks
    vram = GaugeMetricFamily(
        "kvortex_vram_blocks",
        "VRAM blocks: complete without a copy, complete with a copy in RAM, held by requests (overlaps both)",
        labels=["state"],
    )
    for state in ("resident", "clean", "in_use"):
        vram.add_metric([state], stats["tiers"]["vram"][f"{state}_blocks"])
    yield vram
    ram = GaugeMetricFamily(
        "kvortex_ram_blocks",
        "RAM blocks: published; pinned by loads under way; out of use because their bytes had changed",
        labels=["state"],
    )
    for state in ("used", "pinned", "quarantined"):
        ram.add_metric([state], stats["tiers"]["ram"][f"{state}_blocks"])
    yield ram
    yield GaugeMetricFamily(
        "kvortex_ram_used_bytes", "Bytes of published RAM blocks", value=stats["tiers"]["ram"]["used_bytes"]
    )

    evicted = CounterMetricFamily("kvortex_evicted_blocks", "Blocks given up to make room", labels=["tier"])
    evicted.add_metric(["ram"], stats["evicted"]["ram_blocks"])
    evicted.add_metric(["vram"], stats["evicted"]["vram_blocks"])
    yield evicted
    yield CounterMetricFamily(
        "kvortex_uncopied_evicted_blocks",
        "VRAM blocks taken for something else before they were copied: these are computed again",
        value=stats["evicted"]["vram_uncopied_blocks"],
    )
    refused = CounterMetricFamily("kvortex_refused_blocks", "Blocks not moved or dropped", labels=["reason"])
    for reason, blocks in stats["refused"].items():
        refused.add_metric([reason], blocks)
    yield refused
    yield CounterMetricFamily(
        "kvortex_with_step_loaded_blocks",
        "Blocks loaded with the step that needed them, layer by layer",
        value=stats["load"]["with_step_blocks"],
    )
    waits = CounterMetricFamily(
        "kvortex_admission_waits",
        "Requests that waited until the blocks they displace were copied, and those let through at the deadline",
        labels=["outcome"],
    )
    for outcome in ("waited", "overdue"):
        waits.add_metric([outcome], stats["admission"][outcome])
    yield waits
    yield CounterMetricFamily(
        "kvortex_admission_wait_seconds",
        "Time for which the first in line waited until the blocks it displaces were copied",
        value=stats["admission"]["seconds"],
    )
    failures = CounterMetricFamily("kvortex_failed_blocks", "Blocks whose copy failed", labels=["direction"])
    failures.add_metric(["store"], stats["failures"]["store"])
    failures.add_metric(["load"], stats["failures"]["load"])
    yield failures
    yield CounterMetricFamily(
        "kvortex_recomputed_tokens",
        "Tokens computed because a load failed",
        value=stats["failures"]["recomputed_tokens"],
    )
    verified = CounterMetricFamily(
        "kvortex_verified_blocks",
        "Blocks whose checksum was compared before a load, by whether their bytes in RAM were those that were stored",
        labels=["outcome"],
    )
    for outcome in ("intact", "corrupt"):
        verified.add_metric([outcome], stats["verify"][f"{outcome}_blocks"])
    yield verified
    yield CounterMetricFamily(
        "kvortex_checksum_failed_blocks",
        "Blocks whose load failed because of a checksum, their own or another block's of that load",
        value=stats["verify"]["failed_load_blocks"],
    )
    yield CounterMetricFamily(
        "kvortex_dedup_references",
        "Complete blocks offered to RAM, whether it held them already or took them",
        value=stats["dedup"]["references"],
    )
    yield CounterMetricFamily(
        "kvortex_dedup_unique_blocks", "Blocks that RAM took", value=stats["dedup"]["unique_blocks"]
    )
    prefetch = CounterMetricFamily("kvortex_prefetch_blocks", "Prefetched blocks", labels=["outcome"])
    for outcome in ("issued", "used", "wasted", "late"):
        prefetch.add_metric([outcome], stats["prefetch"][f"{outcome}_blocks"])
    yield prefetch
    logged = CounterMetricFamily(
        "kvortex_request_log_requests", "Requests in the request log, or not", labels=["outcome"]
    )
    logged.add_metric(["written"], stats["request_log"]["written"])
    for reason, requests in stats["request_log"]["dropped"].items():
        logged.add_metric([reason], requests)
    yield logged
    sessions = GaugeMetricFamily(
        "kvortex_sessions",
        "Conversations known, with kv_cache.prefetch_enabled; requests under way",
        labels=["state"],
    )
    for state in ("known", "active"):
        sessions.add_metric([state], stats["sessions"][state])
    yield sessions


class StatsCollector(Collector):
    """Gives Prometheus the engines' snapshot; a scrape that cannot be answered has vLLM's own metrics only."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read

    def describe(self) -> list[Metric]:
        """Nothing: registering must not ask an engine that is still starting."""
        return []

    def collect(self) -> Iterator[Metric]:
        try:
            stats = self._read()
        except KVortexError as error:
            logger.warning("no kvortex metrics in this scrape: %s", error.message)
            return
        yield from families(stats)
