"""Imports point one way, from commands down to nouns. Integrations and the bench use public names only."""

import ast
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
FLOORS = (  # a module imports modules of its floor and of floors before it in this list
    ("quire.errors", "quire.spec", "quire.state"),
    ("quire.batch", "quire.cache", "quire.allocator", "quire.batch_check"),
    ("quire.dispatch",),
    ("quire.checks",),
    ("quire.kernels",),  # what all families use, and the kernels of the other verbs
    ("quire.kernels.cpu", "quire.kernels.block"),
    ("quire.kernels.split_kv",),
    ("quire.kernels.hopper",),
    ("quire.launch_codec", "quire.plan"),
    ("quire.ops",),
    ("quire.api",),
    ("quire.service",),
    ("quire",),
    ("quire.reference", "quire.testing", "quire.targets"),
    ("quire.integrations", "quire.distributed"),
    ("quire.bench",),
    ("quire.tuning",),
    ("quire.cli",),
    ("quire.__main__",),
)
PUBLIC_ONLY = ("quire.integrations", "quire.distributed", "quire.bench")
TOOLS = {"quire", "quire.testing", "quire.targets"}  # that PUBLIC_ONLY may import
VAGUE_NAMES = {"utils", "common", "core", "helpers"}


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


def floor(name: str) -> int:
    """Return the floor with the longest entry that is the module or a package around it."""
    matches = [
        (len(entry), i)
        for i, entries in enumerate(FLOORS)
        for entry in entries
        if name == entry or (entry != "quire" and name.startswith(f"{entry}."))
    ]
    assert matches, f"{name} must have a floor, got none; add it to FLOORS"
    return max(matches)[1]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_point_one_way(name):
    upward = {module for module in imports(name) if floor(module) > floor(name)}
    assert not upward, f"{name} must not import from the floors after its own, got {upward}"


def test_a_floor_has_modules():
    found = {floor(name) for name in SOURCES}
    empty = {entry for i, entries in enumerate(FLOORS) if i not in found for entry in entries}
    assert not empty, f"FLOORS must name modules that exist, got {empty}"


@pytest.mark.parametrize("name", sorted(n for n in SOURCES if n.startswith(PUBLIC_ONLY)))
def test_integrations_and_the_bench_use_public_names_only(name):
    for node in ast.walk(SOURCES[name]):
        if isinstance(node, ast.ImportFrom) and node.module == "quire":
            private = {a.name for a in node.names} - set(quire.__all__)
            assert not private, f"{name} must import public names only, got {private} in line {node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "quire":
            assert node.attr in (*quire.__all__, "__version__"), (
                f"{name} must use public names only, got quire.{node.attr} in line {node.lineno}"
            )
    package = ".".join(name.split(".")[:2])
    inner = {module for module in imports(name) - TOOLS if not module.startswith(package)}
    assert not inner, f"{name} must import public names only, got {inner}"


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


def test_no_module_has_a_vague_name():
    assert not [name for name in SOURCES if set(name.split(".")) & VAGUE_NAMES]
