"""Says in words whether the cache is helping and, if not, why: from the counters of `/kvortex/stats` alone.

Works on one document, or on the difference of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from kvortex.cache.misses import Miss

WORTH_SAYING: Final = 0.01
"""Share of the tokens below which a source or a reason is not what decides."""

Stats = Mapping[str, Any]

WORDS: Final[Mapping[Miss, str]] = {
    Miss.NEW_PROMPT: "prompt never seen",
    Miss.SALT: "prompt never seen, with a salt",
    Miss.NEW_TAIL: "new text of a prompt",
    Miss.EVICTED: "given up by RAM",
    Miss.NOT_STORED: "lost before it was copied",
    Miss.LAST_BLOCK: "last, unfinished block",
    Miss.UNUSABLE: "held, but not what is before",
    Miss.LOAD_FAILED: "load failed",
    Miss.QUICKER_COMPUTED: "computing is faster",
    Miss.NOT_ASKED: "request wants no cache",
}
"""A reason in a table's cell."""


class State(Enum):
    """What the cache is to its user."""

    NO_TRAFFIC = "no_traffic"
    HELPING = "helping"
    VRAM_SUFFICES = "vram_suffices"
    NOTHING_REPEATS = "nothing_repeats"
    NOT_HELPING = "not_helping"


@dataclass(frozen=True, slots=True)
class Reason:
    """Why some tokens were computed: `tokens` of them, `share` of all that were, 0 to 1."""

    miss: Miss
    tokens: int
    share: float
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """A sentence, and the reasons behind what was computed: the largest first, small ones left out."""

    state: State
    text: str
    reasons: tuple[Reason, ...]

    def as_dict(self) -> dict[str, Any]:
        """The `verdict` of `/kvortex/stats`."""
        reasons = [
            {"reason": r.miss.value, "tokens": r.tokens, "share": round(r.share, 4), "text": r.text}
            for r in self.reasons
        ]
        return {"state": self.state.value, "text": self.text, "reasons": reasons}


def judge(stats: Stats) -> Verdict:
    """Whether the cache is helping, by the document of `/kvortex/stats`."""
    tokens = stats["tokens"]
    queried, computed = tokens["queried"], tokens["computed"]
    if queried == 0:
        return Verdict(State.NO_TRAFFIC, "No prompt has been asked of the cache yet.", ())
    missed = {miss: stats["missed"][miss.value] for miss in Miss}
    reasons = tuple(
        Reason(miss, count, count / computed, _TEXTS[miss](stats))
        for miss, count in sorted(missed.items(), key=lambda item: -item[1])
        if count >= WORTH_SAYING * computed and count
    )
    state = _state(tokens, sum(missed[miss] for miss in _LOST))
    return Verdict(state, _sentence(state, stats, reasons), reasons)


_LOST: Final = (Miss.EVICTED, Miss.NOT_STORED, Miss.UNUSABLE, Miss.LOAD_FAILED, Miss.QUICKER_COMPUTED)
"""Tokens in blocks that were seen before: a better cache could have given these."""


def _state(tokens: Stats, lost: int) -> State:
    least = WORTH_SAYING * tokens["queried"]
    if tokens["ram_hit"] >= least:
        return State.HELPING
    if lost >= least:
        return State.NOT_HELPING
    return State.VRAM_SUFFICES if tokens["vram_hit"] >= least else State.NOTHING_REPEATS


def _sentence(state: State, stats: Stats, reasons: tuple[Reason, ...]) -> str:
    tokens = stats["tokens"]
    queried = tokens["queried"]
    from_ram, from_vram = tokens["ram_hit"] / queried, tokens["vram_hit"] / queried
    given = f"Of {queried:,} prompt tokens RAM gave {from_ram:.1%} and VRAM {from_vram:.1%}"
    if state is State.HELPING:
        endless = max(stats["prompts"]["seen_tokens"] / queried, from_ram + from_vram)
        return f"The cache is helping. {given}; a cache without limit would have given {endless:.1%} in all."
    if state is State.VRAM_SUFFICES:
        return f"RAM is not needed for this load: VRAM still held what was asked again. {given}."
    if state is State.NOTHING_REPEATS:
        return f"The cache cannot help with this load: almost nothing was asked twice. {given}."
    main = next(reason for reason in reasons if reason.miss in _LOST)
    return f"The cache is not helping. {given}; {main.tokens:,} tokens {main.text}."


def _of_evicted(stats: Stats) -> str:
    ram = stats["tiers"]["ram"]
    return (
        f"were in RAM and were given up: it has room for {ram['capacity_blocks']:,} blocks and gave up "
        f"{stats['evicted']['ram_blocks']:,}; raise kv_cache.ram_cache_size"
    )


def _of_new_prompt(stats: Stats) -> str:
    prompts = stats["prompts"]
    return (
        f"belong to prompts of which not even the first block ({stats['block_size']} tokens) was seen before "
        f"({prompts['new']:,} of {prompts['counted']:,} prompts): one-off traffic, or a date, a name or an id at their "
        "start makes them differ"
    )


def _of_new_tail(stats: Stats) -> str:
    prompts = stats["prompts"]
    continued = prompts["counted"] - prompts["new"]
    where = f" at token {prompts['seen_tokens'] / continued:,.0f} on average" if continued else ""
    return f"are new text: prompts that begin like earlier ones first differ{where}"


def _of_last_block(stats: Stats) -> str:
    return (
        "stand behind the last whole block of their prompt and are always computed: up to "
        f"{stats['block_size']} a prompt; a smaller kv_cache.block_size makes them fewer"
    )


def _always(text: str) -> Callable[[Stats], str]:
    return lambda _: text


_TEXTS: Final[Mapping[Miss, Callable[[Stats], str]]] = {
    Miss.EVICTED: _of_evicted,
    Miss.NEW_PROMPT: _of_new_prompt,
    Miss.NEW_TAIL: _of_new_tail,
    Miss.LAST_BLOCK: _of_last_block,
    Miss.SALT: _always("belong to prompts with a cache_salt of their own: such prompts share with the same salt only"),
    Miss.NOT_STORED: _always(
        "were in blocks that VRAM took before they were copied; lower kv_cache.offload_threshold, 0 copies all at once"
    ),
    Miss.UNUSABLE: _always("are in blocks that are held, but what comes before them in the prompt is not"),
    Miss.LOAD_FAILED: _always("were in RAM and their load failed; the server's log says why"),
    Miss.QUICKER_COMPUTED: _always("were in RAM, and computing them was expected to take less time than loading"),
    Miss.NOT_ASKED: _always("belong to requests that must not use cached blocks, such as those for prompt_logprobs"),
}
