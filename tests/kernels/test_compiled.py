"""A server's loop under `torch.compile(fullgraph=True)`: a new plan in each step, and no new compilation."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import quire
from quire.dispatch.device import interprets
from quire.kernels.shared_prefix.launch import flattened, levels_of
from quire.testing import error_budget, make_problem
from tests.extended import extended

pytestmark = pytest.mark.one_triton

SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
LATENT = quire.AttentionSpec.mla(
    num_q_heads=4, softmax_scale=0.1, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32
)
PAGE, NUM_PAGES = 16, 40
STEPS, COMPILED = 8, 5  # steps, and after how many of them nothing may be compiled any more
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Step:
    """A step with more sequences, tokens and keys than the step before. No two sizes of its tensors are equal."""

    def __init__(self, number: int, device: str, spec: quire.AttentionSpec = SPEC, queries: int = 1) -> None:
        self.spec, self.queries, self.num_seqs, self.keys = spec, queries, 5 + number, 600 + 40 * number
        self.tokens, self.device = self.num_seqs * queries, device
        table = torch.randint(0, NUM_PAGES, (self.num_seqs, 51 + number), dtype=torch.int32, device=device)
        table[:, :3] = table[:1, :3].clone()
        seq_lens = torch.randint(70, self.keys + 1, (self.num_seqs,), dtype=torch.int32, device=device)
        starts = torch.arange(self.num_seqs + 1, dtype=torch.int32, device=device) * queries
        self.batch = quire.Batch(table, seq_lens, None if queries == 1 else starts)
        self.q = torch.randn(self.tokens, spec.num_q_heads, spec.head_dim, device=device)

    def arguments(self, batch: quire.Batch | None = None, **options: Any) -> tuple[torch.Tensor, quire.Plan]:
        bounds = {"max_query_len": self.queries, "max_seq_len": self.keys, "num_tokens": self.tokens}
        return self.q, quire.plan(self.spec, batch or self.batch, **bounds, **options)


def decode(number: int, device: str, options: Callable) -> Arguments:
    return Step(number, device).arguments(), {}


def many_splits(number: int, device: str, options: Callable) -> Arguments:
    return Step(number, device).arguments(**options(num_splits=4)), {"return_lse": True}


def drafts(number: int, device: str, options: Callable) -> Arguments:
    return Step(number, device, queries=2).arguments(), {}


def chunks(number: int, device: str, options: Callable) -> Arguments:
    return Step(number, device, queries=17 + number).arguments(), {}


def latents(number: int, device: str, options: Callable) -> Arguments:
    return Step(number, device, LATENT).arguments(), {}


def an_output_in_e4m3(number: int, device: str, options: Callable) -> Arguments:
    return Step(number, device).arguments(), {"out_scale": torch.tensor([0.5], device=device)}


def new_tokens(number: int, device: str, options: Callable) -> Arguments:
    step = Step(number, device)
    k, v = torch.randn(2, step.tokens, 2, 16, device=device)
    return step.arguments(), {"k": k, "v": v, "slot_mapping": torch.full((step.tokens,), -1, device=device)}


def a_shared_prefix(number: int, device: str, options: Callable) -> Arguments:
    step = Step(number, device)
    levels = [[(step.num_seqs, 2 * PAGE)], [(2, PAGE), (step.num_seqs - 2, 0)]]
    return step.arguments(shared_prefix=levels), {}


def intervals(number: int, device: str, options: Callable) -> Arguments:
    step = Step(number, device)
    return step.arguments(quire.intervals.sliding_window(step.batch, step.tokens, 4)), {}


CASES = decode, many_splits, drafts, chunks, latents, an_output_in_e4m3, new_tokens, a_shared_prefix, intervals
# What is traced does not depend on who computes. By default, PyTorch's path has each case in one of two ways, in turn,
# and the interpreter one case.
BY_DEFAULT = [(new_tokens, None)] if interprets() else list(zip(CASES, (True, None) * 5, strict=False))


def cache_of(spec: quire.AttentionSpec, device: str) -> quire.PagedKVCache:
    cache = quire.PagedKVCache.empty(spec, NUM_PAGES, PAGE, device=device)
    for pages in (cache.latents,) if spec.latent else (cache.k, cache.v):
        pages.normal_()
    return cache


def follow(function: Callable[..., Any], dynamic: bool | None, steps: list[Arguments]) -> None:
    """Call a function compiled and eagerly in each step and compare; fail if a late step is compiled."""
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="eager", fullgraph=True, dynamic=dynamic)
    for number, (arguments, options) in enumerate(steps):
        with torch.compiler.set_stance("default" if number < COMPILED else "fail_on_recompile"):
            found = compiled(*arguments, **options)
        expected = function(*arguments, **options)
        for x, y in zip(found, expected, strict=True) if isinstance(found, tuple) else [(found, expected)]:
            assert torch.equal(x.float(), y.float())


@pytest.mark.parametrize(
    ("case", "dynamic"),
    [
        (case, dynamic) if (case, dynamic) in BY_DEFAULT else extended(case, dynamic)
        for case in CASES
        for dynamic in (True, None)
    ],
    ids=lambda value: getattr(value, "__name__", "dynamic" if value else "automatic"),
)
def test_a_new_plan_in_each_step_compiles_nothing_new(case, dynamic, device, options):
    torch.manual_seed(0)
    cache = cache_of(LATENT if case is latents else SPEC, device)

    def step(q, plan, **options):
        return quire.attention(q, cache, plan, **options)

    follow(step, dynamic, [case(number, device, options) for number in range(STEPS)])


@pytest.mark.parametrize("dynamic", [extended(True), None], ids=["dynamic", "automatic"])
def test_growing_sequences_without_pages_compile_nothing_new(dynamic, device):
    def step(q, k, v, plan):
        return quire.varlen_attention(q, k, v, plan)

    steps = []
    for number in range(STEPS):
        lens = torch.tensor([11 + number, 0, *[7] * (3 + number)], device=device)
        starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        num_tokens, longest = int(starts[-1]), int(lens.max())
        q, (k, v) = torch.randn(num_tokens, 4, 16, device=device), torch.randn(2, num_tokens, 2, 16, device=device)
        bounds = {"max_query_len": longest, "max_seq_len": longest, "num_tokens": num_tokens}
        steps.append(((q, k, v, quire.plan(SPEC, quire.Batch.varlen(starts, starts), **bounds)), {}))
    follow(step, dynamic, steps)


@pytest.mark.triton
def test_a_compiled_call_may_have_as_many_splits_as_an_eager_one(device):
    """Of a workspace that plans share, 16 programs per SM have counters; of one that a plan allocates, all."""
    spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
    p = make_problem(spec, [(1, 256)] * (8 if device == "cpu" else 256), device=device)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=16)
    torch._dynamo.reset()
    attend = torch.compile(lambda q: quire.attention(q, p.cache, plan), backend="eager", fullgraph=True)
    assert error_budget(p, attend(p.q)).passed


def test_levels_survive_as_numbers():
    levels = (((3, 32), (2, 0)), ((1, 16), (1, 16), (3, 48)))
    assert levels_of(flattened(levels)) == levels and levels_of(flattened(())) == ()
