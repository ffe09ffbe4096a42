"""What a server says when it is ready: what the cache can hold, and where to look. HTTP server process."""

from __future__ import annotations

import logging
import multiprocessing
import threading
import time
from argparse import Namespace
from collections.abc import Iterable
from typing import Any

from kvortex.sizes import counted, format_bytes
from kvortex.vllm_plugin.engines import Engines
from kvortex.vllm_plugin.stats_socket import StatsUnavailableError
from kvortex.vllm_plugin.watch import is_listening

logger = logging.getLogger(__name__)

_CONVERSATION_TOKENS = 8192
_WITHIN_S = 600.0


def announce_when_ready(engines: Engines, args: Namespace, paths: Iterable[str]) -> None:
    """Logs the banner once the server takes connections, from a thread of its own.

    Args:
        paths: of the app's routes.
    """
    name = multiprocessing.current_process().name
    # One of several HTTP processes is enough.
    if name == "MainProcess" or name.endswith("_0"):
        threading.Thread(target=_announce, args=(engines, args, set(paths)), name="kvortex-banner", daemon=True).start()


def _announce(engines: Engines, args: Namespace, paths: set[str]) -> None:
    deadline = time.monotonic() + _WITHIN_S
    while time.monotonic() < deadline:
        if is_listening(args):
            break
        time.sleep(0.2)
    else:
        return
    try:
        stats = engines.stats()
    except StatsUnavailableError as error:
        logger.warning("no statistics from the engine: %s", error)
        return
    logger.info("%s", banner(stats, base_url(args), paths))


def base_url(args: Namespace) -> str:
    """Where a browser on this machine finds the server; the path of its Unix socket where it has one."""
    if getattr(args, "uds", None):
        return f"unix:{args.uds}"
    host = args.host if args.host not in (None, "", "0.0.0.0", "::") else "localhost"
    scheme = "https" if getattr(args, "ssl_certfile", None) else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{args.port}"


def banner(stats: dict[str, Any], url: str, paths: set[str]) -> str:
    """The text.

    Args:
        stats: the document of `/kvortex/stats`.
    """
    block_size = stats["block_size"]
    lines = [f"KVortex is ready: {stats['model']} on {url}"]
    for tier in ("vram", "ram"):
        held = stats["tiers"][tier]
        tokens = held["capacity_blocks"] * block_size
        conversations = held["capacity_blocks"] // -(-_CONVERSATION_TOKENS // block_size)
        lines.append(
            f"  {tier.upper():<5} {format_bytes(held['capacity_bytes'])}, {held['capacity_blocks']:,} blocks of "
            f"{block_size} tokens: up to {tokens:,} tokens, {counted(conversations, 'conversation')} of "
            f"{_CONVERSATION_TOKENS:,}"
        )
    lines.append(f"  look  kvortex inspect --url {url}" if not url.startswith("unix:") else f"  look  {url}")
    pages = [path for path in ("/kvortex/dashboard", "/kvortex/stats", "/metrics") if path in paths]
    lines.append(f"        {'  '.join(url + path for path in pages)}")
    return "\n".join(lines)
