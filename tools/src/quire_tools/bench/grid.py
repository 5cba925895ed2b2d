"""Cases drawn at random: `quire bench run --grid`.

Either from the whole space that attention serves, by `quire.drawn`, or batches of models as a server may have them.
"""

import random
from dataclasses import replace

from quire.drawn import Drawn, Limits, heads_of
from quire.drawn import draw as draw_batches
from quire_tools.bench.case import MODELS, Case, Kind, Model

MEASURED = Limits(num_seqs=256, queries=4096, context=60_000, nbytes=256 << 20, flops=2 * 10**12)
DRAFTS = 16  # queries of a sequence up to which a batch counts as draft tokens
# Models, and what sequences do, as often as they are drawn.
SERVED = (
    *["Llama-3-8B"] * 5, *["Llama-3-70B"] * 2, "Llama-3.2-1B", *["Qwen2.5-7B"] * 2, *["Qwen3-30B-A3B"] * 2,
    "Gemma-3-12B", "gpt-oss-120b", "Qwen3.5, 24/4", "MQA", "Qwen2.5-1.5B", "Mistral window",
)  # fmt: skip
DECODE: tuple[Kind, ...] = ("decode",)
KINDS: tuple[Kind, ...] = (*DECODE * 7, "drafts", "chunk", "prefill", "mixed")
SPREADS = "equal", "equal", "log-normal", "uniform", "skewed"
SERVED_PAGES = 16, 16, 32, 64, 64, 128
MOST_BYTES, MOST_FLOPS = 2 * 10**9, 2 * 10**12  # of a batch of a model


def draw(count: int, seed: int, limits: Limits = MEASURED, latents: bool = False) -> list[Case]:
    """Return the first `count` cases of a seed; see `quire.drawn.draw`."""
    return [as_case(batch) for batch in draw_batches(count, seed, limits, latents)]


def draw_served(count: int, seed: int) -> list[Case]:
    """Return the first `count` batches of models of a seed, most of them of decode, with up to 256 sequences."""
    rng, found = random.Random(seed), list[Case]()
    while len(found) < count:
        name, kind = rng.choice(SERVED), rng.choice(KINDS)
        page_size, num_seqs = rng.choice(SERVED_PAGES), int(2 ** rng.uniform(0, 8))
        spread, lens = draw_served_lens(rng, kind, num_seqs)
        model, queries, keys = MODELS[name], [q for q, _ in lens], [s for _, s in lens]
        nbytes, flops = sum(keys) * model.num_kv_heads, sum(q * s for q, s in lens) * model.num_q_heads
        if nbytes * model.head_dim * 4 > MOST_BYTES or flops * model.head_dim * 4 > MOST_FLOPS:
            continue
        heads = f"{model.num_q_heads}/{model.num_kv_heads}/{model.head_dim}"
        sizes = f"{len(lens)} x {min(queries)}..{max(queries)} on {min(keys)}..{max(keys)} {spread}"
        text = f"grid models {seed}/{len(found) + 1}: {kind} {name} {heads} p{page_size} {sizes}"
        found.append(Case(text, kind, tuple(lens), name, page_size=page_size))
    return found


def draw_served_lens(rng: random.Random, kind: Kind, num_seqs: int) -> tuple[str, list[tuple[int, int]]]:
    """Draw a batch of a kind: how lengths are spread, and the queries and keys of each sequence."""
    if kind == "decode":
        spread, keys = spread_lengths(rng, num_seqs, 14)
        return spread, [(1, n) for n in keys]
    if kind in ("drafts", "chunk"):
        queries = rng.randint(2, 6) if kind == "drafts" else int(2 ** rng.uniform(5, 11))
        num_seqs = num_seqs if kind == "drafts" else max(1, num_seqs // 32)
        spread, before = spread_lengths(rng, num_seqs, 13 if kind == "drafts" else 14)
        return spread, [(queries, n + queries) for n in before]
    spread, keys = spread_lengths(rng, max(1, num_seqs // 16) if kind == "prefill" else num_seqs, 13)
    if kind == "prefill":
        return spread, [(n, n) for n in keys]
    _, prompts = spread_lengths(rng, max(1, num_seqs // 16), 11)
    return spread, [(1, n) for n in keys] + [(n, n) for n in prompts]


def spread_lengths(rng: random.Random, count: int, top: int) -> tuple[str, list[int]]:
    """Draw lengths around one of 2^6 to 2^top: equal, log-normal, uniform, or of a few long sequences among short."""
    spread, base = rng.choice(SPREADS), int(2 ** rng.uniform(6, top))
    if spread == "equal" or count == 1:
        return spread, [base] * count
    if spread == "log-normal":
        return spread, [max(1, min(int(base * rng.lognormvariate(0, 0.8)), 16 * base)) for _ in range(count)]
    if spread == "uniform":
        return spread, [rng.randint(max(1, base // 16), 2 * base) for _ in range(count)]
    few = max(1, count // rng.choice((4, 8, 16)))
    return spread, [base * rng.choice((8, 16)) if i < few else base for i in range(count)]


def as_case(batch: Drawn) -> Case:
    """Return a batch as a case."""
    spec = batch.spec
    layer = Model(
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        sliding_window=spec.sliding_window,
        sinks=spec.sinks,
        head_dim_v=None if spec.head_dim_v == spec.head_dim else spec.head_dim_v,
        softmax_scale=spec.softmax_scale if spec.latent else None,
        latent=spec.latent,
        softcap=spec.softcap,
    )
    case = Case(batch.name, "decode", batch.lens, heads_of(spec), batch.page_size, layer=layer)
    if spec.kv_dtype is not spec.dtype:
        case = replace(case, kv_dtype=str(spec.kv_dtype).removeprefix("torch."))
    return replace(case, kind="MLA decode" if spec.latent else kind_of(case))


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
