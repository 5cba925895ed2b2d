"""The commands as a user calls them: help, exit codes, and JSON that other programs read."""

import json
import subprocess
import sys

import pytest
import torch
import triton

import quire
from quire.cli import check, main
from quire.testing import Verdict

COMMANDS = ("generate", "check", "bench", "tune", "env")


def test_help_names_every_command_and_shows_examples(capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["--help"])
    text = capsys.readouterr().out
    assert leaving.value.code == 0
    assert all(command in text for command in COMMANDS) and "examples:" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help_with_examples(command, capsys):
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert "examples:" in capsys.readouterr().out


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"quire {quire.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["compose"], ["env", "--yaml"], ["check", "--dtype", "float64"]])
def test_bad_arguments_leave_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert "usage: quire" in capsys.readouterr().err


def test_the_command_is_installed():
    done = subprocess.run([sys.executable, "-m", "quire", "env", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["versions"]["torch"] == torch.__version__


def test_env_tells_versions_device_and_plans_with_reasons(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"quire", "torch", "triton", "python", "transformers"} <= set(facts["versions"])
    assert facts["device"]["num_sms"] > 0 and facts["device"]["shared_memory"] > 0
    plans = [text for name, text in facts["plans"].items() if name != "spec"]
    expected = "triton" if torch.cuda.is_available() or triton.knobs.runtime.interpret else "torch"
    assert plans and all(text.startswith(f"Plan(kernel='{expected}'") for text in plans)
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert facts["versions"]["torch"] in text and plans[0] in text


def test_check_passes_here_and_says_so_in_json(capsys):
    assert main(["check", "--json", "--dtype", "float32"]) == 0
    lines = json.loads(capsys.readouterr().out)
    served = check.features(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
    assert len(lines) > len(served) >= len([feature for feature in check.FEATURES if not feature.plan])
    assert {line["feature"] for line in lines} >= {feature.name for feature in served}
    assert all(line["passed"] and line["over_budget"] <= 1 and line["dtype"] == "float32" for line in lines)


def test_check_fails_with_1_when_a_result_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(check, "FEATURES", check.FEATURES[:2])
    monkeypatch.setattr(check, "error_budget", lambda problem, result: Verdict(1.5, None, 0.1))
    assert main(["check", "--dtype", "float32"]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and "failed" in text
    assert main(["check", "--json", "--dtype", "float32"]) == 1
    assert len(json.loads(capsys.readouterr().out)) > 1
    assert main(["check", "--json", "--fail-fast", "--dtype", "float32"]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_check_sees_a_kernel_that_forgets_to_scale(monkeypatch):
    right = check.attention
    monkeypatch.setattr(check, "FEATURES", check.FEATURES[:1])
    monkeypatch.setattr(check, "attention", lambda q, *args, **kwargs: right(q * 1.01, *args, **kwargs))
    assert main(["check", "--json", "--dtype", "float32"]) == 1


def test_generate_writes_what_eager_attention_writes(capsys):
    assert (
        main(["generate", "--prompt", "def f(x):\n", "--prompt", "import ", "--max-new-tokens", "5", "--device", "cpu"])
        == 0
    )
    text = capsys.readouterr().out
    assert "tokens/s" in text and "Plan(kernel=" in text and "equal to the same model with eager attention" in text


@pytest.mark.parametrize("arguments", [["--model", "/nowhere/at/all"], ["--max-new-tokens", "0"]])
def test_generate_refuses_what_it_cannot_do(arguments, capsys):
    assert main(["generate", "--device", "cpu", *arguments]) == 2
    assert arguments[0] in capsys.readouterr().err


def test_an_interrupt_leaves_with_130(monkeypatch):
    from quire.cli import env

    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "describe", interrupted)
    assert main(["env"]) == 130
