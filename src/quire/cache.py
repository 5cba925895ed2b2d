"""`PagedKVCache`: one layer's pages, in the layout that the engine keeps them in.

Four layouts reduce to one address of the element (page, slot, head, dim):

    page * stride_page + slot * stride_slot + head * stride_head + dim // vec_size * stride_vec + dim % vec_size

`vec_size` is the number of contiguous elements of a head (vLLM's `x`). The kernels use only this formula.

Latents are keys of one head, whose first columns are the values: k and v are two views of the same bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import count
from typing import Any, Literal, NamedTuple

import torch

from quire.cache_formats import FORMAT_LAYOUTS, FORMATS, Format, check_format
from quire.cache_layout import (
    HEAD_AXIS,
    LATENT_LAYOUTS,
    LAYOUTS,
    MAX_PAGES,
    PAGED_LAYOUTS,
    RECORD_RANK,
    RECORDS,
    SLOT_AXIS,
    Record,
    check_block_scale,
    check_format_pages,
    check_latent_scale,
    check_latents,
    check_layout,
    check_pages,
    is_expanded,
    layout_of,
)
from quire.errors import (
    UnsupportedError,
    check_device,
    check_integer,
    check_positive,
    check_tensor,
    describe,
    has_strides,
    shown,
)
from quire.spec import FORMAT_DTYPE, QUANTISED_DTYPES, UNBOUNDED, AttentionSpec


class Strides(NamedTuple):
    """Strides of a cache tensor in elements, and `vec_size` as in the module's docstring."""

    page: int
    slot: int
    head: int
    vec: int
    vec_size: int


class LatentRecords(NamedTuple):
    """Views of the parts of records, whose sizes are those of `cache_layout.Record`.

    Attributes:
        values: [num_pages, page_size, coded] float8_e4m3fn; real column = value * scale of its group.
        scales: [num_pages, page_size, groups] float32, or uint8 for powers of two.
        rope: [num_pages, page_size, rope] bfloat16, the rotary columns; None if there are none.
    """

    values: torch.Tensor
    scales: torch.Tensor
    rope: torch.Tensor | None


