"""Formats of a cache below eight bits: how they store the numbers of a head, and which scales these have.

A byte holds two numbers of four bits: the lower half is an even column, the upper half the odd one after it.
"""

from typing import Any, NamedTuple

from quire.errors import UnsupportedError, describe


class Codes(NamedTuple):
    """How a format stores keys, or values.

    Attributes:
        name: "int4", whole numbers from 0 to 15; "e2m1"; or "e4m3".
        bits: of a number.
        group: columns that share a scale in e4m3; 0 where a token and head have one scale in float32.
        has_zero: whether the lowest four bits of that scale are the zero point: x = (number - zero point) * scale,
            where these bits of the scale are 0.
    """

    name: str
    bits: int
    group: int = 0
    has_zero: bool = False

    def bytes_of(self, width: int) -> int:
        """Return the bytes of a head of so many columns, and of its scales."""
        return self.data_bytes(width) + (width // self.group if self.group else 4)

    def data_bytes(self, width: int) -> int:
        """Return the bytes of a head of so many columns without its scales."""
        return width * self.bits // 8


class Format(NamedTuple):
    """A format of a cache.

    Attributes:
        k: how keys are stored.
        v: how values are stored.
        description: in a few words.
    """

    k: Codes
    v: Codes
    description: str

    @property
    def has_blocks(self) -> bool:
        """Whether groups of columns have scales of their own."""
        return self.k.group > 0


INT4, E2M1 = Codes("int4", 4, has_zero=True), Codes("e2m1", 4, group=16)
FORMATS = {
    "int4": Format(INT4, INT4, "four bits, with a scale and a zero point of each token and head"),
    "nvfp4": Format(E2M1, E2M1, "e2m1, with a scale in e4m3 of 16 columns each"),
    "k8v4": Format(Codes("e4m3", 8), INT4, "keys in e4m3 and values in four bits, with scales of each token and head"),
}
FORMAT_LAYOUTS = {  # with the bytes of a head
    "NHD": "k and v [num_pages, page_size, num_kv_heads, bytes]",
    "HND": "k and v [num_pages, num_kv_heads, page_size, bytes]",
}


def check_format(name: Any) -> Format | None:
    """Return the format of a name; None for None."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"kv_format must be the name of a format, got {describe(name)}; one of {', '.join(FORMATS)}")
    if name not in FORMATS:
        listed = "; ".join(f"{each}: {form.description}" for each, form in FORMATS.items())
        raise UnsupportedError(f"kv_format must be one of {', '.join(FORMATS)}, got {describe(name)}; {listed}")
    return FORMATS[name]


def check_widths(name: str, head_dim: int, head_dim_v: int) -> None:
    """Raise unless heads of these widths can be stored in a format."""
    form = FORMATS[name]
    for argument, width, codes in (("head_dim", head_dim, form.k), ("head_dim_v", head_dim_v, form.v)):
        if codes.group and width % codes.group:
            raise UnsupportedError(
                f"{argument} must be a multiple of {codes.group} for kv_format {name}, got {width}; "
                f"{codes.group} columns share a scale"
            )
    if form.has_blocks and head_dim != head_dim_v:
        raise UnsupportedError(
            f"head_dim_v must be head_dim for kv_format {name}, got {head_dim_v} and {head_dim}; pad the narrower one"
        )
