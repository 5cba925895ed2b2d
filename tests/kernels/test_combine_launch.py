"""Partials that a second launch combines, and heads in two panels."""

import pytest
import torch
import triton

import quire
from quire import intervals
from quire.dispatch.config import KernelConfig
from quire.testing import make_problem
from tests.extended import extended

pytestmark = pytest.mark.one_triton

HEADS = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 16}
PARTIALS = {
    "decode": ({}, ((1, 20), (1, 0), (1, 300), (1, 700)), {}),
    "more partials than fit": ({"num_kv_heads": 1}, ((1, 1100), (1, 40)), {}),
    "drafts, padding rows and columns": ({"num_q_heads": 10, "head_dim": 24}, ((1, 400), (3, 300)), {}),
    "window, sinks": ({"sliding_window": 200, "sinks": True}, ((1, 500), (1, 250)), {}),
    "several row blocks": ({"num_q_heads": 18}, ((5, 300), (1, 90), (0, 10)), {}),
    "int8": ({"kv_dtype": torch.int8, "dtype": torch.float16}, ((1, 300), (1, 500)), {}),
    "e4m3": ({"kv_dtype": torch.float8_e4m3fn, "dtype": torch.float16, "head_dim": 32}, ((1, 300), (1, 500)), {}),
    "intervals": ({}, ((3, 300), (1, 200)), {"per_token": intervals.causal}),
}
BY_DEFAULT = (
    ("decode", False),
    ("decode", True),
    ("drafts, padding rows and columns", True),
    ("more partials than fit", True),
)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("case", "apart"),
    [
        (case, apart) if (case, apart) in BY_DEFAULT else extended(case, apart)
        for case in PARTIALS
        for apart in (False, True)
    ],
)
def test_partials_are_combined_by_the_last_program_or_by_a_second_launch(
    case, apart, device, assert_within_budget, combine_apart
):
    combine_apart(apart)
    features, lens, more = PARTIALS[case]
    spec = quire.AttentionSpec(**HEADS | {"dtype": torch.float32} | features)
    p = make_problem(spec, lens, device=device, one_query=case == "decode", **more)
    width = max(16, triton.next_power_of_2(spec.head_dim))
    block_n = 32 if case == "int8" else 16  # which the kernel halves for int8
    config = KernelConfig(16, block_n, 4, 2, False, programs_per_sm=64, block_d=width, block_dv=width)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=37, config=config)
    for _ in range(2):
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True))


@pytest.mark.triton
def test_the_second_launch_writes_whole_row_blocks_no_second_time(device, combine_apart):
    """A row block inside one partition is finished by its program; the second launch leaves it alone."""
    combine_apart(True)
    spec = quire.AttentionSpec(**HEADS, dtype=torch.float32)
    p = make_problem(spec, ((1, 16), (1, 16), (1, 16)), device=device, one_query=True)
    config = KernelConfig(16, 16, 4, 2, False, programs_per_sm=64, block_d=16, block_dv=16)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=2, config=config)
    expected = quire.attention(p.q, p.cache, plan)
    plan.workspace.view(torch.uint8)[-1024:].fill_(0xFF)  # NaN, where partials would be
    assert torch.equal(quire.attention(p.q, p.cache, plan), expected)


@pytest.mark.triton
@pytest.mark.parametrize(
    ("head_dim", "head_dim_v", "rows", "kv_dtype"),
    [
        (80, 80, 64, None), (96, 72, 64, None), (168, 136, 16, None), (136, 128, 16, torch.float8_e4m3fn),
        (192, 168, 32, torch.float8_e5m2), (320, 160, 16, None),
    ],
)  # fmt: skip
def test_heads_in_two_panels(head_dim, head_dim_v, rows, kv_dtype, device, assert_within_budget):
    spec = quire.AttentionSpec(
        num_q_heads=4, num_kv_heads=2, head_dim=head_dim, head_dim_v=head_dim_v, dtype=torch.float16, kv_dtype=kv_dtype
    )
    p = make_problem(spec, ((9, 70), (1, 40)), device=device)
    wide = [triton.next_power_of_2(dim) for dim in (head_dim, head_dim_v)]
    config = KernelConfig(rows, 16, 4, 1, True, programs_per_sm=1, block_d=wide[0], block_dv=wide[1])
    for num_splits in (1, 3):
        plan = quire.plan(spec, p.batch, **p.bounds, num_splits=num_splits, config=config)
        assert_within_budget(p, quire.attention(p.q, p.cache, plan, return_lse=True))


@pytest.mark.triton
def test_panels_hold_all_columns_with_less_padding():
    from quire.kernels.panels import panel_widths

    def of(dim, each=1, rows=64):
        return panel_widths(dim, each, rows)

    assert [of(dim) for dim in (16, 24, 64, 80, 96, 112, 128)] == [
        (16,),
        (32,),
        (64,),
        (64, 32),
        (64, 32),
        (128,),
        (128,),
    ]
    assert [of(dim, rows=16) for dim in (80, 96, 136, 168, 192, 200)] == [
        (128,), (128,), (128, 32), (128, 64), (128, 64), (256,),
    ]  # fmt: skip
    assert of(168, 2, 16) == (64, 32) and of(80, 2, 16) == (64,)
    for dim in range(32, 513, 8):
        for each in (1, 2):
            widths = of(dim, each)
            assert sum(widths) * each >= dim > widths[0] * each // 2
