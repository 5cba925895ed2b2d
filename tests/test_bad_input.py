"""Bad input of every kind, to every public function: an error in the house grammar, or a result that is right.

The matrix replaces each argument of each function by each hostile value. A refusal must name the contract and the value
and leave every tensor as it was. What is accepted is judged by the oracle, or by a few lines from the definition.
"""

import dataclasses
import inspect
import itertools
import re
import time
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

import quire
from quire import reference
from quire.allocator import PageSequence
from quire.dispatch.config import KernelConfig
from quire.dispatch.device import interprets
from quire.integrations import flash_attn
from quire.testing import Oracle, Problem, make_problem

pytestmark = pytest.mark.skipif(interprets(), reason="the interpreter runs kernels, which do not look at contents")

LONGEST = 600  # characters of an error, whatever it quotes
HOUSE = (ValueError, TypeError, quire.UnsupportedError, quire.OutOfPagesError)
SECONDS = 1.0  # of processor time, for one call
SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32, causal=False)
LATENT_SPEC = quire.AttentionSpec.mla(
    num_q_heads=4, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32, causal=False
)
LENS = ((1, 9), (3, 5))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


CONSTANTS: dict[str, Any] = {
    "None": None,
    "a list": [1, 2],
    "an empty list": [],
    "a word": "junk",
    "an empty string": "",
    "an array": np.ones((2, 3), np.float32),
    "an array of integers": np.ones(2, np.int32),
    "2.5": 2.5,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "1e-320": 1e-320,
    "-1": -1,
    "0": 0,
    "True": True,
    "False": False,
    "2 ** 62": 1 << 62,
    "10 ** 5000": 10**5000,
    "1j": 1j,
    "an object": object(),
    "a class": int,
    "a dict": {},
    "a lambda": lambda: None,
    "a tensor of no dimension": torch.tensor(3),
    "a float tensor of no dimension": torch.tensor(2.5),
    "a tensor": torch.ones(2, 3),
    "a dtype": torch.float64,
    "uint8": torch.uint8,
    "a meta device": torch.device("meta"),
    "another GPU": "cuda:63",
    "a word with a null byte": "a\0b",
    "a long word": "x" * 5000,
    "a fraction": Fraction(1, 10**6),
    "a spec": SPEC,
    "a spec of latents": LATENT_SPEC,
    "a state": quire.State(torch.zeros(4, 4, 16), torch.zeros(4, 4)),
    "a page sequence": PageSequence(),
    "another batch": quire.Batch(int32(1)[:, None], int32(3)),
    "another cache": quire.PagedKVCache(torch.zeros(2, 3, 2, 16), torch.zeros(2, 3, 2, 16)),
    "a cache of latents": quire.PagedKVCache.from_latents(torch.zeros(2, 3, 16), 16),
}


def hostile(good: Any) -> Iterator[tuple[str, Any]]:
    """Return names and values: constants, and distortions of the good value."""
    yield from CONSTANTS.items()
    if isinstance(good, torch.Tensor):
        yield from distorted(good)
    elif isinstance(good, quire.State):
        yield "a plain tuple", tuple(good)
        yield "a state without lse", quire.State(good.out, None)
        yield "a state without out", quire.State(None, good.lse)
        yield "a state turned round", quire.State(good.lse, good.out)
        yield "a transposed lse", quire.State(good.out, good.lse.t())
        for i, part in enumerate(good):
            yield from ((f"{name} at {i}", quire.State(*good[:i], x, *good[i + 1 :])) for name, x in odd(part))
    elif good == ():
        yield "a tensor of it", (torch.zeros(3),)
    elif isinstance(good, quire.Rope | quire.QKNorm) or (isinstance(good, tuple) and type(good[-1]) in (bool, float)):
        yield "one of them", good[0]
        yield "in a list", list(good)
        yield "more of them", (*good, good[0])
        yield "without the last", tuple(good)[:-1]
        yield "without the first", tuple(good)[1:]
        for i, part in enumerate(good):
            yield from ((f"with {name} at {i}", (*good[:i], value, *good[i + 1 :])) for name, value in hostile(part))
    elif isinstance(good, tuple) and all(isinstance(half, torch.Tensor) for half in good):
        yield "one of them", good[0]
        yield "turned round", good[::-1]
        yield "three of them", (*good, good[0])
        yield "in a list", list(good)
        yield "joined", torch.cat(good, -1)
        for i, half in enumerate(good):
            yield from ((f"with {name} at {i}", (*good[:i], value, *good[i + 1 :])) for name, value in hostile(half))
    elif isinstance(good, list):
        yield "a generator", (x for x in good)
        yield "one of them", good[0]
        yield "None among them", [good[0], None]
        yield from ((f"[good, {name}]", [good[0], value]) for name, value in hostile(good[0]))
    elif isinstance(good, float):
        yield "a numpy float", np.float32(good)
        yield "a fraction", Fraction(good)
    elif isinstance(good, int) and not isinstance(good, bool):
        yield "a numpy integer", np.int64(good)
        yield "a numpy float", np.float32(good)
        yield "a float", float(good)
        yield "a tensor", torch.tensor(good)
        yield "digits", str(good)


