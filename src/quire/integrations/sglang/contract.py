"""How SGLang finds the backend, and what differs between the versions of SGLang that Quire serves.

In 0.5.23 a backend prepares a captured graph and each of its replays in one method, `init_forward_metadata_out_graph`.
Earlier versions have one for the capture and one for the replay. `backend.py` has all three, and SGLang calls those
that it knows.
"""

import importlib
import logging
from typing import Any

from packaging.version import InvalidVersion, Version

from quire import UnsupportedError

NAME = "quire"
SUPPORTED = (Version("0.5.12"), Version("0.6"))  # from, and before

logger = logging.getLogger(f"sglang.{__name__}")


def load(name: str) -> Any:
    """Import a module of SGLang.

    SGLang is not installed where types are checked. This is the one place where it enters, so its types are `Any`.
    """
    return importlib.import_module(name)


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


def create(model_runner: Any) -> Any:
    """Return the backend of a model runner."""
    check_version()
    from quire.integrations.sglang.backend import QuireBackend

    return QuireBackend(model_runner)
