"""The interface between a plan and a kernel family: `Launch`, a decision, and `Runner`, which carries it out.

A family is a folder with a `launch.py`. Its launch class is a frozen dataclass of host values. Its runner holds what is
kept from call to call: the batch, the scratch, and the compiled launches.
"""

from collections.abc import Callable, Hashable
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch

from quire import log
from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.request import Request
from quire.kernels.scratch import ScratchSize

T = TypeVar("T")


def once(method: Callable[[Any], T]) -> Callable[[Any], T]:
    """Keep the result of a method of a frozen dataclass, or of a function of one, with the object."""
    name = f"_{method.__name__}"

    @wraps(method)
    def kept(self: Any) -> T:
        found = self.__dict__.get(name)
        if found is None:
            found = method(self)
            object.__setattr__(self, name, found)
        return found

    return kept


@once
def constexprs_of(launch: Any) -> dict[str, Any]:
    """Return `launch.constexprs()`, which is computed once."""
    return launch.constexprs()


def key_of(kernel: str, *facts: Hashable, **constexprs: Any) -> Hashable:
    """Return the key of a kernel: its name, facts that decide what is compiled, and constexprs.

    Functions stand in it by their ids: Triton would hash their sources.
    """
    return kernel, *facts, *((name, id(c) if callable(c) else c) for name, c in constexprs.items())


def as_appending(launch: Any) -> Hashable:
    """Return whether a launch may append, and what else is compiled for one that does."""
    return launch.request.has_few_new_tokens, getattr(launch, "max_registers", None)


def kernels_of(launch: "Launch") -> frozenset[Hashable]:
    """Return what must be compiled for a launch, for every cache and call: of its own kernels and its fallback's."""
    fallback = getattr(launch, "fallback", None) or launch
    own = frozenset((False, as_appending(launch), key) for key in launch.compile_keys())
    return own | {(True, as_appending(fallback), key) for key in fallback.compile_keys()}


def bind_fallback(runner: Any, cache: PagedKVCache, q: Any = None) -> "Runner":
    """Bind the fallback of a runner's launch, which serves a cache and queries that the launch does not."""
    launch = runner.decided
    if log.is_on(log.LAUNCH):
        line = f"{launch.fallback.name} in place of {launch.name}, which does not serve {launch.unserved(cache, q)}"
        log.say_once(log.LAUNCH, f"{line}, {log.words_of(launch.request.spec)}", (line, launch.request.spec))
    return launch.fallback.bind(runner.batch, runner.workspace)


def states_at_once(num_states: int) -> int:
    """Return how many states a program of `combine.combine_kernel` reads at once; each number is a kernel."""
    return 4 if num_states <= 4 else 16


class Runner(Protocol):
    """Run a decided launch; `quire.attention` has checked the arguments.

    q is the queries [num_tokens, num_q_heads, head_dim]. For a spec with latents, it is always the pair of
    q_nope [num_tokens, num_q_heads, kv_lora_rank] and q_pe [num_tokens, num_q_heads, qk_rope_head_dim], which may be
    views of one tensor. q_pe is None where there are no rotary columns. With out_scale, [1] float32, out is
    float8_e4m3fn.
    """

    def __call__(
        self,
        q: Any,
        cache: PagedKVCache,
        out: torch.Tensor,
        lse: torch.Tensor | None,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        out_scale: torch.Tensor | None = None,
    ) -> None: ...


class Launch:
    """A decision of how to launch attention: a frozen dataclass. A family overrides what raises, and what differs.

    Attributes:
        request: the request that was decided about.
    """

    request: Request

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        raise NotImplementedError

    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch that the launch needs."""
        return ScratchSize()

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, without the fallback's.

        Two keys are equal if and only if the same is compiled, for one spec, device and cache, and one kind of call.
        """
        raise NotImplementedError

    def alike(self) -> "tuple[Launch, ...]":
        """Return the launches that differ in what is decided by numbers, and for which kernels are compiled."""
        return (self,)

    def with_most_partitions(self) -> "Launch":
        """Return the launch with the most partitions that one with its kernels may have, which is for scratch alone."""
        return self

    def for_cache(self, cache: PagedKVCache, q: Any = None) -> "Launch":
        """Return the launch for a cache, and for queries if they are given: this one, or its fallback."""
        return self

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with scratch in a workspace of `scratch_size` bytes."""
        raise NotImplementedError

    def __str__(self) -> str:
        """Describe the launch in one line."""
        raise NotImplementedError
