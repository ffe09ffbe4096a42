"""Wrong files and wrong calls: one message each, at its place, exit 2, and nothing loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-c", "from kvortex_cli.main import main; main()"]
BOMB = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{new}: &{new} [{', '.join([f'*{old}'] * 10)}]\n" for old, new in ("ab", "bc", "cd", "de")
)
WRONG_FILES = {
    "a typo under kv_cache": ("kv_cache:\n  ram_cach_size: 1GB\n", 2, 'did you mean "ram_cache_size"?'),
    "a typo at the top": ("tensor_paralel_size: 2\n", 1, 'did you mean "tensor_parallel_size"?'),
    "a misspelt section": ("kv-cache:\n  ram-cache-size: 1GB\n", 1, 'did you mean "kv_cache"?'),
    "dashes under kv_cache": ("kv_cache:\n  ram-cache-size: 1GB\n", 2, 'did you mean "ram_cache_size"?'),
    "KVortex's key at the top": ("ram_cache_size: 1GB\n", 1, '"ram_cache_size" belongs under kv_cache'),
    "block_size at the top": ("dtype: auto\nblock_size: 64\n", 2, '"block_size" belongs under kv_cache'),
    "vLLM's key under kv_cache": (
        "kv_cache:\n  max_model_len: 1\n",
        2,
        '"max_model_len" belongs at the top level',
    ),
    "an unknown section": (
        "serve:\n  offload_threshold: 0.5\n",
        1,
        '"offload_threshold" belongs under kv_cache',
    ),
    "a key that is like none": ("zzzz: 1\n", 1, "the keys are kv_cache, model and vllm serve's options"),
    "a negation as a key": ("no_enforce_eager: true\n", 1, "write enforce_eager: false"),
    "a key twice": ("seed: 1\nmodel: m\nseed: 2\n", 3, '"seed" is there twice: line 1 and line 3'),
    "a kv_cache key twice": ("kv_cache:\n  num_streams: 1\n  num_streams: 2\n", 3, "line 2 and line 3"),
    "a key in both spellings": (
        "max-model-len: 1\nmax_model_len: 2\n",
        2,
        '"max_model_len" is there twice, first at',
    ),
    "a size in words": ('kv_cache:\n  ram_cache_size: "128 gigs"\n', 2, "there is no unit 'gigs'"),
    "a size with two meanings": ("kv_cache:\n  ram_cache_size: 128G\n", 2, "write 128GB"),
    "bits": ("kv_cache:\n  ram_cache_size: 128Gb\n", 2, "is bits"),
    "a list for a size": ("kv_cache:\n  ram_cache_size: [1]\n", 2, "a list is not a size"),
    "a bool for a size": ("kv_cache:\n  ram_cache_size: true\n", 2, "true is not a size"),
    "null for a size": ("kv_cache:\n  ram_cache_size: null\n", 2, "null is not a size"),
    "a size of zero": ("kv_cache:\n  ram_cache_size: 0\n", 2, "more than zero"),
    "a bool for a number": ("kv_cache:\n  num_streams: true\n", 2, "a whole number from 1 to 64, not true"),
    "a number in quotes": ('kv_cache:\n  offload_threshold: "0.85"\n', 2, "not the text '0.85'"),
    "a percentage for a share": ("kv_cache:\n  offload_threshold: 85\n", 2, "a number from 0 to 1, not 85"),
    "a block of 100 tokens": ("kv_cache:\n  block_size: 100\n", 2, "a positive multiple of 16, not 100"),
    "no stream": ("kv_cache:\n  num_streams: 0\n", 2, "a whole number from 1 to 64, not 0"),
    "a target above the threshold": (
        "kv_cache:\n  offload_threshold: 0.5\n  offload_target: 0.6\n",
        3,
        "0.6 is above offload_threshold, 0.5",
    ),
    "a word that YAML reads as true": ("kv_cache:\n  verify: yes\n", 2, 'or "all", not yes'),
    "a word that is no number": ("kv_cache:\n  num_streams: off\n", 2, "from 1 to 64, not off"),
    "a word for a number of vLLM's": ("port: on\n", 1, "a whole number, not on, which YAML reads as true"),
    "a list for kv_cache": ("kv_cache: [1]\n", 1, "takes keys and values, not a list"),
    "nothing under kv_cache": ("kv_cache:\nseed: 1\n", 1, "takes keys and values, not null"),
    "a list for a number of vLLM's": (
        "tensor_parallel_size: [1, 2]\n",
        1,
        "takes a whole number, not a list",
    ),
    "text for a count of vLLM's": (
        "dtype: auto\nmax_model_len: abc\n",
        2,
        "max_model_len takes a whole number, one such",
    ),
    "a fraction for a count of vLLM's": ("max_num_batched_tokens: 0.5\n", 1, "not the text '0.5'"),
    "text in a list of numbers": ("cudagraph_capture_sizes: [1, x]\n", 1, "takes a whole number, not the text 'x'"),
    "text for a switch": ("enforce_eager: 'yes'\n", 1, "takes true or false, not text"),
    "a bool for text": ("dtype: no\n", 1, "takes text, not no, which YAML reads as false"),
    "a share above one": ("gpu_memory_utilization: 85\n", 1, "above 0 and up to 1, not 85"),
    "a port out of range": ("port: 70000\n", 1, "from 1 to 65535, not 70000"),
    "a connector of the user's": ("kv_transfer_config: {}\n", 1, 'kv_cache.backend to "none"'),
    "a second file": ("config: other.yaml\n", 1, "KVortex reads one file"),
    "a python tag": ("a: !!python/object/apply:os.system [touch pwned]\n", 1, "the tag"),
    "a tab": ("kv_cache:\n\tnum_streams: 4\n", 2, "a tab"),
    "an open bracket": ("model: [m\n", 2, "bad YAML"),
    "an empty file": ("", 1, "the file is empty"),
    "a list": ("- model\n", 1, "the file is a list"),
    "an alias bomb": (BOMB, 4, "aliases"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_gets_one_message_with_its_line_and_exit_2(kvortex: Any, tmp_path: Path, name: str) -> None:
    content, line, said = WRONG_FILES[name]
    (tmp_path / "f.yaml").write_text(content)
    for mode in (["--dry-run"], []):
        result = kvortex("serve", "M", "--config", "f.yaml", *mode)
        assert result.code == 2
        assert result.out == ""
        messages = result.err.splitlines()
        assert messages[0].startswith(f"error: f.yaml:{line}: ")
        assert said in result.err
        assert len(messages) == 1 or (len(messages) == 2 and messages[1].startswith("hint: "))
    assert not (tmp_path / "pwned").exists()


@pytest.mark.usefixtures("clean_environment")
def test_a_wrong_file_ends_a_real_process_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "f.yaml").write_text("kv_cache:\n  ram_cach_size: 1GB\n")
    arguments = [*COMMAND, "serve", "M", "--config", "f.yaml"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        'error: f.yaml:2: unknown key "ram_cach_size" under kv_cache',
        'hint: did you mean "ram_cache_size"?',
    ]


@pytest.mark.parametrize(("path", "said"), [("none.yaml", "there is no such file"), (".", "is a directory")])
def test_no_file_is_refused(kvortex: Any, path: str, said: str) -> None:
    result = kvortex("serve", "M", "--config", path)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith(f"error: {path}: {said}")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["M", "--ofload"], "--ofload: there is no such option"),
        (["M", "--max-model-len"], "--max-model-len: has no value"),
        (["M", "--json"], "--json goes with --dry-run"),
        (["M", "N", "--dry-run"], "unexpected extra argument"),
        (["M", "--set", "kv_cache.num_streams"], "--set kv_cache.num_streams: no value"),
        (["M", "--config"], "'--config' requires an argument"),
        (["--dry-run"], "no model is named"),
        (["M", "--set", "kv_cache.ram_cache_size=1G"], "--set kv_cache.ram_cache_size: '1G' is not a size"),
        (["M", "--set", "kv_cache.verify=yes"], '--set kv_cache.verify: takes "off" or "sample" or "all", not yes'),
        (["M", "--set", "port=0"], "--set port: takes a number from 1 to 65535, not 0"),
        (["M", "--set", "kv_cache.transfer_timeout=0s"], "takes a duration of more than 0 seconds, not 0s"),
        (["M", "--port", "abc"], "--port: takes a whole number, not the text 'abc'"),
        (["M", "--dry-run", "--max-model-len=abc"], "--max-model-len: takes a whole number, one such as 32k, or auto"),
        (["M", "--dry-run", "--set", "max_model_len=abc"], "one such as 32k, or auto, not the text 'abc'"),
    ],
)
def test_a_wrong_call_gets_one_message_and_exit_2(kvortex: Any, arguments: list[str], said: str) -> None:
    result = kvortex("serve", *arguments)
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: ")
    assert said in result.err
    assert "Traceback" not in result.err


def test_a_wrong_variable_gets_one_message_and_exit_2(kvortex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVORTEX_MAX_MODEL_LEN", "abc")
    result = kvortex("serve", "M", "--dry-run")
    assert (result.code, result.out) == (2, "")
    assert result.err.startswith("error: KVORTEX_MAX_MODEL_LEN: ")
    assert "takes a whole number, one such as 32k, or auto, not the text 'abc'" in result.err


@pytest.mark.parametrize("variable", ["KVORTEX_NOPE", "KVORTEX_DEBUG", "KVORTEX_HOME", "KVORTEX_TEST"])
def test_a_variable_that_is_like_none_gets_no_suggestion(
    kvortex: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "1")
    result = kvortex("serve", "M", "--dry-run")
    assert result.code == 2
    assert result.err.splitlines() == [f"error: {variable}: there is no such setting", f"hint: unset {variable}"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["inspect", "foo"], "'foo' is not one of"),
        (["bench", "serve", "--timeout", "0s"], "--timeout: takes more than 0 seconds, not '0s'"),
        (["bench", "compare"], "hint: give MODEL, before list options, or `model:` in the file of --config"),
    ],
)
def test_a_wrong_value_is_told_in_our_words_and_with_the_value(kvortex: Any, arguments: list[str], said: str) -> None:
    result = kvortex(*arguments)
    assert (result.code, result.out) == (2, "")
    assert said in result.err
    assert "Value error" not in result.err
    assert "Input should" not in result.err


@pytest.mark.parametrize(
    ("arguments", "said", "said_by_click"),
    [
        (["inspect", "blocks", "--top", "0"], "takes 1 or more, not 0", "0 is not in the range"),
        (["inspect", "blocks", "--top", "1001"], "takes 1000 or less, not 1001", "1001 is not in the range"),
        (["inspect", "blocks", "--top", "ten"], "takes a whole number, not 'ten'", "'ten' is not a valid int"),
        (["inspect", "--watch", "--every", "soon"], "takes a number, not 'soon'", "'soon' is not a valid float"),
        (["bench", "serve", "--max-failures", "2"], "takes 1 or less, not 2", "2.0 is not in the range"),
    ],
)
def test_a_wrong_number_is_told_with_the_value(
    kvortex: Any, arguments: list[str], said: str, said_by_click: str
) -> None:
    """In our words, where typer reads it with pydantic; older typers leave it to click."""
    result = kvortex(*arguments)
    assert (result.code, result.out) == (2, "")
    assert said in result.err or said_by_click in result.err
    assert "Input should" not in result.err
