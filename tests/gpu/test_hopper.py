"""The Hopper kernel against the oracle: every feature, ragged lengths, poisoned pages, captured graphs, repeated runs.

Plans ask for it by name, so that it also runs where the portable kernels would be faster.
"""

import itertools
import random
from dataclasses import replace
from functools import partial
from itertools import cycle

import pytest
import torch

import quire
from quire import intervals
from quire.dispatch.device import device_properties
from quire.kernels import choose
from quire.plan import make_plan
from quire.testing import error_budget, make_problem
from tests.growth import with_growing_scores
from tests.pairs import each_pair
from tests.score_functions import FUNCTIONS

if not (torch.cuda.is_available() and device_properties(torch.device("cuda")).has_wgmma):
    pytest.skip("a kernel for Hopper GPUs alone", allow_module_level=True)

LLAMA = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
MANY = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128}  # with work tiles for most of the device
MIXED = (
    *((1, 2000), (1, 17), (4, 700), (300, 300), (129, 1500), (1, 0), (0, 50), (33, 33), (31, 129)),
    *((1, n) for n in range(15, 35)),  # with fewer work tiles, keys are split, and there is no decode launch
)


FEW = ((700, 5000), (3, 3))
E4M3 = {"kv_dtype": torch.float8_e4m3fn}
LONG, MANY_QUERIES = 20000, 129  # keys and queries; with these bounds, a program has two consumer warpgroups
BOUNDS = (None, LONG)  # those of the batch, by which programs have one consumer warpgroup on short contexts
SMALL = {"page_size": 1}  # pages whose rows are gathered


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def anywhere(batch, num_tokens):
    """Intervals without order: some empty, some past both ends of the sequence, some of one key."""
    generator = torch.Generator().manual_seed(num_tokens)
    begin = torch.randint(-40, 1600, (num_tokens,), generator=generator, dtype=torch.int32)
    end = begin + torch.randint(-40, 400, (num_tokens,), generator=generator, dtype=torch.int32)
    begin[::7], end[::7] = -(2**31), 2**31 - 1
    begin[1::7], end[1::7] = 2**31 - 1, -(2**31)
    end[2::7] = begin[2::7] + 1
    return replace(batch, key_begin=begin.to(batch.device), key_end=end.to(batch.device))


def images(batch, num_tokens):
    """Spans of MIXED: one ends at the edge of a tile, one is the whole prompt, and a row is padding."""
    return intervals.bidirectional_spans(
        batch, num_tokens, int32([3, 20, 256], [3, 260, 277], [4, 1380, 1460], [8, 0, 129], [-1, 0, 0])
    )


def prefixes(batch, num_tokens):
    return intervals.prefix_lm(batch, num_tokens, int32(*(n // 3 for n in batch.seq_lens.tolist())))


def packed(batch, num_tokens):
    ends = batch.seq_lens.cumsum(0).tolist()
    inside = (n - cut for n in ends for cut in (1, 64, 65, 120, 128))
    return intervals.documents(batch, num_tokens, int32(*sorted({0, *ends, *(n for n in inside if n > 0)})))


SIGHTS = {
    "causal": intervals.causal,
    "window": partial(intervals.sliding_window, size=100, right=30),
    "chunks": partial(intervals.chunked_local, size=128),
    "short chunks": partial(intervals.chunked_local, size=50),
    "blocks": partial(intervals.block_causal, size=96),
    "images": images,
    "prefixes": prefixes,
    "documents": packed,
    "anywhere": anywhere,
}


@pytest.fixture(autouse=True)
def two_warpgroups_for_long_bounds(order):
    """Take programs of two consumer warpgroups where bounds are LONG, so that tests see both numbers."""

    def wanted(launch):
        return launch.request.bounds.max_seq_len >= LONG and "wg2" not in choose.variant_of(launch)

    order(wanted, choose.least)


def in_turn(cases):
    """Return cases with one of the bounds each: cases of kernels of their own, which either bound shows as well."""
    return [(*case, bound) for case, bound in zip(cases, cycle(BOUNDS))]


def solve(spec, lens, max_seq_len=None, **problem):
    p, plan = make_plan_and_problem(spec, lens, max_seq_len, **problem)
    return p, plan, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)


def make_plan_and_problem(spec, lens, max_seq_len=None, **problem):
    p = make_problem(spec, lens, device="cuda", **problem)
    batch, bounds = p.batch, p.bounds
    if max_seq_len:  # more than any sequence has
        bounds |= {"max_seq_len": max_seq_len}
        if batch.num_seqs > 1:
            bounds["max_query_len"] = max(bounds["max_query_len"], MANY_QUERIES)
        if batch.cu_pages is None:
            batch = replace(
                batch, page_table=torch.nn.functional.pad(batch.page_table, (0, max_seq_len // p.cache.page_size + 1))
            )
    plan = quire.plan(spec, batch, **bounds, kernel="hopper")
    assert plan.kernel == "hopper", plan
    return p, plan


def assert_right(spec, lens, bounds=BOUNDS, **problem):
    for max_seq_len in bounds:
        p, plan, state = solve(spec, lens, max_seq_len, **problem)
        verdict = error_budget(p, state)
        assert verdict.passed, (plan, verdict)
        served = plan.launch.for_cache(p.cache) is plan.launch  # else by the fallback
        assert served == (problem.get("scales") != "token")
        request, warpgroups = plan.launch.request, plan.launch.config.num_warpgroups
        assert warpgroups == 2 or not max_seq_len or request.keys_seen <= 512 or request.rows_per_seq <= 64


@pytest.mark.parametrize(
    "extra",
    [{}, {"sliding_window": 1100, "sinks": True}, {"causal": False}, {"softcap": 60.0, "alibi": True}],
    ids=str,
)
def test_prompts_of_equal_lengths(extra):
    """Sequences have the same number of queries, so none can be decoding, and there is enough work without splits."""
    p, plan, state = solve(quire.AttentionSpec(**MANY | extra), ((700, 1300), (700, 2100), (700, 700)))
    assert plan.launch.name == "hopper" and plan.launch.num_splits == 1 and plan.launch.decode is None
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)


ELEMENTS = [{"head_dim": 64}, {}, {"head_dim": 256}, {"dtype": torch.float16}]


@pytest.mark.parametrize(
    *each_pair(
        element=ELEMENTS,
        extra=[
            {},
            {"sliding_window": 100},
            {"sliding_window": 1},
            {"causal": False},
            {"causal": False, "sliding_window": 77, "sliding_window_right": 30},
        ],
        bound=BOUNDS,
    ),
    ids=str,
)
def test_bands(extra, element, bound):
    assert_right(quire.AttentionSpec(**LLAMA | extra | element), MIXED, [bound])


SCORES = [
    {"softcap": 20.0},
    {"alibi": True},
    {"sinks": True},
    {"softcap": 20.0, "alibi": True, "sinks": True, "sliding_window": 300},
]
IN_FLOAT16 = [(ELEMENTS[3], SCORES[0], None), (ELEMENTS[3], SCORES[3], LONG)]


@pytest.mark.parametrize(
    ("element", "extra", "bound"), [*each_pair(a=ELEMENTS[:3], b=SCORES, c=BOUNDS)[1], *IN_FLOAT16], ids=str
)
def test_features(extra, element, bound):
    assert_right(quire.AttentionSpec(**LLAMA | extra | element), MIXED, [bound])


FUNCTIONS_OF_PROMPTS = [
    ("relative bias", {}, {}, LONG),
    ("T5", {"head_dim": 64}, {"softcap": 20.0}, None),
    ("Inkling", {}, {"sliding_window": 300}, LONG),
    ("400 distances", {}, {}, LONG),
    ("of tokens", {}, {}, LONG),
    ("of tokens", {"head_dim": 64}, {"sliding_window": 300}, None),
    ("of tokens", {"head_dim": 96}, {"causal": False}, LONG),
    ("of places", {"dtype": torch.float16}, {"sliding_window": 300}, None),
    ("of places", {}, {"causal": False, "softcap": 20.0}, LONG),
    ("temperatures", {"head_dim": 64}, {}, LONG),
    ("scores of -inf", {}, {}, LONG),
    ("documents", {"head_dim": 256}, {"sinks": True}, LONG),
    ("dense mask", {"head_dim": 192}, {"alibi": True}, None),
    ("softcap", {"dtype": torch.float16}, {}, LONG),
    ("relative bias", {"kv_dtype": torch.float8_e4m3fn}, {}, LONG),
]


@pytest.mark.parametrize(("function", "element", "extra", "bound"), FUNCTIONS_OF_PROMPTS, ids=str)
def test_functions_on_scores_and_masks(function, element, extra, bound):
    assert_right(quire.AttentionSpec(**LLAMA | element | extra | FUNCTIONS[function]), MIXED, [bound])


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(128, 128), (192, 128), (192, 192), (256, 256), (64, 136)])
def test_scores_that_grow_from_tile_to_tile(head_dim, head_dim_v, falling):
    """Bits of a row do not depend on the other rows of its warp, which may have to be rescaled."""
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim, "head_dim_v": head_dim_v})
    p, plan, _ = solve(spec, ((300, 2100), (140, 140), (65, 700)), LONG)
    with_growing_scores(p, falling)
    first = quire.attention(p.q, p.cache, plan, return_lse=True)
    verdict = error_budget(p, first)
    assert verdict.passed, (plan, verdict)
    p.q[37] *= -7.0
    again = quire.attention(p.q, p.cache, plan, return_lse=True)
    others = [token for token in range(505) if token != 37]
    assert torch.equal(first.out[others], again.out[others]) and torch.equal(first.lse[others], again.lse[others])
    assert not torch.equal(first.lse[37], again.lse[37])


