"""Every command that a page, a docstring or a header tells to run: its script is there and has the options it names."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main

from kvortex.config.vllm_options import vllm_options
from kvortex_cli.main import app

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
HEADERS = [ROOT / "examples" / "kvortex.service", ROOT / "examples" / "curl.sh"]
FOLDERS = ("benchmarks", "examples", "tools", "tests")
SCRIPTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
# Variables that vLLM and torch read, not the script.
OTHERS = ("VLLM_", "OMP_", "TORCH_", "HF_")
SCRIPT = re.compile(
    r"(?P<before>(?:[A-Z_]+=\S+ +)*(?:python3? |pytest )?)(?P<script>-m tests\.[\w.]+|[\w/-]+\.py)(?P<rest> .*)?"
)
KVORTEX = re.compile(
    r"(?:\S*/)?kvortex (?P<rest>(?:serve|init|doctor|inspect|plan|bench (?:serve|replay|compare|transfer))( .*)?)"
)


def written(path: Path) -> Iterator[str]:
    """Code spans and indented lines, without what explains them; lines that go on are one."""
    text = path.read_text()
    if path.suffix == ".py":
        text = ast.get_docstring(ast.parse(text)) or ""
    elif path in HEADERS:
        text = "\n".join(line[1:] for line in text.splitlines() if line.startswith("#"))
    text = re.sub(r"\\\n\s*", " ", text)
    yield from (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", text))
    yield from (re.split(r"\s{3,}|\s+#\s", line)[0] for line in re.findall(r"^ {3,}(\S.*)$", text, re.MULTILINE))


def options(arguments: str) -> list[str]:
    """The options of an argument line, those that may be left out too; until a bare `--`."""
    words = shlex.split(re.sub(r"[\[\]]", " ", arguments))
    own = words[: words.index("--")] if "--" in words else words
    return [word.partition("=")[0] for word in own if re.match(r"--?[a-z]", word)]


@cache
def source_of(script: Path) -> str:
    """The text of a script and of its neighbours that it imports."""
    text = script.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module:
            places = [script.parent / f"{node.module}.py", ROOT / f"{node.module.replace('.', '/')}.py"]
            text += "".join(source_of(place) for place in places if place in SCRIPTS)
    return text


def faults_of_script(before: str, script: str, rest: str) -> list[str]:
    """What a command asks of a script that it does not have."""
    path = ROOT / (script.removeprefix("-m ").replace(".", "/") + ".py" if script.startswith("-m ") else script)
    if not path.exists():
        return [f"{script} is not there"]
    variables = [name for name in re.findall(r"([A-Z_]+)=", before) if not name.startswith(OTHERS)]
    return [name for name in [*variables, *options(rest)] if f'"{name}"' not in source_of(path)]


def faults_of_kvortex(rest: str) -> list[str]:
    """The options of a `kvortex` command line that it does not take."""
    command: Any = typer.main.get_command(app)
    words = rest.split()
    while hasattr(command, "commands"):
        command = command.commands[words.pop(0)]
    own = {option for parameter in command.params for option in parameter.opts}
    unknown = [option for option in options(" ".join(words)) if option not in own]
    if command.name in ("serve", "compare"):
        table = vllm_options()
        return [o for o in unknown if table.find(o[2:]) is None and table.find_short(o) is None]
    return unknown


def faults(command: str) -> list[str] | None:
    """What is wrong with a command; None where the text is no command of this repository."""
    if (found := KVORTEX.fullmatch(command)) is not None:
        return faults_of_kvortex(found["rest"])
    found = SCRIPT.fullmatch(command)
    if found is None or not (found["before"] or found["rest"]):
        return None  # a file's name
    return faults_of_script(found["before"], found["script"], found["rest"] or "")


@pytest.mark.parametrize("path", [*PAGES, *HEADERS, *SCRIPTS], ids=lambda path: str(path.relative_to(ROOT)))
def test_every_command_names_what_is_there(path):
    wrong = {command: found for command in written(path) if (found := faults(command))}
    assert wrong == {}


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("python -m tests.e2e.soak --seconds 780 --kills 0", ["--kills"]),
        ("GPU_GB=24 BLOCK=128 benchmarks/multi_turn.py kvortex", ["GPU_GB", "BLOCK"]),
        ("multi_turn.py kvortex", ["multi_turn.py is not there"]),
        ("python benchmarks/start_up.py --ram-gb 4", []),
        ("kvortex bench replay LOG --rams 1GB", ["--rams"]),
        ("kvortex serve MODEL -tp 2 --max-model-lenght 4", ["--max-model-lenght"]),
        ("/opt/bin/kvortex serve --config f --enforce-eager -- --newer", []),
        ("scheduler.py", None),
    ],
)
def test_a_wrong_command_is_found(command, wrong):
    assert faults(command) == wrong


def test_commands_are_found_where_they_stand():
    found = [
        command for path in [*PAGES, *HEADERS, *SCRIPTS] for command in written(path) if faults(command) is not None
    ]
    assert len(found) > 80


def test_make_runs_benchmarks_that_need_no_gpu():
    line = re.search(r"^BENCHMARKS := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert line is not None
    for command in shlex.split(line[1]):
        assert not faults(f"python benchmarks/{command}")
        assert "needs a gpu" not in (ROOT / "benchmarks" / command.split()[0]).read_text().lower()
