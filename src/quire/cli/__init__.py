"""The `quire` command: generate, check, bench, tune, env."""

import argparse
import sys
from collections.abc import Sequence

EXAMPLES = """examples:
  quire generate                                     # the embedded model continues a few prompts
  quire generate --model DIR --prompt 'Once upon a time'
  quire check                                        # the kernels against the float64 oracle, on what this machine has
  quire bench --quick                                # time beside the other libraries that are installed; without a GPU, a roofline
  quire tune --quick                                 # measure this GPU and fit the tree that plans walk
  quire env                                          # what is installed, and what would be chosen on this device and why
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; those of the process when not given.

    Returns:
        The exit code: 0 for success, 1 when what was checked is wrong, 2 for bad arguments, 130 when interrupted.
    """
    from quire import __version__
    from quire.cli import bench, check, env, generate, tune

    parser = argparse.ArgumentParser(
        prog="quire", description="Paged attention for LLM inference, in Python and Triton alone.", epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in (generate, check, bench, tune, env):
        command.add_parser(subparsers)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
