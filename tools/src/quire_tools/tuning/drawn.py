"""The cases of a sweep over variants, drawn at random: layers, and batches of each.

A layer is drawn once for several batches, since its kernels compile for seconds and lengths cost nothing. Layers are
those of models and any others; batches decode, draft, chunk, prefill and mix, with equal, log-normal, skewed and ragged
lengths.
"""

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch

from quire.cache_formats import FORMATS
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Bounds, Request
from quire.drawn import HEAD_DIMS, WIDEST, flops_of, log_uniform
from quire.launch_codec import decode, encode
from quire.spec import AttentionSpec

# Query heads, KV heads, columns.
MODEL_HEADS = {
    64: ((32, 8, 64), (64, 8, 64), (16, 16, 64)),
    128: ((32, 8, 128), (64, 8, 128), (28, 4, 128), (32, 4, 128), (12, 2, 128), (16, 1, 128), (32, 2, 128)),
    256: ((16, 8, 256), (24, 4, 256), (64, 4, 256), (24, 2, 256)),
    512: ((32, 4, 512), (16, 2, 512)),
}
# Kinds of the layers of a cohort, one after the other: widest columns (0 for latents), and of which caches.
KINDS = (
    (128, "bf16"), (0, "bf16"), (64, "bf16"), (128, "e4m3"), (256, "bf16"), (128, "bf16"), (0, "e4m3"), (64, "e4m3"),
    (128, "bf16"), (512, "bf16"), (256, "e4m3"), (0, "bf16"), (128, "int4"), (128, "nvfp4"), (64, "int4"),
    (128, "k8v4"), (256, "int4"), (64, "nvfp4"),
)  # fmt: skip
LATENT_HEADS = (8, 16, 32, 64, 128)
PAGES = (16, 16, 16, 32, 64, 64, 128, 256, 1, 48)
LATENT_PAGES = (64, 64, 64, 32, 128, 16)
MAX_BYTES, MAX_FLOPS = 1 << 30, 3 * 10**12
USES = "decode", "decode ragged", "decode skewed", "drafts", "prompts", "chunks", "mixed", "ragged", "few keys"
LATENT_USES = "decode", "decode ragged", "decode skewed", "drafts", "drafts ragged", "decode"
TURNS = 9  # batches of a layer
SHARES = 0.15, 0.1, 0.1, 0.15  # windows, softcap, sinks, values of another width
INVARIANT = 0.1  # share of layers with batch-invariant plans


