"""Quire itself, and its naive kernel."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch

import quire
from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import refuse, refuse_other_values

MAX_NAIVE_FLOPS = 5e10  # for which the naive kernel takes 20 ms (NVIDIA H200, 2026-11-21)


def quire_calls(inputs: Inputs, out: torch.Tensor, **options: Any) -> Planner:
    """Call Quire; `options` are those of `quire.plan`. What the case shares is shared, unless they say otherwise."""
    options = {"shared_prefix": inputs.case.shared_prefix or None} | options
    workspace: torch.Tensor | None = None  # of the first plan; all plans share it, since no two run at the same time

    def plan(table: torch.Tensor) -> Call:
        nonlocal workspace
        made = inputs.plan(table, workspace=workspace, **options)
        if workspace is None:
            workspace = made.workspace
        if inputs.case.packed:
            return partial(quire.varlen_attention, inputs.q, *inputs.packed(table), made, out=out)
        return partial(quire.attention, inputs.q, inputs.cache_of(table), made, **inputs.arguments, out=out)

    return plan


def quire_with_config(inputs: Inputs, out: torch.Tensor, **fields: int | bool) -> Planner:
    """Call Quire's portable kernels, with some fields of the chosen configuration replaced."""
    launch: Any = inputs.plan(inputs.tables[0], kernel="portable").launch
    return quire_calls(inputs, out, config=replace(launch.config, **fields))


def quire_with_fp8_products(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call Quire with products in fp8 allowed, where its kernel for latents has them."""
    launch: Any = inputs.plan(inputs.tables[0], allow_fp8=True).launch
    refuse(not getattr(launch, "fp8_mma", False), "has no products in fp8 for it")
    return quire_calls(inputs, out, allow_fp8=True)


def naive_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    spec, case = inputs.case.spec, inputs.case
    refuse(case.flops > MAX_NAIVE_FLOPS, "too slow to wait for")
    refuse(spec.sinks or spec.sliding_window is not None or spec.kv_dtype != spec.dtype, "serves causal attention only")
    refuse(spec.softcap is not None, "serves causal attention only")
    refuse_other_values(spec)
    from quire_tools.bench.naive import naive_attention, owners  # which needs Triton, as the help of commands does not

    seq_of, pos_of = owners(case.query_lens, case.seq_lens, inputs.q.device)

    def plan(table: torch.Tensor) -> Call:
        return partial(naive_attention, inputs.q, inputs.cache, table, seq_of, pos_of, spec.softmax_scale, out)

    return plan
