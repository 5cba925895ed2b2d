"""Attend to a context in two halves and merge the two results into the result for the whole context.

Softmax over a set of keys is described by its output and the log of its sum of exponentials (lse): a `State`. States
over disjoint sets of keys merge exactly, in any order. Contexts over several GPUs, shared prefixes and recent tokens
outside the cache all use this.

    python examples/split_context.py
"""

import torch

import quire
from quire.testing import Oracle, make_problem

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONTEXT, NUM_QUERIES, PAGE_SIZE = 1000, 4, 16
HALF = 512  # keys of the first half: whole pages, so that the halves divide the page table


def main() -> None:
    spec = quire.AttentionSpec(num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float32)
    # One sequence whose last 4 tokens are queries, on scattered pages; and its exact result, computed in float64.
    problem = make_problem(spec, [(NUM_QUERIES, CONTEXT)], page_size=PAGE_SIZE, device=DEVICE)
    oracle = Oracle(problem)
    q, cache, whole = problem.q, problem.cache, problem.batch

    def attend(batch: quire.Batch, num_keys: int) -> quire.State:
        plan = quire.plan(spec, batch, max_query_len=NUM_QUERIES, max_seq_len=num_keys)
        return quire.attention(q, cache, plan, return_lse=True)

    def part(begin: int, end: int) -> quire.State:
        """Attend to keys [begin, end): their pages, and where the queries stand counted from `begin`."""
        first_query = CONTEXT - NUM_QUERIES - begin
        batch = quire.Batch(
            page_table=whole.page_table[:, begin // PAGE_SIZE : -(-end // PAGE_SIZE)],
            seq_lens=torch.tensor([end - begin], dtype=torch.int32, device=DEVICE),
            cu_seqlens_q=whole.cu_seqlens_q,
            query_offsets=torch.tensor([first_query], dtype=torch.int32, device=DEVICE),
        )
        return attend(batch, end - begin)

    first, second = part(0, HALF), part(HALF, CONTEXT)
    merged = quire.merge_states([first, second])

    print("error over error budget, where 1 is the most that rounding explains:")
    for name, state in (("whole", attend(whole, CONTEXT)), ("merged", merged), ("first half alone", first)):
        print(f"  {name:17}{oracle.judge(state).out:12.3g}")
    assert oracle.judge(merged).passed
    assert not oracle.judge(first).passed


if __name__ == "__main__":
    main()
