"""Bounds how long an ending server waits for answers that cannot come. HTTP server process.

When `shutdown_timeout` is over vLLM kills its engine, and then waits for the requests that were running to be answered.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.datastructures import State

ANSWERED_WITHIN_S: Final = 5
"""After the engine's end: for what is on its way to a client. Then the connections of all others are closed."""

_LOOK_EVERY_S: Final = 0.1


async def bound_end(state: State) -> None:
    """Sets the bound on the app's HTTP server, which vLLM makes later than the app; one that has a bound keeps it."""
    while (server := getattr(state, "server", None)) is None:
        await asyncio.sleep(_LOOK_EVERY_S)
    if server.config.timeout_graceful_shutdown is None:
        server.config.timeout_graceful_shutdown = ANSWERED_WITHIN_S
