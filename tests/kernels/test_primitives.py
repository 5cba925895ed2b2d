"""The steps of attention, each by itself."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from quire.kernels.primitives import find_pages


@triton.jit
def pages_kernel(out_ptr, row_ptr, pos, kv_start, kv_stop, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.arange(0, BLOCK_N)
    page = find_pages(row_ptr, pos, kv_start, kv_stop, PAGE_SIZE, BLOCK_N)
    tl.store(out_ptr + offs_n, page + 0 * offs_n)


@pytest.mark.triton
@pytest.mark.parametrize(("page_size", "kv_start", "kv_stop"), [(4, 21, 30), (3, 17, 64), (32, 20, 40), (16, 0, 16)])
@pytest.mark.parametrize("pos", [16, 32])
def test_pages_are_read_only_where_there_are_keys(pos, page_size, kv_start, kv_stop, device):
    """The table holds junk outside of the visible keys; a tile within one page has one number for all its keys."""
    row = torch.full((24,), 1 << 30, dtype=torch.int32)
    owned = slice(kv_start // page_size, -(-kv_stop // page_size))
    row[owned] = 100 + torch.arange(24, dtype=torch.int32)[owned]
    kv_pos = pos + torch.arange(16)
    if page_size % 16 == 0:
        expected = row[kv_pos // page_size] if pos < kv_stop else torch.zeros_like(kv_pos)
    else:
        inside = (kv_pos >= kv_start) & (kv_pos < kv_stop)
        expected = torch.where(inside, row[kv_pos // page_size], 0)
    out = torch.zeros(16, dtype=torch.int32, device=device)
    pages_kernel[1,](out, row.to(device), pos, kv_start, kv_stop, page_size, 16)
    assert out.tolist() == expected.tolist()


GUARDED = """
import ctypes, itertools, mmap, torch, quire
from quire.dispatch.config import KernelConfig
from quire.testing import make_problem
from tests.interpreter import hasten

hasten()
libc, kept = ctypes.CDLL(None, use_errno=True), []

def at_the_end(tensor):
    "Return a copy whose last byte lies before memory that may not be read."
    num_bytes = tensor.numel() * tensor.element_size()
    size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    kept.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert libc.mprotect(ctypes.c_void_p(start + size), mmap.PAGESIZE, 0) == 0
    offset = size - num_bytes
    held = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset)
    return held.view(tensor.shape).copy_(tensor)

heads = dict(num_q_heads=6, num_kv_heads=2, head_dim=24)
spec = quire.AttentionSpec(**heads, dtype=torch.float32, sliding_window=40, sinks=True)
for page_size, full_tile_loop, num_splits in itertools.product((8, 16), (False, True), (1, 3)):
    print(f"{page_size = }, {full_tile_loop = }, {num_splits = }", flush=True)
    p = make_problem(spec, ((3, 96), (9, 64)), page_size=page_size)
    b, table = p.batch, p.batch.page_table[:, : -(-96 // page_size)].contiguous()
    batch = quire.Batch(*(at_the_end(t) for t in (table, b.seq_lens, b.cu_seqlens_q)))
    cache = quire.PagedKVCache(at_the_end(p.cache.k), at_the_end(p.cache.v))
    config = KernelConfig(16, 16, 4, 2, full_tile_loop, 1, 32, 32)
    plan = quire.plan(spec, batch, **p.bounds, config=config, num_splits=num_splits)
    out = quire.State(at_the_end(torch.zeros_like(p.q)), at_the_end(torch.zeros(12, 6)))
    inputs = dict(sinks=at_the_end(p.sinks), out=out)
    quire.attention(at_the_end(p.q), cache, plan, **inputs)
    assert plan.appender(cache) is not None
    k, v, slots = (at_the_end(x) for x in (torch.ones(12, 2, 24), torch.ones(12, 2, 24), torch.full((12,), -1)))
    quire.attention(at_the_end(p.q), cache, plan, **inputs, k=k, v=v, slot_mapping=slots)
print("states", flush=True)
outs, lses = at_the_end(torch.zeros(3, 5, 6, 24)), at_the_end(torch.zeros(3, 5, 6))
quire.merge_states([quire.State(out, lse) for out, lse in zip(outs, lses)])
"""


@pytest.mark.slow
@pytest.mark.triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="guards memory of the CPU, where the interpreter runs kernels")
@pytest.mark.skipif(sys.platform != "linux", reason="guards memory with mprotect")
def test_nothing_past_the_end_of_a_tensor_is_read():
    """Each tensor ends where memory that may not be read begins: a load past its end is a segmentation fault.

    One process takes all cases: it imports PyTorch and Triton, which costs more than a case. It names the one it takes.
    """
    root = Path(__file__).parent.parent.parent
    done = subprocess.run(
        [sys.executable, "-c", GUARDED], capture_output=True, text=True, env=dict(os.environ), cwd=root
    )
    cases = done.stdout.splitlines()
    assert done.returncode == 0, f"exit status {done.returncode} at {cases[-1:]}\n{done.stderr[-2000:]}"
    assert len(cases) == 9
