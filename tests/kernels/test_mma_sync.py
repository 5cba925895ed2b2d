"""What the portable kernel does on targets whose products are all mma.sync's: panels, full tiles, decode launches."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import quire
from quire.dispatch import device as devices
from quire.dispatch.config import KernelConfig
from quire.dispatch.constants import forget
from quire.testing import make_problem, unwritten

pytestmark = pytest.mark.triton
DRAFTS = 4  # queries of a sequence, up to which the decode launch serves it, with groups of 4
DECODING = ((1, 700), (DRAFTS, 170), (1, 33))


@pytest.fixture(autouse=True)
def mma_sync(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let plans see such a target in the interpreter."""
    monkeypatch.setattr(devices, "INTERPRETER", replace(devices.INTERPRETER, native_tf32=True))
    devices._read.cache_clear()
    forget()
    yield
    devices._read.cache_clear()
    forget()


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
    if devices.device_properties(p.q.device).has_mma_sync:
        assert plan.launch.full_tile_loop
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.parametrize("num_splits", [1, 2])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("scale", [0.25, 4.0, 10.0, 30.0])
def test_rows_keep_their_maxima_in_full_tiles(scale, window, num_splits, device, assert_within_budget):
    """With large scales, scores of full tiles are 2^60 or 2^128 times those of the tiles before, or more."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 16}
    spec = quire.AttentionSpec(**heads, dtype=dtype, softmax_scale=scale, sliding_window=window, sinks=True)
    p = make_problem(spec, ((40, 900), (0, 7), (1, 340), (20, 20)), device=device)
    config = KernelConfig(64, 16, 4, 2, True, programs_per_sm=1, block_d=16, block_dv=16)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits, config=config, kernel="portable")
    assert_within_budget(p, quire.attention(p.q, p.cache, plan, sinks=p.sinks, return_lse=True))


def test_panels_have_at_most_as_many_columns_as_asked():
    from quire.kernels.panels import panel_widths

    def of(dim, most, each=1):
        return panel_widths(dim, each, 64, most)

    assert of(128, 64) == (64, 64) and of(256, 64) == (64,) * 4 and of(256, 128) == (128, 128)
    assert of(64, 64) == (64,) and of(128, 64, 2) == (64,) and of(256, 64, 2) == (64, 64)
    assert of(192, 128) == (128, 64) and of(136, 64) == (64, 64, 16) and of(80, 128) == panel_widths(80, 1, 64)


@pytest.mark.parametrize("lens", [(*DECODING, (40, 90)), ((40, 90), *DECODING, (5, 300), (1, 1), (0, 7), (33, 33))])
@pytest.mark.parametrize("window", [None, 20])
def test_decoding_sequences_of_a_mixed_batch_have_programs_of_their_own(
    lens, window, device, take, assert_within_budget
):
    take("mixed")
    spec = spec_of(sliding_window=window, sinks=True)
    p = make_problem(spec, lens, device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, kernel="portable")
    if devices.device_properties(p.q.device).has_mma_sync:
        assert plan.launch.decode.max_decode_queries == DRAFTS and plan.launch.min_queries == DRAFTS + 1, plan
        assert plan.launch.decode.config.block_m == 16 < plan.launch.config.block_m
    for _ in range(2):  # counters are 0 again
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, sinks=p.sinks, return_lse=True))


@pytest.mark.parametrize(("num_q_heads", "tile"), [(3, "64x64"), (3, "128x32"), (24, "64x64")])
def test_rows_of_a_decoding_sequence_may_be_fewer_or_more_than_a_tile_has(
    num_q_heads, tile, device, take, assert_within_budget
):
    take("mixed", tile)
    spec = quire.AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    p = make_problem(spec, ((40, 90), (1, 700), (5, 300), (1, 1), (0, 7), (30, 31)), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, kernel="portable")
    if devices.device_properties(p.q.device).has_mma_sync:
        assert plan.launch.decode is not None and plan.launch.decode.multi_block == (num_q_heads > 16), plan
    for _ in range(2):
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.parametrize(
    ("lens", "options"),
    [
        (((40, 40),) * 3, {}),  # equal prompts
        (((40, 40), (33, 33), (40, 40)), {}),  # prompts of most of the tokens that they may have, without keys before
        (((12, 90), (1, 40)), {}),  # one tile has all rows of any sequence
        (((40, 90), (1, 90)), {"batch_invariant": True}),
        (((40, 90), (1, 90)), {"num_splits": 1}),
    ],
)
def test_other_batches_have_one_launch(lens, options, device):
    p = make_problem(spec_of(), lens, device=device)
    plan = quire.plan(p.spec, p.batch, **p.bounds, kernel="portable", **options)
    assert plan.launch.decode is None, plan


def test_each_launch_of_a_step_that_appends_writes_the_tokens_of_its_sequences(device, take, assert_within_budget):
    take("mixed")
    spec = quire.AttentionSpec(num_q_heads=16, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    p = make_problem(spec, ((1, 700), (9, 300), (1, 40), (1, 80)), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, kernel="portable")
    if devices.device_properties(p.q.device).has_mma_sync:
        assert plan.launch.decode is not None and plan.appender(p.cache) is not None, plan
    cache, new = unwritten(p)
    assert_within_budget(p, quire.attention(p.q, cache, plan, **new, return_lse=True))
    assert torch.equal(cache.k.nan_to_num(), p.cache.k.nan_to_num())
