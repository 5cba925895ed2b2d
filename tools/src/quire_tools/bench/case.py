"""What a case is: the lengths of a batch, the attention of a layer, a page size and dtypes. Host numbers only."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypedDict, get_args

import torch

import quire
from quire.drawn import PlanBounds, flops_of
from quire_tools.bench.scores import SCORES

Kind = Literal[
    "decode", "drafts", "prefill", "chunk", "mixed", "MLA decode", "MLA prefill", "chosen decode", "chosen prefill"
]
KINDS: tuple[Kind, ...] = get_args(Kind)
Layout = Literal["pages", "latents", "packed", "shared pages", "chosen keys"]
DEFAULT_MODEL = "Llama-3-8B"
KV_FORMATS = "int4", "nvfp4", "k8v4"  # of caches below eight bits
RECORDS, RECORD_BYTES = "fp8_ds_mla", 656  # the layout of latents in e4m3 with their own scales, and bytes of a token


@dataclass(frozen=True)
class Pool:
    """The slots of which each query token has a list of its own.

    Attributes:
        num_slots: how many there are, a multiple of the page size.
        shared: the share of its entries that a list has from the one of the token before. Others aren't in that one.
    """

    num_slots: int
    shared: float = 0.0

    def num_kept(self, width: int) -> int:
        """Return how many entries of a list of `width` are also in that of the token before."""
        return round(self.shared * width)

    def num_named(self, num_lists: int, width: int) -> float:
        """Return how many slots are expected to be in one list or more."""
        left_out = 1 - width / self.num_slots  # probability for a slot, of the first list
        for_others = 1 - (width - self.num_kept(width)) / (self.num_slots - width)
        return self.num_slots * (1 - left_out * for_others ** (num_lists - 1))


@dataclass(frozen=True)
class Model:
    """The attention of one kind of layer of a model; the fields are those of `quire.AttentionSpec`."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    sinks: bool = False
    head_dim_v: int | None = None
    softmax_scale: float | None = None
    latent: bool = False
    softcap: float | None = None

    def __str__(self) -> str:
        if self.latent:
            return f"{self.num_q_heads} query heads over a latent of {self.head_dim}, values of {self.head_dim_v}"
        values = "" if self.head_dim_v is None else f", values of {self.head_dim_v}"
        return f"{self.num_q_heads} query heads over {self.num_kv_heads} of {self.head_dim}{values}"


def latents(num_q_heads: int) -> Model:
    """Return DeepSeek-V3's attention over latents, with the heads of one tensor-parallel rank."""
    return Model(num_q_heads, 1, 576, head_dim_v=512, softmax_scale=192**-0.5, latent=True)


def expanded(num_heads: int) -> Model:
    """Return DeepSeek-V3's attention over expanded keys and values, with the heads of one tensor-parallel rank."""
    return Model(num_heads, num_heads, 192, head_dim_v=128)


MODELS = {
    "Llama-3-8B": Model(32, 8, 128),
    "Llama-3-70B": Model(64, 8, 128),
    "Llama-3.2-1B": Model(32, 8, 64),
    "Qwen2.5-1.5B": Model(12, 2, 128),
    "Qwen2.5-7B": Model(28, 4, 128),
    "Qwen3-30B-A3B": Model(32, 4, 128),
    "Gemma-3-12B": Model(16, 8, 256),
    "Gemma-3-12B, local": Model(16, 8, 256, sliding_window=1024),
    "Gemma-4-31B": Model(32, 4, 512),
    "Gemma-4-31B, local": Model(32, 16, 256, sliding_window=1024),
    "Qwen3.5, 24/4": Model(24, 4, 256),
    "Qwen3.5, 64/4": Model(64, 4, 256),
    "Qwen3.5, 24/2": Model(24, 2, 256),
    "gpt-oss-120b": Model(64, 8, 64, sinks=True),
    "gpt-oss-120b, local": Model(64, 8, 64, sliding_window=128, sinks=True),
    "Mistral window": Model(32, 8, 128, sliding_window=1024),
    "MQA": Model(16, 1, 128),
}
KV_MODELS = tuple(MODELS)  # whose keys and values are of one width
MODELS |= {f"MLA, {heads} heads": latents(heads) for heads in (16, 32, 64, 128)}
MODELS |= {f"MLA, {heads} heads, expanded": expanded(heads) for heads in (16, 128)}


class CaseOptions(TypedDict, total=False):
    """The fields of a case that have a default."""

    model: str
    page_size: int
    dtype: str
    kv_dtype: str | None
    packed: bool
    scores: str | None


