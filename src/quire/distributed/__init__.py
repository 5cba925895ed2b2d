"""Contexts over several GPUs, over `torch.distributed`: each rank attends to its share of the keys, and states merge.

* Decode: each rank holds a share of each sequence's pages. `ContextShard` says which rank holds which keys, and
  `sharded_attention` attends to the rank's own keys and merges the states of all ranks in one collective.
* Prompts: each rank holds a share of the tokens, and keys and values go around a ring. `plan_ring` decides, and
  `ring_attention` computes each share while it receives the next one.

Groups are process groups or one-dimensional device meshes. Without a group, the default one is used.
"""

from quire.distributed.ring import RingPlan, plan_ring, ring_attention
from quire.distributed.sharded import ContextShard, merge_over_ranks, sharded_attention

__all__ = ["ContextShard", "RingPlan", "merge_over_ranks", "plan_ring", "ring_attention", "sharded_attention"]
