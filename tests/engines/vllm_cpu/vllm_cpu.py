"""A platform plug-in: vLLM on a CPU without compiled operators, with any attention backend.

vLLM finds it by the `dist-info` folder next to it, if this folder is on `sys.path`. vLLM's own CPU platform accepts one
attention backend only, and needs some operators of a compiled build. Here they are written in PyTorch. So are the slots
and the combination of several ranks that share contexts, which vLLM has for GPUs alone.
"""

import functools
import importlib
import inspect
import os
from collections.abc import Callable

import torch


def platform() -> str | None:
    """Return the platform's class, or None to leave a machine with a GPU to vLLM; called by vLLM."""
    return None if torch.cuda.is_available() else "vllm_cpu.PlainCpu"


def slots_of_rank(original: Callable[..., None]) -> Callable[..., None]:
    """Return a function that writes where each token's key goes, -1 for those of other ranks and past the last token.

    It has the arguments of vLLM's, which needs a compiled operator and refuses several ranks.
    """
    parameters = inspect.signature(original)

    @functools.wraps(original)
    def write_slots(*args, **options) -> None:
        given = parameters.bind(*args, **options).arguments
        page_size = given.get("KV_CACHE_BLOCK_SIZE") or given["block_size"]  # the names of 0.33 and of 0.20
        num_ranks, rank, interleave = (
            given[name] for name in ("TOTAL_CP_WORLD_SIZE", "TOTAL_CP_RANK", "CP_KV_CACHE_INTERLEAVE_SIZE")
        )
        starts, table, slots = given["query_start_loc"], given["block_table"], given["slot_mapping"]
        seqs = torch.arange(starts.shape[0] - 1).repeat_interleave(starts.diff().long())
        at = given["positions"][: seqs.shape[0]]
        run, local = at // interleave, at // (interleave * num_ranks) * interleave + at % interleave
        pages = table[seqs, at // (page_size * num_ranks)]
        slots.fill_(-1)
        slots[: seqs.shape[0]] = torch.where(run % num_ranks == rank, pages * page_size + local % page_size, -1)

    return write_slots


def weigh(out: torch.Tensor, lses: torch.Tensor, rank: int, *others, **options) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a rank's out [tokens, heads, columns] by its weight among `lses` [ranks, tokens, heads], and their sum."""
    lses = torch.where(lses.isnan() | (lses == float("inf")), float("-inf"), lses)
    lse = lses.logsumexp(0)
    weight = (lses[rank] - lse).exp().nan_to_num(0.0)[..., None]
    return torch.where(weight == 0, 0.0, out * weight), lse


def gated_gelu(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write gelu(first half of x) · second half."""
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.gelu(gate, approximate="tanh") * up)


def gated_silu(out: torch.Tensor, x: torch.Tensor) -> None:
    """Write silu(first half of x) · second half."""
    gate, up = x.chunk(2, -1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def expand(out: torch.Tensor, values: torch.Tensor, ends: torch.Tensor, replace_from: int, replace_to: int) -> None:
    """Write each sequence's value once for each of its tokens, which end at `ends`."""
    spread = values.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)))
    out[: spread.shape[0]] = spread.where(spread != replace_from, replace_to)