@dataclass(frozen=True)
class DrawnCase:
    """A batch of a layer.

    Attributes:
        name: the seed, the layer's number, and what the batch does.
        spec: of the layer.
        page_size: tokens per page.
        lens: (query length, sequence length) of each sequence, new tokens included.
        batch_invariant: whether the plan is.
    """

    name: str
    spec: AttentionSpec
    page_size: int
    lens: tuple[tuple[int, int], ...]
    batch_invariant: bool = False

    @property
    def bounds(self) -> Bounds:
        """The bounds of a plan for the batch."""
        return Bounds(max(q for q, _ in self.lens), max(s for _, s in self.lens), sum(q for q, _ in self.lens))

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values of all sequences, in whole pages."""
        return sum(-(-s // self.page_size) for _, s in self.lens) * self.page_size * self.spec.bytes_per_token

    def request(self, device: DeviceProperties) -> Request:
        """Return the request that a plan decides about."""
        bounds = self.bounds
        return Request(self.spec, len(self.lens), bounds.max_query_len > 1, bounds.for_decision(), device)

    def as_json(self) -> dict[str, Any]:
        """Return the case as records hold it. Equal neighbours among the lengths are counted."""
        lens = [[*length, len(list(equal))] for length, equal in groupby(self.lens)]
        spec = json.loads(encode(self.spec))
        invariant = {"batch_invariant": True} if self.batch_invariant else {}
        return {"case": self.name, "spec": spec, "page_size": self.page_size, "lens": lens, **invariant}


def case_of(line: dict[str, Any]) -> DrawnCase:
    """Return the case that `as_json` returned."""
    lens = tuple((q, s) for q, s, count in line["lens"] for _ in range(count))
    spec, is_invariant = decode(json.dumps(line["spec"])), line.get("batch_invariant", False)
    return DrawnCase(line["case"], spec, line["page_size"], lens, is_invariant)


def draw_layer(rng: random.Random, widest: int, cache: str) -> tuple[AttentionSpec, int]:
    """Draw the spec of a layer of a kind, and the tokens of a page."""
    has_window, has_softcap, has_sinks, has_other = (rng.random() < share for share in SHARES)
    fields: dict[str, Any] = {"kv_dtype": torch.float8_e4m3fn if cache == "e4m3" else torch.bfloat16}
    if not widest:
        fields["allow_fp8"] = cache == "e4m3" and rng.random() < 0.5
        spec = AttentionSpec.mla(num_q_heads=rng.choice(LATENT_HEADS), softmax_scale=192**-0.5, **fields)
        return spec, rng.choice(LATENT_PAGES)
    heads, kv_heads, width = rng.choice(MODEL_HEADS[widest])
    values = width
    if rng.random() < 0.4:
        group = rng.choice((1, 2, 3, 4, 5, 6, 7, 8, 12, 16))
        kv_heads = rng.choice([n for n in (1, 2, 4, 8, 16) if n * group <= 128])
        widths = [n for n in (*HEAD_DIMS, WIDEST) if widest // 2 < n <= widest]
        heads, width = kv_heads * group, rng.choice(widths)
        values = rng.choice([n for n in HEAD_DIMS if n <= widest]) if has_other else width
    if cache in FORMATS:
        fields = {"kv_format": cache}
    if cache in FORMATS and FORMATS[cache].has_blocks:
        width = values = -(-width // 16) * 16
    spec = AttentionSpec(
        num_q_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=width,
        head_dim_v=values,
        **fields,
        sliding_window=log_uniform(rng, 64, 4096) if has_window else None,
        softcap=30.0 if has_softcap else None,
        sinks=has_sinks,
    )
    return spec, rng.choice(PAGES)


def log_normal(rng: random.Random, count: int, mean: float, sigma: float) -> list[int]:
    """Draw lengths whose logarithms are normal."""
    return [max(1, int(mean * rng.lognormvariate(-sigma * sigma / 2, sigma))) for _ in range(count)]


def draw_lens(rng: random.Random, use: str) -> list[tuple[int, int]]:
    """Draw the lengths of a batch."""
    count, keys, sigma = log_uniform(rng, 1, 600), log_uniform(rng, 64, 40_000), rng.uniform(0.3, 1.2)
    queries = log_uniform(rng, 2, 16)
    if use == "decode":
        return [(1, keys)] * count
    if use == "decode ragged":
        return [(1, s) for s in log_normal(rng, max(2, count), min(keys, 8000), sigma)]
    if use == "decode skewed":
        few, long = log_uniform(rng, 1, 4), log_uniform(rng, 4000, 60_000)
        short = log_normal(rng, log_uniform(rng, 8, 128), log_uniform(rng, 50, 1000), 0.3)
        return [(1, s) for s in [long] * few + short]
    if use == "drafts":
        return [(queries, queries + keys)] * min(count, 128)
    if use == "drafts ragged":
        return [
            (rng.randint(1, queries), s + queries) for s in log_normal(rng, min(count, 128), min(keys, 8000), sigma)
        ]
    if use == "prompts":
        count, tokens = log_uniform(rng, 1, 32), log_uniform(rng, 16, 6000)
        if rng.random() < 0.5:
            return [(tokens, tokens)] * count
        return [(n, n) for n in log_normal(rng, count, tokens, sigma)]
    if use == "chunks":
        count, chunk = log_uniform(rng, 1, 16), log_uniform(rng, 17, 2048)
        if rng.random() < 0.5:
            return [(chunk, chunk + keys)] * count
        pairs = zip(log_normal(rng, count, chunk, 0.5), log_normal(rng, count, min(keys, 16_000), sigma), strict=True)
        return [(q, q + s) for q, s in pairs]
    if use == "mixed":
        lens = [(1, s) for s in log_normal(rng, log_uniform(rng, 4, 128), min(keys, 8000), sigma)]
        for _ in range(log_uniform(rng, 1, 4)):
            q = log_uniform(rng, 32, 2048)
            lens.append((q, q + rng.choice((0, 0, log_uniform(rng, 64, 8000)))))
        return lens
    if use == "ragged":  # of any queries, each fresh or after some keys
        count, most, before = log_uniform(rng, 2, 200), log_uniform(rng, 4, 400), log_uniform(rng, 16, 4096)
        own = [rng.randint(1, most) for _ in range(count)]
        return [(q, q + rng.choice((0, rng.randint(0, before), rng.randint(0, before)))) for q in own]
    queries = rng.choice((1, log_uniform(rng, 2, 64)))
    return [(queries, queries + log_uniform(rng, 1, 256))] * log_uniform(rng, 1, 256)


def shrunk(case: DrawnCase) -> DrawnCase:
    """Return a case with fewer sequences, or shorter ones, that is within the limits."""
    while case.nbytes > MAX_BYTES or flops_of(case.spec, case.lens) > MAX_FLOPS:
        if len(case.lens) > 1:
            case = replace(case, lens=case.lens[: len(case.lens) // 2])
        else:
            q, s = max(case.lens)  # the only one
            case = replace(case, lens=((max(1, q // 2), max(q, s // 2)),))
    return case


def draw(seed: int, cohort: int = len(KINDS)) -> Iterator[DrawnCase]:
    """Draw cases without end: of each few layers, one batch of each in turn, so that none waits for its kernels.

    Args:
        seed: of all numbers.
        cohort: layers that come together.
    """
    first = 0
    while True:
        numbers = range(first, first + cohort)
        layers = [draw_layer(random.Random(f"{seed}/{i}"), *KINDS[i % len(KINDS)]) for i in numbers]
        invariant = [random.Random(f"{seed}/{i}/invariant").random() < INVARIANT for i in numbers]
        for turn in range(TURNS):
            for i, (spec, page_size) in enumerate(layers):
                rng = random.Random(f"{seed}/{first + i}/{turn}")
                uses = LATENT_USES if spec.latent else USES
                if turn < len(uses):
                    use = uses[(turn + 3 * (first + i)) % len(uses)]  # layers of a turn do different things
                    name = f"{seed}/{first + i}/{turn} {use}"
                    yield shrunk(DrawnCase(name, spec, page_size, tuple(draw_lens(rng, use)), invariant[i]))
        first += cohort


def in_words(case: DrawnCase) -> str:
    """Return a case in a line."""
    spec, queries, keys = case.spec, [q for q, _ in case.lens], [s for _, s in case.lens]
    heads = f"{spec.num_q_heads}/{spec.num_kv_heads}/{spec.head_dim}" + ("+" + str(spec.head_dim_v)) * (
        spec.head_dim_v != spec.head_dim
    )
    dtype = str(spec.kv_dtype).removeprefix("torch.")
    mean = math.fsum(keys) / len(keys)
    dtype += " batch-invariant" * case.batch_invariant
    return f"{case.name}: {len(keys)} x {max(queries)} on {max(keys)} (mean {mean:.0f}), {heads} {dtype}"
