"""Compare what is installed with what Quire, PyTorch and the engines need.

Quire's package metadata holds the ranges of what it and its extras need. The tables below hold the rest.
"""

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from typing import Literal

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

Line = tuple[Literal["ok", "warn", "FAIL"], str]
DISTRIBUTION = "quire"

# Distributions that bring the module `triton`: PyPI's two, and those of PyTorch's indexes.
TRITONS = ("triton", "triton-windows", "pytorch-triton", "triton-rocm", "pytorch-triton-rocm", "pytorch-triton-xpu")
# The newest versions that Quire's tests ran with. Its metadata has no such bound: newer ones may serve. Those of
# a line require one another.
TESTED = (("torch<2.16", "triton<3.10"), ("sglang<0.5.24",))
# A package, which of its requirements are compared, and what happens with another version of them.
FITTING = (
    ("torch", TRITONS, "torch.compile may fail"),
    ("vllm", ("torch", *TRITONS), "its compiled operators may not load"),
    ("sglang", ("torch", *TRITONS), "its compiled kernels may not load"),
)
# What Quire does not require, and who misses it.
MISSED = {"numpy": "torch warns of that, and Triton's interpreter needs it"}
UNTRIED = {"win32": "Windows has not been tried with a GPU. Triton for it is triton-windows."}


def check_versions() -> Iterator[Line]:
    """Say of Python and of each package whether its version is supported, and whether the packages fit one another.

    A package that Quire itself needs must be there, in its range. A package of an extra may be absent.
    """
    try:
        metadata = importlib.metadata.metadata(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        yield "warn", "Quire is not installed as a package, so the versions it needs are not known. Run: pip install ."
    else:
        yield "ok", f"Quire {metadata['Version']} is installed."
        yield check_python(metadata["Requires-Python"] or "")
        for extra, requirement in supported(metadata.get_all("Provides-Extra") or []):
            if not extra or installed(requirement):
                yield check_package(requirement, extra)
    yield from check_tested()
    yield from check_fitting()
    yield from check_tritons()
    for name, missed in MISSED.items():
        if version_of(name) is None:
            yield "warn", f"{name} is not installed: {missed}. Run: pip install {name}"
    if sys.platform in UNTRIED:
        yield "warn", UNTRIED[sys.platform]


def check_python(served: str) -> Line:
    """Compare the version of Python."""
    version = platform.python_version()
    if SpecifierSet(served).contains(version, prereleases=True):
        return "ok", f"Python {version} is supported ({served})."
    return "FAIL", f"Python {version} is not supported: Quire needs {served}. Install another Python."


def check_package(requirement: Requirement, extra: str) -> Line:
    """Compare the version of a package that Quire needs, or that an extra has."""
    range_, run = str(requirement.specifier), f"Run: pip install {quoted(requirement)}"
    found = installed(requirement)
    if found is None:
        return "FAIL", f"{requirement.name} is not installed, and Quire needs {requirement.name}{range_}. {run}"
    name, version = found
    if requirement.specifier.contains(version, prereleases=True):
        return "ok", f"{name} {version} is supported{range_ and f' ({range_})'}."
    words = f"the extra {extra} needs" if extra else "Quire needs"
    return "warn" if extra else "FAIL", f"{name} {version} is not supported: {words} {name}{range_}. {run}"


def check_tested() -> Iterator[Line]:
    """Name the packages that are newer than any that Quire was tested with."""
    for line in TESTED:
        newest = [Requirement(text) for text in line]
        found = [(requirement, *(installed(requirement) or (requirement.name, None))) for requirement in newest]
        newer = [
            f"{name} {version}"
            for requirement, name, version in found
            if version is not None and not requirement.specifier.contains(version, prereleases=True)
        ]
        if newer:
            older = " ".join(f"'{name}{requirement.specifier}'" for requirement, name, _ in found)
            yield (
                "warn",
                f"{' and '.join(newer)}: newer than what Quire was tested with. If it fails, run: pip install {older}",
            )


def check_fitting() -> Iterator[Line]:
    """Compare what is installed with what PyTorch and the engines require, where Quire serves these."""
    extras = [requirement for _, requirement in supported([owner for owner, _, _ in FITTING])]
    for owner, names, otherwise in FITTING:
        served = [r for r in extras if r.name == owner]
        if any(not r.specifier.contains(version_of(owner) or "0", prereleases=True) for r in served):
            continue
        for requirement in requirements_of(owner):
            version = version_of(requirement.name) if requirement.name in names else None
            if version is not None and not requirement.specifier.contains(version, prereleases=True):
                needs = f"{requirement.name}{requirement.specifier}"
                yield (
                    "warn",
                    f"{owner} {version_of(owner)} requires {needs}, but {requirement.name} {version} is installed: "
                    f"{otherwise}. Run: pip install {quoted(requirement)}",
                )


def check_tritons() -> Iterator[Line]:
    """Say whether several distributions bring the module `triton`."""
    names = [name for name in TRITONS if version_of(name) is not None]
    if len(names) > 1:
        required = next((r for r in requirements_of("torch") if r.name in TRITONS), Requirement(names[0]))
        yield (
            "FAIL",
            f"{' and '.join(names)} are installed together, and each overwrites the other's files. Run: pip uninstall "
            f"--yes {' '.join(names)}. Then run, with the index that torch came from: pip install {quoted(required)}",
        )


def supported(extras: list[str]) -> Iterator[tuple[str, Requirement]]:
    """Return what Quire requires on this system, and what its extras add, each once, with the name of the extra."""
    seen = set()
    for extra in ("", *extras):
        for requirement in requirements_of(DISTRIBUTION, extra):
            if quoted(requirement) not in seen:
                seen.add(quoted(requirement))
                yield extra, requirement


def requirements_of(package: str, extra: str = "") -> list[Requirement]:
    """Return what a package requires on this system, with an extra if one is named; nothing if it is not installed."""
    try:
        found = [Requirement(text) for text in importlib.metadata.requires(package) or []]
    except importlib.metadata.PackageNotFoundError:
        return []
    return [r for r in found if r.marker is None or r.marker.evaluate({"extra": extra, "sys_platform": sys.platform})]


def installed(requirement: Requirement) -> tuple[str, str] | None:
    """Return the name and version of what meets a requirement; None if nothing does. Any Triton does for Triton."""
    names = TRITONS if requirement.name in TRITONS else (requirement.name,)
    found = ((name, version_of(name)) for name in names)
    return next(((name, version) for name, version in found if version is not None), None)


def quoted(requirement: Requirement) -> str:
    """Return a requirement as an argument for pip."""
    return f"'{requirement.name}{requirement.specifier}'" if requirement.specifier else requirement.name


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
