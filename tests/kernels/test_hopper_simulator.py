"""The kernels for Hopper GPUs on a CPU: their Gluon functions in the simulator, against the oracle.

They are as small as they can be and still have every barrier, every kind of tile and every order of loads. Those of
`tests/gpu` are larger, and see what only a compiler or a GPU decides.
"""

import math
import random
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import pytest
import torch

import quire
from quire import intervals, reference
from quire.dispatch.device import interprets
from quire.plan import make_plan as bind_plan
from quire.testing import error_budget, make_problem, random_chosen

if not interprets():
    pytest.skip("the other kernels of these plans run in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

import triton.language as tl

from quire.kernels.chosen_hopper import launch as chosen_hopper
from quire.kernels.decoded import launch as decoded
from quire.kernels.hopper.convert import quantize_results
from quire.kernels.hopper.lazy_max import LIMIT, first_softmax, maximum_and_sum, next_softmax
from quire.kernels.hopper.operands import unpacked
from quire.kernels.hopper.softcap import capped_exponents, limit_of_squares
from quire.kernels.mla_hopper.rescale import rescaled
from tests.extended import extended
from tests.growth import with_growing_scores
from tests.hopper_simulator.launch import Functions, simulated_hopper
from tests.hopper_simulator.memory import GlobalMemory
from tests.hopper_simulator.program import Machine
from tests.hopper_simulator.values import Value
from tests.pairs import in_turn
from tests.score_functions import FUNCTIONS

pytestmark = pytest.mark.one_triton

LLAMA = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
MIXED = ((40, 200), (1, 17), (0, 50), (3, 0), (33, 33), (4, 70))
E4M3 = {"kv_dtype": torch.float8_e4m3fn}
BFLOAT16 = {"dtype": torch.bfloat16}  # in which a softcap needs no running maximum
LONG, MANY = 20000, 129  # keys and queries; with these bounds, a program has two consumer warpgroups


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def anywhere(batch, num_tokens):
    """Intervals without order: some empty, some past both ends of the sequence, some of one key."""
    generator = torch.Generator().manual_seed(num_tokens)
    begin = torch.randint(-40, 300, (num_tokens,), generator=generator, dtype=torch.int32)
    end = begin + torch.randint(-40, 150, (num_tokens,), generator=generator, dtype=torch.int32)
    begin[::7], end[::7] = -(2**31), 2**31 - 1
    begin[1::7], end[1::7] = 2**31 - 1, -(2**31)
    end[2::7] = begin[2::7] + 1
    return replace(batch, key_begin=begin, key_end=end)


SIGHTS = {
    "chunks": partial(intervals.chunked_local, size=32),
    "window": partial(intervals.sliding_window, size=50, right=20),
    "anywhere": anywhere,
}


def attend(problem, plan, seed=0):
    tensors = problem.tables | {"out_scale": problem.out_scale}
    with simulated_hopper(seed) as simulated:
        state = quire.attention(problem.q, problem.cache, plan, **tensors, return_lse=True)
    return state, simulated


def make_plan(problem, max_seq_len=None, kernel="hopper", num_sms=1, **options):
    """Plan for a GPU of few SMs, whose programs have many tiles, and use the same shared memory again and again."""
    batch, bounds = problem.batch, problem.bounds | options
    if max_seq_len:  # more than any sequence has
        bounds |= {"max_seq_len": max_seq_len}
        if kernel == "hopper" and batch.num_seqs > 1:
            bounds["max_query_len"] = max(bounds["max_query_len"], MANY)
        if batch.cu_pages is None:
            pages = max_seq_len // problem.cache.page_size + 1
            batch = replace(batch, page_table=torch.nn.functional.pad(batch.page_table, (0, pages)))
    with simulated_hopper(num_sms=num_sms):
        return quire.plan(problem.spec, batch, **bounds, kernel=kernel)


def assert_right(spec, lens=MIXED, max_seq_len=None, kernel="hopper", num_sms=1, **problem):
    """Attend with some order of events, and compare with the oracle."""
    p = make_problem(spec, lens, **problem)
    plan = make_plan(p, max_seq_len, kernel, num_sms)
    state, simulated = attend(p, plan, seed=len(lens))
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)
    assert f"{kernel}_kernel" in simulated, plan
    return plan


@pytest.mark.parametrize("bound", [None, LONG])
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"sliding_window": 100},
        {"sliding_window": 600},
        {"causal": False, "sliding_window": 77, "sliding_window_right": 30, "head_dim": 128},
        {"softcap": 20.0},
        {"softcap": 1.5, "sinks": True, "sliding_window": 100},
        {"softcap": 20.0, "alibi": True, "sinks": True, "sliding_window": 100},
    ],
    ids=str,
)
def test_features(extra, bound, take):
    take("wg2" if bound else "wg1")
    plan = assert_right(quire.AttentionSpec(**LLAMA | extra), max_seq_len=bound)
    assert plan.launch.config.num_warpgroups == (2 if bound else 1)


@pytest.mark.parametrize(
    ("function", "bound", "features"),
    [
        ("relative bias", LONG, {}),
        ("T5", None, {}),
        ("Inkling", LONG, {}),
        ("400 distances", LONG, {}),
        ("of tokens", LONG, {}),
        ("of tokens", None, {"sliding_window": 300}),
        ("of places", LONG, {"causal": False, "softcap": 20.0}),
        ("of places", None, {}),
        ("scores of -inf", LONG, {}),
        ("temperatures", None, {}),
        ("documents", LONG, {"softcap": 20.0, "sinks": True}),
        ("softcap", None, BFLOAT16),
        ("dense mask", LONG, {"causal": False, "alibi": True}),
    ],
)
def test_functions_on_scores_and_masks(function, bound, features, take):
    """Among them one that a built-in softcap would take a loop of its own for."""
    take("wg2" if bound else "wg1")
    assert_right(quire.AttentionSpec(**LLAMA | features | FUNCTIONS[function]), max_seq_len=bound)


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [16, extended(1)])
@pytest.mark.parametrize(
    "extra",
    [
        *(extended({}), extended({"softcap": 20.0})),
        *({"sliding_window": 1000, "sinks": True}, extended({"alibi": True}), {"causal": False}),
    ],
    ids=str,
)
def test_heads_of_128(extra, page_size, take):
    take("wg2")
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": 128} | extra)
    plan = assert_right(spec, ((130, 700), (130, 260), (130, 190)), LONG, page_size=page_size)
    assert plan.launch.config.num_warpgroups == 2 and plan.launch.config.block_n == 128


@pytest.mark.parametrize(
    ("extra", "page_size", "bound"),
    [
        ({}, 16, None),
        extended({}, 16, LONG),
        extended({}, 1, None),
        extended(BFLOAT16 | {"softcap": 20.0}, 16, LONG),
        extended(E4M3, 16, LONG),
        (E4M3 | {"head_dim": 128, "allow_fp8": True}, 1, LONG),
        extended({"sinks": True, "sliding_window": 100}, 16, LONG),
    ],
    ids=str,
)
def test_results_are_nan_where_row_blocks_were_found_for_other_lengths(extra, page_size, bound):
    """A kernel has written to the lengths, which a plan does not notice."""
    lens = (40, 100), (70, 130), (9, 30), (50, 50), (30, 90)
    p = make_problem(quire.AttentionSpec(**LLAMA | extra), lens, page_size=page_size)
    plan = make_plan(p, bound)
    right = attend(p, plan)[0]
    for tensor, values, is_stale in (
        (p.batch.seq_lens, (100, 130, 30, 50, 91), True),
        (p.batch.seq_lens, (100, 130, 30, 50, 90), False),
        (p.batch.cu_seqlens_q, (0, 40, 110, 121, 169, 199), True),
        (p.batch.cu_seqlens_q, (0, 40, 110, 119, 169, 199), False),
        (p.batch.cu_seqlens_q, (0, 40, 110, 119, 169, 189), True),
    ):
        tensor.data.copy_(int32(*values))
        state, simulated = attend(p, plan)
        assert "hopper_schedule_kernel" not in simulated
        assert state.out.isnan().all() and state.lse.isnan().all() if is_stale else torch.equal(state.out, right.out)
    p.batch.cu_seqlens_q.data.copy_(int32(0, 40, 110, 119, 169, 199))
    plan.update()
    assert torch.equal(attend(p, plan)[0].out, right.out)


