"""Trees: which one serves whom, and what walking one costs."""

import json
import sys
import timeit
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import quire
from quire.cli import main
from quire.dispatch import tree as trees
from quire.dispatch.config import hopper_config
from quire.dispatch.tree import features_of, load_tree, prefers_hopper, rounded, select, walk
from quire.plan import decide, scratch_bytes
from quire.targets import TARGETS

SPEC = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
TRAITS = replace(TARGETS["sm90"].properties, num_sms=120)  # of no device that a tree is shipped for
LEAF = {"block_m": 16, "block_n": 32, "num_warps": 8, "num_stages": 2, "full_tile_loop": False, "programs_per_sm": 1}
COVERS = [{"query_bytes": 2, "kv_bytes": 2, "head_dim": 128, "head_padding": 0}]


@pytest.fixture(autouse=True)
def user_trees(tmp_path, monkeypatch):
    """A place of their own for the user's trees, and nothing remembered from other tests."""
    monkeypatch.setattr(trees, "USER_TREES", tmp_path)

    def forget():
        for function in (trees.fitted_trees, trees.choose_tree, select, prefers_hopper):
            function.cache_clear()

    forget()
    yield tmp_path
    forget()


def own_tree(folder: Path, properties=TRAITS, name: str = "mine", **parts) -> None:
    tree = {
        "fitted_on": {"device": "here"},
        "properties": asdict(properties),
        "covers": COVERS,
        "attention": LEAF,
        "hopper": False,
    } | parts
    (folder / f"{name}.json").write_text(json.dumps(tree))


def test_a_user_s_own_tree_comes_first_where_it_was_fitted(user_trees):
    seen = rounded(SPEC, TRAITS, 1, 2048, 32)
    before, _ = select(SPEC, TRAITS, *seen)
    own_tree(user_trees)
    trees.fitted_trees.cache_clear(), trees.choose_tree.cache_clear(), select.cache_clear()
    tile, why = select(SPEC, TRAITS, *seen)
    assert tile.leaf == LEAF != before.leaf and "mine.json tree at" in why
    assert not prefers_hopper(SPEC, TRAITS, *rounded(SPEC, TRAITS, 4096, 4096, 4096))
    other = replace(TRAITS, num_sms=TRAITS.num_sms - 2)
    assert "mine.json" not in select(SPEC, other, *seen)[1]  # another device
    wide = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=80)
    assert "mine.json" not in select(wide, TRAITS, *seen)[1]  # a head dim it was not fitted for


def test_a_leaf_may_leave_it_to_the_generic_tree_and_batch_invariant_plans_always_do(user_trees):
    seen, few = rounded(SPEC, TRAITS, 1, 2048, 32), rounded(SPEC, TRAITS, 1, 64, 32)
    generic = [select(SPEC, TRAITS, *s)[0] for s in (seen, few)]
    batch = quire.Batch(torch.zeros(32, 1, dtype=torch.int32), torch.zeros(32, dtype=torch.int32))
    invariant = decide(SPEC, batch, TRAITS, 1, 2048, 32, batch_invariant=True).tile
    own_tree(user_trees, attention=["keys_per_seq", 100, LEAF, "generic"], hopper="generic")
    for function in (trees.fitted_trees, trees.choose_tree, select, prefers_hopper):
        function.cache_clear()
    assert select(SPEC, TRAITS, *seen)[0] == generic[0] and "mine.json" in select(SPEC, TRAITS, *seen)[1]
    assert select(SPEC, TRAITS, *few)[0].leaf == LEAF != generic[1].leaf
    assert prefers_hopper(SPEC, TRAITS, *rounded(SPEC, TRAITS, 4096, 4096, 4096))
    assert decide(SPEC, batch, TRAITS, 1, 64, 32).tile.leaf == LEAF
    assert decide(SPEC, batch, TRAITS, 1, 64, 32, batch_invariant=True).tile == invariant


def test_a_broken_tree_of_the_user_s_is_told(user_trees):
    (user_trees / "broken.json").write_text('{"attention": {}}')
    with pytest.raises(ValueError, match="must be a tree that `quire tune` wrote"):
        trees.fitted_trees(TRAITS)


def test_unknown_devices_have_the_generic_tree():
    unknown = replace(TRAITS, num_sms=77, shared_memory=100 * 1024)
    tile, why = select(SPEC, unknown, *rounded(SPEC, unknown, 1, 2048, 32))
    assert why.startswith("generic tree at") and tile.shared_memory(SPEC) <= unknown.shared_memory


def test_the_choice_of_the_hopper_kernel_is_the_tree_s():
    unknown = replace(TRAITS, num_sms=77)
    assert [prefers_hopper(SPEC, unknown, *rounded(SPEC, unknown, q, 4096, q)) for q in (1, 32, 33, 4096)] == [
        False,
        False,
        True,
        True,
    ]


def test_features_are_bounds_rounded_up():
    seen = rounded(SPEC, TRAITS, 5, 1000, 70)
    assert seen == (32, 32, 1024, 8)
    features = features_of(SPEC, TRAITS, *seen)
    assert (features["group_size"], features["head_dim"], features["head_padding"], features["kv_bytes"]) == (
        4,
        128,
        0,
        2,
    )


def depth(tree) -> int:
    return 1 + max(depth(tree[2]), depth(tree[3])) if isinstance(tree, list) else 0


def shipped() -> list[str]:
    return sorted(path.stem for path in (Path(trees.__file__).parent / "trees").glob("*.json"))


