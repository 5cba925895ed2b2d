"""Quire: paged attention for LLM inference, in Python and Triton."""

from quire import draft_trees as draft_trees
from quire import indexer as indexer
from quire import intervals as intervals
from quire.allocator import PageAllocator
from quire.api import (
    attention,
    copy_pages,
    merge_states,
    union_attention,
    varlen_attention,
    write_kv,
    write_latent,
)
from quire.batch import Batch, ChosenKeys
from quire.cache import PagedKVCache
from quire.compile_ahead.verbs import begin_warmup, no_compilation, warmup, workspace_size
from quire.errors import OutOfPagesError, UnsupportedError
from quire.norm_rope import QKNorm, Rope
from quire.plan import Plan, is_worth_sharing, plan
from quire.score_functions import mask, score
from quire.spec import AttentionSpec
from quire.state import State
from quire.version import __version__ as __version__

__all__ = [
    "AttentionSpec",
    "Batch",
    "ChosenKeys",
    "OutOfPagesError",
    "PageAllocator",
    "PagedKVCache",
    "Plan",
    "QKNorm",
    "Rope",
    "State",
    "UnsupportedError",
    "attention",
    "begin_warmup",
    "copy_pages",
    "is_worth_sharing",
    "mask",
    "merge_states",
    "no_compilation",
    "plan",
    "score",
    "union_attention",
    "varlen_attention",
    "warmup",
    "workspace_size",
    "write_kv",
    "write_latent",
]
