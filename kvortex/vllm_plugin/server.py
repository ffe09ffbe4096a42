"""`python -m kvortex.vllm_plugin.server MODEL [options]`: vLLM's own `vllm serve`, by its parts.

vLLM's console script asks for a distribution called `vllm` and fails on the CPU build; its parts do not. What is added:
progress while it starts, an end on SIGTERM meanwhile, one on SIGHUP as on SIGTERM, and at the end one message that says
why the engine died.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from multiprocessing import resource_tracker
from types import FrameType
from typing import Any, NoReturn

from kvortex.config.redaction import hide_secrets
from kvortex.hardware.memory import read_oom_kills
from kvortex.vllm_plugin.death import Death, explain
from kvortex.vllm_plugin.last_words import LastWords, record_last_words
from kvortex.vllm_plugin.watch import Watch

_FAILED = 1


def main(argv: list[str]) -> NoReturn:
    """Runs vLLM's server in this process until it ends; exit 2 on a wrong option, 1 when the engine died."""
    spawn_processes()
    words = LastWords()
    oom_kills = read_oom_kills()
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    record_last_words()
    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="kvortex serve")
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    command.validate(args)
    _end_on_hangup()
    asked_to_end = _hear_of_terms()
    watch = Watch(args, asked_to_end)
    failure: Exception | None = None
    try:
        command.cmd(args)
    except Exception as error:  # noqa: BLE001 - the edge at which vLLM's failure becomes one message
        failure = error
    except KeyboardInterrupt:  # while it started: vLLM raises it for SIGTERM, too
        watch.close()  # nothing is to interrupt what ends with the interpreter
        print("kvortex: ended before it was ready", file=sys.stderr, flush=True)
        sys.exit(128 + (signal.SIGTERM if asked_to_end.is_set() else signal.SIGINT))
    watch.close()
    death = explain(words.read(), watch.exits(), failure, oom_killed=read_oom_kills() > oom_kills)
    if death is None:
        sys.exit(0)
    _tell(death, failure)
    sys.exit(_FAILED)


def spawn_processes() -> None:
    """What the `vllm` command does and `ServeSubcommand` by itself does not: its processes are spawned, not forked. A
    fork would copy this process in the middle of what its other threads do."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")


def _tell(death: Death, failure: Exception | None) -> None:
    """The message, last: what scrolled by above it is vLLM's own."""
    if failure is not None and "root cause" not in str(failure):
        print(hide_secrets("".join(traceback.format_exception(failure)), os.environ), file=sys.stderr)
    sys.stdout.flush()
    print(f"error: {hide_secrets(death.message, os.environ)}", file=sys.stderr)
    print(f"hint: {hide_secrets(death.hint, os.environ)}", file=sys.stderr, flush=True)


def _hear_of_terms() -> threading.Event:
    """Set once SIGTERM has come. vLLM sets a handler for its start, and another for the time after; each is called as
    if we were not there."""
    asked = threading.Event()
    set_handler = signal.signal

    def set_ours(number: int, handler: Any) -> Any:
        if number != signal.SIGTERM or not callable(handler):
            return set_handler(number, handler)

        def told(number: int, frame: FrameType | None) -> Any:
            asked.set()
            return handler(number, frame)

        return set_handler(number, told)

    signal.signal = set_ours  # type: ignore[assignment]
    return asked


def _end_on_hangup() -> None:
    """A closed terminal ends the server as SIGTERM does; `nohup` keeps its meaning."""

    def terminate(_number: int, _frame: FrameType | None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        # What is started while it is ignored ignores it: multiprocessing's helper, which outlives the others.
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        resource_tracker.ensure_running()
        signal.signal(signal.SIGHUP, terminate)


if __name__ == "__main__":
    main(sys.argv[1:])
