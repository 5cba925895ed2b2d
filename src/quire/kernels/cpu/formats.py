"""Decode and encode the numbers of formats below eight bits in PyTorch, to the same bits as the Triton kernels."""

import torch

from quire.cache import PagedKVCache
from quire.cache_formats import Codes
from quire.kernels.formats import LARGEST, LARGEST_E2M1, SMALLEST_BLOCK_SCALE, SMALLEST_PEAK, SMALLEST_RANGE

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def decode(
    cache: PagedKVCache, page: torch.Tensor, slot: torch.Tensor, heads: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of some KV heads in float32, [..., heads, width]; page and slot have any equal shape."""
    form = cache.form
    k = decode_side(cache, cache.k, cache.k_scale, cache.k_block_scale, form.k, page, slot, heads)
    return k, decode_side(cache, cache.v, cache.v_scale, cache.v_block_scale, form.v, page, slot, heads)


def decode_side(
    cache: PagedKVCache,
    stored: torch.Tensor,
    scale: torch.Tensor | None,
    blocks: torch.Tensor | None,
    codes: Codes,
    page: torch.Tensor,
    slot: torch.Tensor,
    heads: slice,
) -> torch.Tensor:
    """Return keys, or values, of some KV heads."""
    assert scale is not None
    x = stored[page, slot, heads] if cache.layout == "NHD" else stored[page, heads, slot]
    if codes.name == "e4m3":
        return x.view(torch.float8_e4m3fn).float() * scale[page, slot][..., heads, None]
    x = torch.stack([x & 15, x >> 4], -1).flatten(-2)
    if codes.has_zero:
        bits = scale[page, slot][..., heads, None].contiguous().view(torch.int32)
        return (x.float() - (bits & 15)) * (bits & ~15).view(torch.float32)
    table = torch.tensor([*E2M1, *(-number for number in E2M1)], dtype=torch.float32, device=x.device)
    assert blocks is not None
    of_block = blocks.view(torch.uint8)[page, slot][..., heads, :].contiguous().view(torch.float8_e4m3fn).float()
    x = table[x.int()].unflatten(-1, (-1, codes.group)) * of_block[..., None]
    return x.flatten(-2) * scale[heads, None]


def encode(
    x: torch.Tensor, codes: Codes, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the bytes of heads, their scales, and their block scales in e4m3.

    Args:
        x: [num_tokens, heads, width] float32.
        codes: how to store them.
        scale: of the cache, which block scales are relative to.
    """
    finite = torch.where(x.isfinite(), x, 0.0)
    if codes.group:
        groups = x.unflatten(-1, (-1, codes.group))
        peak = finite.unflatten(-1, (-1, codes.group)).abs().amax(-1)
        head = scale[:, None]
        wanted = (peak / LARGEST_E2M1 / head).clamp(SMALLEST_BLOCK_SCALE, LARGEST[torch.float8_e4m3fn])
        blocks = wanted.to(torch.float8_e4m3fn)
        numbers = to_e2m1((groups / (blocks.float() * head)[..., None]).flatten(-2))
        return packed(numbers), None, blocks
    if codes.name == "e4m3":
        limit = LARGEST[torch.float8_e4m3fn]
        peak = finite.abs().amax(-1)
        fresh = torch.where(peak > SMALLEST_PEAK, peak / limit, 1.0)
        return (x / fresh[..., None]).clamp(-limit, limit).to(torch.float8_e4m3fn).view(torch.uint8), fresh, None
    low, high = finite.amin(-1).clamp(max=0.0), finite.amax(-1).clamp(min=0.0)
    bits = torch.where(high - low > SMALLEST_RANGE, (high - low) / 15, 1.0).view(torch.int32) & ~15
    fresh = bits.view(torch.float32)
    zero = (-low / fresh).round().clamp(0, 15)
    numbers = ((x / fresh[..., None]).nan_to_num(0.0, 15.0, -15.0).round() + zero[..., None]).clamp(0, 15)
    return packed(numbers.to(torch.uint8)), (bits | zero.int()).view(torch.float32), None


def to_e2m1(x: torch.Tensor) -> torch.Tensor:
    """Round float32 to e2m1, half to even, saturating; NaN becomes 0. Return four bits of each in uint8."""
    magnitude = x.abs().nan_to_num(0.0, 6.0).clamp(max=6.0)
    # Steps are 0.5 up to 2, 1 up to 4, and 2 up to 6. A number in steps, rounded, plus the codes before its range.
    step = torch.where(magnitude < 2, 2.0, torch.where(magnitude < 4, 1.0, 0.5))
    before = torch.where(magnitude < 2, 0.0, torch.where(magnitude < 4, 2.0, 4.0))
    number = (magnitude * step).round() + before
    return number.to(torch.uint8) | ((x.view(torch.int32) < 0) & (number > 0)).to(torch.uint8) << 3


def packed(numbers: torch.Tensor) -> torch.Tensor:
    """Return four-bit numbers, [..., width] uint8, two to a byte."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4
