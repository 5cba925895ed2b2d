"""Decode context parallelism in the plug-in: ranks that hold shares of each context, in the real vLLM.

One layer on two ranks, which are threads, against the oracle; and the engine in two processes against the same model in
Transformers with eager attention, token for token.
"""

# ruff: noqa: E402 (vLLM's environment comes first, and fixtures are found by their names)

import importlib
import importlib.util
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

import tests.engines.vllm_environment  # noqa: F401

vllm = pytest.importorskip("vllm", reason="vLLM is tested by `make test-vllm`")

import quire
from quire.integrations.vllm import contract
from quire.integrations.vllm.backend import QuireBackend, QuireImpl
from quire.testing import Problem, error_budget, make_problem, unwritten
from tests.engines.test_vllm import (  # noqa: F401
    DEVICE,
    NAME,
    greedy,
    make_layer,
    make_model,
    one_process,
    prepare_two_processes,
    prompts,
    serve,
    step_of,
)

RANKS = 2
SPEC = quire.AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=16, dtype=torch.float32)
BATCHES = {
    "decode": ((1, 9), (1, 40), (1, 1), (1, 33)),  # some have no key on one of the ranks
    "mixed": ((1, 9), (7, 40), (1, 1), (20, 20), (3, 70)),
    "drafts": ((4, 9), (4, 40), (4, 4)),
    "prompts": ((5, 5), (20, 20)),
}
here = threading.local()


