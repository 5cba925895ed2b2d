"""Compute every headline about speed from docs/results/*.json, and write it where a page has a place for it.

    python scripts/headlines.py            # rewrite the pages
    python scripts/headlines.py --check    # exit with 1 if a page differs from the data

A headline compares Quire with the fastest other library, case by case, by the ratio "× as fast":
the other library's time over Quire's, so above 1 Quire is faster.
It counts the cases that at least one library with a kernel optimised for the card also serves.
Cases in which vLLM's portable Triton kernel is the only other library say little, and are left out.
A place in a page is everything between `<!-- headline NAME -->` and `<!-- end -->`.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from quire_tools.bench.ratios import best_other
from quire_tools.bench.results import QUIRE, Report, Row, load

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs/results"
PAGES = (
    "README.md", "docs/README.md", "docs/why.md", "docs/vllm.md", "docs/sglang.md", "docs/transformers.md",
    "docs/mla.md", "docs/results/README.md",
)  # fmt: skip
NAMES = {  # how names of libraries begin, and what a headline calls them
    "FlashAttention 3": "FlashAttention 3",
    "FlashInfer": "FlashInfer",
    "FlashMLA": "FlashMLA",
    "cuDNN": "cuDNN",
    "vLLM Triton": "vLLM's Triton kernel",
}
OPTIMISED = ("FlashAttention 3", "FlashInfer", "cuDNN", "FlashMLA")  # how names of libraries begin
PLACE = re.compile(r"(<!-- headline (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def speedups(rows: Iterable[Row]) -> dict[str, float]:
    """Return by case the fastest other library's time over Quire's, where a library with an optimised kernel ran."""
    found = {}
    for row in rows:
        best = best_other(row)
        if best and QUIRE in row.times and any(name.startswith(OPTIMISED) for name in row.times):
            found[row.case] = best[1] / row.times[QUIRE]
    return found


def libraries(report: Report) -> str:
    """Return the other libraries that a report has times of."""
    names = [name for name in NAMES if any(peer.startswith(name) for row in report.rows for peer in row.times)]
    return ", ".join(NAMES[name] for name in names[:-1]) + " and " + NAMES[names[-1]]


def line(name: str, found: dict[str, float]) -> str:
    """Return a line of a headline's table: how many cases, mean, worst, and how many are slower."""
    worst = min(found, key=lambda case: found[case])
    slower = [ratio for ratio in found.values() if ratio < 1]
    return (
        f"| {name} | {len(found)} | {statistics.geometric_mean(found.values()):.2f}× "
        f"| {found[worst]:.2f}× ({worst}) | {len(slower)} |\n"
    )


def table(report: Report, kinds: dict[str, tuple[str, ...]]) -> str:
    """Return a headline: one line for each group of kinds, and one for all cases if there are several groups."""
    by_case = {row.case: row.kind for row in report.rows}
    found = speedups(report.rows)
    facts = report.provenance
    text = (
        f"| {facts.device}, {facts.date} | cases | × as fast as the fastest of {libraries(report)} | slowest case "
        "| cases in which another library is faster |\n| --- | --- | --- | --- | --- |\n"
    )
    for name, group in kinds.items():
        some = {case: ratio for case, ratio in found.items() if by_case[case] in group}
        text += line(name, some) if some else ""
    return text + (line("all", found) if len(kinds) > 1 else "")


def speed_table(report: Report) -> str:
    """Return the times of a few cases in µs; the fastest library of each case is bold."""
    rows = {row.case: row for row in report.rows}
    shown = [name for name in NAMES if any(n.startswith(name) for case in SHOWN for n in rows[case].times)]
    text = f"| batch | floor | {' | '.join([QUIRE, *(NAMES[name] for name in shown)])} |\n"
    text += f"{'| --- ' * (len(shown) + 3)}|\n"
    for case, words in SHOWN.items():
        times = rows[case].times
        fastest = {
            name: min((t for n, t in times.items() if n.startswith(name) and not n.startswith("Quire, ")), default=0.0)
            for name in (QUIRE, *shown)
        }
        best = min(time for time in fastest.values() if time)
        cells = [micros(time, is_best=time == best) for time in fastest.values()]
        text += f"| {words} | {micros(rows[case].floor_micros)} | {' | '.join(cells)} |\n"
    return text


