"""Files of decision trees: where they are, and whether they are sound.

The shipped trees are trusted; the tests check them. A user's tree is checked completely when it is first read. One that
is not sound is left out, with a warning that names the file, so planning never sees a broken tree.
"""

import json
import math
import os
import stat
import warnings
from collections.abc import Callable
from dataclasses import fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, get_type_hints

from quire.dispatch.config import HINTS, CostModel, KernelConfig
from quire.dispatch.device import DeviceProperties

VARIABLE = "QUIRE_TREES"  # names the folder of the user's trees
USER_TREES = f"${VARIABLE}, $XDG_CONFIG_HOME/quire/trees or ~/.config/quire/trees"  # the first that there is
GENERIC = "generic"  # the shipped tree for every device, and a leaf of a fitted tree that leaves the choice to it
MOST_LEVELS = 32  # of nodes
SPEC_FEATURES = (
    "group_size", "num_kv_heads", "head_dim", "head_padding", "shared_kib", "mma_sync", "gbps_per_sm", "query_bytes",
    "kv_bytes", "int8_cache",
)  # fmt: skip
BATCH_FEATURES = "rows_per_seq", "rows_per_sm", "keys_per_seq", "keys_per_sm", "queries_per_seq"
MOST_OF_LEAF = {
    "block_m": 256,
    "block_n": 256,
    "num_warps": 16,
    "num_stages": 8,
    "programs_per_sm": 16,
    "waves_per_eu": 8,
}


@cache
def load_tree(name: str) -> dict[str, Any]:
    """Read a shipped tree."""
    return json.loads(resources.files("quire.dispatch").joinpath(f"trees/{name}.json").read_text(encoding="utf-8"))


@cache
def shipped_trees() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Read the shipped trees that were fitted to a device, by name."""
    paths = resources.files("quire.dispatch").joinpath("trees").iterdir()
    names = sorted(path.name.removesuffix(".json") for path in paths if path.name.endswith(".json"))
    return tuple((name, load_tree(name)) for name in names if name != GENERIC)


def user_folder() -> Path | None:
    """Return the folder of the user's trees; None for a user without a home directory, if no variable names one."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    base = config if os.path.isabs(config) else "~/.config"  # its specification says that a relative one is ignored
    folder = os.path.expanduser(os.environ.get(VARIABLE) or os.path.join(base, "quire", "trees"))
    return None if folder.startswith("~") else Path(folder).absolute()


@cache
def user_trees() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Read the user's trees, by path, once per process.

    Warn of each file that is not a sound tree, and leave it out.
    """
    folder, found = user_folder(), []
    if folder is None or not os.path.isdir(folder):  # also where the home directory may not be entered
        return ()
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError as error:
        warnings.warn(
            f"{folder} must be a folder that can be listed, got {error.strerror}; let this user read it. "
            "Quire plans without the trees in it.",
            stacklevel=2,
        )
        return ()
    for name in names:
        try:
            found.append((str(folder / name), read_tree(folder / name)))
        except ValueError as error:
            warnings.warn(f"{error}. Quire plans without it.", stacklevel=2)
    return tuple(found)


def read_tree(path: Path) -> dict[str, Any]:
    """Read a fitted tree from a file and check it.

    Raises:
        ValueError: the file cannot be read, or is not a sound tree. The message names the file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would block
            raise ValueError("something that is not a regular file")
        tree = json.loads(path.read_text(encoding="utf-8"))
        check_tree(tree)
    except OSError as error:
        wrong = error.strerror or str(error)
    except RecursionError:
        wrong = "JSON that is nested too deeply"
    except json.JSONDecodeError as error:
        wrong = f"invalid JSON ({error})"
    except UnicodeDecodeError:
        wrong = "text that is not UTF-8"
    except ValueError as error:
        wrong = str(error)
    else:
        return tree
    raise ValueError(
        f"{path} must be a tree that `quire tune` wrote, got {wrong}; run `quire tune` again, or move the file away"
    )


def check_tree(tree: object) -> None:
    """Raise ValueError unless `tree` is a sound fitted tree. The message says what is wrong and where."""
    if not isinstance(tree, dict):
        raise ValueError(f"{shown(tree)} where an object is expected")
    if "traits" in tree:
        raise ValueError("a tree of an older version, which says 'traits' for 'properties' and must be fitted again")
    required, optional = (
        {"fitted_on", "properties", "covers", "attention"},
        {"mla", "hopper", "cost_model", "mla_cost_model"},
    )
    check_keys(tree, required, optional, "the tree")
    check_provenance(tree["fitted_on"])
    check_properties(tree["properties"])
    check_covers(tree["covers"])
    has_mfma = tree["properties"]["has_mfma"]
    check_nodes(tree["attention"], "attention", lambda leaf, where: check_config(leaf, has_mfma, where))
    if "mla" in tree:
        check_nodes(tree["mla"], "mla", lambda leaf, where: check_config(leaf, has_mfma, where))
    if "hopper" in tree:
        check_nodes(tree["hopper"], "hopper", check_choice)
    for section in ("cost_model", "mla_cost_model"):
        if section in tree:
            check_cost_model(tree[section], required=set(), where=section)


def check_provenance(section: object) -> None:
    """Raise ValueError unless `section` is an object whose "regret" has "mean" and "worst" for sets of cases."""
    regret = check_object(section, "fitted_on").get("regret", {})
    for name, numbers in check_object(regret, "fitted_on.regret").items():
        where = f"fitted_on.regret.{name}"
        for key in ("mean", "worst"):
            if not is_number(check_object(numbers, where).get(key)):
                raise ValueError(f"{shown(numbers)} at {where}, where {key} must be a number")


