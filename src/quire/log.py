"""Say what Quire decides, through Python's `logging`: each new decision once, at level DEBUG.

| logger | what it says |
| --- | --- |
| `quire.plan` | what `quire.plan` was asked, what it chose, and why |
| `quire.launch` | a kernel's first launch, what calls take, and why a fallback took the place of a launch |
| `quire.start` | warm-ups, operators that `torch.compile` traced, and which layers an engine gave to Quire |

An application sets the level of these loggers, or of their parent `quire`, and has its handlers show the lines. The
variable `QUIRE_LOG` (`plan`, `launch`, or `all` for all three) does it from outside. Lines that no handler of the
application's takes then go to standard error.

A logger is asked when a plan is made, a kernel is compiled or a fallback is bound, never when a layer calls
`quire.attention`.
"""

import logging
import os
import sys
import warnings
from collections.abc import Hashable, Iterator

from quire.spec import AttentionSpec

VARIABLE = "QUIRE_LOG"
DEBUG = logging.DEBUG
PARENT = logging.getLogger("quire")
PLAN, LAUNCH, START = (logging.getLogger(f"quire.{name}") for name in ("plan", "launch", "start"))
SHOWN = {"plan": (PLAN,), "launch": (LAUNCH,), "all": (PLAN, LAUNCH, START)}  # by the variable's value
FLAGS = ("sliding_window", "sliding_window_right", "softcap", "alibi", "sinks", "allow_tf32", "allow_fp8")
MOST_SAID = 1 << 14  # decisions that are remembered
SAID: dict[Hashable, None] = {}  # in the order in which they were first said


class ToStandardError(logging.Handler):
    """Write lines to standard error, but for those that a handler of the application's takes."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line to what is `sys.stderr` now."""
        if any(handler is not self and takes(handler, record) for handler in handlers(record)):
            return
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except (OSError, ValueError):  # closed
            self.handleError(record)


def takes(handler: logging.Handler, record: logging.LogRecord) -> bool:
    """Return whether a handler shows a record that comes to it."""
    return handler.level <= record.levelno and not isinstance(handler, logging.NullHandler)


def handlers(record: logging.LogRecord) -> Iterator[logging.Handler]:
    """Return the handlers that a record comes to."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def show(wanted: str) -> None:
    """Let loggers speak, as `QUIRE_LOG` asks; warn of another value. An empty one asks for nothing."""
    if wanted not in ("", *SHOWN):
        warnings.warn(f"{VARIABLE} must be plan, launch or all, got {wanted!r}; Quire logs nothing", stacklevel=2)
        return
    for logger in SHOWN.get(wanted, ()):
        logger.setLevel(DEBUG)
    if wanted and not any(isinstance(handler, ToStandardError) for handler in PARENT.handlers):
        handler = ToStandardError()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        PARENT.addHandler(handler)


def is_on(logger: logging.Logger) -> bool:
    """Return whether a logger speaks. Ask before a line is made."""
    return logger.isEnabledFor(DEBUG)


def say_once(logger: logging.Logger, line: str, decision: Hashable = None) -> None:
    """Log a line, unless it was logged before, or another line about the same decision was."""
    key = logger.name, line if decision is None else decision
    if key in SAID:
        return
    if len(SAID) >= MOST_SAID:
        del SAID[next(iter(SAID))]
    SAID[key] = None
    logger.debug("%s", line)


def was_said(logger: logging.Logger, decision: Hashable) -> bool:
    """Return whether a line about a decision was logged."""
    return (logger.name, decision) in SAID


def micros(time: float) -> str:
    """Return a time in µs with three digits, or all before the point."""
    return f"{time:,.0f}" if time >= 100 else f"{time:.3g}"


def words_of(spec: AttentionSpec) -> str:
    """Describe a spec in a few words: heads, dtypes, and what is not usual."""
    heads = f"{spec.num_q_heads}/{spec.num_kv_heads}/{spec.head_dim}"
    if spec.latent:
        heads = f"{spec.num_q_heads} heads on latents of {spec.kv_lora_rank}+{spec.qk_rope_head_dim}"
    elif spec.head_dim_v != spec.head_dim:
        heads += f"/{spec.head_dim_v}"
    words = [f"{heads} {spec.dtype}".replace("torch.", "")]
    if spec.kv_dtype is not spec.dtype:
        words.append(f"a cache in {spec.kv_format or spec.kv_dtype}".replace("torch.", ""))
    if not spec.causal:
        words.append("not causal")
    for name in FLAGS:
        value = getattr(spec, name)
        if value is not None and value is not False:
            words.append(name if value is True else f"{name}={value}")
    words += [f"{one.kind} {one.name}" for one in (spec.score, spec.mask) if one is not None]
    return ", ".join(words)


PARENT.addHandler(logging.NullHandler())
show(os.environ.get(VARIABLE, ""))