@pytest.mark.parametrize("extra", [{}, {"softcap": 20.0}, BFLOAT16 | {"softcap": 20.0}], ids=str)
def test_what_is_not_finite_reaches_no_row_that_does_not_see_it(extra):
    """A query, and the last key of a prompt, which the last of its queries alone sees."""
    p = make_problem(quire.AttentionSpec(**LLAMA | extra), ((40, 200), (33, 70)))
    plan = make_plan(p)
    expected, _ = attend(p, plan)
    p.q[5] = float("nan")
    p.cache.k[p.batch.page_table[0, 199 // p.cache.page_size], 199 % p.cache.page_size] = float("nan")
    state, _ = attend(p, plan)
    others = [token for token in range(73) if token not in (5, 39)]
    assert torch.equal(state.out[others], expected.out[others]) and torch.equal(state.lse[others], expected.lse[others])
    assert state.out[[5, 39]].isnan().all() and state.lse[[5, 39]].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("falling", [extended(True), False])
@pytest.mark.parametrize(
    ("spec", "lens", "kernel"),
    [
        (quire.AttentionSpec(**LLAMA | {"head_dim_v": 192}), ((40, 700), (33, 130)), "hopper"),
        (
            quire.AttentionSpec(**LLAMA | {"head_dim_v": 136, "sinks": True, "softcap": 30.0}),
            ((40, 700), (33, 130)),
            "hopper",
        ),
        (
            quire.AttentionSpec.mla(num_q_heads=64, softmax_scale=0.07, dtype=torch.float16),
            ((1, 700), (1, 130)),
            "mla_hopper",
        ),
        (
            quire.AttentionSpec.mla(num_q_heads=64, softmax_scale=0.07, dtype=torch.float16, **E4M3),
            ((1, 700), (1, 130)),
            "mla_hopper",
        ),
    ],
    ids=["wide values", "sinks and softcap", "latents", "fp8 latents"],
)
def test_scores_that_grow_from_tile_to_tile(spec, lens, kernel, falling, take):
    take("wide", "cut")  # row blocks of latents, whose accumulators are rescaled lazily
    p = with_growing_scores(make_problem(spec, lens, page_size=64), falling)
    state, _ = attend(p, make_plan(p, LONG, kernel))
    assert error_budget(p, state).passed, error_budget(p, state)


class Softmax(NamedTuple):
    """What is left of some tiles: the last one's probabilities, accumulators that began as ones, and rows' states."""

    p: torch.Tensor
    accs: torch.Tensor
    maximum: torch.Tensor
    total: torch.Tensor


def softmax_of(tiles, scale=1.0, width=32, columns=32, width_v=32, dtype=torch.bfloat16):
    """Run the assembly of `steady.py` on tiles of scores [64, keys], in tensors of so many columns."""
    element = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
    functions = Functions(Machine(0, (1,), GlobalMemory()))
    first, advance, unpack = (functions.function(f.fn) for f in (first_softmax, next_softmax, unpacked))
    scores = [tuple(Value(part.contiguous()) for part in tile.split(width, 1)) for tile in tiles]
    accs = tuple(Value(torch.ones(64, width_v)) for _ in range(columns // width_v))
    p, state = first(scores[0], scale, (), element)
    for tile in scores[1:]:
        p, accs, state = advance(tile, accs, state, scale, (), element)
    maximum, total = functions.function(maximum_and_sum.fn)(state, None)
    parts = [part.data for part in unpack(p, element, tiles[0].shape[1])]
    return Softmax(torch.cat(parts, 1), torch.cat([acc.data for acc in accs], 1), maximum.data, total.data)


@pytest.mark.parametrize(
    ("keys", "width", "columns", "width_v"), [(128, 128, 32, 32), (64, 64, 48, 16), (96, 16, 96, 32)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_maximum_is_raised_where_a_thread_adds_more_than_the_limit(keys, width, columns, width_v, dtype):
    """In other rows of the warp, nothing changes. A thread has a quarter of a row."""
    exponent = torch.arange(64) % 8 * 2.0  # of all scores of a row in the second tile; 0 in the first one
    tiles = [torch.zeros(64, keys), exponent[:, None].expand(64, keys)]
    found = softmax_of(tiles, width=width, columns=columns, width_v=width_v, dtype=dtype)
    raised = keys / 4 * 2**exponent > LIMIT
    assert raised.any() and not raised.all()
    power = torch.where(raised, exponent, 0.0)
    assert torch.equal(found.maximum, power)
    assert torch.equal(found.accs, (2**-power)[:, None].expand(64, columns))
    assert torch.equal(found.total, keys * (2**-power + 2 ** (exponent - power)))
    assert torch.equal(found.p.float(), (2 ** (exponent - power))[:, None].expand(64, keys))


@pytest.mark.parametrize("column", [0, 3, 20, 63])
def test_one_score_raises_the_maximum_of_its_row(column):
    """Also in the three other threads that have a part of the row."""
    tile = torch.zeros(64, 64)
    tile[9, column] = 20.0
    found = softmax_of([torch.zeros(64, 64), tile])
    power = torch.zeros(64)
    power[9] = 20.0
    assert torch.equal(found.maximum, power) and torch.equal(found.accs, (2**-power)[:, None].expand(64, 32))
    assert torch.equal(found.p.float(), 2 ** (tile - power[:, None]))


def test_the_first_tile_of_a_row_has_probabilities_of_at_most_one():
    scores = 1000 * torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).round()
    scores[3], scores[5, 7:] = -float("inf"), -float("inf")
    scale = torch.linspace(0.001, 0.1, 64)
    found = softmax_of([scores], Value(scale))
    shown = scores.isfinite().any(1)
    assert torch.equal(found.maximum[shown], (scores.amax(1) * scale)[shown])
    assert found.maximum[3] == -float("inf") and found.total[3] == 0 and (found.p[3] == 0).all()
    assert found.p.max() <= 1.001 and found.total[5] >= 0.999
    assert (found.p[5, 7:] == 0).all()


@pytest.mark.parametrize("other", [30.0, 3e38, float("inf"), -float("inf"), float("nan")])
def test_what_a_warp_holds_changes_no_bit_of_its_other_rows(other):
    """With another score, a warp may raise a maximum. However large it is, the warp goes on."""
    generator = torch.Generator().manual_seed(0)
    tiles = [4 * torch.randn(64, 64, generator=generator) for _ in range(3)]
    expected = softmax_of(tiles)
    for row, column in ((0, 0), (7, 63), (8, 6), (15, 57)):
        changed = [tiles[0], tiles[1].clone(), tiles[2]]
        changed[1][row::16, column] = other
        others = torch.arange(64) % 16 != row
        for found, same in zip(softmax_of(changed), expected, strict=True):
            assert torch.equal(found[others], same[others])


@pytest.mark.parametrize("columns", [128, 16])
def test_a_warp_that_rescales_some_rows_of_an_accumulator_rescales_all(columns):
    """It skips the products if the factors of all of its rows are 1."""
    factor = torch.ones(64)
    factor[16:24], factor[40:48], factor[50], factor[61] = 0.5, 3.0, 0.25, 0.0
    accs = torch.randn(2, 64, columns, generator=torch.Generator().manual_seed(0))
    run = Functions(Machine(0, (1,), GlobalMemory())).function(rescaled.fn)
    for acc, result in zip(accs, run(tuple(map(Value, accs)), Value(factor)), strict=True):
        assert torch.equal(result.data, acc * factor[:, None])


@pytest.mark.parametrize("bound", [None, LONG])
def test_bfloat16(bound):
    """Of prompts, since Triton's interpreter computes decode launches of bfloat16 wrongly."""
    assert_right(quire.AttentionSpec(**LLAMA | BFLOAT16), ((40, 200), (33, 33)), max_seq_len=bound)


@pytest.mark.slow
@pytest.mark.parametrize(
    *in_turn(
        extra=[
            {"softcap": 20.0},
            {"softcap": 1.5, "sinks": True, "sliding_window": 100},
            {"softcap": 50.0, "head_dim": 128, "softmax_scale": 10.0},
            {"softcap": 51.0},
            {"softcap": 50.0, "head_dim": 80, "head_dim_v": 136, "num_q_heads": 6},
        ],
        page_size=[1, 16],
        bound=[None, LONG],
    ),
    ids=str,
)
def test_softcap_without_a_running_maximum(extra, page_size, bound):
    """Caps of up to 50; prompts, as above. Rows with small scores alone, with large ones, and with both."""
    spec = quire.AttentionSpec(**LLAMA | BFLOAT16 | extra)
    plan = assert_right(spec, ((40, 200), (33, 33), (70, 700)), max_seq_len=bound, page_size=page_size)
    assert is_capped(plan) == (extra["softcap"] <= 50.0)


def is_capped(plan):
    """Return whether a plan takes the loop of capped scores."""
    return plan.launch.constexprs()["SCORE_MOD"] is capped_exponents


@pytest.mark.parametrize("sign", [1, -1])
def test_capped_scores_that_are_all_as_large_as_they_can_be(sign):
    """Their exponents are ±72 in base 2. Rows that see no key have sinks alone."""
    p = make_problem(
        quire.AttentionSpec(**LLAMA | BFLOAT16, softcap=50.0, sinks=True, causal=False), ((40, 200), (20, 0))
    )
    p.q.fill_(30.0)
    p.cache.k.fill_(30.0 * sign)
    p.sinks.fill_(-200.0)
    plan = make_plan(p, LONG)
    state, _ = attend(p, plan)
    assert is_capped(plan)
    assert error_budget(p, state).passed, error_budget(p, state)


def exponents(scores, scale, cap, owned=None):
    """Return what the kernel makes of a tile of scores, of whose rows so many have queries. Its assembly is run."""
    functions = Functions(Machine(0, (1,), GlobalMemory()))
    scale, cap = Value(torch.tensor(scale)), Value(torch.tensor(cap))
    limit = functions.function(limit_of_squares.fn)(scale, cap, Value(torch.arange(64, dtype=torch.int32)), owned)
    tiles = scores.split(16 if scores.shape[1] == 96 else scores.shape[1], 1)  # no power of two is in pieces
    found = functions.function(capped_exponents.fn)(tuple(Value(tile) for tile in tiles), scale, cap, limit)
    return torch.cat([tile.data for tile in found], 1)


def is_close_to_tanh(found, scores, scale, cap):
    """Compare with float64. The polynomial is as far from tanh as its comment says. There are a few roundings."""
    largest = cap / math.log(2.0)
    expected = largest * torch.tanh(scores.double() * scale / cap)
    return (found.double() - expected).abs() <= largest * (1.3e-7 + 5 * 2.0**-24)


# The largest abs(x) in a warp's first eight rows and in its others. Up to 0.285, the kernel calls x small.
SIZES = ((0.28, 0.28), (3.0, 3.0), (0.28, 3.0), (3.0, 0.28))


@pytest.mark.parametrize("columns", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("cap", [50.0, 1.5])
@pytest.mark.parametrize("factor", [0.0025, 0.2, -0.014, 1e-6, 1e5])
def test_exponents_of_capped_scores(factor, cap, columns):
    """A warp skips what others compute for scores that are all small."""
    generator = torch.Generator().manual_seed(columns)
    x = torch.tensor(SIZES).reshape(8, 1, 1) * (2 * torch.rand(8, 8, columns, generator=generator) - 1)
    x = x.reshape(64, columns)
    x[:, 0], x[:, 1], x[20, 2:4] = 0.0, 1e-30, torch.tensor([300.0, -300.0])
    scores = x / factor
    found = exponents(scores, factor * cap, cap)
    close = is_close_to_tanh(found, scores, factor * cap, cap)
    assert close.all(), (x[~close], found[~close])


@pytest.mark.parametrize("other", [1.0, 1e30, float("inf"), float("nan")])
def test_rows_without_queries_are_small(other):
    """Whatever they hold, no warp computes for them what it skips: the polynomial isn't close to tanh there."""
    x = torch.full((64, 64), 0.1)
    x[59:] = other
    found = exponents(x, 1.0, 1.0, owned=59)
    close = is_close_to_tanh(found, x, 1.0, 1.0)
    assert close[:59].all() and not close[59:].any()


@pytest.mark.parametrize("other", [0.6, 40.0, float("inf"), -float("inf"), float("nan")])
def test_what_a_warp_holds_changes_no_bit_of_its_other_capped_scores(other):
    """With another score, a warp may compute what it skips if all are small. It is in any of a thread's rows."""
    cap, scale = 50.0, 0.125
    x = 0.56 * torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) - 0.28
    scores = x * cap / scale
    expected = exponents(scores, scale, cap)
    assert is_close_to_tanh(expected, scores, scale, cap).all()
    for row, column in ((0, 0), (7, 63), (8, 6), (15, 57)):
        changed = scores.clone()
        changed[row::16, column] = other * cap / scale
        found = exponents(changed, scale, cap)
        same, close = found == expected, is_close_to_tanh(found, changed, scale, cap)
        right = found.isnan() if math.isnan(other) else close
        assert right[row::16, column].all()
        same[row::16, column] = True
        assert same.all(), (scores[~same], found[~same], expected[~same])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [
        (24, 40),
        extended(80, 80),
        (88, 232),
        extended(128, 256),
        (192, 128),
        extended(192, 192),
        extended(16, 16),
        extended(112, 96),
        extended(256, 64),
    ],
)
def test_widths(head_dim, head_dim_v):
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim, "head_dim_v": head_dim_v})
    assert_right(spec, page_size=48, layout="HND")
    assert_right(spec, max_seq_len=LONG, page_size=2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "page_size", "bound"),
    [
        ({}, 16, None),
        ({"sinks": True, "sliding_window": 100}, 16, LONG),
        extended({"head_dim": 384}, 24, LONG),
        extended({"head_dim_v": 256}, 1, None),
        extended(BFLOAT16 | {"softcap": 20.0, "sinks": True}, 32, None),
        extended({"causal": False}, 528, None),
    ],
    ids=str,
)
def test_heads_of_up_to_512(extra, page_size, bound):
    """A work tile has at most 256 columns of values."""
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": 512} | extra)
    plan = assert_right(spec, max_seq_len=bound, page_size=page_size)
    assert plan.launch.column_parts == (1 if spec.head_dim_v == 256 else 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "page_size"),
    [
        ({"head_dim": 192}, 16),
        extended({"head_dim": 136, "sinks": True, "sliding_window": 150}, 32),
        extended({"head_dim": 152, "causal": False, "num_q_heads": 6, "layout": "HND"}, 80),
        extended({"head_dim": 192, "head_dim_v": 144}, 192),
        extended(BFLOAT16 | {"head_dim": 192, "softcap": 20.0}, 64),
        ({"head_dim": 176, "softcap": 20.0, "alibi": True}, 16),
        extended({"head_dim": 24, "head_dim_v": 168}, 48),
    ],
    ids=str,
)
def test_scores_in_pieces(extra, page_size, take):
    """Tiles have 96 keys. Boxes have at least 16 rows."""
    take("n96")
    layout = extra.pop("layout", "NHD")
    spec = quire.AttentionSpec(**LLAMA | extra)
    p = make_problem(spec, ((140, 400), (66, 192), (1, 90), (0, 5)), page_size=page_size, layout=layout)
    plan = make_plan(p, LONG)
    assert plan.launch.config_of(p.cache).block_n == 96
    state, _ = attend(p, plan)
    assert error_budget(p, state).passed, error_budget(p, state)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [24, *map(extended, (96, 104)), 200])
