"""Score mods, each by itself: what they compute, to the last bits of float32."""

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels import mods
from quire.kernels.hopper.softcap import COEFFICIENTS, SMALL


@triton.jit
def tanh_kernel(out_ptr, x_ptr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, mods.tanh(tl.load(x_ptr + offs)))


@pytest.mark.slow
@pytest.mark.triton
def test_tanh_is_exact_to_float32(device):
    """Relatively, on both sides of the change from the series to the exponential, whose steps round once each."""
    x = torch.cat([torch.linspace(-12, 12, 4096), torch.logspace(-30, 1, 4096), -torch.logspace(-30, 1, 4096)])
    out = torch.empty_like(x, device=device)
    tanh_kernel[len(x) // 256,](out, x.to(device), 256)
    torch.testing.assert_close(out.cpu().double(), x.double().tanh(), rtol=8 * torch.finfo(torch.float32).eps, atol=0)


@triton.jit
def softcap_kernel(out_ptr, x_ptr, cap, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offs, mods.softcap(tl.load(x_ptr + offs), 0.5, None, None, None, cap))


@pytest.mark.triton
@pytest.mark.parametrize("cap", [1.0, 30.0, 256.0])
def test_the_softcap_of_16_bit_queries_errs_by_a_millionth_of_the_cap(cap, device):
    x = torch.cat([torch.linspace(-8 * cap, 8 * cap, 4094), torch.tensor([torch.inf, -torch.inf])])
    out = torch.empty_like(x, device=device)
    softcap_kernel[len(x) // 256,](out, x.to(device), cap, 256)
    torch.testing.assert_close(out.cpu().double(), cap * (x.double() / 2 / cap).tanh(), rtol=0, atol=1e-6 * cap)


def test_the_polynomial_of_small_scores_errs_as_little_as_it_says():
    x = torch.linspace(-SMALL.value, SMALL.value, 100_001, dtype=torch.float64)
    series = sum(c * x ** (2 * i + 1) for i, c in enumerate(COEFFICIENTS))
    assert (series - torch.tanh(x)).abs().max() <= 1.3e-7
