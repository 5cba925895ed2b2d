"""What is packed: the version and its commit, the archive of sources, the wheel, and what an index shows of them."""

import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import quire
from quire.cli.doctor_versions import TESTED
from quire.version import commit, commit_of

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FOLDERS = {"quire": ROOT, "quire_tools": ROOT / "tools"}  # of the two distributions
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
RELATIVE = re.compile(r"\]\((?![a-z]+:)[^)]*\)")
needs_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="an archive of sources has no git")


def run(*command: object, cwd: Path) -> str:
    done = subprocess.run([str(word) for word in command], cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def version_in(folder: Path) -> str:
    """Return the version that a build in this folder would have."""
    pytest.importorskip("setuptools_scm", reason="the dependency group `dev` has it")
    return run(sys.executable, "-m", "setuptools_scm", cwd=folder).splitlines()[-1]


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone with one commit and no tag, as continuous integration makes it, with the changes of this working tree."""
    folder = tmp_path_factory.mktemp("clone") / "quire"
    run("git", "clone", "--quiet", "--no-tags", "--depth", 1, ROOT.as_uri(), folder, cwd=ROOT)
    for name in run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def archives(clone):
    """A folder with the archives of sources of both distributions, and the wheels that are built from them."""
    pytest.importorskip("setuptools_scm", reason="the dependency group `dev` has it")
    for folder in (clone, clone / "tools"):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", clone / "dist", folder, cwd=clone)
    return clone / "dist"


def wheel_of(archives: Path, name: str) -> Path:
    (wheel,) = archives.glob(f"{name}-*.whl")
    return wheel


# The version


@needs_git
def test_the_version_names_the_commit_in_a_clone_of_one_commit_and_no_tag(clone):
    head = run("git", "rev-parse", "HEAD", cwd=clone)
    found = re.fullmatch(r"0\.1\.dev1\+g([0-9a-f]{7,})(\.d\d+)?", version_in(clone))
    assert found and head.startswith(found[1]) and head.startswith(commit_of(found[0]))


@needs_git
def test_the_version_of_a_tag_is_the_tag(tmp_path):
    run("git", "clone", "--quiet", "--depth", 1, ROOT.as_uri(), tmp_path / "quire", cwd=ROOT)
    run("git", "tag", "v1.2.3", cwd=tmp_path / "quire")
    assert version_in(tmp_path / "quire") == "1.2.3" and commit_of("1.2.3") == "v1.2.3"


def test_a_copy_without_git_has_a_version(tmp_path):
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    version = version_in(tmp_path)
    assert version.startswith("0.1.dev0") and commit_of(version) == "not known"


@needs_git
def test_a_checkout_knows_its_commit():
    if not Path(quire.__file__).is_relative_to(ROOT):
        pytest.skip("Quire is installed from elsewhere")
    assert run("git", "rev-parse", "HEAD", cwd=ROOT).startswith(commit())


# Archives


@needs_git
def test_the_tests_of_an_archive_of_sources_are_collected(archives, clone, tmp_path):
    """It takes half a minute: the archives are built, and another process imports every test."""
    (archive,) = archives.glob("quire-*.tar.gz")
    with tarfile.open(archive) as file:
        file.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    tracked = run("git", "ls-files", cwd=clone).splitlines()
    assert not [name for name in tracked if not (folder / name).exists()]
    assert version_in(folder) == archive.name.removeprefix("quire-").removesuffix(".tar.gz")
    code = f"import sys; sys.path.insert(0, {str(folder / 'src')!r}); import pytest; sys.exit(pytest.main())"
    collected = run(
        sys.executable, "-c", code, "--collect-only", "-q", "--assert=plain", "-p", "no:cacheprovider", cwd=folder
    )
    assert "tests/test_packaging.py" in collected and "tests/compile/" in collected


@needs_git
@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("quire", {"quire/py.typed"}),
        ("quire_tools", {"quire_tools/py.typed", "quire_tools/bench/templates/report.html"}),
    ],
)
def test_a_wheel_has_the_package_and_its_data_alone(name, data, archives):
    with zipfile.ZipFile(wheel_of(archives, name)) as file:
        names = {name for name in file.namelist() if ".dist-info/" not in name}
    folder = FOLDERS[name] / "src"
    sources = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    assert sources <= names
    assert {name for name in names - sources if not name.startswith("quire/dispatch/constants/")} == data


@needs_git
def test_the_wheel_of_the_library_is_smaller_than_1_mb(archives):
    assert wheel_of(archives, "quire").stat().st_size < 1 << 20


@needs_git
def test_the_tools_have_the_version_and_the_licence_of_the_library(archives):
    facts, licences = {}, {}
    for name in FOLDERS:
        with zipfile.ZipFile(wheel_of(archives, name)) as file:
            inside = {Path(member).name: member for member in file.namelist() if ".dist-info/" in member}
            facts[name] = message_from_string(file.read(inside["METADATA"]).decode())
            licences[name] = file.read(inside["LICENSE"])
    assert facts["quire_tools"]["Version"] == facts["quire"]["Version"]
    assert licences["quire_tools"] == licences["quire"] == (ROOT / "LICENSE").read_bytes()
    assert "quire" in facts["quire_tools"].get_all("Requires-Dist")


@needs_git
def test_an_index_shows_links_that_lead_somewhere_and_extras_for_users_alone(archives):
    with zipfile.ZipFile(wheel_of(archives, "quire")) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        facts = message_from_string(file.read(name).decode())
    text = facts.get_payload()
    assert facts["Description-Content-Type"].startswith("text/markdown")
    assert isinstance(text, str) and text.strip().startswith("# Quire") and not RELATIVE.search(text)
    assert set(facts.get_all("Provides-Extra", [])) == {"transformers", "vllm", "sglang"}


def test_relative_links_lead_to_the_repository_once_it_has_an_address(tmp_path):
    shutil.copy(ROOT / "setup.py", tmp_path)
    text = '<img alt="A" src="docs/a.png" width="9">![A plot](docs/a.png)[Page](docs/b.md#c), [there](https://d.e/f)'
    (tmp_path / "README.md").write_text(text)
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    description = runpy.run_path(str(tmp_path / "setup.py"))["long_description"]
    assert description() == "Page, [there](https://d.e/f)"
    (tmp_path / "pyproject.toml").write_text('[project]\nurls = { Repository = "https://a.b/c" }\n')
    assert description() == (
        '<img alt="A" src="https://a.b/c/raw/HEAD/docs/a.png" width="9">'
        "![A plot](https://a.b/c/raw/HEAD/docs/a.png)[Page](https://a.b/c/blob/HEAD/docs/b.md#c), [there](https://d.e/f)"
    )


# What is required


@pytest.mark.parametrize(
    ("system", "triton"), [("linux", {"triton"}), ("win32", {"triton-windows"}), ("darwin", set())]
)
def test_each_system_gets_its_triton(system, triton):
    required = map(Requirement, PROJECT["project"]["dependencies"])
    names = {r.name for r in required if r.marker is None or r.marker.evaluate({"sys_platform": system})}
    assert names == {"torch", "packaging"} | triton


def test_the_newest_versions_that_were_tested_are_those_of_the_makefile():
    """The bound of `quire doctor` is the next version."""
    pins = re.findall(r"\b(torch|triton)==([\d.]+)", (ROOT / "Makefile").read_text())
    pins += [("sglang", pin) for pin in re.findall(r"^SGLANG := .* (\S+)$", (ROOT / "Makefile").read_text(), re.M)]
    for bound in (Requirement(text) for line in TESTED for text in line):
        (limit,) = bound.specifier
        *head, next_one = Version(limit.version).release
        newest = max(Version(pin).release for name, pin in pins if name == bound.name)
        assert limit.operator == "<" and newest[: len(head) + 1] == (*head, next_one - 1)


def test_no_advice_asks_an_index_for_quire():
    """There is no release, so `pip install quire-tools` finds nothing."""
    folders = ("src", "tools", "scripts", "examples", "docs", ".github")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".md", ".yml")]
    files += [*ROOT.glob("*.md"), ROOT / "Makefile"]
    asked = re.compile(r"pip install [^\n`]*(?<![\w./-])'?quire\b(?!/)")
    found = {str(path.relative_to(ROOT)): asked.findall(path.read_text("utf-8")) for path in files}
    assert not {name: lines for name, lines in found.items() if lines and name != "CHANGELOG.md"}
