"""vLLM's backend of MLA whose indexer chooses keys, as of DeepSeek V3.2: decodes and long prompts alike.

The indexer writes the positions that each token sees into a tensor which all layers share. Quire's kernels read it and
the page table, so that a step has one plan, and no launch turns positions into slots. Prompts of at most as many tokens
as the indexer chooses expand their latents, as without an indexer. Where ranks share a sequence, or a part of the cache
is in host memory, vLLM finds the slots of keys and calls `_forward_mqa_kernel`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

import quire
from quire import AttentionSpec, ChosenKeys, PagedKVCache, Plan
from quire.integrations.flash_mla import sparse_batch
from quire.integrations.vllm import contract
from quire.integrations.vllm.mla import (
    KV_DTYPES,
    LatentCache,
    QuireMLABackend,
    base,
    check_served,
    config,
    latent_spec,
)
from quire.integrations.vllm.plans import Kind, Planner, bidirectional, one_query_each
from quire.integrations.vllm.prefill import check_queries

sparse: Any = contract.load(contract.SPARSE_MLA)
utils: Any = contract.load("vllm.v1.attention.backends.mla.sparse_utils")
groups: Any = contract.load("vllm.v1.attention.backends.mla.index_group")


class QuireSparseMLABackend(QuireMLABackend):
    """What vLLM asks before it chooses a backend."""

    @staticmethod
    def get_impl_cls() -> type["QuireSparseMLAImpl"]:
        return QuireSparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type["QuireSparseMLAMetadataBuilder"]:
        return QuireSparseMLAMetadataBuilder

    @classmethod
    def is_sparse(cls) -> bool:
        return True

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return utils.align_blocks_to_rows(spec)

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False


@dataclass(kw_only=True)
class QuireSparseMLAMetadata(sparse.SparseMLACommonMetadata):
    """One step of the layers that share a page table."""

    builder: Any = None
    query_start_loc_cpu: torch.Tensor | None = None

    def __post_init__(self) -> None:
        """Accept latents of any width; vLLM's own check knows those of its backends."""

    def plan(self, spec: AttentionSpec, lists: torch.Tensor, page_size: int) -> Plan:
        """Return the step's plan for tokens with lists: all of them, or those of the decodes, which come first."""
        num_tokens = lists.shape[0]
        num_seqs = self.num_reqs if num_tokens > self.num_decode_tokens else self.num_decodes
        assert self.query_start_loc_cpu is not None and self.seq_lens is not None
        starts = self.query_start_loc_cpu[: num_seqs + 1]
        longest = max(1, int(starts.diff().max()), -(-num_tokens // num_seqs))  # a capture may count tokens only
        return self.builder.plan_for(
            spec,
            self.block_table[:num_seqs],
            self.seq_lens[:num_seqs],
            None if one_query_each(starts, longest, num_tokens) else self.query_start_loc[: num_seqs + 1],
            page_size=page_size,
            num_tokens=num_tokens,
            max_query_len=longest,
            max_seq_len=self.max_seq_len,
            chosen=ChosenKeys(lists),
        )


class QuireSparseMLAMetadataBuilder(sparse.SparseMLACommonMetadataBuilder[QuireSparseMLAMetadata], Planner):
    """Makes the metadata of a group of layers, and owns their plans and scratch memory."""

    metadata_cls = QuireSparseMLAMetadata
    _cudagraph_support: ClassVar[Any] = base.AttentionCGSupport.UNIFORM_BATCH
    reorder_batch_threshold: int = 128

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(self.reorder_batch_threshold, supports_spec_as_decode=True)
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        self.keep_plans(layer_names, vllm_config, device)

    def kinds(self, spec: AttentionSpec) -> list[Kind]:
        """Return the spec of a layer's plans, and the lists that its batches have."""
        return [(spec, {"chosen": ChosenKeys(torch.zeros(1, self.topk_tokens, dtype=torch.int32, device=self.device))})]

    def _build_req_id_per_token(self, common_attn_metadata: Any) -> torch.Tensor:
        """Return each token's sequence where vLLM finds slots; else memory that nothing reads."""
        if self.dcp_world_size > 1 or self.vllm_config.attention_config.hisparse_config is not None:
            return super()._build_req_id_per_token(common_attn_metadata)
        return self.req_id_per_token_buffer[: common_attn_metadata.num_actual_tokens]

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Return the metadata of a step."""
        self.reserve_workspace()
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        metadata.builder, metadata.query_start_loc_cpu = self, common_attn_metadata.query_start_loc_cpu
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return the metadata of a step that is about to be captured."""
        self.compile_ahead(lambda layer: layer.impl.bind(layer.kv_cache, layer._k_scale))
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Refresh a step inside of a graph that drafts several tokens; kernels read what vLLM has advanced."""


class QuireSparseMLAImpl(LatentCache, sparse.SparseMLACommonImpl):
    """One layer's attention."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    lse_base_on_e: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,  # of a latent
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        **mla_args: Any,
    ) -> None:
        check_served(alibi_slopes, sliding_window, logits_soft_cap, attn_type)
        rest = (None, None, kv_cache_dtype, None, attn_type, kv_sharing_target_layer_name)
        sparse.SparseMLACommonImpl.__init__(self, num_heads, head_size, scale, num_kv_heads, *rest, **mla_args)
        self.supports_quant_query_input = False  # queries stay in the model's dtype where the latents are fp8
        dtype = torch.get_default_dtype()  # the model's, while its layers are made
        self.kv_dtype = KV_DTYPES.get(kv_cache_dtype, dtype)
        ranks = config.get_current_vllm_config().parallel_config.decode_context_parallel_size
        spec = latent_spec(num_heads * ranks, head_size, self.kv_lora_rank, self.scale, dtype, self.kv_dtype)
        # Lists say what is seen. Records are rounded to bfloat16, as in vLLM's own backends.
        self.spec = replace(bidirectional(spec), allow_fp8=spec.kv_dtype is torch.float8_e4m3fn)
        self.bound = None

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the latents whose positions the indexer wrote.

        Args:
            q: [num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim], or its two parts.
            kv_c_and_k_pe_cache: the layer's cache.
            attn_metadata: of the step.
            layer: vLLM's module.

        Returns:
            out [num_tokens, num_heads, kv_lora_rank], and, if vLLM asks for it, the lse [num_tokens, num_heads].
        """
        if self.dcp_world_size > 1 or isinstance(self.index_group, groups.HiSparseMLAIndexGroup):
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        cached = layer.kv_cache
        pages = self.pages if cached is self.bound else self.bind(cached, layer._k_scale)
        first = q if isinstance(q, torch.Tensor) else q[0]
        plan = attn_metadata.plan(self.spec, self.topk_indices_buffer[: first.shape[0]], pages.page_size)
        return self.attend(q, pages, plan)

    def _forward_mqa_kernel(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_cache: torch.Tensor,
        topk_indices: torch.Tensor,  # [num_tokens, topk] int32, rows of the flat cache
        valid_counts: torch.Tensor,  # [num_tokens] int32
        *,
        layer: Any,
        block_size: int,
        is_decode: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to latents that vLLM has found; see `forward_mqa`."""
        rows, _ = utils.flat_kv_row_view(kv_cache, block_size)
        pages = self.pages_of(rows[:, None], layer._k_scale)
        lists = topk_indices[:, None], valid_counts, None, None
        batch = sparse_batch(lists, (topk_indices.shape[0], 1), topk_indices.device)
        num_tokens = topk_indices.shape[0]
        return self.attend(
            q, pages, quire.plan(self.spec, batch, max_query_len=1, max_seq_len=1, num_tokens=num_tokens)
        )

    def attend(self, q: Any, pages: PagedKVCache, plan: Plan) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return out, and the lse if vLLM asks for it."""
        check_queries(q if isinstance(q, torch.Tensor) else q[0], self.spec.dtype)
        if self.need_to_return_lse_for_decode:
            state = quire.attention(q, pages, plan, return_lse=True)
            return state.out, state.lse
        return quire.attention(q, pages, plan), None
