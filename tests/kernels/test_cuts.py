"""Row blocks that the Hopper kernel cuts by keys in ragged batches, in the simulator: decisions, and launches."""

import random
from dataclasses import replace

import pytest
import torch
import triton

import quire
from quire.dispatch.device import interprets
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels import choose
from quire.plan import decide, make_plan
from quire.targets import TARGETS
from quire.testing import error_budget, make_problem

if not interprets():
    pytest.skip("the other kernels of these plans run in Triton's interpreter", allow_module_level=True)
pytest.importorskip("triton.experimental.gluon")

import triton.language as tl

from quire.kernels import schedule, scratch, work
from quire.kernels.hopper import launch, partials
from tests.extended import extended
from tests.hopper_simulator.launch import simulated_hopper
from tests.hopper_simulator.memory import AccessError
from tests.hopper_simulator.program import Machine
from tests.kernels.schedules import CAUSAL, row_blocks_of

pytestmark = [pytest.mark.slow, pytest.mark.one_triton]

BLOCK_T, BLOCK_N, WORK_TILES_EACH = 16, 64, 2
SEQS = schedule.SEQS.value


def decided(lens, num_programs, slots, window=CAUSAL, max_decode_queries=0):
    """Return (sequence, row block, shift, first slot, split) of all places, in the order of programs."""
    places, _, _ = row_blocks_of(
        lens, num_programs, WORK_TILES_EACH, cut_slots=slots, window=window, max_decode_queries=max_decode_queries
    )
    return [(p.seq, p.token // BLOCK_T, p.shift, p.first_slot, p.split) for p in reversed(places)]


def drawn(count, seed):
    """Draw lengths of which a few are long."""
    draw = random.Random(seed)
    lens = []
    for _ in range(count):
        queries = draw.choice((0, 1, 3, draw.randint(4, 90), draw.randint(4, 400), draw.randint(4, 1500)))
        before = draw.choice((0, draw.randint(0, 300), draw.randint(0, 3000), draw.randint(0, 20000)))
        lens.append((queries, queries + before))
    return lens


BATCHES = [  # what is drawn; row blocks that are cut, and splits of all row blocks
    ({}, 6, 2, 1, 3),
    ({}, 6, 9, 0, 141),
    extended({}, 6, 200, 0, 3007),
    extended({}, 132, 2, 0, 26),
    ({}, 132, 5, 4, 16),
    ({}, 132, 9, 24, 183),
    extended({}, 132, 40, 0, 393),
    extended({}, 132, 200, 0, 2286),
    ({}, 132, 128, 0, 1535),
    ({}, 3000, 1, 1, 2),
    ({}, 3000, 9, 46, 372),
    extended({}, 3000, 40, 212, 1723),
    extended({}, 3000, 127, 504, 2708),
    extended({}, 3000, 200, 408, 3719),
    ({}, 3000, 129, 354, 2748),
    ({"max_decode_queries": 3}, 6, 40, 0, 300),
    ({"max_decode_queries": 3}, 132, 9, 22, 176),
    extended({"max_decode_queries": 3}, 3000, 127, 491, 2604),
    extended({"max_decode_queries": 3}, 132, 200, 0, 2220),
    ({"window": (900, 0)}, 6, 40, 0, 318),
    ({"window": (900, 0)}, 132, 9, 0, 113),
    extended({"window": (900, 0)}, 3000, 127, 0, 1104),
    extended({"window": (900, 0)}, 132, 200, 0, 2286),
    ({"window": (1 << 30, 1 << 30)}, 6, 40, 0, 318),
    ({"window": (1 << 30, 1 << 30)}, 132, 9, 24, 183),
    extended({"window": (1 << 30, 1 << 30)}, 3000, 127, 508, 2520),
    extended({"window": (1 << 30, 1 << 30)}, 132, 200, 0, 2286),
]


@pytest.mark.parametrize(("options", "num_programs", "count", "num_cut", "num_work_tiles"), BATCHES, ids=str)
def test_those_row_blocks_are_cut_that_were(options, num_programs, count, num_cut, num_work_tiles):
    """Which gain by it was measured on GPUs. The last two numbers are recorded: a change of them is to be meant."""
    lens, slots = drawn(count, seed=count + num_programs), 2 * num_programs + 20
    numbers = [num_splits for num_splits, _ in cuts_of(lens, num_programs, slots, **options).values()]
    assert (sum(n > 1 for n in numbers), sum(numbers)) == (num_cut, num_work_tiles)


def cuts_of(lens, num_programs, slots, **options):
    """Return {(sequence, row block): (splits, first slot)} of what `row_blocks_of` judges."""
    found = {
        (seq, block): (1 << shift, first_slot if shift else None)
        for seq, block, shift, first_slot, _ in decided(lens, num_programs, slots, **options)
    }
    assert all(n == 1 for (seq, _), (n, _) in found.items() if seq >= SEQS)  # of which no program knows the lengths
    return found


def test_sequences_after_the_last_that_is_looked_at_are_whole_where_that_one_is_cut():
    lens = [(0, 5)] * (SEQS - 1) + [(16, 50000), (16, 50000), (40, 9000)]
    assert cuts_of(lens, 132, 300)[SEQS - 1, 0][0] > 1


def test_how_many_splits_there_are_at_most():
    found = cuts_of([(16, 50000), (16, 100), (64, 64)], 100, 1000)
    assert schedule.LEAST_KEYS.value == work.LEAST_KEYS
    assert found[0, 0][0] == launch.MAX_SPLITS_OF_CUT == max(n for n, _ in found.values())


def test_what_does_not_fit_is_not_cut():
    lens = [(16, 4000), (16, 3900), (16, 3800)]
    for slots in (0, 15, 16, 31, 32, 47, 48, 1000):
        numbers = (
            {seq: 1 << shift for seq, _, shift, _, _ in decided(lens, 100, slots)} if slots else {0: 1, 1: 1, 2: 1}
        )
        assert [numbers[seq] for seq in range(3)] == [8 if slots >= 16 * (seq + 1) else 1 for seq in range(3)]


@pytest.mark.skipif(
    triton.__version__.startswith(("3.6.", "3.7.", "3.8.")),
    reason="the interpreter of Triton 3.6 to 3.8 raises an error where a sum of int32 wraps around",
)
@pytest.mark.parametrize("num_programs", [1, 3, 132])
def test_sums_that_wrap_around_leave_slots_within_the_scratch(num_programs):
    """Tiles of all work tiles pass 2^31, and so does the share of few programs. Each row block is found once."""
    decided([(16, 2**30), (40, 2**30 + 5), (9, 40), *[(2000, 2**30)] * 3], num_programs, 64)


LLAMA = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
E4M3 = {"kv_dtype": torch.float8_e4m3fn}
RAGGED = ((40, 900), (9, 100), (3, 400), (0, 50), (33, 33), (20, 500))
LONG, SHORT = 20000, 4000  # bounds of keys: programs of two consumer warpgroups, and of one
MANY = 129  # queries, the bound of the former


@pytest.fixture
def short_pieces(monkeypatch, take):
    """Launches cut sequences that a simulator attends to in a second."""
    take("cut")
    monkeypatch.setattr(schedule, "LEAST_KEYS", tl.constexpr(128))
    monkeypatch.setattr(schedule, "OVERHEAD", tl.constexpr(0))


def attend(p, bound=LONG, num_sms=12, seed=0, section_heads=None):
    """Attend; return the plan, the state and how many partials arrived at a counter."""
    batch, pages = p.batch, bound // p.cache.page_size + 1
    bounds = p.bounds | {"max_seq_len": bound}
    if bound == LONG:
        bounds["max_query_len"] = max(MANY, p.bounds["max_query_len"])
    if batch.cu_pages is None:
        batch = replace(batch, page_table=torch.nn.functional.pad(batch.page_table, (0, pages)))
    with simulated_hopper(num_sms=num_sms):
        plan = quire.plan(p.spec, batch, **bounds, kernel="hopper")
        if section_heads:
            plan = make_plan(p.spec, batch, replace(plan.launch, section_heads=section_heads), "sections")
    return plan, *run(p, plan, seed)


def run(p, plan, seed=0):
    """Return the state, and how many partials arrived. All counters are 0 afterwards."""
    arrivals, add = [], Machine.atomic_add

    def count(machine, pointer, added, mask=None, sem=""):
        before = add(machine, pointer, added, mask, sem)
        if sem == "acq_rel":
            arrivals.append(int(before))
        return before

    with pytest.MonkeyPatch.context() as patch, simulated_hopper(seed):
        patch.setattr(Machine, "atomic_add", count)
        state = quire.attention(p.q, p.cache, plan, **p.tables, out_scale=p.out_scale, return_lse=True)
    assert not plan.workspace[: plan.launch.counters].any()
    return state, len(arrivals)


def assert_right(extra, lens=RAGGED, bound=LONG, num_sms=12, seed=0, section_heads=None, **problem):
    p = make_problem(quire.AttentionSpec(**LLAMA | extra), lens, **problem)
    plan, state, arrivals = attend(p, bound, num_sms, seed, section_heads)
    verdict = error_budget(p, state)
    assert verdict.passed, (plan, verdict)
    return plan, arrivals


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    ("extra", "bound"),
    [
        extended({}, LONG),
        ({}, SHORT),
        ({"sinks": True, "softcap": 20.0, "alibi": True}, LONG),
        extended({"sinks": True, "softcap": 20.0, "alibi": True}, SHORT),
        ({"sliding_window": 1100, "sinks": True}, LONG),
        extended({"sliding_window": 1100, "sinks": True}, SHORT),
        extended({"causal": False, "head_dim": 128}, LONG),
        extended({"causal": False, "head_dim": 128}, SHORT),
        ({"num_q_heads": 14, "head_dim": 80, "head_dim_v": 96}, LONG),
        extended({"num_q_heads": 14, "head_dim": 80, "head_dim_v": 96}, SHORT),
        extended({"num_q_heads": 6, "num_kv_heads": 2}, LONG),
        extended({"num_q_heads": 6, "num_kv_heads": 2}, SHORT),
    ],
    ids=str,
)
def test_features(extra, bound, take):
    take("wg2" if bound == LONG else "wg1", "cut")
    lens = ((40, 1500), (3, 400), (33, 33)) if "sliding_window" in extra else RAGGED
    plan, arrivals = assert_right(extra, lens, bound)
    assert arrivals > 0 and plan.launch.config.num_warpgroups == (2 if bound == LONG else 1)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v"),
    [(16, 16), (64, 184), *(extended(*case) for case in ((128, 192), (192, 128), (256, 256), (248, 248), (512, 512)))],
)
def test_widths(head_dim, head_dim_v):
    """Values wider than 128 have several accumulators, or one of 256 columns. Wider ones are cut into two parts."""
    assert assert_right({"head_dim": head_dim, "head_dim_v": head_dim_v, "sinks": True}, page_size=24)[1] > 0


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("head_dim", [64, extended(256)])
def test_more_splits_than_are_combined_at_once(head_dim):
    lens = (1, 3600), (20, 30), *((1, 40),) * 40
    _, arrivals = assert_right({"head_dim": head_dim, "sinks": True}, lens, bound=SHORT, num_sms=64)
    assert arrivals >= 2 * 32  # two KV heads


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    ("num_q_heads", "apart"), [extended(4, True), extended(4, False), extended(6, True), (6, False)], ids=str
)
def test_warpgroups_have_their_own_tokens_or_share_them(num_q_heads, apart, take):
    """Of three heads, the second one has rows of both warpgroups if they share tokens."""
    take("wg2", "cut")
    lens = RAGGED if apart else ((300, 700), (2, 600))
    extra = E4M3 if apart else {}  # in 16 bits, programs of one warpgroup take their place
    plan, arrivals = assert_right({"num_q_heads": num_q_heads} | extra, lens, num_sms=4 * num_q_heads)
    assert arrivals and plan.launch.config.num_warpgroups == 2 and plan.launch.config.apart == apart


