"""The recipes of CONTRIBUTING.md work: each is followed here for a small example.

Kernels run on a GPU, or in the interpreter with TRITON_INTERPRET=1. Elsewhere they are compiled for a GPU that is not
here.
"""

import importlib.metadata
import re
import sys
import tomllib
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

import quire
from quire.batch import Batch
from quire.checks import plan as checks
from quire.compile_ahead import launches
from quire.dispatch.request import Options, Request
from quire.kernels import choose, formats, mods, views
from quire.kernels.launcher import launch
from quire.kernels.states import as_stored
from quire.targets import TARGETS, Launch, compiling
from quire.testing import error_budget, make_problem
from quire_tools.bench.case import Case
from quire_tools.bench.inputs import make_inputs
from quire_tools.bench.measure import NotServed
from quire_tools.bench.peers import Peer
from quire_tools.bench.sample import Sample

ROOT = Path(__file__).parent.parent
INTERPRETED = triton.knobs.runtime.interpret
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or torch.cuda.is_available()), reason="runs Triton kernels: needs a GPU or TRITON_INTERPRET=1"
)
compiles = pytest.mark.skipif(INTERPRETED, reason="the interpreter's kernels cannot be compiled")
on_cpu_tensors = pytest.mark.skipif(torch.cuda.is_available(), reason="the example is for targets without fp8")

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 32}


# A score mod.


@triton.jit
def double(scores, scale, q_pos, kv_pos, slopes, cap):
    return 2.0 * scores * scale


@pytest.fixture
def doubled_scores(monkeypatch) -> quire.AttentionSpec:
    """Return a spec whose scores `double` makes twice as large. It takes softcap's place."""
    monkeypatch.setitem(mods.SCORE_MODS, ("float32", False), double)
    return quire.AttentionSpec(**HEADS, dtype=torch.float32, softmax_scale=0.1, softcap=1.0)


@runs_kernels
@pytest.mark.parametrize("num_splits", [1, 3])
def test_a_new_score_mod_is_applied(doubled_scores, num_splits):
    same_by_definition = quire.AttentionSpec(**HEADS, dtype=torch.float32, softmax_scale=0.2)
    problem = make_problem(same_by_definition, ((3, 40), (1, 17)), device=DEVICE)
    plan = quire.plan(doubled_scores, problem.batch, **problem.bounds, num_splits=num_splits)
    verdict = error_budget(problem, quire.attention(problem.q, problem.cache, plan, return_lse=True))
    assert verdict.passed, verdict


@compiles
@pytest.mark.parametrize("target", ["sm90", "gfx942"])
def test_a_new_score_mod_compiles(doubled_scores, target):
    plan, compiled = Launch(doubled_scores, 1, 4, 64, 4).compile(TARGETS[target])
    assert plan.kernel == "block"
    assert [c.kernel for c in compiled] == ["portable_kernel"]


# A cache dtype: float8_e4m3fnuz, AMD's older format. It is e4m3 with the exponent one lower and no negative zero, whose
# code is NaN instead. The example has a software decoder alone, which a GPU with conversions for fp8 does not choose.

FNUZ = torch.float8_e4m3fnuz


@triton.jit
def decode_fnuz(x, dtype: tl.constexpr):
    bits = x.to(tl.uint16)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where(bits == 0x80, float("nan"), half.to(tl.float32) * 128.0).to(dtype)


@triton.jit
def encode_fnuz(x):
    bits = mods.to_fp8_bits(x, 3, 8, 240.0, 0x80)
    return tl.where((x == x) & (bits == 0x80), 0, bits).to(tl.uint8)


@pytest.fixture
def fnuz_cache(monkeypatch) -> quire.AttentionSpec:
    """Return a spec whose cache is in the new dtype."""
    for module in [m for name, m in sys.modules.items() if name.startswith("quire.")]:  # one line of `spec.py`
        if hasattr(module, "QUANTISED_DTYPES"):
            monkeypatch.setattr(module, "QUANTISED_DTYPES", (*module.QUANTISED_DTYPES, FNUZ))
    monkeypatch.setitem(formats.LARGEST, FNUZ, 240.0)
    monkeypatch.setitem(mods.SOFTWARE_DECODERS, FNUZ, decode_fnuz)
    monkeypatch.setitem(mods.SOFTWARE_ENCODERS, FNUZ, encode_fnuz)
    return quire.AttentionSpec(**HEADS, dtype=torch.float32, kv_dtype=FNUZ)