def micros(time: float, is_best: bool = False) -> str:
    """Return a time with three digits, bold if it is the best of its row; a dash for none."""
    if not time:
        return "–"
    text = f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
    return f"**{text}**" if is_best else text


def glance(*reports: tuple[str, Report, dict[str, tuple[str, ...]]]) -> str:
    """Return a small table, a column for each report: means by group of kinds, and in how many cases Quire is slower.

    It has to fit on a phone.
    """
    columns = []
    for name, report, kinds in reports:
        by_case = {row.case: row.kind for row in report.rows}
        found = speedups(report.rows)
        groups = [[ratio for case, ratio in found.items() if by_case[case] in of] for of in kinds.values()]
        means = [f"{statistics.geometric_mean(some):.2f}×" for some in groups]
        device = report.provenance.device.split()[1]
        slower = f"{sum(ratio < 1 for ratio in found.values())} of {len(found)}"
        columns.append([f"{device}{name}", *means, *[""] * (3 - len(means)), slower])
    lines = [f"| {' | '.join(cells)} |" for cells in zip(GLANCE, *columns, strict=True)]
    return "\n".join([lines[0], f"{'| --- ' * (len(columns) + 1)}|", *lines[1:]]) + "\n"


def losses(*reports: Report) -> str:
    """Return a table of the cases in which another library is faster, by report and ratio."""
    text = "| case | GPU | fastest other library | its time, µs | Quire, µs | × as fast |\n"
    text += f"{'| --- ' * 6}|\n"
    for report in reports:
        rows = {row.case: row for row in report.rows}
        for case, ratio in sorted(speedups(report.rows).items(), key=lambda found: found[1]):
            best = best_other(rows[case])
            if ratio < 1 and best:
                times = f"{micros(best[1])} | {micros(rows[case].times[QUIRE])}"
                device = report.provenance.device.split()[1]
                text += f"| {case} | {device}, {report.provenance.date} | {best[0]} | {times} | {ratio:.2f}× |\n"
    return text


def drawn(*reports: Report) -> str:
    """Return what cases drawn at random say, as a sentence."""
    words = []
    for report in reports:
        ratios = list(speedups(report.rows).values())
        mean, slower = statistics.geometric_mean(ratios), sum(ratio < 1 for ratio in ratios)
        words.append(
            f"{mean:.2f}× as fast (geometric mean of {len(ratios)} cases; {min(ratios):.2f}× at worst, "
            f"slower in {slower})"
        )
    facts = reports[0].provenance
    return (
        "With a seed that no change had looked at ([9371](grid_h200.md#seeds-5227-8123-and-9371), "
        f"{facts.device}, {facts.date}), Quire runs, against the fastest of all libraries,\n"
        f"{words[0]}; over latents {words[1]}.\n"
    )


def copies(report: Report) -> str:
    """Return where a library that is given contiguous copies, so that no mean counts it, is faster than Quire."""
    both = {row.case: row.times[COPIES] / row.times[QUIRE] for row in report.rows if COPIES in row.times}
    faster = [ratio for ratio in both.values() if ratio < 1]
    worst = min(both, key=lambda case: both[case])
    kinds = sorted({row.kind for row in report.rows if both.get(row.case, 1) < 1})
    return (
        f"It's faster than Quire in {len(faster)} of {len(both)} cases, all of {' or '.join(kinds)}. "
        f"In the slowest ({worst}), Quire runs {both[worst]:.2f}× as fast.\n"
    )


def invariant(report: Report, latents: Report) -> str:
    """Return what batch-invariant plans cost, as two sentences."""

    def cost(some: Report, group: tuple[str, ...]) -> str:
        rows = [row.times for row in some.rows if row.kind in group and {QUIRE, INVARIANT} <= row.times.keys()]
        ratios = [times[INVARIANT] / times[QUIRE] for times in rows]
        return f"{statistics.geometric_mean(ratios):.2f}× as long ({max(ratios):.1f}× at most)"

    words = [
        f"{name}{'' if i else ' then take'} {cost(report, group)}" for i, (name, group) in enumerate(DENSE.items())
    ]
    return (
        f"On an {report.provenance.device}, {', '.join(words[:-1])} and {words[-1]}.\n"
        f"Decode over latents takes {cost(latents, ('MLA decode',))}.\n"
    )


