"""Compare what is installed with the ranges that Quire's package metadata names."""

import importlib.metadata
import platform
from collections.abc import Iterator
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

Line = tuple[Literal["ok", "warn", "FAIL"], str]
DISTRIBUTION = "quire"
FOR_DEVELOPERS = "dev"  # an extra that users do not install


def check_versions() -> Iterator[Line]:
    """Say of Python and of each package whether its version is supported.

    A package that Quire itself needs must be there, in its range. A package of an extra may be absent.
    """
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
        requirements = [Requirement(text) for text in importlib.metadata.requires(DISTRIBUTION) or []]
    except importlib.metadata.PackageNotFoundError:
        yield "warn", "Quire is not installed as a package, so the versions it needs are not known. Run: pip install ."
        return
    yield "ok", f"Quire {metadata['Version']} is installed."
    yield check_python(metadata["Requires-Python"] or "")
    for requirement in requirements:
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield check_package(requirement, None)
    seen = set()
    for extra in metadata.get_all("Provides-Extra") or []:
        for requirement in requirements:
            is_of_extra = requirement.marker is not None and not requirement.marker.evaluate({"extra": ""})
            if extra == FOR_DEVELOPERS or not is_of_extra or str(requirement.specifier) + requirement.name in seen:
                continue
            if requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
                seen.add(str(requirement.specifier) + requirement.name)
                if version_of(requirement.name) is not None:
                    yield check_package(requirement, extra)


def check_python(supported: str) -> Line:
    """Compare the version of Python."""
    version = platform.python_version()
    if SpecifierSet(supported).contains(version, prereleases=True):
        return "ok", f"Python {version} is supported ({supported})."
    return "FAIL", f"Python {version} is not supported: Quire needs {supported}. Install another Python."


def check_package(requirement: Requirement, extra: str | None) -> Line:
    """Compare the version of a package that Quire needs, or that an extra has."""
    name, supported = requirement.name, str(requirement.specifier)
    version = version_of(name)
    target = "quire" if extra is None else f"'quire[{extra}]'"
    if version is None:
        return "FAIL", f"{name} is not installed, and Quire needs {name}{supported}. Run: pip install {target}"
    needs = f" ({supported})" if supported else ""
    if requirement.specifier.contains(version, prereleases=True):
        return "ok", f"{name} {version} is supported{needs}."
    words = "Quire needs" if extra is None else f"the extra {extra} needs"
    level = "FAIL" if extra is None else "warn"
    return level, f"{name} {version} is not supported: {words} {name}{supported}. Run: pip install {target}"


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
