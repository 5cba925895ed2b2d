"""The commands as a user calls them: help, exit codes, output that is cut off, and JSON that other programs read."""

import importlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
import torch
import triton

import quire
import quire_command
from quire import debug
from quire.cli import COMMANDS, check, doctor_kernels, env, main, parse
from quire.cli.arguments import TOOLS
from quire.cli.check_lines import Check
from quire.cli.exit_codes import INTERRUPTED, READER_LEFT
from quire.testing import Verdict, make_problem
from quire.version import commit, packages_of

pytestmark = pytest.mark.slow

SHORT = {  # arguments that print something after little work, which `quire tune` has not
    "generate": ["generate", "--device", "cpu", "--prompt", "é", "--max-new-tokens", "2", "--no-compare"],
    "check": ["check", "--dtype", "float32"],
    "bench": ["bench", "list"],
    "warmup": [
        *("warmup", "--target", "sm90", "--limits", "1", "1", "16", "--min-seq-len", "16"),
        *("--spec", "num_q_heads=1", "num_kv_heads=1", "head_dim=16", "--export"),
    ],
    "env": ["env"],
    "doctor": ["doctor"],
    "replay": ["replay"],
}


@pytest.fixture
def short(tmp_path):
    """Return a function from a command to arguments that print something after little work."""

    def arguments(command: str) -> list[str]:
        if command == "warmup":
            return [*SHORT[command], str(tmp_path)]
        if command != "replay":
            return SHORT[command]
        problem = make_problem(
            quire.AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=32, dtype=torch.float32), [(1, 9)]
        )
        path = tmp_path / "call.quire"
        debug.save(path, problem.q, problem.cache, quire.plan(problem.spec, problem.batch, **problem.bounds))
        return [*SHORT[command], "--device", "cpu", str(path)]

    return arguments


def help_of(capsys, *command: str) -> str:
    with pytest.raises(SystemExit) as leaving:
        main([*command, "--help"])
    assert leaving.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command_and_the_exit_codes(capsys):
    text = help_of(capsys)
    lines = {" ".join(line.split()) for line in text.splitlines()}
    assert lines >= {f"{command} {summary}" for command, summary in COMMANDS.items()}
    assert "exit codes:" in text


BENCH = [("bench", name) for name in ("run", "graphs", "roofline", "list", "report", "compare", "floors", "guard")]


@pytest.mark.parametrize("command", [(), *((command,) for command in COMMANDS), *BENCH], ids=" ".join)
def test_every_example_in_the_help_is_understood(command, capsys):
    lines = help_of(capsys, *command).split("examples:")[1].splitlines()
    examples = [line.split("#")[0].split(" | ")[0].split(" > ")[0] for line in lines if "  quire " in line]
    assert examples
    for example in examples:
        args = parse(shlex.split(example)[1:])
        assert callable(args.run)


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"quire {quire.__version__}, commit {commit()}\n"


@pytest.mark.parametrize("arguments", [[], ["compose"], ["env", "--yaml"], ["check", "--dtype", "float64"]])
def test_bad_arguments_leave_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert "usage: quire" in capsys.readouterr().err


