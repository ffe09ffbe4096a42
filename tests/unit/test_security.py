"""Nothing in the packages runs what it reads, and nothing that they write is for others."""

from __future__ import annotations

import ast
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvortex.transfer.tuning import TransferTuning, write
from kvortex.vllm_plugin.request_log import RequestLog
from kvortex_cli.init import write_new

ROOT = Path(__file__).parent.parent.parent
SOURCES = sorted([*(ROOT / "kvortex").rglob("*.py"), *(ROOT / "kvortex_cli").rglob("*.py")])
SCRIPTS = sorted((ROOT / "kvortex").rglob("*.js"))

MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "jsonpickle", "code"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    *("torch.load", "numpy.load", "np.load", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("tempfile.mktemp", "ssl._create_unverified_context"),
}
LOADERS = {"Loader", "UnsafeLoader", "FullLoader", "CLoader"}
"""Of yaml; a class of the project's own stands on SafeLoader, whose own name is not here."""

KEYWORDS = {("shell", True), ("allow_pickle", True), ("weights_only", False), ("verify", False)}


def unsafe(source: str) -> Iterator[str]:
    """What in a module runs code that it was given, or could."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (f"{node.lineno}: {n.name}" for n in names if n.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in MODULES or any(f"{module}.{n.name}" in CALLS for n in names):
                    yield f"{node.lineno}: from {module}"
            case ast.Call(func=ast.Name(id=name)) if name in BUILTINS:
                yield f"{node.lineno}: {name}()"
            case ast.Attribute() if ast.unparse(node) in CALLS or (
                ast.unparse(node.value) == "yaml" and node.attr in LOADERS
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"
            case ast.keyword(arg=str(arg), value=ast.Constant(value=value)) if (arg, value) in KEYWORDS:
                yield f"{node.value.lineno}: {arg}={value}"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_runs_what_it_is_given(path: Path) -> None:
    """Field trial B65."""
    assert list(unsafe(path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "from marshal import loads",
        "eval(x)",
        "exec('x')",
        "compile(x, '', 'exec')",
        "__import__(name)",
        "import torch\ntorch.load(f)",
        "from torch import load",
        "torch.load(f, weights_only=False)",
        "load = torch.load",
        "yaml.load(f, Loader=yaml.Loader)",
        "class L(yaml.UnsafeLoader): ...",
        "np.load(f, allow_pickle=True)",
        "subprocess.run(c, shell=True)",
        "os.system(c)",
        "from os import system",
        "httpx.get(u, verify=False)",
    ],
)
def test_what_runs_code_is_found(source: str) -> None:
    assert list(unsafe(source))


def test_what_is_safe_is_not_found() -> None:
    assert not list(
        unsafe("import re\nre.compile(x)\nclass L(yaml.SafeLoader): ...\nself.load(x)\nrun(c, shell=False)")
    )
    assert len(SOURCES) > 150


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_no_script_of_the_dashboard_makes_markup_or_code_of_text(path: Path) -> None:
    """`document.write` gets the whole page that the server sent, in the form that asks for the key."""
    text = path.read_text(encoding="utf-8")
    for banned in ("eval(", "new Function", "innerHTML", "outerHTML", "insertAdjacentHTML", "localStorage"):
        assert banned not in text, banned
    assert text.count("document.write(") == (path.name == "key_form.js")


# ---- files


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_a_server_writes_is_for_its_user_alone(tmp_path: Path, usual_umask: None) -> None:
    """Field trial B65: the tuning of the GPU and the request log, and the file before it."""
    tuned = tmp_path / "cache" / "kvortex" / "tuning.json"
    write(tuned, TransferTuning(1e10, 1e10))
    assert (mode(tuned), mode(tuned.parent)) == (0o600, 0o700)
    log = tmp_path / "requests.jsonl"
    for _ in range(2):
        RequestLog(log, 10**6, 16).close()
    assert [mode(log), mode(log.with_name("requests.jsonl.1"))] == [0o600, 0o600]


def test_what_init_writes_is_as_any_file_of_the_users(tmp_path: Path, usual_umask: None) -> None:
    """It holds no secret, and a service of another user may have to read it; nobody else can write it."""
    written = tmp_path / "kvortex.yaml"
    write_new(written, "model: m\n", force=False)
    assert mode(written) == 0o644
    target = tmp_path / "target"
    target.write_text("mine")
    link = tmp_path / "link.yaml"
    link.symlink_to(target)
    write_new(link, "model: m\n", force=True)
    assert target.read_text() == "mine"


# ---- YAML


@pytest.mark.parametrize(
    "value", ['!!python/object/apply:os.system ["touch {0}"]', '!!python/object/new:os.system ["touch {0}"]']
)
def test_a_tag_that_would_run_code_is_refused_in_one_line(tmp_path: Path, value: str) -> None:
    """Field trial B65."""
    fell = tmp_path / "fell"
    file = tmp_path / "kvortex.yaml"
    file.write_text("model: m\nseed: " + value.format(fell) + "\n")
    command = [sys.executable, "-c", "from kvortex_cli.main import main; main()"]
    answer = subprocess.run(
        [*command, "serve", "--dry-run", "--config", str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 2, answer
    (line,) = answer.stderr.splitlines()
    assert line.startswith(f"error: {file}:2: the tag")
    assert not fell.exists()