@pytest.mark.parametrize("extra", [{}, extended({"softcap": 20.0})], ids=str)
def test_a_warpgroup_without_tokens_releases_tiles_when_they_are_there(extra, take):
    """It would release many tiles at once if it did not wait for them. There are two stages."""
    take("apart")
    plan, arrivals = assert_right({"head_dim": 128} | E4M3 | extra, ((1, 1900), (1, 1500), (40, 300)), num_sms=2)
    assert plan.launch.config.apart and plan.launch.config.num_stages == 2 and not arrivals


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    ("extra", "page_size"),
    [
        *(({}, 1), extended({}, 3), extended({}, 8)),
        *(extended({"head_dim": 128} | E4M3, 1), ({"head_dim": 128} | E4M3, 3), extended({"head_dim": 128} | E4M3, 8)),
    ],
    ids=str,
)
def test_pages(extra, page_size):
    assert assert_right(extra, page_size=page_size, layout="HND")[1] > 0


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    ("extra", "scales"),
    [
        *(extended(E4M3, "head"), extended(E4M3, "tensor")),
        *(extended({"kv_dtype": torch.float8_e5m2}, scales) for scales in ("tensor", "head")),
        *(({"kv_dtype": torch.int8}, "head"), extended({"kv_dtype": torch.int8}, "tensor")),
        *((E4M3 | {"allow_fp8": True}, "tensor"), extended(E4M3 | {"allow_fp8": True}, "head")),
    ],
    ids=str,
)
def test_quantised_caches(extra, scales, take):
    take("cut", *(["fp8"] if "allow_fp8" in extra else []))
    plan, arrivals = assert_right({"head_dim": 128, "sinks": True} | extra, scales=scales)
    assert arrivals > 0 and plan.launch.config.fp8_mma == ("allow_fp8" in extra)


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    "extra",
    [extended({}), extended({"head_dim": 256}), extended({"head_dim_v": 192}), E4M3 | {"head_dim": 128}],
    ids=str,
)
def test_outputs_in_e4m3(extra):
    p = make_problem(quire.AttentionSpec(**LLAMA | extra), RAGGED)
    p = replace(p, out_scale=torch.tensor([0.013]))
    _, state, arrivals = attend(p)
    assert arrivals > 0 and state.out.dtype is torch.float8_e4m3fn
    assert error_budget(p, state).passed


