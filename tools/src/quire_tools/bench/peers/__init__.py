"""The libraries that are measured, Quire among them.

Each has an adapter. A library that is not installed is reported as absent.

An adapter takes a case's inputs and the output tensor, and returns `plan(page_table) -> call`.
`plan` is what a server does once per step, `call` what it does once per layer.
A call writes `out`, or returns its result with the tokens in the same order.
Libraries that read no pages get contiguous copies of the keys and values. The copies are not timed, which favours them.

To add a library, write a module with its adapter here, and add one line to `PEERS`.
"""

from functools import partial
from typing import get_args

from quire_tools.bench.case import Layout
from quire_tools.bench.measure import Peer
from quire_tools.bench.peers.call_cudnn import cudnn_calls
from quire_tools.bench.peers.call_flash_attention import flash_attention_calls
from quire_tools.bench.peers.call_flash_mla import flash_mla_calls, vllm_flash_mla_calls
from quire_tools.bench.peers.call_flashinfer import batch_attention_calls, flashinfer_calls, xqa_calls
from quire_tools.bench.peers.call_pytorch import flex_calls, sdpa_calls
from quire_tools.bench.peers.call_quire import (
    naive_calls,
    quire_calls,
    quire_with_config,
    quire_with_fp8_products,
)
from quire_tools.bench.peers.call_sglang import sglang_triton_calls
from quire_tools.bench.peers.call_vllm_triton import vllm_triton_calls, vllm_triton_mla_calls
from quire_tools.bench.scores import SCORES

__all__ = ["BASELINES", "NAIVE", "PEERS", "Peer", "quire_calls", "quire_with_config"]

NAIVE = "Quire, naive"
EVERYTHING: tuple[Layout, ...] = get_args(Layout)
LATENTS: tuple[Layout, ...] = ("latents",)
LISTS: Layout = "chosen keys"
PEERS = (
    Peer("Quire", "quire", quire_calls, plans=True, serves=EVERYTHING, scores=tuple(SCORES)),
    Peer(
        "Quire, batch-invariant",
        "quire",
        partial(quire_calls, batch_invariant=True),
        plans=True,
        serves=("pages", "latents"),
        scores=tuple(SCORES),
    ),
    Peer("Quire, flat", "quire", partial(quire_calls, shared_prefix=None), plans=True, serves=("shared pages",)),
    Peer("Quire, portable", "quire", partial(quire_calls, kernel="mla"), plans=True, serves=LATENTS),
    Peer(
        "Quire, fp8 products",
        "quire",
        quire_with_fp8_products,
        plans=True,
        serves=LATENTS,
        in_fp8=True,
        for_hopper=True,
    ),
    Peer(
        "FlashMLA",
        "flash_mla",
        flash_mla_calls,
        plans=True,
        package="sgl-flash-mla",
        serves=(*LATENTS, LISTS),
        in_fp8=True,
        for_hopper=True,
    ),
    Peer(
        "FlashMLA in vLLM",
        "vllm.third_party.flashmla.flash_mla_interface",
        vllm_flash_mla_calls,
        serves=LATENTS,
        for_hopper=True,
    ),
    Peer(
        "FlashAttention 3",
        "vllm.vllm_flash_attn._vllm_fa3_C",
        partial(flash_attention_calls, version=3),
        plans=True,
        serves=EVERYTHING,
        for_hopper=True,
    ),
    Peer("FlashAttention 2", "vllm.vllm_flash_attn._vllm_fa2_C", partial(flash_attention_calls, version=2)),
    Peer(
        "FlashInfer fa2",
        "flashinfer",
        partial(flashinfer_calls, backend="fa2"),
        plans=True,
        package="flashinfer-python",
        serves=tuple(layout for layout in EVERYTHING if layout != LISTS),
    ),
    Peer(
        "FlashInfer fa3",
        "flashinfer",
        partial(flashinfer_calls, backend="fa3"),
        plans=True,
        package="flashinfer-python",
        serves=EVERYTHING,
        for_hopper=True,
    ),
    Peer("FlashInfer XQA", "flashinfer.decode", xqa_calls, package="flashinfer-python"),
    Peer("FlashInfer BatchAttention", "flashinfer", batch_attention_calls, plans=True, package="flashinfer-python"),
    Peer("vLLM Triton", "vllm.v1.attention.ops.triton_unified_attention", vllm_triton_calls, scores=("ALiBi",)),
    Peer(
        "SGLang Triton",
        "sglang.kernels.ops.attention.score_mod",
        sglang_triton_calls,
        scores=("relative bias",),
    ),
    Peer("vLLM Triton MLA", "vllm.v1.attention.ops.triton_decode_attention", vllm_triton_mla_calls, serves=LATENTS),
    Peer("cuDNN", "cudnn", cudnn_calls, package="nvidia-cudnn-frontend", for_hopper=True),
    Peer("SDPA, not paged", "torch", sdpa_calls),
    Peer(
        "FlexAttention, not paged",
        "torch",
        flex_calls,
        slow=True,
        for_hopper=True,
        scores=tuple(name for name, each in SCORES.items() if "score" in each.fields),
    ),
    Peer(NAIVE, "quire", naive_calls),
)
BASELINES = ("SDPA, not paged", "FlexAttention, not paged")  # they read no pages, so neither is "the best other"
