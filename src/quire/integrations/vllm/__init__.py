"""Quire as a plug-in attention backend of vLLM.

Choose it with `vllm serve MODEL --attention-backend CUSTOM`, or `--attention-backend QUIRE` from vLLM 0.32 on.

vLLM keeps scheduling, sampling, parallelism and speculation, and its code is not patched. It finds `register` by the
entry point `vllm.general_plugins` and calls it in each of its processes. `contract.py` holds what differs between
versions of vLLM. `backend.py` is the backend, `mla.py`, `sparse.py` and `prefill.py` are those of latent attention, and
`choice.py` chooses between them. `models.py` has the models whose layers ask for no backend, and `minimax_m3.py` the
backend of theirs.
"""

from quire.integrations.vllm.contract import register

__all__ = ["register"]
