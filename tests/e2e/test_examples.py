"""The examples do against a real server what they say; one server for all of them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import ENDED_WITHIN_S, KEY, inherited_environment

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
DOCUMENTS = ("a.txt", "b.txt", "c.txt")


def run(command: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=ENDED_WITHIN_S,
        env=inherited_environment(**env),
        check=False,
    )


@pytest.fixture
def no_curl_is_no_fault():
    if shutil.which("curl") is None:
        pytest.skip("no curl on this machine")


@pytest.mark.usefixtures("no_curl_is_no_fault")
def test_curl_has_two_turns_and_sees_the_counters(server):
    before = server.stats()["prompts"]["counted"]
    done = run([str(EXAMPLES / "curl.sh")], URL=server.url, VLLM_API_KEY=KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r'"object":"chat.completion"', done.stdout)) == 2
    assert '"ram_hit"' in done.stdout.splitlines()[-1]
    assert server.stats()["prompts"]["counted"] == before + 2


@pytest.mark.usefixtures("no_curl_is_no_fault")
def test_curl_fails_where_the_server_refuses(server):
    done = run([str(EXAMPLES / "curl.sh")], URL=server.url, VLLM_API_KEY="wrong")
    assert done.returncode != 0
    assert "401" in done.stderr


def test_openai_conversations_come_back_from_ram(server, tmp_path):
    """Three documents of 480 tokens on VRAM for 1,280: when the first one's turn comes again, RAM has it."""
    for number, name in enumerate(DOCUMENTS):
        words = [f"w{10 + (number * 131 + place * place) % 490}" for place in range(480)]
        (tmp_path / name).write_text(" ".join(words))
    script = [sys.executable, str(EXAMPLES / "openai_sessions.py"), "--url", server.url, "--max-tokens", "8"]
    before = server.stats()["tokens"]
    done = run([*script, *(str(tmp_path / name) for name in DOCUMENTS)], OPENAI_API_KEY=KEY)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = re.findall(r"^(\S+), turn (\d): (\d+) tokens from VRAM, (\d+) from RAM, (\d+) computed", done.stdout, re.M)
    paths = [str(tmp_path / name) for name in DOCUMENTS]
    assert [(path, int(turn)) for path, turn, *_ in lines] == [(path, turn) for turn in (1, 2, 3) for path in paths]
    now = server.stats()["tokens"]
    for place, tier in ((2, "vram_hit"), (3, "ram_hit"), (4, "computed")):
        assert sum(int(line[place]) for line in lines) == now[tier] - before[tier], tier
    assert int(lines[3][3]) > 300, "RAM has most of the first document at its second turn"
