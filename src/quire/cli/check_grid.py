"""`quire check --grid`: compare cases that are drawn at random with the float64 oracle.

They are the cases of `quire bench run --grid` with the same seed, but in several dtypes, and smaller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quire.api import attention
from quire.cli.check_lines import Check, as_check, name_of, plan_for
from quire.dispatch.device import interprets
from quire.drawn import Drawn, Limits, draw
from quire.spec import AttentionSpec
from quire.testing import Problem, error_budget, make_problem

# The oracle computes one head at a time in float64. In the interpreter a program takes ten milliseconds.
ON_A_GPU = Limits(num_seqs=24, queries=2048, context=20_000, nbytes=32 << 20, flops=2 * 10**10)
ON_A_CPU = Limits(num_seqs=8, queries=128, context=2000, nbytes=8 << 20, flops=5 * 10**8)
IN_THE_INTERPRETER = Limits(num_seqs=3, queries=24, context=200, nbytes=2 << 20, flops=10**7)


def draw_problems(
    count: int,
    seed: int,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    latents: bool = False,
    kv_format: str | None = None,
) -> list[Drawn]:
    """Return the cases of a seed, small enough for the oracle on a device, in these dtypes by turns."""
    limits = IN_THE_INTERPRETER if interprets() else ON_A_GPU if device.type == "cuda" else ON_A_CPU
    cases = enumerate(draw(count, seed, limits, latents, kv_format))
    return [replace(case, spec=in_dtype(case.spec, dtypes[i % len(dtypes)])) for i, case in cases]


def in_dtype(spec: AttentionSpec, dtype: torch.dtype) -> AttentionSpec:
    """Return a spec with queries of this dtype, and a cache of it unless that is quantised."""
    return replace(spec, dtype=dtype, kv_dtype=dtype if spec.kv_dtype is spec.dtype else spec.kv_dtype)


def compile_all(cases: Sequence[Drawn]) -> Iterator[int]:
    """Fill Triton's cache for these cases on the current GPU, with all cores; yield how many launches are done."""
    from quire import targets  # here, since it needs Triton

    launches = [
        targets.Launch(case.spec, len(case.lens), **case.bounds, page_size=case.page_size, return_lse=True)
        for case in cases
    ]
    yield 0
    for done, _ in enumerate(targets.compile_all(launches, targets.current_target()), start=1):
        yield done


def check_all(cases: Sequence[Drawn], device: torch.device) -> Iterator[Check]:
    """Check cases; one that raises is a check that failed, with the reason."""
    for case in cases:
        try:
            yield check_case(case, device)
        except Exception as error:  # Triton's compiler raises many kinds
            first = next(iter(str(error).splitlines()), "")
            yield Check(
                "attention", name_of(case.spec.dtype), case.name, None, None, False, f"{type(error).__name__}: {first}"
            )


def check_case(case: Drawn, device: torch.device) -> Check:
    """Compare the result of one case with the oracle."""
    problem = problem_of(case, device)
    chosen = plan_for(problem)
    state = attention(problem.q, problem.cache, chosen, **problem.tables, return_lse=True)
    return as_check(f"attention ({chosen.kernel})", problem.spec.dtype, case.name, error_budget(problem, state))


def problem_of(case: Drawn, device: torch.device) -> Problem:
    """Return the problem of a case, whose memory that may not be read is poisoned."""
    one_query = case.bounds["max_query_len"] == 1
    problem = make_problem(case.spec, case.lens, page_size=case.page_size, one_query=one_query, device=device)
    sinks = None if problem.sinks is None else problem.sinks.to(case.spec.dtype)  # as they are compiled for
    return replace(problem, sinks=sinks)
