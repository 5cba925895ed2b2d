"""Draw the figures of docs/tour.md and docs/intervals.md: from Quire's own code, or from what docs/results/ holds.

    python scripts/draw_tour.py

Nothing needs a GPU. The partitions are those that the portable kernel's own schedule computes, in Triton's interpreter.
"""

import json
import math
import os
import random
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported

import torch
from figures import COLOURS, GREY, ROOT, WIDTH, write
from matplotlib import pyplot
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

import quire
from quire import intervals as made
from quire import reference
from quire.dispatch.request import Bounds, Options, Request, cdiv
from quire.draft_trees import from_parents
from quire.kernels.choose import variants
from quire.kernels.schedule import FIELDS
from quire.kernels.scheduler import Scheduler
from quire.targets import TARGETS

RESULTS = ROOT / "docs/results/h200.json"
ONE_FILE = ROOT / "docs/results/one_file_h200.json"  # what `python examples/one_file.py` printed
HEADS = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)


def pages() -> Figure:
    """Return a pool of pages that three sequences have grown into, and their page table."""
    pool, page_size, steps = quire.PageAllocator(24, 4), 4, random.Random(0)
    sequences = [pool.allocate(n) for n in (9, 5, 3)]
    while pool.num_free_pages > 5:
        pool.grow(steps.choice(sequences), steps.randint(1, 5))
    figure, (memory, table) = pyplot.subplots(2, 1, figsize=(WIDTH, 2.9), height_ratios=(2, 3), layout="constrained")
    owner = {page: (s, i) for s, sequence in enumerate(sequences) for i, page in enumerate(sequence.pages)}
    for page in range(24):
        s, i = owner.get(page, (None, 0))
        for slot in range(page_size):
            is_used = s is not None and i * page_size + slot < sequences[s].num_tokens
            colour = COLOURS[s] if s is not None and is_used else GREY
            memory.add_patch(Rectangle((page + 0.06 + 0.22 * slot, 0), 0.2, 1, color=colour, lw=0))
        memory.text(page + 0.5, -0.15, str(page), ha="center", va="top", fontsize=8)
    memory.set(xlim=(0, 24), ylim=(-0.8, 1.3))
    memory.set_title("memory: pages of 4 slots, in the order of their numbers", loc="left", fontsize=10)
    for s, sequence in enumerate(sequences):
        table.text(-0.2, s + 0.5, f"sequence {s}, {sequence.num_tokens} keys", ha="right", va="center", fontsize=9)
        for i, page in enumerate(sequence.pages):
            table.add_patch(Rectangle((i + 0.05, s + 0.1), 0.9, 0.8, color=COLOURS[s], lw=0))
            table.text(i + 0.5, s + 0.5, str(page), ha="center", va="center", color="white", fontsize=9)
    table.set(xlim=(-4.5, 13), ylim=(len(sequences), 0))
    table.set_title("page table: the pages of each sequence, in the order of its keys", loc="left", fontsize=10)
    memory.axis("off")
    table.axis("off")
    return figure


def softmax() -> Figure:
    """Return how the running softmax approaches the whole one, tile by tile, on one row of scores."""
    torch.manual_seed(1)
    scores, v, tile = 3 * torch.randn(512, dtype=torch.float64), torch.randn(512, dtype=torch.float64), 32
    exact = (scores * math.log(2)).softmax(0) @ v
    m, total, acc = -math.inf, 0.0, 0.0
    largest, lse, out = [], [], []
    for s, values in zip(scores.split(tile), v.split(tile), strict=True):
        m_new = max(m, s.max().item())
        p = torch.exp2(s - m_new)
        total = total * 2 ** (m - m_new) + p.sum().item()
        acc = acc * 2 ** (m - m_new) + (p @ values).item()
        m = m_new
        largest.append(m)
        lse.append(m + math.log2(total))
        out.append(acc / total)
    assert abs(out[-1] - exact.item()) < 1e-12
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH, 2.4), layout="constrained")
    keys = range(tile, 513, tile)
    left.step(keys, largest, where="post", color=COLOURS[1], label="m, largest score so far")
    left.step(keys, lse, where="post", color=COLOURS[0], label="m + log₂ l")
    left.set(xlabel="keys seen", ylabel="base-2 exponent")
    left.legend(frameon=False, fontsize=9)
    right.axhline(exact.item(), color="0.6", lw=1, ls="--", label="softmax over all keys at once")
    right.step(keys, out, where="post", color=COLOURS[0], label="acc / l")
    right.set(xlabel="keys seen", ylabel="output")
    right.legend(frameon=False, fontsize=9)
    return figure


