"""vLLM, imported before any test here is: it warns of itself and of torch, which is not ours to mend.

And engines over devices that hold tags, for the modules that have called `import_sim`.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvortex.cache.load_choice import Way

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    importlib.import_module("vllm.entrypoints.openai.api_server")


@pytest.fixture(scope="module")
def sim_configs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Any]:
    folder: Path = tmp_path_factory.mktemp("model")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sim = importlib.import_module("tests.fakes.sim_engine")
        return {overlap: sim.vllm_config(folder, overlap=overlap, max_running=4) for overlap in (False, True)}


@pytest.fixture
def make(sim_configs: dict[bool, Any]) -> Iterator[Callable[..., Any]]:
    """Engines without prefetch, whose stores and loads the test ends; loads come before their step."""
    sim = importlib.import_module("tests.fakes.sim_engine")
    made = []

    def make_one(**options: Any) -> Any:
        settings = {"offload_threshold": 0.0, "prefetch_enabled": False, "transfer_timeout": 10.0}
        options = {"num_slots": 300, **options}
        config = sim_configs[options.pop("overlap", False)]
        config.kv_transfer_config.kv_role = "kv_both"  # the engine before this one changed it
        engine = sim.SimEngine(config, settings=settings | options.pop("settings", {}), **options)
        engine.side._choice.way = lambda *_, **__: Way.BEFORE_STEP
        made.append(engine)
        return engine

    yield make_one
    for engine in made:
        engine.close()
