"""FlashInfer's wrapper of block-sparse matrices against dense attention with a mask in float64."""

import pytest
import torch

from quire.integrations import flashinfer
from quire.integrations.flashinfer.planned import LOG2E

SIZES = {"num_qo_heads": 4, "num_kv_heads": 2, "head_dim": 32}


def dense(q, k, v, seen, scale):
    """Return out and the lse in base 2; `seen` is [num_qo_heads, M, N]."""
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * scale
    scores = scores.masked_fill(~seen.to(scores.device), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v)
    return out, torch.logsumexp(scores, -1).t() * LOG2E


def problem(device, rows=20, keys=48):
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 32).half().to(device) for n, h in ((rows, 4), (keys, 2), (keys, 2)))
    return q, k, v, flashinfer.BlockSparseAttentionWrapper(torch.empty(1, device=device), backend="fa2")


def assert_close(found, expected):
    for x, y, tolerance in zip(found, expected, (5e-3, 1e-2), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("r", "c"), [(4, 8), (8, 16), (1, 1), (20, 48)])
def test_rows_of_blocks_see_the_blocks_of_a_matrix(device, r, c):
    q, k, v, wrapper = problem(device)
    blocks = torch.rand(-(-20 // r), 48 // c) < 0.4
    blocks[0] = False  # a row without blocks
    indptr = torch.nn.functional.pad(blocks.sum(1).cumsum(0), (1, 0)).int()
    wrapper.plan(indptr.to(device), blocks.nonzero()[:, 1].int().to(device), 20, 48, r, c, **SIZES, sm_scale=0.3)
    seen = blocks.repeat_interleave(r, 0)[:20].repeat_interleave(c, 1).expand(4, -1, -1)
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert out.dtype is torch.float16 and not out[:r].any()
    assert_close((out, lse), dense(q, k, v, seen, 0.3))
    own = torch.empty_like(out)
    assert wrapper.run(q, k, v, out=own) is own and torch.equal(own, out)


@pytest.mark.parametrize("heads", [2, 4])
def test_each_kv_head_may_have_blocks_of_its_own(device, heads):
    q, k, v, wrapper = problem(device)
    blocks = torch.rand(2, 5, 6) < 0.5
    mask = blocks.repeat_interleave(heads // 2, 0)
    wrapper.plan(None, None, 20, 48, 4, 8, **SIZES, block_mask=mask.to(device), logits_soft_cap=2.0)
    seen = blocks.repeat_interleave(2, 0).repeat_interleave(4, 1).repeat_interleave(8, 2)
    out = wrapper.run(q, k, v)
    k_all, v_all = (x.double().repeat_interleave(2, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k_all) * 32**-0.5
    scores = (2 * (scores / 2).tanh()).masked_fill(~seen.to(device), float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1).nan_to_num(0.0), v_all)
    torch.testing.assert_close(out.double(), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"N": 47}, "N must be a multiple of C = 8, got 47"),
        ({"indptr": torch.tensor([0, 1])}, r"indptr must have ceil\(M / R\) \+ 1 = 6 entries"),
        ({"indices": torch.tensor([6])}, "indices must be from 0 to N / C - 1 = 5"),
        ({"causal": True}, "causal must be left out, got True; blocks say what is seen"),
        ({"mask": torch.ones(1, 4, 8)}, "mask must be left out"),
    ],
)
def test_what_is_not_served_is_refused(change, message):
    q, k, v, wrapper = problem("cpu")
    given = {"indptr": torch.tensor([0, 1, 1, 1, 1, 1]), "indices": torch.tensor([2]), "M": 20, "N": 48, "R": 4, "C": 8}
    with pytest.raises(ValueError, match="plan must be called before run"):
        wrapper.run(q, k, v)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        wrapper.plan(**given | SIZES | change)
    wrapper.plan(**given, **SIZES)
    with pytest.raises(ValueError, match="k must have the planned N = 48 tokens, got 47"):
        wrapper.run(q, k[:47], v[:47])


