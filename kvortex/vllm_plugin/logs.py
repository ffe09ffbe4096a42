"""KVortex's log lines look like vLLM's and follow its level."""

from __future__ import annotations

import logging


def share_vllms_log() -> None:
    """Gives the `kvortex` loggers vLLM's handlers in this process. Leaves a logger alone that its user has set up."""
    ours, vllms = logging.getLogger("kvortex"), logging.getLogger("vllm")
    if not ours.handlers and vllms.handlers:
        ours.handlers = list(vllms.handlers)
        ours.setLevel(vllms.level)
        ours.propagate = False
