"""Each example runs as a reader runs it, and prints what it claims to show."""

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import quire

EXAMPLES = Path(__file__).parent.parent / "examples"
GRAPH = "captured" if torch.cuda.is_available() else "no GPU here"
SHOWS = {  # what an example prints if it works
    "decode_loop": r"the same tokens as without a cache; 32 of 32 pages are free again",
    "cuda_graph": rf"{GRAPH}(.*\n)+step 2: sequences of \[8, 103\] tokens; error \S+, 0\.\d+ of its budget",
    "split_context": r"merged +0\.\d+\n +first half alone +\d",
    "mla": r"absorbed +\d\.\de-0[5-9]\n +chunk merged with its context +\d\.\de-0[5-9]",
    "prefix_sharing": r"4 pages in use instead of 6\nkeys read: +54 instead of 86\n.*: \S+, 0\.\d+ of its budget",
}
VLLM = importlib.util.find_spec("vllm")


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python on a command line, with the modules of this process."""
    paths = os.pathsep.join([*environment.pop("paths", "").split(), *sys.path])
    return subprocess.run(
        [sys.executable, *command], env=os.environ | {"PYTHONPATH": paths} | environment, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWS)
def test_an_example_shows_what_it_claims(name, capsys, monkeypatch):
    """In this process: another one would import PyTorch again."""
    path = EXAMPLES / f"{name}.py"
    monkeypatch.setattr(sys, "argv", [str(path)])
    with torch.random.fork_rng():
        runpy.run_path(str(path), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(SHOWS[name], printed), printed


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SHOWS, "one_file", "vllm_offline"}


@pytest.mark.slow
def test_one_file_meets_its_bound_on_the_error():
    """In a process of its own: without a GPU it turns on Triton's interpreter, before Triton is imported."""
    done = run(str(EXAMPLES / "one_file.py"), "--check")
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"error \d\.\de-0\d, at most", done.stdout)) == 4, done.stdout


def test_one_file_is_short_and_needs_torch_and_triton_alone():
    source = (EXAMPLES / "one_file.py").read_text(encoding="utf-8")
    imports = re.findall(r"^(?:import|from) (\w+)", source, re.MULTILINE)
    assert set(imports) - set(sys.stdlib_module_names) == {"torch", "triton"}
    assert len(source.splitlines()) <= 500


@pytest.mark.slow
@pytest.mark.skipif(VLLM is not None, reason="vLLM is installed")
def test_the_vllm_example_says_how_to_install_vllm():
    done = run(str(EXAMPLES / "vllm_offline.py"))
    assert done.returncode == 1
    assert f"pip install {quire.version.packages_of('vllm')}" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("is_clone", [True, False])
def test_the_vllm_example_finds_the_demo_model_in_its_clone_alone(is_clone, tmp_path, monkeypatch):
    """However Quire is installed: a wheel has no demo model."""
    example = EXAMPLES / "vllm_offline.py"
    if not is_clone:
        example = Path(shutil.copy(example, tmp_path))
    asked = []
    vllm = SimpleNamespace(__version__="0.33.0", LLM=lambda model, **_: asked.append(model) or sys.exit("asked"))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setattr(quire, "__file__", str(tmp_path / "site-packages" / "quire" / "__init__.py"))
    monkeypatch.setattr(sys, "argv", [str(example)])
    with pytest.raises(SystemExit, match="asked" if is_clone else "name one, or its folder"):
        runpy.run_path(str(example), run_name="__main__")
    assert asked == [str(EXAMPLES.parent / "src" / "quire" / "demo_model")] * is_clone
    assert all((Path(model) / "config.json").exists() for model in asked)


# Where vLLM has no compiled operators, as in `make test-vllm`, its engine needs these options.
ON_A_CPU = """
import functools, runpy, sys, vllm
options = {"enforce_eager": True, "dtype": "float32", "kv_cache_memory_bytes": 1 << 28,
           "compilation_config": {"mode": 0, "custom_ops": ["none"]}}
vllm.LLM = functools.partial(vllm.LLM, **options)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.skipif(VLLM is None, reason="vLLM is not installed; `make test-vllm` runs this")
def test_the_vllm_example_generates_text_through_quire():
    """It takes twenty seconds: a process of its own imports vLLM and loads a model."""
    example = str(EXAMPLES / "vllm_offline.py")
    command = (example,) if torch.cuda.is_available() else ("-c", ON_A_CPU, example)
    done = run(
        *command,
        paths=str(Path(__file__).parent / "engines" / "vllm_cpu"),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"attention backend (QUIRE|CUSTOM)", done.stdout)
    assert done.stdout.count("continues as") == 3
