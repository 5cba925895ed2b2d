"""The GPU suite is itself tested: in a copy of the package with one place of the Hopper kernel broken, it must fail.

These are mutants that change bits alone, which a GPU decides. The simulator judges the others, on a CPU.
"""

from collections.abc import Iterator

import pytest
import torch

from quire.dispatch.device import device_properties
from tests.mutations.mutants import ON_HOPPER
from tests.mutations.server import Server

if not (torch.cuda.is_available() and device_properties(torch.device("cuda")).has_wgmma):
    pytest.skip("the Hopper kernel runs on Hopper GPUs alone", allow_module_level=True)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("name", ON_HOPPER)
def test_a_broken_kernel_is_noticed(name, server):
    verdict = server.judge(ON_HOPPER[name])
    assert verdict.noticed, f"{ON_HOPPER[name].judge} ended with {verdict.status}\n{verdict.output}"
