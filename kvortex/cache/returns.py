"""Whether prompts come back at all: which share of what they asked for lately was there already."""

from __future__ import annotations

import math
from typing import Final

AT_FIRST: Final = 0.5
"""The share before anything is known: gone to a tenth of it when VRAM has been asked for 2.3 times over, in vain."""


class Returns:
    """Forgets as VRAM does: what was asked for a VRAM of tokens ago counts a third.

    EngineCore process, scheduler thread.

    Args:
        vram_tokens: that VRAM holds.
    """

    def __init__(self, vram_tokens: int) -> None:
        assert vram_tokens > 0, vram_tokens
        self._vram_tokens = vram_tokens
        self._found = AT_FIRST * vram_tokens
        self._asked = float(vram_tokens)

    def saw(self, found: int, asked: int) -> None:
        """A prompt of `asked` tokens, `found` of them in VRAM or RAM, asks for the first time."""
        kept = math.exp(-asked / self._vram_tokens)
        self._found = kept * self._found + found
        self._asked = kept * self._asked + asked

    @property
    def share(self) -> float:
        """Of the tokens asked for lately, those found."""
        return self._found / self._asked
