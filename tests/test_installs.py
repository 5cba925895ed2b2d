"""Every install line of the repository can be met from PyPI alone. It needs a network: `make test-installs`.

`pip install --dry-run` chooses versions and installs nothing. It reads metadata, and downloads a package only where
the index has no metadata of its own.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from quire.cli.doctor_versions import TESTED
from quire.version import packages_of

pytestmark = pytest.mark.network
ROOT = Path(__file__).parent.parent
KEPT = ("PIP_CERT", "PIP_PROXY", "PIP_DEFAULT_TIMEOUT")
PYPI_ALONE = {name: value for name, value in os.environ.items() if not name.startswith("PIP_") or name in KEPT} | {
    "PIP_CONFIG_FILE": os.devnull
}
LINE = re.compile(r"\bpip(?:\.exe)? install +([^`\n#&;]+)")
BUILT = {"--no-build-isolation", "--no-binary vllm"}  # which the Makefile builds from source


def lines_of_pages() -> set[str]:
    """Return the arguments of pip in the pages and in the workflows."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / ".github").rglob("*.yml")]
    found = {line.strip() for page in pages if page.name != "CHANGELOG.md" for line in LINE.findall(page.read_text())}
    return {line for line in found if "${{" not in line}


def lines_of_make() -> set[str]:
    """Return the arguments of pip in all recipes, where pip sees PyPI alone."""
    command = [
        "make",
        "--dry-run",
        "--always-make",
        "VENV=/nowhere/.venv",
        "HAS_GPU=",
        "test-vllm",
        "test-sglang",
        "docs",
        "dist",
    ]
    command += [".overlays/triton-3.6.0/.ready", ".overlays/transformers-5.17.0/.ready"]
    environment = {name: value for name, value in PYPI_ALONE.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    found = {line.strip() for line in LINE.findall(done.stdout.replace("\\\n", " "))}
    for flag in BUILT:
        found = {line.replace(flag, "") for line in found}
    return found


def lines_of_advice() -> set[str]:
    """Return the arguments of pip that errors and `quire doctor` advise."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return (
        {packages_of(extra) for extra in extras} | {shlex.join(line) for line in TESTED} | {"torch", "triton", "numpy"}
    )


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone, in which pip may write while it reads Quire's metadata."""
    folder = tmp_path_factory.mktemp("clone") / "quire"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), folder], check=True)
    return folder


def test_all_kinds_of_lines_are_found():
    assert {".", ". ./tools", "'.[vllm]'", "-e '.[transformers]' -e tools --group dev"} <= lines_of_pages()
    assert any("torch==2.15.0 triton==" in line for line in lines_of_make())
    assert {line.split()[-1] for line in lines_of_make()} >= {"triton==3.6.0", "docs", "dev"}


@pytest.mark.parametrize("line", sorted(lines_of_pages() | lines_of_make() | lines_of_advice()))
def test_an_install_line_is_met_from_pypi_alone(line, clone):
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", *shlex.split(line)]
    done = subprocess.run(command, cwd=clone, env=PYPI_ALONE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
