"""Checks of the arguments of `plan`, but for `shared_prefix`."""

from typing import Any

import torch

from quire.batch import Batch, ChosenKeys
from quire.dispatch.config import KernelConfig
from quire.dispatch.device import is_served_by_torch
from quire.dispatch.request import Bounds
from quire.draft_trees import MAX_DRAFTS
from quire.errors import UnsupportedError, check_flag, check_integer, check_served, check_tensor, describe
from quire.kernels.choose import FAMILIES
from quire.spec import UNBOUNDED, AttentionSpec

MAX_SPLITS = 128
MAX_TOKENS = (1 << 31) - 1  # of a batch: cu_seqlens_q is int32
WORKSPACE_ALIGNMENT = 16  # bytes; kernels are compiled for it


def check_plan_arguments(
    spec: AttentionSpec,
    batch: Batch,
    *,
    max_query_len: int,
    max_seq_len: int,
    num_tokens: int | None,
    num_splits: int | None = None,
    config: KernelConfig | None = None,
    batch_invariant: bool = False,
    workspace: torch.Tensor | None = None,
    kernel: str | None = None,
) -> tuple[Bounds, int | None]:
    """Raise unless the arguments of `plan` are sound; return the bounds and num_splits as plain integers.

    Args:
        spec, batch, max_query_len, max_seq_len, num_tokens, num_splits, config, batch_invariant, workspace, kernel:
            as for `quire.plan`.

    Returns:
        The bounds, with num_tokens `num_seqs * max_query_len` where None was given, and num_splits.
    """
    check_spec(spec)
    if not isinstance(batch, Batch):
        raise TypeError(f"batch must be a Batch, got {describe(batch)}; make one from the page table and the lengths")
    check_served("batch", batch.device)
    if spec.latent and not batch.paged:
        raise UnsupportedError(
            "batch must be paged for a spec with latents, got one without pages; give it a page table"
        )
    advice = "pass an upper bound over the batch"
    max_query_len = check_integer("max_query_len", max_query_len, advice, 0, UNBOUNDED)
    max_seq_len = check_integer("max_seq_len", max_seq_len, advice, 0, UNBOUNDED)
    if num_tokens is None:
        num_tokens = min(batch.num_seqs * max_query_len, MAX_TOKENS)
    num_tokens = check_integer("num_tokens", num_tokens, advice, 0, MAX_TOKENS)
    if batch.cu_seqlens_q is None and max_query_len != 1:
        raise ValueError(
            f"max_query_len must be 1 where the batch has no cu_seqlens_q, got {max_query_len}; "
            "say in the batch which queries are whose"
        )
    if batch.max_tokens is not None:
        check_per_token(spec, batch.per_token or "")
        if batch.tree_bits is not None and max_query_len > MAX_DRAFTS:
            raise UnsupportedError(
                f"max_query_len must be at most {MAX_DRAFTS} where the batch has tree_bits, got {max_query_len}; "
                "a word has a bit for each draft of a sequence: put prompts into another batch"
            )
    if batch.chosen is not None:
        check_chosen(spec, batch.chosen)
    if batch.extra_chosen is not None:
        check_extra_chosen(spec, batch.extra_chosen)
    if num_splits is not None:
        num_splits = check_integer("num_splits", num_splits, "leave it out to have it chosen", 1, MAX_SPLITS)
    if config is not None and not isinstance(config, KernelConfig):
        raise TypeError(f"config must be a KernelConfig, got {describe(config)}; leave it out to have it chosen")
    check_flag("batch_invariant", batch_invariant, "pass True for results that do not depend on the rest of the batch")
    if kernel is not None and not isinstance(kernel, str):
        raise TypeError(f"kernel must be the name of a kernel, got {describe(kernel)}; leave it out to have it chosen")
    if kernel is not None and kernel not in FAMILIES:
        names = ", ".join(FAMILIES)
        raise ValueError(f"kernel must be one of {names}, got {describe(kernel)}; leave it out to have it chosen")
    if workspace is not None:
        _check_workspace(workspace, batch.device)
    if is_served_by_torch(batch.device):
        for name, value in (
            ("kernel", kernel),
            ("num_splits", num_splits),
            ("config", config),
            ("batch_invariant", batch_invariant or None),
            ("workspace", workspace if workspace is not None and workspace.numel() else None),
        ):
            if value is not None:
                raise UnsupportedError(
                    f"{name} must be left out for CPU tensors, which PyTorch serves, got {describe(value)}; "
                    "plan for a GPU"
                )
    return Bounds(max_query_len, max_seq_len, num_tokens), num_splits


