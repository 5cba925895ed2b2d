"""Requests and what is decided for them, in words: `tests/decisions.json` records them.

`python -m tests.decisions` writes the file again, after a change that is meant to decide otherwise: its diff says what.
"""

import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

import quire
from quire.dispatch.request import Bounds, Options, Request
from quire.plan import decide
from quire.targets import TARGETS

RECORDED = Path(__file__).with_suffix(".json")
LLAMA, WIDE, NARROW = (32, 8, 128), (16, 4, 256), (10, 2, 24)
E4M3, INT8 = torch.float8_e4m3fn, torch.int8
HEADS = (
    *(LLAMA, WIDE, NARROW, (12, 2, 64), (28, 4, 128), (64, 8, 64), (26, 2, 32), (8, 4, 216), (11, 1, 216)),
    *((15, 1, 80), (96, 96, 128), (18, 2, 200), (16, 8, 512), (64, 4, 192)),
)
FEATURES: tuple[dict[str, Any], ...] = (
    *({}, {}, {}, {"softcap": 30.0}, {"sliding_window": 128}, {"sliding_window": 1000}, {"sinks": True}),
    *({"kv_dtype": E4M3}, {"kv_dtype": E4M3, "allow_fp8": True}, {"kv_dtype": INT8}, {"causal": False}),
)
LATENT_HEADS = (8, 16, 32, 128)


def at_edges() -> Iterator[tuple[str, dict, tuple[int, int, int, int], dict]]:
    """Yield (target, fields of the spec, (sequences, queries, keys, tokens), options) about where decisions change."""
    for queries, keys in itertools.product((1, 4, 8, 9, 16, 32, 33, 64, 128, 288, 520, 1025, 4096), (64, 513, 16384)):
        if queries <= keys:
            yield "sm90", {}, (1, queries, keys, queries), {}
            yield "sm90", {}, (8, queries, keys, 8 * queries), {}
            yield "sm90", {}, (17, queries, keys, queries + 16), {}
    for queries, keys in ((1, 1024), (1, 131072), (8, 4096), (64, 8192), (512, 512), (2048, 2048)):
        for target in ("sm90", "sm80", "gfx942"):
            yield target, {}, (1, queries, keys, queries), {"batch_invariant": True}
    for num_seqs, queries, keys in ((32, 1, 2048), (128, 1, 4096), (4, 16, 300), (64, 8, 1000)):
        for features in ({"kv_dtype": E4M3}, {"sliding_window": 60}, {"softcap": 30.0}):
            yield "sm90", features, (num_seqs, queries, keys, num_seqs * queries), {}


def drawn(count: int, seed: int) -> Iterator[tuple[str, dict, tuple[int, int, int, int], dict]]:
    """Yield what `at_edges` yields, of any heads, features, batches and targets."""
    draw = random.Random(seed)
    for _ in range(count):
        target = draw.choice(("sm90", "sm90", "sm90", *TARGETS))
        num_seqs = int(2 ** draw.uniform(0, 8))
        queries = draw.choice((1, 1, int(2 ** draw.uniform(0, 6)), int(2 ** draw.uniform(5, 12))))
        keys = max(queries, int(2 ** draw.uniform(4, 16)))
        tokens = draw.choice((num_seqs * queries, draw.randint(queries + num_seqs - 1, num_seqs * queries)))
        options = draw.choice(({}, {}, {}, {"batch_invariant": True}, {"kernel": "portable"}))
        if draw.random() < 0.15:
            fields = {"latent": draw.choice(LATENT_HEADS), "kv_dtype": draw.choice((None, E4M3))}
            queries = min(queries, 64)
            yield target, fields, (num_seqs, queries, keys, num_seqs * queries), {}
            continue
        yield target, {"heads": draw.choice(HEADS)} | draw.choice(FEATURES), (num_seqs, queries, keys, tokens), options


def chunks(count: int, seed: int) -> Iterator[tuple[str, dict, tuple[int, int, int, int], dict]]:
    """Yield what `at_edges` yields: batches of a few queries on a Hopper GPU, where most rules are about."""
    draw = random.Random(seed)
    for _ in range(count):
        num_seqs, queries = int(2 ** draw.uniform(0, 6)), int(2 ** draw.uniform(1, 8))
        keys = max(queries, int(2 ** draw.uniform(7, 15)))
        tokens = draw.choice((num_seqs * queries, draw.randint(queries + num_seqs - 1, num_seqs * queries)))
        features = draw.choice(({}, {}, {}, {"softcap": 30.0}, {"kv_dtype": E4M3}))
        yield "sm90", {"heads": draw.choice(HEADS)} | features, (num_seqs, queries, keys, tokens), {}


def request_of(target: str, fields: dict, batch: tuple[int, int, int, int]) -> Request:
    """Return the request that fields describe."""
    fields, (num_seqs, queries, keys, tokens) = dict(fields), batch
    num_q_heads, num_kv_heads, head_dim = fields.pop("heads", LLAMA)
    if "latent" in fields:
        kv_dtype = {"kv_dtype": fields["kv_dtype"]} if fields["kv_dtype"] else {}
        spec = quire.AttentionSpec.mla(num_q_heads=fields["latent"], softmax_scale=0.1, **kv_dtype)
    else:
        spec = quire.AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **fields)
    return Request(spec, num_seqs, queries > 1, Bounds(queries, keys, tokens), TARGETS[target].properties)


def in_words(launch: Any) -> str:
    """Return a launch: the kernel, its configuration, and what else is decided."""
    words = [launch.name]
    if hasattr(launch, "config"):
        words.append(" ".join(str(int(x)) if isinstance(x, bool) else str(x) for x in astuple(launch.config)))
    for name in (
        *("num_partitions", "num_splits", "fixed_split_size", "max_decode_queries", "section_heads"),
        *("column_parts", "cut_slots", "has_combine_launch", "fp8_mma"),
    ):
        value = getattr(launch, name, None)
        if value is True or (type(value) is int and value > 1):
            words.append(f"{name} {int(value)}")
    if launch.name == "hopper":  # whose tiles depend on pages, too
        caches = [quire.PagedKVCache.empty(launch.request.spec, 1, page_size) for page_size in (8, 16)]
        words += [f"pages {c.page_size}: {launch.config_of(c).block_n} {launch.boxes(c)}" for c in caches]
    words.append(f"scratch {launch.scratch_size().total}")
    for name in ("decode", "fallback"):
        if getattr(launch, name, None) is not None:
            words.append(f"{name} ({in_words(getattr(launch, name))})")
    return ", ".join(words)


def decisions() -> dict[str, str]:
    """Return what is decided, by request."""
    found = {}
    for target, fields, batch, options in (*at_edges(), *drawn(300, 1), *chunks(300, 2)):
        request = request_of(target, fields, batch)
        text = ", ".join(f"{name} {value}" for name, value in (fields | options).items()).replace("torch.", "")
        found[f"{target}: {batch} {text}".strip()] = in_words(decide(request, Options(**options))[0])
    return found


if __name__ == "__main__":
    RECORDED.write_text(json.dumps(decisions(), indent=0) + "\n")
