"""Outputs in float8_e4m3fn on a GPU: real shapes and dtypes, both kernels for prompts, captured graphs."""

from dataclasses import replace

import pytest
import torch

import quire
from quire import intervals
from quire.dispatch.device import device_properties
from quire.testing import error_budget, make_problem

if not torch.cuda.is_available():
    pytest.skip("a test of kernels on a GPU", allow_module_level=True)

E4M3 = torch.float8_e4m3fn
LLAMA = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 128, "dtype": torch.bfloat16}
MIXED = (
    *((1, 2000), (1, 17), (4, 700), (300, 300), (129, 1500), (1, 0), (0, 50), (33, 33), (31, 129)),
    *((1, n) for n in range(15, 35)),  # with fewer work tiles, keys are split, and there is no decode launch
)
DECODE = ((1, 5000), (1, 17), (1, 700), (1, 0))
KERNELS = [
    "portable",
    pytest.param(
        "hopper",
        marks=pytest.mark.skipif(
            not device_properties(torch.device("cuda")).has_wgmma, reason="a kernel for Hopper GPUs alone"
        ),
    ),
]


def solve(fields, lens, of_problem=None, scale=0.01, **options):
    """Attend with and without a scale; return the problem, both states and the plan."""
    problem = make_problem(quire.AttentionSpec(**LLAMA | fields), lens, **(of_problem or {}), device="cuda")
    problem = replace(problem, out_scale=torch.tensor([scale], device="cuda"))
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds | options)
    plain = quire.attention(problem.q, problem.cache, plan, **problem.tables, return_lse=True)
    arguments = problem.tables | {"out_scale": problem.out_scale}
    state = quire.attention(problem.q, problem.cache, plan, **arguments, return_lse=True)
    again = quire.attention(problem.q, problem.cache, plan, **arguments, return_lse=True)  # a relaunch
    assert torch.equal(again.out.view(torch.uint8), state.out.view(torch.uint8))
    return problem, plain, state, plan


def assert_right(*case, **options):
    problem, plain, state, plan = solve(*case, **options)
    verdict = error_budget(problem, state)
    assert verdict.passed, (plan, verdict)
    assert torch.equal(state.lse, plain.lse)
    return plan


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("fields", "of_problem"),
    [
        ({}, {}),
        ({"head_dim": 64, "sinks": True, "softcap": 20.0}, {}),
        ({"head_dim": 256}, {}),
        ({"head_dim": 80, "head_dim_v": 72}, {}),
        ({"dtype": torch.float16, "kv_dtype": torch.int8}, {}),
        ({"kv_dtype": E4M3}, {}),
        ({}, {"per_token": intervals.causal}),
    ],
    ids=lambda options: str({name: getattr(value, "__name__", value) for name, value in options.items()}),
)
def test_prompts_and_mixed_batches(fields, of_problem, kernel):
    for scale in (1e-4, 0.01, 30.0):
        plan = assert_right(fields, MIXED, of_problem, scale, kernel=kernel)
        assert (plan.kernel == "hopper") == (kernel == "hopper")


@pytest.mark.parametrize("kernel", KERNELS[1:])
@pytest.mark.parametrize(
    ("fields", "of_problem"),
    [({"head_dim": 64, "dtype": torch.float16}, {"page_size": 1}), ({"kv_dtype": E4M3, "allow_fp8": True}, {})],
    ids=["gathered rows", "products in fp8"],
)
def test_what_the_hopper_kernel_alone_has(fields, of_problem, kernel):
    assert assert_right(fields, MIXED, of_problem, kernel=kernel).kernel == "hopper"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("first", "width"), [(0, 129), (1, 144), (8, 144), (16, 136), (16, 144)])
def test_heads_that_begin_at_any_byte(width, first, kernel):
    """A thread stores as many bytes at once as pointer and strides allow."""
    problem, _, state, plan = solve({}, MIXED, kernel=kernel)
    wide = torch.zeros(*state.out.shape[:2], first + width, device="cuda").to(E4M3)
    into = wide[..., first : first + 128]
    quire.attention(problem.q, problem.cache, plan, **problem.tables, out=into, out_scale=problem.out_scale)
    expected = torch.zeros_like(wide)
    expected[..., first : first + 128] = state.out
    assert torch.equal(wide.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kernel", KERNELS)
def test_splits_of_a_chunk(kernel, take):
    take("split")
    plan = assert_right({"sinks": True}, ((33, 3000), (70, 1100), (1, 9)), kernel=kernel, num_tokens=None)
    assert kernel == "portable" or plan.launch.num_splits > 1


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        *(({}, options) for options in ({}, {"num_splits": 1}, {"num_splits": 7}, {"batch_invariant": True})),
        *(({"kv_dtype": E4M3}, options) for options in ({}, {"batch_invariant": True})),
        *(({"dtype": torch.float16, "head_dim": 64}, {"num_splits": splits}) for splits in (1, 7)),
    ],
    ids=str,
)
def test_decode(options, fields):
    assert_right(fields, DECODE, **options)


@pytest.mark.parametrize("lens", [DECODE, ((3, 500), (300, 300))], ids=str)
def test_latents(lens):
    latents = {"num_q_heads": 16, "num_kv_heads": 1, "head_dim": 576, "head_dim_v": 512, "latent": True}
    assert_right(latents | {"softmax_scale": 192**-0.5}, lens, {"page_size": 64}, kernel="mla")


@pytest.mark.skipif(not device_properties(torch.device("cuda")).has_wgmma, reason="a kernel for Hopper GPUs alone")
@pytest.mark.parametrize("fields", [{}, {"head_dim": 64, "sinks": True}, {"head_dim": 256}], ids=str)
def test_both_kernels_of_batch_invariant_plans_store_the_same_bits(fields):
    spec = quire.AttentionSpec(**LLAMA | fields)
    problem, stored = make_problem(spec, ((300, 2500), (40, 900)), device="cuda"), []
    out_scale = torch.tensor([0.01], device="cuda")
    for kernel in ("portable", "hopper"):
        plan = quire.plan(spec, problem.batch, **problem.bounds, batch_invariant=True, kernel=kernel)
        assert (plan.kernel == "hopper") == (kernel == "hopper")
        out = quire.attention(problem.q, problem.cache, plan, **problem.tables, out_scale=out_scale)
        stored.append(out.view(torch.uint8))
    assert torch.equal(*stored)


def test_a_captured_graph_reads_the_scale_at_each_replay():
    problem = make_problem(quire.AttentionSpec(**LLAMA), DECODE, device="cuda")
    scale = torch.ones(1, device="cuda")
    plan = quire.plan(problem.spec, problem.batch, **problem.bounds)
    quire.attention(problem.q, problem.cache, plan, out_scale=scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = quire.attention(problem.q, problem.cache, plan, out_scale=scale)
    for number in (0.01, 1e-4, 3.0):
        scale.fill_(number)
        graph.replay()
        verdict = error_budget(replace(problem, out_scale=scale), out)
        assert verdict.passed, (number, verdict)
