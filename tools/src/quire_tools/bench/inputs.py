"""The tensors of a case: one cache, and page tables that share no page, so that no call finds its keys in L2."""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

import quire
from quire_tools.bench.case import Case
from quire_tools.bench.scores import SCORES, slopes_of

MAX_TABLES = 256
L2_MULTIPLE = 6  # the page tables together point at this many times the bytes of the L2 cache


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case: one cache, and page tables that share no page.

    Together the tables point at several times as many bytes as the L2 cache holds, unless that takes too many tables.

    Attributes:
        case: the case.
        q: queries, [num_tokens, num_q_heads, head_dim].
        cache: pages in NHD layout, filled with normal random numbers; scales are 1, of int8 1/40.
        tables: page tables, each [num_seqs, max_pages_per_seq] int32. Where keys are packed, the pages of a table are
            in order, so that a table stands for a slice of the cache.
        seq_lens: [num_seqs] int32.
        cu_seqlens_q: [num_seqs + 1] int32.
        cu_seqlens_k: the same for keys.
        sinks: [num_q_heads], or None.
        alibi_slopes: [num_q_heads], or None.
        extras: the tensors of the spec's functions.
    """

    case: Case
    q: torch.Tensor
    cache: quire.PagedKVCache
    tables: tuple[torch.Tensor, ...]
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor
    cu_seqlens_k: torch.Tensor
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None = None
    extras: tuple[torch.Tensor, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments of `quire.attention`."""
        return {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes, "extras": self.extras}

    def batch(self, table: torch.Tensor) -> quire.Batch:
        """Return the sequences, with one of the tables."""
        starts = None if self.case.bounds["max_query_len"] == 1 else self.cu_seqlens_q
        if self.case.packed:
            return quire.Batch.varlen(starts, self.cu_seqlens_k)
        return quire.Batch(table, self.seq_lens, starts)

    def packed(self, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the packed keys and values that a table stands for, [num_keys, num_kv_heads, head_dim] each."""
        first = int(table[0, 0])
        end = first + sum(self.case.seq_lens)
        return self.cache.k[first:end, 0], self.cache.v[first:end, 0]

    def empty_out(self) -> torch.Tensor:
        """Return a tensor for results, [num_tokens, num_q_heads, head_dim_v], filled with NaN."""
        spec = self.case.spec
        return self.q.new_full((self.case.num_tokens, spec.num_q_heads, spec.head_dim_v), math.nan)

    def plan(self, table: torch.Tensor, allow_fp8: bool = False, **options: Any) -> quire.Plan:
        """Plan for one of the tables; `options` are those of `quire.plan`, bounds included."""
        arguments: dict[str, Any] = {**self.case.bounds, **options}
        spec = self.case.spec  # the same object for all plans, as in a server
        if allow_fp8 and not spec.allow_fp8:
            spec = replace(spec, allow_fp8=True)
        return quire.plan(spec, self.batch(table), **arguments)


def make_inputs(
    case: Case, device: torch.device | str = "cuda", max_tables: int = MAX_TABLES, table_len: int = 0
) -> Inputs:
    """Fill a cache with random numbers and assign its pages to sequences, at random unless keys are packed.

    Args:
        case: the batch.
        device: where the tensors are.
        max_tables: make no more page tables than this.
        table_len: keys that each row of a table has room for, if more than the case has.
    """
    spec, device = case.spec, torch.device(device)
    generator = torch.Generator(device).manual_seed(0)
    num_shared = case.shared_prefix // case.page_size  # pages, the first of each table
    pages_per_seq = [pages - num_shared for pages in case.pages_per_seq]
    pages_per_table = num_shared + sum(pages_per_seq)
    bytes_per_call = pages_per_table * case.page_size * case.bytes_per_key
    num_tables = min(max_tables, max(2, math.ceil(L2_MULTIPLE * l2_bytes(device) / bytes_per_call)))
    cache = make_cache(case, num_tables * pages_per_table, device, generator)
    if case.packed:
        order = torch.arange(cache.num_pages, dtype=torch.int32, device=device)
    else:
        order = torch.randperm(cache.num_pages, device=device, generator=generator).to(torch.int32)
    width = max(*case.pages_per_seq, -(-table_len // case.page_size))
    tables = []
    for pages in order.split(pages_per_table):
        table = torch.zeros(len(case.lens), width, dtype=torch.int32, device=device)
        table[:, :num_shared] = pages[:num_shared]
        for row, owned in zip(table, pages[num_shared:].split(pages_per_seq), strict=True):
            row[num_shared : num_shared + len(owned)] = owned
        tables.append(table)
    starts, key_starts = (
        torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
        for lens in (case.query_lens, case.seq_lens)
    )
    seq_lens = torch.tensor(case.seq_lens, dtype=torch.int32, device=device)
    q = torch.randn(case.num_tokens, spec.num_q_heads, spec.head_dim, device=device, generator=generator).to(spec.dtype)
    sinks = torch.randn(spec.num_q_heads, device=device, generator=generator).to(spec.dtype) if spec.sinks else None
    slopes = slopes_of(spec.num_q_heads).to(device) if spec.alibi else None
    extras: tuple[torch.Tensor, ...] = ()
    if case.scores is not None:
        random = partial(torch.randn, device=device, generator=generator)
        made = SCORES[case.scores].extras(case.num_tokens, spec.num_q_heads, random)
        extras = tuple(extra.to(device) for extra in made)
    return Inputs(case, q, cache, tuple(tables), seq_lens, starts, key_starts, sinks, slopes, extras)


def make_cache(case: Case, num_pages: int, device: torch.device, generator: torch.Generator) -> quire.PagedKVCache:
    """Fill pages with normal random numbers, in int8 with 40 times these, and scales of 1/40."""
    cache = quire.PagedKVCache.empty(case.spec, num_pages, case.page_size, device=device)
    if case.spec.kv_format is not None:
        heads, slots = cache.num_kv_heads, torch.arange(num_pages * case.page_size, device=device)
        for some in slots.split(max(1, len(slots) // 16)):
            k, v = (
                torch.randn(len(some), heads, width, device=device, generator=generator)
                for width in (cache.head_dim, cache.head_dim_v)
            )
            quire.write_kv(k, v, cache, some)
        return cache
    is_int8 = case.spec.kv_dtype is torch.int8
    unit = 40.0 if is_int8 else 1.0
    for tensor in (cache.latents,) if cache.is_latent else (cache.k, cache.v):
        for some in tensor.split(max(1, num_pages // 16)):  # a sixteenth at a time, since random numbers are float32
            some.copy_((unit * torch.randn(some.shape, device=device, generator=generator)).clamp(-127, 127))
    return quire.PagedKVCache(cache.k, cache.v, "NHD", 1 / unit, 1 / unit) if is_int8 else cache


def l2_bytes(device: torch.device) -> int:
    """Return the size of the L2 cache; 64 MiB where torch does not know it, 0 on a CPU."""
    if device.type != "cuda":
        return 0
    return getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 64 << 20)
