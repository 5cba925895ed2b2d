"""What the compiler makes for GPUs that no one here can run is no worse than the record, which a page shows."""

import json
from dataclasses import replace

import pytest
import triton

from tests.compile import static

KNOWN = static.record()
VERSION = json.loads(static.RECORD.read_text())["triton"]
TEXT = """
.LBB0_1:
	s_waitcnt vmcnt(0)
.LBB0_2:
	v_mfma_f32_16x16x16_bf16 a[0:3], v[0:1], v[2:3], a[0:3]
	v_exp_f32_e32 v1, v1
	s_cbranch_scc1 .LBB0_2
	s_cbranch_scc0 .LBB0_1
	s_endpgm
"""


BY_DEFAULT = {  # decode, which takes the compiler least time; gfx90a compiles a prompt in test_compile.py
    "sm100": "decode 128 × 2,048",
    "sm120": "decode 128 × 2,048, e4m3",
    "gfx942": "decode 128 × 2,048",
    "gfx950": "decode 1 × 16,384",
}
LAUNCHES = [
    pytest.param(target, case, marks=[] if BY_DEFAULT[target] == case else pytest.mark.extended, id=f"{target}-{case}")
    for target in static.CARDS
    for case in static.CASES
]


@pytest.mark.one_triton
@pytest.mark.skipif(triton.__version__ != VERSION, reason=f"the record is of Triton {VERSION}")
@pytest.mark.parametrize(("target", "case"), LAUNCHES)
def test_no_kernel_is_worse_than_the_record(target, case):
    assert static.worse(static.make(target, case), KNOWN[f"{target} | {case}"]) == []


def test_the_record_has_each_target_and_case_and_the_page_shows_it():
    assert set(KNOWN) == {f"{target} | {case}" for target in static.CARDS for case in static.CASES}
    assert static.PAGE.read_text() == static.page(KNOWN, VERSION)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"variant": "another"}, ["another in place of a"]),
        ({"spills": 12}, ["spills 8 -> 12"]),
        ({"instructions": 103}, ["instructions 100 -> 103"]),
        ({"instructions": 102}, []),
        ({"occupancy": 1}, ["occupancy 2 -> 1"]),
        ({"in_flight": 0}, ["in_flight 64 -> 0"]),
        ({"products": 15}, ["products 16 -> 15"]),
        ({"spills": 0, "occupancy": 3, "instructions": 50, "registers": 255}, []),
    ],
)
def test_what_is_worse_is_named(change, words):
    known = static.Made("a", 128, 8, 1024, 2, 64, 100, 16)
    assert static.worse(replace(known, **change), known) == words


def test_loops_of_an_amd_gpu_are_those_inside():
    assert list(static.loops_of_amd(TEXT)) == [["v_mfma_f32_16x16x16_bf16", "v_exp_f32_e32", "s_cbranch_scc1"]]
    assert static.loop_of({"amdgcn": TEXT}) == (3, 1)
