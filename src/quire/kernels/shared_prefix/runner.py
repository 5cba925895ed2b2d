"""Run the launches of shared prefixes one after the other, and combine their states.

Every launch has a separate batch. Its page table is a view of the plan's table, and its lengths are computed from the
plan's lengths at each call. So an engine can change the plan's batch in place, as with other plans.
"""

from itertools import groupby, pairwise
from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.checks.batch import check_reads, check_shared_pages
from quire.dispatch.device import device_properties
from quire.kernels.capture import is_capturing
from quire.kernels.launch import Runner
from quire.kernels.shared_prefix.launch import SharedPrefixLaunch, first_seqs, is_rectangle, num_shared_keys
from quire.state import State


class SharedPrefixRunner:
    """Run a launch for shared prefixes for one batch.

    Args:
        launch: the decision.
        batch: the sequences.
        workspace: of `launch.scratch_size()` bytes, or None if that is 0.
    """

    def __init__(self, launch: SharedPrefixLaunch, batch: Batch, workspace: torch.Tensor | None) -> None:
        self.decided, self.batch, self.workspace = launch, batch, workspace
        self.served_by_torch = launch.launches[-1].name == "torch"
        self.firsts = [first_seqs(level) for level in launch.levels]
        with torch.inference_mode(False):  # tensors of inference mode could not be changed outside of it
            self.num_shared = on_device(num_shared_keys(launch.levels), batch.device)
            self.own_lens = torch.empty_like(self.num_shared)
            self.query_starts = [on_device(firsts, batch.device) for firsts in self.firsts]
            self.first_seqs = [starts.clone() for starts in self.query_starts]
        self.runners: dict[int, list[Runner]] = {}  # by page size
        self.captured: list[list[Runner]] = []  # first needed while a graph was captured, which reads their numbers
        self.combine = None if self.served_by_torch else make_combine(batch)

    def __call__(
        self,
        q: Any,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
    ) -> None:
        runners = self.runners.get(cache.page_size)
        if runners is None:
            parts = zip(self.decided.launches, self.batches(cache.page_size), strict=True)
            runners = [launch.bind(part, self.workspace) for launch, part in parts]
            if is_capturing(out.device):
                self.captured.append(runners)  # whose numbers are written by replays alone
            else:
                self.runners[cache.page_size] = runners
        if self.served_by_torch:
            self.check_contents(cache, out.shape[0])
        torch.sub(self.batch.seq_lens, self.num_shared, out=self.own_lens)
        self.own_lens.clamp_(min=0)  # of rows without queries
        if self.batch.cu_seqlens_q is not None:
            for starts, seqs in zip(self.query_starts, self.first_seqs, strict=True):
                torch.index_select(self.batch.cu_seqlens_q, 0, seqs, out=starts)
        num_tokens, num_heads, width = out.shape
        dtype = self.decided.request.spec.dtype
        states = torch.empty(len(runners), num_tokens, num_heads, width, dtype=dtype, device=out.device)
        # Rows are spare so that each level begins at a multiple of 16 bytes, for which kernels are compiled.
        lses = torch.empty(len(runners), num_tokens + 3 & ~3, num_heads, dtype=torch.float32, device=out.device)
        lses = lses[:, :num_tokens]
        for run, level_out, level_lse in zip(runners[:-1], states, lses, strict=False):
            run(q, cache, level_out, level_lse, None, None)
        runners[-1](q, cache, states[-1], lses[-1], sinks, None)
        if self.combine is not None:
            self.combine(states, lses, out, lse, out_scale)
        else:
            self.combine_in_torch(states, lses, out, lse, out_scale)

    def batches(self, page_size: int) -> list[Batch]:
        """Return the batches of all launches, for a cache with pages of this size."""
        levels, batch = self.decided.levels, self.batch
        self.decided.check_page_size(page_size)
        before = [0] * batch.num_seqs  # keys of the levels above
        parts = []
        for level, firsts, starts in zip(levels, self.firsts, self.query_starts, strict=True):
            table, cu_pages = rows_of_table(batch, firsts[:-1], [before[seq] // page_size for seq in firsts[:-1]])
            seq_lens = on_device([num_keys for _, num_keys in level], batch.device)
            parts.append(Batch(table, seq_lens, starts, cu_pages))
            for (_, num_keys), (first, end) in zip(level, pairwise(firsts), strict=True):
                before[first:end] = [keys + num_keys for keys in before[first:end]]
        table, cu_pages = rows_of_table(batch, list(range(batch.num_seqs)), [keys // page_size for keys in before])
        parts.append(Batch(table, self.own_lens, batch.cu_seqlens_q, cu_pages))
        return parts

    def check_contents(self, cache: PagedKVCache, num_tokens: int) -> None:
        """Raise unless the batch's tensors agree with the plan. Only on a CPU, where reading them is cheap."""
        bounds, spec = self.decided.request.bounds, self.decided.request.spec
        lens = {"max_query_len": bounds.max_query_len, "max_seq_len": bounds.max_seq_len}
        check_reads(self.batch, cache, spec, num_tokens=num_tokens, **lens)
        check_shared_pages(self.batch, cache.page_size, self.decided.levels)

    def combine_in_torch(
        self,
        states: torch.Tensor,
        lses: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        out_scale: torch.Tensor | None,
    ) -> None:
        """Combine the states of CPU tensors; tokens of no sequence are left as they are."""
        from quire.kernels.cpu.cache_ops import store_out
        from quire.kernels.cpu.combine import merge_states

        end = int(self.batch.query_starts[-1])
        dtype = out.dtype if out_scale is None else torch.float32
        merged = merge_states([State(*state) for state in zip(states[:, :end], lses[:, :end], strict=True)], dtype)
        store_out(out, slice(end), merged.out, out_scale)
        if lse is not None:
            lse[:end] = merged.lse


def make_combine(batch: Batch) -> Any:
    """Return a function that launches `combine_kernel` for the tokens of a batch."""
    from quire.kernels.combine import combine_arguments, combine_kernel
    from quire.kernels.launcher import Arguments, Kernel
    from quire.kernels.views import output_tensor

    kernel = Kernel(combine_kernel)

    def arguments(states: torch.Tensor, lses: torch.Tensor, out: torch.Tensor, out_scale: Any, lse: Any) -> Arguments:
        fixed, meta = combine_arguments(states, lses, out.stride(), lse)
        stored = output_tensor(out, device_properties(out.device).native_fp8)
        return Arguments((states, lses, stored, out_scale, lse), (batch.cu_seqlens_q, batch.num_seqs, *fixed), meta)

    def combine(
        states: torch.Tensor,
        lses: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        out_scale: torch.Tensor | None,
    ) -> None:
        """Combine states [levels, num_tokens, num_q_heads, head_dim_v] and their lses into `out` and `lse`."""
        num_tokens = batch.num_seqs if batch.cu_seqlens_q is None else out.shape[0]  # a flat plan writes no others
        if num_tokens == 0:
            return

        kernel((num_tokens, out.shape[1], 1), (states, lses, out, out_scale, lse), None, arguments)

    return combine


def on_device(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Return host numbers as an int32 tensor, without waiting for the device."""
    if is_capturing(device):
        return filled(numbers, device)  # a replay would copy again, from memory that another tensor may have by then
    tensor = torch.tensor(numbers, dtype=torch.int32, device="cpu")
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


def filled(numbers: list[int], device: torch.device) -> torch.Tensor:
    """Return host numbers as an int32 tensor, which the device writes by itself: one launch for equal neighbours."""
    tensor = torch.empty(len(numbers), dtype=torch.int32, device=device)
    first = 0
    for number, equal in groupby(numbers):
        end = first + len(list(equal))
        tensor[first:end].fill_(number)
        first = end
    return tensor


def rows_of_table(batch: Batch, seqs: list[int], entries: list[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return views of a batch's page table: the rows of some sequences, each from one of its entries on.

    Args:
        batch: has a rectangular table.
        seqs: the sequences, ascending.
        entries: the first entry of each.

    Returns:
        A rectangular table and None, or, if rows are not equally spaced or begin at different entries, the whole table
        as a flat one, and `cu_pages`.
    """
    table = batch.page_table
    if is_rectangle(seqs, entries):
        step = seqs[1] - seqs[0] if len(seqs) > 1 else 1
        return table[seqs[0] :: step, entries[0] :][: len(seqs)], None
    stride = table.stride(0)
    flat = table.as_strided(((len(table) - 1) * stride + table.shape[1],), (1,))
    return flat, on_device([seq * stride + entry for seq, entry in zip(seqs, entries, strict=True)], batch.device)
