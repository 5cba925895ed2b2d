"""What a server settles before its first request: how much scratch all its plans need, and which kernels they launch.

A plan is chosen from a batch's bounds, rounded up to powers of two, so all plans within given bounds are few and can be gone through beforehand:
`workspace_size` takes the largest scratch among them, `warmup` launches each kind once on nothing, and `no_compilation` proves that nothing was forgotten.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import triton

from quire.api import attention, in_torch, write_kv
from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.device import DeviceProperties, device_properties
from quire.kernels.hopper.launch import rows_of_cache
from quire.plan import Plan, decide, scratch_bytes, with_scratch
from quire.spec import AttentionSpec
from quire.state import State

KERNELS = ("block_kernel", "split_kv_kernel", "hopper_kernel", "write_kernel", "copy_kernel", "combine_kernel")


def workspace_size(
    spec: AttentionSpec,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    device: torch.device | str | None = None,
    batch_invariant: bool = False,
) -> int:
    """Return how many bytes of scratch are enough for every plan of every batch within the bounds.

    Args:
        spec: what is computed.
        max_num_seqs: most sequences of a batch.
        max_num_tokens: most query tokens of a batch.
        max_seq_len: most keys of a sequence.
        device: where; the current GPU when not given.
        batch_invariant: whether the plans are.

    Returns:
        Bytes, for `plan(..., workspace=torch.zeros(bytes, dtype=torch.uint8, device=device))`. Without batch_invariant they depend on the device and the
        spec, hardly on the bounds. 0 where PyTorch serves the device.

    Raises:
        ValueError: a bound is less than 1.
    """
    device = torch.device(device or "cuda")
    check_bounds(max_num_seqs, max_num_tokens, max_seq_len)
    if in_torch(device):
        return 0
    bounds = max_num_seqs, max_num_tokens, max_seq_len
    plans = plans_within(spec, device_properties(device), *bounds, batch_invariant)
    return max((scratch_bytes(plan)[0] for plan in plans if plan.has_scratch), default=0)


def warmup(
    spec: AttentionSpec,
    cache: PagedKVCache,
    *,
    max_num_seqs: int,
    max_num_tokens: int,
    max_seq_len: int,
    batch_invariant: bool = False,
    return_lse: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[str]:
    """Compile every attention kernel that batches within the bounds can need, and the write of new tokens, and load them.

    Queries and outputs are taken to be contiguous, or strided in multiples of 16 elements as slices of a fused projection are, and tables to be rectangular
    and int32. Batches with and without `cu_seqlens_q` are both served.

    Args:
        spec: what is computed.
        cache: one layer's pages; its layout, strides and scales decide what is compiled. Nothing in it is read or written.
        max_num_seqs: most sequences of a batch.
        max_num_tokens: most query tokens of a batch.
        max_seq_len: most keys of a sequence.
        batch_invariant: whether the plans are.
        return_lse: whether the lse is asked for.
        progress: called with the name of each kernel before it is compiled, for instance `print`.

    Returns:
        The names of what was compiled.

    Raises:
        ValueError: a bound is less than 1.
    """
    check_bounds(max_num_seqs, max_num_tokens, max_seq_len)
    device, names = cache.device, []
    if in_torch(device):
        return names
    if cache.layout != "THD":
        names.append("write")
        if progress:
            progress(names[-1])
        k, v = (
            torch.zeros(1, spec.num_kv_heads, dim, dtype=spec.dtype, device=device)
            for dim in (spec.head_dim, spec.head_dim_v)
        )
        write_kv(k, v, cache, torch.full((1,), -1, device=device))
    for plan in plans_within(
        spec, device_properties(device), max_num_seqs, max_num_tokens, max_seq_len, batch_invariant
    ):
        if plan.fast is not None and rows_of_cache(cache) is None:  # what the plan has for such caches
            plan = plan.instead or replace(plan, kernel="triton", fast=None, beside=None, few=0)
        if name(plan) in names:
            continue
        names.append(name(plan))
        if progress:
            progress(names[-1])
        launch_on_nothing(plan, cache, return_lse)
    return names


@contextlib.contextmanager
def no_compilation() -> Iterator[None]:
    """Raise RuntimeError when one of Quire's kernels is compiled, or loaded from Triton's cache, in this context: a server's guard after `warmup`."""
    hooks = triton.knobs.runtime.kernel_load_start_hook

    def refuse(module, function, name, metadata_group, hash):
        if name in KERNELS:
            raise RuntimeError(
                f"{name} must not be compiled in service, got a launch that warmup did not cover; widen its bounds"
            )

    hooks.add(refuse)
    try:
        yield
    finally:
        hooks.remove(refuse)


