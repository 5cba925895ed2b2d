"""Imports point down, from the commands through the verbs to the nouns; engines and the bench use public names only.

The tools, a distribution of their own, are above the library, which imports none of them.
"""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import quire
import quire_tools

ROOT, TOOLS = Path(quire.__file__).parent, Path(quire_tools.__file__).parent
LAYERS = (  # those of DESIGN.md, from the lowest up; a module imports from its own layer and those below
    (
        *(
            "errors",
            "spec",
            "state",
            "batch",
            "chosen",
            "checks.batch",
            "cache",
            "cache_layout",
            "cache_formats",
            "allocator",
        ),
        *("norm_rope", "intervals", "draft_trees", "reference", "score_functions", "version", "log"),
    ),
    ("triton_internals",),
    ("dispatch",),
    ("kernels",),
    ("plan", "checks", "launch_codec"),
    ("api", "ops", "indexer", "compile_ahead"),
    ("__init__",),
    ("testing", "drawn", "targets", "debug"),
    ("integrations", "distributed"),
    ("cli",),
    ("__main__",),
)
TOOLS_LAYERS = (("__init__",), ("bench",), ("tuning",), ("cli",))  # of the tools, all above the library
MAY_IMPORT = {  # and nothing else: what judges results knows no kernel
    "quire.reference": {
        f"quire.{name}" for name in ("spec", "batch", "cache", "state", "norm_rope", "score_functions")
    },
    "quire.testing": {
        f"quire.{name}"
        for name in (
            "reference",
            "spec",
            "batch",
            "chosen",
            "checks.batch",
            "cache",
            "state",
            "norm_rope",
            "errors",
            "score_functions",
        )
    },
}
PUBLIC_ONLY = ("quire.integrations", "quire.distributed", "quire_tools.bench")
PUBLIC_MODULES = ("intervals", "draft_trees", "indexer", "version")  # which `import quire` brings along
HOLDALLS = {"utils", "common", "core", "helpers"}


def module_name(path: Path, root: Path) -> str:
    return ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(".__init__")


SOURCES = {
    module_name(path, root): ast.parse(path.read_text()) for root in (ROOT, TOOLS) for path in root.rglob("*.py")
}
LIBRARY = sorted(name for name in SOURCES if name.split(".")[0] == "quire")


def imports(name: str) -> set[str]:
    """Return the modules of the two packages that a module imports, wherever in it."""
    found = set()
    for node in ast.walk(SOURCES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} must import absolutely, got a relative import in line {node.lineno}"
            found |= {
                f"{node.module}.{a.name}" if f"{node.module}.{a.name}" in SOURCES else node.module for a in node.names
            }
    return {module for module in found if module.split(".")[0] in ("quire", "quire_tools")}


def layer(name: str) -> int:
    """Return the number of a module's layer."""
    package, _, inner = name.partition(".")
    parts = inner.split(".")[:2] if inner else ["__init__"]
    layers, below = (LAYERS, 0) if package == "quire" else (TOOLS_LAYERS, len(LAYERS))
    found = [below + i for part in (".".join(parts), parts[0]) for i, layer in enumerate(layers) if part in layer]
    assert found, f"{name} is in no layer; give it one here and in DESIGN.md"
    return found[0]


@pytest.mark.parametrize("name", sorted(SOURCES))
def test_imports_point_down(name):
    upward = {module for module in imports(name) if layer(module) > layer(name)}
    assert not upward, f"{name} must not import from the layers above its own, got {upward}"
    if name in MAY_IMPORT:
        assert imports(name) <= MAY_IMPORT[name]


@pytest.mark.parametrize("name", LIBRARY)
def test_the_library_imports_no_tools(name):
    """The command finds those of the tools by name, and says what to install where they are not."""
    assert not {module for module in imports(name) if module.startswith("quire_tools")}
    named = {node.value for node in ast.walk(SOURCES[name]) if isinstance(node, ast.Constant)}
    assert "quire_tools" not in named or name == "quire.cli"


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
        - {"quire", "quire.testing", "quire.targets", "quire.drawn"}
        - {f"quire.{m}" for m in PUBLIC_MODULES}
        if not module.startswith(package)
    }
    assert not inner, f"{name} must import public names only, got {inner}"


def test_imports_go_in_no_circle():
    """A unit is a file; of a kernel family it is the folder, since a launch and its runner know each other."""
    units = {}
    for name in SOURCES:
        below = units.setdefault(unit(name), set())
        below |= {unit(module) for module in imports(name)} - {unit(name)}
    assert list(TopologicalSorter(units).static_order())


def unit(name: str) -> str:
    return ".".join(name.split(".")[:3]) if name.startswith("quire.kernels.") else name


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