def check_per_token(spec: AttentionSpec, name: str) -> None:
    """Raise if the spec has a window or ALiBi that conflicts with `name`, the batch's own mask."""
    for window in ("sliding_window", "sliding_window_right"):
        if getattr(spec, window) is not None:
            by_hand = "quire.intervals.sliding_window" if name == "key_begin" else "quire.draft_trees.windowed"
            advice = f"say it by key_begin, for which there is {by_hand}"
            if name == "chosen":
                advice = "leave keys outside of the window out of the lists"
            raise ValueError(
                f"{window} must be left out where the batch has {name}, got {getattr(spec, window)}; {advice}"
            )
    if name == "tree_bits" and spec.has_bounds:
        raise UnsupportedError(
            f"mask must have no bounds where the batch has tree_bits, got {spec.mask} with some; leave them out"
        )
    if name == "tree_bits" and spec.alibi:
        raise UnsupportedError(
            "alibi must be False where the batch has tree_bits, got True; drafts that branch share positions"
        )


def check_chosen(spec: AttentionSpec, chosen: ChosenKeys) -> None:
    """Raise if a batch's lists of chosen keys do not fit the spec."""
    if chosen.num_lists not in (1, spec.num_kv_heads):
        raise ValueError(
            f"chosen must have one list a token, or one for each of {spec.num_kv_heads} KV heads, "
            f"got {chosen.num_lists}; slice the lists to this rank's heads"
        )
    if chosen.are_slots and spec.causal:
        raise ValueError(
            "causal must be False where chosen has slots, which have no positions, got True; "
            "leave keys that are not seen out of the lists"
        )
    for name in ("score", "mask"):
        if getattr(spec, name) is not None:
            raise UnsupportedError(
                f"{name} must be None where the batch has chosen, got {getattr(spec, name)}; lists say which keys are "
                "seen, and leave no positions to functions"
            )
    if spec.alibi:
        raise UnsupportedError(
            "alibi must be False where the batch has chosen, got True; no model has both: leave out the slopes"
        )


def check_extra_chosen(spec: AttentionSpec, extra: ChosenKeys) -> None:
    """Raise if a batch's lists of keys in a second cache do not fit the spec."""
    if not spec.latent:
        raise UnsupportedError(
            "extra_chosen must be left out for keys and values that aren't latents, got some; no model has both: merge "
            "two calls with quire.merge_states"
        )
    if extra.num_lists != 1:
        raise ValueError(f"extra_chosen must have one list a token, got {extra.num_lists}; latents have one KV head")


def _check_workspace(workspace: Any, device: torch.device) -> None:
    advice = "allocate it with torch.zeros(quire.workspace_size(...), dtype=torch.uint8, device=...)"
    check_tensor("workspace", workspace, advice)
    if workspace.dtype is not torch.uint8 or workspace.dim() != 1 or not workspace.is_contiguous():
        raise ValueError(
            f"workspace must be uint8, contiguous and of one dimension, got {describe(workspace)} with strides "
            f"{workspace.stride()}; {advice}"
        )
    if workspace.device != device:
        raise ValueError(f"workspace must be on the batch's device {device}, got {workspace.device}; {advice}")
    if workspace.data_ptr() % WORKSPACE_ALIGNMENT:
        raise ValueError(
            f"workspace must be aligned to {WORKSPACE_ALIGNMENT} bytes, got address {workspace.data_ptr():#x}; {advice}"
        )


def check_spec(spec: Any) -> None:
    """Raise unless a value is a spec."""
    if not isinstance(spec, AttentionSpec):
        raise TypeError(f"spec must be an AttentionSpec, got {describe(spec)}; make one for the layer")
