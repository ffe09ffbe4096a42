"""Writes the table of docs/configuration.md from the settings themselves.

    python tools/write_configuration_reference.py

The test suite fails while the page and the code differ.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from kvortex.config.layers import ENVIRONMENT_PREFIX
from kvortex.config.settings import KV_CACHE_KEYS, KVCacheSettings, check_value, default_ram_cache_size, shown
from kvortex.config.sources import SourceKind
from kvortex.errors import ConfigError, Place
from kvortex.sizes import format_bytes

PAGE: Final = Path(__file__).parent.parent / "docs" / "configuration.md"
BEGIN: Final = "<!-- written by tools/write_configuration_reference.py -->\n"
END: Final = "<!-- end -->\n"

_WHAT: Final = {
    "backend": "`kvortex`, or `none`: plain vLLM, without KVortex",
    "offload_threshold": "stores begin when this share of VRAM's KV has no copy in RAM; 0 is write-through",
    "offload_target": "and go on until this share has none; not set, it is never above `offload_threshold`",
    "offload_batch": "bytes that one step may store, at most",
    "idle_after": "a block unused for this long counts as idle; the `priority` policy gives idle ones up sooner",
    "ram_cache_size": "host RAM for blocks: the whole server's, split over its GPUs",
    "prefetch_enabled": "sessions' blocks are brought back before they are asked for; may gain time, with hints",
    "num_streams": "copy threads on vLLM's CPU build, threads of `verify`; on a GPU, 1: both directions share a stream",
    "block_size": "tokens of a block; becomes vLLM's `--block-size`",
    "eviction_policy": "which blocks a full RAM gives up: [eviction.md](eviction.md)",
    "transfer_timeout": "after this long a copy is given up and counted as failed",
    "request_log": "file that gets a line for each request, with block hashes and no text: [plan.md](plan.md)",
    "request_log_size": "of that file and the one before it together",
    "verify": "which blocks get a checksum that is compared before each load: [verification.md](verification.md)",
}
_RAM: Final = 10**15
_PLACE: Final = Place("-")


def refused(key: str, value: Any) -> ConfigError | None:
    """What the settings say against a value; None where they take it."""
    try:
        check_value(key, value, place=_PLACE, available_ram_bytes=_RAM)
    except ConfigError as error:
        return error
    return None


def takes(key: str) -> str:
    """What a key may be, in the words of its own refusals."""
    error = refused(key, [])
    assert error is not None, key
    said = error.message.removeprefix(f"{_PLACE}: {key} takes ")
    if said != error.message:
        return said.removesuffix(", not a list").replace('"', "`")
    if "duration" in said:
        return "a duration" if refused(key, "0s") is None else "a duration above 0"
    least = refused(key, 1)
    words = "a size" if least is None or least.hint is None else f"a size; {least.hint.removeprefix('give ')}"
    return words if refused(key, "50%") is not None else f"{words} or a share of the usable RAM"


def default(key: str) -> str:
    """A key's default as the file would say it."""
    field = KVCacheSettings.model_fields[key]
    if field.is_required():
        share = default_ram_cache_size(100 * 10**9) / (100 * 10**9)
        return f"{share:.0%} of the usable RAM, at most {format_bytes(default_ram_cache_size(_RAM))}"
    return f"`{shown(key, field.default).removesuffix(' (none)')}`"


def table() -> str:
    """The order of the sources, and one row a key in the order of the settings."""
    lines = [
        "    " + "  >  ".join(kind.value for kind in SourceKind),
        "",
        "| key under `kv_cache` | environment | takes | default | what |",
        "| --- | --- | --- | --- | --- |",
    ]
    assert set(_WHAT) == set(KV_CACHE_KEYS), set(_WHAT) ^ set(KV_CACHE_KEYS)
    for key in KV_CACHE_KEYS:
        variable = f"`{ENVIRONMENT_PREFIX}{key.upper()}`"
        lines.append(f"| `{key}` | {variable} | {takes(key)} | {default(key)} | {_WHAT[key]} |")
    return "\n".join(lines) + "\n"


def page(current: str) -> str:
    """The page with its table as the code is now."""
    before, _, rest = current.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{table()}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
