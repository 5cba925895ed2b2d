"""Decode under FlashInfer's names: one query, or a few, for each sequence."""

from quire.integrations.arguments import as_int, shown
from quire.integrations.flash_attn.kvcache import multiples
from quire.integrations.flashinfer.arguments import read_scoring
from quire.integrations.flashinfer.blocks import (
    trtllm_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache_mla,
    xqa_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache_mla,
)
from quire.integrations.flashinfer.planned import OutAndLse, PagedWrapper
from quire.integrations.flashinfer.signatures import Arguments
from quire.integrations.flashinfer.single import single_decode_with_kv_cache
from quire.integrations.flashinfer.tables import COMMON

__all__ = [
    "BatchDecodeWithPagedKVCacheWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "fast_decode_plan",
    "single_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]
FORWARD = (
    "q, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, window_left=-1, "
    "logits_soft_cap=None, sm_scale=None, rope_scale=None, rope_theta=None"
)


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attend from the last query of each sequence, or its last `q_len_per_req`, to its pages."""

    _buffers = "paged_kv_{}_buffer"

    @COMMON.accepts(
        "float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False, "
        "paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, "
        "backend='auto', jit_args=None, jit_kwargs=None"
    )
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        self._set_up(a)
        self._use_tensor_cores: bool = a.use_tensor_cores
        self._q_len_per_req: int | None = None  # until `plan` was called
        self._keep_buffers(a)

    @property
    def use_tensor_cores(self) -> bool:
        """What the wrapper was made with."""
        return self._use_tensor_cores

    @COMMON.accepts(
        "indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode='NONE', "
        "window_left=-1, logits_soft_cap=None, q_data_type='float16', kv_data_type=None, o_data_type=None, "
        "data_type=None, sm_scale=None, rope_scale=None, rope_theta=None, non_blocking=True, block_tables=None, "
        "seq_lens=None, fixed_split_size=None, disable_split_kv=False, q_len_per_req=1, *, window_right=0, "
        "is_causal=None, use_token_head_sf=False"
    )
    def plan(self, a: Arguments) -> None:
        """Say which pages each sequence has, and what is computed; once per step, for all layers.

        Lists may be on the host or on the device, int32 or int64. From a device their largest length is read back, but
        for CUDA graphs, where the buffers are the bound.
        """
        q_len = as_int("q_len_per_req", a.q_len_per_req, least=1)
        for name in ("q_data_type", "kv_data_type"):
            if getattr(a, name) is None:
                setattr(a, name, a.data_type)
        causal = q_len > 1 if a.is_causal is None else a.is_causal
        scoring = read_scoring(a, head_dim_qk=a.head_dim, causal=causal, is_last=q_len == 1)
        lists, most_keys = self._read_pages(a)
        is_first = not self._use_cuda_graph or self._q_len_per_req is None
        if not is_first and self._q_len_per_req != q_len:
            raise ValueError(
                f"q_len_per_req must be {self._q_len_per_req} as at the first plan, got {q_len}; use a wrapper for each"
            )
        batch_size = len(a.last_page_len)
        if q_len > 1 and is_first:
            lists["cu_seqlens_q"] = multiples(batch_size + 1, q_len, self.device)
        self._prepare(a, scoring, (q_len, most_keys), batch_size * q_len, **lists)
        self._q_len_per_req = q_len

    begin_forward = plan

    @COMMON.accepts(
        "q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False, "
        "enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, "
        "skip_softmax_threshold_scale_factor=None, kv_cache_sf=None"
    )
    def run(self, a: Arguments) -> OutAndLse:
        """Attend, for one layer. `window_left` and `q_len_per_req` must be what was planned.

        Returns:
            out like `q`, or (out, lse), the lse in base 2.
        """
        self._planned(a.window_left)
        if a.q_len_per_req is not None and as_int("q_len_per_req", a.q_len_per_req) != self._q_len_per_req:
            raise ValueError(
                f"q_len_per_req must be the planned {self._q_len_per_req}, got {a.q_len_per_req}; pass it to plan"
            )
        return self._attend(a, self._read_cache(a))

    @COMMON.accepts(FORWARD)
    def forward(self, a: Arguments) -> OutAndLse:
        """Attend by these scores and this window, whatever was planned; FlashInfer's old name of `run`."""
        return self._forward(a, return_lse=False)

    @COMMON.accepts(FORWARD)
    def forward_return_lse(self, a: Arguments) -> OutAndLse:
        """Return `forward`'s output and the lse."""
        return self._forward(a, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with `use_cuda_graph=True`."""

    @COMMON.accepts(
        "workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout='NHD', use_tensor_cores=False"
    )
    def __init__(self, a: Arguments) -> None:
        """Make a wrapper."""
        buffers = a.indptr_buffer, a.indices_buffer, a.last_page_len_buffer
        super().__init__(a.workspace_buffer, a.kv_layout, True, a.use_tensor_cores, *buffers)


@COMMON.accepts(
    "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode='NONE', "
    "window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, data_type=None, sm_scale=None, "
    "rope_scale=None, rope_theta=None, non_blocking=True, fixed_split_size=None, disable_split_kv=False, "
    "q_len_per_req=1, global_override_indptr_cpu=None"
)
def fast_decode_plan(a: Arguments) -> None:
    """Plan for decode; engines put it in the place of a wrapper's `plan`, which is as fast.

    Without dtypes, queries are float16.
    """
    given = vars(a).copy()
    wrapper, indptr = given.pop("self"), given.pop("global_override_indptr_cpu")
    if not isinstance(wrapper, BatchDecodeWithPagedKVCacheWrapper):
        raise TypeError(f"self must be a wrapper for decode, got {shown(wrapper)}; bind it with functools.partial")
    if given["q_data_type"] is None and given["data_type"] is None:
        given["q_data_type"] = "float16"
    BatchDecodeWithPagedKVCacheWrapper.plan(wrapper, **given | ({} if indptr is None else {"indptr": indptr}))
