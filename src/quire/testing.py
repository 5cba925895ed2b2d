"""Tools to test paged attention: random problems, poisoned memory, an error budget, and a check of a batch's contents.

They are part of the package, so that integrations and users can test with them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from quire import reference
from quire.batch import Batch, ChosenKeys
from quire.cache import PagedKVCache
from quire.checks.batch import check_batch
from quire.norm_rope import QKNorm, Rope
from quire.score_functions import KINDS, largest_number
from quire.spec import QUANTISED_DTYPES, AttentionSpec
from quire.state import State

__all__ = [
    "Oracle",
    "Problem",
    "Verdict",
    "check_batch",
    "error_budget",
    "make_problem",
    "owned_slots",
    "poison",
    "random_chosen",
    "random_norm_rope",
    "unwritten",
]


LARGEST_E4M3 = 448.0
EXP2_ERROR = 2.0**-22  # relative, of `ex2.approx.ftz.f32` (PTX ISA), by which kernels compute exponentials


@dataclass(frozen=True, eq=False)
class Problem:
    """The inputs of `quire.attention`, and their lengths on the host.

    Attributes:
        spec: what to compute.
        batch: the sequences.
        cache: the pages; every slot that no query sees is poisoned.
        q: queries, [num_tokens, num_q_heads, head_dim]; `halves` are those to latents.
        query_lens: queries per sequence.
        seq_lens: keys per sequence.
        sinks: [num_q_heads] or None.
        alibi_slopes: [num_q_heads] or None.
        step: k, v, slot_mapping, rope and qk_norm of `quire.attention`, as far as it is given them. Oracles know them
            then, unless latents or a quantised cache round them.
        out_scale: that of `quire.attention`, if it is given one.
        extra_cache: the same.
        extras: the tensors of `spec.extras`.
    """

    spec: AttentionSpec
    batch: Batch
    cache: PagedKVCache
    q: torch.Tensor
    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    sinks: torch.Tensor | None
    alibi_slopes: torch.Tensor | None
    step: Mapping[str, Any] = field(default_factory=dict)
    out_scale: torch.Tensor | None = None
    extra_cache: PagedKVCache | None = None
    extras: tuple[torch.Tensor, ...] = ()

    @property
    def bounds(self) -> dict[str, int]:
        """Keyword arguments of `quire.plan`."""
        return {
            "max_query_len": max(self.query_lens, default=0),
            "max_seq_len": max(self.seq_lens, default=0),
            "num_tokens": self.q.shape[0],
        }

    @property
    def halves(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The queries to latents as the pair (q_nope, q_pe): views of q."""
        return self.q[..., : self.spec.kv_lora_rank], self.q[..., self.spec.kv_lora_rank :]

    @property
    def tables(self) -> dict[str, Any]:
        """Keyword arguments of `quire.attention` and of `quire.reference.attention`."""
        extra = {} if self.extra_cache is None else {"extra_cache": self.extra_cache}
        extra |= {"extras": self.extras} if self.extras else {}
        return {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes} | extra


