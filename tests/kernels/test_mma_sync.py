"""What the portable kernel does on targets whose products are all mma.sync's: panels, full tiles, decode launches."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import quire
from quire.dispatch import device as devices
from quire.dispatch.config import KernelConfig
from quire.dispatch.tree import forget_trees
from quire.testing import make_problem

pytestmark = pytest.mark.triton


@pytest.fixture(autouse=True)
def mma_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let plans see such a target in the interpreter."""
    monkeypatch.setattr(devices, "INTERPRETER", replace(devices.INTERPRETER, native_tf32=True))
    devices._read.cache_clear()
    forget_trees()
    yield
    devices._read.cache_clear()
    forget_trees()


def spec_of(head_dim: int = 16, **more) -> quire.AttentionSpec:
    return quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=head_dim, dtype=torch.float16, **more)


@pytest.mark.parametrize("num_splits", [1, 3])
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "kv_dtype"),
    [(128, 128, None), (256, 192, None), (96, 136, None), (256, 256, torch.float8_e4m3fn), (80, 256, torch.int8)],
)
def test_heads_in_panels_of_as_many_columns_as_rows(
    head_dim, head_dim_v, kv_dtype, num_splits, device, assert_within_budget
):
    spec = spec_of(head_dim, head_dim_v=head_dim_v, kv_dtype=kv_dtype)
    p = make_problem(spec, ((20, 70), (1, 40)), device=device)
    wide = [max(16, 1 << (dim - 1).bit_length()) for dim in (head_dim, head_dim_v)]
    config = KernelConfig(64, 16, 4, 1, True, programs_per_sm=1, block_d=wide[0], block_dv=wide[1])
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits, config=config, kernel="portable")
    assert plan.launch.full_tile_loop
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


def test_panels_have_at_most_as_many_columns_as_asked():
    from quire.kernels.panels import panel_widths

    def of(dim, most, each=1):
        return panel_widths(dim, each, 64, most)

    assert of(128, 64) == (64, 64) and of(256, 64) == (64,) * 4 and of(256, 128) == (128, 128)
    assert of(64, 64) == (64,) and of(128, 64, 2) == (64,) and of(256, 64, 2) == (64, 64)
    assert of(192, 128) == (128, 64) and of(136, 64) == (64, 64, 16) and of(80, 128) == panel_widths(80, 1, 64)
