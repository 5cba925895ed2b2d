"""`quire generate`: what it writes, what it refuses, and how it stops."""

import io
import logging
import os
import signal
import subprocess
import sys
import threading

import huggingface_hub
import pytest
import torch
import transformers
from rich.console import Console, Group

import quire
from quire.cli import console, generate, generate_engine, main
from quire.cli.exit_codes import BAD_ARGUMENTS, INTERRUPTED
from quire.integrations import transformers as integration
from tests.extended import extended

pytestmark = pytest.mark.slow

SHORT = ["generate", "--device", "cpu", "--prompt", "import ", "--max-new-tokens", "3"]


def test_it_writes_what_eager_attention_writes(capsys):
    prompts = ["--prompt", "def f(x):\n", "--prompt", "import "]
    assert main(["generate", *prompts, "--max-new-tokens", "5", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert "tokens/s" in text and "Plan(" in text and "equal to the same model with eager attention" in text


def test_other_tokens_than_eager_attention_s_leave_with_1(monkeypatch, capsys):
    right = generate_engine.stream
    monkeypatch.setattr(generate_engine, "stream", lambda *args: [[t + 1 for t in tokens] for tokens in right(*args)])
    assert main(SHORT) == 1
    assert "different from eager attention: prompt 0 from token 0 on" in capsys.readouterr().out


def test_without_the_demo_model_it_says_where_that_is(monkeypatch, tmp_path, capsys):
    """As after an installation from a wheel, which leaves the demo model out."""
    monkeypatch.setattr(generate, "DEMO_MODEL", tmp_path / "demo_model")
    assert main(SHORT) == BAD_ARGUMENTS
    assert "the demo model is in Quire's repository; name its folder src/quire/demo_model" in capsys.readouterr().err


def test_sampling_and_no_compare_leave_out_the_second_run(monkeypatch, capsys):
    monkeypatch.setattr(generate, "compare", None)
    assert main([*SHORT, "--temperature", "0.8"]) == 0
    assert main([*SHORT, "--no-compare"]) == 0
    assert capsys.readouterr().out.count("tokens/s") == 2


def test_a_terminal_shows_the_last_line_of_each_text():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    model, tokenizer = generate.load(None, "float32", "cpu")
    integration.use(model)
    ids = [tokenizer(prompt)["input_ids"] for prompt in ("import ", "def f(x):\n")]
    config = generate_engine.generation_config(model, 4, 0.0)
    generated = generate_engine.stream(model, tokenizer, ["import ", "def f(x):\n"], ids, config, 16, console)
    assert [len(tokens) for tokens in generated] == [4, 4]
    assert "import" in console.file.getvalue() and "8/8" in console.file.getvalue()


def test_threads_are_as_before_afterwards():
    before = torch.get_num_threads()
    assert main([*SHORT, "--no-compare"]) == 0
    assert torch.get_num_threads() == before


# What is refused


@pytest.mark.parametrize(
    ("option", "value", "contract"),
    [
        ("--page-size", "3", "from 4 to 1024, got 3"),
        ("--page-size", "1000000", "from 4 to 1024, got 1000000"),
        ("--temperature", "-1", "a number from 0 up, got -1.0"),
        ("--temperature", "nan", "a number from 0 up, got nan"),
        ("--temperature", "inf", "a number from 0 up, got inf"),
        ("--max-new-tokens", "0", "at least 1, got 0"),
        ("--max-new-tokens", "1000000", "at most 2045, since the model has 2048 positions"),
        ("--model", "/nowhere", "a checkpoint that Transformers loads, got '/nowhere'"),
        ("--model", "", "a checkpoint folder or a hub name, got ''"),
    ],
)
def test_bad_values_are_named(option, value, contract, capsys):
    assert main([*SHORT, option, value]) == 2
    captured = capsys.readouterr()
    assert f"{option} must be {contract}" in captured.err and captured.out == ""


@pytest.mark.parametrize(
    ("prompt", "contract"),
    [
        (os.fsdecode(b"\xff\xfe"), r"must be valid UTF-8, got b'\xff\xfe'"),
        ("x = 1\n" * 700, "must have fewer tokens than the model's 2048 positions, got"),
    ],
    ids=["bytes", "long"],
)
def test_bad_prompts_are_named(prompt, contract, capsys):
    assert main(["generate", "--device", "cpu", "--prompt", prompt]) == 2
    assert f"--prompt {contract}" in capsys.readouterr().err


def test_a_broken_checkpoint_is_named(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_bytes(b"\x00\xff")
    assert main([*SHORT, "--model", str(tmp_path)]) == 2
    assert f"--model must be a checkpoint that Transformers loads, got '{tmp_path}'" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["./none", "/nowhere", "~/none", "some/folder/none"])
def test_a_checkpoint_that_is_not_there_is_named(place, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*SHORT, "--model", place]) == 2
    words = f"--model must be a checkpoint that Transformers loads, got '{place}', which is not there"
    assert words in capsys.readouterr().err


def test_a_hub_that_does_not_answer_is_asked_once(monkeypatch, capsys):
    """Transformers would ask again for most of a minute."""
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", None)
    assert main([*SHORT, "--model", "nosuch"]) == BAD_ARGUMENTS
    assert "--model must be a folder here or a model of the hub, got 'nosuch': " in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys):
    assert main(["generate", "--device", "cuda"]) == 2
    assert "--device must be cpu or auto" in capsys.readouterr().err


