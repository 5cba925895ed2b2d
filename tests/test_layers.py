"""Imports point one way, from commands and integrations through the verbs down to the nouns, and those who sit outside use public names only."""

import ast
from pathlib import Path

import pytest

import quire

ROOT = Path(quire.__file__).parent
LAYERS = (  # a module imports from its own layer or from those above it in this list
    ("quire.errors", "quire.spec", "quire.state"),
    ("quire.batch", "quire.cache", "quire.allocator"),
    ("quire.tuning",),
    ("quire.kernels.views", "quire.kernels.mods", "quire.kernels.primitives"),
    ("quire.kernels.block.kernel", "quire.kernels.split_kv.kernel"),
    ("quire.plan",),
    ("quire.kernels",),
    ("quire.api", "quire.ops"),
    ("quire.service",),
    ("quire",),
    ("quire.integrations", "quire.bench"),
    (
        "quire.cli.check",
        "quire.cli.env",
        "quire.cli.generate",
        "quire.tuning.sweep",
        "quire.tuning.fit",
        "quire.cli.tune",
    ),
    ("quire.cli",),
    ("quire.__main__",),
)
BESIDE = {  # what these may import, and nothing else
    "quire.reference": {"quire.spec", "quire.batch", "quire.cache", "quire.state"},
    "quire.testing": {"quire.reference", "quire.spec", "quire.batch", "quire.cache", "quire.state"},
    "quire.targets": {"quire", "quire.dispatch.device"},
}
PUBLIC_ONLY = ("quire.integrations", "quire.bench", "quire.distributed")
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
    """Return the layer whose entry names the module most closely."""
    matches = [
        (len(entry), i)
        for i, entries in enumerate(LAYERS)
        for entry in entries
        if name == entry or (entry != "quire" and name.startswith(f"{entry}."))
    ]
    assert matches, f"{name} is in no layer; give it one here"
    return max(matches)[1]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_point_one_way(name):
    if name in BESIDE:
        assert imports(name) <= BESIDE[name]
        return
    # Beside the order: what is shipped for tests may be used by commands.
    upward = {module for module in imports(name) - set(BESIDE) if layer(module) > layer(name)}
    assert not upward, f"{name} must not import from the layers after its own, got {upward}"


@pytest.mark.parametrize("name", sorted(n for n in SOURCES if n.startswith(PUBLIC_ONLY)))
def test_outsiders_use_public_names_only(name):
    for node in ast.walk(SOURCES[name]):
        if isinstance(node, ast.ImportFrom) and node.module == "quire":
            private = {a.name for a in node.names} - set(quire.__all__)
            assert not private, f"{name} must import public names only, got {private} in line {node.lineno}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "quire":
            assert node.attr in (*quire.__all__, "__version__"), (
                f"{name} must use public names only, got quire.{node.attr} in line {node.lineno}"
            )
    package = ".".join(name.split(".")[:2])
    inner = {
        module
        for module in imports(name) - {"quire", "quire.testing", "quire.targets"}
        if not module.startswith(package)
    }
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


def test_a_helper_lives_with_its_caller():
    assert not [name for name in SOURCES if set(name.split(".")) & HOLDALLS]
