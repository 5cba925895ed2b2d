"""Judge mutants: run a test of the suite on a copy of the package with one place broken.

The tests use `Server`. It starts `python -m tests.mutations.server`, a process that imports PyTorch, Triton and pytest
once, an engine when a judge needs it, and never Quire. This process forks a child for each mutant. The child imports
the broken copy and runs the judge in pytest: a mutant costs the time of its judge and less than a second.
"""

import gc
import importlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "quire"
PASSED, FAILED, PYTEST_FAILED = 0, 1, 3  # exit codes of pytest
TOO_LONG, STUCK = 120, 600  # seconds of CPU time, and of any time
# What judges import of other packages. PyTorch imports its parts and SymPy when a first operator of a kind needs them.
IMPORTED_ONCE = (
    "hypothesis", "numpy", "pytest", "torch._dynamo", "torch.fx.experimental.symbolic_shapes",
    "triton.experimental.gluon", "triton.experimental.gluon.nvidia.hopper",
)  # fmt: skip


class Mutant(NamedTuple):
    """One place of the package, broken, and the test that must notice.

    Attributes:
        file: relative to the package.
        right: the text to replace, found once.
        wrong: the text to put there.
        judge: node id of a test, a parametrised test or a file, relative to tests/.
    """

    file: str
    right: str
    wrong: str
    judge: str

    def text(self) -> str:
        """Return the text of the broken file.

        Raises:
            LookupError: the text to replace is not there exactly once.
        """
        text = (PACKAGE / self.file).read_text()
        if text.count(self.right) != 1:
            found = text.count(self.right)
            raise LookupError(f"{self.file} holds {self.right!r} {found} times; the place has moved")
        return text.replace(self.right, self.wrong)


class Verdict(NamedTuple):
    """What became of a judge."""

    status: int  # exit code of pytest; negative where a signal ended it
    output: str

    @property
    def noticed(self) -> bool:
        """Whether a test failed, or the process crashed.

        pytest itself may crash where a broken kernel wrote to memory that is not its own.
        """
        return self.status in (FAILED, PYTEST_FAILED, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS)


class Server:
    """A process that judges mutants, until it is closed."""

    def __init__(self, interprets: bool | None = None) -> None:
        """Start the process, with Triton's interpreter or without it. By default, it is as in this process."""
        # pytest-xdist's variables would tell the judge that it is one of several processes.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no judge needs a plug-in; their imports take time
        if interprets is not None:
            environment["TRITON_INTERPRET"] = str(int(interprets))
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutations.server"],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def judge(self, mutant: Mutant) -> Verdict:
        """Run a mutant's judge on the broken package."""
        return self.run(mutant.file, mutant.text(), (mutant.judge,), every_case=True)

    def run(self, file: str, text: str, judges: Sequence[str], every_case: bool = False) -> Verdict:
        """Run judges until one fails, with a text in the place of a file's. Extended cases run if every case does."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps((file, text, judges, every_case)), file=self.process.stdin, flush=True)
        return Verdict(*json.loads(self.process.stdout.readline()))

    def close(self) -> None:
        """End the process."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def copy_package(folder: Path) -> Path:
    """Copy the package into a folder; return the copy.

    It has the bytecode that there is. Python takes it for source of the same time, which a copy keeps.
    """
    return Path(shutil.copytree(PACKAGE, folder / "quire", ignore=shutil.ignore_patterns("demo_model")))


@contextmanager
def broken(file: str, text: str, package: Path) -> Iterator[None]:
    """In this context, a file of a copy of the package has another text."""
    place = package / file
    forget_bytecode(place)
    place.write_text(text)
    try:
        yield
    finally:
        forget_bytecode(place)  # a process that a judge started may have written it
        shutil.copy2(PACKAGE / file, place)


def forget_bytecode(file: Path) -> None:
    """Delete the bytecode of a file: another text may have the same size and, to the second, the same time."""
    for bytecode in file.parent.glob(f"__pycache__/{file.stem}.*"):
        bytecode.unlink()


def run_judges(judges: Sequence[str], every_case: bool, folder: str, log: str) -> int:
    """Run judges in this process, which ends afterwards; return pytest's exit code."""
    import pytest

    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    resource.setrlimit(resource.RLIMIT_CPU, (TOO_LONG, TOO_LONG + 9))
    signal.alarm(STUCK)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ['PYTHONPATH']}"  # of the processes that judges start
    sys.dont_write_bytecode = True
    paths = [str(ROOT / "tests" / judge) for judge in judges]
    # Most judges fail. To show where, pytest would parse the files of the traceback, and to say what was compared, it
    # would rewrite the judge's file in each child.
    brief = "-q", "--tb=native", "--assert=plain"
    every = ("-m", "") if every_case else ()
    code = pytest.main(["-x", *brief, *every, "-p", "no:cacheprovider", "--rootdir", str(ROOT), *paths])
    import quire

    assert str(quire.__file__).startswith(folder)
    return int(code)


def import_engine(judge: str) -> None:
    """Import what takes most of the time of a judge in tests/engines, if that is where it is."""
    file = judge.partition("::")[0]
    if file.startswith("engines/test_vllm"):
        for name in ("tests.engines.vllm_environment", "vllm.v1.core.sched.scheduler", "vllm.v1.attention.backend"):
            importlib.import_module(name)
    elif file.startswith("engines/test_transformers"):
        importlib.import_module("transformers")


def judge_in_a_child(file: str, text: str, judges: Sequence[str], every_case: bool, package: Path) -> Verdict:
    """Run judges on a copy of the package with another text of a file."""
    for judge in judges:
        import_engine(judge)
    gc.freeze()  # pytest collects garbage in each child, which would go through what is imported here
    log = package.parent / "log"
    log.unlink(missing_ok=True)
    with broken(file, text, package):
        child = os.fork()
        if child == 0:
            code = 99
            try:
                code = run_judges(judges, every_case, str(package.parent), str(log))
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
    output = log.read_text(errors="replace") if log.exists() else ""
    return Verdict(os.waitstatus_to_exitcode(status), output[-3000:])


def main() -> None:
    """Judge what comes in, each mutant in a child."""
    import torch

    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        package = copy_package(Path(folder))
        for line in sys.stdin:
            print(json.dumps(judge_in_a_child(*json.loads(line), package)), flush=True)
    gc.unfreeze()  # otherwise Triton's binding reports what it finds alive at the end


if __name__ == "__main__":
    main()