@pytest.mark.parametrize(
    ("head_dim", "page_size", "dtype"),
    [
        (64, 1, torch.bfloat16),
        (64, 64, torch.float16),
        (128, 64, torch.bfloat16),
        (128, 1, torch.float16),
        (160, 64, torch.bfloat16),
        (256, 1, torch.float16),
    ],
    ids=str,
)
def test_capped_scores_small_and_large(head_dim, page_size, dtype):
    """Bits of a row do not depend on the other rows of its warp, which may have scores beyond the polynomial's."""
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim, "dtype": dtype, "softcap": 50.0, "sinks": True})
    p, plan, first = solve(spec, ((300, 2100), (140, 140), (65, 700)), LONG, page_size=page_size)
    assert error_budget(p, first).passed, (plan, error_budget(p, first))
    for row in (37, 301, 440):
        p.q[row] *= 100.0
    state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    assert error_budget(p, state).passed, (plan, error_budget(p, state))
    others = [token for token in range(505) if token not in (37, 301, 440)]
    assert torch.equal(first.out[others], state.out[others]) and torch.equal(first.lse[others], state.lse[others])


@pytest.mark.parametrize(
    ("page_size", "extra"),
    [
        (1072, {}),
        (528, {"head_dim": 80, "sliding_window": 1500}),
        (528, {"kv_dtype": torch.int8}),
        (528, {"head_dim": 256, "softcap": 30.0}),
        (131, {"head_dim": 136}),
        (626, {"head_dim": 224, "sliding_window": 777}),
        (387, {"head_dim": 192, "head_dim_v": 128}),
        (249, {"head_dim": 248, "softcap": 50.0}),
    ],
    ids=str,
)
def test_tiles_that_lie_in_one_page_and_tiles_in_two(page_size, extra, take):
    if page_size == 131:
        take("n64")
    spec = quire.AttentionSpec(**LLAMA | extra)
    p, plan, first = solve(spec, ((300, 2100), (140, 140), (1, 50), (65, 4000)), LONG, page_size=page_size)
    assert plan.launch.boxes(p.cache)[1] == plan.launch.config.block_n
    assert error_budget(p, first).passed, (plan, error_budget(p, first))
    for _ in range(200):
        state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
        assert torch.equal(first.out, state.out) and torch.equal(first.lse, state.lse)


@pytest.mark.parametrize("extra", [{}, {"softcap": 20.0}, {"softcap": 50.0, "head_dim": 64}], ids=str)
def test_what_is_not_finite_reaches_no_row_that_does_not_see_it(extra):
    """A query, and the last key of a prompt, which the last of its queries alone sees."""
    p, plan, expected = solve(quire.AttentionSpec(**LLAMA | extra), ((140, 500), (133, 170)))
    p.q[5] = float("nan")
    p.cache.k[p.batch.page_table[0, 499 // p.cache.page_size], 499 % p.cache.page_size] = float("nan")
    state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    others = [token for token in range(273) if token not in (5, 139)]
    assert torch.equal(state.out[others], expected.out[others]) and torch.equal(state.lse[others], expected.lse[others])
    assert state.out[[5, 139]].isnan().all() and state.lse[[5, 139]].isnan().all()


@pytest.mark.parametrize("extra", [{}, {"softcap": 20.0}, E4M3, {"head_dim": 256}], ids=str)
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize("lens", [MIXED, ((700, 5000), (200, 300))], ids=["mixed", "cut"])
def test_results_are_nan_where_row_blocks_were_found_for_other_lengths(lens, bound, extra):
    """A kernel has written to the lengths, which a plan does not notice. A decode launch may be right."""
    p, plan = make_plan_and_problem(quire.AttentionSpec(**LLAMA | extra), lens, bound)
    right, known = quire.attention(p.q, p.cache, plan), p.batch.seq_lens.clone()
    known[0] -= 1
    torch.from_dlpack(p.batch.seq_lens).copy_(known)
    out, ends = quire.attention(p.q, p.cache, plan), [*itertools.accumulate(queries for queries, _ in lens)]
    for (queries, _), rows, those in zip(lens, out.tensor_split(ends[:-1]), right.tensor_split(ends[:-1]), strict=True):
        is_decoding = plan.launch.decode is not None and queries <= plan.launch.max_decode_queries
        assert rows.isnan().all() or (is_decoding and torch.equal(rows, those))
    known[0] += 1
    p.batch.seq_lens.copy_(known)
    assert torch.equal(quire.attention(p.q, p.cache, plan), right)


def test_a_prompt_that_begins_two_keys_before_the_end_of_a_tile():
    """Its first query sees all keys of the tile but the last, so the tile needs a mask."""
    assert_right(quire.AttentionSpec(**LLAMA | {"head_dim": 64}), ((130, 256), (66, 192), (300, 682)))


WIDTHS = (16, 24, 40, 64), (72, 96, 120, 128), (136, 160, 192), (200, 240, 256), (384, 512)


@pytest.mark.parametrize(("head_dim", "bound"), in_turn((width,) for widths in WIDTHS for width in widths))
def test_widths(head_dim, bound):
    """Heads of one to four panels of 64 columns: whole ones, a last one of each width, and beyond by either parity.

    A last panel is multiplied in pieces of 64, 32 and 16 columns, the last of which may be half zeros.
    """
    assert_right(quire.AttentionSpec(**LLAMA | {"head_dim": head_dim}), MIXED, [bound])


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "bound", "layout"),
    [
        *((192, 128, bound, layout) for bound in BOUNDS for layout in ("NHD", "HND")),
        (128, 192, None, "NHD"),
        (80, 32, LONG, "HND"),
        (256, 64, None, "HND"),
        (24, 200, LONG, "NHD"),
        (128, 512, LONG, "NHD"),
        (264, 256, None, "HND"),
        (128, 328, LONG, "HND"),
    ],
)
def test_values_of_another_width(head_dim, head_dim_v, bound, layout):
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim, "head_dim_v": head_dim_v})
    assert_right(spec, MIXED, [bound], layout=layout)


