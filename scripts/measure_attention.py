"""Time `quire.attention` on a GPU: CUDA-graph replays that rotate over distinct pages, so that neither launch gaps nor a warm L2 flatter it.

Every time is printed only after the result has met the error budget of a float32 check. Medians over replays, in microseconds, beside the floor:
the larger of bytes over the read bandwidth and flops over the bf16 matrix rate measured on an H200 (4.3 TB/s, 760 TFLOP/s).

    python scripts/measure_attention.py                          # the default shapes
    python scripts/measure_attention.py --only 32x2048           # those whose name contains this
    python scripts/measure_attention.py --tile 16,128,4,3,0,2    # block_m, block_n, warps, stages, unmasked_loop, programs_per_sm
"""

import argparse
import dataclasses
import statistics
import time
from functools import partial

import torch

import quire
from quire.tuning.select import padded
from quire.tuning.space import Tile

READ_BANDWIDTH, MATRIX_RATE = 4.3e12, 760e12  # NVIDIA H200, 2026-11


@dataclasses.dataclass(frozen=True)
class Case:
    """A named batch of (query length, sequence length), and the heads."""

    name: str
    lens: tuple[tuple[int, int], ...]
    heads: tuple[int, int, int] = (32, 8, 128)
    page_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    options: tuple = ()

    @property
    def spec(self) -> quire.AttentionSpec:
        q, kv, dim = self.heads
        return quire.AttentionSpec(num_q_heads=q, num_kv_heads=kv, head_dim=dim, dtype=self.dtype, kv_dtype=self.kv_dtype, **dict(self.options))

    def floor(self) -> float:
        """Return the least possible time in µs."""
        spec = self.spec
        pairs, kv = 0, 0
        for q, s in self.lens:
            window = min(s, spec.window[0] + 1)
            pairs += q * s - q * (q - 1) // 2 if window == s else q * window
            kv += min(s, window + q - 1)
        nbytes = kv * spec.num_kv_heads * 2 * spec.head_dim * spec.kv_dtype.itemsize
        flops = 4 * pairs * spec.num_q_heads * spec.head_dim
        return 1e6 * max(nbytes / READ_BANDWIDTH, flops / MATRIX_RATE)


def decode(num_seqs: int, length: int, **kw) -> Case:
    return Case(kw.pop("name", f"decode {num_seqs}x{length}"), decoding([length] * num_seqs), **kw)


