"""Each thing that Quire uses of Triton beyond its language works with the Triton that is installed.

A new version of Triton that has changed one of them fails here, where the test's name says which.
"""

import ast
import importlib
import inspect
import os
import pkgutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from triton.compiler.errors import CompilationError
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

import quire
import quire.kernels
from quire import triton_internals as internals
from quire.targets import TARGETS

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

SM90 = TARGETS["sm90"]
PUBLIC = ("triton.language", "triton.experimental.gluon")  # modules that kernels are written in
PUBLIC_NAMES = {"jit", "constexpr_function", "language", "experimental", "next_power_of_2", "cdiv", "__version__"}
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=32, element_bitwidth=32, rank=2)


@triton.jit
def add_one(x):
    return x + 1


@triton.jit
def add(x, y, n, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    tl.store(y + offs, add_one(tl.load(x + offs, mask=offs < n)), mask=offs < n)


@triton.jit
def add_another(x, y, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 0, "tensors of different sizes")


@gluon.jit
def count(x, y, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    rows = gl.arange(0, BLOCK, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(y + rows, gl.to_tensor(x.block_type.nbytes) + rows)


class Launcher:
    """Stands for Triton's launcher of a compiled kernel."""

    def __init__(self, src, metadata):
        self.types, self.passed = src.signature, []

    def __call__(self, *passed):
        self.passed.append(passed)


class Driver(internals.StubDriver):
    """A driver whose device has a number, which launches nothing."""

    launcher_cls = Launcher

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 7


@pytest.fixture
def driven(monkeypatch):
    """Let a driver that launches nothing be the active one, and kernels be loaded nowhere."""

    def stand_in(kernel):
        if kernel.function is None:
            kernel.function, kernel._run = 5, Launcher(kernel.src, kernel.metadata)

    monkeypatch.setattr(internals.CompiledKernel, "_init_handles", stand_in)
    driver = Driver("gpu", SM90.gpu)
    with internals.driven_by(driver):
        yield driver


def tensors(*shape):
    return [torch.zeros(shape) for _ in range(2)]


def compiled_add(arguments, kernel=add):
    return internals.compiled_for(kernel, arguments, (1,), {"BLOCK": 16, "num_warps": 1, "enable_fp_fusion": True})


def test_a_driver_that_stands_in_is_the_active_one_until_its_context_ends():
    before = internals.driver._active
    with internals.driven_by(internals.StubDriver("sm90", SM90.gpu)):
        assert internals.current_target() == SM90.gpu and internals.current_device() == "sm90"
    assert internals.driver._active is before


def test_the_backend_of_each_target_says_which_dtypes_it_has():
    found = {
        name: internals.backend_options(target.gpu, {"enable_fp_fusion": True}) for name, target in TARGETS.items()
    }
    assert "fp8e4nv" in found["sm90"].supported_fp8_dtypes and "fp8e4nv" not in found["sm80"].supported_fp8_dtypes
    assert "tf32" in found["sm80"].allowed_dot_input_precisions
    assert hasattr(found["sm90"], "launch_pdl") and not hasattr(found["gfx942"], "launch_pdl")
    assert all(options.enable_fp_fusion for options in found.values())


def test_kernels_are_lowered_for_another_target_than_the_driver_s_in_a_context_alone(tmp_path, driven, monkeypatch):
    """Triton keeps them under another key, and assembles them for the driver's GPU."""
    before = os.environ.get("TRITON_OVERRIDE_ARCH")
    with internals.caching_in(tmp_path):
        own = compiled_add((*tensors(16), 7), fresh(add))
        with internals.lowering_for(TARGETS["sm86"].gpu):
            older = compiled_add((*tensors(16), 7), fresh(add))
    assert os.environ.get("TRITON_OVERRIDE_ARCH") == before
    assert [k.metadata.arch for k in (own, older)] == [
        internals.arch_of(TARGETS[name].gpu) for name in ("sm90", "sm86")
    ]
    assert own.hash != older.hash and own.metadata.target == older.metadata.target == SM90.gpu
    assert all(".target sm_90a" in kernel.asm["ptx"] for kernel in (own, older))
    assert internals.arch_of(TARGETS["gfx942"].gpu) == "gfx942"


def test_the_backend_says_the_dtypes_of_a_target_whatever_triton_is_told_to_lower_for(monkeypatch):
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    assert "fp8e4nv" in internals.backend_options(SM90.gpu, {}).supported_fp8_dtypes
    assert "fp8e4nv" not in internals.backend_options(TARGETS["sm86"].gpu, {}).supported_fp8_dtypes


def test_the_memory_of_a_gpu_is_as_fast_as_its_driver_says(driven):
    facts = {"mem_clock_rate": 2_000_000, "mem_bus_width": 4096}  # kHz, bits
    driven.utils = SimpleNamespace(get_device_properties=lambda index: facts)
    assert internals.memory_gbps(0) == 2048


def test_the_clock_of_a_gpu_is_the_fastest_one_that_its_driver_names(driven):
    driven.utils = SimpleNamespace(get_device_properties=lambda index: {"sm_clock_rate": 1_980_000})  # kHz
    assert internals.clock_mhz(0) == 1980


def test_it_is_known_whether_the_interpreter_runs_kernels():
    assert internals.interprets() is False


def test_the_folder_of_compiled_kernels_is_the_one_that_is_asked_for(tmp_path, monkeypatch, driven):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "environment"))
    assert internals.cache_folder() == tmp_path / "environment"
    with internals.caching_in(tmp_path / "asked for"):
        compiled_add((*tensors(16), 7), fresh(add))
        assert internals.cache_folder() == tmp_path / "asked for"
    assert internals.cache_folder() == tmp_path / "environment"
    assert [*tmp_path.glob("asked for/*/*.cubin")] and not (tmp_path / "environment").exists()


def test_a_kernel_that_is_put_into_the_cache_is_not_compiled(tmp_path, monkeypatch, driven):
    """Of its files, code and metadata are enough. The facts by which it is found are the same as before."""
    hits = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **more: hits.append(cache_hit))
    with internals.caching_in(tmp_path / "compiled"):
        before = compiled_add((*tensors(16), 7), fresh(add))
    [code] = tmp_path.glob("compiled/*/add.cubin")
    key, files = code.parent.name, {name: (code.parent / name).read_bytes() for name in ("add.cubin", "add.json")}
    with internals.caching_in(tmp_path / "put"):
        assert not internals.is_cached(key, "add.cubin")
        internals.put_into_cache(key, files)
        assert internals.is_cached(key, "add.cubin") and not internals.is_cached(key, "add.ptx")
        assert Path(internals.cache_manager(key).get_file("add.json")).read_bytes() == files["add.json"]
        assert compiled_add((*tensors(16), 7), fresh(add)).asm["cubin"] == before.asm["cubin"]
        internals.put_into_cache(key, {"launcher.so": b"library"})
        assert internals.is_cached(key, "launcher.so") and not internals.is_cached(key, "other.so")
    assert hits == [False, True]
    facts = internals.compiler_facts(SM90.gpu, {"enable_fp_fusion": True})
    assert facts["Triton"] == triton.__version__ and "ptxas" in facts["compiler"]
    assert facts != internals.compiler_facts(TARGETS["sm80"].gpu, {"enable_fp_fusion": True})
    monkeypatch.setenv("DISABLE_LLVM_OPT", "1")
    assert facts["environment"] != internals.compiler_facts(SM90.gpu, {})["environment"]


