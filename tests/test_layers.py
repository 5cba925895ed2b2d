"""Imports point down, from the commands through the verbs to the nouns; engines and the bench use public names only."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
LAYERS = (  # those of DESIGN.md, from the lowest up; a module imports from its own layer and from those below it
    (
        *("errors", "spec", "state", "batch", "batch_check", "cache", "cache_layout", "allocator"),
        *("norm_rope", "intervals", "draft_trees", "reference", "version"),
    ),
    ("triton_internals",),
    ("dispatch",),
    ("kernels",),
    ("corners", "plan", "checks", "cache_checks", "norm_rope_checks", "prefix_checks", "launch_codec"),
    ("api", "ops", "service", "early_warmup", "early_compile", "empty_launches", "compile_processes"),
    ("__init__",),
    ("testing", "targets", "debug"),
    ("integrations", "bench", "distributed"),
    ("tuning",),
    ("cli",),
    ("__main__",),
)
MAY_IMPORT = {  # and nothing else: what judges results knows no kernel
    "quire.reference": {"quire.spec", "quire.batch", "quire.cache", "quire.state", "quire.norm_rope"},
    "quire.testing": {
        f"quire.{name}"
        for name in ("reference", "spec", "batch", "batch_check", "cache", "state", "norm_rope", "errors")
    },
}
PUBLIC_ONLY = ("quire.integrations", "quire.bench", "quire.distributed")
PUBLIC_MODULES = ("intervals", "draft_trees", "version")  # which `import quire` brings along
HOLDALLS = {"utils", "common", "core", "helpers"}


def module_name(path: Path) -> str:
    return ".".join(("quire", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {module_name(path): ast.parse(path.read_text()) for path in ROOT.rglob("*.py")}


def imports(name: str) -> set[str]:
    """Return the modules of this package that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(SOURCES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} must import absolutely, got a relative import in line {node.lineno}"
            found |= {
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in SOURCES else node.module for a in node.names
            }
    return {module for module in found if module == "quire" or module.startswith("quire.")}


def layer(name: str) -> int:
    """Return the number of a module's layer."""
    part = name.split(".")[1] if "." in name else "__init__"
    found = [i for i, parts in enumerate(LAYERS) if part in parts]
    assert found, f"{name} is in no layer; give it one here and in DESIGN.md"
    return found[0]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_point_down(name):
    upward = {module for module in imports(name) if layer(module) > layer(name)}
    assert not upward, f"{name} must not import from the layers above its own, got {upward}"
    if name in MAY_IMPORT:
        assert imports(name) <= MAY_IMPORT[name]


@pytest.mark.parametrize("name", sorted(n for n in SOURCES if n.startswith(PUBLIC_ONLY)))
def test_outsiders_use_public_names_only(name):
    for node in ast.walk(SOURCES[name]):
        if isinstance(node, ast.ImportFrom) and node.module == "quire":
            private = {a.name for a in node.names} - {*quire.__all__, *PUBLIC_MODULES}
            assert not private, f"{name} must import public names only, got {private} in line {node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "quire":
            assert node.attr in (*quire.__all__, "__version__", *PUBLIC_MODULES), (
                f"{name} must use public names only, got quire.{node.attr} in line {node.lineno}"
            )
    package = ".".join(name.split(".")[:2])
    inner = {
        module
        for module in imports(name)
        - {"quire", "quire.testing", "quire.targets"}
        - {f"quire.{m}" for m in PUBLIC_MODULES}
        if not module.startswith(package)
    }
    assert not inner, f"{name} must import public names only, got {inner}"


def test_imports_go_in_no_circle():
    """A unit is a file; of kernels, engines and commands a folder, whose files may know one another."""
    units = {}
    for name in SOURCES:
        below = units.setdefault(unit(name), set())
        below |= {unit(module) for module in imports(name)} - {unit(name)}
    assert list(TopologicalSorter(units).static_order())


def unit(name: str) -> str:
    return ".".join(name.split(".")[:3])


def test_the_oracle_knows_no_kernel():
    seen, todo = set(), {"quire.reference"}
    while todo:
        name = todo.pop()
        seen.add(name)
        todo |= imports(name) - seen - {"quire"}
    assert not [name for name in seen if name.startswith("quire.kernels")]
    assert "triton" not in {
        a.name for node in ast.walk(SOURCES["quire.reference"]) if isinstance(node, ast.Import) for a in node.names
    }


def test_a_helper_lives_with_its_caller():
    assert not [name for name in SOURCES if set(name.split(".")) & HOLDALLS]
