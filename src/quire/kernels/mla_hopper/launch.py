"""`MLAHopperLaunch`: a launch of the MLA kernel for Hopper GPUs, and what it serves."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import MIN_TMA_BOX, power_of_two
from quire.dispatch.request import Request, cdiv
from quire.kernels.launch import Launch, Runner, constexprs_of, key_of, once
from quire.kernels.mla.launch import MLALaunch
from quire.kernels.scratch import ScratchSize
from quire.kernels.tma import matrix_of, no_matrix, page_box
from quire.kernels.views import Matrix

if TYPE_CHECKING:  # it imports Triton, which a plan for the CPU must not need
    from quire.kernels.scheduler import Search

ROWS = 64  # rows of a row block: the rows of a tensor-core instruction of one warpgroup
TILE = 64  # keys of a tile
WIDTHS = (512, 64)  # kv_lora_rank and qk_rope_head_dim
MAX_COLUMN_ROWS = 32  # up to this many rows of a row block are the columns of products (few_rows.py)
MIN_COLUMNS = 16
MAX_SEQS_OF_COMBINE_BY_SEQ = 32  # up to which programs of the combine belong to sequences, otherwise to boundaries
COMBINE_NUMBERS = 8192  # float32 numbers of partials that a program of the combine holds at once
MIN_COMBINE_PROGRAMS = 132  # programs below which a program combines fewer rows or columns


@dataclass(frozen=True)
class MLAHopperLaunch(Launch):
    """A warp-specialised kernel for latents, and a second one that combines partials if sequences are cut.

    Attributes:
        request: the request that was decided about.
        fallback: the launch for caches that TMA cannot address.
        fp8_mma: whether matrix products are in fp8.
        most_rows: of a row block: MAX_COLUMN_ROWS or ROWS.
        whole: whether no sequence is cut, so that nothing has to be combined.
    """

    request: Request
    fallback: MLALaunch
    fp8_mma: bool = False
    most_rows: int = MAX_COLUMN_ROWS
    whole: bool = False

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "mla_hopper"

    @property
    def variant(self) -> str:
        """Name among the variants: row blocks of 16, 32 or 64 rows, or products in fp8; sequences are cut or whole."""
        rows = "fp8" if self.fp8_mma else {MIN_COLUMNS: "few", MAX_COLUMN_ROWS: "narrow", ROWS: "wide"}[self.columns]
        return f"mla_hopper {rows} {'whole' if self.whole else 'cut'}"

    @property
    def row_blocks(self) -> int:
        """Most row blocks of a sequence."""
        return max(1, cdiv(self.request.rows_per_seq, self.columns))

    @property
    def partial_rows(self) -> int:
        """Rows of a partial, a power of two."""
        return min(self.columns, power_of_two(self.request.rows_per_seq))

    @property
    def columns(self) -> int:
        """Rows of a row block, a power of two. Up to MAX_COLUMN_ROWS, they are columns of products, and keys rows."""
        if self.fp8_mma:
            return ROWS
        return min(power_of_two(max(MIN_COLUMNS, self.request.rows_per_seq)), self.most_rows)

    @property
    def num_partitions(self) -> int:
        """Partitions of the batch's tiles for each row block: as many programs as there are SMs, in all."""
        return max(1, self.request.device.num_sms // self.row_blocks)

    @property
    def combine_cost(self) -> float:
        """Cost of the partials of one tile, for `schedule.latent_partition_size`.

        With cost c, t tiles in partitions of s tiles take the time of s + c * t / s tiles. That is least where s is the
        root of c * t. The cost is that of a partial's rows (NVIDIA H200, 2026-11-22).
        """
        return 0.0 if self.whole else max(32, self.row_blocks * self.partial_rows) / 1280

    @property
    def sequence_cost(self) -> int:
        """Time to begin a sequence, in tiles (NVIDIA H200, 2026-11-22)."""
        return 1 if self.columns < ROWS else 4

    @once
    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for partials, and for the fallback."""
        fallback = self.fallback.scratch_size()
        rows = 2 * self.request.device.num_sms * self.partial_rows
        states = 4 * rows * (self.request.spec.kv_lora_rank + 2)
        return ScratchSize(max(fallback.counters + states, fallback.total), fallback.counters)

    def constexprs(self) -> dict[str, Any]:
        """Return the attention kernel's constexprs, without those that a cache decides."""
        return {
            "NUM_HEADS": self.request.spec.num_q_heads, "PARTIAL_ROWS": self.partial_rows, "COLUMNS": self.columns,
            "FP8_MMA": self.fp8_mma,
        }  # fmt: skip

    @property
    def combines_by_sequence(self) -> bool:
        """Whether programs of the combine belong to sequences; otherwise to boundaries between partitions."""
        return power_of_two(self.request.num_seqs) <= MAX_SEQS_OF_COMBINE_BY_SEQ

    @property
    def num_cuts(self) -> int:
        """Sequences of a row block that may be combined; 1 if they are whole, as a tensor must not be empty."""
        if self.whole:
            return 1
        return self.request.num_seqs if self.combines_by_sequence else max(1, self.num_partitions - 1)

    def search(self, asked: None) -> "Search":
        """Return the launch that finds the schedule."""
        from quire.kernels.schedule import CUT_FIELDS, FIELDS, mla_schedule_kernel
        from quire.kernels.scheduler import Search

        parts, cuts, row_blocks, spec = self.num_partitions, self.num_cuts, self.row_blocks, self.request.spec
        costs = self.combine_cost, self.sequence_cost, int(spec.causal)
        how = int(self.combines_by_sequence), int(self.whole)
        fixed = *costs, *how, self.request.num_seqs, parts, cuts
        sizes = row_blocks * parts * FIELDS.value, row_blocks * cuts * CUT_FIELDS.value
        units = {"GROUP": spec.num_q_heads, "BLOCK_M": self.columns, "UNIT": TILE}
        meta = units | {"PDL": True, "num_warps": 1, "launch_pdl": True}
        return Search(mla_schedule_kernel, row_blocks * max(parts, cuts), sizes, fixed, meta)

    @once
    def combine_constexprs(self) -> dict[str, Any]:
        """Return the constexprs of the combine. They depend on powers of two only, so that there are few of them."""
        num_seqs, row_blocks = power_of_two(self.request.num_seqs), power_of_two(self.row_blocks)
        by_sequence = self.combines_by_sequence
        partials = max(1, self.request.device.num_sms // row_blocks // num_seqs) if by_sequence else 2
        parts = min(16, max(2, power_of_two(partials)))
        columns, block_m = self.request.spec.kv_lora_rank, min(4, self.partial_rows)
        cut = num_seqs if by_sequence else max(1, self.request.device.num_sms // row_blocks)
        rows = cut * row_blocks * self.partial_rows
        too_few = 2 * MIN_COMBINE_PROGRAMS
        while block_m > 1 and (block_m * parts * columns > COMBINE_NUMBERS or rows // block_m < too_few):
            block_m //= 2
        while columns > 128 and rows // block_m * (WIDTHS[0] // columns) < MIN_COMBINE_PROGRAMS:
            columns //= 2
            parts = min(32, 2 * parts)
        return {
            "NUM_HEADS": self.request.spec.num_q_heads, "PARTIAL_ROWS": self.partial_rows,
            "BLOCK_M": block_m, "PARTS": parts, "COLUMNS": columns,
        }  # fmt: skip

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        absent = self.request.has_cu_seqlens  # an argument that may be None
        own = key_of(self.name, absent, **constexprs_of(self))
        if self.num_partitions == 1 or self.whole:
            return frozenset({own})
        return frozenset({own, key_of("mla_combine", absent, **self.combine_constexprs())})

    def with_most_partitions(self) -> "MLAHopperLaunch":
        """Return the launch with the most partitions that one with its kernels may have, which is for scratch alone."""
        return replace(self, fallback=self.fallback.with_most_partitions())

    def for_cache(self, cache: PagedKVCache, q: Any = None) -> "MLAHopperLaunch | MLALaunch":
        """Return this launch, or its fallback if TMA cannot address the cache."""
        return self.fallback if matrix_of_latents(cache) is None else self

    def unserved(self, cache: PagedKVCache, q: Any = None) -> str:
        """Return why the fallback serves a cache: what TMA cannot address."""
        return "records of vLLM's fp8_ds_mla" if cache.scale_kind == "record" else no_matrix(cache)

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with scratch in a workspace of `scratch_size` bytes."""
        from quire.kernels.mla_hopper.runner import MLAHopperRunner

        assert workspace is not None
        return MLAHopperRunner(self, batch, workspace)

    def __str__(self) -> str:
        products = "products in fp8, " if self.fp8_mma else ""
        whole = "whole sequences in " * self.whole
        blocks = "1 row block" if self.row_blocks == 1 else f"{self.row_blocks} row blocks"
        return (
            f"Hopper MLA kernel: {self.columns} rows × {TILE} keys, {products}{whole}{self.num_partitions} partitions "
            f"× {blocks}; fallback for records, and latents that TMA cannot address: {self.fallback}"
        )


def can_multiply_in_fp8(request: Request) -> bool:
    """Return whether products in fp8 are allowed, and the kernel has them for so many rows."""
    spec = request.spec
    return spec.allow_fp8 and spec.kv_dtype is torch.float8_e4m3fn and request.rows_per_seq > MIN_COLUMNS


def matrix_of_latents(cache: PagedKVCache) -> Matrix | None:
    """Return a cache's latents as a matrix; None if the kernel does not serve the cache."""
    if cache.layout != "NHD" or cache.scale_kind == "record":
        return None
    return matrix_of(cache.k, cache.extents[0], cache.strides[0][:3])


def is_gathered(cache: PagedKVCache) -> bool:
    """Return whether latents are copied one by one: TMA loads no boxes of so few slots of a page."""
    return page_box(cache) < MIN_TMA_BOX
