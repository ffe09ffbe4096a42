"""Which forward passes tell, layer by layer, that kernels are about to be submitted (`wait_for_layer_load`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


class LayerWaits:
    """Trusts a kind of forward pass only after one in which every layer told.

    Graphs replay without telling, and a model may have layers that never tell. Which do is seen, not assumed.

    Args:
        regions_of: for each layer, the regions of the layout that its kernels read.
    """

    def __init__(self, regions_of: Mapping[str, Sequence[int]]) -> None:
        self._regions_of = regions_of
        self._reliable: set[str] = set()
        self._told: set[str] = set()
        self._kind: str | None = None

    def begin_step(self) -> None:
        self._told.clear()
        self._kind = None

    def begin_forward(self, kind: str | None) -> bool:
        """Whether every layer will tell in this pass.

        Args:
            kind: how vLLM runs it, see `compat.forward_kind`; None is never relied on.
        """
        self._kind = kind
        return kind in self._reliable

    def tells(self, layer_name: str) -> Sequence[int]:
        """A layer's kernels come next; the regions that they read."""
        self._told.add(layer_name)
        return self._regions_of.get(layer_name, ())

    def end_forward(self) -> None:
        if self._kind is not None and self._regions_of and self._told >= self._regions_of.keys():
            self._reliable.add(self._kind)