def test_what_a_head_holds_changes_no_bit_of_another(head_dim):
    """In memory, a head's keys and values follow those of the head before it."""
    p = make_problem(quire.AttentionSpec(**LLAMA | {"head_dim": head_dim}), ((40, 200), (33, 70)))
    plan = make_plan(p)
    expected, _ = attend(p, plan)
    p.cache.k[:, :, 1], p.cache.v[:, :, 1] = float("nan"), float("inf")
    state, _ = attend(p, plan)
    of_first = p.spec.group_size
    assert torch.equal(state.out[:, :of_first], expected.out[:, :of_first])
    assert state.out[:, of_first : 2 * of_first].isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize(
    *in_turn(
        extra=[
            {},
            {"head_dim": 80, "head_dim_v": 96},
            {"head_dim": 128} | E4M3 | {"allow_fp8": True},
            {"head_dim": 128, "head_dim_v": 184},  # two accumulators, in two parts of one buffer
            {"head_dim": 256},
            {"head_dim_v": 192},  # wider than the shared memory of the queries: results are written from registers
        ],
        bound=[None, LONG],
    ),
    ids=str,
)
def test_outputs_in_e4m3(extra, bound):
    """With the smaller scale, some results saturate."""
    p = make_problem(quire.AttentionSpec(**LLAMA | extra), MIXED)
    p = replace(p, out_scale=torch.tensor([5e-4 if bound else 0.013]))
    state, simulated = attend(p, make_plan(p, bound))
    assert state.out.dtype is torch.float8_e4m3fn and "hopper_kernel" in simulated
    assert error_budget(p, state).passed


