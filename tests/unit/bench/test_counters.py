"""Where prompt tokens came from, by the server's own count."""

from __future__ import annotations

from kvortex.bench.counters import Copies, CountedBy, PromptTokens, of_kvortex, of_vllm

METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Number of prompt tokens by source.
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 100.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 30.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 7.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="m",source="local_compute"} 1.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="m",source="local_compute"} 1.7e+09
something_else{ not a metric
"""


def test_vllms_own_metrics_are_summed_over_its_engines() -> None:
    counters = of_vllm(METRICS)
    assert counters is not None
    assert counters.counted_by is CountedBy.VLLM
    assert counters.tokens == PromptTokens(vram=30, ram=7, computed=101)
    assert counters.copies is None


def test_metrics_without_the_series_are_no_counters() -> None:
    assert of_vllm("process_cpu_seconds_total 1.0\n") is None


def test_kvortexs_statistics_are_read() -> None:
    counters = of_kvortex(
        '{"tokens": {"vram_hit": 1, "ram_hit": 2, "computed": 3}, "store": {"bytes": 4}, "load": {"bytes": 5},'
        ' "failures": {"store": 1, "load": 1},'
        ' "tiers": {"vram": {"capacity_bytes": 6}, "ram": {"capacity_bytes": 7}}}'
    )
    assert counters is not None
    assert counters.counted_by is CountedBy.KVORTEX
    assert counters.tokens == PromptTokens(1, 2, 3)
    assert counters.copies == Copies(4, 5, 2)


def test_another_document_is_no_counters() -> None:
    assert of_kvortex("{}") is None
    assert of_kvortex("not JSON") is None
    assert of_kvortex("[]") is None


def test_differences_are_taken_part_by_part() -> None:
    assert PromptTokens(5, 6, 7) - PromptTokens(1, 2, 3) == PromptTokens(4, 4, 4)
    assert (PromptTokens(5, 6, 7) - PromptTokens(1, 2, 3)).all == 12
