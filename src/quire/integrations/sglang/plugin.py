"""How SGLang finds the backend: by a name in its lists of choices and in its registry."""

import os
import sys
from typing import Any

from quire.integrations.sglang import contract
from quire.integrations.sglang.contract import NAME

DSA = "dsa"  # SGLang's name of attention to keys that an indexer chooses, which its models ask for
SCHEDULER = "sglang.srt.managers.scheduler"  # of the processes that run a model
CHOSEN_KEYS = "QUIRE_SGLANG_DSA"  # "1" has Quire attend to these


def register() -> None:
    """Register the backend with SGLang. Calling it again changes nothing.

    It imports only SGLang's registry and its arguments. An unsupported version is refused when the backend is made.
    Hooks are registered where SGLang has imported its scheduler: to apply them, SGLang imports its model runner.
    """
    arguments = contract.load("sglang.srt.server_args")
    for choices, add in (
        ("ATTENTION_BACKEND_CHOICES", "add_attention_backend_choices"),
        ("DETERMINISTIC_ATTENTION_BACKEND_CHOICES", "add_deterministic_attention_backend_choices"),
        (
            "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
            "add_radix_supported_deterministic_attention_backend_choices",
        ),
    ):
        home = arguments if hasattr(arguments, add) else contract.load("sglang.srt.arg_groups.choices")
        if NAME not in getattr(home, choices):
            getattr(home, add)([NAME])
    registry = contract.load("sglang.srt.layers.attention.attention_registry")
    if NAME not in registry.ATTENTION_BACKENDS:
        registry.register_attention_backend(NAME)(create)
    if os.environ.get(CHOSEN_KEYS) == "1" and DSA in registry.ATTENTION_BACKENDS:
        registry.ATTENTION_BACKENDS[DSA] = create_dsa
    if SCHEDULER in sys.modules:
        from quire.integrations.sglang import ahead

        ahead.register_hooks()


def create(model_runner: Any) -> Any:
    """Return the backend of a model runner."""
    contract.check_version()
    from quire.integrations.sglang.backend import QuireBackend

    return QuireBackend(model_runner)


def create_dsa(model_runner: Any) -> Any:
    """Return the backend of a model runner whose model chooses keys."""
    contract.check_version()
    from quire.integrations.sglang.dsa import QuireDsaBackend

    return QuireDsaBackend(model_runner)
