"""Batches drawn at random from the space that attention serves, for `quire check --grid` and `quire bench run --grid`.

A fixed list covers only chosen sizes. Random batches also find slow sizes between them: widths that are not powers of
two, pages of any size, few queries on a long context. A seed and a number identify a batch, however many are drawn.

The space: head_dim from 16 to 256 in steps of 8, and 512; values of the same or of another width; groups of 1 to 16;
pages of 1 to 1,072 tokens; 1 to 4,096 queries on 0 to 60,000 keys before them, equal or unequal; dense, windowed,
soft-capped, with sinks. A batch above the limits loses sequences, then KV heads, then keys.

The space of latents (`--latents`): 1 to 128 heads, half of the time a multiple of 8; 1 to 8 queries of each sequence;
lengths that are equal, log-normal, or of one long sequence among short ones; pages of 1 to 128 tokens; latents of
512 + 64 numbers in bfloat16 or e4m3.
"""

import math
import random
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TypedDict

import torch

from quire.cache_formats import FORMATS
from quire.spec import AttentionSpec

HEAD_DIMS = tuple(range(16, 257, 8))
WIDEST = 512
GROUP_SIZES = range(1, 17)
KV_HEADS = (1, 2, 4, 8, 16, 32)
MAX_HEADS = 128  # query heads
FEW_KEYS = 64
USUAL_PAGES = (1, 16, 32, 64, 128, 256, 528, 1072)
MAX_PAGE_SIZE = 1072
MASKS = ("dense", "window", "softcap", "sinks", "window, softcap", "window, sinks")
SOFTCAPS = (15.0, 30.0, 50.0)
MOST_DRAFTS = 8  # queries of a sequence over latents
PAGES_OF_LATENTS = (1, 16, 32, 64, 128)
SPREAD = 0.8  # of the logarithms of log-normal lengths
LATENT_SCALE = 192**-0.5  # DeepSeek's scale of scores


@dataclass(frozen=True)
class Limits:
    """How large a drawn batch may be.

    Attributes:
        num_seqs: most sequences.
        queries: most queries of a sequence.
        context: most keys before a sequence's queries.
        nbytes: most bytes of the keys and values of all sequences, whole pages, and of queries and outputs.
        flops: most operations.
    """

    num_seqs: int
    queries: int
    context: int
    nbytes: int
    flops: int


class PlanBounds(TypedDict):
    """The bounds that `quire.plan` takes."""

    max_query_len: int
    max_seq_len: int
    num_tokens: int


