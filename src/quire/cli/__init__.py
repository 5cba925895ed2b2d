"""The `quire` command: its commands, of which bench and tune come with quire-tools."""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType

import quire
from quire.cli.arguments import TOOLS, CommandError, require_packages
from quire.cli.exit_codes import BAD_ARGUMENTS, INTERRUPTED, READER_LEFT
from quire.cli.streams import allow_any_encoding, discard_output
from quire.version import commit

COMMANDS = {
    "doctor": "say whether this machine can run Quire, and what to do if not",
    "generate": "continue prompts with a Hugging Face model",
    "check": "compare the kernels with the float64 oracle",
    "bench": "time attention next to other libraries (in quire-tools)",
    "tune": "fit the numbers by which plans choose (in quire-tools)",
    "warmup": "compile a server's kernels, and export them",
    "env": "versions, device, and what a plan chooses and why",
    "replay": "run a recorded call again, and judge it by the oracle",
}
OF_TOOLS = "bench", "tune"  # commands of the package quire_tools, which is another distribution
EXAMPLES = """examples:
  quire doctor                          # can this machine run Quire?
  quire generate --model src/quire/demo_model     # in a clone: the demo model continues a few prompts
  quire generate --model DIR --prompt 'Once upon a time'
  quire check                           # compare the kernels with the float64 oracle on this machine
  quire bench run --quick               # time Quire and the other libraries installed here
  quire tune sweep --output 1.jsonl     # time the variants of all kernels on this GPU
  quire warmup --export DIR --limits 64 8192 8192 --spec num_q_heads=32 num_kv_heads=8 head_dim=128  # for a server
  quire env                             # what is installed, and what a plan chooses on this device and why
  quire replay call.quire               # run a call that quire.debug.record wrote to a file

exit codes: 0 success, 1 a check failed, 2 bad arguments or a missing package, 130 interrupted
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: arguments; those of the process when not given.

    Returns:
        The exit code: 0 for success, 1 if a check failed, 2 for bad arguments or a missing package, 130
        when interrupted, 141 when the reader of the output left early.
    """
    allow_any_encoding()
    try:
        try:
            args = parse(sys.argv[1:] if argv is None else argv)
            return args.run(args)
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except CommandError as error:
        print(error, file=sys.stderr)
        return BAD_ARGUMENTS
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        discard_output()
        return READER_LEFT
    except OSError as error:  # a folder that may not be entered, a name that is too long, a full disk
        if error.filename is None:
            discard_output()
        where = "the output" if error.filename is None else repr(str(error.filename))
        print(f"{where} must be a file that can be used, got {error.strerror}; name another", file=sys.stderr)
        return BAD_ARGUMENTS


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments; of the commands, import only the one that is named."""
    parser = argparse.ArgumentParser(
        prog="quire",
        description="Paged attention for LLM inference, in Python and Triton.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show the version and the commit, and exit")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    named = next((argument for argument in argv if not argument.startswith("-")), None)
    for name, summary in COMMANDS.items():
        if name == named:
            module_of(name).add_parser(subparsers, summary)
        else:
            subparsers.add_parser(name, help=summary)
    return parser.parse_args(argv)  # where help is asked for, the process ends here


def module_of(command: str) -> ModuleType:
    """Return the module of a command."""
    if command not in OF_TOOLS:
        return import_module(f"quire.cli.{command}")
    require_packages(command, TOOLS, "quire_tools")
    return import_module(f"quire_tools.cli.{command}")


class ShowVersion(argparse.Action):
    """Print the version and the commit. git is asked only then."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"quire {quire.__version__}, commit {commit()}")
        parser.exit()