def check_properties(section: object) -> None:
    """Raise ValueError unless `section` has the fields of `DeviceProperties`, with values of their types.

    A tree without `memory_gbps` is for devices of any.
    """
    kinds = get_type_hints(DeviceProperties)
    properties = check_object(section, "properties")
    check_keys(properties, set(kinds) - {"memory_gbps"}, {"memory_gbps"}, "properties")
    for name, kind in kinds.items():
        if name in properties and type(properties[name]) is not kind:
            raise ValueError(f"{shown(properties[name])} at properties.{name}, which must be of type {kind.__name__}")


def check_covers(section: object) -> None:
    """Raise ValueError unless `section` is a list of objects of features, of a spec on a device, and numbers."""
    if not isinstance(section, list) or not section:
        raise ValueError(f"{shown(section)} at covers, which must be a list of objects")
    for i, kind in enumerate(section):
        if not check_object(kind, f"covers[{i}]"):
            raise ValueError(
                f"an empty object at covers[{i}], which must name the features of the specs that are served"
            )
        for feature, value in kind.items():
            if feature not in SPEC_FEATURES:
                raise ValueError(
                    f"the unknown feature {feature!r} at covers[{i}]; known are {', '.join(SPEC_FEATURES)}"
                )
            if not is_number(value):
                raise ValueError(f"{shown(value)} at covers[{i}].{feature}, which must be a number")


def check_nodes(node: object, where: str, check_leaf: Callable[[object, str], None], levels: int = MOST_LEVELS) -> None:
    """Raise ValueError unless `node` is a node `[feature, number, below, above]`, and those below it too, or a leaf."""
    if not isinstance(node, list):
        if node != GENERIC:
            check_leaf(node, where)
        return
    if levels == 0:
        raise ValueError(f"more than {MOST_LEVELS} levels of nodes at {where}")
    if len(node) != 4:
        raise ValueError(f"a list of {len(node)} at {where}, where a node is [feature, number, below, above]")
    feature, threshold, below, above = node
    if feature not in (*SPEC_FEATURES, *BATCH_FEATURES):
        known = ", ".join((*SPEC_FEATURES, *BATCH_FEATURES))
        raise ValueError(f"the unknown feature {shown(feature)} at {where}; known are {known}")
    if not is_number(threshold):
        raise ValueError(f"{shown(threshold)} at {where}[1], which must be a number")
    check_nodes(below, f"{where}[2]", check_leaf, levels - 1)
    check_nodes(above, f"{where}[3]", check_leaf, levels - 1)


def check_config(leaf: object, has_mfma: bool, where: str) -> None:
    """Raise ValueError unless `leaf` has the fields of a legal `KernelConfig`, but for those that the spec decides."""
    names = {field.name for field in fields(KernelConfig)} - {"block_d", "block_dv"}
    values = check_object(leaf, where)
    check_keys(values, names - set(HINTS), set(HINTS) if has_mfma else set(), where)
    try:
        KernelConfig(**values, block_d=16, block_dv=16)
        for name, most in MOST_OF_LEAF.items():
            if values.get(name, 0) > most:
                raise ValueError(f"{name} must be at most {most}, got {values[name]}")
    except ValueError as error:
        raise ValueError(f"{shown(leaf)} at {where}, where {error}") from None


def check_choice(leaf: object, where: str) -> None:
    """Raise ValueError unless `leaf` says whether the Hopper kernel is preferred."""
    if not isinstance(leaf, bool):
        raise ValueError(f"{shown(leaf)} at {where}, which must be true, false or {GENERIC!r}")


def check_cost_model(section: object, required: set[str], where: str = "cost_model") -> None:
    """Raise ValueError unless `section` has fields of `CostModel`, all that are `required`, with legal values."""
    names = {field.name for field in fields(CostModel)}
    overrides = check_object(section, where)
    check_keys(overrides, required, names | {"provenance"}, where)
    try:
        CostModel(**{**constants(load_tree(GENERIC)), **constants({"cost_model": overrides})})
    except ValueError as error:
        raise ValueError(f"a {where} whose {error}") from None


def check_object(section: object, where: str) -> dict[str, Any]:
    """Return `section`; raise ValueError unless it is an object."""
    if not isinstance(section, dict):
        raise ValueError(f"{shown(section)} at {where}, which must be an object")
    return section


def check_keys(section: dict, required: set[str], optional: set[str], where: str) -> None:
    """Raise ValueError unless `section` has all required keys and none that is neither required nor optional."""
    if missing := required - section.keys():
        raise ValueError(f"no {', '.join(sorted(missing))} in {where}")
    if unknown := section.keys() - required - optional:
        raise ValueError(f"the unknown {', '.join(sorted(map(repr, unknown)))} in {where}")


def is_number(value: object) -> bool:
    """Whether a value of JSON is a finite number."""
    return type(value) is int or (type(value) is float and math.isfinite(value))


def shown(value: object) -> str:
    """Return a value of JSON for a message, cut to a length that can be read."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def constants(tree: dict[str, Any]) -> dict[str, Any]:
    """Return the constants of a tree's cost model without their provenance."""
    return {name: value for name, value in tree["cost_model"].items() if name != "provenance"}
