"""An engine in its caller's process is put to sleep between two steps: by then no copy may be under way.

vLLM takes the KV memory away, and on a GPU (tests/gpu/test_sleep.py) a copy from there ends the process.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from unittest.mock import patch

import pytest

from kvortex.transfer.cpu import CpuCopyEngine, HostMover
from tests.e2e.engine import WRITE_THROUGH, engine, prompt
from tests.fakes.copy_engines import GatedMover

PROMPT = prompt(1, 600)


@pytest.mark.parametrize("is_awaited", [True, False], ids=["as it is", "negative control"])
def test_no_copy_is_under_way_when_vllm_takes_the_memory(tiny_llama: str, is_awaited: bool) -> None:
    movers: list[GatedMover] = []
    copiers: list[CpuCopyEngine] = []

    def make_gated(layout, slab) -> CpuCopyEngine:
        movers.append(GatedMover(HostMover(layout, slab)))
        copiers.append(CpuCopyEngine(layout, slab, 2, mover=movers[0]))
        return copiers[0]

    unheeded = patch("kvortex.vllm_plugin.connector.settle_workers", return_value=True)
    with engine(tiny_llama, WRITE_THROUGH, make_engine=make_gated) as vllm:
        right = vllm.ask(PROMPT)
        under_way = copiers[0]._queue._jobs
        assert under_way, "nobody waits for stores"
        at_sleep: list[int] = []
        opener = threading.Timer(0.5, movers[0].open)
        opener.start()
        with (
            nullcontext() if is_awaited else unheeded,
            patch.object(vllm.core.model_executor, "sleep", lambda level: at_sleep.append(len(under_way))),
        ):
            vllm.llm.sleep(level=1)
        assert (at_sleep == [0]) is is_awaited
        opener.join()
        vllm.core.resume_scheduler()
        assert vllm.ask(PROMPT) == right
        vllm.settle()
        assert vllm.stats()["failures"]["store"] == 0