def test_the_command_is_installed():
    done = subprocess.run([sys.executable, "-m", "quire", "env", "--json"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["versions"]["torch"] == version("torch")


@pytest.mark.parametrize("arguments", [["env"], ["--help"]])
def test_only_the_command_that_is_named_is_imported(arguments, monkeypatch):
    for name in COMMANDS:
        if name not in arguments:
            monkeypatch.setitem(sys.modules, f"quire.cli.{name}", None)
    monkeypatch.setitem(sys.modules, "quire_tools", None)
    try:
        assert main(arguments) == 0
    except SystemExit as leaving:
        assert leaving.code == 0


# What is missing


@pytest.mark.parametrize(
    ("command", "package", "advice"),
    [
        ("generate", "transformers", packages_of("transformers")),
        ("generate", "rich", packages_of("transformers")),
        ("generate", "psutil", packages_of("transformers")),
        ("bench list", "matplotlib", TOOLS),
        ("bench list", "rich", TOOLS),
        ("bench", "quire_tools", TOOLS),
        ("tune fit x.jsonl", "quire_tools", TOOLS),
    ],
)
def test_a_missing_package_is_named_with_what_to_install(command, package, advice, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, package, None)
    assert main(command.split()) == 2
    name, *_ = command.split()
    error = capsys.readouterr().err
    assert error == f"quire {name} needs {package}, which is not installed; pip install {advice}\n"
    assert "in quire-tools" in help_of(capsys)


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
from quire.cli import main
assert main(["bench", "run"]) == 2
main(["bench", "run", "--help"])
"""


def test_commands_that_need_triton_say_so_where_there_is_none():
    done = subprocess.run([sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True)
    assert "quire bench needs triton, which is not installed; pip install triton" in done.stderr
    assert done.returncode == 0 and "examples:\n  quire bench run" in done.stdout, done.stderr


WITHOUT = """
import importlib, sys
ENTRIES = {"sglang": "register", "vllm": "register", "transformers": "install"}
class Missing:
    def find_spec(name, path=None, target=None):
        if name in ENTRIES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing)
for package, entry in ENTRIES.items():
    try:
        getattr(importlib.import_module(f"quire.integrations.{package}"), entry)()
    except ModuleNotFoundError as missing:
        print(missing)
"""


def test_an_integration_without_its_package_says_what_to_install():
    """One process for all: to import PyTorch takes seconds."""
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"quire.integrations.{package} needs {package}, which is not installed; pip install {packages_of(package)}"
        for package in ("sglang", "vllm", "transformers")
    ]


# Threads


@pytest.fixture
def threads_chosen(monkeypatch):
    """Return the numbers of threads that PyTorch is given."""
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    return chosen


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", ["check", "replay", "doctor_kernels"])
@pytest.mark.parametrize("number", [None, "3"])
def test_work_on_the_cpu_takes_one_thread_unless_a_number_is_chosen(
    command, number, short, threads_chosen, monkeypatch, capsys
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if number is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", number)
    before = torch.get_num_threads()
    if command == "doctor_kernels":
        monkeypatch.setattr(signal, "signal", lambda *args: None)
        doctor_kernels.main()
    else:
        monkeypatch.setattr(check, "FEATURES", check.FEATURES[:1])
        assert main(short(command)) == 0
    assert threads_chosen == ([1, before] if number is None else [before])


# Where the output goes


@pytest.mark.parametrize("command", SHORT)
def test_a_reader_that_leaves_ends_the_command(command, short, monkeypatch):
    """As `quire ... | head -1` does, but at once."""
    arguments = short(command)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w", encoding="utf-8") as output:
        monkeypatch.setattr(sys, "stdout", output)
        assert main(arguments) == READER_LEFT
        output.flush()  # as the interpreter does at exit: raises unless what is left goes elsewhere


def test_a_reader_that_leaves_sees_no_message():
    command = [sys.executable, "-m", "quire", "env"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == READER_LEFT


@pytest.mark.parametrize("command", SHORT)
def test_output_in_ascii_lacks_some_characters(command, short, monkeypatch):
    arguments = short(command)
    output = io.TextIOWrapper(io.BytesIO(), encoding="ascii", errors="strict")
    monkeypatch.setattr(sys, "stdout", output)
    assert main(arguments) == 0
    output.flush()
    assert output.buffer.getvalue().isascii() and len(output.buffer.getvalue()) > 20


@pytest.mark.extended
def test_output_in_the_c_locale_lacks_some_characters():
    here = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-m", "quire", "tune", "--help"], env=here, capture_output=True, check=False)
    assert done.returncode == 0 and done.stdout.isascii() and done.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_named():
    with open("/dev/full", "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", "quire", "env"], stdout=output, stderr=subprocess.PIPE, check=False
        )
    assert done.returncode == 2
    assert done.stderr == b"the output must be a file that can be used, got No space left on device; name another\n"


@pytest.mark.parametrize("arguments", [["tune", "fit"], ["bench", "report"], ["replay"]], ids=" ".join)
def test_a_name_that_is_too_long_is_named(arguments, capsys):
    assert main([*arguments, "x" * 300]) == 2
    assert "File name too long" in capsys.readouterr().err


def test_json_of_checks_has_no_nan(monkeypatch, capsys):
    nan = Check("write_kv", "float32", "a feature", float("nan"), float("inf"), False)
    monkeypatch.setattr(check, "check_all", lambda *args: iter([nan]))
    assert main(["check", "--json"]) == 1
    (found,) = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["error"] is found["over_budget"] is None


def test_a_file_may_have_the_name_of_a_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["replay", "bench"]) == 2
    assert capsys.readouterr().err.startswith("bench must be")


# Interrupts


def test_an_interrupt_leaves_with_130(monkeypatch, capsys):
    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(env, "describe", interrupt)
    assert main(["env"]) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


class InterruptedImport:
    """Finds one module, and is interrupted there."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name, path=None, target=None):
        if name == self.name:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("module", "arguments"), [("quire.cli.env", ["env"]), ("quire.cli.generate_engine", SHORT["generate"])]
)
def test_an_interrupt_of_an_import_leaves_with_130(module, arguments, monkeypatch, capsys):
    parent, name = module.rsplit(".", 1)
    importlib.import_module(module)
    monkeypatch.delattr(sys.modules[parent], name)
    monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [InterruptedImport(module), *sys.meta_path])
    assert main(arguments) == INTERRUPTED
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_while_pytorch_is_imported_leaves_quietly_with_130(tmp_path):
    (tmp_path / "torch.py").write_text("print('importing', flush=True)\nimport time\ntime.sleep(60)\n")
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from quire_command import main; sys.exit(main())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, "env"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "importing\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30) == ("", "interrupted\n")
    assert process.returncode == INTERRUPTED