@dataclass(frozen=True, eq=False, init=False, repr=False)
class PagedKVCache:
    """Hold one layer's keys and values, or its latents (`from_latents`), read and written in place.

    Any strides serve if the last dimension is contiguous: K and V may be slices of one tensor, and pages of several
    layers may interleave. Slots and pages that no sequence owns may hold anything, NaN included.

    Args:
        k: keys, shaped as `layout` says.
        v: values, likewise; their head_dim may differ from the keys'.
        layout: "NHD", "HND", "HDNX" (vLLM's original, `x` is its vector size) or "THD" (not paged, for
            `varlen_attention`).
        k_scale: of a quantised cache: real key = stored key * k_scale. A positive number or float32 tensor with one
            element (per tensor), or a float32 tensor [num_kv_heads] (per head) or
            [num_pages, page_size, num_kv_heads] (per token and head, any strides).
        v_scale: the same for values; of the same shape and strides as `k_scale`.
        kv_format: of a cache below eight bits, whose k and v are bytes (uint8) in layout "NHD" or "HND". The lower half
            of a byte is an even column, the upper half the odd one after it. None for other caches.
            "int4", vLLM's int4_per_token_head: k [num_pages, page_size, num_kv_heads, head_dim / 2], v likewise, and
            scales per token and head, whose lowest four bits are a zero point: key = (number - zero point) * scale,
            where these bits of the scale are 0.
            "nvfp4", vLLM's and FlashInfer's: the same shapes with numbers in e2m1, and block scales: key = number *
            block scale * k_scale, which is per tensor or per head. head_dim is a multiple of 16, and of values the
            same.
            "k8v4": keys are bytes in e4m3, [num_pages, page_size, num_kv_heads, head_dim], with a scale per token and
            head; values are those of "int4".
        k_block_scale: of nvfp4, float8_e4m3fn or its bytes, [num_pages, page_size, num_kv_heads, head_dim / 16] in
            every layout; any strides with a contiguous last dimension, that 4 divides where head_dim is a multiple of
            64.
        v_block_scale: the same for values; of the same shape and strides.

    Attributes:
        dtype: of the stored elements; uint8 where there is a kv_format.
        device: where the pages are.
        num_pages: pages in the pool (tokens, where not paged).
        page_size: tokens per page; `UNBOUNDED` where not paged, as a sequence there is one page.
        num_kv_heads: KV heads.
        head_dim: width of a key.
        head_dim_v: width of a value.
        signature: dtype or kv_format, KV heads, both head dims and `is_latent`, to be compared with
            `AttentionSpec.cache_signature`.
        scale_kind: "none", "head" (per tensor or per head), "token" (per token and head) or "record" (within
            records).
        is_expanded: whether k, v or scales per token are expanded (a stride is 0): then they can be read, not written.
        is_latent: whether the cache holds latents, of which v is a part of k.
        latents: the latents or records, [num_pages, page_size, columns]; only where `is_latent`.

    Raises:
        TypeError: an argument is of the wrong type.
        ValueError: shapes, strides, scales or devices do not fit together.
        UnsupportedError: a layout or dtype that is not served.

    Examples:
        >>> k, v = torch.zeros(2, 64, 16, 8, 128)  # 64 pages of 16 tokens, 8 KV heads of 128
        >>> cache = quire.PagedKVCache(k, v, "NHD")
        >>> cache.num_pages, cache.page_size, cache.num_kv_heads, cache.head_dim
        (64, 16, 8, 128)
    """

    k: torch.Tensor
    v: torch.Tensor
    layout: str
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    dtype: torch.dtype = field(init=False, repr=False)
    device: torch.device = field(init=False, repr=False)
    num_pages: int = field(init=False, repr=False)
    page_size: int = field(init=False, repr=False)
    num_kv_heads: int = field(init=False, repr=False)
    head_dim: int = field(init=False, repr=False)
    head_dim_v: int = field(init=False, repr=False)
    signature: tuple[torch.dtype | str, int, int, int, bool] = field(init=False, repr=False)
    scale_kind: Literal["none", "head", "token", "record"] = field(init=False, repr=False)
    is_expanded: bool = field(init=False, repr=False)
    is_latent: bool = field(init=False, repr=False)
    latents: torch.Tensor = field(init=False, repr=False)
    kv_format: str | None = field(default=None, init=False, repr=False)
    k_block_scale: torch.Tensor | None = field(default=None, init=False, repr=False)
    v_block_scale: torch.Tensor | None = field(default=None, init=False, repr=False)

    def __init__(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        layout: str = "NHD",
        k_scale: torch.Tensor | float | None = None,
        v_scale: torch.Tensor | float | None = None,
        *,
        kv_format: str | None = None,
        k_block_scale: torch.Tensor | None = None,
        v_block_scale: torch.Tensor | None = None,
    ) -> None:
        form = check_format(kv_format)
        check_layout(layout, LAYOUTS if form is None else FORMAT_LAYOUTS)
        check_tensor("k", k, "allocate the pages with `PagedKVCache.empty`")
        check_tensor("v", v, "allocate the pages with `PagedKVCache.empty`")
        if form is None or kv_format is None:
            check_pages(k, v, layout)
            head_dim, head_dim_v = k.shape[-1], v.shape[-1]
        else:
            k, v = (x.view(FORMAT_DTYPE) if x.dtype is torch.float8_e4m3fn else x for x in (k, v))
            head_dim, head_dim_v = check_format_pages(k, v, layout, kv_format)
        num_kv_heads = k.shape[HEAD_AXIS[layout]]
        if layout == "HDNX":
            head_dim, head_dim_v = k.shape[2] * k.shape[4], v.shape[2]
        values = {
            "k": k,
            "v": v,
            "layout": layout,
            "dtype": k.dtype,
            "device": k.device,
            "num_pages": k.shape[0],
            "page_size": UNBOUNDED if layout == "THD" else k.shape[SLOT_AXIS[layout]],
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "head_dim_v": head_dim_v,
            "signature": (kv_format or k.dtype, num_kv_heads, head_dim, head_dim_v, False),
            "is_latent": False,
        }
        if kv_format is not None:
            values["kv_format"] = kv_format
        self._set(values)
        if (k_scale is None) != (v_scale is None):
            raise ValueError("k_scale and v_scale must be given together, got only one; pass 1.0 for the other")
        k_scale, v_scale = self._scale("k_scale", k_scale), self._scale("v_scale", v_scale)
        scale_kind = "none"
        if k_scale is not None and v_scale is not None:
            scale_kind = "token" if k_scale.dim() == 3 else "head"
            if k_scale.shape != v_scale.shape or k_scale.stride() != v_scale.stride():
                raise ValueError(
                    f"v_scale must have k_scale's shape {tuple(k_scale.shape)} and strides {k_scale.stride()}, "
                    f"got {tuple(v_scale.shape)} and {v_scale.stride()}; expand one of them"
                )
        blocks = self._block_scales(k_block_scale, v_block_scale, scale_kind)
        written = (k, v, *blocks, *((k_scale, v_scale) if scale_kind == "token" else ()))
        expanded = any(is_expanded(x) for x in written if x is not None)
        self._set({"k_scale": k_scale, "v_scale": v_scale, "scale_kind": scale_kind, "is_expanded": expanded})

    @classmethod
    def from_latents(
        cls, latents: torch.Tensor, kv_lora_rank: int, *, scale: torch.Tensor | float | None = None
    ) -> "PagedKVCache":
        """Return a cache of latents, for specs with `latent=True`; k and v are views of the same bytes.

        Args:
            latents: [num_pages, page_size, head_dim] in float16, bfloat16, float32 or float8_e4m3fn, with a contiguous
                last dimension: the latent, then its rotary columns. Layout "NHD". Or records in bytes, of one of these
                layouts, for which k and v are bytes, and dtype is float8_e4m3fn:
                "fp8_ds_mla", uint8 [num_pages, page_size, 656], vLLM's: 512 numbers in e4m3, 4 float32 scales of 128
                columns each, and 64 rotary columns in bfloat16. head_dim is 576.
                "fp8_ds_mla_584", uint8 [num_pages, page_size, 584], DeepSeek V4's: 448 numbers in e4m3, 64 rotary
                columns in bfloat16, which are values too, and 7 scales in ue8m0 of 64 columns each. head_dim is 512. A
                page has 576 bytes of each token first, and then 8 bytes of scales of each; its stride may be larger.
                "fp8_ds_mla_528", uint8 [num_pages, page_size, 528], DeepSeek V4.1's: 512 numbers in e4m3 and 16 scales
                in ue8m0 of 32 columns each. head_dim is 512.
            kv_lora_rank: columns of a latent that are the value too; 512 for records.
            scale: of an e4m3 cache, of keys and values alike: real number = stored number * scale. A positive number,
                or a float32 tensor with one element.

        Returns:
            The cache, with `is_latent`.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: widths, strides, scale or devices do not fit together.
            UnsupportedError: a dtype that is not served.

        Examples:
            >>> cache = quire.PagedKVCache.from_latents(torch.zeros(64, 16, 576), kv_lora_rank=512)
            >>> cache.head_dim, cache.head_dim_v, cache.is_latent
            (576, 512, True)
        """
        check_tensor("latents", latents, "allocate the pages with `PagedKVCache.empty`")
        rank = check_integer("kv_lora_rank", kv_lora_rank, "512 is DeepSeek's", 1)
        check_latents(latents, rank)
        stored_scale = None if scale is None else check_latent_scale(scale, latents)
        dtype, head_dim, layout = latents.dtype, latents.shape[2], layout_of(latents)
        record = RECORDS.get(layout)
        if record is not None:
            dtype, head_dim = torch.float8_e4m3fn, record.head_dim
        scale_kind = "none" if stored_scale is None else "head"
        k = latents.unsqueeze(2)
        self = object.__new__(cls)
        self._set(
            {
                "k": k,
                "v": k[..., :rank],
                "layout": layout,
                "k_scale": stored_scale,
                "v_scale": stored_scale,
                "dtype": dtype,
                "device": latents.device,
                "num_pages": latents.shape[0],
                "page_size": latents.shape[1],
                "num_kv_heads": 1,
                "head_dim": head_dim,
                "head_dim_v": rank,
                "signature": (dtype, 1, head_dim, rank, True),
                "scale_kind": scale_kind if record is None else "record",
                "is_expanded": is_expanded(latents),
                "is_latent": True,
                "latents": latents,
            }
        )
        return self

    def _set(self, values: dict[str, Any]) -> None:
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @classmethod
    def empty(
        cls,
        spec: AttentionSpec,
        num_pages: int,
        page_size: int,
        *,
        layout: str = "NHD",
        device: torch.device | str | None = None,
    ) -> "PagedKVCache":
        """Allocate an uninitialised cache for one layer of `spec`, with scales of 1 if it is quantised.

        A `kv_format` has scales per token and head, or block scales, which are uninitialised too.

        For a spec with `latent=True`, it holds latents.

        Args:
            spec: gives heads, head dims and dtype.
            num_pages: pages in the pool, at least 1.
            page_size: tokens per page, at least 1.
            layout: "NHD", "HND" or "HDNX"; of latents, "NHD" or one of the records of `from_latents`.
            device: where; torch's default device when not given.

        Raises:
            TypeError: an argument is of the wrong type.
            ValueError: a size is out of range.
            UnsupportedError: a layout that is not served, or not for this head_dim and dtype.

        Examples:
            >>> spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, kv_dtype=torch.int8)
            >>> cache = quire.PagedKVCache.empty(spec, num_pages=64, page_size=16)
            >>> cache.k.shape, cache.dtype, cache.scale_kind
            (torch.Size([64, 16, 8, 128]), torch.int8, 'head')
        """
        if not isinstance(spec, AttentionSpec):
            raise TypeError(f"spec must be an AttentionSpec, got {describe(spec)}; make one for the layer")
        num_pages = check_integer("num_pages", num_pages, "size the pool by the memory there is", 1, MAX_PAGES)
        page_size = check_integer("page_size", page_size, "16 is a common size", 1, UNBOUNDED - 1)
        form = check_format(spec.kv_format)
        check_layout(layout, LATENT_LAYOUTS if spec.latent else PAGED_LAYOUTS if form is None else FORMAT_LAYOUTS)
        device = check_device("device", device, "leave it out for the default device")
        heads, dim, dim_v, dtype = spec.num_kv_heads, spec.head_dim, spec.head_dim_v, spec.kv_dtype
        if form is not None:
            middle = (heads, page_size) if layout == "HND" else (page_size, heads)
            k, v = (
                torch.empty(num_pages, *middle, codes.data_bytes(width), dtype=dtype, device=device)
                for codes, width in ((form.k, dim), (form.v, dim_v))
            )
            # The scales of a head's tokens are neighbours: a program reads those of one head.
            per_token = num_pages, heads, page_size
            if not form.has_blocks:
                scales = (torch.empty(per_token, dtype=torch.float32, device=device) for _ in range(2))
                return cls(k, v, layout, *(scale.transpose(1, 2) for scale in scales), kv_format=spec.kv_format)
            k_blocks, v_blocks = (
                torch.empty(*per_token, dim // form.k.group, dtype=torch.float8_e4m3fn, device=device).transpose(1, 2)
                for _ in range(2)
            )
            blocks = {"k_block_scale": k_blocks, "v_block_scale": v_blocks}
            return cls(k, v, layout, 1.0, 1.0, kv_format=spec.kv_format, **blocks)
        if layout == "HDNX":
            x = 16 // dtype.itemsize
            if dim % x:
                raise UnsupportedError(
                    f"layout must be NHD or HND for head_dim {dim} in {dtype}, got 'HDNX'; it needs multiples of {x}"
                )
            shapes = (num_pages, heads, dim // x, page_size, x), (num_pages, heads, dim_v, page_size)
        elif layout == "HND":
            shapes = (num_pages, heads, page_size, dim), (num_pages, heads, page_size, dim_v)
        else:
            shapes = (num_pages, page_size, heads, dim), (num_pages, page_size, heads, dim_v)
        scale = 1.0 if dtype in QUANTISED_DTYPES else None
        if spec.latent:
            record = RECORDS.get(layout)
            if record is None:
                latents = torch.empty(num_pages, page_size, dim, dtype=dtype, device=device)
                return cls.from_latents(latents, dim_v, scale=scale)
            if (dtype, dim_v, dim) != (torch.float8_e4m3fn, RECORD_RANK, record.head_dim):
                raise UnsupportedError(
                    f"layout must be NHD for latents of {dim_v} + {dim - dim_v} in {dtype}, got {layout!r}; "
                    f"its records hold {RECORD_RANK} + {record.head_dim - RECORD_RANK} in float8_e4m3fn"
                )
            used = page_size * record.num_bytes
            size = -(-used // record.page_multiple) * record.page_multiple
            pages = torch.empty(num_pages, size, dtype=torch.uint8, device=device)
            return cls.from_latents(pages[:, :used].unflatten(1, (page_size, record.num_bytes)), dim_v)
        k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        return cls(k, v, layout, scale, scale)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is computed when it is first asked for: `kind` counts the kinds of one process.

        Keys and values are views of latents and made again, since pickle would make memory of their own for them.
        """
        left_out = {name for name, value in vars(type(self)).items() if isinstance(value, cached_property)}
        if self.is_latent:
            left_out |= {"k", "v"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take what `__getstate__` returned."""
        self._set(state)
        if self.is_latent:
            k = self.latents.unsqueeze(2)
            self._set({"k": k, "v": k[..., : self.head_dim_v]})

    def __repr__(self) -> str:
        names = "latents" if self.is_latent else "k", "v", "layout", "k_scale", "v_scale"
        return shown(self, *names, "kv_format", "k_block_scale", "v_block_scale")

    @cached_property
    def records(self) -> LatentRecords:
        """The parts of records, as views."""
        latents, record = self.latents, self.record
        coded, rope, scales = record.coded, 2 * record.rope, record.groups * record.scale_dtype.itemsize
        if record.is_split:
            row, pages, slots, begin = coded + rope, *latents.shape[:2], latents.storage_offset()

            def part(size: int, stride: int, first: int) -> torch.Tensor:
                return latents.as_strided((pages, slots, size), (latents.stride(0), stride, 1), begin + first)

            parts = part(coded, row, 0), part(scales, record.num_bytes - row, slots * row), part(rope, row, coded)
        else:
            parts = latents.split([coded, scales, rope], -1)
        return LatentRecords(
            parts[0].view(torch.float8_e4m3fn),
            parts[1].view(record.scale_dtype),
            parts[2].view(torch.bfloat16) if rope else None,
        )

    @property
    def form(self) -> Format:
        """How numbers are stored, where there is a `kv_format`."""
        assert self.kv_format is not None
        return FORMATS[self.kv_format]

    @property
    def scales(self) -> dict[str, Any]:
        """The keyword arguments that make such a cache of its `k`, `v` and `layout`."""
        names = "k_scale", "v_scale", "kv_format", "k_block_scale", "v_block_scale"
        return {name: getattr(self, name) for name in names}

    @property
    def record(self) -> Record:
        """What the layout keeps of a token, where it is one of records."""
        return RECORDS[self.layout]

    @cached_property
    def strides(self) -> tuple[Strides, Strides]:
        """Strides of k and of v, in elements; of records, in bytes."""
        k, v = self.k.stride(), self.v.stride()
        if self.layout == "HDNX":
            return Strides(k[0], k[3], k[1], k[2], self.k.shape[4]), Strides(v[0], 1, v[1], v[2], 1)
        slot, head = SLOT_AXIS.get(self.layout, 0), HEAD_AXIS[self.layout]
        return (
            Strides(k[0], k[slot], k[head], 0, self.head_dim),
            Strides(v[0], v[slot], v[head], 0, self.head_dim_v),
        )

    @cached_property
    def scale_strides(self) -> tuple[int, int, int]:
        """Strides of the scale of (page, slot, head), in elements; v's are the same."""
        if self.k_scale is None:
            return 0, 0, 0
        if self.scale_kind == "head":
            return 0, 0, self.k_scale.stride(0)
        page, slot, head = self.k_scale.stride()
        return page, slot, head

    @cached_property
    def block_strides(self) -> tuple[int, int, int]:
        """Strides of the block scales of (page, slot, head), in bytes; v's are the same."""
        if self.k_block_scale is None:
            return 0, 0, 0
        page, slot, head, _ = self.k_block_scale.stride()
        return page, slot, head

    @cached_property
    def extents(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Pages, slots of a page, heads and elements of a head, of k and of v; without pages, tokens and one slot."""
        slots = 1 if self.layout == "THD" else self.page_size
        pages, heads = self.num_pages, self.num_kv_heads
        return (pages, slots, heads, self.head_dim), (pages, slots, heads, self.head_dim_v)

    @cached_property
    def has_wide_offsets(self) -> bool:
        """Whether an offset within one page, or of a scale, may reach 2^31 elements.

        An unpaged sequence is one page.
        """
        slots, heads = self.k.shape[0] if self.layout == "THD" else self.page_size, self.num_kv_heads
        _, scale_slot, scale_head = self.scale_strides
        return (slots - 1) * scale_slot + (heads - 1) * scale_head >= 1 << 31 or any(
            (slots - 1) * s.slot + (heads - 1) * s.head + (dim // s.vec_size - 1) * s.vec + s.vec_size > 1 << 31
            for s, dim in zip(self.strides, (self.head_dim, self.head_dim_v), strict=True)
        )

    @cached_property
    def kind(self) -> int:
        """A number that two caches share only if one compiled kernel serves both."""
        odd_offsets = self.k.storage_offset() % 2, self.v.storage_offset() % 2
        # For AMD's GPUs, Triton compiles other addresses where a tensor's memory is less than 2 GiB.
        stored = [x for x in (self.k, self.v, self.k_scale, self.v_scale) if x is not None]
        small = tuple(x.untyped_storage().nbytes() < 1 << 31 for x in stored)
        facts = self.layout, self.page_size, self.strides, self.scale_kind, self.scale_strides
        if self.kv_format is not None:
            facts = *facts, self.kv_format, self.block_strides
        return _kind_of(self.dtype, self.is_latent, *facts, odd_offsets, small, self.has_wide_offsets)

    @property
    def addresses(self) -> tuple[int | None, ...]:
        """Of k, v, their scales and their block scales; of latents, of values, the rotary columns and the scales."""
        if self.is_latent:
            return self._addresses_of_latents()
        if self.k_block_scale is not None:
            return tuple(x.data_ptr() for x in (self.k, self.v, *self.scale_tensors))
        if self.k_scale is None or self.v_scale is None:
            return self.k.data_ptr(), self.v.data_ptr(), None, None
        return self.k.data_ptr(), self.v.data_ptr(), self.k_scale.data_ptr(), self.v_scale.data_ptr()

    @property
    def scale_tensors(self) -> list[torch.Tensor]:
        """Those of k_scale, v_scale, k_block_scale and v_block_scale that there are."""
        found = self.k_scale, self.v_scale, self.k_block_scale, self.v_block_scale
        return [x for x in found if x is not None]

    def _addresses_of_latents(self) -> tuple[int, int | None, int | None]:
        if self.scale_kind == "record":
            values, scales, rope = self.records
            return values.data_ptr(), None if rope is None else rope.data_ptr(), scales.data_ptr()
        at = self.k.data_ptr()
        rope_at = at + self.head_dim_v * self.dtype.itemsize if self.head_dim_v < self.head_dim else None
        return at, rope_at, None if self.k_scale is None else self.k_scale.data_ptr()

    def _scale(self, name: str, scale: Any) -> torch.Tensor | None:
        if scale is None:
            return None
        if self.dtype not in QUANTISED_DTYPES and self.kv_format is None:
            raise ValueError(
                f"{name} must be left out for a cache of {self.dtype}, got {describe(scale)}; "
                "scales belong to fp8 and int8 caches"
            )
        advice = "1.0 means no scale"
        if not isinstance(scale, torch.Tensor):
            scale = torch.full((), check_positive(name, scale, advice), dtype=torch.float32, device=self.device)
        check_tensor(name, scale, advice)
        if scale.dtype != torch.float32 or scale.device != self.device:
            raise ValueError(f"{name} must be float32 on {self.device}, got {describe(scale)}; convert it")
        if self.kv_format is not None and not self.form.has_blocks and scale.dim() != 3:
            raise ValueError(
                f"{name} must be [num_pages, page_size, num_kv_heads] for kv_format {self.kv_format}, got shape "
                f"{tuple(scale.shape)}; each token and head has its own"
            )
        if self.kv_format is not None and self.form.has_blocks and scale.dim() == 3:
            raise ValueError(
                f"{name} must be a number or [num_kv_heads] for kv_format {self.kv_format}, got shape "
                f"{tuple(scale.shape)}; scales of columns are {name.replace('scale', 'block_scale')}"
            )
        if scale.numel() == 1 and scale.dim() < 3:
            return scale.reshape(1).expand(self.num_kv_heads)  # per tensor is per head with stride 0
        per_token = self.num_pages, self.page_size, self.num_kv_heads
        if scale.shape == (self.num_kv_heads,) or (self.layout != "THD" and scale.shape == per_token):
            return scale
        raise ValueError(
            f"{name} must be a number, [num_kv_heads] = [{self.num_kv_heads}] or "
            f"[num_pages, page_size, num_kv_heads] = {list(per_token)}, got shape {tuple(scale.shape)}; "
            "permute or expand it"
        )

    def _block_scales(self, k_scale: Any, v_scale: Any, scale_kind: str) -> tuple[torch.Tensor, ...]:
        """Check and keep the block scales, if the format has some."""
        if self.kv_format is not None and scale_kind == "none":
            raise ValueError(f"k_scale must be given for kv_format {self.kv_format}, got None; numbers have a scale")
        given = {"k_block_scale": k_scale, "v_block_scale": v_scale}
        if self.kv_format is None or not self.form.has_blocks:
            for name, scale in given.items():
                if scale is not None:
                    raise ValueError(f"{name} must be left out, got {describe(scale)}; it belongs to kv_format nvfp4")
            return ()
        shape = self.num_pages, self.page_size, self.num_kv_heads, self.head_dim // self.form.k.group
        checked = {name: check_block_scale(name, scale, shape, self.device) for name, scale in given.items()}
        k_scale, v_scale = checked.values()
        if k_scale.stride() != v_scale.stride():
            raise ValueError(
                f"v_block_scale must have k_block_scale's strides {k_scale.stride()}, got {v_scale.stride()}; "
                "allocate both alike"
            )
        self._set(checked)
        return k_scale, v_scale


def packed_cache(k: torch.Tensor, v: torch.Tensor) -> PagedKVCache:
    """Return `PagedKVCache(k, v, "THD")`.

    Every layer of a step has keys and values of the same shapes and strides. What follows from these is kept.
    """
    if torch.compiler.is_compiling() or not (has_strides(k) and has_strides(v)):
        return PagedKVCache(k, v, "THD")
    facts = _facts_of(k), _facts_of(v)
    known = _packed.get(facts)
    if known is None:
        first = PagedKVCache(k, v, "THD")
        _ = first.kind, first.extents
        known = {name: value for name, value in first.__dict__.items() if name not in ("k", "v")}
        if len(_packed) >= MOST_PACKED:
            _packed.clear()
        _packed[facts] = known
    cache = object.__new__(PagedKVCache)
    cache.__dict__.update(known, k=k, v=v)
    return cache


def _facts_of(x: torch.Tensor) -> tuple[Any, ...]:
    """Return all that a cache of packed keys and values reads of one of them."""
    is_small = x.untyped_storage().nbytes() < 1 << 31
    return x.dtype, x.device, x.shape, x.stride(), x.storage_offset() % 2, is_small


def decoded_cache(k: torch.Tensor, v: torch.Tensor) -> Callable[[PagedKVCache], PagedKVCache]:
    """Return a function that returns `PagedKVCache(k, v, "THD")` with the scales of heads of another cache.

    Args:
        k: decoded keys, in 16 bits.
        v: decoded values.
    """
    plain, known = PagedKVCache(k, v, "THD"), dict[int, dict[str, Any]]()

    def with_scales_of(stored: PagedKVCache) -> PagedKVCache:
        scales = {"k_scale": stored.k_scale, "v_scale": stored.v_scale} if stored.scale_kind == "head" else {}
        made = object.__new__(PagedKVCache)
        if stored.kind in known:
            made.__dict__.update(known[stored.kind], **scales)
            return made
        made.__dict__.update(plain.__dict__, scale_kind=stored.scale_kind if scales else "none", **scales)
        _ = made.kind, made.extents, made.strides, made.scale_strides
        known[stored.kind] = dict(made.__dict__)
        return made

    return with_scales_of


MOST_PACKED = 64  # shapes and strides of packed keys and values that are kept
_packed: dict[tuple[Any, ...], dict[str, Any]] = {}


@lru_cache(maxsize=4096)
def _kind_of(*facts: Any) -> int:
    return next(_kinds)


_kinds = count()
