"""Models of the Hugging Face Hub: gated, missing, offline and slow ones told apart, the token shown nowhere (B55)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.environment import ROOMY
from tests.fakes.hub import FakeHub, fake_hub

pytest.importorskip("huggingface_hub")

TOKEN = "hf_TESTSECRET"
COMMAND = [sys.executable, "-c", f"{ROOMY}from kvortex_cli.main import main; main()"]
ROOT = str(Path(__file__).parents[2])


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with fake_hub() as running:
        yield running


def run(hub: FakeHub, directory: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """A command in a process whose hub is the fake one, and whose home is empty."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING", "KVORTEX_"))
    }
    home = {"HOME": str(directory), "HF_HOME": str(directory / "hf"), "HF_ENDPOINT": hub.url}
    # A proxy would not know the way to this machine.
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=directory,
        env={**inherited, **home, "NO_PROXY": "*", "PYTHONPATH": ROOT, "CUDA_VISIBLE_DEVICES": "", **environ},
    )


ANSWERS = [
    ("o/code-401", "", "no public repository o/code-401", "no_token", True),
    ("o/code-401", TOKEN, "refused the Hugging Face token", "bad_token", False),
    ("o/gated-401", "", "is gated, and there is no Hugging Face token", "no_token", False),
    ("o/gated-403", TOKEN, "is gated, and the account of the token in use has no access", "no_access", False),
    ("o/code-404", "", "has no repository o/code-404", "not_found", True),
]


@pytest.mark.parametrize(("model", "token", "said", "reason", "is_absent"), ANSWERS)
def test_every_command_tells_the_same_and_never_the_token(
    hub: FakeHub, tmp_path: Path, model: str, token: str, said: str, reason: str, is_absent: bool
) -> None:
    token_of = {"HF_TOKEN": token} if token else {}
    doctor = run(hub, tmp_path, "doctor", "--model", model, "--json", **token_of)
    serve = run(hub, tmp_path, "serve", model, "--uds", "s", "--set", "kv_cache.ram_cache_size=1MB", **token_of)
    init = run(hub, tmp_path, "init", model, **token_of)
    findings = {finding["check"]: finding for finding in json.loads(doctor.stdout)["findings"]}
    assert (doctor.returncode, findings["model"]["status"]) == (1, "fail")
    assert said in findings["model"]["value"]
    assert json.loads(doctor.stdout)["model"]["unavailable"] == reason
    # vLLM itself would need half a minute for this, and a page of traces; a comparison, a server for each engine.
    compare = run(hub, tmp_path, "bench", "compare", model, "--set", "kv_cache.ram_cache_size=1MB", **token_of)
    for refused in (serve, compare):
        assert refused.returncode == (2 if is_absent else 1)
        assert said in refused.stderr.splitlines()[-2]
        assert refused.stderr.splitlines()[-1].startswith("hint: ")
        assert "starting" not in refused.stderr
    # A file can still be written for what is there, with the reason in it.
    written = (tmp_path / "kvortex.yaml").read_text() if not is_absent else ""
    assert init.returncode == (2 if is_absent else 0)
    assert (tmp_path / "kvortex.yaml").exists() is not is_absent
    assert said in (init.stderr if is_absent else written)
    for shown in (doctor.stdout, doctor.stderr, serve.stderr, compare.stderr, init.stderr, written):
        assert TOKEN not in shown
    assert set(hub.tokens) == {token}


def test_a_token_of_the_file_reaches_the_hub(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / "k.yaml").write_text(f"model: o/gated-403\nhf_token: {TOKEN}\nuds: s\n")
    done = run(hub, tmp_path, "serve", "--config", "k.yaml", "--set", "kv_cache.ram_cache_size=1MB")
    assert "has no access" in done.stderr
    assert TOKEN not in done.stderr
    assert hub.tokens == [TOKEN]


def test_a_model_that_is_there_is_told_in_bytes(hub: FakeHub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "doctor", "--model", "o/llama-200", "--json", HF_TOKEN=TOKEN)
    answer = json.loads(done.stdout)
    assert answer["model"]["kv_bytes_per_token"] == 131072
    assert TOKEN not in done.stdout + done.stderr
    # Now it is in the cache, and no network is needed.
    asked = len(hub.tokens)
    offline = run(hub, tmp_path, "doctor", "--model", "o/llama-200", "--json", HF_HUB_OFFLINE="1")
    assert json.loads(offline.stdout)["model"]["kv_bytes_per_token"] == 131072
    assert len(hub.tokens) == asked


def test_offline_is_told_apart_from_absent(hub: FakeHub, tmp_path: Path) -> None:
    done = run(
        *(hub, tmp_path, "serve", "o/llama-200", "--uds", "s", "--set", "kv_cache.ram_cache_size=1MB"),
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 1
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert hub.tokens == []


@pytest.mark.parametrize("model", ["o/slow-200", "o/code-429", "o/code-503"])
def test_a_hub_that_does_not_answer_well_is_not_taken_for_a_missing_model(
    hub: FakeHub, tmp_path: Path, model: str
) -> None:
    done = run(hub, tmp_path, "doctor", "--model", model, "--json", HF_TOKEN=TOKEN)
    answer = json.loads(done.stdout)
    assert answer["model"]["unavailable"] == "no_network"
    assert TOKEN not in done.stdout + done.stderr
