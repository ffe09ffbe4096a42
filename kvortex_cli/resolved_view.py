"""A resolved configuration, to read and as data: every value with its source, and vLLM's command line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from kvortex.config.command_line import vllm_command
from kvortex.config.option_values import as_data
from kvortex.config.redaction import redact
from kvortex.config.resolve import ResolvedConfig
from kvortex.config.settings import shown
from kvortex.config.sources import SECTION, Source
from kvortex.sizes import format_bytes


def print_json(resolved: ResolvedConfig, environment: Mapping[str, str]) -> None:
    """One JSON object on stdout; sizes in bytes, durations in seconds, secrets as ***."""
    command = vllm_command(resolved, environment, show_secrets=False)
    data = {
        "model": redact("model", resolved.model.value) if resolved.model else None,
        "values": {
            name: {"value": value, "source": str(source), "source_kind": source.kind.value}
            for name, value, source in _values(resolved)
        },
        "vllm": {"argv": list(command.argv), "env": dict(command.env), "line": command.as_line()},
        "ranks": resolved.num_ranks,
        "ram_per_rank_bytes": resolved.ram_per_rank_bytes,
    }
    print(json.dumps(data, indent=2))


def print_table(resolved: ResolvedConfig, environment: Mapping[str, str]) -> None:
    """A table on stdout, the model first, and the plain `vllm serve` line that does the same."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from kvortex_cli.console import stdout

    table = Table("setting", "value", "from", box=SIMPLE_HEAD)
    for name, value, source in _values(resolved):
        table.add_row(name, _in_words(resolved, name, value), str(source))
    stdout().print(table)
    print(vllm_command(resolved, environment, show_secrets=False).as_line())


def ram_in_words(resolved: ResolvedConfig) -> str:
    """`128 GB in total, 64 GB per rank`."""
    total = format_bytes(resolved.kv_cache.ram_cache_size)
    return f"{total} in total, {format_bytes(resolved.ram_per_rank_bytes)} per rank"


def _values(resolved: ResolvedConfig) -> Iterator[tuple[str, Any, Source]]:
    if resolved.model is not None:
        yield "model", redact("model", resolved.model.value), resolved.model.source
    for name, setting in resolved.vllm.items():
        yield name, redact(name, as_data(setting.value)), setting.source
    for key, value in resolved.kv_cache_values.items():
        yield f"{SECTION}.{key}", value, resolved.sources[key]


def _in_words(resolved: ResolvedConfig, name: str, value: Any) -> str:
    key = name.removeprefix(SECTION + ".")
    if key == "ram_cache_size":
        return ram_in_words(resolved)
    if key != name:
        return shown(key, value)
    if value is None:
        return "null (vLLM's default)"
    return value if isinstance(value, str) else json.dumps(value)
