"""The layouts of a cache: their names and shapes, and the checks of tensors against them."""

from typing import Any, NamedTuple

import torch

from quire.cache_formats import FORMATS, check_widths
from quire.errors import UnsupportedError, check_positive, check_tensor, describe
from quire.spec import FORMAT_DTYPE, LATENT_FP8_DTYPES, QUANTISED_DTYPES, QUERY_DTYPES, dtype_names

LAYOUTS = {
    "NHD": "k and v [num_pages, page_size, num_kv_heads, head_dim]",
    "HND": "k and v [num_pages, num_kv_heads, page_size, head_dim]",
    "HDNX": "k [num_pages, num_kv_heads, head_dim / x, page_size, x], v [num_pages, num_kv_heads, head_dim, page_size]",
    "THD": "k and v [num_tokens, num_kv_heads, head_dim], not paged",
}
PAGED_LAYOUTS = {name: LAYOUTS[name] for name in ("NHD", "HND", "HDNX")}
LATENT_LAYOUTS = {
    "NHD": "latents [num_pages, page_size, head_dim]",
    "fp8_ds_mla": "vLLM's records of 656 bytes, uint8 [num_pages, page_size, 656]",
    "fp8_ds_mla_584": "DeepSeek V4's records, uint8 [num_pages, page_size, 584]",
    "fp8_ds_mla_528": "DeepSeek V4.1's records, uint8 [num_pages, page_size, 528]",
}


class Record(NamedTuple):
    """What a layout of records keeps of a token.

    Attributes:
        num_bytes: of a token.
        coded: columns in e4m3, the first ones.
        rope: columns in bfloat16, after them.
        group: columns in e4m3 that share a scale.
        scale_dtype: float32; or uint8, the exponent of a power of two plus 127 (ue8m0).
        smallest_scale: that is written.
        is_split: whether a page has the columns of all its tokens first, and then the scales of all of them.
        page_multiple: of bytes, to which a page is rounded up.
    """

    num_bytes: int
    coded: int
    rope: int
    group: int
    scale_dtype: torch.dtype
    smallest_scale: float
    is_split: bool = False
    page_multiple: int = 1

    @property
    def head_dim(self) -> int:
        """Columns of a token."""
        return self.coded + self.rope

    @property
    def groups(self) -> int:
        """Scales of a token."""
        return self.coded // self.group


RECORDS = {
    # vLLM 0.33 writes powers of two to the first, and none below 1e-4. Of the others, 1e-4 is the least peak.
    "fp8_ds_mla": Record(656, 512, 64, 128, torch.float32, 2.0**-13),
    "fp8_ds_mla_584": Record(584, 448, 64, 64, torch.uint8, 2.0**-22, is_split=True, page_multiple=576),
    "fp8_ds_mla_528": Record(528, 512, 0, 32, torch.uint8, 2.0**-22),
}
RECORD_RANK = 512  # of all of them: in DeepSeek V4's, rotary columns are values too
RECORD_ALIGNMENT = 16  # bytes
SPLIT_ALIGNMENT = 8  # of pages and of the sizes of records, where scales follow the columns of a page
NUM_DIMS = {"NHD": (4, 4), "HND": (4, 4), "HDNX": (5, 4), "THD": (3, 3)}  # of k and v
SLOT_AXIS = {"NHD": 1, "HND": 2, "HDNX": 3} | dict.fromkeys(RECORDS, 1)
HEAD_AXIS = {"NHD": 2, "HND": 1, "HDNX": 1, "THD": 1} | dict.fromkeys(RECORDS, 2)
MAX_PAGES = (1 << 31) - 1  # page numbers are int32


def check_layout(layout: Any, served: dict[str, str]) -> None:
    """Raise unless the layout is one of those served, names with their shapes."""
    if not isinstance(layout, str):
        raise TypeError(f"layout must be the name of a layout, got {describe(layout)}; one of {', '.join(served)}")
    if layout not in served:
        shapes = "; ".join(f"{name}: {shape}" for name, shape in served.items())
        raise UnsupportedError(f"layout must be one of {', '.join(served)}, got {describe(layout)}; {shapes}")


