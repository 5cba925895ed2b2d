"""vLLM's attention backend: what it serves, a builder that turns a step's metadata into plans, and a layer's two calls.

`plans.py` says which plans are kept, `sharded.py` spreads contexts over ranks, and `mla.py` is the backend of latent
attention (MLA).
"""

from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch

import quire
from quire import AttentionSpec, PagedKVCache, Plan, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.vllm import ahead, contract
from quire.integrations.vllm.plans import Kind, Launch, Planner, bidirectional, one_query_each, shares, unpaged
from quire.integrations.vllm.sharded import ShardedStep, Shares
from quire.integrations.vllm.spans import has_spans, scheduled_spans, see_by_sequence, see_spans, without_window

contract.check_version()

base: Any = contract.load("vllm.v1.attention.backend")  # the abstract classes
quant: Any = contract.load("vllm.model_executor.layers.quantization.utils.quant_utils")

KV_DTYPES = {  # vLLM's names; "auto" is the model's own
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    **contract.TOKEN_SCALES,
}
PAGE_SIZE = 16  # vLLM's own default
QUANTISED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
ENCODERS = (base.AttentionType.ENCODER, base.AttentionType.ENCODER_ONLY)  # their keys are the step's own, in no cache


class QuireBackend(contract.CacheShape, base.AttentionBackend):
    """What vLLM asks before it chooses a backend."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar = ["auto", *KV_DTYPES, *contract.FORMATS]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name() -> str:
        return contract.backend_name()

    @staticmethod
    def get_impl_cls() -> type["QuireImpl"]:
        return QuireImpl

    @staticmethod
    def get_builder_cls() -> type["QuireMetadataBuilder"]:
        return QuireMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        # Any size. Some versions take the least number here for layers with windows, or else the least divisor.
        return [PAGE_SIZE, base.MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        try:
            AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=head_size)
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
        if kv_cache_dtype == contract.BLOCKED and head_size % contract.COLUMNS_OF_SCALE:
            return f"head_size must be a multiple of {contract.COLUMNS_OF_SCALE} for {kv_cache_dtype}, got {head_size}"
        if kv_cache_dtype in contract.FORMATS or KV_DTYPES.get(kv_cache_dtype or "auto", dtype) in (dtype, *QUANTISED):
            return None
        return f"kv_cache_dtype must be auto or fp8 for a model in {dtype}, got {kv_cache_dtype}"

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in list(base.AttentionType)

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True


@dataclass
class QuireMetadata(base.AttentionMetadata):
    """One step of the layers that share a page table."""

    num_reqs: int  # here and below, padding included
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    query_start_loc: torch.Tensor  # [num_reqs + 1] int32
    seq_lens: torch.Tensor  # [num_reqs] int32
    block_table: torch.Tensor  # [num_reqs, max_pages_per_seq] int32
    slot_mapping: torch.Tensor  # [num_tokens] int64
    causal: bool | torch.Tensor  # or [num_reqs] int32, of each sequence
    builder: "QuireMetadataBuilder"
    query_start_loc_cpu: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor | None
    sharded: ShardedStep | None = None  # where ranks share contexts
    num_shared: int = 0  # first keys that all requests share and that are read once
    # By request, the first and the last positions of images. Older vLLM and models write here, by this name.
    mm_prefix_range: dict[int, list[tuple[int, int]]] | None = None
    plans: dict[Any, Any] = field(default_factory=dict)  # by the spec's id: hashing one costs 4 µs, in every layer

    @property
    def one_query_each(self) -> bool:
        """Whether each sequence has one query, so that counts of queries are not needed."""
        return one_query_each(self.query_start_loc_cpu[: self.num_reqs + 1], self.max_query_len, self.num_actual_tokens)

    def plan(self, spec: AttentionSpec, num_tokens: int, page_size: int | None) -> Plan:
        """Return the step's plan for a kind of layer, or for the step's own keys if there is no page size."""
        plan = self.plans.get(id(spec))
        if plan is None:
            plan = self.plans[id(spec)] = self.builder.plan(self, spec, num_tokens, page_size)
        return plan

    def plan_intervals(self, spec: AttentionSpec, num_tokens: int, page_size: int, layer: Any) -> Plan | None:
        """Return a layer's plan for a step in which each query token has an interval of keys; None for other steps.

        Such a step has queries of an image, or some of its sequences are causal and some are not.
        """
        if self.causal is False or (self.causal is True and self.mm_prefix_range is None):
            return None
        clamp = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        key = id(spec), clamp, id(self.mm_prefix_range)
        if key not in self.plans:
            self.plans[key] = self.builder.plan_intervals(self, spec, num_tokens, page_size, clamp)
        return self.plans[key]


class QuireMetadataBuilder(base.AttentionMetadataBuilder[QuireMetadata], Planner):
    """Makes the metadata of a group of layers, and owns their plans and scratch memory."""

    _cudagraph_support: ClassVar[Any] = base.AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Return which steps graphs serve: those with prompts only if these have no images seen in both directions."""
        return base.AttentionCGSupport.UNIFORM_BATCH if has_spans(vllm_config) else cls._cudagraph_support

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.has_spans = has_spans(vllm_config)
        layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        self.impls = [layer.impl for layer in layers]
        group, self.shares = contract.context_group(kv_cache_spec), None
        if group is not None and not all(layer.impl.attn_type in ENCODERS for layer in layers):
            if self.has_spans:
                raise UnsupportedError(
                    "is_mm_prefix_lm must be False where ranks share contexts, got True; "
                    "leave --decode-context-parallel-size out for this model"
                )
            self.supports_update_block_table = False  # a captured graph reads its own builder's lengths
            self.shares = Shares(group, [layer.impl for layer in layers], vllm_config, device)
        self.supports_draft_decode_metadata_update = self.shares is None
        is_plain = self.shares is None and not self.has_spans
        decodes = all(impl.attn_type == base.AttentionType.DECODER for impl in self.impls)
        self.may_share = is_plain and decodes and contract.asks_about_prefixes(vllm_config)
        self.keep_plans(layer_names, vllm_config, device)

    def launches(self, spec: AttentionSpec, impl: Any, pages: PagedKVCache) -> list[Launch]:
        """Return what a layer launches."""
        if self.shares is not None:
            return self.shares.launches(spec, pages)
        writes = impl.attn_type == base.AttentionType.DECODER and impl.kv_sharing_target_layer_name is None
        # What this layer did while memory was measured, others of its kind may not have done.
        quantises = {other.quantises for other in self.impls if other.spec == spec}
        return [
            (planned, pages, {"append": writes, "out_scale": with_scale, **has})
            for with_scale in sorted(quantises)
            for planned, has in self.kinds(spec)
        ] + [(part, pages, {"return_lse": True}) for part in self.parts_of(spec)]

    def parts_of(self, spec: AttentionSpec) -> list[AttentionSpec]:
        """Return the specs of the parts of a layer's plans that share prefixes: for shared keys, and for others."""
        return [replace(spec, causal=False, sinks=False), spec] if self.may_share else []

    def kinds(self, spec: AttentionSpec) -> list[Kind]:
        """Return the specs of a layer's plans, and what their batches have."""
        if self.shares is not None:
            return self.shares.kinds(spec)
        in_spans: list[Kind] = [(without_window(spec), {"intervals": True})] if self.has_spans else []
        return super().kinds(spec) + in_spans

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> QuireMetadata:
        """Return the metadata of a step that is about to be captured."""
        self.compile_ahead(lambda layer: layer.impl.bind(layer, layer.kv_cache), self.combine_once)
        step = self.build(0, common_attn_metadata)
        if step.sharded is not None:
            step.sharded.has_context = True  # replays may have some
        return step

    def combine_once(self) -> list[str]:
        """Attend to two keys with a shared prefix, in batches of both kinds, so that what combines is compiled."""
        names = []
        for spec, layer in self.layers.items() if self.may_share else ():
            impl, pages = layer.impl, layer.impl.bind(layer, layer.kv_cache)
            q = torch.zeros(2, spec.num_q_heads, spec.head_dim, dtype=spec.dtype, device=pages.device)
            ints: dict[str, Any] = {"dtype": torch.int32, "device": pages.device}
            page_size, table = pages.page_size, torch.zeros(2, 2, **ints)
            for starts in (None, torch.arange(3, **ints)):
                batch = quire.Batch(table, torch.full((2,), page_size + 1, **ints), starts)
                lens = {"max_query_len": 1, "max_seq_len": 2 * page_size, "workspace": self.workspace}
                plan = quire.plan(spec, batch, **lens, shared_prefix=page_size)
                quire.attention(q, pages, plan, sinks=impl.sinks)
                names.append("what combines shared keys and others")
        return names

    def use_cascade_attention(self, common_prefix_len: int, query_lens: Any, **others: Any) -> bool:
        """Return whether to read the keys once that all requests of a step share; vLLM then replays no whole graph."""
        if not self.may_share or any(impl.quantises for impl in self.impls):
            return False
        step = len(query_lens), int(query_lens.sum()), int(query_lens.max()), int(common_prefix_len)
        return all(shares(spec, *step, self.workspace_device) for spec in self.layers)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> QuireMetadata:
        """Return a step's metadata: vLLM's, unchanged."""
        self.reserve_workspace()
        common = common_attn_metadata
        if not isinstance(common.causal, bool) and self.shares is not None:
            raise UnsupportedError(
                "causal must be one bool for the whole batch where ranks share contexts, got one for each request; "
                "leave --decode-context-parallel-size out for this model"
            )
        return QuireMetadata(
            num_reqs=common.num_reqs,
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            builder=self,
            query_start_loc_cpu=common.query_start_loc_cpu,
            seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
            mm_prefix_range=getattr(common, "mm_req_doc_ranges", None),
            sharded=None if self.shares is None else self.shares.step(common),
            num_shared=common_prefix_len if self.may_share and common.causal is True else 0,
        )

    def update_block_table(
        self, metadata: QuireMetadata, blk_table: torch.Tensor, slot_mapping: torch.Tensor
    ) -> QuireMetadata:
        """Return the metadata of another group of layers, which differs in its page table."""
        self.reserve_workspace()
        other = copy(metadata)  # its class may be one of vLLM's
        other.block_table, other.slot_mapping, other.builder, other.plans = blk_table, slot_mapping, self, {}
        other.num_shared = 0  # vLLM says it of the first group alone
        return other

    def update_draft_decode_metadata(self, metadata: QuireMetadata) -> None:
        """Refresh a step inside of a graph that drafts several tokens: vLLM has advanced the tensors that it reads.

        vLLM's bound of the keys is that of the last draft.
        """
        for plan in metadata.plans.values():
            if plan is not None:
                plan.update()

    def plan(self, step: QuireMetadata, spec: AttentionSpec, num_tokens: int, page_size: int | None) -> Plan:
        """Return a plan for a step: an earlier one if bounds and memory are the same."""
        starts = None if step.one_query_each else step.query_start_loc
        bounds: dict[str, Any] = {"num_tokens": num_tokens, "max_query_len": step.max_query_len}
        if page_size is None:
            return self.plan_unpaged(spec, step.query_start_loc, step.seq_lens, **bounds)
        bounds |= {"page_size": page_size, "max_seq_len": step.max_seq_len, "num_shared": step.num_shared}
        return self.plan_for(spec, step.block_table, step.seq_lens, starts, **bounds)

    def plan_intervals(
        self, step: QuireMetadata, spec: AttentionSpec, num_tokens: int, page_size: int, clamp: bool
    ) -> Plan | None:
        """Return a new plan for a step whose tokens see keys of their own, or None if there are none."""
        batch = quire.Batch(step.block_table, step.seq_lens, step.query_start_loc)
        if isinstance(step.causal, torch.Tensor):
            seen = see_by_sequence(batch, num_tokens, step.causal, spec.sliding_window)
        else:
            rows = scheduled_spans(step.mm_prefix_range or {}, step.query_start_loc_cpu, step.seq_lens_cpu_upper_bound)
            if not rows:
                return None
            seen = see_spans(batch, num_tokens, rows, spec.sliding_window, clamp)
        return quire.plan(
            without_window(spec),
            seen,
            max_query_len=step.max_query_len,
            max_seq_len=min(step.max_seq_len, step.block_table.shape[1] * page_size),
            num_tokens=num_tokens,
            workspace=self.workspace if self.has_spans else None,  # which is large enough for intervals
            batch_invariant=self.batch_invariant,
        )


