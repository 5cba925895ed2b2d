"""The shared memory of the MLA kernel: a stage for each quarter of two tiles, and the barriers that hand them over.

A barrier's i-th phase belongs to the i-th use of what it guards.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quire.kernels.gluon.compat import aggregate, reinterpret
from quire.kernels.gluon.pipeline import (
    THREADS,
    allocate_barrier,
    allocate_barriers,
    allocate_ready,
    make_each_ready,
    make_ready,
    tell_ready,
)
from quire.kernels.mla_hopper import launch

ROWS, TILE = gl.constexpr(launch.ROWS), gl.constexpr(launch.TILE)
HALF = gl.constexpr(256)  # columns of the values that a consumer warpgroup owns
QUARTER = gl.constexpr(128)  # columns that are loaded, waited for and freed together
ROPE = gl.constexpr(64)  # rope columns
PANEL = gl.constexpr(64)  # columns of a TMA box
SCALES = gl.constexpr(8)  # rows of the scales of a tile of records in shared memory: one for each quarter, then zeros
EVEN, ODD = gl.constexpr(0), gl.constexpr(1)
# Quarters of an even and of an odd tile in the order in which they are loaded and multiplied. Both warpgroups multiply
# the values of the odd tile at the same time. So they free its quarters 0 and 2 first.
ORDER = gl.constexpr(((0, 1, 2, 3), (2, 0, 3, 1)))


@aggregate
class Shared:
    """Shared memory and its barriers. The even warpgroup owns quarters 0 and 1 of the columns, the odd one 2 and 3."""

    q: Any  # [4, ROWS, QUARTER]: quarters of the queries
    q_rope: Any  # [1, ROWS, ROPE]
    kv: Any  # [8, TILE, QUARTER]: quarters of the even tile, then of the odd tile
    kv_rope: Any  # [2, TILE, ROPE]: rope columns of the even and of the odd tile, later their probabilities
    maximum: Any  # [2, ROWS]: of the even and of the odd warpgroup
    total: Any  # [2, ROWS]: sum of exponentials
    full: Any  # 8 barriers: the quarter may be multiplied
    empty: Any  # 8: the quarter may be overwritten
    q_full: Any  # both warpgroups have stored their quarters of the queries
    q_empty: Any  # both warpgroups have multiplied the queries
    p_full: Any  # 2: probabilities and maximum are stored
    total_full: Any  # both sums are stored
    raw_full: Any  # fp8 latents: 8 barriers: the quarter has arrived
    peak_full: Any  # fp8 latents with one scale: 1: both warpgroups have stored the absolute maxima of their queries
    seen: Any  # chosen keys: 1: Seen of the even and of the odd tile
    scales: Any  # records: 1: [2, SCALES, TILE] of the even and of the odd tile
    ready: Any  # the other barriers are ready

    @gluon.jit
    def make_ready(self, GATHERED: gl.constexpr):
        """Make all barriers ready. GATHERED: rows are copied one by one."""
        LOADED: gl.constexpr = THREADS if GATHERED else 1  # arrivals of what is loaded
        if len(self.raw_full) > 0:
            make_each_ready(self.raw_full, LOADED)
            make_each_ready(self.full, 1)
        else:
            make_each_ready(self.full, LOADED)
        make_each_ready(self.empty + self.p_full, 1)
        make_each_ready((self.q_full, self.q_empty, self.total_full) + self.peak_full, 2)
        if len(self.seen) > 0:
            make_ready(self.seen[0].full, 1)
        tell_ready(self.ready)


class Seen(NamedTuple):
    """Flags of the keys of tiles, in as many places as there are tiles in shared memory."""

    flags: Any  # [places, TILE] int32: 0 for a key that isn't seen, 1 for one that is; 2 for each if all are
    full: Any  # barriers: the flags are stored


@gluon.jit
def allocate(element: gl.constexpr, FROM_FP8: gl.constexpr, LISTS: gl.constexpr = False):
    """Allocate shared memory for operands of type `element`.

    FROM_FP8: for latents that are converted. LISTS: of chosen keys, of which fp8 latents have records.
    """
    WIDE: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    raw_full, peak_full, seen, scales = (), (), (), ()
    if FROM_FP8:
        raw_full = one_by_one(8)
        if LISTS:
            scales = (make_scales(2),)
        else:
            peak_full = (allocate_barrier(),)
    if LISTS:
        seen = (make_seen(2),)
    return Shared(
        gl.allocate_shared_memory(element, [4, ROWS, QUARTER], WIDE),
        gl.allocate_shared_memory(element, [1, ROWS, ROPE], WIDE),
        gl.allocate_shared_memory(element, [8, TILE, QUARTER], WIDE),
        gl.allocate_shared_memory(element, [2, TILE, ROPE], WIDE),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        gl.allocate_shared_memory(gl.float32, [2, ROWS], FLAT),
        one_by_one(8),
        one_by_one(8),
        allocate_barrier(),
        allocate_barrier(),
        one_by_one(2),
        allocate_barrier(),
        raw_full,
        peak_full,
        seen,
        scales,
        allocate_ready(),
    )  # fmt: skip


@gluon.jit
def one_by_one(NUMBER: gl.constexpr):
    """Allocate barriers of which each has its own place, which the compiler knows."""
    barriers = ()
    for _ in gl.static_range(NUMBER):
        barriers = barriers + (allocate_barrier(),)
    return barriers


@gluon.jit
def make_seen(PLACES: gl.constexpr):
    """Allocate flags of PLACES tiles."""
    flags = gl.allocate_shared_memory(gl.int32, [PLACES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return Seen(flags, allocate_barriers(PLACES))


@gluon.jit
def make_scales(PLACES: gl.constexpr):
    """Allocate the scales of records in PLACES tiles."""
    return gl.allocate_shared_memory(gl.float32, [PLACES, SCALES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def scales_of(tile, QUARTER_I: gl.constexpr):
    """Return the scales of a quarter of the records in a tile, of which `tile` has all scales."""
    rows = reinterpret(tile, gl.float32, [SCALES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    return rows.index(QUARTER_I)
