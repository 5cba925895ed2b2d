"""Quire as an attention implementation of Hugging Face Transformers.

Call `use(model)`, or pass `attn_implementation=install()` when loading.

Scheduling, continuous batching, sampling and prefix reuse stay Transformers'. Its continuous batching gives an
attention function the new keys and values, the cache, and for each sequence either the list of token slots to read (a
page table of page size 1) or, in steps that only decode on a GPU, a table of pages. Quire writes the new tokens into
their slots and attends through the list or the table in place, for prefill as for decode. Nothing is gathered.

From 5.24 on, a layer gives its keys to `PagedAttentionCache.update`, which writes them and gathers all keys, before
attention. `install` replaces that method for models that use Quire: theirs returns the new keys as they are, and passes
the cache on to the attention function, which then gets what it got before 5.24.

Sliding-window layers keep a ring of the last tokens. Writing first would overwrite keys that the early queries of a
chunk still need. There the past in the ring and the step's own tokens are two states over disjoint keys: attend to
both, merge, then write.

Models with multi-head latent attention (DeepSeek-V2 and V3) expand their latents before they attend. Their keys are
wider than their values, and both are wider than `config.head_dim`, which sizes the engine's cache. `use` sets it to the
wider of the two. The other takes the first columns of its slot.

`transformers serve` accepts only the attention implementations of a fixed list and kernels of the hub, so it cannot use
Quire. Serve through `model.init_continuous_batching` instead.
"""

from typing import Any

import torch
from packaging.version import Version

from quire.version import packages_of

try:
    import transformers
except ModuleNotFoundError as error:
    if error.name != "transformers":
        raise
    raise ModuleNotFoundError(
        "quire.integrations.transformers needs transformers, which is not installed; "
        f"pip install {packages_of('transformers')}",
        name="transformers",
    ) from None
from transformers import AttentionInterface, AttentionMaskInterface

import quire
from quire import AttentionSpec, Batch, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.arguments import shown
from quire.integrations.engine import START
from quire.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
from quire.integrations.flash_attn.kvcache import contiguous_last
from quire.integrations.transformers.batching import (
    CACHE,
    Call,
    Step,
    attend,
    engine_of,
    last_plan,
    remember,
    take_updates,
)

__all__ = ["attention_forward", "install", "last_plan", "use"]

SUPPORTED = (Version("5.17"), Version("5.25"))  # from, and before
NO_PREFIX = Version("5.19")  # from here on, names of paged implementations have no prefix `paged|`
UPDATES = Version("5.24")  # from here on, layers call the cache's `update` themselves
# Transformers gives CUDA graphs and decoding by page tables to names that contain "flash" and, after it, a 2 or 3.
NAME = "quire_flash_2"
# Tensors among the keyword arguments of a forward pass that say nothing new, or that the mask is made of.
KNOWN = (
    "position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k", "seq_idx", "num_items_in_batch", "input_ids",
    "inputs_embeds", "labels", "token_type_ids", "mm_token_type_ids",
)  # fmt: skip
# Arguments that some models pass to their attention, and that change its result.
UNSERVED = ("position_bias", "indices", "block_indices", "sinks")


def install() -> str:
    """Register Quire with Transformers' attention and mask interfaces. Calling it again changes nothing.

    Returns:
        The name to pass as `attn_implementation`, or to `model.set_attn_implementation`.

    Raises:
        UnsupportedError: this version of Transformers is outside the supported range.
    """
    version = Version(transformers.__version__)
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise UnsupportedError(
            f"transformers must be from {SUPPORTED[0]} to before {SUPPORTED[1]}, got {version}; "
            "install a version in that range"
        )
    name = NAME if version >= NO_PREFIX else f"paged|{NAME}"
    AttentionInterface.register(name, attention_forward)
    AttentionMaskInterface.register(name, unserved_mask)
    seed_lazy_import(name)
    if version >= UPDATES:
        take_updates(name)
    return name


