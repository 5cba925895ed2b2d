"""A platform plug-in: vLLM on a CPU without compiled operators, with any attention backend.

vLLM finds it by the `dist-info` folder next to it, if this folder is on `sys.path`. vLLM's own CPU platform accepts one
attention backend only, and needs some operators of a compiled build. Here they are written in PyTorch.
"""

import torch


def platform() -> str | None:
    """Return the platform's class, or None to leave a machine with a GPU to vLLM; called by vLLM."""
    return None if torch.cuda.is_available() else "vllm_cpu.PlainCpu"


def slots_of_tokens(
    starts: torch.Tensor, positions: torch.Tensor, table: torch.Tensor, slots: torch.Tensor, page_size: int
) -> None:
    """Write into `slots` where each token's key goes, -1 past the last token."""
    seqs = torch.arange(starts.shape[0] - 1).repeat_interleave(starts.diff().long())
    at = positions[: seqs.shape[0]]
    slots.fill_(-1)
    slots[: seqs.shape[0]] = table[seqs, at // page_size] * page_size + at % page_size


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


OPERATORS = {
    (
        "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, "
        "int page_size) -> ()"
    ): slots_of_tokens,
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
            wanted = attn_selector_config._asdict()
            reasons = selected_backend.get_class().validate_configuration(
                device_capability=DeviceCapability(8, 0), **wanted
            )
            if reasons:
                raise ValueError(f"{selected_backend.name} cannot serve this model: {', '.join(reasons)}")
            return selected_backend.get_path()

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

        @classmethod
        def check_and_update_config(cls, vllm_config) -> None:
            executor = vllm_config.parallel_config.distributed_executor_backend
            scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
            page_size, max_num_tokens = cache.block_size, scheduler.max_num_batched_tokens
            in_chunks, with_prefixes = scheduler.enable_chunked_prefill, cache.enable_prefix_caching
            super().check_and_update_config(vllm_config)
            if vllm_config.model_config.use_mla and hasattr(super(), "get_mla_prefill_backend_cls"):
                # Undo what vLLM's own operator for MLA needs. Older versions cannot split prefills without a GPU.
                cache.block_size, scheduler.max_num_batched_tokens = page_size, max_num_tokens
                scheduler.enable_chunked_prefill, cache.enable_prefix_caching = in_chunks, with_prefixes
            vllm_config.parallel_config.distributed_executor_backend = (
                executor or "uni"
            )  # one process, which a test can look into

    globals()[name] = PlainCpu
    return PlainCpu
