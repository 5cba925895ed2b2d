"""Prefill of multi-head latent attention (MLA): many queries attend to latents expanded to a key and a value per head.

vLLM expands the latents of the step's own tokens, and those of their past chunk by chunk, and merges the parts. A part
is ordinary attention over keys and values. In versions of vLLM that have backends for prefill, `QuirePrefill` is chosen
by `--attention-config.mla_prefill_backend CUSTOM`, with any backend for decoding. In earlier versions it belongs to
Quire's backend of MLA.
"""

from collections.abc import Hashable
from typing import Any, ClassVar

import torch

import quire
from quire import AttentionSpec, PagedKVCache, Plan, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.vllm import contract

contract.check_version()

envs: Any = contract.load("vllm.envs")
PrefillBackend: Any = (
    contract.load("vllm.v1.attention.backends.mla.prefill.base").MLAPrefillBackend
    if contract.has_prefill_backends()
    else object
)
Plans = dict[Hashable, Plan]  # one step's, by the part of its keys


def attend(
    plans: Plans,
    part: Hashable,  # the step's own tokens, or a chunk of their past
    q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
    k: torch.Tensor,  # [num_keys, num_heads, head_dim]
    v: torch.Tensor,  # [num_keys, num_heads, head_dim_v]
    starts: torch.Tensor,  # [num_seqs + 1] int32, of the queries
    key_starts: torch.Tensor,  # [num_seqs + 1] int32
    *,
    scale: float,
    max_query_len: int,
    max_seq_len: int,
    causal: bool,
    return_lse: bool,
    out: torch.Tensor | None = None,  # [num_tokens, num_heads, head_dim_v]
) -> Any:
    """Attend to a part of a step's keys; layers share the step's plans.

    Returns:
        out [num_tokens, num_heads, head_dim_v], and with `return_lse` also the lse [num_heads, num_tokens].
    """
    check_queries(q)
    plan = plans.get(part)
    if plan is None:
        plan = plans[part] = quire.plan(
            expanded_spec(q.shape[1], q.shape[2], v.shape[2], q.dtype, scale, causal),
            quire.Batch.varlen(starts, key_starts),
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            num_tokens=q.shape[0],
            batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
        )
    if not return_lse:
        return quire.varlen_attention(q, k, v, plan, out=out)
    state = quire.varlen_attention(q, k, v, plan, out=out, return_lse=True)
    return state.out, state.lse.transpose(0, 1).contiguous()


def expanded_spec(
    num_heads: int, head_dim: int, head_dim_v: int, dtype: torch.dtype, scale: float, causal: bool
) -> AttentionSpec:
    """Return the spec of attention to expanded latents."""
    return layer_spec(
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        head_dim_v=head_dim_v,
        dtype=dtype,
        softmax_scale=scale,
        causal=causal,
    )


def warmup(
    num_heads: int,
    qk_nope_head_dim: int,
    qk_rope_head_dim: int,
    head_dim_v: int,
    dtype: torch.dtype,
    scale: float,
    device: torch.device,
    bounds: dict[str, Any],
) -> list[str]:
    """Compile what prefill can need: the step's own tokens with and without an lse, and their past."""
    k = torch.empty(1, num_heads, qk_nope_head_dim + qk_rope_head_dim, dtype=dtype, device=device)
    v = torch.empty(1, num_heads, qk_nope_head_dim + head_dim_v, dtype=dtype, device=device)[..., qk_nope_head_dim:]
    expanded = PagedKVCache(k, v, "THD")
    names = []
    for causal, return_lse in ((True, False), (True, True), (False, True)):
        spec = expanded_spec(num_heads, k.shape[2], head_dim_v, dtype, scale, causal)
        names += quire.warmup(spec, expanded, return_lse=return_lse, **bounds)
    return names


class QuirePrefill(PrefillBackend):
    """vLLM's interface of a backend for prefill. Layers share an instance, which knows one step at a time."""

    supported_dtypes: ClassVar = [torch.float16, torch.bfloat16, torch.float32]

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, device_capability: Any) -> bool:
        return device_capability is None or device_capability.major >= 8

    @classmethod
    def supports_mla_dimensions(cls, mla_dimensions: Any) -> bool:
        head_dim = mla_dimensions.qk_nope_head_dim + mla_dimensions.qk_rope_head_dim
        return serves(head_dim, mla_dimensions.v_head_dim)

    def supports_out(self) -> bool:
        return True

    def prepare_metadata(self, prefill_metadata: Any) -> None:
        """Begin a step."""
        super().prepare_metadata(prefill_metadata)
        self.plans: Plans = {}

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads, head_dim]
        k: torch.Tensor,
        v: torch.Tensor,  # [num_tokens, num_heads, head_dim_v]
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> Any:
        """Attend to the step's own tokens, causally."""
        if output_scale is not None:
            raise UnsupportedError(
                "output_scale must be None, got one; "
                "switch off the fusion of attention with quantisation (fuse_attn_quant)"
            )
        step = self._prefill_metadata
        return attend(
            self.plans,
            "new tokens",
            q,
            k,
            v,
            step.query_start_loc,
            step.query_start_loc,
            scale=self.scale,
            max_query_len=step.max_query_len,
            max_seq_len=step.max_query_len,
            causal=True,
            return_lse=return_softmax_lse,
            out=out,
        )

    def run_prefill_context_chunk(
        self, chunk: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor | None = None
    ) -> Any:
        """Attend to a chunk of the past. Every query sees all of it."""
        return attend(
            self.plans,
            chunk.index,
            q,
            k,
            v,
            chunk.query_start_loc,
            chunk.cu_seq_lens,
            scale=self.scale,
            max_query_len=chunk.max_query_len,
            max_seq_len=chunk.max_seq_len,
            causal=False,
            return_lse=True,
            out=out,
        )


def check_queries(q: torch.Tensor, dtype: torch.dtype | None = None) -> None:
    """Raise UnsupportedError for queries in 8 bits, as some models make them for an fp8 cache."""
    if q.dtype.itemsize == 1 or dtype not in (None, q.dtype):
        raise UnsupportedError(
            f"queries must be {dtype or 'in the dtype of the model'}, got {q.dtype}; "
            "leave --kv-cache-dtype out for this model, or Quire"
        )


def serves(head_dim: int, head_dim_v: int) -> bool:
    """Whether Quire attends to keys and values of these widths."""
    try:
        AttentionSpec(num_q_heads=1, num_kv_heads=1, head_dim=head_dim, head_dim_v=head_dim_v)
    except (ValueError, UnsupportedError):
        return False
    return True
