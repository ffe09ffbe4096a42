"""vLLM's KV memory as regions of blocks, for every way in which a supported vLLM lays it out."""

from __future__ import annotations

import importlib
import warnings

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed")
    compat = importlib.import_module("kvortex.vllm_plugin.compat")

BLOCKS, LAYERS, TOKENS, HEADS, DIM = 6, 3, 4, 2, 8


def bytes_of_block(view: torch.Tensor, block: int) -> set[int]:
    """Addresses of all bytes that a layer's view gives to one block; the view's first dimension is the block."""
    picked = view[block]
    start = picked.data_ptr()
    offsets = [sum(i * s for i, s in zip(index, picked.stride(), strict=True)) for index in indices(picked.shape)]
    return {start + 2 * o + b for o in offsets for b in (0, 1)}


def indices(shape: torch.Size) -> list[tuple[int, ...]]:
    return [tuple(i.tolist()) for i in torch.cartesian_prod(*(torch.arange(n) for n in shape))]


def region_bytes(regions: list[torch.Tensor], block: int) -> set[int]:
    return {r[block].data_ptr() + i for r in regions for i in range(r.shape[1])}


def check(regions: list[torch.Tensor], views: list[torch.Tensor]) -> None:
    for block in range(BLOCKS):
        expected = set().union(*(bytes_of_block(view, block) for view in views))
        assert region_bytes(regions, block) == expected, block


def storage(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


def test_one_tensor_a_layer_with_k_and_v_inside_a_block():
    layers = {f"l{i}": storage(BLOCKS, TOKENS, HEADS, 2 * DIM).permute(0, 2, 1, 3) for i in range(LAYERS)}
    check(compat._regions_by_storage(layers, BLOCKS), list(layers.values()))


def test_one_tensor_a_layer_with_k_before_v():
    layers = {f"l{i}": storage(2, BLOCKS, TOKENS, HEADS, DIM) for i in range(LAYERS)}
    regions = compat._regions_by_storage(layers, BLOCKS)
    assert len(regions) == 2 * LAYERS
    check(regions, [layer[k] for layer in layers.values() for k in (0, 1)])


def test_layers_that_share_a_tensor_are_one_region():
    shared = storage(BLOCKS, TOKENS, HEADS, 2 * DIM)
    assert len(compat._regions_by_storage({"a": shared, "b": shared}, BLOCKS)) == 1


def test_all_layers_inside_a_block_are_one_region():
    physical = storage(BLOCKS, LAYERS, TOKENS, HEADS, 2 * DIM)
    regions = compat._regions_by_storage({"all": physical.permute(1, 0, 3, 2, 4)}, BLOCKS)
    assert len(regions) == 1
    check(regions, [physical[:, layer] for layer in range(LAYERS)])


def test_layers_and_k_and_v_outside_the_blocks():
    physical = storage(LAYERS, 2, BLOCKS, TOKENS, HEADS, DIM)
    regions = compat._regions_by_storage({"all": physical}, BLOCKS)
    assert len(regions) == LAYERS * 2
    check(regions, [physical[layer, k] for layer in range(LAYERS) for k in (0, 1)])


def test_a_list_of_tensors_over_one_storage_counts_once():
    shared = storage(BLOCKS, TOKENS, HEADS, 2 * DIM)
    assert len(compat._regions_by_storage({"a": [shared[:, :2], shared[:, 2:]]}, BLOCKS)) == 1
