"""`kvortex bench`: what does it gain here?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from kvortex_cli.bench_compare import CompareCommand, bench_compare
from kvortex_cli.bench_load import Html, check_writable
from kvortex_cli.bench_replay import bench_replay
from kvortex_cli.bench_serve import bench_serve

if TYPE_CHECKING:
    from rich.table import Table

    from kvortex.transfer.transfer_bench import TransferReport

_COLUMNS: Final = ("fragment", "method", "direction", "GB/s", "of peak", "GB/s beside", "of peak", "step", "worst")

bench_app = typer.Typer(
    name="bench",
    help="Measures what KVortex does on this machine.",
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@bench_app.callback(invoke_without_command=True)
def bench(ctx: typer.Context) -> None:
    """Measures what KVortex does on this machine."""
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(2)


bench_app.command("serve")(bench_serve)
bench_app.command("replay")(bench_replay)
bench_app.command("compare", cls=CompareCommand, options_metavar="[OPTIONS] [VLLM OPTIONS]")(bench_compare)


@bench_app.command("transfer")
def transfer(
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="VRAM and host RAM, each, to copy between.")
    ] = "4GiB",
    fragments: Annotated[
        str,
        typer.Option(
            "--fragments", metavar="SIZES", help="Contiguous bytes of a block on the GPU: a layer's, most often."
        ),
    ] = "4KiB,32KiB,512KiB,2MiB",
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
    html: Html = None,
) -> None:
    """Measure copies between host RAM and a GPU: how fast, and what they cost a model that runs beside them.

    Takes about a minute, and the GPU for itself. The first GPU that CUDA_VISIBLE_DEVICES names is measured.

    Example: kvortex bench transfer --fragments 64KiB,512KiB --json
    """
    num_bytes, fragment_sizes = _sizes(size, fragments)
    check_writable(html)
    from kvortex.errors import UnfitError
    from kvortex_cli.console import stderr, stdout

    try:
        from kvortex.transfer.transfer_bench import bench_transfer
    except ImportError as error:
        hint = "install vLLM with its GPU dependencies, which bring it"
        raise UnfitError(f"copies cannot be measured here: {error}", hint=hint) from error
    report = bench_transfer(num_bytes, fragment_sizes, stderr().print)
    if html is not None:
        _write_page(html, report, num_bytes)
    if as_json:
        _print_json(report)
    else:
        stdout().print(_table(report))


def _sizes(size: str, fragments: str) -> tuple[int, list[int]]:
    """Bytes of --size and of each of --fragments; raises UsageError naming the option that is wrong."""
    from kvortex.errors import UsageError
    from kvortex.sizes import BadValueError, parse_size

    def parsed(option: str, text: str) -> int:
        try:
            return parse_size(text.strip())
        except BadValueError as error:
            raise UsageError(f"{option}: {error.message}", hint=error.hint) from error

    num_bytes = parsed("--size", size)
    fragment_sizes = [parsed("--fragments", text) for text in fragments.split(",")]
    smallest = 32 * max(fragment_sizes)
    if num_bytes < smallest:
        raise UsageError(
            f"--size {size} is less than two blocks of 16 fragments of {max(fragment_sizes):,} bytes",
            hint=f"at least {smallest:,} bytes, or smaller --fragments",
        )
    return num_bytes, list(dict.fromkeys(fragment_sizes))


def _print_json(report: TransferReport) -> None:
    import json
    from dataclasses import asdict

    document = asdict(report)
    for shown, result in zip(document["results"], report.results, strict=True):
        shown["share_of_peak"] = report.share(result, result.bandwidth)
    print(json.dumps(document, indent=2))


def _table(report: TransferReport) -> Table:
    from rich.table import Table

    setting = report.setting
    title = (
        f"{setting.gpu}, driver {setting.driver}, CUDA {setting.cuda}, torch {setting.torch}, "
        f"triton {setting.triton}, KVortex {setting.kvortex}, {setting.host}\n"
        f"a model's step alone takes {report.step_s * 1e3:.1f} ms; * is what this GPU's tuning takes"
    )
    table = Table(title=title, title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, justify="left" if column in ("method", "direction") else "right", no_wrap=True)
    for cells in _rows(report):
        table.add_row(*cells)
    return table


def _rows(report: TransferReport) -> Iterator[tuple[str, ...]]:
    """Text for _COLUMNS."""
    for result in report.results:
        beside = ("-", "-", "-", "-")
        if result.beside is not None:
            beside = (
                f"{result.beside.bandwidth / 1e9:.1f}",
                f"{report.share(result, result.beside.bandwidth):.0%}",
                f"{result.beside.mean_step:.2f}x",
                f"{result.beside.worst_step:.2f}x",
            )
        yield (
            _shown_fragment(result.fragment_bytes),
            result.method + (" *" if result.is_chosen else ""),
            result.direction,
            f"{result.bandwidth / 1e9:.1f}",
            f"{report.share(result, result.bandwidth):.0%}",
            *beside,
        )


def _write_page(html: Path, report: TransferReport, num_bytes: int) -> None:
    from datetime import UTC, datetime

    from kvortex.bench.transfer_page import transfer_page
    from kvortex.sizes import format_bytes
    from kvortex_cli.bench_load import say

    setting = report.setting
    conditions = [
        ("GPU", f"{setting.gpu}, driver {setting.driver}"),
        ("versions", f"CUDA {setting.cuda}, torch {setting.torch}, triton {setting.triton}, KVortex {setting.kvortex}"),
        ("host", setting.host),
        (
            "copied between",
            f"{format_bytes(num_bytes)} of VRAM and as much pinned host RAM, or less for small fragments",
        ),
        ("a model's step alone", f"{report.step_s * 1e3:.1f} ms"),
        ("ended", f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"),
    ]
    page = transfer_page(_COLUMNS, _rows(report), report, _shown_fragment, conditions)
    html.write_text(page, encoding="utf-8")
    say(f"wrote {html}")


def _shown_fragment(num_bytes: int) -> str:
    if not num_bytes:
        return "-"
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes:,} B"