def make_problem(
    spec: AttentionSpec,
    lens: Sequence[tuple[int, int]],
    *,
    page_size: int = 16,
    layout: str = "NHD",
    scales: str = "head",
    flat_table: bool = False,
    one_query: bool = False,
    spare_pages: int = 3,
    per_token: Callable[[Batch, int], Batch] | None = None,
    extras: tuple[torch.Tensor, ...] | None = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> Problem:
    """Make a random problem with scattered pages, and poison all memory that attention must not read.

    Poison fills page 0 (whose address masked loads have), the unused slots of last pages, spare pages, and keys before
    every query's window. Page table entries past a sequence's end are -1, and so are all of a sequence without queries.
    Of several heads, the last one has a sink of -inf.

    Args:
        spec: what to compute.
        lens: (query length, sequence length) of each sequence, new tokens included. A padding row is (1, 0).
        page_size: tokens per page.
        layout: "NHD", "HND" or "HDNX"; of latents, "NHD" or one of records, such as "fp8_ds_mla".
        scales: of a quantised cache: "tensor", "head" or "token". Those of latents are per tensor.
        flat_table: make the page table one-dimensional, with `cu_pages`.
        one_query: leave `cu_seqlens_q` out; every query length must be 1.
        spare_pages: pages that no sequence owns, page 0 included.
        per_token: returns the batch with intervals, trees or chosen keys, such as `quire.intervals.causal` or
            `random_chosen`, from the batch and its number of tokens.
        extras: the tensors of `spec.extras`, on the CPU; random ones, of 17 numbers along dimensions of any size, when
            not given.
        seed: of the random numbers.
        device: where the tensors go.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> problem = quire.testing.make_problem(spec, [(1, 40), (7, 7)])  # a decoding sequence and a prompt
        >>> problem.q.shape, problem.bounds
        (torch.Size([8, 4, 16]), {'max_query_len': 7, 'max_seq_len': 40, 'num_tokens': 8})
    """
    generator = torch.Generator().manual_seed(seed)
    query_lens, seq_lens = tuple(q for q, _ in lens), tuple(s for _, s in lens)
    pages_of = [-(-s // page_size) for s in seq_lens]
    num_pages = sum(pages_of) + max(spare_pages, 1)
    order = (1 + torch.randperm(num_pages - 1, generator=generator)).to(torch.int32)
    rows = order[: sum(pages_of)].split(pages_of)
    rows = [row if query_len else torch.full_like(row, -1) for row, query_len in zip(rows, query_lens, strict=True)]
    if flat_table:
        table = torch.cat([*rows, order[:0]])
        cu_pages = torch.tensor([0, *pages_of], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    else:
        table = torch.full((len(lens), max([1, *pages_of])), -1, dtype=torch.int32)
        for row, pages in zip(table, rows, strict=True):
            row[: len(pages)] = pages
        cu_pages = None
    cu_seqlens_q = None if one_query else torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    batch = Batch(table, torch.tensor(seq_lens, dtype=torch.int32), cu_seqlens_q, cu_pages)
    if per_token is not None:
        batch = per_token(batch, sum(query_lens))

    cache = random_cache(spec, num_pages, page_size, layout, scales, generator)
    if extras is None:
        extras = random_extras(spec, generator)
    poison(cache, owned_slots(batch, cache, spec, extras))
    q = torch.randn(sum(query_lens), spec.num_q_heads, spec.head_dim, generator=generator).to(spec.dtype)
    sinks = torch.randn(spec.num_q_heads, generator=generator) if spec.sinks else None
    if sinks is not None:
        sinks[1:][-1:] = float("-inf")
    slopes = 2.0 ** -(8.0 * (1 + torch.arange(spec.num_q_heads)) / spec.num_q_heads) if spec.alibi else None

    def move(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.to(device)

    batch = Batch(
        table.to(device),
        batch.seq_lens.to(device),
        move(cu_seqlens_q),
        move(cu_pages),
        key_begin=move(batch.key_begin),
        key_end=move(batch.key_end),
        tree_bits=move(batch.tree_bits),
        chosen=None if (c := batch.chosen) is None else replace(c, indices=c.indices.to(device), lens=move(c.lens)),
    )
    if cache.is_latent:
        cache = PagedKVCache.from_latents(cache.latents.to(device), spec.kv_lora_rank, scale=move(cache.k_scale))
    else:
        cache = with_tensors(cache, lambda tensor: tensor.to(device))
    tables = move(sinks), move(slopes)
    extras = tuple(extra.to(device) for extra in extras)
    return Problem(spec, batch, cache, q.to(device), query_lens, seq_lens, *tables, extras=extras)


def random_extras(spec: AttentionSpec, generator: torch.Generator, size: int = 17) -> tuple[torch.Tensor, ...]:
    """Return random tensors for a spec's functions, of `size` numbers along dimensions of any size."""
    made = []
    for extra in spec.extras:
        shape = extra.with_size(size)
        numbers = torch.randn(shape, generator=generator)
        if KINDS[extra.dtype] != "float":
            numbers = torch.randint(0, 4 if KINDS[extra.dtype] == "int" else 2, shape, generator=generator)
        made.append(numbers.to(extra.dtype))
    return tuple(made)


def random_chosen(
    batch: Batch,
    num_tokens: int,
    *,
    width: int,
    num_lists: int | None = None,
    block_size: int = 1,
    counted: bool = False,
    causal: bool = True,
    slots_of: int | None = None,
    shared: float = 0.0,
    seed: int = 0,
) -> Batch:
    """Return the batch with random lists of chosen keys, for `make_problem(per_token=...)`.

    Lists have any number of entries, in any order, and negative numbers anywhere. Some are empty.

    Args:
        batch: the sequences, on the CPU.
        num_tokens: query tokens of the step.
        width: most entries of a list.
        num_lists: lists of a token, as many as KV heads; None for one list for all heads.
        block_size: keys that an entry names.
        counted: say how many entries count; those after them are no keys.
        causal: name no key after the token's own block.
        slots_of: name slots, of pages of this many tokens, instead of positions.
        shared: the share of its entries that a list has from the one of the token before.
        seed: of the random numbers.

    Examples:
        >>> from functools import partial
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> choose = partial(quire.testing.random_chosen, width=8)
        >>> problem = quire.testing.make_problem(spec, [(1, 40), (7, 7)], per_token=choose)
        >>> problem.batch.chosen.indices.shape
        torch.Size([8, 8])
    """
    if slots_of is not None and slots_of % block_size:
        raise ValueError(
            f"slots_of must be a multiple of block_size, got {slots_of} and {block_size}; a block is whole"
        )
    generator = torch.Generator().manual_seed(seed)

    def below(limit: int) -> int:
        return int(torch.randint(limit, (1,), generator=generator))

    lists = num_lists or 1
    indices = torch.full((num_tokens, lists, width), -1, dtype=torch.int32)
    lens = torch.full((num_tokens, lists), width, dtype=torch.int32)
    starts = batch.query_starts.tolist()
    for seq, kv_len in enumerate(batch.seq_lens.tolist()):
        before = [torch.empty(0, dtype=torch.int64)] * lists
        for token in range(starts[seq], starts[seq + 1]):
            end = max(0, kv_len - (starts[seq + 1] - 1 - token)) if causal else kv_len
            for i in range(lists):
                if counted:
                    lens[token, i] = below(width + 1)
                room, blocks = int(lens[token, i]), -(-end // block_size)
                most = min(room, blocks)
                count = most if below(2) else below(most + 1)
                entries = torch.randperm(max(blocks, 1), generator=generator)
                if shared:
                    kept = before[i][torch.rand(before[i].shape, generator=generator) < shared]
                    entries = torch.cat((kept, entries[~torch.isin(entries, kept)]))
                before[i] = entries = entries[:count]
                if slots_of is not None:
                    row = batch.page_table[seq] if batch.cu_pages is None else batch.page_table[batch.cu_pages[seq] :]
                    first = entries * block_size
                    entries = (row[first // slots_of].long() * slots_of + first % slots_of) // block_size
                indices[token, i, torch.randperm(room, generator=generator)[:count]] = entries.int()
                indices[token, i, room::2], indices[token, i, room + 1 :: 2] = 0, (1 << 31) - 1
    counts = lens if counted else None
    if num_lists is None:
        indices, counts = indices[:, 0], None if counts is None else counts[:, 0]
    return replace(batch, chosen=ChosenKeys(indices, counts, block_size, are_slots=slots_of is not None))


def random_cache(
    spec: AttentionSpec, num_pages: int, page_size: int, layout: str, scales: str, generator: torch.Generator
) -> PagedKVCache:
    """Return a cache of random numbers on the CPU; the arguments are those of `make_problem`."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    def uniform(*shape: int) -> torch.Tensor:
        return 0.5 + torch.rand(*shape, generator=generator)

    cache = PagedKVCache.empty(spec, num_pages, page_size, layout=layout)
    if cache.scale_kind == "record":
        values, group_scales, rope = cache.records
        values.copy_((100 * normal(*values.shape)).clamp(-448, 448))
        fresh = 0.01 * uniform(*group_scales.shape)
        group_scales.copy_(fresh if group_scales.dtype is torch.float32 else fresh.view(torch.int32) >> 23)
        if rope is not None:
            rope.copy_(normal(*rope.shape))
        return cache
    if cache.is_latent:
        cache.latents.copy_(normal(*cache.latents.shape))
        scale = None if cache.scale_kind == "none" else uniform(1)
        return PagedKVCache.from_latents(cache.latents, spec.kv_lora_rank, scale=scale)
    if cache.kv_format is not None:
        return random_codes(cache, generator)
    k_scale = v_scale = None
    if spec.kv_dtype in QUANTISED_DTYPES:
        shapes = {"tensor": (1,), "head": (spec.num_kv_heads,), "token": (num_pages, page_size, spec.num_kv_heads)}
        unit = 0.02 if spec.kv_dtype is torch.int8 else 1.0
        k_scale, v_scale = unit * uniform(*shapes[scales]), unit * uniform(*shapes[scales])
    unit = 40.0 if spec.kv_dtype is torch.int8 else 1.0
    cache.k.copy_((unit * normal(*cache.k.shape)).clamp(-127, 127))
    cache.v.copy_((unit * normal(*cache.v.shape)).clamp(-127, 127))
    return PagedKVCache(cache.k, cache.v, layout, k_scale, v_scale)


def random_codes(cache: PagedKVCache, generator: torch.Generator) -> PagedKVCache:
    """Fill a new cache with a `kv_format` with random numbers and scales, zero points among them."""

    def uniform(shape: torch.Size) -> torch.Tensor:
        return 0.5 + torch.rand(shape, generator=generator)

    # The largest number of each scale is there, so that the scale is the same when the numbers are written again.
    for x, codes in ((cache.k, cache.form.k), (cache.v, cache.form.v)):
        if codes.name == "e4m3":
            numbers = (100 * torch.randn(x.shape, generator=generator)).clamp(-448, 448)
            numbers[..., 0] = 448
            x.copy_(numbers.to(torch.float8_e4m3fn).view(torch.uint8))
        else:
            x.random_(0, 256, generator=generator)
            x[..., :: max(1, codes.group // 2) if codes.group else x.shape[-1]] = 0xF0 if codes.has_zero else 0x7F
    for scale, codes in ((cache.k_scale, cache.form.k), (cache.v_scale, cache.form.v)):
        if scale is not None and cache.scale_kind == "token":
            scale.copy_((0.2 if codes.has_zero else 0.01) * uniform(scale.shape))
            if codes.has_zero:
                bits = scale.view(torch.int32)
                bits.copy_(bits & ~15 | torch.randint(16, bits.shape, generator=generator, dtype=torch.int32))
    for blocks in (cache.k_block_scale, cache.v_block_scale):
        if blocks is not None:
            blocks.copy_(uniform(blocks.shape))
    if not cache.form.has_blocks:
        return cache
    heads = torch.Size([cache.num_kv_heads])
    of_heads: dict[str, Any] = {"k_scale": 0.5 * uniform(heads), "v_scale": 0.5 * uniform(heads)}
    return PagedKVCache(cache.k, cache.v, cache.layout, **cache.scales | of_heads)


def with_tensors(cache: PagedKVCache, change: Callable[[torch.Tensor], torch.Tensor]) -> PagedKVCache:
    """Return a cache of keys and values with a function's results in place of its tensors."""
    scales: dict[str, Any] = {name: change(x) if isinstance(x, torch.Tensor) else x for name, x in cache.scales.items()}
    return PagedKVCache(change(cache.k), change(cache.v), cache.layout, **scales)


def owned_slots(
    batch: Batch,
    cache: PagedKVCache,
    spec: AttentionSpec | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Return which slots hold a key that some query sees, [num_pages, page_size] bool.

    Keys between two that are seen count as well, and the drafts of a tree: kernels read them whether or not they are
    seen. So do keys that a mask hides within its bounds. Of chosen keys, those that lists name count, and no others.

    Args:
        batch: the sequences.
        cache: the pages.
        spec: which keys queries see. Without it, all keys of a sequence with queries count.
        extras: the tensors of `spec.extras`.
    """
    owned = torch.zeros(cache.num_pages, cache.page_size, dtype=torch.bool, device=cache.device)
    starts = batch.query_starts.tolist()
    for seq, kv_len in enumerate(batch.seq_lens.tolist()):
        q_len = starts[seq + 1] - starts[seq]
        positions = torch.arange(kv_len if q_len else 0, device=cache.device)
        if spec is not None:
            first = kv_len - q_len if batch.query_offsets is None else int(batch.query_offsets[seq])
            rows = slice(starts[seq], starts[seq] + q_len)
            if batch.chosen is not None:
                named = reference.chosen_slots(batch, batch.chosen, cache, spec, seq, rows, first, kv_len)
                for _, _, page, slot in named:
                    owned[page, slot] = True
                continue
            tables = {extra.name: tensor for extra, tensor in zip(spec.extras, extras, strict=True)}
            seen = reference.keys_within_bounds(batch, spec, seq, first, kv_len, tables)
            positions = seen.any(0).nonzero()[:, 0].tolist()
            if batch.tree_bits is not None:
                positions = sorted({*positions, *range(max(first, 0), min(first + q_len, kv_len))})
            between = range(positions[0], positions[-1] + 1) if positions else ()
            positions = torch.tensor(between, dtype=torch.int64, device=cache.device)
        row = batch.page_table[seq] if batch.cu_pages is None else batch.page_table[int(batch.cu_pages[seq]) :]
        owned[row[positions // cache.page_size].long(), positions % cache.page_size] = True
    return owned


def poison(cache: PagedKVCache, owned: torch.Tensor) -> None:
    """Overwrite every slot that is not owned, and its scales, with NaN; int8 slots, and those of a format, with 127.

    Args:
        cache: changed in place.
        owned: [num_pages, page_size] bool.
    """
    page, slot = (~owned).nonzero(as_tuple=True)
    if cache.scale_kind == "record":
        for part in cache.records:
            if part is not None:
                part.view(torch.uint8)[page, slot] = 255  # NaN in all formats, infinity where it is an exponent
        return
    every = slice(None)
    index = {"NHD": (page, slot), "HND": (page, every, slot), "HDNX": (page, every, every, slot)}[cache.layout]
    nothing = 127.0 if cache.dtype in (torch.int8, torch.uint8) else float("nan")
    value = torch.full((), nothing, dtype=torch.float32, device=cache.device).to(cache.dtype)
    for stored in (cache.k, cache.v):
        if value.dtype.itemsize == 1:  # indexing is not implemented for every 8-bit float
            stored.view(torch.uint8)[index] = value.view(torch.uint8)
        else:
            stored[index] = value
    for scale in (cache.k_scale, cache.v_scale):
        if scale is not None and cache.scale_kind == "token":
            scale[page, slot] = float("nan")
    for blocks in (cache.k_block_scale, cache.v_block_scale):
        if blocks is not None:
            blocks.view(torch.uint8)[page, slot] = 0x7F  # NaN


def unwritten(problem: Problem) -> tuple[PagedKVCache, dict[str, Any]]:
    """Take the keys and values of the queries' own tokens out of a problem's cache.

    Args:
        problem: left as it is.

    Returns:
        A copy of the cache in which their slots are poisoned, and k, v and slot_mapping for `quire.attention`, which
        writes them again. Numbers of a quantised cache are read in float32, and are the same when they are written
        again, except for those of records and of caches with scales per token, which are rounded with other scales.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> problem = quire.testing.make_problem(spec, [(1, 40), (7, 7)])
        >>> cache, new = quire.testing.unwritten(problem)
        >>> plan = quire.plan(spec, problem.batch, **problem.bounds)
        >>> quire.testing.error_budget(problem, quire.attention(problem.q, cache, plan, **new)).passed
        True
    """
    cache, batch, spec = problem.cache, problem.batch, problem.spec
    is_quantised = spec.kv_dtype in QUANTISED_DTYPES or spec.kv_format is not None
    dtype = torch.float32 if is_quantised else spec.kv_dtype
    num_tokens = problem.q.shape[0]
    slots = torch.full((num_tokens,), -1, device=cache.device)
    k = torch.zeros(num_tokens, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=cache.device)
    v = torch.zeros(num_tokens, spec.num_kv_heads, spec.head_dim_v, dtype=dtype, device=cache.device)
    starts = batch.query_starts.tolist()
    for seq, kv_len in enumerate(batch.seq_lens.tolist()):
        q_len = starts[seq + 1] - starts[seq]
        first = kv_len - q_len if batch.query_offsets is None else int(batch.query_offsets[seq])
        positions = first + torch.arange(q_len, device=cache.device)
        inside = (positions >= 0) & (positions < kv_len)
        tokens, positions = starts[seq] + inside.nonzero()[:, 0], positions[inside]
        row = batch.page_table[seq] if batch.cu_pages is None else batch.page_table[int(batch.cu_pages[seq]) :]
        slots[tokens] = row[positions // cache.page_size].long() * cache.page_size + positions % cache.page_size
        k[tokens], v[tokens] = reference.gather(cache, batch, seq, positions, dtype)
    kept = torch.ones(cache.num_pages, cache.page_size, dtype=torch.bool, device=cache.device)
    kept.view(-1)[slots[slots >= 0]] = False
    if cache.is_latent:
        copy = PagedKVCache.from_latents(cache.latents.clone(), spec.kv_lora_rank, scale=cache.k_scale)
        rope = k[:, 0, spec.kv_lora_rank :] if spec.qk_rope_head_dim else None
        new = {"k": v[:, 0], "v": rope, "slot_mapping": slots}
    else:
        copy = with_tensors(cache, torch.Tensor.clone)
        new = {"k": k, "v": v, "slot_mapping": slots}
    poison(copy, kept)
    return copy, new


def random_norm_rope(
    problem: Problem, rotary_dim: int | None = None, *, interleaved: bool = False, qk_norm: bool = False, seed: int = 0
) -> dict[str, Any]:
    """Make a rotary embedding and a norm for the queries and the new keys of a problem.

    Args:
        problem: what they are for.
        rotary_dim: columns that are rotated, an even number; none if None.
        interleaved: pairs are (2i, 2i + 1).
        qk_norm: make a norm too.
        seed: of the random numbers.

    Returns:
        `rope`, `qk_norm` or both, as `quire.attention` takes them. Positions are those of the queries among the keys.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> problem = quire.testing.make_problem(spec, [(1, 40), (7, 7)])
        >>> cache, new = quire.testing.unwritten(problem)
        >>> step = new | quire.testing.random_norm_rope(problem, rotary_dim=8, qk_norm=True)
        >>> plan = quire.plan(spec, problem.batch, **problem.bounds)
        >>> out = quire.attention(problem.q, cache, plan, **step)
        >>> from dataclasses import replace
        >>> quire.testing.error_budget(replace(problem, cache=cache, step=step), out).passed
        True
    """
    batch, device, made = problem.batch, problem.q.device, {}
    generator = torch.Generator().manual_seed(seed)
    if rotary_dim is not None:
        positions = torch.zeros(problem.q.shape[0], dtype=torch.int64, device=device)
        for seq, first in enumerate(batch.query_starts.tolist()[:-1]):
            q_len, kv_len = problem.query_lens[seq], problem.seq_lens[seq]
            offset = kv_len - q_len if batch.query_offsets is None else int(batch.query_offsets[seq])
            positions[first : first + q_len] = offset + torch.arange(q_len, device=device)
        rows = int(positions.max()) + 1 if positions.numel() else 1
        angles = 7 * torch.rand(max(rows, 1), rotary_dim // 2, generator=generator)
        cos, sin = angles.cos().to(device), angles.sin().to(device)
        made["rope"] = Rope(cos, sin, positions, interleaved)
    if qk_norm:
        q_weight, k_weight = 0.5 + torch.rand(2, problem.spec.head_dim, generator=generator).to(device)
        made["qk_norm"] = QKNorm(q_weight, k_weight)
    return made


@dataclass(frozen=True)
class Verdict:
    """The error of a result, in units of its budget.

    Attributes:
        out: largest error of out, divided by its budget; at most 1 passes.
        lse: the same for lse; None if the result had none.
        error: largest absolute error of out.
    """

    out: float
    lse: float | None
    error: float

    @property
    def passed(self) -> bool:
        """Whether all errors are within budget; NaN is not."""
        return self.out <= 1 and (self.lse is None or self.lse <= 1)


class Oracle:
    """The float64 result of a problem and the error that its precision allows, to judge any number of results.

    The budget comes from the data: 2 · (error of `quire.reference` at the input dtype + eps · max|exact|). eps is the
    dtype's, or the error of a GPU's exp2 if that is larger. In float32, a kernel adds the head_dim products of a score
    one after the other. The rounding errors of such a sum grow with the root of head_dim, and eps with them, from 64
    on. Where a spec allows products in fp8, the reference rounds as they do. Where 16-bit queries meet a cache with a
    scale for each token, a launch may decode keys and values in the queries' dtype, so the reference of the lse rounds
    them too. An output in float8_e4m3fn may differ from the saturated result by that budget and, in addition, by half a
    unit of its last place.

    Args:
        problem: what is computed.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.exact = self._reference(torch.float64)
        self.budget = 0.0
        if self.exact.out.numel():
            naive = self._reference(problem.spec.dtype)
            eps = max(torch.finfo(problem.spec.dtype).eps, EXP2_ERROR)
            if problem.spec.dtype is torch.float32:
                eps *= max(1.0, (problem.spec.head_dim / 64) ** 0.5)
            self.budget = 2 * (
                (naive.out.double() - self.exact.out).abs().max().item() + eps * self.exact.out.abs().max().item()
            )

    def judge(self, result: torch.Tensor | State) -> Verdict:
        """Compare a result, out or a state, with the float64 result."""
        out, lse = result if isinstance(result, State) else (result, None)
        if out.numel() == 0:
            return Verdict(0.0, None if lse is None else 0.0, 0.0)
        over, worst = self._judge_out(out) if self.problem.out_scale is None else self._judge_quantised(out)
        return Verdict(over, None if lse is None else self._judge_lse(lse), worst)

    def _judge_out(self, out: torch.Tensor) -> tuple[float, float]:
        worst = (out.double() - self.exact.out).abs().max().item()
        return worst / self.budget if self.budget else (0.0 if worst == 0 else float("inf")), worst

    def _judge_quantised(self, out: torch.Tensor) -> tuple[float, float]:
        scale = self.problem.out_scale
        if out.dtype is not torch.float8_e4m3fn or scale is None:
            return float("inf"), float("inf")
        scale = scale.double().view(())
        size = scale.abs()
        limit = LARGEST_E4M3 * size
        exact = self.exact.out.clamp(-limit, limit)
        # What is rounded is at most this. e4m3 has 3 bits after the first one, down to 2^-6.
        largest = ((exact.abs() + self.budget) / size).clamp(2.0**-6, LARGEST_E4M3)
        half_unit = torch.exp2(torch.frexp(largest)[1].double() - 5) * size
        errors = (out.double() * scale - exact).abs()
        return (errors / (self.budget + half_unit)).max().item(), errors.max().item()

    def _judge_lse(self, lse: torch.Tensor) -> float:
        # lse is computed in float32 for all input dtypes. Empty rows must be -inf on both sides.
        exact = self.exact.lse
        finite = exact.isfinite()
        if not torch.equal(finite, lse.isfinite()) or not torch.equal(exact[~finite], lse[~finite].double()):
            return float("inf")
        if not finite.any():
            return 0.0
        single, eps = self._reference(torch.float32).lse, torch.finfo(torch.float32).eps
        spec, largest = self.problem.spec, max(1.0, exact[finite].abs().max().item())
        # Tensor cores add the products of 16 columns to a score at a time, and truncate each sum (arXiv 2203.03341).
        # The error of one step is half a unit on average, of a sum that is half of the score on average.
        steps = 0 if spec.dtype is torch.float32 else spec.head_dim / 16
        rounding = (single.double() - exact)[finite].abs().max().item() + eps * largest
        # Of 16-bit queries, a softcap is 1 - 2 / (exp(2x) + 1): float32 rounds it near 1, in four steps.
        # So is a tanh of a spec's function, times what the function multiplies it by.
        by = max(spec.softcap or 0, largest_number(spec.score) if spec.score is not None else 0)
        capped = 0 if spec.dtype is torch.float32 else 4 * eps * by
        budget = 2 * (rounding + steps * eps / 4 * largest + capped)
        return (lse.double() - exact)[finite].abs().max().item() / budget

    def _reference(self, dtype: torch.dtype) -> State:
        p = self.problem
        in_fp8 = p.spec.allow_fp8 and p.spec.kv_dtype is torch.float8_e4m3fn and dtype is not torch.float64
        rounds = p.cache.scale_kind == "token" and p.spec.dtype.itemsize == 2 and dtype is not torch.float64
        rounding = {"in_fp8": in_fp8, "decoded": p.spec.dtype if rounds else None}
        with torch.no_grad(), torch.autocast(p.q.device.type, enabled=False):
            return reference.attention(p.q, p.cache, p.batch, p.spec, **p.tables, **p.step, dtype=dtype, **rounding)


def error_budget(problem: Problem, result: torch.Tensor | State) -> Verdict:
    """Compare a result with the float64 result of its problem; see `Oracle`.

    Args:
        problem: what was computed.
        result: out, or a state.

    Examples:
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> problem = quire.testing.make_problem(spec, [(1, 40), (7, 7)])
        >>> plan = quire.plan(spec, problem.batch, **problem.bounds)
        >>> quire.testing.error_budget(problem, quire.attention(problem.q, problem.cache, plan)).passed
        True
    """
    return Oracle(problem).judge(result)
