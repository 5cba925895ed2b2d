"""A token's bits in a batch-invariant plan are those of one prompt, in random compositions through the interpreter.

Which tokens, chunks, drafts and other sequences are in a batch, which launch it has, and where its partitions end are
drawn at random. The proof (test_proof.py) compares expressions; here it is numbers.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

import quire
from tests.extended import extended
from tests.kernels.test_proof import FEATURES, HEADS, OPTIONS
from tests.proof.compositions import Composition, Piece, World, small_tiles

pytestmark = [
    pytest.mark.one_triton,
    pytest.mark.triton,
    pytest.mark.skipif(torch.cuda.is_available(), reason="compares what Triton's interpreter computes"),
]
LATENTS = {"num_q_heads": 4, "head_dim": 48, "head_dim_v": 32, "softmax_scale": 0.2, "latent": True}
SPECS = FEATURES | {"latents": LATENTS, "e4m3 latents": LATENTS | {"kv_dtype": torch.float8_e4m3fn}}
TILES = (32, "16x16 w4 s3 p2"), (64, "16x32 w4 s3 p2")  # keys of a split, and tiles
COMPOSITIONS = 30  # of a world


def multiply(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
    """Multiply tiles one column after the other. NumPy orders sums by the shapes, and tensor cores do not."""
    x, y = (
        interpreter._convert_float(each.data, each.dtype, tl.float16, None).view(np.float16)
        if each.dtype.primitive_bitwidth == 8
        else each.data
        for each in (a, b)
    )
    acc = np.array(d.data, np.float32)
    for k in range(x.shape[1]):
        acc += x[:, k : k + 1].astype(np.float32) * y[k : k + 1].astype(np.float32)
    return interpreter.TensorHandle(acc, d.dtype.scalar)


def draw_pieces(random: np.random.Generator, lengths: tuple[int, ...]) -> list[Piece]:
    """Draw up to four pieces: decoded tokens, drafts and chunks."""
    pieces = []
    for seq in random.choice(len(lengths), random.integers(1, 5), p=(0.6, 0.3, 0.1)):
        most = (2, 2, 9, 41)[int(random.integers(4))]
        size = min(lengths[seq], int(random.integers(1, most)))
        stop = int(random.integers(size, lengths[seq] + 1))
        pieces.append(Piece(int(seq), stop - size, stop))
    return pieces


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor as integers, so that NaN and the sign of a zero count."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("worlds, count", [(1, 2), extended(12, COMPOSITIONS)], ids=["some", "360"])
def test_random_compositions_have_the_bits_of_one_prompt(name, worlds, count, monkeypatch):
    """Extended, these are 5,040 compositions."""
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", multiply)
    random = np.random.default_rng(list(SPECS).index(name))
    for world_seed in range(worlds):
        split, config = TILES[1 if "latents" in name else int(random.integers(2))]
        lengths = int(random.integers(90, 150)), int(random.integers(30, 70)), int(random.integers(1, 20))
        with small_tiles(split, config):
            spec = quire.AttentionSpec(**HEADS | SPECS[name])
            world = World.make(spec, lengths, seed=world_seed, **OPTIONS.get(name, {}))
            prompts = Composition(world, [Piece(seq, 0, length) for seq, length in enumerate(lengths)])
            whole = prompts.attend(prompts.plan.launch)
            for _ in range(count):
                composition = Composition(world, draw_pieces(random, lengths))
                launches = list(composition.launches().values())
                launch = launches[int(random.integers(len(launches)))]
                if launch.num_partitions:
                    launch = replace(launch, num_partitions=int(random.integers(1, 9)))
                for one, all_rows in zip(composition.attend(launch), whole, strict=True):
                    assert torch.equal(as_bits(one), as_bits(all_rows[composition.rows])), (composition.pieces, launch)