@pytest.mark.parametrize(
    ("extra", "page_size"),
    [
        ({"head_dim": 192}, 16),
        ({"head_dim": 136, "sinks": True, "sliding_window": 300, "dtype": torch.float16}, 32),
        ({"head_dim": 152, "causal": False, "num_q_heads": 6}, 48),
        ({"head_dim": 192, "head_dim_v": 144, "softcap": 20.0}, 64),
        ({"head_dim": 176, "softcap": 20.0, "alibi": True, "sinks": True}, 192),
        ({"head_dim": 24, "head_dim_v": 168, "softcap": 60.0}, 48),
    ],
    ids=str,
)
def test_scores_in_pieces(extra, page_size, take):
    """Tiles have 96 keys, in ragged batches too, which may be cut or split."""
    take("n96")
    spec = quire.AttentionSpec(**LLAMA | extra)
    if page_size in (16, 48, 192):
        assert_right(spec, MIXED, [LONG], page_size=page_size, layout="HND" if page_size == 48 else "NHD")
    p, plan, state = solve(spec, ((700, 1300), (700, 2100), (700, 700)), page_size=page_size)
    assert plan.launch.config_of(p.cache).block_n == 96
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize(
    ("widths", "every", "bound"),
    in_turn(
        [((192, 128), True), ((192, 128), False), ((88, 88), True), ((40, 40), False), ((192, 192), True)],
    ),
    ids=str,
)
def test_features_of_other_widths(widths, every, bound):
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": widths[0], "head_dim_v": widths[1]})
    if every:
        spec = replace(spec, softcap=20.0, alibi=True, sinks=True, sliding_window=300)
    else:
        spec = replace(spec, causal=False, dtype=torch.float16, kv_dtype=torch.float16)
    assert_right(spec, MIXED, [bound], layout="NHD" if every else "HND")


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(192, 128), (128, 128), (80, 80)])
def test_sections_of_heads(head_dim, head_dim_v):
    spec = quire.AttentionSpec(**MANY | {"head_dim": head_dim, "head_dim_v": head_dim_v})
    lens = ((200, 700), (300, 300)) if head_dim == 80 else MIXED
    p, plan, expected = solve(spec, lens, LONG)
    for heads in (1, 4):
        cut = make_plan(spec, plan.batch, replace(plan.launch, section_heads=heads), "sections")
        state = quire.attention(p.q, p.cache, cut, **p.tables, return_lse=True)
        assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse)


@pytest.mark.parametrize("warpgroups", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_both_numbers_of_warpgroups(head_dim, warpgroups, take):
    take(f"wg{warpgroups}")
    for lens in (MIXED, ((200, 700),)):
        p, plan, state = solve(quire.AttentionSpec(**LLAMA | {"head_dim": head_dim}), lens)
        assert plan.launch.config.num_warpgroups == warpgroups and error_budget(p, state).passed, plan


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "bound"),
    in_turn(
        [(1, 1), (2, 1), (3, 1), (8, 1), (11, 1), (12, 1), (16, 1), (40, 1), (64, 2), (71, 1)],
    ),
)
def test_group_sizes(num_q_heads, num_kv_heads, bound):
    """Groups of 5, 7, 9, 10 and 15 are those of `test_work_tiles_with_all_heads_of_a_group`."""
    assert_right(quire.AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=64), MIXED, [bound])


@pytest.mark.parametrize(
    ("group_size", "extra"),
    [
        (3, {"sinks": True, "alibi": True}),
        (5, {"head_dim": 120, "softcap": 20.0, "sliding_window": 70}),
        (7, {"head_dim": 192, "head_dim_v": 128}),
        (9, E4M3),
        (10, {"head_dim": 248, "sinks": True}),
        (15, E4M3 | {"allow_fp8": True}),
    ],
    ids=str,
)
def test_work_tiles_with_all_heads_of_a_group(extra, group_size):
    """Of equal and ragged batches, and of few queries. Some rows of such a work tile have no query."""
    spec = quire.AttentionSpec(**LLAMA | {"num_q_heads": 2 * group_size} | extra)
    assert_right(spec, ((24, 500), (24, 24), (24, 1500)), [None])
    if group_size not in (5, 10):
        assert_right(spec, ((1, 300), (40, 900), (17, 17), (130, 600)), [LONG])
    if group_size in (3, 9):
        assert_right(spec, ((9, 4000),), [None])


@pytest.mark.parametrize("page_size", [1, 2, 7, 8, 12, 16, 24, 64, 128, 256, 528, 1072])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages(page_size, layout):
    assert_right(quire.AttentionSpec(**LLAMA), ((1, 2000), (200, 600), (130, 1003)), page_size=page_size, layout=layout)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("bound", BOUNDS)
@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"sliding_window": 100},
        {"causal": False, "sliding_window": 77, "sliding_window_right": 30},
    ],
    ids=str,
)
def test_bands_of_gathered_rows(extra, bound, page_size):
    """One kernel serves them all, for each page size."""
    assert_right(quire.AttentionSpec(**LLAMA | extra), MIXED, [bound], page_size=page_size)


@pytest.mark.parametrize(
    ("extra", "head_dim", "bound"),
    [
        *(
            ({"softcap": 20.0, "alibi": True, "sinks": True, "sliding_window": 300}, *rest)
            for rest in ((64, LONG), (128, None))
        ),
        ({"sliding_window": 100}, 64, LONG),
        ({"dtype": torch.float16}, 64, None),
        (E4M3, 64, None),
        (E4M3, 128, LONG),
        ({"kv_dtype": torch.int8, "sliding_window": 100}, 128, None),
    ],
    ids=str,
)
def test_features_of_gathered_rows(extra, head_dim, bound):
    assert_right(quire.AttentionSpec(**LLAMA | {"head_dim": head_dim} | extra), MIXED, [bound], page_size=1)


@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "layout", "bound"),
    in_turn(
        [
            (16, 16, "NHD"),
            (80, 80, "HND"),
            (24, 200, "HND"),
            (192, 128, "NHD"),
            (256, 256, "NHD"),
            (88, 256, "HND"),
            (256, 64, "HND"),
            (192, 192, "NHD"),
        ]
    ),
)
def test_widths_of_gathered_rows(head_dim, head_dim_v, layout, bound):
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim, "head_dim_v": head_dim_v})
    assert_right(spec, MIXED, [bound], layout=layout, page_size=1)


