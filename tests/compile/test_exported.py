"""Exported kernels: a start that loads them compiles nothing, and none are loaded that were made for something else."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import quire
from quire import triton_internals
from quire.cli import main
from quire.cli.arguments import CommandError
from quire.cli.warmup import compiling_for, spec_of
from quire.compile_ahead import exported, processes
from quire.kernels.launcher import compile_only
from quire.targets import TARGETS

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

SPEC = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16)
LIMITS = {"max_num_seqs": 1, "max_num_tokens": 1, "max_seq_len": 64, "min_seq_len": 64}
COMMAND = [
    *(sys.executable, "-m", "quire", "warmup", "--limits", "1", "1", "64", "--min-seq-len", "64"),
    *("--spec", "num_q_heads=8", "num_kv_heads=2", "head_dim=64", "dtype=float16"),
]
SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """Return a function that exports the kernels of a small warm-up for a target, once."""
    made = {}

    def run(target: str) -> Path:
        if target not in made:
            made[target] = tmp_path_factory.mktemp(target)
            command = [*COMMAND, "--target", target, "--export", made[target], "--options", "append"]
            done = subprocess.run(
                command, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True
            )
            assert done.returncode == 0, done.stderr
        return made[target]

    return run


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    """Let Triton's cache be empty, and the environment name no export."""
    monkeypatch.delenv(exported.VARIABLE, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def compiling(target: str, name: str):
    """Return a context that compiles for a target. Triton has no kernels in memory for one of another name."""
    return compile_only(name, TARGETS[target].gpu, TARGETS[target].properties)


def pages(target: str = "sm90") -> quire.PagedKVCache:
    """Return pages; for AMD's GPUs, as many as a server has, for which Triton compiles other kernels."""
    num_pages = 1 << 20 if target == "gfx942" else 4
    return quire.PagedKVCache(*torch.empty(2, num_pages, 16, 2, 64, dtype=torch.float16), "NHD")


HERE = [
    pytest.param("sm90", marks=pytest.mark.hopper),
    pytest.param("gfx942", marks=[pytest.mark.amd, pytest.mark.extended]),
]


@pytest.mark.parametrize("target", HERE)
def test_a_start_with_exported_kernels_compiles_nothing(target, export, empty_cache, monkeypatch):
    folder, hits = export(target), []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **more: hits.append(cache_hit))
    with compiling(target, f"{target}, exported"):
        names = quire.warmup(SPEC, pages(target), **LIMITS, append=True, kernels=folder)
    kinds = {path.suffix for path in empty_cache.glob("*/*") if not path.name.startswith("__grp__")}
    assert kinds == {".json", ".cubin" if target == "sm90" else ".hsaco"}
    assert len(hits) >= len(names) > 1 and all(hits)


@pytest.mark.hopper
def test_the_environment_names_exported_kernels_that_an_early_warm_up_loads_sm90(export, empty_cache, monkeypatch):
    folder = export("sm90")
    monkeypatch.setenv(exported.VARIABLE, str(folder))
    monkeypatch.setattr(processes, "begin", lambda *job: None)
    with compiling("sm90", "sm90, early, exported"):
        quire.begin_warmup(SPEC, pages(), device="cpu", **LIMITS, append=True)
        assert len([*empty_cache.glob("*/*.cubin")]) == len([*folder.rglob("*.cubin.gz")]) > 1
        before = {path: path.stat().st_mtime_ns for path in empty_cache.glob("*/*")}
        exported.load(exported.folder_of(None), CPU)
    assert before == {path: path.stat().st_mtime_ns for path in empty_cache.glob("*/*")}  # not once more


@pytest.mark.hopper
def test_engines_need_the_kernels_of_an_export_with_their_page_size_sm90(monkeypatch):
    """Neither the layout of pages nor their number decides what is compiled."""
    needed: dict[str, set] = {}

    def note(self, key, signature, device, constexprs, options, attrs, warmup):
        named = {place: getattr(value, "__name__", value) for place, value in constexprs.items()}
        needed.setdefault(device, set()).add((self.__name__, *map(str, (signature, named, options, attrs))))
        return SimpleNamespace()

    monkeypatch.setattr(JITFunction, "_do_compile", note)
    empty = partial(torch.empty, dtype=torch.float16)
    five, rows = empty(50, 2, 16, 2, 64), empty(50, 16, 2, 128).transpose(1, 2)  # of vLLM
    pool = empty(2, 1001, 2, 64).unflatten(1, (-1, 1))  # of SGLang
    caches = {
        "16": (*empty(2, 4, 16, 2, 64), "NHD"),
        "16, vLLM 0.20": (five[:, 0], five[:, 1], "NHD"),
        "16, vLLM 0.33": (*rows.chunk(2, -1), "HND"),
        "1": (*empty(2, 4, 1, 2, 64), "NHD"),
        "1, SGLang": (*pool, "NHD"),
    }
    for name, (k, v, layout) in caches.items():
        with compiling("sm90", f"pages of {name}"):
            quire.warmup(SPEC, quire.PagedKVCache(k, v, layout), **LIMITS | {"max_num_tokens": 70})
    for name in caches:
        assert needed[f"pages of {name}"] == needed[f"pages of {name.split(',')[0]}"]
    assert needed["pages of 1"] != needed["pages of 16"]