def use(model: transformers.PreTrainedModel) -> str:
    """Install Quire and set it on a loaded model.

    Some models (gpt-oss) list the implementations with "flash" in their names that may serve them, and replace any
    other without an error. Quire serves attention sinks, so its name is added to the list. In a model with latent
    attention `config.head_dim` becomes the width of the keys, or of wider values, which continuous batching needs.

    Args:
        model: a decoder-only model that continuous batching runs.

    Returns:
        The implementation's name.

    Raises:
        TypeError: `model` is not a model of Transformers.
        UnsupportedError: this version of Transformers is outside the supported range; or the model computes attention
            without Transformers' interface (Bloom, MPT, Falcon), or to keys that it selects (DeepSeek-V3.2, Doge).
    """
    if not isinstance(model, transformers.PreTrainedModel):
        raise TypeError(f"model must be a transformers.PreTrainedModel, got {shown(model)}; load one first")
    name = install()
    config: Any = model.config.get_text_config(decoder=True)
    modules: list[Any] = [m for m in torch.nn.Module.modules(model) if isinstance(m, transformers.PreTrainedModel)]
    decoder = [model, *(module for module in modules if module.config is config)]
    # Transformers would only log a warning.
    if not all(module._can_set_attn_implementation() for module in decoder):
        raise UnsupportedError(
            f"model must compute attention by transformers.AttentionInterface, got {type(model).__name__}, which has "
            "attention of its own; generate by model.generate, without Quire"
        )
    # Quire serves what flash attention serves. A model around a text model may not be served for its images alone.
    if not all(module._supports_flash_attn for module in decoder[len(decoder) > 1 :]):
        raise UnsupportedError(
            f"model must attend to all keys or to a window of them, got {type(model).__name__}, which flash attention "
            "cannot serve: it selects keys, or has a mask of its own; load it with attn_implementation='sdpa'"
        )
    for module in modules:
        listed = getattr(module, "_compatible_flash_implementations", None) or [NAME]
        if NAME not in listed:
            module._compatible_flash_implementations = [*listed, NAME]
    if getattr(config, "kv_lora_rank", None) and getattr(config, "qk_nope_head_dim", None):
        config.head_dim = max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    model.set_attn_implementation(name)
    START.debug("Transformers attends by Quire in %s, as %s", type(model).__name__, name)
    return name


def seed_lazy_import(name: str) -> None:
    """Tell Transformers that the implementation `name` is imported already, with Quire's functions as flash-attn's.

    Transformers imports or downloads a package of that name when an implementation with "flash" in its name is set, and
    has no public way to say that there is none. These private globals of `modeling_flash_attention_utils` are the ones
    that the import would have set. They hold one implementation at a time: after another flash implementation was
    loaded in the same process, call `install` (or `use`) again.
    """
    from transformers import modeling_flash_attention_utils

    lazy: Any = modeling_flash_attention_utils
    lazy._loaded_implementation = name
    lazy._flash_fn = flash_attn_func
    lazy._flash_varlen_fn = flash_attn_varlen_func
    lazy._flash_with_kvcache_fn = flash_attn_with_kvcache
    lazy._pad_fn, lazy._unpad_fn = lazy._pad_input, lazy._unpad_input
    lazy._process_flash_kwargs_fn = lazy._lazy_define_process_function(flash_attn_varlen_func)
    if hasattr(lazy, "_process_with_kvcache_kwargs_fn"):  # from 5.19
        lazy._process_with_kvcache_kwargs_fn = lazy._lazy_define_process_function(flash_attn_with_kvcache)


def unserved_mask(
    *,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,  # [batch, num_tokens] bool, False for padding
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool | None = None,  # given only for masks that are not causal
    **kwargs: Any,
) -> torch.Tensor | None:
    """Return None if causality and windows are the whole mask; otherwise a mask that `attention_forward` refuses.

    That is the 2-D mask if there is padding or a static cache, whose unused end only a mask shows. For other masks
    (packed sequences, blocks) it is an empty tensor. Continuous batching packs sequences too, but gives their lengths.

    Raises:
        UnsupportedError: the mask is not causal.
    """
    if allow_is_bidirectional_skip is not None:
        raise UnsupportedError(
            "attention_mask must be causal, got the mask of a bidirectional model or of cross-attention; "
            "load the model with attn_implementation='sdpa'"
        )
    if attention_mask is not None:
        attention_mask = attention_mask[:, -kv_length:]
        if attention_mask.shape[1] != kv_length or not attention_mask.all():
            return attention_mask
    if isinstance(q_offset, torch.Tensor) or not allow_is_causal_skip:  # a static cache counts on the device
        return torch.empty(0, 0, 0, 0)  # Transformers passes a 4-D mask on unchanged
    return None