# Blocks of sizes that vary.

ROWS = [[3, 0, 9, 8], [8, 8, 2, 2]]
COLUMNS = {1: [[5, 1, 30, 12], [16, 16, 15, 1]], 4: [[8, 16, 4, 20], [0, 24, 12, 12]]}  # by what divides them


def sized(columns):
    """Return a mask of blocks, their sizes, and what each query head sees, [num_qo_heads, 20, 48]."""
    torch.manual_seed(1)
    blocks, rows, columns = torch.rand(2, 4, 4) < 0.5, torch.tensor(ROWS), torch.tensor(columns)
    blocks[0, 2] = False  # a row without blocks
    seen = [b.repeat_interleave(r, 0).repeat_interleave(c, 1) for b, r, c in zip(blocks, rows, columns, strict=True)]
    return blocks, rows.int(), columns.int(), torch.stack(seen).repeat_interleave(2, 0)


@pytest.mark.parametrize("unit", COLUMNS)
def test_blocks_may_have_any_sizes(device, unit):
    q, k, v, _ = problem(device)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # heads first, with any strides
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(1, device=device), backend="fa2")
    mask, rows, columns, seen = sized(COLUMNS[unit])
    wrapper.plan(mask.to(device), rows.to(device), columns.to(device), **SIZES, sm_scale=0.3)
    assert wrapper._page_size == unit
    expected = [x.transpose(0, 1) for x in dense(*(x.transpose(0, 1) for x in (q, k, v)), seen, 0.3)]
    out, lse = wrapper.run(q, k, v, return_lse=True)
    assert out.dtype is torch.float16 and out.is_contiguous() and not out[:2, 3:12].any()
    assert_close((out, lse), expected)
    rows_of_heads, sums = torch.empty(40, 2, 32, dtype=torch.float16, device=device), torch.empty(40, 2, device=device)
    assert torch.equal(wrapper.run(q, k, v, out=rows_of_heads, lse=sums), out)
    assert torch.equal(rows_of_heads.view(2, 20, 2, 32).transpose(1, 2).reshape_as(out), out)
    assert torch.equal(sums.view(2, 20, 2).transpose(1, 2).reshape_as(lse), lse)
    assert_close(
        (wrapper.forward(q, k, v, sm_scale=0.2), lse),
        (dense(*(x.transpose(0, 1) for x in (q, k, v)), seen, 0.2)[0].transpose(0, 1), lse.double()),
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "causal must be left out, got True; blocks say what is seen"),
        (
            {"block_mask_map": torch.ones(1, 4, 4)},
            r"block_mask_map must be \[num_kv_heads = 2, MB, NB\], got \[1, 4, 4\]",
        ),
        ({"block_row_sz": torch.ones(2, 3, dtype=torch.int32)}, r"block_row_sz must be \[num_kv_heads = 2, MB = 4\]"),
        ({"block_row_sz": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 2]])}, "block_row_sz must be .* the same sum"),
        ({"block_col_sz": torch.zeros(2, 4, dtype=torch.int32)}, "block_col_sz must count a key or more, got 0"),
    ],
)
def test_what_is_not_served_of_blocks_of_any_sizes_is_refused(change, message):
    q, k, v, _ = problem("cpu")
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    wrapper = flashinfer.VariableBlockSparseAttentionWrapper(torch.empty(1))
    mask, rows, columns, _ = sized(COLUMNS[4])
    given = {"block_mask_map": mask, "block_row_sz": rows, "block_col_sz": columns} | SIZES
    with pytest.raises(ValueError, match="plan must be called before run"):
        wrapper.run(q, k, v)
    with pytest.raises((ValueError, NotImplementedError), match=message):
        wrapper.plan(**given | change)
    wrapper.plan(**given)
    with pytest.raises(
        ValueError, match=r"k must be \[num_kv_heads = 2, kv_len = 48, head_dim = 32\], got \[2, 47, 32\]"
    ):
        wrapper.run(q, k[:, :47], v)