@pytest.mark.usefixtures("short_pieces")
def test_sections_of_heads():
    extra = {"num_q_heads": 4, "num_kv_heads": 4}
    assert assert_right(extra, section_heads=2)[1] > 0


@pytest.mark.usefixtures("short_pieces")
def test_sequences_that_are_not_looked_at_are_not_cut(take):
    take("wg2", "cut")
    lens = tuple((20, 1500) if i in (3, 100, 130) else (0, i % 40 + 3) for i in range(135))
    spec = {"num_q_heads": 1, "num_kv_heads": 1, "head_dim": 16}
    plan, arrivals = assert_right(spec, lens)
    of_each = 8 * plan.launch.config.num_warpgroups * -(-20 // plan.launch.config.block_t)
    assert 0 < arrivals <= 2 * of_each


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    ("head_dim", "lens", "bound", "seeds"),
    [
        (64, RAGGED, LONG, range(1, 2)),
        extended(64, RAGGED, SHORT, range(1, 2)),
        extended(512, ((20, 700), (2, 300)), LONG, range(1, 2)),
        extended(64, RAGGED, LONG, range(2, 7)),
        extended(64, RAGGED, SHORT, range(2, 7)),
    ],
)
def test_any_order_of_programs_gives_the_same_bits(head_dim, lens, bound, seeds):
    """Of eleven and more programs, which begin in any order, four run at a time."""
    p = make_problem(quire.AttentionSpec(**LLAMA | {"head_dim": head_dim}), lens)
    plan, first, arrivals = attend(p, bound, num_sms=11)
    assert arrivals > 0 and error_budget(p, first).passed
    for seed in seeds:
        again, _ = run(p, plan, seed)
        assert torch.equal(first.out, again.out) and torch.equal(first.lse, again.lse)


