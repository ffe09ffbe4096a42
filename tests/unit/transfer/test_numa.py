"""Which NUMA node is a GPU's, over faked machines."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from kvortex.transfer.numa import nearest_node

GPUS = (SimpleNamespace(uuid="GPU-aa", numa_node=0), SimpleNamespace(uuid="MIG-bb-cc", numa_node=1))


@pytest.mark.parametrize(("of_the_driver", "node"), [("GPU-aa", 0), ("GPU-bb-cc", 1), ("GPU-dd", None)])
def test_a_slice_is_found_whatever_kind_its_uuid_names(
    monkeypatch: pytest.MonkeyPatch, of_the_driver: str, node: int | None
) -> None:
    monkeypatch.setattr("kvortex.hardware.read_host", lambda: SimpleNamespace(numa_nodes=(0, 1)))
    monkeypatch.setattr("kvortex.hardware.read_gpus", lambda: SimpleNamespace(gpus=GPUS))
    assert nearest_node(of_the_driver) == node


def test_where_there_is_one_node_nobody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvortex.hardware.read_host", lambda: SimpleNamespace(numa_nodes=(0,)))
    assert nearest_node("GPU-aa") is None
