"""vLLM's backend of multi-head latent attention (MLA): what it serves, a builder, and a layer's calls.

A layer keeps one latent per token: c_kv, followed by k_pe. vLLM multiplies queries by the matrix that would expand
the latents to keys, so that decoding attends to the latents themselves, which all heads share (`forward_mqa`). Prefill
expands them (`prefill.py`). A step's decodes come first, and each may have several queries: drafts, or a short prompt,
for which expanding would cost more than it saves.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch

import quire
from quire import AttentionSpec, PagedKVCache, Plan, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.vllm import contract
from quire.integrations.vllm.plans import Planner, bidirectional, one_query_each
from quire.integrations.vllm.prefill import Plans, QuirePrefill, attend, check_queries, serves, warmup

contract.check_version()

base: Any = contract.load("vllm.v1.attention.backend")
config: Any = contract.load("vllm.config.vllm")
mla: Any = contract.load("vllm.model_executor.layers.attention.mla_attention")

RECORD = "fp8_ds_mla"  # vLLM's name of a latent's record: e4m3 with four scales, and rope columns in bfloat16
KV_DTYPES = {  # vLLM's names; "auto" is the model's own
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    RECORD: torch.float8_e4m3fn,
}
RECORD_BYTES = 656
PREFERRED_PAGE_SIZE = 64  # latents that the Hopper kernel copies at once


class QuireMLABackend(mla.MLACommonBackend):
    """What vLLM asks before it chooses a backend."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    # Versions whose backend also prefills cannot expand the past from records.
    supported_kv_cache_dtypes: ClassVar = [
        "auto",
        *(name for name in KV_DTYPES if name != RECORD or contract.has_prefill_backends()),
    ]

    @staticmethod
    def get_name() -> str:
        return contract.backend_name()

    @staticmethod
    def get_impl_cls() -> type["QuireMLAImpl"]:
        return QuireMLAImpl

    @staticmethod
    def get_builder_cls() -> type["QuireMLAMetadataBuilder"]:
        return QuireMLAMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Return the shape of a layer's cache, which vLLM up to 0.28 asks."""
        return num_blocks, block_size, RECORD_BYTES if cache_dtype_str == RECORD else head_size

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [base.MultipleOf(1)]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return PREFERRED_PAGE_SIZE

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        try:
            latent_spec(1, head_size, min(head_size, 512), 1.0, torch.bfloat16)
        except (ValueError, UnsupportedError):
            return False
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None, *rest: Any
    ) -> str | None:
        if KV_DTYPES.get(kv_cache_dtype or "auto", dtype) not in (dtype, torch.float8_e4m3fn):
            return f"kv_cache_dtype must be auto or fp8 for a model in {dtype}, got {kv_cache_dtype}"
        if kv_cache_dtype == RECORD and head_size != 576:
            return f"kv_cache_dtype must be auto or fp8 for latents of {head_size} columns, got {RECORD}"
        return None

    @classmethod
    def supports_non_causal(cls) -> bool:
        return hasattr(mla.MLACommonMetadataBuilder, "supports_non_causal_multi_token_decode")

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        # Short prompts attend to latents and long ones to expanded keys, which rounds otherwise. vLLM cuts the past of
        # a prompt into chunks whose lengths depend on the other prompts of the step.
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # a plan's bound of queries is the host's


@dataclass(kw_only=True)
class QuireMLADecode(mla.MLACommonDecodeMetadata):
    """The decodes of one step."""

    query_start_loc: torch.Tensor  # [num_decodes + 1] int32
    max_query_len: int
    max_seq_len: int
    one_query_each: bool
    builder: "QuireMLAMetadataBuilder"
    plans: dict[int, Plan] = field(default_factory=dict)  # by the spec's id

    def plan(self, spec: AttentionSpec, num_tokens: int, page_size: int) -> Plan:
        """Return the step's plan for a kind of layer."""
        plan = self.plans.get(id(spec))
        if plan is None:
            plan = self.plans[id(spec)] = self.builder.plan_for(
                spec,
                self.block_table,
                self.seq_lens,
                None if self.one_query_each else self.query_start_loc,
                page_size=page_size,
                num_tokens=num_tokens,
                max_query_len=self.max_query_len,
                max_seq_len=self.max_seq_len,
            )
        return plan


class QuireMLAMetadata(mla.MLACommonMetadata):
    """One step of the layers that share a page table."""

    def __post_init__(self) -> None:
        """Accept latents of any width; vLLM's own check knows those of its backends."""


@dataclass(kw_only=True)
class QuirePrefillMetadata(mla.MLACommonPrefillMetadata):
    """The prefills of one step, where Quire's backend of MLA runs them."""

    plans: Plans = field(default_factory=dict)