def check_latents(latents: torch.Tensor, rank: int) -> None:
    """Raise unless a tensor holds latents, or records, whose first `rank` columns are values."""
    served = (*QUERY_DTYPES, *LATENT_FP8_DTYPES)
    if latents.dtype not in (*served, torch.uint8):
        raise UnsupportedError(
            f"latents must be of dtype {dtype_names(served)}, or uint8 records, got {latents.dtype}; "
            "view them as their real dtype"
        )
    if latents.dim() != 3 or 0 in latents.shape:
        raise ValueError(
            f"latents must be [num_pages, page_size, head_dim] without an empty dimension, got {list(latents.shape)}; "
            "view them so"
        )
    if latents.stride(2) != 1 and not latents.is_contiguous():
        raise ValueError(
            f"latents must be contiguous in their last dimension, got strides {latents.stride()}; reallocate the cache"
        )
    if latents.dtype is torch.uint8:
        check_records(latents, rank)
    elif rank > latents.shape[2]:
        raise ValueError(
            f"kv_lora_rank must be at most the width of latents, {latents.shape[2]}, got {rank}; "
            "values are the first columns of latents"
        )


def layout_of(latents: torch.Tensor) -> str:
    """Return the layout of latents: of bytes, that of the records of their size."""
    if latents.dtype is not torch.uint8:
        return "NHD"
    for name, record in RECORDS.items():
        if record.num_bytes == latents.shape[2]:
            return name
    sizes = " or ".join(str(record.num_bytes) for record in RECORDS.values())
    raise ValueError(
        f"latents must be records of {sizes} bytes where they are uint8, got {latents.shape[2]} bytes; "
        "view fp8 latents as float8_e4m3fn"
    )


def check_records(latents: torch.Tensor, rank: int) -> None:
    """Raise unless a tensor of bytes holds records."""
    layout = layout_of(latents)
    record = RECORDS[layout]
    if rank != RECORD_RANK:
        raise ValueError(f"kv_lora_rank must be {RECORD_RANK} for {layout} records, got {rank}; that is their rank")
    if record.is_split and latents.shape[1] > 1 and latents.stride(1) != record.num_bytes:
        raise ValueError(
            f"latents must have nothing between the {record.num_bytes} bytes of tokens, got strides "
            f"{latents.stride()}; scales follow the columns of a whole page"
        )
    alignment = SPLIT_ALIGNMENT if record.is_split else RECORD_ALIGNMENT
    if latents.storage_offset() % RECORD_ALIGNMENT or any(stride % alignment for stride in latents.stride()[:2]):
        raise ValueError(
            f"latents must be records that begin at multiples of {alignment} bytes, got strides "
            f"{latents.stride()} from {latents.storage_offset()}; pad them"
        )


def check_latent_scale(scale: Any, latents: torch.Tensor) -> torch.Tensor:
    """Return the scale as a tensor [1], or raise unless it fits the latents."""
    if latents.dtype not in LATENT_FP8_DTYPES:
        is_record = latents.dtype is torch.uint8
        stored = f"{layout_of(latents)} records, which hold theirs" if is_record else str(latents.dtype)
        raise ValueError(f"scale must be left out for latents of {stored}, got {describe(scale)}; it belongs to e4m3")
    if not isinstance(scale, torch.Tensor):
        scale = torch.full(
            (), check_positive("scale", scale, "1.0 means no scale"), dtype=torch.float32, device=latents.device
        )
    check_tensor("scale", scale, "pass a number")
    if scale.numel() != 1 or scale.dim() > 1:
        raise ValueError(f"scale must be a number or hold one element, got {describe(scale)}; scales are per tensor")
    if scale.dtype is not torch.float32 or scale.device != latents.device:
        raise ValueError(f"scale must be float32 on {latents.device}, got {describe(scale)}; convert it")
    return scale.reshape(1)


