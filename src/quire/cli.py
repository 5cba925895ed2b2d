"""The `quire` command: generate, check, env."""

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    from quire import check, env, generate

    parser = argparse.ArgumentParser(prog="quire", description="Paged attention for LLM inference, in Python and Triton alone.")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, check, env):
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    return args.run(args)


if __name__ == "__main__":
    sys.exit(main())