class QuireImpl(base.AttentionImpl):
    """One layer's attention."""

    can_return_lse_for_decode: bool = True
    supports_dcp: bool = True
    lse_base_on_e: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = base.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,  # [num_heads]
        **others: Any,
    ) -> None:
        for name, value in others.items():  # arguments that a model passes to backends that know them
            if not (value is None or value is False or (isinstance(value, int) and value == -1)):
                raise UnsupportedError(
                    f"{name} must be left out, got {value}; leave --attention-backend out for this model"
                )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.sliding_window, self.kv_cache_dtype, self.logits_soft_cap = sliding_window, kv_cache_dtype, logits_soft_cap
        self.attn_type, self.kv_sharing_target_layer_name, self.sinks = attn_type, kv_sharing_target_layer_name, sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        dtype = torch.get_default_dtype()  # the model's, while its layers are made
        encodes = attn_type in ENCODERS
        self.kv_dtype = dtype if encodes else KV_DTYPES.get(kv_cache_dtype, dtype)
        self.kv_format = None if encodes else contract.FORMATS.get(kv_cache_dtype)
        self.hands_over = getattr(contract.current_config(), "kv_transfer_config", None) is not None
        self.turn: torch.Tensor | None = None  # how heads are rotated before they are stored, where there is a format
        self.spec = layer_spec(
            num_q_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=head_size,
            dtype=dtype,
            kv_dtype=self.kv_dtype if self.kv_format is None else None,
            kv_format=self.kv_format,
            softmax_scale=self.scale,
            causal=attn_type == base.AttentionType.DECODER,
            sliding_window=sliding_window,
            sliding_window_right=sliding_window - 1 if encodes and sliding_window is not None else None,
            softcap=logits_soft_cap or None,
            alibi=alibi_slopes is not None,
            sinks=sinks is not None,
        )
        self.quantises = False  # whether it was given an output_scale
        self.bound: torch.Tensor | None = None  # the cache that `pages` are a view of
        self.pages: Any = None
        ahead.begin(self, quantised=self.kv_dtype in QUANTISED)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Return whether results are quantised as they are written: to e4m3, by one static scale.

        Where ranks share contexts, vLLM combines results that are not quantised.
        """
        if quant_key.dtype is not torch.float8_e4m3fn or self.dcp_world_size > 1:
            return False
        return quant_key == quant.kFp8StaticTensorSym

    def forward(
        self,
        layer: Any,  # vLLM's module
        query: torch.Tensor,  # [num_tokens, num_heads, head_size], padding included
        key: torch.Tensor | None,  # [num_tokens, num_kv_heads, head_size]; None where another layer writes them
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: QuireMetadata | None,  # None while memory is measured
        output: torch.Tensor,  # like query; of float8_e4m3fn with output_scale
        output_scale: torch.Tensor | None = None,  # one float32 number
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the step's keys and values, unless another layer has written them, and attend."""
        if output_block_scale is not None:
            raise UnsupportedError(
                "output_block_scale must be None, got one; "
                "switch off the fusion of attention with quantisation (fuse_attn_quant)"
            )
        if output_scale is not None:
            self.quantises = True
        if attn_metadata is None:
            return output.fill_(0)
        if self.attn_type in ENCODERS:
            return self.encode(query, key, value, attn_metadata, output, output_scale)
        pages = self.pages if kv_cache is self.bound else self.bind(layer, kv_cache)
        if self.turn is not None:
            return self.attend_rotated(layer, pages, attn_metadata, query, key, value, output, output_scale)
        if attn_metadata.sharded is not None:
            if output_scale is not None:
                raise UnsupportedError(
                    "output_scale must be None where ranks share contexts, got one; "
                    "switch off the fusion of attention with quantisation (fuse_attn_quant)"
                )
            attn_metadata.builder.shares.attend(self, attn_metadata, pages, query, key, value, output)
            return output
        self.attend(layer, pages, attn_metadata, query, key, value, output, output_scale)
        return output

    def attend(
        self,
        layer: Any,
        pages: PagedKVCache,
        attn_metadata: QuireMetadata,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None,
    ) -> None:
        """Write the step's keys and values, unless another layer has written them, and attend in one process."""
        spec = bidirectional(self.spec) if attn_metadata.causal is False and self.spec.causal else self.spec
        plan = attn_metadata.plan_intervals(spec, query.shape[0], pages.page_size, layer)
        plan = plan or attn_metadata.plan(spec, query.shape[0], pages.page_size)
        new: dict[str, Any] = {}
        if self.kv_sharing_target_layer_name is None and key is not None and value is not None:
            slots = attn_metadata.slot_mapping
            new = {"k": key, "v": value, "slot_mapping": slots}
            if self.attn_type == base.AttentionType.ENCODER_DECODER:  # keys of another sequence than the queries'
                quire.write_kv(**cut(new, min(slots.shape[0], key.shape[0])), cache=pages)
                new = {}
            else:
                # Outside of full graphs, there is no slot for padding, which comes last and belongs to no sequence.
                rows = min(slots.shape[0], query.shape[0])
                query, new = query[:rows], cut(new, rows)
        per_head: dict[str, Any] = {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes}
        out = output[: query.shape[0]]
        quire.attention(query, pages, plan, **new, **per_head, out=out, out_scale=output_scale)

    def attend_rotated(
        self,
        layer: Any,
        pages: PagedKVCache,
        attn_metadata: QuireMetadata,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attend with heads that are rotated before they are stored, and rotate the results back."""
        assert self.turn is not None
        if attn_metadata.sharded is not None or output_scale is not None:
            raise UnsupportedError(
                f"kv_cache_dtype must be auto or fp8 where ranks share contexts or outputs are quantised, got "
                f"{self.kv_cache_dtype}; set --kv-cache-dtype fp8"
            )
        key, value = (None if x is None else x @ self.turn for x in (key, value))
        norm, out = self.head_size & -self.head_size, torch.zeros_like(output)
        self.attend(layer, pages, attn_metadata, query @ (self.turn / norm), key, value, out, None)
        output.copy_(out @ (self.turn.T / norm))
        return output

    def do_kv_cache_update(
        self,
        layer: Any,  # vLLM's module
        key: torch.Tensor,  # [num_tokens, num_kv_heads, head_size]
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,  # [num_tokens] int64, -1 for padding
    ) -> None:
        """Write keys and values that no query comes with: of the context, for a model that drafts whole blocks."""
        if kv_cache.numel() == 0:  # while memory is measured
            return
        pages = self.pages if kv_cache is self.bound else self.bind(layer, kv_cache)
        if self.turn is not None:
            key, value = key @ self.turn, value @ self.turn
        new = {"k": key, "v": value, "slot_mapping": slot_mapping}
        quire.write_kv(**cut(new, min(slot_mapping.shape[0], key.shape[0])), cache=pages)

    def encode(
        self, query: torch.Tensor, key: Any, value: Any, step: QuireMetadata, output: torch.Tensor, output_scale: Any
    ) -> torch.Tensor:
        """Attend to the step's own keys, which no cache holds."""
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(query.device)
        plan, out = step.plan(self.spec, query.shape[0], None), output[: query.shape[0]]
        per_head: dict[str, Any] = {"sinks": self.sinks, "alibi_slopes": self.alibi_slopes}
        quire.varlen_attention(query, key, value, plan, **per_head, out=out, out_scale=output_scale)
        return output

    def bind(self, layer: Any, kv_cache: torch.Tensor) -> PagedKVCache:
        """Remember the layer's pages: views of vLLM's tensor, whose fp8 numbers have the dtype of bytes."""
        if self.attn_type in ENCODERS:
            return unpaged(self.spec, layer._k_scale.device)
        if self.kv_format is not None:
            self.bound, self.pages = kv_cache, self.pages_of_format(layer, kv_cache.view(torch.uint8))
            return self.with_slopes(kv_cache.device)
        k, v, layout = contract.keys_and_values(kv_cache.view(self.kv_dtype), self.head_size)
        scales = (layer._k_scale, layer._v_scale) if self.kv_dtype in QUANTISED else (None, None)
        if self.kv_cache_dtype in contract.TOKEN_SCALES:
            scales = contract.scales_of_tokens(kv_cache.view(self.kv_dtype), self.head_size)
        self.bound, self.pages = kv_cache, PagedKVCache(k, v, layout, *scales)
        return self.with_slopes(kv_cache.device)

    def pages_of_format(self, layer: Any, stored: torch.Tensor) -> PagedKVCache:
        """Return the pages of a cache below eight bits.

        Those of nvfp4 are as vLLM has them. In vLLM's pages of int4, each head is followed by its scale, so heads begin
        at any multiple of four bytes, and would be read in pieces of four. So unless pages are handed to other
        programs, the bytes of a page have another order here.
        """
        width = self.head_size // 2
        if self.kv_format == contract.BLOCKED:
            parts = contract.dense_pages(stored, self.num_kv_heads, width)
            if parts is None:
                raise UnsupportedError(
                    f"kv_cache must have dense pages for {self.kv_cache_dtype}, got strides {stored.stride()}; "
                    "set --kv-cache-dtype fp8"
                )
            k, v, *scales = parts
            k_blocks, v_blocks = (x.view(torch.float8_e4m3fn) for x in scales)
            blocks = {"k_block_scale": k_blocks, "v_block_scale": v_blocks}
            return PagedKVCache(k, v, "NHD", layer._k_scale, layer._v_scale, kv_format=self.kv_format, **blocks)
        self.turn = contract.rotation(self.head_size, torch.empty(0, dtype=self.spec.dtype, device=stored.device))
        parts = None if self.hands_over else contract.dense_pages(stored, self.num_kv_heads, width, by_slots=False)
        if parts is None:
            k, v, layout = contract.keys_and_values(stored, width)
            return PagedKVCache(k, v, layout, *contract.scales_of_tokens(stored, width), kv_format=self.kv_format)
        k, v, *scales = parts
        return PagedKVCache(k, v, "NHD", *(x.view(torch.float32)[..., 0] for x in scales), kv_format=self.kv_format)

    def with_slopes(self, device: torch.device) -> PagedKVCache:
        """Return the pages; slopes are on their device then."""
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(device)
        return self.pages


def cut(new: dict[str, torch.Tensor], rows: int) -> dict[str, torch.Tensor]:
    """Return the first rows of tensors."""
    return {name: x[:rows] for name, x in new.items()}
