"""Refuse by name what Quire does not serve under SGLang: options of the server, kinds of steps, kinds of layers."""

from typing import Any

from quire import UnsupportedError
from quire.integrations.sglang import contract

DECODER: Any = contract.load("sglang.srt.layers.radix_attention").AttentionType.DECODER
MAX_DRAFTS = 64  # of a request: bits of a word of `tree_bits`
INSTEAD = "choose another --attention-backend for this model"


def drafts_branch(speculation: Any) -> bool:
    """Return whether the server's drafts may be trees.

    Those of n-grams may, with any breadth: matches of several lengths each begin a branch.
    """
    if str(getattr(speculation, "speculative_algorithm", None)).upper() == "NGRAM":
        return True
    return getattr(speculation, "speculative_eagle_topk", None) not in (None, 0, 1)


def refuse_options(model_runner: Any, options: Any, speculation: Any) -> None:
    """Raise UnsupportedError if the server has options that Quire does not serve; `speculation` has those of drafts."""
    if drafts_branch(speculation):
        refuse_trees(speculation, bool(model_runner.use_mla_backend))
        if getattr(options, "enable_two_batch_overlap", False):
            raise UnsupportedError(
                "enable_two_batch_overlap must be False where drafts branch, got True, which cuts their masks in two; "
                "leave out --enable-two-batch-overlap"
            )
    if model_runner.use_mla_backend and getattr(options, "enable_deterministic_inference", False):
        raise UnsupportedError(
            "enable_deterministic_inference must be False for latent attention, got True: prompts without a cached "
            f"prefix attend to expanded keys, which rounds differently; {INSTEAD}"
        )
    dcp = getattr(options, "dcp_size", None)
    if dcp not in (None, 1):
        raise UnsupportedError(f"dcp_size must be 1, got {dcp}; leave out --dcp-size")
    if getattr(getattr(model_runner, "kv_index_translator", None), "is_translating", False):
        raise UnsupportedError(
            "token_to_kv_pool must be a pool whose slots keep their numbers, got a unified pool; switch it off"
        )


def refuse_drafts(mode: Any, spec_info: Any) -> None:
    """Raise UnsupportedError for the steps of a draft model."""
    if mode.name.startswith("DRAFT_EXTEND") or (mode.is_decode() and getattr(spec_info, "kv_indptr", None) is not None):
        raise UnsupportedError(
            f"forward_mode must be one of the target model, got {mode.name} of a draft model; "
            "pass --speculative-draft-attention-backend triton"
        )
    if mode.name.startswith("DLLM") or mode.name == "SPLIT_PREFILL":
        raise UnsupportedError(
            f"forward_mode must be DECODE, EXTEND, MIXED or TARGET_VERIFY, got {mode.name}; {INSTEAD}"
        )


def refuse_trees(drafts: Any, latent: bool) -> None:
    """Raise UnsupportedError for trees that are not served; `drafts` is a step's `spec_info`, or the options."""
    if latent:
        raise UnsupportedError(
            "drafts must be chains for latent attention, got trees; "
            "pass --speculative-eagle-topk 1, and no --speculative-algorithm NGRAM"
        )
    count = getattr(drafts, "draft_token_num", getattr(drafts, "speculative_num_draft_tokens", None))
    if count is not None and count > MAX_DRAFTS:
        raise UnsupportedError(
            f"speculative_num_draft_tokens must be at most {MAX_DRAFTS} where drafts branch, got {count}; "
            "a word has a bit for each"
        )


def refuse_arguments(others: dict[str, Any]) -> None:
    """Raise UnsupportedError for what a model passes to backends that know it."""
    for name, value in others.items():
        if not (value is None or value is False):
            raise UnsupportedError(f"{name} must be left out, got {type(value).__name__}; {INSTEAD}")


def refuse_layer(layer: Any) -> None:
    """Raise UnsupportedError for a kind of layer that is not served."""
    for name, value, served in (
        ("attn_type", layer.attn_type, layer.attn_type == DECODER),
        ("is_cross_attention", layer.is_cross_attention, not layer.is_cross_attention),
        ("pos_encoding_mode", layer.pos_encoding_mode, layer.pos_encoding_mode == "NONE"),
        (
            "logit_capping_method",
            layer.logit_capping_method,
            not layer.logit_cap or layer.logit_capping_method == "tanh",
        ),
        ("use_irope", layer.use_irope, not layer.use_irope),  # local attention in chunks
        ("xai_temperature_len", layer.xai_temperature_len, layer.xai_temperature_len <= 0),
    ):
        if not served:
            raise UnsupportedError(f"{name} of a layer must be that of a plain decoder, got {value}; {INSTEAD}")
