"""Wakes an idle engine when there is something to prefetch. HTTP server process.

An engine without requests waits for its clients and looks at nothing else. Any request of the utility kind has it look
whether there is work, and its connector says so while there is something to bring back: the question whether it
sleeps is the cheapest of them, and every supported vLLM has it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from starlette.concurrency import run_in_threadpool
from vllm.v1.engine.exceptions import EngineDeadError

from kvortex.vllm_plugin.stats_socket import StatsUnavailableError

if TYPE_CHECKING:
    from vllm.engine.protocol import EngineClient

    from kvortex.vllm_plugin.engines import Engines

logger = logging.getLogger(__name__)

EVERY_S: Final = 1.0


async def wake(engine_client: EngineClient) -> None:
    """Has the engine look whether there is work."""
    await engine_client.is_sleeping()


async def keep_prefetching(engines: Engines, engine_client: EngineClient) -> None:
    """Asks now and then whether an idle engine has something to prefetch; ends with the engine or the server."""
    while True:
        await asyncio.sleep(EVERY_S)
        try:
            if await run_in_threadpool(engines.may_prefetch):
                await wake(engine_client)
        except StatsUnavailableError as error:
            logger.debug("no look at what could be prefetched: %s", error.message)
        except EngineDeadError:
            return
