"""The launches of the compile suite: kinds of batches × head dims × feature sets, called as a user calls them."""

from dataclasses import dataclass, field, replace

import torch
import triton

import quire
from quire.dispatch.request import cdiv
from quire.targets import TARGETS
from tests.extended import OLDEST

BATCHES = {  # sequences, queries and keys of each; query tokens of the batch, if lengths differ
    "decode, short": (1, 1, 128),
    "decode": (128, 1, 2048),
    "decode, split": (1, 1, 16384),
    "drafts": (8, 8, 2048),
    "prompt": (1, 256, 256),
    "prefill": (4, 4096, 4096),
    "chunk, split": (1, 64, 16384),
    "mixed": (34, 1024, 4096, 1600),
}
APPENDING = {"decode, 64": (64, 1, 2048)}  # as many sequences as a launch writes the new tokens of
HEAD_DIMS = (64, 128, 256)
ODD_HEAD_DIMS = (16, 40, 80, 96, 192)
WIDE = {  # beyond 256, on every target, and what else on targets with a tree: batch, head dim, features
    "every target": (("decode, split", 512, "plain"), ("prefill", 512, "plain")),
    "with a tree": (("drafts", 512, "plain"), ("decode, split", 512, "e4m3"), ("prefill", 320, "many, with lse")),
}


@dataclass(frozen=True)
class Features:
    """What a launch has in addition to the defaults: fields of the spec, of the cache, and of the batch."""

    spec: dict = field(default_factory=dict)
    heads: tuple[int, int] = (32, 8)
    page_size: int = 16
    layout: str = "NHD"
    scales: str = "head"
    flat_table: bool = False
    lse: bool = False
    per_token: tuple[str, ...] = ()  # fields of the batch with an entry for each token
    out_scale: bool = False  # of an output in e4m3


