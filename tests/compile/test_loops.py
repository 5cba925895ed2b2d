"""`python -m tests.compile --loops` counts the instructions of loops."""

import pytest
import triton

from quire import targets
from quire.targets import TARGETS, compiling
from tests.compile import launches, loops
from tests.extended import extended

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

LINES = (
    ".L_x_0:",  # the outer loop
    "MOV R0, 0x1 ;",
    ".L_x_1:",  # the inner loop
    *["FFMA R1, R2, R3, R1 ;"] * 20,
    *["LDSM.16.M88.4 R4, [R5] ;"] * 2,
    ".L_x_2:",  # a wait
    "SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [R6], R7 ;",
    "@!P1 BRA `(.L_x_2) ;",
    "@P0 BRA `(.L_x_1) ;",
    "@UP2 UIADD3 UR4, UR4, 0x1, URZ ;",
    "@P3 BRA `(.L_x_0) ;",
    "EXIT ;",
    ".L_x_3:",
    "BRA `(.L_x_1) ;",  # not a loop
)


def test_the_loop_without_loops_inside_is_found_and_counted():
    code = "\n".join(line if line.startswith(".L") else f"        /*{i:04x}*/  {line}" for i, line in enumerate(LINES))
    (loop,) = loops.innermost_loops(code)
    kinds = {"float": 20, "shared memory": 2, "barriers": 1, "integers and branches": 2}
    assert loops.count_kinds(loop) == kinds and loops.describe(loop).startswith("25 instructions: 20 float, ")


@pytest.mark.parametrize("head_dim", [extended(128), 120])
def test_decode_s_loop_multiplies_on_tensor_cores_and_copies_ahead(head_dim, monkeypatch):
    """It copies 16 bytes at once, also where strides are multiples of 8 elements and not of 16."""
    monkeypatch.setattr(targets, "inspect", lambda name, kernel, *others: (name, kernel.asm["cubin"]))
    with compiling(TARGETS["sm90"]) as cubins:
        launches.attend("decode", head_dim, "plain")
    loop = loops.innermost_loops(loops.disassemble(dict(cubins)["portable_kernel"]))[0]
    assert loops.count_kinds(loop)["tensor cores"] == 32 and sum(op.startswith("LDGSTS") for op in loop) == 16
