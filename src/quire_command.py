"""The `quire` command, from its first moment on. `import quire` imports PyTorch, which takes a second or more.

This module is outside the package, so that an interrupt in that second ends the command as quietly as a later one.
"""

import os
import signal
import sys

INTERRUPTED = 130  # 128 + SIGINT


def main() -> int:
    """Run the command line; return its exit code."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is signal.default_int_handler:
        # No exception: an import that fails halfway may hide it, or report another one.
        signal.signal(signal.SIGINT, leave)
    from quire import cli

    signal.signal(signal.SIGINT, handler)
    return cli.main()


def leave(*_: object) -> None:
    """End the process."""
    print("interrupted", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)