def odd(good: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return tensors of PyTorch's other kinds: nested, sparse, quantised."""
    numbers = good.float() if good.dtype is torch.float8_e4m3fn else good.detach()  # no 8-bit floats are sparse
    with warnings.catch_warnings():  # they are prototypes, or deprecated
        warnings.simplefilter("ignore")
        kinds = {"quantised": lambda: torch.quantize_per_tensor(numbers.float(), 0.1, 0, torch.qint8)}
        if good.dim():
            kinds["nested"] = lambda: torch.nested.nested_tensor([numbers, numbers])
            kinds["jagged"] = lambda: torch.nested.nested_tensor([numbers, numbers], layout=torch.jagged)
        if good.dim() == 2:
            kinds["in compressed rows"] = numbers.to_sparse_csr
        made = [(name, make()) for name, make in kinds.items()]
    yield from made


def distorted(good: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Return tensors that are `good` but for one property."""
    for dtype in (torch.float16, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64):
        yield f"as {dtype}", good.to(dtype)
    yield "on meta", good.to("meta")
    yield "sparse", (good.float() if good.dtype is torch.float8_e4m3fn else good).to_sparse()  # not of 8-bit floats
    yield from odd(good)
    yield "empty", good[:0]
    yield "empty, of one dimension", good.new_empty(0)
    yield "empty, with strides of 0", torch.from_numpy(np.empty((0, *good.shape[1:]), np.float32)).to(good.dtype)
    yield "one dimension less", good[0]
    yield "one dimension more", good[None]
    yield "shorter", good[:-1].clone()
    yield "longer", torch.cat([good, good])
    yield "narrower", good[..., : good.shape[-1] // 2].clone()
    if good.dim() > 2:
        yield "of fewer heads", good[..., :1, :].clone()
    yield "strided", good.repeat_interleave(2, -1)[..., ::2]
    yield "expanded", good[:1].expand_as(good)
    yield "flipped dimensions", good.permute(*reversed(range(good.dim())))
    yield "filled with -1", torch.full_like(good, -1)
    if good.is_floating_point():
        yield "with a gradient", good.clone().requires_grad_()
        yield "a parameter", torch.nn.Parameter(good.clone())
    elif good.dtype is not torch.bool:
        yield "filled with its largest number", torch.full_like(good, torch.iinfo(good.dtype).max)
    if not good.is_floating_point():
        yield "descending", good.flip(0)


# Good calls. Each returns a function and its arguments, all of them new; `confirm` judges what such a call returned.


@dataclasses.dataclass(frozen=True)
class Call:
    make: Callable[[], tuple[Callable, dict[str, Any]]]
    confirm: Callable[[dict[str, Any], Any], bool]


def run(problem: Problem) -> bool:
    """Plan and attend; the oracle judges."""
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds)
    return confirm_attention({"q": problem.q, "cache": problem.cache, "plan": plan, **problem.tables}, None)


def confirm_attention(a: dict[str, Any], result: Any) -> bool:
    """Judge the result of these arguments; the rows that no sequence owns are not judged."""
    batch = a["plan"].batch
    if result is None:
        result = quire.attention(a["q"], a["cache"], a["plan"], **{n: a[n] for n in ("sinks", "alibi_slopes")})
    q = torch.cat(a["q"], -1) if isinstance(a["q"], tuple) else a["q"]
    problem = Problem(a["plan"].spec, batch, a["cache"], q, (), (), a["sinks"], a["alibi_slopes"])
    oracle = Oracle(dataclasses.replace(problem, out_scale=a.get("out_scale")))
    owned = int(batch.query_starts[-1])
    if isinstance(result, torch.Tensor):
        return oracle.judge(torch.cat([result[:owned], oracle.exact.out[owned:].to(result.dtype)])).passed
    rows = (torch.cat([x[:owned], y[owned:].to(x.dtype)]) for x, y in zip(result, oracle.exact, strict=True))
    return oracle.judge(quire.State(*rows)).passed


def paged_problem(**features: bool) -> Problem:
    """A problem without poison: hostile tables may name any page."""
    p = make_problem(dataclasses.replace(SPEC, **features), LENS, page_size=4)
    return dataclasses.replace(p, cache=quire.PagedKVCache(p.cache.k.nan_to_num(), p.cache.v.nan_to_num()))


NOTHING_NEW = dict(k=None, v=None, slot_mapping=None, rope=None, qk_norm=None, extra_cache=None, extras=())


def make_attention(**features: bool) -> tuple[Callable, dict[str, Any]]:
    p = paged_problem(**features)
    out = quire.State(torch.full((4, 4, 16), 7.0), torch.full((4, 4), 7.0))
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    arguments = dict(q=p.q, cache=p.cache, plan=plan, **p.tables, out=out, out_scale=None, return_lse=True)
    return quire.attention, NOTHING_NEW | arguments


def make_quantised_attention() -> tuple[Callable, dict[str, Any]]:
    attend, arguments = make_attention()
    out = arguments["out"].out.to(torch.float8_e4m3fn)
    return attend, arguments | dict(out=out, out_scale=torch.tensor([0.01]), return_lse=False)


def confirm_quantised_attention(a: dict[str, Any], result: Any) -> bool:
    """By a scale that is not finite, results are 0 or NaN."""
    scale = a["out_scale"]
    if scale is None or scale.isfinite().all():
        return confirm_attention(a, result)
    expected = torch.tensor(7.0 if scale.isnan().any() else 0.0)
    return torch.equal(result.float().nan_to_num(7.0), expected.expand_as(result))


def make_append() -> tuple[Callable, dict[str, Any]]:
    attend, arguments = make_attention()
    new = dict(k=torch.randn(4, 2, 16), v=torch.randn(4, 2, 16), slot_mapping=slots_of(arguments["plan"].batch))
    return attend, arguments | new


def slots_of(batch: quire.Batch) -> torch.Tensor:
    """Return the slots of LENS' four tokens."""
    (_, _, last), (only, other) = (row[row >= 0].tolist() for row in batch.page_table)
    return torch.tensor([4 * last, 4 * only + 2, 4 * only + 3, 4 * other])


def confirm_append(a: dict[str, Any], result: Any) -> bool:
    return confirm_write(a, None) and confirm_attention(a, result)


def make_norm_rope(bare: bool) -> tuple[Callable, dict[str, Any]]:
    attend, arguments = make_append()
    angles = torch.rand(20, 6)
    rope = quire.Rope(angles.cos(), angles.sin(), torch.tensor([8, 2, 3, 4]))
    norm = quire.QKNorm(torch.rand(16), torch.rand(16), 1e-5)
    return attend, arguments | dict(rope=tuple(rope) if bare else rope, qk_norm=tuple(norm) if bare else norm)


def confirm_norm_rope(a: dict[str, Any], result: Any) -> bool:
    """The keys are those of the reference, and a plain call gives the result again, from rotated queries."""
    rope = None if a["rope"] is None else quire.Rope(*a["rope"])
    norm = None if a["qk_norm"] is None else quire.QKNorm(*a["qk_norm"])
    q, k = (reference.norm_rope(x, rope, norm, torch.float32, of_keys=x is a["k"]) for x in (a["q"], a["k"]))
    return confirm_append(a | dict(q=q, k=k), result)


def make_union_attention() -> tuple[Callable, dict[str, Any]]:
    p = paged_problem(sinks=True)
    both = quire.intervals.prefix_and_window(p.batch, 4, 2, 3)
    specs = p.spec, dataclasses.replace(p.spec, sinks=False)
    plans = [quire.plan(spec, batch, **p.bounds) for spec, batch in zip(specs, both, strict=True)]
    return quire.union_attention, dict(q=p.q, cache=p.cache, plans=plans, **p.tables, extras=(), return_lse=True)


def confirm_union_attention(a: dict[str, Any], result: Any) -> bool:
    """The state over a key that two plans see is no state over a set, so each plan is judged, and their merge."""
    states = []
    for i, plan in enumerate(a["plans"]):
        arguments = a | {"plan": plan, "sinks": None if i else a["sinks"]}
        if not confirm_attention(arguments, None):
            return False
        tables = {"sinks": arguments["sinks"], "alibi_slopes": a["alibi_slopes"]}
        states.append(quire.attention(a["q"], a["cache"], plan, **tables, return_lse=True))
    merged = quire.merge_states(states)
    owned = int(a["plans"][0].batch.query_starts[-1])
    wanted = merged if a["return_lse"] else (merged.out,)
    found = result if a["return_lse"] else (result,)
    return all(torch.equal(x[:owned], y[:owned]) for x, y in zip(found, wanted, strict=True))


def latent_problem(layout: str = "NHD", kv_dtype: torch.dtype | None = None) -> Problem:
    """A problem of latents without poison."""
    spec = LATENT_SPEC if kv_dtype is None else dataclasses.replace(LATENT_SPEC, kv_dtype=kv_dtype)
    if layout == "fp8_ds_mla":
        spec = dataclasses.replace(spec, head_dim=576, head_dim_v=512, softmax_scale=0.05)
    p = make_problem(spec, LENS, page_size=4, layout=layout)
    values = p.cache.latents.view(torch.uint8) if kv_dtype else p.cache.latents
    values[p.cache.latents.float().isnan() if layout == "NHD" else values == 255] = 0
    return p


def make_latent_attention(pair: bool) -> tuple[Callable, dict[str, Any]]:
    p = latent_problem()
    out = quire.State(torch.full((4, 4, 32), 7.0), torch.full((4, 4), 7.0))
    plan = quire.plan(p.spec, p.batch, **p.bounds)
    q = p.halves if pair else p.q
    arguments = dict(q=q, cache=p.cache, plan=plan, **p.tables, out=out, out_scale=None, return_lse=True)
    return quire.attention, NOTHING_NEW | arguments


def make_append_latents() -> tuple[Callable, dict[str, Any]]:
    attend, arguments = make_latent_attention(pair=False)
    return attend, arguments | dict(
        k=torch.randn(4, 32), v=torch.randn(4, 16), slot_mapping=slots_of(arguments["plan"].batch)
    )


def confirm_append_latents(a: dict[str, Any], result: Any) -> bool:
    return confirm_write_latent(a | dict(c_kv=a["k"], k_pe=a["v"]), None) and confirm_attention(a, result)


def make_varlen_attention() -> tuple[Callable, dict[str, Any]]:
    k, v = torch.randn(14, 2, 16), torch.randn(14, 2, 16)
    batch = quire.Batch.varlen(int32(0, 1, 4), int32(0, 9, 14))
    plan = quire.plan(SPEC, batch, max_query_len=3, max_seq_len=9, num_tokens=4)
    arguments = dict(q=torch.randn(4, 4, 16), k=k, v=v, plan=plan, sinks=None, alibi_slopes=None, extras=())
    return quire.varlen_attention, arguments | {
        "out": torch.full((4, 4, 16), 7.0), "out_scale": None, "return_lse": False
    }  # fmt: skip


def confirm_varlen_attention(a: dict[str, Any], result: Any) -> bool:
    return confirm_attention(a | {"cache": quire.PagedKVCache(a["k"], a["v"], "THD")}, result)


def make_plan() -> tuple[Callable, dict[str, Any]]:
    p = paged_problem()
    options = dict(num_splits=None, config=None, batch_invariant=False, workspace=None, kernel=None)
    return quire.plan, dict(spec=p.spec, batch=p.batch, **p.bounds, **options, shared_prefix=None)


def make_is_worth_sharing() -> tuple[Callable, dict[str, Any]]:
    p = paged_problem()
    return quire.is_worth_sharing, dict(spec=p.spec, batch=p.batch, shared_prefix=4, **p.bounds)


def make_shared_prefix(shared_prefix: Any) -> tuple[Callable, dict[str, Any]]:
    plan, arguments = make_plan()
    arguments["batch"].page_table[:, 0], arguments["batch"].seq_lens[1] = 1, 8  # the second sequence has 4 own keys
    return plan, arguments | {"max_seq_len": 9, "shared_prefix": shared_prefix}


def confirm_plan(a: dict[str, Any], plan: Any) -> bool:
    p = paged_problem()
    return confirm_attention({"q": p.q, "cache": p.cache, "plan": plan, **p.tables}, None)


def make_spec() -> tuple[Callable, dict[str, Any]]:
    fields = {field.name: getattr(SPEC, field.name) for field in dataclasses.fields(SPEC) if field.init}
    return quire.AttentionSpec, fields


def make_latent_spec() -> tuple[Callable, dict[str, Any]]:
    fields = {field.name: getattr(LATENT_SPEC, field.name) for field in dataclasses.fields(LATENT_SPEC) if field.init}
    return quire.AttentionSpec, fields


def make_mla() -> tuple[Callable, dict[str, Any]]:
    return quire.AttentionSpec.mla, dict(num_q_heads=4, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16)


def confirm_mla(a: dict[str, Any], spec: Any) -> bool:
    widths = spec.kv_lora_rank == a["kv_lora_rank"] and spec.qk_rope_head_dim == a["qk_rope_head_dim"]
    return widths and confirm_spec(a, spec)


def confirm_spec(a: dict[str, Any], spec: Any) -> bool:
    same = dataclasses.replace(spec)
    return same == spec and hash(same) == hash(spec) and run(make_problem(spec, LENS, page_size=4))


def make_cache() -> tuple[Callable, dict[str, Any]]:
    p = make_problem(dataclasses.replace(SPEC, kv_dtype=torch.int8), LENS, page_size=4, scales="tensor")
    of_format = dict(kv_format=None, k_block_scale=None, v_block_scale=None)
    return quire.PagedKVCache, dict(k=p.cache.k, v=p.cache.v, layout="NHD", k_scale=0.02, v_scale=0.5, **of_format)


def nvfp4_problem() -> Any:
    return make_problem(dataclasses.replace(SPEC, kv_dtype=None, kv_format="nvfp4"), LENS, page_size=4)


def make_nvfp4_cache() -> tuple[Callable, dict[str, Any]]:
    cache = nvfp4_problem().cache
    return quire.PagedKVCache, {"k": cache.k, "v": cache.v, "layout": "NHD", **cache.scales}


def confirm_nvfp4_cache(a: dict[str, Any], cache: Any) -> bool:
    return run(dataclasses.replace(nvfp4_problem(), cache=cache))


def confirm_cache(a: dict[str, Any], cache: Any) -> bool:
    p = make_problem(dataclasses.replace(SPEC, kv_dtype=torch.int8), LENS, page_size=4, scales="tensor")
    return run(dataclasses.replace(p, cache=cache))


def make_latents(layout: str) -> tuple[Callable, dict[str, Any]]:
    p = latent_problem(layout, torch.float8_e4m3fn)
    scale = 0.5 if layout == "NHD" else None
    arguments = dict(latents=p.cache.latents, kv_lora_rank=p.spec.kv_lora_rank, scale=scale)
    return quire.PagedKVCache.from_latents, arguments


def confirm_latents(layout: str) -> Callable[[dict[str, Any], Any], bool]:
    p = latent_problem(layout, torch.float8_e4m3fn)

    def confirm(a: dict[str, Any], cache: Any) -> bool:
        if cache.device.type != "meta" and bool((cache.latents.view(torch.uint8) == 255).all()):  # all NaN
            plan = quire.plan(p.spec, p.batch, **p.bounds)
            return bool(quire.attention(p.q, cache, plan).isnan().all())
        return run(dataclasses.replace(p, cache=cache))

    return confirm


def make_empty_latents(layout: str) -> tuple[Callable, dict[str, Any]]:
    spec = latent_problem(layout, torch.float8_e4m3fn).spec
    return quire.PagedKVCache.empty, dict(spec=spec, num_pages=8, page_size=4, layout=layout, device=None)


def make_empty() -> tuple[Callable, dict[str, Any]]:
    spec = dataclasses.replace(SPEC, kv_dtype=torch.int8)
    return quire.PagedKVCache.empty, dict(spec=spec, num_pages=8, page_size=4, layout="HND", device=None)


def confirm_empty(a: dict[str, Any], cache: Any) -> bool:
    served = cache.signature == a["spec"].cache_signature and cache.layout == a["layout"]
    return served and (cache.num_pages, cache.page_size) == (a["num_pages"], a["page_size"])


def make_batch(flat: bool = False) -> tuple[Callable, dict[str, Any]]:
    batch = make_problem(SPEC, LENS, page_size=4, flat_table=flat).batch
    tensors = dict(page_table=batch.page_table, seq_lens=batch.seq_lens, cu_seqlens_q=batch.cu_seqlens_q)
    arguments = tensors | dict(cu_pages=batch.cu_pages, query_offsets=int32(8, 2), paged=True)
    return quire.Batch, arguments | dict(key_begin=None, key_end=None, tree_bits=None, chosen=None, extra_chosen=None)


def make_batch_with_intervals() -> tuple[Callable, dict[str, Any]]:
    function, arguments = make_batch()
    return function, arguments | dict(key_begin=int32(3, 0, 1, 2), key_end=int32(9, 1, 9, 2))


def make_batch_with_a_tree() -> tuple[Callable, dict[str, Any]]:
    function, arguments = make_batch()
    return function, arguments | dict(key_begin=int32(3, 0, 1, 2), tree_bits=torch.tensor([1, 1, 3, 5]))


def make_batch_with_chosen_keys() -> tuple[Callable, dict[str, Any]]:
    function, arguments = make_batch()
    return function, arguments | dict(chosen=quire.ChosenKeys(**make_chosen_keys()[1]))


def make_chosen_keys() -> tuple[Callable, dict[str, Any]]:
    indices = torch.tensor([[[0, 2], [1, 3]], [[0, -1], [2, 0]], [[-1, 0], [1, 0]], [[1, 2], [0, 9]]]).int()
    arguments = dict(indices=indices, lens=torch.tensor([[2, 1], [2, 2], [2, 2], [0, 1]]).int())
    return quire.ChosenKeys, arguments | dict(block_size=2, are_slots=False)


def confirm_chosen_keys(a: dict[str, Any], chosen: Any) -> bool:
    p = paged_problem()
    return run(dataclasses.replace(p, batch=dataclasses.replace(p.batch, chosen=chosen)))


def confirm_batch(a: dict[str, Any], batch: Any) -> bool:
    p = paged_problem()
    one_query = batch.cu_seqlens_q is None
    return run(dataclasses.replace(p, batch=batch, query_lens=(1,) if one_query else p.query_lens))


def make_varlen() -> tuple[Callable, dict[str, Any]]:
    arguments = dict(cu_seqlens_q=int32(0, 1, 4), cu_seqlens_k=int32(0, 9, 14))
    return quire.Batch.varlen, arguments | dict(key_begin=int32(3, 0, 1, 2), key_end=int32(9, 1, 9, 2), tree_bits=None)


def confirm_varlen(a: dict[str, Any], batch: Any) -> bool:
    _, arguments = make_varlen_attention()
    query_len = 1 if batch.cu_seqlens_q is None else 3
    plan = quire.plan(SPEC, batch, max_query_len=query_len, max_seq_len=9, num_tokens=4)
    return confirm_varlen_attention(arguments | {"plan": plan}, None)


def make_write() -> tuple[Callable, dict[str, Any]]:
    cache = quire.PagedKVCache(torch.zeros(5, 4, 2, 16), torch.zeros(5, 4, 2, 16))
    slots = torch.tensor([3, -1, 17])
    return quire.write_kv, dict(k=torch.randn(3, 2, 16), v=torch.randn(3, 2, 16), cache=cache, slot_mapping=slots)


def confirm_write(a: dict[str, Any], result: Any) -> bool:
    memory = {slot: token for token, slot in enumerate(a["slot_mapping"].tolist()) if slot >= 0}
    stored = zip((a["cache"].k, a["cache"].v), (a["k"], a["v"]), strict=True)
    return result is None and all(
        torch.equal(pages.flatten(0, 1)[slot], new[token]) for pages, new in stored for slot, token in memory.items()
    )


def make_write_latent(rope: int = 16) -> tuple[Callable, dict[str, Any]]:
    cache = quire.PagedKVCache.from_latents(torch.zeros(5, 4, 32 + rope), 32)
    new = dict(c_kv=torch.randn(3, 32), k_pe=torch.randn(3, 1, rope) if rope else None)
    return quire.write_latent, new | dict(cache=cache, slot_mapping=torch.tensor([3, -1, 17]))


def confirm_write_latent(a: dict[str, Any], result: Any) -> bool:
    memory = {slot: token for token, slot in enumerate(a["slot_mapping"].tolist()) if slot >= 0}
    new = a["c_kv"] if a["k_pe"] is None else torch.cat([a["c_kv"], a["k_pe"].flatten(1)], 1)
    stored = a["cache"].latents.flatten(0, 1)
    return result is None and all(torch.equal(stored[slot], new[token]) for slot, token in memory.items())


def make_copy() -> tuple[Callable, dict[str, Any]]:
    src, dst = (quire.PagedKVCache(torch.randn(5, 4, 2, 16), torch.randn(5, 4, 2, 16)) for _ in range(2))
    return quire.copy_pages, dict(src=src, dst=dst, page_pairs=torch.tensor([[0, 3], [-1, 2], [4, 1]]))


def confirm_copy(a: dict[str, Any], result: Any) -> bool:
    pairs = [pair for pair in a["page_pairs"].tolist() if min(pair) >= 0]
    return result is None and all(torch.equal(a["src"].k[s], a["dst"].k[d]) for s, d in pairs)


def make_merge() -> tuple[Callable, dict[str, Any]]:
    states = [quire.State(torch.randn(4, 4, 16), torch.randn(4, 4)) for _ in range(3)]
    return quire.merge_states, dict(states=states)


def within_budget(compute: Callable[[torch.dtype], torch.Tensor], result: torch.Tensor) -> bool:
    """Whether a result is as close to float64 as twice what its own dtype can do."""
    exact, naive = compute(torch.float64), compute(result.dtype).double()
    if exact.numel() == 0:
        return result.shape == exact.shape
    budget = 2 * ((naive - exact).abs().max() + torch.finfo(result.dtype).eps * exact.abs().max())
    return bool((result.double() - exact).abs().max() <= budget)


def confirm_merge(a: dict[str, Any], result: Any) -> bool:
    def merge(dtype: torch.dtype) -> torch.Tensor:
        weights = torch.softmax(torch.stack([state.lse for state in a["states"]]).to(dtype), 0)[..., None]
        return (weights * torch.stack([state.out for state in a["states"]]).to(dtype)).sum(0)

    def lse(dtype: torch.dtype) -> torch.Tensor:
        return torch.logsumexp(torch.stack([state.lse for state in a["states"]]).to(dtype), 0)

    return within_budget(merge, result.out) and within_budget(lse, result.lse)


def make_service(function: Callable, **more: Any) -> tuple[Callable, dict[str, Any]]:
    limits = dict(max_num_seqs=4, max_num_tokens=8, max_seq_len=32, min_seq_len=1)
    kinds = dict(batch_invariant=False, intervals=False, trees=False, chosen=None, extra_chosen=None)
    return function, dict(spec=SPEC, **limits, **kinds, **more)


def make_warmup() -> tuple[Callable, dict[str, Any]]:
    return make_service(
        quire.warmup,
        cache=paged_problem().cache,
        **dict(return_lse=False, out_scale=False, append=False, min_query_len=1, per_head_dtype=None, progress=None),
        **dict(rope=None, qk_norm=None, kernels=None, extra_cache=None),
    )


def make_begin_warmup() -> tuple[Callable, dict[str, Any]]:
    more = dict(return_lse=False, out_scale=False, append=False, min_query_len=1, per_head_dtype=None, kernels=None)
    return make_service(quire.begin_warmup, cache=paged_problem().cache, extra_cache=None, device="cpu", **more)


def make_warmup_with_rope() -> tuple[Callable, dict[str, Any]]:
    warmup, arguments = make_warmup()
    _, rotated = make_norm_rope(bare=False)
    return warmup, arguments | dict(append=True, rope=rotated["rope"], qk_norm=rotated["qk_norm"])


def make_pool(method: str) -> tuple[Callable, dict[str, Any]]:
    pool = quire.PageAllocator(8, 4)
    sequence = pool.allocate(6)
    arguments: dict[str, dict[str, Any]] = {
        "allocate": dict(num_tokens=5),
        "grow": dict(sequence=sequence, num_tokens=3),
        "fork": dict(sequence=sequence),
        "free": dict(sequence=sequence),
        "page_table": dict(sequences=[sequence], width=3, device=None),
        "slot_mapping": dict(sequence=sequence, num_tokens=2, device=None),
    }
    return getattr(pool, method), arguments[method]


def confirm_pool(a: dict[str, Any], result: Any) -> bool:
    if "sequences" in a:
        width = 2 if a["width"] is None else a["width"]
        return result.is_meta or result.tolist() == [s.pages + [-1] * (width - len(s.pages)) for s in a["sequences"]]
    return result.is_meta or len(result) == a["num_tokens"]


def confirm_pages(a: dict[str, Any], result: Any) -> bool:
    sequence = result if isinstance(result, PageSequence) else a["sequence"]
    return len(sequence.pages) == -(-sequence.num_tokens // 4) and result in (sequence, None, [])


def attend_by_definition(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: dict[str, Any], dtype: torch.dtype
) -> torch.Tensor:
    """Attention of one sequence, [tokens, heads, head_dim], with flash-attn's arguments `a`, or with a mask `seen`."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (x.detach().to(dtype).transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.mT * float(a["softmax_scale"] or q.shape[-1] ** -0.5)
    if a["softcap"]:
        scores = float(a["softcap"]) * torch.tanh(scores / float(a["softcap"]))
    distance = torch.arange(k.shape[1]) - torch.arange(k.shape[1] - q.shape[1], k.shape[1])[:, None]
    if a["alibi_slopes"] is not None:
        scores = scores - a["alibi_slopes"].to(dtype)[:, None, None] * distance.abs()
    left, right = (int(side) for side in a["window_size"])
    right = 0 if a["causal"] else right
    hidden = (left >= 0) & (distance < -left) | (right >= 0) & (distance > right)
    hidden = hidden if a.get("seen") is None else ~a["seen"]
    sinks = torch.full((q.shape[0],), float("-inf"), dtype=dtype) if a["s_aux"] is None else a["s_aux"].to(dtype)
    scores = torch.cat([scores.masked_fill(hidden, float("-inf")), sinks[:, None, None].expand(-1, q.shape[1], 1)], -1)
    return (torch.softmax(scores, -1).nan_to_num(0.0)[..., :-1] @ v).transpose(0, 1)


FLASH = dict(softmax_scale=None, causal=True, window_size=(2, 0), softcap=0.0)


def make_flash(heads: bool = False) -> tuple[Callable, dict[str, Any]]:
    tables = dict(alibi_slopes=torch.rand(4), s_aux=torch.randn(4)) if heads else dict(alibi_slopes=None, s_aux=None)
    tensors = dict(q=torch.randn(2, 3, 4, 16), k=torch.randn(2, 5, 2, 16), v=torch.randn(2, 5, 2, 16))
    return flash_attn.flash_attn_func, tensors | FLASH | tables | dict(
        dropout_p=0.0, deterministic=False, return_attn_probs=False
    )


def confirm_flash(a: dict[str, Any], result: Any) -> bool:
    def compute(dtype: torch.dtype) -> torch.Tensor:
        outs = [attend_by_definition(*x, a, dtype) for x in zip(a["q"], a["k"], a["v"], strict=True)]
        return torch.stack(outs) if outs else a["q"].to(dtype)

    return within_budget(compute, result[0] if a["return_attn_probs"] else result)


def make_flash_varlen(paged: bool = False) -> tuple[Callable, dict[str, Any]]:
    _, arguments = make_flash()
    shape = (5, 4, 2, 16) if paged else (14, 2, 16)
    arguments |= dict(
        q=torch.randn(4, 4, 16), k=torch.randn(shape), v=torch.randn(shape), max_seqlen_q=3, max_seqlen_k=9
    )
    table = torch.tensor([[1, 4, 2], [3, 0, -1]], dtype=torch.int32) if paged else None
    return flash_attn.flash_attn_varlen_func, arguments | dict(
        cu_seqlens_q=int32(0, 1, 4), cu_seqlens_k=int32(0, 9, 14), block_table=table
    )


def confirm_flash_varlen(a: dict[str, Any], result: Any) -> bool:
    def compute(dtype: torch.dtype) -> torch.Tensor:
        outs = []
        starts, ends = a["cu_seqlens_q"].tolist(), a["cu_seqlens_k"].tolist()
        for i, (q0, q1, k0, k1) in enumerate(zip(starts, starts[1:], ends, ends[1:], strict=False)):
            k, v = a["k"], a["v"]
            if a["block_table"] is not None:
                pages = a["block_table"][i, : -(-(k1 - k0) // k.shape[1])].long()
                k, v, k0, k1 = k[pages].flatten(0, 1), v[pages].flatten(0, 1), 0, k1 - k0
            outs.append(attend_by_definition(a["q"][q0:q1], k[k0:k1], v[k0:k1], a, dtype))
        return torch.cat(outs)

    out = result[0] if a["return_attn_probs"] else result
    return within_budget(compute, out[: int(a["cu_seqlens_q"][-1])])


def make_flash_kvcache(paged: bool = False) -> tuple[Callable, dict[str, Any]]:
    _, arguments = make_flash()
    caches = dict(k_cache=torch.randn(5, 4, 2, 16), v_cache=torch.randn(5, 4, 2, 16))
    where = dict(
        block_table=torch.tensor([[1, 4], [3, 0]], dtype=torch.int32), cache_batch_idx=None, cache_leftpad=None
    )
    if not paged:
        where = dict(block_table=None, cache_batch_idx=int32(4, 1), cache_leftpad=int32(1, 0))
    for name in ("dropout_p", "deterministic", "return_attn_probs"):
        del arguments[name]
    arguments |= dict(q=torch.randn(2, 1, 4, 16), k=torch.randn(2, 1, 2, 16), v=torch.randn(2, 1, 2, 16))
    arguments |= dict(rotary_cos=torch.rand(8, 8), rotary_sin=torch.rand(8, 8), rotary_interleaved=False)
    lengths = int32(6, 3) if paged else int32(2, 3)
    more = dict(cache_seqlens=lengths, num_splits=0, return_softmax_lse=False)
    return flash_attn.flash_attn_with_kvcache, arguments | caches | where | more


def confirm_flash_kvcache(a: dict[str, Any], result: Any) -> bool:
    """Judge by the cache as it is after the call, which has the new keys."""
    batch, length = a["q"].shape[0], 0 if a["k"] is None else a["k"].shape[1]
    lens = torch.as_tensor(a["cache_seqlens"]).expand(batch)

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        if a["rotary_cos"] is None:
            return x
        c, s = a["rotary_cos"][position].to(x.dtype), a["rotary_sin"][position].to(x.dtype)
        even, odd = (x[..., ::2], x[..., 1::2]) if a["rotary_interleaved"] else x[..., : 2 * len(c)].split(len(c), -1)
        pair = even * c - odd * s, even * s + odd * c
        return (
            torch.stack(pair, -1).flatten(-2)
            if a["rotary_interleaved"]
            else torch.cat([*pair, x[..., 2 * len(c) :]], -1)
        )

    def compute(dtype: torch.dtype) -> torch.Tensor:
        outs = []
        for i in range(batch):
            begin, row = 0, i
            end = int(lens[i]) + length
            if a["block_table"] is not None:
                k, v = (x[a["block_table"][i].long()].flatten(0, 1) for x in (a["k_cache"], a["v_cache"]))
            else:
                row = i if a["cache_batch_idx"] is None else int(a["cache_batch_idx"][i])
                begin = 0 if a["cache_leftpad"] is None else int(a["cache_leftpad"][i])
                k, v = a["k_cache"][row], a["v_cache"][row]
            q = rotated(a["q"][i].to(dtype), end - length)
            outs.append(attend_by_definition(q, k[begin:end], v[begin:end], a, dtype))
        return torch.stack(outs)

    return within_budget(compute, result[0] if a["return_softmax_lse"] else result)


def batch_of_four() -> quire.Batch:
    return quire.Batch(torch.zeros(2, 3, dtype=torch.int32), int32(9, 5), int32(0, 1, 4))


INTERVALS: dict[str, dict[str, Any]] = {  # arguments of the functions of `quire.intervals`, but for the batch
    "causal": dict(num_tokens=5),
    "sliding_window": dict(num_tokens=5, size=3, right=1),
    "chunked_local": dict(num_tokens=5, size=4),
    "block_causal": dict(num_tokens=5, size=4),
    "prefix_lm": dict(num_tokens=5, prefix_lens=int32(2, 4)),
    "bidirectional_spans": dict(
        num_tokens=5, spans=int32([1, 2, 4], [1, 6, 9], [-1, 0, 0]), sliding_window=2, within_window=False
    ),
    "documents": dict(num_tokens=5, cu_seqlens=int32(0, 4, 11, 14), causal=True),
    "prefix_and_window": dict(num_tokens=5, prefix=2, size=3),
}


def make_intervals(name: str) -> tuple[Callable, dict[str, Any]]:
    arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in INTERVALS[name].items()}
    return getattr(quire.intervals, name), dict(batch=batch_of_four(), **arguments)


def seen_by(name: str, a: dict[str, Any], seq: int, position: int, length: int, before: int) -> tuple[int, int]:
    """The first key that a token sees and the key after the last, from the words of each function."""
    size = int(a.get("size", 1))
    if name == "documents":
        cuts = a["cu_seqlens"].tolist()
        own = [(b, e) for b, e in itertools.pairwise(cuts) if b <= before + position < e] or [(before, before)]
        begin, end = own[0][0] - before, own[0][1] - before
        return begin, min(end, position + 1) if a["causal"] else end
    if name == "bidirectional_spans":
        own = [(b, e) for s, b, e in a["spans"].tolist() if s == seq and b <= position < e]
        window = (1 << 31) if a["sliding_window"] is None else int(a["sliding_window"])
        begins, ends = [b for b, _ in own if window == 1 << 31 or not a["within_window"]], [e for _, e in own]
        return min([max(0, position + 1 - window), *begins]), max([position + 1, *ends])
    return {
        "causal": (0, position + 1),
        "sliding_window": (position + 1 - size, position + 1 + int(a.get("right", 0))),
        "chunked_local": (position - position % size, position + 1),
        "block_causal": (0, position - position % size + size),
        "prefix_lm": (0, max(position + 1, a["prefix_lens"].tolist()[seq]) if name == "prefix_lm" else 0),
    }[name]


def confirm_intervals(name: str) -> Callable[[dict[str, Any], Any], bool]:
    def confirm(a: dict[str, Any], found: Any) -> bool:
        if name == "prefix_and_window":  # the same keys, each once
            both, one = [], dict(batch=a["batch"], num_tokens=a["num_tokens"])
            for some in found:
                both.append([set(range(b, e)) for b, e in zip(some.key_begin, some.key_end, strict=True)])
            ends = quire.intervals.causal(**one).key_end.tolist()
            begins = quire.intervals.sliding_window(**one, size=a["size"]).key_begin.tolist()
            wanted = [{*range(min(e, int(a["prefix"]))), *range(b, e)} for b, e in zip(begins, ends, strict=True)]
            return all(not x & y and x | y == z for x, y, z in zip(*both, wanted, strict=True))
        starts, lengths = a["batch"].query_starts.tolist(), a["batch"].seq_lens.tolist()
        expected = [(0, 0)] * int(a["num_tokens"])
        for seq, length in enumerate(lengths):
            for token in range(starts[seq], min(starts[seq + 1], len(expected))):
                position = length - starts[seq + 1] + token
                if position >= 0:
                    ends = seen_by(name, a, seq, position, length, sum(lengths[:seq]))
                    expected[token] = tuple(min(max(end, 0), length) for end in ends)
        return list(zip(found.key_begin.tolist(), found.key_end.tolist(), strict=True)) == expected

    return confirm


TREES: dict[str, dict[str, Any]] = {  # arguments of the functions of `quire.draft_trees`
    "from_parents": dict(parents=torch.tensor([-1, 0, 0, 2])),
    "from_mask": dict(mask=torch.tensor([[1, 0], [1, 1]] * 3).bool().view(3, 2, 2), num_drafts=2),
    "from_words": dict(words=torch.tensor([1, 3, 5], dtype=torch.int32)),
    "from_flashinfer": dict(
        packed_custom_mask=torch.tensor([0b11110111, 0b1], dtype=torch.uint8), qo_lens=[2, 1], kv_lens=[4, 1]
    ),
    "depths": dict(tree_bits=torch.tensor([1, 3, -1])),
    "windowed": dict(tree_bits=torch.tensor([1, 1, 3, 7]), sliding_window=2),
}


def make_trees(name: str) -> tuple[Callable, dict[str, Any]]:
    arguments = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in TREES[name].items()}
    batch = {"batch": batch_of_four()} if name == "windowed" else {}
    return getattr(quire.draft_trees, name), batch | arguments


def signed(word: int) -> int:
    return (word & (1 << 64) - 1) - (1 << 64) * (word >> 63 & 1)


def confirm_trees(name: str) -> Callable[[dict[str, Any], Any], bool]:
    def confirm(a: dict[str, Any], found: Any) -> bool:
        if isinstance(found, torch.Tensor) and found.is_meta:
            return True
        if name == "from_parents":
            expected = []
            for parents in a["parents"].reshape(-1, a["parents"].shape[-1]).tolist():
                for draft in range(len(parents)):
                    path: set[int] = set()
                    while 0 <= draft < len(parents) and draft not in path:
                        path.add(draft)
                        draft = parents[draft]
                    expected.append(signed(sum(1 << d for d in path)))
        elif name == "from_mask":
            rows = a["mask"].reshape(-1, int(a["num_drafts"])).tolist()
            expected = [signed(sum(bit << j for j, bit in enumerate(row))) for row in rows]
        elif name == "from_words":
            bits = 8 * a["words"].dtype.itemsize
            expected = [signed(word & (1 << bits) - 1) for word in a["words"].flatten().tolist()]
        elif name == "from_flashinfer":
            expected, data = [], a["packed_custom_mask"].tolist()
            for drafts, keys in zip(map(int, a["qo_lens"]), map(int, a["kv_lens"]), strict=True):
                size = -(-drafts * keys // 8)
                number = sum(byte << 8 * i for i, byte in enumerate(data[:size]))
                data = data[size:]
                rows = [number >> row * keys & (1 << keys) - 1 for row in range(drafts)]
                assert all(row & (1 << keys - drafts) - 1 == (1 << keys - drafts) - 1 for row in rows)
                expected += [signed(row >> keys - drafts) for row in rows]
        elif name == "depths":
            expected = [(word & (1 << 64) - 1).bit_count() - 1 for word in a["tree_bits"].flatten().tolist()]
        else:
            return confirm_windowed(a, found)
        return found.flatten().tolist() == expected

    return confirm


def confirm_windowed(a: dict[str, Any], found: quire.Batch) -> bool:
    """Only what no row of the batch could see is not compared: bits of drafts that a sequence does not have."""
    words, window = a["tree_bits"].tolist(), int(a["sliding_window"])
    depth = [(word & (1 << 64) - 1).bit_count() - 1 for word in words]
    starts, lengths = a["batch"].query_starts.tolist(), a["batch"].seq_lens.tolist()
    for seq, length in enumerate(lengths):
        count = starts[seq + 1] - starts[seq]
        for token in range(starts[seq], min(starts[seq + 1], len(words))):
            begin = max(0, min(length, length - count + depth[token] + 1 - window))
            drafts = range(min(count, len(words) - starts[seq]))
            near = [j for j in drafts if depth[token] - depth[starts[seq] + j] < window]
            bits = sum(words[token] & 1 << j for j in near)
            kept = int(found.tree_bits[token]) & (1 << len(drafts)) - 1
            if int(found.key_begin[token]) != begin or kept != bits:
                return False
    return found.key_end is None


CALLS = {
    "attention": Call(make_attention, confirm_attention),
    "union_attention": Call(make_union_attention, confirm_union_attention),
    "attention, sinks and slopes": Call(lambda: make_attention(sinks=True, alibi=True), confirm_attention),
    "attention, quantised": Call(make_quantised_attention, confirm_quantised_attention),
    "attention, new tokens": Call(make_append, confirm_append),
    "attention, new latents": Call(make_append_latents, confirm_append_latents),
    "attention, rotated": Call(lambda: make_norm_rope(bare=False), confirm_norm_rope),
    "attention, rotated, bare tuples": Call(lambda: make_norm_rope(bare=True), confirm_norm_rope),
    "attention, latents": Call(lambda: make_latent_attention(pair=False), confirm_attention),
    "attention, latents and a pair": Call(lambda: make_latent_attention(pair=True), confirm_attention),
    "varlen_attention": Call(make_varlen_attention, confirm_varlen_attention),
    "plan": Call(make_plan, confirm_plan),
    "is_worth_sharing": Call(make_is_worth_sharing, lambda a, result: result is False),  # PyTorch serves the CPU
    "plan, a shared prefix": Call(lambda: make_shared_prefix(4), confirm_plan),
    "plan, levels of shared prefixes": Call(lambda: make_shared_prefix([[(2, 4)], [(1, 0), (1, 0)]]), confirm_plan),
    "AttentionSpec": Call(make_spec, confirm_spec),
    "AttentionSpec, latents": Call(make_latent_spec, confirm_spec),
    "AttentionSpec.mla": Call(make_mla, confirm_mla),
    "PagedKVCache": Call(make_cache, confirm_cache),
    "PagedKVCache, nvfp4": Call(make_nvfp4_cache, confirm_nvfp4_cache),
    "PagedKVCache.empty": Call(make_empty, confirm_empty),
    **{
        name: call
        for layout in ("NHD", "fp8_ds_mla")
        for name, call in {
            f"PagedKVCache.from_latents, {layout}": Call(
                lambda layout=layout: make_latents(layout), confirm_latents(layout)
            ),
            f"PagedKVCache.empty, latents, {layout}": Call(
                lambda layout=layout: make_empty_latents(layout), confirm_empty
            ),
        }.items()
    },
    "Batch": Call(make_batch, confirm_batch),
    "Batch, intervals": Call(make_batch_with_intervals, confirm_batch),
    "Batch, a tree": Call(make_batch_with_a_tree, confirm_batch),
    "Batch, chosen keys": Call(make_batch_with_chosen_keys, confirm_batch),
    "ChosenKeys": Call(make_chosen_keys, confirm_chosen_keys),
    "Batch, flat": Call(lambda: make_batch(flat=True), confirm_batch),
    "Batch.varlen": Call(make_varlen, confirm_varlen),
    "write_kv": Call(make_write, confirm_write),
    "write_latent": Call(make_write_latent, confirm_write_latent),
    "write_latent, no rotary columns": Call(lambda: make_write_latent(rope=0), confirm_write_latent),
    "copy_pages": Call(make_copy, confirm_copy),
    "merge_states": Call(make_merge, confirm_merge),
    "begin_warmup": Call(make_begin_warmup, lambda a, result: result is None),
    "warmup": Call(make_warmup, lambda a, result: result == []),
    "warmup, rotated": Call(make_warmup_with_rope, lambda a, result: result == []),
    "workspace_size": Call(lambda: make_service(quire.workspace_size, device="cpu"), lambda a, result: result == 0),
    "PageAllocator": Call(
        lambda: (quire.PageAllocator, dict(num_pages=8, page_size=4)),
        lambda a, pool: pool.num_free_pages == a["num_pages"] and pool.page_size == a["page_size"],
    ),
    **{
        f"PageAllocator.{method}": Call(lambda method=method: make_pool(method), confirm)
        for confirm, methods in (
            (confirm_pages, ("allocate", "grow", "fork", "free")),
            (confirm_pool, ("page_table", "slot_mapping")),
        )
        for method in methods
    },
    **{
        f"intervals.{name}": Call(lambda name=name: make_intervals(name), confirm_intervals(name)) for name in INTERVALS
    },
    **{f"draft_trees.{name}": Call(lambda name=name: make_trees(name), confirm_trees(name)) for name in TREES},
    "flash_attn_func": Call(make_flash, confirm_flash),
    "flash_attn_func, slopes and sinks": Call(lambda: make_flash(heads=True), confirm_flash),
    "flash_attn_varlen_func": Call(make_flash_varlen, confirm_flash_varlen),
    "flash_attn_varlen_func, paged": Call(lambda: make_flash_varlen(paged=True), confirm_flash_varlen),
    "flash_attn_with_kvcache": Call(make_flash_kvcache, confirm_flash_kvcache),
    "flash_attn_with_kvcache, paged": Call(lambda: make_flash_kvcache(paged=True), confirm_flash_kvcache),
}
EXEMPT = {
    "OutOfPagesError": "an exception",
    "UnsupportedError": "an exception",
    "Plan": "made by quire.plan alone",
    "State": "holds what it is given; the verbs check it",
    "Rope": "holds what it is given; attention and warmup check it",
    "QKNorm": "holds what it is given; attention and warmup check it",
    "no_compilation": "has no arguments",
    "score": "reads a function; test_score_functions.py has what it refuses",
    "mask": "reads a function; test_score_functions.py has what it refuses",
}
CASES = [(call, name) for call in CALLS for name in CALLS[call].make()[1]]


@pytest.fixture(scope="module", autouse=True)
def lazy_imports_of_torch() -> None:
    """Let torch import what meta tensors need before calls are timed."""
    int32(0, 1).to("meta").diff()


def contents(value: Any) -> Any:
    """Return all that a call could change in a value, to be compared with ==."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_nested or value.device.type == "meta" or value.numel() == 0:
            return None
        value = value.int_repr() if value.is_quantized else value
        flat = torch.empty(value.numel(), dtype=value.dtype).copy_(value.detach().reshape(-1))
        return flat.view(torch.uint8).numpy().tobytes()
    if isinstance(value, PageSequence):
        return list(value.pages), value.num_tokens
    if isinstance(value, quire.PageAllocator):
        return value.num_free_pages
    if isinstance(value, quire.PagedKVCache):
        return [contents(x) for x in (value.k, value.v, value.k_scale, value.v_scale)]
    if isinstance(value, quire.Plan):
        return contents(value.batch)
    if isinstance(value, quire.Batch | quire.ChosenKeys):
        return [contents(getattr(value, field.name)) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return [contents(x) for x in value.values()]
    return [contents(x) for x in value] if isinstance(value, list | tuple) else None


def in_house_grammar(error: Exception) -> bool:
    """Whether an error is one of Quire's, and says what must be and what it got."""
    return isinstance(error, HOUSE) and re.search(r" must .* got .+", str(error), re.DOTALL) is not None


def complaint(call: Call, name: str, value: Any, left: list) -> str | None:
    """Return what is wrong with how a call takes this value for one of its arguments.

    Most calls are refused, and to make one takes longer than to refuse it. What a refusal left as it was is put into
    `left`, and the next call takes it from there.
    """
    # `torch.manual_seed` also seeds GPUs that are not there, and keeps the stack of each call in words for them.
    torch.default_generator.manual_seed(0)
    function, arguments = left.pop() if left else call.make()
    arguments[name] = value
    owner = getattr(function, "__self__", None)
    before = contents(arguments), contents(owner)
    start = time.process_time()
    try:
        result = function(**arguments)
    except Exception as error:
        if not in_house_grammar(error):
            return f"raised {type(error).__name__}: {error}"
        if len(str(error)) > LONGEST:
            return f"raised {len(str(error)):,} characters: {error}"
        if (contents(arguments), contents(owner)) != before:
            return f"wrote before it raised {error}"
        if owner is None:  # `contents` does not know all that an object holds
            left.append((function, arguments))
        return None
    finally:
        if time.process_time() - start > SECONDS:
            pytest.fail(f"{name} took {time.process_time() - start:.1f} s")
    try:
        return None if call.confirm(arguments, result) else f"accepted, and returned what is wrong: {result}"
    except Exception as error:  # a noun may be sound and still not fit the rest
        return None if in_house_grammar(error) else f"accepted, then {type(error).__name__}: {error}"


def test_every_public_function_and_argument_is_in_the_matrix():
    named = {call.split(",")[0].split(".")[0] for call in CALLS}
    assert named == (set(quire.__all__) - set(EXEMPT)) | set(flash_attn.__all__) | {"intervals", "draft_trees"}
    assert set(INTERVALS) == set(quire.intervals.__all__) and set(TREES) == set(quire.draft_trees.__all__)
    methods = {name for name, _ in inspect.getmembers(quire.PageAllocator, inspect.isfunction) if name[0] != "_"}
    assert {f"PageAllocator.{name}" for name in methods} <= set(CALLS)
    for call in CALLS.values():
        function, arguments = call.make()
        parameters = inspect.signature(function).parameters.values()
        assert set(arguments) == {p.name for p in parameters if p.kind is not p.VAR_KEYWORD}


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_right_before_anything_is_replaced(name):
    torch.manual_seed(0)
    function, arguments = CALLS[name].make()
    assert CALLS[name].confirm(arguments, function(**arguments))


@pytest.mark.slow
@pytest.mark.parametrize(("call", "name"), CASES, ids=lambda word: word.replace(" ", "_"))
def test_hostile_values_are_refused_or_served_rightly(call, name):
    torch.manual_seed(0)
    _, arguments = CALLS[call].make()
    left = []
    found = {kind: complaint(CALLS[call], name, value, left) for kind, value in hostile(arguments[name])}
    wrong = [f"{name} = {kind}: {what[:300]}" for kind, what in found.items() if what]
    assert not wrong, "\n".join(wrong)


# The commands of the issue on defects, each a test of its own.


def decode_problem() -> tuple[Problem, quire.Plan]:
    p = make_problem(SPEC, ((1, 9), (1, 5)), page_size=4)
    return p, quire.plan(SPEC, p.batch, **p.bounds)


def test_a_cache_without_pages_is_refused_by_a_plan_for_pages():
    p, plan = decode_problem()
    flat = quire.PagedKVCache(torch.randn(14, 2, 16), torch.randn(14, 2, 16), "THD")
    with pytest.raises(ValueError, match="cache must be paged, as the plan's batch is, got layout THD"):
        quire.attention(p.q, flat, plan)


def test_pages_are_refused_by_a_plan_for_a_cache_without_pages():
    p, _ = decode_problem()
    batch = quire.Batch.varlen(int32(0, 1, 2), int32(0, 4, 7))
    plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=4)
    with pytest.raises(ValueError, match="cache must be of layout THD, as the plan's batch has no pages, got NHD"):
        quire.attention(p.q, p.cache, plan)


@pytest.mark.parametrize("strides", [(0, 16, 1), (64, 0, 1), (16, 16, 1), (40, 16, 1)])
def test_out_may_not_overlap_itself(strides):
    p, plan = decode_problem()
    out = torch.full((256,), 7.0).as_strided((2, 4, 16), strides)
    with pytest.raises(ValueError, match="out must have a contiguous last dimension and rows that do not overlap"):
        quire.attention(p.q, p.cache, plan, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("strides", [(16, 32, 1), (1000, 16, 1)])
def test_out_may_have_any_strides_that_do_not_overlap(strides):
    p, plan = decode_problem()
    out = torch.zeros(2000).as_strided((2, 4, 16), strides)
    assert Oracle(p).judge(quire.attention(p.q, p.cache, plan, out=out)).passed


def test_vectors_of_sixteen_bytes_need_a_head_dim_of_whole_vectors():
    spec = dataclasses.replace(SPEC, head_dim=24, kv_dtype=torch.int8)
    with pytest.raises(quire.UnsupportedError, match=r"layout must be NHD or HND for head_dim 24 in torch.int8"):
        quire.PagedKVCache.empty(spec, 8, 4, layout="HDNX")


@pytest.mark.parametrize(("sizes", "name"), [((0, 4), "num_pages"), ((8, 0), "page_size")])
def test_a_cache_has_pages_and_pages_have_slots(sizes, name):
    with pytest.raises(ValueError, match=f"{name} must be from 1 to .*, got 0"):
        quire.PagedKVCache.empty(SPEC, *sizes)
    with pytest.raises(ValueError, match="k must have no empty dimension"):
        quire.PagedKVCache(torch.zeros(*sizes, 2, 16), torch.zeros(*sizes, 2, 16))


def test_a_slot_past_the_pool_is_refused_before_anything_is_written():
    _, arguments = make_write()
    cache = arguments["cache"]
    with pytest.raises(ValueError, match=r"slot_mapping must hold slots below .* got 20"):
        quire.write_kv(arguments["k"], arguments["v"], cache, torch.tensor([0, 1, 20]))
    assert not cache.k.any() and not cache.v.any()


def test_an_expanded_cache_is_read_only():
    _, arguments = make_write()
    pages = torch.zeros(1, 4, 2, 16).expand(5, 4, 2, 16)
    with pytest.raises(ValueError, match="cache must have memory for every slot to be written, got strides"):
        quire.write_kv(**arguments | {"cache": quire.PagedKVCache(pages, pages.clone())})


def test_a_cache_that_requires_a_gradient_or_has_no_memory_is_not_written():
    function, arguments = make_write()
    cache = arguments["cache"]
    tracked = quire.PagedKVCache(cache.k.clone().requires_grad_(), cache.v)
    with pytest.raises(quire.UnsupportedError, match="cache must not require a gradient, got k or v that does"):
        function(**arguments | {"cache": tracked})
    names = ("k", "v", "slot_mapping")
    nowhere = {name: arguments[name].to("meta") for name in names}
    nowhere["cache"] = quire.PagedKVCache(cache.k.to("meta"), cache.v.to("meta"))
    with pytest.raises(quire.UnsupportedError, match="cache must be on a GPU or the CPU, got meta"):
        function(**nowhere)


@pytest.mark.parametrize(
    ("tensor", "values", "name"),
    [
        ("seq_lens", (-1, 5), "seq_lens"),
        ("seq_lens", (9, 500), "max_seq_len"),
        ("cu_seqlens_q", (0, 3, 2), "cu_seqlens_q"),
        ("cu_seqlens_q", (1, 2, 4), "cu_seqlens_q"),
        ("cu_seqlens_q", (0, 1, 9), "q"),
        ("page_table", (99, 1, 2, 3, 4, 5), "page_table"),
        ("page_table", (-1, 1, 2, 3, 4, 5), "page_table"),
    ],
)
def test_contents_out_of_range_are_refused_for_cpu_tensors(tensor, values, name):
    p = make_problem(SPEC, LENS, page_size=4)
    plan = quire.plan(SPEC, p.batch, **p.bounds)
    out = torch.full((4, 4, 16), 7.0)
    broken = getattr(p.batch, tensor)
    broken.copy_(torch.tensor(values).view(broken.shape))
    with pytest.raises(ValueError, match=f"^{name} must .* got"):
        quire.attention(p.q, p.cache, plan, out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("kernel", ["hoper", "torch", 3])
def test_a_kernel_that_does_not_exist_is_refused(kernel):
    p = make_problem(SPEC, LENS)
    with pytest.raises((ValueError, TypeError), match=r"kernel must be .* got"):
        quire.plan(SPEC, p.batch, **p.bounds, kernel=kernel)


@pytest.mark.parametrize("option", ["kernel", "num_splits", "config", "workspace", "batch_invariant"])
def test_options_that_pytorch_does_not_serve_are_refused_by_name(option):
    p = make_problem(SPEC, LENS)
    config = KernelConfig(16, 32, 4, 2, False, 1, 16, 16)
    values = dict(kernel="hopper", num_splits=2, config=config, workspace=torch.zeros(64, dtype=torch.uint8))
    with pytest.raises(quire.UnsupportedError, match=f"{option} must be left out for CPU tensors"):
        quire.plan(SPEC, p.batch, **p.bounds, **{option: values.get(option, True)})


def test_the_workspace_that_workspace_size_asks_for_is_accepted():
    p = make_problem(SPEC, LENS)
    size = quire.workspace_size(SPEC, max_num_seqs=2, max_num_tokens=4, max_seq_len=16, device="cpu")
    quire.plan(SPEC, p.batch, **p.bounds, workspace=torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize("value", [2.5, float("nan"), True, torch.tensor(2)])
def test_an_integer_is_an_integer(value):
    p = make_problem(SPEC, LENS)
    bounds = p.bounds
    for name in ("num_q_heads", "num_kv_heads", "head_dim", "head_dim_v", "sliding_window", "sliding_window_right"):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
            dataclasses.replace(SPEC, **{name: value})
    for name in ("max_query_len", "max_seq_len", "num_tokens", "num_splits"):
        with pytest.raises(TypeError, match=f"{name} must be an integer, got"):
            quire.plan(SPEC, p.batch, **bounds | {name: value})
    for sizes in ((value, 4), (8, value)):
        with pytest.raises(TypeError, match="must be an integer, got"):
            quire.PageAllocator(*sizes)


def test_a_scale_that_float32_does_not_hold_is_refused():
    for name in ("softmax_scale", "softcap"):
        for value in (1e-320, 1e39, float("nan"), -1.0, True, "1"):
            with pytest.raises((ValueError, TypeError), match=f"{name} must be .* got"):
                dataclasses.replace(SPEC, **{name: value})


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_sinks_and_slopes_are_real_numbers(dtype):
    for name, feature in (("sinks", "sinks"), ("alibi_slopes", "alibi")):
        p = make_problem(dataclasses.replace(SPEC, **{feature: True}), LENS)
        plan = quire.plan(p.spec, p.batch, **p.bounds)
        with pytest.raises(ValueError, match=f"{name} must be of dtype float16, bfloat16, float32, float64, got"):
            quire.attention(p.q, p.cache, plan, **p.tables | {name: p.tables[name].to(dtype)})


def test_what_a_batch_says_of_each_token_is_checked_before_a_launch():
    p = paged_problem()
    out, begin, end = torch.full((4, 4, 16), 7.0), int32(0, 0, 0, 0), int32(9, 3, 4, 5)
    words = torch.tensor([1, 1, 3, 5])
    for fields, error, message in (
        (dict(key_begin=begin), ValueError, "key_end must be given with key_begin, got None"),
        (dict(key_end=end), ValueError, "key_begin must be given with key_end, got None"),
        (dict(key_begin=begin, key_end=end[:3]), ValueError, "key_end must have key_begin's 4 entries, got 3"),
        (dict(key_begin=begin.long(), key_end=end), TypeError, "key_begin must be int32, got torch.int64"),
        (dict(key_begin=begin, key_end=end.to("meta")), ValueError, "key_end must be on page_table's device cpu"),
        (dict(tree_bits=words.int()), TypeError, "tree_bits must be int64, got torch.int32"),
        (dict(tree_bits=words, key_end=end), ValueError, "key_end must be left out where tree_bits are given, got"),
    ):
        with pytest.raises(error, match=message):
            dataclasses.replace(p.batch, **fields)
    for fields, name in (
        (dict(key_begin=begin[:3], key_end=end[:3]), "key_begin"),
        (dict(tree_bits=words[:3]), "tree_bits"),
    ):
        plan = quire.plan(SPEC, dataclasses.replace(p.batch, **fields), **p.bounds)
        with pytest.raises(ValueError, match=f"{name} must have an entry for each of q's 4 tokens, got 3"):
            quire.attention(p.q, p.cache, plan, out=out)
    assert (out == 7).all()
    one_each = quire.Batch(p.batch.page_table, p.batch.seq_lens)
    with pytest.raises(ValueError, match="tree_bits must have an entry for each of 2 sequences, got 1"):
        dataclasses.replace(one_each, tree_bits=words[:1])


def test_a_spec_and_a_batch_may_not_both_have_windows():
    p = paged_problem()
    windows = {"sliding_window": 4, "sliding_window_right": 3}
    intervals = quire.intervals.causal(p.batch, 4)
    tree = dataclasses.replace(p.batch, tree_bits=torch.tensor([1, 1, 3, 5]))
    for batch, name in ((intervals, "key_begin"), (tree, "tree_bits")):
        for window, size in windows.items():
            spec = dataclasses.replace(SPEC, **{window: size})
            with pytest.raises(ValueError, match=f"{window} must be left out where the batch has {name}, got {size}"):
                quire.plan(spec, batch, **p.bounds)
    spec = dataclasses.replace(SPEC, alibi=True)
    quire.plan(spec, intervals, **p.bounds)
    with pytest.raises(quire.UnsupportedError, match="alibi must be False where the batch has tree_bits, got True"):
        quire.plan(spec, tree, **p.bounds)


def test_more_than_64_drafts_are_refused_by_name():
    words = torch.zeros(65, dtype=torch.int64)
    starts = int32(0, 65)
    batch = quire.Batch.varlen(starts, starts, tree_bits=words)
    with pytest.raises(quire.UnsupportedError, match="max_query_len must be at most 64 where the batch has tree_bits"):
        quire.plan(SPEC, batch, max_query_len=65, max_seq_len=65)
    for refused in (
        lambda: quire.draft_trees.from_parents(words),
        lambda: quire.draft_trees.from_mask(torch.zeros(65 * 65, dtype=torch.bool), 65),
        lambda: quire.draft_trees.from_flashinfer(words.to(torch.uint8), [65], [65]),
    ):
        with pytest.raises(quire.UnsupportedError, match=r"must be at most 64 drafts, got 65"):
            refused()


def test_a_general_dense_mask_is_refused_by_name():
    mask = torch.tensor([0b11011101], dtype=torch.uint8)
    with pytest.raises(
        quire.UnsupportedError, match=r"got 0 for key 1 and draft 0 of sequence 0; a general dense mask"
    ):
        quire.draft_trees.from_flashinfer(mask, [2], [4])


def test_an_empty_tensor_from_numpy_is_served():
    empty = torch.from_numpy(np.empty((0, 4, 16), np.float32))
    assert empty.stride() == (0, 0, 0)
    nothing = torch.from_numpy(np.empty((0, 3), np.int32))
    batch = quire.Batch(nothing, int32(), int32(0))
    plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=4)
    assert quire.attention(empty, paged_problem().cache, plan).shape == (0, 4, 16)


@pytest.mark.parametrize(("offset", "step"), [(1, 1), (0, 2)])
def test_a_workspace_is_aligned_and_contiguous(offset, step):
    p = make_problem(SPEC, LENS)
    workspace = torch.zeros(4096, dtype=torch.uint8)[offset::step]
    with pytest.raises(ValueError, match=r"workspace must be (aligned|uint8)"):
        quire.plan(SPEC, p.batch, **p.bounds, workspace=workspace)


@pytest.mark.skipif(torch.cuda.is_available(), reason="without a device, the GPU is meant")
def test_workspace_size_needs_no_gpu():
    assert quire.workspace_size(SPEC, max_num_seqs=2, max_num_tokens=4, max_seq_len=16) == 0
    with pytest.raises(quire.UnsupportedError, match="device must be a device of this machine, got cuda"):
        quire.workspace_size(SPEC, max_num_seqs=2, max_num_tokens=4, max_seq_len=16, device="cuda")


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64])
def test_merging_serves_the_dtypes_of_queries(dtype):
    state = quire.State(torch.ones(1, 4, 16, dtype=dtype), torch.zeros(1, 4))
    with pytest.raises(
        quire.UnsupportedError, match=r"states\[0\].out must be of dtype float16, bfloat16, float32, got"
    ):
        quire.merge_states([state, state])


def test_merging_takes_a_list_of_states_that_have_memory():
    state = quire.State(torch.ones(1, 4, 16), torch.zeros(1, 4))
    with pytest.raises(TypeError, match="states must be a list of states, got"):
        quire.merge_states(state)
    with pytest.raises(TypeError, match="states must be a list of states, got"):
        quire.merge_states(s for s in (state, state))
    meta = quire.State(state.out.to("meta"), state.lse.to("meta"))
    with pytest.raises(quire.UnsupportedError, match="states must be on a GPU or the CPU, got meta"):
        quire.merge_states([meta, meta])


def test_warmup_looks_at_the_cache_on_every_device():
    other = quire.PagedKVCache.empty(dataclasses.replace(SPEC, num_kv_heads=1), 8, 4)
    with pytest.raises(ValueError, match="cache must have 2 heads of 16"):
        quire.warmup(SPEC, other, max_num_seqs=2, max_num_tokens=4, max_seq_len=16)


@pytest.mark.parametrize("dim", [0, 8, 20, 520, 4096])
def test_a_head_dim_that_is_not_served_is_unsupported(dim):
    for name in ("head_dim", "head_dim_v"):
        with pytest.raises(quire.UnsupportedError, match=f"{name} must be a multiple of 8 from 16 to 512, got {dim}"):
            dataclasses.replace(SPEC, **{name: dim})
