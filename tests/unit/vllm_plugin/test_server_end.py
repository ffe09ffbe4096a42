"""The bound on how long an ending server waits; tests/e2e/test_server_end.py has a real one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from starlette.datastructures import State

from kvortex.vllm_plugin import server_end
from kvortex.vllm_plugin.server_end import ANSWERED_WITHIN_S, bound_end


@pytest.mark.parametrize(("given", "then"), [(None, ANSWERED_WITHIN_S), (60, 60)])
def test_a_server_that_is_made_later_is_bound_unless_it_is(
    monkeypatch: pytest.MonkeyPatch, given: int | None, then: int
) -> None:
    monkeypatch.setattr(server_end, "_LOOK_EVERY_S", 0.001)
    config = SimpleNamespace(timeout_graceful_shutdown=given)

    async def start() -> None:
        state = State()
        bounding = asyncio.create_task(bound_end(state))
        await asyncio.sleep(0.01)
        assert not bounding.done()
        state.server = SimpleNamespace(config=config)
        await asyncio.wait_for(bounding, 10.0)

    asyncio.run(start())
    assert config.timeout_graceful_shutdown == then
