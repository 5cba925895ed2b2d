"""Products and sums are fused, or not, as Quire says, whatever Triton's default is."""

import ast
import itertools
import re
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

import quire
import quire_tools
from quire import api, targets
from quire.dispatch.device import COMPILER_OPTIONS
from quire.kernels.launcher import launch
from quire.targets import TARGETS, Launch, compiling
from tests.compile import launches
from tests.extended import each_kind, extended

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

EXECUTABLE = 4  # the flag SHF_EXECINSTR of a section


@triton.jit
def multiply_add_kernel(x, y):
    value = tl.load(x)
    tl.store(y, value * value + value)


def multiply_and_add() -> None:
    launch(multiply_add_kernel, (1,), (torch.zeros(1), torch.zeros(1)), {})


@pytest.mark.parametrize(("target", "code", "fused"), [("sm80", "ptx", "fma.rn"), ("gfx942", "amdgcn", "v_fma")])
def test_a_product_and_a_sum_are_one_fma_also_where_triton_s_default_is_another(target, code, fused, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "0")  # the default from Triton 3.10 on
    texts = []
    monkeypatch.setattr(targets, "inspect", lambda name, kernel, *others: texts.append(kernel.asm[code]))
    with compiling(TARGETS[target]):
        multiply_and_add()
    assert fused in texts[0]


def launch_every_kernel() -> None:
    """Launch each kernel of the package once, on a Hopper GPU."""
    launches.attend("decode, split", 128, "plain")
    for features in ("plain", "float32", "int4"):
        launches.attend("prefill", 128, features)
    launches.attend_to_latents("decode", "bfloat16")
    for features in ("tokens, few heads", "two lists", "blocks"):
        launches.attend_to_chosen(features)
    launches.attend_to_unions()
    launches.choose_keys()
    launches.write(64, "plain")
    for features in ("bfloat16", "records"):
        launches.write_latents(features)
    plan = launches.plan_of("prompt", launches.make_spec(128, launches.FEATURES["plain"]), launches.FEATURES["plain"])
    inputs = launches.make_inputs(plan, launches.FEATURES["plain"]) | launches.new_tokens(plan)
    new = (inputs[name] for name in ("cache", "k", "v", "slot_mapping"))
    api.norm_rope_and_write(inputs["q"], inputs["q"].clone(), *new, **launches.norm_rope_of(plan))


@pytest.mark.hopper
def test_every_kernel_of_sm90_asks_for_fusion_itself(monkeypatch, first_stages):
    """Not by Triton's default. Tests compile with several Tritons, whose defaults differ."""
    asked, run = {}, JITFunction.run

    def record(self, *args, **options):
        asked.setdefault(self.__name__, set()).add(options.get("enable_fp_fusion"))
        return run(self, *args, **options)

    monkeypatch.setattr(JITFunction, "run", record)
    with compiling(TARGETS["sm90"]):
        launch_every_kernel()
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1)
    Launch(spec, 8, 1, 4096, 8, page_size=64).compile(TARGETS["sm90"])
    sources = "".join(file.read_text() for file in (Path(quire.__file__).parent / "kernels").rglob("*.py"))
    assert asked == {name: {True} for name in re.findall(r"(?m)^def (\w+_kernel)\(", sources)}


@pytest.mark.parametrize("layout", ["fp8_ds_mla_584", "NHD"])
def test_scores_of_float32_latents_are_sums_of_a_few_columns_each(layout, first_stages):
    """Triton makes one sum of two where it may, whose error grows with its length."""
    records = {"kv_dtype": torch.float8_e4m3fn, "qk_rope_head_dim": 0} if layout != "NHD" else {}
    spec = quire.AttentionSpec.mla(num_q_heads=3, softmax_scale=0.1, dtype=torch.float32, causal=False, **records)
    lens, lists = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 12, dtype=torch.int32)
    batch = quire.Batch(lists, lens, chosen=quire.ChosenKeys(lists, are_slots=True) if records else None)
    with compiling(TARGETS["sm80"]):
        plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=64)
        q, cache = torch.empty(4, 3, spec.head_dim), quire.PagedKVCache.empty(spec, 4, 16, layout=layout)
        quire.attention(q, cache, plan)
    ir = next(ir for name, _, ir in first_stages if name in ("chosen_latents_kernel", "mla_kernel"))
    starts = re.findall(r"tt\.dot \S+, \S+, (%\w+)", ir)
    assert len(starts) >= 4 and all(start.startswith("%cst") for start in starts)


def test_no_launch_outside_of_the_launcher_leaves_fusion_to_triton():
    """A launch is `kernel[grid](...)`. Those of `quire bench` do not go through the launcher."""
    left = []
    packages = [Path(package.__file__).parent for package in (quire, quire_tools)]
    for file in itertools.chain.from_iterable(package.rglob("*.py") for package in packages):
        for node in ast.walk(ast.parse(file.read_text())):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)):
                continue
            if isinstance(node.func.value, ast.Name) and node.func.value.id.endswith("kernel"):
                words = [keyword.arg or ast.unparse(keyword.value) for keyword in node.keywords]
                if not {"COMPILER_OPTIONS", "enable_fp_fusion"} & {*words}:
                    left.append(f"{file.name}:{node.lineno}")
    assert left == []


def machine_code(cubin: bytes) -> list[bytes]:
    """Return the sections of a cubin, an ELF file, that hold instructions. To disassemble them takes half a second."""
    (table,), (size, count) = struct.unpack_from("<Q", cubin, 0x28), struct.unpack_from("<HH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + i * size) for i in range(count)]
    return [cubin[start : start + length] for _, _, flags, _, start, length in sections if flags & EXECUTABLE]


def instructions(call: Callable[[], None], target: str, fused: bool, monkeypatch: pytest.MonkeyPatch) -> list:
    """Return the code of each kernel that a call launches, without comments, line numbers and debug sections."""
    kernels = []
    with monkeypatch.context() as patch, compiling(TARGETS[target]):
        patch.setitem(COMPILER_OPTIONS, "enable_fp_fusion", fused)
        patch.setattr(targets, "inspect", lambda name, kernel, *others: kernels.append(kernel))
        call()
    if target.startswith("sm"):
        return [machine_code(kernel.asm["cubin"]) for kernel in kernels]
    texts = [kernel.asm["amdgcn"].partition(".debug_abbrev")[0] for kernel in kernels]
    return [re.sub(r"(?m)\s*([;#]|//|\.loc|\.file).*$", "", text) for text in texts]


@pytest.mark.parametrize("target", [each_kind("sm90"), extended("gfx942")])
def test_writes_and_copies_have_the_same_instructions_with_and_without_fusion(target, monkeypatch):
    """So their bits do not depend on it."""
    for features in ("plain", "int8 per token"):
        call = partial(launches.write, 64, features)
        fused, apart = (instructions(call, target, on, monkeypatch) for on in (True, False))
        assert fused == apart and all(fused)
    fused, apart = (instructions(multiply_and_add, target, on, monkeypatch) for on in (True, False))
    assert fused != apart  # what does depend on it is seen
