"""The cases of `quire check`: named combinations of spec, lengths, plan and layout."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypedDict

import torch

from quire import draft_trees, intervals
from quire.batch import Batch
from quire.score_functions import Function, mask, score
from quire.spec import AttentionSpec
from quire.testing import random_chosen


class SpecOptions(TypedDict, total=False):
    """Arguments of `AttentionSpec` that a feature sets."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    kv_dtype: torch.dtype
    causal: bool
    sliding_window: int
    sliding_window_right: int
    softcap: float
    alibi: bool
    sinks: bool
    softmax_scale: float
    latent: bool
    score: Function
    mask: Function
    kv_format: str


class PlanOptions(TypedDict, total=False):
    """Arguments of `quire.plan` that a feature sets."""

    num_splits: int
    batch_invariant: bool
    kernel: str


class ProblemOptions(TypedDict, total=False):
    """Arguments of `quire.testing.make_problem` that a feature sets."""

    page_size: int
    layout: str
    scales: str
    flat_table: bool
    one_query: bool
    per_token: Callable[[Batch, int], Batch]


class NormRopeOptions(TypedDict, total=False):
    """Arguments of `quire.testing.random_norm_rope` that a feature sets."""

    rotary_dim: int
    interleaved: bool
    qk_norm: bool


HEADS: SpecOptions = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32}
LATENTS: SpecOptions = {"num_kv_heads": 1, "head_dim": 48, "head_dim_v": 32, "softmax_scale": 0.2, "latent": True}
DEEPSEEK: SpecOptions = LATENTS | {"num_q_heads": 16, "head_dim": 576, "head_dim_v": 512, "softmax_scale": 192**-0.5}
FP8: SpecOptions = {"kv_dtype": torch.float8_e4m3fn}
MIXED = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0), (2, 17), (33, 70))
BRANCHES = (-1, 0, 0, 1, 2, 4, 3)  # parents of the drafts of a tree


def images(batch: Batch, num_tokens: int) -> Batch:
    """Return the batch with intervals for images in the third sequence and in the last one."""
    spans = torch.tensor([[2, 31, 38], [6, 40, 60], [6, 61, 69]], dtype=torch.int32)
    return intervals.bidirectional_spans(batch, num_tokens, spans, sliding_window=20)


def trees(batch: Batch, num_tokens: int, window: int | None = None) -> Batch:
    """Return the batch with a tree for each sequence, of as many drafts as it has queries."""
    words = draft_trees.from_parents(torch.tensor(BRANCHES))
    tree_bits = torch.cat([words[:count] for count in batch.query_starts.diff().tolist()])
    return replace(batch, tree_bits=tree_bits) if window is None else draft_trees.windowed(batch, tree_bits, window)


@score(extras={"bias": ("num_q_heads", None)})
def relative(score, q_pos, kv_pos, q_head, bias):
    """Add a bias by the distance, which is that of the last entry from there on."""
    return score + bias[q_head, q_pos - kv_pos]


@mask(extras={"reach": (torch.int32, "num_q_heads")}, bounds=lambda q_pos: (q_pos - 24, q_pos))
def dilated(q_pos, kv_pos, q_head, reach):
    """Leave out keys between others, of each head in its own way."""
    return (q_pos - kv_pos) % (1 + (reach[q_head] & 3)) == 0


@dataclass(frozen=True)
class Feature:
    """A named problem.

    Attributes:
        name: in the table.
        spec_options: what the spec has in addition to HEADS, or in place of them.
        lens: (query length, sequence length) of each sequence.
        plan: arguments of `quire.plan`.
        problem: arguments of `quire.testing.make_problem`.
        captured: launch from a CUDA graph that was captured at other lengths.
        append: pass the keys and values of the queries' own tokens, which are not in the cache.
        norm_rope: arguments of `quire.testing.random_norm_rope`, if `append` rotates queries and keys.
        out_scale: of an output in e4m3; None for one of the queries' dtype.
    """

    name: str
    spec_options: SpecOptions = field(default_factory=SpecOptions)
    lens: tuple[tuple[int, int], ...] = MIXED
    plan: PlanOptions = field(default_factory=PlanOptions)
    problem: ProblemOptions = field(default_factory=ProblemOptions)
    captured: bool = False
    append: bool = False
    norm_rope: NormRopeOptions = field(default_factory=NormRopeOptions)
    out_scale: float | None = None

    def spec(self, dtype: torch.dtype) -> AttentionSpec:
        """Return the spec for queries of a dtype."""
        return AttentionSpec(**HEADS | self.spec_options, dtype=dtype)