def float32_of(bits):
    return bits.to(torch.int32).view(torch.float32)


@pytest.mark.parametrize(
    "scale",
    [1.0, 0.013, 0.0317, 7.3e-4, 20.0, 3e5, 2.0**-64, 2.0**64, 1e-30, 1e30, 1e-45, 3e38, -0.7, -1e-38, 0.0, -0.0]
    + [float("inf"), -float("inf"), float("nan")],
)
def test_results_are_quantised_to_the_bits_of_a_division(scale):
    """Among the results are those next to the middle of two e4m3 numbers, subnormal ones, and those that saturate."""
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (20000,), generator=generator)
    numbers = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    middles = torch.cat([(numbers[1:] + numbers[:-1]) / 2, torch.tensor([464.0, 512.0])]) * scale
    near = torch.cat([float32_of(middles.view(torch.int32).long() + i) for i in range(-4, 5)])
    special = torch.tensor([0.0, 1e-45, 1e-38, 3.4e38, float("inf"), float("nan")])
    x = torch.cat([float32_of(bits), near, -near, special, -special, scale * torch.randn(20000, generator=generator)])
    quantize = Functions(Machine(0, (1,), GlobalMemory())).function(quantize_results.fn)
    found, expected = quantize(Value(x), Value(torch.tensor(scale))).data, reference.quantise(x, torch.tensor([scale]))
    same = (found.view(torch.uint8) == expected.view(torch.uint8)) | (found.isnan() & expected.isnan())
    assert same.all(), (x[~same], found[~same], expected[~same])


@pytest.mark.parametrize("heads", [*map(extended, [(1, 1), (7, 1), (16, 1)]), (3, 1), (10, 2), (33, 1)])
def test_group_sizes(heads):
    spec = quire.AttentionSpec(**LLAMA | {"num_q_heads": heads[0], "num_kv_heads": heads[1]})
    assert_right(spec, ((24, 100), (24, 24), (9, 70)))


@pytest.mark.slow
@pytest.mark.parametrize(*in_turn(layout=["NHD", "HND"], page_size=[3, 1, 4, 24, 48, 528]))
def test_pages(page_size, layout):
    """The boxes of a tile are found in another way where sequences have different numbers of queries."""
    spec = quire.AttentionSpec(**LLAMA)
    assert_right(spec, page_size=page_size, layout=layout, flat_table=layout == "HND")
    assert_right(spec, ((40, 260),), page_size=page_size, layout=layout)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page_size", "extra"),
    [
        (272, {"head_dim": 80}),
        extended(528, {}),
        (528, {"sliding_window": 1100}),
        extended(528, {"kv_dtype": torch.int8}),
        extended(131, {"head_dim": 136}),
        extended(131, {"head_dim": 192, "sliding_window": 100}),
        (529, {"head_dim": 136, "head_dim_v": 200, "num_q_heads": 6, "layout": "HND"}),
    ],
    ids=str,
)
def test_tiles_that_lie_in_one_page_and_tiles_in_two(page_size, extra):
    """Some of the former have keys that a window or the end of a sequence hides. From 131 on, rows are gathered."""
    layout = extra.pop("layout", "NHD")
    p = make_problem(
        quire.AttentionSpec(**LLAMA | extra), ((40, 1500), (33, 330), (1, 90)), page_size=page_size, layout=layout,
        scales="tensor",
    )  # fmt: skip
    plan = make_plan(p, LONG)
    assert plan.launch.boxes(p.cache)[1] == plan.launch.config_of(p.cache).block_n
    state, _ = attend(p, plan)
    assert error_budget(p, state).passed, error_budget(p, state)


@pytest.mark.parametrize("page_size", [extended(1), 3])
def test_windows_of_gathered_rows(page_size):
    assert_right(quire.AttentionSpec(**LLAMA | {"sliding_window": 30}), page_size=page_size)


