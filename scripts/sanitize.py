"""Launch each kernel on small problems, for compute-sanitizer: `make sanitize`.

    export PYTORCH_NO_CUDA_MEMORY_CACHING=1
    compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/sanitize.py
    compute-sanitizer --tool synccheck --error-exitcode 1 python scripts/sanitize.py
    compute-sanitizer --tool racecheck --error-exitcode 1 python scripts/sanitize.py --portable
    compute-sanitizer --tool memcheck --error-exitcode 1 python scripts/sanitize.py --part 2/8  # one of eight processes

racecheck does not understand shared-memory barriers between warps: it reports a race for a kernel that only passes a
number through one (docs/notes/hopper.md). The Hopper kernel uses these barriers, so racecheck leaves it out. The other
tools and tests of repeated runs cover it. Some kernels of cuBLAS have such barriers too, so the oracle is computed on
the CPU.
"""

import argparse
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

import quire
from quire.cache_formats import FORMATS as KV_FORMATS
from quire.dispatch.config import KernelConfig
from quire.dispatch.device import device_properties
from quire.testing import Oracle, make_problem, random_chosen, unwritten, with_tensors

HEADS = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128}
CASES = (
    ({}, ((1, 300), (1, 40), (1, 0)), {"num_splits": 4}),
    ({"head_dim": 80, "sinks": True, "softcap": 20.0}, ((1, 200), (3, 70)), {"num_splits": 3}),
    ({}, ((200, 300), (1, 90)), {"num_splits": 1}),
    ({"kv_dtype": torch.float8_e4m3fn, "sliding_window": 60}, ((1, 150), (5, 33)), {"num_splits": 2}),
    ({"num_q_heads": 64, "num_kv_heads": 16, "kv_dtype": torch.float8_e5m2}, ((250, 300),), {"batch_invariant": True}),
    ({"dtype": torch.float32}, ((1, 90), (20, 40)), {"num_splits": 2}),
    ({}, ((150, 300), (1, 90), (1, 0), (33, 33)), {"kernel": "hopper"}),
    ({}, ((150, 300), (1, 4100)), {"kernel": "hopper"}),
    ({"sinks": True}, ((40, 1500),), {"kernel": "hopper"}),
    ({"sinks": True, "softcap": 20.0}, ((33, 9000), (40, 60), (1, 90)), {"kernel": "hopper"}),
    ({"num_q_heads": 64, "num_kv_heads": 16}, ((33, 9000), (40, 60), (1, 90)), {"kernel": "hopper"}),
    ({"num_q_heads": 64, "num_kv_heads": 16}, ((150, 300), (150, 150), *[(1, 90)] * 9), {"kernel": "hopper"}),
    ({"head_dim": 256, "sliding_window": 60}, ((150, 300), (1, 90)), {"kernel": "hopper"}),
    ({"num_q_heads": 10, "head_dim": 120, "sinks": True}, ((24, 300), (3, 90)), {"kernel": "hopper"}),
    ({"head_dim": 256}, ((150, 700), (1, 90)), {"kernel": "hopper", "batch_invariant": True}),
    ({"head_dim": 512}, ((150, 700), (1, 90)), {"kernel": "hopper", "batch_invariant": True}),
    ({}, ((16, 3000),), {"batch_invariant": True}),
    ({"kv_dtype": torch.float8_e4m3fn, "sliding_window": 60}, ((150, 300), (1, 90)), {"kernel": "hopper"}),
    ({"kv_dtype": torch.float8_e4m3fn, "allow_fp8": True}, ((150, 300), (1, 90)), {"kernel": "hopper"}),
    ({"num_q_heads": 64, "num_kv_heads": 16}, ((150, 1300), (150, 300)), {"kernel": "hopper"}),  # keys multiplied ahead
    ({"head_dim": 64}, ((150, 1300), (300, 300), (1, 90)), {"kernel": "hopper"}),
    ({"head_dim": 88}, ((150, 1300), (300, 300), (1, 90)), {"kernel": "hopper"}),  # products of `products.py`
    ({"head_dim": 192}, ((150, 1300), (150, 1210)), {"kernel": "hopper"}),  # scores in pieces
    ({"head_dim": 512, "sinks": True}, ((40, 1500),), {"kernel": "hopper"}),
    ({"head_dim": 512}, ((33, 9000), (40, 60), (1, 90)), {"kernel": "hopper"}),
)
E4M3 = torch.float8_e4m3fn
FORMATS = (  # of few rows, of prompts, and with tiles of 128 rows
    (((1, 900), (1, 33), (2, 500)), {"num_splits": 3}),
    (((150, 300), (1, 90)), {"kernel": "portable"}),
    (((150, 300), (1, 90), (1, 0)), {"kernel": "decoded"}),
    (((200, 300), (33, 90)), {"config": KernelConfig(128, 64, 8, 3, True, 1, block_d=128, block_dv=128)}),
)
LATENTS = (
    ({}, ((1, 700), (3, 40), (1, 0)), {"kernel": "mla"}, {}),
    ({"kv_dtype": E4M3}, ((1, 300), (2, 70)), {"kernel": "mla", "num_splits": 2}, {}),
    ({"kv_dtype": E4M3}, ((1, 300), (2, 70)), {"kernel": "mla"}, {"layout": "fp8_ds_mla"}),
    ({}, ((1, 2000), (5, 170), (1, 0)), {"kernel": "mla_hopper"}, {"page_size": 64}),
    ({"kv_dtype": E4M3}, ((1, 2000), (5, 170), (1, 0)), {"kernel": "mla_hopper"}, {"page_size": 64}),
)
CHOSEN = (  # parts of lists, and lists of neighbouring tokens that are united
    (((1, 700), (3, 40), (1, 0)), {"width": 300, "counted": True}),
    (((1100, 1300), (1, 90)), {"width": 150, "shared": 0.9}),
)
PRODUCTS = quire.AttentionSpec.mla(num_q_heads=128, softmax_scale=0.07, kv_dtype=E4M3, allow_fp8=True)
ALL = [(quire.AttentionSpec(**HEADS | extra), *case, {}) for extra, *case in CASES]
ALL += [(quire.AttentionSpec(**HEADS, kv_format=name), *case, {}) for name in KV_FORMATS for case in FORMATS]
ALL += [(quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.07, **extra), *case) for extra, *case in LATENTS]
for lens, lists in CHOSEN:
    kind = {"page_size": 64, "per_token": partial(random_chosen, **lists)}
    ALL.append((quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.07), lens, {"kernel": "chosen_hopper"}, kind))