def band() -> Figure:
    """Return which tiles the rows of a chunk read, and which of these need a mask."""
    queries, keys, rows_of, block_n = 32, 128, 16, 16
    figure, axes = pyplot.subplots(2, 1, figsize=(WIDTH, 3.7), layout="constrained", sharex=True)
    for axis, (title, window) in zip(axes, (("causal", None), ("causal, sliding window of 48", 48)), strict=True):
        spec = quire.AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=16, sliding_window=window)
        lengths = (torch.tensor([0, n], dtype=torch.int32) for n in (queries, keys))
        seen = reference.visible_keys(quire.Batch.varlen(*lengths), spec, slice(0, queries), keys - queries, keys)
        for top in range(0, queries, rows_of):
            for left in range(0, keys, block_n):
                tile = seen[top : top + rows_of, left : left + block_n]
                colour = COLOURS[0] if tile.all() else COLOURS[4] if tile.any() else GREY
                axis.add_patch(Rectangle((left + 0.4, top + 0.4), block_n - 0.8, rows_of - 0.8, color=colour, lw=0))
        row, key = (~seen).nonzero(as_tuple=True)
        inside = [
            (r, k) for r, k in zip(row.tolist(), key.tolist(), strict=True) if is_partial(seen, r, k, rows_of, block_n)
        ]
        axis.scatter([k + 0.5 for _, k in inside], [r + 0.5 for r, _ in inside], s=1.5, color="white", lw=0)
        axis.set(xlim=(0, keys), ylim=(queries, 0), yticks=[0, 16, 32], ylabel="queries", aspect="equal")
        axis.set_title(f"{title}: the last {queries} of {keys} tokens", loc="left", fontsize=10)
    axes[1].set(xlabel="keys", xticks=range(0, keys + 1, 16))
    names = ("full tile: no mask", "masked tile (dots: masked)", "never read")
    patches = [
        Patch(color=colour, label=name) for colour, name in zip((COLOURS[0], COLOURS[4], GREY), names, strict=True)
    ]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def intervals() -> Figure:
    """Return what the tokens of a sequence see, for each kind of interval and for a tree of drafts."""
    num_tokens, tree = 24, (-1, 0, 0, 1, 1, 2, 5, 3)
    starts = torch.tensor([0, num_tokens], dtype=torch.int32)
    prompt = quire.Batch.varlen(starts, starts)
    spans = torch.tensor([[0, 3, 9], [0, 14, 20]], dtype=torch.int32)
    cuts = torch.tensor([0, 7, 15, num_tokens], dtype=torch.int32)
    drafts = quire.Batch.varlen(
        torch.tensor([0, len(tree)], dtype=torch.int32), starts, tree_bits=from_parents(torch.tensor(tree))
    )
    sights = {
        "causal\n": made.causal(prompt, num_tokens),
        "sliding_window\nsize 6": made.sliding_window(prompt, num_tokens, 6),
        "chunked_local\nsize 8": made.chunked_local(prompt, num_tokens, 8),
        "prefix_lm\n10 tokens": made.prefix_lm(prompt, num_tokens, torch.tensor([10], dtype=torch.int32)),
        "bidirectional_spans\ntwo images": made.bidirectional_spans(prompt, num_tokens, spans),
        "block_causal\nsize 6": made.block_causal(prompt, num_tokens, 6),
        "documents\nthree": made.documents(prompt, num_tokens, cuts),
        "tree_bits\n8 drafts": drafts,
    }
    figure, axes = pyplot.subplots(2, 4, figsize=(WIDTH, 4.8), layout="constrained")
    for axis, (title, batch) in zip(axes.flat, sights.items(), strict=True):
        rows = int(batch.query_starts[-1])
        seen = reference.visible_keys(batch, HEADS, slice(0, rows), num_tokens - rows, num_tokens)
        axis.add_patch(Rectangle((0, 0), num_tokens, rows, color=GREY, lw=0))
        for row in range(rows):
            edges = torch.nn.functional.pad(seen[row].int(), (1, 1)).diff().nonzero()[:, 0].tolist()
            for first, stop in zip(edges[::2], edges[1::2], strict=True):
                axis.add_patch(Rectangle((first, row), stop - first, 1, color=COLOURS[0], lw=0))
            axis.add_patch(Rectangle((num_tokens - rows + row, row), 1, 1, color=COLOURS[1], lw=0))
        axis.hlines(range(rows + 1), 0, num_tokens, color="white", lw=0.6)
        axis.vlines(range(num_tokens + 1), 0, rows, color="white", lw=0.6)
        axis.set(xlim=(0, num_tokens), ylim=(rows, 0), xticks=[], yticks=[], aspect="equal")
        axis.spines[:].set_visible(False)
        axis.set_title(title, loc="left", fontsize=8)
    names = {COLOURS[0]: "seen", COLOURS[1]: "seen: the token's own key", GREY: "not seen"}
    patches = [Patch(color=colour, label=name) for colour, name in names.items()]
    figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def is_partial(seen: torch.Tensor, row: int, key: int, rows_of: int, block_n: int) -> bool:
    """Return whether the tile that holds a row and a key is read and needs a mask."""
    top, left = row // rows_of * rows_of, key // block_n * block_n
    return bool(seen[top : top + rows_of, left : left + block_n].any())


