"""`quire doctor`: what it finds, what it says of that, and its exit code."""

import importlib.metadata
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
import warnings
from email.message import Message
from pathlib import Path

import pytest
import torch

import quire
from quire.cli import doctor, doctor_kernels, doctor_versions, main
from quire.cli.exit_codes import INTERRUPTED
from quire.cli.status_line import StatusLine
from quire.dispatch.device import compile_for
from quire.targets import TARGETS

pytestmark = pytest.mark.slow

START = subprocess.Popen
ROOT = Path(__file__).parent.parent
EVENTS = (
    {"step": "compiling and running: decode"},
    {"kernel": "attention (split_kv)", "dtype": "float16", "feature": "decode", "over_budget": 0.4, "passed": True},
)


@pytest.fixture
def kernels(monkeypatch):
    """Return a function that replaces the process that runs kernels by one that prints these lines and ends so."""

    def install(*events, code: str = "") -> None:
        lines = "\n".join(json.dumps(event | {"seconds": 0.1}) for event in events)
        program = f"import os, signal, sys\nprint({lines!r}, flush=True)\n{code}"
        monkeypatch.setattr(subprocess, "Popen", lambda command, **o: START([sys.executable, "-c", program], **o))

    install(*EVENTS)
    return install


@pytest.fixture
def metadata(monkeypatch):
    """Return a function that gives Quire made-up metadata, and packages made-up versions and requirements."""

    def install(
        requires: list[str], versions: dict[str, str | None], python: str = ">=3.11", **others: list[str]
    ) -> None:
        facts = Message()
        facts["Version"], facts["Requires-Python"] = "0.1.0", python
        for extra in ("transformers", "vllm", "sglang"):
            facts["Provides-Extra"] = extra
        monkeypatch.setattr(importlib.metadata, "metadata", lambda name: facts)
        monkeypatch.setattr(importlib.metadata, "requires", {"quire": requires, **others}.get)
        monkeypatch.setattr(doctor_versions, "version_of", ({"numpy": "2.3"} | versions).get)

    return install


def lines_of(capsys, *arguments: str) -> tuple[int, list[str]]:
    code = main(["doctor", *arguments])
    return code, capsys.readouterr().out.splitlines()


def lines_with(lines: list[str], word: str) -> list[str]:
    return [line for line in lines if word in line]


def test_it_finds_this_machine_fit(capsys):
    """The whole command, with the process that runs kernels."""
    code, lines = lines_of(capsys)
    assert (code, lines[-1].startswith("This machine can run Quire.")) == (0, True), lines
    assert lines_with(lines, f"torch {importlib.metadata.version('torch')} is supported (>=2.")
    judged = lines_with(lines, "of its budget")
    assert len(judged) >= 3 and all(line.startswith("ok ") for line in judged)
    assert {line[:5].strip() for line in lines[:-1]} <= {"ok", "warn"}


@pytest.mark.usefixtures("kernels")
def test_one_problem_makes_the_exit_code_1(metadata, capsys):
    metadata(["torch>=2.6"], {"torch": "2.5.1"})
    code, lines = lines_of(capsys)
    assert code == 1
    assert lines_with(lines, "torch 2.5.1 is not supported: Quire needs torch>=2.6. Run: pip install 'torch>=2.6'")
    assert lines[-1] == "This machine can't run Quire: 1 problem."


# Versions


