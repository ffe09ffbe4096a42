"""`kvortex plan` as a user calls it."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvortex.keys import block_key
from kvortex.replay import plan as plan_module
from kvortex.replay.models import KNOWN_MODELS
from kvortex.replay.synthesis import round_robin
from kvortex.vllm_plugin.request_log import EndedRequest, RequestLog
from tests.cli.test_help import HEAVY, run

BLOCK_BYTES = 128 * 131072
TALKS, BLOCKS_EACH, ROUNDS = 8, 16, 8


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """As a server writes it: 8 conversations of 16 blocks of 128 tokens and a bit, 2.1 GB in all, 8 times in turn."""
    path = tmp_path / "requests.jsonl"
    writer = RequestLog(path, 10**8, 128)
    for request in round_robin(conversations=TALKS, blocks_each=BLOCKS_EACH, rounds=ROUNDS):
        keys = [block_key(number.to_bytes(32, "big"), 0) for number in request.blocks]
        writer.add(EndedRequest(10**9 + request.arrival_s, 128 * BLOCKS_EACH + 50, 40, keys))
    writer.close()
    return path


def planned(kvortex: Any, *arguments: str) -> dict[str, Any]:
    result = kvortex("plan", *arguments, "--json")
    assert result.code == 0, result.err
    document: dict[str, Any] = json.loads(result.out)
    return document


def test_a_servers_log_tells_which_size_pays(kvortex: Any, log: Path) -> None:
    document = planned(kvortex, str(log), "--model", "llama-3.1-8b")
    assert (document["kind"], document["requests"], document["block_tokens"]) == ("kvortex plan", 64, 128)
    assert document["working_set_bytes"] == TALKS * BLOCKS_EACH * BLOCK_BYTES
    assert document["conversations"] == {
        "number": TALKS,
        "mean_turns": ROUNDS,
        "median_tokens": 2138,
        "p95_tokens": 2138,
        "at_once": TALKS,
    }
    rows = {row["ram_bytes"]: row for row in document["sizes"]}
    assert document["recommended"]["ram_bytes"] == 4 * 10**9
    assert rows[4 * 10**9]["lru"]["hit_rate"] == pytest.approx(2048 / 2098)
    assert rows[10**9]["lru"]["hit_rate"] == 0
    assert rows[10**9]["bound"]["hit_rate"] > 0.3
    assert rows[4 * 10**9]["fit_conversations"] == 4 * 10**9 // (2138 * 131072)


def test_a_table_says_the_size_why_and_what_fits(kvortex: Any, log: Path) -> None:
    result = kvortex("plan", str(log), "--model", "llama-3.1-8b", "--vram", "1GB", "--ram", "2GB", "--ram", "4GB")
    assert result.code == 0, result.err
    shown = " ".join(result.out.split())
    for part in (
        "recommended: 2 GB: from no RAM to 2 GB gains",
        "beyond, each doubling gains less than 1 point",
        "an endless cache would find 97.6%",
        "conversations: 8, 8.0 turns each, 2,138 tokens at their end",
        "VRAM of 1 GB holds 3 of the median length",
        "estimated from 6.98 billion weights",
        "<- pays",
        "default: adaptive",
    ):
        assert part in shown, part
    assert "plan: 2 GB of RAM, 64 requests" in result.err


def test_nothing_that_pays_is_one_line_and_too_little_ram_is_called_that(kvortex: Any, log: Path) -> None:
    model = ("--model", "llama-3.1-8b")
    shown = kvortex("plan", str(log), *model, "--ram", "20MB").out
    (line,) = [line for line in shown.splitlines() if ": none: " in line]
    assert line.startswith("recommended: none: too little RAM: 20 MB adds 0.")
    assert "hardly repeat" not in shown
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:TALKS]))
    shown = kvortex("plan", str(log), *model, "--ram", "4GB").out
    assert "recommended: none: no size pays: prompts hardly repeat." in shown
    assert shown.count(": none: ") == 1


def test_lru_is_named_where_it_needs_less_ram(kvortex: Any, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policies' hit rates are given here; which sizes they are of is the plan's."""
    played = plan_module.replay

    def replay(requests: Any, policy: str, *, ram_bytes: int, **options: Any) -> Any:
        rate = {"default": {10**9: 0.10, 4 * 10**9: 0.21}, "lru": {10**9: 0.20, 4 * 10**9: 0.21}}
        result = played(requests, policy, ram_bytes=ram_bytes, **options)
        return replace(result, hit_rate=rate.get(policy, {}).get(ram_bytes, 0.21))

    monkeypatch.setattr(plan_module, "replay", replay)
    arguments = (str(log), "--model", "llama-3.1-8b", "--ram", "1GB", "--ram", "4GB")
    shown = kvortex("plan", *arguments).out
    assert "recommended: 4 GB: " in shown
    assert "with lru: 1 GB finds 20.0%, where the default policy finds 10.0%: kv_cache.eviction_policy" in shown
    assert planned(kvortex, *arguments)["lru_instead"] == 10**9


def test_one_request_is_one_request(kvortex: Any, log: Path) -> None:
    log.write_text(log.read_text().splitlines()[0])
    model = ("--model", "llama-3.1-8b", "--ram", "1GB")
    for command in (("plan",), ("bench", "replay")):
        result = kvortex(*command, str(log), *model, "--warm-up", "0")
        assert "1 request" in result.out
        assert "1 requests" not in result.out + result.err


