"""Compare `quire.attention` with other libraries on the shapes of `measure_attention.py`, side by side in one run.

Whichever of FlashAttention 3 (as vLLM packages it), FlashInfer and vLLM's Triton kernel can be imported takes part. All read the same cache through the same
page tables, replayed as CUDA graphs in turn; what needs a plan or metadata made it before. No time is told for a wrong answer.

    python scripts/compare.py decode --output docs/results/decode_h200     # writes .json and .md
    python scripts/compare.py prefill --output docs/results/prefill_h200
    python scripts/compare.py prefill --only 8192 --libraries "Quire,FlashAttention 3"
"""

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import measure_attention as m
import torch
import triton

import quire


def quire_calls(inputs: m.Inputs, out: torch.Tensor, **options) -> list:
    return [partial(quire.attention, inputs.q, inputs.cache, inputs.plan(table, **options), out=out) for table in inputs.tables]


def flash_attention_3_calls(inputs: m.Inputs, out: torch.Tensor) -> list:
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    spec, bounds = inputs.case.spec, inputs.bounds
    window = (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)
    metadata = get_scheduler_metadata(
        batch_size=len(inputs.case.lens), max_seqlen_q=bounds["max_query_len"], max_seqlen_k=bounds["max_seq_len"], num_heads_q=spec.num_q_heads,
        num_heads_kv=spec.num_kv_heads, headdim=spec.head_dim, cache_seqlens=inputs.seq_lens, qkv_dtype=spec.dtype, cu_seqlens_q=inputs.cu_seqlens_q,
        page_size=inputs.case.page_size, causal=True, window_size=window, num_splits=0,
    )  # fmt: skip
    return [
        partial(
            flash_attn_varlen_func, inputs.q, inputs.cache.k, inputs.cache.v, max_seqlen_q=bounds["max_query_len"], cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_k=bounds["max_seq_len"], seqused_k=inputs.seq_lens, softmax_scale=spec.softmax_scale, causal=True, window_size=list(window),
            block_table=table, out=out, scheduler_metadata=metadata, num_splits=0, fa_version=3,
        )
        for table in inputs.tables
    ]  # fmt: skip