@pytest.mark.parametrize("name", shipped())
def test_walking_a_shipped_tree_takes_under_two_microseconds(name):
    tree = load_tree(name)["attention"]
    features = features_of(SPEC, TRAITS, *rounded(SPEC, TRAITS, 2048, 8192, 4096))
    calls = 2000
    assert min(timeit.repeat(lambda: walk(tree, features), number=calls, repeat=7)) / calls < 2e-6


@pytest.mark.parametrize("name", [name for name in shipped() if name != "generic"])
def test_a_fitted_tree_tells_where_it_comes_from_and_is_small(name):
    tree = load_tree(name)
    assert {"device", "triton", "commit", "date", "cases", "regret"} <= tree["fitted_on"].keys()
    assert {"mean", "worst"} <= tree["fitted_on"]["regret"]["held_out"].keys()
    assert depth(tree["attention"]) <= 6
    asked = {n[0] for n in nodes(tree["attention"])} | {n[0] for n in nodes(tree["hopper"])}
    assert asked <= features_of(SPEC, TRAITS, 1, 1, 1, 1).keys()


def nodes(tree):
    if isinstance(tree, list):
        yield tree
        yield from nodes(tree[2])
        yield from nodes(tree[3])


def test_a_cached_choice_costs_a_look_up():
    seen = rounded(SPEC, TRAITS, 1, 2048, 32)
    select(SPEC, TRAITS, *seen)
    calls = 500
    assert min(timeit.repeat(lambda: select(SPEC, TRAITS, *seen), number=calls, repeat=7)) / calls < 20e-6


def test_a_tree_is_told_in_words(user_trees, capsys):
    own_tree(user_trees)
    assert main(["tune", "--explain", str(user_trees / "mine.json")]) == 0
    text = capsys.readouterr().out
    assert "device here" in text and "16 rows × 32 keys, 8 warps, 2 stages" in text and "head_dim 128" in text
    (user_trees / "mine.json").unlink()
    assert main(["tune", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "mine" not in text and "up to" in text and " rows × " in text
    (user_trees / "none.json").write_text("[]")
    assert main(["tune", "--explain", str(user_trees / "none.json")]) == 2


def test_without_a_gpu_there_is_nothing_to_tune(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["tune", "--quick"]) == 2
    assert "must have a GPU" in capsys.readouterr().err
    assert "quire.tuning.sweep" in sys.modules


def test_which_configuration_of_the_hopper_kernel_serves_a_spec():
    def tile(properties=TRAITS, short=False, **changes):
        return hopper_config(replace(SPEC, **changes), properties, short)

    assert (tile().num_warpgroups, tile(short=True).num_warpgroups) == (2, 1)
    fp8 = {"kv_dtype": torch.float8_e4m3fn}
    assert tile(**fp8).num_byte_stages and not tile(**fp8).in_fp8 and tile(short=True, **fp8).num_warpgroups == 2
    assert tile(**fp8, allow_fp8=True).in_fp8 and not tile(allow_fp8=True).in_fp8
    assert not tile(kv_dtype=torch.int8, allow_fp8=True).in_fp8  # nothing but e4m3 has such products
    for reason, changes in (
        ("not a Hopper GPU", {"properties": TARGETS["sm80"].properties}), ("float32 queries", {"dtype": torch.float32, "kv_dtype": torch.float32}),
        ("head_dim 256, 256 of a float8_e4m3fn cache", {"head_dim": 256, "head_dim_v": 256, **fp8}), ("head_dim 80", {"head_dim": 80, "head_dim_v": 80}),
    ):  # fmt: skip
        assert reason in tile(**changes), tile(**changes)


def test_keys_are_cut_where_blocks_of_prompts_are_few():
    def parts(max_query_len, max_seq_len, num_seqs=1, num_tokens=None, **options):
        starts = torch.zeros(num_seqs + 1, dtype=torch.int32)
        batch = quire.Batch(torch.zeros(num_seqs, 1, dtype=torch.int32), starts[1:], starts)
        return decide(
            SPEC,
            batch,
            replace(TRAITS, num_sms=128),
            max_query_len,
            max_seq_len,
            num_tokens or num_seqs * max_query_len,
            **options,
        )

    chunk = parts(64, 16384)
    assert (chunk.kernel, chunk.num_parts, chunk.num_shares) == ("hopper", 8, 0) and "their keys in 8 parts" in repr(
        chunk
    )
    assert (
        chunk.instead.kernel == "triton"
        and chunk.instead.num_shares > 0
        and scratch_bytes(chunk)[0] >= scratch_bytes(chunk.instead)[0]
    )
    assert scratch_bytes(chunk) == scratch_bytes(parts(128, 9999)) != scratch_bytes(parts(512, 16384))
    assert parts(64, 2048).num_parts == 8 and parts(64, 1200).num_parts == 4  # two tiles each at least
    assert [parts(n, 16384).num_parts for n in (31, 32, 128, 256, 512, 4096)] == [1, 15, 4, 2, 1, 1]
    assert parts(64, 16384, num_seqs=2).num_parts == 4
    assert parts(64, 16384, num_seqs=3, num_tokens=70).num_parts == 1  # some of them may be decoding
    assert (
        parts(64, 1024).num_parts
        == parts(64, 16384, batch_invariant=True).num_parts
        == parts(64, 16384, kernel="triton").num_parts
        == 1
    )