def fresh(kernel):
    """Return a jit function that has compiled nothing."""
    return triton.jit(kernel.fn)


def test_who_listens_is_told_before_a_kernel_is_loaded():
    names = []
    hook = triton.knobs.runtime.kernel_load_start_hook
    with internals.before_loading(names.append):
        hook(None, None, "add", {}, "hash")
    hook(None, None, "later", {}, "hash")
    assert names == ["add"]
    source = inspect.getsource(internals.CompiledKernel._init_handles)
    assert "kernel_load_start_hook(self.module, self.function, self.name, self.metadata_group, self.hash)" in source


def test_it_is_known_whether_a_kernel_was_compiled_or_in_the_cache(tmp_path, driven):
    found, of_others = [], []
    triton.knobs.compilation.listener = lambda **facts: of_others.append(facts["cache_hit"])
    try:
        with internals.caching_in(tmp_path):
            for _ in range(2):
                kernel = fresh(add)
                with internals.told_of_compilations(kernel, found.append):
                    compiled_add((*tensors(16), 7), kernel)
                    compiled_add((*tensors(16), 7), kernel)  # which is loaded
        with internals.told_of_compilations(add, found.append):
            compiled_add((*tensors(16), 7), fresh(add))
    finally:
        triton.knobs.compilation.listener = None
    assert found == [False, True] and of_others[:2] == found and len(of_others) == 3


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_on_launches_are_seen(hook, monkeypatch):
    assert not internals.is_observed()
    hooks = getattr(triton.knobs.runtime, hook)
    hooks.add(print)
    try:
        assert internals.is_observed()
    finally:
        hooks.remove(print)
    assert not internals.is_observed()
    monkeypatch.setattr(triton.knobs.runtime, hook, print)  # a function in place of a chain
    assert internals.is_observed()


