"""How SGLang finds the backend, and what differs between the versions of SGLang that Quire serves.

In 0.5.23 a backend prepares a captured graph and each of its replays in one method, `init_forward_metadata_out_graph`.
Earlier versions have one for the capture and one for the replay. `backend.py` has all three, and SGLang calls those
that it knows.

From 0.5.23 on, a backend may own the buffer into which SGLang draws the mask of the drafts, in a layout of its choice.
Earlier versions draw masks over the whole context. There, too, SGLang publishes the options that it has resolved in a
place of their own, and `server_args` keeps what was asked for.
"""

import logging
from typing import Any

import torch
from packaging.version import InvalidVersion, Version

from quire import UnsupportedError
from quire.integrations import engine

NAME = "quire"
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


def register() -> None:
    """Register the backend with SGLang. Calling it again changes nothing.

    It imports only SGLang's registry and its arguments. An unsupported version is refused when the backend is made.
    """
    arguments = load("sglang.srt.server_args")
    for choices, add in (
        ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
        ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "add_deterministic_attention_backend_choices"),
        (
            "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
            "add_radix_supported_deterministic_attention_backend_choices",
        ),
    ):
        home = arguments if hasattr(arguments, add) else load("sglang.srt.arg_groups.choices")
        if NAME not in getattr(home, choices):
            getattr(home, add)([NAME])
    registry = load("sglang.srt.layers.attention.attention_registry")
    if NAME not in registry.ATTENTION_BACKENDS:
        registry.register_attention_backend(NAME)(create)


def speculation(options: Any) -> Any:
    """Return what holds the options `speculative_*` as SGLang has resolved them."""
    try:
        return load("sglang.srt.runtime_context").get_spec()
    except (ModuleNotFoundError, AttributeError, ValueError):  # before 0.5.23; outside of a server
        return options


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


def create(model_runner: Any) -> Any:
    """Return the backend of a model runner."""
    check_version()
    from quire.integrations.sglang.backend import QuireBackend

    return QuireBackend(model_runner)