@on_cpu_tensors
def test_a_new_cache_dtype_is_written_as_pytorch_converts_it(fnuz_cache):
    cache = quire.PagedKVCache.empty(fnuz_cache, num_pages=4, page_size=16)
    finest = 2.0**-11  # half of the smallest number
    k = torch.cat([torch.linspace(-300, 300, 63 * 64), finest * torch.arange(-32, 32)]).reshape(64, 2, 32)
    v = torch.where(k > 290, float("nan"), -k)
    quire.write_kv(k, v, cache, torch.arange(64))
    for x, stored in ((k, cache.k), (v, cache.v)):
        expected = x.clamp(-240.0, 240.0).to(FNUZ)
        assert torch.equal(stored.view(torch.uint8).reshape(x.shape), expected.view(torch.uint8))


@on_cpu_tensors
@pytest.mark.parametrize("scales", ["head", "token"])
def test_a_new_cache_dtype_is_read(fnuz_cache, scales):
    problem = make_problem(fnuz_cache, ((3, 40), (1, 17)), scales=scales)
    plan = quire.plan(fnuz_cache, problem.batch, **problem.bounds)
    verdict = error_budget(problem, quire.attention(problem.q, problem.cache, plan, return_lse=True))
    assert verdict.passed, verdict


@compiles
def test_a_new_cache_dtype_compiles_where_the_compiler_lacks_it(fnuz_cache):
    _, compiled = Launch(fnuz_cache, 1, 4, 64, 4).compile(TARGETS["sm80"])
    assert [c.kernel for c in compiled] == ["portable_kernel"]


# A kernel family: one program for each query head, which reads one key after the other.


