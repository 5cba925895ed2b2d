"""The launches of the compile ring: kinds of batches × head dims × feature sets, called as a user calls them."""

from dataclasses import dataclass, field

import torch

import quire

BATCHES = {  # sequences, queries and keys of each
    "decode, short": (1, 1, 128),
    "decode": (128, 1, 2048),
    "decode, split": (1, 1, 16384),
    "drafts": (8, 8, 2048),
    "prompt": (1, 256, 256),
    "prefill": (4, 4096, 4096),
    "chunk, split": (1, 64, 16384),
}
HEAD_DIMS = (64, 128, 256)
MANY = {"softcap": 30.0, "alibi": True, "sinks": True, "sliding_window": 1024}


@dataclass(frozen=True)
class Features:
    """What a launch has beyond the ordinary: fields of the spec, of the cache, and of the batch."""

    spec: dict = field(default_factory=dict)
    page_size: int = 16
    layout: str = "NHD"
    scales: str = "head"
    flat_table: bool = False
    lse: bool = False


FEATURES = {
    "plain": Features(),
    "many, with lse": Features(MANY, lse=True),
    "softcap": Features({"softcap": 30.0}),
    "sinks, window": Features({"sinks": True, "sliding_window": 128}),
    "bidirectional": Features({"causal": False, "sliding_window": 64, "sliding_window_right": 32}),
    "float16": Features({"dtype": torch.float16}),
    "float32": Features({"dtype": torch.float32}),
    "tf32": Features({"dtype": torch.float32, "allow_tf32": True}),
    "e4m3": Features({"kv_dtype": torch.float8_e4m3fn}),
    "e5m2 per token": Features({"kv_dtype": torch.float8_e5m2}, scales="token", layout="HND"),
    "int8 per token": Features({"kv_dtype": torch.int8}, scales="token"),
    "float32, e4m3": Features({"dtype": torch.float32, "kv_dtype": torch.float8_e4m3fn}),
    "vLLM's original": Features(layout="HDNX"),
    "pages of 1, flat": Features(page_size=1, flat_table=True),
    "pages of 528": Features(page_size=528),
    "other value width": Features({"head_dim_v": 32}),
}


def attend(batch: str, head_dim: int, features: str, heads: tuple[int, int] = (32, 8)) -> quire.Plan:
    """Launch attention; return its plan."""
    num_seqs, q_len, kv_len = BATCHES[batch]
    wanted = FEATURES[features]
    spec = quire.AttentionSpec(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=head_dim, **{"dtype": torch.bfloat16} | wanted.spec)
    cache = make_cache(spec, wanted)
    pages = -(-kv_len // wanted.page_size)
    cu_seqlens_q = torch.zeros(num_seqs + 1, dtype=torch.int32)
    table = torch.zeros((num_seqs * pages,) if wanted.flat_table else (num_seqs, pages), dtype=torch.int32)
    described = quire.Batch(table, cu_seqlens_q[1:], cu_seqlens_q, cu_seqlens_q.clone() if wanted.flat_table else None)
    plan = quire.plan(spec, described, max_query_len=q_len, max_seq_len=kv_len)
    q = torch.empty(plan.num_tokens, spec.num_q_heads, head_dim, dtype=spec.dtype)
    table = torch.zeros(spec.num_q_heads)
    quire.attention(q, cache, plan, sinks=table if spec.sinks else None, alibi_slopes=table if spec.alibi else None, return_lse=wanted.lse)
    return plan


def make_cache(spec: quire.AttentionSpec, wanted: Features, num_pages: int = 4) -> quire.PagedKVCache:
    cache = quire.PagedKVCache.empty(spec, num_pages, wanted.page_size, layout=wanted.layout)
    if wanted.scales == "token":
        scale = torch.ones(num_pages, wanted.page_size, spec.num_kv_heads)
        return quire.PagedKVCache(cache.k, cache.v, wanted.layout, scale, scale.clone())
    return cache
