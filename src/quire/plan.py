"""`Plan`: how a batch is launched, decided once per step (or once per captured graph) and shared by all layers.

A plan is made from host numbers only. Lengths and page tables stay on the device and may change under it, as long as they keep within the
bounds it was made for.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton

from quire.batch import Batch
from quire.errors import UnsupportedError
from quire.kernels.views import Scratch
from quire.spec import AttentionSpec
from quire.tuning.select import select
from quire.tuning.space import Tile
from quire.tuning.traits import Traits, device_traits

MAX_SPLITS = 128  # of one block's keys
MERGE_ROUND = 2.3  # what merging eight partial states costs, in tiles of keys (1.5 µs and 0.65 µs on an NVIDIA H200, 2026-11-20)


@dataclass(frozen=True, eq=False, repr=False)
class Plan:
    """Carry every decision of a launch; `repr` tells them, and why.

    Attributes:
        spec: what is computed.
        batch: the sequences, read on the device at launch.
        kernel: "triton", or "torch" for CPU tensors outside Triton's interpreter.
        max_query_len: most queries of any sequence.
        max_seq_len: most keys of any sequence.
        num_tokens: most query tokens of the whole batch.
        traits: of the device.
        tile: the kernel's configuration; None for "torch".
        num_splits: shares into which the keys of a block of rows are split.
        scratch: partial states; None where nothing is split.
        why: the reasons, in words.
    """

    spec: AttentionSpec
    batch: Batch
    kernel: str
    max_query_len: int
    max_seq_len: int
    num_tokens: int
    traits: Traits
    tile: Tile | None
    num_splits: int
    scratch: Scratch | None
    why: str

    @property
    def search(self) -> bool:
        """Whether a sequence may have several blocks of rows, so that a program has to search for its own."""
        return self.tile is not None and self.max_query_len * self.spec.group_size > self.tile.block_m

    @property
    def split_rows(self) -> int:
        """Rows of a partial state; 0 where nothing is split."""
        return split_rows(self.spec, self.tile, self.max_query_len) if self.scratch is not None else 0

    def num_q_blocks(self, num_tokens: int) -> int:
        """Return how many blocks of rows `num_tokens` query tokens need at most, per KV head."""
        num_seqs = self.batch.num_seqs
        if not self.search:
            return num_seqs if num_tokens else 0
        if self.batch.cu_seqlens_q is None:
            return num_seqs * triton.cdiv(self.spec.group_size, self.tile.block_m)
        return num_tokens * self.spec.group_size // self.tile.block_m + num_seqs

    def __repr__(self) -> str:
        shape = f"{self.batch.num_seqs} sequences, at most {self.max_query_len} queries and {self.max_seq_len} keys each"
        if self.tile is None:
            return f"Plan(kernel={self.kernel!r}: {shape}; {self.why})"
        t = self.tile
        return (
            f"Plan(kernel={self.kernel!r}: {shape}; tile {t.block_m} rows × {t.block_n} keys, {t.num_warps} warps, {t.num_stages} stages, "
            f"{self.num_q_blocks(self.num_tokens)} blocks × {self.spec.num_kv_heads} KV heads × {self.num_splits} splits; {self.why})"
        )


def plan(
    spec: AttentionSpec,
    batch: Batch,
    *,
    max_query_len: int,
    max_seq_len: int,
    num_tokens: int | None = None,
    num_splits: int | None = None,
    tile: Tile | None = None,
) -> Plan:
    """Decide how `batch` is launched, from host numbers only.

    Make it once per step and share it between the layers that have this spec; or once per captured graph, with the largest lengths that the graph
    shall serve. A plan owns its scratch memory, so two plans may run at the same time on two streams, one plan may not.

    Args:
        spec: what is computed.
        batch: the sequences.
        max_query_len: an upper bound of any sequence's queries in this batch.
        max_seq_len: an upper bound of any sequence's keys.
        num_tokens: an upper bound of the batch's query tokens; `num_seqs * max_query_len` when not given.
        num_splits: into how many shares the keys are split, from 1 to 128; chosen to fill the device when not given.
        tile: the kernel's configuration; chosen by the device's decision tree when not given.

    Returns:
        The plan, with its scratch memory.

    Raises:
        ValueError: a bound is negative, or num_splits out of range.
        UnsupportedError: bfloat16 under Triton's interpreter.
        RuntimeError: the batch is on a device that has no kernel.
    """
    for name, value in (("max_query_len", max_query_len), ("max_seq_len", max_seq_len), ("num_tokens", num_tokens or 0)):
        if value < 0:
            raise ValueError(f"{name} must be at least 0, got {value}; pass an upper bound over the batch")
    if num_splits is not None and not 1 <= num_splits <= MAX_SPLITS:
        raise ValueError(f"num_splits must be from 1 to {MAX_SPLITS}, got {num_splits}; leave it out to have it chosen")
    if batch.cu_seqlens_q is None and max_query_len != 1:
        raise ValueError(f"max_query_len must be 1 where the batch has no cu_seqlens_q, got {max_query_len}; say in the batch which queries are whose")
    if num_tokens is None:
        num_tokens = batch.num_seqs * max_query_len
    traits = device_traits(batch.device)
    if batch.device.type == "cpu" and not triton.knobs.runtime.interpret:
        why = "CPU tensors: vectorised PyTorch; Triton has no CPU driver"
        return Plan(spec, batch, "torch", max_query_len, max_seq_len, num_tokens, traits, None, 1, None, why)
    if batch.device.type == "cpu" and spec.dtype is torch.bfloat16:
        raise UnsupportedError("dtype must not be bfloat16 under Triton's interpreter, which computes it on raw bits and wrongly; use float32 or float16 there")
    if batch.device.type not in ("cuda", "cpu"):
        raise RuntimeError(f"batch must be on a device that Triton serves (cuda, or cpu), got {batch.device}; move it there")

    rows = num_tokens * spec.group_size * spec.num_kv_heads / traits.num_sms
    why = "tile given by the caller"
    if tile is None:
        tile, why = select(spec, traits, _power_of_two(max_query_len * spec.group_size), _power_of_two(rows), _power_of_two(max_seq_len))
    whole = Plan(spec, batch, "triton", max_query_len, max_seq_len, num_tokens, traits, tile, 1, None, why)
    programs = whole.num_q_blocks(num_tokens) * spec.num_kv_heads
    if num_splits is None:
        num_splits = choose_splits(programs, traits.num_sms * tile.programs_per_sm, triton.cdiv(max_seq_len, tile.block_n))
        why += f", {num_splits} splits to fill {traits.num_sms} multiprocessors with {programs} programs"
    if num_splits == 1 or programs == 0:
        return Plan(spec, batch, "triton", max_query_len, max_seq_len, num_tokens, traits, tile, 1, None, why)
    rows = split_rows(spec, tile, max_query_len)
    slots, options = (programs, num_splits, rows), {"dtype": torch.float32, "device": batch.device}
    scratch = Scratch(
        acc=torch.empty(*slots, spec.head_dim_v, **options),
        m=torch.empty(slots, **options),
        denom=torch.empty(slots, **options),
        counter=torch.zeros(programs, dtype=torch.int32, device=batch.device),
    )
    return Plan(spec, batch, "triton", max_query_len, max_seq_len, num_tokens, traits, tile, num_splits, scratch, why)


@cache
def choose_splits(programs: int, capacity: int, tiles: int) -> int:
    """Return into how many shares the keys are best split, when one share per block makes `programs` programs on a device that holds `capacity`.

    More shares mean fewer tiles one after the other, and more partial states to merge, eight in a round.
    """
    if programs == 0 or programs >= capacity:
        return 1

    def cost(splits: int) -> float:
        return -(-tiles // splits) + (MERGE_ROUND * -(-splits // 8) if splits > 1 else 0.0)

    return min(range(1, max(1, min(capacity // programs, tiles, MAX_SPLITS)) + 1), key=cost)


def split_rows(spec: AttentionSpec, tile: Tile, max_query_len: int) -> int:
    """Return the rows of a partial state: one token's for decode, else a whole block, so that no step's length decides what is compiled."""
    return min(tile.block_m, _power_of_two(spec.group_size)) if max_query_len <= 1 else tile.block_m


def _power_of_two(value: float) -> int:
    return 1 << max(0, int(-(-value // 1)) - 1).bit_length()
