"""vLLM's backend of the layers of MiniMax M3 that choose blocks of keys, for each KV head.

The indexer of each layer writes the blocks that each token sees into a tensor which all layers share, -1 after the
last. Quire's kernels read it, the page table and the cache into which vLLM has written the step's keys, for decodes,
drafts and prompts alike, so that a step has one plan. vLLM scores the blocks and chooses among them.
"""

from typing import Any, ClassVar

import torch

import quire
from quire import AttentionSpec, ChosenKeys, PagedKVCache, Plan, UnsupportedError
from quire.integrations.vllm import contract
from quire.integrations.vllm.backend import QuireImpl, QuireMetadata, QuireMetadataBuilder, base
from quire.integrations.vllm.plans import Kind, Launch

sparse: Any = contract.load(contract.MINIMAX_M3 + ".common.sparse_attention")
forward_context: Any = contract.load("vllm.forward_context")

SERVED = ("auto", "float16", "bfloat16", "fp8", "fp8_e4m3", "fp8_e5m2")  # caches that vLLM fills for these layers


def attend_with_quire(model: Any) -> None:
    """Give the layers of a model that choose blocks Quire's attention, for which they do not ask."""
    on_rocm = contract.load("vllm.platforms").current_platform.is_rocm()
    if on_rocm or not hasattr(sparse, "select_main_backend_and_impl_cls"):
        contract.logger.warning(
            "Quire leaves the layers of MiniMax M3 that choose blocks to vLLM's own attention: it serves them from "
            "vLLM 0.33 on, and not on ROCm"
        )
        return
    for layer in model.modules():
        if isinstance(getattr(layer, "impl", None), sparse.MiniMaxM3SparseImpl):
            layer.attn_backend, layer.impl = QuireM3Backend, QuireM3Impl(layer)


class QuireM3Backend(sparse.MiniMaxM3SparseBackend):
    """What vLLM asks of a layer's backend: the shape of a cache, and the class of its builder."""

    @staticmethod
    def get_name() -> str:
        return contract.backend_name()

    @staticmethod
    def get_impl_cls() -> type["QuireM3Impl"]:
        return QuireM3Impl

    @staticmethod
    def get_builder_cls() -> type["QuireM3MetadataBuilder"]:
        return QuireM3MetadataBuilder


class QuireM3MetadataBuilder(QuireMetadataBuilder):
    """Makes the metadata of a group of layers, and owns their plans and scratch memory."""

    _cudagraph_support: ClassVar[Any] = base.AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """Return which steps graphs serve: those that the indexer's builder serves."""
        return cls._cudagraph_support

    def lists(self, num_tokens: int) -> ChosenKeys:
        """Return the blocks that the indexer writes for the tokens of a step."""
        impl = self.impls[0]
        return ChosenKeys(impl.blocks[:num_tokens], block_size=impl.block_size)

    def kinds(self, spec: AttentionSpec) -> list[Kind]:
        """Return the spec of a layer's plans, and the lists that its batches have."""
        return [(spec, {"chosen": self.lists(1)})]

    def launches(self, spec: AttentionSpec, impl: Any, pages: PagedKVCache) -> list[Launch]:
        """Return what a layer launches."""
        return [(planned, pages, has) for planned, has in self.kinds(spec)]

    def plan(self, step: QuireMetadata, spec: AttentionSpec, num_tokens: int, page_size: int | None) -> Plan:
        """Return a plan for a step: an earlier one if bounds and memory are the same."""
        assert page_size is not None
        return self.plan_for(
            spec,
            step.block_table,
            step.seq_lens,
            None if step.one_query_each else step.query_start_loc,
            page_size=page_size,
            num_tokens=num_tokens,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_seq_len,
            chosen=self.lists(num_tokens),
        )


class QuireM3Impl(QuireImpl):
    """One layer's attention."""

    supports_dcp: bool = False  # the indexer of a rank scores its own keys alone

    def __init__(self, layer: Any) -> None:
        """Take the place of a layer's attention."""
        theirs, kv_cache_dtype = layer.impl, layer.kv_cache_dtype
        if kv_cache_dtype not in SERVED:
            raise UnsupportedError(
                f"kv_cache_dtype must be one of {', '.join(SERVED)} for MiniMax M3, got {kv_cache_dtype}; "
                "leave --attention-backend out for this cache"
            )
        super().__init__(
            theirs.num_heads, theirs.head_size, theirs.scale, theirs.num_kv_heads, kv_cache_dtype=kv_cache_dtype
        )
        self.blocks: torch.Tensor = layer.topk_indices_buffer  # [tokens, num_kv_heads, topk] int32
        self.block_size: int = theirs.block_size

    def should_use_msa_decode(self, layer_name: str) -> bool:
        """Return whether another kernel decodes, of which vLLM's warm-up asks."""
        return False

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        layer: Any,  # vLLM's module
        query: torch.Tensor,  # [num_tokens, num_heads * head_size], padding included
        kv_cache: torch.Tensor,  # the step's keys and values are in it
        output: torch.Tensor,  # like query
        *,
        query_fp8: torch.Tensor | None = None,  # which vLLM makes for one of its own kernels
    ) -> torch.Tensor:
        """Attend to the blocks that the layer's indexer has chosen."""
        steps = forward_context.get_forward_context().attn_metadata
        if not isinstance(steps, dict):  # while memory is measured
            return output
        step = steps[layer.layer_name]
        pages = self.pages if kv_cache is self.bound else self.bind(layer, kv_cache)
        rows, heads = step.num_actual_tokens, (self.num_heads, self.head_size)
        plan = step.plan(self.spec, rows, pages.page_size)
        quire.attention(query[:rows].unflatten(1, heads), pages, plan, out=output[:rows].unflatten(1, heads))
        return output
