"""`attention` with `rope` and `qk_norm` gives the bits of a launch that rotates queries and new keys, and attention.

Both are judged by the oracle, which rotates in float64.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire import api, reference
from quire.dispatch.device import is_served_by_torch
from quire.spec import QUANTISED_DTYPES
from quire.testing import Problem, make_problem, random_norm_rope, unwritten
from tests.extended import some_extended
from tests.kernels.test_append import bits_of, copy_of, random_like

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float16}
E4M3 = {"kv_dtype": torch.float8_e4m3fn}
FULL, PART = {"rotary_dim": 32}, {"rotary_dim": 24}
NEIGHBOURS, NORM = {"interleaved": True}, {"qk_norm": True}


def solve(
    features: dict[str, Any], lens: Any, norm_rope: dict[str, Any], options: dict[str, Any], **problem: Any
) -> Any:
    """Return a problem with a step, whose new tokens are not in the cache, and its plan."""
    spec = quire.AttentionSpec(**HEADS | features)
    p = make_problem(spec, lens, **problem)
    cache, new = unwritten(p)
    step = random_like(new) | random_norm_rope(p, **norm_rope)
    return replace(p, cache=cache, step=step), quire.plan(spec, p.batch, **p.bounds, **options)


def rotated_before(p: Problem, plan: quire.Plan) -> tuple[quire.State, quire.PagedKVCache]:
    """Rotate and write in one launch, and attend in another; return the state and the cache."""
    cache, rotated, step = copy_of(p.cache), torch.empty_like(p.q), dict(p.step)
    norm_rope = step.pop("rope", None), step.pop("qk_norm", None)
    api.norm_rope_and_write(p.q, rotated, cache, *step.values(), *norm_rope)
    return quire.attention(rotated, cache, plan, **p.tables, return_lse=True), cache


def check(p: Problem, plan: quire.Plan) -> None:
    """Compare both ways to take a step, and judge one of them."""
    expected, written = rotated_before(p, plan)
    cache = copy_of(p.cache)
    found = quire.attention(p.q, cache, plan, **p.tables, **p.step, return_lse=True)
    rows = slice(0, int(p.batch.query_starts[-1]))
    assert torch.equal(found.out[rows], expected.out[rows]) and torch.equal(found.lse[rows], expected.lse[rows])
    for a, b in zip(bits_of(cache), bits_of(written), strict=True):
        assert torch.equal(a, b)
    if p.spec.kv_dtype in QUANTISED_DTYPES:  # whose keys are rounded: the oracle takes them as they were written
        p = replace(p, cache=cache, step={name: p.step[name] for name in ("rope", "qk_norm") if name in p.step})
    verdict = quire.testing.error_budget(p, found)
    assert verdict.passed, verdict


IN_ONE_LAUNCH: dict[str, tuple[dict, tuple, dict, dict, dict]] = {  # spec, lengths, how; of plan and problem
    "decode": ({}, ((1, 9), (1, 40), (1, 1), (1, 0), (1, 64)), FULL, {}, {"page_size": 4}),
    "one query each, neighbours": ({}, ((1, 9), (1, 40), (1, 0)), FULL | NEIGHBOURS, {}, {"one_query": True}),
    "split keys, part of a head": ({}, ((1, 300), (1, 40), (1, 256)), PART, {"num_splits": 3}, {"layout": "HND"}),
    "drafts, part, neighbours": ({}, ((3, 9), (1, 40), (4, 4), (0, 12), (2, 64)), PART | NEIGHBOURS, {}, {}),
    "drafts, cut, norm alone": ({}, ((5, 258), (8, 130), (3, 66), (1, 65)), NORM, {"num_splits": 4}, {}),
    "split keys, both": ({}, ((1, 300), (3, 90)), FULL | NORM, {"num_splits": 3}, {"layout": "HDNX"}),
    "several row blocks, both": ({"num_q_heads": 34}, ((9, 40), (1, 5)), FULL | NORM | NEIGHBOURS, {}, {}),
    "batch-invariant": ({}, ((1, 600), (5, 540), (1, 40)), FULL | NORM, {"batch_invariant": True}, {}),
    "sinks, softcap and window": (
        {"sinks": True, "softcap": 5.0, "sliding_window": 20}, ((2, 90), (1, 30)), PART | NORM, {}, {},
    ),
    "heads of 40, values of 24": ({"head_dim": 40, "head_dim_v": 24}, ((2, 90), (1, 40)), PART | NORM, {}, {}),
    "float32": ({"dtype": torch.float32}, ((2, 90), (1, 40)), FULL | NORM, {}, {}),
    "e4m3": (E4M3, ((1, 40), (3, 9)), FULL | NORM, {}, {}),
    "e4m3, neighbours, split keys": (E4M3, ((1, 300), (3, 90)), PART | NEIGHBOURS, {"num_splits": 3}, {}),
    "e4m3, one scale, float32": (E4M3 | {"dtype": torch.float32}, ((1, 40), (3, 9)), FULL, {}, {"scales": "tensor"}),
    "int8": ({"kv_dtype": torch.int8}, ((1, 300), (3, 90)), FULL | NORM, {"num_splits": 3}, {}),
}  # fmt: skip
IN_TWO_LAUNCHES: dict[str, tuple[dict, tuple, dict, dict, dict]] = {
    "prompts": ({}, ((60, 106), (1, 9), (33, 33)), FULL | NORM, {}, {}),
    "prompts, neighbours, groups of 3": ({"num_q_heads": 6}, ((20, 20), (2, 9)), PART | NEIGHBOURS, {}, {}),
    "scales per token": ({"kv_dtype": torch.int8}, ((1, 40), (3, 9)), FULL | NORM, {}, {"scales": "token"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", some_extended([*IN_ONE_LAUNCH, *IN_TWO_LAUNCHES], ["prompts"]))
def test_a_step_that_rotates_is_a_rotation_and_a_step(name, device, options):
    features, lens, norm_rope, chosen, problem = (IN_ONE_LAUNCH | IN_TWO_LAUNCHES)[name]
    p, plan = solve(features, lens, norm_rope, options(**chosen), **problem, device=device)
    in_one_launch = name in IN_ONE_LAUNCH and not is_served_by_torch(torch.device(device))
    assert (plan.appender(p.cache) is not None) == in_one_launch
    check(p, plan)


@pytest.mark.parametrize("name", ["cos in 16 bits", "weights in float32", "int32 positions", "two halves of one table"])
def test_tables_of_any_dtype_and_rows_of_any_distance(name, device, options):
    p, plan = solve({}, ((1, 70), (3, 90)), PART | NORM, {}, device=device)
    rope, norm = p.step["rope"], p.step["qk_norm"]
    if name == "cos in 16 bits":
        rope = rope._replace(cos=rope.cos.half(), sin=rope.sin.half())
    elif name == "weights in float32":
        norm = norm._replace(q_weight=norm.q_weight.float(), k_weight=norm.k_weight.half())
    elif name == "int32 positions":
        rope = rope._replace(positions=rope.positions.int())
    else:  # as vLLM's cos_sin_cache
        cos, sin = torch.cat([rope.cos, rope.sin], 1).chunk(2, 1)
        rope = rope._replace(cos=cos, sin=sin)
    check(replace(p, step={**p.step, "rope": rope, "qk_norm": norm}), plan)


def test_bare_tuples_are_taken(device):
    p, plan = solve({}, ((1, 70), (3, 90)), FULL | NORM, {}, device=device)
    bare = {**p.step, "rope": tuple(p.step["rope"])[:3], "qk_norm": tuple(p.step["qk_norm"])}
    caches = copy_of(p.cache), copy_of(p.cache)
    expected = quire.attention(p.q, caches[0], plan, **p.step)
    assert torch.equal(quire.attention(p.q, caches[1], plan, **bare), expected)


def test_positions_outside_of_the_table_are_clamped(device):
    p, plan = solve({}, ((1, 70), (3, 90)), FULL, {}, device=device)
    rope = p.step["rope"]
    rows = rope.cos.shape[0]
    wild = torch.tensor([-1, rows, -(1 << 40), 5], device=device)
    clamped = torch.tensor([0, rows - 1, 0, 5], device=device)
    results = []
    for positions in (wild, clamped):
        step = {**p.step, "rope": rope._replace(positions=positions)}
        results.append(quire.attention(p.q, copy_of(p.cache), plan, **step))
    assert torch.equal(*results)


def test_columns_that_are_not_rotated_keep_their_bits(device):
    """Zeros keep their signs."""
    p, plan = solve({}, ((1, 70), (3, 90)), PART, {}, device=device)
    k = p.step["k"]
    k[..., 24:] = torch.tensor([-0.0, 0.0, 65504.0, 2.0**-24, -1.5, 3.0, -0.0, 1.0], device=device)
    cache = copy_of(p.cache)
    quire.attention(p.q, cache, plan, **p.step)
    stored = cache.k.flatten(0, 1)[p.step["slot_mapping"]]
    assert torch.equal(stored[..., 24:].view(torch.int16), k[..., 24:].contiguous().view(torch.int16))


@pytest.mark.parametrize("norm_rope", [FULL | NORM, PART | NEIGHBOURS], ids=str)
@pytest.mark.parametrize("lens", [((1, 300), (3, 90)), ((20, 30), (3, 90))], ids=["in one launch", "in two launches"])
def test_a_quantised_key_is_rounded_to_its_dtype_before(lens, norm_rope, device):
    """The bytes are those that `write_kv` makes of rotated keys, which a cache of their dtype holds."""
    p, plan = solve(E4M3, lens, norm_rope, {}, device=device)
    plain, same = solve({}, lens, norm_rope, {}, device=device)
    plain = replace(plain, step={**p.step, **{name: p.step[name].half() for name in "kv"}})
    p = replace(p, step=plain.step)
    caches = copy_of(p.cache), copy_of(p.cache), copy_of(plain.cache)
    quire.attention(p.q, caches[0], plan, **p.step)
    quire.attention(plain.q, caches[2], same, **plain.step)
    slots = p.step["slot_mapping"]
    quire.write_kv(caches[2].k.flatten(0, 1)[slots], p.step["v"], caches[1], slots)
    for a, b in zip(bits_of(caches[0]), bits_of(caches[1]), strict=True):
        assert torch.equal(a, b)


@pytest.mark.slow
def test_a_head_is_rounded_once(device):
    """The error of a rotated query is that of one rounding, and of float32."""
    p, _ = solve({}, ((1, 70), (3, 90)), FULL | NORM, {}, device=device)
    step, rotated = dict(p.step), torch.empty_like(p.q)
    rope, norm = step.pop("rope"), step.pop("qk_norm")
    api.norm_rope_and_write(p.q, rotated, copy_of(p.cache), *step.values(), rope, norm)
    exact = reference.norm_rope(p.q, rope, norm, of_keys=False)
    spacing = torch.exp2(torch.frexp(exact.abs()).exponent.clamp(min=-13) - 11.0)  # of float16
    slack = 64 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert bool(((rotated.double() - exact).abs() <= 0.5 * spacing + slack).all())


def test_tokens_without_a_slot_are_rotated_and_left_out(device):
    """Their queries see the keys that the cache has."""
    p, plan = solve({}, ((2, 40), (3, 9)), FULL | NORM, {}, page_size=4, device=device)
    p = replace(p, cache=quire.PagedKVCache(p.cache.k.nan_to_num(), p.cache.v.nan_to_num()))
    p.step["slot_mapping"][torch.tensor([0, 4])] = -1
    check(p, plan)


@pytest.mark.triton
def test_a_norm_sums_alike_whatever_the_tile(device):
    """Tiles of 16 and of 64 rows, one or two warps: the bits of the keys are the same."""
    bits = []
    p, _ = solve({"num_q_heads": 16}, ((3, 90), (1, 30)), FULL | NORM, {}, device=device)
    for block_m in (16, 64):
        config = quire.plan(p.spec, p.batch, **p.bounds).launch.config
        plan = quire.plan(p.spec, p.batch, **p.bounds, config=replace(config, block_m=block_m), kernel="portable")
        cache = copy_of(p.cache)
        quire.attention(p.q, cache, plan, **p.step)
        bits.append(bits_of(cache))
    assert all(torch.equal(a, b) for a, b in zip(*bits, strict=True))


def test_what_a_rotation_needs_is_named(device):
    p, plan = solve({}, ((1, 70), (3, 90)), FULL | NORM, {}, device=device)
    norm_rope = {name: p.step[name] for name in ("rope", "qk_norm")}
    for name, value in norm_rope.items():
        with pytest.raises(ValueError, match=f"{name} must be given with k, v and slot_mapping"):
            quire.attention(p.q, p.cache, plan, **{name: value})
    with pytest.raises(ValueError, match=r"rope.positions must have q's 4 tokens, got shape \[3\]"):
        short = norm_rope["rope"]._replace(positions=norm_rope["rope"].positions[:3])
        quire.attention(p.q, p.cache, plan, **{**p.step, "rope": short})
    latent = quire.AttentionSpec.mla(num_q_heads=4, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16)
    latent = replace(latent, dtype=torch.float16, kv_dtype=torch.float16)
    p = make_problem(latent, ((1, 70), (3, 90)), device=device)
    cache, new = unwritten(p)
    plan = quire.plan(latent, p.batch, **p.bounds)
    for name, value in norm_rope.items():
        with pytest.raises(quire.UnsupportedError, match=f"{name} must be left out for latents"):
            quire.attention(p.q, cache, plan, **new, **{name: value})


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(data=st.data())
def test_whole_space(device, options, data):
    draw = data.draw
    kv_heads, head_dim = draw(st.integers(1, 2)), 8 * draw(st.integers(2, 10))
    features = {
        "num_q_heads": kv_heads * draw(st.integers(1, 9)),
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "head_dim_v": 8 * draw(st.integers(2, 10)),
        "dtype": draw(st.sampled_from([torch.float32, torch.float16])),
        "kv_dtype": draw(st.sampled_from([None, None, torch.float8_e4m3fn, torch.int8])),
    }
    norm_rope = {
        "rotary_dim": 2 * draw(st.integers(1, head_dim // 2)),
        "interleaved": draw(st.booleans()),
        "qk_norm": draw(st.booleans()),
    }
    lens = draw(st.lists(st.tuples(st.integers(0, 18), st.integers(0, 90)), min_size=1, max_size=4))
    problem = {"page_size": draw(st.integers(1, 40)), "seed": draw(st.integers(0, 99)), "device": device}
    p, plan = solve(features, lens, norm_rope, options(num_splits=draw(st.none() | st.integers(1, 6))), **problem)
    check(p, plan)
