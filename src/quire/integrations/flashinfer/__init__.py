"""FlashInfer's wrappers and functions, with FlashInfer's parameters and semantics.

Names, order and defaults are those of FlashInfer 0.7.4 (github.com/flashinfer-ai/flashinfer); modules have its names
too (`decode`, `prefill`, `cascade`, `page`, `mla`, `sparse`). `tables.py` says of each argument whether it is served.
The lse is in base 2. What is not served is refused by name: some custom masks, rotary embeddings inside attention,
custom kernels, fp8 queries, fp4 caches. Every check runs before anything is written. Arguments that choose among
FlashInfer's kernels are ignored.

Differences from FlashInfer: a row that sees no key has out 0 and lse -inf. Pages may have any size. `plan` needs no
workspace memory. Under `torch.compile` the wrappers break the graph: use `quire.plan`
and `quire.attention` for a full graph.
"""

from quire.integrations.flashinfer.attention import BatchAttention, BatchAttentionWithAttentionSinkWrapper
from quire.integrations.flashinfer.blocks import (
    trtllm_batch_context_with_kv_cache,
    trtllm_batch_decode_with_kv_cache,
    trtllm_batch_decode_with_kv_cache_mla,
    trtllm_ragged_attention_deepseek,
    xqa_batch_decode_with_kv_cache,
    xqa_batch_decode_with_kv_cache_mla,
)
from quire.integrations.flashinfer.cascade import (
    MultiLevelCascadeAttentionWrapper,
    merge_state,
    merge_state_in_place,
    merge_states,
)
from quire.integrations.flashinfer.decode import (
    BatchDecodeWithPagedKVCacheWrapper,
    CUDAGraphBatchDecodeWithPagedKVCacheWrapper,
    fast_decode_plan,
)
from quire.integrations.flashinfer.mla import BatchMLAPagedAttentionWrapper
from quire.integrations.flashinfer.page import (
    append_paged_kv_cache,
    append_paged_mla_kv_cache,
    get_batch_indices_positions,
    get_seq_lens,
)
from quire.integrations.flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper
from quire.integrations.flashinfer.ragged import BatchPrefillWithRaggedKVCacheWrapper
from quire.integrations.flashinfer.single import single_decode_with_kv_cache, single_prefill_with_kv_cache
from quire.integrations.flashinfer.sparse import BlockSparseAttentionWrapper, VariableBlockSparseAttentionWrapper

__all__ = [
    "BatchAttention",
    "BatchAttentionWithAttentionSinkWrapper",
    "BatchDecodeWithPagedKVCacheWrapper",
    "BatchMLAPagedAttentionWrapper",
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "BlockSparseAttentionWrapper",
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper",
    "MultiLevelCascadeAttentionWrapper",
    "VariableBlockSparseAttentionWrapper",
    "append_paged_kv_cache",
    "append_paged_mla_kv_cache",
    "fast_decode_plan",
    "get_batch_indices_positions",
    "get_seq_lens",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "single_decode_with_kv_cache",
    "single_prefill_with_kv_cache",
    "trtllm_batch_context_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache",
    "trtllm_batch_decode_with_kv_cache_mla",
    "trtllm_ragged_attention_deepseek",
    "xqa_batch_decode_with_kv_cache",
    "xqa_batch_decode_with_kv_cache_mla",
]
