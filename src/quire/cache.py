"""`PagedKVCache`: one layer's pages, in whatever layout the engine keeps them.

Four layouts reduce to one address: `page * stride_page + slot * stride_slot + head * stride_head + (dim // vec) * stride_vec + dim % vec`,
where `vec` is how many elements of a head are contiguous (vLLM's x). The kernels know only that line.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from quire.errors import UnsupportedError
from quire.spec import QUANTISED_DTYPES, QUERY_DTYPES, UNBOUNDED, AttentionSpec

LAYOUTS = {
    "NHD": "k and v [num_pages, page_size, num_kv_heads, head_dim]",
    "HND": "k and v [num_pages, num_kv_heads, page_size, head_dim]",
    "HDNX": "k [num_pages, num_kv_heads, head_dim / x, page_size, x], v [num_pages, num_kv_heads, head_dim, page_size] (vLLM's original)",
    "THD": "k and v [num_tokens, num_kv_heads, head_dim], not paged",
}


KINDS: dict[tuple, int] = {}


class Strides(NamedTuple):
    """Where element (page, slot, head, dim) of a cache tensor lies, in elements; `vec` as in the module's docstring."""

    page: int
    slot: int
    head: int
    vec: int
    vec_size: int


@dataclass(frozen=True, eq=False)
class PagedKVCache:
    """Hold one layer's keys and values, read and written in place.

    Any strides serve as long as the innermost dimension is contiguous: K and V may be slices of one tensor, and pages of several layers may
    interleave. Slots and pages that no sequence owns may hold anything, NaN included.

    Args:
        k: keys, shaped as `layout` says.
        v: values, likewise; their head_dim may differ from the keys'.
        layout: "NHD", "HND", "HDNX" (vLLM's original) or "THD" (not paged, for `varlen_attention`).
        k_scale: of a quantised cache, float32: real key = stored key * k_scale. A number or one-element tensor (per tensor), [num_kv_heads]
            (per head), or [num_pages, page_size, num_kv_heads] (per token and head, any strides).
        v_scale: the same for values; of the same kind as `k_scale`.

    Raises:
        ValueError: shapes, strides, scales or devices do not fit together.
        UnsupportedError: a layout or dtype that is not served.
    """

    k: torch.Tensor
    v: torch.Tensor
    layout: str = "NHD"
    k_scale: torch.Tensor | float | None = None
    v_scale: torch.Tensor | float | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UnsupportedError(
                f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}; "
                + "; ".join(f"{n}: {s}" for n, s in LAYOUTS.items())
            )
        dims = {"THD": (3, 3), "HDNX": (5, 4)}.get(self.layout, (4, 4))
        if (self.k.dim(), self.v.dim()) != dims:
            raise ValueError(
                f"k and v must have {dims[0]} and {dims[1]} dimensions in layout {self.layout} ({LAYOUTS[self.layout]}), "
                f"got shapes {tuple(self.k.shape)} and {tuple(self.v.shape)}; view them so, or name their layout"
            )
        for name, tensor in (("k", self.k), ("v", self.v)):
            if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
                raise ValueError(
                    f"{name} must be contiguous in its last dimension, got strides {tensor.stride()}; reallocate the cache"
                )
        if self.k.dtype != self.v.dtype or self.k.device != self.v.device:
            raise ValueError(
                f"v must have k's dtype and device, got {self.v.dtype} on {self.v.device} beside {self.k.dtype} on {self.k.device}; "
                "allocate both alike"
            )
        if self.k.dtype not in QUERY_DTYPES + QUANTISED_DTYPES:
            raise UnsupportedError(
                f"k must be float16, bfloat16, float32, float8_e4m3fn, float8_e5m2 or int8, got {self.k.dtype}; view it as its real dtype"
            )
        if (self.num_pages, self.page_size, self.num_kv_heads) != self._v_extents:
            raise ValueError(
                f"v must have k's pages, slots and heads {(self.num_pages, self.page_size, self.num_kv_heads)}, got {self._v_extents}; allocate both alike"
            )
        if (self.k_scale is None) != (self.v_scale is None):
            raise ValueError("k_scale and v_scale must be given together, got only one; pass 1.0 for the other")
        if self.k_scale is not None:
            if self.k.dtype not in QUANTISED_DTYPES:
                raise ValueError(
                    f"k_scale must be left out for a cache of {self.k.dtype}, got one; scales belong to fp8 and int8 caches"
                )
            object.__setattr__(self, "k_scale", self._scale("k_scale"))
            object.__setattr__(self, "v_scale", self._scale("v_scale"))
            if self.k_scale.shape != self.v_scale.shape or self.k_scale.stride() != self.v_scale.stride():
                raise ValueError(
                    f"v_scale must have k_scale's shape and strides, got {tuple(self.v_scale.shape)} with {self.v_scale.stride()} beside "
                    f"{tuple(self.k_scale.shape)} with {self.k_scale.stride()}; expand one"
                )

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
        """Allocate an uninitialised cache for one layer of `spec`, scales 1 when it is quantised.

        Args:
            spec: gives heads, head dims and dtype.
            num_pages: pages in the pool.
            page_size: tokens per page, any integer from 1 up.
            layout: "NHD", "HND" or "HDNX".
            device: where.
        """
        heads, dim, dim_v, dtype = spec.num_kv_heads, spec.head_dim, spec.head_dim_v, spec.kv_dtype
        if layout == "HDNX":
            x = 16 // dtype.itemsize
            shapes = (num_pages, heads, dim // x, page_size, x), (num_pages, heads, dim_v, page_size)
        elif layout == "HND":
            shapes = (num_pages, heads, page_size, dim), (num_pages, heads, page_size, dim_v)
        else:
            shapes = (num_pages, page_size, heads, dim), (num_pages, page_size, heads, dim_v)
        scale = 1.0 if dtype in QUANTISED_DTYPES else None
        k, v = (torch.empty(shape, dtype=dtype, device=device) for shape in shapes)
        return cls(k, v, layout, scale, scale)

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored elements."""
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        """Where the pages live."""
        return self.k.device

    @cached_property
    def num_pages(self) -> int:
        """Pages in the pool (tokens, where not paged)."""
        return self.k.shape[0]

    @cached_property
    def page_size(self) -> int:
        """Tokens per page; unbounded where not paged, as a sequence there is one page."""
        return {"NHD": lambda s: s[1], "HND": lambda s: s[2], "HDNX": lambda s: s[3], "THD": lambda s: UNBOUNDED}[
            self.layout
        ](self.k.shape)

    @cached_property
    def num_kv_heads(self) -> int:
        """KV heads."""
        return self.k.shape[2 if self.layout == "NHD" else 1]

    @cached_property
    def head_dim(self) -> int:
        """Width of a key."""
        return self.k.shape[2] * self.k.shape[4] if self.layout == "HDNX" else self.k.shape[-1]

    @cached_property
    def head_dim_v(self) -> int:
        """Width of a value."""
        return self.v.shape[2] if self.layout == "HDNX" else self.v.shape[-1]

    @cached_property
    def scale_kind(self) -> str:
        """ "none", "head" (per tensor or per head) or "token" (per token and head)."""
        return "none" if self.k_scale is None else "token" if self.k_scale.dim() == 3 else "head"

    @cached_property
    def strides(self) -> tuple[Strides, Strides]:
        """Strides of k and of v."""
        k, v = self.k.stride(), self.v.stride()
        if self.layout == "HDNX":
            x = self.k.shape[4]
            return Strides(k[0], k[3], k[1], k[2], x), Strides(v[0], 1, v[1], v[2], 1)
        order = {"NHD": (0, 1, 2), "HND": (0, 2, 1), "THD": (0, 0, 1)}[self.layout]
        return tuple(Strides(*(s[i] for i in order), 0, dim) for s, dim in ((k, self.head_dim), (v, self.head_dim_v)))

    @cached_property
    def scale_strides(self) -> tuple[int, int, int]:
        """Where the scale of (page, slot, head) lies, in elements; those of v lie alike."""
        if self.scale_kind == "token":
            return self.k_scale.stride()
        return (0, 0, 0 if self.k_scale is None else self.k_scale.stride(0))

    @cached_property
    def extents(self) -> tuple[tuple[int, int, int, int], tuple[int, int, int, int]]:
        """Pages, slots of a page, heads and elements of a head, of k and of v; without pages, tokens and one slot."""
        slots = 1 if self.layout == "THD" else self.page_size
        return (self.num_pages, slots, self.num_kv_heads, self.head_dim), (
            self.v.shape[0],
            slots,
            self.num_kv_heads,
            self.head_dim_v,
        )

    @cached_property
    def has_wide_offsets(self) -> bool:
        """Whether an offset within one page and head may pass 2^31 elements; sequences that are not paged are one page."""
        slots = self.k.shape[0] if self.layout == "THD" else self.page_size
        return any(
            (slots - 1) * s.slot + (dim // s.vec_size - 1) * s.vec + s.vec_size > 1 << 31
            for s, dim in zip(self.strides, (self.head_dim, self.head_dim_v), strict=True)
        ) or (slots - 1) * self.scale_strides[1] >= 1 << 31

    @cached_property
    def kind(self) -> int:
        """A number that caches share which one compiled kernel serves."""
        offsets = self.k.storage_offset() % 2, self.v.storage_offset() % 2
        scales = None if self.k_scale is None else (self.k_scale.data_ptr() % 16, self.v_scale.data_ptr() % 16)
        return KINDS.setdefault(
            (
                self.dtype,
                self.layout,
                self.page_size,
                self.strides,
                self.scale_kind,
                self.scale_strides,
                offsets,
                scales,
                self.has_wide_offsets,
            ),
            len(KINDS),
        )

    @property
    def addresses(self) -> tuple[int, int, int | None, int | None]:
        """Of k, v and their scales."""
        if self.k_scale is None:
            return self.k.data_ptr(), self.v.data_ptr(), None, None
        return self.k.data_ptr(), self.v.data_ptr(), self.k_scale.data_ptr(), self.v_scale.data_ptr()

    @cached_property
    def _v_extents(self) -> tuple[int, int, int]:
        slots = {"NHD": 1, "HND": 2, "HDNX": 3}.get(self.layout)
        return (
            self.v.shape[0],
            UNBOUNDED if slots is None else self.v.shape[slots],
            self.v.shape[2 if self.layout == "NHD" else 1],
        )

    def _scale(self, name: str) -> torch.Tensor:
        scale = torch.as_tensor(getattr(self, name), dtype=torch.float32, device=self.device)
        if scale.numel() == 1 and scale.dim() < 3:
            return scale.reshape(1).expand(self.num_kv_heads)  # per tensor is per head with stride 0
        if scale.shape == (self.num_kv_heads,) or (
            self.layout != "THD" and scale.shape == (self.num_pages, self.page_size, self.num_kv_heads)
        ):
            return scale
        raise ValueError(
            f"{name} must be a number, [num_kv_heads] = [{self.num_kv_heads}] or [num_pages, page_size, num_kv_heads] = "
            f"[{self.num_pages}, {self.page_size}, {self.num_kv_heads}], got shape {tuple(scale.shape)}; permute or expand it"
        )
