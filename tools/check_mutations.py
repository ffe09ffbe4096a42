"""Breaks each invariant of docs/invariants.md in a copy of the source, one way at a time; some test must fail.

    python tools/check_mutations.py            all of them, some minutes; a Markdown table on stdout
    python tools/check_mutations.py 3          those of invariant 3

Exits 1 if a mutation was missed, or if its tests fail without it.
"""

# ruff: noqa: E501 - a mutation is a line, however long

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).parents[1]


class Mutation(NamedTuple):
    """Of one invariant: `old` stands in `file` once, and `tests` must fail when it is `new`."""

    invariant: int
    what: str
    file: str
    old: str
    new: str
    tests: str


SIM: Final = "tests/unit/vllm_plugin/test_sim_engine.py"
SIM_STORES: Final = "tests/unit/vllm_plugin/test_sim_stores.py"
JOBS: Final = "tests/unit/vllm_plugin/test_jobs.py"
INDEX: Final = "tests/unit/cache/test_index.py"
PLUGIN: Final = "kvortex/vllm_plugin"

# fmt: off
MUTATIONS: Final = (
    Mutation(1, "a key is a part of the hash", "kvortex/keys.py", "return BlockKey(block_hash + group.to_bytes(", "return BlockKey(bytes(len(block_hash) - 2) + block_hash[-2:] + group.to_bytes(", "tests/unit/test_keys.py"),
    Mutation(1, "a hit is one block off", "kvortex/cache/prefix.py", "slots[group.group_id] = dict(enumerate(found, start))", "slots[group.group_id] = dict(enumerate(found, start + 1))", "tests/unit/cache/test_prefix.py"),
    Mutation(1, "a block that went to others while it was copied is kept", f"{PLUGIN}/jobs.py", "job.lost.add(entry[1])", "pass", JOBS),
    Mutation(2, "one rank's answer publishes a block", f"{PLUGIN}/jobs.py", "job.waiting_ranks.remove(rank)", "job.waiting_ranks.clear()", JOBS),
    Mutation(2, "a key is found while it is written", "kvortex/cache/index.py", "self._writing.update(zip(keys, slots, strict=True))", "self._ready.add(keys, slots)", INDEX),
    Mutation(2, "an evicted key is still found", "kvortex/cache/index.py", "self._ready.remove(evicted)", "pass", INDEX),
    Mutation(3, "a store does not wait for its step's kernels", f"{PLUGIN}/step_log.py", "return self.number + 1", "return self.number", f"{SIM_STORES} -k store_reads"),
    Mutation(3, "a store waits for the step before the one that wrote its blocks", f"{PLUGIN}/step_log.py", "if completion < completions:", "if completion < completions + 8:", "tests/unit/vllm_plugin/test_step_log.py"),
    Mutation(3, "a load does not wait for promised loads into its blocks", f"{PLUGIN}/worker.py", "self._before_kernels = self.engine.fence() if loads else None", "self._before_kernels = type(self.engine.fence())(self.engine, self.engine.submitted - len(needed)) if loads else None", f"{SIM} -k overtake"),
    Mutation(3, "nobody waits for a promised load that failed elsewhere", f"{PLUGIN}/jobs.py", "self._need(job.job_id)  #", "pass  #", f"{SIM} -k one_rank_promised"),
    Mutation(4, "a pin outlives its load", f"{PLUGIN}/copy_ends.py", "self._index.unpin(job.slots)", "pass", f"{SIM} -k failed_load"),
    Mutation(4, "the policy may give up pinned slots", "kvortex/cache/index.py", "self._policy.blocked(first)", "pass", INDEX),
    Mutation(5, "a refused reservation has evicted", "kvortex/cache/index.py", "        if count > room:\n", "        if count > room:\n            self._evict(self.evictable)\n", INDEX),
    Mutation(6, "a failed store is published", f"{PLUGIN}/copy_ends.py", "            self._index.abandon(job.slots)\n", "            self._index.publish(job.slots)\n", f"{SIM} -k failed_store"),
    Mutation(6, "vLLM is not told that a load failed", f"{PLUGIN}/worker.py", "self._invalid_blocks.update(order.gpu_blocks.tolist())", "pass", f"{SIM} -k failed_load"),
    Mutation(7, "a store without an answer is never given up", f"{PLUGIN}/jobs.py", "if deadline > now:", "if True:", JOBS),
    Mutation(7, "an order has no deadline", "kvortex/transfer/queue.py", "if job.is_late(now_s):", "if False:", "tests/unit/transfer/test_queue.py"),
    Mutation(7, "the first in line waits for ever", "kvortex/cache/gate.py", "if now_s - self._first_since < MAX_WAIT_S:", "if True:", "tests/unit/cache/test_gate.py"),
    Mutation(7, "ended jobs are kept", f"{PLUGIN}/jobs.py", "del self._jobs[result.job_id]", "pass", JOBS),
    Mutation(8, "a load is chosen although computing is quicker", "kvortex/cache/load_choice.py", "if computed_s is None:", "if True:", "tests/unit/cache/test_load_choice.py"),
    Mutation(8, "a load makes others' steps longer", "kvortex/cache/load_choice.py", "if num_running == 0:", "if True:", "tests/unit/cache/test_load_choice.py"),
    Mutation(8, "stores go before loads", "kvortex/transfer/queue.py", "(self._waiting[Direction.LOAD], self._waiting[Direction.STORE])", "(self._waiting[Direction.STORE], self._waiting[Direction.LOAD])", "tests/unit/transfer/test_queue.py"),
    Mutation(9, "blocks that RAM has no room for are not counted", f"{PLUGIN}/scheduler.py", "self._ledger.refused[Refusal.RAM_PINNED] += decision.refused", "pass", f"{SIM} -k pinned"),
    Mutation(9, "failed loads are not counted", f"{PLUGIN}/copy_ends.py", "            self._ledger.load_failures += len(job.gpu_blocks)\n            if state is not None:", "            if state is not None:", f"{SIM} -k failed_load"),
    Mutation(9, "an answer that comes twice is not counted", f"{PLUGIN}/jobs.py", "self.ignored_answers += 1", "pass", JOBS),
    Mutation(10, "each rank takes all of the RAM", f"{PLUGIN}/setup.py", "num_slots = settings.ram_cache_size // least", "num_slots = settings.ram_cache_size // rank_block_bytes", f"{SIM} -k configuration_says"),
    Mutation(10, "the slab is not given back", "kvortex/transfer/slab.py", "self._memory.madvise(mmap.MADV_DONTNEED)", "pass", "tests/unit/transfer/test_slab.py"),
)
# fmt: on

