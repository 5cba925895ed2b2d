"""Models of vLLM whose layers ask its registry for no attention backend, where Quire is the chosen one.

A model is registered under vLLM's own name. It is vLLM's class in all but one thing: where the user chose Quire, layers
that do not ask attend with it. Nothing of Quire's attention is imported where another backend is chosen.
"""

from typing import Any

from quire.integrations.vllm import contract

m3: Any = contract.load(contract.MINIMAX_M3)


class MiniMaxM3SparseForCausalLM(m3.MiniMaxM3SparseForCausalLM):
    """MiniMax M3, whose layers choose blocks of keys."""

    def __init__(self, *, vllm_config: Any, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        if contract.is_chosen(vllm_config):
            from quire.integrations.vllm.minimax_m3 import attend_with_quire

            attend_with_quire(self)