def test_whether_proton_records_is_known(monkeypatch):
    from triton.profiler.flags import flags

    assert not internals.proton_records()
    monkeypatch.setattr(flags, "profiling_on", True)
    assert internals.proton_records()


def test_a_kernel_is_compiled_for_its_arguments_and_says_what_it_takes(driven):
    kernel = compiled_add((*tensors(16), 7))
    assert internals.parameters(add) == ["x", "y", "n", "BLOCK"]
    assert kernel.src.signature == {"x": "*fp32", "y": "*fp32", "n": "i32", "BLOCK": "constexpr"}
    assert kernel.metadata.num_warps == 1 and kernel.metadata.shared == 0 and kernel.asm["cubin"]
    assert internals.cuobjdump().is_file()


@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_a_tensor_for_which_another_stands_may_be_at_any_address(target, driven):
    driven.gpu = TARGETS[target].gpu
    x, y = tensors(16)
    aligned = compiled_add((x, y, 7)).asm["ttir"].splitlines()
    unaligned = compiled_add((internals.Unaligned(x), y, 7)).asm["ttir"].splitlines()
    assert [sum("tt.divisibility" in line for line in text) for text in (aligned, unaligned)] == [1, 1]
    assert [sum(line.count("tt.divisibility") for line in text) for text in (aligned, unaligned)] == [2, 1]


def test_callees_are_hashed_before_the_function_that_calls_them():
    callee = triton.jit(add_one.fn)
    scope = {**add.fn.__globals__, "add_one": callee}
    caller = triton.jit(add.fn)
    for function in (callee, caller):
        assert function.hash is None
    function = type(add.fn)(add.fn.__code__, scope, "add")
    function.__module__, function.__qualname__ = add.fn.__module__, add.fn.__qualname__
    calling = triton.jit(function)
    internals.hash_callees(calling)
    assert callee.hash and calling.hash and calling.cache_key == calling.cache_key


def test_kernels_are_compiled_in_an_executor_and_missing_ones_counted(driven):
    with ThreadPoolExecutor(1) as executor, internals.compiling_in(executor) as num_missing:
        coming = compiled_add((*tensors(16), 7), fresh(add))
        assert num_missing(60.0) == 0
    assert coming.result().asm["cubin"]


def test_after_a_kernel_that_does_not_compile_others_do_as_before(driven):
    with (
        pytest.raises(CompilationError, match="tensors of different"),
        ThreadPoolExecutor(1) as executor,
        internals.compiling_in(executor),
    ):
        compiled_add((*tensors(16), 7), add_another)
    assert compiled_add((*tensors(16), 7), fresh(add)).asm["cubin"]


def test_a_second_launch_passes_what_the_binder_s_does(driven):
    x, y = tensors(16)
    kernel = compiled_add((x, y, 7))
    internals.launch_bound(kernel, (3, 2, 1), (x, y, 7, 16))
    run = internals.launcher_of(kernel)
    assert internals.launch_again(kernel, run, (3, 2, 1), 0, (x, y, 7, 16))
    (by_binder, again) = run.passed[-2:]
    assert again[:6] == by_binder[:6] == (3, 2, 1, 7, 5, kernel.packed_metadata) and again[6:9] == (None, None, None)
    assert len(by_binder) == len(again) and again[9:] == by_binder[9:] == (x, y, 7, 16)


def test_a_second_launch_is_refused_on_another_device_and_with_hooks(driven, monkeypatch):
    x, y = tensors(16)
    kernel = compiled_add((x, y, 7))
    run = internals.launcher_of(kernel)
    before = len(run.passed)
    assert not internals.launch_again(kernel, run, (1, 1, 1), 1, (x, y, 7, 16))
    monkeypatch.setattr(internals, "is_observed", lambda: True)
    assert not internals.launch_again(kernel, run, (1, 1, 1), 0, (x, y, 7, 16))
    assert len(run.passed) == before


def test_triton_s_own_launcher_takes_as_many_arguments_before_those_of_the_kernel():
    from triton.backends.nvidia.driver import CudaLauncher

    names = [*inspect.signature(CudaLauncher.__call__).parameters]
    assert names[:6] == ["self", "gridX", "gridY", "gridZ", "stream", "function"] and names[-1] == "args"
    assert names[6:-1] in ([], ["kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook"])


def described(rows=64):
    x = torch.zeros(rows, 16)
    return TensorDescriptor(x, [rows, 16], [16, 1], [8, 8], LAYOUT)


def compiled_count(driven):
    options = {"BLOCK": 8, "LAYOUT": LAYOUT, "num_warps": 4, "enable_fp_fusion": True}
    return internals.compiled_for(fresh_gluon(count), (described(), torch.zeros(8, dtype=torch.int32)), (1,), options)


