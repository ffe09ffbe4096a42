"""torch's allocator option that vLLM refuses beside a KV connector, unless its own cumem allocator holds the KV."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

_EXPANDABLE: Final = "expandable_segments:True"
# vLLM looks at the first only, by these very letters; torch reads both, in any case.
_LOOKED_AT: Final = "PYTORCH_CUDA_ALLOC_CONF"
_VARIABLES: Final = (_LOOKED_AT, "PYTORCH_ALLOC_CONF")


@dataclass(frozen=True, slots=True)
class ExpandableSegments:
    """
    Attributes:
        variable: where it is set.
        option: as written there.
        is_refused: vLLM sees it, and ends.
    """

    variable: str
    option: str
    is_refused: bool

    @property
    def fix(self) -> str:
        return f"take {self.option} out of {self.variable}"


def expandable_segments(environ: Mapping[str, str]) -> ExpandableSegments | None:
    """The option, where the environment turns it on."""
    for variable in _VARIABLES:
        for option in (option.strip() for option in environ.get(variable, "").split(",")):
            if option.lower() == _EXPANDABLE.lower():
                return ExpandableSegments(variable, option, variable == _LOOKED_AT and option == _EXPANDABLE)
    return None