def read(name: str) -> dict[str, Any]:
    """Return a JSON file of results."""
    return json.loads((RESULTS / f"{name}.json").read_text("utf-8"))


VLLM_ROWS = {  # by what was measured, and of how much
    ("latency", "1600"): "one request, 500 + 1,600 tokens",
    ("load", "8"): "8 requests at once",
    ("load", "32"): "32 requests at once",
    ("load", "128"): "128 requests at once",
    ("prompt", "15000"): "one prompt of 15,000 tokens",
    ("prompts", "8"): "8 prompts at once, one output each",
    ("prompts", "32"): "32 prompts at once",
    ("prompts", "128"): "128 prompts at once",
}


def times_as_fast(run: dict[str, Any], other: str) -> dict[tuple[str, str], float]:
    """Return by what was measured in vLLM how many times as fast Quire is as another backend."""
    ours, theirs = (next(r for r in run["results"] if r["backend"] == name) for name in ("CUSTOM", other))
    return {
        (kind, size): ours[kind][size] / theirs[kind][size] if kind == "load" else theirs[kind][size] / ours[kind][size]
        for kind in ("latency", "load", "prompts", "prompt")
        for size in ours.get(kind, {})
    }


def vllm_gains() -> dict[str, dict[tuple[str, str], float]]:
    """Return how many times as fast Llama's geometry runs in vLLM as with FLASH_ATTN, by version and date."""
    older, newer = read("vllm_rounds_second_h200"), read("vllm026_h200")
    facts = newer["about"]
    kept = newer["times_as_fast"]
    return {
        f"vLLM {older['results'][0]['vllm']}, {older['about']['date']}": times_as_fast(older, "FLASH_ATTN"),
        f"vLLM {facts['vllm']}, {facts['date']}": {
            (kind, size): kept[kind][size] for kind in kept for size in kept[kind]
        },
    }


def vllm() -> str:
    """Return what vLLM gains, as a table, and what it gains with latents."""
    gains = vllm_gains()
    text = f"| × as fast as FLASH_ATTN | {' | '.join(gains)} |\n{'| --- ' * (len(gains) + 1)}|\n"
    for key, words in VLLM_ROWS.items():
        cells = [f"{found[key]:.3f}×" if key in found else "not measured" for found in gains.values()]
        text += f"| {words} | {' | '.join(cells)} |\n"
    run = read("vllm_mla_h200")
    version, date = run["results"][0]["vllm"], run["about"]["date"]
    found = [ratio for (kind, _), ratio in times_as_fast(run, "FLASH_ATTN_MLA").items() if kind in ("latency", "load")]
    return (
        f"{text}\nOne of eight GPUs' share of DeepSeek-V3's attention (61 layers, 16 heads) decodes "
        f"[{min(found):.3f} to {max(found):.3f}× as fast](results/vllm_mla_h200.md) as with FLASH_ATTN_MLA, "
        f"with one to 128 requests (vLLM {version}, {date}).\n"
    )


TAIL_ROWS = {
    "tokens": "output tokens per second",
    "between_50": "between outputs, median",
    "between_99": "between outputs, 99th percentile",
    "first_50": "to the first output, median",
    "first_99": "to the first output, 99th percentile",
}


def tail_gains() -> dict[str, dict[str, list[float]]]:
    """Return by load and measure how many times as fast vLLM serves each trace under load as with FLASH_ATTN."""
    loads, gains = read("tail_h200")["results"][0]["loads"], dict[str, dict[str, list[float]]]()
    for share in sorted(loads, key=float):
        pairs = list(zip(loads[share]["CUSTOM"], loads[share]["FLASH_ATTN"], strict=False))
        for name in TAIL_ROWS:
            if share != "1.0" or not name.startswith("first"):  # at saturation, requests wait as long as it lasts
                ratios = [ours[name] / theirs[name] for ours, theirs in pairs]
                gains.setdefault(share, {})[name] = ratios if name == "tokens" else [1 / ratio for ratio in ratios]
    return gains


