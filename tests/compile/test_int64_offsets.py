"""No address is an int32 product: in the compiled kernels, a run-time stride is only ever multiplied as an int64.

A stride is any integer argument of a kernel that is not a count or a window. The test reads the kernels' IR as text,
before it has the layouts of a GPU. Offsets within a page are an exception in attention: `slot * k_slot` and similar
products are int32 if the cache says that they stay below 2^31 (`WIDE_OFFSETS` is False).
"""

import re
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

import quire
from quire.kernels.launcher import launch
from quire.targets import TARGETS, compiling
from tests.compile import launches
from tests.pairs import in_turn

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

TARGET = replace(TARGETS["sm80"], name="sm80, its first stage")  # the name by which Triton keeps compiled kernels
NO_STRIDES = {"num_seqs", "num_states", "num_partitions", "window_left", "window_right"}
WITHIN_A_PAGE = {
    f"kv.{name}" for name in ("k_slot", "v_slot", "scale_slot", "k_head", "v_head", "scale_head", "k_vec", "v_vec")
}
ARGUMENT = re.compile(r'(%[\w.]+): i32 (?:\{[^}]*\} )?loc\("([\w.]+)"')
SHAPED = re.compile(r"(%[\w.]+) = tt\.(?:splat|broadcast|expand_dims) (%[\w.]+)")
PRODUCT = re.compile(r"= arith\.muli (%[\w.]+), (%[\w.]+)(?: overflow<\w+>)? : (?:i32|tensor<[\dx]+xi32[,>])")


def int32_products(ir: str) -> list[str]:
    """Return the names of the strides that a kernel multiplies as int32."""
    signature = next(line for line in ir.splitlines() if "tt.func public" in line)
    strides = {value: name for value, name in ARGUMENT.findall(signature) if name not in NO_STRIDES}
    found = []
    for line in ir.splitlines():
        if shaped := SHAPED.search(line):
            value, source = shaped.groups()
            if source in strides:
                strides[value] = strides[source]
        elif product := PRODUCT.search(line):
            found += [strides[value] for value in product.groups() if value in strides]
    return found


def wrong(compiled: list) -> list[str]:
    """Return what is wrong in some compiled kernels."""
    found = []
    for name, options, text in compiled:
        served = WITHIN_A_PAGE if options.get("WIDE_OFFSETS") is False else set()
        found += [f"{name}: {stride} is multiplied as int32" for stride in int32_products(text) if stride not in served]
    return found


@pytest.mark.parametrize(
    *in_turn(
        features=["many, with lse", "int8 per token", "vLLM's original", "e4m3", "other value width"],
        wide=[False, True],
    )
)
def test_strides_are_multiplied_as_int64(features, wide, first_stages, monkeypatch):
    monkeypatch.setattr(quire.PagedKVCache, "has_wide_offsets", wide)
    with compiling(TARGET):
        launches.attend("prompt", 16, features)
        launches.attend("decode, split", 16, features)
        if not wide:
            launches.write(16, features)
            launches.merge(16, features)
    kernels = {"schedule_kernel", "portable_kernel"} | (
        set() if wide else {"write_kernel", "copy_kernel", "combine_kernel"}
    )
    assert {name for name, _, _ in first_stages} == kernels
    assert not wrong(first_stages)


@pytest.mark.parametrize("features", ["bfloat16", "records"])
def test_strides_of_latents_are_multiplied_as_int64(features, first_stages):
    with compiling(TARGET):
        launches.write_latents(features)
    assert first_stages[0][0] == ("write_record_kernel" if features == "records" else "write_latent_kernel")
    assert not wrong(first_stages)


@triton.jit
def narrow_kernel(ptr, stride_row):
    offs = tl.program_id(0) * stride_row
    tl.store(ptr + offs, 1.0)


@triton.jit
def narrow_tensor_kernel(ptr, stride_row):
    rows = tl.arange(0, 16)
    tl.store(ptr + (rows * stride_row).to(tl.int64), 1.0)  # too late


@triton.jit
def wide_kernel(ptr, stride_row):
    rows = tl.program_id(0).to(tl.int64) + tl.arange(0, 16)
    tl.store(ptr + rows * stride_row, 1.0)


@pytest.mark.parametrize(
    ("kernel", "narrow"),
    [(narrow_kernel, ["stride_row"]), (narrow_tensor_kernel, ["stride_row"]), (wide_kernel, [])],
)
def test_the_check_sees_an_int32_product(kernel, narrow, first_stages):
    with compiling(TARGET):
        launch(kernel, (1,), (torch.zeros(16), 48), {})
    assert int32_products(first_stages[0][2]) == narrow
