"""When `wait_for_layer_load` can be relied on."""

from __future__ import annotations

from kvortex.vllm_plugin.layer_waits import LayerWaits

LAYERS = {"a": (0, 1), "b": (2,)}


def forward(waits: LayerWaits, kind: str | None, *layers: str, told_late: bool = False) -> bool:
    """One step; vLLM calls `start_load_kv` before the kernels, or after them where no load goes with the step."""
    waits.begin_step()
    relied = False if told_late else waits.begin_forward(kind)
    for layer in layers:
        waits.tells(layer)
    if told_late:
        waits.begin_forward(kind)
    waits.end_forward()
    return relied


def test_a_kind_of_pass_is_relied_on_after_one_in_which_every_layer_told() -> None:
    waits = LayerWaits(LAYERS)
    assert not forward(waits, "NONE", "a", "b")
    assert forward(waits, "NONE")


def test_a_pass_that_was_named_after_its_kernels_counts() -> None:
    waits = LayerWaits(LAYERS)
    forward(waits, "NONE", "a", "b", told_late=True)
    assert forward(waits, "NONE")


def test_kinds_are_kept_apart_and_graphs_never_count() -> None:
    waits = LayerWaits(LAYERS)
    forward(waits, "NONE", "a", "b")
    forward(waits, None, "a", "b")
    assert not forward(waits, "PIECEWISE")
    assert not forward(waits, None)


def test_one_silent_layer_is_enough_to_rely_on_none() -> None:
    waits = LayerWaits(LAYERS)
    for _ in range(3):
        assert not forward(waits, "NONE", "a")
        assert not forward(waits, "NONE", "b")
    assert not forward(waits, "NONE", "a", "b")


def test_where_layers_are_not_known_nothing_is_relied_on() -> None:
    waits = LayerWaits({})
    forward(waits, "NONE", "a", "b")
    assert not forward(waits, "NONE", "a", "b")


def test_the_regions_of_a_layer() -> None:
    waits = LayerWaits(LAYERS)
    assert waits.tells("a") == (0, 1)
    assert waits.tells("of another model") == ()