@triton.jit
def serial_kernel(
    q_ptr,  # [num_seqs, NUM_Q_HEADS, HEAD_DIM]
    k_ptr,  # [num_pages, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM]
    v_ptr,  # the same
    out_ptr,  # [num_seqs, NUM_Q_HEADS, HEAD_DIM]
    out_scale_ptr,  # [1], or None
    lse_ptr,  # [num_seqs, NUM_Q_HEADS], or None
    page_table,  # [num_seqs, max_pages_per_seq]
    seq_lens,  # [num_seqs]
    scale, stride_table,
    NUM_Q_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    seq, head = row // NUM_Q_HEADS, row % NUM_Q_HEADS
    offs_d = tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + row * HEAD_DIM + offs_d)
    acc = tl.zeros([HEAD_DIM], tl.float32)
    m = -float("inf")
    l = 0.0  # noqa: E741
    for position in range(tl.load(seq_lens + seq)):
        page = tl.load(page_table + seq * stride_table + position // PAGE_SIZE)
        slot = page.to(tl.int64) * PAGE_SIZE + position % PAGE_SIZE
        offs = (slot * NUM_KV_HEADS + head // (NUM_Q_HEADS // NUM_KV_HEADS)) * HEAD_DIM + offs_d
        score = tl.sum(q * tl.load(k_ptr + offs), 0) * scale
        m_new = tl.maximum(m, score)
        p, alpha = tl.exp(score - m_new), tl.exp(m - m_new)
        acc = acc * alpha + p * tl.load(v_ptr + offs)
        l = l * alpha + p  # noqa: E741
        m = m_new
    out = as_stored(acc / tl.maximum(l, 1e-30), out_scale_ptr, out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + offs_d, out)
    if lse_ptr is not None:
        tl.store(lse_ptr + row, m + tl.log(l))


@dataclass(frozen=True)
class SerialLaunch(quire.kernels.launch.Launch):
    """A launch of `serial_kernel`.

    Attributes:
        request: what it serves.
    """

    request: Request

    @property
    def name(self) -> str:
        return "serial"

    def num_programs(self, num_tokens: int) -> int:
        return num_tokens * self.request.spec.num_q_heads

    def compile_keys(self) -> frozenset[Hashable]:
        spec = self.request.spec
        return frozenset({(self.name, spec.num_q_heads, spec.num_kv_heads, spec.head_dim)})

    def bind(self, batch: Batch, workspace: torch.Tensor | None):
        spec = self.request.spec

        def run(q, cache, out, lse, sinks, alibi_slopes, out_scale=None):
            out = views.output_tensor(out, self.request.device.native_fp8)
            tensors = q, cache.k, cache.v, out, out_scale, lse, batch.page_table, batch.seq_lens
            meta = {"NUM_Q_HEADS": spec.num_q_heads, "NUM_KV_HEADS": spec.num_kv_heads, "HEAD_DIM": spec.head_dim}
            meta["PAGE_SIZE"] = cache.page_size
            numbers = spec.softmax_scale, batch.page_table.stride(0)
            launch(serial_kernel, (self.num_programs(q.shape[0]), 1, 1), (*tensors, *numbers), meta)

        return run

    def __str__(self) -> str:
        return f"serial kernel: {self.num_programs(self.request.bounds.num_tokens)} programs"


def serial_variants(request: Request) -> dict[str, SerialLaunch] | str:
    """Return the launch by its name, or what it does not serve."""
    if request.has_cu_seqlens:
        return "batches with cu_seqlens_q"
    if request.spec.dtype is not torch.float32 or request.spec.kv_dtype is not torch.float32:
        return "dtypes other than float32"
    return {"serial": SerialLaunch(request)}


@pytest.fixture
def serial(monkeypatch) -> quire.AttentionSpec:
    """Return a spec for which the new family is preferred."""
    of_others = choose.variants

    def variants(request: Request, options: Options, within: bool = False):
        found, refusals = of_others(request, options, within)
        own = serial_variants(request)
        if isinstance(own, str):
            return found, refusals | {"serial": own}
        return (own, refusals) if options.kernel in (None, "serial") else (found, refusals)

    for module in (choose, sys.modules["quire.plan"], launches):
        monkeypatch.setattr(module, "variants", variants)
    families = "serial", *choose.FAMILIES
    for module in (choose, sys.modules["quire.plan"], checks):
        monkeypatch.setattr(module, "FAMILIES", families)
    return quire.AttentionSpec(**HEADS, dtype=torch.float32)


@runs_kernels
def test_a_new_kernel_family_serves_what_it_can(serial):
    problem = make_problem(serial, ((1, 40), (1, 17)), one_query=True, device=DEVICE)
    plan = quire.plan(serial, problem.batch, **problem.bounds)
    assert plan.kernel == "serial"
    assert "serial kernel: 8 programs; the only variant" in repr(plan)
    verdict = error_budget(problem, quire.attention(problem.q, problem.cache, plan, return_lse=True))
    assert verdict.passed, verdict
    problem = replace(problem, out_scale=torch.full((1,), 0.1, device=DEVICE))
    verdict = error_budget(problem, quire.attention(problem.q, problem.cache, plan, out_scale=problem.out_scale))
    assert verdict.passed, verdict


@runs_kernels
def test_what_a_new_kernel_family_does_not_serve_is_left_to_the_others_or_refused(serial):
    problem = make_problem(serial, ((3, 40), (1, 17)), device=DEVICE)
    assert quire.plan(serial, problem.batch, **problem.bounds).kernel == "block"
    with pytest.raises(quire.UnsupportedError, match="got 'serial', which does not serve batches with cu_seqlens_q"):
        quire.plan(serial, problem.batch, **problem.bounds, kernel="serial")


@runs_kernels
def test_a_new_kernel_family_is_warmed_up(serial):
    cache = quire.PagedKVCache.empty(serial, num_pages=4, page_size=16, device=DEVICE)
    compiled = quire.warmup(serial, cache, max_num_seqs=1, max_num_tokens=1, max_seq_len=16)
    assert "serial kernel: 4 programs" in compiled


@pytest.mark.skipif(not torch.cuda.is_available(), reason="a kernel is loaded on a GPU alone")
def test_a_new_kernel_family_must_not_be_compiled_in_service(serial):
    problem = make_problem(replace(serial, head_dim=64, head_dim_v=64), ((1, 40),), one_query=True, device=DEVICE)
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds)
    with quire.no_compilation(), pytest.raises(RuntimeError, match="serial_kernel must not be compiled in service"):
        quire.attention(problem.q, problem.cache, plan)


@compiles
def test_a_new_kernel_family_compiles(serial):
    with compiling(TARGETS["sm90"]) as compiled:
        batch = Batch(torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
        plan = quire.plan(serial, batch, max_query_len=1, max_seq_len=16)
        cache = quire.PagedKVCache.empty(serial, num_pages=1, page_size=16)
        quire.attention(torch.zeros(1, serial.num_q_heads, serial.head_dim), cache, plan)
    assert [c.kernel for c in compiled] == ["serial_kernel"]


# A peer: PyTorch, one sequence after the other.

CASE = Case("example", "decode", ((1, 40), (1, 17)), model="MQA", dtype="float32")


def one_by_one(inputs, out):
    spec = inputs.case.spec
    if spec.sinks:
        raise NotServed("does not serve sinks")

    def plan(table):
        def call():
            for seq, (_, length) in enumerate(inputs.case.lens):
                pages = table[seq, : -(-length // inputs.case.page_size)].long()
                k, v = (t[pages].flatten(0, 1)[:length].transpose(0, 1) for t in (inputs.cache.k, inputs.cache.v))
                out[seq] = torch.nn.functional.scaled_dot_product_attention(
                    inputs.q[seq][:, None], k, v, scale=spec.softmax_scale, enable_gqa=True
                )[:, 0]

        return call

    return plan


def test_a_new_peer_is_checked_like_the_others():
    peer = Peer("PyTorch, one by one", "torch", one_by_one)
    assert peer.version() == importlib.metadata.version("torch")
    inputs = make_inputs(CASE, "cpu", 2)
    out = torch.full_like(inputs.q, float("nan"))
    plan = one_by_one(inputs, out)
    for table in inputs.tables:
        assert not Sample(inputs, table).judge(out).passed  # the result for another table
        plan(table)()
        assert Sample(inputs, table).judge(out).passed


# A target: a GPU like sm90, with less shared memory.


@compiles
def test_a_new_target_is_planned_and_compiled_for():
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=256)
    sm90 = TARGETS["sm90"]
    prompt = Launch(spec, 4, 512, 512, 2048, options=(("kernel", "portable"),))
    plan, _ = prompt.compile(sm90)
    small = replace(sm90, name="sm90, a quarter of the shared memory", shared_memory=sm90.shared_memory // 4)
    small_plan, compiled = prompt.compile(small)
    assert plan.launch.config != small_plan.launch.config
    assert all(each.shared <= small.shared_memory for each in compiled)


# What CONTRIBUTING.md and pyproject.toml say of the source.


def test_files_that_the_recipes_name_exist():
    recipes = (ROOT / "CONTRIBUTING.md").read_text().split("## Recipes")[1]
    source = {p for p in re.findall(r"`([a-z_/]+\.py)`", recipes) if "<" not in p and not p.startswith("tests/")}
    assert source
    missing = {path for path in source if not (ROOT / path).exists() and not list((ROOT / "src/quire").rglob(path))}
    assert not missing


def test_only_files_of_kernels_are_left_out_of_type_checking():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["typeCheckingMode"] == "standard"
    assert not [name for name in settings if name.startswith("report")]
    for pattern in settings["ignore"]:
        files = list(ROOT.glob(pattern))
        assert files, f"{pattern} matches no file"
        assert all(re.search(r"@(triton|gluon)\.jit", file.read_text()) for file in files), pattern
