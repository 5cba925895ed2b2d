"""A sample of a library's output, judged by the float64 oracle before the library is timed."""

import math
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import torch

import quire
from quire.testing import Oracle, Problem, Verdict
from quire_tools.bench.inputs import Inputs, batch_of_lists
from quire_tools.bench.scores import SCORES

SAMPLE = 16  # queries at each end of a sequence that are compared with the oracle


class Sample:
    """The oracle's results for queries at both ends of some sequences.

    The sequences are the first, the last, the longest, and the one with the most queries.
    The scales of records are powers of two, so it changes nothing that FlashMLA rounds what they hold to bfloat16.

    Args:
        inputs: of the case.
        table: the page table, or the lists, that results are made with.
    """

    def __init__(self, inputs: Inputs, table: torch.Tensor) -> None:
        case, device = inputs.case, inputs.q.device
        starts = [0, *accumulate(case.query_lens)]
        last = len(case.lens) - 1
        most_queries = max(range(last + 1), key=case.query_lens.__getitem__)
        longest = max(range(last + 1), key=case.seq_lens.__getitem__)
        seqs, rows, query_lens, seq_lens, offsets = [], [], [], [], []
        for seq in sorted({0, last, most_queries, longest}):
            q_len, seq_len = case.lens[seq]
            for begin in sorted({0, max(0, q_len - SAMPLE)}):
                end = min(q_len, begin + SAMPLE)
                seqs.append(seq)
                rows.append(torch.arange(starts[seq] + begin, starts[seq] + end, device=device))
                query_lens.append(end - begin)
                seq_lens.append(seq_len)
                offsets.append(seq_len - q_len + begin)
        self.rows = torch.cat(rows)
        row_starts = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device=device)
        if case.pool is None:
            first = torch.tensor(offsets, dtype=torch.int32, device=device)
            batch = quire.Batch(table[seqs], inputs.seq_lens[seqs], row_starts, query_offsets=first)
        else:
            batch = batch_of_lists(table[self.rows], inputs.seq_lens[seqs], row_starts)
        q = inputs.q[self.rows]
        extras = inputs.extras
        if case.scores is not None and SCORES[case.scores].per_token:
            extras = tuple(extra[self.rows] for extra in extras)
        problem = Problem(
            replace(case.spec, allow_fp8=False),
            batch,
            inputs.cache_of(table),
            q,
            tuple(query_lens),
            tuple(seq_lens),
            inputs.sinks,
            inputs.alibi_slopes,
            extras=extras,
        )
        self.oracle = Oracle(problem)

    def judge(self, out: torch.Tensor, in_fp8: bool = False) -> Verdict:
        """Judge a result: the sample must be within its error budget, and all of the result finite.

        Args:
            out: [num_tokens, num_q_heads, head_dim_v].
            in_fp8: judge by `fp8_budget`.
        """
        verdict = self.oracle.judge(out[self.rows])
        if in_fp8:
            verdict = Verdict(verdict.error / self.fp8_budget, None, verdict.error)
        return verdict if bool(out.isfinite().all()) else Verdict(math.inf, None, math.inf)

    @cached_property
    def fp8_budget(self) -> float:
        """The error budget of attention over e4m3 latents whose matrix products are in e4m3.

        Queries, and probabilities of which the largest is 1, are rounded to e4m3. As in `quire.testing`, the budget is
        twice the error of that arithmetic and of rounding the result.
        """
        problem, exact = self.oracle.problem, self.oracle.exact.out
        spec, cache, batch = problem.spec, problem.cache, problem.batch
        worst = 0.0
        for seq, (q_len, kv_len) in enumerate(zip(problem.query_lens, problem.seq_lens, strict=True)):
            rows = slice(sum(problem.query_lens[:seq]), sum(problem.query_lens[: seq + 1]))
            keys = cache.latents[batch.page_table[seq].long()].flatten(0, 1)[:kv_len].float()
            scores = spec.softmax_scale * (rounded_to_fp8(problem.q[rows]) @ keys.T)
            first = int(batch.query_offsets[seq]) if batch.query_offsets is not None else kv_len - q_len
            last = torch.arange(first, first + q_len, device=keys.device)[:, None, None]
            scores = scores.masked_fill(torch.arange(kv_len, device=keys.device) > last, -math.inf)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            out = rounded_to_fp8(weights) @ keys[:, : spec.head_dim_v] / weights.sum(-1, keepdim=True)
            worst = max(worst, (out.double() - exact[rows]).abs().max().item())
        return 2 * (worst + torch.finfo(spec.dtype).eps * exact.abs().max().item())


def rounded_to_fp8(x: torch.Tensor) -> torch.Tensor:
    """Round to float8_e4m3fn, without a scale; return float32."""
    return x.to(torch.float8_e4m3fn).float()
