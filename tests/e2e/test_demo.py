"""`make demo`, as a stranger runs it: two real servers, a real small model, real conversations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server import inherited_environment

ROOT = Path(__file__).parents[2]
MODEL = ROOT / ".models/SmolLM2-135M-Instruct"


@pytest.mark.timeout(2000)
@pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="the demo model is made by `make test` or `make demo`")
def test_the_demo_shows_conversations_that_come_back_from_ram(tmp_path):
    data = tmp_path / "demo.json"
    ended = subprocess.run(
        [sys.executable, "examples/demo.py", str(MODEL)],
        cwd=ROOT,
        env=inherited_environment(DEMO_JSON=str(data), VLLM_LOGGING_LEVEL="INFO"),
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    document = json.loads(data.read_text())
    turns = document["turns"]
    assert len({turn["conversation"] for turn in turns}) >= 3
    assert max(turn["turn"] for turn in turns) >= 3
    for turn in turns:
        assert turn["vram_hit"] + turn["ram_hit"] + turn["computed"] == turn["prompt_tokens"]
        assert turn["text"] == turn["text_none"]
        assert (turn["ram_hit"] > 0) == (turn["turn"] > 1)
    tokens = document["stats"]["tokens"]
    assert tokens["vram_hit"] + tokens["ram_hit"] + tokens["computed"] == tokens["queried"]
    assert "from RAM" in ended.stdout, "inspect's table"