def test_what_stops_the_engine_is_printed_without_a_traceback(monkeypatch, capsys):
    def refuse(*args, **options):
        raise quire.UnsupportedError("heads must be even, got odd; use another model")

    logged: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", logged.append)
    for name in ("transformers", "ContinuousBatchingLogger"):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [*logger.handlers, handler])
    monkeypatch.setattr(integration, "layer_spec", refuse)
    assert main(SHORT) == 2
    assert capsys.readouterr().err == "the engine stopped: heads must be even, got odd; use another model\n"
    assert not logged


def test_a_version_of_transformers_that_is_not_served_is_named(monkeypatch, capsys):
    monkeypatch.setattr(integration, "SUPPORTED", (integration.Version("6.0"), integration.Version("6.1")))
    assert main(SHORT) == 2
    assert "transformers must be from 6.0" in capsys.readouterr().err


# How it stops


def test_an_interrupt_drops_what_is_unfinished(monkeypatch, capsys):
    steps = []
    step = generate_engine.ContinuousBatchingManager._generation_step

    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(
        generate_engine.ContinuousBatchingManager, "_generation_step", lambda self: steps.append(1) or step(self)
    )
    monkeypatch.setattr(generate_engine.Display, "print_new_lines", interrupt)
    handler = signal.getsignal(signal.SIGINT)
    assert main([*SHORT, "--max-new-tokens", "2000"]) == INTERRUPTED
    assert 0 < len(steps) < 500
    assert threading.active_count() == len([t for t in threading.enumerate() if t.daemon]) + 1
    assert signal.getsignal(signal.SIGINT) is handler
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_leaves_the_texts_so_far_on_a_terminal(monkeypatch, capsys):
    def interrupt(self, tokens):
        if any(tokens):
            raise KeyboardInterrupt
        return Group()

    monkeypatch.setattr(generate_engine.Display, "render", interrupt)
    monkeypatch.setattr(console.CommandConsole, "is_terminal", True)
    assert main([*SHORT, "--max-new-tokens", "2000"]) == INTERRUPTED
    captured = capsys.readouterr()
    assert captured.err == "interrupted\n"
    texts = captured.out.split("─" * 20)
    assert any(SHORT[SHORT.index("--prompt") + 1] in text for text in texts) and len(texts) > 2


STUCK = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a test run in the background ignores it, and so would this
from quire.cli import generate_engine, main
{patch}
sys.exit(main(["generate", "--device", "cpu", "--prompt", "import ", "--max-new-tokens", "2000"]))
"""
SLOW_STOP = """
def stop(self, **options):
    sys.stdout.write("\\nstopping\\n"), sys.stdout.flush()  # one write: other threads print too
    time.sleep(300)
generate_engine.ContinuousBatchingManager.stop = stop
"""
SLOW_STEP = """
step = generate_engine.ContinuousBatchingManager._generation_step
steps = []
def slow_step(self):
    steps.append(1)
    if len(steps) == 50:
        sys.stdout.write("\\nstuck\\n"), sys.stdout.flush()
        time.sleep(300)
    step(self)
generate_engine.ContinuousBatchingManager._generation_step = slow_step
generate_engine.PATIENCE = 0.2
"""


def run_until(word: str, patch: str) -> subprocess.Popen:
    """Start a command, and return when it has printed a line that is `word`."""
    process = subprocess.Popen(
        [sys.executable, "-c", STUCK.format(patch=patch)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    for line in process.stdout:
        if line.startswith("[0]"):
            process.send_signal(signal.SIGINT) if word == "stopping" else None
        if line.strip() == word:
            return process
    raise AssertionError(process.stderr.read())


@pytest.mark.parametrize(("word", "patch"), [("stopping", SLOW_STOP), extended("stuck", SLOW_STEP)])
def test_an_interrupt_waits_for_no_thread(word, patch):
    """A second interrupt while the engine stops, or one while the model is in a step that does not end."""
    process = run_until(word, patch)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == INTERRUPTED
    assert error == "interrupted\n"
