"""Whatever stands in a file, a `--set` or a variable: a configuration, or one line that says what is wrong.

FUZZ_EXAMPLES says how many of each are tried; the suite tries a few.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvortex.config.command_line import vllm_command
from kvortex.config.machine import MachineFacts
from kvortex.config.resolve import CommandLine, resolve
from kvortex.config.settings import KV_CACHE_KEYS, KVCacheSettings
from kvortex.config.vllm_options import vllm_options
from kvortex.errors import UsageError

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "120"))
MACHINE = MachineFacts(usable_ram_bytes=64 * 10**9)
LONGEST_MESSAGE = 1000

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 120,
    database=None,
    suppress_health_check=list(HealthCheck),
)

DIGITS = st.sampled_from(["9" * 30, "9" * 400, "9" * 5000, "0x" + "f" * 5000, "1e999", "-0", ".nan", "-.inf", "1_000"])
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=12),
    DIGITS,
    st.sampled_from(
        ["128GB", "50%", "1" * 400 + "GB", "9" * 5000 + "s", "null", "{}", "[" * 40, "!!python/object:os.x {}"]
    ),
)
KEYS = st.one_of(
    st.sampled_from(["kv_cache", *KV_CACHE_KEYS, "model", *vllm_options().by_name]),
    st.text(max_size=8),
    st.sampled_from(["a\nb", "\x1b[31mred", "x" * 5000, "no_port", "<<", "=", "\u202e"]),
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(KEYS, inner, max_size=3))
)
SECTIONS = st.dictionaries(st.one_of(st.sampled_from(KV_CACHE_KEYS), KEYS), VALUES, max_size=4)


def spelled(value: object) -> str:
    """A value in YAML's flow style; a text as it is, quoted or not, whatever YAML makes of it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(key)}: {spelled(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(spelled, value)) + "]"
    if isinstance(value, str):
        return value if value[:1].isdigit() or value[:1] in ("!", ".", "-") else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


MAPPINGS = st.fixed_dictionaries({}, optional={"model": VALUES, "kv_cache": SECTIONS, "port": VALUES}).flatmap(
    lambda fixed: st.dictionaries(KEYS, VALUES, max_size=3).map(
        lambda more: "\n".join(f"{json.dumps(key)}: {spelled(value)}" for key, value in {**fixed, **more}.items())
    )
)
PIECES = (
    "a: |kv_cache:\n|  |\t|- |[|]|{|}|&a |*a|!!python/object |? |>\n|---\n|...\n|%YAML 9.9\n|'|\"|\\x|#|\x00|\x85|"
    "\u2028|<<: |model: m\n|\r|: |,"
)
SCRAPS = st.lists(st.sampled_from(PIECES.split("|")), max_size=30).map("".join)
FILES = st.one_of(
    st.binary(max_size=200),
    SCRAPS.map(lambda text: text.encode()),
    MAPPINGS.map(lambda text: text.encode(errors="replace")),
)


def is_one_line(said: str | None) -> bool:
    return said is None or (said.isprintable() and len(said) <= LONGEST_MESSAGE)


def check_answer(ask: Callable[[], object]) -> None:
    """It is taken, or refused in one line that a terminal may be given."""
    refused: UsageError | None = None
    try:
        ask()
    except UsageError as error:
        refused = error
    if refused is not None:
        assert is_one_line(refused.message), refused.message
        assert is_one_line(refused.hint), refused.hint


@fuzz
@given(content=FILES)
@example(content=b"kv_cache:\n  idle_after: " + b"9" * 400)
@example(content=b"kv_cache:\n  ram_cache_size: 0x" + b"f" * 5000)
@example(content=b'"a\\nb": 1')
@example(content=b"max_model_len: " + b"9" * 5000)
@example(content=b"port: " + b"9" * 400)
def test_any_file_is_a_configuration_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    path.write_bytes(content)

    def start() -> object:
        resolved = resolve(CommandLine(config=str(path)), {}, MACHINE, require_model=False)
        if resolved.model is not None:
            vllm_command(resolved, {})
        return resolved

    check_answer(start)


@fuzz
@given(key=KEYS, value=st.one_of(SCALARS.map(str), VALUES.map(spelled), st.text(max_size=30)), section=st.booleans())
@example(key="ram_cache_size", value="9" * 5000, section=True)
@example(key="hf_overrides", value='{"a": ' + "[" * 100_000, section=False)
@example(key="hf_overrides", value='{"a": ' + "9" * 5000 + "}", section=False)
def test_any_set_and_variable_is_a_configuration_or_one_line(key: str, value: str, section: bool) -> None:
    named = f"kv_cache.{key}" if section else key
    check_answer(lambda: resolve(CommandLine(model="m", sets=[f"{named}={value}"]), {}, MACHINE))
    check_answer(lambda: resolve(CommandLine(model="m"), {f"KVORTEX_{key.upper()}": value}, MACHINE))


@fuzz
@given(values=st.dictionaries(st.one_of(st.sampled_from(KV_CACHE_KEYS), KEYS), VALUES, max_size=4))
@example(values={"idle_after": 10**400})
@example(values={"ram_cache_size": 16**5000})
def test_any_extra_configuration_of_the_connector_is_read_or_refused_in_one_line(values: dict[str, object]) -> None:
    check_answer(lambda: KVCacheSettings.from_extra_config(values, available_ram_bytes=10**9))


def test_the_check_sees_what_it_looks_for() -> None:
    """Its own control: a trace, two lines and a screen full are no answer."""
    with pytest.raises(ZeroDivisionError):
        check_answer(lambda: 1 / 0)
    assert not any(map(is_one_line, ("two\nlines", "\x1b[31m", "\udcff", "x" * 5000)))

    def refuse() -> object:
        raise UsageError("a\n\x1b[31m\udcff" + "x" * 5000)

    check_answer(refuse)