@pytest.mark.parametrize(
    *each_pair(
        kv_dtype=[torch.float8_e4m3fn, torch.float8_e5m2, torch.int8],
        head_dim=[64, 128],
        dtype=[torch.bfloat16, torch.float16],
        plain=[True, False],
        bound=BOUNDS,
    ),
    ids=str,
)
def test_quantised_caches(kv_dtype, head_dim, dtype, plain, bound):
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim, "dtype": dtype, "kv_dtype": kv_dtype})
    if plain:
        assert_right(spec, MIXED, [bound], scales="tensor")
    else:
        spec = replace(spec, softcap=20.0, alibi=True, sinks=True, sliding_window=300)
        assert_right(spec, MIXED, [bound], scales="head", layout="HND", page_size=24)


@pytest.mark.parametrize(
    ("extra", "lens", "page_size"),
    [
        *(({}, lens, page_size) for lens in (MIXED, FEW) for page_size in (16, 1)),
        ({"sliding_window": 100}, MIXED, 16),
        ({"causal": False, "sliding_window": 77, "sliding_window_right": 30}, MIXED, 1),
        ({"softcap": 20.0, "alibi": True, "sinks": True, "sliding_window": 300}, MIXED, 16),
        ({"dtype": torch.float16, "num_q_heads": 14}, MIXED, 1),
    ],
    ids=lambda value: "mixed" if value is MIXED else str(value),
)
def test_products_in_fp8(extra, lens, page_size, take):
    take("fp8")
    spec = quire.AttentionSpec(**LLAMA | E4M3 | {"allow_fp8": True} | extra)
    p, plan, state = solve(spec, lens, page_size=page_size)
    verdict = error_budget(p, state)
    assert plan.launch.config.fp8_mma and verdict.passed, (plan, verdict)


def test_products_in_fp8_are_only_where_they_are_allowed():
    states = []
    for allow_fp8 in (False, True):
        spec = quire.AttentionSpec(**LLAMA, **E4M3, allow_fp8=allow_fp8)
        _, plan, state = solve(spec, MIXED)
        assert plan.launch.config.fp8_mma == allow_fp8
        states.append(state)
    assert not torch.equal(states[0].out, states[1].out)


def test_sums_of_products_in_fp8_are_float32():
    """The average of equal values over many keys is that value. Sums in the tensor cores would be too small."""
    spec = quire.AttentionSpec(**LLAMA, kv_dtype=torch.float8_e4m3fn, allow_fp8=True)
    p = make_problem(spec, ((64, 30000),), device="cuda")
    p.cache.v.fill_(1.0)
    out = quire.attention(p.q * 0, p.cache, quire.plan(spec, p.batch, **p.bounds, kernel="hopper"))
    torch.testing.assert_close(
        out,
        p.cache.v_scale.to(out.dtype).repeat_interleave(spec.group_size)[None, :, None].expand_as(out),
        atol=0,
        rtol=8e-3,
    )


@pytest.mark.parametrize(
    ("head_dim", "lens"),
    [
        *((128, lens) for lens in (((40, 16000),), MIXED, ((200, 130), (70, 0), (0, 90)), ((33, 90000), (40, 900)))),
        *((64, lens) for lens in (((40, 16000),), MIXED)),
        *((256, lens) for lens in (((200, 130), (70, 0), (0, 90)), MIXED)),
    ],
)
def test_a_sink_of_minus_infinity_is_no_key(lens, head_dim):
    """Keys are split, whole, or cut. Rows see no key in one of the parts, or none at all."""
    spec = quire.AttentionSpec(**LLAMA | {"head_dim": head_dim, "sinks": True})
    p = make_problem(spec, lens, device="cuda")
    p.sinks[::2] = float("-inf")
    plan = quire.plan(spec, p.batch, **p.bounds, kernel="hopper")
    verdict = error_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))
    assert verdict.passed, (plan, verdict)


CHUNK, DRAFTS = ((64, 16384),), ((9, 20000),)
ONE_HEAD = {"num_q_heads": 8, "num_kv_heads": 1}  # so that there are most splits
OTHER_QUERIES = ((33, 3000), (70, 1100), (1, 9), (0, 50))
OTHER_KEYS = ((64, 9000), (1, 7000), (20, 0), (0, 40))


@pytest.mark.parametrize(
    ("extra", "page_size", "lens"),
    [
        *(({}, page_size, lens) for page_size in (16, 1) for lens in (CHUNK, OTHER_QUERIES, OTHER_KEYS)),
        ({"sinks": True, "softcap": 20.0, "alibi": True}, 16, OTHER_QUERIES),
        ({"sliding_window": 1100}, 16, CHUNK),
        ({"sliding_window": 1100}, 1, OTHER_KEYS),
        ({"causal": False}, 16, OTHER_KEYS),
        ({"causal": False}, 1, CHUNK),
        ({"head_dim": 64, "sinks": True}, 16, CHUNK),
        ({"head_dim": 64, "sinks": True}, 1, CHUNK),
        ({"dtype": torch.float16}, 16, OTHER_KEYS),
        ({"head_dim": 256}, 16, OTHER_QUERIES),
        ({"head_dim": 192, "head_dim_v": 128}, 16, CHUNK),
        ({"head_dim": 80}, 1, CHUNK),
        (E4M3, 16, CHUNK),
        (E4M3, 1, OTHER_QUERIES),
        (E4M3 | {"allow_fp8": True}, 16, OTHER_KEYS),
        (E4M3 | {"allow_fp8": True}, 1, CHUNK),
        ({"num_q_heads": 12}, 16, OTHER_QUERIES),
        ({"head_dim": 512, "sinks": True}, 16, OTHER_KEYS),
        *((ONE_HEAD | {"head_dim": head_dim}, 16, lens) for head_dim in (128, 256) for lens in (CHUNK, DRAFTS)),
    ],
    ids=str,
)
def test_splits(lens, extra, page_size, take):
    """Among them: a sequence with fewer tiles than splits, one without queries, and windows that leave splits empty.

    The host may know that sequences differ in their numbers of queries.
    """
    spec = quire.AttentionSpec(**LLAMA | extra)
    p = make_problem(spec, lens, device="cuda", page_size=page_size)
    bounds = p.bounds | ({"num_tokens": None} if lens is OTHER_QUERIES else {})
    take("wg2", "split")
    plan = quire.plan(spec, p.batch, **bounds, kernel="hopper")
    least = 32 if spec.num_kv_heads == 1 else 2
    assert plan.launch.num_splits >= least and plan.launch.decode is None, plan
    first = None
    for _ in range(20):
        state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
        assert first is None or (torch.equal(first.out, state.out) and torch.equal(first.lse, state.lse))
        first = state
    verdict = error_budget(p, first)
    assert verdict.passed, (plan, verdict)
    assert torch.equal(quire.attention(p.q, p.cache, plan, **p.tables), first.out)


