"""Numbers by which times are predicted, fitted to what was measured: one file for each kind of device.

`quire tune fit` writes a file: what it was fitted on, the properties of that device, and for each kind of spec and each
variant the `predict.Numbers`. The user's files come before the shipped ones. A device that none was fitted on has the
numbers of the shipped one whose features are most like its own, scaled by what its properties say (`scaled`).

Nothing is read at import. A shipped file is trusted; the tests check it. A user's file that is not sound is left out,
with a warning that names the file.
"""

import json
import math
import os
import stat
import warnings
from dataclasses import asdict, fields
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from quire.dispatch.device import DeviceProperties
from quire.dispatch.predict import Numbers

VARIABLE = "QUIRE_CONSTANTS"  # names the folder of the user's files
USER_FILES = f"${VARIABLE}, $XDG_CONFIG_HOME/quire/constants or ~/.config/quire/constants"  # the first that there is
PACKAGE = "quire.dispatch.constants"
SPEEDS = "memory_gbps", "clock_mhz"  # which may differ by a tenth, as between cards of one kind
SLOWER_WITHOUT_WGMMA = 2.0  # how many times as long an SM multiplies a tile
CHOICES: list[Any] = []  # functions that cache what is chosen by these numbers, for `forget`


class Constants(NamedTuple):
    """The numbers that a device has.

    Attributes:
        name: of the file, and whether they are scaled.
        kinds: by the kind of spec and the variant.
        factors: on a guess of the numbers of what was not measured, by the family of variants.
    """

    name: str
    kinds: dict[str, dict[str, Numbers]]
    factors: dict[str, Numbers]


@cache
def constants_of(device: DeviceProperties) -> Constants:
    """Return the numbers of a device: those of the first file that was fitted on one like it, or scaled ones."""
    refuse_trees()
    for name, file in (*user_files(), *shipped_files()):
        if are_like(file["properties"], device):
            return Constants(name, read_numbers(file), factors_of(file))
    name, file = min(shipped_files(), key=lambda shipped: unlike(DeviceProperties(**shipped[1]["properties"]), device))
    fitted = DeviceProperties(**file["properties"])
    kinds = read_numbers(file)
    return Constants(
        f"{name}, scaled",
        {kind: {name: scaled(own, fitted, device) for name, own in of.items()} for kind, of in kinds.items()},
        factors_of(file),
    )


def unlike(fitted: DeviceProperties, device: DeviceProperties) -> tuple[bool, int]:
    """Return how much the features of two devices differ: first in how they multiply, then in how many features."""
    of_fitted, of_device = asdict(fitted), asdict(device)
    features = [name for name, value in of_device.items() if isinstance(value, bool)]
    count = sum(of_fitted[name] != of_device[name] for name in features)
    return fitted.has_mma_sync != device.has_mma_sync, count


def scaled(numbers: Numbers, fitted: DeviceProperties, device: DeviceProperties) -> Numbers:
    """Return numbers for another device than that on which they were fitted.

    Bytes take as much longer as memory is slower; where its speed is unknown, each SM is taken to have as much of it.
    NVIDIA's SMs take as many cycles, but SLOWER_WITHOUT_WGMMA times as many for products without what the other has.
    Launches take as long.
    """
    if device.memory_gbps and fitted.memory_gbps:
        slower = fitted.memory_gbps / device.memory_gbps
    else:
        slower = fitted.num_sms / device.num_sms
    products = SLOWER_WITHOUT_WGMMA if fitted.has_wgmma and not device.has_wgmma else 1.0
    cycle = fitted.clock_mhz / device.clock_mhz if fitted.clock_mhz and device.clock_mhz and device.has_ptx else 1.0
    return numbers._replace(
        item=numbers.item * cycle,
        tile=numbers.tile * cycle,
        sm_tile=numbers.sm_tile * cycle * products,
        megabyte=numbers.megabyte * slower,
        partial=numbers.partial * cycle,
        partial_megabyte=numbers.partial_megabyte * slower,
    )


def are_like(fitted: dict[str, Any], device: DeviceProperties) -> bool:
    """Whether a file's properties are those of a device, but for its speeds, which may differ by a tenth."""
    has = asdict(device)
    is_like = all(10 * abs(has[name] - fitted[name]) <= fitted[name] for name in SPEEDS if name in fitted)
    return is_like and fitted | {name: has[name] for name in SPEEDS} == has


def read_numbers(file: dict[str, Any]) -> dict[str, dict[str, Numbers]]:
    """Return the numbers of a file."""
    return {kind: {name: Numbers(*own) for name, own in of.items()} for kind, of in file["kinds"].items()}


