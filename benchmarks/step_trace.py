"""A server whose engine writes down what each step took, a line of JSON a step: `benchmarks/sessions.py --trace`.

    KVORTEX_STEP_TRACE=steps.jsonl python benchmarks/step_trace.py MODEL [options of vllm serve]

at_s       when the step was scheduled, Unix time
requests   in the step; tokens: computed by it; stores, step_loads, loads: blocks that KVortex ordered with it
host_ms    of the engine's thread: schedule, execute (submitting the kernels), sample, update (taking the output)
cpu_ms     of these, on a core; what is missing it waited, for the interpreter's lock, for a core or in the driver
switches   of cores: when it waited, and when its core was taken from it
gpu_ms     from the step's first kernel to its last, by events; none without a GPU
idle_ms    of the GPU before it, since the last step's end

One process (no tensor parallelism): events are of the engine's own device.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

FILE_VARIABLE = "KVORTEX_STEP_TRACE"


class StepTrace:
    """Wraps what an engine's step calls."""

    def __init__(self, path: Path) -> None:
        import torch

        self._torch = torch
        self._file = path.open("a", buffering=1, encoding="utf-8")  # vLLM may kill the engine's process at its end
        self._begun: deque[dict[str, Any]] = deque()
        self._last_end: Any = None

    def wrap(self, engine: Any) -> None:
        scheduler, executor = engine.scheduler, engine.model_executor
        for owner, name, part in (
            (scheduler, "schedule", "schedule"),
            (executor, "execute_model", "execute"),
            (executor, "sample_tokens", "sample"),
            (scheduler, "update_from_output", "update"),
        ):
            setattr(owner, name, self._timed(getattr(owner, name), part))

    def _timed(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if part == "execute" and self._begun and self._begun[-1]["tokens"]:
                self._begun[-1]["events"] = [self._event()]
            before = resource.getrusage(resource.RUSAGE_THREAD)
            begin, begin_cpu = time.perf_counter(), time.thread_time()
            result = call(*args, **kwargs)
            host_ms, cpu_ms = (time.perf_counter() - begin) * 1e3, (time.thread_time() - begin_cpu) * 1e3
            after = resource.getrusage(resource.RUSAGE_THREAD)
            if part == "schedule":
                self._begun.append(_row(result))
            # Steps overlap: an output that is taken is the oldest step's, all else the newest's.
            row = self._begun[0 if part == "update" else -1]
            row["host_ms"][part] = round(row["host_ms"].get(part, 0.0) + host_ms, 3)
            row["cpu_ms"][part] = round(row["cpu_ms"].get(part, 0.0) + cpu_ms, 3)
            row["switches"][0] += after.ru_nvcsw - before.ru_nvcsw
            row["switches"][1] += after.ru_nivcsw - before.ru_nivcsw
            if row["events"] and (part == "sample" or (part == "execute" and result is not None)):
                row["events"] = [row["events"][0], self._event()]
            if part == "update":
                self._end(self._begun.popleft())
            return result

        return timed

    def _event(self) -> Any:
        if not self._torch.cuda.is_available():
            return None
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _end(self, row: dict[str, Any]) -> None:
        """The step's output is there, so its kernels have run."""
        events = row.pop("events")
        if len(events) == 2 and None not in events:
            begin, end = events
            end.synchronize()
            row["gpu_ms"] = round(begin.elapsed_time(end), 3)
            if self._last_end is not None:
                row["idle_ms"] = round(self._last_end.elapsed_time(begin), 3)
            self._last_end = end
        self._file.write(json.dumps(row) + "\n")


def _row(scheduled: Any) -> dict[str, Any]:
    plan = getattr(scheduled.kv_connector_metadata, "plan", None)
    orders = {"stores": (), "step_loads": (), "loads": ()}
    if plan is not None:
        orders = {"stores": plan.stores, "step_loads": plan.step_loads, "loads": [*plan.loads, *plan.prefetches]}
    return {
        "at_s": round(time.time(), 4),
        "requests": len(scheduled.num_scheduled_tokens),
        "tokens": scheduled.total_num_scheduled_tokens,
        **{name: sum(len(order.slots) for order in some) for name, some in orders.items()},
        "host_ms": {},
        "cpu_ms": {},
        "switches": [0, 0],
        "events": [],
    }


def trace_engines(path: Path) -> None:
    """Every engine made in this process from now on is traced."""
    from vllm.v1.engine.core import EngineCore

    init = EngineCore.__init__

    def traced(engine: Any, *args: Any, **kwargs: Any) -> None:
        init(engine, *args, **kwargs)
        StepTrace(path).wrap(engine)

    EngineCore.__init__ = traced  # type: ignore[method-assign]


# The engine's process is spawned, so it imports this module anew, under this name.
if __name__ == "__mp_main__" and (file := os.environ.get(FILE_VARIABLE)):
    trace_engines(Path(file))

if __name__ == "__main__":
    from kvortex.vllm_plugin.server import main

    main(sys.argv[1:])