def find_partitions(seq_lens: list[int]) -> tuple[Any, list[tuple[int, int]]]:
    """Return the launch that an H200 gets for decoding sequences, and the tiles of each of its partitions."""
    bounds = Bounds(1, max(seq_lens), len(seq_lens))
    request = Request(HEADS, len(seq_lens), False, bounds, TARGETS["sm90"].properties)
    found, _ = variants(request, Options())
    launch: Any = next(launch for name, launch in found.items() if name.endswith("joined"))
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    search = launch.search(launch.config.block_n)
    meta = {name: value for name, value in search.meta.items() if name != "launch_pdl"} | {"PDL": False}
    searching: Any = SimpleNamespace(search=lambda asked: search._replace(meta=meta))  # the interpreter knows no PDL
    schedule = Scheduler(searching, quire.Batch(lengths[:, None], lengths))
    schedule.find(launch.config.block_n)
    assert schedule.tensors is not None
    parts = schedule.tensors[0][: launch.num_partitions * FIELDS.value].view(-1, FIELDS.value)
    return launch, [(low, high) for low, high in parts[:, :2].tolist() if low < high]


def partitions() -> Figure:
    """Return the work of each program: one program per sequence, and equal partitions."""
    seq_lens = [9000, 700, 3100, 300, 5200, 1500]
    launch, found = find_partitions(seq_lens)
    tiles = [cdiv(n, launch.config.block_n) for n in seq_lens]
    ends = [sum(tiles[: i + 1]) for i in range(len(tiles))]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(WIDTH, 2.7), layout="constrained", sharey=True)
    for s, count in enumerate(tiles):
        left.bar(s, count, color=COLOURS[s], width=0.8)
    for p, (low, high) in enumerate(found):
        at = low
        for s, end in enumerate(ends):
            upto = min(high, end)
            if upto > at:
                right.bar(p, upto - at, bottom=at - low, color=COLOURS[s], width=0.8)
                at = upto
    left.set(xticks=range(len(tiles)), xlabel="program", ylabel=f"tiles of {launch.config.block_n} keys")
    left.set_title("a program for each sequence", loc="left", fontsize=10)
    right.set(xlabel="program (colours are sequences)")
    right.set_title(f"{len(found)} equal partitions", loc="left", fontsize=10)
    return figure


