"""What differs between the versions of SGLang that Quire serves.

0.5.12 prepares a captured graph and each of its replays in two methods of a backend. Newer releases, 0.5.17 and 0.5.23
among them, have one method for both, `init_forward_metadata_out_graph`. `backend.py` has all three, and SGLang calls
those that it knows.

In newer releases a backend may own the buffer into which SGLang draws the mask of the drafts, in a layout of its own;
0.5.12 draws masks over the whole context. Newer releases publish the options that they have resolved in a place of
their own, and `server_args` keeps what was asked for.
"""

import logging
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from quire import UnsupportedError
from quire.integrations import engine

NAME = "quire"  # of the backend
SUPPORTED = (Version("0.5.12"), Version("0.6"))  # from, and before

logger = logging.getLogger(f"sglang.{__name__}")


def load(name: str) -> Any:
    """Import a module of SGLang.

    SGLang is not installed where types are checked. This is the one place where it enters, so its types are `Any`.
    """
    return engine.load("sglang", name)


def check_version() -> None:
    """Raise UnsupportedError unless this version of SGLang is in the supported range."""
    found = load("sglang").__version__
    try:
        served = SUPPORTED[0] <= Version(found) < SUPPORTED[1]
    except InvalidVersion:  # a checkout that was never installed
        return
    if not served:
        raise UnsupportedError(
            f"sglang must be from {SUPPORTED[0]} to before {SUPPORTED[1]}, got {found}; install a version in that range"
        )


def speculation(options: Any) -> Any:
    """Return what holds the options `speculative_*` as SGLang has resolved them."""
    return resolved("spec", options)


def resolved(kind: str, options: Any) -> Any:
    """Return what holds the options of a kind as SGLang has resolved them.

    Args:
        kind: as SGLang's runtime context names it, for instance "schedule".
        options: the server's, which older versions resolve in place.
    """
    try:
        return getattr(load("sglang.srt.runtime_context"), f"get_{kind}")()
    except (ModuleNotFoundError, AttributeError, ValueError):  # 0.5.12; outside of a server
        return options


def attention_backends(options: Any) -> tuple[str | None, str | None]:
    """Return the names of the backends of prefill and of decode."""
    kernel = getattr(resolved("exec", options), "kernel", options)
    names = kernel.prefill_attention_backend, kernel.decode_attention_backend
    return names[0] or kernel.attention_backend, names[1] or kernel.attention_backend


def captures_decode(options: Any) -> bool:
    """Return whether SGLang captures the steps of decode."""
    graph = getattr(resolved("exec", options), "graph", None)
    if graph is None or getattr(graph, "cuda_graph_config", None) is None:  # 0.5.12
        return not options.disable_cuda_graph
    return graph.cuda_graph_config.decode.backend != "disabled"


def verify_mask(max_num_seqs: int, num_drafts: int, is_read: bool, device: Any) -> Any:
    """Return a buffer for the masks among the drafts of the largest batch; None where SGLang has no place for it."""
    try:
        home = load("sglang.srt.layers.attention.verify_mask")
    except ModuleNotFoundError:
        return None
    mode = home.TreeMaskMode.QLEN_ONLY
    cells = home.tree_mask_numel(mode, max_num_seqs, num_drafts, 0)
    buffer = torch.zeros(cells, dtype=torch.bool, device=device)
    return home.VerifyMask(buffer=buffer, mode=mode, max_bs=max_num_seqs, is_read=is_read)
