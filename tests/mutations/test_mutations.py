"""The suite is itself tested: in a copy of the package with one place broken, the tests meant for it must fail."""

import ast
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
import triton

from tests.mutations.generated import GROUPS, Places, files_of, floors, mutants_of
from tests.mutations.mutants import IN_INTERPRETER, ON_HOPPER, OUTSIDE
from tests.mutations.server import PACKAGE, ROOT, Mutant, Server

INTERPRETS = triton.knobs.runtime.interpret


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


def default_and_extended(mutants: dict[str, Mutant]) -> list[Any]:
    """Return the names of mutants for `pytest.mark.parametrize`. By default, each file of judges has one: it can fail.

    The others are extended cases. An engine takes seconds to import: its mutants are for the matrix of engines.
    """
    first = {mutant.judge.partition("::")[0]: name for name, mutant in reversed(mutants.items())}

    def marks(name: str, file: str) -> list[pytest.MarkDecorator]:
        if file.startswith("engines/test_vllm"):
            return [pytest.mark.slow]
        return [] if first[file] == name else [pytest.mark.extended]

    judges = {name: mutant.judge.partition("::")[0] for name, mutant in mutants.items()}
    return [pytest.param(name, marks=marks(name, file)) for name, file in judges.items()]


def check(mutant: Mutant, server: Server) -> None:
    verdict = server.judge(mutant)
    assert verdict.noticed, f"{mutant.judge} ended with {verdict.status}\n{verdict.output}"


@pytest.mark.parametrize("name", IN_INTERPRETER | OUTSIDE | ON_HOPPER)
def test_every_mutant_has_its_place_and_its_judge(name):
    """Those too that are judged only where an engine, a compiler or a GPU is there."""
    mutant = (IN_INTERPRETER | OUTSIDE | ON_HOPPER)[name]
    assert mutant.text() != (PACKAGE / mutant.file).read_text()
    assert exists(mutant.judge)


def exists(judge: str) -> bool:
    """Return whether there is a file of tests, and the test in it."""
    file, _, test = judge.partition("::")
    return test == "" or f"def {test.partition('[')[0]}(" in (ROOT / "tests" / file).read_text()


def test_every_group_of_generated_mutants_has_files_judges_and_a_floor():
    """Each mutant is a text that Python reads. Which of them are noticed says `python -m tests.mutations`."""
    assert floors().keys() == GROUPS.keys()
    for group, judges in GROUPS.items():
        assert files_of(group) and all(exists(judge) for judge in judges.tests), group
        some = [mutant for file in files_of(group) for mutant in mutants_of(file)]
        for mutant in some[:20]:
            ast.parse(mutant.text())
        assert len({mutant.rank for mutant in some}) == len(some) > 10, group


FUNCTION = """
def f(x, y):
    wait(x)
    keep = (x < 3) & (y >= x)
    for i in range(0, y + 1):
        z = a if x and y else tl.minimum(x, y)
"""


def test_what_is_generated():
    places = Places(FUNCTION.encode())
    places.visit(ast.parse(FUNCTION))
    found = {(change, FUNCTION[start:end], after) for change, start, end, after, _ in places.found}
    assert found == {
        ("drop a call that synchronises", "wait(x)", "pass"),
        ("drop a term", "(x < 3) & (y >= x)", "(x < 3)"),
        ("drop a term", "(x < 3) & (y >= x)", "(y >= x)"),
        ("flip < and <=", "x < 3", "x <= 3"),
        ("flip < and <=", "y >= x", "y > x"),
        ("one less or more", "y + 1", "(y + 1) + 1"),
        ("one less or more", "y + 1", "(y + 1) - 1"),
        ("one less or more", "y + 1", "(y)"),
        ("negate a condition", "x and y", "(not (x and y))"),
        ("drop a term", "x and y", "((x))"),
        ("drop a term", "x and y", "((y))"),
        ("swap minimum and maximum", "tl.minimum", "tl.maximum"),
    }


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
