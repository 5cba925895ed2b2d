"""Errors that are Quire's own.

A broken contract raises `ValueError` or `TypeError`, worded `<argument> must <contract>, got <value>; <what to do>`. The two below are for
requests that are sound and still cannot be met.
"""


class UnsupportedError(NotImplementedError):
    """A sound request that Quire does not serve; the message names what was wanted and what is supported."""


class OutOfPagesError(RuntimeError):
    """The page pool has too few free pages; nothing was changed."""
