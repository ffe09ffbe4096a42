"""Plays the trials on one engine; a process of its own.

python -m tests.gpu.play_trials MODE MODEL OUT.json [--device cpu]
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch

from tests.gpu.trial_engine import Trial, trial_engine, trial_options


def main() -> None:
    options = trial_options(__doc__).parse_args()
    # vLLM is imported here and not before: trial_engine sets its environment first.
    from tests.gpu.trial_sizes import CPU, GPU

    size = GPU if options.device == "cuda" else CPU
    with trial_engine(
        options,
        block=size.block,
        pool=size.pool,
        ram_bytes=400 * 10**6,
        max_num_seqs=size.seqs,
        max_num_batched_tokens=8192 if options.device == "cuda" else 1024,
        max_model_len=(size.pool - 4) * size.block,
        hf_overrides={"max_position_embeddings": 1 << 16},
    ) as trial:
        play_all(trial, size)


def play_all(trial: Trial, size: Any) -> None:
    """The trials that a mode plays, in order."""
    from tests.gpu import trial_loads as loads

    vllm, mode = trial.vllm, trial.mode
    trial.part("same", lambda: loads.same_prompts(vllm, size, 2 if mode == "zeros" else None))
    runs = 2 if mode == "plain" else 1  # plain vLLM has to agree with itself
    trial.part("pressure", lambda: loads.under_pressure(vllm, size, runs))
    if mode == "zeros":
        trial.watch.loses_loads = True
        with loads_before_steps():  # one that goes with its step cannot be lost
            trial.write("stall", {"seen": loads.stalls(vllm, size)})
        return
    if mode != "defaults":
        trial.part("returns", lambda: loads.returning_sessions(vllm, size, runs))
        trial.part("shared", lambda: loads.shared_prefix(vllm, size, 1).figures())
    if mode == "through":
        trial.part("convoy", lambda: convoy(trial, size))
    trial.part("fresh", lambda: loads.fresh_prompts(vllm, size, 2).figures())


def convoy(trial: Trial, size: Any) -> dict[str, Any]:
    """The control of "shared": nobody waits for another's load of the same blocks."""
    from kvortex.vllm_plugin.jobs import JobBook
    from tests.gpu import trial_loads as loads

    # Requests of one step share what goes with it.
    with loads_before_steps(), patch.object(JobBook, "loading", lambda book, key: False):
        return loads.shared_prefix(trial.vllm, size, 2).figures()


def loads_before_steps() -> AbstractContextManager[object]:
    from kvortex.cache.load_choice import LoadChoice, Way

    return patch.object(LoadChoice, "way", lambda *_, **__: Way.BEFORE_STEP)


if __name__ == "__main__":
    main()
