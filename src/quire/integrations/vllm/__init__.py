"""Quire as a plug-in attention backend of vLLM.

Choose it with `vllm serve MODEL --attention-backend CUSTOM`, or `--attention-backend QUIRE` from vLLM 0.32 on.

Scheduling, sampling, parallelism and speculation stay vLLM's. Nothing of vLLM is patched. vLLM finds `register` by the
entry point `vllm.general_plugins` and calls it in each of its processes. `contract.py` holds what differs between
versions of vLLM, `backend.py` the rest.
"""

from quire.integrations.vllm.contract import register

__all__ = ["register"]
