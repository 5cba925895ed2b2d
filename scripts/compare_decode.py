"""Compare `quire.attention` with other libraries on the decode shapes of `measure_attention.py`, side by side in one run.

Whichever of FlashAttention 3 (as vLLM packages it), FlashInfer and vLLM's Triton kernel can be imported takes part. All read the same cache through the same
page tables, replayed as CUDA graphs in turn; what needs a plan or metadata made it before. No time is told for a wrong answer.

    python scripts/compare_decode.py --output docs/results/decode_h200     # writes .json and .md
    python scripts/compare_decode.py --only 32x2048
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import measure_attention as m
import torch
import triton

import quire

GOALS = {  # µs, what the project set itself on an H200
    "decode 1x128": 4.0, "decode 1x1024": 6.5, "decode 1x4096": 9.5, "decode 1x16384": 21, "decode 1x131072": 128, "decode 1x4096 12/2/128": 7,
    "decode 1x4096 28/4/128": 8, "decode 8x128": 5.4, "decode 8x1024": 13, "decode 8x4096": 36, "decode 32x512": 20, "decode 32x2048": 65,
    "decode 128x512": 67, "decode 128x4096": 485, "decode 256x1024": 252, "decode 32x2048 16/1/128": 13, "decode 32x2048 32/8/64": 34,
    "decode 16x2048 16/8/256": 66, "decode 8x8192 window 1024": 13, "decode 16 of 64 to 8192": 80, "decode 64 of 16 to 4096": 127,
    "decode 128 of 16 to 1024": 75, "decode 1x131072 with 31x4096": 245, "drafts 16x4 on 2048": 36, "drafts 32x8 on 4096": 130,
}  # fmt: skip


def quire_calls(inputs: m.Inputs, out: torch.Tensor) -> list:
    return [partial(quire.attention, inputs.q, inputs.cache, inputs.plan(table), out=out) for table in inputs.tables]


def invariant_calls(inputs: m.Inputs, out: torch.Tensor) -> list:
    return [partial(quire.attention, inputs.q, inputs.cache, inputs.plan(table, batch_invariant=True), out=out) for table in inputs.tables]


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


def flashinfer_calls(inputs: m.Inputs, out: torch.Tensor) -> list:
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
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(shared, "NHD", use_tensor_cores=spec.group_size > 1, backend="fa2")
            wrapper.plan(indptr, indices, last, *heads, window_left=window, q_data_type=spec.dtype, kv_data_type=spec.kv_dtype)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(shared, "NHD", backend="fa2")
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


LIBRARIES = {
    "Quire": quire_calls,
    "Quire, batch-invariant": invariant_calls,
    "FlashAttention 3": flash_attention_3_calls,
    "FlashInfer": flashinfer_calls,
    "vLLM Triton": vllm_triton_calls,
}
PEERS = ("FlashAttention 3", "FlashInfer", "vLLM Triton")


def compare(case: m.Case, seconds: float) -> dict[str, float | str]:
    """Return each library's median time in µs, or why there is none."""
    inputs = m.lay_out(case)
    graphs, results = {}, {}
    for name, make in LIBRARIES.items():
        try:
            out = torch.full_like(inputs.q, float("nan"))
            calls = make(inputs, out)
            calls[0]()
            m.compare(case, inputs.q, inputs.cache, inputs.tables[0], out)
            graphs[name] = m.capture(calls), calls, out
        except Exception as error:  # peers raise what they like
            results[name] = f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    times, deadline = {name: [] for name in graphs}, time.time() + seconds
    while time.time() < deadline or min(map(len, times.values())) < 7:
        for name, (graph, *_) in graphs.items():
            times[name].append(m.replay(graph) / len(inputs.tables))
    return results | {name: statistics.median(values) for name, values in times.items()}


def provenance(commit: str | None) -> dict[str, str]:
    commit = commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    return {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda,
        "quire": quire.__version__, "commit": commit or "not in a repository", "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    """Return the rows as Markdown, with geometric means."""
    lines = ["| shape | floor | " + " | ".join(LIBRARIES) + " | Quire / best peer | goal |", "| --- |" + " --- |" * (len(LIBRARIES) + 3)]
    ratios, invariant = [], []
    for row in rows:
        times = row["times"]
        best = min((times[p] for p in PEERS if isinstance(times.get(p), float)), default=None)
        cells = [f"{times[n]:.1f}" if isinstance(times.get(n), float) else "–" for n in LIBRARIES]
        ratio = "–"
        if best and isinstance(times["Quire"], float):
            ratios.append(times["Quire"] / best)
            ratio = f"{ratios[-1]:.2f}"
        if isinstance(times["Quire"], float) and isinstance(times["Quire, batch-invariant"], float):
            invariant.append(times["Quire, batch-invariant"] / times["Quire"])
        lines.append(f"| {row['case']} | {row['floor']:.1f} | " + " | ".join(cells) + f" | {ratio} | {row['goal'] or '–'} |")
    mean = "–" if not ratios else f"{math.exp(statistics.fmean(map(math.log, ratios))):.3f}"
    cost = "–" if not invariant else f"{math.exp(statistics.fmean(map(math.log, invariant))):.3f}"
    return "\n".join([*lines, "", f"Geometric means: Quire over the best peer {mean}; batch-invariant over ordinary plans {cost}."])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="compare the cases whose name contains this")
    parser.add_argument("--seconds", type=float, default=0.3, help="measure each case for so long")
    parser.add_argument("--output", type=Path, help="write FILE.json and FILE.md")
    parser.add_argument("--commit", help="say that this commit was measured, where there is no repository to ask")
    args = parser.parse_args()
    rows = []
    cases = [case for case in m.CASES if case.name.startswith(("decode", "drafts")) and args.only in case.name]
    for i, case in enumerate(cases, start=1):
        rows.append({"case": case.name, "floor": case.floor(), "goal": GOALS.get(case.name), "times": compare(case, args.seconds)})
        told = "  ".join(f"{name} {t:.1f}" if isinstance(t, float) else f"{name} – ({t})" for name, t in rows[-1]["times"].items())
        print(f"{i:2} of {len(cases)}  {case.name:30} {told}", file=sys.stderr, flush=True)
        torch.cuda.empty_cache()
    told = provenance(args.commit)
    text = "# Decode, side by side\n\n" + ", ".join(f"{k} {v}" for k, v in told.items())
    text += ". µs, medians of CUDA-graph replays in turn over rotating pages.\n\n"
    text += table(rows) + "\n"
    print(text)
    if args.output:
        args.output.with_suffix(".json").write_text(json.dumps({"provenance": told, "rows": rows}, indent=1))
        args.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
