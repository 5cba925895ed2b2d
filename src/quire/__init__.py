"""Quire: paged attention for LLM inference, in Python and Triton alone."""

from quire.api import attention, varlen_attention
from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.errors import OutOfPagesError, UnsupportedError
from quire.plan import Plan, plan
from quire.spec import AttentionSpec
from quire.state import State

__version__ = "0.1.0"

__all__ = [
    "AttentionSpec",
    "Batch",
    "OutOfPagesError",
    "PagedKVCache",
    "Plan",
    "State",
    "UnsupportedError",
    "attention",
    "plan",
    "varlen_attention",
]
