"""Quire as a plug-in attention backend of SGLang.

Choose it with `python -m sglang.launch_server --attention-backend quire`.

SGLang keeps scheduling, sampling, parallelism and the radix cache, and its code is not patched. It finds `register` by
the entry point `sglang.srt.plugins` and calls it in each of its processes. `plugin.py` registers the name, and
`contract.py` holds what differs between versions of SGLang. `backend.py` is the backend, and `steps.py` and `layers.py`
hold its state of a step and of a layer.
"""

from quire.integrations.sglang.plugin import register

__all__ = ["register"]