NEIGHBOURS: NormRopeOptions = {"rotary_dim": 24, "interleaved": True, "qk_norm": True}

BY_HAND: SpecOptions = {"causal": False}  # slots have no positions: lists say what is seen

FEATURES = (
    Feature("decode", lens=((1, 130), (1, 1), (1, 77))),
    Feature("decode, one query each", lens=((1, 130), (1, 1), (1, 0), (1, 77)), problem={"one_query": True}),
    Feature("drafted tokens", lens=((4, 130), (4, 20), (4, 77))),
    Feature("prefill", lens=((70, 70), (33, 33))),
    Feature("chunk on a context", lens=((33, 150), (20, 64))),
    Feature("mixed"),
    Feature("split keys", lens=((1, 300), (1, 5), (1, 0)), plan={"num_splits": 5}),
    Feature("split keys, drafted tokens", lens=((3, 300), (1, 40), (0, 9), (2, 170)), plan={"num_splits": 3}),
    Feature("split keys, several blocks", {"num_q_heads": 34}, lens=((9, 200), (1, 40)), plan={"num_splits": 2}),
    Feature(
        "split keys, sliding window", {"sliding_window": 90}, lens=((1, 300), (1, 5), (1, 200)), plan={"num_splits": 4}
    ),
    Feature("batch-invariant", lens=((1, 700), (1, 5), (1, 0), (3, 300)), plan={"batch_invariant": True}),
    Feature("bidirectional", {"causal": False}),
    Feature("sliding window", {"sliding_window": 9}),
    Feature("window on both sides", {"causal": False, "sliding_window": 9, "sliding_window_right": 4}),
    Feature("chunks", problem={"per_token": partial(intervals.chunked_local, size=12)}),
    Feature("images in a window", problem={"per_token": images}),
    Feature("images in a window, split keys", {"sinks": True}, plan={"num_splits": 3}, problem={"per_token": images}),
    Feature("draft trees", lens=((7, 130), (4, 20), (1, 77)), problem={"per_token": trees}),
    Feature("draft trees, split keys", lens=((7, 300), (4, 20)), plan={"num_splits": 3}, problem={"per_token": trees}),
    Feature(
        "draft trees in a window", lens=((7, 130), (4, 20), (1, 77)), problem={"per_token": partial(trees, window=3)}
    ),
    Feature("chosen keys", problem={"per_token": partial(random_chosen, width=40)}),
    Feature(
        "chosen keys, captured in a graph",
        lens=((1, 300), (1, 5), (1, 200)),
        problem={"per_token": partial(random_chosen, width=40)},
        captured=True,
    ),
    Feature("chosen keys, counted", problem={"per_token": partial(random_chosen, width=40, num_lists=2, counted=True)}),
    Feature(
        "chosen regions of 8", {"sinks": True}, problem={"per_token": partial(random_chosen, width=5, block_size=8)}
    ),
    Feature(
        "chosen slots", BY_HAND, problem={"per_token": partial(random_chosen, width=40, causal=False, slots_of=16)}
    ),
    Feature(
        "chosen blocks, fp8 cache, HND",
        FP8,
        problem={"per_token": partial(random_chosen, width=3, num_lists=2, block_size=16), "layout": "HND"},
    ),
    Feature("softcap", {"softcap": 3.0}),
    Feature("ALiBi", {"alibi": True}),
    Feature("sinks", {"sinks": True}),
    Feature("sinks, split keys", {"sinks": True}, lens=((1, 300), (1, 5), (1, 0)), plan={"num_splits": 5}),
    Feature("all at once", {"softcap": 5.0, "alibi": True, "sinks": True, "sliding_window": 20}),
    Feature("score function", {"score": relative, "softcap": 3.0}),
    Feature("mask function with bounds", {"mask": dilated}),
    Feature(
        "functions, split keys", {"score": relative, "mask": dilated}, ((1, 300), (1, 5), (1, 0)), {"num_splits": 5}
    ),
    Feature("values of another width", {"head_dim": 40, "head_dim_v": 24}),
    Feature("head_dim 256, MQA", {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 256}, lens=((1, 40), (5, 30))),
    Feature("head_dim 512, MQA", {"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 512}, lens=((1, 40), (5, 30))),
    Feature("head_dim 320, fp8 cache", FP8 | {"head_dim": 320, "head_dim_v": 512}, lens=((1, 40), (5, 30))),
    Feature("pages of 1, flat table", problem={"page_size": 1, "flat_table": True}),
    Feature("pages of 7, HND", problem={"page_size": 7, "layout": "HND"}),
    Feature("vLLM's original layout", problem={"layout": "HDNX"}),
    Feature("fp8 e4m3 cache", {"kv_dtype": torch.float8_e4m3fn}),
    Feature("fp8 e5m2 cache, scales per token", {"kv_dtype": torch.float8_e5m2}, problem={"scales": "token"}),
    Feature("int8 cache, one scale", {"kv_dtype": torch.int8}, problem={"scales": "tensor"}),
    Feature("int4 cache", {"kv_format": "int4"}),
    Feature("int4 cache, split keys, HND", {"kv_format": "int4"}, plan={"num_splits": 3}, problem={"layout": "HND"}),
    Feature("int4 cache, batch-invariant", {"kv_format": "int4"}, ((1, 700), (3, 300)), {"batch_invariant": True}),
    Feature("nvfp4 cache", {"kv_format": "nvfp4"}),
    Feature("nvfp4 cache, split keys, HND", {"kv_format": "nvfp4"}, plan={"num_splits": 3}, problem={"layout": "HND"}),
    Feature("K8V4 cache", {"kv_format": "k8v4"}),
    Feature("nvfp4 cache, batch-invariant", {"kv_format": "nvfp4"}, ((1, 700), (3, 300)), {"batch_invariant": True}),
    Feature("K8V4 cache, split keys", {"kv_format": "k8v4"}, plan={"num_splits": 3}),
    Feature("K8V4 cache, batch-invariant", {"kv_format": "k8v4"}, ((1, 700), (3, 300)), {"batch_invariant": True}),
    Feature("fp8 e4m3 output", out_scale=0.02),
    Feature("fp8 e4m3 output, split keys", lens=((1, 300), (1, 5), (1, 0)), plan={"num_splits": 5}, out_scale=0.02),
    Feature("captured in a graph", lens=((1, 300), (1, 5), (1, 200)), captured=True),
    Feature("new tokens", lens=((1, 130), (4, 20), (1, 0), (4, 3), (0, 9)), append=True),
    Feature("new tokens, split keys", lens=((3, 300), (1, 5), (9, 170)), plan={"num_splits": 5}, append=True),
    Feature("new tokens, mixed", append=True),
    Feature("new tokens, rotated", lens=((1, 130), (4, 20), (1, 0)), append=True, norm_rope={"rotary_dim": 32}),
    Feature("new tokens, normalised, rotated", append=True, norm_rope=NEIGHBOURS),
    Feature("new tokens, fp8 e4m3 cache", FP8, ((1, 130), (4, 20), (1, 0)), append=True),
    Feature("new tokens, int8 cache", {"kv_dtype": torch.int8}, ((1, 130), (4, 20), (1, 0)), append=True),
    Feature("new tokens, int4 cache", {"kv_format": "int4"}, ((1, 130), (4, 20), (1, 0)), append=True),
    Feature("new tokens, nvfp4 cache", {"kv_format": "nvfp4"}, ((1, 130), (4, 20), (1, 0)), append=True),
    Feature("new tokens, K8V4 cache", {"kv_format": "k8v4"}, ((1, 130), (4, 20), (1, 0)), append=True),
)
DECODING, DRAFTS = ((1, 130), (1, 1), (1, 0), (1, 77)), ((4, 300), (4, 20), (4, 3), (0, 9))
LATENT_FEATURES = (
    Feature("MLA: decode", LATENTS, DECODING, problem={"one_query": True, "page_size": 64}),
    Feature("MLA: drafted tokens", LATENTS, DRAFTS),
    Feature("MLA: mixed", LATENTS),
    Feature("MLA: no rotary columns", LATENTS | {"head_dim": 32}, DRAFTS),
    Feature("MLA: pages of 1, flat table", LATENTS, DRAFTS, problem={"page_size": 1, "flat_table": True}),
    Feature("MLA: pages of 7", LATENTS, DRAFTS, problem={"page_size": 7}),
    Feature("MLA: split keys", LATENTS, ((1, 300), (1, 5), (1, 0)), {"num_splits": 5}),
    Feature("MLA: batch-invariant", LATENTS, ((1, 700), (1, 5), (1, 0), (3, 300)), {"batch_invariant": True}),
    Feature("MLA: functions", LATENTS | {"score": relative, "mask": dilated}, DRAFTS),
    Feature("MLA: fp8 latents", LATENTS | FP8, DRAFTS),
    Feature("MLA: 512 + 64, decode", DEEPSEEK, DECODING, problem={"page_size": 64}),
    Feature("MLA: 512 + 64, drafted tokens", DEEPSEEK, DRAFTS, problem={"page_size": 64}),
    Feature("MLA: 512 + 64, fp8 latents", DEEPSEEK | FP8, DRAFTS, problem={"page_size": 64}),
    Feature("MLA: 512 + 64, fp8_ds_mla", DEEPSEEK | FP8, DRAFTS, problem={"page_size": 64, "layout": "fp8_ds_mla"}),
    Feature("MLA: chosen keys", LATENTS | {"sinks": True}, problem={"per_token": partial(random_chosen, width=40)}),
    Feature(
        "MLA: chosen slots, fp8_ds_mla",
        DEEPSEEK | FP8 | BY_HAND,
        DRAFTS,
        problem={
            "page_size": 64,
            "layout": "fp8_ds_mla",
            "per_token": partial(random_chosen, width=80, causal=False, slots_of=64),
        },
    ),
    *(
        Feature(
            f"MLA: chosen slots, {layout}",
            DEEPSEEK | FP8 | BY_HAND | {"head_dim": 512, "sinks": True},
            DRAFTS,
            problem={
                "page_size": 64,
                "layout": layout,
                "per_token": partial(random_chosen, width=80, causal=False, slots_of=64),
            },
        )
        for layout in ("fp8_ds_mla_584", "fp8_ds_mla_528")
    ),
    Feature("MLA: fp8 e4m3 output", LATENTS, DRAFTS, out_scale=0.02),
    Feature("MLA: new tokens", LATENTS, DRAFTS, append=True),
    Feature("MLA: captured in a graph", DEEPSEEK, DRAFTS, problem={"page_size": 64}, captured=True),
)

PROMPTS = ((150, 150), (33, 300), (1, 0), (1, 70), (130, 131))
HOPPER: PlanOptions = {"kernel": "hopper"}
DECODED: PlanOptions = {"kernel": "decoded"}
HOPPER_FEATURES = (
    Feature("prompts on Hopper", {"head_dim": 64}, PROMPTS, HOPPER),
    Feature(
        "prompts on Hopper, all at once",
        {"head_dim": 128, "softcap": 5.0, "alibi": True, "sinks": True, "sliding_window": 90},
        PROMPTS,
        HOPPER,
        {"layout": "HND"},
    ),
    Feature(
        "prompts on Hopper, both sides",
        {"head_dim": 256, "causal": False, "sliding_window": 90, "sliding_window_right": 40},
        PROMPTS,
        HOPPER,
        {"page_size": 24},
    ),
    Feature(
        "prompts on Hopper, chunks",
        {"head_dim": 128},
        PROMPTS,
        HOPPER,
        {"per_token": partial(intervals.chunked_local, size=90)},
    ),
    Feature("prompts on Hopper, e4m3 output", {"head_dim": 128}, PROMPTS, HOPPER, out_scale=0.02),
    Feature("prompts on Hopper, int4 decoded once", {"head_dim": 128, "kv_format": "int4"}, PROMPTS, DECODED),
    Feature("prompts on Hopper, nvfp4 decoded once", {"head_dim": 128, "kv_format": "nvfp4"}, PROMPTS, DECODED),
    Feature("prompts on Hopper, e4m3 decoded once", FP8 | {"head_dim": 128}, PROMPTS, DECODED),
)
MLA_HOPPER: PlanOptions = {"kernel": "mla_hopper"}
FULL_HEADS = DEEPSEEK | {"num_q_heads": 128}
LATENT_HOPPER_FEATURES = (
    Feature("MLA on Hopper, 16 heads", DEEPSEEK, DECODING, MLA_HOPPER, {"page_size": 64}),
    Feature("MLA on Hopper, 128 heads", FULL_HEADS, ((1, 700), (1, 64), (1, 0)), MLA_HOPPER, {"page_size": 64}),
    Feature("MLA on Hopper, drafted tokens", FULL_HEADS, DRAFTS, MLA_HOPPER, {"page_size": 64}),
    Feature(
        "MLA on Hopper, chosen keys",
        FULL_HEADS,
        DRAFTS,
        {"kernel": "chosen_hopper"},
        {"page_size": 64, "per_token": partial(random_chosen, width=200)},
    ),
    Feature(
        "MLA on Hopper, chosen keys that neighbours share",
        DEEPSEEK,
        ((1, 64), (1100, 1500)),
        {"kernel": "chosen_hopper"},
        {"page_size": 64, "per_token": partial(random_chosen, width=200, shared=0.9)},
    ),
    Feature(
        "MLA on Hopper, chosen keys, fp8_ds_mla",
        DEEPSEEK | FP8,
        DRAFTS,
        {"kernel": "chosen_hopper"},
        {"page_size": 64, "layout": "fp8_ds_mla", "per_token": partial(random_chosen, width=200)},
    ),
)
