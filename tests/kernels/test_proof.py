"""A token's result in a batch-invariant plan is one expression of float operations, in whatever batch it is computed.

The expressions are traced out of the jitted kernels (tests/proof). docs/proof.md says what follows from this, and under
which assumptions.
"""

from dataclasses import replace
from itertools import combinations, pairwise, product

import numpy as np
import pytest
import torch

import quire
from quire.dispatch.request import cdiv
from tests.extended import extended
from tests.proof.compositions import Composition, Piece, World, real_tiles, small_tiles
from tests.proof.table import Table

GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.one_triton,
    pytest.mark.triton,
    pytest.mark.skipif(GPU, reason="traces what Triton's interpreter computes"),
]
HEADS = {"num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "dtype": torch.float16}
SPLIT, TILES = 32, "16x16 w4 s3 p2"  # two tiles a split
SIZES = TILES, "32x16 w4 s3u p2"


@pytest.fixture(autouse=True)
def tiles(request):
    """Small splits and tiles, unless a test asks for others."""
    split, config = getattr(request, "param", (SPLIT, TILES))
    with small_tiles(split, config):
        yield split, config


def in_one_chunk(world, start=0):
    """Return the trees of the first sequence's tokens by position, of one chunk from `start` to the end.

    It is cut nowhere, and its tiles have 16 rows.
    """
    composition = Composition(world, [Piece(0, start, world.problem.seq_lens[0])])
    launch = next(iter(composition.launches().values()))
    assert not launch.num_partitions and launch.config.block_m == 16
    return {at: trees for _, at, trees in composition.by_token(launch)}


def assert_equal(composition, launch, expected, what):
    """Fail unless each token of the first sequence has the trees that are expected of it."""
    tokens = [(at, trees) for seq, at, trees in composition.by_token(launch) if seq == 0]
    assert tokens
    different = sorted({at for at, trees in tokens if not np.array_equal(trees, expected[at])})
    assert not different, f"{what}: tokens {different} have other trees than in one chunk"


@pytest.mark.parametrize("window", [None, 20])
def test_a_tree_has_the_keys_that_its_token_sees_and_no_others(window):
    """A key or a value by another name changes the trees of the tokens that see it, and of no others."""
    world = World.make(quire.AttentionSpec(**HEADS, sliding_window=window), (40, 20))
    before = in_one_chunk(world)
    for name, key in (("k", 33), ("v", 5)):
        page, slot = world.problem.batch.page_table[0, key // 16], key % 16
        renamed = world.trees[name].copy()
        renamed[page, slot] += np.uint64(1)
        after = in_one_chunk(World(world.problem, world.trees | {name: renamed}))
        changed = {at for at in range(40) if (before[at] != after[at])[:, :-1].all()}
        assert changed == {at for at in range(key, 40) if window is None or at - key < window}
        assert all(at in changed or np.array_equal(before[at], after[at]) for at in range(40))
        assert all((before[at][:, -1] != after[at][:, -1]).all() == (name == "k") for at in changed)  # of the lse


CONTEXT = 50
CHUNKS = {
    "decode": ([Piece(0, at, at + 1) for at in (0, 15, 16, 31, 32, 47, 48, 49)], ("whole", "cut", "joined")),
    "chunks": ([Piece(0, start, stop) for start, stop in combinations((0, 1, 31, 33, 48, 50), 2)], ("whole", "cut")),
    "drafts": ([Piece(0, stop - count, stop) for stop in (8, 33, 50) for count in (2, 5)], ("cut", "joined")),
}
ALL = [Piece(0, start, stop) for start, stop in combinations(range(CONTEXT + 1), 2)], ("whole", "cut")


@pytest.mark.parametrize("pieces, uses", [*CHUNKS.values(), extended(*ALL)], ids=[*CHUNKS, "all"])
def test_every_cut_of_a_context_into_chunks_has_one_tree(pieces, uses):
    """A token's launch has one chunk of its context, and any others. The 1,275 chunks make 2^49 cuts of a context."""
    world = World.make(quire.AttentionSpec(**HEADS), (CONTEXT,))
    expected = in_one_chunk(world)
    for first in range(0, len(pieces), 60):
        composition = Composition(world, pieces[first : first + 60])
        for name, launch in composition.launches().items():
            if name.split()[-1] in uses:
                assert_equal(composition, launch, expected, name)


def partitions_of(composition, launch, size):
    """Return the launch with so many partitions that each has `size` splits; None if no number gives that."""
    block_m, group = launch.config.block_m, composition.world.problem.spec.group_size
    split = launch.fixed_split_size
    units = sum(cdiv((p.stop - p.start) * group, block_m) * cdiv(p.stop, split) for p in composition.pieces)
    number = cdiv(units, size)
    return replace(launch, num_partitions=number) if cdiv(units, number) == size else None


@pytest.mark.parametrize("use", ["cut", "joined"])
@pytest.mark.parametrize("tiles", [(2 * SPLIT, "16x32 w4 s3 p2")], indirect=True, ids=["four sums"])
def test_every_cut_of_splits_into_partitions_has_one_tree(use, tiles):
    """One piece has four splits. Sequences before it decide in which of them a partition begins."""
    split, config = tiles
    end = 4 * split - 5
    world = World.make(quire.AttentionSpec(**HEADS), (end, 10))
    expected, found = in_one_chunk(world, end - 8), {}
    for size, before, after in product(range(1, 5), range(4), range(4)):
        queries = 1 + 2 * (before % 2)
        one = Piece(1, 3, 4)
        composition = Composition(world, [one] * before + [Piece(0, end - queries, end)] + [one] * after)
        cuts = tuple(at - before for at in range(size, before + 4, size) if at > before)
        launch = partitions_of(composition, composition.launches()[f"portable {config} {use}"], size)
        if launch is not None and queries not in found.setdefault(cuts, set()):
            assert_equal(composition, launch, expected, f"{cuts}, {launch}")
            found[cuts].add(queries)
    assert set(found) == {(), (1,), (2,), (3,), (1, 3), (1, 2, 3)} and {1, 3} in found.values()


SOME_BORDERS = 0, 33, 70
MANY_BORDERS = 0, 1, 7, 16, 17, 31, 32, 33, 48, 49, 63, 64, 65, 70


@pytest.mark.parametrize(
    "borders, sizes, uses, count",
    [
        (SOME_BORDERS, SIZES[:1], ("whole", "cut"), 20_000),
        extended(MANY_BORDERS, SIZES, ("whole", "cut", "joined"), 1_000_000),
    ],
    ids=["some", "a million"],
)
def test_random_compositions_have_the_trees_of_row_blocks_that_were_traced(borders, sizes, uses, count):
    """Each row block of each chunk is traced once for each of the places where partitions may cut it.

    A million compositions take ten minutes: those of tracing 3,472 row blocks, in the launches of two heights of tiles.
    """
    world = World.make(quire.AttentionSpec(**HEADS), (borders[-1], SPLIT))
    names = [f"portable {size} {use}" for size in sizes for use in uses]
    table = Table(world, borders, names, SPLIT, in_one_chunk(world))
    assert table.differing() == 0
    judged, row_blocks, failed = table.judge(count, seed=1)
    print(f"{table.size} row blocks were traced; {judged} compositions have {row_blocks}")
    assert judged == count and failed == 0


FEATURES = {
    "plain": {},
    "window": {"sliding_window": 40},
    "sinks": {"sinks": True},
    "softcap": {"softcap": 20.0},
    "alibi": {"alibi": True},
    "several heads": {"num_q_heads": 6, "num_kv_heads": 2},
    "panels": {"head_dim": 80, "head_dim_v": 40},  # two of 64 rows, padded columns in one of 16
    "float32": {"dtype": torch.float32},
    "int8": {"kv_dtype": torch.int8},
    "fp8 in pairs": {"kv_dtype": torch.float8_e4m3fn, "head_dim": 32},
    "fp8": {"kv_dtype": torch.float8_e5m2},
    "intervals": {},
}
OPTIONS = {"int8": {"scales": "token"}, "intervals": {"per_token": quire.intervals.causal}}


def random_pieces(random, lengths, tokens):
    """Return pieces of the first sequence that are made of all `tokens`, and pieces of others among them."""
    first, last = tokens
    borders = sorted({first, last, *random.integers(first, last + 1, random.integers(0, 4)).tolist()})
    pieces = [Piece(0, start, stop) for start, stop in pairwise(borders)]
    for _ in range(random.integers(0, 4)):
        seq = int(random.integers(1, len(lengths)))
        start = int(random.integers(0, lengths[seq]))
        pieces.append(Piece(seq, start, int(random.integers(start + 1, lengths[seq] + 1))))
    return [pieces[i] for i in random.permutation(len(pieces))]


def check_random(features, seed, count, kinds):
    random = np.random.default_rng(seed)
    spec, lengths = quire.AttentionSpec(**HEADS | FEATURES[features]), (100, 45, 7)
    world = World.make(spec, lengths, seed=seed, **OPTIONS.get(features, {}))
    tokens = 70, 100
    expected = in_one_chunk(world, tokens[0])
    launched = set()
    for i in range(count):
        composition = Composition(world.elsewhere(seed + i), random_pieces(random, lengths, tokens))
        launches = composition.launches()
        for name in random.permutation(list(launches))[:kinds]:
            launch = launches[name]
            if launch.num_partitions:
                launch = replace(launch, num_partitions=int(random.integers(1, 9)))
            assert_equal(composition, launch, expected, f"{features}, seed {seed}, {i}: {composition.pieces}, {launch}")
            launched.add(name)
    return launched


@pytest.mark.parametrize("features", FEATURES)
def test_random_batches_have_the_trees_of_one_chunk(features):
    """Other sequences, pages, chunks, drafts, launches and partitions."""
    check_random(features, 1, 2, 2)


@pytest.mark.extended
@pytest.mark.parametrize("seed", range(2, 8))
@pytest.mark.parametrize("features", FEATURES)
def test_more_random_batches_have_the_trees_of_one_chunk(features, seed):
    launched = check_random(features, seed, 8, 6)
    assert {name.split()[-1] for name in launched} == {"whole", "cut", "joined"}


@pytest.mark.parametrize("dtype", [torch.float16, extended(torch.float32)], ids=str)
@pytest.mark.parametrize("tiles", [(64, TILES)], indirect=True, ids=[""])
def test_latents_have_one_tree(dtype, tiles):
    """Their launch has one tile. Partitions end where a band of row blocks ends, or cut it."""
    spec = quire.AttentionSpec.mla(
        num_q_heads=3, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=dtype, softcap=5.0
    )
    world, start, stop = World.make(spec, (150, 70)), 125, 150
    others = [Piece(1, 30, 37), Piece(1, 69, 70)]
    expected = None
    for pieces, partitions in (
        ([Piece(0, start, stop)], (1, 2, 3, 7)),
        ([Piece(0, stop - 1, stop)], (1, 2, 3)),
        ([*others, Piece(0, start, 129), Piece(0, 129, 132)], (2, 5)),
    ):
        composition = Composition(world, pieces)
        (launch,) = composition.launches().values()
        assert launch.kernel == "mla" and launch.fixed_split_size == 64
        for number in partitions:
            launch = replace(launch, num_partitions=number)
            expected = expected or {at: trees for _, at, trees in composition.by_token(launch)}
            assert_equal(composition, launch, expected, f"{pieces}, {launch}")


def test_splits_and_tiles_of_their_real_sizes_have_one_tree():
    """Of 256 keys, and tiles of 64, as plans have them for heads of 48 in the interpreter."""
    world = World.make(quire.AttentionSpec(**HEADS | {"head_dim": 48}), (600, 300))
    with real_tiles():
        expected = in_one_chunk(world, 590)
        for pieces in ([Piece(0, 599, 600)], [Piece(1, 290, 300), Piece(0, 590, 597), Piece(0, 597, 600)]):
            composition = Composition(world, pieces)
            for name, launch in composition.launches().items():
                assert launch.fixed_split_size == 256 and launch.config.block_n == 64
                if not (name.endswith("joined") and len(pieces) > 1):
                    assert_equal(composition, launch, expected, name)
