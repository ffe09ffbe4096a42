"""Sources in order, each value with where it came from, and what is refused before anything is loaded."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from kvortex.config.arguments import split_arguments
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine, ResolvedConfig, resolve
from kvortex.config.sources import Setting, SourceKind
from kvortex.errors import ConfigError, UsageError

RAM = 64 * 10**9
MACHINE = MachineFacts(usable_ram_bytes=RAM, gpu_count=8)

Resolve = Callable[..., ResolvedConfig]


@pytest.fixture
def resolved(tmp_path: Path) -> Resolve:
    """Resolves a command line, an environment and the text of a file."""

    def run(line: str = "M", environment: Mapping[str, str] | None = None, yaml: str | None = None) -> ResolvedConfig:
        config = None
        if yaml is not None:
            path = tmp_path / "kvortex.yaml"
            path.write_text(yaml)
            config = str(path)
        arguments = split_arguments(shlex.split(line))
        model = next((a for a in arguments.own if not a.startswith("--") and "=" not in a), None)
        sets = [a for a in arguments.own if "=" in a]
        return resolve(
            CommandLine(model, config, sets, arguments.vllm, arguments.untouched), environment or {}, MACHINE
        )

    return run


def given(config: ResolvedConfig) -> dict[str, Setting]:
    """vLLM's options as somebody gave them, without KVortex's own default."""
    return {name: setting for name, setting in config.vllm.items() if setting.source.kind is not SourceKind.DEFAULT}


def test_each_source_is_overridden_by_the_one_above_and_the_source_is_told(resolved: Resolve) -> None:
    def streams(line: str, environment: Mapping[str, str], yaml: str) -> tuple[int, str]:
        config = resolved(line, environment, yaml)
        return config.kv_cache.num_streams, str(config.sources["num_streams"]).rpartition("/")[2]

    in_file, nothing = "model: m\nkv_cache:\n  num_streams: 2\n", "model: m\n"
    in_environment = {"KVORTEX_NUM_STREAMS": "3"}
    assert streams("--set kv_cache.num_streams=5", in_environment, in_file) == (
        5,
        "--set kv_cache.num_streams",
    )
    assert streams("", in_environment, in_file) == (3, "KVORTEX_NUM_STREAMS")
    assert streams("", {}, in_file) == (2, "kvortex.yaml:3")
    assert streams("", {}, nothing) == (4, "default")


def test_the_hardware_suggests_what_no_one_said(resolved: Resolve) -> None:
    suggested = resolved()
    assert suggested.kv_cache.ram_cache_size == RAM // 2
    assert "half of 64 GB usable RAM" in str(suggested.sources["ram_cache_size"])
    assert resolved("M --set kv_cache.ram_cache_size=25%").kv_cache.ram_cache_size == RAM // 4


def test_a_vllm_option_has_the_same_order(resolved: Resolve) -> None:
    environment, yaml = {"KVORTEX_MAX_MODEL_LEN": "2000"}, "max_model_len: 1000\n"

    def length(line: str, environment: Mapping[str, str]) -> tuple[object, str]:
        setting = resolved(line, environment, yaml).vllm["max_model_len"]
        return setting.value, str(setting.source).rpartition("/")[2]

    assert length("M --max_model_len=3000", environment) == (3000, "--max_model_len")
    assert length("M --set max_model_len=3000", environment) == (3000, "--set max_model_len")
    assert length("M", environment) == (2000, "KVORTEX_MAX_MODEL_LEN")
    assert length("M", {}) == (1000, "kvortex.yaml:1")


def test_the_model_of_the_command_line_wins(resolved: Resolve) -> None:
    def model(line: str, environment: Mapping[str, str]) -> object:
        setting = resolved(line, environment, "model: in-file\n").model
        assert setting is not None
        return setting.value

    assert model("in-line", {"KVORTEX_MODEL": "in-environment"}) == "in-line"
    assert model("", {"KVORTEX_MODEL": "in-environment"}) == "in-environment"
    assert model("", {}) == "in-file"


def test_the_environment_names_the_file_and_the_command_line_another(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("model: from-a\n")
    environment = {"KVORTEX_CONFIG": str(path)}
    assert given(resolve(CommandLine(), environment, MACHINE)) == {}
    missing = str(tmp_path / "b.yaml")
    with pytest.raises(ConfigError, match=r"b\.yaml: there is no such file"):
        resolve(CommandLine(config=missing), environment, MACHINE)
    with pytest.raises(ConfigError, match=r"KVORTEX_CONFIG: names .*b\.yaml, and there is no such file"):
        resolve(CommandLine("M"), {"KVORTEX_CONFIG": missing}, MACHINE)
    with pytest.raises(ConfigError, match="KVORTEX_CONFIG: names no file"):
        resolve(CommandLine("M"), {"KVORTEX_CONFIG": ""}, MACHINE)


def test_false_zero_empty_and_null_are_values(resolved: Resolve) -> None:
    config = resolved(
        "M",
        {"KVORTEX_DTYPE": "null", "KVORTEX_TOOL_PARSER_PLUGIN": ""},
        "enforce_eager: false\nseed: 0\nreasoning_parser: ''\nquantization: null\ndtype: auto\n"
        "kv_cache: {prefetch_enabled: false, offload_threshold: 0, idle_after: 0}\n",
    )
    assert {name: setting.value for name, setting in given(config).items()} == {
        "enforce_eager": False,
        "seed": 0,
        "reasoning_parser": "",
        "quantization": None,
        "dtype": None,
        "tool_parser_plugin": "",
    }
    assert config.kv_cache.prefetch_enabled is False
    assert config.kv_cache.offload_threshold == 0
    assert config.kv_cache.idle_after == 0


def test_null_overrides_a_lower_source_with_vllms_default(resolved: Resolve) -> None:
    assert resolved("M --set tensor_parallel_size=null", {}, "tensor_parallel_size: 4\n").num_ranks == 1


def test_values_of_the_file_keep_their_type_or_their_spelling(resolved: Resolve) -> None:
    yaml = (
        "served_model_name: [a, 1.0]\nhf_overrides: {rope: {factor: 2}}\ntensor_parallel_size: '2'\n"
        "revision: 0123\nmax-model-len: 32k\nswap-in: x\n"
    ).replace("swap-in: x\n", "")
    values = {name: setting.value for name, setting in given(resolved("M", {}, yaml)).items()}
    assert values == {
        "served_model_name": ("a", "1.0"),
        "hf_overrides": {"rope": {"factor": 2}},
        "tensor_parallel_size": 2,
        "revision": "0123",
        "max_model_len": "32k",
    }


def test_text_of_the_environment_stays_as_it_is(resolved: Resolve) -> None:
    environment = {
        "KVORTEX_CHAT_TEMPLATE": "{% for x in y %}: {{ x }}",
        "KVORTEX_SERVED_MODEL_NAME": "[a, b]",
        "KVORTEX_ENFORCE_EAGER": "true",
        "KVORTEX_HF_OVERRIDES": '{"a": 1}',
    }
    values = {name: setting.value for name, setting in given(resolved("M", environment)).items()}
    assert values == {
        "chat_template": "{% for x in y %}: {{ x }}",
        "served_model_name": ("a", "b"),
        "enforce_eager": True,
        "hf_overrides": {"a": 1},
    }


def test_block_size_on_the_command_line_is_kv_caches(resolved: Resolve) -> None:
    config = resolved("M --block-size 64")
    assert (config.kv_cache.block_size, given(config)) == (64, {})
    with pytest.raises(ConfigError, match="positive multiple of 16, not 100"):
        resolved("M --block-size 100")


def test_the_ram_cache_is_split_over_all_ranks(resolved: Resolve) -> None:
    line = "M --set kv_cache.ram_cache_size=64GB -tp 2 -pp 2 -dp 2"
    assert resolved(line).num_ranks == 8
    assert resolved(line).ram_per_rank_bytes == 8 * 10**9


@pytest.mark.parametrize(
    ("line", "environment", "said", "hint"),
    [
        (
            "M --set kv_cache.ram_cach_size=1",
            {},
            "--set kv_cache.ram_cach_size: unknown key",
            "ram_cache_size",
        ),
        ("M --set kv-cache.ram-cache-size=1", {}, "unknown section", "kv_cache.ram-cache-size"),
        ("M --set ram_cache_size=1GB", {}, "belongs under kv_cache", "kv_cache:"),
        ("M --set kv_cache.max_model_len=1", {}, "belongs at the top level", "kv_cache:"),
        ("M --set kv_cache.num_streams=", {}, "takes a whole number from 1 to 64, not the text ''", None),
        ("M --set kv_cache.num_streams='\"4\"'", {}, "not the text '4'", None),
        ("M --set kv_cache.num_streams=1 --set kv_cache.num_streams=2", {}, "is there twice", "keep one"),
        ("M --port 70000", {}, "--port: takes a number from 1 to 65535, not 70000", None),
        ("M --port 0", {}, "not 0", None),
        ("M --port abc", {}, "not the text 'abc'", None),
        ("M -tp 0", {}, "at least 1, not 0", None),
        ("M --gpu-memory-utilization 90", {}, "above 0 and up to 1, not 90", "share"),
        ("M --gpu-memory-utilization 0", {}, "above 0", "share"),
        ("M --kv-transfer-config {}", {}, "is KVortex's to set", "backend"),
        ("M --kv-offloading-size 4", {}, "is KVortex's to set", "backend"),
        ("M --no-enable-prefix-caching", {}, "turns prefix caching off", "backend"),
        (
            "M",
            {"KVORTEX_RAM_CACH_SIZE": "1GB"},
            "KVORTEX_RAM_CACH_SIZE: there is no such setting",
            "_CACHE_SIZE?",
        ),
        ("M", {"KVORTEX_NUM_STREAMS": "many"}, "KVORTEX_NUM_STREAMS: takes a whole number", None),
        ("M", {"KVORTEX_MODEL": "null"}, None, None),
        ("", {"KVORTEX_MODEL": ""}, "KVORTEX_MODEL: takes a name or a path, not the text ''", None),
        ("", {"KVORTEX_MODEL": "null"}, "KVORTEX_MODEL: takes a name or a path, not null", None),
    ],
)
def test_a_wrong_setting_outside_the_file_is_refused_at_its_place(
    resolved: Resolve, line: str, environment: dict[str, str], said: str | None, hint: str | None
) -> None:
    if said is None:
        resolved(line, environment)
        return
    with pytest.raises(UsageError) as refused:
        resolved(line, environment)
    assert said in refused.value.message
    if hint is not None:
        assert hint in (refused.value.hint or "")


def test_a_bad_value_is_refused_even_where_it_is_overridden(resolved: Resolve) -> None:
    with pytest.raises(ConfigError, match=r"kvortex\.yaml:1: kv_cache\.num_streams"):
        resolved("M --set kv_cache.num_streams=2", {}, "kv_cache: {num_streams: 0}\n")


def test_without_a_model_anywhere_the_ways_to_name_one_are_told(resolved: Resolve) -> None:
    with pytest.raises(UsageError, match="no model is named") as refused:
        resolved("", {}, "dtype: auto\n")
    assert "give MODEL, before list options, or `model:` in" in (refused.value.hint or "")
    assert resolve(CommandLine(), {}, MACHINE, require_model=False).model is None


def test_with_backend_none_another_connector_may_be_given(resolved: Resolve) -> None:
    line = 'M --set kv_cache.backend=none --kv-transfer-config \'{"kv_connector": "X"}\''
    assert resolved(line).vllm["kv_transfer_config"].value == {"kv_connector": "X"}


def test_a_target_lowered_by_the_threshold_says_so(resolved: Resolve) -> None:
    config = resolved("M --set kv_cache.offload_threshold=0.5")
    assert config.kv_cache_values["offload_target"] == 0.5
    assert str(config.sources["offload_target"]) == "default, lowered to offload_threshold"
