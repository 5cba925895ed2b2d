"""Compositions: tokens of some sequences in one launch of a batch-invariant plan, and the trees of their results."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

import quire
from quire.dispatch.constants import forget
from quire.dispatch.request import Options
from quire.kernels import choose, formats, scratch
from quire.kernels.mla import variants as mla
from quire.kernels.portable import variants
from quire.kernels.portable.launch import PortableLaunch
from quire.testing import Problem, make_problem
from tests.proof.arrays import leaves
from tests.proof.tracer import Tracer


@dataclass
class World:
    """Sequences, and a cache that holds all of their keys.

    Attributes:
        problem: the sequences as prompts, so that each token has a query.
        trees: of the elements of q, k, v, and of each other tensor of numbers, by name.
    """

    problem: Problem
    trees: dict[str, np.ndarray]

    @classmethod
    def make(cls, spec: quire.AttentionSpec, lengths: Sequence[int], **options: Any) -> "World":
        """Return a world of sequences of some lengths."""
        problem = make_problem(spec, [(length, length) for length in lengths], **options)
        trees = {name: leaves(name, tuple(tensor.shape)) for name, tensor in tensors_of(problem).items()}
        return cls(problem, trees)

    def elsewhere(self, seed: int) -> "World":
        """Return the same sequences with their keys in other pages."""
        problem = self.problem
        count = problem.cache.k.shape[0]
        order = torch.cat(
            [
                torch.zeros(1, dtype=torch.int64),
                1 + torch.from_numpy(np.random.default_rng(seed).permutation(count - 1)),
            ]
        )
        place = torch.empty_like(order)
        place[order] = torch.arange(count)
        table = problem.batch.page_table
        batch = replace(problem.batch, page_table=torch.where(table < 0, table, place[table.long()].to(table.dtype)))
        per_page = [
            name
            for name in ("k", "v", "k_scale", "v_scale")
            if name in self.trees and self.trees[name].shape[0] == count
        ]
        cache = replace(
            problem.cache,
            **{
                name: formats.as_bytes(getattr(problem.cache, name))[order].view(getattr(problem.cache, name).dtype)
                for name in per_page
            },
        )
        trees = self.trees | {name: self.trees[name][order.numpy()] for name in per_page}
        return World(replace(problem, batch=batch, cache=cache), trees)


def tensors_of(problem: Problem) -> dict[str, torch.Tensor]:
    """Return the tensors of numbers that a kernel reads, by name."""
    cache = problem.cache
    kept = {"latents": cache.latents} if cache.is_latent else {"k": cache.k, "v": cache.v}
    found = kept | {"q": problem.q, "k_scale": cache.k_scale, "v_scale": cache.v_scale}
    return {name: x for name, x in (found | problem.tables).items() if x is not None}


@dataclass(frozen=True)
class Piece:
    """The tokens `start` to `stop` of a sequence, which attend to the keys before `stop`."""

    seq: int
    start: int
    stop: int


class Composition:
    """Pieces of a world in one batch.

    Args:
        world: the sequences.
        pieces: in the order of the batch. Pieces may be of the same sequence.
    """

    def __init__(self, world: World, pieces: Sequence[Piece]) -> None:
        self.world, self.pieces = world, list(pieces)
        problem = world.problem
        starts = problem.batch.query_starts.tolist()
        self.rows = [starts[p.seq] + i for p in pieces for i in range(p.start, p.stop)]
        lengths = torch.tensor([p.stop for p in pieces], dtype=torch.int32)
        counts = torch.tensor([0, *(p.stop - p.start for p in pieces)]).cumsum(0).to(torch.int32)
        table = problem.batch.page_table[[p.seq for p in pieces]]
        per_token = {}
        for name in ("key_begin", "key_end", "tree_bits"):
            whole = getattr(problem.batch, name)
            per_token[name] = None if whole is None else whole[self.rows]
        self.batch = quire.Batch(table, lengths, counts, **per_token)
        bounds = max(p.stop - p.start for p in pieces), max(p.stop for p in pieces)
        self.plan = quire.plan(
            problem.spec, self.batch, max_query_len=bounds[0], max_seq_len=bounds[1], num_tokens=len(self.rows),
            batch_invariant=True,
        )  # fmt: skip

    def launches(self) -> dict[str, Any]:
        """Return the launches that a plan for the batch may have, by name."""
        return choose.variants(self.plan.launch.request, Options(batch_invariant=True))[0]

    def trees(self, launch: Any) -> np.ndarray:
        """Return the trees of the results of each token, [tokens, heads, head_dim_v + 1]; the last is of the lse."""
        problem, q = self.world.problem, self.world.problem.q[self.rows]
        out, lse = self.empty_state()
        size = launch.scratch_size()
        workspace, tracer = scratch.allocate(size, torch.device("cpu")), Tracer()
        tensors = tensors_of(problem) | {"q": q}
        for name, tensor in tensors.items():
            trees = self.world.trees[name]
            tracer.add(formats.as_bytes(tensor), trees[self.rows] if name == "q" else trees)
        results = tracer.add(out), tracer.add(lse)
        if launch.num_partitions:
            tracer.add(workspace[size.counters :].view(torch.float32))
        runner = launch.bind(self.batch, workspace)
        with tracer.tracing(choose.variant_of(launch)):
            self.run(runner, q, out, lse)
        self.state = quire.State(out, lse)
        return np.concatenate([results[0].read_all(), results[1].read_all()[:, :, None]], 2)

    def empty_state(self) -> quire.State:
        """Return a state of NaN of the batch's tokens."""
        spec = self.world.problem.spec
        shape = len(self.rows), spec.num_q_heads, spec.head_dim_v
        return quire.State(torch.full(shape, float("nan"), dtype=spec.dtype), torch.full(shape[:2], float("nan")))

    def run(self, runner: Any, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Attend."""
        problem, rank = self.world.problem, self.world.problem.spec.kv_lora_rank
        queries = (q[:, :, :rank], q[:, :, rank:]) if problem.spec.latent else q
        runner(queries, problem.cache, out, lse, *(problem.tables.get(name) for name in ("sinks", "alibi_slopes")))

    def attend(self, launch: Any) -> quire.State:
        """Return the results of each token, of a launch that nothing traces."""
        state = self.empty_state()
        workspace = scratch.allocate(launch.scratch_size(), torch.device("cpu"))
        self.run(launch.bind(self.batch, workspace), self.world.problem.q[self.rows], *state)
        return state

    def by_token(self, launch: Any) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield the sequence and the position of each token, and the trees of its results."""
        trees = self.trees(launch)
        places = [(p.seq, at) for p in self.pieces for at in range(p.start, p.stop)]
        for (seq, at), of_token in zip(places, trees, strict=True):
            yield seq, at, of_token


CONSTEXPRS = PortableLaunch.combine_constexprs
TABLE, SPLIT, SMALL = variants.INVARIANT, variants.FIXED_SPLIT_SIZE, variants.SMALL


def small_tiles(split: int, config: str) -> AbstractContextManager[None]:
    """In this context, batch-invariant plans have splits of `split` keys, and tiles as `config` names them.

    Those of more rows follow from it as they do from the table's. A program of the second launch loads four states at
    a time, in place of 8 or 32.
    """
    return with_tiles(
        split, {size: {512: config} for size in (1, 2, 4)}, 0, lambda launch: CONSTEXPRS(launch) | {"AHEAD": 4}
    )


def real_tiles() -> AbstractContextManager[None]:
    """In this context, batch-invariant plans are those of the library, also where `small_tiles` is around it."""
    return with_tiles(SPLIT, TABLE, SMALL, CONSTEXPRS)


@contextmanager
def with_tiles(split: int, table: Any, small: int, constexprs: Any) -> Iterator[None]:
    """In this context, batch-invariant plans have splits of `split` keys and tiles of a table."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(variants, "FIXED_SPLIT_SIZE", split)
        patch.setattr(mla, "FIXED_SPLIT_SIZE", split)
        patch.setattr(variants, "INVARIANT", table)
        patch.setattr(variants, "SMALL", small)  # other tiles for narrow heads of 8 bits
        patch.setattr(PortableLaunch, "combine_constexprs", constexprs)
        variants.invariant_configs.cache_clear()
        forget()
        yield
    variants.invariant_configs.cache_clear()
    forget()