def test_the_command_s_first_module_has_the_exit_code_of_the_others():
    assert quire_command.INTERRUPTED == INTERRUPTED


# env


def test_env_prints_versions_device_and_plans_with_reasons(capsys):
    assert main(["env", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {"quire", "torch", "triton", "python", "transformers"} <= set(facts["versions"])
    assert facts["versions"]["commit of quire"] == commit()
    plans = [text for name, text in facts["plans"].items() if name != "spec"]
    has_triton = torch.cuda.is_available() or triton.knobs.runtime.interpret
    assert len(plans) == 4 and all(text.startswith("Plan(") for text in plans)
    assert has_triton != any("PyTorch" in text for text in plans)
    assert facts["environment"].keys() == {"QUIRE_LOG", "QUIRE_NVTX", "QUIRE_CONSTANTS"}
    assert facts["environment"]["QUIRE_LOG"].startswith("not set")
    assert facts["device"].pop("name")
    if has_triton:
        assert facts["device"]["num_sms"] > 0 and facts["device"]["shared_memory"] > 0
    else:  # no plan depends on them
        assert facts["device"] == {}
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert facts["versions"]["torch"] in text and plans[0] in text


def test_env_adds_what_torch_says_of_the_system_when_asked(monkeypatch, capsys):
    monkeypatch.setattr(env, "collect_env", lambda: "OS: made up\n\nLibc version: 2")
    assert main(["env"]) == 0
    assert "made up" not in capsys.readouterr().out
    assert main(["env", "--verbose"]) == 0
    assert "torch.utils.collect_env\n  OS: made up\n\n  Libc version: 2\n" in capsys.readouterr().out
    assert main(["env", "--verbose", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["collect_env"].startswith("OS: made up")


# check


def test_check_passes_here_and_says_so_in_json(capsys):
    assert main(["check", "--json", "--dtype", "float32"]) == 0
    lines = json.loads(capsys.readouterr().out)
    served = check.features(torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.float32)
    assert len(lines) == len(served) + 3 and len(served) > len(check.FEATURES) / 2
    assert {line["feature"] for line in lines} >= {feature.name for feature in served}
    assert all(line["passed"] and line["over_budget"] <= 1 and line["dtype"] == "float32" for line in lines)


def test_check_fails_with_1_when_a_result_is_wrong(capsys, monkeypatch):
    monkeypatch.setattr(check, "FEATURES", check.FEATURES[:2])
    monkeypatch.setattr(check, "LATENT_FEATURES", ())
    monkeypatch.setattr(check, "error_budget", lambda problem, result: Verdict(1.5, None, 0.1))
    assert main(["check", "--dtype", "float32"]) == 1
    text = capsys.readouterr().out
    assert "FAIL" in text and "0 passed, 5 failed" in text
    assert main(["check", "--json", "--dtype", "float32"]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 5
    assert main(["check", "--json", "--fail-fast", "--dtype", "float32"]) == 1
    assert len(json.loads(capsys.readouterr().out)) == 1


def test_check_sees_a_kernel_that_forgets_to_scale(monkeypatch):
    right = check.attention

    def scaled(q):
        return tuple(half * 1.01 for half in q) if isinstance(q, tuple) else q * 1.01

    monkeypatch.setattr(check, "FEATURES", check.FEATURES[:1])
    monkeypatch.setattr(check, "LATENT_FEATURES", ())
    monkeypatch.setattr(check, "attention", lambda q, *args, **kwargs: right(scaled(q), *args, **kwargs))
    assert main(["check", "--json", "--dtype", "float32"]) == 1


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_check_that_is_interrupted_prints_what_was_checked(options, monkeypatch, capsys):
    def check_some(device, dtypes):
        for i in range(3):
            yield check.Check("attention", "float32", f"feature {i}", 1e-7, 0.1, True)
        raise KeyboardInterrupt

    monkeypatch.setattr(check, "check_all", check_some)
    assert main(["check", "--dtype", "float32", *options]) == INTERRUPTED
    captured = capsys.readouterr()
    assert captured.err.startswith("interrupted after 3 of ")
    if options:
        assert [line["feature"] for line in json.loads(captured.out)] == ["feature 0", "feature 1", "feature 2"]
    else:
        assert "feature 2" in captured.out and "3 passed, 0 failed" in captured.out
