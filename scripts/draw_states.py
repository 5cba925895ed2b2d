"""Draw the figures of docs/shared_prefix.md and docs/distributed.md: who reads which keys, from Quire's own plans.

    python scripts/draw_states.py

Nothing needs a GPU.
"""

import torch
from figures import COLOURS, WIDTH, write
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import quire
from quire.distributed import ContextShard
from quire.distributed.ring import chunk_pair, plan_step

PAGE = 4


def bar(axis: Axes, left: float, top: float, width: float, height: float, colour: str) -> None:
    """Draw keys `left` to `left + width` of rows `top` to `top + height`, in pages."""
    for page in range(int(left), int(left + width), PAGE):
        cells = min(PAGE, left + width - page)
        axis.add_patch(Rectangle((page + 0.3, top + 0.08), cells - 0.6, height - 0.16, color=colour, lw=0))


def shared_prefix() -> Figure:
    """Return the keys that each launch of a plan reads, without and with shared prefixes."""
    seq_lens, levels = [34, 30, 37, 33, 26, 31], [[(6, 12)], [(4, 12), (2, 8)]]
    table = torch.zeros(len(seq_lens), 10, dtype=torch.int32)
    spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    batch = quire.Batch(table, torch.tensor(seq_lens, dtype=torch.int32))
    plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=37, shared_prefix=levels)
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 2.5), layout="constrained", sharey=True)
    flat, shared = axes
    for row, length in enumerate(seq_lens):
        bar(flat, 0, row, length, 1, COLOURS[5])
    ends = [0] * len(seq_lens)
    for i, level in enumerate(levels):
        row = 0
        for num_seqs, num_keys in level:
            bar(shared, ends[row], row, num_keys, num_seqs, COLOURS[i])
            ends[row : row + num_seqs] = [ends[row] + num_keys] * num_seqs
            row += num_seqs
    for row, length in enumerate(seq_lens):
        bar(shared, ends[row], row, length - ends[row], 1, COLOURS[5])
    total = sum(seq_lens)
    flat.set_title(f"flat plan: {total} keys are read", loc="left", fontsize=10)
    shared.set_title(f"shared_prefix: {total - plan.saved_keys} keys are read", loc="left", fontsize=10)
    flat.set(ylabel="sequence", yticks=[i + 0.5 for i in range(len(seq_lens))], yticklabels=range(len(seq_lens)))
    for axis in axes:
        axis.set(xlim=(0, 40), ylim=(len(seq_lens), 0), xlabel="position of the key", xticks=range(0, 41, 8))
    return figure


def context_shards() -> Figure:
    """Return which rank holds which tokens of two sequences, and how many each rank attends to."""
    seq_lens, size = [37, 22], 4
    figure, axes = pyplot.subplots(2, 1, figsize=(WIDTH, 2.7), layout="constrained", sharex=True)
    for axis, interleave in zip(axes, (1, PAGE), strict=True):
        shards = [ContextShard(rank, size, interleave) for rank in range(size)]
        for row, length in enumerate(seq_lens):
            for token in range(length):
                ends = torch.tensor([token, token + 1])
                holder = next(s.rank for s in shards if int(s.num_keys(ends).diff()) == 1)
                axis.add_patch(Rectangle((token + 0.06, row + 0.12), 0.88, 0.76, color=COLOURS[holder], lw=0))
            counts = ", ".join(str(int(s.num_keys(torch.tensor(length)))) for s in shards)
            axis.text(length + 0.7, row + 0.5, f"{counts} keys on the ranks", va="center", fontsize=8.5)
        axis.set(xlim=(0, 52), ylim=(len(seq_lens), 0), yticks=[0.5, 1.5], yticklabels=["0", "1"], ylabel="sequence")
        axis.set_title(f"interleave={interleave}", loc="left", fontsize=10)
    axes[1].set(xlabel="position of the token", xticks=range(0, 41, 8))
    patches = [Patch(color=COLOURS[rank], label=f"rank {rank}") for rank in range(size)]
    figure.legend(handles=patches, loc="outside lower center", ncols=size, frameon=False, fontsize=9)
    return figure


def ring() -> Figure:
    """Return in which step a ring computes each query and key of a causal prompt, from the plans of its steps."""
    size, total = 4, 32
    spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    shares = [[chunk_pair(total, rank, size)] for rank in range(size)]
    held = [[t for low, high in share[0] for t in range(low, high)] for share in shares]
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 3.4), layout="constrained", width_ratios=(1, 1))
    steps, work = axes
    for rank in range(size):
        for step in range(size):
            source = (rank - step) % size
            plan = plan_step(spec, rank, source, shares, torch.device("cpu"))
            queries = held[rank][-plan.bounds.max_query_len :]
            keys = held[source][: plan.bounds.max_seq_len]
            seen = [(q, k) for q in queries for k in keys if k <= q or not plan.spec.causal]
            assert all(k <= q for q, k in seen)
            for first in range(0, total, total // (2 * size)):  # a chunk of keys
                for q in queries:
                    width = sum(row == q and first <= k < first + total // (2 * size) for row, k in seen)
                    if width:
                        steps.add_patch(Rectangle((first, q), width, 1, color=COLOURS[step], lw=0))
            work.barh(rank, len(seen), left=step * 80, color=COLOURS[step], height=0.7)
            work.text(step * 80 + 2, rank, str(len(seen)), va="center", fontsize=8, color="white")
        for q in held[rank]:
            steps.text(-0.6, q + 0.5, str(rank), ha="right", va="center", fontsize=6)
    steps.set(xlim=(0, total), ylim=(total, 0), xticks=range(0, total + 1, 8), yticks=[], xlabel="key", aspect="equal")
    steps.set_title("rank of the query, and step", loc="left", fontsize=10)
    work.set(yticks=range(size), ylim=(size - 0.5, -0.5), xticks=[80 * i + 32 for i in range(size)], ylabel="rank")
    work.set(xticklabels=[f"step {i}" for i in range(size)])
    work.set_title("pairs of a query and a key it sees", loc="left", fontsize=10)
    return figure


if __name__ == "__main__":
    write(__doc__, shared_prefix, context_shards, ring)
