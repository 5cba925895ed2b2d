"""The method, as far as it needs no GPU: inputs, the oracle's sample, replays, adapters, ceilings."""

import time
from dataclasses import replace

import pytest
import torch
import triton

import quire
from quire.targets import TARGETS
from quire_tools.bench import measure
from quire_tools.bench.case import RECORDS, Case, Model, Pool
from quire_tools.bench.cases import cases
from quire_tools.bench.inputs import draw_lists, make_inputs
from quire_tools.bench.peers import BASELINES, PEERS, Peer, quire_calls
from quire_tools.bench.roofline import DATA_SHEETS, from_data_sheet
from quire_tools.bench.sample import Sample, rounded_to_fp8

INTERPRETED = triton.knobs.runtime.interpret
RECORDS_CASE = Case("lists", "chosen decode", ((1, 40),) * 3, "MLA, 16 heads", 64, kv_dtype=RECORDS, pool=Pool(256))


def test_a_floor_is_bytes_or_flops_whichever_takes_longer(ceilings):
    decode, prompt = Case("d", "decode", ((1, 4096),)), Case("p", "prefill", ((8192, 8192),))
    assert ceilings.bound(decode) == "memory"
    assert ceilings.floor(decode) == pytest.approx(1e6 * decode.nbytes / 4e12)
    assert ceilings.bound(prompt) == "compute"
    assert ceilings.floor(prompt) == pytest.approx(1e6 * prompt.flops / 800e12)


def test_every_target_has_a_data_sheet():
    assert {target for target, *_ in DATA_SHEETS.values()} == set(TARGETS)
    assert {from_data_sheet(name).source for name in DATA_SHEETS} == {"data sheet"}


@pytest.mark.skipif(INTERPRETED, reason="tables as on a GPU, which the interpreter walks slowly")
def test_a_sample_is_compared_with_the_oracle():
    case = Case("small", "mixed", ((1, 70), (40, 90), (3, 200)), model="gpt-oss-120b, local", dtype="float32")
    inputs = make_inputs(case, "cpu")
    table, sample = inputs.tables[1], Sample(inputs, inputs.tables[1])
    out = quire.attention(inputs.q, inputs.cache, inputs.plan(table), sinks=inputs.sinks)
    assert sample.judge(out).passed
    assert not Sample(inputs, inputs.tables[0]).judge(out).passed
    for token in (0, 1, 40, 41, 43):  # ends of sequences
        wrong = out.clone()
        wrong[token] *= 1.001
        assert not sample.judge(wrong).passed, token
    out[20] = float("nan")
    assert not sample.judge(out).passed


def test_a_sample_has_both_ends_of_the_first_last_longest_and_widest_sequence():
    case = Case("small", "mixed", ((3, 70), (1, 40), (40, 90), (1, 200), (1, 30), (2, 60)), dtype="float32")
    inputs = make_inputs(case, "cpu")
    sample = Sample(inputs, inputs.tables[0])
    first, widest, longest, last = [0, 1, 2], [*range(4, 20), *range(28, 44)], [44], [46, 47]
    assert sample.rows.tolist() == [*first, *widest, *longest, *last]


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no bfloat16")
def test_inputs_of_every_kind_of_case_are_made_and_judged():
    kinds = {
        (c.dtype, c.kv_dtype, c.spec.sinks, c.spec.sliding_window, c.page_size, c.layout, c.kind == "chosen prefill"): c
        for c in sorted(cases(), key=lambda c: -c.spec.num_q_heads)
    }
    assert len(kinds) > 10
    for case in kinds.values():
        small = replace(case, lens=((2, 150), (3, 40)), shared_prefix=min(case.shared_prefix, 32))
        if case.pool is not None:
            small = replace(case, lens=((2, 40), (3, 40)), pool=replace(case.pool, num_slots=256))
        inputs = make_inputs(small, "cpu", max_tables=2)
        out = inputs.empty_out()
        quire_calls(inputs, out)(inputs.tables[1])()
        sample = Sample(inputs, inputs.tables[1])
        assert sample.judge(out).passed, case
        assert not sample.judge(out * 1.2).passed, case


@pytest.mark.parametrize("shared", [0.0, 0.75])
def test_lists_are_of_random_slots_in_order_of_which_the_token_before_has_a_share(shared):
    pool, lists = Pool(512, shared), torch.full((40, 64), -1, dtype=torch.int32)
    draw_lists(lists, pool, torch.Generator().manual_seed(3))
    assert (lists.diff() > 0).all() and lists.min() >= 0 and lists.max() < 512
    in_common = [len(set(a) & set(b)) for a, b in zip(lists.tolist(), lists[1:].tolist(), strict=False)]
    assert set(in_common) == {round(64 * shared)}


