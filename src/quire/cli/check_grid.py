"""`quire check --grid`: compare cases that are drawn at random with the float64 oracle.

They are the cases of `quire bench --grid` with the same seed, but in several dtypes, and smaller.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from quire.api import attention
from quire.bench.case import Case
from quire.bench.grid import Limits, draw
from quire.cli.check_lines import Check, as_check, name_of, plan_for
from quire.dispatch.device import interprets
from quire.testing import Problem, error_budget, make_problem

# The oracle computes one head at a time in float64. In the interpreter a program takes ten milliseconds.
ON_A_GPU = Limits(num_seqs=24, queries=2048, context=20_000, nbytes=32 << 20, flops=2 * 10**10)
ON_A_CPU = Limits(num_seqs=8, queries=128, context=2000, nbytes=8 << 20, flops=5 * 10**8)
IN_THE_INTERPRETER = Limits(num_seqs=3, queries=24, context=200, nbytes=2 << 20, flops=10**7)


def draw_problems(count: int, seed: int, device: torch.device, dtypes: Sequence[torch.dtype]) -> list[Case]:
    """Return the cases of a seed, small enough for the oracle on a device, in these dtypes by turns."""
    limits = IN_THE_INTERPRETER if interprets() else ON_A_GPU if device.type == "cuda" else ON_A_CPU
    cases = draw(count, seed, limits)
    return [replace(case, dtype=name_of(dtypes[i % len(dtypes)])) for i, case in enumerate(cases)]


def compile_all(cases: Sequence[Case]) -> Iterator[int]:
    """Fill Triton's cache for these cases on the current GPU, with all cores; yield how many launches are done."""
    from quire import targets  # here, since it needs Triton

    launches = [
        targets.Launch(case.spec, len(case.lens), **case.bounds, page_size=case.page_size, return_lse=True)
        for case in cases
    ]
    yield 0
    for done, _ in enumerate(targets.compile_all(launches, targets.current_target()), start=1):
        yield done


def check_all(cases: Sequence[Case], device: torch.device) -> Iterator[Check]:
    """Check cases; one that raises is a check that failed, with the reason."""
    for case in cases:
        try:
            yield check_case(case, device)
        except Exception as error:  # Triton's compiler raises many kinds
            first = next(iter(str(error).splitlines()), "")
            yield Check("attention", case.dtype, case.name, None, None, False, f"{type(error).__name__}: {first}")


def check_case(case: Case, device: torch.device) -> Check:
    """Compare the result of one case with the oracle."""
    problem = problem_of(case, device)
    chosen = plan_for(problem)
    state = attention(problem.q, problem.cache, chosen, **problem.tables, return_lse=True)
    return as_check(f"attention ({chosen.kernel})", problem.spec.dtype, case.name, error_budget(problem, state))


def problem_of(case: Case, device: torch.device) -> Problem:
    """Return the problem of a case, whose memory that may not be read is poisoned."""
    one_query = case.bounds["max_query_len"] == 1
    problem = make_problem(case.spec, case.lens, page_size=case.page_size, one_query=one_query, device=device)
    sinks = None if problem.sinks is None else problem.sinks.to(case.spec.dtype)  # as they are compiled for
    return replace(problem, sinks=sinks)
