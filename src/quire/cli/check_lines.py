"""The lines that `quire check` prints, and how a problem is planned for them."""

from dataclasses import dataclass
from typing import Unpack

import torch

from quire.batch import Batch
from quire.cli.check_features import PlanOptions
from quire.plan import Plan, plan
from quire.testing import Problem, Verdict

FEATURE_WIDTH = 34  # columns


@dataclass(frozen=True)
class Check:
    """One line of the table.

    Attributes:
        kernel: what was checked.
        dtype: of the queries.
        feature: what was asked of it.
        error: largest absolute error of out; None where there is no result.
        over_budget: largest error over its budget, of out and of lse; None where there is no result.
        passed: whether that is at most 1.
        why: why there is no result.
    """

    kernel: str
    dtype: str
    feature: str
    error: float | None
    over_budget: float | None
    passed: bool
    why: str | None = None


def line_of(check: Check, width: int = FEATURE_WIDTH) -> str:
    """Return a check as a line of the table, whose features are `width` columns wide."""
    if check.error is None or check.over_budget is None:
        return f"{check.kernel:20} {check.dtype:9} {check.feature:{width}} {'':19}  FAIL: {check.why}"
    numbers = f"{check.error:9.1e} {check.over_budget:9.0%}  {'pass' if check.passed else 'FAIL'}"
    return f"{check.kernel:20} {check.dtype:9} {check.feature:{width}} {numbers}"


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


def as_check(kernel: str, dtype: torch.dtype, feature: str, verdict: Verdict) -> Check:
    """Turn a verdict into a line of the table."""
    over_budget = max(verdict.out, verdict.lse or 0.0)
    return Check(kernel, name_of(dtype), feature, verdict.error, over_budget, verdict.passed)


def plan_for(problem: Problem, batch: Batch | None = None, **options: Unpack[PlanOptions]) -> Plan:
    """Plan for a problem, or for another batch within its bounds."""
    bounds = problem.bounds
    return plan(
        problem.spec,
        problem.batch if batch is None else batch,
        max_query_len=bounds["max_query_len"],
        max_seq_len=bounds["max_seq_len"],
        num_tokens=bounds["num_tokens"],
        **options,
    )
