"""`python -m kvortex.vllm_plugin.server MODEL [options]`: vLLM's own `vllm serve`, by its parts.

vLLM's console script asks for a distribution called `vllm` and fails on the CPU build; its parts do not.
"""

from __future__ import annotations

import sys


def main(argv: list[str]) -> None:
    """Runs vLLM's server in this process until it ends; argparse's exit 2 on a wrong option."""
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = ServeSubcommand()
    parser = FlexibleArgumentParser(prog="kvortex serve")
    command.subparser_init(parser.add_subparsers(required=True, dest="subparser"))
    args = parser.parse_args(["serve", *argv])
    command.validate(args)
    command.cmd(args)


if __name__ == "__main__":
    main(sys.argv[1:])