def test_a_prompt_that_begins_two_keys_before_the_end_of_a_tile():
    """Its first query sees all keys of the tile but the last, so the tile needs a mask."""
    assert_right(quire.AttentionSpec(**LLAMA), ((130, 256), (66, 192)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_dtype", "head_dim", "page_size"),
    [
        (torch.float8_e4m3fn, 64, 16),
        (torch.float8_e5m2, 128, 1),
        (torch.int8, 64, 16),
        *(extended(*case) for case in ((torch.float8_e4m3fn, 128, 1), (torch.int8, 128, 1))),
    ],
)
def test_quantised_caches(kv_dtype, head_dim, page_size):
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim, "kv_dtype": kv_dtype})
    assert_right(spec, scales="tensor", page_size=page_size)
    assert_right(replace(spec, sliding_window=50, sinks=True), scales="head", layout="HND", page_size=page_size)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "extra", "bound", "problem"),
    [
        ({"kv_format": "int4"}, {"sliding_window": 50}, None, {"page_size": 24}),
        ({"kv_format": "nvfp4"}, {"softcap": 20.0, "sinks": True}, LONG, {"flat_table": True}),
        ({"kv_format": "k8v4"}, {"head_dim": 128}, LONG, {"layout": "HND"}),
        (E4M3, {"head_dim": 80, "alibi": True}, None, {"scales": "token"}),
        extended({"kv_dtype": torch.int8}, {"num_q_heads": 14}, None, {"page_size": 1}),
        extended({"kv_format": "int4"}, {"head_dim": 256}, LONG, {}),
    ],
    ids=str,
)
def test_caches_that_are_decoded_once(stored, extra, bound, problem, take):
    """Sequences of few queries are the decode launch's. Scratch holds NaN, also behind each sequence."""
    take("wg2" if bound else "wg1")
    p = make_problem(quire.AttentionSpec(**LLAMA | stored | extra), MIXED, **problem)
    plan = make_plan(p, bound, "decoded")
    plan.memory[plan.launch.scratch_size().counters :] = 255
    for seed in range(2):  # the second time on what the first one left
        state, simulated = attend(p, plan, seed)
        verdict = error_budget(p, state)
        assert verdict.passed and "hopper_kernel" in simulated, (plan, verdict)
    assert plan.launch.attend.decode is not None


@pytest.mark.slow
@pytest.mark.parametrize("stored", [{"kv_format": "int4"}, E4M3], ids=str)
def test_where_room_is_scarce_more_sequences_are_left_to_the_decode_launch(stored, monkeypatch):
    """Those that are decoded follow each other, whichever they are."""
    lens = ((2, 90), (80, 200), (17, 33), (12, 70), (1, 150), (40, 40))
    p = make_problem(quire.AttentionSpec(**LLAMA | stored), lens)
    monkeypatch.setattr(decoded, "MOST_STATES", 4 * 200 * 2 * 128 * 2)  # four sequences of 200 keys
    plan = make_plan(p, kernel="decoded")
    plan.memory[plan.launch.scratch_size().counters :] = 255
    assert plan.launch.attend.max_decode_queries == (32 if "kv_format" in stored else 64), plan
    state, simulated = attend(p, plan)
    assert error_budget(p, state).passed and "hopper_kernel" in simulated, plan


@pytest.mark.slow
@pytest.mark.parametrize(
    *in_turn(extra=[{}, {"sliding_window": 50, "softcap": 20.0}, {"num_q_heads": 14}], page_size=[24, 1]), ids=str
)
def test_products_in_fp8(extra, page_size, take):
    take("fp8")
    spec = quire.AttentionSpec(**LLAMA | E4M3 | {"head_dim": 128, "allow_fp8": True} | extra)
    assert assert_right(spec, page_size=page_size).launch.config.fp8_mma


UNKNOWN, KNOWN = ((64, 500), (0, 50), (20, 0)), ((64, 500), (1, 700), (20, 0), (0, 40))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lens", "extra", "page_size"),
    [
        (UNKNOWN, {"head_dim": 128} | E4M3, 16),
        extended(UNKNOWN, {"head_dim": 512, "sinks": True}, 16),
        (KNOWN, {"sinks": True, "softcap": 20.0}, 16),
        extended(KNOWN, {"head_dim": 192, "head_dim_v": 128}, 1),
        extended(UNKNOWN, {"sinks": True, "softcap": 20.0}, 16),
        extended(UNKNOWN, {"head_dim": 192, "head_dim_v": 128}, 1),
        extended(KNOWN, {"head_dim": 128} | E4M3, 16),
        extended(KNOWN, {"head_dim": 512, "sinks": True}, 16),
    ],
    ids=str,
)
def test_splits(lens, extra, page_size, take):
    """Among them are empty ones. The host may know that sequences differ in their numbers of queries."""
    take("split")
    p = make_problem(quire.AttentionSpec(**LLAMA | extra), lens, page_size=page_size)
    plan = make_plan(p, 16384, num_sms=80, **({"num_tokens": None} if len(lens) == 3 else {}))
    assert plan.launch.num_splits > 1 and plan.launch.decode is None, plan
    verdict = error_budget(p, attend(p, plan)[0])
    assert verdict.passed, (plan, verdict)


def test_more_splits_than_are_combined_at_once(take):
    """Of one KV head, up to 64 splits fill the device. Sixteen are combined at once; some splits here are empty."""
    take("split")
    p = make_problem(quire.AttentionSpec(num_q_heads=8, num_kv_heads=1, head_dim=64, sinks=True), ((9, 2300),))
    plan = make_plan(p, 16384, num_sms=80)
    assert plan.launch.num_splits == 64, plan
    verdict = error_budget(p, attend(p, plan)[0])
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize(
    ("lens", "bound", "num_sms"),
    [
        extended(((40, 400),), 16000, 8),
        (((20, 0), (0, 30), (50, 33), (9, 100)), None, 1),
        (((40, 0), (64, 50)), 16384, 80),
    ],
    ids=str,
)
def test_a_sink_of_minus_infinity_is_no_key(lens, bound, num_sms, take):
    """Of a split, some rows see no key. Others see none at all: their sequences have fewer keys than queries."""
    take("split" if bound else "whole")
    p = make_problem(quire.AttentionSpec(**LLAMA, sinks=True), lens)
    p = replace(p, sinks=torch.tensor([float("-inf"), 1.0, float("-inf"), float("-inf")]))
    plan = make_plan(p, bound, num_sms=num_sms)
    assert (plan.launch.num_splits > 1) == (bound is not None), plan
    verdict = error_budget(p, attend(p, plan)[0])
    assert verdict.passed, (plan, verdict)


@pytest.mark.slow
@pytest.mark.parametrize("extra", [extended({"sinks": True}), {"head_dim": 128} | E4M3], ids=str)
def test_splits_that_programs_take_in_rounds(extra, take):
    take("wg2", "whole")
    p = make_problem(quire.AttentionSpec(**LLAMA | extra), ((100, 500), (30, 400)))
    plan = make_plan(p, 16384, num_sms=16, num_tokens=None)
    plan = bind_plan(p.spec, plan.batch, replace(plan.launch, num_splits=3), "more splits than are chosen")
    assert plan.launch.num_splits * plan.launch.num_work_tiles(130) > plan.launch.num_programs(200) == 16
    verdict = error_budget(p, attend(p, plan)[0])
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize("sight", ["chunks", extended("anywhere")])
def test_splits_of_intervals(sight, take):
    take("split")
    p = make_problem(quire.AttentionSpec(**LLAMA), ((64, 500), (0, 50), (20, 0)), per_token=SIGHTS[sight])
    plan = make_plan(p, 16384, num_sms=80)
    assert plan.launch.num_splits > 1, plan
    verdict = error_budget(p, attend(p, plan)[0])
    assert verdict.passed, (plan, verdict)


@pytest.mark.slow
@pytest.mark.parametrize(
    *in_turn(
        extra=[{}, {"head_dim": 128} | E4M3, {"head_dim": 128, "sinks": True}], page_size=[16, 1], sight=[*SIGHTS]
    ),
    ids=str,
)
def test_intervals(extra, page_size, sight):
    """Slots that no row sees hold NaN."""
    bound = LONG if sight == "anywhere" else None
    assert_right(quire.AttentionSpec(**LLAMA | extra), MIXED, bound, page_size=page_size, per_token=SIGHTS[sight])


