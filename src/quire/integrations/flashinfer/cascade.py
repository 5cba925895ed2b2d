"""States over parts of the keys under FlashInfer's names: their merge, and attention over shared prefixes."""

import torch

import quire
from quire import State, UnsupportedError
from quire.integrations.arguments import as_int, check_no_overlap, check_tensor, shown
from quire.integrations.flashinfer.arguments import is_alibi
from quire.integrations.flashinfer.planned import LOG2E
from quire.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.tables import CASCADE, SEVERAL_STATES, STATES

MOST_LEVELS = 256


@STATES.accepts("v_a, s_a, v_b, s_b")
def merge_state(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys into attention over both.

    Returns:
        The output and the float32 lse, in base 2, over all keys.
    """
    sizes = check_state(a, "v_a", "s_a")
    check_state(a, "v_b", "s_b", **sizes)
    return merge([(a.v_a, a.s_a), (a.v_b, a.s_b)])


@STATES.accepts("v, s, v_other, s_other, mask=None")
def merge_state_in_place(a: Arguments) -> None:
    """Merge a state over other keys into one, in place."""
    v, s, mask = a.v, a.s, a.mask
    sizes = check_state(a, "v", "s")
    check_state(a, "v_other", "s_other", **sizes)
    if mask is not None:
        check_tensor("mask", mask, v.device, seq_len=sizes["seq_len"])
        if mask.is_complex():
            raise TypeError(f"mask must be bool, got {mask.dtype}; it says which rows to merge")
    check_no_overlap("v", v)
    check_no_overlap("s", s)
    merged, lse = merge([(v, s), (a.v_other, a.s_other)])
    if mask is not None:
        rows = mask.bool()[:, None]
        merged, lse = torch.where(rows[..., None], merged, v), torch.where(rows, lse, s)
    v.copy_(merged)
    s.copy_(lse)


@SEVERAL_STATES.accepts("v, s")
def merge_states(a: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over any number of disjoint sets of keys.

    Returns:
        The output [seq_len, num_heads, head_dim] and the float32 lse [seq_len, num_heads], in base 2, over all keys.
    """
    sizes = check_state(a, "v", "s", seq_len=None, num_states=None, num_heads=None, head_dim=None)
    if sizes["num_states"] == 0:
        raise ValueError("v must hold at least one state, got none; an empty set of keys has lse -inf")
    return merge(list(zip(a.v.unbind(1), a.s.unbind(1), strict=True)))


def check_state(a: Arguments, v_name: str, s_name: str, **sizes: int | None) -> dict[str, int | None]:
    """Return the sizes of an output, or raise unless they are these, and its lse, of real numbers, fits."""
    v, s = getattr(a, v_name), getattr(a, s_name)
    sizes = sizes or {"seq_len": None, "num_heads": None, "head_dim": None}
    sizes = dict(zip(sizes, check_tensor(v_name, v, None, **sizes), strict=True))
    check_tensor(s_name, s, v.device, **{name: size for name, size in sizes.items() if name != "head_dim"})
    if not s.is_floating_point():
        raise TypeError(f"{s_name} must be float32, got {s.dtype}; it is an lse in base 2")
    return sizes


def merge(states: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge states whose lse is in base 2."""
    out, lse = quire.merge_states([State(v, s.float() / LOG2E) for v, s in states])
    return out, lse.mul_(LOG2E)


class MultiLevelCascadeAttentionWrapper:
    """Attend to prefixes that several sequences share, each once, and to the sequences' own pages.

    Every level is a batch over the same queries. The last level is causal if `plan` says so; at the others every query
    sees all keys.
    """

    @CASCADE.accepts(
        "num_levels, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf_arr=None, "
        "paged_kv_indptr_buf_arr=None, paged_kv_indices_buf_arr=None, paged_kv_last_page_len_buf_arr=None"
    )
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        num_levels = as_int("num_levels", a.num_levels, least=1, most=MOST_LEVELS)
        self._use_cuda_graph: bool = a.use_cuda_graph
        names = "qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len"
        buffers = {f"{name}_buf_arr": getattr(a, f"{name}_buf_arr") for name in names}
        by_level = _by_level(num_levels, **buffers) if a.use_cuda_graph else [(None,) * 4] * num_levels
        self._levels = [
            BatchPrefillWithPagedKVCacheWrapper(a.float_workspace_buffer, a.kv_layout, a.use_cuda_graph, *level)
            for level in by_level
        ]

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether `plan` writes into fixed buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor] | None = None
    ) -> None:
        """Take the device from a workspace buffer; Quire needs no memory from it."""
        for level in self._levels:
            level.reset_workspace_buffer(float_workspace_buffer)

    @CASCADE.accepts(
        "qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len, num_qo_heads, "
        "num_kv_heads, head_dim, page_size, causal=False, pos_encoding_mode='NONE', use_fp16_qk_reduction=False, "
        "sm_scale=None, window_left=-1, logits_soft_cap=None, rope_scale=None, rope_theta=None, "
        "q_data_type='float16', kv_data_type=None"
    )
    def plan(self, a: Arguments) -> None:
        """Say which queries and pages each sequence of each level has, and what is computed."""
        given = vars(a).copy()
        names = "qo_indptr_arr", "paged_kv_indptr_arr", "paged_kv_indices_arr", "paged_kv_last_page_len"
        lists = {name: given.pop(name) for name in names}
        given["head_dim_qk"], causal = given.pop("head_dim"), given.pop("causal")
        if is_alibi(a.pos_encoding_mode):
            raise UnsupportedError(
                "pos_encoding_mode must be 'NONE', got 'ALIBI'; levels do not know the distances to each other"
            )
        last = len(self._levels) - 1
        for i, level in enumerate(_by_level(last + 1, **lists)):
            self._levels[i].plan(*level, causal=causal and i == last, **given)

    begin_forward = plan

    @CASCADE.accepts("q, paged_kv_cache")
    def run(self, a: Arguments) -> torch.Tensor:
        """Attend at every level, and merge.

        Returns:
            out like `q`.
        """
        states = [State(*level.run(a.q, a.paged_kv_cache, return_lse=True, lse_base="ln")) for level in self._levels]
        return states[0].out if len(states) == 1 else quire.merge_states(states).out

    forward = run


def _by_level(num_levels: int, **lists: list[torch.Tensor] | None) -> list[tuple[torch.Tensor, ...]]:
    """Return what each level has of these lists, or raise unless all have an entry for each level."""
    for name, entries in lists.items():
        if not isinstance(entries, list | tuple):
            raise TypeError(f"{name} must be a list of tensors, got {shown(entries)}; it has one for each level")
        if len(entries) != num_levels:
            raise ValueError(f"{name} must have {num_levels} tensors, got {len(entries)}; it has one for each level")
    return list(zip(*(entries for entries in lists.values() if entries is not None), strict=True))
