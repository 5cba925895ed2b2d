"""The kernels of examples/one_file.py, judged as Quire's own are."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import quire
from quire.testing import error_budget, make_problem

pytestmark = pytest.mark.triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if torch.cuda.is_available() else torch.float16
TILE = {"BLOCK_M": 16, "BLOCK_N": 16, "num_warps": 4, "num_stages": 2}
DECODE = [(1, n) for n in (1, 16, 17, 300, 64)]
MIXED = [(1, 33), (0, 0), (40, 40), (7, 90), (1, 1), (0, 5), (20, 150)]


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    path = Path(__file__).parents[2] / "examples/one_file.py"
    spec = importlib.util.spec_from_file_location("one_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["one_file"] = module  # Triton looks there for the globals of a kernel
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("split_keys", [16, 64, None])
@pytest.mark.parametrize("group", [3, 4])
@pytest.mark.parametrize(
    "lens", [DECODE, [*DECODE, (1, 0)], [(90, 90)], MIXED], ids=["decode", "idle", "prompt", "mixed"]
)
def test_results_are_within_the_error_budget_however_keys_are_split(one_file, lens, group, split_keys):
    """Memory that must not be read is NaN. With splits of 16 keys, the combine goes through more than one round."""
    spec = quire.AttentionSpec(num_q_heads=2 * group, num_kv_heads=2, head_dim=16, dtype=DTYPE)
    decodes = all(query_len == 1 for query_len, _ in lens)
    problem = make_problem(spec, lens, page_size=8 if group == 3 else 16, one_query=decodes, device=DEVICE)
    bounds = problem.bounds["max_query_len"], problem.bounds["max_seq_len"]
    batch = one_file.Batch(problem.batch.page_table, problem.batch.seq_lens, problem.batch.cu_seqlens_q, *bounds)
    tile = TILE if split_keys else None
    out = one_file.attention(problem.q, problem.cache.k, problem.cache.v, batch, tile, split_keys)
    assert error_budget(problem, out).passed


def test_sequences_of_many_rows_are_not_split(one_file):
    spec = quire.AttentionSpec(num_q_heads=64, num_kv_heads=1, head_dim=16, dtype=DTYPE)
    problem = make_problem(spec, [(17, 40), (16, 40)], device=DEVICE)  # 1,088 rows, and 1,024
    batch = one_file.Batch(problem.batch.page_table, problem.batch.seq_lens, problem.batch.cu_seqlens_q, 17, 40)
    out = one_file.attention(problem.q, problem.cache.k, problem.cache.v, batch, {**TILE, "BLOCK_M": 64}, 16)
    assert error_budget(problem, out).passed


def test_a_tensor_that_is_not_contiguous_is_refused(one_file):
    problem = one_file.make_problem([(1, 20)], (4, 2, 16), DTYPE)
    transposed = problem.k_pages.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="must be contiguous"):
        one_file.attention(problem.q, transposed, problem.v_pages, problem.batches[0])


def test_quire_is_compared_on_the_same_pages(one_file):
    problem = one_file.make_problem([(1, 20), (5, 40)], (4, 2, 16), DTYPE, copies=2)
    call = one_file.with_quire(problem)
    for batch in problem.batches:
        ours = one_file.attention(problem.q, problem.k_pages, problem.v_pages, batch)
        torch.testing.assert_close(call(batch), ours, atol=4e-3, rtol=4e-3)
