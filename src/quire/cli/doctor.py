"""`quire doctor`: check whether this machine can run Quire, and say so in plain sentences.

It compares versions with the ranges in Quire's package metadata, looks for what Triton needs, tries to write into the
folders that Quire and Triton use, compiles and runs kernels in a separate process, and says which kernel each kind of
batch would take. Every line that is not "ok" says what to do.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from quire import log
from quire.cli.arguments import triton_package
from quire.cli.doctor_versions import check_versions
from quire.cli.env import plan_for
from quire.cli.status_line import StatusLine
from quire.dispatch.constants import VARIABLE, constants_of, refuse_trees, user_files, user_folder
from quire.dispatch.device import HAS_TRITON, device_properties, interprets
from quire.errors import UnsupportedError
from quire.spec import AttentionSpec

EXAMPLES = """examples:
  quire doctor
  QUIRE_LOG=plan quire doctor           # the whole of each decision; programs that use Quire print theirs, too
  quire doctor --interpret              # run the Triton kernels on the CPU, in Triton's interpreter; takes some seconds
"""
PAGE = "https://pytorch.org/get-started/locally/ says from which index to install a build for"
DRIVERS = (  # of whose GPUs, a file of the driver, how to install a build of torch for them
    (
        "NVIDIA",
        Path("/proc/driver/nvidia/version"),
        "Run: pip install --force-reinstall torch.",
    ),
    ("NVIDIA", Path("C:/Windows/System32/nvcuda.dll"), f"{PAGE} CUDA."),
    ("AMD", Path("/dev/kfd"), f"{PAGE} ROCm."),
)


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        level: "FAIL" where Quire will not work, "warn" where a part of it will not.
        text: what was found, and what to do about it; sentences.
    """

    level: Literal["ok", "warn", "FAIL"]
    text: str

    def __str__(self) -> str:
        return f"{self.level:5} {self.text}"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "doctor",
        help=summary,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--interpret", action="store_true", help="run the Triton kernels in Triton's interpreter, on the CPU"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit code is 1 when this machine can't run Quire."""
    counts = dict.fromkeys(("ok", "warn", "FAIL"), 0)
    with StatusLine() as status:
        for finding in examine(args.interpret, status):
            counts[finding.level] += 1
            status.say(str(finding))
    problems, remarks = counts["FAIL"], counts["warn"]
    also = f" {count(remarks, 'line')} above say what works in part." if remarks else ""
    if problems:
        print(f"This machine can't run Quire: {count(problems, 'problem')}.{also}")
        return 1
    print(f"This machine can run Quire.{also}")
    return 0


def count(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def examine(is_interpreted: bool, status: StatusLine) -> Iterator[Finding]:
    """Look at everything, in order."""
    status("reading versions")
    for level, text in check_versions():
        yield Finding(level, text)
    yield from check_device()
    yield from check_folders()
    yield from check_user_files()
    yield from run_kernels(is_interpreted, status)
    status("planning")
    yield from describe_plans(is_interpreted)


def check_device() -> Iterator[Finding]:
    """Say which device serves, and whether Triton finds what it needs to launch on it."""
    if torch.cuda.is_available():
        index = torch.cuda.current_device()
        others = torch.cuda.device_count() - 1
        more = f", and {count(others, 'more GPU')}" if others else ""
        yield Finding("ok", f"torch {torch.__version__} sees GPU {index}, {torch.cuda.get_device_name(index)}{more}.")
        if not HAS_TRITON:
            yield Finding("FAIL", f"The GPU kernels need Triton, which is missing. Run: pip install {triton_package()}")
        compiler = os.environ.get("CC") or next(filter(shutil.which, ("gcc", "clang", "cc")), None)
        if compiler is None or shutil.which(compiler) is None:
            yield Finding(
                "FAIL",
                "There is no C compiler, with which Triton builds its launcher. Install gcc, or set CC to a compiler.",
            )
        else:
            yield Finding("ok", f"Triton builds its launcher with {compiler}.")
        return
    driver = next(((vendor, advice) for vendor, path, advice in DRIVERS if path.exists()), None)
    if driver is None:
        yield Finding("ok", "There is no GPU here. PyTorch serves CPU tensors, which is meant for tests.")
        return
    built = torch.version.cuda or torch.version.hip
    reason = f"is built for {built}, which this driver may not serve" if built else "is built for CPUs only"
    vendor, advice = driver
    yield Finding(
        "FAIL",
        f"There is a driver for {vendor} GPUs, but torch sees none: torch {torch.__version__} {reason}. "
        f"{advice if built is None else 'Update the driver, or install a torch for its version.'} "
        "See that CUDA_VISIBLE_DEVICES is not empty.",
    )


def check_folders() -> Iterator[Finding]:
    """Say whether the folders that are written to can be written."""
    folders = {"temporary files": Path(tempfile.gettempdir())}
    advice = {"temporary files": "set TMPDIR"}
    if HAS_TRITON:
        from quire.triton_internals import cache_folder

        folders["Triton's compiled kernels"] = cache_folder()
        advice["Triton's compiled kernels"] = "set TRITON_CACHE_DIR"
    numbers = user_folder()
    if numbers is None:
        yield Finding("warn", f"There is no home folder, so quire tune fit needs --output. Set HOME or {VARIABLE}.")
    else:
        folders["the numbers of quire tune"] = numbers
        advice["the numbers of quire tune"] = f"make it writable, or set {VARIABLE} to a folder that is"
    for what, folder in folders.items():
        problem = why_not_writable(folder)
        if problem is None:
            yield Finding("ok", f"The folder of {what} can be written: {folder}.")
        else:
            yield Finding(
                "FAIL", f"The folder of {what} cannot be written: {folder} ({problem}). To correct it, {advice[what]}."
            )


def why_not_writable(folder: Path) -> str | None:
    """Return why no file can be written into a folder, or into the one it would be made in; None if one can."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(1 << 16))
    except OSError as error:
        return error.strerror or type(error).__name__
    return None


