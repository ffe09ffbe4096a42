"""What `bench replay` and `plan` share: the options that say what is replayed, and how they are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvortex.replay.models import KNOWN_MODELS

if TYPE_CHECKING:
    from kvortex.replay.models import ReplayedModel
    from kvortex.replay.prefill import PrefillCost
    from kvortex.replay.trace import TracedRequest

Trace = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="Requests as JSON lines, .gz or not: Mooncake's, or a server's kv_cache.request_log."
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model", metavar="MODEL", help=f"Whose KV: {', '.join(KNOWN_MODELS)}, a directory or a Hub name (owner/name)."
    ),
]
KvCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", metavar="DTYPE", help="As vLLM's: auto is 2 bytes an element, fp8 is 1.")
]
Vram = Annotated[str, typer.Option("--vram", metavar="SIZE", help="VRAM for blocks in front of RAM; 0 is none.")]
BlockSize = Annotated[
    int | None,
    typer.Option("--block-size", metavar="TOKENS", help="Larger blocks: a multiple of the trace's. [default: its]"),
]
PrefillSpeed = Annotated[
    float | None,
    typer.Option(
        "--prefill-speed",
        metavar="TOKENS/S",
        help="What this model's prefill reaches; by default estimated from its weights at 400 TFLOP/s.",
    ),
]
WarmUp = Annotated[
    float,
    typer.Option("--warm-up", metavar="SHARE", help="Share of the requests that fill the cache before hits count."),
]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the result as an HTML page, too.")]


@dataclass(frozen=True, slots=True)
class Replayed:
    """What is played.

    Attributes:
        prefill: None where it is not known.
    """

    trace: Path
    model: ReplayedModel
    requests: Sequence[TracedRequest]
    vram_bytes: int
    prefill: PrefillCost | None
    warm_up: float

    @property
    def block_tokens(self) -> int:
        return self.requests[0].block_tokens

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.model.token_bytes


def read_replayed(
    trace: Path,
    *,
    model: str,
    kv_cache_dtype: str,
    vram: str,
    block_size: int | None,
    prefill_speed: float | None,
    warm_up: float,
) -> Replayed:
    """What the options say.

    Raises:
        UsageError: one is wrong, or a line of the trace.
        ModelUnavailableError, UnfitError: the model's configuration cannot be read, or is not understood.
    """
    from kvortex.errors import UsageError
    from kvortex.kv_shape import KV_DTYPES
    from kvortex.replay.models import read_model
    from kvortex.replay.prefill import cost_of_shape, cost_of_speed
    from kvortex.replay.trace import load_trace

    if kv_cache_dtype not in KV_DTYPES:
        raise UsageError(f"--kv-cache-dtype {kv_cache_dtype}: not known", hint=f"known: {', '.join(KV_DTYPES)}")
    if not 0 <= warm_up < 1:
        raise UsageError(f"--warm-up: takes a share from 0 to below 1, not {warm_up:g}", hint="0.5 is the first half")
    if prefill_speed is not None and not 0 < prefill_speed < 1e12:
        raise UsageError(f"--prefill-speed: takes tokens a second, more than 0, not {prefill_speed:g}")
    vram_bytes = 0 if re.fullmatch(r"0+ *[KMGTP]?i?B?", vram.strip()) else parsed_size("--vram", vram)
    served = read_model(model, kv_cache_dtype=kv_cache_dtype)
    requests = _in_blocks(load_trace(trace), block_size)
    prefill = None
    if prefill_speed is not None:
        prefill = cost_of_speed(prefill_speed)
    elif served.parameters is not None:
        prefill = cost_of_shape(served.shape, served.parameters)
    return Replayed(trace, served, requests, vram_bytes, prefill, warm_up)


def _in_blocks(requests: list[TracedRequest], block_size: int | None) -> list[TracedRequest]:
    from kvortex.errors import UsageError
    from kvortex.replay.trace import coarser

    traced = requests[0].block_tokens
    if block_size is None or block_size == traced:
        return requests
    if block_size < 1 or block_size % traced:
        raise UsageError(
            f"--block-size {block_size}: the trace tells prompts apart every {traced} tokens",
            hint=f"give a multiple of {traced}, or leave it out",
        )
    return coarser(requests, block_size)


def parsed_size(option: str, text: str) -> int:
    """Bytes; raises UsageError naming the option."""
    from kvortex.errors import UsageError
    from kvortex.sizes import BadValueError, parse_size

    try:
        return parse_size(text)
    except BadValueError as bad:
        raise UsageError(f"{option}: {bad.message}", hint=bad.hint) from None


def check_room(ram_sizes: Sequence[int], replayed: Replayed) -> None:
    """Raises UsageError for a size that holds no block."""
    from kvortex.errors import UsageError

    for size in ram_sizes:
        if size < replayed.block_bytes:
            raise UsageError(
                f"--ram {size} is less than one block: {replayed.block_tokens} tokens of {replayed.model.name} are "
                f"{replayed.block_bytes:,} bytes",
                hint="a size is a number and a unit, such as 128GiB",
            )


def shown_saving(saved_s: float | None, all_s: float | None) -> str:
    """`1.2 h, 23 %`, or a dash."""
    if saved_s is None or all_s is None:
        return "-"
    share = saved_s / all_s if all_s else 0.0
    for unit, seconds in (("h", 3600), ("min", 60)):
        if saved_s >= seconds:
            return f"{saved_s / seconds:.1f} {unit}, {share:.1%}"
    return f"{saved_s:.3g} s, {share:.1%}"


def conditions(replayed: Replayed) -> list[tuple[str, str]]:
    """What a reader needs to repeat it."""
    from kvortex import __version__
    from kvortex.bench.conditions import read_hardware
    from kvortex.sizes import counted, format_bytes

    prefill = replayed.prefill.source if replayed.prefill is not None else "not known: give --prefill-speed"
    return [
        ("trace", f"{replayed.trace}, {counted(len(replayed.requests), 'request')}"),
        ("model", f"{replayed.model.name}, {replayed.model.token_bytes:,} bytes of KV a token"),
        ("blocks", f"{replayed.block_tokens} tokens"),
        ("VRAM in front", format_bytes(replayed.vram_bytes)),
        ("counted", f"requests after the first {replayed.warm_up:.0%}"),
        ("prefill", prefill),
        ("played by", f"KVortex {__version__} on {read_hardware()}"),
    ]
