"""Which Quire this is: its version, its commit, and what its extras need."""

import importlib.metadata
import re
import subprocess
from functools import cache
from pathlib import Path

try:
    __version__ = importlib.metadata.version("quire")
except importlib.metadata.PackageNotFoundError:  # sources on the path that were never installed
    __version__ = "0.1.dev0"


@cache
def commit() -> str:
    """Return the commit of this package in short: git's in a checkout, else the one that the version names.

    A release has its tag instead, since its version names no commit. "not known" for a copy without git.
    """
    here = Path(__file__)

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", "-C", str(here.parent), *words], capture_output=True, text=True)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    # The folder of an installed package may belong to another git repository, which does not track this file.
    checked_out = git("ls-files", "--error-unmatch", here.name) and git("rev-parse", "--short", "HEAD")
    return checked_out or commit_of(__version__)


def commit_of(version: str) -> str:
    """Return the commit that a version names, or the tag of a release."""
    built = re.search(r"\+g([0-9a-f]+)", version)
    return built[1] if built else "not known" if "dev" in version else f"v{version}"


def packages_of(extra: str) -> str:
    """Return the packages of an extra as arguments for pip, since Quire itself is on no index.

    Sources that were never installed have no metadata. There, they are the extra of the clone.
    """
    from packaging.requirements import Requirement

    try:
        requirements = [Requirement(text) for text in importlib.metadata.requires("quire") or []]
    except importlib.metadata.PackageNotFoundError:
        return f"'.[{extra}]'"
    own = [r for r in requirements if "extra" in str(r.marker) and r.marker and r.marker.evaluate({"extra": extra})]
    return " ".join(f"'{r.name}{r.specifier}'" if r.specifier else r.name for r in own)