@pytest.mark.slow
@pytest.mark.parametrize("extra", [{}, extended({"head_dim": 128} | E4M3)], ids=str)
def test_tiles_at_whose_edges_intervals_begin_and_end(extra):
    """All rows of a sequence see the same keys, one more or one less than whole tiles of 64 or of 128."""
    edges = [(begin, end) for begin in (63, 64, 65) for end in (191, 192, 193, 255, 256, 257)]

    def per_token(batch, num_tokens):
        begin, end = (int32(*ends).repeat_interleave(10) for ends in zip(*edges, strict=True))
        return replace(batch, key_begin=begin, key_end=end)

    assert_right(quire.AttentionSpec(**LLAMA | extra), ((10, 300),) * len(edges), per_token=per_token)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "page_size"),
    [
        ({}, 1),
        extended({"head_dim": 80, "sinks": True}, 16),
        extended({"head_dim": 256}, 16),
        extended({"head_dim": 256}, 1),
        extended({"head_dim": 256}, 131),
        extended({"head_dim": 512}, 16),
        extended({"head_dim": 192}, 16),
        extended({"head_dim": 144}, 1),
        ({"head_dim": 224, "sinks": True}, 16),
        ({"head_dim": 136}, 131),
        extended({"head_dim": 320}, 16),
        extended({"num_q_heads": 14}, 1),
    ],
    ids=str,
)
def test_batch_invariant_plans(extra, page_size):
    """Prompts of any company have the same bits, whatever the order of events. Wide heads are in parts of 128.

    The last part has columns in common with the one before it, if 128 does not divide the head.
    Some tiles in pages of 131 are one box. Rows of the others are gathered.
    """
    spec, is_long = quire.AttentionSpec(**LLAMA | extra), page_size == 131
    p = make_problem(spec, ((40, 700 if is_long else 300), (70, 170)), page_size=page_size)
    plan = make_plan(p, LONG if is_long else None, batch_invariant=True)
    assert plan.launch.config is not None and plan.kernel == "hopper"
    assert plan.launch.constexprs()["PARTS"] == -(-spec.head_dim // 128)
    assert (plan.launch.boxes(p.cache)[1] > 0) == is_long
    first, _ = attend(p, plan, seed=0)
    assert error_budget(p, first).passed
    again, _ = attend(p, plan, seed=1)
    assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim_v", [*map(extended, (200, 256)), 320])
def test_values_in_several_parts(head_dim_v):
    """A work tile has some columns of the values. Parts of 320 columns have 192 each, or 128."""
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": 128, "head_dim_v": head_dim_v})
    plan = assert_right(spec, ((40, 300), (70, 170)))
    assert plan.launch.constexprs()["PARTS"] == (2 if head_dim_v > 256 else 1)
    p = make_problem(plan.spec, ((40, 300), (70, 170)))
    plan = make_plan(p, batch_invariant=True)
    assert plan.launch.constexprs()["PARTS"] == (3 if head_dim_v > 256 else 2)
    assert error_budget(p, attend(p, plan)[0]).passed


def test_more_sequences_than_are_looked_at_at_once():
    lens = tuple((40, 70) if i in (3, 127, 128, 200) else (0, i % 40 + 3) for i in range(201))
    assert_right(quire.AttentionSpec(**LLAMA), lens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "seed"), [(64, 1), (128, 2), *(extended(*case) for case in ((64, 0), (64, 2), (80, 0), (128, 1)))]
)
def test_any_order_of_events_gives_the_same_bits(head_dim, seed):
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim})
    lens = ((130, 300), (130, 170)) if head_dim == 128 else ((40, 300), (70, 170))  # keys are multiplied ahead, or not
    p = make_problem(spec, lens, page_size=1 if seed % 2 else 16)
    plan = make_plan(p, LONG if seed % 3 else None)
    first, other = (attend(p, plan, seed=s)[0] for s in (100, seed))
    assert torch.equal(first.out, other.out) and torch.equal(first.lse, other.lse)


@pytest.mark.parametrize("seed", [*range(4), *map(extended, range(4, 8))])
def test_whole_space(seed):
    draw = random.Random(seed)
    kv_heads, causal = draw.randint(1, 3), draw.choice([True, False])
    spec = quire.AttentionSpec(
        num_q_heads=kv_heads * draw.randint(1, 9),
        num_kv_heads=kv_heads,
        head_dim=draw.choice([64, 128, 80, 96, 192]),
        head_dim_v=draw.choice([64, 128, 96]),
        dtype=torch.float16,
        causal=causal,
        sliding_window=draw.choice([None, draw.randint(1, 400)]),
        sliding_window_right=None if causal else draw.choice([None, draw.randint(0, 200)]),
        sinks=draw.choice([True, False]),
    )
    lens = [(draw.choice([0, 1, 9, 33, 70]), draw.choice([0, *draw.sample(range(300), 3)])) for _ in range(3)]
    lens.append((34, 90))
    assert_right(
        spec,
        lens,
        draw.choice([None, LONG]),
        page_size=draw.choice([draw.randint(1, 7), 8 * draw.randint(1, 20)]),
        layout=draw.choice(["NHD", "HND"]),
        flat_table=draw.choice([True, False]),
        seed=seed,
    )


PRODUCTS_IN_FP8 = {"kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}
LATENTS = ((1, 500), (1, 17), (4, 70), (1, 0), (0, 50), (2, 64), (1, 128))


def latent_spec(num_q_heads, dtype=torch.float16, **fields):
    return quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=192**-0.5, dtype=dtype, **fields)


def assert_latents_are_right(take, spec, lens=LATENTS, partitions=2, page_size=64, blocks="wide", **problem):
    """Wide row blocks have 64 rows, narrow ones 32; the tiles of each are cut into partitions."""
    take("fp8" if spec.allow_fp8 else blocks, "cut")
    rows = 32 if blocks == "narrow" else 64
    row_blocks = -(-spec.num_q_heads * max(q_len for q_len, _ in lens) // rows)
    num_sms = partitions * max(1, row_blocks)
    bound = LONG if spec.allow_fp8 else None  # products in fp8 are for plans whose bounds are many tiles
    plan = assert_right(spec, lens, bound, "mla_hopper", num_sms, page_size=page_size, **problem)
    assert plan.launch.num_partitions == partitions and plan.launch.fp8_mma == spec.allow_fp8
    assert plan.launch.columns <= rows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_q_heads", "causal", "blocks", "kv_dtype"),
    [
        *((16, True, "wide", torch.float8_e4m3fn), (40, True, "wide", None), (40, True, "narrow", torch.float8_e4m3fn)),
        *(extended(1, True, "narrow", None), extended(16, True, "wide", None), extended(40, True, "narrow", None)),
        *(extended(8, False, "narrow", dtype) for dtype in (None, torch.float8_e4m3fn)),
        *(extended(40, False, blocks, None) for blocks in ("wide", "narrow")),
    ],
)
def test_latents(num_q_heads, causal, blocks, kv_dtype, take):
    assert_latents_are_right(take, latent_spec(num_q_heads, kv_dtype=kv_dtype, causal=causal), blocks=blocks)


@pytest.mark.slow
@pytest.mark.parametrize(("page_size", "kv_dtype"), [extended(8, None), (48, torch.float8_e4m3fn), extended(528, None)])
def test_pages_of_latents(page_size, kv_dtype, take):
    assert_latents_are_right(take, latent_spec(16, kv_dtype=kv_dtype), page_size=page_size)


