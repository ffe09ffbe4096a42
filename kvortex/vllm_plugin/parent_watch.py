"""The engine ends when its server does, also when the server had no time to say so.

vLLM's workers watch their engine, but its engine process does not watch the API server: after a SIGKILL of that one,
the engine lives on and holds the GPU, its workers and KVortex's RAM. Linux can send a signal on a parent's death.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import threading

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Asks for SIGTERM, on which vLLM's engine shuts down, when the process that started this one dies.

    Does nothing in a process that multiprocessing did not start: an engine inside the user's own program.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0) != 0:
        logger.warning("no watch on the server process: %s", os.strerror(ctypes.get_errno()))
    elif os.getppid() != parent.pid:
        # It died before the call: nobody will send the signal any more.
        os.kill(os.getpid(), signal.SIGTERM)


def ignore_hangup() -> None:
    """A closed terminal sends SIGHUP to every process of the server at once; the server itself ends the others, after
    their running requests. Does nothing in a process that multiprocessing did not start."""
    if multiprocessing.parent_process() is not None and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