@dataclass(frozen=True)
class Case:
    """A named batch.

    Attributes:
        name: unique among the cases.
        kind: one of KINDS.
        lens: (query length, sequence length) of each sequence, new tokens included. Where there is a pool, the second
            is the keys that each query token chooses, the same for all sequences.
        model: a key of MODELS; where there is a `layer`, its heads in words.
        page_size: tokens per page.
        dtype: name of the torch dtype of the queries.
        kv_dtype: name of the torch dtype of the cache, one of KV_FORMATS, or RECORDS; `dtype` when not given.
        packed: keys and values are not paged but packed, sequence after sequence. The page size is then 1.
        shared_prefix: leading keys that all sequences have in the same pages, a multiple of the page size.
        layer: the attention of a layer that none of MODELS has.
        scores: what it does to scores, a key of SCORES; None for nothing.
        pool: of latents, the slots among which each query token chooses its keys; None where it sees all.
    """

    name: str
    kind: Kind
    lens: tuple[tuple[int, int], ...]
    model: str = DEFAULT_MODEL
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    packed: bool = False
    shared_prefix: int = 0
    layer: Model | None = None
    scores: str | None = None
    pool: Pool | None = None

    @property
    def attention(self) -> Model:
        """The attention of the layer."""
        return MODELS[self.model] if self.layer is None else self.layer

    @cached_property
    def spec(self) -> quire.AttentionSpec:
        """The spec of the layer, in these dtypes."""
        model = self.attention
        fields: dict[str, Any] = {"softcap": model.softcap}
        if self.scores is not None:
            fields |= SCORES[self.scores].fields
        return quire.AttentionSpec(
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=getattr(torch, self.dtype),
            **self.stored,
            sliding_window=model.sliding_window,
            sinks=model.sinks,
            head_dim_v=model.head_dim_v,
            softmax_scale=model.softmax_scale,
            latent=model.latent,
            causal=self.pool is None,  # lists of slots say what is seen
            **fields,
        )

    @property
    def stored(self) -> dict[str, Any]:
        """How the cache stores numbers, as `AttentionSpec` takes it."""
        if self.kv_dtype in KV_FORMATS:
            return {"kv_format": self.kv_dtype}
        if self.kv_dtype == RECORDS:  # kernels may round to bfloat16 what records hold, as FlashMLA does
            return {"kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}
        return {"kv_dtype": getattr(torch, self.kv_dtype or self.dtype)}

    @property
    def cache_layout(self) -> str:
        """The layout of a cache that is paged, as `PagedKVCache.empty` takes it."""
        return RECORDS if self.kv_dtype == RECORDS else "NHD"

    @property
    def layout(self) -> Layout:
        """How keys and values are stored: in pages, in shared pages, packed, or as latents in pages or in lists."""
        if self.pool is not None:
            return "chosen keys"
        if self.packed:
            return "packed"
        if self.shared_prefix:
            return "shared pages"
        return "latents" if self.spec.latent else "pages"

    @cached_property
    def bounds(self) -> PlanBounds:
        """Arguments for `quire.plan`."""
        return {
            "max_query_len": max(q for q, _ in self.lens),
            "max_seq_len": max(s for _, s in self.lens),
            "num_tokens": self.num_tokens,
        }

    @property
    def query_lens(self) -> list[int]:
        """Queries of each sequence."""
        return [q for q, _ in self.lens]

    @property
    def seq_lens(self) -> list[int]:
        """Keys of each sequence."""
        return [s for _, s in self.lens]

    @property
    def pages_per_seq(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-s // self.page_size) for s in self.seq_lens]

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.query_lens)

    @property
    def decode_share(self) -> float:
        """The share of the sequences that have one query."""
        return sum(q == 1 for q in self.query_lens) / len(self.lens)

    @property
    def uniform(self) -> bool:
        """Whether all sequences have the same lengths."""
        return len(set(self.lens)) == 1

    @property
    def bytes_per_key(self) -> int:
        """Bytes of a token's keys and values in one layer. A latent is both."""
        return RECORD_BYTES if self.kv_dtype == RECORDS else self.spec.bytes_per_token

    @cached_property
    def nbytes(self) -> int:
        """Bytes that must be moved: every visible key and value once, queries, outputs. Lists of keys are not counted.

        Of chosen keys, it is as many as are expected to be in one list or more.
        """
        spec = self.spec
        if self.pool is not None:
            keys = round(self.pool.num_named(self.num_tokens, self.bounds["max_seq_len"]))
        else:
            keys = sum(min(s, spec.window[0] + q) for q, s in self.lens) - (len(self.lens) - 1) * self.shared_prefix
        cache = keys * self.bytes_per_key
        return cache + self.num_tokens * spec.num_q_heads * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize

    @cached_property
    def flops(self) -> int:
        """Operations of the two matrix products over visible keys; a multiply-add is two."""
        if self.pool is not None:
            pairs = sum(q * s for q, s in self.lens)
            return 2 * pairs * self.spec.num_q_heads * (self.spec.head_dim + self.spec.head_dim_v)
        return flops_of(self.spec, self.lens)

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.nbytes