@pytest.mark.parametrize(
    ("num_q_heads", "page_size", "blocks", "fields"),
    [
        *((16, 1, "wide", {}), (40, 1, "narrow", E4M3), (128, 12, "wide", PRODUCTS_IN_FP8)),
        *(extended(16, 83, "wide", E4M3), extended(40, 1, "narrow", {}), extended(128, 12, "wide", {})),
    ],
    ids=str,
)
def test_latents_of_small_pages_are_gathered(num_q_heads, page_size, blocks, fields, take):
    """Slots that no sequence sees hold NaN, and what is not seen of a tile is zeros."""
    blocks = "wide" if fields.get("allow_fp8") else blocks
    spec = latent_spec(num_q_heads, torch.bfloat16, **fields)
    assert_latents_are_right(take, spec, page_size=page_size, blocks=blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    *in_turn(
        kv_dtype=[None, torch.float8_e4m3fn],
        num_q_heads=[16, 64],
        blocks=["wide", "narrow"],
        lens=[((1, 1),), ((1, 600),), tuple((1, 37 * i % 100) for i in range(9)), ((1, 0),) * 3],
    ),
    ids=str,
)
def test_lengths_of_latents(lens, num_q_heads, kv_dtype, blocks, take):
    """Partitions cut sequences, and hold several."""
    spec = latent_spec(num_q_heads, kv_dtype=kv_dtype)
    assert_latents_are_right(take, spec, lens, partitions=5, blocks=blocks, one_query=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_q_heads", "page_size", "fields"),
    [
        (40, 64, {"causal": True}),
        extended(64, 8, {}),
        extended(128, 48, {"causal": True}),
        extended(33, 528, {"dtype": torch.bfloat16}),
    ],
)
def test_products_of_latents_in_fp8(num_q_heads, page_size, fields, take):
    assert_latents_are_right(take, latent_spec(num_q_heads, **PRODUCTS_IN_FP8 | fields), page_size=page_size)


@pytest.mark.parametrize("lens", [((1, 1),), ((1, 900),), tuple((1, 37 * i % 100) for i in range(9)), ((1, 0),) * 3])
def test_lengths_of_latents_with_products_in_fp8(lens, take):
    assert_latents_are_right(take, latent_spec(64, **PRODUCTS_IN_FP8), lens, partitions=5, one_query=True)


@pytest.mark.parametrize(("num_q_heads", "fields"), [(16, {}), (40, {}), (40, PRODUCTS_IN_FP8)])
def test_queries_of_latents_in_two_parts_of_any_strides(num_q_heads, fields):
    p = make_problem(latent_spec(num_q_heads, **fields), ((2, 300), (1, 90)), page_size=64)
    plan = make_plan(p, LONG, kernel="mla_hopper")
    whole, _ = attend(p, plan)
    nope, rope = p.q[..., :512], p.q[..., 512:]
    parts = nope.transpose(0, 1).contiguous().transpose(0, 1), rope.contiguous()
    with simulated_hopper():
        assert torch.equal(quire.attention(parts, p.cache, plan), whole.out)


@pytest.mark.parametrize("half", [0, 1])
def test_queries_of_latents_that_are_large_in_one_half_of_the_columns(half, take):
    """Each of two warpgroups has half of the columns. Both scale theirs by one maximum, so none is above float16."""
    take("wide", "cut")
    spec = replace(latent_spec(40, torch.bfloat16, **E4M3), softmax_scale=192**-0.5 / 64)
    p = make_problem(spec, ((1, 90), (2, 40)), page_size=64)
    p.q[..., 256 * half : 256 * (half + 1)] *= 64
    state, simulated = attend(p, make_plan(p, kernel="mla_hopper"))
    verdict = error_budget(p, state)
    assert verdict.passed and "mla_hopper_kernel" in simulated, verdict


def test_latents_that_tma_cannot_address_go_to_the_kernel_that_the_plan_names():
    """Records. That kernel quantises its output too."""
    p = make_problem(latent_spec(2, **E4M3), ((1, 40), (1, 9)), page_size=64, one_query=True, layout="fp8_ds_mla")
    p, plan = replace(p, out_scale=torch.full((1,), 0.01)), make_plan(p, kernel="mla_hopper")
    assert plan.kernel == "mla_hopper" and plan.launch_for(p.cache).name == "mla"
    with simulated_hopper() as simulated:
        out = quire.attention(p.q, p.cache, plan, out_scale=p.out_scale)
    assert error_budget(p, out).passed and "mla_hopper_kernel" not in simulated


@pytest.mark.parametrize(
    ("num_q_heads", "blocks", "fields"),
    [
        (16, "narrow", {}),
        (40, "wide", {}),
        (40, "narrow", E4M3),
        (40, "wide", PRODUCTS_IN_FP8),
        (20, "narrow", PRODUCTS_IN_FP8),
    ],
    ids=str,
)
def test_whole_sequences_of_latents_need_no_second_launch(num_q_heads, blocks, fields, take):
    """Programs have one sequence, several, or none; some sequences have no keys or no queries."""
    take("fp8" if fields.get("allow_fp8") else blocks, "whole")
    lens = ((1, 300), (1, 9), (2, 64), (0, 40), (1, 0), (3, 70), (1, 130))
    spec = latent_spec(num_q_heads, **fields)
    for num_sms in (2, 5, 40):
        p = make_problem(spec, lens, page_size=64)
        state, simulated = attend(p, make_plan(p, kernel="mla_hopper", num_sms=num_sms), num_sms)
        verdict = error_budget(p, state)
        assert verdict.passed, verdict
        assert "mla_hopper_kernel" in simulated and "mla_combine_kernel" not in simulated


@pytest.mark.parametrize("seed", [*range(3), *map(extended, range(3, 6))])
def test_whole_space_of_latents(seed, take):
    draw = random.Random(seed)
    take(draw.choice(["narrow", "wide", "fp8"]), draw.choice(["cut", "whole"]))
    kind = draw.choice([{}, E4M3, PRODUCTS_IN_FP8])
    spec = latent_spec(draw.choice([1, 8, 20, 33, 64, 128]), causal=draw.choice([True, False]), **kind)
    lens = [(draw.randint(0, 3), draw.choice([0, *draw.sample(range(600), 4)])) for _ in range(draw.randint(1, 6))]
    lens = [(min(q, s) if spec.causal else q, s) for q, s in [*lens, (1, 70)]]
    bound, page_size, num_sms = draw.choice([None, LONG]), draw.choice([1, 5, 8, 24, 64, 128]), draw.randint(1, 9)
    assert_right(spec, lens, bound, "mla_hopper", num_sms, page_size=page_size, seed=seed)


@pytest.mark.slow
def test_more_sequences_of_latents_than_are_looked_at_at_once(take):
    lens = tuple((1, 37 * i % 100) for i in range(140))
    assert_latents_are_right(take, latent_spec(8), lens, one_query=True)


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize(("num_q_heads", "blocks"), [(16, "narrow"), (64, "narrow"), (64, "wide")])
def test_any_order_of_events_gives_the_same_bits_over_latents(num_q_heads, blocks, kv_dtype, take):
    take(blocks, "cut")
    p = make_problem(
        latent_spec(num_q_heads, kv_dtype=kv_dtype), ((1, 100), (1, 500), (1, 130)), page_size=64, one_query=True
    )
    plan = make_plan(p, kernel="mla_hopper", num_sms=2)
    first, other = (attend(p, plan, seed=s)[0] for s in (0, 1))
    assert torch.equal(first.out, other.out) and torch.equal(first.lse, other.lse)