def test_a_captured_graph_of_splits_leaves_tokens_of_no_sequence_alone():
    spec = quire.AttentionSpec(**LLAMA)
    p = make_problem(spec, ((64, 6000),), device="cuda")
    plan = quire.plan(spec, p.batch, **p.bounds, kernel="hopper")
    out = torch.empty_like(p.q)
    quire.attention(p.q, p.cache, plan, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(p.q, p.cache, plan, out=out)
    for q_len, seq_len in ((64, 6000), (40, 1000), (1, 70), (0, 0), (64, 64)):
        p.batch.cu_seqlens_q[1], p.batch.seq_lens[0] = q_len, seq_len
        out.fill_(7.0)
        graph.replay()
        expected = quire.attention(
            p.q, p.cache, quire.plan(spec, p.batch, **p.bounds, kernel="portable"), out=torch.full_like(out, 7.0)
        )
        torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


RAGGED = ((40, 9000), (1, 3000), (200, 200), (20, 4000), (0, 50), (33, 33), (130, 1500), (7, 7000))


@pytest.mark.parametrize(
    ("extra", "page_size"),
    [
        ({}, 16),
        ({"head_dim": 64, "alibi": True}, 1),
        ({"head_dim": 128, "head_dim_v": 192, "softcap": 20.0}, 16),
        ({"num_q_heads": 28, "num_kv_heads": 4, "head_dim": 248, "sinks": True}, 64),
        ({"head_dim": 192, "head_dim_v": 128, "sliding_window": 3000}, 16),
        ({"causal": False, "head_dim": 80}, 24),
        ({"head_dim": 512, "sinks": True}, 16),
        (E4M3, 16),
        (E4M3 | {"allow_fp8": True}, 8),
        ({"kv_dtype": torch.int8, "head_dim": 64}, 3),
    ],
    ids=str,
)
def test_long_sequences_of_ragged_batches_are_cut(extra, page_size, take):
    """Runs have the same bits, whichever warpgroup is the last one. Counters are 0 after each."""
    take("cut")
    spec = quire.AttentionSpec(**MANY | extra)
    p, plan, first = solve(spec, RAGGED, page_size=page_size)
    assert plan.launch.cut_slots > 0 and error_budget(p, first).passed
    for _ in range(20):
        again = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)
    torch.cuda.synchronize()
    assert not plan.workspace[: plan.launch.counters].any()