@pytest.mark.usefixtures("short_pieces")
def test_lengths_that_change_in_place():
    """Another sequence is the longest, and then none is."""
    spec = quire.AttentionSpec(**LLAMA)
    p = make_problem(spec, ((40, 700), (40, 700), (30, 700)))  # of as many queries, keys would be split
    plan, _, _ = attend(p, num_sms=12)
    found = []
    for keys in ((100, 700, 60), (50, 60, 650), (70, 70, 70)):
        plan.batch.seq_lens.copy_(torch.tensor(keys, dtype=torch.int32))
        state, arrivals = run(p, plan)
        with simulated_hopper():
            portable = quire.plan(spec, plan.batch, **p.bounds, kernel="portable")
            other = quire.attention(p.q, p.cache, portable, return_lse=True)
        torch.testing.assert_close(state.out, other.out, atol=2e-3, rtol=2e-3)
        torch.testing.assert_close(state.lse, other.lse, atol=1e-4, rtol=1e-4)
        found.append(arrivals > 0)
    assert found == [True, True, False]


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize("seed", [extended(0), 1, *map(extended, range(2, 10))])
def test_whole_space(seed):
    draw = random.Random(seed)
    kv_heads, causal = draw.randint(1, 3), draw.choice([True, False])
    kind = draw.choice([{}, {}, {"head_dim": 128} | E4M3, {"head_dim": 64, "kv_dtype": torch.int8}])
    extra = {
        "num_q_heads": kv_heads * draw.randint(1, 9), "num_kv_heads": kv_heads, "causal": causal,
        "head_dim": draw.choice([64, 128, 80, 256, 192]),
        "sliding_window": draw.choice([None, draw.randint(1100, 1600)]), "sinks": draw.choice([True, False]),
    } | kind  # fmt: skip
    lens = [(draw.choice([0, 1, 9, 33, 70]), draw.choice([0, *draw.sample(range(1600), 4)])) for _ in range(4)]
    lens = [*lens, (draw.randint(17, 60), draw.randint(700, 1800)), (20, 30)]
    assert_right(
        extra,
        lens,
        draw.choice([LONG, SHORT]),
        num_sms=draw.randint(3, 20),
        page_size=draw.choice([draw.randint(1, 7), 8 * draw.randint(1, 20)]),
        layout=draw.choice(["NHD", "HND"]),
        flat_table=draw.choice([True, False]),
        seed=seed,
    )


