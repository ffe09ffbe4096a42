"""docs/configuration.md is what the settings are."""

from __future__ import annotations

import re
import textwrap

import pytest

from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine, ResolvedConfig, resolve
from kvortex.config.settings import KV_CACHE_KEYS
from kvortex.config.sources import SourceKind
from kvortex.errors import ConfigError
from tools.write_configuration_reference import PAGE, page

MACHINE = MachineFacts(usable_ram_bytes=512 * 10**9, gpu_count=8)
TEXT = PAGE.read_text()
ROWS = re.findall(r"^\| `(\w+)` \| `(KVORTEX_\w+)` \| (.+?) \| (.+?) \|", TEXT, re.MULTILINE)


def test_the_reference_is_what_the_settings_are():
    assert page(TEXT) == TEXT, "run tools/write_configuration_reference.py"


def test_every_key_has_a_row():
    assert [key for key, *_ in ROWS] == list(KV_CACHE_KEYS)


def resolved(environment: dict[str, str], *, config: str | None = None) -> ResolvedConfig:
    return resolve(CommandLine("M" if config is None else None, config), environment, MACHINE)


@pytest.mark.parametrize(("key", "variable", "takes", "default"), ROWS)
def test_a_row_s_variable_sets_its_key_and_its_default_is_the_one_that_holds(key, variable, takes, default):
    """What the page says is read back as a user would write it."""
    none_given = resolved({})
    if key == "ram_cache_size":
        assert default == "50% of the usable RAM, at most 256 GB"
        assert none_given.kv_cache.ram_cache_size == 256 * 10**9
        return
    given = resolved({variable: default.strip("`")})
    assert given.sources[key].kind is SourceKind.ENVIRONMENT
    assert getattr(given.kv_cache, key) == getattr(none_given.kv_cache, key)


def test_the_example_is_taken(tmp_path):
    (tmp_path / "kvortex.yaml").write_text(textwrap.dedent(TEXT.split("\n\n")[2]))
    example = resolved({}, config=str(tmp_path / "kvortex.yaml"))
    assert example.kv_cache.ram_cache_size == 128 * 10**9
    assert example.vllm_value("max_model_len", None) == 32768


def test_the_message_shown_is_the_one_that_comes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kvortex.yaml").write_text("model: M\n\n\n\n\n\nkv_cache:\n  ram_cache_sise: 1GB\n")
    with pytest.raises(ConfigError) as refusal:
        resolved({}, config="kvortex.yaml")
    assert textwrap.indent(f"error: {refusal.value}", "    ") in TEXT