class Group:
    """vLLM's group of ranks, where the ranks are threads. One runs at a time, since Triton's interpreter needs that."""

    world_size = RANKS

    def __init__(self, rank: int, given: dict, barrier: threading.Barrier, turn: threading.Lock) -> None:
        self.rank_in_group, self.given, self.barrier, self.turn = rank, given, barrier, turn

    def wait(self) -> None:
        self.turn.release()
        try:
            self.barrier.wait(60)
        finally:
            self.turn.acquire()

    def exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.given[self.rank_in_group] = x
        self.wait()
        found = [self.given[rank].clone() for rank in range(RANKS)]
        self.wait()
        return found

    def all_gather(self, x: torch.Tensor, dim: int = 0) -> torch.Tensor:
        assert x.is_contiguous()
        return torch.cat(self.exchange(x), dim)

    def reduce_scatter(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        return sum(self.exchange(x)).chunk(RANKS, dim)[self.rank_in_group].contiguous()


@pytest.fixture
def on_ranks(monkeypatch):
    """Return a function that runs another on each rank, and returns what each returned."""
    combine = importlib.import_module(contract.combiner_of_ranks(parallel("ag_rs")).__module__)
    if DEVICE == "cpu":
        monkeypatch.setattr(combine, "correct_attn_out", importlib.import_module("vllm_cpu").weigh)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_dcp_group", lambda: here.group)

    def run(function):
        given, barrier, turn, found = {}, threading.Barrier(RANKS), threading.Lock(), {}

        def work(rank: int) -> None:
            here.group = Group(rank, given, barrier, turn)
            try:
                with turn:
                    found[rank] = function(rank)
            except BaseException as error:
                found[rank] = error
                barrier.abort()

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in found.values():
            if isinstance(result, BaseException) and not isinstance(result, threading.BrokenBarrierError):
                raise result
        return [found[rank] for rank in range(RANKS)]

    return run


def parallel(backend: str):
    return type("ParallelConfig", (), {"dcp_comm_backend": backend})


def share(problem: Problem, rank: int, interleave: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return a rank's cache with the keys before the step, its page table, and the slots of the step's tokens.

    Token i of a sequence is on rank i // interleave % RANKS. All other slots are NaN.
    """
    page_size, width, starts = problem.cache.page_size, 5, problem.batch.query_starts.tolist()
    k, v = problem.cache.k, problem.cache.v
    poison = [torch.full((1 + width * len(problem.seq_lens), *x.shape[1:]), float("nan")) for x in (k, v)]
    pages = [x.to(DEVICE).to(k.dtype) for x in poison]
    table = 1 + torch.arange(width * len(problem.seq_lens), dtype=torch.int32, device=DEVICE).view(-1, width).flip(0, 1)
    slots = torch.full((problem.q.shape[0],), -1, device=DEVICE)
    for seq, (num_queries, num_keys) in enumerate(zip(problem.query_lens, problem.seq_lens, strict=True)):
        for i in range(num_keys):
            if i // interleave % RANKS != rank:
                continue
            local = i // (interleave * RANKS) * interleave + i % interleave
            page, slot = table[seq, local // page_size], local % page_size
            new = i - (num_keys - num_queries)
            if new >= 0:
                slots[starts[seq] + new] = page * page_size + slot
                continue
            row = problem.batch.page_table[seq, i // page_size], i % page_size
            for mine, whole in zip(pages, (k, v), strict=True):
                mine[page, slot] = whole[row]
    if k.dtype.itemsize == 1:
        pages = [x.view(torch.uint8) for x in pages]
    return torch.stack(pages, 1), table, slots


def of_rank(problem: Problem, rank: int) -> Problem:
    """Return the problem with a rank's heads."""
    heads = slice(rank * 2, rank * 2 + 2)
    return replace(
        problem,
        spec=replace(problem.spec, num_q_heads=2),
        q=problem.q[:, heads],
        sinks=None if problem.sinks is None else problem.sinks[heads].contiguous(),
    )


def attend(problem: Problem, rank: int, interleave: int, dtype: str = "auto", causal: bool = True, **changes):
    """Return a rank's out, its cache and its slots."""
    mine, (_, new) = of_rank(problem, rank), unwritten(problem)
    layer, builder = make_layer(mine, dtype, interleave=interleave)
    kv_cache, table, slots = share(problem, rank, interleave)
    common, query, num_tokens = step_of(mine, 2, 5)
    common.block_table_tensor[: len(table)] = table
    padded = torch.nn.functional.pad(slots, (0, 2), value=-1)
    step = builder.build(0, common.replace(slot_mapping=padded, causal=causal, **changes))
    key, value = (torch.nn.functional.pad(new[name], (0, 0, 0, 0, 0, 2), value=float("nan")) for name in "kv")
    output = torch.full_like(query, 7.0)
    layer.impl.forward(layer, query, key, value, kv_cache, step, output)
    return output[:num_tokens], kv_cache, slots, step, builder


@pytest.mark.parametrize("interleave", [1, 4, 16])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("features", [{}, {"sinks": True, "softcap": 3.0}], ids=["plain", "sinks"])
def test_ranks_that_share_contexts_attend_to_all_keys(batch, interleave, features, on_ranks):
    problem = make_problem(replace(SPEC, **features), BATCHES[batch], device=DEVICE)
    found = on_ranks(lambda rank: attend(problem, rank, interleave))
    assert error_budget(problem, torch.cat([out for out, *_ in found], 1)).passed
    held = [slots >= 0 for _, _, slots, *_ in found]
    assert (held[0] ^ held[1]).all()
    _, new = unwritten(problem)
    for _, kv_cache, slots, *_ in found:
        written = kv_cache[:, 0].flatten(0, 1)[slots[slots >= 0]]
        assert torch.equal(written, new["k"][slots >= 0])
    if batch == "decode":
        assert (found[0][3].sharded.query_lens is None) == (not features)


@pytest.mark.parametrize("batch", ["decode", "drafts"])
def test_fp8_shares(batch, on_ranks):
    """The step's own keys are exact in fp8 here. A step with several queries does not read them from the cache."""
    problem = make_problem(replace(SPEC, kv_dtype=torch.float8_e4m3fn), BATCHES[batch], scales="tensor", device=DEVICE)
    found = on_ranks(lambda rank: attend(problem, rank, 1, "fp8"))
    assert error_budget(problem, torch.cat([out for out, *_ in found], 1)).passed


def test_steps_of_shares_that_are_not_causal(on_ranks):
    problem = make_problem(replace(SPEC, causal=False), BATCHES["mixed"], device=DEVICE)
    found = on_ranks(lambda rank: attend(problem, rank, 4, causal=False))
    assert error_budget(problem, torch.cat([out for out, *_ in found], 1)).passed


@pytest.mark.parametrize("batch", ["prompts", "mixed"])
def test_prompts_without_a_past_do_not_communicate(batch, on_ranks, monkeypatch):
    """The host's lengths say so; they are the same on all ranks. A graph is captured with the past."""
    problem = make_problem(SPEC, BATCHES[batch], device=DEVICE)
    gathered, all_gather = [], Group.all_gather
    monkeypatch.setattr(Group, "all_gather", lambda self, x, dim=0: (gathered.append(x), all_gather(self, x, dim))[1])
    longest = torch.tensor([*problem.seq_lens, 0, 0], dtype=torch.int32)
    found = on_ranks(lambda rank: attend(problem, rank, 1, seq_lens_cpu_upper_bound=longest))
    assert error_budget(problem, torch.cat([out for out, *_ in found], 1)).passed
    step, builder = found[0][3:]
    assert bool(gathered) == step.sharded.has_context == (batch == "mixed")
    common, _, _ = step_of(of_rank(problem, 0), 2, 5)
    builder.warm = True
    assert builder.build_for_cudagraph_capture(common.replace(seq_lens_cpu_upper_bound=longest)).sharded.has_context


def test_what_cannot_be_shared_is_refused_by_name(on_ranks):
    for features, name in (({"sliding_window": 8}, "sliding_window"), ({"alibi": True}, "alibi_slopes")):
        problem = make_problem(replace(SPEC, **features), BATCHES["decode"], device=DEVICE)
        with pytest.raises(quire.UnsupportedError, match=f"{name} must be None where ranks share contexts"):
            on_ranks(lambda rank, problem=problem: make_layer(of_rank(problem, rank)))


def test_outputs_of_shares_are_not_quantised(on_ranks):
    """vLLM asks before it fuses; a call that it did not ask about is refused by name."""
    problem = of_rank(make_problem(SPEC, BATCHES["decode"], device=DEVICE), 0)
    common, query, _ = step_of(problem, 2, 5)

    def forward(rank):
        layer, builder = make_layer(problem)
        assert not builder.supports_update_block_table  # its graphs read lengths that only `build` computes
        kv_cache, _, _ = share(problem, rank, 1)
        output = torch.empty_like(query).to(torch.float8_e4m3fn)
        step = builder.build(0, common)
        layer.impl.forward(layer, query, None, None, kv_cache, step, output, output_scale=torch.ones(1, device=DEVICE))

    with pytest.raises(quire.UnsupportedError, match="output_scale must be None where ranks share contexts, got one"):
        on_ranks(forward)


def test_shares_are_causal_or_not_as_a_whole(on_ranks):
    problem = make_problem(SPEC, BATCHES["drafts"], device=DEVICE)
    with pytest.raises(quire.UnsupportedError, match="causal must be one bool for the whole batch where ranks share"):
        on_ranks(lambda rank: attend(problem, rank, 1, causal=torch.ones(5, dtype=torch.int32)))


def test_a_cache_that_every_rank_holds_whole_is_not_shared(on_ranks):
    """Newer vLLM says it of the cache; a draft model's may be so."""
    whole = type("Spec", (), {"dcp_sharded": False})
    assert on_ranks(lambda rank: contract.context_group(whole)) == [None, None]
    assert all(group.world_size == RANKS for group in on_ranks(lambda rank: contract.context_group(None)))


def test_vllm_s_own_functions_combine_the_ranks():
    assert contract.combiner_of_ranks(parallel("ag_rs")).__name__ == "cp_lse_ag_out_rs"
    assert contract.combiner_of_ranks(parallel("a2a")).__name__ == "dcp_a2a_lse_reduce"
    assert QuireImpl.can_return_lse_for_decode and QuireImpl.supports_mtp_with_cp_non_trivial_interleave_size
    if hasattr(QuireBackend, "supports_dcp"):
        assert QuireBackend.supports_dcp()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of vLLM's workers, which are forked and would inherit "error"
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="needs two GPUs, or none")
def test_two_processes_that_share_contexts_write_the_tokens_of_eager_attention(tmp_path, monkeypatch):
    prepare_two_processes(monkeypatch)
    model = make_model("llama", tmp_path, {"num_key_value_heads": 1})
    ranks = {"tensor_parallel_size": 2, "decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 4}
    generated, _ = serve(tmp_path, max_num_batched_tokens=32, distributed_executor_backend="mp", **ranks)
    assert generated == [[greedy(model, p) for p in prompts()]]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of vLLM's workers, as above
@pytest.mark.skipif(torch.cuda.is_available(), reason="on GPUs the script itself is run; this is a model for a CPU")
def test_the_script_that_measures_compares_tokens_and_times_steps_with_shared_contexts(tmp_path, monkeypatch):
    """Transformers has the same model, from the weights that the script writes."""
    prepare_two_processes(monkeypatch)
    found = importlib.util.spec_from_file_location(
        "measure_vllm", Path(__file__).parents[2] / "scripts/measure_vllm.py"
    )
    script = importlib.util.module_from_spec(found)
    monkeypatch.setitem(sys.modules, "measure_vllm", script)
    found.loader.exec_module(script)
    monkeypatch.setitem(script.MODELS, "small", (script.LLAMA, (64, 96, 2, 4, 1, 97)))
    monkeypatch.setattr(script, "PROMPT", 5)
    monkeypatch.setattr(script, "STEPS", 3)
    run = script.Run(
        "small",
        NAME,
        context=(1, 3),
        greedy=6,
        keys=70,
        weights=2.0,
        tensor_parallel=2,
        dcp=2,
        warm=False,
        together=True,
    )
    script.write_config(str(tmp_path), "small", None)
    script.write_weights(str(tmp_path), "small", None, run.weights)
    options = script.options(run)
    assert options["kv_cache_memory_bytes"] == run.cache_bytes() and options["decode_context_parallel_size"] == 2
    on_a_cpu = {
        "dtype": "float32",
        "enforce_eager": True,
        "compilation_config": {"mode": 0, "custom_ops": ["none"]},
        "kv_cache_memory_bytes": 1 << 28,
        "block_size": 16,
        "max_num_batched_tokens": 32,
        "distributed_executor_backend": "mp",
    }
    llm = vllm.LLM(model=str(tmp_path), **options | on_a_cpu)
    result = list(script.measure(run, llm))[-1]
    llm.llm_engine.engine_core.shutdown()
    model = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    prompts_of_run = [script.tokens(n, i, 97)["prompt_token_ids"] for i, n in enumerate(run.greedy_lengths())]
    for prompt, generated, logprobs in zip(prompts_of_run, result["tokens"], result["logprobs"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        assert generated == logits.argmax(-1).tolist()
        expected = logits.log_softmax(-1).max(-1).values
        torch.testing.assert_close(torch.tensor(logprobs), expected, atol=1e-3, rtol=1e-3)
    assert len({tuple(of_prompt) for of_prompt in result["tokens"]}) > 4  # they depend on the prompt
    assert list(result["context"]) == ["1", "3"] and all(ms > 0 for ms in result["context"].values())
