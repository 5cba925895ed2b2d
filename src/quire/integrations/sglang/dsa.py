"""SGLang's backend of attention to chosen keys (DSA), whose kernels are Quire's: `QUIRE_SGLANG_DSA=1`.

SGLang's models ask for the backend by its name, "dsa", and it prepares what indexers need. So Quire takes the place of
the functions that attend, and of the schedules of FlashMLA: those of `--dsa-prefill-backend` and
`--dsa-decode-backend` flashmla_sparse, flashmla_kv, triton_sparse_mla and tilelang. No head is padded.
"""

from typing import Any

import torch

from quire.integrations import flash_mla
from quire.integrations.sglang import contract

dsa: Any = contract.load("sglang.srt.layers.attention.dsa_backend")


class QuireDsaBackend(dsa.DeepseekSparseAttnBackend):
    """Attention of all layers of one model runner."""

    def _forward_flashmla_sparse(
        self,
        q_all: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        kv_cache: torch.Tensor,  # [num_slots, 1, head_dim]
        v_head_dim: int,
        page_table_1: torch.Tensor,  # [num_tokens, topk] int32, slots
        sm_scale: float,
        topk_length: torch.Tensor | None = None,  # [num_tokens] int32
        attn_sink: torch.Tensor | None = None,  # [num_heads]
    ) -> torch.Tensor:
        """Attend to slots of a cache in 16 bits."""
        if topk_length is not None and topk_length.shape[0] != q_all.shape[0]:
            topk_length = None  # as SGLang has it: slots after a list's end are -1
        lists = page_table_1[:, None]
        latents = kv_cache.view(-1, 1, kv_cache.shape[-1])
        return flash_mla.flash_mla_sparse_fwd(q_all, latents, lists, sm_scale, v_head_dim, attn_sink, topk_length)[0]

    def _forward_triton_sparse_mla(self, *args: Any, **others: Any) -> torch.Tensor:
        return self._forward_flashmla_sparse(*args, **others)

    def _forward_tilelang(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        page_table_1: torch.Tensor,
        sm_scale: float,
    ) -> torch.Tensor:
        return self._forward_flashmla_sparse(q_all, kv_cache, v_head_dim, page_table_1, sm_scale)

    def _forward_flashmla_kv(
        self,
        q_all: torch.Tensor,
        kv_cache: torch.Tensor,
        v_head_dim: int,
        sm_scale: float,
        layer: Any,
        metadata: Any,
        page_table_1: torch.Tensor,
    ) -> torch.Tensor:
        """Attend to slots of a cache of records; one in 16 bits is read as it is."""
        if not self.dsa_kv_cache_store_fp8:
            return self._forward_flashmla_sparse(q_all, kv_cache, v_head_dim, page_table_1, sm_scale)
        out, _ = flash_mla.flash_mla_with_kvcache(
            q_all.view(-1, 1, layer.tp_q_head_num, layer.head_dim),
            kv_cache.view(-1, self.physical_page_size, 1, self.kv_cache_dim),
            None,
            None,
            v_head_dim,
            softmax_scale=sm_scale,
            indices=page_table_1[:, None],
            kv_format=self.flashmla_kv_format,
        )
        return out

    def _compute_flashmla_metadata(self, cache_seqlens: torch.Tensor, seq_len_q: int) -> Any:
        """Return a schedule that nothing reads."""
        metadata, num_splits = flash_mla.get_mla_decoding_metadata(cache_seqlens, seq_len_q, 1)
        return dsa.DSAFlashMLAMetadata(flashmla_metadata=metadata, num_splits=num_splits)