def test_any_order_of_events_gives_the_same_bits_of_products_of_latents_in_fp8(take):
    """Sequences of one tile follow one another, and places in which rows were zeroed are used again.

    In the order of seed 6, a sequence's sum is stored after its last tile has been multiplied.
    """
    take("fp8", "cut")
    lens = (1, 20), (1, 30), (1, 100), (1, 330)
    p = make_problem(latent_spec(64, **PRODUCTS_IN_FP8), lens, page_size=64, one_query=True)
    plan = make_plan(p, LONG, "mla_hopper")
    assert plan.launch.fp8_mma
    first, other = (attend(p, plan, seed=s)[0] for s in (0, 6))
    assert error_budget(p, first).passed and error_budget(p, other).passed
    assert torch.equal(first.out, other.out) and torch.equal(first.lse, other.lse)


@pytest.mark.parametrize("seed", [57, 1009])
def test_a_tile_may_arrive_long_after_the_next_one(seed):
    """Two warpgroups take the tiles in turn. In these orders of events, one has to wait for a tile of the other's."""
    p = make_problem(latent_spec(20, kv_dtype=torch.float8_e4m3fn), ((1, 700),), page_size=64, one_query=True)
    state, _ = attend(p, make_plan(p, kernel="mla_hopper", num_sms=1), seed)
    assert error_budget(p, state).passed


CHOSEN = ((1, 300), (3, 9), (0, 9), (1, 0), (2, 200))
RECORDS = {"kv_dtype": torch.float8_e4m3fn, "dtype": torch.bfloat16}


def solve_chosen(spec, lens, lists, num_splits=None, num_sms=2, seed=0, **problem):
    """Attend to chosen keys, and return the problem, the plan, the result and the names of simulated kernels."""
    choose = partial(random_chosen, **{"causal": spec.causal} | lists)
    layout = "NHD" if spec.kv_dtype is spec.dtype else "fp8_ds_mla"
    p = make_problem(spec, lens, per_token=choose, **{"layout": layout, "page_size": 64} | problem)
    with simulated_hopper(num_sms=num_sms):
        plan = quire.plan(p.spec, p.batch, **p.bounds, num_splits=num_splits)
    return p, plan, *attend(p, plan, seed)


@pytest.mark.parametrize(
    ("num_q_heads", "records", "lists", "num_splits"),
    [
        (16, False, {"width": 200, "counted": True}, 1),
        (5, False, {"width": 300, "slots_of": 16, "page_size": 16}, 3),
        extended(24, False, {"width": 100}, 2),
        (40, False, {"width": 200, "counted": True}, 1),
        (128, False, {"width": 150, "slots_of": 64}, 3),
        (16, True, {"width": 200, "counted": True}, 1),
        (24, True, {"width": 100}, 2),
        (40, True, {"width": 200, "slots_of": 64}, 3),
    ],
    ids=str,
)
def test_chosen_keys_of_latents(num_q_heads, records, lists, num_splits):
    """Lists that end in a tile, hold -1 anywhere, are empty, or have fewer tiles than parts."""
    kind = RECORDS | {"allow_fp8": num_q_heads > 32} if records else {}
    spec, lists = latent_spec(num_q_heads, causal="slots_of" not in lists, **kind), dict(lists)
    page_size = lists.pop("page_size", 64)
    p, plan, state, simulated = solve_chosen(
        spec, CHOSEN, lists, num_splits, seed=num_q_heads, num_sms=2 + num_q_heads // 64, page_size=page_size
    )
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)
    assert simulated == ["chosen_hopper_kernel"] + ["combine_lists_kernel"] * (num_splits > 1)


@pytest.mark.parametrize(
    ("num_q_heads", "records", "lists", "columns"),
    [
        (16, False, {"width": 150}, 64),
        (16, True, {"width": 150, "slots_of": 64}, 64),
        (5, False, {"width": 90, "counted": True}, 32),
        extended(32, False, {"width": 150, "slots_of": 64}, 64),
        (20, False, {"width": 150}, 64),  # unions of three tokens
        extended(24, False, {"width": 150}, 64),
        extended(8, True, {"width": 150}, 32),
    ],
    ids=str,
)
def test_neighbouring_tokens_attend_to_the_union_of_their_lists(num_q_heads, records, lists, columns):
    """Where they have much in common; elsewhere each attends on its own, and so do those of a very large cache."""
    kind = RECORDS | {"allow_fp8": True} if records else {}
    spec = latent_spec(num_q_heads, causal="slots_of" not in lists, **kind)
    lens = ((9, 300), (1, 40), (6, 500))
    found = []
    for shared in (0.9, 0.0):
        p, plan, state, simulated = solve_chosen(spec, lens, lists | {"shared": shared}, num_sms=1)
        verdict = error_budget(p, state)
        assert verdict.passed, (plan, verdict)
        assert simulated == ["chosen_hopper_kernel"] * 2
        assert plan.launch.constexprs_of_unions()["COLUMNS"] == columns
        found.append(plan.runner.unions.counts.tensor())
    assert (found[0] > 0).any() and (found[1] < 0).any()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chosen_hopper, "MAP_BYTES", 4)
        again, simulated = attend(p, plan)
    assert error_budget(p, again).passed and simulated == ["chosen_hopper_kernel"]


def test_chosen_keys_after_the_end_are_left_out():
    """Lists name the key after the last one, and those behind it, in place of none."""
    p, plan, expected, _ = solve_chosen(latent_spec(16), ((1, 100), (1, 130)), {"width": 90}, 1)
    lists = p.batch.chosen.indices
    none = lists < 0
    assert none.any()
    behind = p.batch.seq_lens[:, None] + none.cumsum(-1, dtype=torch.int32) - 1
    batch = replace(p.batch, chosen=quire.ChosenKeys(torch.where(none, behind, lists)))
    with simulated_hopper():
        again = quire.plan(p.spec, batch, **p.bounds, num_splits=1)
    found, _ = attend(replace(p, batch=batch), again)
    assert again.kernel == plan.kernel == "chosen_hopper" and torch.equal(found.out, expected.out)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_q_heads", "records", "num_splits"),
    [(16, False, 1), (64, False, 1), (16, True, 1), (64, True, 1), (16, False, None)],
)
def test_any_order_of_events_gives_the_same_bits_of_chosen_keys(num_q_heads, records, num_splits):
    """Also of unions."""
    spec = latent_spec(num_q_heads, **(RECORDS | {"allow_fp8": num_q_heads > 32} if records else {}))
    lens, lists = (((1, 500), (2, 130)), {"width": 400}) if num_splits else (((9, 300),), {"width": 200, "shared": 0.9})
    p, plan, first, _ = solve_chosen(spec, lens, lists, num_splits, num_sms=1)
    assert (plan.launch.union > 1) == (num_splits is None)
    other, _ = attend(p, plan, seed=5)
    assert torch.equal(first.out, other.out) and torch.equal(first.lse, other.lse)


def test_rows_that_are_not_gathered_go_to_the_kernel_that_the_plan_names():
    """e4m3 without records. That kernel quantises its output too."""
    p, plan, state, simulated = solve_chosen(latent_spec(2, **E4M3), ((1, 40), (1, 9)), {"width": 20}, layout="NHD")
    assert plan.kernel == "chosen" and error_budget(p, state).passed and not simulated
    p, plan, _, _ = solve_chosen(latent_spec(2), ((1, 40), (1, 9)), {"width": 20})
    p = replace(p, out_scale=torch.full((1,), 0.01))
    with simulated_hopper() as simulated:
        out = quire.attention(p.q, p.cache, plan, out_scale=p.out_scale)
    assert plan.kernel == "chosen_hopper" and error_budget(p, out).passed and not simulated
