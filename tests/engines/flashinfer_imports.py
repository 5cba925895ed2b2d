"""Which of FlashInfer's names for attention over keys an engine imports."""

import ast
import importlib
from pathlib import Path

from quire.integrations import flashinfer

MODULES = (
    "cascade",
    "decode",
    "mla",
    "page",
    "prefill",
    "sparse",
)  # whose names are of attention; and the package's own
# What Quire's module has of what the newest releases import. docs/flashinfer.md counts them.
OF_VLLM = """
BatchAttentionWithAttentionSinkWrapper BatchDecodeWithPagedKVCacheWrapper BatchMLAPagedAttentionWrapper
BatchPrefillWithPagedKVCacheWrapper BatchPrefillWithRaggedKVCacheWrapper fast_decode_plan get_seq_lens
trtllm_batch_context_with_kv_cache trtllm_batch_decode_with_kv_cache trtllm_batch_decode_with_kv_cache_mla
trtllm_ragged_attention_deepseek xqa_batch_decode_with_kv_cache
"""
OF_SGLANG = """
BatchDecodeWithPagedKVCacheWrapper BatchMLAPagedAttentionWrapper BatchPrefillWithPagedKVCacheWrapper
BatchPrefillWithRaggedKVCacheWrapper fast_decode_plan merge_state trtllm_batch_context_with_kv_cache
trtllm_batch_decode_with_kv_cache trtllm_batch_decode_with_kv_cache_mla trtllm_ragged_attention_deepseek
"""
# What it has not, and who needs it.
WITHOUT = {
    "_grouped_size_compiled_for_decode_kernels": "which kernels FlashInfer has compiled",
    "_sparse_mla_sm120": "a private kernel",
    "cudnn_batch_prefill_with_kv_cache": "towers of vision models, by cuDNN",
    "trtllm_batch_decode_sparse_mla_dsv4": "DeepSeek V4 on Blackwell GPUs",
    "trtllm_fmha_v2_prefill": "prompts by TensorRT-LLM's kernels, where they skip scores",
    "trtllm_sage_attention_quantize": "quantisation for SageAttention",
}


def dotted(node: ast.expr) -> str:
    """Return an expression of names and dots as text, and nothing of others: to unparse all takes seconds."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def imported(package: str) -> set[str]:
    """Return the names that an engine's files import from FlashInfer, or read of its modules, as its sources say."""
    root, found = Path(str(importlib.import_module(package).__file__)).parent, set[str]()
    for file in root.rglob("*.py"):
        text = file.read_text("utf-8-sig")
        if "flashinfer" not in text:
            continue
        tree = ast.parse(text)
        modules = {"flashinfer": "flashinfer"}  # by the name that the file has for it
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "flashinfer":
                for alias in node.names:
                    modules[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                    found |= attention_of(f"{node.module}.{alias.name}")
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                found |= attention_of(dotted(node), modules)
            elif isinstance(node, ast.Call) and "lazy_import" in ast.unparse(node.func):
                words = [str(each.value) for each in node.args if isinstance(each, ast.Constant)]
                found |= attention_of(".".join(words))
    return found


def attention_of(path: str, modules: dict[str, str] | None = None) -> set[str]:
    """Return the name that a dotted path has after FlashInfer's package, or after one of its modules for attention."""
    first, *rest = path.split(".")
    if modules is not None:
        first, *rest = [*modules.get(first, "").split("."), *rest]
    if first != "flashinfer" or not rest:
        return set()
    name, *more = rest if rest[0] not in MODULES else rest[1:] or [""]
    of_module = rest[0] in MODULES and name
    return {name} if of_module or name in flashinfer.__all__ else set()
