"""Users' functions on scores and masks in every kernel that serves them, against the oracle.

On a GPU and in the interpreter (TRITON_INTERPRET=1) Triton kernels run, elsewhere the PyTorch path for CPU tensors.
"""

import pytest
import torch

import quire
from tests.score_functions import FUNCTIONS

HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16}
LATENTS = {"num_kv_heads": 1, "head_dim": 48, "head_dim_v": 32, "softmax_scale": 0.2, "latent": True, "num_q_heads": 6}
MIXED = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0), (2, 17))


@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.triton)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions(function, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**HEADS | FUNCTIONS[function], dtype=torch.float32)
    assert_within_budget(*solve(spec, MIXED, num_splits, page_size=5))


@pytest.mark.parametrize("num_splits", [1, pytest.param(3, marks=pytest.mark.triton)])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_functions_on_latents(function, num_splits, solve, assert_within_budget):
    spec = quire.AttentionSpec(**LATENTS | FUNCTIONS[function], dtype=torch.float32)
    assert_within_budget(*solve(spec, MIXED, num_splits, page_size=5))
