"""Conversations over real text with a real model, whose KV outgrows VRAM many times; a process of its own.

    python -m tests.gpu.play_real_model MODE MODEL OUT.json [--history PLAIN.json] [--device cpu]

Plain vLLM plays its own conversations, and then the same prompts again in another order: how far it agrees with itself
is how far text can be trusted. The other modes are asked exactly those prompts, its answers included (--history).
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.gpu.trial_engine import Trial, play, trial_engine, trial_options

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Size:
    """Lengths in tokens; `pool` in blocks of `block` tokens."""

    block: int
    pool: int
    ram_bytes: int
    conversations: int
    turns: int
    first: int
    add: int
    answer: int
    at_once: int
    """Requests of more than the pool holds: some are preempted."""


GPU = Size(16, 2048, 4 * 10**9, conversations=96, turns=6, first=700, add=60, answer=48, at_once=32)
CPU = Size(32, 40, 10**9, conversations=16, turns=3, first=200, add=30, answer=12, at_once=6)

Turns = list[list[list[int]]]
"""[turn][conversation] -> token ids."""


def main() -> None:
    parser = trial_options(__doc__)
    parser.add_argument("--history", type=Path, help="what mode plain wrote")
    options = parser.parse_args()
    size = GPU if options.device == "cuda" else CPU
    text = project_tokens(Path(options.model))
    with trial_engine(
        options,
        block=size.block,
        pool=size.pool,
        ram_bytes=size.ram_bytes,
        kv_cache_memory_bytes=2 * 10**9 if options.device == "cuda" else 10**8,
        max_num_seqs=size.at_once,
        max_num_batched_tokens=8192 if options.device == "cuda" else 512,
        max_model_len=2048 if options.device == "cuda" else 512,
    ) as trial:
        if options.mode == "plain":
            said: Turns = []
            trial.part("own", lambda: own_conversations(trial, size, text, said))
            trial.part("again", lambda: asked_again(trial, size, text, said, size.turns))
        else:
            said = json.loads(options.history.read_text())["own"]["answers"]
            turns = 2 if options.mode == "zeros" else size.turns
            trial.part("again", lambda: asked_again(trial, size, text, said, turns))


def project_tokens(model: Path) -> list[int]:
    """Real text: what this project says about itself, and its code."""
    from tokenizers import Tokenizer

    files = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/*.md")), *sorted(ROOT.glob("kvortex/**/*.py"))]
    text = "\n".join(file.read_text() for file in files)
    return list(Tokenizer.from_file(str(model / "tokenizer.json")).encode(text).ids)


def prompts_of(size: Size, text: list[int], said: Turns, turn: int) -> list[list[int]]:
    """A conversation is a stretch of the text; what was said stands between the parts of it that turns add."""
    stretch = size.first + size.turns * size.add
    step = (len(text) - stretch) // size.conversations
    assert step > 0, f"{len(text)} tokens are too few"
    prompts = []
    for number in range(size.conversations):
        begin = number * step
        prompt = text[begin : begin + size.first]
        for earlier in range(turn):
            at = begin + size.first + earlier * size.add
            prompt = prompt + said[earlier][number] + text[at : at + size.add]
        prompts.append(prompt)
    return prompts


def own_conversations(trial: Trial, size: Size, text: list[int], said: Turns) -> dict[str, Any]:
    for turn in range(size.turns):
        played = play(trial.vllm, prompts_of(size, text, said, turn), size.answer, size.at_once)
        said.append([list(answer) for answer in played.answers])
    return {"answers": said}


def asked_again(trial: Trial, size: Size, text: list[int], said: Turns, turns: int) -> dict[str, Any]:
    """The same prompts, turn after turn, in another order."""
    answers: Turns = []
    asked: Turns = []
    for turn in range(turns):
        order = list(range(size.conversations))
        random.Random(turn).shuffle(order)
        prompts = prompts_of(size, text, said, turn)
        asked.append(prompts)
        played = play(trial.vllm, [prompts[i] for i in order], size.answer, size.at_once)
        by_number = dict(zip(order, played.answers, strict=True))
        answers.append([list(by_number[i]) for i in range(size.conversations)])
    return {"prompts": asked, "answers": answers}


if __name__ == "__main__":
    main()