def change(folder: Path, here: Path, what: str) -> None:
    """Make an export unfit."""
    manifest = json.loads((here / "manifest.json").read_text())
    first = next(iter(manifest["files"]))
    if what == "a file":
        code = (here / f"{first}.gz").read_bytes()
        (here / f"{first}.gz").write_bytes(code[:-1] + bytes([code[-1] ^ 1]))
    elif what == "a file that is not there":
        (here / f"{first}.gz").unlink()
    elif what in ("triton-3.5.0-sm90", f"triton-{triton.__version__}-sm80"):
        here.rename(folder / what)
    elif what == "no export":
        shutil.rmtree(here)
    elif what == "a place outside":
        manifest["files"] = {"../../a.json": manifest["files"][first]}
    elif what == "no files":
        del manifest["files"]
    else:
        manifest[what] = "another"
    if here.exists():
        (here / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.hopper
@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("a file", "must have the hash in manifest.json, got another file; export the kernels"),
        ("a file that is not there", "No such file"),
        ("triton-3.5.0-sm90", "must have kernels in triton-.*-sm90, got triton-3.5.0-sm90; export the kernels"),
        (f"triton-{triton.__version__}-sm80", "must have kernels in triton-.*-sm90, got triton-.*-sm80; export the"),
        ("no export", "must have kernels in triton-.*-sm90, got none; export the kernels"),
        ("a place outside", "must name files of Triton's cache, got '../../a.json'"),
        ("no files", "must list files"),
        ("Triton", "must be made with Triton 3.*, got another; export the kernels"),
        ("Triton's files", "must be made with Triton's files"),
        ("compiler", "must be made with compiler ptxas.*, got another"),
        ("options", "must be made with options"),
        ("environment", "must be made with environment"),
        ("Quire", "must be made with Quire .*, got another"),
        ("Quire's kernels", "must be made with Quire's kernels"),
    ],
)
def test_kernels_for_something_else_are_compiled_instead_sm90(what, says, export, empty_cache, monkeypatch, tmp_path):
    folder, compiled = tmp_path / "export", []
    shutil.copytree(export("sm90"), folder)
    change(folder, folder / f"triton-{triton.__version__}-sm90", what)
    monkeypatch.setattr(JITFunction, "_do_compile", lambda *arguments: compiled.append(1) or SimpleNamespace())
    with compiling("sm90", f"sm90, {what}"), pytest.warns(UserWarning, match=says) as warned:
        quire.warmup(SPEC, pages(), **LIMITS, append=True, kernels=folder)
    assert "the warm-up compiles them" in str(warned[0].message)
    assert len(compiled) >= 3 and not [*empty_cache.glob("*/*.cubin")]


def test_an_export_has_libraries_which_a_python_of_another_abi_leaves_out(empty_cache, tmp_path):
    """And what a later export adds, after it has loaded the first one."""
    libraries = {f"launcher{SUFFIX}": b"ours", "launcher.cpython-27.so": b"theirs"}
    kernel = {"add.json": b"{}", "add.cubin": b"code"}
    gpu = TARGETS["sm90"].gpu
    for name, content in libraries.items():
        triton_internals.put_into_cache("LIBRARY2", {name: content})
    triton_internals.put_into_cache("KERNEL7", kernel)
    here, count, size = exported.write(tmp_path / "export", gpu, ["a warm-up"])
    assert count == 1 and size == sum(path.stat().st_size for path in here.rglob("*") if path.is_file())
    shutil.rmtree(empty_cache)
    assert exported.load_for(tmp_path / "export", gpu)["made for"] == ["a warm-up"]
    assert {path.name for path in empty_cache.glob("*/*")} == {*kernel, "__grp__add.json", f"launcher{SUFFIX}"}
    triton_internals.put_into_cache("KERNEL6", kernel)
    assert exported.write(tmp_path / "export", gpu, [])[1] == 2
    assert [path.name for path in (tmp_path / "export").iterdir()] == [here.name]


def test_a_target_and_a_spec_are_checked_by_the_command(monkeypatch, capsys):
    assert spec_of(["num_q_heads=2", "num_kv_heads=1", "head_dim=16", "dtype=float16", "causal=False"]) == replace(
        quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16), causal=False
    )
    for words, says in (
        (["num_q_heads"], "--spec must have NAME=VALUE, got 'num_q_heads'"),
        (["num_q_heads=x(1)"], "--spec must have NAME=VALUE"),
        (["heads=3"], "--spec must be a spec"),
        (["num_q_heads=3", "num_kv_heads=2", "head_dim=16"], "num_q_heads must"),
    ):
        with pytest.raises(CommandError, match=says):
            spec_of(words)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in (None, "sm1"):
        with pytest.raises(CommandError, match=f"--target must be one of sm80.*, got {name}; name the server's GPU"):
            compiling_for(name)
    arguments = ["--target", "sm90", "--limits", "1", "1", "64", "--min-seq-len", "65", "--export", "nowhere"]
    assert main(["warmup", *arguments, "--spec", "num_q_heads=1", "num_kv_heads=1", "head_dim=16"]) == 2
    assert "min_seq_len must be" in capsys.readouterr().err and not Path("nowhere").exists()
