"""The backend that vLLM finds behind Quire's name: two for multi-head latent attention (MLA), and one for the rest.

A vLLM backend serves either MLA, or MLA whose indexer chooses keys, or everything else, and vLLM knows a backend by one
path: `Backend` of this module. But a user chooses Quire by one name. So `Backend` is a computed attribute: its class
depends on the model that vLLM is loading.
"""

from typing import Any

from quire.integrations.vllm import contract


def __getattr__(name: str) -> Any:
    """Return the backend's class; without a model, the one that is not for MLA."""
    if name != "Backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    config = contract.load("vllm.config.vllm").get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is not None and model.use_mla and chooses_keys(model) and contract.has_sparse_mla():
        from quire.integrations.vllm.sparse import QuireSparseMLABackend

        return QuireSparseMLABackend
    if model is not None and model.use_mla:
        from quire.integrations.vllm.mla import QuireMLABackend

        return QuireMLABackend
    from quire.integrations.vllm.backend import QuireBackend

    return QuireBackend


def chooses_keys(model: Any) -> bool:
    """Return whether a model has an indexer, which chooses keys."""
    return hasattr(getattr(model, "hf_text_config", None), "index_topk")
