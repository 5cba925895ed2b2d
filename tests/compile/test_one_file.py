"""The kernels of examples/one_file.py compile for every target, and their choices fit it."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from quire.targets import TARGETS, Compiled, Target, inspect
from quire.triton_internals import StubDriver, compiled_for, driven_by
from tests.extended import extended

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

LAUNCHES = {  # queries and keys of each sequence, head_dim, and which kernels there are
    "decode": ([(1, 65536)], 128, ["attend_kernel", "combine_kernel"]),
    "chunk": ([(80, 16384)], 128, ["attend_kernel", "combine_kernel"]),
    "prompt, heads of 64": ([(2048, 2048)], 64, ["attend_kernel"]),
}
BY_DEFAULT = [("sm90", "decode")]
MOST_SPILLED = 128  # bytes


class Recorder:
    """Stands for a kernel: compiles what is launched, and launches nothing."""

    def __init__(self, kernel: Any, target: Target, compiled: list[Compiled]) -> None:
        self.kernel, self.target, self.compiled = kernel, target, compiled

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launch(*arguments: Any, **options: Any) -> None:
            kernel = compiled_for(self.kernel, arguments, grid, options)
            self.compiled.append(inspect(self.kernel.__name__, kernel, self.target, options))

        return launch


@pytest.fixture
def one_file(monkeypatch):
    """The example as a machine with a GPU imports it; otherwise it turns on Triton's interpreter."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path = Path(__file__).parents[2] / "examples/one_file.py"
    spec = importlib.util.spec_from_file_location("one_file", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "one_file", module)
    spec.loader.exec_module(module)
    monkeypatch.undo()
    return module


@pytest.mark.parametrize(
    ("target", "launch"),
    [
        (target, launch) if (target, launch) in BY_DEFAULT else extended(target, launch)
        for target in TARGETS
        for launch in LAUNCHES
    ],
)
def test_one_file_compiles_and_fits(one_file, launch, target, monkeypatch):
    lens, head_dim, kernels = LAUNCHES[launch]
    gpu, compiled = TARGETS[target], []
    for name in ("attend_kernel", "combine_kernel"):
        monkeypatch.setattr(one_file, name, Recorder(getattr(one_file, name), gpu, compiled))
    monkeypatch.setattr(one_file, "device_of", lambda tensor: (gpu.num_sms, gpu.shared_memory, target == "sm90"))
    (query_len, seq_len), int32 = lens[0], {"dtype": torch.int32}
    starts = None if query_len == 1 else torch.zeros(2, **int32)
    batch = one_file.Batch(torch.zeros(1, seq_len // 16, **int32), torch.zeros(1, **int32), starts, query_len, seq_len)
    pages = torch.empty(4, 16, 8, head_dim, dtype=torch.bfloat16)
    with driven_by(StubDriver(gpu.name, gpu.gpu)):
        one_file.attention(torch.empty(query_len, 32, head_dim, dtype=torch.bfloat16), pages, pages, batch)
    assert [c.kernel for c in compiled] == kernels
    assert all(c.shared <= gpu.shared_memory and c.spills <= MOST_SPILLED for c in compiled), compiled