def fresh_gluon(kernel):
    """Return a Gluon function that has compiled nothing, so that a test may change what it compiles."""
    return gluon.jit(kernel.fn)


def test_a_tensor_descriptor_becomes_a_tensor_map_a_shape_and_strides(driven):
    encoded = []
    fill = lambda *facts: encoded.append(facts) or "tensor map"  # noqa: E731
    driven.utils = SimpleNamespace(fill_tma_descriptor=fill, fill_tma_descriptor_tiled=fill)
    kernel = compiled_count(driven)
    (of_one,) = internals.descriptor_formats(kernel)
    assert of_one["block_size"] == [8, 8]
    descriptor = described(rows=32)
    assert internals.encode(descriptor, of_one) == ("tensor map", 32, 16, 16, 1)
    assert encoded[0][0] == descriptor.base.data_ptr() and [8, 8] in map(listed, encoded[0])


def listed(value):
    return [*value] if isinstance(value, list | tuple) else value


def test_a_kernel_s_boxes_can_be_others_than_it_was_compiled_for(driven):
    kernel = compiled_count(driven)
    internals.set_boxes(kernel, (None,))
    assert [of_one["block_size"] for of_one in internals.descriptor_formats(kernel)] == [[8, 8]]
    internals.set_boxes(kernel, ((6, 8),))
    assert [of_one["block_size"] for of_one in internals.descriptor_formats(kernel)] == [[6, 8]]


def test_a_launcher_of_tensor_maps_takes_them_in_place_of_descriptors(driven):
    run = internals.launcher_of_tensor_maps(compiled_count(driven))
    assert [*run.types.values()] == ["nvTmaDesc", "i32", "i32", "i64", "i64", "*i32", "constexpr", "constexpr"]


def test_a_kernel_without_descriptors_has_no_formats(driven):
    assert internals.descriptor_formats(compiled_add((*tensors(16), 7))) == ()


def test_methods_that_kernels_call_are_those_of_jit():
    class Pair:
        def __init__(self): ...

        @triton.jit
        def total(self): ...

    assert internals.jit_methods(Pair) == ["total"]


def test_no_other_module_uses_what_triton_does_not_promise():
    found, root = [], Path(quire.__file__).parent
    for path in root.rglob("*.py"):
        if path.name == "triton_internals.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if alias.name.startswith("triton.")]
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "triton":
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "triton":
                names = [] if node.attr in PUBLIC_NAMES else [f"triton.{node.attr}"]
            found += [
                f"{path.relative_to(root)}: {name}"
                for name in names
                if not name.startswith(PUBLIC) or any(part.startswith("_") for part in name.split("."))
            ]
    assert not found, f"what Triton does not promise must be in triton_internals.py alone, got {found}"


def test_constants_of_one_name_have_one_value():
    """Triton hashes those that a kernel and its callees use by name, and those of one name in the order of addresses.

    With two values, a kernel would have another key in another process, which would compile it again.
    """
    values = {}
    for found in pkgutil.walk_packages(quire.kernels.__path__, "quire.kernels."):
        for name, value in vars(importlib.import_module(found.name)).items():
            if isinstance(value, tl.constexpr):
                values.setdefault(name, {}).setdefault(repr(value.value), found.name)
    assert len(values) > 50
    assert {name: list(where) for name, where in values.items() if len(where) > 1} == {}


def test_each_function_has_a_test():
    text = Path(os.path.abspath(__file__)).read_text()
    names = [name for name, f in vars(internals).items() if getattr(f, "__module__", "") == internals.__name__]
    assert len(names) > 15 and not [name for name in names if f"internals.{name}" not in text]


def test_threads_that_compile_parse_in_turn(monkeypatch):
    """Python 3.11 may end one of two parsers that work at once with SystemError."""
    at_once, most = [0], [0]

    def parse(function):
        at_once[0] += 1
        most[0] = max(most[0], at_once[0])
        time.sleep(0.02)
        at_once[0] -= 1

    monkeypatch.setattr(internals.JITFunction, "parse", parse)
    with internals.parsing_in_turn(), ThreadPoolExecutor(4) as threads:
        for _ in range(4):
            threads.submit(lambda: internals.JITFunction.parse(None))
    assert most == [1] and internals.JITFunction.parse is parse
    first, second = internals.parsing_in_turn(), internals.parsing_in_turn()
    for step in (first.__enter__, second.__enter__, lambda: first.__exit__(None, None, None)):
        step()
        assert internals.JITFunction.parse is not parse
    second.__exit__(None, None, None)  # of two warm-ups, the first one to begin may be the first one to end
    assert internals.JITFunction.parse is parse
