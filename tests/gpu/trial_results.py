"""Runs the processes that play the trials, and reads what they wrote."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

PROCESS_TIMEOUT_S = 240


def run_process(module: str, arguments: Sequence[str], out: Path) -> dict[str, Any]:
    """What the process wrote to `out`, all of it or, with "ending" saying why, the parts it came to."""
    out.unlink(missing_ok=True)
    log = out.with_suffix(".log")
    with log.open("w") as file:
        try:
            code = subprocess.run(
                [sys.executable, "-m", module, *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=PROCESS_TIMEOUT_S,
                check=False,
            ).returncode
            ending = "" if code == 0 else f"it ended with {code}"
        except subprocess.TimeoutExpired:
            ending = f"it was not done after {PROCESS_TIMEOUT_S} s"
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    if ending:
        result["ending"] = f"{ending}:\n" + "\n".join(log.read_text().splitlines()[-40:])
    return result


class Results:
    """What each mode's process wrote; played when first asked for.

    Args:
        run: plays one mode.
        modes: all of them. With KVORTEX_TRIALS_AT_ONCE=1 they are played at the same time, on a machine with cores
            enough: quick, but then the times in the results say nothing.
    """

    def __init__(self, run: Callable[[str], dict[str, Any]], modes: Sequence[str]) -> None:
        self._run = run
        self._modes = modes if os.environ.get("KVORTEX_TRIALS_AT_ONCE") == "1" else ()
        self._played: dict[str, dict[str, Any]] = {}

    def __call__(self, mode: str) -> dict[str, Any]:
        if mode not in self._played and self._modes:
            with ThreadPoolExecutor(len(self._modes)) as pool:
                self._played.update(zip(self._modes, pool.map(self._run, self._modes), strict=True))
        elif mode not in self._played:
            self._played[mode] = self._run(mode)
        return self._played[mode]


def part_of(result: dict[str, Any], name: str) -> dict[str, Any]:
    """Fails where the engine did not come so far."""
    assert name in result, f"{name!r} was not played: {result.get('ending')}"
    part: dict[str, Any] = result[name]
    return part


def grown(part: dict[str, Any], *path: str) -> int:
    """By how much a counter grew in a part."""
    before, after = part["before"], part["after"]
    for name in path:
        before, after = before[name], after[name]
    return int(after - before)


def check_at_rest(part: dict[str, Any]) -> None:
    """Every copy was answered once, none failed, nothing is held."""
    after = part["after"]
    assert after["load"]["in_flight"] == after["store"]["in_flight"] == 0
    assert after["tiers"]["ram"]["pinned_blocks"] == 0
    assert after["ignored_answers"] == 0, "a copy was answered twice"
    assert after["failures"] == {"store": 0, "load": 0, "recomputed_tokens": 0}


def check_bytes(part: dict[str, Any], *, exact: bool) -> None:
    """Every copy that the counters tell of was watched, none brought wrong bytes, none is filed under a wrong key.

    Args:
        exact: VRAM and RAM hold the same bytes even where VRAM computed a block again after RAM got its copy. Else only
            blocks are compared that no kernel wrote since a copy filled them, or was made from them.
    """
    loaded = grown(part, "load", "blocks")
    assert loaded > 0, "nothing was loaded: the trial is void"
    assert grown(part, "watched", "loaded") == loaded
    assert grown(part, "watched", "wrong") == 0, "loaded blocks are not what was stored"
    clean = part["clean"]
    print(f"VRAM and RAM hold {clean['blocks']} blocks both, {clean['copied']} of them by a copy alone")
    assert clean["misfiled"] == 0, "vLLM has blocks under other keys than KVortex"
    assert clean["copied"] > 0
    assert clean["copied_unequal"] == 0, "VRAM and RAM hold different bytes under one key"
    assert not exact or clean["unequal"] == 0, "VRAM and RAM hold different bytes under one key"
