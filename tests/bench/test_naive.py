"""The naive kernel is slow but right: compared with the oracle, and compiled for both vendors."""

import pytest
import torch
import triton

import quire
from quire.dispatch.device import COMPILER_OPTIONS
from quire.targets import TARGETS, compiling, inspect
from quire.testing import make_problem
from quire_tools.bench.naive import naive_attention, naive_kernel, owners


@pytest.mark.triton
@pytest.mark.parametrize("page_size", [1, 16, 24])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_it_agrees_with_the_oracle(page_size, dtype, device, assert_within_budget):
    spec = quire.AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=24, dtype=dtype)
    problem = make_problem(spec, ((1, 50), (3, 3), (7, 40), (2, 17), (1, 33)), page_size=page_size, device=device)
    seq_of, pos_of = owners(list(problem.query_lens), list(problem.seq_lens), device)
    out = torch.full_like(problem.q, float("nan"))
    naive_attention(problem.q, problem.cache, problem.batch.page_table, seq_of, pos_of, spec.softmax_scale, out)
    assert_within_budget(problem, out)


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="the interpreter compiles nothing")
@pytest.mark.parametrize("target", ["sm80", "sm90", "gfx942"])
def test_it_compiles(target):
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    cache = quire.PagedKVCache.empty(spec, 2, 16)
    q = torch.empty(4, 32, 128, dtype=torch.bfloat16)
    table, index = torch.zeros(1, 2, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    tensors = q, cache.k, cache.v, torch.empty_like(q), table, index, index
    constants = {"NUM_Q_HEADS": 32, "GROUP": 4, "HEAD_DIM": 128, "BLOCK_D": 128, "PAGE_SIZE": 16, "BLOCK_N": 32}
    constants |= COMPILER_OPTIONS
    with compiling(TARGETS[target]):
        compiled = naive_kernel.warmup(*tensors, 0.1, table.stride(0), grid=(4, 32), **constants)
    kernel = inspect("naive_kernel", compiled, TARGETS[target], {})
    assert kernel.spills == 0
    assert kernel.registers > 0
