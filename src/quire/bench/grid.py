"""Cases drawn at random from the space that attention serves: `quire bench --grid` and `quire check --grid`.

A fixed list covers only chosen sizes. Random cases also find slow sizes between them: widths that are not powers of
two, pages of any size, few queries on a long context. A seed and a number identify a case, for any size of the grid.

The space: head_dim from 16 to 256 in steps of 8, and 512; values of the same or of another width; groups of 1 to 16;
pages of 1 to 1,072 tokens; 1 to 4,096 queries on 0 to 60,000 keys before them, equal or unequal; dense, windowed,
soft-capped, with sinks. A batch above the limits loses sequences, then KV heads, then keys.
"""

import math
import random
from dataclasses import dataclass, replace

from quire.bench.case import Case, Kind, Model

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
DRAFTS = 16  # queries of a sequence up to which a batch counts as draft tokens


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


MEASURED = Limits(num_seqs=256, queries=4096, context=60_000, nbytes=256 << 20, flops=2 * 10**12)


def draw(count: int, seed: int, limits: Limits = MEASURED) -> list[Case]:
    """Return the first `count` cases of a seed.

    Args:
        count: how many, from 1.
        seed: from 0.
        limits: how large a batch may be. They change the lengths, and perhaps the KV heads, and nothing else.
    """
    return [draw_case(seed, i, limits) for i in range(1, count + 1)]


def draw_case(seed: int, number: int, limits: Limits) -> Case:
    """Return case `number` of a seed."""
    rng = random.Random(f"{seed}/{number}")
    head_dim, other = draw_width(rng), draw_width(rng)
    has_other_values = rng.random() < 0.2
    group = rng.choice(GROUP_SIZES)
    kv_heads = rng.choice([n for n in KV_HEADS if n * group <= MAX_HEADS])
    usual, any_size = rng.choice(USUAL_PAGES), log_uniform(rng, 1, MAX_PAGE_SIZE)
    page_size = usual if rng.random() < 0.5 else any_size
    mask, window, softcap = rng.choice(MASKS), log_uniform(rng, 16, 8192), rng.choice(SOFTCAPS)
    layer = Model(
        kv_heads * group,
        kv_heads,
        head_dim,
        sliding_window=window if "window" in mask else None,
        sinks="sinks" in mask,
        head_dim_v=other if has_other_values and other != head_dim else None,
        softcap=softcap if "softcap" in mask else None,
    )
    case = Case("", "decode", draw_lens(rng, limits), "", page_size, layer=layer)
    while (smaller := shrunk(case, limits)) is not None:
        case = smaller
    return named(case, f"grid {seed}/{number}")


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


def shrunk(case: Case, limits: Limits) -> Case | None:
    """Return a smaller case; None if this one is within the limits."""
    if allocated(case) <= limits.nbytes and case.flops <= limits.flops:
        return None
    layer = case.attention
    if len(case.lens) > 1:
        return replace(case, lens=case.lens[: len(case.lens) // 2])
    if layer.num_kv_heads > 1:
        halved = layer.num_kv_heads // 2
        group = layer.num_q_heads // layer.num_kv_heads
        return replace(case, layer=replace(layer, num_q_heads=halved * group, num_kv_heads=halved))
    q, s = max(case.lens)  # the only one
    if s > q:
        return replace(case, lens=((q, q + (s - q) // 2),))
    if q > 1:
        return replace(case, lens=((q // 2, q // 2),))
    return replace(case, page_size=case.page_size // 2) if case.page_size > 1 else None


def allocated(case: Case) -> int:
    """Return the bytes of the keys and values of all sequences, whole pages, and of queries and outputs."""
    spec = case.spec
    rows = case.num_tokens * spec.num_q_heads * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize
    return sum(case.pages_per_seq) * case.page_size * case.bytes_per_key + rows


def named(case: Case, number: str) -> Case:
    """Return a case with its kind, and with a name that says all of it."""
    layer = case.attention
    width = f"{layer.head_dim}" if layer.head_dim_v is None else f"{layer.head_dim}+{layer.head_dim_v}"
    heads = f"{layer.num_q_heads}/{layer.num_kv_heads}/{width}"
    lens = f"{len(case.lens)} x {span(case.query_lens)} on {span(case.seq_lens)}"
    words = [lens, heads, f"pages of {case.page_size}"]
    if layer.sliding_window is not None:
        words.append(f"window {layer.sliding_window}")
    if layer.softcap is not None:
        words.append(f"softcap {layer.softcap:g}")
    if layer.sinks:
        words.append("sinks")
    return replace(case, name=f"{number}: {', '.join(words)}", kind=kind_of(case), model=heads)


def span(lengths: list[int]) -> str:
    """Return the least and the greatest of some lengths, or the one that all have."""
    low, high = min(lengths), max(lengths)
    return f"{low}" if low == high else f"{low}..{high}"


def kind_of(case: Case) -> Kind:
    """Return the kind of a batch."""
    queries = case.query_lens
    if max(queries) == 1:
        return "decode"
    if case.query_lens == case.seq_lens:
        return "prefill"
    if min(queries) == 1:
        return "mixed"
    return "drafts" if max(queries) <= DRAFTS else "chunk"
