"""The tables and the figure of `scripts/measure_vllm.py`. Measuring itself needs vLLM and a GPU."""

import importlib.util
import io
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
import json, os, signal, subprocess, sys, time
from pathlib import Path
run, log, count = json.loads(sys.argv[2]), Path(__file__).with_name("log"), 0
result = {"backend": run["backend"], "start": os.getpid(), "invariant": os.environ["VLLM_BATCH_INVARIANT"]}

def say(ended, **measured):
    print("measured: " + json.dumps(result | measured | {"ended": ended}), flush=True)

if run["backend"] == "STUCK":
    subprocess.run(["sleep", "600"])
print("ready to measure", flush=True)
while sys.stdin.readline():
    count += 1
    if run["backend"] == "KILLED" or run["backend"] == "KILLED LATER" and count == 2:
        say(False, load={"8": 600.0})
        print("measured: " + '{"backend": "KILL', end="", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    with log.open("a+") as file:
        file.write(run["backend"] + "\\n")
    number = float(len(log.read_text().splitlines()))
    say(False, load={"8": number})
    if run["backend"] == "SLOW":
        time.sleep(600)
    print("measured: a line into which others wrote", flush=True)
    say(True, load={"8": number, "32": 2 * number})
"""


@pytest.fixture
def measure_all(script, tmp_path, monkeypatch):
    """Return a function that measures with WORKER in place of vLLM; it returns the results and WORKER's log."""
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    monkeypatch.setattr(script, "__file__", str(worker))

    def measure_all(backends, limit=None, **options):
        (tmp_path / "log").write_text("")
        results = script.measure_all([script.Run("llama-3.1-8b", name, **options) for name in backends], limit)
        return results, (tmp_path / "log").read_text().splitlines()

    return measure_all


@pytest.mark.parametrize("together", [False, True])
def test_what_is_stuck_ends_at_the_limit_and_loses_no_result(together, measure_all, capfd):
    began = time.perf_counter()
    results, _ = measure_all(["FLASH_ATTN", "CUSTOM"], limit=60, together=together)
    assert [(r["backend"], r["ended"]) for r in results] == [("FLASH_ATTN", True), ("CUSTOM", True)]
    assert "CUSTOM: is measured" in capfd.readouterr().err
    results, _ = measure_all(["FLASH_ATTN", "CUSTOM", "STUCK"], limit=5, together=together)
    assert time.perf_counter() - began < 30
    expected = [] if together else ["FLASH_ATTN", "CUSTOM"]  # together, all start first
    assert [r["backend"] for r in results] == expected
    said = capfd.readouterr().err
    assert f"{len(results)} of 3 runs were measured\n" in said
    assert "STUCK did not end with llama-3.1-8b; its output is above" in said


def test_what_is_stopped_at_the_limit_keeps_the_points_that_it_measured(measure_all, capfd):
    (result,), _ = measure_all(["SLOW"], limit=5, together=True)
    assert (result["load"], result["ended"]) == ({"8": 1.0}, False)
    said = capfd.readouterr().err
    assert "SLOW: stopped early" in said and "0 of 1 runs were measured; 1 stopped early" in said
    assert "SLOW did not end with llama-3.1-8b; its output is above" in said


def test_a_process_that_is_killed_while_it_prints_keeps_its_points_and_is_not_counted_as_measured(measure_all, capfd):
    results, _ = measure_all(["KILLED", "CUSTOM"])
    assert [(r["backend"], r["load"], r["ended"]) for r in results] == [
        ("KILLED", {"8": 600.0}, False),
        ("CUSTOM", {"8": 1.0, "32": 2.0}, True),
    ]
    said = capfd.readouterr().err
    assert "KILLED: stopped early" in said and "CUSTOM: is measured" in said
    assert "1 of 2 runs were measured; 1 stopped early" in said


@pytest.mark.parametrize("together", [False, True])
def test_rounds_measure_backends_in_alternating_order_and_give_medians(together, measure_all, script):
    results, log = measure_all(["A", "B"], rounds=3, together=together)
    assert log == ["A", "B", "B", "A", "A", "B"]
    assert [(r["load"], r["ended"]) for r in results] == [({"8": 4.0, "32": 8.0}, True), ({"8": 3.0, "32": 6.0}, True)]
    assert [r["each_round"]["load"]["8"] for r in results] == [[1.0, 4.0, 5.0], [2.0, 3.0, 6.0]]
    for r in results:
        assert len(set(r["each_round"]["start"])) == (1 if together else 3)  # processes
        assert r["start"] in r["each_round"]["start"]


def test_a_backend_that_fails_in_a_later_round_keeps_what_it_measured_and_is_marked(measure_all, capfd):
    results, log = measure_all(["KILLED LATER", "B"], rounds=4, together=True)
    assert log == ["KILLED LATER", "B", "B", "B", "B"]
    assert [r["ended"] for r in results] == [False, True]
    assert results[0]["each_round"]["load"] == {"8": [1.0, 600.0], "32": [2.0]}
    said = capfd.readouterr().err
    assert "KILLED LATER: stopped early in round 2 of 4" in said and "B: is measured in round 4 of 4" in said
    assert said.count("KILLED LATER did not end") == 1 and "1 of 2 runs were measured; 1 stopped early" in said


def test_batch_invariance_is_what_was_asked_for_not_what_the_shell_has(measure_all, monkeypatch):
    for asked in (False, True):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(not asked)))
        (result,), _ = measure_all(["CUSTOM"], batch_invariant=asked)
        assert result["invariant"] == str(int(asked))


