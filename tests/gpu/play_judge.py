"""Plain vLLM judges answers: how far each is from what it would have said itself; a process of its own.

    python -m tests.gpu.play_judge MODEL QUESTIONS.json OUT.json

QUESTIONS.json has the options of the engine that plays, "engine", and "questions" of "prompt" and "answer"; OUT.json
gets the worst gap of each (see `tests.near_ties`). Nothing is cached, so that all places of a prompt are computed.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

from tests.gpu.trial_engine import ENVIRONMENT
from tests.near_ties import Question, worst_gap


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="the model's folder")
    parser.add_argument("questions", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")  # quicker to start
    asked = json.loads(options.questions.read_text())
    questions = [Question(tuple(one["prompt"]), tuple(one["answer"])) for one in asked["questions"]]
    begin = time.perf_counter()
    gaps = gaps_of(options.model, asked["engine"], questions)
    judged = {"gaps": gaps, "seconds": round(time.perf_counter() - begin, 1)}
    options.out.write_text(json.dumps({"judged": judged}))


def gaps_of(model: str, engine: dict[str, Any], questions: list[Question]) -> list[float]:
    # vLLM is imported here and not before: `main` sets its environment first.
    from vllm import LLM, SamplingParams

    llm = LLM(model, **{**engine, "enable_prefix_caching": False})
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    # No more at once than the pool has room for: nobody is preempted.
    longest = -(-max(len(question.tokens) + 1 for question in questions) // engine["block_size"])
    at_once = max(1, (engine["num_gpu_blocks_override"] - 1) // longest)
    gaps = []
    for begin in range(0, len(questions), at_once):
        batch = questions[begin : begin + at_once]
        outputs = llm.generate([{"prompt_token_ids": one.tokens} for one in batch], params, use_tqdm=False)
        for question, output in zip(batch, outputs, strict=True):
            places = [
                None if place is None else {token: one.logprob for token, one in place.items()}
                for place in output.prompt_logprobs
            ]
            gaps.append(worst_gap(question, places))
    llm.llm_engine.engine_core.shutdown()
    return gaps


if __name__ == "__main__":
    main()
