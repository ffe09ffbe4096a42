"""Makes kvortex/config/vllm_options.json: the options of `vllm serve`, over the supported versions.

    python tools/list_vllm_options.py collect > 0.32.json      for each version, in an environment with it
    python tools/list_vllm_options.py merge *.json > kvortex/config/vllm_options.json

`collect` asks vLLM's own argument parser, so that a name is spelled, aliased and negated as vLLM does it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PARSER_MODULES = (
    "vllm.entrypoints.common.cli_args",  # 0.33
    "vllm.entrypoints.launchers.cli_args",
    "vllm.entrypoints.openai.cli_args",  # 0.26
)
_TYPES = {
    "int": "int",
    "float": "float",
    "str": "str",
    "human_readable_int": "count",
    "human_readable_int_or_auto": "count_or_auto",
    "loads": "json",
    "union_dict_and_str": "json",
    "parse_dataclass": "json",
}
_KIND_ORDER = ("value", "optional", "list", "append", "flag", "switch")
_TYPE_ORDER = ("int", "float", "count", "count_or_auto", "str", "json", "any")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    collect_parser = commands.add_parser("collect")
    collect_parser.add_argument(
        "--cpu-platform",
        action="store_true",
        help="for a GPU build of vLLM on a machine without a GPU, whose parser cannot be built otherwise",
    )
    merge_parser = commands.add_parser("merge")
    merge_parser.add_argument("files", nargs="+", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "collect":
        json.dump(collect(cpu_platform=arguments.cpu_platform), sys.stdout, indent=1)
    else:
        sys.stdout.write(as_text(merge([json.loads(file.read_text()) for file in arguments.files])))


def collect(*, cpu_platform: bool) -> dict[str, Any]:
    """The options of the installed vLLM: `{"version": "0.32", "options": {name: {...}}}`."""
    import vllm
    import vllm.platforms
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    if cpu_platform:
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
    make_arg_parser = next(_make_arg_parsers())
    parser = make_arg_parser(FlexibleArgumentParser(prog="vllm serve"))
    options = {}
    for action in parser._actions:
        names = [option.removeprefix("--").replace("-", "_") for option in action.option_strings if option[:2] == "--"]
        if not names or names[0] == "help":
            continue
        kind = kind_of(action)
        negations = [name for name in names if kind == "switch" and is_negation(name, names[0])]
        options[names[0]] = {
            "kind": kind,
            "type": type_of(action.type) if kind not in ("switch", "flag") else "bool",
            "aliases": [name for name in names[1:] if name not in negations],
            "negations": [name for name in negations if name != f"no_{names[0]}"],
            "short": [option for option in action.option_strings if option[:2] != "--"],
        }
    major, minor, *_ = vllm.__version__.split(".")
    return {"version": f"{major}.{minor}", "options": options}


def _make_arg_parsers() -> Iterator[Callable[..., argparse.ArgumentParser]]:
    for module in _PARSER_MODULES:
        try:
            yield importlib.import_module(module).make_arg_parser
        except ModuleNotFoundError:
            continue


def kind_of(action: argparse.Action) -> str:
    """How an option takes its value on a command line."""
    if isinstance(action, argparse.BooleanOptionalAction):
        return "switch"
    if isinstance(action, argparse._AppendAction):
        return "append"
    return {0: "flag", None: "value", "?": "optional", "+": "list", "*": "list"}[action.nargs]


def is_negation(name: str, of: str) -> bool:
    """`--no-x` of `--x`; vLLM 0.33 also pairs `--enable-x` with `--disable-x`."""
    inverse = {"enable": "disable", "disable": "enable"}.get(of.split("_")[0])
    return name in (f"no_{of}", f"{inverse}_{of.partition('_')[2]}")


def type_of(convert: Any) -> str:
    """`optional_type(int)` is a closure over `int`: what it is is read from its cells."""
    if convert is None:
        return "str"
    name = getattr(convert, "__qualname__", "").rsplit(".", 1)[-1]
    if name in _TYPES:
        return _TYPES[name]
    cells = getattr(convert, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells if callable(cell.cell_contents)]
    return type_of(inner[0]) if len(inner) == 1 else "any"


def merge(dumps: list[dict[str, Any]]) -> dict[str, Any]:
    """One table: an option is there if any version has it; `since` and `until` say which, if not all do."""
    dumps = sorted(dumps, key=lambda dump: int(dump["version"].split(".")[1]))
    versions = [dump["version"] for dump in dumps]
    merged: dict[str, dict[str, Any]] = {}
    for dump in dumps:
        for name, option in dump["options"].items():
            into = merged.setdefault(name, {"kind": option["kind"], "type": option["type"], "in": []})
            into["in"].append(dump["version"])
            into["kind"] = max(into["kind"], option["kind"], key=_KIND_ORDER.index)
            if into["type"] != option["type"]:
                into["type"] = widest(into["type"], option["type"])
            for more in ("aliases", "negations", "short"):
                into[more] = sorted({*into.get(more, ()), *option[more]})
    for option in merged.values():
        present = option.pop("in")
        if present[0] != versions[0]:
            option["since"] = present[0]
        if present[-1] != versions[-1]:
            option["until"] = present[-1]
        for more in ("aliases", "negations", "short"):
            if not option[more]:
                del option[more]
    return {"versions": versions, "options": dict(sorted(merged.items()))}


def widest(one: str, other: str) -> str:
    """The type that takes what either takes."""
    if "bool" in (one, other):
        return "any"
    return max(one, other, key=_TYPE_ORDER.index)


def as_text(table: dict[str, Any]) -> str:
    """JSON with one option a line, so that a change of vLLM's reads as a change of lines."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(option)}" for name, option in table["options"].items())
    return f'{{\n "versions": {json.dumps(table["versions"])},\n "options": {{\n{lines}\n }}\n}}\n'


if __name__ == "__main__":
    main()
