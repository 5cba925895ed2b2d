"""Fixtures and marks of tests that run on a GPU, in Triton's interpreter (TRITON_INTERPRET=1), or through PyTorch."""

import atexit
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton

import quire
from quire.dispatch.constants import forget
from quire.dispatch.device import is_served_by_torch
from quire.kernels import choose, scratch
from quire.testing import Problem, error_budget, make_problem

GPU = torch.cuda.is_available()
TRITON_RUNS = not is_served_by_torch(torch.device("cuda" if GPU else "cpu"))
MARKS = {
    "triton": (TRITON_RUNS, "Triton has no driver for CPUs: this needs a GPU or TRITON_INTERPRET=1"),
    "pytorch": (
        not TRITON_RUNS,
        "Triton serves this device; PyTorch serves CPU tensors outside of the interpreter",
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks, and collect no garbage among what is imported: it took a fifth of the time to import it."""
    gc.disable()
    # Tests have homes of their own.
    for name in ("QUIRE_TREES", "XDG_CONFIG_HOME", "QUIRE_KERNELS", "QUIRE_LOG", "QUIRE_NVTX"):
        os.environ.pop(name, None)
    for mark, (_, reason) in MARKS.items():
        config.addinivalue_line("markers", f"{mark}: skipped elsewhere, since {reason}")
    if triton.knobs.runtime.interpret:
        from tests.interpreter import hasten

        hasten()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what does not run here."""
    for item in items:
        for mark, (runs, reason) in MARKS.items():
            if not runs and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    """Collect garbage from here on, but not among what is imported by now."""
    gc.freeze()
    gc.enable()
    atexit.register(gc.unfreeze)  # otherwise Triton's bindings report what they find alive at the end
    # vLLM undoes it at the end of each engine, and then collects garbage three times.
    gc.freeze = gc.unfreeze = lambda: None


@pytest.fixture
def rows_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the interpreter's matrix product, NumPy's, which may round a row by its place. Tensor cores do not."""
    if not GPU:
        monkeypatch.setattr(np, "matmul", lambda a, b, dtype: np.einsum("ik,kj->ij", a.astype(dtype), b.astype(dtype)))


@pytest.fixture(scope="session", autouse=True)
def poisoned_scratch() -> Iterator[None]:
    """Fill new scratch with NaN, but for its counters: a state that is read and was never written is noticed."""
    allocate = scratch.allocate

    def poisoned(size: scratch.ScratchSize, device: torch.device) -> torch.Tensor:
        workspace = allocate(size, device)
        workspace[size.counters :].fill_(255)
        return workspace

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scratch, "allocate", poisoned)
        yield


@pytest.fixture(scope="session")
def device() -> str:
    """Where tests compute: on the GPU if there is one."""
    return "cuda" if GPU else "cpu"


@pytest.fixture(scope="session")
def options() -> Callable[..., dict[str, Any]]:
    """Return a function that keeps options of `quire.plan` where Triton runs; PyTorch has none."""

    def options(**chosen: Any) -> dict[str, Any]:
        return chosen if TRITON_RUNS else {}

    return options


@pytest.fixture(scope="session")
def solve(device: str, options: Callable[..., dict[str, Any]]) -> Callable[..., tuple[Problem, quire.State]]:
    """Return a function that makes a problem, attends, and returns the problem and the state."""

    def solve(
        spec: quire.AttentionSpec,
        lens: Sequence[tuple[int, int]],
        num_splits: int | None = None,
        out_scale: float | None = None,
        **problem: Any,
    ) -> tuple[Problem, quire.State]:
        p = make_problem(spec, lens, device=device, **problem)
        scale = None if out_scale is None else torch.tensor([out_scale], device=device)
        plan = quire.plan(spec, p.batch, **p.bounds, **options(num_splits=num_splits))
        state = quire.attention(p.q, p.cache, plan, **p.tables, out_scale=scale, return_lse=True)
        return replace(p, out_scale=scale), state

    return solve


@pytest.fixture(scope="session")
def assert_within_budget() -> Callable[[Problem, torch.Tensor | quire.State], None]:
    """Return a function that fails unless a result, out or a state, is within its problem's error budget."""

    def assert_within_budget(problem: Problem, result: torch.Tensor | quire.State) -> None:
        verdict = error_budget(problem, result)
        assert verdict.passed, verdict

    return assert_within_budget


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that makes plans take the launch with the least key, and of those the first by `least`."""

    def order(key: Callable[[Any], Any], least: Callable[..., Any]) -> None:
        monkeypatch.setattr(choose, "least", lambda *found: sorted(least(*found), key=key))
        forget()

    yield order
    forget()


@pytest.fixture
def take(order: Callable[..., None]) -> Callable[..., None]:
    """Return a function that makes plans take the variant with most of some words in its name."""
    least = choose.least
    return lambda *words: order(lambda launch: len(set(words) - set(choose.variant_of(launch).split())), least)