def attention_forward(
    module: Any,  # torch.nn.Module; under continuous batching it has a `layer_idx`
    query: torch.Tensor,  # [batch, num_q_heads, num_queries, head_dim]; batch is 1 under continuous batching
    key: torch.Tensor,  # [batch, num_kv_heads, num_keys, head_dim]; under continuous batching the new tokens only
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    cache: Any = None,
    **step: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as Transformers' attention interface asks; see `transformers.AttentionInterface`.

    Outside continuous batching, `cu_seq_lens_q` and `cu_seq_lens_k` of `step` say which tokens are one sequence, for
    example an image, or a window of one, in a vision tower.

    Returns:
        out [batch, num_queries, num_q_heads, head_dim], and None for the weights.

    Raises:
        UnsupportedError: dropout, a bias or a selection of keys; or, outside continuous batching, padding, a static
            cache or a mask of another kind.
    """
    if dropout:
        raise UnsupportedError(f"dropout must be 0, got {dropout}; Quire serves inference: call model.eval()")
    cache = cache or getattr(key, CACHE, None)
    if (cache is None) != (step.get("read_index") is None):
        raise UnsupportedError(
            "in continuous batching a layer must pass the cache and the step's arguments on to attention, got one "
            f"without the other in {type(module).__name__}; generate by model.generate"
        )
    if attention_mask is not None and (cache is None or attention_mask.numel()):
        raise UnsupportedError(
            "attention_mask must be None (causal or sliding-window attention without padding), got padding, a static "
            "cache, packed sequences or another mask; generate by continuous batching (`model.generate_batch`) if the "
            "model passes the lengths of its sequences on to attention, or without `cache_implementation` and with "
            "prompts of one length at a time"
        )
    for name, given in step.items():
        if given is not None and (
            name in UNSERVED or (cache is None and name not in KNOWN and isinstance(given, torch.Tensor))
        ):
            raise UnsupportedError(f"{name} must be left out, got one; load the model with attn_implementation='sdpa'")
    engine = None if cache is None else engine_of(cache)
    widths = key.shape[-1], value.shape[-1]
    layer = None if engine is None else engine.layer(cache, module.layer_idx, key.shape[1], *widths)
    spec = layer_spec(
        num_q_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[-1],
        head_dim_v=value.shape[-1],
        dtype=query.dtype,
        softmax_scale=scaling or getattr(module, "scaling", None),
        causal=getattr(module, "is_causal", True) if is_causal is None else is_causal,
        sliding_window=sliding_window if sliding_window or layer is None else layer.window,
        softcap=softcap,
        sinks=s_aux is not None,
    )
    if engine is None or layer is None:
        return contiguous_attention(query, key, value, spec, s_aux, step), None
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    call = Call(spec, s_aux, engine, layer, Step.of(step, layer, num_tokens=q.shape[0]))
    engine.begin(module.layer_idx, call.step)
    return attend(q, k, v, call).unsqueeze(0), None


def contiguous_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
    step: dict[str, Any],
) -> torch.Tensor:
    """Attend in an ordinary forward pass, to keys and values as they are; the queries are the last of the tokens."""
    (num_seqs, _, q_len, _), kv_len = query.shape, key.shape[2]
    q, k, v = (contiguous_last(x.transpose(1, 2).flatten(0, 1)) for x in (query, key, value))
    cu_q, cu_k = step.get("cu_seq_lens_q"), step.get("cu_seq_lens_k")
    if cu_q is None or cu_k is None:
        cu_q = torch.arange(0, (num_seqs + 1) * q_len, q_len, dtype=torch.int32, device=q.device)
        cu_k = torch.arange(0, (num_seqs + 1) * kv_len, kv_len, dtype=torch.int32, device=q.device)
        longest = q_len, kv_len
    else:  # the sequences are packed
        cu_q, cu_k = cu_q.to(torch.int32), cu_k.to(torch.int32)
        longest = int(step.get("max_length_q") or len(q)), int(step.get("max_length_k") or len(k))
    batch = Batch.varlen(cu_q, cu_k)
    plan = quire.plan(spec, batch, max_query_len=longest[0], max_seq_len=longest[1], num_tokens=len(q))
    return quire.varlen_attention(q, k, v, remember(plan), sinks=sinks).unflatten(0, (num_seqs, q_len))
