"""Products and sums are fused, or not, as Quire says, whatever Triton's default is."""

import pytest
import torch
import triton
import triton.language as tl

from quire import targets
from quire.kernels.launcher import launch
from quire.targets import TARGETS, compiling

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)


@triton.jit
def multiply_add_kernel(x, y):
    value = tl.load(x)
    tl.store(y, value * value + value)


@pytest.mark.parametrize(("target", "code", "fused"), [("sm80", "ptx", "fma.rn"), ("gfx942", "amdgcn", "v_fma")])
def test_a_product_and_a_sum_are_one_fma_also_where_triton_s_default_is_another(target, code, fused, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # the default from Triton 3.10 on
    texts = []
    monkeypatch.setattr(targets, "inspect", lambda name, kernel, *others: texts.append(kernel.asm[code]))
    with compiling(TARGETS[target]):
        launch(multiply_add_kernel, (1,), (torch.zeros(1), torch.zeros(1)), {})
    assert fused in texts[0]