class QuireMLAMetadataBuilder(mla.MLACommonMetadataBuilder[QuireMLAMetadata], Planner):
    """Makes the metadata of a group of layers, and owns their plans and scratch memory."""

    _cudagraph_support: ClassVar[Any] = base.AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[Any] = mla.QueryLenSupport.VARLEN
    # Up to 170 queries, expanding the past (2 · 512 · 256 operations per key and head) costs more than it saves
    # (2 · (1088 - 320) for each query).
    reorder_batch_threshold: int = 128
    supports_non_causal_multi_token_decode: ClassVar[bool] = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device, QuireMLAMetadata)
        scheduler = vllm_config.scheduler_config
        most = min(scheduler.max_num_batched_tokens, scheduler.max_num_seqs * self.reorder_batch_threshold)
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1  # else counts of keys follow from others
        self.keep_plans(layer_names, vllm_config, device, most)
        if getattr(self, "prefill_metadata_cls", None) is mla.MLACommonPrefillMetadata:
            self.prefill_metadata_cls = QuirePrefillMetadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Return the metadata of a step that is about to be captured."""
        self.compile_ahead(lambda layer: layer.impl.bind(layer.kv_cache, layer._k_scale), self.compile_prefill)
        return super().build_for_cudagraph_capture(common_attn_metadata)

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Refresh a step inside of a graph that drafts several tokens: vLLM has advanced the tensors that it reads."""
        for plan in () if metadata.decode is None else metadata.decode.plans.values():
            plan.update()

    def compile_prefill(self) -> list[str]:
        """Compile the kernels of prefill, if it is Quire's."""
        impl = next(iter(self.layers.values())).impl
        if not (impl.prefills or isinstance(getattr(self, "_prefill_backend", None), QuirePrefill)):
            return []
        most, least = self.vllm_config.scheduler_config.max_num_batched_tokens, self.reorder_batch_threshold + 1
        bounds = self.bounds | {"max_num_tokens": most, "min_query_len": min(least, most), "min_seq_len": 1}
        dims = impl.qk_nope_head_dim, impl.qk_rope_head_dim, impl.v_head_dim
        return warmup(impl.num_heads, *dims, self.model_config.dtype, impl.scale, self.device, bounds)

    def _build_decode(
        self,
        block_table_tensor: torch.Tensor,  # [num_decodes, max_pages_per_seq] int32
        seq_lens_device: torch.Tensor,  # [num_decodes] int32
        max_seq_len: int,
        query_start_loc_cpu: torch.Tensor,
        query_start_loc_device: torch.Tensor,  # [num_decodes + 1] int32
        num_decode_tokens: int,
        dcp_tot_seq_lens_device: torch.Tensor | None,
        **others: Any,
    ) -> QuireMLADecode:
        """Return the metadata of a step's decodes."""
        self.reserve_workspace()
        num_decodes = seq_lens_device.shape[0]
        longest = int(query_start_loc_cpu.diff().max())  # of the decodes; the step's prefills have more
        max_query_len = max(1, longest, -(-num_decode_tokens // num_decodes))  # a capture may count tokens only
        return QuireMLADecode(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            one_query_each=one_query_each(query_start_loc_cpu[: num_decodes + 1], max_query_len, num_decode_tokens),
            builder=self,
        )


class LatentCache:
    """A part of a layer's attention: its latents, which it writes, as pages.

    A class that has it sets `kv_cache_dtype`, vLLM's name, `kv_dtype`, `kv_lora_rank`, and `bound` to None.
    """

    kv_cache_dtype: str
    kv_dtype: torch.dtype
    kv_lora_rank: int
    bound: torch.Tensor | None  # the cache that `pages` are a view of
    pages: Any = None

    def do_kv_cache_update(
        self,
        kv_c_normed: torch.Tensor,  # [num_tokens, kv_lora_rank], padding included
        k_pe: torch.Tensor,  # [num_tokens, 1, qk_rope_head_dim]
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,  # [num_tokens] int64, -1 for padding
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *others: Any,
    ) -> None:
        """Write the step's latents."""
        if kv_cache.numel() == 0:  # while memory is measured
            return
        pages = self.pages if kv_cache is self.bound else self.bind(kv_cache, k_scale)
        quire.write_latent(kv_c_normed, k_pe, pages, slot_mapping.flatten()[: kv_c_normed.shape[0]])

    def bind(self, kv_cache: torch.Tensor, k_scale: torch.Tensor) -> PagedKVCache:
        """Remember the layer's pages."""
        self.bound, self.pages = kv_cache, self.pages_of(kv_cache, k_scale)
        return self.pages

    def pages_of(self, kv_cache: torch.Tensor, k_scale: torch.Tensor) -> PagedKVCache:
        """Return pages: a view of vLLM's tensor, whose fp8 numbers have the dtype of bytes."""
        if self.kv_cache_dtype == RECORD:
            return PagedKVCache.from_latents(kv_cache.view(torch.uint8), self.kv_lora_rank)
        scale = k_scale if self.kv_dtype == torch.float8_e4m3fn else None
        return PagedKVCache.from_latents(kv_cache.view(self.kv_dtype), self.kv_lora_rank, scale=scale)


class QuireMLAImpl(LatentCache, mla.MLACommonImpl):
    """One layer's attention."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False  # prompts over several ranks (0.33): not run
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
        try:
            mla.MLACommonImpl.__init__(self, num_heads, head_size, scale, num_kv_heads, *rest, **mla_args)
        except RuntimeError as error:
            # Versions without backends for prefill want FlashAttention here, at the end, and Quire does not.
            if contract.has_prefill_backends() or "FlashAttention" not in str(error):
                raise
            self.dcp_world_size = -1  # until vLLM asks for it
        current = config.get_current_vllm_config()
        self.prefills = self.takes_prefill(current.additional_config)
        if self.prefills:
            self._pad_v = False
            self._run_prefill_new_tokens = self.prefill_new_tokens
            self._run_prefill_context_chunk = self.prefill_context_chunk
        self.supports_quant_query_input = False  # queries stay in the model's dtype where the latents are fp8
        dtype = torch.get_default_dtype()  # the model's, while its layers are made
        self.kv_dtype = KV_DTYPES.get(kv_cache_dtype, dtype)
        ranks = current.parallel_config.decode_context_parallel_size  # each has a part of the keys and all their heads
        self.spec = latent_spec(num_heads * ranks, head_size, self.kv_lora_rank, self.scale, dtype, self.kv_dtype)
        self.bound = None

    def takes_prefill(self, additional_config: Any) -> bool:
        """Whether this layer prefills: where vLLM would use FlashAttention, unless the user says otherwise.

        `additional_config={"quire_prefill": False}` leaves prefill to FlashAttention.
        """
        if contract.has_prefill_backends():
            return False
        chosen = getattr(self, "_run_prefill_new_tokens", None)
        wanted = not isinstance(additional_config, dict) or additional_config.get("quire_prefill", True)
        served = serves(self.qk_head_dim, self.v_head_dim)
        return chosen is None or bool(wanted and served and chosen == getattr(self, "_run_prefill_new_tokens_fa", None))

    def forward_mqa(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: Any,
        layer: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend from decodes to the latents, which have the step's own already.

        Args:
            q: [num_tokens, num_heads, kv_lora_rank + qk_rope_head_dim], or its two parts.
            kv_c_and_k_pe_cache: the layer's cache as fp8, a new view in each call; `layer.kv_cache` is the same memory.
            attn_metadata: of the step.
            layer: vLLM's module.

        Returns:
            out [num_tokens, num_heads, kv_lora_rank], and, if vLLM asks for it, the lse [num_tokens, num_heads].
        """
        cached = layer.kv_cache
        pages = self.pages if cached is self.bound else self.bind(cached, layer._k_scale)
        spec = self.spec if getattr(attn_metadata, "causal", True) else bidirectional(self.spec)
        first = q if isinstance(q, torch.Tensor) else q[0]
        check_queries(first, spec.dtype)
        num_tokens = first.shape[0]
        plan = attn_metadata.decode.plan(spec, num_tokens, pages.page_size)
        if self.need_to_return_lse_for_decode:
            state = quire.attention(q, pages, plan, return_lse=True)
            return state.out, state.lse
        return quire.attention(q, pages, plan), None

    def prefill_new_tokens(
        self, prefill: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, return_softmax_lse: bool
    ) -> Any:
        """Attend to the step's own tokens, causally, in versions without backends for prefill."""
        return attend(
            prefill.plans,
            "new tokens",
            q,
            k,
            v,
            prefill.query_start_loc,
            prefill.query_start_loc,
            scale=self.scale,
            max_query_len=prefill.max_query_len,
            max_seq_len=prefill.max_query_len,
            causal=True,
            return_lse=return_softmax_lse,
        )

    def prefill_context_chunk(
        self, prefill: Any, chunk_idx: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> Any:
        """Attend to a chunk of the past, in versions without backends for prefill."""
        past = prefill.chunked_context
        return attend(
            prefill.plans,
            chunk_idx,
            q,
            k,
            v,
            prefill.query_start_loc,
            past.cu_seq_lens[chunk_idx],
            scale=self.scale,
            max_query_len=prefill.max_query_len,
            max_seq_len=past.max_seq_lens[chunk_idx],
            causal=False,
            return_lse=True,
        )


def check_served(
    alibi_slopes: list[float] | None, sliding_window: int | None, logits_soft_cap: float | None, attn_type: str
) -> None:
    """Raise UnsupportedError where a model asks for what attention to latents does not do here."""
    unserved = {"alibi_slopes": alibi_slopes, "sliding_window": sliding_window, "logits_soft_cap": logits_soft_cap}
    for name, value in unserved.items():
        if value:
            raise UnsupportedError(
                f"{name} must be left out in MLA, got {value}; leave --attention-backend out for this model"
            )
    if attn_type != base.AttentionType.DECODER:
        raise UnsupportedError(
            f"attn_type must be decoder, got {base.AttentionType(attn_type).value}; "
            "leave --attention-backend out for this model"
        )


def latent_spec(
    num_heads: int,
    head_dim: int,
    kv_lora_rank: int,
    scale: float,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> AttentionSpec:
    """Return the spec of attention to latents."""
    return layer_spec(
        num_q_heads=num_heads,
        num_kv_heads=1,
        head_dim=head_dim,
        head_dim_v=kv_lora_rank,
        dtype=dtype,
        kv_dtype=kv_dtype,
        softmax_scale=scale,
        latent=True,
    )
