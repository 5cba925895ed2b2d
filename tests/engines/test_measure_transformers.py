"""`scripts/measure_transformers.py` in its tiny mode, and its table."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts/measure_transformers.py"


@pytest.fixture(scope="module")
def script():
    found = importlib.util.spec_from_file_location("measure_transformers", SCRIPT)
    module = sys.modules["measure_transformers"] = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    yield module
    del sys.modules["measure_transformers"]


def test_the_tiny_mode_measures_quire_against_sdpa(script, tmp_path, capsys):
    output = tmp_path / "tiny.json"
    arguments = ["--tiny", "--implementations", "quire", "sdpa", "--load", "3x9+3", "--output", str(output)]
    script.main(arguments)
    written = json.loads(output.read_text())
    assert [r["implementation"] for r in written["results"]] == ["quire", "sdpa"]
    for result in written["results"]:
        assert result["tokens"] == 9 and result["load"] == {"requests": 3, "prompt": 9, "new": 3}
        assert 0 < result["seconds"] <= result["call_seconds"]
        assert result["tokens_per_second"] == pytest.approx(9 / result["seconds"])
    assert [r["kernel"] is None for r in written["results"]] == [False, True]
    assert written["about"]["transformers"] and written["about"]["model"]["num_hidden_layers"] == 2
    assert "| 3 x (9 + 3) |" in capsys.readouterr().out


def test_every_implementation_generates_the_same_tokens(script):
    """So that no implementation is fast because it computes something else."""
    import torch

    model, load = script.make_model(script.TINY, torch.float32, "cpu"), script.Load(2, 9, 3)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generated, options = [], {"num_blocks": 8, "max_batch_tokens": 128} | script.no_switch()
    original = model.to(device).generate_batch

    def generate_batch(*arguments, **named):
        results = original(*arguments, **named)
        generated.append([list(result.generated_tokens) for result in results.values()])
        return results

    model.generate_batch = generate_batch
    for implementation in ("quire", "sdpa", "eager"):
        script.measure(model, implementation, load, options)
    assert generated[:2] == generated[2:4] == generated[4:] and generated[0] != generated[1]


def test_the_table_gives_speeds_and_quire_s_multiples(script):
    first, second = script.Load(32, 500, 256), script.Load(128, 500, 128)
    results = [
        script.Result("quire", first, 8192, 2.0, 2.5, 30.0, "split_kv"),
        script.Result("sdpa", first, 8192, 10.0, 10.5, 20.0, None),
        script.Result("quire", second, 16384, 2.0, 2.5, 30.0, "split_kv"),
    ]
    assert script.table(results).splitlines() == [
        "| requests x (prompt + new), tokens/s | quire | sdpa |",
        "| --- | --- | --- |",
        "| 32 x (500 + 256) | 4,096 | 819 (5.0x) |",
        "| 128 x (500 + 128) | 8,192 |  |",
    ]


@pytest.mark.parametrize("text", ["", "32", "32x500", "0x5+5", "3x5+-1", "axb+c"])
def test_a_malformed_load_is_refused(script, text, capsys):
    with pytest.raises(SystemExit):
        script.main(["--tiny", "--load", text])
    assert "load must be REQUESTSxPROMPT+NEW" in capsys.readouterr().err


def test_no_run_starts_after_the_time_is_up(script, capsys):
    with pytest.raises(SystemExit, match="no implementation could be measured"):
        script.main(["--tiny", "--implementations", "quire", "--load", "2x5+2", "--seconds", "0"])
    assert "left out, 0 s have passed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--seconds", "nan"], "--seconds must be at least 0, got nan"),
        (["--layers", "0"], "--layers must be at least 1, got 0"),
        (["--output", "/no/such/folder/x.json"], "--output must be a file that can be written"),
    ],
)
def test_options_are_checked_before_anything_is_measured(script, arguments, message, capsys):
    with pytest.raises(SystemExit):
        script.main(["--tiny", *arguments])
    assert message in capsys.readouterr().err
