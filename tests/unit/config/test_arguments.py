"""The command line of serve: vLLM's options in all their spellings, anywhere, apart from KVortex's own."""

from __future__ import annotations

import shlex

import pytest

from kvortex.config.arguments import split_arguments
from kvortex.config.option_values import Dotted
from kvortex.errors import UsageError


def split(line: str) -> dict[str, object]:
    return {argument.option.name: argument.value for argument in split_arguments(shlex.split(line)).vllm}


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("--max-model-len 4096", "max_model_len", 4096),
        ("--max-model-len=4096", "max_model_len", 4096),
        ("--max_model_len 4096", "max_model_len", 4096),
        ("--max_model_len=32k", "max_model_len", "32k"),
        ("--max-model-len -1", "max_model_len", "-1"),
        ("--max-model-len Auto", "max_model_len", "Auto"),
        ("--max-num-batched-tokens 25.6k", "max_num_batched_tokens", "25.6k"),
        ("--kv-cache-memory-bytes 20G", "kv_cache_memory_bytes", "20G"),
        ("--cudagraph-capture-sizes 1 2 4", "cudagraph_capture_sizes", ("1", "2", "4")),
        ("-tp 2", "tensor_parallel_size", 2),
        ("-tp=2", "tensor_parallel_size", 2),
        ("-pp 2", "pipeline_parallel_size", 2),
        ("-q awq", "quantization", "awq"),
        ("--enforce-eager", "enforce_eager", True),
        ("--no-enforce-eager", "enforce_eager", False),
        ("--no_enforce_eager", "enforce_eager", False),
        ("--disable-log-requests", "enable_log_requests", False),
        ("--headless", "headless", True),
        ("--device-memory-utilization 0.5", "gpu_memory_utilization", 0.5),
        ("--served-model-name a b", "served_model_name", ("a", "b")),
        ("--served-model-name=a", "served_model_name", ("a",)),
        ("--middleware a --middleware b", "middleware", ("a", "b")),
        ("--hf-token", "hf_token", True),
        ("--hf-token abc", "hf_token", "abc"),
        ("-O3", "optimization_level", "3"),
        ("-O 2", "optimization_level", "2"),
        ("-O=1", "optimization_level", "1"),
        ("-cc.mode 3", "compilation_config", Dotted((("mode", "3"),))),
        ("--compilation-config.a.b=x -cc.c+ 1", "compilation_config", Dotted((("a.b", "x"), ("c+", "1")))),
        ("""--compilation-config '{"mode": 3}'""", "compilation_config", {"mode": 3}),
        ("--chat-template '{% if x %}'", "chat_template", "{% if x %}"),
        ("--revision 0123", "revision", "0123"),
        ("--chat-template=--x", "chat_template", "--x"),
    ],
)
def test_a_vllm_option_is_read_in_each_of_its_spellings(line: str, name: str, value: object) -> None:
    assert split(line) == {name: value}
    assert split(f"MODEL {line}") == split(line)


def test_the_model_and_kvortex_own_options_may_stand_anywhere() -> None:
    arguments = split_arguments(
        shlex.split("-tp 2 -c 'a b.yaml' MODEL --dtype auto --set kv_cache.x=y --dry-run --json")
    )
    assert arguments.own == ["--config", "a b.yaml", "MODEL", "--set", "kv_cache.x=y", "--dry-run", "--json"]
    assert [argument.written for argument in arguments.vllm] == ["-tp", "--dtype"]


@pytest.mark.parametrize("config", ["--config f.yaml", "--config=f.yaml", "-c f.yaml", "-c=f.yaml"])
def test_the_config_file_is_named_in_any_form(config: str) -> None:
    before, after = (split_arguments(shlex.split(line)).own for line in (f"{config} M", f"M {config}"))
    assert before == ["--config", "f.yaml", "M"]
    assert after == ["M", "--config", "f.yaml"]


@pytest.mark.parametrize(
    ("line", "message", "hint"),
    [
        ("--maxmodel-len 1", "--maxmodel-len: there is no such option", "--max-model-len"),
        ("--dryrun", "no such option", "--dry-run"),
        ("--no-enforce-eagre", "no such option", "--no-enforce-eager"),
        ("--ram-cache-size 1GB", "no such option", "--set kv_cache.ram_cache_size=...?"),
        ("-xyz", "no such option", "--help=all"),
        ("--max-model-len", "--max-model-len: has no value", "--max-model-len=VALUE"),
        ("--max-model-len --dtype auto", "has no value", "=VALUE"),
        ("--served-model-name --dtype auto", "has no value", "=VALUE"),
        ("--enforce-eager=true", "--enforce-eager: takes no value", "--no-enforce-eager"),
        ("-tp two", "-tp: takes a whole number, not the text 'two'", None),
        ("-tp 2.0", "takes a whole number", None),
        ("--max-model-len=abc", "takes a whole number, one such as 32k, or auto, not the text 'abc'", "in 1024s"),
        ("--max-model-len 1.5K", "takes no fraction before K, as in '1.5K'", "1.5k counts in 1000s"),
        ("--max-model-len 32kb", "not the text '32kb'", "in 1000s"),
        ("--max-num-batched-tokens auto", "takes a whole number, or one such as 32k, not the text 'auto'", None),
        ("--cudagraph-capture-sizes 1 two", "takes a whole number, not the text 'two'", None),
        ("--gpu-memory-utilization nan", "takes a number", None),
        ("""--compilation-config '{"mode": '""", "is not JSON", None),
        ("--port.x 3", "has no parts", None),
        ("-tp 2 --tensor-parallel-size 4", '"tensor_parallel_size" is there twice, first as -tp', "keep one"),
        ("-cc.mode 3 --compilation-config {}", "there twice", "keep one"),
        ("--config a --config b", "--config is there twice", "one file"),
        ("-- --max-model-len 3", '"max_model_len" is a known option', "before --"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_right(line: str, message: str, hint: str | None) -> None:
    with pytest.raises(UsageError) as refused:
        split(line)
    assert message in refused.value.message
    if hint is not None:
        assert refused.value.hint is not None
        assert hint in refused.value.hint


def test_what_follows_two_dashes_goes_to_vllm_as_it_stands() -> None:
    arguments = split_arguments(["M", "--", "--newer-than-this", "a=b", "--flag"])
    assert arguments.own == ["M"]
    assert arguments.untouched == ("--newer-than-this", "a=b", "--flag")