def tail() -> str:
    """Return what vLLM gains under load, as a table."""
    gains, run = tail_gains(), read("tail_h200")
    columns = ["always waiting" if share == "1.0" else f"{float(share):.0%} of saturation" for share in gains]
    text = f"| × as fast as FLASH_ATTN | {' | '.join(columns)} |\n{'| --- ' * (len(gains) + 1)}|\n"
    for name, words in TAIL_ROWS.items():
        cells = []
        for found in gains.values():
            ratios = found.get(name, [])
            cell = f"{statistics.median(ratios):.2f}×" if ratios else "–"
            cells.append(cell if not ratios or min(ratios) > 1 or max(ratios) < 1 else f"({cell})")
        text += f"| {words} | {' | '.join(cells)} |\n"
    counts = sorted({len(found["tokens"]) for found in gains.values()})
    of_each = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return (
        f"{text}\n[The tail of a loaded server](results/tail_h200.md), vLLM {run['results'][0]['version']}, "
        f"{run['about']['date']}: medians of {of_each} traces of at most 20 seconds, "
        "in brackets where they don't agree.\n"
    )


def spread(found: Iterable[float]) -> str:
    """Return the least and the largest ratio, and of how many Quire is slower."""
    ratios = list(found)
    slower = sum(ratio < 1 for ratio in ratios)
    return f"{min(ratios):.3f} to {max(ratios):.3f}× as fast, and slower in {slower} of {len(ratios)} measurements"


def vllm_in_short() -> str:
    """Return what all measurements of vLLM say, slower ones too."""
    first = read("vllm_h200")
    runs = {f"vLLM {first['results'][0]['vllm']}, {first['about']['date']}": times_as_fast(first, "FLASH_ATTN")}
    words = [f"{spread(found.values())} ({name})" for name, found in (runs | vllm_gains()).items()]
    return (
        "**vLLM.** End to end, with Llama-3.1-8B's geometry and against FlashAttention 3, Quire runs\n"
        + ";\n".join(words)
        + ".\n"
    )


def sglang_in_short() -> str:
    """Return what the run of SGLang says, slower rows too."""
    run = read("sglang_h200")
    machine = run["machine"]
    first = {each["backend"]: each["startup_s"] for each in reversed(run["speed"]) if each["round"] == 0}
    steps, prompts = (spread(found.values()) for found in sglang_gains().values())
    return (
        f"**SGLang.** With [{machine['sglang']}](sglang_h200.md), {machine['date']}, and against the faster of fa3 and "
        f"triton, steps are\n{steps}; prompts are\n{prompts}.\n"
        f"It starts in {first['quire']:.0f} s with Quire, in {first['fa3']:.0f} with fa3 and in {first['triton']:.0f} "
        "with triton.\n"
    )


def transformers() -> str:
    """Return what continuous batching gains, as a table."""
    run = read("transformers_h200")["results"]
    text = "| requests × (prompt + new), tokens/s | Quire | `paged\\|sdpa` | × as fast |\n| --- | --- | --- | --- |\n"
    of_each = ([each for each in run if each["implementation"] == name] for name in ("quire", "sdpa"))
    for ours, theirs in zip(*of_each, strict=True):
        load, speeds = ours["load"], [each["tokens_per_second"] for each in (ours, theirs)]
        text += f"| {load['requests']} × ({load['prompt']} + {load['new']}) | {speeds[0]:,.0f} | {speeds[1]:,.0f} "
        text += f"| {speeds[0] / speeds[1]:.1f}× |\n"
    return text


