"""Shell completion, driven in a real bash as a TAB would drive it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvortex.config.settings import KV_CACHE_KEYS, KVCacheSettings

# COMP_WORDS and COMP_CWORD are what bash sets before it calls the function.
SCRIPT = """
eval "$(kvortex --show-completion bash)"
complete -p kvortex | grep -q _kvortex_completion || exit 3
COMP_WORDS=(%s)
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_kvortex_completion kvortex
printf '%%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with a `kvortex` on it."""
    program = tmp_path / "kvortex"
    program.write_text(f"#!{sys.executable}\nfrom kvortex_cli.main import main\nmain()\n")
    program.chmod(0o755)
    return f"{tmp_path}:{os.environ['PATH']}"


def completed(path: str, *words: str) -> list[str]:
    """What TAB offers after `kvortex WORDS`; the last word is the one being typed."""
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run(
        [bash, "--norc", "-c", SCRIPT % shlex.join(["kvortex", *words])],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "LC_ALL": "C", "PATH": path, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.split()


def test_commands_are_completed(path: str) -> None:
    assert {"doctor", "init", "serve", "inspect", "bench"} <= set(completed(path, ""))
    assert completed(path, "doc") == ["doctor"]
    assert completed(path, "bench", "re") == ["replay"]


def test_own_options_are_completed(path: str) -> None:
    assert completed(path, "doctor", "--mo") == ["--model"]
    assert completed(path, "init", "M", "--fo") == ["--force"]
    assert completed(path, "serve", "M", "--dry") == ["--dry-run"]


def test_vllms_options_are_completed_wherever_it_takes_them(path: str) -> None:
    assert completed(path, "serve", "M", "--max-model") == ["--max-model-len"]
    assert completed(path, "bench", "compare", "--no-enforce") == ["--no-enforce-eager"]
    # Those before the cursor may be without their value.
    assert completed(path, "serve", "M", "--port", "--max-model") == ["--max-model-len"]
    assert completed(path, "doctor", "--max-model") == []


def test_settings_are_completed_with_their_defaults(path: str) -> None:
    assert completed(path, "serve", "M", "--set", "kv_cache.num") == ["kv_cache.num_streams=4"]
    offered = completed(path, "bench", "compare", "M", "--set", "")
    assert [setting.split("=")[0] for setting in offered] == [f"kv_cache.{key}" for key in KV_CACHE_KEYS]


def test_what_is_offered_for_set_is_accepted(path: str) -> None:
    offered = completed(path, "serve", "M", "--set", "")
    sets = [argument for setting in offered for argument in ("--set", setting)]
    done = subprocess.run(
        [sys.executable, "-c", "from kvortex_cli.main import main; main()", "serve", "M", "--dry-run", "--json", *sets],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    values = {name: told["value"] for name, told in json.loads(done.stdout)["values"].items()}
    for key, field in KVCacheSettings.model_fields.items():
        assert field.is_required() or values[f"kv_cache.{key}"] == field.default, key