@pytest.mark.parametrize(("num_lists", "shared"), [(1, 0.0), (5, 0.0), (5, 0.75), (40, 0.75)])
def test_the_expected_number_of_slots_in_lists_is_that_of_many_draws(num_lists, shared):
    pool, generator = Pool(512, shared), torch.Generator().manual_seed(0)
    counts = []
    for _ in range(60):
        lists = torch.empty(num_lists, 64, dtype=torch.int32)
        draw_lists(lists, pool, generator)
        counts.append(len(lists.unique()))
    assert pool.num_named(num_lists, 64) == pytest.approx(sum(counts) / len(counts), rel=0.01)


def test_each_table_of_lists_has_a_pool_of_its_own(monkeypatch):
    case = Case("small", "chosen decode", ((1, 40),) * 3, "MLA, 16 heads", 64, dtype="float32", pool=Pool(128))
    monkeypatch.setattr("quire_tools.bench.inputs.l2_bytes", lambda device: 10**6)
    inputs = make_inputs(case, "cpu")
    assert len(inputs.tables) == len(inputs.pools) > 20
    for i, table in enumerate(inputs.tables):
        assert inputs.cache_of(table) is inputs.pools[i]
        assert torch.equal(inputs.pools[i].latents, inputs.cache.latents[2 * i : 2 * i + 2])
    assert not torch.equal(inputs.tables[0], inputs.tables[1])
    monkeypatch.setattr("quire_tools.bench.inputs.MOST_POOL_BYTES", 7 * 128 * 576 * 4)
    assert len(make_inputs(case, "cpu").tables) == 7


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no bfloat16")
def test_bfloat16_holds_what_records_hold():
    inputs = make_inputs(RECORDS_CASE, "cpu", max_tables=2)
    numbers, scales, rope = (x.flatten(0, 1).float() for x in inputs.pools[0].records)
    latents = numbers * scales.repeat_interleave(128, 1)
    assert torch.equal(latents, latents.bfloat16().float())
    assert 0.9 < latents.std() < 1.1 and 0.9 < rope.std() < 1.1


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no bfloat16")
def test_fp8_products_have_the_budget_of_fp8_products():
    case = Case("fp8", "MLA decode", ((2, 300), (2, 90)), "MLA, 16 heads", 64, kv_dtype="float8_e4m3fn")
    inputs = make_inputs(case, "cpu", max_tables=2)
    spec, sample = case.spec, Sample(inputs, inputs.tables[0])

    def result(rounded, keys_per_tile=64):
        """Attend with queries and probabilities that are `rounded`, tile by tile as a kernel does."""
        rows = []
        for seq, (q_len, kv_len) in enumerate(case.lens):
            keys = inputs.cache.latents[inputs.tables[0][seq].long()].flatten(0, 1)[:kv_len].float()
            for i in range(q_len):
                scores = spec.softmax_scale * (rounded(inputs.q[len(rows)]) @ keys[: kv_len - q_len + i + 1].T)
                largest, total, acc = torch.full((16, 1), -float("inf")), torch.zeros(16, 1), torch.zeros(16, 512)
                for begin in range(0, scores.shape[1], keys_per_tile):
                    tile = scores[:, begin : begin + keys_per_tile]
                    new = torch.maximum(largest, tile.amax(1, keepdim=True))
                    weights, shrink = torch.exp(tile - new), torch.exp(largest - new)
                    total = total * shrink + weights.sum(1, keepdim=True)
                    acc = acc * shrink + rounded(weights) @ keys[begin : begin + tile.shape[1], :512]
                    largest = new
                rows.append(acc / total)
        return torch.stack(rows).to(spec.dtype)

    in_fp8, exact = result(rounded_to_fp8), result(torch.Tensor.float)
    assert sample.judge(exact).passed
    assert not sample.judge(in_fp8).passed
    assert sample.judge(in_fp8, in_fp8=True).passed
    coarser = result(lambda x: x.to(torch.float8_e5m2).float())
    assert not sample.judge(2 * in_fp8, in_fp8=True).passed
    assert sample.judge(coarser, in_fp8=True).out > sample.judge(in_fp8, in_fp8=True).out


def test_sequences_of_a_table_share_the_pages_of_their_prefix():
    inputs = make_inputs(Case("small", "decode", ((1, 70), (1, 33)), shared_prefix=32), "cpu")
    pages = [row[:n].tolist() for table in inputs.tables for row, n in zip(table, (5, 3), strict=True)]
    assert all(a[:2] == b[:2] for a, b in zip(pages[::2], pages[1::2], strict=True))
    assert len({page for row in pages for page in row}) == inputs.cache.num_pages == len(inputs.tables) * (2 + 3 + 1)


