"""The examples in docstrings run as they stand, on the CPU, and everything public has one."""

import doctest

import pytest
import torch
import triton

import quire
import quire.debug
import quire.testing

ERRORS = {"OutOfPagesError", "UnsupportedError"}


def examples() -> dict[str, doctest.DocTest]:
    """Return the examples of the package's public names, by name."""
    finder, found = doctest.DocTestFinder(), {}
    public = [getattr(quire, name) for name in quire.__all__]
    public += [getattr(module, name) for module in (quire.intervals, quire.draft_trees) for name in module.__all__]
    public += [getattr(module, name) for module in (quire.testing, quire.debug) for name in module.__all__]
    for thing in public:
        for test in finder.find(
            thing, f"{thing.__module__}.{thing.__qualname__}", globs={"torch": torch, "quire": quire}
        ):
            if test.examples:
                found[test.name] = test
    return found


@pytest.mark.parametrize("name", examples())
def test_an_example_prints_what_its_docstring_says(name):
    if torch.cuda.is_available():
        pytest.skip("the examples show the plans of a machine without a GPU")
    if triton.knobs.runtime.interpret:
        pytest.skip("bfloat16 examples, which Triton's interpreter computes wrongly")
    said: list[str] = []
    doctest.DocTestRunner(optionflags=doctest.REPORT_ONLY_FIRST_FAILURE).run(examples()[name], out=said.append)
    assert not said, "".join(said)


@pytest.mark.parametrize("name", sorted(set(quire.__all__) - ERRORS))
def test_every_public_name_has_an_example(name):
    thing = getattr(quire, name)
    assert f"{thing.__module__}.{thing.__qualname__}" in examples()
