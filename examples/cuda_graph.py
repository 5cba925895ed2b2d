"""Capture decoding in a CUDA graph once, then replay it while sequences grow and come and go.

A plan is made from bounds, and lengths and page tables are read on the device at each launch. So one captured graph is
right for every step within the bounds: update its tensors in place and replay it. Nothing is planned, compiled or
allocated again.

On a machine without a GPU the same calls run without a graph.

    python examples/cuda_graph.py
"""

from collections.abc import Callable

import torch

import quire
from quire.testing import Problem, error_budget

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
MAX_NUM_SEQS, MAX_SEQ_LEN, PAGE_SIZE, NUM_PAGES = 4, 256, 16, 64

SPEC = quire.AttentionSpec(
    num_q_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.float16 if HAS_GPU else torch.float32
)


def capture(run: Callable[[], None]) -> Callable[[], None]:
    """Return what replays the launches of `run`; `run` itself where there is no GPU."""
    if not HAS_GPU:
        print("no GPU here: the same calls run without a graph")
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()  # compiles the kernels, which must not happen during capture
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    print("captured one graph")
    return graph.replay


def main() -> None:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, SPEC.dtype)

    cache = quire.PagedKVCache.empty(SPEC, NUM_PAGES, PAGE_SIZE, device=DEVICE)
    pool = quire.PageAllocator(NUM_PAGES, PAGE_SIZE)

    # What the graph reads and writes. Rows without a sequence are padding: no keys, and slot -1, which writes nothing.
    pages_per_seq = MAX_SEQ_LEN // PAGE_SIZE
    page_table = torch.full((MAX_NUM_SEQS, pages_per_seq), -1, dtype=torch.int32, device=DEVICE)
    seq_lens = torch.zeros(MAX_NUM_SEQS, dtype=torch.int32, device=DEVICE)
    slot_mapping = torch.full((MAX_NUM_SEQS,), -1, dtype=torch.int64, device=DEVICE)
    q = random(MAX_NUM_SEQS, SPEC.num_q_heads, SPEC.head_dim)
    k, v = (random(MAX_NUM_SEQS, SPEC.num_kv_heads, SPEC.head_dim) for _ in range(2))
    out = torch.zeros_like(q)

    # Without cu_seqlens_q, every sequence has one query. The bounds are the largest that the graph will serve.
    batch = quire.Batch(page_table, seq_lens)
    plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=MAX_SEQ_LEN)

    def layer() -> None:
        quire.write_kv(k, v, cache, slot_mapping)
        quire.attention(q, cache, plan, out=out)

    replay = capture(layer)

    # Prompts of several lengths: their keys and values are written outside the graph.
    sequences = []
    for length in (5, 100, 240):
        sequence = pool.allocate(length)
        keys, values = (random(length, SPEC.num_kv_heads, SPEC.head_dim) for _ in range(2))
        quire.write_kv(keys, values, cache, pool.slot_mapping(sequence, length, DEVICE))
        sequences.append(sequence)

    for step in range(3):
        if step == 2:  # a sequence leaves; its row becomes padding
            pool.free(sequences.pop())
        for sequence in sequences:
            pool.grow(sequence, 1)
        active = len(sequences)
        page_table.fill_(-1)
        page_table[:active].copy_(pool.page_table(sequences, width=pages_per_seq))
        seq_lens.zero_()
        seq_lens[:active].copy_(torch.tensor([s.num_tokens for s in sequences]))
        slot_mapping.fill_(-1)
        slot_mapping[:active].copy_(torch.cat([pool.slot_mapping(s, 1) for s in sequences]))
        for tensor in (q, k, v):
            tensor.copy_(random(*tensor.shape))
        replay()

        lens = [s.num_tokens for s in sequences]
        own = quire.Batch(page_table[:active], seq_lens[:active])
        problem = Problem(SPEC, own, cache, q[:active], (1,) * active, tuple(lens), sinks=None, alibi_slopes=None)
        verdict = error_budget(problem, out[:active])  # against the definition of attention, in float64
        print(f"step {step}: sequences of {lens} tokens; error {verdict.error:.1e}, {verdict.out:.2f} of its budget")
        assert verdict.passed


if __name__ == "__main__":
    main()
