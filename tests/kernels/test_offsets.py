"""Offsets of 2^31 elements and more: strides so large that an int32 product wraps, in sparse memory.

Each case runs in a separate process, since a wrapped offset is a segmentation fault.
`tests/compile/test_int64_offsets.py` checks the same in the compiled kernels, without running them.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

import quire
from quire.kernels import views
from quire.kernels.combine import combine_arguments, combine_kernel

pytestmark = pytest.mark.one_triton

NUM_KEYS, FAR_TOKEN = 70, 1 << 25  # 70 * 2^25 elements; the 64th key lies at 2^31
FAR_HEAD = 1 << 30  # of three heads: the third lies at 2^31
OUT_OF_MEMORY = 77


def spread(tensor: torch.Tensor, dim: int, stride: int) -> torch.Tensor:
    """Copy a tensor to sparse memory, with stride `stride` in dimension `dim`; the other dimensions are contiguous."""
    strides = list(tensor[(slice(None),) * dim + (slice(1),)].contiguous().stride())
    strides[dim] = stride
    extent = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, strides, strict=True))
    memory = torch.empty(extent, dtype=tensor.dtype)
    return memory.as_strided(tensor.shape, strides).copy_(tensor)


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def spec_of(num_q_heads: int = 1, num_kv_heads: int = 1, **others) -> quire.AttentionSpec:
    return quire.AttentionSpec(
        num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, **{"head_dim": 16, "dtype": torch.float16} | others
    )


def num_splits(split: bool) -> int | None:
    """Return how many splits to ask for; PyTorch, which serves CPU tensors outside of the interpreter, has none."""
    return 3 if split and os.environ.get("TRITON_INTERPRET") == "1" else None


def attend(spec, q, k, v, layout="THD", split=False, out=None, scales=()):
    """Attend with one sequence to k and v: tokens without pages, or pages in order."""
    q_len, seq_len = q.shape[0], k.shape[0] if layout == "THD" else NUM_KEYS
    plan = {"max_query_len": q_len, "max_seq_len": seq_len, "num_splits": num_splits(split)}
    if layout == "THD":
        batch = quire.Batch.varlen(i32(0, q_len), i32(0, seq_len))
        return quire.varlen_attention(q, k, v, quire.plan(spec, batch, **plan), out=out)
    table = torch.arange(k.shape[0], dtype=torch.int32)[None]
    plan = quire.plan(spec, quire.Batch(table, i32(seq_len), i32(0, q_len)), **plan)
    return quire.attention(q, quire.PagedKVCache(k, v, layout, *scales), plan, out=out)


def attend_to_tokens_far_apart(split=False):
    torch.manual_seed(0)
    spec, q = spec_of(), torch.randn(1, 1, 16).half()
    k, v = torch.randn(2, NUM_KEYS, 1, 16).half()
    expected = attend(spec, q, k, v, split=split)
    assert torch.equal(attend(spec, q, spread(k, 0, FAR_TOKEN), spread(v, 0, FAR_TOKEN), split=split), expected)


def attend_to_values_far_apart(split=False):
    torch.manual_seed(0)
    spec, q = spec_of(), torch.randn(1, 1, 16).half()
    k, v = torch.randn(2, NUM_KEYS, 1, 16).half()
    expected = attend(spec, q, k, v, split=split)
    assert torch.equal(attend(spec, q, k, spread(v, 0, FAR_TOKEN), split=split), expected)


def attend_to_slots_far_apart(split=False):
    torch.manual_seed(0)
    spec, q = spec_of(), torch.randn(1, 1, 16).half()
    k, v = torch.randn(2, 1, NUM_KEYS, 1, 16).half()
    expected = attend(spec, q, k, v, "NHD", split)
    assert torch.equal(attend(spec, q, spread(k, 1, FAR_TOKEN), spread(v, 1, FAR_TOKEN), "NHD", split), expected)


def attend_to_vectors_far_apart(split=False):
    torch.manual_seed(0)
    spec, q = spec_of(head_dim=32), torch.randn(1, 1, 32).half()
    k, v = torch.randn(1, 1, 4, NUM_KEYS, 8).half(), torch.randn(1, 1, 32, NUM_KEYS).half()
    expected = attend(spec, q, k, v, "HDNX", split)
    assert torch.equal(attend(spec, q, spread(k, 2, FAR_HEAD), v, "HDNX", split), expected)


def attend_to_heads_far_apart(split=False):
    torch.manual_seed(0)
    spec, q = spec_of(3, 3), torch.randn(2, 3, 16).half()
    k, v = torch.randn(2, NUM_KEYS, 3, 16).half()
    expected = attend(spec, q, k, v, split=split)
    assert torch.equal(attend(spec, q, spread(k, 1, FAR_HEAD), spread(v, 1, FAR_HEAD), split=split), expected)


def attend_with_scales_far_apart(split=False):
    torch.manual_seed(0)
    spec, q = spec_of(kv_dtype=torch.int8), torch.randn(1, 1, 16).half()
    k, v = torch.randint(-99, 99, (2, 1, NUM_KEYS, 1, 16), dtype=torch.int8)
    scales = torch.rand(2, 1, NUM_KEYS, 1) / 30
    expected = attend(spec, q, k, v, "NHD", split, scales=scales)
    far = [spread(scale, 1, FAR_TOKEN) for scale in scales]
    assert torch.equal(attend(spec, q, k, v, "NHD", split, scales=far), expected)


def attend_with_query_heads_far_apart(split=False):
    torch.manual_seed(0)
    spec, q = spec_of(3), torch.randn(2, 3, 16).half()
    k, v = torch.randn(2, NUM_KEYS, 1, 16).half()
    expected = attend(spec, q, k, v, split=split)
    assert torch.equal(attend(spec, spread(q, 1, FAR_HEAD), k, v, split=split), expected)
    out = spread(torch.full_like(q, 7.0), 1, FAR_HEAD)
    attend(spec, q, k, v, split=split, out=out)
    assert torch.equal(out, expected)


def attend_with_query_tokens_far_apart(split=False):
    torch.manual_seed(0)
    spec, q = spec_of(), torch.randn(3, 1, 16).half()
    k, v = torch.randn(2, NUM_KEYS, 1, 16).half()
    expected = attend(spec, q, k, v, split=split)
    out = spread(torch.full_like(q, 7.0), 0, FAR_HEAD)
    attend(spec, spread(q, 0, FAR_HEAD), k, v, split=split, out=out)
    assert torch.equal(out, expected)


def combine_states_far_apart():
    torch.manual_seed(0)
    outs, lses = torch.randn(3, 2, 2, 16), torch.randn(3, 2, 2)
    results = []
    for some, some_lses in ((outs, lses), (spread(outs.half(), 0, FAR_HEAD), lses), (outs, spread(lses, 0, FAR_HEAD))):
        out, lse = torch.empty(2, 2, 16), torch.empty(2, 2)
        rest, meta = combine_arguments(some, some_lses, out.stride(), lse)
        combine_kernel[2, 2](some, some_lses, out, None, lse, None, 0, *rest, **meta)
        results.append((out, lse))
    (out, lse), (out_of_half, _), (out_again, lse_again) = results
    assert torch.equal(out, out_again) and torch.equal(lse, lse_again)
    torch.testing.assert_close(out_of_half, out, atol=1e-3, rtol=1e-3)


def write_far_apart():
    torch.manual_seed(0)
    source = torch.randn(3, 2, 16).half()
    slots = torch.tensor([69, 3, 64])
    cache = quire.PagedKVCache(*torch.zeros(2, 1, NUM_KEYS, 2, 16).half())
    quire.write_kv(source, -source, cache, slots)
    far = quire.PagedKVCache(*(spread(torch.zeros(1, NUM_KEYS, 2, 16).half(), 1, FAR_TOKEN) for _ in "kv"))
    quire.write_kv(
        spread(source, 0, FAR_HEAD), spread(-source.transpose(0, 1), 1, FAR_HEAD).transpose(0, 1), far, slots
    )
    assert torch.equal(far.k, cache.k) and torch.equal(far.v, cache.v)


def copy_far_apart():
    torch.manual_seed(0)
    near = quire.PagedKVCache(*torch.randn(2, 2, NUM_KEYS, 1, 16).half())
    k, v = (spread(torch.zeros(NUM_KEYS, 2, 1, 16).half(), 0, FAR_TOKEN).transpose(0, 1) for _ in "kv")
    far = quire.PagedKVCache(k, v)
    quire.copy_pages(near, far, torch.tensor([[0, 1], [1, 0]]))
    assert torch.equal(far.k, near.k.flip(0)) and torch.equal(far.v, near.v.flip(0))
    back = quire.PagedKVCache(*torch.zeros(2, 2, NUM_KEYS, 1, 16).half())
    quire.copy_pages(far, back, torch.tensor([[0, 1], [1, 0]]))
    assert torch.equal(back.k, near.k) and torch.equal(back.v, near.v)


@pytest.mark.parametrize("layout", ["THD", "NHD", "NHD, heads", "HDNX, slots", "HDNX, vectors", "scales"])
def test_the_host_knows_which_offsets_are_wide(layout):
    """An offset within a page is wide from 2^31 elements on."""
    far = 1 << (30 if "heads" in layout or "vectors" in layout else 25)
    scales = ()
    for step, wide in ((far, True), (far // 2, False)):
        memory = torch.empty(1 << 33, dtype=torch.float16, device="meta")
        k = v = memory.as_strided((1, NUM_KEYS, 1, 16), (0, step, 16, 1))
        if layout == "THD":
            k = v = k[0]
        elif "heads" in layout:
            k = v = memory.as_strided((1, NUM_KEYS, 3, 16), (0, 16, step, 1))
        elif layout.startswith("HDNX"):
            slot, vector = (step, 8) if "slots" in layout else (8, step)
            k = memory.as_strided((1, 1, 4, NUM_KEYS, 8), (0, 0, vector, slot, 1))
            v = memory.as_strided((1, 1, 32, NUM_KEYS), (0, 0, NUM_KEYS, 1))
        elif layout == "scales":
            k = v = torch.empty(1, NUM_KEYS, 1, 16, dtype=torch.int8, device="meta")
            scales = [torch.empty(1 << 33, device="meta").as_strided((1, NUM_KEYS, 1), (0, step, 1)) for _ in "kv"]
        cache = quire.PagedKVCache(k, v, layout.split(",")[0].replace("scales", "NHD"), *scales)
        assert cache.has_wide_offsets == wide


CASES = {
    f"{name}{', split' * split}": (case, (split,))
    for name, case in {
        "tokens": attend_to_tokens_far_apart,
        "values": attend_to_values_far_apart,
        "slots": attend_to_slots_far_apart,
        "vectors": attend_to_vectors_far_apart,
        "heads": attend_to_heads_far_apart,
        "scales": attend_with_scales_far_apart,
        "query heads": attend_with_query_heads_far_apart,
        "query tokens": attend_with_query_tokens_far_apart,
    }.items()
    for split in (False, True)
} | {"combine": (combine_states_far_apart, ()), "write": (write_far_apart, ()), "copy": (copy_far_apart, ())}


NEED_TRITON = {case for case in CASES if case == "combine" or case.endswith("split")}  # PyTorch does not split
# Kernels that split address keys and values by the functions of those that do not.
REPEATING = "values, split", "slots, split", "vectors, split", "heads, split"


@pytest.fixture(scope="module")
def run_case() -> Iterator[Callable[[str], tuple[int, str]]]:
    """Return a function that runs a case in a separate process, and returns its exit status and messages."""
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:

        def run_case(case: str) -> tuple[int, str]:
            assert server.stdin is not None and server.stdout is not None
            print(case, file=server.stdin, flush=True)
            status, messages = json.loads(server.stdout.readline())
            return status, messages

        yield run_case


@pytest.mark.slow
@pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs the interpreter's kernels, in sparse memory, which a GPU lacks"
)
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(c, marks=[pytest.mark.triton] * (c in NEED_TRITON) + [pytest.mark.extended] * (c in REPEATING))
        for c in CASES
    ],
)
def test_far_strides_reach_what_they_say(case, run_case):
    status, messages = run_case(case)
    if status == OUT_OF_MEMORY:
        pytest.skip("this machine gives no process 5 to 10 GB of address space")
    assert status == 0, f"exit status {status}\n{messages}"


def main() -> None:
    """Run the cases that come in, each in a child. PyTorch is imported once for all of them."""
    torch.set_num_threads(1)
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as messages:
            child = os.fork()
            if child == 0:
                os.dup2(messages.fileno(), 2)
                os._exit(exit_status(line.strip()))
            _, status = os.waitpid(child, 0)
            messages.seek(0)
            print(json.dumps((os.waitstatus_to_exitcode(status), messages.read()[-2000:])), flush=True)


def exit_status(case: str) -> int:
    """Run a case in this process; return 0 if it passed."""
    function, arguments = CASES[case]
    try:
        function(*arguments)
    except BaseException as error:
        if "can't allocate memory" in str(error):
            return OUT_OF_MEMORY
        traceback.print_exc()
        sys.stderr.flush()
        return 1
    return 0


if __name__ == "__main__":
    main()


@pytest.mark.parametrize(
    ("strides", "unit"),
    [
        ((16 * 120, 120, 120), 8),
        ((16 * 8 * 72, 8 * 72, 72, 32 * 72, 72), 8),
        ((256, 128, 128), 1),  # Triton knows that 16 divides these
        ((48, 16, 0), 1),
        ((60, 120), 4),  # two fp8 numbers as one element
        ((1, 128), 1),
        ((0, 0), 1),
    ],
)
def test_the_compiler_is_told_what_divides_strides_that_16_does_not(strides, unit):
    assert views.stride_unit(*strides) == unit