def factors_of(file: dict[str, Any]) -> dict[str, Numbers]:
    """Return the factors of a file."""
    return {name: Numbers(*own) for name, own in file["factors"].items()}


def forget() -> None:
    """Read files again when they are next asked for; choices made by those read so far are dropped."""
    for function in (user_files, constants_of, refuse_trees, *CHOICES):
        function.cache_clear()


@cache
def load(name: str) -> dict[str, Any]:
    """Read a shipped file."""
    return json.loads(resources.files(PACKAGE).joinpath(f"{name}.json").read_text(encoding="utf-8"))


@cache
def shipped_files() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Read the shipped files, by name."""
    paths = resources.files(PACKAGE).iterdir()
    names = sorted(path.name.removesuffix(".json") for path in paths if path.name.endswith(".json"))
    return tuple((name, load(name)) for name in names)


def user_folder(variable: str = VARIABLE, name: str = "constants") -> Path | None:
    """Return the folder of the user's files; None for a user without a home directory, if no variable names one."""
    config = os.environ.get("XDG_CONFIG_HOME", "")
    base = config if os.path.isabs(config) else "~/.config"  # its specification says that a relative one is ignored
    folder = os.path.expanduser(os.environ.get(variable) or os.path.join(base, "quire", name))
    return None if folder.startswith("~") else Path(folder).absolute()


@cache
def refuse_trees() -> None:
    """Raise ValueError if the user has decision trees, which plans followed until 2026-11-29."""
    folder = user_folder("QUIRE_TREES", "trees")
    names = names_in(folder) if folder is not None else []
    if names:
        raise ValueError(
            f"{folder} must have no decision trees, got {', '.join(names)}; plans take the variant of least predicted "
            "time, so delete them, and for a device of your own run `quire tune sweep` and `quire tune fit`"
        )


def names_in(folder: Path) -> list[str]:
    """Return the names of the JSON files of a folder, if there is one that can be listed."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return []


@cache
def user_files() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Read the user's files, by path, once per process.

    Warn of each that is not sound, and leave it out.
    """
    folder, found = user_folder(), []
    if folder is None or not os.path.isdir(folder):  # also where the home directory may not be entered
        return ()
    try:
        names = sorted(name for name in os.listdir(folder) if name.endswith(".json"))
    except OSError as error:
        warnings.warn(
            f"{folder} must be a folder that can be listed, got {error.strerror}; let this user read it. "
            "Quire plans without the files in it.",
            stacklevel=2,
        )
        return ()
    for name in names:
        try:
            found.append((str(folder / name), read(folder / name)))
        except ValueError as error:
            warnings.warn(f"{error}. Quire plans without it.", stacklevel=2)
    return tuple(found)


def read(path: Path) -> dict[str, Any]:
    """Read a file of numbers and check it.

    Raises:
        ValueError: the file cannot be read, or is not sound. The message names the file.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # to open a pipe would block
            raise ValueError("something that is not a regular file")
        file = json.loads(path.read_text(encoding="utf-8"))
        check(file)
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
        return file
    raise ValueError(
        f"{path} must be what `quire tune fit` wrote, got {wrong}; fit the numbers again, or move the file away"
    )


def check(file: object) -> None:
    """Raise ValueError unless `file` has numbers. The message says what is wrong and where."""
    parts = "fitted_on", "properties", "factors", "kinds"
    if not isinstance(file, dict) or not set(parts) <= file.keys():
        raise ValueError(f"{shown(file)} where an object with {', '.join(parts)} is expected")
    names = {field.name for field in fields(DeviceProperties)}
    if not isinstance(file["properties"], dict) or file["properties"].keys() | {"clock_mhz"} != names:
        raise ValueError(f"{shown(file['properties'])} at properties, which must have {', '.join(sorted(names))}")
    if not isinstance(file["kinds"], dict):
        raise ValueError(f"{shown(file['kinds'])} at kinds, which must be an object")
    check_numbers(file["factors"], "factors")
    for kind, variants in file["kinds"].items():
        check_numbers(variants, f"kinds.{kind}")


def check_numbers(section: object, where: str) -> None:
    """Raise ValueError unless `section` has lists of as many times as `Numbers` has."""
    if not isinstance(section, dict):
        raise ValueError(f"{shown(section)} at {where}, which must be an object")
    for name, own in section.items():
        is_list = isinstance(own, list) and len(own) == len(Numbers._fields)
        if not is_list or not all(is_time(value) for value in own):
            raise ValueError(f"{shown(own)} at {where}.{name}, which must be {len(Numbers._fields)} numbers from 0")


def is_time(value: object) -> bool:
    """Whether a value of JSON is a finite number from 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def shown(value: object) -> str:
    """Return a value of JSON for a message, cut to a length that can be read."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
