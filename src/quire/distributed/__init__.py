"""Contexts over several GPUs, over `torch.distributed`: each rank attends to its share of the keys, and states merge.

* Decode: each rank holds a share of each sequence's pages. `ContextShard` says which keys are whose, and
  `sharded_attention` attends to the rank's own keys and merges the states of all ranks in one collective.
* Prompts: each rank holds a share of the tokens, and keys and values go round in a ring. `plan_ring` decides, and
  `ring_attention` computes each share while the next one is on its way.

Groups are process groups or one-dimensional device meshes; where a group is left out, it is the default one.
"""

from quire.distributed.ring import RingPlan, plan_ring, ring_attention
from quire.distributed.sharded import ContextShard, merge_over_ranks, sharded_attention

__all__ = ["ContextShard", "RingPlan", "merge_over_ranks", "plan_ring", "ring_attention", "sharded_attention"]