def check_format_pages(k: torch.Tensor, v: torch.Tensor, layout: str, name: str) -> tuple[int, int]:
    """Return the widths of a key and of a value, or raise unless k and v are pages of one pool in this format."""
    check_pages(k, v, layout, (FORMAT_DTYPE,))
    form = FORMATS[name]
    head_dim, head_dim_v = k.shape[3] * 8 // form.k.bits, v.shape[3] * 8 // form.v.bits
    check_widths(name, head_dim, head_dim_v)
    for side, x in (("k", k), ("v", v)):
        if any(number % 2 for number in (x.storage_offset(), *x.stride()[:3])):
            raise ValueError(
                f"{side} must have even strides from an even byte for kv_format {name}, got {x.stride()} from "
                f"{x.storage_offset()}; two bytes are read at a time"
            )
    return head_dim, head_dim_v


def check_block_scale(name: str, scale: Any, shape: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Return block scales as float8_e4m3fn, or raise unless they have this shape."""
    advice = "nvfp4 has a scale of 16 columns each"
    check_tensor(name, scale, advice)
    if scale.dtype is torch.uint8:
        scale = scale.view(torch.float8_e4m3fn)
    if tuple(scale.shape) != shape or scale.stride(3) != 1:
        raise ValueError(
            f"{name} must be [num_pages, page_size, num_kv_heads, head_dim / 16] = {list(shape)} with a contiguous "
            f"last dimension, got {list(scale.shape)} with strides {scale.stride()}; {advice}"
        )
    if shape[3] % 4 == 0 and any(number % 4 for number in (scale.storage_offset(), *scale.stride()[:3])):
        raise ValueError(
            f"{name} must have strides that 4 divides, from a multiple of 4 bytes, got {scale.stride()} from "
            f"{scale.storage_offset()}; four scales are read at a time"
        )
    if scale.dtype is not torch.float8_e4m3fn or scale.device != device:
        raise ValueError(f"{name} must be float8_e4m3fn on {device}, got {describe(scale)}; convert it")
    return scale


def check_pages(k: torch.Tensor, v: torch.Tensor, layout: str, served: tuple[torch.dtype, ...] = ()) -> None:
    """Raise unless k and v are pages of one pool in this layout, of the dtypes `served` or else any cache's."""
    served = served or QUERY_DTYPES + QUANTISED_DTYPES
    if (k.dim(), v.dim()) != NUM_DIMS[layout]:
        raise ValueError(
            f"k and v must have {NUM_DIMS[layout][0]} and {NUM_DIMS[layout][1]} dimensions in layout {layout} "
            f"({LAYOUTS[layout]}), got shapes {tuple(k.shape)} and {tuple(v.shape)}; "
            "view them so, or name their layout"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.stride(-1) != 1 and not tensor.is_contiguous():
            raise ValueError(
                f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}; reallocate the cache"
            )
        if 0 in (tensor.shape[1:] if layout == "THD" else tensor.shape):
            raise ValueError(
                f"{name} must have no empty dimension in layout {layout}, got shape {tuple(tensor.shape)}; "
                "allocate a page at least"
            )
    if k.dtype != v.dtype or k.device != v.device:
        raise ValueError(
            f"v must have k's dtype and device, {k.dtype} on {k.device}, got {v.dtype} on {v.device}; "
            "allocate both alike"
        )
    if k.dtype not in served:
        raise UnsupportedError(f"k must be of dtype {dtype_names(served)}, got {k.dtype}; view it as its real dtype")
    dims = [0, HEAD_AXIS[layout]] + ([SLOT_AXIS[layout]] if layout != "THD" else [])
    if [k.shape[dim] for dim in dims] != [v.shape[dim] for dim in dims]:
        raise ValueError(
            f"v must have k's pages, slots and heads, got shape {tuple(v.shape)} where k has {tuple(k.shape)} "
            f"in layout {layout}; allocate both alike"
        )


def is_expanded(tensor: torch.Tensor) -> bool:
    """Return whether elements of a tensor share memory, so that it can be read but not written."""
    if tensor.is_contiguous():
        return False
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