ALL.append((PRODUCTS, ((1, 9000), (2, 170), (1, 0)), {"kernel": "mla_hopper"}, {"page_size": 64}))
ALL.append((quire.AttentionSpec(**HEADS), ((150, 300), (1, 90)), {"kernel": "hopper"}, {"page_size": 1}))
for extra, page_size in (({"head_dim": 224}, 3), ({"head_dim": 192, "head_dim_v": 128}, 16)):  # one buffer of queries
    spec = quire.AttentionSpec(**HEADS | extra)
    ALL.append((spec, ((150, 1300), (1000, 1000), (1, 90)), {"kernel": "hopper"}, {"page_size": page_size}))
for extra, page_size in (({"softcap": 50.0}, 528), ({"head_dim": 224}, 131)):  # tiles that lie in one page are one box
    spec = quire.AttentionSpec(**HEADS | extra)
    ALL.append((spec, ((150, 1300), (33, 3000), (1, 90)), {"kernel": "hopper"}, {"page_size": page_size}))


def on_cpu(value: Any) -> Any:
    """Return a copy of a tensor or of a cache on the CPU, or of a dataclass with such copies."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, quire.PagedKVCache):
        if value.is_latent:
            return quire.PagedKVCache.from_latents(value.latents.cpu(), value.head_dim_v, scale=on_cpu(value.k_scale))
        return with_tensors(value, torch.Tensor.cpu)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: on_cpu(getattr(value, f.name)) for f in fields(value) if f.init})
    return value


def norm_and_rope(spec: quire.AttentionSpec, num_tokens: int) -> dict[str, Any]:
    """Return weights of norms, and tables of cos and sin for a part of each head."""
    cos, sin = torch.randn(2, 64, spec.head_dim // 4, device="cuda")
    positions = torch.arange(num_tokens, device="cuda") % 70  # the last ones are outside of the tables
    norm = quire.QKNorm(*torch.ones(2, spec.head_dim, device="cuda"))
    return {"rope": quire.Rope(cos, sin, positions), "qk_norm": norm}


CHUNKS = {"per_token": partial(quire.intervals.chunked_local, size=70)}
for kv_dtype in (None, E4M3):
    ALL.append((quire.AttentionSpec(**HEADS, kv_dtype=kv_dtype), ((150, 300), (1, 90)), {"kernel": "hopper"}, CHUNKS))
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--portable", action="store_true", help="leave out the kernels for Hopper GPUs")
parser.add_argument("--part", default="1/1", metavar="I/N", help="launch the I-th of N parts (default: 1/1)")
args = parser.parse_args()
part, parts = map(int, args.part.split("/"))
portable = args.portable or not device_properties(torch.device("cuda")).has_wgmma
for spec, lens, options, layout in ALL[part - 1 :: parts]:
    if portable and any(name in options.get("kernel", "") for name in ("hopper", "decoded")):
        continue
    problem = make_problem(spec, lens, device="cuda", **layout)
    plan = quire.plan(spec, problem.batch, **problem.bounds | options)
    oracle = Oracle(on_cpu(problem))
    state = quire.attention(problem.q, problem.cache, plan, **problem.tables, return_lse=True)
    verdict = oracle.judge(quire.State(*map(on_cpu, state)))
    print(plan, verdict, flush=True)
    assert verdict.passed
    if problem.cache.scale_kind != "record":  # records would be rounded again
        cache, new = unwritten(problem)  # written by the launch that attends, or by one before it
        state = quire.attention(problem.q, cache, plan, **new, **problem.tables, return_lse=True)
        verdict = oracle.judge(quire.State(*map(on_cpu, state)))
        assert verdict.passed, verdict
        if not spec.latent:
            norm_rope = norm_and_rope(spec, problem.q.shape[0])
            quire.attention(problem.q, cache, plan, **new, **norm_rope, **problem.tables)
    quire.merge_states([state, state, state])
    slots = torch.tensor([0, -1, 17], device="cuda")
    k = torch.randn(3, spec.num_kv_heads, spec.head_dim, dtype=spec.dtype, device="cuda")
    if spec.latent:
        rank = spec.kv_lora_rank
        quire.write_latent(k[:, 0, :rank].contiguous(), k[:, 0, rank:].contiguous(), problem.cache, slots)
    else:
        quire.write_kv(k, k[..., : spec.head_dim_v].contiguous(), problem.cache, slots)
    quire.copy_pages(problem.cache, problem.cache, torch.tensor([[0, 1], [-1, 0]], device="cuda"))
torch.cuda.synchronize()
print("done")