def flashinfer_calls(inputs: m.Inputs, out: torch.Tensor, backend: str) -> list:
    import flashinfer

    spec, case = inputs.case.spec, inputs.case
    pages = torch.tensor([-(-s // case.page_size) for _, s in case.lens])
    indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    last = torch.tensor([(s - 1) % case.page_size + 1 for _, s in case.lens], dtype=torch.int32)
    window = -1 if spec.sliding_window is None else spec.sliding_window - 1
    shared, calls = torch.empty(256 << 20, dtype=torch.uint8, device="cuda"), []
    for table in inputs.tables:
        indices = torch.cat([row[:n] for row, n in zip(table, pages.tolist(), strict=True)])
        heads = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, case.page_size)
        if inputs.bounds["max_query_len"] == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(shared, "NHD", use_tensor_cores=spec.group_size > 1, backend=backend)
            wrapper.plan(indptr, indices, last, *heads, window_left=window, q_data_type=spec.dtype, kv_data_type=spec.kv_dtype)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(shared, "NHD", backend=backend)
            starts = inputs.cu_seqlens_q.cpu()
            wrapper.plan(starts, indptr, indices, last, *heads, causal=True, window_left=window, q_data_type=spec.dtype, kv_data_type=spec.kv_dtype)
        calls.append(partial(wrapper.run, inputs.q, (inputs.cache.k, inputs.cache.v), out=out))
    return calls


def vllm_triton_calls(inputs: m.Inputs, out: torch.Tensor) -> list:
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    spec, bounds = inputs.case.spec, inputs.bounds
    window = (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)
    scratch = {"dtype": torch.float32, "device": "cuda"}
    shape = (inputs.q.shape[0], spec.num_q_heads, 16)
    segments = torch.empty(*shape, spec.head_dim, **scratch), torch.empty(shape, **scratch), torch.empty(shape, **scratch)
    return [
        partial(
            unified_attention, inputs.q, inputs.cache.k, inputs.cache.v, out, inputs.cu_seqlens_q, bounds["max_query_len"], inputs.seq_lens,
            bounds["max_seq_len"], spec.softmax_scale, True, window, table, 0, None, None, None,
            seq_threshold_3D=128 // spec.num_kv_heads, num_par_softmax_segments=16,
            softmax_segm_output=segments[0], softmax_segm_max=segments[1], softmax_segm_expsum=segments[2],
        )
        for table in inputs.tables
    ]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Table:
    """The cases to compare on, each with what the project set itself on an H200 in µs, and the columns; Quire's own begin with its name."""

    title: str
    goals: dict[str, float | None]
    libraries: dict[str, Callable[[m.Inputs, torch.Tensor], list]]


TABLES = {
    "decode": Table(
        title="Decode",
        goals={
            "decode 1x128": 4.0, "decode 1x1024": 6.5, "decode 1x4096": 9.5, "decode 1x16384": 21, "decode 1x131072": 128,
            "decode 1x4096 12/2/128": 7, "decode 1x4096 28/4/128": 8, "decode 8x128": 5.4, "decode 8x1024": 13, "decode 8x4096": 36,
            "decode 32x512": 20, "decode 32x2048": 65, "decode 128x512": 67, "decode 128x4096": 485, "decode 256x1024": 252,
            "decode 32x2048 16/1/128": 13, "decode 32x2048 32/8/64": 34, "decode 16x2048 16/8/256": 66, "decode 8x8192 window 1024": 13,
            "decode 16 of 64 to 8192": 80, "decode 64 of 16 to 4096": 127, "decode 128 of 16 to 1024": 75, "decode 1x131072 with 31x4096": 245,
            "drafts 16x4 on 2048": 36, "drafts 32x8 on 4096": 130,
            "decode 32x2048 fp8": None, "decode 128x4096 fp8": None, "decode 1x131072 fp8": None, "drafts 32x8 on 4096 fp8": None,
        },
        libraries={
            "Quire": quire_calls,
            "Quire batch-invariant": partial(quire_calls, batch_invariant=True),
            "FlashAttention 3": flash_attention_3_calls,
            "FlashInfer": partial(flashinfer_calls, backend="fa2"),
            "vLLM Triton": vllm_triton_calls,
        },
    ),
    "prefill": Table(
        title="Prefill",
        goals={
            "prefill 128": 6.5, "prefill 512": 12, "prefill 2048": 66, "prefill 8192": 840, "prefill 16384": 3450, "prefill 8x512": 50,
            "prefill 8x2048": 470, "prefill 8 of 33 to 3000": 230, "chunk 512 on 16384": 200, "chunk 2048 on 30720": 1560,
            "prefill 8192 28/4/128": 780, "prefill 4096 32/8/64": 145, "prefill 4096 16/8/256": 205, "mixed 32 decoding + 2 prompts": 92,
            "mixed 64 decoding + 4 prompts": 155, "mixed 8 decoding + 8 prompts": 70, "prefill 8192 fp8": None,
        },
        libraries={
            "Quire": quire_calls,
            "FlashAttention 3": flash_attention_3_calls,
            "FlashInfer fa3": partial(flashinfer_calls, backend="fa3"),
            "FlashInfer fa2": partial(flashinfer_calls, backend="fa2"),
            "vLLM Triton": vllm_triton_calls,
        },
    ),
}  # fmt: skip


def compare(case: m.Case, libraries: dict[str, Callable], seconds: float) -> dict[str, float | str]:
    """Return each library's median time in µs, or why there is none."""
    inputs = m.lay_out(case)
    graphs, results = {}, {}
    for name, make in libraries.items():
        try:
            out = torch.full_like(inputs.q, float("nan"))
            calls = make(inputs, out)
            calls[0]()
            m.compare(case, inputs.q, inputs.cache, inputs.tables[0], out)
            graphs[name] = m.capture(calls), calls, out
        except Exception as error:  # peers raise what they like
            results[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    times, deadline = {name: [] for name in graphs}, time.time() + seconds
    while times and (time.time() < deadline or min(map(len, times.values())) < 7):
        for name, (graph, *_) in graphs.items():
            times[name].append(m.replay(graph) / len(inputs.tables))
    return results | {name: statistics.median(values) for name, values in times.items()}


def provenance(commit: str | None) -> dict[str, str]:
    commit = commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "quire": quire.__version__, "commit": commit or "not in a repository", "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def markdown(rows: list[dict], libraries: list[str]) -> str:
    """Return the rows as Markdown, with the geometric means of those that have a goal."""
    lines = ["| shape | floor | " + " | ".join(libraries) + " | Quire / best peer | goal |", "| --- |" + " --- |" * (len(libraries) + 3)]
    ratios = defaultdict(list)
    for row in rows:
        times = {name: t for name, t in row["times"].items() if isinstance(t, float)}
        if peers := [t for name, t in times.items() if not name.startswith("Quire")]:
            times["best peer"] = min(peers)
        over = {name: times["Quire"] / times[name] for name in ("best peer", *libraries) if name in times} if "Quire" in times else {}
        if row["goal"]:
            for name, ratio in over.items():
                ratios[name].append(ratio)
        cells = [f"{row['floor']:.1f}", *(f"{times[name]:.1f}" if name in times else "–" for name in libraries)]
        cells += [f"{over['best peer']:.2f}" if "best peer" in over else "–", str(row["goal"] or "–")]
        lines.append(f"| {row['case']} | " + " | ".join(cells) + " |")
    means = ", ".join(f"{name} {statistics.geometric_mean(values):.3f}" for name, values in ratios.items() if name != "Quire")
    return "\n".join([*lines, "", f"Quire over the others, geometric means of the shapes with a goal: {means or '–'}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", choices=TABLES, help="which shapes and which libraries")
    parser.add_argument("--only", default="", help="compare the cases whose name contains this")
    parser.add_argument("--libraries", help="compare these columns of the table only, separated by commas")
    parser.add_argument("--seconds", type=float, default=0.3, help="measure each case for so long")
    parser.add_argument("--output", type=Path, help="write FILE.json and FILE.md")
    parser.add_argument("--commit", help="say that this commit was measured, where there is no repository to ask")
    args = parser.parse_args()
    table = TABLES[args.table]
    names = args.libraries.split(",") if args.libraries else list(table.libraries)
    if unknown := set(names) - table.libraries.keys():
        parser.error(f"--libraries must be among {', '.join(table.libraries)}, got {', '.join(unknown)}")
    libraries = {name: table.libraries[name] for name in names}
    by_name, rows = {case.name: case for case in m.CASES}, []
    cases = [by_name[name] for name in table.goals if args.only in name]
    for i, case in enumerate(cases, start=1):
        rows.append({"case": case.name, "floor": case.floor(), "goal": table.goals[case.name], "times": compare(case, libraries, args.seconds)})
        told = "  ".join(f"{name} {t:.1f}" if isinstance(t, float) else f"{name} – ({t})" for name, t in rows[-1]["times"].items())
        print(f"{i:2} of {len(cases)}  {case.name:30} {told}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    told = provenance(args.commit)
    text = f"# {table.title}, side by side\n\n" + ", ".join(f"{k} {v}" for k, v in told.items())
    text += ". µs, medians of CUDA-graph replays in turn over rotating pages.\n\n"
    text += markdown(rows, names) + f"\n\nWritten by `python scripts/compare.py {args.table}`.\n"
    print(text)
    if args.output:
        args.output.with_suffix(".json").write_text(json.dumps({"provenance": told, "rows": rows}, indent=1))
        args.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
