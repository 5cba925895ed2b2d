"""The workloads: names, what they need, and traces."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.drawn import visible_pairs
from quire_tools.bench import cases as workloads
from quire_tools.bench.case import KINDS, MODELS, RECORDS, Case, Pool
from quire_tools.bench.cases import SETS, cases, cases_from_trace, log_normal
from quire_tools.bench.roofline import Ceilings


def test_names_are_unique_and_every_set_and_model_is_there():
    every = cases()
    assert len({case.name for case in every}) == len(every)
    assert len(every) > 100
    assert {name for case in every for name in workloads.sets_of(case)} == set(SETS)
    assert {case.model for case in every} == set(MODELS)
    assert {case.kind for case in every} == set(KINDS)
    for case in every:
        assert case.nbytes > 0, case
        assert case.flops > 0, case


def test_sets_and_parts_of_names_choose():
    assert [c.name for c in cases(["decode"], "fp8")] == [
        "decode 32x2048 fp8",
        "decode 128x4096 fp8",
        "decode 1x131072 fp8",
        "drafts 32x8 on 4096 fp8",
    ]
    assert [c.name for c in cases(["quick"])] == list(workloads.QUICK)
    assert {c.decode_share for c in cases(["share"])} == {0, 0.5, 1}


@given(q_len=st.integers(1, 40), before=st.integers(0, 60), window=st.integers(1, 120))
def test_pairs_are_counted_as_one_by_one(q_len, before, window):
    seq_len = before + q_len
    assert visible_pairs(q_len, seq_len, window) == sum(min(before + i + 1, window) for i in range(q_len))


def test_bytes_are_keys_values_queries_and_outputs():
    case = Case("a chunk", "chunk", ((4, 100), (1, 30)), page_size=16)
    assert case.nbytes == 2 * (130 * 8 * 256 + 5 * 32 * 256)
    windowed = Case("local", "decode", ((1, 5000),), model="Gemma-3-12B, local")
    assert windowed.nbytes == 2 * (1024 * 8 * 512 + 16 * 512)
    assert Case("fp8", "decode", ((1, 64),), kv_dtype="float8_e4m3fn").nbytes == 64 * 8 * 256 + 2 * 32 * 256


def test_a_shared_prefix_is_read_once():
    case = cases(["shared"])[0]
    assert (case.name, case.layout) == ("decode 64 samples of 8192 with 256 own keys", "shared pages")
    assert case.nbytes == 2 * ((8192 + 64 * 256) * 8 * 256 + 64 * 32 * 256)


def test_a_latent_is_read_once_for_keys_and_values():
    case = Case("latents", "MLA decode", ((2, 100), (2, 30)), model="MLA, 16 heads", page_size=64)
    assert case.layout == "latents"
    assert case.nbytes == 2 * (130 * 576 + 4 * 16 * (576 + 512))
    pairs = 99 + 100 + 29 + 30
    assert case.flops == 2 * pairs * 16 * (576 + 512)
    assert replace(case, kv_dtype="float8_e4m3fn").nbytes == case.nbytes - 130 * 576
    assert case.spec.softmax_scale == 192**-0.5


def test_latents_are_bound_by_memory_up_to_some_93_rows():
    h200 = Ceilings("H200", 4.6e12, 805e12, "measured")
    bounds = {case.spec.num_q_heads * case.bounds["max_query_len"]: h200.bound(case) for case in workloads.MLA[:21]}
    assert bounds == {16: "memory", 32: "memory", 64: "memory", 128: "compute", 256: "compute"}


def test_latents_are_decoded_by_16_to_128_heads_in_two_dtypes_and_expanded_for_prompts():
    names = [case.name for case in cases(["mla"])]
    assert sum(name.endswith("fp8") for name in names) == 17
    assert len(names) == 21 + 17
    assert {"MLA 1x131072 h16", "MLA 64 of 16 to 8192 h128 fp8", "MLA 32x4096 h16, 4 queries"} < set(names)
    for case in cases(["mla"]):
        assert (case.layout, case.page_size, case.spec.latent) == ("latents", 64, True)
    for case in cases(["mla_prefill"]):
        assert (case.layout, case.page_size) == ("packed", 1)
        assert (case.spec.head_dim, case.spec.head_dim_v) == (192, 128)
    chunk = cases(["mla_prefill"], "chunk")[0]
    assert chunk.lens == ((2048, 14336 + 2048),)


def test_tokens_choose_keys_in_decode_in_two_dtypes_and_in_prompts():
    names = [case.name for case in cases(["chosen"])]
    assert len(names) == 7 + 7 + 4
    assert {"chosen 1x2048 h16", "chosen 128x2048 h128 records"} < set(names)
    assert {"chosen prefill 8192x2048 h16, 75 % shared", "chosen prefill 8192x2048 h128"} < set(names)
    for case in cases(["chosen"]):
        assert (case.layout, case.page_size, case.spec.causal) == ("chosen keys", 64, False)
        assert case.pool.num_slots == 262_144 and set(case.seq_lens) == {2048}


def test_chosen_keys_are_counted_once_however_many_tokens_choose_them():
    case = Case("lists", "chosen decode", ((1, 100),) * 3, "MLA, 16 heads", 64, pool=Pool(4096))
    named = 4096 - 4096 * (1 - 100 / 4096) * (1 - 100 / 3996) ** 2
    assert case.nbytes == 2 * 576 * round(named) + 2 * 3 * 16 * (576 + 512)
    assert case.flops == 2 * 3 * 100 * 16 * (576 + 512)
    assert replace(case, kv_dtype=RECORDS).nbytes == case.nbytes - round(named) * (2 * 576 - 656)
    one = replace(case, lens=((1, 100),))
    assert one.nbytes == 2 * 576 * 100 + 2 * 16 * (576 + 512)
    prompt = replace(case, kind="chosen prefill", lens=((3, 100),))
    assert (prompt.nbytes, prompt.flops) == (case.nbytes, case.flops)


def test_many_heads_over_records_are_planned_with_rounding_as_flash_mla_rounds():
    assert {case.spec.allow_fp8 for case in cases(["chosen"], "records")} == {True}
    assert not any(case.spec.allow_fp8 for case in cases(["chosen"]) if case.kv_dtype is None)


def test_lengths_depend_on_the_seed_alone():
    lengths = log_normal(2000, 512, seed=1)
    assert lengths == log_normal(2000, 512, seed=1)
    assert lengths != log_normal(2000, 512, seed=2)
    assert 460 < sorted(lengths)[1000] < 570
    assert min(lengths) >= 32
    assert 2048 < max(lengths) <= 512 * 16


def test_a_trace_becomes_cases(tmp_path):
    trace, rng = tmp_path / "served.csv", random.Random(0)
    pairs = [(rng.randint(10, 900), rng.randint(1, 200)) for _ in range(50)]
    trace.write_text("ContextTokens,GeneratedTokens\n" + "".join(f"{p},{o}\n" for p, o in pairs))
    found = cases_from_trace(trace, seed=4)
    assert found == cases_from_trace(trace, seed=4)
    assert [case.kind for case in found] == ["decode", "mixed"] * 3
    assert {len(case.lens) for case in found} == {8, 32, 128}
    assert max(s for c in found for _, s in c.lens) <= max(p + o + 1 for p, o in pairs)
    assert found[3].decode_share == 30 / 32


def test_a_trace_may_begin_with_a_byte_order_mark(tmp_path):
    trace = tmp_path / "served.csv"
    trace.write_bytes("\ufeff90000,20\n300,5\n".encode())  # as Excel writes "CSV UTF-8"
    assert max(s for case in cases_from_trace(trace) for _, s in case.lens) > 90000


@pytest.mark.parametrize(
    "content",
    [b"", b"prompt,output\n", b"12,30\nmany,few\n", b"12,30\n12\n", b"\xff\xfe\x00\x81", b'12,30\n"' + b"x" * 200_000],
)
def test_what_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "trace.csv"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="must hold `prompt tokens,output tokens`") as caught:
        cases_from_trace(path)
    assert str(path) in str(caught.value)
