"""Fixtures of the compile suite."""

import gc
from collections.abc import Iterator

import pytest
from triton._C.libtriton import ir
from triton.runtime.jit import JITFunction

from quire import targets
from tests.compile import launches


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is compiled for Hopper GPUs, where the case says so. Tests of their kernels alone say it themselves."""
    for item in items:
        if getattr(item, "callspec", None) and item.callspec.params.get("target") == "sm90":
            item.add_marker("hopper")


@pytest.fixture(autouse=True)
def no_python_while_garbage_is_collected() -> Iterator[None]:
    """Remove Hypothesis's callback, at which Python may change threads while one makes a syntax tree.

    Python 3.11 counts the depth of all trees together, and takes that for an error.
    """
    callbacks = [*gc.callbacks]
    gc.callbacks.clear()
    yield
    gc.callbacks.extend(callbacks)


@pytest.fixture
def first_stages(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict, str]]:
    """Collect (name, constexprs and options, IR) of what is compiled in the test, up to Triton's first IR.

    The stages after it would take most of the time. Nothing is written to Triton's cache.
    """
    collected = []

    def first_stage(self, key, signature, device, constexprs, options, attrs, warmup):
        _, _, target, backend, _ = self.device_caches[device]
        context, stages = ir.context(), {}
        ir.load_dialects(context)
        backend.load_dialects(context)
        functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
        source = self.ASTSource(self, signature, constexprs, attrs)
        module = source.make_ir(target, options, functions, modules, context)
        backend.add_stages(stages, options, source.language)
        return str(next(iter(stages.values()))(module, {}))

    def collect(name, found, target, options):
        if not isinstance(found, str):  # an earlier test of this process compiled the same launch whole
            found = found.asm.get("ttir") or found.asm["ttgir"]
        collected.append((name, options, found))

    monkeypatch.setattr(JITFunction, "_do_compile", first_stage)
    monkeypatch.setattr(targets, "inspect", collect)
    return collected


@pytest.fixture
def assembled(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """Collect the code of each kernel that is compiled in the test, by stage, but for those that find schedules."""
    collected, inspect = [], targets.inspect

    def collect(name, kernel, *others):
        if name not in launches.SCHEDULES:
            collected.append(kernel.asm)
        return inspect(name, kernel, *others)

    monkeypatch.setattr(targets, "inspect", collect)
    return collected