@pytest.mark.parametrize("short", [True, False])
def test_a_captured_graph_of_cuts_follows_lengths_that_change_in_place(short, take):
    """Each sequence in turn is the long one, and then none is. There is another number of splits at each replay."""
    take("wg1" if short else "wg2", "cut")
    spec, most = quire.AttentionSpec(**MANY), 4000 if short else 30000
    p = make_problem(spec, ((40, most),) * 5 + ((39, most),), device="cuda")
    plan = quire.plan(spec, p.batch, **p.bounds, kernel="hopper")
    assert plan.launch.cut_slots > 0 and plan.launch.config.num_warpgroups == (1 if short else 2)
    state = quire.State(torch.empty_like(p.q), torch.empty(p.q.shape[:2], device="cuda"))
    portable = quire.plan(spec, p.batch, **p.bounds, kernel="portable")
    quire.attention(p.q, p.cache, plan, out=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(p.q, p.cache, plan, out=state)
    for keys in (*([most if i == j else 60 + i for i in range(6)] for j in range(6)), [70] * 6, [most] * 6, [900] * 6):
        p.batch.seq_lens.copy_(int32(*keys))
        state.out.fill_(float("nan"))
        graph.replay()
        expected = quire.attention(p.q, p.cache, portable, return_lse=True)
        torch.testing.assert_close(state.out, expected.out, atol=2e-2, rtol=2e-2)
        torch.testing.assert_close(state.lse, expected.lse, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("extra", "page_size", "decoding"),
    [
        *(({}, page_size, decoding) for page_size in (16, 3) for decoding in (30, 150)),
        ({"sinks": True, "softcap": 20.0}, 3, 30),
        ({"head_dim": 64, "sliding_window": 500}, 16, 150),
        ({"head_dim": 256}, 16, 30),
        ({"num_q_heads": 48, "num_kv_heads": 16, "head_dim": 80}, 3, 150),
    ],
    ids=str,
)
def test_programs_take_work_tiles_of_mixed_batches_from_both_ends(extra, decoding, page_size):
    """There are more of them than programs. Runs have the same bits, and the counter is 0 after each."""
    spec = quire.AttentionSpec(**MANY | extra)
    lens = (*((1, 3900 // (1 + i % 10)) for i in range(decoding)), (700, 700), (20, 2000), (300, 1100), (0, 9))
    p, plan, first = solve(spec, lens, page_size=page_size)
    num_tokens = p.q.shape[0]
    assert plan.launch.decode is None
    assert plan.launch.num_work_tiles(num_tokens) > plan.launch.num_programs(num_tokens)
    verdict = error_budget(p, first)
    assert verdict.passed, (plan, verdict)
    for _ in range(20):
        again = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
        assert torch.equal(again.out, first.out) and torch.equal(again.lse, first.lse)
    torch.cuda.synchronize()
    assert not plan.workspace[: plan.launch.counters].any()


def test_scales_of_tokens_go_to_the_portable_kernel():
    assert_right(quire.AttentionSpec(**LLAMA, kv_dtype=torch.float8_e4m3fn), MIXED, scales="token")


@pytest.mark.parametrize(("page_size", "bound"), [(16, None), (1, LONG)])
def test_a_flat_table(page_size, bound):
    assert_right(quire.AttentionSpec(**LLAMA), MIXED, [bound], flat_table=True, page_size=page_size)


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_keys_and_values_in_one_tensor(layout, page_size):
    """As engines store them: adjacent in every page, or adjacent in every head."""
    p, plan, expected = solve(quire.AttentionSpec(**LLAMA), MIXED, layout=layout, page_size=page_size)
    for together in (
        torch.stack([p.cache.k, p.cache.v], 1).unbind(1),
        torch.cat([p.cache.k, p.cache.v], 3).split(128, 3),
    ):
        state = quire.attention(p.q, quire.PagedKVCache(*together, layout), plan, return_lse=True)
        assert torch.equal(state.out, expected.out) and torch.equal(state.lse, expected.lse)


def test_what_tma_cannot_address_goes_to_the_fallback():
    p, plan, _ = solve(quire.AttentionSpec(**LLAMA), ((200, 600), (3, 9)))
    rows = torch.empty(*p.cache.k.shape[:3], 132, dtype=p.cache.k.dtype, device="cuda")
    unaligned = rows[..., 4:]  # heads do not begin at a multiple of 16 bytes
    cache = quire.PagedKVCache(unaligned.copy_(p.cache.k), p.cache.v)
    assert error_budget(p, quire.attention(p.q, cache, plan, return_lse=True)).passed
    assert "tensors that TMA cannot address: split-KV kernel" in repr(plan)
    assert plan.launch_for(cache).name == "split_kv" and plan.launch_for(p.cache, p.q) is plan.launch


def test_not_paged():
    spec = quire.AttentionSpec(**LLAMA)
    torch.manual_seed(0)
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32, device="cuda") for c in ((0, 300, 300, 437), (0, 400, 445, 900)))
    q, k, v = (torch.randn(n, h, 128, dtype=torch.bfloat16, device="cuda") for n, h in ((437, 8), (900, 2), (900, 2)))
    k[400:445] = v[400:445] = float("nan")  # of a sequence without queries
    batch = quire.Batch.varlen(cu_q, cu_k)
    bounds = {"max_query_len": 300, "max_seq_len": 455, "num_tokens": 437}
    out, expected = (
        quire.varlen_attention(q, k, v, quire.plan(spec, batch, **bounds, kernel=kernel))
        for kernel in ("hopper", "portable")
    )
    torch.testing.assert_close(out, expected, atol=2e-2, rtol=2e-2)


def test_query_offsets():
    spec = quire.AttentionSpec(**LLAMA)
    p = make_problem(spec, ((150, 700), (140, 140)), device="cuda")
    batch = quire.Batch(
        p.batch.page_table,
        p.batch.seq_lens,
        p.batch.cu_seqlens_q,
        query_offsets=torch.tensor([500, 3], dtype=torch.int32, device="cuda"),
    )
    first, second = (
        quire.attention(p.q, p.cache, quire.plan(spec, batch, **p.bounds, kernel=kernel), return_lse=True)
        for kernel in ("hopper", "portable")
    )
    torch.testing.assert_close(first.out, second.out, atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(first.lse, second.lse)


@pytest.mark.parametrize(*each_pair(sight=[*SIGHTS], head_dim=[64, 128, 256], bound=BOUNDS), ids=str)
def test_every_kind_of_interval(sight, head_dim, bound):
    """MIXED has decoding sequences too, which the decode launch serves. Slots that no row sees hold NaN."""
    assert_right(quire.AttentionSpec(**LLAMA | {"head_dim": head_dim}), MIXED, [bound], per_token=SIGHTS[sight])


@pytest.mark.parametrize(
    ("extra", "page_size", "bound"),
    [
        ({"causal": False}, 16, None),
        ({"softcap": 20.0}, 1, LONG),
        ({"sinks": True}, 16, LONG),
        ({"softcap": 20.0, "alibi": True, "sinks": True, "dtype": torch.float16}, 1, None),
        ({"head_dim": 192, "head_dim_v": 128}, 1, LONG),
        ({"head_dim": 80}, 16, LONG),
        ({"num_q_heads": 2}, 16, None),  # a work tile has one head, and row blocks of 64 or 128 queries
        ({"num_q_heads": 6}, 1, LONG),
        (E4M3, 16, None),
        (E4M3 | {"softcap": 20.0, "alibi": True, "sinks": True}, 16, None),
        ({"kv_dtype": torch.float8_e5m2, "head_dim": 64}, 1, None),
        ({"kv_dtype": torch.int8, "dtype": torch.float16}, 16, None),
    ],
    ids=str,
)
def test_features_with_intervals(extra, page_size, bound):
    for sight in ("images", "anywhere"):
        spec = quire.AttentionSpec(**LLAMA | extra)
        assert_right(spec, MIXED, [bound], per_token=SIGHTS[sight], page_size=page_size)


@pytest.mark.parametrize(
    ("page_size", "bound", "flat_table", "layout"),
    [
        *((1, LONG, False, layout) for layout in ("NHD", "HND")),
        (1, None, True, "NHD"),
        (3, None, False, "HND"),
        (8, None, False, "NHD"),
        *((16, LONG, False, layout) for layout in ("NHD", "HND")),
        (16, None, True, "HND"),
        (128, LONG, False, "NHD"),
        (528, LONG, False, "HND"),
    ],
)
def test_pages_with_intervals(page_size, bound, flat_table, layout):
    for sight in ("chunks", "anywhere"):
        assert_right(
            quire.AttentionSpec(**LLAMA),
            ((1, 2000), (200, 600), (130, 1003)),
            [bound],
            per_token=SIGHTS[sight],
            page_size=page_size,
            layout=layout,
            flat_table=flat_table,
        )


@pytest.mark.parametrize("sight", ["images", "short chunks", "anywhere"])
@pytest.mark.parametrize("page_size", [16, 1])
def test_products_in_fp8_with_intervals(page_size, sight, take):
    take("fp8")
    spec = quire.AttentionSpec(**LLAMA, **E4M3, allow_fp8=True)
    p, plan, state = solve(spec, MIXED, page_size=page_size, per_token=SIGHTS[sight])
    verdict = error_budget(p, state)
    assert plan.launch.config.fp8_mma and verdict.passed, (plan, verdict)


@pytest.mark.parametrize("extra", [{}, {"head_dim": 64}, E4M3], ids=str)
@pytest.mark.parametrize("bound", [None, LONG])
def test_tiles_at_whose_edges_intervals_begin_and_end(bound, extra):
    """All rows of a sequence see the same keys, one more or one less than whole tiles of 64 or of 128."""
    edges = [(begin, end) for begin in (63, 64, 65, 127, 128, 129) for end in (255, 256, 257, 319, 320, 321)]

    def per_token(batch, num_tokens):
        begin, end = (int32(*ends).repeat_interleave(20) for ends in zip(*edges, strict=True))
        return replace(batch, key_begin=begin, key_end=end)

    p, plan, state = solve(quire.AttentionSpec(**LLAMA | extra), ((20, 400),) * len(edges), bound, per_token=per_token)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize("window", [None, 600])  # a shorter window has tiles of its own, as short contexts have
@pytest.mark.parametrize(
    ("extra", "page_size", "bound"),
    [
        ({}, 16, None),
        ({}, 1, LONG),
        ({"head_dim": 256}, 16, LONG),
        (E4M3, 16, None),
        (E4M3 | {"allow_fp8": True}, 1, None),
    ],
    ids=str,
)
def test_a_band_as_intervals_has_the_bits_of_the_band(extra, page_size, window, bound, take):
    """Its tiles, their order and its arithmetic are those of the band, where no keys are cut."""
    take("wg2", "whole")
    lens = ((300, 900), (129, 1500), (0, 50), (33, 33), (31, 129), (200, 1400)) * 4
    spec = quire.AttentionSpec(**LLAMA | extra, sliding_window=window)
    p, plan, band = solve(spec, lens, bound, page_size=page_size)
    n = p.q.shape[0]
    seen = intervals.causal(plan.batch, n) if window is None else intervals.sliding_window(plan.batch, n, window)
    bounds = p.bounds | {"max_seq_len": bound or 1500}
    same = quire.plan(replace(spec, sliding_window=None), seen, **bounds, kernel="hopper")
    assert same.launch.config == plan.launch.config
    state = quire.attention(p.q, p.cache, same, return_lse=True)
    assert torch.equal(state.out, band.out) and torch.equal(state.lse, band.lse)


@pytest.mark.parametrize("extra", [{}, {"sinks": True}, E4M3, E4M3 | {"allow_fp8": True}], ids=str)
@pytest.mark.parametrize("lens", [((40, 500), (64, 64)), ((64, 16384),)], ids=str)
def test_rows_that_see_nothing_are_zero(lens, extra):
    """Some rows, and whole row blocks."""

    def per_token(batch, num_tokens):
        begin = torch.zeros(num_tokens, dtype=torch.int32)
        end = torch.full((num_tokens,), 90, dtype=torch.int32)
        begin[3:40] = 90
        begin[-20:], end[-20:] = 5000, 20
        return replace(batch, key_begin=begin, key_end=end)

    p, plan, state = solve(quire.AttentionSpec(**LLAMA | extra), lens, per_token=per_token)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)
    blind = p.batch.key_begin >= p.batch.key_end.minimum(
        p.batch.seq_lens.repeat_interleave(p.batch.query_starts.diff())
    )
    assert blind.sum() == 57
    assert (state.out[blind] == 0).all()
    if not plan.spec.sinks:
        assert (state.lse[blind] == float("-inf")).all()


@pytest.mark.parametrize("sight", ["chunks", "images", "anywhere"])
@pytest.mark.parametrize(
    ("extra", "page_size"),
    [
        ({}, 16),
        ({}, 1),
        ({"head_dim": 64, "sinks": True}, 1),
        (E4M3, 16),
        (E4M3 | {"allow_fp8": True}, 16),
        (E4M3 | {"allow_fp8": True}, 1),
    ],
    ids=str,
)
def test_splits_with_intervals(page_size, extra, sight):
    """Most splits of chunks are empty."""

    def per_token(batch, num_tokens):
        if sight == "images":
            return intervals.bidirectional_spans(batch, num_tokens, int32([0, 16330, 16370]), sliding_window=3000)
        found = SIGHTS[sight](batch, num_tokens)
        if sight == "anywhere":
            found.key_begin[5:9], found.key_end[5:9] = 0, int32(16384, 9000, 128, 3)
        return found

    p = make_problem(
        quire.AttentionSpec(**LLAMA | extra), ((64, 16384),), device="cuda", page_size=page_size, per_token=per_token
    )
    plan = quire.plan(p.spec, p.batch, **p.bounds, kernel="hopper")
    assert plan.launch.num_splits > 1, plan
    first = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    for _ in range(20):
        state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
        assert torch.equal(first.out, state.out) and torch.equal(first.lse, state.lse)
    verdict = error_budget(p, first)
    assert verdict.passed, (plan, verdict)


@pytest.mark.parametrize("page_size", [16, 4, 1])
def test_pages_that_no_row_sees_may_be_junk(page_size):
    """Neither the page numbers before the first key that a row sees, nor those after the last, are used."""

    def per_token(batch, num_tokens):
        begin, end = torch.full((num_tokens,), 400), torch.full((num_tokens,), 430)
        begin[: num_tokens // 2] = 250
        begin[40], end[40] = 500, 500  # which sees nothing
        return replace(batch, key_begin=begin.int(), key_end=end.int())

    p, plan, expected = solve(
        quire.AttentionSpec(**LLAMA), ((100, 800), (1, 600)), LONG, page_size=page_size, per_token=per_token
    )
    for row, begin, end in zip(plan.batch.page_table, (250, 400), (430, 430), strict=True):
        row[: begin // page_size] = -(1 << 30)
        row[-(-end // page_size) :] = 1 << 30
    found = quire.attention(p.q, p.cache, plan, return_lse=True)
    assert torch.equal(found.out, expected.out) and torch.equal(found.lse, expected.lse)


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("extra", [{}, E4M3], ids=str)
@pytest.mark.parametrize("bound", [None, LONG])
def test_a_captured_graph_serves_intervals_that_are_written_into_its_tensors(bound, extra, page_size):
    everything = partial(intervals.block_causal, size=4096)
    lens = ((160, 900), (300, 300), (2, 1500))
    p, plan, _ = solve(quire.AttentionSpec(**LLAMA | extra), lens, bound, page_size=page_size, per_token=everything)
    state = quire.State(torch.empty_like(p.q), torch.empty(p.q.shape[:2], device="cuda"))
    quire.attention(p.q, p.cache, plan, out=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(p.q, p.cache, plan, out=state)
    for make in (intervals.causal, SIGHTS["chunks"], everything, SIGHTS["window"], anywhere):
        step = make(p.batch, p.q.shape[0])
        p.batch.key_begin.copy_(step.key_begin)
        p.batch.key_end.copy_(step.key_end)
        state.out.fill_(float("nan"))
        graph.replay()
        verdict = error_budget(p, state)
        assert verdict.passed, (make, verdict)


@pytest.mark.parametrize(
    ("extra", "bound", "problem"),
    [
        ({"head_dim": 64}, None, {}),
        ({}, LONG, {}),
        ({"head_dim": 256}, None, {}),
        (E4M3, None, {}),
        (E4M3 | {"allow_fp8": True}, None, {}),
        ({}, LONG, SMALL),
        (E4M3, None, SMALL),
    ],
    ids=str,
)
def test_runs_with_intervals_are_bitwise_equal(extra, bound, problem):
    for sight in ("chunks", "anywhere"):
        p, plan, first = solve(quire.AttentionSpec(**LLAMA | extra), MIXED, bound, per_token=SIGHTS[sight], **problem)
        for _ in range(100):
            again = quire.attention(p.q, p.cache, plan, return_lse=True)
            assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.parametrize("page_size", [16, 1])
@pytest.mark.parametrize("most", [600, 2048])
def test_a_captured_graph_serves_all_lengths_and_tables_within_its_bounds(most, page_size, take):
    take("wg1" if most == 600 else "wg2")
    spec = quire.AttentionSpec(**LLAMA)
    big = make_problem(spec, ((160, most),) * 3, device="cuda", page_size=page_size)
    plan = quire.plan(spec, big.batch, **big.bounds, kernel="hopper")
    state = quire.State(torch.empty_like(big.q), torch.empty(big.q.shape[:2], device="cuda"))
    quire.attention(big.q, big.cache, plan, out=state)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        quire.attention(big.q, big.cache, plan, out=state)
    table = big.batch.page_table.clone()
    assert plan.launch.config.num_warpgroups == (1 if most == 600 else 2)
    for lens in ((160, 161, 200), (0, 127, 2048), (128, 129, 0), (1000, 1024, 1025), (2048, 2047, 1)):
        big.batch.seq_lens.copy_(torch.tensor(lens).clamp(max=most))
        big.batch.page_table.copy_(table[torch.randperm(3)])
        state.out.fill_(float("nan"))
        graph.replay()
        verdict = error_budget(big, state)
        assert verdict.passed, (lens, verdict)


@pytest.mark.parametrize(
    ("extra", "bound", "problem"),
    [
        ({"head_dim": 64}, None, {}),
        ({"head_dim": 64}, LONG, {}),
        ({}, None, {}),
        ({}, LONG, {}),
        ({"head_dim": 256}, None, {}),
        ({"head_dim": 192, "head_dim_v": 128}, None, {}),
        ({"head_dim": 192, "head_dim_v": 128}, LONG, {}),
        ({"head_dim": 80}, None, {}),
        ({"head_dim": 80}, LONG, {}),
        ({"head_dim": 160}, None, {}),
        (E4M3 | {"head_dim": 64}, None, {}),
        (E4M3, None, {}),
        (E4M3 | {"allow_fp8": True}, None, {}),
        ({"head_dim": 64}, None, SMALL),
        ({"head_dim": 64}, LONG, SMALL),
        ({}, None, SMALL),
        ({}, LONG, SMALL),
        ({"head_dim": 256}, None, SMALL),
        ({"head_dim": 192, "head_dim_v": 128}, LONG, SMALL),
        ({"head_dim": 80}, LONG, SMALL),
        (E4M3, None, SMALL),
        (E4M3 | {"allow_fp8": True}, None, SMALL),
    ],
    ids=str,
)
def test_runs_are_bitwise_equal(extra, bound, problem):
    p, plan, first = solve(quire.AttentionSpec(**LLAMA | extra), MIXED, bound, **problem)
    for _ in range(200):
        again = quire.attention(p.q, p.cache, plan, return_lse=True)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"head_dim": 80, "kv_dtype": torch.int8}, "head_dim 80"),
        ({"dtype": torch.float32}, "float32"),
        ({"head_dim": 256, "kv_dtype": torch.int8}, "int8"),
    ],
)
def test_what_it_does_not_serve_is_named(options, words):
    p = make_problem(quire.AttentionSpec(**LLAMA | options), ((200, 200),), device="cuda")
    with pytest.raises(quire.UnsupportedError, match=words):
        quire.plan(p.spec, p.batch, **p.bounds, kernel="hopper")
    assert quire.plan(p.spec, p.batch, **p.bounds).kernel != "hopper"


@pytest.mark.parametrize("seed", range(12))  # a test for each: each compiles a kernel, and processes share them
def test_whole_space(seed):
    draw = random.Random(seed)
    bound = draw.choice(BOUNDS)
    kv_heads, causal = draw.randint(1, 3), draw.choice([True, False])
    spec = quire.AttentionSpec(
        num_q_heads=kv_heads * draw.randint(1, 9),
        num_kv_heads=kv_heads,
        head_dim=draw.choice([64, 128, 80, 96, 192]),
        head_dim_v=draw.choice([64, 128, 96]),
        causal=causal,
        sliding_window=draw.choice([None, draw.randint(1, 400)]),
        sliding_window_right=None if causal else draw.choice([None, draw.randint(0, 200)]),
        sinks=draw.choice([True, False]),
    )
    lens = [
        (draw.choice([0, 1, *draw.sample(range(200), 3)]), draw.choice([0, *draw.sample(range(900), 5)]))
        for _ in range(draw.randint(1, 5))
    ]
    assert_right(
        spec,
        lens,
        [bound],
        page_size=draw.choice([draw.randint(1, 7), 8 * draw.randint(1, 20)]),
        layout=draw.choice(["NHD", "HND"]),
        flat_table=draw.choice([True, False]),
        seed=seed,
    )


def test_more_sequences_than_are_looked_at_at_once():
    lens = tuple((200, 300) if i in (3, 127, 128, 290) else (i % 3, i % 40 + 3) for i in range(300))
    assert_right(quire.AttentionSpec(**LLAMA), lens)


INVARIANT = [
    ({}, 16),
    ({"num_q_heads": 28, "num_kv_heads": 4, "sliding_window": 700}, 1),
    ({"head_dim": 64, "dtype": torch.float16}, 16),
    ({"head_dim": 80, "softcap": 20.0, "sinks": True}, 1),
    ({"num_q_heads": 8, "num_kv_heads": 8, "head_dim": 192, "head_dim_v": 128}, 16),
    ({"num_q_heads": 16, "num_kv_heads": 1, "alibi": True}, 16),
    ({"num_q_heads": 16, "num_kv_heads": 8, "head_dim": 256, "sinks": True}, 1),
    ({"num_q_heads": 16, "num_kv_heads": 4, "head_dim": 224, "sinks": True, "softcap": 20.0}, 16),
    ({"num_q_heads": 8, "num_kv_heads": 1, "head_dim": 512}, 1),
    ({"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 192, "head_dim_v": 320, "softcap": 20.0}, 16),
]


@pytest.mark.parametrize(("extra", "page_size"), INVARIANT, ids=str)
def test_a_token_has_the_same_bits_by_decode_drafts_chunks_and_prompts(extra, page_size):
    """Decode multiplies 16 rows by mma.sync, this kernel 64 by wgmma. Batch-invariant plans rely on equal bits."""
    spec = quire.AttentionSpec(**{**LLAMA, "dtype": torch.bfloat16, **extra})
    queries, length, others = 300, 2500, ((40, 900), (1, 1300))
    p = make_problem(spec, ((queries, length), *others), device="cuda", page_size=page_size)
    state, kernels = attend_to_last(p, ((queries, length), *others), kernel="hopper")
    assert kernels == "hopper"
    verdict = error_budget(p, state)
    assert verdict.passed, verdict
    whole = quire.State(state.out[:queries], state.lse[:queries])
    seen = {"hopper"}
    for sizes in ((1, 299), (4, 16, 80, 200), (7, 36, 257)):
        at, parts = length - queries, []
        for size in sizes:
            at += size
            part, kernel = attend_to_last(p, ((size, at),))
            parts.append(part)
            seen.add(kernel)
        joined = quire.State(torch.cat([s.out for s in parts]), torch.cat([s.lse for s in parts]))
        assert torch.equal(joined.out, whole.out) and torch.equal(joined.lse, whole.lse), sizes
    assert "split_kv" in seen


@pytest.mark.parametrize(
    ("extra", "kv_dtype"),
    [
        ({}, torch.float8_e4m3fn),
        ({"head_dim": 64, "sinks": True}, torch.float8_e5m2),
        ({"num_q_heads": 16, "head_dim": 256}, torch.float8_e4m3fn),
        ({"num_q_heads": 28, "softcap": 20.0}, torch.float8_e4m3fn),
    ],
    ids=str,
)
def test_a_token_has_the_same_bits_by_decode_drafts_and_prompts_on_fp8_numbers_in_pairs(extra, kv_dtype):
    """Decode multiplies 16 rows by mma.sync, drafts of many sequences 32 or 64, and prompts 64 by wgmma."""
    heads = {"num_q_heads": 32, "num_kv_heads": 4, "head_dim": 128}
    spec = quire.AttentionSpec(**{**heads, "dtype": torch.bfloat16, "kv_dtype": kv_dtype, **extra})
    queries, length, others = 900, 2500, ((4, 300),) * 63
    p = make_problem(spec, ((queries, length), *others), device="cuda", page_size=16)
    whole, kernel = attend_to_last(p, ((queries, length), *others))
    assert kernel == "block"
    verdict = error_budget(p, whole)
    assert verdict.passed, verdict
    for sizes, more in (((1, 899), ()), ((4, 96, 800), ()), ((4, 4), others), ((7, 36, 257, 600), ())):
        at, parts = length - queries, []
        for size in sizes:
            at += size
            part, _ = attend_to_last(p, ((size, at), *more))
            parts.append(quire.State(part.out[:size], part.lse[:size]))
        joined = quire.State(torch.cat([s.out for s in parts]), torch.cat([s.lse for s in parts]))
        n = sum(sizes)
        assert torch.equal(joined.out, whole.out[:n]) and torch.equal(joined.lse, whole.lse[:n]), (sizes, len(more))


def attend_to_last(problem, lens, **options):
    """Attend with the last queries of the first sequences at the lengths given, in a batch-invariant plan.

    Returns:
        The state, and the kernel of the plan.
    """
    rows, starts = [], problem.batch.query_starts.tolist()
    for seq, (q_len, kv_len) in enumerate(lens):
        stop = starts[seq + 1] - (problem.seq_lens[seq] - kv_len)
        rows += range(stop - q_len, stop)
    counts = torch.tensor([0, *(q for q, _ in lens)], device="cuda")
    lengths = torch.tensor([kv for _, kv in lens], dtype=torch.int32, device="cuda")
    batch = quire.Batch(problem.batch.page_table[: len(lens)], lengths, counts.cumsum(0).to(torch.int32))
    bounds = {"max_query_len": max(q for q, _ in lens), "max_seq_len": max(kv for _, kv in lens)}
    plan = quire.plan(problem.spec, batch, **bounds, batch_invariant=True, **options)
    return quire.attention(problem.q[rows], problem.cache, plan, **problem.tables, return_lse=True), plan.kernel