def test_more_than_this_machine_has_is_marked_and_not_recommended_here(kvortex: Any, log: Path) -> None:
    sizes = ("--ram", "32MB", "--ram", "900TB")
    document = planned(kvortex, str(log), "--model", "llama-3.1-8b", *sizes)
    assert [row["is_within_machine"] for row in document["sizes"]] == [True, False]
    assert document["recommended"]["ram_bytes"] == 900 * 10**12
    assert document["recommended_here"]["ram_bytes"] != 900 * 10**12
    shown = kvortex("plan", str(log), "--model", "llama-3.1-8b", *sizes).out
    assert "(more than is usable here)" in shown


def test_both_files_of_a_log_that_was_full_are_one_trace(kvortex: Any, log: Path, tmp_path: Path) -> None:
    lines = log.read_text().splitlines(keepends=True)
    both = tmp_path / "both.jsonl.gz"
    both.write_bytes(gzip.compress("".join(lines[30:] + lines[:30]).encode()))
    model = ("--model", "llama-3.1-8b", "--ram", "1GB")
    whole, joined = (planned(kvortex, str(path), *model)["sizes"][0] for path in (log, both))
    for played in (whole, joined):
        for policy in ("default", "lru", "bound"):
            del played[policy]["seconds"]
    assert joined == whole


def test_a_page_has_the_plot_and_the_reason(kvortex: Any, log: Path, tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    assert kvortex("plan", str(log), "--model", "llama-3.1-8b", "--html", str(page)).code == 0
    text = page.read_text()
    assert text.count("<polyline") == 3
    assert "<dt>recommended</dt><dd>4 GB: from 2 GB to 4 GB" in text


def write_model(folder: Path, **values: Any) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values))
    return str(folder)


def test_without_a_known_prefill_there_is_a_dash_and_a_way_out(kvortex: Any, log: Path, tmp_path: Path) -> None:
    mixtral = {"model_type": "mixtral", "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    mixtral |= {"hidden_size": 64, "intermediate_size": 128, "num_local_experts": 8}
    model = write_model(tmp_path / "m", **mixtral)
    shown = kvortex("plan", str(log), "--model", model, "--ram", "4GB").out
    assert "prefill: not known for this model: give --prefill-speed" in shown
    assert planned(kvortex, str(log), "--model", model)["sizes"][0]["default"]["prefill_saved_s"] is None


def refused(kvortex: Any, code: int, *arguments: str) -> str:
    result = kvortex("plan", *arguments)
    assert (result.code, result.out) == (code, "")
    assert "Traceback" not in result.err
    assert result.err.startswith("error: ")
    return str(result.err)


def test_a_wrong_trace_is_named_with_its_line(kvortex: Any, log: Path, tmp_path: Path) -> None:
    model = ("--model", "llama-3.1-8b")
    assert "none.jsonl: there is no such file" in refused(kvortex, 2, "none.jsonl", *model)
    assert f"{tmp_path}: cannot be read: Is a directory" in refused(kvortex, 2, str(tmp_path), *model)
    empty = tmp_path / "empty"
    empty.touch()
    assert f"{empty}: holds no request" in refused(kvortex, 2, str(empty), *model)
    log.write_text(log.read_text().replace('"input_length": 2098', '"input_length": 209', 1))
    assert f"{log}:1: 16 hash_ids for 209 tokens" in refused(kvortex, 2, str(log), *model)


def test_a_wrong_model_ends_with_1_and_a_wrong_call_with_2(kvortex: Any, log: Path, tmp_path: Path) -> None:
    unknown = write_model(tmp_path / "u", model_type="rwkv")
    assert "the layout of this model's KV is not known" in refused(kvortex, 1, str(log), "--model", unknown)
    assert "is no directory" in refused(kvortex, 2, str(log), "--model", "./none")
    assert "Missing option '--model'" in refused(kvortex, 2, str(log))
    assert "less than one block" in refused(kvortex, 2, str(log), "--model", "llama-3.1-8b", "--ram", "1MB")
    assert "--ram: " in refused(kvortex, 2, str(log), "--model", "llama-3.1-8b", "--ram", "128G")
    assert "--html none/p cannot be written" in refused(kvortex, 2, str(log), "--model", "m", "--html", "none/p")


@pytest.mark.parametrize("name", ["gpt9", "llama", ""])
def test_a_name_that_is_none_is_not_asked_of_the_hub_and_the_known_ones_are_told(
    kvortex: Any, log: Path, name: str
) -> None:
    said = refused(kvortex, 2, str(log), "--model", name)
    assert said.startswith(f"error: --model {name}: there is no such directory, and a Hub name is owner/name\n")
    assert f"hint: known without a file: {', '.join(KNOWN_MODELS)}\n" in said


def test_help_imports_nothing_heavy_and_names_the_known_models() -> None:
    done = run("plan", "--help")
    assert done.returncode == 0
    assert ", ".join(KNOWN_MODELS) in " ".join(done.stdout.split())
    assert set(json.loads(done.stderr)).isdisjoint(HEAVY)