TIMEOUT_S: Final = 600.0


def main(numbers: Iterable[int]) -> int:
    wanted = set(numbers)
    mutations = [m for m in MUTATIONS if not wanted or m.invariant in wanted]
    unsound = [file for file in sorted({m.tests.split()[0] for m in mutations}) if failed(file, ROOT)]
    for file in unsound:
        print(f"fails without any mutation: {file}", file=sys.stderr)
    print("| invariant | broken | in | caught by |\n| --- | --- | --- | --- |")
    missed = 0
    for mutation in mutations:
        caught = mutation.tests.split()[0] not in unsound and is_caught(mutation)
        missed += not caught
        by = mutation.tests.replace("tests/", "", 1) if caught else f"**missed** by {mutation.tests}"
        print(f"| {mutation.invariant} | {mutation.what} | {mutation.file} | {by} |", flush=True)
    return int(bool(missed or unsound))


def is_caught(mutation: Mutation) -> bool:
    with tempfile.TemporaryDirectory(prefix="kvortex-mutation-") as name:
        copy = Path(name)
        for part in ("kvortex", "kvortex_cli", "tests"):
            shutil.copytree(ROOT / part, copy / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        path = copy / mutation.file
        path.write_text(mutated(path.read_text(), mutation))
        return failed(mutation.tests, copy)


def mutated(source: str, mutation: Mutation) -> str:
    count = source.count(mutation.old)
    assert count == 1, f"{mutation.old!r} is {count} times in {mutation.file}"
    return source.replace(mutation.old, mutation.new)


def failed(tests: str, folder: Path) -> bool:
    """Whether a test failed. A run that tested nothing, or could not begin, is an error of this list."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ended = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode in (0, 1), ended.stdout + ended.stderr
    assert " skipped" not in ended.stdout, ended.stdout
    return ended.returncode == 1


if __name__ == "__main__":
    sys.exit(main(int(number) for number in sys.argv[1:]))
