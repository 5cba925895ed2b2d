"""Two conversations share the pages of their common prompt: fork, grow, copy on write, and read them once.

A forked sequence has its parent's pages. Pages that are full stay shared. The last page is often not full: the first
sequence that writes to it gets a copy of its own, and the allocator says which page to copy where. The plan is told how
many keys are shared, so that these are read once for both.

    python examples/prefix_sharing.py
"""

import torch

import quire
from quire.testing import Problem, error_budget

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NUM_PAGES, PAGE_SIZE = 16, 16
PROMPT_LEN, NUM_NEW_TOKENS = 40, 3  # two full pages, and half of a third

SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, dtype=torch.float32)


def main() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, SPEC.head_dim, generator=generator).to(DEVICE)

    def new_keys_and_values(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        return random(num_tokens, SPEC.num_kv_heads), random(num_tokens, SPEC.num_kv_heads)

    cache = quire.PagedKVCache.empty(SPEC, NUM_PAGES, PAGE_SIZE, device=DEVICE)
    pool = quire.PageAllocator(NUM_PAGES, PAGE_SIZE)

    # The common prompt is written once.
    first = pool.allocate(PROMPT_LEN)
    prompt = new_keys_and_values(PROMPT_LEN)
    quire.write_kv(*prompt, cache, pool.slot_mapping(first, PROMPT_LEN, DEVICE))
    second = pool.fork(first)
    print(f"after the fork:   {first.pages} and {second.pages}, {NUM_PAGES - pool.num_free_pages} pages in use")

    # Each sequence continues in its own way.
    replies = []
    for sequence in (first, second):
        copies = pool.grow(sequence, NUM_NEW_TOKENS)
        if copies:  # before anything is written
            print(f"copy on write:    page {copies[0][0]} to page {copies[0][1]}")
            quire.copy_pages(cache, cache, torch.tensor(copies))
        reply = new_keys_and_values(NUM_NEW_TOKENS)
        quire.write_kv(*reply, cache, pool.slot_mapping(sequence, NUM_NEW_TOKENS, DEVICE))
        replies.append(reply)
    total = PROMPT_LEN + NUM_NEW_TOKENS
    in_use, unshared = NUM_PAGES - pool.num_free_pages, 2 * -(-total // PAGE_SIZE)
    print(f"after the writes: {first.pages} and {second.pages}, {in_use} pages in use instead of {unshared}")

    def int32(*numbers: int) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)

    # One decoding step for both, through the shared pages.
    q = random(2, SPEC.num_q_heads)
    batch = quire.Batch(pool.page_table([first, second], device=DEVICE), int32(total, total))
    full_pages = PROMPT_LEN // PAGE_SIZE * PAGE_SIZE
    plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=total, shared_prefix=full_pages)
    out = quire.attention(q, cache, plan)
    print(f"keys read:        {2 * total - plan.saved_keys} instead of {2 * total}")

    # What it has to equal: the definition of attention, in float64, on separate copies that have no pages.
    keys, values = (torch.cat([t for reply in replies for t in (prompt[i], reply[i])]) for i in range(2))
    separate = quire.Batch.varlen(int32(0, 1, 2), int32(0, total, 2 * total))
    copies = quire.PagedKVCache(keys, values, "THD")
    problem = Problem(SPEC, separate, copies, q, (1, 1), (total, total), sinks=None, alibi_slopes=None)
    verdict = error_budget(problem, out)
    print(f"error against separate copies: {verdict.error:.1e}, {verdict.out:.2f} of its budget")
    assert verdict.passed

    pool.free(first)
    assert pool.num_free_pages == NUM_PAGES - len(second.pages)  # the second sequence still holds the shared pages
    pool.free(second)


if __name__ == "__main__":
    main()
