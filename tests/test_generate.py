"""`quire generate` where things do not go well; where they do, see `test_cli.py`."""

import pytest
import torch

import quire
from quire.cli import generate, main
from quire.integrations import transformers as hook

SHORT = ["generate", "--device", "cpu", "--prompt", "import ", "--max-new-tokens", "3"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--page-size", "3"],
        ["--temperature", "-1"],
        ["--temperature", "nan"],
        ["--max-new-tokens", "0"],
        ["--model", "/nowhere"],
    ],
)
def test_bad_values_are_named(arguments, capsys):
    assert main([*SHORT, *arguments]) == 2
    captured = capsys.readouterr()
    assert f"{arguments[0]} must be" in captured.err and "tokens/s" not in captured.out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys):
    assert main(["generate", "--device", "cuda"]) == 2
    assert "--device must be cpu or auto" in capsys.readouterr().err


def test_what_stops_the_engine_is_told(monkeypatch, capsys):
    def refuse(*args):
        raise quire.UnsupportedError("heads must be even, got odd; use another model")

    monkeypatch.setattr(hook, "layer_spec", refuse)
    assert main(SHORT) == 2
    assert "heads must be even, got odd" in capsys.readouterr().err


def test_a_version_of_transformers_that_is_not_served_is_told(monkeypatch, capsys):
    monkeypatch.setattr(hook, "SUPPORTED", (hook.Version("6.0"), hook.Version("6.1")))
    assert main(SHORT) == 2
    assert "transformers must be from 6.0" in capsys.readouterr().err


def test_other_tokens_than_eager_attention_s_leave_with_1(monkeypatch, capsys):
    right = generate.stream
    monkeypatch.setattr(generate, "stream", lambda *args: [[t + 1 for t in tokens] for tokens in right(*args)])
    assert main(SHORT) == 1
    assert "different from eager attention: prompt 0 from token 0 on" in capsys.readouterr().out


def test_sampling_and_no_compare_leave_out_the_second_run(monkeypatch, capsys):
    monkeypatch.setattr(generate, "compare", None)
    assert main([*SHORT, "--temperature", "0.8"]) == 0
    assert main([*SHORT, "--no-compare"]) == 0
    assert capsys.readouterr().out.count("tokens/s") == 2


def test_threads_are_as_before_afterwards():
    before = torch.get_num_threads()
    assert main([*SHORT, "--no-compare"]) == 0
    assert torch.get_num_threads() == before
