"""`kvortex bench` on real servers: conversations that outgrow the KV pool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.server import inherited_environment

# The KV pool has 39 blocks of 32 tokens: room for two of the five conversations.
SERVER = (
    *("--max-model-len", "1152", "--num-gpu-blocks-override", "40", "--kv-cache-memory-bytes", "100000000"),
    *("--enforce-eager", "--set", "kv_cache.block_size=32"),
    *("--set", "kv_cache.ram_cache_size=20MB", "--set", "kv_cache.offload_threshold=0"),
)
LOAD = ("--conversations", "5", "--turns", "3", "--first", "480", "--add", "32", "--gen", "6", "--concurrency", "2")
REQUESTS = 15


def kvortex(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from kvortex_cli.main import main; main()", *arguments],
        capture_output=True,
        text=True,
        timeout=1000,
        env=inherited_environment(VLLM_LOGGING_LEVEL="INFO"),
        check=False,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


@pytest.fixture(scope="module")
def there_before() -> set[psutil.Process]:
    """What ran before the bench began: the server of other tests may."""
    return set(psutil.process_iter())


@pytest.fixture(scope="module")
def compared(tiny_llama: str, folder: Path, there_before: set[psutil.Process]) -> dict[str, Any]:
    """The document of a comparison, and the engines' first runs by name."""
    arguments = ["--engines", "none,offloading,kvortex", "--logs", str(folder), "--html", str(folder / "page.html")]
    done = kvortex("bench", "compare", tiny_llama, *arguments, *SERVER, *LOAD, "--json")
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def first_run(document: dict[str, Any], engine: str) -> dict[str, Any]:
    (run,) = next(entry["runs"] for entry in document["engines"] if entry["engine"] == engine)
    return dict(run)


@pytest.mark.parametrize("engine", ["none", "kvortex"])
def test_every_request_is_answered_and_measured(compared: dict[str, Any], engine: str) -> None:
    run = first_run(compared, engine)
    assert run["outcome"] == "measured"
    measured = run["measured"]
    assert (measured["requests"]["ok"], measured["requests"]["failed"]) == (REQUESTS, 0)
    assert measured["requests"]["short_answers"] == 0
    assert all(value > 0 for value in measured["figures"].values())
    # vLLM tells the ids of its answers, so that conversations go on with what was really said.
    assert not any("token ids" in note for note in measured["notes"])
    prompts = [480 + 38 * turn for turn in range(3)]
    assert [sum(turn["tokens"].values()) for turn in measured["turns"]] == [5 * tokens for tokens in prompts]


def test_kvortex_has_prompt_tokens_from_ram_and_plain_vllm_computes_them(compared: dict[str, Any]) -> None:
    plain = first_run(compared, "none")["measured"]["sources"]
    assert plain["counted_by"] == "/metrics"
    assert plain["tokens"]["ram"] == 0
    sources = first_run(compared, "kvortex")["measured"]["sources"]
    assert sources["counted_by"] == "/kvortex/stats"
    assert sources["tokens"]["ram"] > 0
    assert sources["loaded_bytes"] > 0
    assert sources["tokens"]["computed"] < plain["tokens"]["computed"]


def test_ratios_compare_the_rates_of_this_run(compared: dict[str, Any]) -> None:
    rates = [first_run(compared, e)["measured"]["figures"]["output_tokens_per_s"] for e in ("none", "kvortex")]
    assert first_run(compared, "kvortex")["ratios"]["none"] == pytest.approx(rates[1] / rates[0])


def test_what_vllm_refuses_here_is_a_failure_with_its_reason(compared: dict[str, Any], folder: Path) -> None:
    """vLLM's OffloadingConnector needs a GPU."""
    run = first_run(compared, "offloading")
    assert run["outcome"] == "failed"
    assert run["measured"] is None
    assert "the server died" in run["reason"]
    assert "CPU" in run["reason"] or "cpu" in run["reason"], run["reason"]
    assert run["log_tail"]
    assert Path(run["log"]).parent == folder
    assert compared["failures"] == [
        {"engine": "offloading", "run": 1, "outcome": "failed", "reason": run["reason"]},
    ]


def test_the_document_and_the_page_say_what_was_measured_where(compared: dict[str, Any], folder: Path) -> None:
    assert {"hardware", "versions", "workload", "limits", "engines", "logs"} <= compared.keys()
    assert compared["versions"]["vllm"].startswith("0.")
    assert compared["workload"]["vocabulary"] == {"low": 128, "high": 512}
    page = (folder / "page.html").read_text()
    rate = first_run(compared, "kvortex")["measured"]["figures"]["output_tokens_per_s"]
    assert (f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}") in page


def test_no_server_is_left(compared: dict[str, Any], there_before: set[psutil.Process]) -> None:
    for process in set(psutil.process_iter(["cmdline"])) - there_before:
        command = " ".join(process.info["cmdline"] or [])
        assert f"kvortex.vllm_plugin.server {compared['model']}" not in command