@pytest.mark.usefixtures("short_pieces")
@pytest.mark.parametrize(
    ("broken", "message"),
    [("barrier", "have not released"), ("release", "have not released"), ("acquire", "have not acquired")],
)
def test_what_the_simulator_refuses(broken, message, monkeypatch):
    """A partial is released by an atomic operation after a barrier, or other warps do not see it."""
    add = Machine.atomic_add

    def add_otherwise(machine, pointer, added, mask=None, sem=""):
        acquired = machine.local.warps.acquired
        before = add(machine, pointer, added, mask, "relaxed" if broken == "release" else sem)
        machine.local.warps.acquired = acquired
        return before

    if broken == "barrier":
        monkeypatch.setattr(Machine, "barrier", lambda machine: None)
    else:
        monkeypatch.setattr(Machine, "atomic_add", add_otherwise)
    with pytest.raises(AccessError, match=message):
        attend(make_problem(quire.AttentionSpec(**LLAMA), RAGGED))


def test_scratch_of_cuts_is_apart_from_that_of_the_decode_launch():
    """These run at the same time. Counters and states begin where they do in all plans of a device."""
    device, draw, found = TARGETS["sm90"].properties, random.Random(3), 0
    for _ in range(300):
        heads = draw.choice([(32, 8, 128), (7, 1, 248), (16, 2, 64), (24, 4, 192)])
        spec = quire.AttentionSpec(num_q_heads=heads[0], num_kv_heads=heads[1], head_dim=heads[2])
        num_seqs, queries = draw.randint(2, 200), draw.choice([3, 40, 500, 1300])
        bounds = Bounds(queries, draw.randint(queries, 40000), draw.randint(queries, num_seqs * queries))
        plan, _ = decide(Request(spec, num_seqs, True, bounds, device), Options(kernel="hopper"))
        size = plan.scratch_size()
        assert size.counters == scratch.counter_bytes(device, 0) == plan.counters and plan.states_at % 128 == 0
        if not plan.cut_slots:
            continue
        found += 1
        warpgroups = plan.config.num_warpgroups
        assert plan.states_at + plan.cut_bytes <= size.total
        assert plan.cut_bytes == 4 * plan.cut_slots * warpgroups * partials.size_of_partial(spec.head_dim_v)
        assert plan.arrivals_at + 4 * plan.cut_slots * warpgroups <= size.counters and plan.arrivals_at % 128 == 0
        if plan.decode is not None:
            assert plan.states_at >= plan.decode.scratch_size().total
            arrived = 2 * plan.decode.num_partitions * spec.num_kv_heads
            assert scratch.TILE_COUNTER_BYTES + 4 * arrived <= plan.arrivals_at
    assert found > 100


@pytest.mark.parametrize(
    ("bounds", "cut"),
    [
        (Bounds(2048, 2048, 8 * 2048), False),  # all sequences have as many queries as keys
        (Bounds(2048, 2048, 8 * 2048 - 1), True),
        (Bounds(2048, 2048, 2049), True),
        (Bounds(2048, 2048, 2048), True),
        (Bounds(2048, 2048, 1024), True),
        (Bounds(512, 30000, 8 * 512), True),
        (Bounds(40, 1024, 100), False),
        (Bounds(40, 1025, 100), True),
    ],
    ids=str,
)
def test_which_launches_may_cut(bounds, cut):
    device = TARGETS["sm90"].properties
    for extra, cuts_here in (({}, cut), ({"sliding_window": 1024}, False)):
        spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, **extra)
        request = Request(spec, 8, True, bounds, device)
        found, _ = choose.variants(request, Options(kernel="hopper"))
        cutting = [one for name, one in found.items() if name.endswith(" cut")]
        assert found and bool(cutting) == cuts_here, [*found]
        for one in cutting:
            assert "cut by keys" in str(one) and one.constexprs()["CUT_SLOTS"] == one.cut_slots > 0
            for changed in (replace(request, num_seqs=1), replace(request, has_intervals=True)):
                assert not replace(one, request=changed).cut_slots
            assert not replace(one, num_splits=2).cut_slots and not replace(one, fixed_split_size=256).cut_slots
        whole = [one for one in found.values() if one not in cutting]
        assert all(not one.cut_slots and "cut by keys" not in str(one) for one in whole)
