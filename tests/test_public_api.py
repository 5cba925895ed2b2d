"""What is public is what `__all__` says: importable, documented in the house grammar, cheap to import; nothing else."""

import dataclasses
import inspect
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest

import quire
from quire.integrations import flash_attn, flashinfer

VERBS = (
    "attention",
    "copy_pages",
    "is_worth_sharing",
    "merge_states",
    "begin_warmup",
    "no_compilation",
    "plan",
    "union_attention",
    "varlen_attention",
    "warmup",
    "workspace_size",
    "write_kv",
    "write_latent",
)
NOUNS = ("AttentionSpec", "Batch", "PagedKVCache", "Plan", "State", "Rope", "QKNorm", "PageAllocator")
SUBMODULES = {path.stem for path in Path(quire.__file__).parent.iterdir()}


def test_all_is_what_is_public():
    assert quire.__all__ == sorted(quire.__all__)
    public = {
        name
        for name in vars(quire)
        if not name.startswith("_") and not (name in SUBMODULES and inspect.ismodule(getattr(quire, name)))
    }
    assert public == set(quire.__all__)
    assert set(VERBS) | set(NOUNS) <= public


@pytest.mark.parametrize("name", VERBS)
def test_verbs_are_documented(name):
    check_documented(getattr(quire, name))


@pytest.mark.parametrize("name", quire.intervals.__all__)
def test_functions_of_intervals_are_documented(name):
    check_documented(getattr(quire.intervals, name))


@pytest.mark.parametrize("name", quire.draft_trees.__all__)
def test_functions_of_draft_trees_are_documented(name):
    check_documented(getattr(quire.draft_trees, name))


@pytest.mark.parametrize("name", NOUNS)
def test_nouns_and_their_public_members_are_documented(name):
    noun = getattr(quire, name)
    text = inspect.getdoc(noun)
    assert text
    for field in dataclasses.fields(noun) if dataclasses.is_dataclass(noun) else ():
        assert re.search(rf"^    {field.name}: ", text, re.MULTILINE), f"{name}'s docstring must name {field.name}"
    for member, value in vars(noun).items():
        described = inspect.isroutine(value) or isinstance(value, (property, cached_property, classmethod))
        if not member.startswith("_") and described:
            assert inspect.getdoc(getattr(noun, member) if isinstance(value, classmethod) else value), (
                f"{name}.{member} must have a docstring"
            )


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_flash_attn_s_functions_are_documented(name):
    assert inspect.getdoc(getattr(flash_attn, name))


@pytest.mark.parametrize("name", flashinfer.__all__)
def test_flashinfer_s_names_and_their_public_methods_are_documented(name):
    member = getattr(flashinfer, name)
    assert inspect.getdoc(member)
    for method, value in inspect.getmembers(member, inspect.isfunction) if inspect.isclass(member) else ():
        assert method.startswith("_") or inspect.getdoc(value), f"{name}.{method} must have a docstring"


def check_documented(function) -> None:
    """Assert one imperative sentence, and Args, Returns and Raises that name what there is to name."""
    text = inspect.getdoc(function)
    assert text and re.search(r"[.:]", text.splitlines()[0]), f"{function.__name__}: the first line must be a sentence"
    signature = inspect.signature(function)
    sections = dict(re.findall(r"^(Args|Returns|Raises):\n((?:    .*\n?|\n)*)", text, re.MULTILINE))
    for parameter in signature.parameters.values():
        assert re.search(rf"^    (\*\*)?{parameter.name}: ", sections["Args"], re.MULTILINE), (
            f"{function.__name__}: Args must name {parameter.name}"
        )
    is_context = inspect.isgeneratorfunction(inspect.unwrap(function))
    assert signature.return_annotation is None or "Returns" in sections or "Return" in text or is_context, (
        f"{function.__name__} must say what it returns"
    )
    assert "Raises" in sections, f"{function.__name__} must say what it raises"


@pytest.mark.parametrize("name", VERBS)
def test_verbs_are_annotated_and_take_few_positional_arguments(name):
    signature = inspect.signature(getattr(quire, name))
    assert signature.return_annotation is not inspect.Signature.empty
    positional = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert len(positional) <= 6
    assert all(p.annotation is not p.empty for p in positional)


@pytest.mark.slow
def test_importing_quire_imports_torch_and_nothing_else_and_touches_no_device():
    code = (
        "import sys, torch; torch.cuda.init = torch.cuda._lazy_init = None; before = set(sys.modules); import quire;"
        "print(*{name.split('.')[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names));"
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["quire"]