def decoding(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((1, length) for length in lengths)


def prompts(lengths: list[int]) -> tuple[tuple[int, int], ...]:
    return tuple((length, length) for length in lengths)


def at_random(num_seqs: int, low: int, high: int, seed: int) -> list[int]:
    return torch.randint(low, high + 1, (num_seqs,), generator=torch.Generator().manual_seed(seed)).tolist()


def mixed(num_decoding: int, num_prompts: int, seed: int) -> Case:
    lens = decoding(at_random(num_decoding, 512, 4096, seed)) + prompts(at_random(num_prompts, 64, 1024, seed))
    return Case(f"mixed {num_decoding} decoding + {num_prompts} prompts", lens)


FP8 = {"kv_dtype": torch.float8_e4m3fn}
CASES = (
    decode(1, 128),
    decode(1, 1024),
    decode(1, 4096),
    decode(1, 16384),
    decode(1, 131072),
    decode(1, 4096, name="decode 1x4096 12/2/128", heads=(12, 2, 128)),
    decode(1, 4096, name="decode 1x4096 28/4/128", heads=(28, 4, 128)),
    decode(8, 128),
    decode(8, 1024),
    decode(8, 4096),
    decode(32, 512),
    decode(32, 2048),
    decode(128, 512),
    decode(128, 4096),
    decode(256, 1024),
    decode(32, 2048, name="decode 32x2048 16/1/128", heads=(16, 1, 128)),
    decode(32, 2048, name="decode 32x2048 32/8/64", heads=(32, 8, 64)),
    decode(16, 2048, name="decode 16x2048 16/8/256", heads=(16, 8, 256)),
    decode(8, 8192, name="decode 8x8192 window 1024", options=(("sliding_window", 1024),)),
    Case("decode 16 of 64 to 8192", decoding(at_random(16, 64, 8192, seed=0))),
    Case("decode 64 of 16 to 4096", decoding(at_random(64, 16, 4096, seed=1))),
    Case("decode 128 of 16 to 1024", decoding(at_random(128, 16, 1024, seed=2))),
    Case("decode 1x131072 with 31x4096", ((1, 131072),) + ((1, 4096),) * 31),
    Case("drafts 16x4 on 2048", ((4, 2048),) * 16),
    Case("drafts 32x8 on 4096", ((8, 4096),) * 32),
    decode(32, 2048, name="decode 32x2048 fp8", **FP8),
    decode(128, 4096, name="decode 128x4096 fp8", **FP8),
    decode(1, 131072, name="decode 1x131072 fp8", **FP8),
    Case("drafts 32x8 on 4096 fp8", ((8, 4096),) * 32, **FP8),
    Case("prefill 128", prompts([128])),
    Case("prefill 512", prompts([512])),
    Case("prefill 2048", prompts([2048])),
    Case("prefill 8192", prompts([8192])),
    Case("prefill 16384", prompts([16384])),
    Case("prefill 8x512", prompts([512] * 8)),
    Case("prefill 8x2048", prompts([2048] * 8)),
    Case("prefill 8 of 33 to 3000", prompts(at_random(8, 33, 3000, seed=14))),
    Case("prefill 8192 28/4/128", prompts([8192]), heads=(28, 4, 128)),
    Case("prefill 4096 32/8/64", prompts([4096]), heads=(32, 8, 64)),
    Case("prefill 4096 16/8/256", prompts([4096]), heads=(16, 8, 256)),
    Case("prefill 8192 fp8", prompts([8192]), **FP8),
    Case("chunk 64 on 16384", ((64, 16384),)),
    Case("chunk 512 on 16384", ((512, 16384),)),
    Case("chunk 2048 on 30720", ((2048, 30720),)),
    mixed(32, 2, seed=15),
    mixed(64, 4, seed=15),
    mixed(8, 8, seed=15),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """A case's tensors: one cache, and page tables that share no page, several times the L2 cache in all."""

    case: Case
    q: torch.Tensor
    cache: quire.PagedKVCache
    tables: tuple[torch.Tensor, ...]
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor

    @property
    def bounds(self) -> dict[str, int]:
        """What `quire.plan` wants to know."""
        lens = self.case.lens
        return {"max_query_len": max(q for q, _ in lens), "max_seq_len": max(s for _, s in lens), "num_tokens": sum(q for q, _ in lens)}

    def plan(self, table: torch.Tensor, **options) -> quire.Plan:
        """Plan for one of the tables."""
        batch = quire.Batch(table, self.seq_lens, None if self.bounds["max_query_len"] == 1 else self.cu_seqlens_q)
        return quire.plan(self.case.spec, batch, **self.bounds, **options)


def lay_out(case: Case) -> Inputs:
    """Fill a cache with random numbers and deal its pages out at random."""
    spec, device = case.spec, torch.device("cuda")
    torch.manual_seed(0)
    pages_of = [-(-s // case.page_size) for _, s in case.lens]
    bytes_per_call = sum(pages_of) * case.page_size * spec.num_kv_heads * 2 * spec.head_dim * spec.kv_dtype.itemsize
    rotations = max(2, min(64, int(400e6 // bytes_per_call)))  # several times the 60 MB of L2
    num_pages = rotations * sum(pages_of)
    cache = quire.PagedKVCache.empty(spec, num_pages, case.page_size, device=device)
    for tensor in (cache.k, cache.v):
        for part in tensor.split(max(1, num_pages // 16)):
            part.copy_(torch.randn(part.shape, device=device, dtype=torch.float16))
    order = torch.randperm(num_pages, device=device, dtype=torch.int64).to(torch.int32)
    tables = []
    for r in range(rotations):
        table = torch.zeros(len(case.lens), max(pages_of), dtype=torch.int32, device=device)
        begin = r * sum(pages_of)
        for row, n in zip(table, pages_of, strict=True):
            row[:n] = order[begin : begin + n]
            begin += n
        tables.append(table)
    cu = torch.tensor([0, *(q for q, _ in case.lens)], device=device).cumsum(0).to(torch.int32)
    seq_lens = torch.tensor([s for _, s in case.lens], device=device, dtype=torch.int32)
    q = torch.randn(sum(q for q, _ in case.lens), spec.num_q_heads, spec.head_dim, device=device, dtype=spec.dtype)
    return Inputs(case, q, cache, tuple(tables), seq_lens, cu)


def capture(calls) -> torch.cuda.CUDAGraph:
    """Capture calls, one after the other, as one graph, and replay it once."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def replay(graph: torch.cuda.CUDAGraph) -> float:
    """Return the time of one replay in µs."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) * 1e3


def measure(
    case: Case, tile: Tile | None, num_splits: int | None, seconds: float = 0.3, batch_invariant: bool = False
) -> tuple[float, quire.Plan]:  # fmt: skip
    """Return the median time of one call in µs, and its plan."""
    inputs = lay_out(case)
    plans = [inputs.plan(table, num_splits=num_splits, tile=tile, batch_invariant=batch_invariant) for table in inputs.tables]
    out = torch.empty_like(inputs.q)
    verify(case, inputs.q, inputs.cache, plans[0])
    graph = capture([partial(quire.attention, inputs.q, inputs.cache, plan, out=out) for plan in plans])
    times, deadline = [], time.time() + seconds
    while time.time() < deadline or len(times) < 5:
        times.append(replay(graph) / len(plans))
    return statistics.median(times), plans[0]


def verify(case: Case, q: torch.Tensor, cache: quire.PagedKVCache, plan: quire.Plan) -> None:
    """Compare the last tokens of a few sequences with float32 attention; raise on a difference."""
    compare(case, q, cache, plan.batch.page_table, quire.attention(q, cache, plan))


def compare(case: Case, q: torch.Tensor, cache: quire.PagedKVCache, table: torch.Tensor, out: torch.Tensor) -> None:
    """Compare the last tokens of the first and the last sequence with float32 attention; raise on a difference."""
    spec, out, end = case.spec, out.float(), 0
    for seq, (q_len, kv_len) in enumerate(case.lens):
        end += q_len
        if seq not in (0, len(case.lens) - 1):
            continue
        pages = table[seq, : -(-kv_len // case.page_size)].long()
        k, v = (t[pages].flatten(0, 1)[:kv_len].float().repeat_interleave(spec.group_size, 1) for t in (cache.k, cache.v))
        low = max(0, kv_len - 1 - spec.window[0])
        scores = torch.einsum("hd,khd->hk", q[end - 1].float(), k[low:]) * spec.softmax_scale
        expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v[low:])
        torch.testing.assert_close(out[end - 1], expected, atol=4e-3 * expected.abs().max().item() + 2e-3, rtol=2e-2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="measure the cases whose name contains this")
    parser.add_argument("--tile", action="append", help="block_m,block_n,warps,stages,unmasked_loop,programs_per_sm; may be repeated")
    parser.add_argument("--splits", type=int, action="append", help="number of splits; may be repeated")
    parser.add_argument("--invariant", action="store_true", help="measure batch-invariant plans")
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), "torch", torch.__version__, "quire", quire.__version__)
    print(f"{'case':32} {'floor':>8} {'µs':>9} {'of floor':>8}  tile")
    for case in CASES:
        if args.only not in case.name:
            continue
        for text in args.tile or [None]:
            tile = None
            if text:
                m, n, warps, stages, unmasked, per_sm = map(int, text.split(","))
                tile = Tile(m, n, warps, stages, bool(unmasked), per_sm, padded(case.spec.head_dim), padded(case.spec.head_dim))
            for splits in args.splits or [None]:
                try:
                    micros, plan = measure(case, tile, splits, batch_invariant=args.invariant)
                except Exception as error:
                    print(f"{case.name:32} {text} {splits}: {type(error).__name__} {str(error)[:300]}")
                    continue
                t = plan.tile
                chosen = f"{t.block_m}x{t.block_n} w{t.num_warps} s{t.num_stages} u{int(t.unmasked_loop)}, {plan.num_shares or 'no'} shares"
                print(f"{case.name:32} {case.floor():8.1f} {micros:9.1f} {case.floor() / micros:8.0%}  {chosen}", flush=True)


if __name__ == "__main__":
    main()
