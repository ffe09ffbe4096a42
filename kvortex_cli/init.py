"""`kvortex init MODEL`: a commented kvortex.yaml, sized for this machine."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from kvortex.hardware import Gpu, GpuReport, Ram
    from kvortex.kv_shape import KVShape
    from kvortex_cli.sizing import Sizing, Suggestion


def init(
    model: Annotated[
        str | None,
        typer.Argument(help="Model to serve: a Hub name or a directory. Optional with --interactive."),
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where to write.")] = Path(
        "kvortex.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it is there.")] = False,
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Ask for each value, with what suits this machine as default.")
    ] = False,
) -> None:
    """Write a configuration for MODEL, sized for this machine, with the reason beside each value.

    Example: kvortex init meta-llama/Llama-3.1-8B-Instruct -o kvortex.yaml
    """
    import shlex

    from kvortex.config.vllm_install import installed_vllm
    from kvortex.errors import UnfitError, UsageError
    from kvortex.hardware import read_gpus, read_ram
    from kvortex.model_files import require_path
    from kvortex_cli.console import report
    from kvortex_cli.interview import ask_model
    from kvortex_cli.sizing import suggest

    _check_output(output, force=force)
    if model is None and interactive:
        model = ask_model()
    if model is None:
        raise UsageError("no model is named", hint="kvortex init MODEL, or --interactive to be asked")
    if not model.strip() or not model.isprintable():
        raise UsageError(f"{model!r} is no model", hint="give a Hub name (owner/name) or a directory")
    require_path(model)
    try:
        install = installed_vllm()
    except UnfitError:
        install = None
    found, ram = read_gpus(), read_ram()
    gpus = () if install is not None and install.is_cpu_build else found.gpus
    shape, trouble = _read_shape(model)
    sizing = _ask_sizing(model, ram, gpus, shape) if interactive else suggest(ram, gpus, shape)
    file_name = _one_line(shlex.quote(str(output)))
    text = render(model, sizing, ram, found if gpus else None, trouble, file_name)
    write_new(output, text, force=force)
    report("kvortex", f"wrote {output}; next: kvortex doctor --config {output}")


def _ask_sizing(model: str, ram: Ram, gpus: tuple[Gpu, ...], shape: KVShape | None) -> Sizing:
    """What suits this machine, question by question: an answer may change what is suggested next."""
    from kvortex.config.machine import MachineFacts
    from kvortex.sizes import format_bytes
    from kvortex_cli.interview import Interview
    from kvortex_cli.sizing import Chosen, suggest

    interview = Interview(model, MachineFacts(ram.usable_bytes, len(gpus) or None))
    chosen = Chosen()

    def suggested(key: str) -> str:
        sizing = suggest(ram, gpus, shape, chosen)
        return next(s.value for s in (*sizing.vllm, *sizing.kv_cache) if s.key == key).strip('"')

    if gpus:
        question = f"How many of the {len(gpus)} visible GPUs share the model?"
        answer = interview.ask("tensor_parallel_size", question, suggested("tensor_parallel_size"))
        chosen = replace(chosen, tensor_parallel_size=int(answer))
    key = "gpu_memory_utilization"
    of = "each GPU's memory" if gpus else "RAM, on this machine without a GPU,"
    answer = interview.ask(key, f"What share of {of} may vLLM take for the model and its KV?", suggested(key))
    chosen = replace(chosen, gpu_memory_utilization=float(answer))
    usable = format_bytes(ram.usable_bytes)
    question = f"How much host RAM for the cache, the whole server? {usable} are usable now."
    answer = interview.ask("kv_cache.ram_cache_size", question, suggested("ram_cache_size"))
    chosen = replace(chosen, ram_cache_size=answer)
    key = "kv_cache.offload_threshold"
    question = "Copy cold blocks to RAM once this share of VRAM has no copy there? 0 copies every block at once."
    answer = interview.ask(key, question, suggested("offload_threshold"))
    return suggest(ram, gpus, shape, replace(chosen, offload_threshold=float(answer)))


def _read_shape(model: str) -> tuple[KVShape | None, str]:
    """The model's KV; or None, and why it cannot be read from here.

    Raises:
        ModelUnavailableError: there is no such model.
    """
    import os

    from kvortex.config.checks import is_elsewhere
    from kvortex.errors import KVortexError
    from kvortex.kv_shape import read_kv_shape
    from kvortex.model_files import ModelUnavailableError, read_model_files
    from kvortex_cli.console import report

    try:
        files = read_model_files(model)
        return read_kv_shape(files.config, source=files.source), ""
    except KVortexError as error:
        if isinstance(error, ModelUnavailableError) and error.is_absent and not is_elsewhere(model, os.environ):
            raise
        report("warning", f"{error.message}; sizes are chosen without knowing the model", error.hint)
        return None, error.message


def render(model: str, sizing: Sizing, ram: Ram, report: GpuReport | None, trouble: str, file_name: str) -> str:
    """The file's text.

    Args:
        report: the GPUs; None on vLLM's CPU build.
        trouble: why the model's configuration could not be read; "" when it was.
    """
    import json

    from kvortex import __version__
    from kvortex.config.settings import KVCacheSettings
    from kvortex.sizes import format_bytes
    from kvortex_cli.sizing import Suggestion

    names = [gpu.name for gpu in report.gpus] if report is not None else []
    counted = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)) or "no GPU in use"
    lines = [
        f"# Written by `kvortex init` {__version__} for this machine: {counted}, "
        f"{format_bytes(ram.usable_bytes)} of RAM usable.",
        f"# Check it with `kvortex doctor --config {file_name}`;",
        f"# serve with `kvortex serve --config {file_name}`.",
    ]
    if trouble:
        lines.append(f"# The model's size is not known: {_one_line(trouble)}")
    prefetch = KVCacheSettings.model_fields["prefetch_enabled"].default
    fixed = (
        Suggestion("backend", '"kvortex"', '"none" serves plain vLLM, to compare with'),
        Suggestion(
            "prefetch_enabled",
            str(prefetch).lower(),
            "true brings conversations back before they ask; may gain time, with hints",
        ),
    )
    own = sorted((*fixed, *sizing.kv_cache), key=lambda suggestion: _ORDER.index(suggestion.key))
    top = [Suggestion("model", json.dumps(model, ensure_ascii=False), ""), *sizing.vllm]
    body = [*_aligned(top, ""), "", "kv_cache:", *_aligned(own, "  ")]
    return "\n".join([*lines, "", *body, ""])


_ORDER = ("backend", "offload_threshold", "ram_cache_size", "prefetch_enabled", "num_streams", "block_size")


def _aligned(suggestions: list[Suggestion], indent: str) -> list[str]:
    entries = [f"{indent}{suggestion.key}: {suggestion.value}" for suggestion in suggestions]
    width = max(len(entry) for entry, s in zip(entries, suggestions, strict=True) if s.reason)
    return [
        f"{entry.ljust(width)}  # {_one_line(suggestion.reason)}" if suggestion.reason else entry
        for entry, suggestion in zip(entries, suggestions, strict=True)
    ]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _check_output(output: Path, *, force: bool) -> None:
    """Refuses early what `write_new` would refuse after the model was looked up."""
    from kvortex.errors import UsageError

    if output.is_dir():
        raise UsageError(f"{output} is a directory", hint=f"give a file: -o {output / 'kvortex.yaml'}")
    if not output.parent.is_dir():
        raise UsageError(f"there is no directory {output.parent}", hint="make it first, or give another -o")
    if not force and (output.exists() or output.is_symlink()):
        raise _exists(output)


def _exists(output: Path) -> Exception:
    from kvortex.errors import UsageError

    return UsageError(f"{output} is already there", hint="give another -o, or --force to overwrite it")


def write_new(output: Path, text: str, *, force: bool) -> None:
    """Writes the whole file or nothing; without `force` never over another, even one that appears meanwhile.

    Raises:
        UsageError: it is there already, or cannot be written.
    """
    import os
    import secrets

    from kvortex.errors import UsageError

    draft = output.parent / f".{output.name}.{secrets.token_hex(4)}"
    try:
        with draft.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if force:
            draft.replace(output)
        else:
            _move_to_free_name(draft, output)
    except FileExistsError:
        raise _exists(output) from None
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}", hint="give another -o") from None
    finally:
        draft.unlink(missing_ok=True)


def _move_to_free_name(draft: Path, output: Path) -> None:
    """Raises FileExistsError where a rename would overwrite."""
    try:
        output.hardlink_to(draft)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links: take the name first.
        output.touch(exist_ok=False)
        draft.replace(output)
