"""What `quire bench` and `quire tune` refuse before they work: numbers, other files, folders they cannot write."""

from pathlib import Path

import pytest
import torch

from quire.cli import main
from quire_tools.cli import bench_measure

OTHER_FILES = {
    "empty": b"",
    "binary": bytes(range(128, 256)),
    "text": b"nothing of the kind",
    "a list": b"[1, 2]",
    "an object": b"{}",
    "a number": b"7",
    "nested": b"[" * 100_000,
}


@pytest.fixture
def written(tmp_path):
    """Return a function that writes a file, and gives its path."""

    def write(content: bytes):
        path = tmp_path / "other"
        path.write_bytes(content)
        return str(path)

    return write


@pytest.fixture
def no_work(monkeypatch):
    """Fail the test if a command begins to measure or compile."""

    def work(*args):
        raise AssertionError("the command began to work")

    monkeypatch.setattr(bench_measure, "measure", work)
    monkeypatch.setattr(bench_measure, "analyse", work)


def refused(capsys, arguments: list[str], *words: str) -> None:
    """Assert that a command leaves with 2, and with one line that has these words."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    for word in words:
        assert word in captured.err


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--seconds", value) for value in ("nan", "-1", "0", "inf", "soon")),
        *(("--config", value) for value in ("foo", "block_n", "block_k=3", "block_n=many", "block_n=12", "")),
    ],
)
def test_values_that_bench_cannot_take_are_named(option, value, capsys):
    with pytest.raises(SystemExit) as leaving:
        main(["bench", "run", option, value])
    assert leaving.value.code == 2
    assert f"argument {option}: must be" in (error := capsys.readouterr().err)
    assert f"got {value!r}" in error


READERS = {"report": 1, "compare": 2, "floors": 2, "guard": 2, "list --trace": 1}  # and how many files they name


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES)
@pytest.mark.parametrize("command", READERS)
def test_bench_refuses_files_of_another_kind(command, content, written, capsys):
    path = written(content)
    refused(capsys, ["bench", *command.split(), *[path] * READERS[command]], path)


@pytest.mark.parametrize("command", READERS)
def test_bench_refuses_folders_without_results(command, tmp_path, capsys):
    refused(capsys, ["bench", *command.split(), *[str(tmp_path)] * READERS[command]], str(tmp_path))


def with_a_gpu(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Made-Up Device")


@pytest.mark.parametrize("content", OTHER_FILES.values(), ids=OTHER_FILES)
def test_tune_fits_no_files_of_another_kind(content, written, tmp_path, capsys):
    path = written(content)
    refused(capsys, ["tune", "fit", path, "--output", str(tmp_path / "out.json")], "records must hold times, got none")
    assert not (tmp_path / "out.json").exists()


def test_tune_fits_no_folder(tmp_path, capsys):
    refused(capsys, ["tune", "fit", str(tmp_path)], f"got {tmp_path}, which is a folder")


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_bench_finds_a_folder_it_cannot_write_before_it_works(has_gpu, written, monkeypatch, capsys):
    if has_gpu:
        with_a_gpu(monkeypatch)
    file = written(b"")
    for folder in (file, f"{file}/inside"):
        assert main(["bench", "run" if has_gpu else "roofline", "--quick", "--output", folder]) == 2
        assert f"--output must be a folder that can be written, got {folder}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "no such case"], "--only must be part of the name of a case, got 'no such case'"),
        (["--only", "grid 1/17:"], "got 'grid 1/17:'; pass --grid N and --seed S too"),
        (["--latents"], "--latents must be given with --grid; add --grid N"),
        (["--trace", "/nowhere"], "--trace must be a file that can be read, got /nowhere"),
        (["--peers", "Quire 0,"], "--peers must begin the names of some of"),
        (["--peers", ","], "--peers must begin the names of some of"),
    ],
)
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_what_bench_cannot_do_is_named(arguments, words, tmp_path, capsys):
    refused(capsys, ["bench", "run", *arguments, "--output", str(tmp_path)], words)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("has_gpu", [False, True])
def test_libraries_that_do_not_exist_are_named(has_gpu, monkeypatch, tmp_path, capsys):
    if has_gpu:
        with_a_gpu(monkeypatch)
    arguments = ["bench", "run", "--peers", "Nobody", "--output", str(tmp_path)]
    refused(capsys, arguments, "--peers must begin the names of some of")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_tune_needs_a_gpu(capsys):
    refused(capsys, ["tune", "sweep", "--output", "x.jsonl"], "must have a GPU to measure, got none")


def test_floors_take_no_run_s_place(tmp_path, capsys):
    file = tmp_path / "results.json"
    file.write_bytes((Path(__file__).parent.parent / "docs/results/h200.json").read_bytes())
    before = file.read_bytes()
    for source in (tmp_path, file):
        refused(capsys, ["bench", "floors", str(source), str(file)], "FILE must be another file than the run's")
    assert file.read_bytes() == before
