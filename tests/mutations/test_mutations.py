"""The suite is itself tested: in a copy of the package with one place broken, the tests meant for it must fail."""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import triton

from tests.extended import extended
from tests.mutations.mutants import IN_INTERPRETER, ON_HOPPER, OUTSIDE, SLOW
from tests.mutations.server import PACKAGE, ROOT, Mutant, Server

INTERPRETS = triton.knobs.runtime.interpret


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def default_and_extended(names: Iterable[str]) -> list[Any]:
    """Return the names of mutants for `pytest.mark.parametrize`; those whose judges are slow are extended cases."""
    return [extended(name) if name in SLOW else name for name in names]


def check(mutant: Mutant, server: Server) -> None:
    verdict = server.judge(mutant)
    assert verdict.noticed, f"{mutant.judge} ended with {verdict.status}\n{verdict.output}"


@pytest.mark.parametrize("name", IN_INTERPRETER | OUTSIDE | ON_HOPPER)
def test_every_mutant_has_its_place_and_its_judge(name):
    """Those too that are judged only where an engine, a compiler or a GPU is there."""
    assert set(IN_INTERPRETER | OUTSIDE) >= SLOW
    mutant = (IN_INTERPRETER | OUTSIDE | ON_HOPPER)[name]
    assert (PACKAGE / mutant.file).read_text().count(mutant.right) == 1
    file, _, test = mutant.judge.partition("::")
    assert test == "" or f"def {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()


@pytest.mark.skipif(not INTERPRETS, reason="runs Triton kernels in the interpreter, which TRITON_INTERPRET=1 selects")
@pytest.mark.parametrize("name", default_and_extended(IN_INTERPRETER))
def test_a_broken_kernel_is_noticed(name, server):
    check(IN_INTERPRETER[name], server)


@pytest.mark.skipif(
    INTERPRETS, reason="runs what serves CPU tensors and compiles kernels, which TRITON_INTERPRET=1 prevents"
)
@pytest.mark.parametrize("name", default_and_extended(OUTSIDE))
def test_a_broken_function_is_noticed(name, server):
    mutant = OUTSIDE[name]
    for engine in ("transformers", "vllm"):
        if engine in mutant.judge and find_spec(engine) is None:
            pytest.skip(f"{engine} is not installed")
    check(mutant, server)