def test_a_worker_measures_once_for_each_line_and_says_when_it_has_ended(script, monkeypatch, capsys):
    torch = pytest.importorskip("torch")
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__="0.20.2"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a device")
    monkeypatch.setattr(script, "start", lambda run: None)
    points = {"load": {"8": 1.0}}, {"load": {"8": 1.0, "32": 2.0}}
    monkeypatch.setattr(script, "measure", lambda run, llm: iter(points))
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    script.work(script.Run("llama-3.1-8b", "CUSTOM", load=(8, 32), rounds=2))
    first, *rest = capsys.readouterr().out.splitlines()
    assert first == script.READY
    found = [json.loads(line.removeprefix(script.MEASURED)) for line in rest]
    assert [(r["load"], r["ended"]) for r in found] == [
        ({"8": 1.0}, False),
        ({"8": 1.0, "32": 2.0}, False),
        ({"8": 1.0, "32": 2.0}, True),
    ] * 2
    assert (found[0]["vllm"], found[0]["device"], found[0]["rounds"]) == ("0.20.2", "a device", 2)


def test_tables_have_every_backend_s_points_and_say_what_stopped_early(script):
    parts = [
        result("FLASH_ATTN", load={"8": 100.0}, ended=False),
        result("CUSTOM", load={"128": 300.0, "8": 110.0}, ended=True, start=12.34),
    ]
    text = script.markdown(ABOUT, script.join(parts)).splitlines()
    assert f"| {script.EXPERIMENTS['load']} | FLASH_ATTN, stopped early | CUSTOM |" in text
    assert text[text.index("| 8 | 100 | 110 (110.0 %) |") + 1] == "| 128 |  | 300 |"
    at = text.index("| starting; seconds | FLASH_ATTN, stopped early | CUSTOM |")
    assert text[at + 2] == "| until ready | 1.0 | 12.3 |"
    pytest.importorskip("matplotlib")
    base, other = script.draw([parts[1], parts[0]]).axes[0].containers
    assert [bar.get_height() for bar in base] == [110.0, 300.0] and [bar.get_height() for bar in other] == [100.0]


def test_a_figure_has_the_points_that_the_first_backend_lacks_where_it_needs_no_ratio(script):
    pytest.importorskip("matplotlib")
    parts = [
        result("FLASH_ATTN", latency={"100": 1.0, "200": 2.0}, load={"8": 100.0, "32": 200.0}, ended=False),
        result("CUSTOM", latency={"100": 0.5, "200": 1.0, "400": 2.0}, load={"8": 110.0, "128": 500.0, "32": 210.0}),
    ]
    latency, load = script.draw(parts).axes
    assert [line.get_xdata().tolist() for line in latency.lines] == [[100, 200]] * 2
    assert [bar.get_height() for bar in load.containers[1]] == [110.0, 210.0, 500.0]
    assert [text.get_text() for text in load.texts] == ["110.0", "105.0", ""]
    assert [text.get_text() for text in load.get_xticklabels()] == ["8", "32", "128"]


def test_titles_name_rounds_and_batch_invariance_and_invocations_are_joined_by_them(script):
    rounds = {"rounds": 3, "batch_invariant": True}
    parts = [
        result("CUSTOM", load={"8": 1.0}),
        result("CUSTOM", load={"8": 2.0}, each_round={"load": {"8": [1.0, 2.0, 9.0]}, "start": [1.0]}, **rounds),
        result("CUSTOM", load={"32": 4.0}, each_round={"load": {"32": [4.0] * 3}, "start": [1.0]}, **rounds),
        result("CUSTOM", load={"32": 3.0}, rounds=1, batch_invariant=False, keys=60000, dcp=1),
    ]
    plain, invariant = script.join(parts)
    assert (plain["load"], invariant["load"]) == ({"8": 1.0, "32": 3.0}, {"8": 2.0, "32": 4.0})
    assert invariant["each_round"]["load"] == {"8": [1.0, 2.0, 9.0], "32": [4.0] * 3}
    text = script.markdown(ABOUT, [plain, invariant]).splitlines()
    assert "## llama-3.1-8b, 32 layers" in text
    assert "## llama-3.1-8b, 32 layers, VLLM_BATCH_INVARIANT=1, medians of 3 rounds" in text
    assert "Each round measured every backend, in alternating order." in text


def test_without_vllm_the_script_says_what_to_install(script, monkeypatch):
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["measure_vllm.py", "--load", "8"])
    with pytest.raises(SystemExit, match=r"pip install '\.\[vllm\]'"):
        script.main()


def test_a_figure_has_a_panel_for_each_experiment_with_something_to_compare(script):
    pytest.importorskip("matplotlib")
    both = [
        result(b, latency={"100": 0.5, "1600": 8.0}, load={"8": 700.0, "32": 2000.0}) for b in ("FLASH_ATTN", "CUSTOM")
    ]
    figure = script.draw([*both, result("CUSTOM", gpus=2, latency={"100": 0.3, "1600": 4.0})])
    assert [axis.get_title() for axis in figure.axes] == ["llama-3.1-8b, 32 layers"] * 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["FLASH_ATTN", "Quire"]
    assert script.draw([result("CUSTOM", latency={"100": 0.3})]) is None