def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> None:
    """Write x over its root mean square; a weight with two dimensions has a row for each layer, x's first dimension."""
    normed = x.float() * (x.float().square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        normed *= weight if weight.dim() == 1 else weight.reshape(-1, *[1] * (x.dim() - 2), x.shape[-1])
    out.copy_(normed)


def rotate(
    positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor | None, head_size: int, table: torch.Tensor, neox: bool
) -> None:
    """Rotate heads in place, by the two halves of a head; the table has cosines and then sines of each position."""
    assert neox
    cos, sin = (x[:, None] for x in table[positions.flatten()].chunk(2, -1))
    for heads in (q,) if k is None else (q, k):
        x = heads.view(positions.numel(), -1, head_size)
        first, second = x[..., : 2 * cos.shape[-1]].chunk(2, -1)
        rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        x[..., : 2 * cos.shape[-1]] = rotated


OPERATORS = {
    "rms_norm(Tensor(a!) out, Tensor x, Tensor? weight, float eps) -> ()": rms_norm,
    "rotary_embedding(Tensor positions, Tensor(a!) q, Tensor(b!)? k, int size, Tensor table, bool neox) -> ()": rotate,
    "expand_kernel_impl(Tensor(a!) out, Tensor values, Tensor ends, int replace_from, int replace_to) -> ()": expand,
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "gelu_tanh_and_mul(Tensor(a!) out, Tensor x) -> ()": gated_gelu,
    "silu_and_mul(Tensor(a!) out, Tensor x) -> ()": gated_silu,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
}


def __getattr__(name: str):
    """Make the class when it is asked for: vLLM is still looking for its platform when this module is imported."""
    if name != "PlainCpu":
        raise AttributeError(name)
    from vllm.platforms.cpu import CpuPlatform
    from vllm.platforms.interface import DeviceCapability, PlatformEnum

    class PlainCpu(CpuPlatform):
        _enum = PlatformEnum.CPU
        library = None

        @classmethod
        def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
            try:
                collectives = importlib.import_module("vllm.v1.attention.ops.dcp")
            except ImportError:  # before 0.33
                collectives = importlib.import_module("vllm.v1.attention.ops.common")
            collectives.correct_attn_out = weigh
            if attn_selector_config.use_mla and not hasattr(CpuPlatform, "get_mla_prefill_backend_cls"):
                cls.choose_mla_prefill()
            wanted = attn_selector_config._asdict()
            reasons = selected_backend.get_class().validate_configuration(
                device_capability=DeviceCapability(8, 0), **wanted
            )
            if reasons:
                raise ValueError(f"{selected_backend.name} cannot serve this model: {', '.join(reasons)}")
            return selected_backend.get_path()

        @classmethod
        def choose_mla_prefill(cls) -> None:
            """Let vLLM take a plug-in's prefill of MLA; versions that do not ask the platform want FlashAttention."""
            try:
                prefill = importlib.import_module("vllm.v1.attention.backends.mla.prefill.registry")
            except ImportError:  # 0.20, whose backend of MLA also prefills
                return
            layers = importlib.import_module("vllm.model_executor.layers.attention.mla_attention")
            layers.get_mla_prefill_backend = lambda config: prefill.MLAPrefillBackendEnum.CUSTOM.get_class()

        @classmethod
        def get_mla_prefill_backend_cls(cls, config):
            from vllm.config import get_current_vllm_config

            chosen = get_current_vllm_config().attention_config.mla_prefill_backend
            return super().get_mla_prefill_backend_cls(config) if chosen is None else chosen.get_class()

        @classmethod
        def import_kernels(cls) -> None:
            if cls.library is None:
                cls.library = torch.library.Library("_C", "FRAGMENT")
                for schema, function in OPERATORS.items():
                    cls.library.define(schema)
                    cls.library.impl(schema.split("(")[0], function, "CompositeExplicitAutograd")
                cls.share_contexts()

        @classmethod
        def share_contexts(cls) -> None:
            """Let several ranks have slots of their own; vLLM takes these functions when it is imported."""
            kernels = importlib.import_module("vllm.utils.cpu_triton_utils")
            slots = slots_of_rank(kernels._compute_slot_mapping_kernel_impl)
            kernels._compute_slot_mapping_kernel_impl = slots
            if hasattr(kernels, "compute_slot_mapping_kernel"):  # 0.20's, which wraps the function
                kernels.compute_slot_mapping_kernel.func = slots

        @classmethod
        def register_triton_kernel_overrides(cls) -> None:
            cls.share_contexts()
            super().register_triton_kernel_overrides()

        @classmethod
        def check_and_update_config(cls, vllm_config) -> None:
            executor = vllm_config.parallel_config.distributed_executor_backend
            scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
            page_size, max_num_tokens = cache.block_size, scheduler.max_num_batched_tokens
            in_chunks, with_prefixes = scheduler.enable_chunked_prefill, cache.enable_prefix_caching
            # vLLM's own operators have few dtypes of caches, and older versions no quantised one with chunked prefill.
            cache_dtype, cache.cache_dtype = cache.cache_dtype, "auto"
            super().check_and_update_config(vllm_config)
            # vLLM asks for new processes, each of which imports it again. Forked ones have it.
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
            cache.cache_dtype = cache_dtype
            if vllm_config.model_config.use_mla and hasattr(super(), "get_mla_prefill_backend_cls"):
                # Undo what vLLM's own operator for MLA needs. Older versions cannot split prefills without a GPU.
                cache.block_size, scheduler.max_num_batched_tokens = page_size, max_num_tokens
                scheduler.enable_chunked_prefill, cache.enable_prefix_caching = in_chunks, with_prefixes
            vllm_config.parallel_config.distributed_executor_backend = (
                executor or "uni"
            )  # one process, which a test can look into

    globals()[name] = PlainCpu
    return PlainCpu