def test_tables_share_no_page():
    inputs = make_inputs(Case("small", "decode", ((1, 70), (1, 33))), "cpu", table_len=500)
    pages = [int(p) for table in inputs.tables for row, n in zip(table, (5, 3), strict=True) for p in row[:n]]
    assert len(pages) == len(set(pages)) == inputs.cache.num_pages
    assert inputs.tables[0].shape[1] == 32


def test_packed_keys_are_slices_that_share_nothing():
    case = Case("small", "MLA prefill", ((20, 70), (33, 33)), "MLA, 16 heads, expanded", page_size=1, packed=True)
    inputs = make_inputs(case, "cpu", max_tables=2)
    first, second = (inputs.packed(table) for table in inputs.tables)
    assert [tuple(x.shape) for x in first] == [(103, 16, 192), (103, 16, 128)]
    for one, other, stored in zip(first, second, (inputs.cache.k, inputs.cache.v), strict=True):
        assert torch.equal(torch.cat([one, other]), stored[:, 0])
        assert one.data_ptr() == stored.data_ptr()


def test_the_same_inputs_are_made_each_time():
    case = Case("small", "decode", ((1, 70), (1, 33)))
    first, second = (make_inputs(case, "cpu", max_tables=2) for _ in range(2))
    assert len(first.tables) == 2
    assert torch.equal(first.q, second.q)
    assert torch.equal(first.cache.k, second.cache.k)
    assert torch.equal(torch.stack(first.tables), torch.stack(second.tables))


def test_timers_run_round_robin_in_another_order_each_time():
    order = []
    timers = {name: lambda name=name, at=at: order.append(name) or at for name, at in (("a", 3.0), ("b", 5.0))}
    times = measure.round_robin(timers, seconds=0.01, min_replays=10)
    rounds = list(zip(order[:20:2], order[1:20:2], strict=True))
    assert {frozenset(each) for each in rounds} == {frozenset("ab")}
    assert len(set(rounds)) == 2  # each is the first one in some round
    assert set(times["a"]) == {3.0}
    assert len(times["b"]) >= 10


def test_a_slow_timer_runs_three_times():
    timers = {"fast": lambda: 3.0, "slow": lambda: time.sleep(0.02) or 7.0}
    times = measure.round_robin(timers, seconds=0.01, min_replays=10)
    assert times["slow"] == [7.0] * 3
    assert len(times["fast"]) >= 10


def test_a_range_holds_four_fifths_of_the_times():
    assert measure.median_and_range([90.0] + [2.0] * 8 + [1.0]) == (2.0, 2.0, 2.0)
    assert measure.median_and_range([float(i) for i in range(21)]) == (10.0, 2.0, 18.0)
    assert measure.median_and_range([3.0, 1.0]) == (2.0, 1.0, 3.0)


