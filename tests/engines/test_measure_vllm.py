"""The tables and the figure of `scripts/measure_vllm.py`. Measuring itself needs vLLM and a GPU."""

import importlib.util
import json
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/measure_vllm.py"


@pytest.fixture(scope="module")
def script():
    found = importlib.util.spec_from_file_location("measure_vllm", SCRIPT)
    module = sys.modules["measure_vllm"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    del sys.modules["measure_vllm"]


def result(backend: str, gpus: int = 1, **measured) -> dict:
    what = {
        "model": "llama-3.1-8b",
        "backend": backend,
        "layers": None,
        "kv_cache_dtype": "auto",
        "tensor_parallel": gpus,
        "compiled": True,
        "together": False,
    }
    return what | {"start": 1.0, "vllm": "0.20.2", "torch": "2.11.0", "device": "a device"} | measured


ABOUT = {
    "date": "2026-11-21",
    "commit": "abc",
    "python": "3.12",
    "triton": "3.6.0",
    "driver": "580",
    "notes": ["A note."],
}


def test_a_cache_holds_what_the_requests_need_at_once(script):
    run = script.Run("llama-3.1-8b", "CUSTOM", load=(1, 8))
    least = max(n + end for n, end in script.lengths(8)) * 32 * 2 * 8 * 128 * 2
    assert least < run.cache_bytes() <= 1.1 * sum(n + end for n, end in script.lengths(8)) * 32 * 2 * 8 * 128 * 2
    assert (
        script.Run("llama-3.1-8b", "CUSTOM", latency=(12800,), tensor_parallel=2).cache_bytes()
        == int(1.1 * 13316) * 32 * 8 * 128 * 2
    )


def test_a_model_with_latents_has_no_experts_and_each_rank_has_all_latents(script, tmp_path):
    script.write_config(str(tmp_path), "deepseek-v3-rank", layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["first_k_dense_replace"] == config["num_hidden_layers"] == 4
    assert (config["num_attention_heads"], config["kv_lora_rank"], config["qk_rope_head_dim"]) == (16, 512, 64)
    for gpus in (1, 2):
        run = script.Run("deepseek-v3", "CUSTOM", latency=(12800,), tensor_parallel=gpus)
        assert run.cache_bytes() == int(1.1 * 13316) * 61 * 576 * 2


def test_tables_give_the_speed_relative_to_the_first_backend(script):
    parts = [
        result("FLASH_ATTN", latency={"100": 0.5, "1600": 8.0}, load={"32": 2000.0}),
        result("CUSTOM", latency={"100": 0.4, "1600": 7.5}),
        result("CUSTOM", load={"32": 2200.0}),
        result("TRITON_ATTN", latency={"100": 0.5}),
        result("CUSTOM", gpus=2, latency={"100": 0.3}),
        result("CUSTOM", gpus=2, prefill=False, latency={"100": 0.4}),
    ]
    joined = script.join(parts)
    assert [(r["backend"], r["tensor_parallel"]) for r in joined] == [
        ("FLASH_ATTN", 1),
        ("CUSTOM", 1),
        ("TRITON_ATTN", 1),
        ("CUSTOM", 2),
        ("CUSTOM", 2),
    ]
    text = script.markdown(ABOUT, joined, "plot.png")
    for line in (
        "| 100 | 0.500 | 0.400 (125.0 %) | 0.500 (100.0 %) |",
        "| 1,600 | 8.000 | 7.500 (106.7 %) |  |",
        "| 32 | 2,000 | 2,200 (110.0 %) |",
        "## llama-3.1-8b, 32 layers",
        "## llama-3.1-8b, 32 layers, 2 GPUs",
        f"| {script.EXPERIMENTS['latency']} | CUSTOM | CUSTOM, vLLM's prefill |",
        "| 100 | 0.300 | 0.400 (75.0 %) |",
        "![Speed against length and load](plot.png)",
        "A note.",
    ):
        assert line in text.splitlines()


def test_ranks_that_share_contexts_hold_a_part_of_the_cache_each(script):
    whole = script.Run("one-kv-head", "CUSTOM", context=(16,), tensor_parallel=2)
    shared = script.Run("one-kv-head", "CUSTOM", context=(16,), tensor_parallel=2, dcp=2)
    least = 16 * whole.keys * 16 * 2 * 128 * 2  # one KV head, which both GPUs have
    assert least < whole.cache_bytes() < 1.2 * least
    assert shared.cache_bytes() == whole.cache_bytes() // 2
    assert whole.longest > whole.keys + script.STEPS


def test_a_plugin_allocates_the_workspace_of_vllm_s_own_backends(script, tmp_path, monkeypatch):
    class WorkspaceManager:  # vLLM's, as far as the plug-in needs it
        def __init__(self, device, num_ubatches=1):
            self._current_workspaces = [None] * num_ubatches

    monkeypatch.setitem(sys.modules, "vllm.v1.worker.workspace", SimpleNamespace(WorkspaceManager=WorkspaceManager))
    script.write_workspace_plugin(tmp_path, 3)
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = (e for e in entry_points(group="vllm.general_plugins") if e.name == "workspace")
    found.load()()
    assert [w.nbytes for w in WorkspaceManager("cpu", 2)._current_workspaces] == [3 << 20] * 2


def test_tokens_count_as_equal_one_by_one_and_up_to_the_first_difference(script):
    parts = [
        result("FLASH_ATTN", tokens=[[1, 2, 3], [4, 5, 6]], logprobs=[[-1.0, -1.0, -1.0], [-2.0, -2.0, -2.0]]),
        result("CUSTOM", tokens=[[1, 9, 3], [4, 5, 6]], logprobs=[[-1.25, -1.0, -9.0], [-2.0, -2.5, -2.0]]),
    ]
    for r in parts:
        r |= {
            "dcp": 2,
            "tensor_parallel": 2,
            "keys": 60000,
            "context": {"16": 2.0 if r["backend"] == "CUSTOM" else 3.0},
        }
    text = script.markdown(ABOUT, script.join(parts)).splitlines()
    assert "## llama-3.1-8b, 32 layers, 2 GPUs, contexts shared by 2, contexts of 60,000" in text
    assert "| 16 | 3.000 | 2.000 (150.0 %) |" in text
    assert "| CUSTOM | 5 of 6 | 4 | at most 0.500 |" in text


WORKER = """
import json, subprocess, sys, time
run = json.loads(sys.argv[2])
if run["backend"] == "STUCK":
    subprocess.run(["sleep", "600"])
print("ready to measure", flush=True)
sys.stdin.readline()
print("measured: " + json.dumps({"backend": run["backend"]}), flush=True)
if run["backend"] == "SLOW":
    print("measured: " + json.dumps({"backend": run["backend"], "load": {"8": 600.0}}), flush=True)
    time.sleep(600)
"""


@pytest.mark.parametrize("together", [False, True])
def test_what_is_stuck_ends_at_the_limit_and_loses_no_result(together, script, tmp_path, monkeypatch, capfd):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(script, "__file__", str(worker))
    runs = [script.Run("llama-3.1-8b", backend, together=together) for backend in ("FLASH_ATTN", "STUCK", "CUSTOM")]
    began = time.perf_counter()
    results = script.measure_all(runs[:1] + runs[2:], limit=60)
    assert [r["backend"] for r in results] == ["FLASH_ATTN", "CUSTOM"]
    assert "CUSTOM: is measured" in capfd.readouterr().err
    results = script.measure_all([runs[0], runs[2], runs[1]], limit=5)
    assert time.perf_counter() - began < 30
    assert [r["backend"] for r in results] == (
        [] if together else ["FLASH_ATTN", "CUSTOM"]
    )  # together, all start first
    said = capfd.readouterr().err
    assert (
        f"{len(results)} of 3 runs were measured" in said
        and "STUCK did not end with llama-3.1-8b; its output is above" in said
    )


def test_what_is_stopped_at_the_limit_keeps_the_points_that_it_measured(script, tmp_path, monkeypatch, capfd):
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(script, "__file__", str(worker))
    results = script.measure_all([script.Run("llama-3.1-8b", "SLOW", together=True)], limit=5)
    assert results == [{"backend": "SLOW", "load": {"8": 600.0}}]
    assert "SLOW did not end with llama-3.1-8b; its output is above" in capfd.readouterr().err


def test_a_figure_has_a_panel_for_each_experiment_with_something_to_compare(script):
    pytest.importorskip("matplotlib")
    both = [
        result(b, latency={"100": 0.5, "1600": 8.0}, load={"8": 700.0, "32": 2000.0}) for b in ("FLASH_ATTN", "CUSTOM")
    ]
    figure = script.draw([*both, result("CUSTOM", gpus=2, latency={"100": 0.3, "1600": 4.0})])
    assert [axis.get_title() for axis in figure.axes] == ["llama-3.1-8b, 32 layers"] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FLASH_ATTN", "Quire"]
    assert script.draw([result("CUSTOM", latency={"100": 0.3})]) is None
