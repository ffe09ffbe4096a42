"""The vllm serve command of a configuration: options, plugins, secrets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import metadata

import pytest

from kvortex.config.arguments import split_arguments
from kvortex.config.command_line import VllmCommand, vllm_command
from kvortex.config.machine import MachineFacts
from kvortex.config.redaction import redact
from kvortex.config.resolve import CommandLine, resolve
from kvortex.config.settings import KVCacheSettings
from kvortex.config.vllm_options import Kind, vllm_options
from kvortex.errors import ConfigError

SECRET = "sk-TESTSECRET"


def command(
    *arguments: str,
    sets: tuple[str, ...] = (),
    environment: Mapping[str, str] | None = None,
    show_secrets: bool = True,
) -> VllmCommand:
    split = split_arguments(arguments)
    resolved = resolve(
        CommandLine("M", None, ("kv_cache.ram_cache_size=1GB", *sets), split.vllm, split.untouched),
        {},
        MachineFacts(64 * 10**9),
    )
    return vllm_command(resolved, environment or {}, show_secrets=show_secrets)


def options(*arguments: str, sets: tuple[str, ...] = ()) -> list[str]:
    """What stands between the model and --block-size, without what drains on SIGTERM."""
    argv = list(command(*arguments, sets=sets).argv)
    assert argv[:3] == ["vllm", "serve", "M"]
    between = argv[3 : argv.index("--block-size")]
    drain = between.index("--shutdown-timeout")
    return between[:drain] + between[drain + 2 :]


def test_a_sigterm_drains_unless_the_user_says_otherwise() -> None:
    argv = command().argv
    assert argv[argv.index("--shutdown-timeout") + 1] == "30"
    argv = command("--shutdown-timeout", "5").argv
    assert argv.count("--shutdown-timeout") == 1
    assert argv[argv.index("--shutdown-timeout") + 1] == "5"


def test_the_connector_gets_the_settings_in_base_units_and_recomputes_failed_loads() -> None:
    argv = command().argv
    config = json.loads(argv[argv.index("--kv-transfer-config") + 1])
    assert config["kv_connector"] == "KVortexConnector"
    assert config["kv_role"] == "kv_both"
    assert config["kv_load_failure_policy"] == "recompute"
    extra = config["kv_connector_extra_config"]
    assert extra["ram_cache_size"] == 10**9
    assert KVCacheSettings.from_extra_config(extra, available_ram_bytes=1).model_dump() == extra
    assert argv[argv.index("--block-size") + 1] == "128"


@pytest.mark.parametrize(
    ("given", "passed"),
    [
        (["-tp", "2"], ["--tensor-parallel-size", "2"]),
        (["--enforce-eager"], ["--enforce-eager"]),
        (["--no-enforce-eager"], ["--no-enforce-eager"]),
        (["--headless"], ["--headless"]),
        (["--served-model-name", "a", "b"], ["--served-model-name", "a", "b"]),
        (["--middleware", "a", "--middleware", "b"], ["--middleware", "a", "--middleware", "b"]),
        (["--hf-overrides", '{"a": [1]}'], ["--hf-overrides", '{"a": [1]}']),
        (["-cc.mode", "3", "-cc.x+=y"], ["--compilation-config.mode", "3", "--compilation-config.x+", "y"]),
        (["--max-model-len", "-1"], ["--max-model-len=-1"]),
        (["--gpu-memory-utilization", "0.9"], ["--gpu-memory-utilization", "0.9"]),
        (["--allowed-origins", '["*"]'], ["--allowed-origins", '["*"]']),
        (["--hf-token"], ["--hf-token"]),
        (["--reasoning-parser", ""], ["--reasoning-parser", ""]),
        (["--", "--newer", "1"], []),
    ],
)
def test_an_option_reaches_vllm_unchanged(given: list[str], passed: list[str]) -> None:
    assert options(*given) == passed


@pytest.mark.parametrize("value", ["headless=false", "dtype=null", "hf_token=false", "served_model_name=null"])
def test_vllms_own_default_is_nothing_on_its_command_line(value: str) -> None:
    assert options(sets=(value,)) == []


def test_what_goes_through_untouched_stands_last() -> None:
    assert command("--", "--newer", "1").argv[-2:] == ("--newer", "1")


def test_backend_none_is_plain_vllm_with_the_same_block_size() -> None:
    plain = command(sets=("kv_cache.backend=none",))
    assert plain.argv == ("vllm", "serve", "M", "--shutdown-timeout", "30", "--block-size", "128")
    assert plain.env == {}


class TestPlugins:
    """VLLM_PLUGINS shuts out whatever it does not name."""

    def test_the_users_own_stay_in(self) -> None:
        env = command(environment={"VLLM_PLUGINS": "mine,kvortex"}).env
        assert env["VLLM_PLUGINS"] == "mine,kvortex,kvortex_routes"

    def test_an_empty_list_of_the_users_is_a_value(self) -> None:
        assert command(environment={"VLLM_PLUGINS": ""}).env["VLLM_PLUGINS"] == "kvortex,kvortex_routes"

    def test_without_one_every_installed_plugin_is_named_but_those_that_naming_turns_on(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed = {
            "vllm.general_plugins": ["kvortex", "lora_filesystem_resolver", "lora_hf_hub_resolver"],
            "vllm.platform_plugins": ["my_npu"],
            "vllm.stat_logger_plugins": ["my_logger", "my_npu"],
            "vllm.endpoint_plugins": ["somebody_elses_routes"],
        }
        monkeypatch.setattr(
            metadata,
            "entry_points",
            lambda group: [metadata.EntryPoint(name, "m:f", group) for name in installed.get(group, [])],
        )
        assert command().env["VLLM_PLUGINS"] == "kvortex,lora_filesystem_resolver,my_npu,my_logger,kvortex_routes"


class TestSecrets:
    def test_a_key_goes_by_environment_and_never_on_the_command_line(self) -> None:
        secret = command("--api-key", SECRET, "--hf-token", SECRET)
        assert SECRET not in " ".join(secret.argv)
        assert "--api-key" not in secret.argv
        assert (secret.env["VLLM_API_KEY"], secret.env["HF_TOKEN"]) == (SECRET, SECRET)

    @pytest.mark.parametrize(
        "arguments",
        [
            ["--api-key", SECRET],
            ["--hf-token", SECRET],
            ["--model-loader-extra-config", json.dumps({"aws": {"secret_key": SECRET}})],
            ["--kv-events-config", json.dumps({"headers": {"Authorization": SECRET}})],
            ["-cc.auth_token", SECRET],
            ["--otlp-traces-endpoint", f"http://user:{SECRET}@host:4317"],
        ],
    )
    def test_what_is_shown_has_stars_in_its_place(self, arguments: list[str]) -> None:
        shown = command(*arguments, show_secrets=False).as_line()
        assert SECRET not in shown
        assert "***" in shown
        real = command(*arguments)
        assert SECRET in real.as_line()

    def test_several_keys_are_refused_without_showing_them(self) -> None:
        with pytest.raises(ConfigError, match="--api-key: takes one value") as refused:
            command("--api-key", SECRET, "other")
        assert SECRET not in str(refused.value)

    def test_no_other_option_is_hidden_by_its_name(self) -> None:
        with_text = [option.name for option in vllm_options() if option.kind not in (Kind.SWITCH, Kind.FLAG)]
        hidden = {name for name in with_text if redact(name, "x") != "x"}
        assert hidden == {"api_key", "hf_token"}