def prefill() -> Figure:
    """Return the rate of prompts by length, of Quire, the naive kernel and two other libraries."""
    report = json.loads(RESULTS.read_text(encoding="utf-8"))
    rows = [r for r in report["rows"] if r["case"] == f"prefill {r['num_tokens']}"]
    rows.sort(key=lambda r: r["num_tokens"])
    figure, axis = pyplot.subplots(figsize=(WIDTH, 3), layout="constrained")
    axis.axhline(report["ceilings"]["flops_per_second"] / 1e12, color="0.4", lw=1, ls="--", label="ceiling of the card")
    for name, colour in (("Quire", 0), ("FlashAttention 3", 2), ("vLLM Triton", 4), ("Quire, naive", 1)):
        timed = [(r["num_tokens"], r["results"].get(name, {})) for r in rows]
        points = [(n, result["flops_per_second"] / 1e12) for n, result in timed if "micros" in result]
        axis.plot(*zip(*points, strict=True), "o-", ms=4, color=COLOURS[colour], label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens of the prompt", ylabel="TFLOP/s")
    axis.set_xticks([r["num_tokens"] for r in rows], [f"{r['num_tokens']:,}" for r in rows])
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    axis.set_title(f"{report['provenance']['device']}, {report['provenance']['date']}", loc="left", fontsize=10)
    return figure


STEPS = {  # a bar's name: the case, and the library
    "decode, 32 × 2,048 keys": ("decode 32x2048", "decode 32x2048 fp8"),
    "prompt, 2,048 tokens": ("prefill 2048", None),
}


def steps() -> Figure:
    """Return the times of the naive kernel and of Quire, and the floor."""
    rows = {row["case"]: row for row in json.loads(RESULTS.read_text(encoding="utf-8"))["rows"]}
    figure, axes = pyplot.subplots(1, 2, figsize=(WIDTH, 2.3), layout="constrained")
    for axis, (title, (case, fp8)) in zip(axes, STEPS.items(), strict=True):
        results = rows[case]["results"]
        bars = {"naive": results["Quire, naive"]["micros"], "today": results["Quire"]["micros"]}
        bars["floor, bf16"] = rows[case]["floor_micros"]
        if fp8:
            bars["today, fp8 cache"] = rows[fp8]["results"]["Quire"]["micros"]
        colours = {"naive": COLOURS[1], "floor, bf16": "0.6"}
        axis.scatter(list(bars.values()), list(bars), color=[colours.get(name, COLOURS[0]) for name in bars], zorder=3)
        for i, micros in enumerate(bars.values()):
            axis.text(micros * 1.25, i, f"{micros:,.0f}" if micros >= 100 else f"{micros:.1f}", va="center", fontsize=9)
        axis.set(xscale="log", xlabel="µs", xlim=(20, max(bars.values()) * 8), ylim=(len(bars) - 0.4, -0.6))
        axis.grid(alpha=0.3)
        axis.set_title(title, loc="left", fontsize=10)
    return figure


def one_file() -> Figure:
    """Return how fast examples/one_file.py is, as a share of FlashAttention 3's speed in the same run."""
    report = json.loads(ONE_FILE.read_text(encoding="utf-8"))
    share = {name: times["FlashAttention 3"] / times["this file"] for name, times in report["micros"].items()}
    figure, axis = pyplot.subplots(figsize=(WIDTH, 3.2), layout="constrained")
    colours = [COLOURS["decode" not in name[:6]] for name in share]
    axis.scatter(list(share.values()), list(share), color=colours, zorder=3)
    for i, name in enumerate(share):
        label, place = f"{report['micros'][name]['this file']:,.1f} µs", axis.get_yaxis_transform()
        axis.text(0.99, i, label, transform=place, ha="right", va="center", fontsize=9)
    axis.axvline(1, color="0.4", lw=1, ls="--", zorder=0)
    axis.set(xlim=(0, max(share.values()) + 0.3), ylim=(len(share) - 0.5, -0.5))
    axis.set_xlabel("speed of one_file.py; FlashAttention 3 is 1")
    axis.grid(alpha=0.3)
    axis.set_title(f"{report['provenance']['device']}, {report['provenance']['date']}", loc="left", fontsize=10)
    return figure


if __name__ == "__main__":
    write(__doc__, pages, softmax, band, intervals, partitions, prefill, steps, one_file)