@pytest.fixture
def without_graphs(monkeypatch):
    """Let `compare` run on a CPU: a graph is the list of its calls, and a replay takes 10 µs a call."""
    monkeypatch.setattr(measure, "make_inputs", lambda case, table_len: make_inputs(case, "cpu", table_len=table_len))
    monkeypatch.setattr(measure, "capture", list)
    monkeypatch.setattr(measure, "replay", lambda graph: 10.0 * len(graph))
    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: None)
    for name in ("memory_allocated", "max_memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda *args: 0)


@pytest.mark.pytorch
@pytest.mark.usefixtures("without_graphs")
def test_right_results_are_timed_and_the_others_have_a_reason():
    (ours,) = (peer for peer in PEERS if peer.name == "Quire")
    tables = []

    def right(inputs, out):
        plan = ours.adapter(inputs, out)

        def record(table):
            tables.append(table)
            return plan(table)

        return record

    def wrong(inputs, out):
        plan = ours.adapter(inputs, out)
        return lambda table: lambda: plan(table)().mul_(1.1)

    def lacking(inputs, out):
        raise measure.NotServed("no such thing")

    def broken(inputs, out):
        raise RuntimeError("out of order\nwith details")

    peers = [Peer(adapter.__name__, "quire", adapter) for adapter in (lacking, right, wrong, broken)]
    peers.append(replace(ours, name="planned"))
    case = Case("small", "decode", ((1, 300),) * 4, dtype="float32")
    found = measure.compare(case, peers, seconds=0.01)
    assert list(found) == ["lacking", "right", "wrong", "broken", "planned"]
    assert found["lacking"] == measure.NoResult("no such thing")
    assert found["broken"] == measure.NoResult("RuntimeError: out of order")
    assert "times its budget" in found["wrong"].why
    assert found["right"].micros == found["right"].low == found["right"].high == 10
    assert found["right"].replays >= 7
    assert found["right"].of_budget <= 1
    assert found["right"].bytes_per_second == pytest.approx(case.nbytes / 10e-6)
    assert found["right"].plan_micros is None
    assert found["planned"].plan_micros > 0
    # One call is checked, then the graph has a call for each table.
    checked, *captured = (table.data_ptr() for table in tables)
    assert captured[0] == checked
    assert len(captured) == len(set(captured)) == 2


@pytest.mark.skipif(INTERPRETED, reason="the interpreter has no bfloat16")
@pytest.mark.pytorch
@pytest.mark.usefixtures("without_graphs")
def test_records_are_judged_by_one_budget_whoever_reads_them():
    (ours,) = (peer for peer in PEERS if peer.name == "Quire")
    found = measure.compare(RECORDS_CASE, [ours, replace(ours, name="in fp8", in_fp8=True)], seconds=0.01)
    assert found["Quire"].of_budget == found["in fp8"].of_budget <= 1


@pytest.mark.pytorch
@pytest.mark.parametrize(("micros", "captured"), [(10.0, [2, 32]), (1500.0, [2, 6]), (3000.0, [2])])
@pytest.mark.usefixtures("without_graphs")
def test_a_graph_has_a_call_for_each_layer_of_a_model_unless_a_replay_takes_too_long(micros, captured, monkeypatch):
    lengths = []
    monkeypatch.setattr(measure, "capture", lambda calls: lengths.append(len(calls)) or list(calls))
    monkeypatch.setattr(measure, "replay", lambda graph: micros * len(graph))
    peers = [peer for peer in PEERS if peer.name == "Quire"]
    found = measure.compare(Case("small", "decode", ((1, 300),), dtype="float32"), peers, seconds=0.01)
    assert lengths == captured and found["Quire"].micros == micros


def test_errors_are_described_in_one_line():
    assert measure.describe_error(measure.NotServed("no sinks")) == "no sinks"
    assert measure.describe_error(ValueError("\n  first\nsecond")) == "ValueError: first"
    assert measure.describe_error(KeyError()) == "KeyError: "


def test_peers_are_reported_absent_with_the_reason():
    present = [peer for peer in PEERS if peer.module == "quire"]
    assert len(present) == 6
    for peer in present:
        assert peer.why_absent() is None
        assert peer.version() == quire.__version__
    absent = Peer("none", "quire_that_nobody_wrote", present[0].adapter)
    assert absent.why_absent() == "ModuleNotFoundError: No module named 'quire_that_nobody_wrote'"


def test_baselines_are_peers():
    assert set(BASELINES) < {peer.name for peer in PEERS}


@pytest.mark.skipif(INTERPRETED, reason="bfloat16 cases, which the interpreter does not serve")
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("name", ["Quire", "SDPA, not paged", "FlexAttention, not paged"])
def test_adapters_without_a_gpu_are_right(name, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    (peer,) = (peer for peer in PEERS if peer.name == name)
    for lens in (((1, 40),) * 2, ((12, 40),), ((20, 20),) * 2):
        inputs = make_inputs(Case("small", "chunk", lens), "cpu", max_tables=2)
        for table in inputs.tables:
            out = inputs.empty_out()
            result = peer.adapter(inputs, out)(table)()
            judged = out if result is None else result.reshape(out.shape)
            assert Sample(inputs, table).judge(judged).passed, lens


def test_adapters_refuse_what_their_library_lacks():
    cases_by_peer = {
        "Quire, naive": Case("window", "decode", ((1, 40),), model="Mistral window"),
        "SDPA, not paged": Case("fp8", "decode", ((1, 40),), kv_dtype="float8_e4m3fn"),
        "FlexAttention, not paged": Case("unequal", "decode", ((1, 40), (1, 50), (1, 60))),
    }
    for peer in PEERS:
        if peer.name in cases_by_peer:
            inputs = make_inputs(cases_by_peer.pop(peer.name), "cpu", max_tables=2)
            with pytest.raises(measure.NotServed):
                peer.adapter(inputs, inputs.empty_out())
    assert not cases_by_peer


@pytest.mark.parametrize(
    ("name", "layer", "reason"),
    [
        ("Quire, naive", Model(4, 2, 64, softcap=30.0), "causal attention only"),
        ("Quire, naive", Model(4, 2, 64, head_dim_v=32), "values of another width"),
        ("SDPA, not paged", Model(4, 2, 64, softcap=30.0), "softcap"),
        ("FlexAttention, not paged", Model(4, 2, 64, softcap=30.0), "softcap"),
    ],
)
def test_adapters_refuse_layers_that_their_library_lacks(name, layer, reason):
    (peer,) = (peer for peer in PEERS if peer.name == name)
    inputs = make_inputs(Case("drawn", "decode", ((1, 40),), "4/2/64", layer=layer), "cpu", max_tables=2)
    with pytest.raises(measure.NotServed, match=reason):
        peer.adapter(inputs, inputs.empty_out())