def check_bounds(*bounds: int) -> None:
    """Raise unless all bounds are at least 1."""
    if min(bounds) < 1:
        raise ValueError(
            f"max_num_seqs, max_num_tokens and max_seq_len must be at least 1, got {bounds}; pass the server's limits"
        )


def plans_within(
    spec: AttentionSpec, properties: DeviceProperties, max_num_seqs: int, max_num_tokens: int, max_seq_len: int, batch_invariant: bool
) -> Iterator[Plan]:  # fmt: skip
    """Go through all plans of batches within the bounds, without their scratch: one for every set of bounds that a plan tells apart."""
    for num_seqs in sorted({min(n, max_num_seqs) for n in (1, 32, 33, 256, 257, max_num_seqs)}):
        shape = torch.zeros(num_seqs, dtype=torch.int32), torch.zeros(num_seqs + 1, dtype=torch.int32)
        batches = Batch(shape[0][:, None], shape[0]), Batch(shape[0][:, None], *shape)
        for max_query_len in powers(max_num_tokens):
            for num_tokens in powers(max_num_tokens):
                if num_tokens < max_query_len:
                    continue
                for seq_len in powers(max_seq_len):
                    for batch in batches if max_query_len == 1 and num_tokens >= num_seqs else batches[1:]:
                        yield decide(
                            spec, batch, properties, max_query_len, seq_len, num_tokens, batch_invariant=batch_invariant
                        )


def powers(limit: int) -> list[int]:
    """Return the powers of two below a limit, and the limit."""
    return [1 << i for i in range(limit.bit_length()) if 1 << i < limit] + [limit]


def name(plan: Plan) -> str:
    """Return what tells a plan's kernel from others."""
    tile, batch, fast = plan.tile, plan.batch, plan.fast
    if fast is not None:
        beside = "" if plan.beside is None else f"; beside it {name(plan.beside)}"
        extra = ", products in fp8" * fast.in_fp8 + ", keys in parts" * (plan.num_parts > 1) + beside
        return (
            f"hopper {fast.block_t} × {fast.block_n}, {fast.num_warpgroups} warpgroups, {fast.num_stages} stages{extra}"
        )
    words = [
        f"{'shares' if plan.num_shares else 'blocks'} {tile.block_m} × {tile.block_n}, {tile.num_warps} warps, {tile.num_stages} stages",
        "one query each"
        if batch.cu_seqlens_q is None
        else "one query at most"
        if plan.max_query_len <= 1
        else "queries",
        "several blocks" if plan.search else "one block",
    ]
    if plan.full_tile_loop:
        words.append("two loops")
    words += [f"{hint} {value}" for hint, value in tile.hints.items()]
    if plan.few:
        words.append(f"sequences of up to {plan.few} queries")
    if plan.num_shares:
        many = "more than" if batch.num_seqs > plan.seqs_at_once else "up to"
        words.append(
            f"partial states of {plan.partial_rows} rows{', merged in two steps' * plan.two_level}, {many} {plan.seqs_at_once} sequences"
        )
    return ", ".join(words)


def launch_on_nothing(plan: Plan, cache: PagedKVCache, return_lse: bool) -> None:
    """Launch a plan's kernel for sequences without keys."""
    spec, device, num_seqs = plan.spec, cache.device, plan.batch.num_seqs
    table = torch.zeros(1, triton.cdiv(plan.max_seq_len, cache.page_size), dtype=torch.int32, device=device).expand(
        num_seqs, -1
    )
    starts = None if plan.batch.cu_seqlens_q is None else torch.zeros(num_seqs + 1, dtype=torch.int32, device=device)
    batch = Batch(table, torch.zeros(num_seqs, dtype=torch.int32, device=device), starts)
    others = {
        name: other and replace(other, batch=batch, prepared={})
        for name, other in (("beside", plan.beside), ("instead", plan.instead))
    }
    plan = replace(plan, batch=batch, **others, prepared={})
    plan = with_scratch(plan)
    q = torch.zeros(num_seqs if starts is None else 1, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=device)
    row = torch.zeros(spec.num_q_heads, device=device)
    out = torch.empty(q.shape[0], spec.num_q_heads, spec.head_dim_v, dtype=q.dtype, device=device)
    into = State(out, torch.empty(q.shape[:2], device=device)) if return_lse else out
    attention(q, cache, plan, sinks=row if spec.sinks else None, alibi_slopes=row if spec.alibi else None, out=into)
