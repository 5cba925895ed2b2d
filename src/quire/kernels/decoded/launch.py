"""`DecodedLaunch`: a quantised cache's keys and values are decoded once, and the Hopper kernel attends to the results.

The converter of the Hopper kernel (`hopper/convert.py`) decodes each tile for each row block, of which a prompt has
many. Here a kernel (`kernel.py`) decodes the batch's keys and values into scratch first, in the queries' dtype, one
sequence after the other. They are a 16-bit cache without pages, for which the Hopper kernel has its launches.

Scales of heads are not multiplied into numbers: the Hopper kernel multiplies scores and results by them. So numbers of
e4m3, e5m2, int8 and nvfp4 are exact in 16 bits. Those with a scale for each token are rounded.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import padded
from quire.dispatch.request import Request, cdiv
from quire.kernels.hopper.launch import HopperLaunch
from quire.kernels.launch import Launch, Runner, key_of, once
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.scratch import MOST_STATES, ScratchSize
from quire.kernels.tma import matrix_of_queries
from quire.spec import AttentionSpec

# Numbers of a tile, of keys and of values, which one warp decodes. With 16 keys of 128 columns in a tile, 16,384 keys
# take 28 to 31 us, and with four warps and 32 keys 29 to 36 (8 KV heads, NVIDIA H200, 2026-11-30).
TILE = 2048
PROGRAMS_PER_SM = 32


@dataclass(frozen=True)
class DecodedLaunch(Launch):
    """Decode the keys and values of prompts, then attend to them.

    Attributes:
        request: the request that was decided about.
        attend: the launch for what was decoded. Its decode launch reads the cache as it is stored.
        fallback: the launch for queries that TMA cannot address.
    """

    request: Request
    attend: HopperLaunch
    fallback: PortableLaunch

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "decoded"

    @property
    def most_seqs(self) -> int:
        """Sequences for which there is room: no batch has more that the decode launch leaves."""
        bounds = self.request.bounds
        return max(1, min(self.request.num_seqs, bounds.num_tokens // (self.attend.max_decode_queries + 1)))

    @property
    def most_keys(self) -> int:
        """Keys of a sequence for which there is room: all, of any launch but those that are for scratch or warm-ups."""
        each = self.most_seqs * self.attend.request.spec.bytes_per_token
        return max(1, min(self.request.bounds.max_seq_len, MOST_STATES // each))

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all keys and values in 16 bits."""
        return self.most_seqs * self.most_keys * self.attend.request.spec.bytes_per_token

    @property
    def table_at(self) -> int:
        """Byte of the workspace where it is said where each sequence begins; keys and values follow."""
        return 128 * cdiv(self.attend.own_bytes, 128)

    @property
    def decoded_at(self) -> int:
        """Byte of the workspace where keys begin."""
        return self.table_at + 128 * cdiv(4 * self.request.num_seqs, 128)

    @property
    def block_n(self) -> int:
        """Keys of a tile."""
        return TILE // max(padded(self.request.spec.head_dim), padded(self.request.spec.head_dim_v))

    @property
    def num_decoders(self) -> int:
        """Programs that decode."""
        request = self.request
        tiles = self.most_seqs * cdiv(request.bounds.max_seq_len, self.block_n) * request.spec.num_kv_heads
        return max(1, min(tiles, PROGRAMS_PER_SM * request.device.num_sms))

    @once
    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch of the launches with decoded keys and values, or of the fallback."""
        fallback = self.fallback.scratch_size()
        counters = max(self.attend.counters, fallback.counters)
        return ScratchSize(max(self.decoded_at + self.decoded_bytes, fallback.total), counters)

    def constexprs(self) -> dict[str, Any]:
        """Return the constexprs of the kernel that decodes, without those that a cache decides."""
        spec = self.request.spec
        return {
            "NUM_KV_HEADS": spec.num_kv_heads, "HEAD_DIM": spec.head_dim, "HEAD_DIM_V": spec.head_dim_v,
            "BLOCK_N": self.block_n, "num_warps": 1,
        } | self.request.device.pdl  # fmt: skip

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        own = key_of("decode", self.request.has_intervals)
        return self.attend.compile_keys() | {own}

    def alike(self) -> "tuple[DecodedLaunch, ...]":
        """Return the launches that differ in what is decided by numbers, and for which kernels are compiled."""
        return tuple(replace(self, attend=attend) for attend in self.attend.alike())

    def with_most_partitions(self) -> "DecodedLaunch":
        """Return the launch with the most partitions that one with its kernels may have, which is for scratch alone."""
        attend, fallback = self.attend.with_most_partitions(), self.fallback.with_most_partitions()
        return replace(self, attend=attend, fallback=fallback)

    def for_cache(self, cache: PagedKVCache, q: Any = None) -> "DecodedLaunch | PortableLaunch":
        """Return this launch, or its fallback if TMA cannot address queries that are given."""
        return self if q is None or not q.shape[0] or matrix_of_queries(q) is not None else self.fallback

    def unserved(self, cache: PagedKVCache, q: Any = None) -> str:
        """Return why the fallback serves queries."""
        return self.attend.unserved(cache, q)

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with scratch in a workspace of `scratch_size` bytes."""
        from quire.kernels.decoded.runner import DecodedRunner

        assert workspace is not None
        return DecodedRunner(self, batch, workspace)

    def __str__(self) -> str:
        fallback = f"fallback for queries that TMA cannot address: {self.fallback}"
        return f"{self.attend.describe()}; keys and values decoded once, {self.decoded_bytes:,} bytes; {fallback}"


@lru_cache(maxsize=1024)
def spec_of_decoded(spec: AttentionSpec) -> AttentionSpec:
    """Return the spec of decoded keys and values."""
    return replace(spec, kv_dtype=spec.dtype, kv_format=None, allow_fp8=False)