def latents() -> str:
    """Return how fast attention over latents is, alone and in vLLM, as a paragraph."""
    report = load(RESULTS / "mla_h200.json")
    facts, words, few = report.provenance, [], []
    groups: dict[str, list[tuple[float, int]]] = {}  # ratios, and rows of a sequence
    for row in report.rows:
        best = best_other(row)
        name = "e4m3 latents with `allow_fp8`" if "fp8" in row.case else "bf16"
        name = "prompts" if row.kind == "MLA prefill" else name
        ours = min(row.times[each] for each in (QUIRE, FP8_PRODUCTS) if each in row.times)
        if best:
            groups.setdefault(name, []).append((best[1] / ours, rows_of(row)))
    for name, found in groups.items():
        slower = sum(ratio < 1 for ratio, _ in found)
        mean = statistics.geometric_mean(ratio for ratio, _ in found)
        words.append(f"{mean:.2f}× as fast in {name} (slower in {slower} of {len(found)} cases)")
        few.append(statistics.geometric_mean(ratio for ratio, rows in found if rows <= FEW_ROWS or name == "prompts"))
    in_vllm = times_as_fast(read("vllm_mla_h200"), "FLASH_ATTN_MLA")
    return (
        f"On an {facts.device} ({facts.date}), against the fastest other library of each case, in geometric mean, "
        "Quire runs\n"
        f"{', '.join(words[:-1])}, and {words[-1]}.\n"
        f"Decode with at most {FEW_ROWS} rows per sequence runs {few[0]:.2f}× as fast in bf16 "
        f"and {few[1]:.2f}× with e4m3 latents.\n"
        "[In vLLM](notes/vllm.md#measured), one request of 500 + 1,600 tokens runs "
        f"{in_vllm['latency', '1600']:.3f}× as fast as with vLLM's FLASH_ATTN_MLA, "
        f"and 128 requests {in_vllm['load', '128']:.3f}×.\n"
    )


def rows_of(row: Row) -> int:
    """Return the rows of a sequence in a case of latents: its queries times its heads."""
    return round(row.mean_query_len) * int(re.findall(r" h(\d+)", row.case)[0])


def sglang_gains() -> dict[str, dict[str, float]]:
    """Return how many times as fast SGLang runs as with the fastest other backend, by what was measured and load."""
    run = read("sglang_h200")
    gains: dict[str, dict[str, float]] = {"step_ms": {}, "prefill_s": {}}
    for field, found in gains.items():
        times: dict[str, dict[str, list[float]]] = {}
        for each in run["speed"]:
            if each["backend"] != "quire" or each["page"] == 1:
                for row in each["rows"]:
                    if field == "prefill_s" or row["prompt"] < LONG:
                        batch = f"{row['batch']} × {row['prompt']:,}"
                        times.setdefault(batch, {}).setdefault(each["backend"], []).append(row[field])
        for batch, by_backend in times.items():
            medians = {backend: statistics.median(some) for backend, some in by_backend.items()}
            found[batch] = min(time for backend, time in medians.items() if backend != "quire") / medians["quire"]
    return gains


def sglang() -> str:
    """Return what SGLang gains, as a table."""
    steps, prompts = sglang_gains().values()
    text = "| requests × tokens of a prompt | one step | prompts alone |\n| --- | --- | --- |\n"
    for batch, ratio in prompts.items():
        step = f"{steps[batch]:.2f}×" if batch in steps else "not measured"
        text += f"| {batch} | {step} | {ratio:.2f}× |\n"
    return text


def starts() -> str:
    """Return how long servers take to start with nothing compiled, and with Quire's kernels exported, as a table."""
    run, newer = read("sglang_h200"), read("vllm026_h200")
    first, start = run["start"], newer["start"]
    quire, fa3 = (", ".join(f"{seconds:.0f}" for seconds in first[name]) for name in ("quire", "fa3"))
    return (
        "| seconds until a server is ready | Quire | Quire, exported kernels | FlashAttention 3 | Triton |\n"
        "| --- | --- | --- | --- | --- |\n"
        f"| [SGLang {run['machine']['sglang']}](results/sglang_h200.md), {first['date']} "
        f"| {quire} | not measured | {fa3} | not measured |\n"
        f"| [vLLM {newer['about']['vllm']}](results/vllm026_h200.md), {start['date']} | {start['CUSTOM']:.0f} "
        f"| {start['CUSTOM, exported']:.0f} | {start['FLASH_ATTN']:.0f} | not measured |\n"
    )


def servers() -> str:
    """Return what whole servers gain at most, as a paragraph."""
    most = max(ratio for found in vllm_gains().values() for ratio in found.values())
    step = max(sglang_gains()["step_ms"].values())
    loaded = statistics.median(tail_gains()["1.0"]["tokens"])
    run = read("transformers_h200")["results"]
    quire, sdpa = (next(each for each in run if each["implementation"] == name) for name in ("quire", "sdpa"))
    return (
        "In a whole server, where attention is only part of a step, that's worth less. "
        f"On an H200, vLLM runs [up to {most:.3f}× as fast](vllm.md#what-it-gains) as with FlashAttention 3,\n"
        f"and SGLang takes its steps [up to {step:.2f}× as fast](sglang.md#what-it-gains) "
        "as with the faster of FlashAttention 3 and Triton.\n"
        f"Where requests always wait, vLLM makes [{loaded:.2f}× as many tokens](vllm.md#under-load) "
        "as with FlashAttention 3.\n"
        f"Transformers' continuous batching runs "
        f"[{quire['tokens_per_second'] / sdpa['tokens_per_second']:.1f}× as fast](transformers.md#speed) "
        f"as with its own `paged|sdpa` ({quire['load']['requests']} requests, H200).\n"
    )


