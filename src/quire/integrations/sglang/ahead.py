"""A layer's warm-up, begun when SGLang makes the layer.

Its kernels are then compiled while SGLang loads weights and allocates memory. When graphs are captured,
`QuireBackend.warm_up` finds them in Triton's cache. The pool and the bounds are only expected here. Where SGLang
chooses others, the kernels for these are compiled later. So are those of draft models, trees of drafts and quantised
pools. A layer does not know of sinks and of functions on scores when it is made: their kernels are compiled later too.
"""

from collections.abc import Callable
from contextvars import ContextVar
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch

import quire
from quire import AttentionSpec
from quire.integrations.engine import LARGE, START
from quire.integrations.sglang import contract
from quire.integrations.sglang.layers import Layers
from quire.integrations.sglang.refusals import drafts_branch
from quire.integrations.sglang.steps import Plans

LOAD = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
MAKE_LAYER = "sglang.srt.layers.radix_attention.RadixAttention.__init__"
MOST_REQUESTS = 4096  # at once, unless the server is told a number

LOADING: ContextVar[Any] = ContextVar("LOADING", default=None)  # the runner whose model is made
BEGUN: dict[AttentionSpec, dict[str, Any]] = {}  # the bounds of the warm-ups


@cache
def register_hooks() -> None:
    """Have SGLang call the hooks of this file; `load_plugins` applies them."""
    home = contract.load("sglang.srt.plugins.hook_registry")
    home.HookRegistry.register(LOAD, while_loading, home.HookType.AROUND)
    home.HookRegistry.register(MAKE_LAYER, after_layer, home.HookType.AFTER)


def while_loading(load: Callable[..., Any], runner: Any, *args: Any, **options: Any) -> Any:
    """Load a runner's model. The layers that are made in the meantime are the runner's."""
    token = LOADING.set(runner)
    try:
        return load(runner, *args, **options)
    finally:
        LOADING.reset(token)


def after_layer(result: Any, layer: Any, *args: Any, **options: Any) -> None:
    """Begin the warm-up of a layer that SGLang made, if it can be foreseen. An error is logged and ends no start."""
    runner = LOADING.get()
    try:
        if runner is not None and has_gpu(runner) and will_warm_up(runner, layer):
            begin(runner, layer)
    except Exception as error:
        START.debug("no warm-up of an SGLang layer was begun: %s: %s", type(error).__name__, error)


def has_gpu(runner: Any) -> bool:
    """Return whether a runner's model is on a GPU."""
    return torch.device(runner.device).type == "cuda" and torch.cuda.is_available()


def will_warm_up(runner: Any, layer: Any) -> bool:
    """Return whether a layer's kernels will be needed, and are those that `begin` compiles."""
    options = runner.server_args
    kv_dtype = contract.resolved("model", options).kv_cache_dtype
    config = getattr(layer.quant_method, "quant_config", None)
    is_quantised = kv_dtype not in ("auto", "bf16", "bfloat16") or getattr(config, "kv_cache_quant_algo", None)
    is_expanded = runner.use_mla_backend and layer.tp_k_head_num != 1  # from latents, for prompts
    is_served = contract.NAME in contract.attention_backends(options) and runner.is_generation
    is_draft = runner.is_draft_worker or drafts_branch(contract.speculation(options))
    is_known = not (is_quantised or is_expanded or is_draft)
    return is_served and is_known and contract.captures_decode(options)


def begin(runner: Any, layer: Any) -> None:
    """Begin the warm-up of a layer, unless one like it has begun."""
    page_size, dtype = int(runner.page_size or 1), runner.model_config.dtype
    pool = expected_pool(layer, page_size, dtype)
    bound = Layers(pool, page_size, dtype, bool(runner.use_mla_backend), False).bind(layer, has_sinks=False)
    if bound.spec in BEGUN:
        return
    bounds = BEGUN[bound.spec] = expected_bounds(runner)
    device = torch.device("cuda", torch.cuda.current_device())
    quire.begin_warmup(bound.spec, bound.pages, device=device, **bounds)


def expected_pool(layer: Any, page_size: int, dtype: torch.dtype) -> Any:
    """Return what `Layers` asks of SGLang's pool, with one layer's part of the pool to come, without memory."""
    row = layer.tp_k_head_num * layer.qk_head_dim * dtype.itemsize
    shape = (LARGE // (row * page_size) + 2) * page_size, layer.tp_k_head_num
    k, v = (torch.empty(*shape, width, dtype=dtype, device="meta") for width in (layer.qk_head_dim, layer.v_head_dim))
    return SimpleNamespace(get_key_buffer=lambda layer_id: k, get_value_buffer=lambda layer_id: v)


def expected_bounds(runner: Any) -> dict[str, Any]:
    """Return bounds that should hold those of the backend to come (`Plans.bounds`)."""
    options = runner.server_args
    schedule, drafts = contract.resolved("schedule", options), contract.speculation(options)
    max_num_seqs = (schedule.max_running_requests or MOST_REQUESTS) + 1  # with the row for padding
    max_seq_len = runner.model_config.context_len + (drafts.speculative_num_draft_tokens or 1)
    plans = Plans(max_num_seqs, max_seq_len, None, bool(getattr(options, "enable_deterministic_inference", False)))
    prompt = schedule.chunked_prefill_size or 0
    plans.max_num_tokens = max(plans.max_num_tokens, 1 << max(0, prompt - 1).bit_length())
    return plans.bounds()


def bounds_of(spec: AttentionSpec, bounds: dict[str, Any]) -> dict[str, Any]:
    """Return the bounds of a warm-up: those with which it was begun if these hold the given ones.

    A warm-up finds its process by equal bounds, waits for it and reads Triton's cache where the process wrote it.
    """
    begun = BEGUN.get(spec)
    if begun is None or begun["batch_invariant"] != bounds["batch_invariant"]:
        return bounds
    holds = all(begun[name] >= bounds[name] for name in ("max_num_seqs", "max_num_tokens", "max_seq_len"))
    return begun if holds and begun["min_seq_len"] <= bounds["min_seq_len"] else bounds
