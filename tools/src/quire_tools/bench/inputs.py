"""The tensors of a case: one cache, and page tables that share no page, so that no call finds its keys in L2.

Where query tokens choose keys, a table is the lists of all tokens, and each table has a pool of its own in the cache.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch

import quire
from quire_tools.bench.case import RECORDS, Case, Pool
from quire_tools.bench.scores import SCORES, slopes_of

MAX_TABLES = 256
L2_MULTIPLE = 6  # the page tables together point at this many times the bytes of the L2 cache
MOST_POOL_BYTES = 24 * 10**9  # of the pools of all tables


@dataclass(frozen=True, eq=False)
class Inputs:
    """The tensors of a case: one cache, and page tables that share no page.

    Together the tables point at several times as many bytes as the L2 cache holds, unless that takes too many tables.

    Attributes:
        case: the case.
        q: queries, [num_tokens, num_q_heads, head_dim].
        cache: pages in NHD layout, filled with normal random numbers; scales are 1, of int8 1/40.
        tables: page tables, each [num_seqs, max_pages_per_seq] int32. Where keys are packed, the pages of a table are
            in order, so that a table stands for a slice of the cache. Where keys are chosen, the lists of all query
            tokens, [num_tokens, width] int32: slots of the table's own pool. The lists are in ascending order.
        seq_lens: [num_seqs] int32.
        cu_seqlens_q: [num_seqs + 1] int32.
        cu_seqlens_k: the same for keys.
        sinks: [num_q_heads], or None.
        alibi_slopes: [num_q_heads], or None.
        extras: the tensors of the spec's functions.
        pools: where keys are chosen, the pool of each table: a slice of the cache.
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
    pools: tuple[quire.PagedKVCache, ...] = ()

    @property
    def arguments(self) -> dict[str, Any]:
        """Further arguments of `quire.attention`."""
        return {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes, "extras": self.extras}

    def batch(self, table: torch.Tensor) -> quire.Batch:
        """Return the sequences, with one of the tables."""
        starts = None if self.case.bounds["max_query_len"] == 1 else self.cu_seqlens_q
        if self.case.packed:
            return quire.Batch.varlen(starts, self.cu_seqlens_k)
        if self.case.pool is not None:
            return batch_of_lists(table, self.seq_lens, starts)
        return quire.Batch(table, self.seq_lens, starts)

    def cache_of(self, table: torch.Tensor) -> quire.PagedKVCache:
        """Return the cache whose pages, or slots, a table names. Tables of lists lie one after the other in memory."""
        return self.pools[table.storage_offset() // table.numel()] if self.pools else self.cache

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
    pools: tuple[quire.PagedKVCache, ...] = ()
    if case.pool is None:
        cache, tables = make_tables(case, max_tables, table_len, device, generator)
    else:
        cache, tables, pools = make_lists(case, case.pool, max_tables, device, generator)
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
    return Inputs(case, q, cache, tuple(tables), seq_lens, starts, key_starts, sinks, slopes, extras, pools)


def make_tables(
    case: Case, max_tables: int, table_len: int, device: torch.device, generator: torch.Generator
) -> tuple[quire.PagedKVCache, list[torch.Tensor]]:
    """Return a cache, and page tables for all of its pages; the arguments are those of `make_inputs`."""
    num_shared = case.shared_prefix // case.page_size  # pages, the first of each table
    pages_per_seq = [pages - num_shared for pages in case.pages_per_seq]
    pages_per_table = num_shared + sum(pages_per_seq)
    bytes_per_call = pages_per_table * case.page_size * case.bytes_per_key
    num_tables = min(max_tables, tables_beyond_l2(bytes_per_call, device))
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
    return cache, tables


def make_lists(
    case: Case, pool: Pool, max_tables: int, device: torch.device, generator: torch.Generator
) -> tuple[quire.PagedKVCache, list[torch.Tensor], tuple[quire.PagedKVCache, ...]]:
    """Return a cache, tables of lists of chosen keys, and the slice of the cache that is each table's pool.

    A pool is larger than what its table names, so memory may limit how many there are.
    """
    width, pages = case.bounds["max_seq_len"], pool.num_slots // case.page_size
    bytes_per_call = case.bytes_per_key * pool.num_named(case.num_tokens, width)
    room = max(2, MOST_POOL_BYTES // (case.bytes_per_key * pool.num_slots))
    num_tables = min(max_tables, room, tables_beyond_l2(bytes_per_call, device))
    cache = make_cache(case, num_tables * pages, device, generator)
    lists = torch.empty(num_tables, case.num_tokens, width, dtype=torch.int32, device=device)
    for table in lists:
        draw_lists(table, pool, generator)
    slices = cache.latents.split(pages)
    return cache, list(lists), tuple(quire.PagedKVCache.from_latents(some, cache.head_dim_v) for some in slices)


def draw_lists(lists: torch.Tensor, pool: Pool, generator: torch.Generator) -> None:
    """Fill lists, [num_tokens, width], with random slots of a pool, none twice in a list; see `Pool.shared`."""
    width, device = lists.shape[1], lists.device
    before = torch.empty(0, dtype=torch.int64, device=device)
    for row in lists:
        is_other = torch.ones(pool.num_slots, dtype=torch.bool, device=device)
        is_other[before] = False
        slots = torch.randperm(pool.num_slots, device=device, generator=generator)
        kept = before[torch.randperm(len(before), device=device, generator=generator)[: pool.num_kept(width)]]
        before = torch.cat([kept, slots[is_other[slots]]])[:width].sort().values
        row.copy_(before)


def batch_of_lists(lists: torch.Tensor, seq_lens: torch.Tensor, starts: torch.Tensor | None) -> quire.Batch:
    """Return a batch whose query tokens have lists of slots. Its page table and `seq_lens` may then hold anything."""
    return quire.Batch(seq_lens[:, None], seq_lens, starts, chosen=quire.ChosenKeys(lists, are_slots=True))


def tables_beyond_l2(bytes_per_call: float, device: torch.device) -> int:
    """Return how many tables point at several times as many bytes as the L2 cache holds, at least 2."""
    return max(2, math.ceil(L2_MULTIPLE * l2_bytes(device) / bytes_per_call))


def make_cache(case: Case, num_pages: int, device: torch.device, generator: torch.Generator) -> quire.PagedKVCache:
    """Fill pages with normal random numbers, in int8 with 40 times these, and scales of 1/40."""
    cache = quire.PagedKVCache.empty(case.spec, num_pages, case.page_size, layout=case.cache_layout, device=device)
    if case.spec.kv_format is not None or case.kv_dtype == RECORDS:
        if cache.is_latent:
            write, shapes = quire.write_latent, [(case.spec.kv_lora_rank,), (case.spec.qk_rope_head_dim,)]
        else:
            write, shapes = quire.write_kv, [(cache.num_kv_heads, dim) for dim in (cache.head_dim, cache.head_dim_v)]
        slots = torch.arange(num_pages * case.page_size, device=device)
        for some in slots.split(max(1, len(slots) // 16)):
            k, v = (torch.randn(len(some), *shape, device=device, generator=generator) for shape in shapes)
            write(k, v, cache, some)
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
