"""What a large RAM cache costs at start, and how much memory it really takes.

    python benchmarks/start_up.py --json start_up.json
    python benchmarks/start_up.py --only pinned --pin-gb 5 17 70

starts   vLLM made with and without KVortex in turn, each in a fresh process; few layers, since their number is not
         what is measured. The first start warms files up and is not counted.
pinned   the host slab alone, in a fresh process a size: what the kernel accounts to the process while all of it is
         pinned, and after it was given back, against what was asked; and how long another thread of the process waits
         meanwhile to map memory, as the model's does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import mmap
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from dummy_engine import EngineOptions, add_engine_options, ask_all, engine_options, read_counters, save, start_engine

STATUS = ("VmRSS", "RssAnon", "VmLck", "VmPin")
SLOT_BYTES = 128 * 131072
"""A block of 128 tokens of the 8B shape."""
PIN_TIMEOUT_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("starts", "pinned"))
    parser.add_argument("--repeats", type=int, default=2, help="counted starts a mode")
    parser.add_argument("--pin-gb", type=float, nargs="+", default=[5, 17, 70])
    parser.add_argument("--timeout", type=float, default=120, help="seconds a process")
    parser.add_argument("--start", choices=("plain", "kvortex"), help=argparse.SUPPRESS)
    parser.add_argument("--pin", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--unpinned", action="store_true", help="without a GPU: pages are taken, not registered")
    add_engine_options(parser, EngineOptions(layers=4, vram_gb=4, max_model_len=8192))
    options = parser.parse_args()
    if options.start:
        asyncio.run(start(options))
    elif options.pin:
        pin(int(options.pin * 1e9), pageable=options.unpinned)
    else:
        measure(options)


# ---- parent --------------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    result: dict[str, Any] = {"options": {k: str(v) for k, v in vars(options).items()}, "starts": [], "pinned": []}
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    begin = time.monotonic()
    if options.only != "pinned":
        for number, mode in enumerate(["plain"] + ["kvortex", "plain"] * options.repeats):
            answer = child(["--start", mode], options)
            result["starts"].append({"mode": mode, "counted": number > 0, **answer})
            result["start_summary"] = start_summary(result["starts"])
            save(options.json, result)
            print(f"{time.monotonic() - begin:5.0f} s  start {mode}: {json.dumps(answer)}", flush=True)
    if options.only != "starts":
        for size in options.pin_gb:
            answer = child(["--pin", str(size)], options)
            result["pinned"].append(answer)
            save(options.json, result)
            print(f"{time.monotonic() - begin:5.0f} s  pinned {size:g} GB: {json.dumps(answer)}", flush=True)
    print(json.dumps(result.get("start_summary"), indent=1))


def child(order: Sequence[str], options: argparse.Namespace) -> dict[str, Any]:
    """Runs this file once more; what its RESULT line says, or how it failed."""
    command = [sys.executable, __file__, *sys.argv[1:], *order]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        text, _ = process.communicate(timeout=options.timeout)
    except subprocess.TimeoutExpired:
        text = f"not done after {options.timeout:g} s"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # its engine too
    lines = text.splitlines()
    answers = [line for line in lines if line.startswith("RESULT ")]
    answer: dict[str, Any] = json.loads(answers[-1][7:]) if answers else {"failed": lines[-20:]}
    return answer


def start_summary(starts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    seconds = {
        mode: [s["start_s"] for s in starts if s["mode"] == mode and s["counted"] and "start_s" in s]
        for mode in ("plain", "kvortex")
    }
    medians = {mode: statistics.median(values) for mode, values in seconds.items() if values}
    longer = round(medians["kvortex"] - medians["plain"], 2) if len(medians) == 2 else None
    return {"start_s": seconds, "median_s": medians, "kvortex_longer_s": longer}


# ---- one start -----------------------------------------------------------------------------------------------------


async def start(options: argparse.Namespace) -> None:
    """The seconds until the engine is made, until it has answered once, and until its memory no longer grows."""
    engine, start_s = start_engine(engine_options(options, {} if options.start == "kvortex" else None))
    begin = time.perf_counter()
    first = await ask_all(engine, [list(range(10, 400))], 4, 1)
    rss = engine_rss()
    while time.perf_counter() - begin < options.timeout / 2:
        await asyncio.sleep(1)
        before, rss = rss, engine_rss()
        if abs(rss - before) < 0.01 * rss:
            break
    counters = read_counters(engine)
    answer = {
        "start_s": round(start_s, 2),
        "first_answer_s": round(first.wall_s, 3),
        "rss_steady_after_s": round(time.perf_counter() - begin, 1),
        "engine_rss_bytes": rss,
        "ram_cache_bytes": counters["tiers"]["ram"]["capacity_bytes"] if counters else 0,
    }
    print("RESULT " + json.dumps(answer), flush=True)
    engine.shutdown()


def engine_rss() -> int:
    """Of the largest process below this one: the worker, which holds the slab."""
    children = psutil.Process().children(recursive=True)
    return max((int(process.memory_info().rss) for process in children), default=0)


# ---- one slab ------------------------------------------------------------------------------------------------------


def pin(asked: int, *, pageable: bool) -> None:
    from kvortex.transfer.pinned import PinnedSlab

    if pageable:
        registrar: Any = NoRegistrar()
    else:
        import torch

        from kvortex.transfer.cuda_driver import CudaDriver

        torch.zeros(1, device="cuda")
        registrar = CudaDriver(0)
    alone_ms = Neighbour().waits_ms(0.5)
    neighbour = Neighbour()
    before = accounts()
    begin = time.perf_counter()
    slab = PinnedSlab(asked // SLOT_BYTES, SLOT_BYTES, registrar)
    made_s = time.perf_counter() - begin
    all_pinned = slab.wait_pinned(PIN_TIMEOUT_S)
    pinned_s = time.perf_counter() - begin
    meanwhile_ms = neighbour.waits_ms()
    held = accounts()
    slab_bytes, pinned_bytes, refusal = slab.num_bytes, slab.pinned_bytes, slab.refusal
    is_pinned = [bool(slab.tensor[i].is_pinned()) for i in (0, slab.num_slots // 2, -1)] if not pageable else []
    begin = time.perf_counter()
    slab.close()
    close_s = time.perf_counter() - begin
    after = accounts()
    rss = held["VmRSS"] - before["VmRSS"]
    answer = {
        "asked_bytes": asked,
        "slab_bytes": slab_bytes,
        "pinned_bytes": pinned_bytes,
        "all_pinned": all_pinned,
        "first_middle_last_slot_pinned": is_pinned,
        "refusal": refusal,
        "usable_after_s": round(made_s, 3),
        "all_pinned_after_s": round(pinned_s, 2),
        "neighbour_maps_ms": {"alone": percentiles(alone_ms), "meanwhile": percentiles(meanwhile_ms)},
        "close_s": round(close_s, 2),
        "taken": {name: held[name] - before[name] for name in held},
        "left_after_close": {name: after[name] - before[name] for name in after},
        "rss_of_asked": round(rss / asked, 4),
        "within_5_percent": abs(rss - asked) <= 0.05 * asked,
    }
    print("RESULT " + json.dumps(answer), flush=True)


def accounts() -> dict[str, int]:
    """Bytes, as the kernel accounts them: to this process, and as pages pinned in all; what it does not say is left
    out. Which of them grows when a driver pins memory depends on the kernel and the driver; VmRSS always does."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name in STATUS:
            found[name] = int(rest.split()[0]) * 1024
    vmstat = Path("/proc/vmstat")
    pages = dict(line.split() for line in vmstat.read_text().splitlines()) if vmstat.exists() else {}
    if {"nr_foll_pin_acquired", "nr_foll_pin_released"} <= pages.keys():
        held = int(pages["nr_foll_pin_acquired"]) - int(pages["nr_foll_pin_released"])
        found["pages_pinned_in_all"] = held * os.sysconf("SC_PAGE_SIZE")
    return found


class Neighbour:
    """A thread that maps a MiB, touches it and gives it back, every millisecond."""

    def __init__(self) -> None:
        self._waits_ms: list[float] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._map)
        self._thread.start()

    def waits_ms(self, after_s: float = 0.0) -> list[float]:
        """What each took. Ends the thread."""
        time.sleep(after_s)
        self._ends.set()
        self._thread.join()
        return self._waits_ms

    def _map(self) -> None:
        while not self._ends.wait(0.001):
            begin = time.perf_counter()
            with mmap.mmap(-1, 1 << 20) as memory:
                memory[0] = 1
            self._waits_ms.append(1e3 * (time.perf_counter() - begin))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    return {f"p{share}": round(float(np.percentile(values, share)), 2) for share in (50, 99, 100)}


class NoRegistrar:
    """Registers nothing; for a machine without a GPU."""

    def enter_thread(self) -> None: ...

    def enter(self) -> None: ...

    def pin(self, address: int, num_bytes: int) -> None: ...

    def unpin(self, address: int) -> None: ...


if __name__ == "__main__":
    main()