def test_ranges_are_those_of_the_project():
    """The metadata is what an installer made of pyproject.toml; nothing is copied."""
    source = "".join(path.read_text() for path in (ROOT / "src/quire/cli").glob("doctor*.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = [re.sub(r"^[\w\[\]-]+|;.*", "", text) for text in project["dependencies"]]
    assert ">=2.10" in ranges
    assert not [served for served in ranges if served and served in source]
    assert project["requires-python"] not in source


@pytest.mark.parametrize(
    ("version", "level"),
    [("2.6.0", "ok"), ("2.11.0+cu130", "ok"), ("2.14.0a0+git1a2b", "ok"), ("2.5.1", "FAIL"), (None, "FAIL")],
)
def test_versions_are_compared_with_the_ranges(version, level, metadata):
    metadata(["torch>=2.6"], {"torch": version})
    *_, (found, text) = doctor_versions.check_versions()
    assert found == level and "torch" in text
    assert (level == "ok") == ("pip install" not in text)


def test_packages_of_extras_may_be_absent_and_of_another_version(metadata):
    requires = ["rich<15,>=13; extra == 'transformers'", "psutil; extra == 'transformers'"]
    metadata(requires, {"rich": "16.0"})
    lines = list(doctor_versions.check_versions())[2:]
    text = "rich 16.0 is not supported: the extra transformers needs rich<15,>=13. Run: pip install 'rich<15,>=13'"
    assert lines == [("warn", text)]


def test_markers_are_obeyed(metadata):
    metadata(["triton>=3.6; sys_platform == 'another'", "torch; python_version > '3'"], {"torch": "2.6"})
    lines = list(doctor_versions.check_versions())[2:]
    assert lines == [("ok", "torch 2.6 is supported.")]


QUIRE = [  # as in pyproject.toml
    "torch>=2.10",
    "triton>=3.6; sys_platform == 'linux'",
    "triton-windows>=3.6; sys_platform == 'win32'",
    "vllm<0.34,>=0.20; extra == 'vllm'",
    "sglang<0.6,>=0.5.12; extra == 'sglang'",
]
COMBINATIONS = {  # versions, what packages require, the platform, the level, what is said
    "a torch that is too old for Triton 3.6": (
        {"torch": "2.9.1", "triton": "3.6.0"}, {"torch": ["triton==3.5.1"]}, "linux",
        "FAIL", "torch 2.9.1 is not supported: Quire needs torch>=2.10. Run: pip install 'torch>=2.10'",
    ),
    "a torch for another Triton": (
        {"torch": "2.13.0", "triton": "3.9.0"}, {"torch": ["triton==3.7.1", "sympy"]}, "linux",
        "warn", "torch 2.13.0 requires triton==3.7.1, but triton 3.9.0 is installed: torch.compile may fail. "
        "Run: pip install 'triton==3.7.1'",
    ),
    "a torch for an older Triton": (
        {"torch": "2.15.0", "triton": "3.8.0"}, {"torch": ["triton~=3.9.0"]}, "linux",
        "warn", "torch 2.15.0 requires triton~=3.9.0, but triton 3.8.0 is installed: torch.compile may fail. "
        "Run: pip install 'triton~=3.9.0'",
    ),
    "a Triton that is too old": (
        {"torch": "2.13.0+cpu", "triton": "3.5.1"}, {}, "linux",
        "FAIL", "triton 3.5.1 is not supported: Quire needs triton>=3.6. Run: pip install 'triton>=3.6'",
    ),
    "a Triton that is too new, and its torch": (
        {"torch": "2.16.0", "triton": "3.10.0"}, {"torch": ["triton~=3.10.0"]}, "linux",
        "warn", "torch 2.16.0 and triton 3.10.0: newer than what Quire was tested with. "
        "If it fails, run: pip install 'torch<2.16' 'triton<3.10'",
    ),
    "a Triton that is too new": (
        {"torch": "2.13.0+cpu", "triton": "3.10.0"}, {}, "linux",
        "warn", "triton 3.10.0: newer than what Quire was tested with. "
        "If it fails, run: pip install 'torch<2.16' 'triton<3.10'",
    ),
    "no Triton on Linux": (
        {"torch": "2.15.0"}, {"torch": ["triton~=3.9.0"]}, "linux",
        "FAIL", "triton is not installed, and Quire needs triton>=3.6. Run: pip install 'triton>=3.6'",
    ),
    "no Triton on Windows": (
        {"torch": "2.15.0"}, {}, "win32",
        "FAIL", "triton-windows is not installed, and Quire needs triton-windows>=3.6. "
        "Run: pip install 'triton-windows>=3.6'",
    ),
    "a Triton that is too new on Windows": (
        {"torch": "2.15.0", "triton-windows": "3.10.0.post1"}, {}, "win32",
        "warn", "triton-windows 3.10.0.post1: newer than what Quire was tested with. "
        "If it fails, run: pip install 'torch<2.16' 'triton-windows<3.10'",
    ),
    "Windows": (
        {"torch": "2.15.0", "triton-windows": "3.8.0.post29"}, {}, "win32",
        "warn", "Windows has not been tried with a GPU. Triton for it is triton-windows.",
    ),
    "two Tritons": (
        {"torch": "2.11.0+rocm7", "triton": "3.6.0", "pytorch-triton-rocm": "3.6.0"},
        {"torch": ["pytorch-triton-rocm==3.6.0"]}, "linux",
        "FAIL", "triton and pytorch-triton-rocm are installed together, and each overwrites the other's files. "
        "Run: pip uninstall --yes triton pytorch-triton-rocm. Then run, with the index that torch came from: "
        "pip install 'pytorch-triton-rocm==3.6.0'",
    ),
    "two Tritons on Windows": (
        {"torch": "2.15.0", "triton": "3.8.0", "triton-windows": "3.8.0.post29"}, {}, "win32",
        "FAIL", "Run: pip uninstall --yes triton triton-windows.",
    ),
    "a vLLM that is too new": (
        {"torch": "2.15.0", "triton": "3.9.0", "vllm": "0.34.0"}, {"vllm": ["torch==2.15.0"]}, "linux",
        "warn", "vllm 0.34.0 is not supported: the extra vllm needs vllm<0.34,>=0.20. "
        "Run: pip install 'vllm<0.34,>=0.20'",
    ),
    "a vLLM for another torch": (
        {"torch": "2.15.0", "triton": "3.9.0", "vllm": "0.33.0"}, {"vllm": ["torch==2.14.0"]}, "linux",
        "warn", "vllm 0.33.0 requires torch==2.14.0, but torch 2.15.0 is installed: its compiled operators may not "
        "load. Run: pip install 'torch==2.14.0'",
    ),
    "an SGLang that is too old": (
        {"torch": "2.10.0", "triton": "3.6.0", "sglang": "0.5.11"}, {}, "linux",
        "warn", "sglang 0.5.11 is not supported: the extra sglang needs sglang<0.6,>=0.5.12. "
        "Run: pip install 'sglang<0.6,>=0.5.12'",
    ),
    "an SGLang that is too new": (
        {"torch": "2.14.1", "triton": "3.8.0", "sglang": "0.5.24"}, {"sglang": ["torch==2.14.1"]}, "linux",
        "warn", "sglang 0.5.24: newer than what Quire was tested with. If it fails, run: pip install 'sglang<0.5.24'",
    ),
    "an SGLang for another torch": (
        {"torch": "2.14.0", "triton": "3.8.0", "sglang": "0.5.23"}, {"sglang": ["torch==2.14.1"]}, "linux",
        "warn", "sglang 0.5.23 requires torch==2.14.1, but torch 2.14.0 is installed: its compiled kernels may not "
        "load. Run: pip install 'torch==2.14.1'",
    ),
    "no NumPy": (
        {"torch": "2.15.0", "triton": "3.9.0", "numpy": None}, {}, "linux",
        "warn", "numpy is not installed: torch warns of that, and Triton's interpreter needs it. "
        "Run: pip install numpy",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", COMBINATIONS)
def test_a_combination_that_does_not_fit_is_named_with_what_to_install(name, metadata, monkeypatch):
    versions, others, system, level, said = COMBINATIONS[name]
    monkeypatch.setattr(sys, "platform", system)
    metadata(QUIRE, versions, **others)
    lines = [line for line in doctor_versions.check_versions() if line[0] != "ok"]
    untried = [line for line in lines if line[1].startswith("Windows") and name != "Windows"]
    assert len(untried) == (system == "win32" and name != "Windows")
    ((found, text),) = [line for line in lines if line not in untried]
    assert found == level and said in text


FITS = {
    "PyPI's newest": ({"torch": "2.15.0", "triton": "3.9.0"}, {"torch": ["triton~=3.9.0"]}),
    "a torch for the CPU requires no Triton": ({"torch": "2.13.0+cpu", "triton": "3.9.0"}, {"torch": ["sympy"]}),
    "torch for AMD brings a Triton of another name": (
        {"torch": "2.11.0+rocm7", "pytorch-triton-rocm": "3.6.0"}, {"torch": ["pytorch-triton-rocm==3.6.0"]}
    ),
    "vLLM": (
        {"torch": "2.14.0+cu130", "triton": "3.8.0", "vllm": "0.33.0"},
        {"torch": ["triton~=3.8.0"], "vllm": ["torch==2.14.0", "numpy"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FITS)
def test_a_combination_that_fits_is_ok(name, metadata, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    versions, others = FITS[name]
    metadata(QUIRE, versions, **others)
    assert {level for level, _ in doctor_versions.check_versions()} == {"ok"}


def test_another_python_is_named(metadata):
    metadata([], {}, python=">=4")
    assert ("FAIL", "not supported: Quire needs >=4") in [
        (level, text[text.index("not supported") :].split(". ")[0]) for level, text in doctor_versions.check_versions()
        if level == "FAIL"
    ]  # fmt: skip


def test_a_package_without_metadata_is_no_problem(monkeypatch):
    monkeypatch.setattr(doctor_versions, "DISTRIBUTION", "quire-that-is-not-installed")
    level, text = next(doctor_versions.check_versions())
    assert level == "warn" and "pip install ." in text


# Folders


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("variable", "word"), [("HOME", "the numbers of quire tune"), ("TRITON_CACHE_DIR", "Triton's compiled kernels")]
)
def test_a_folder_that_cannot_be_written_is_a_problem(variable, word, tmp_path, monkeypatch, capsys):
    blocked = tmp_path / "file"
    blocked.write_text("a file where a folder should be")
    monkeypatch.setenv(variable, str(blocked))
    code, lines = lines_of(capsys)
    assert code == 1
    (line,) = [line for line in lines_with(lines, word) if line.startswith("FAIL")]
    assert str(blocked) in line and "To correct it" in line


def test_folders_that_are_not_there_are_not_made(tmp_path):
    assert doctor.why_not_writable(tmp_path / "a/b/c") is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_named(tmp_path):
    tmp_path.chmod(0o500)
    assert doctor.why_not_writable(tmp_path) == "Permission denied"


def test_files_of_numbers_that_are_not_sound_are_named(monkeypatch):
    def read():
        warnings.warn("mine.json is left out: it is not JSON", stacklevel=1)
        return (("other.json", {}),)

    monkeypatch.setattr(doctor, "user_files", read)
    assert [str(finding) for finding in doctor.check_user_files()] == [
        "warn  mine.json is left out: it is not JSON",
        "ok    Plans use the user's numbers where they fit: other.json.",
    ]


# The device


def test_a_driver_that_torch_does_not_see_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    advice = {"NVIDIA": ("Run: pip install --force-reinstall torch.", "CUDA."), "AMD": ("ROCm.",)}
    for vendor, _, what in doctor.DRIVERS:
        monkeypatch.setattr(doctor, "DRIVERS", ((vendor, tmp_path, what),))
        (finding,) = doctor.check_device()
        assert finding.level == "FAIL" and what.endswith(advice[vendor])
        assert f"for {vendor} GPUs" in finding.text and f"is built for CPUs only. {what}" in finding.text
    monkeypatch.setattr(doctor, "DRIVERS", ())
    (finding,) = doctor.check_device()
    assert finding.level == "ok" and "no GPU" in finding.text


@pytest.mark.parametrize(("compiler", "level"), [(sys.executable, "ok"), ("/nowhere/cc", "FAIL")])
def test_a_gpu_needs_a_compiler(compiler, level, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "a made-up GPU")
    monkeypatch.setenv("CC", compiler)
    first, second = doctor.check_device()
    assert "a made-up GPU, and 2 more GPUs" in first.text
    assert second.level == level and "launcher" in second.text
    monkeypatch.setattr(doctor, "HAS_TRITON", False)
    for system, package in (("linux", "triton"), ("win32", "triton-windows")):
        monkeypatch.setattr(sys, "platform", system)
        assert list(doctor.check_device())[1].text.endswith(f"pip install {package}")


# Kernels


def findings(is_interpreted: bool = False) -> list[doctor.Finding]:
    with StatusLine() as status:
        return list(doctor.run_kernels(is_interpreted, status))


def test_kernels_that_are_right_are_named(kernels):
    (finding,) = findings()
    assert str(finding) == (
        "ok    attention (split_kv) in float16 (decode, 0.1 s) is right: its error is 40% of its budget."
    )


def test_a_kernel_that_is_wrong_is_a_problem(kernels):
    kernels(EVENTS[0], EVENTS[1] | {"passed": False, "over_budget": 70.0})
    (finding,) = findings()
    assert finding.level == "FAIL" and "is wrong: its error is 70.0 times its budget" in finding.text


def test_a_kernel_that_does_not_compile_is_a_problem(kernels):
    kernels(EVENTS[0], EVENTS[1] | {"failure": "CompilationError: at 1:1."}, *EVENTS)
    first, second = findings()
    assert first.level == "FAIL" and "does not run: CompilationError: at 1:1. Run quire check" in first.text
    assert second.level == "ok"


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", "ended with signal 11 while it was compiling and running: decode"),
        ("sys.exit('no libcuda here')", "ended with code 1 while it was compiling and running: decode: no libcuda"),
    ],
)
def test_a_process_that_crashes_is_a_problem(code, words, kernels):
    kernels(EVENTS[0], code=code)
    (finding,) = findings()
    assert finding.level == "FAIL" and words in finding.text


def test_a_failure_of_a_kernel_is_reported_by_the_process(monkeypatch, capsys):
    def fail(*args):
        raise RuntimeError("\n  PTX was compiled with an unsupported toolchain\nat ...")

    monkeypatch.setattr(doctor_kernels, "check_feature", fail)
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    doctor_kernels.main()
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {event["failure"] for event in events if "failure" in event} == {
        "RuntimeError: PTX was compiled with an unsupported toolchain."
    }
    assert len(events) == 2 * len([event for event in events if "step" in event]) >= 6


def test_the_interpreter_runs_the_kernels_on_request(monkeypatch):
    seen = {}

    def start(command, **options):
        seen.update(options["env"])
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "Popen", start)
    with pytest.raises(KeyboardInterrupt):
        findings(is_interpreted=True)
    assert seen["TRITON_INTERPRET"] == "1" and seen["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setattr(doctor, "HAS_TRITON", False)
    (finding,) = findings(is_interpreted=True)
    assert finding.level == "FAIL" and "There is no Triton" in finding.text


# Plans


@pytest.mark.parametrize(("target", "kernels"), [("sm90", {"split_kv", "hopper"}), ("gfx942", {"split_kv", "block"})])
def test_each_kind_of_batch_has_a_kernel_and_a_reason(target, kernels):
    with compile_for(TARGETS[target].properties, on_compile=lambda *args: None):
        found = list(doctor.describe_plans())
    assert all(finding.level == "ok" for finding in found)
    text = "\n".join(map(str, found))
    for kernel in kernels:
        assert f"the {kernel} kernel, since its predicted time is the least" in text
    assert "a prompt of 4,096 tokens" in text


def test_plans_are_set_off_from_the_interpreter_s_lines():
    with compile_for(TARGETS["sm90"].properties, on_compile=lambda *args: None):
        found = list(doctor.describe_plans(is_interpreted=True))
    assert found and all(finding.text.startswith("without the interpreter, ") for finding in found)


def test_a_batch_that_nothing_serves_is_a_problem(monkeypatch):
    def refuse(*args):
        raise quire.UnsupportedError("spec must be another, got this; use that")

    monkeypatch.setattr(doctor, "plan_for", refuse)
    assert {finding.level for finding in doctor.describe_plans()} == {"FAIL"}


# Progress and interrupts


class Terminal:
    """A stream that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_a_terminal_shows_the_step_and_its_time(monkeypatch, capsys):
    terminal = Terminal()
    monkeypatch.setattr("quire.cli.status_line.INTERVAL", 0.01)
    monkeypatch.setattr(sys, "stderr", terminal)
    with StatusLine() as status:
        status("compiling and running: decode")
        deadline = time.monotonic() + 30
        while "decode, 1 s" not in terminal.text and time.monotonic() < deadline:
            time.sleep(0.05)
        status.say("a line")
    assert "compiling and running: decode, 0 s" in terminal.text and "decode, 1 s" in terminal.text
    assert terminal.text.endswith("\r\x1b[K")
    assert capsys.readouterr().out == "a line\n"


def test_without_a_terminal_nothing_is_shown(capsys):
    with StatusLine() as status:
        status("compiling")
        status.say("a line")
    assert capsys.readouterr() == ("a line\n", "")


STUCK = """
import signal, subprocess, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it, and so would this
from quire.cli import doctor, main
start = subprocess.Popen
def stuck(command, **options):
    program = "import os, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(300)"
    return start([sys.executable, "-c", f"import sys; {program}", sys.argv[1]], **options)
subprocess.Popen = stuck
sys.exit(main(["doctor"]))
"""


def test_an_interrupt_leaves_at_once_and_ends_the_process_that_runs_kernels(tmp_path):
    file = tmp_path / "pid"
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(file)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while not (file.exists() and file.read_text()) and process.poll() is None:
            time.sleep(0.1)
        begun = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
        assert time.monotonic() - begun < 10
    assert (process.returncode, errors) == (INTERRUPTED, "interrupted\n")
    assert "is installed." in output  # what was found before
    with pytest.raises(ProcessLookupError):
        os.kill(int(file.read_text()), 0)
