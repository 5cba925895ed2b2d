"""PyTorch's SDPA and FlexAttention. They read no pages, so they get contiguous copies of keys and values."""

import math
from collections.abc import Callable
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch

from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import refuse, refuse_special_dtypes_and_scores
from quire_tools.bench.scores import CAP, EXTENT

MOST_GROUPS = 2  # runs of equal lengths in a batch that FlexAttention is called for, once each


def sdpa_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    refuse_special_dtypes_and_scores(inputs)
    refuse(not inputs.case.uniform, "one length per batch, keys not paged")
    (group,) = groups_of(inputs)
    q, q_len, seq_len = group.queries(inputs), group.q_len, group.seq_len
    spec = inputs.case.spec
    refuse(spec.sliding_window is not None, "does not serve windows")
    options: dict[str, Any] = {"scale": spec.softmax_scale, "enable_gqa": True}
    if q_len == seq_len:
        options["is_causal"] = True
    elif q_len > 1:
        options["attn_mask"] = causal_lower_right(q_len, seq_len)

    def plan(table: torch.Tensor) -> Call:
        k, v = contiguous_kv(inputs, table, group)
        return lambda: scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return plan


def flex_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call FlexAttention once for each run of sequences of the same lengths."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    refuse_special_dtypes_and_scores(inputs)
    groups, spec = groups_of(inputs), inputs.case.spec
    refuse(len(groups) > MOST_GROUPS, f"more than {MOST_GROUPS} pairs of lengths, and keys are not paged")
    torch.compiler.reset()  # which otherwise compiles no more than eight cases
    compiled = torch.compile(flex_attention, dynamic=False)
    options: list[dict[str, Any]] = []
    for group in groups:
        before, window = group.seq_len - group.q_len, spec.sliding_window or group.seq_len
        mask = None
        if group.q_len > 1 or window < group.seq_len:
            lengths = group.q_len, group.seq_len
            mask = create_block_mask(visible(before, window), None, None, *lengths, device=inputs.q.device.type)
        options.append({"block_mask": mask, "score_mod": score_mod(inputs, group), "scale": spec.softmax_scale})

    def plan(table: torch.Tensor) -> Call:
        tensors = [(group.queries(inputs), *contiguous_kv(inputs, table, group)) for group in groups]

        def call() -> torch.Tensor:
            found = [
                compiled(*each, **some, enable_gqa=True).transpose(1, 2)
                for each, some in zip(tensors, options, strict=True)
            ]
            return found[0] if len(found) == 1 else torch.cat([part.reshape(-1, *out.shape[1:]) for part in found])

        return call

    return plan


def visible(before: int, window: int) -> Callable[..., torch.Tensor]:
    """Return FlexAttention's mask of causal attention over a window, with so many keys before the first query."""

    def is_visible(
        batch: torch.Tensor, head: torch.Tensor, q_index: torch.Tensor, kv_index: torch.Tensor
    ) -> torch.Tensor:
        return (kv_index <= q_index + before) & (kv_index > q_index + before - window)

    return is_visible


def score_mod(inputs: Inputs, group: "Group") -> Callable[..., torch.Tensor] | None:
    """Return what a case does to scores as FlexAttention has it."""
    name, before, first, q_len = inputs.case.scores, group.seq_len - group.q_len, group.first_token, group.q_len
    if name is None:
        return None
    if name == "softcap as a function":
        return lambda score, batch, head, q_index, kv_index: CAP * torch.tanh(score / CAP)
    (extra,) = inputs.extras
    if name == "ALiBi as a function":
        return lambda score, batch, head, q_index, kv_index: score - extra[head] * (q_index + before - kv_index).abs()
    if name == "relative bias":

        def relative(score: Any, batch: Any, head: Any, q_index: Any, kv_index: Any) -> torch.Tensor:
            distance = q_index + before - kv_index
            bias = extra[first + batch * q_len + q_index, head, distance.clamp(0, EXTENT - 1)]
            return score + torch.where((distance >= 0) & (distance < EXTENT), bias, 0.0)

        return relative
    assert name == "T5 buckets", name

    def buckets(score: Any, batch: Any, head: Any, q_index: Any, kv_index: Any) -> torch.Tensor:
        distance = (q_index + before - kv_index).clamp(min=0)
        far = 16 + (torch.log(distance.clamp(min=1) / 16) / math.log(128 / 16) * 16).int()
        return score + extra[torch.where(distance < 16, distance, far.clamp(max=31)), head]

    return buckets


class Group(NamedTuple):
    """Sequences of the same lengths, one after the other in the batch."""

    first_seq: int
    num_seqs: int
    first_token: int
    q_len: int
    seq_len: int

    def queries(self, inputs: Inputs) -> torch.Tensor:
        """Return their queries, [num_seqs, num_q_heads, q_len, head_dim]."""
        q = inputs.q[self.first_token : self.first_token + self.num_seqs * self.q_len]
        return q.view(-1, self.q_len, *q.shape[1:]).transpose(1, 2)


def groups_of(inputs: Inputs) -> list[Group]:
    """Return the runs of sequences of the same lengths."""
    lens = inputs.case.lens
    starts = [0, *accumulate(inputs.case.query_lens)]
    found, seq = [], 0
    for (q_len, seq_len), some in groupby(lens):
        found.append(Group(seq, len(list(some)), starts[seq], q_len, seq_len))
        seq += found[-1].num_seqs
    return found


def contiguous_kv(inputs: Inputs, table: torch.Tensor, group: Group) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of sequences of one length, [num_seqs, num_kv_heads, seq_len, head_dim] each."""
    pages = table[group.first_seq : group.first_seq + group.num_seqs, : -(-group.seq_len // inputs.case.page_size)]

    def gather(cache: torch.Tensor) -> torch.Tensor:
        return cache[pages.long()].flatten(1, 2)[:, : group.seq_len].transpose(1, 2).contiguous()

    return gather(inputs.cache.k), gather(inputs.cache.v)