@dataclass(frozen=True)
class Drawn:
    """A batch that was drawn.

    Attributes:
        name: the seed, the number, and all of the batch in words.
        spec: of its layer, in bfloat16; a cache of latents may be in e4m3.
        lens: (query length, sequence length) of each sequence, new tokens included.
        page_size: tokens per page.
    """

    name: str
    spec: AttentionSpec
    lens: tuple[tuple[int, int], ...]
    page_size: int

    @property
    def bounds(self) -> PlanBounds:
        """Keyword arguments of `quire.plan`."""
        queries = [q for q, _ in self.lens]
        return {
            "max_query_len": max(queries),
            "max_seq_len": max(s for _, s in self.lens),
            "num_tokens": sum(queries),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all sequences, whole pages, and of queries and outputs."""
        spec = self.spec
        width = spec.head_dim + spec.head_dim_v
        slots = sum(-(-s // self.page_size) for _, s in self.lens) * self.page_size
        rows = sum(q for q, _ in self.lens) * spec.num_q_heads
        return slots * spec.bytes_per_token + rows * width * spec.dtype.itemsize


def draw(count: int, seed: int, limits: Limits, latents: bool = False, kv_format: str | None = None) -> list[Drawn]:
    """Return the first `count` batches of a seed.

    Args:
        count: how many, from 1.
        seed: from 0.
        limits: how large a batch may be. They change the lengths, and perhaps the KV heads, and nothing else.
        latents: whether the cache holds latents.
        kv_format: of the caches, below eight bits; not of latents. Widths are those that it serves.
    """
    one = draw_latents if latents else draw_batch
    drawn = [one(seed, i, limits) for i in range(1, count + 1)]
    return drawn if kv_format is None else [in_format(batch, kv_format) for batch in drawn]


def in_format(batch: Drawn, kv_format: str) -> Drawn:
    """Return a batch whose cache is in a format, with widths that the format serves."""
    spec, group = batch.spec, max(1, FORMATS[kv_format].k.group)
    width = -(-spec.head_dim // group) * group
    width_v = width if FORMATS[kv_format].has_blocks else spec.head_dim_v
    spec = replace(spec, kv_format=kv_format, kv_dtype=None, head_dim=width, head_dim_v=width_v)
    made = replace(batch, spec=spec)
    return replace(made, name=f"{batch.name.split(': ')[0]}: {in_words(made)}, {kv_format}")


def draw_batch(seed: int, number: int, limits: Limits) -> Drawn:
    """Return batch `number` of a seed."""
    rng = random.Random(f"{seed}/{number}")
    head_dim, other = draw_width(rng), draw_width(rng)
    has_other_values = rng.random() < 0.2
    group = rng.choice(GROUP_SIZES)
    kv_heads = rng.choice([n for n in KV_HEADS if n * group <= MAX_HEADS])
    usual, any_size = rng.choice(USUAL_PAGES), log_uniform(rng, 1, MAX_PAGE_SIZE)
    page_size = usual if rng.random() < 0.5 else any_size
    mask, window, softcap = rng.choice(MASKS), log_uniform(rng, 16, 8192), rng.choice(SOFTCAPS)
    spec = AttentionSpec(
        num_q_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        head_dim_v=other if has_other_values else head_dim,
        sliding_window=window if "window" in mask else None,
        sinks="sinks" in mask,
        softcap=softcap if "softcap" in mask else None,
    )
    return named(f"grid {seed}/{number}", Drawn("", spec, draw_lens(rng, limits), page_size), limits)


def draw_latents(seed: int, number: int, limits: Limits) -> Drawn:
    """Return batch `number` of a seed, over latents."""
    rng = random.Random(f"latents {seed}/{number}")
    eights, any_number = 8 * log_uniform(rng, 1, MAX_HEADS // 8), log_uniform(rng, 1, MAX_HEADS)
    heads = eights if rng.random() < 0.5 else any_number
    queries = rng.choice((1, rng.randint(1, MOST_DRAFTS)))
    usual, any_size = rng.choice(PAGES_OF_LATENTS), rng.randint(1, max(PAGES_OF_LATENTS))
    page_size = usual if rng.random() < 0.75 else any_size
    kv_dtype = rng.choice((torch.bfloat16, torch.float8_e4m3fn))
    spec = AttentionSpec.mla(num_q_heads=heads, softmax_scale=LATENT_SCALE, kv_dtype=kv_dtype)
    num_seqs, keys = log_uniform(rng, 1, limits.num_seqs), log_uniform(rng, FEW_KEYS, limits.context)
    kind, lens = rng.choice(("equal", "log-normal", "one long")), []
    for i in range(num_seqs):
        if kind == "log-normal":
            before = min(limits.context, int(keys * rng.lognormvariate(0, SPREAD)))
        else:
            before = keys if kind == "equal" or i == 0 else keys // 16
        lens.append((queries, queries + before))
    return named(f"grid latents {seed}/{number}", Drawn("", spec, tuple(lens), page_size), limits)


def named(identity: str, batch: Drawn, limits: Limits) -> Drawn:
    """Return a batch that is within the limits, with its name."""
    while (smaller := shrunk(batch, limits)) is not None:
        batch = smaller
    return replace(batch, name=f"{identity}: {in_words(batch)}")


def draw_width(rng: random.Random) -> int:
    """Draw the width of a head; one in eight is the widest."""
    width, is_widest = rng.choice(HEAD_DIMS), rng.random() < 1 / 8
    return WIDEST if is_widest else width


def draw_lens(rng: random.Random, limits: Limits) -> tuple[tuple[int, int], ...]:
    """Draw (query length, sequence length) of each sequence: a third of the batches decode, half have equal lengths."""
    num_seqs, queries = log_uniform(rng, 1, limits.num_seqs), log_uniform(rng, 2, limits.queries)
    has_few_keys = rng.random() < 1 / 8
    context = log_uniform(rng, 1, FEW_KEYS) if has_few_keys else log_uniform(rng, FEW_KEYS, limits.context)
    is_decode, has_context, is_equal = rng.random() < 1 / 3, rng.random() < 3 / 4, rng.random() < 1 / 2
    lens = []
    for _ in range(num_seqs):
        q = 1 if is_decode else queries if is_equal else log_uniform(rng, 1, queries)
        before = 0 if not (has_context or is_decode) else context if is_equal else log_uniform(rng, 1, context)
        lens.append((q, q + before))
    return tuple(lens)


def log_uniform(rng: random.Random, low: int, high: int) -> int:
    """Draw an integer from low to high, small ones as often as large ones."""
    return min(high, int(math.exp(rng.uniform(math.log(low), math.log(high + 1)))))


def shrunk(batch: Drawn, limits: Limits) -> Drawn | None:
    """Return a smaller batch; None if this one is within the limits."""
    spec = batch.spec
    if batch.nbytes <= limits.nbytes and flops_of(spec, batch.lens) <= limits.flops:
        return None
    if len(batch.lens) > 1:
        return replace(batch, lens=batch.lens[: len(batch.lens) // 2])
    if spec.num_kv_heads > 1:
        halved = spec.num_kv_heads // 2
        return replace(batch, spec=replace(spec, num_q_heads=halved * spec.group_size, num_kv_heads=halved))
    q, s = max(batch.lens)  # the only one
    if s > q:
        return replace(batch, lens=((q, q + (s - q) // 2),))
    if q > 1:
        return replace(batch, lens=((q // 2, q // 2),))
    return replace(batch, page_size=batch.page_size // 2) if batch.page_size > 1 else None


def flops_of(spec: AttentionSpec, lens: Iterable[tuple[int, int]]) -> int:
    """Return the operations of the two matrix products over visible keys; a multiply-add is two."""
    pairs = sum(visible_pairs(q, s, spec.window[0] + 1) for q, s in lens)
    return 2 * pairs * spec.num_q_heads * (spec.head_dim + spec.head_dim_v)


def visible_pairs(q_len: int, seq_len: int, window: int) -> int:
    """Count the (query, key) pairs of a causal sequence whose queries are its last and see at most `window` keys."""
    before = seq_len - q_len
    short = max(0, min(q_len, window - before))  # queries that see every key up to their own
    return short * (2 * before + short + 1) // 2 + (q_len - short) * window


def in_words(batch: Drawn) -> str:
    """Return all of a batch in words."""
    spec = batch.spec
    lens = f"{len(batch.lens)} x {span([q for q, _ in batch.lens])} on {span([s for _, s in batch.lens])}"
    words = [lens, heads_of(spec), f"pages of {batch.page_size}"]
    if spec.sliding_window is not None:
        words.append(f"window {spec.sliding_window}")
    if spec.softcap is not None:
        words.append(f"softcap {spec.softcap:g}")
    if spec.sinks:
        words.append("sinks")
    return ", ".join(words)


def heads_of(spec: AttentionSpec) -> str:
    """Return the numbers of heads and their widths."""
    if spec.latent:
        return f"{spec.num_q_heads} over latents{'' if spec.kv_dtype is spec.dtype else ' in e4m3'}"
    values = "" if spec.head_dim_v == spec.head_dim else f"+{spec.head_dim_v}"
    return f"{spec.num_q_heads}/{spec.num_kv_heads}/{spec.head_dim}{values}"


def span(lengths: list[int]) -> str:
    """Return the least and the greatest of some lengths, or the one that all have."""
    low, high = min(lengths), max(lengths)
    return f"{low}" if low == high else f"{low}..{high}"
