"""Right answers to a trial's prompts: plain vLLM's, and those that it finds as likely as its own."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from tests.gpu.trial_results import part_of, run_process
from tests.near_ties import Judge, Question, Verdict, check_control, tolerance_of

Tokens = Sequence[int]
Run = Sequence[Tokens | None]
"""An answer for each prompt, None for one that was not asked."""


class JudgeProcess:
    """Plain vLLM in a process of its own, each time that it is asked something new.

    Args:
        plain: what mode plain wrote, for the options of its engine.
        folder: keeps questions and gaps.
    """

    def __init__(self, model: str, plain: Callable[[], dict[str, Any]], folder: Path, name: str) -> None:
        self._model = model
        self._plain = plain
        self._files = (folder / f"{name}-judge-{number}" for number in count())
        self._known: dict[Question, float] = {}

    def __call__(self, questions: Sequence[Question]) -> list[float]:
        new = [question for question in dict.fromkeys(questions) if question not in self._known]
        if new:
            file = next(self._files)
            asked, out = file.with_suffix(".questions.json"), file.with_suffix(".json")
            engine = part_of(self._plain(), "start")["engine"]
            lines = [{"prompt": question.prompt, "answer": question.answer} for question in new]
            asked.write_text(json.dumps({"engine": engine, "questions": lines}))
            judged = part_of(run_process("tests.gpu.play_judge", [self._model, str(asked), str(out)], out), "judged")
            self._known.update(zip(new, judged["gaps"], strict=True))
        return [self._known[question] for question in questions]


class Oracle:
    """Judges answers to some prompts by one tolerance, that of plain vLLM's disagreements about them.

    Args:
        runs: plain vLLM's answers to the prompts, two runs or more, in other orders or at other concurrency.
        exact: nothing else is right: plain vLLM agrees with itself here, as its CPU build does.
    """

    def __init__(self, prompts: Sequence[Tokens], runs: Sequence[Run], judge: Judge, *, exact: bool) -> None:
        assert len(runs) > 1, "one run says nothing about another"
        self._prompts = [tuple(prompt) for prompt in prompts]
        self._right = [
            {tuple(answer) for answer in answers if answer is not None} for answers in zip(*runs, strict=True)
        ]
        self._judge = judge
        self._exact = exact
        # Where it disagrees with itself.
        self._own = [question for i, said in enumerate(self._right) if len(said) > 1 for question in self._asked(i)]
        unsure = sum(len(said) > 1 for said in self._right)
        print(f"plain vLLM disagrees with itself about {unsure} of {len(prompts)} prompts")
        assert not exact or unsure <= 0.05 * len(prompts), "plain vLLM should agree with itself here"

    def verdict(self, runs: Sequence[Run]) -> Verdict:
        compared, differing, unlike = 0, [], 0
        for run in runs:
            for prompt, right, said in zip(self._prompts, self._right, run, strict=True):
                if said is None:
                    continue
                compared += 1
                if len(said) not in {len(answer) for answer in right}:
                    unlike += 1
                elif tuple(said) not in right:
                    differing.append(Question(prompt, tuple(said)))
        gaps = self._judge([*self._own, *differing]) if differing else []
        tolerance = tolerance_of(gaps[: len(self._own)] if differing else self._judge(self._own))
        verdict = Verdict((*gaps[len(self._own) :], *[math.inf] * unlike), compared, tolerance)
        print(verdict)
        return verdict

    def check(self, runs: Sequence[Run]) -> None:
        """Every prompt was answered, and no answer is wrong."""
        assert all(answer is not None for run in runs for answer in run), "answers are missing"
        verdict = self.verdict(runs)
        assert not verdict.wrong, f"wrong answers: {verdict}"
        assert not (self._exact and verdict.gaps), f"answers differ where none should: {verdict}"

    def check_spoiled(self, runs: Sequence[Run]) -> None:
        """The negative control: most of these answers are wrong, and far from right."""
        check_control(self.verdict(runs))

    def check_own(self) -> None:
        """The positive control: none of plain vLLM's answers is judged wrong, those that it always gives included."""
        all_own = [question for i in range(len(self._prompts)) for question in self._asked(i)]
        gaps = self._judge(all_own)
        verdict = Verdict(tuple(gaps), len(gaps), tolerance_of(self._judge(self._own)))
        print(f"plain vLLM's own: {len(gaps)} answers, worst gap {max(gaps):.3f}; tolerance {verdict.tolerance:.3f}")
        assert not verdict.wrong, f"plain vLLM finds answers of its own wrong: {verdict}"

    def _asked(self, number: int) -> list[Question]:
        return [Question(self._prompts[number], answer) for answer in sorted(self._right[number])]
