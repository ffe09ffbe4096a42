"""The `kvortex` command. `--help` imports neither torch nor vllm: a command's body imports what it needs."""

from __future__ import annotations

from typing import Annotated, NoReturn

import typer

from kvortex import __version__
from kvortex_cli.bench import bench_app
from kvortex_cli.console import run_reporting_errors
from kvortex_cli.doctor import doctor
from kvortex_cli.init import init
from kvortex_cli.inspect import inspect_command
from kvortex_cli.plan import plan
from kvortex_cli.serve import ServeCommand, serve

app = typer.Typer(
    name="kvortex",
    help="Keeps idle conversations' KV cache in host RAM, for vLLM.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"kvortex {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    """Keeps idle conversations' KV cache in host RAM, for vLLM.

    Start with `kvortex doctor`; `kvortex serve MODEL` is `vllm serve MODEL` with offload.
    """
    assert not version
    if ctx.invoked_subcommand is None:
        typer.echo(ctx.get_help(), err=True)
        raise typer.Exit(2)


app.command("doctor")(doctor)
app.command("init")(init)
app.command("serve", cls=ServeCommand, options_metavar="[OPTIONS] [VLLM OPTIONS]")(serve)
app.command("inspect")(inspect_command)
app.command("plan")(plan)
app.add_typer(bench_app)


def main() -> NoReturn:
    """Entry point: runs the command line and exits with its code."""
    run_reporting_errors(lambda: app(prog_name="kvortex", standalone_mode=False))
