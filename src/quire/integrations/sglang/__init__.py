"""Quire as a plug-in attention backend of SGLang.

Choose it with `python -m sglang.launch_server --attention-backend quire`.

Scheduling, sampling, parallelism and the radix cache stay SGLang's. Nothing of SGLang is patched. SGLang finds
`register` by the entry point `sglang.srt.plugins` and calls it in each of its processes. `contract.py` holds what
differs between versions of SGLang, `backend.py` the backend, and `steps.py` what it keeps of a step.
"""

from quire.integrations.sglang.contract import register

__all__ = ["register"]