FEATURES = {
    "plain": Features(),
    "many, with lse": Features({"softcap": 30.0, "alibi": True, "sinks": True, "sliding_window": 1024}, lse=True),
    "softcap": Features({"softcap": 30.0}),
    "sinks, window": Features({"sinks": True, "sliding_window": 128}),
    "bidirectional": Features({"causal": False, "sliding_window": 64, "sliding_window_right": 32}, layout="HND"),
    "float16": Features({"dtype": torch.float16}),
    "float32": Features({"dtype": torch.float32}),
    "tf32": Features({"dtype": torch.float32, "allow_tf32": True}),
    "e4m3": Features({"kv_dtype": torch.float8_e4m3fn}),
    "fp8 products": Features({"kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}),
    "e5m2 per token": Features({"kv_dtype": torch.float8_e5m2}, scales="token"),
    "int8 per token": Features({"kv_dtype": torch.int8}, scales="token"),
    "float32, e4m3": Features({"dtype": torch.float32, "kv_dtype": torch.float8_e4m3fn}),
    "vLLM's original": Features(layout="HDNX"),
    "pages of 1, flat": Features(page_size=1, flat_table=True),
    "pages of 528": Features(page_size=528),
    "other value width": Features({"head_dim_v": 32}),
    "groups of 5": Features(heads=(40, 8)),
    "MQA": Features(heads=(32, 1)),
    "intervals": Features(per_token=("key_begin", "key_end")),
    "trees": Features(per_token=("tree_bits",)),
    "trees, window": Features(per_token=("key_begin", "tree_bits")),
}
OF_TREES = ("drafts", "chunk, split")  # batches with at most 64 queries for each sequence
COMBINED = {  # features that are compiled together: each reaches the compiler as it does alone
    "pages of 1, flat, groups of 5": Features(heads=(40, 8), page_size=1, flat_table=True),
    "pages of 528, MQA": Features(heads=(32, 1), page_size=528),
    "bidirectional, other value width": Features(FEATURES["bidirectional"].spec | {"head_dim_v": 32}, layout="HND"),
    "sinks, lse, e4m3 output": Features({"sinks": True}, lse=True, out_scale=True),
    "int4": Features({"kv_format": "int4"}),
    "nvfp4": Features({"kv_format": "nvfp4"}),
    "k8v4": Features({"kv_format": "k8v4"}),
}
TOGETHER = {
    "softcap", "sinks, window",  # in "many, with lse"; the Hopper kernel's loop for a softcap alone has a test
    "bidirectional", "other value width", "pages of 1, flat", "groups of 5", "pages of 528", "MQA",
}  # fmt: skip
COMPILED = [name for name in (*FEATURES, *COMBINED) if name not in TOGETHER]

# Kernels that find a schedule, before the first layer of a step.
SCHEDULES = ("schedule_kernel", "mla_schedule_kernel", "hopper_schedule_kernel")
TUNED = ("sm90", "gfx942")  # targets with a tree, where default configurations must not spill
OUT_OF_TURN = {  # prompts of sm90: some are cut; cut e4m3 of 128 spills 72 bytes
    "many, with lse": ("chunk, split", 128),
    "float16": ("chunk, split", 128),
    "e4m3": ("chunk, split", 256),
    "pages of 528, MQA": ("prefill", 128),  # with two kinds of boxes
}
PROMPTS = (("prompt", 128), ("prefill", 64), ("prompt", 256))
# By default, these are compiled to machine code: a launch of each target that has no record (`static.CARDS`), and a few
# features whose loops differ most. Of all features, Triton's first stage is run. The oldest Triton compiles Gluon
# kernels, in half the time.
BY_DEFAULT = (
    *(("sm80", "plain", "prefill"), ("sm86", "plain", "decode, split"), ("sm89", "plain", "prefill")),
    *(("gfx90a", "plain", "prefill"), ("sm90", "plain", "decode"), ("sm90", "plain", "mixed")),
    *(("gfx942", "many, with lse", "decode"), ("sm90", "float32", "prompt"), ("sm90", "k8v4", "prompt")),
)
OLDEST_BY_DEFAULT = (
    *(("sm90", "plain", "chunk, split"), ("gfx942", "plain", "prefill")),
    *(("sm90", "tf32", "prefill"), ("sm90", "fp8 products", "prompt")),
)


def selection(target: str, features: str) -> list[tuple[str, int]]:
    """Return which (batch, head dim) to launch: for `plain` the most, of other features one, or none.

    sm90 compiles prompts of each feature and gfx942 all batches, in turn. One of the other targets compiles it too.
    """
    if features == "plain":
        return plain_selection(target)
    turn = COMPILED.index(features)
    dim = HEAD_DIMS[(turn + turn // 3) % 3]
    trees = "tree_bits" in (FEATURES | COMBINED)[features].per_token
    if target not in TUNED:
        others = [name for name in TARGETS if name not in TUNED]
        batch = OF_TREES[turn % 2] if trees else ("decode, split", "prefill", "decode")[turn % 3]
        return [(batch, dim)] if others[3 * turn % len(others)] == target else []
    if triton.__version__ == OLDEST and TUNED[turn % 2] != target and features != "fp8 products":
        return []
    if trees:
        return [(OF_TREES[(turn + TUNED.index(target)) % 2], dim)]
    if target == "sm90":
        return [OUT_OF_TURN.get(features, PROMPTS[turn % 3])]
    return [(list(BATCHES)[turn % len(BATCHES)], dim)]


def is_extended(target: str, features: str, batch: str, head_dim: int) -> bool:
    """Return whether a launch of `selection` only repeats what others show."""
    wanted = OLDEST_BY_DEFAULT if triton.__version__ == OLDEST else BY_DEFAULT
    return (target, features, batch) not in wanted or head_dim in ODD_HEAD_DIMS


def plain_selection(target: str) -> list[tuple[str, int]]:
    """Return the launches without features: on tuned targets each batch, with head dims in turn."""
    batches, column, oldest = list(BATCHES), list(TARGETS).index(target), triton.__version__ == OLDEST
    odd = [(batches[i], dim) for i, dim in enumerate(ODD_HEAD_DIMS, start=1)]
    if target in TUNED:  # the two ends of the supported Tritons have the batches with different head dims
        first = TUNED.index(target)
        every = [(batch, HEAD_DIMS[(i + first + oldest) % 3]) for i, batch in enumerate(batches)]
        return every[first::2] if oldest else every + odd[first::2]
    some = [("decode, split", HEAD_DIMS[column % 3]), ("prefill", HEAD_DIMS[1 + column % 2])]
    return some + odd[:3:2] if target == "sm80" else some


def attend(batch: str, head_dim: int, features: str, batch_invariant: bool = False) -> quire.Plan:
    """Launch attention; return its plan."""
    wanted = (FEATURES | COMBINED)[features]
    plan = plan_of(batch, make_spec(head_dim, wanted), wanted, batch_invariant)
    quire.attention(**make_inputs(plan, wanted), plan=plan)
    return plan


def append(batch: str, head_dim: int, features: str, batch_invariant: bool = False) -> quire.Plan:
    """Launch attention that also writes the batch's tokens, in one launch; return its plan."""
    wanted = FEATURES[features]
    plan = plan_of(batch, make_spec(head_dim, wanted), wanted, batch_invariant, "portable")
    quire.attention(**make_inputs(plan, wanted), **new_tokens(plan), plan=plan)
    return plan


def rotate(batch: str, head_dim: int, features: str, **options) -> quire.Plan:
    """Launch attention that also normalises, rotates and writes the batch's tokens; return its plan."""
    wanted = FEATURES[features]
    plan = plan_of(batch, make_spec(head_dim, wanted), wanted, kernel="portable")
    quire.attention(**make_inputs(plan, wanted), **new_tokens(plan), **norm_rope_of(plan, **options), plan=plan)
    return plan


def norm_rope_of(
    plan: quire.Plan, rotary_dim: int | None = None, interleaved: bool = False, qk_norm: bool = True, rope: bool = True
) -> dict:
    """Return the two halves of a table of cosines and sines, as vLLM holds it, and the weights of a norm."""
    spec, num_tokens = plan.spec, plan.bounds.num_tokens
    made = {}
    if rope:
        cos, sin = torch.zeros(4096, rotary_dim or spec.head_dim, dtype=spec.dtype).chunk(2, 1)
        made["rope"] = quire.Rope(cos, sin, torch.zeros(num_tokens, dtype=torch.int64), interleaved)
    if qk_norm:
        made["qk_norm"] = quire.QKNorm(*torch.ones(2, spec.head_dim, dtype=spec.dtype), 1e-6)
    return made


def new_tokens(plan: quire.Plan) -> dict:
    """Return new keys and values, as slices of a fused projection, and their slots."""
    spec, num_tokens = plan.spec, plan.bounds.num_tokens
    widths = [spec.num_kv_heads * dim for dim in (spec.head_dim, spec.head_dim_v)]
    k, v = torch.empty(num_tokens, sum(widths), dtype=spec.dtype).split(widths, 1)
    heads = spec.num_kv_heads, -1
    slots = torch.zeros(num_tokens, dtype=torch.int64)
    return {"k": k.unflatten(1, heads), "v": v.unflatten(1, heads), "slot_mapping": slots}


def plan_of(
    batch: str,
    spec: quire.AttentionSpec,
    wanted: Features,
    batch_invariant: bool = False,
    kernel: str | None = None,
) -> quire.Plan:
    """Plan for one of BATCHES or APPENDING."""
    num_seqs, q_len, kv_len, *num_tokens = (BATCHES | APPENDING)[batch]
    pages = cdiv(kv_len, wanted.page_size)
    cu_seqlens_q = torch.zeros(num_seqs + 1, dtype=torch.int32)
    table = torch.zeros((num_seqs * pages,) if wanted.flat_table else (num_seqs, pages), dtype=torch.int32)
    starts = None if batch in ("decode", "decode, 64", "decode, split") else cu_seqlens_q
    num_tokens = num_tokens[0] if num_tokens else None
    dtypes = {"key_begin": torch.int32, "key_end": torch.int32, "tree_bits": torch.int64}
    rows = num_tokens or num_seqs * q_len
    seen = {name: torch.zeros(rows, dtype=dtypes[name]) for name in wanted.per_token}
    cu_pages = cu_seqlens_q.clone() if wanted.flat_table else None
    described = quire.Batch(table, cu_seqlens_q[1:], starts, cu_pages, **seen)
    bounds = {"max_query_len": q_len, "max_seq_len": kv_len, "num_tokens": num_tokens}
    return quire.plan(spec, described, **bounds, batch_invariant=batch_invariant, kernel=kernel)


def make_inputs(plan: quire.Plan, wanted: Features) -> dict:
    """Return the arguments of `quire.attention`, without the plan."""
    spec = plan.spec
    row = torch.zeros(spec.num_q_heads)
    return {
        "q": torch.empty(plan.bounds.num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype),
        "cache": make_cache(spec, wanted),
        "sinks": row if spec.sinks else None,
        "alibi_slopes": row if spec.alibi else None,
        "return_lse": wanted.lse,
        "out_scale": torch.ones(1) if wanted.out_scale else None,
    }


def write(head_dim: int, features: str) -> None:
    """Launch the write of four tokens and the copy of a page."""
    wanted = (FEATURES | COMBINED)[features]
    spec = make_spec(head_dim, wanted)
    cache = make_cache(spec, wanted)
    k, v = (torch.empty(4, spec.num_kv_heads, dim, dtype=spec.dtype) for dim in (spec.head_dim, spec.head_dim_v))
    quire.write_kv(k, v, cache, torch.zeros(4, dtype=torch.int64))
    quire.copy_pages(cache, cache, torch.zeros(1, 2, dtype=torch.int64))


LATENTS = {  # dtype of queries and of the cache, layout, rank and rotary columns
    "bfloat16": (torch.bfloat16, None, "NHD", 512, 64),
    "no rotary columns": (torch.float16, None, "NHD", 512, 0),
    "odd widths": (torch.float32, None, "NHD", 48, 16),
    "e4m3": (torch.bfloat16, torch.float8_e4m3fn, "NHD", 256, 64),
    "records": (torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla", 512, 64),
    "records, float16": (torch.float16, torch.float8_e4m3fn, "fp8_ds_mla", 512, 64),
    "records of 584 bytes": (torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla_584", 512, 0),
    "records of 528 bytes": (torch.bfloat16, torch.float8_e4m3fn, "fp8_ds_mla_528", 512, 0),
}


LATENT_BATCHES = {  # sequences, queries and keys of each, query heads
    "decode": (32, 1, 4096, 16),
    "one long": (1, 1, 16384, 16),
    "many heads": (32, 1, 4096, 128),
    "drafts": (8, 3, 4096, 64),
    "prompt": (2, 300, 2000, 16),
}
LATENT_LAUNCHES = {  # of each target, the kind of latents and the batch: no target and no kind is left out
    "sm80": (
        ("bfloat16", "decode"), ("no rotary columns", "drafts"), ("e4m3", "decode"), ("records, float16", "one long"),
    ),
    "sm86": (("bfloat16", "prompt"),),
    "sm89": (("records", "many heads"),),
    "sm90": (
        ("bfloat16", "decode"), ("bfloat16", "many heads"), ("bfloat16", "prompt"), ("e4m3", "many heads"),
        ("records", "decode"),
    ),
    "sm100": (("bfloat16", "drafts"), ("records of 528 bytes", "decode")),
    "sm120": (("e4m3", "prompt"), ("records of 584 bytes", "decode")),
    "gfx90a": (("no rotary columns", "decode"),),
    "gfx942": (
        ("bfloat16", "one long"), ("bfloat16", "many heads"), ("no rotary columns", "prompt"), ("e4m3", "drafts"),
        ("odd widths", "decode"),
    ),
    "gfx950": (("records, float16", "decode"),),
}  # fmt: skip


def latent_spec(features: str, num_q_heads: int = 16) -> quire.AttentionSpec:
    """Return the spec of a launch over latents."""
    dtype, kv_dtype, _, rank, rope = LATENTS[features]
    widths = {"kv_lora_rank": rank, "qk_rope_head_dim": rope}
    return quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=0.1, dtype=dtype, kv_dtype=kv_dtype, **widths)


def attend_to_latents(batch: str, features: str, page_size: int = 64, **options) -> quire.Plan:
    """Launch attention over latents by the portable MLA kernel; return its plan."""
    num_seqs, q_len, kv_len, heads = LATENT_BATCHES[batch]
    spec = latent_spec(features, heads)
    starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
    table = torch.zeros(num_seqs, cdiv(kv_len, page_size), dtype=torch.int32)
    described = quire.Batch(table, starts[1:], None if q_len == 1 else starts)
    plan = quire.plan(spec, described, max_query_len=q_len, max_seq_len=kv_len, kernel="mla", **options)
    cache = quire.PagedKVCache.empty(spec, 4, page_size, layout=LATENTS[features][2])
    quire.attention(torch.empty(num_seqs * q_len, heads, spec.head_dim, dtype=spec.dtype), cache, plan)
    return plan


def choose_keys() -> None:
    """Launch what models compute before they choose keys."""
    q, k = (torch.empty(*shape).to(torch.float8_e4m3fn) for shape in ((64, 64, 128), (4096, 128)))
    weights, ends = torch.empty(64, 64), torch.zeros(64, dtype=torch.int32)
    for options in ({}, {"num_columns": 512}):
        quire.indexer.mqa_logits(q, k, torch.empty(4096), weights, ends, ends, **options)
    cache, table = torch.empty(16, 64, 1, 132, dtype=torch.uint8), torch.zeros(16, 16, dtype=torch.int32)
    quire.indexer.paged_mqa_logits(q.view(16, 4, 64, 128), cache, weights, ends[:16], table, 1024, clean=False)
    batch = quire.Batch(table, ends[:16], ends[:17])
    q, keys = torch.empty(30, 4, 128, dtype=torch.bfloat16), torch.empty(9, 128, 128, dtype=torch.bfloat16)
    quire.indexer.block_scores(q, keys, batch, block_size=128, max_query_len=20, max_seq_len=1024)
    quire.indexer.top_k(torch.empty(64, 32768), 2048, begin=ends, end=ends)


CHOSEN = {  # heads of keys and values, or features and heads of latents; and what lists have
    "tokens": (("bfloat16", 128), {}),
    "tokens, few heads": (("bfloat16", 16), {}),
    "slots of records": (("records", 128), {"are_slots": True}),
    "slots of records, few heads": (("records", 16), {"are_slots": True}),
    "two lists": (("no rotary columns", 64), {"are_slots": True}),
    "two lists of 584 bytes": (("records of 584 bytes", 64), {"are_slots": True}),
    "two lists of 584 bytes, few heads": (("records of 584 bytes", 16), {"are_slots": True}),
    "slots of 528 bytes": (("records of 528 bytes", 64), {"are_slots": True}),
    "slots of 528 bytes, few heads": (("records of 528 bytes", 16), {"are_slots": True}),
    "blocks": ((32, 4), {"block_size": 128}),
}


def attend_to_unions(num_q_heads: int = 16, layout: str = "NHD", are_slots: bool = False) -> quire.Plan:
    """Launch attention of a prompt to chosen keys, over latents on a Hopper GPU; return its plan."""
    records = {} if layout == "NHD" else {"kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}
    spec = quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=0.1, causal=not are_slots, **records)
    starts, table = torch.zeros(2, dtype=torch.int32), torch.zeros(1, 64, dtype=torch.int32)
    lists = quire.ChosenKeys(torch.zeros(2048, 2048, dtype=torch.int32), are_slots=are_slots)
    batch = quire.Batch(table, starts[1:], starts, chosen=lists)
    plan = quire.plan(spec, batch, max_query_len=2048, max_seq_len=4096, num_tokens=2048)
    cache = quire.PagedKVCache.empty(spec, 4, 64, layout=layout)
    quire.attention(torch.empty(2048, num_q_heads, 576, dtype=torch.bfloat16), cache, plan, return_lse=True)
    return plan


def attend_to_chosen(features: str, **planned) -> quire.Plan:
    """Launch attention to chosen keys, in prompts; return its plan."""
    heads, options = CHOSEN[features]
    indices, lens = torch.zeros(16, 1, 2048, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
    lists = quire.ChosenKeys(indices, lens, **options)
    starts, table = torch.zeros(5, dtype=torch.int32), torch.zeros(4, 64, dtype=torch.int32)
    if isinstance(heads[0], str):
        spec, layout = latent_spec(*heads), LATENTS[heads[0]][2]
    else:
        spec, layout = make_spec(128, Features({"sinks": True}, heads)), "HND"
    spec = replace(spec, causal=not lists.are_slots)
    extra = quire.ChosenKeys(indices[..., :512], lens, are_slots=True) if "two lists" in features else None
    batch = quire.Batch(table, starts[1:], starts, chosen=lists, extra_chosen=extra)
    plan = quire.plan(spec, batch, max_query_len=8, max_seq_len=4096, num_tokens=16, **planned)
    cache = quire.PagedKVCache.empty(spec, 4, 64, layout=layout)
    sinks = torch.zeros(spec.num_q_heads) if spec.sinks else None
    q = torch.empty(16, spec.num_q_heads, spec.head_dim, dtype=spec.dtype)
    extra_cache = None if extra is None else quire.PagedKVCache.empty(spec, 4, 16, layout=layout)
    quire.attention(q, cache, plan, sinks=sinks, return_lse=True, extra_cache=extra_cache)
    return plan


def write_latents(features: str) -> None:
    """Launch the write of four latents, the copy of a page, and the merge of three states as wide as values."""
    dtype, _, layout, rank, rope = LATENTS[features]
    cache = quire.PagedKVCache.empty(latent_spec(features), 4, 64, layout=layout)
    new = torch.empty(4, rank + rope, dtype=dtype)
    quire.write_latent(new[:, :rank], new[:, rank:], cache, torch.zeros(4, dtype=torch.int64))
    quire.copy_pages(cache, cache, torch.zeros(1, 2, dtype=torch.int64))
    quire.merge_states([quire.State(torch.empty(4, 16, rank, dtype=dtype), torch.empty(4, 16))] * 3)


def merge(head_dim: int, features: str) -> None:
    """Launch the merge of three states."""
    spec = make_spec(head_dim, FEATURES[features])
    out, lse = torch.empty(4, spec.num_q_heads, spec.head_dim_v, dtype=spec.dtype), torch.empty(4, spec.num_q_heads)
    quire.merge_states([quire.State(out, lse)] * 3)


def make_spec(head_dim: int, wanted: Features) -> quire.AttentionSpec:
    """Return the spec of a launch."""
    num_q_heads, num_kv_heads = wanted.heads
    return quire.AttentionSpec(
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **{"dtype": torch.bfloat16} | wanted.spec
    )


def make_cache(spec: quire.AttentionSpec, wanted: Features, num_pages: int = 4) -> quire.PagedKVCache:
    """Return a cache of four pages, in the layout and with the scales that are wanted."""
    cache = quire.PagedKVCache.empty(spec, num_pages, wanted.page_size, layout=wanted.layout)
    if wanted.scales == "token":
        scale = torch.ones(num_pages, wanted.page_size, spec.num_kv_heads)
        return quire.PagedKVCache(cache.k, cache.v, wanted.layout, scale, scale.clone())
    return cache