GLANCE = ("× as fast", "decode", "prompts", "mixed", "slower in")
LONG = 10_000  # tokens of a prompt after which SGLang's step is of one request alone, and counts for no load
COPIES = "SDPA, not paged"
INVARIANT, FP8_PRODUCTS = "Quire, batch-invariant", "Quire, fp8 products"
FEW_ROWS = 32
SHOWN = {  # by case what README calls it
    "decode 1x128": "decode, 1 sequence of 128 keys",
    "decode 8x1024": "decode, 8 × 1,024",
    "decode 64 of 16 to 4096": "decode, 64 sequences of 16 to 4,096",
    "decode 128x4096": "decode, 128 × 4,096",
    "decode 256x1024": "decode, 256 × 1,024",
    "decode 1x131072": "decode, 1 × 131,072",
    "prefill 2048": "prefill, 2,048 tokens",
    "prefill 8192": "prefill, 8,192",
    "prefill 4096 32/8/64": "prefill, 4,096, head_dim 64",
    "chunk 64 on 16384": "chunk of 64 tokens on 16,384 keys",
    "mixed 32 decoding + 2 prompts": "32 decoding sequences and 2 prompts",
}
DENSE = {
    "decode and drafts": ("decode", "drafts"),
    "prompts and chunks": ("prefill", "chunk"),
    "mixed batches": ("mixed",),
}
LATENTS = {"decode batches": ("MLA decode",), "prompts": ("MLA prefill",)}
HEADLINES: dict[str, Callable[[], str]] = {
    "speed": lambda: speed_table(load(RESULTS / "h200_peers.json")),
    "glance": lambda: glance(
        ("", load(RESULTS / "h200_peers.json"), DENSE),
        ("", load(RESULTS / "h100.json"), DENSE),
        (", MLA", load(RESULTS / "mla_h200.json"), LATENTS),
    ),
    "servers": servers,
    "starts": starts,
    "vllm": vllm,
    "tail": tail,
    "sglang": sglang,
    "vllm_in_short": vllm_in_short,
    "sglang_in_short": sglang_in_short,
    "transformers": transformers,
    "latents": latents,
    "losses": lambda: losses(*(load(RESULTS / f"{name}.json") for name in ("h200_peers", "h200", "h100"))),
    "peers": lambda: table(load(RESULTS / "h200_peers.json"), DENSE),
    "drawn": lambda: drawn(
        *(load(RESULTS / f"{name}.json") for name in ("grid_seed_9371_h200", "grid_latents_9371_h200"))
    ),
    "copies": lambda: copies(load(RESULTS / "h200_peers.json")),
    "invariant": lambda: invariant(load(RESULTS / "h200.json"), load(RESULTS / "mla_h200.json")),
    "h200": lambda: table(load(RESULTS / "h200.json"), DENSE),
    "h100": lambda: table(load(RESULTS / "h100.json"), DENSE),
    "mla": lambda: table(load(RESULTS / "mla_h200.json"), LATENTS),
}


def rewritten(text: str) -> str:
    """Return a page with every headline computed again."""
    return PLACE.sub(lambda place: place[1] + HEADLINES[place[2]]() + place[4], text)


def main() -> int:
    """Rewrite the pages, or compare them with the data; return how many differ from it, where only compared."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; exit with 1 if a page differs")
    check = parser.parse_args().check
    stale = []
    for page in PAGES:
        path = ROOT / page
        text = path.read_text(encoding="utf-8")
        new = rewritten(text)
        if new != text:
            stale.append(page)
            if not check:
                path.write_text(new, encoding="utf-8")
    if stale:
        print(f"{'differ from docs/results' if check else 'rewrote'}: {', '.join(stale)}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