def check_user_files() -> Iterator[Finding]:
    """Say which files of numbers of the user's were read, and which are not sound."""
    try:
        refuse_trees()
    except ValueError as error:
        yield Finding("FAIL", f"{error}.")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = user_files()
    for warning in caught:
        yield Finding("warn", f"{warning.message}")
    if found:
        yield Finding("ok", f"Plans use the user's numbers where they fit: {', '.join(name for name, _ in found)}.")


def run_kernels(is_interpreted: bool, status: StatusLine) -> Iterator[Finding]:
    """Compile kernels and run them in another process, and say how near they come to the oracle."""
    if is_interpreted and not HAS_TRITON:
        yield Finding("FAIL", f"There is no Triton, nor its interpreter. Run: pip install {triton_package()}")
        return
    environment = os.environ | {log.VARIABLE: ""}  # its last message says what went wrong
    environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""} if is_interpreted else {}
    status("starting a process that compiles and runs kernels")
    begun = 0
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as messages:
        command = [sys.executable, "-P", "-m", "quire.cli.doctor_kernels"]  # without the modules of this folder
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=messages, text=True
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.startswith("{"):  # what something else printed
                    continue
                event = json.loads(line)
                if "step" in event:
                    begun += 1
                    status(event["step"])
                else:
                    yield judged(event)
            code = process.wait()
        finally:
            process.kill()
            process.wait()
            process.stdout.close()
        messages.seek(0)
        if code != 0 or not begun:
            last = (messages.read().strip().splitlines() or ["it printed nothing"])[-1]
            how = f"ended with signal {-code}" if code < 0 else f"ended with code {code}"
            during = f" {status.step}" if begun else ""
            yield Finding(
                "FAIL",
                f"The process that runs kernels {how} while it was{during or ' starting'}: {last} "
                "Run quire check to see the whole message; report it with the output of quire env --verbose.",
            )


def judged(event: dict) -> Finding:
    """Return what came of one kernel."""
    what = f"{event['kernel']} in {event['dtype']} ({event['feature']}, {event['seconds']:.1f} s)"
    if "failure" in event:
        return Finding("FAIL", f"{what} does not run: {event['failure']} Run quire check, and report it.")
    if event["passed"]:
        return Finding("ok", f"{what} is right: its error is {event['over_budget']:.0%} of its budget.")
    return Finding(
        "FAIL",
        f"{what} is wrong: its error is {event['over_budget']:.1f} times its budget. Run quire check, and report it.",
    )


def describe_plans(is_interpreted: bool = False) -> Iterator[Finding]:
    """Say which kernel each kind of batch would take on this device, and why.

    Args:
        is_interpreted: whether the lines before are about the interpreter, which these are not.
    """
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    half = torch.float16 if interprets() or not gpu else torch.bfloat16
    heads = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=half)
    fp8 = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=half, kv_dtype=torch.float8_e4m3fn)
    latents = AttentionSpec.mla(num_q_heads=128, softmax_scale=192**-0.5, dtype=half)
    batches = (
        ("decode, 32 sequences of 2,048 keys", heads, ((1, 2048),) * 32),
        ("decode, 1 sequence of 16,384 keys", heads, ((1, 16384),)),
        ("decode on an fp8 cache, 32 of 2,048 keys", fp8, ((1, 2048),) * 32),
        ("drafts, 32 sequences of 8 tokens on 4,096 keys", heads, ((8, 4096),) * 32),
        ("a prompt of 4,096 tokens", heads, ((4096, 4096),)),
        ("a chunk of 512 tokens on 16,384 keys", heads, ((512, 16384),)),
        ("32 decoding sequences and 2 prompts of 512", heads, ((1, 2048),) * 32 + ((512, 512),) * 2),
        ("MLA decode, 128 heads, 32 sequences of 4,096", latents, ((1, 4096),) * 32),
    )
    chosen: dict[str, list[str]] = {}  # titles by what is said of them
    for title, spec, lens in batches:
        try:
            found = plan_for(spec, lens, device)
        except UnsupportedError as error:
            yield Finding("FAIL", f"{title}: no kernel serves it, since {error}")
            continue
        reason = found.reason if found.predicted_us is None else "its predicted time is the least"
        chosen.setdefault(f"the {found.kernel} kernel, since {reason}.", []).append(title)
    where = "without the interpreter, " if is_interpreted else ""
    for words, titles in chosen.items():
        which = "every kind of batch" if len(titles) == len(batches) else "; ".join(titles)
        yield Finding("ok", f"{where}{which}: {words}")
    if gpu and (name := constants_of(device_properties(device)).name).endswith("scaled"):
        yield Finding(
            "warn",
            f"No times were measured on such a GPU, so plans have those of {name}. Run: quire tune sweep, and then "
            "quire tune fit (half an hour)",
        )
