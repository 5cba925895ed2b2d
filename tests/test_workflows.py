"""What workflows do in a shell is tried here, with repositories in a folder."""

import json
import os
import subprocess
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml", reason="Transformers brings it")
ROOT = Path(__file__).parent.parent
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in (ROOT / ".github/workflows").glob("*.yml")}


def git(*arguments: object, cwd: Path) -> str:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    command = ["git", *identity, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, check=True, capture_output=True, text=True).stdout


def script(step: str) -> str:
    return next(each["run"] for each in WORKFLOWS["gpu"]["jobs"]["gpu"]["steps"] if each.get("name") == step)


def test_the_history_of_a_night_is_on_its_branch_the_next_night(tmp_path):
    origin = tmp_path / "origin.git"
    git("init", "--quiet", "--bare", origin, cwd=tmp_path)
    (tmp_path / "first").mkdir()
    git("init", "--quiet", cwd=tmp_path / "first")
    git("commit", "--quiet", "--allow-empty", "-m", "a commit", cwd=tmp_path / "first")
    git("push", "--quiet", origin, "HEAD:refs/heads/main", cwd=tmp_path / "first")
    for night in (1, 2, 3):
        folder = tmp_path / f"night{night}"
        git("clone", "--quiet", "--branch", "main", origin.as_uri(), folder, cwd=tmp_path)
        run = {"cwd": folder, "check": True, "env": os.environ | {"GITHUB_SHA": "0123456789abcdef"}}
        subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script("The times so far")], **run)
        history = folder / "build/history.json"
        before = json.loads(history.read_text()) if history.exists() else []
        assert before == [*range(1, night)]
        history.write_text(json.dumps([*before, night]))
        subprocess.run(["bash", "-e", "-o", "pipefail", "-c", script("Keep them")], **run)
    assert git("log", "--format=%s", "history", cwd=origin).splitlines() == ["Times of 0123456789ab"] * 3
    assert git("ls-tree", "--name-only", "history", cwd=origin).split() == ["history.json"]


def test_every_make_target_of_a_workflow_is_one_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text("utf-8")
    steps = [step for flow in WORKFLOWS.values() for job in flow["jobs"].values() for step in job["steps"]]
    lines = [step["run"] for step in steps if step.get("run", "").startswith("make ")]
    targets = {word for line in lines for word in line.split()[1:] if "=" not in word and "$" not in word}
    targets -= {"${{", "matrix.suites", "matrix.suite", "}}"}
    assert len(targets) > 5
    patterns = ("test-vllm", "test-sglang")  # made of a list
    missing = {name for name in targets if f"\n{name}:" not in makefile and name not in patterns}
    assert missing <= {".venv/.ready"}
