"""Judge mutants: run a test of the suite on a copy of the package with one place broken.

The tests use `Server`. It starts `python -m tests.mutations.server`, a process that imports PyTorch, Triton and pytest
once, an engine when a judge needs it, and never Quire. This process forks a child for each mutant. The child imports
the broken copy and runs the judge in pytest: a mutant costs the time of its judge and less than a second.
"""

import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "src" / "quire"
PASSED, FAILED, PYTEST_FAILED = 0, 1, 3  # exit codes of pytest
TOO_LONG = 120  # seconds
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

    def __init__(self) -> None:
        # pytest-xdist's variables would tell the judge that it is one of several processes.
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.environ.get("PYTHONPATH", "")}
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # no judge needs a plug-in; their imports take time
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.mutations.server"],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip

    def judge(self, mutant: Mutant) -> Verdict:
        """Run a mutant's judge on the broken package."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps(mutant), file=self.process.stdin, flush=True)
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
def broken(mutant: Mutant, package: Path) -> Iterator[None]:
    """Break a copy of the package in this context.

    Raises:
        LookupError: the text to replace is not there exactly once.
    """
    file = package / mutant.file
    text = (PACKAGE / mutant.file).read_text()
    if text.count(mutant.right) != 1:
        raise LookupError(f"{mutant.file} holds {mutant.right!r} {text.count(mutant.right)} times; the place has moved")
    forget_bytecode(file)
    file.write_text(text.replace(mutant.right, mutant.wrong))
    try:
        yield
    finally:
        forget_bytecode(file)  # a process that a judge started may have written it
        shutil.copy2(PACKAGE / mutant.file, file)


def forget_bytecode(file: Path) -> None:
    """Delete the bytecode of a file: another text may have the same size and, to the second, the same time."""
    for bytecode in file.parent.glob(f"__pycache__/{file.stem}.*"):
        bytecode.unlink()


def run_judge(mutant: Mutant, folder: str, log: str) -> int:
    """Run the judge in this process, which ends afterwards; return its exit code."""
    import pytest

    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    signal.alarm(TOO_LONG)
    sys.path.insert(0, folder)
    os.environ["PYTHONPATH"] = f"{folder}:{os.environ['PYTHONPATH']}"  # of the processes that judges start
    sys.dont_write_bytecode = True
    judge = str(ROOT / "tests" / mutant.judge)
    # Most judges fail. To show where, pytest would parse the files of the traceback, and to say what was compared, it
    # would rewrite the judge's file in each child.
    brief = "-q", "--tb=native", "--assert=plain"
    every = "-m", ""  # case, also an extended one
    code = pytest.main(["-x", *brief, *every, "-p", "no:cacheprovider", "--rootdir", str(ROOT), judge])
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


def judge_in_a_child(mutant: Mutant, package: Path) -> Verdict:
    """Run the judge on a copy of the package with its place broken."""
    import_engine(mutant.judge)
    gc.freeze()  # pytest collects garbage in each child, which would go through what is imported here
    log = package.parent / "log"
    log.unlink(missing_ok=True)
    try:
        with broken(mutant, package):
            child = os.fork()
            if child == 0:
                code = 99
                try:
                    code = run_judge(mutant, str(package.parent), str(log))
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            _, status = os.waitpid(child, 0)
    except LookupError as error:
        return Verdict(-1000, str(error))
    output = log.read_text(errors="replace") if log.exists() else ""
    return Verdict(os.waitstatus_to_exitcode(status), output[-3000:])


def main() -> None:
    """Judge the mutants that come in, each in a child."""
    import torch

    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        package = copy_package(Path(folder))
        for line in sys.stdin:
            print(json.dumps(judge_in_a_child(Mutant(*json.loads(line)), package)), flush=True)
    gc.unfreeze()  # otherwise Triton's binding reports what it finds alive at the end


if __name__ == "__main__":
    main()
