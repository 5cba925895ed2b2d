"""Trees: which one serves a spec on a device, what is legal in one, and what they choose."""

import errno
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import quire
from quire.cli import main
from quire.compile_ahead.launches import launches_within
from quire.dispatch import tree as trees
from quire.dispatch import tree_file
from quire.dispatch.config import CostModel, HopperConfig, KernelConfig
from quire.dispatch.device import compile_for
from quire.dispatch.request import Bounds, Options, Request
from quire.dispatch.tree import (
    cost_model,
    features_of,
    fitted_trees,
    hopper_config,
    prefers_hopper,
    rounded,
    select,
)
from quire.dispatch.tree_file import (
    BATCH_FEATURES,
    SPEC_FEATURES,
    check_choice,
    check_config,
    check_cost_model,
    check_nodes,
    check_tree,
    load_tree,
    shipped_trees,
)
from quire.kernels.launch import kernels_of
from quire.kernels.shared_prefix.launch import levels_of
from quire.launch_codec import decode, decode_options
from quire.plan import decide, decide_launch
from quire.targets import TARGETS
from tests.extended import extended

SPEC = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
PROPERTIES = replace(TARGETS["sm90"].properties, num_sms=120)  # of no device that a tree is shipped for
LEAF = {"block_m": 16, "block_n": 32, "num_warps": 8, "num_stages": 2, "full_tile_loop": False, "programs_per_sm": 1}
COVERS = [{"query_bytes": 2, "kv_bytes": 2, "head_dim": 128, "head_padding": 0}]


@pytest.fixture(autouse=True)
def user_trees(tmp_path, monkeypatch):
    """A home directory with a folder for the user's trees, and nothing remembered from other tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config" / "quire" / "trees"
    folder.mkdir(parents=True)
    trees.forget_trees()
    yield folder
    trees.forget_trees()


def own_tree(folder: Path, **parts) -> None:
    tree = {"fitted_on": {"device": "here"}, "properties": asdict(PROPERTIES), "covers": COVERS, "attention": LEAF}
    (folder / "mine.json").write_text(json.dumps(tree | {"hopper": False} | parts))


def test_a_tree_says_for_which_memory_it_is_or_serves_any(user_trees):
    slower = replace(PROPERTIES, memory_gbps=PROPERTIES.memory_gbps // 2)
    own_tree(user_trees)
    trees.forget_trees()
    another_card = replace(PROPERTIES, memory_gbps=PROPERTIES.memory_gbps * 49 // 48)
    assert [len(trees.fitted_trees(device)) for device in (PROPERTIES, another_card, slower)] == [1, 1, 0]
    own_tree(user_trees, properties={k: v for k, v in asdict(PROPERTIES).items() if k != "memory_gbps"})
    trees.forget_trees()
    assert [len(trees.fitted_trees(device)) for device in (PROPERTIES, slower)] == [1, 1]


def test_a_user_s_own_tree_comes_first_where_it_was_fitted(user_trees):
    seen = rounded(SPEC, PROPERTIES, 1, 2048, 32)
    before, _ = select(SPEC, PROPERTIES, *seen)
    own_tree(user_trees)
    trees.forget_trees()
    config, why = select(SPEC, PROPERTIES, *seen)
    assert config.leaf == LEAF != before.leaf
    assert "mine.json tree at" in why
    assert not prefers_hopper(SPEC, PROPERTIES, *rounded(SPEC, PROPERTIES, 4096, 4096, 4096))
    other = replace(PROPERTIES, num_sms=PROPERTIES.num_sms - 2)
    assert "mine.json" not in select(SPEC, other, *seen)[1]  # another device
    wide = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=80)
    assert "mine.json" not in select(wide, PROPERTIES, *seen)[1]  # a head dim it was not fitted for


def decided(max_query_len: int, max_seq_len: int, num_tokens: int, num_seqs: int, device=PROPERTIES, **options):
    """Return the launch that is decided for a batch, with cu_seqlens_q where sequences may have several queries."""
    bounds = Bounds(max_query_len, max_seq_len, num_tokens)
    return decide(Request(SPEC, num_seqs, max_query_len > 1, bounds, device), Options(**options))[0]


def test_a_leaf_may_leave_it_to_the_generic_tree_and_batch_invariant_plans_always_do(user_trees):
    seen, few = rounded(SPEC, PROPERTIES, 1, 2048, 32), rounded(SPEC, PROPERTIES, 1, 64, 32)
    generic = [select(SPEC, PROPERTIES, *s)[0] for s in (seen, few)]
    invariant = decided(1, 2048, 32, 32, batch_invariant=True).config
    own_tree(user_trees, attention=["keys_per_seq", 100, LEAF, "generic"], hopper="generic")
    trees.forget_trees()
    config, why = select(SPEC, PROPERTIES, *seen)
    assert config == generic[0]
    assert "mine.json" in why
    assert select(SPEC, PROPERTIES, *few)[0].leaf == LEAF != generic[1].leaf
    assert prefers_hopper(SPEC, PROPERTIES, *rounded(SPEC, PROPERTIES, 4096, 4096, 4096))
    assert decided(1, 64, 32, 32).config.leaf == LEAF
    assert decided(1, 64, 32, 32, batch_invariant=True).config == invariant


def test_batch_invariant_tiles_have_as_many_keys_for_every_number_of_queries():
    def of(queries, num_tokens=None, seq_len=8192, **options):
        return decided(queries, seq_len, num_tokens or queries, 1, batch_invariant=True, **options)

    few, short = [of(queries) for queries in (1, 4, 8, 16, 64)], of(1, seq_len=40)
    prompt, forced = of(2048), of(64, kernel="hopper")
    assert [launch.config.block_m for launch in few] == [16, 16, 32, 64, 128]
    assert {launch.name for launch in few} == {"split_kv"}
    assert (prompt.name, prompt.fallback.name, forced.name) == ("hopper", "block", "hopper")
    tiles = {launch.config.block_n for launch in (*few, short, prompt, prompt.fallback, forced)}
    splits = {launch.fixed_split_size for launch in (*few, short, prompt, prompt.fallback, forced)}
    assert len(tiles) == len(splits) == 1 and splits.pop() % tiles.pop() == 0


def test_batch_invariant_prompts_with_wide_values_have_a_part_of_the_columns_at_a_time():
    def of(head_dim_v):
        spec = quire.AttentionSpec(num_q_heads=16, num_kv_heads=8, head_dim=256, head_dim_v=head_dim_v)
        request = Request(spec, 1, True, Bounds(2048, 2048, 2048), PROPERTIES)
        return decide(request, Options(batch_invariant=True))[0]

    wide, narrow = of(256), of(128)
    assert (wide.name, wide.column_parts, narrow.name, narrow.column_parts) == ("hopper", 2, "hopper", 1)
    assert wide.num_work_tiles(2048) == 2 * narrow.num_work_tiles(2048)
    # Two parts of 128 have columns in common, which both compute.
    shared = of(200)
    assert (shared.name, shared.column_parts, shared.part_width, shared.last_part) == ("hopper", 2, 128, 72)
    assert (wide.last_part, narrow.last_part, narrow.part_width) == (None, None, 128)
    # Both have three parts of 128, of which one launch has no column in common.
    even, uneven = of(384), of(344)
    assert even.constexprs() == uneven.constexprs() and even.compile_keys() != uneven.compile_keys()


def test_taller_batch_invariant_tiles_are_for_devices_that_round_them_alike():
    unknown = replace(PROPERTIES, has_wgmma=False)  # has Hopper's shared memory
    launch = decided(2048, 2048, 2048, 1, device=unknown, batch_invariant=True)
    assert (launch.name, launch.config.block_m) == ("block", 32)
    older = replace(unknown, supports_pdl=False)
    assert decided(2048, 2048, 2048, 1, device=older, batch_invariant=True).config.block_m == 64
    amd = replace(older, has_mfma=True, shared_memory=65536)
    assert decided(1, 2048, 1, 1, device=amd, batch_invariant=True).config.matrix_instr_nonkdim == 16
    for device, dtype, rows in (
        (PROPERTIES, torch.float8_e4m3fn, 64),
        (older, torch.float8_e5m2, 32),  # mma.sync takes both operands from registers
        (amd, torch.float8_e4m3fn, 16),
        (PROPERTIES, torch.int8, 16),
    ):
        spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, kv_dtype=dtype)
        request = Request(spec, 1, True, Bounds(2048, 2048, 2048), device)
        launch, _ = decide(request, Options(batch_invariant=True))
        assert launch.config.block_m == rows
        assert (launch.fallback is None) == (rows == 16) and (rows == 16 or launch.fallback.config.block_m == 16)
    chunk = replace(request, spec=replace(spec, kv_dtype=torch.float8_e4m3fn), bounds=Bounds(64, 8192, 64))
    assert decide(chunk, Options(batch_invariant=True))[0].config.block_m == 16  # its row blocks are cut


@pytest.mark.parametrize(
    ("heads", "limits", "batch_invariant"),
    [
        ((12, 2, 64), (40, 600, 5000), False),
        extended((12, 2, 64), (40, 600, 5000), True),
        extended((12, 2, 64), (300, 3000, 131072), False),
        extended((12, 2, 64), (300, 3000, 131072), True),
        extended((28, 4, 128), (40, 600, 5000), False),
        ((28, 4, 128), (40, 600, 5000), True),
        extended((28, 4, 128), (300, 3000, 131072), False),
        extended((28, 4, 128), (300, 3000, 131072), True),
    ],
    ids=str,
)
def test_the_launches_of_every_plan_are_among_those_of_warmup_and_fit_the_workspace(heads, limits, batch_invariant):
    num_q_heads, num_kv_heads, head_dim = heads
    spec = quire.AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    most_seqs, most_tokens, most_keys = limits
    found = list(launches_within(spec, PROPERTIES, *limits, batch_invariant))
    warm, enough = kernels_of_all(found), max(launch.with_most_partitions().scratch_size().total for launch in found)
    assert enough < 1.1 * 2**30
    draw = random.Random(2)
    for _ in range(400):
        num_seqs, queries = draw.randint(1, most_seqs), draw.choice((1, 1, 3, 9, 15, 40, 200, 600))
        one_query = queries == 1 and draw.random() < 0.5
        num_tokens = num_seqs if one_query else draw.randint(queries, min(most_tokens, num_seqs * queries))
        bounds = Bounds(queries, draw.randint(queries, draw.choice((600, most_keys))), num_tokens)
        request = Request(spec, num_seqs, not one_query, bounds, PROPERTIES)
        launch, _ = decide(request, Options(batch_invariant=batch_invariant))
        assert kernels_of(launch) <= warm, (num_seqs, bounds, str(launch))
        assert launch.scratch_size().total <= enough, (num_seqs, bounds, str(launch))


def kernels_of_all(launches):
    """Return what must be compiled for launches."""
    return frozenset().union(*map(kernels_of, launches))


@pytest.mark.parametrize(
    ("heads", "features", "limits"),
    [
        extended((4, 4, 216), {}, (33, 1000, 5000)),
        extended((6, 1, 64), {}, (64, 2048, 32768)),
        ((52, 4, 128), {}, (64, 2048, 32768)),
        extended((44, 4, 144), {"sinks": True}, (64, 2048, 32768)),
        extended((11, 1, 216), {"sliding_window": 131}, (64, 2048, 32768)),
        extended((11, 1, 192), {}, (33, 1000, 5000)),
        extended((15, 1, 64), {}, (64, 2048, 32768)),
        extended((8, 1, 64), {}, (33, 1000, 5000)),
        ((64, 8, 64), {"sliding_window": 17}, (256, 8192, 16384)),
        extended((64, 4, 256), {}, (64, 2048, 32768)),
        ((16, 2, 128), {"softcap": 30.0}, (33, 1000, 5000)),
    ],
    ids=str,
)
def test_the_launches_of_random_batches_are_among_those_of_warmup(heads, features, limits):
    """Of equal and uneven sequences, many and few, on a device with a fitted tree."""
    num_q_heads, num_kv_heads, head_dim = heads
    spec = quire.AttentionSpec(num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, **features)
    device, draw = TARGETS["sm90"].properties, random.Random(1)
    max_num_seqs, max_num_tokens, max_seq_len = limits
    warm = kernels_of_all(launches_within(spec, device, *limits, False))
    for _ in range(1500):
        num_seqs = draw.choice((draw.randint(1, max_num_seqs), min(max_num_seqs, 1 << draw.randint(0, 5))))
        queries = min(max_num_tokens, int(2 ** draw.uniform(0, 11)))
        most = min(max_num_tokens, num_seqs * queries)
        num_tokens = draw.choice((most, draw.randint(min(most, queries + num_seqs - 1), most)))
        bounds = Bounds(queries, min(max_seq_len, max(queries, int(2 ** draw.uniform(0, 15)))), num_tokens)
        launch, _ = decide(Request(spec, num_seqs, True, bounds, device), Options())
        assert kernels_of(launch) <= warm, (num_seqs, bounds, str(launch))


def test_numbers_of_queries_stand_for_splits_in_rounds():
    """Of 12 heads that share keys, 846 queries have 81 work tiles. Two rounds of programs take three splits of each."""
    spec = quire.AttentionSpec(num_q_heads=12, num_kv_heads=1, head_dim=192)
    device, in_rounds = TARGETS["sm90"].properties, 0
    warm = kernels_of_all(launches_within(spec, device, 1, 1024, 17000, False))
    for queries in range(600, 1024, 6):
        request = Request(spec, 1, True, Bounds(queries, 16800, queries), device)
        launch, _ = decide(request, Options())
        in_rounds += launch.num_splits * launch.num_work_tiles(queries) > device.num_sms
        assert kernels_of(launch) <= warm, str(launch)
    assert in_rounds > 10


def planned(**options) -> quire.Plan:
    """Plan a step of 32 decoding sequences for the device, with tensors of its own."""
    batch = quire.Batch(torch.zeros(32, 128, dtype=torch.int32), torch.zeros(32, dtype=torch.int32))
    with compile_for(PROPERTIES, on_compile=lambda *facts: None):
        return quire.plan(SPEC, batch, **{"max_query_len": 1, "max_seq_len": 2048} | options)


def test_a_decision_is_kept_until_trees_are_forgotten(user_trees):
    first = planned()
    assert planned().launch is first.launch
    assert planned(max_seq_len=1984).launch != first.launch
    assert planned(num_splits=2).launch != first.launch
    assert planned(batch_invariant=True).launch != first.launch
    own_tree(user_trees, attention=LEAF)
    trees.forget_trees()
    assert planned().launch.config.leaf == LEAF != first.launch.config.leaf
    assert planned().asked == first.asked  # which `torch.compile` has seen


def test_compiled_code_decides_as_the_plan_did_and_sees_one_text():
    """The operator knows the batch, and two strings and some numbers. The strings are those of all steps."""
    rng, texts, kernels = random.Random(0), set(), set()
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=4, head_dim=128)
    for _ in range(200):
        lens = [rng.choice([1, 1, 4, 300]) for _ in range(rng.randint(1, 40))]
        longest = rng.choice([300, 2000, 30_000])
        bounds = Bounds(max(lens), longest + max(lens), sum(lens))
        levels = [[(len(lens), 256)]] if rng.random() < 0.2 else None
        starts = None if max(lens) == 1 else torch.tensor([0, *lens]).cumsum(0).int()
        batch = quire.Batch(torch.zeros(len(lens), 2048).int(), torch.zeros(len(lens)).int(), starts)
        with compile_for(TARGETS["sm90"].properties, on_compile=lambda *facts: None):
            plan = quire.plan(spec, batch, **asdict(bounds), shared_prefix=levels)
            text, options, numbers = plan.asked
            decided = decide_launch(decode(text), batch, bounds, decode_options(options), levels_of(numbers))
        assert decided == (plan.launch, plan.reason)
        texts.add((text, options))
        kernels.add(plan.kernel)
    assert len(texts) == 1 and {"split_kv", "hopper", "shared_prefix"} <= kernels


def test_decoding_sequences_grow_for_64_steps_with_one_decision():
    """The plan's own bounds are exact, and so is the decision where tiles or queries may depend on each key."""
    steps = [planned(max_seq_len=keys) for keys in range(1985, 2049)]
    assert all(step.launch is steps[-1].launch for step in steps)
    assert [step.bounds.max_seq_len for step in steps] == list(range(1985, 2049))
    assert "1985 keys" in str(steps[0])
    assert planned(max_seq_len=2049).launch is not steps[-1].launch
    for bounds in (Bounds(1, 63, 4), Bounds(2, 1985, 8), Bounds(1985, 1985, 1985), Bounds(0, 1985, 0)):
        assert bounds.for_decision() is bounds


def test_a_decision_is_that_of_the_families_there_are(monkeypatch):
    before = planned()
    other = {"other": lambda request, options: (before.launch, "of another family")}
    monkeypatch.setitem(decide.__globals__, "FAMILIES", other)
    assert planned().reason == "of another family" != before.reason


def test_a_plan_from_a_kept_decision_is_checked_as_the_first_one_was():
    first = planned()
    assert first.workspace is not None
    small, fitting = (torch.zeros(first.workspace.numel() - less, dtype=torch.uint8) for less in (1, 0))
    assert planned(workspace=fitting).workspace is fitting
    with pytest.raises(ValueError, match="workspace must be uint8 with at least"):
        planned(workspace=small)
    with pytest.raises(TypeError, match="max_seq_len must be an integer"):
        planned(max_seq_len=2048.0)
    with pytest.raises(quire.UnsupportedError, match="kernel must be"):
        planned(kernel="mla")
    for _ in range(2):  # a refusal is no decision that is kept
        with pytest.raises(ValueError, match="config must have block_d"):
            planned(config=KernelConfig(**LEAF, block_d=16, block_dv=16))


def check_that_it_is_left_out(path: Path, reason: str) -> None:
    """Assert that planning goes on without the file, and that one warning, given once, names it."""
    trees.forget_trees()
    seen = rounded(SPEC, PROPERTIES, 1, 2048, 32)
    with pytest.warns(UserWarning) as warned:
        _, why = select(SPEC, PROPERTIES, *seen)
        fitted_trees(replace(PROPERTIES, num_sms=2))
    (message,) = [str(w.message) for w in warned]
    assert message.startswith(f"{path} must be a tree that `quire tune` wrote, got ")
    assert reason in message
    assert message.endswith("run `quire tune` again, or move the file away. Quire plans without it.")
    assert why.startswith("generic tree")


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("attention", [], "a list of 0 at attention, where a node is"),
        ("attention", ["keys_per_seq", 100, LEAF], "a list of 3 at attention"),
        ("attention", ["keys_per_seq", 100, LEAF, ["keys_per_seq"]], "a list of 1 at attention[3]"),
        ("attention", ["keys", 100, LEAF, LEAF], 'the unknown feature "keys" at attention'),
        ("attention", [{}, 100, LEAF, LEAF], "the unknown feature {} at attention"),
        ("attention", ["keys_per_seq", "100", LEAF, LEAF], '"100" at attention[1], which must be a number'),
        ("attention", ["keys_per_seq", float("inf"), LEAF, LEAF], "Infinity at attention[1]"),
        ("attention", ["keys_per_seq", True, LEAF, LEAF], "true at attention[1]"),
        ("attention", None, "null at attention, which must be an object"),
        ("attention", "hopper", '"hopper" at attention, which must be an object'),
        ("attention", {}, "no block_m, block_n"),
        ("attention", LEAF | {"colour": 1}, "the unknown 'colour' in attention"),
        ("attention", LEAF | {"waves_per_eu": 2}, "the unknown 'waves_per_eu'"),
        ("attention", LEAF | {"block_m": -16}, "block_m must be a power of two of at least 16, got -16"),
        ("attention", LEAF | {"block_m": 0}, "block_m must be"),
        ("attention", LEAF | {"block_m": 24}, "block_m must be"),
        ("attention", LEAF | {"block_m": "16"}, "block_m must be"),
        ("attention", LEAF | {"block_n": 512}, "block_n must be at most 256"),
        ("attention", LEAF | {"num_warps": 7}, "num_warps must be"),
        ("attention", LEAF | {"num_warps": 32}, "num_warps must be at most 16"),
        ("attention", LEAF | {"num_stages": 0}, "num_stages must be"),
        ("attention", LEAF | {"num_stages": 9}, "num_stages must be at most 8"),
        ("attention", LEAF | {"programs_per_sm": 0}, "programs_per_sm must be"),
        ("attention", LEAF | {"programs_per_sm": 10**9}, "programs_per_sm must be at most 16"),
        ("attention", LEAF | {"full_tile_loop": 1}, "full_tile_loop must be a bool"),
        ("hopper", LEAF, "at hopper, which must be true, false or 'generic'"),
        ("hopper", 1, "1 at hopper"),
        ("covers", 5, "5 at covers, which must be a list of objects"),
        ("covers", [], "[] at covers"),
        ("covers", [{}], "an empty object at covers[0]"),
        ("covers", [{"keys_per_seq": 1}], "the unknown feature 'keys_per_seq' at covers[0]"),
        ("covers", [{"head_dim": "128"}], '"128" at covers[0].head_dim'),
        ("properties", [], "[] at properties"),
        ("properties", {}, "no has_mfma, has_wgmma"),
        ("properties", asdict(PROPERTIES) | {"num_sms": "9"}, '"9" at properties.num_sms, which must be of type int'),
        ("properties", asdict(PROPERTIES) | {"l2": 1}, "the unknown 'l2' in properties"),
        ("fitted_on", "here", '"here" at fitted_on'),
        ("fitted_on", {"regret": {"held_out": {"mean": 1.0}}}, "where worst must be a number"),
        ("cost_model", {"combine_cost": -1}, "combine_cost must be a finite number"),
        ("cost_model", {"hopper_min_tiles_per_split": 0}, "hopper_min_tiles_per_split must be an int of at least 1"),
        ("cost_model", {"combine": 1}, "the unknown 'combine' in cost_model"),
        ("traits", {}, "says 'traits' for 'properties' and must be fitted again"),
        ("colour", {}, "the unknown 'colour' in the tree"),
    ],
)  # fmt: skip
def test_a_user_s_tree_that_is_not_sound_is_left_out_with_a_warning(user_trees, part, value, reason):
    own_tree(user_trees, **{part: value})
    check_that_it_is_left_out(user_trees / "mine.json", reason)


def test_a_tree_of_too_many_levels_is_left_out(user_trees):
    node = LEAF
    for _ in range(40):
        node = ["keys_per_seq", 100, LEAF, node]
    own_tree(user_trees, attention=node)
    check_that_it_is_left_out(user_trees / "mine.json", "more than 32 levels of nodes")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "invalid JSON"),
        (b"{", "invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "[] where an object is expected"),
        (b"{}", "no attention, covers, fitted_on, properties in the tree"),
        (b"1" * 5000, "digits"),
    ],
)
def test_a_file_that_holds_no_tree_is_left_out(user_trees, content, reason):
    (user_trees / "mine.json").write_bytes(content)
    check_that_it_is_left_out(user_trees / "mine.json", reason)


def test_what_is_not_a_readable_file_is_left_out_and_a_pipe_is_never_opened(user_trees):
    path = user_trees / "mine.json"
    path.mkdir()
    check_that_it_is_left_out(path, "not a regular file")
    path.rmdir()
    path.symlink_to(user_trees / "gone")
    check_that_it_is_left_out(path, "No such file")
    path.unlink()
    os.mkfifo(path)
    check_that_it_is_left_out(path, "not a regular file")


def test_a_file_without_permission_is_left_out(user_trees, monkeypatch):
    own_tree(user_trees)
    (user_trees / "mine.json").chmod(0)
    if os.access(user_trees / "mine.json", os.R_OK):  # root may read every file
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    check_that_it_is_left_out(user_trees / "mine.json", "Permission denied")


def test_a_broken_tree_does_not_hide_a_sound_one(user_trees):
    own_tree(user_trees)
    (user_trees / "broken.json").write_text("{")
    with pytest.warns(UserWarning, match=r"broken\.json must be"):
        _, why = select(SPEC, PROPERTIES, *rounded(SPEC, PROPERTIES, 1, 2048, 32))
    assert "mine.json tree at" in why


IMPORT_AND_PLAN = """
import pwd
pwd.getpwuid = {}.__getitem__  # no user has an entry
import torch, quire
spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
batch = quire.Batch(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
quire.plan(spec, batch, max_query_len=1, max_seq_len=1)
from quire.dispatch import tree, tree_file
from quire.dispatch.device import device_properties
assert tree_file.user_folder() is None
print(tree.select(spec, device_properties(torch.device("cpu")), 2, 1.0, 1, 1)[1])
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ".config/quire/trees"),
        ({"XDG_CONFIG_HOME": "{tmp}/settings"}, "settings/quire/trees"),
        ({"XDG_CONFIG_HOME": "relative"}, ".config/quire/trees"),
        ({"XDG_CONFIG_HOME": ""}, ".config/quire/trees"),
        ({"XDG_CONFIG_HOME": "{tmp}/settings", "QUIRE_TREES": "{tmp}/mine"}, "mine"),
        ({"QUIRE_TREES": "~/mine"}, "mine"),
    ],
)
def test_variables_say_where_the_trees_are(variables, expected, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    folder = tree_file.user_folder()
    assert folder == tmp_path / expected
    folder.mkdir(parents=True, exist_ok=True)
    own_tree(folder)
    _, why = select(SPEC, PROPERTIES, *rounded(SPEC, PROPERTIES, 1, 2048, 32))
    assert "mine.json tree at" in why


@pytest.mark.slow
def test_a_user_without_a_home_directory_has_no_trees():
    """As in containers with arbitrary user ids: neither HOME nor an entry in the list of users."""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    command = [sys.executable, "-c", IMPORT_AND_PLAN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("generic tree at")


@pytest.mark.slow
def test_no_tree_is_read_at_import(user_trees):
    """A broken tree of the user's warns when something is planned for a GPU, not before."""
    (user_trees / "broken.json").write_text("{")
    code = (
        "import quire\nfrom quire.dispatch import tree_file\n"
        "print(*[f.cache_info().misses for f in (tree_file.user_trees, tree_file.load_tree)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 0\n"
    assert "broken" not in done.stderr


def test_every_shipped_tree_is_sound():
    assert [name for name, _ in shipped_trees()] == [name for name in shipped() if name != "generic"]
    for _, tree in shipped_trees():
        check_tree(tree)
    generic = load_tree("generic")
    names = {field.name for field in fields(CostModel)}
    check_cost_model(generic["cost_model"], required=names)
    assert generic["cost_model"]["provenance"].keys() == names | {"device"}
    check_nodes(generic["attention"], "attention", lambda leaf, where: check_config(leaf, False, where))
    check_nodes(generic["hopper"], "hopper", check_choice)
    assert not {n for n in leaves(generic["attention"]) if n == "generic"}


def leaves(tree):
    return [tree] if not isinstance(tree, list) else leaves(tree[2]) + leaves(tree[3])


def test_every_feature_that_trees_may_ask_for_is_known():
    assert set(features_of(SPEC, PROPERTIES, 1, 1, 1, 1)) == {*SPEC_FEATURES, *BATCH_FEATURES}


def test_a_fitted_tree_overrides_constants_of_the_cost_model(user_trees):
    generic = cost_model(SPEC, PROPERTIES)
    assert (generic.combine_cost, generic.short_context, generic.hopper_max_splits) == (0.29, 1024, 15)
    own_tree(user_trees, cost_model={"combine_cost": 0.5, "short_context": 512, "provenance": "measured here"})
    trees.forget_trees()
    assert cost_model(SPEC, PROPERTIES) == replace(generic, combine_cost=0.5, short_context=512)
    assert cost_model(SPEC, replace(PROPERTIES, num_sms=2)) == generic  # another device
    assert (
        cost_model(replace(SPEC, head_dim=80, head_dim_v=80), PROPERTIES) == generic
    )  # a head dim it was not fitted for


@pytest.mark.parametrize(
    "changes",
    [
        {"block_m": 24}, {"block_m": 0}, {"block_m": None}, {"block_n": 8}, {"block_d": -16}, {"block_dv": 17},
        {"num_warps": 64}, {"num_warps": 3}, {"num_stages": 0}, {"num_stages": 2.0}, {"num_stages": True},
        {"programs_per_sm": 0}, {"full_tile_loop": "no"}, {"waves_per_eu": -1}, {"matrix_instr_nonkdim": 8},
    ],
)  # fmt: skip
def test_a_kernel_config_must_be_legal(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name} must be .*, got .*; "):
        replace(KernelConfig(**LEAF, block_d=128, block_dv=128), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_warpgroups": 3}, {"block_t": 256}, {"block_t": 0}, {"block_n": 100}, {"num_stages": 0},
        {"num_q_stages": 0}, {"num_quantised_stages": -1}, {"fp8_mma": 2},
    ],
)  # fmt: skip
def test_a_hopper_config_must_be_legal(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name} must be .*, got .*; "):
        replace(HopperConfig(2, 32, 128, 2, 2), **changes)


def test_a_hopper_config_for_fp8_has_two_warpgroups_and_stages_for_bytes():
    with pytest.raises(ValueError, match="num_warpgroups must be 2"):
        HopperConfig(1, 32, 64, 2, 2, num_quantised_stages=1)
    with pytest.raises(ValueError, match="num_quantised_stages must be at least 1"):
        HopperConfig(2, 32, 64, 2, 2, fp8_mma=True)


def test_unknown_devices_have_the_generic_tree():
    unknown = replace(PROPERTIES, num_sms=77, shared_memory=100 * 1024)
    config, why = select(SPEC, unknown, *rounded(SPEC, unknown, 1, 2048, 32))
    assert why.startswith("generic tree at")
    assert config.shared_memory(SPEC, unknown) <= unknown.shared_memory


def test_features_are_bounds_rounded_up():
    seen = rounded(SPEC, PROPERTIES, 5, 1000, 70)
    assert seen == (32, 32, 1024, 8)
    features = features_of(SPEC, PROPERTIES, *seen)
    assert features["keys_per_sm"] == 1024
    assert features["group_size"] == 4
    assert features["head_dim"] == 128
    assert features["head_padding"] == 0
    assert features["kv_bytes"] == 2


def depth(tree) -> int:
    return 1 + max(depth(tree[2]), depth(tree[3])) if isinstance(tree, list) else 0


def shipped() -> list[str]:
    return sorted(path.stem for path in (Path(trees.__file__).parent / "trees").glob("*.json"))


@pytest.mark.parametrize("name", shipped())
def test_a_shipped_tree_asks_few_questions(name):
    assert depth(load_tree(name)["attention"]) <= (11 if name == "generic" else 6)


@pytest.mark.parametrize("name", [name for name in shipped() if name != "generic"])
def test_a_fitted_tree_says_where_it_comes_from(name):
    facts = load_tree(name)["fitted_on"]
    assert {"device", "triton", "commit", "date", "cases", "regret"} <= facts.keys()
    assert {"mean", "worst"} <= facts["regret"]["held_out"].keys()


LONG = False, 4096, False  # context, queries, raggedness


def test_a_choice_is_made_once():
    seen = rounded(SPEC, PROPERTIES, 1, 2048, 32)
    assert select(SPEC, PROPERTIES, *seen) is select(SPEC, PROPERTIES, *seen)
    assert hopper_config(SPEC, PROPERTIES, *LONG) is hopper_config(SPEC, PROPERTIES, *LONG)
    assert cost_model(SPEC, PROPERTIES) is cost_model(SPEC, PROPERTIES)


def test_a_tree_of_the_user_s_is_explained(user_trees, capsys):
    own_tree(user_trees)
    assert main(["tune", "--explain", str(user_trees / "mine.json")]) == 0
    text = capsys.readouterr().out
    assert "device here" in text
    assert "16 rows × 32 keys, 8 warps, 2 stages" in text
    assert "head_dim 128" in text


def test_the_tree_in_use_is_explained(capsys):
    assert main(["tune", "--explain"]) == 0
    text = capsys.readouterr().out
    assert "mine" not in text
    assert "up to" in text
    assert " rows × " in text


def test_what_is_no_tree_is_not_explained(user_trees, capsys):
    (user_trees / "none.json").write_text("[]")
    assert main(["tune", "--explain", str(user_trees / "none.json")]) == 2
    assert "none.json must be a tree that `quire tune` wrote, got [] where an object" in capsys.readouterr().err


def test_without_a_gpu_there_is_nothing_to_tune(capsys):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert main(["tune", "--quick"]) == 2
    assert "must have a GPU" in capsys.readouterr().err
    assert "quire_tools.tuning.sweep" in sys.modules


E4M3, INT8 = torch.float8_e4m3fn, torch.int8


def test_every_width_of_a_16_bit_cache_has_a_configuration_of_the_hopper_kernel():
    for head_dim, head_dim_v, short in itertools.product(range(16, 513, 8), (16, 72, 128, 200, 512), (False, True)):
        spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim_v)
        assert isinstance(hopper_config(spec, PROPERTIES, short, 4096, False), HopperConfig), (head_dim, head_dim_v)


@pytest.mark.parametrize(
    ("group_size", "queries", "heads_and_queries"),
    [(1, 64, (1, 128)), (4, 64, (4, 32)), (5, 64, (5, 24)), (11, 64, (11, 10)), (96, 4, (48, 2))],
)
def test_warpgroups_with_tokens_of_their_own_have_equally_many(group_size, queries, heads_and_queries):
    spec = replace(SPEC, num_q_heads=2 * group_size, num_kv_heads=2)
    config = hopper_config(spec, PROPERTIES, False, queries, ragged=True, apart=True)
    assert (config.heads(group_size), config.block_t) == heads_and_queries
    assert config.apart and not hopper_config(spec, PROPERTIES, True, queries, ragged=True, apart=True).apart
    with pytest.raises(ValueError, match="apart must be False with num_warpgroups 1"):
        replace(config, num_warpgroups=1, block_t=8)
    with pytest.raises(ValueError, match="apart must be False with num_warpgroups 2 and block_t 7"):
        replace(config, block_t=7)


def test_launches_have_one_key_if_and_only_if_they_have_one_kernel():
    """The programs of an SM are no constexpr, but constexprs follow from them."""
    launches = []
    devices = PROPERTIES, TARGETS["sm80"].properties  # of which one combines in a second launch
    for device, num_kv_heads, programs, keys in itertools.product(devices, (2, 12), (1, 2), (128, 2048, 32768)):
        spec = replace(SPEC, num_q_heads=12, num_kv_heads=num_kv_heads, head_dim=128)
        config = KernelConfig(16, 64, 4, 3, False, programs, 128, 128)
        launch, _ = decide(Request(spec, 1, False, Bounds(1, keys, 1), device), Options(config=config))
        launches.append(launch)

    def kernels(launch):
        combine = launch.combine_constexprs() if getattr(launch, "has_combine_launch", False) else None
        return launch.name, launch.constexprs(), combine

    pairs = list(itertools.combinations(launches, 2))
    same_kernels = [kernels(a) == kernels(b) for a, b in pairs]
    assert [a.compile_keys() == b.compile_keys() for a, b in pairs] == same_kernels
    assert any(same_kernels)
    for device in devices:
        assert len({launch.compile_keys() for launch in launches if launch.request.device == device}) > 2


@pytest.mark.parametrize(
    ("reason", "target", "changes"),
    [
        ("GPUs other than Hopper", "sm80", {}),
        ("float32 queries", "sm90", {"dtype": torch.float32, "kv_dtype": torch.float32}),
        ("head_dim 256 of a float8_e4m3fn cache", "sm90", {"head_dim": 256, "head_dim_v": 256, "kv_dtype": E4M3}),
        ("head_dim 80 of a int8 cache", "sm90", {"head_dim": 80, "head_dim_v": 80, "kv_dtype": INT8}),
        ("head_dim 128 with head_dim_v 64 of a int8 cache", "sm90", {"head_dim_v": 64, "kv_dtype": INT8}),
    ],
)
def test_what_the_hopper_kernel_does_not_serve(reason, target, changes):
    for short in (False, True):
        assert hopper_config(replace(SPEC, **changes), TARGETS[target].properties, short, 4096, False) == reason


def test_intervals_take_the_hopper_kernel_where_a_band_does():
    for max_query_len, max_seq_len, num_seqs, num_tokens in itertools.product(
        (1, 16, 33, 64, 512), (512, 4096, 16384), (1, 8), (None, 600)
    ):
        bounds = Bounds(max_query_len, max_seq_len, num_tokens or num_seqs * max_query_len)
        request = Request(SPEC, num_seqs, True, bounds, PROPERTIES)
        band, seen = (decide(replace(request, has_intervals=has), Options())[0] for has in (False, True))
        assert band.name == seen.name and seen.request.has_intervals and "intervals of keys" in str(seen)
        assert band.compile_keys() != seen.compile_keys()
        if band.name == "hopper":
            assert (band.config, band.num_splits) == (seen.config, seen.num_splits)
            assert seen.fallback.request.has_intervals
            assert band.decode is None or seen.decode is not None
            assert seen.decode is None or seen.decode.request.has_intervals


@pytest.mark.parametrize(
    ("num_q_heads", "queries", "max_seq_len", "kv_dtype", "allow_fp8", "in_fp8"),
    [
        (128, 1, 4096, E4M3, True, True),
        (128, 1, 1024, E4M3, True, False),
        (33, 1, 4096, E4M3, True, True),
        (16, 4, 4096, E4M3, True, True),
        (32, 1, 4096, E4M3, True, False),
        (16, 1, 4096, E4M3, True, False),
        (128, 1, 4096, E4M3, False, False),
        (128, 1, 4096, None, True, False),
    ],
)
def test_products_over_latents_are_in_fp8_if_that_is_allowed_and_there_are_many_rows_and_tiles(
    num_q_heads, queries, max_seq_len, kv_dtype, allow_fp8, in_fp8
):
    spec = quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=0.1, kv_dtype=kv_dtype, allow_fp8=allow_fp8)
    request = Request(spec, 8, queries > 1, Bounds(queries, max_seq_len, 8 * queries), PROPERTIES)
    launch, _ = decide(request, Options())
    assert launch.name == "mla_hopper" and launch.constexprs()["FP8_MMA"] == in_fp8
    assert ("products in fp8" in str(launch)) == in_fp8
    other = replace(request, spec=replace(spec, allow_fp8=not allow_fp8))
    same_kernel = decide(other, Options())[0].compile_keys() == launch.compile_keys()
    assert same_kernel == (kv_dtype is None or launch.columns < 64 or max_seq_len < 4096)
    assert decide(request, Options(batch_invariant=True))[0].name == "mla"


@pytest.mark.parametrize("seen", [(True, False), (False, True), (True, True)])
def test_trees_take_the_portable_kernels_and_latents_have_neither_trees_nor_intervals(seen):
    """On a Hopper GPU too, where a prompt would take the Hopper kernel."""
    request = Request(SPEC, 8, True, Bounds(64, 4096, 512), PROPERTIES, *seen)
    words = "draft trees" if seen[1] else "intervals of keys"
    if seen[1]:
        launch, _ = decide(request, Options())
        assert launch.name in ("block", "split_kv")
        assert words in str(launch)
        with pytest.raises(quire.UnsupportedError, match=f"got 'hopper', which does not serve {words}"):
            decide(request, Options(kernel="hopper"))
    latent = replace(request, spec=quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1))
    with pytest.raises(quire.UnsupportedError, match=f"mla_hopper does not serve {words}, mla does not serve {words}"):
        decide(latent, Options())


def test_a_plan_for_latents_on_a_flat_page_table_names_the_kernel_that_runs():
    """The MLA kernel for Hopper GPUs reads rectangular tables alone. Shared prefixes make flat ones of their own."""
    spec = quire.AttentionSpec.mla(num_q_heads=128, softmax_scale=0.1)
    table, seq_lens = torch.zeros(4, 40, dtype=torch.int32), torch.full((4,), 600, dtype=torch.int32)
    rectangular = quire.Batch(table, seq_lens)
    flat = quire.Batch(table.flatten(), seq_lens, cu_pages=torch.arange(0, 161, 40, dtype=torch.int32))
    bounds = {"max_query_len": 1, "max_seq_len": 640}
    with compile_for(PROPERTIES, on_compile=None):
        assert quire.plan(spec, rectangular, **bounds).kernel == "mla_hopper"
        assert quire.plan(spec, flat, **bounds).kernel == "mla"
        with pytest.raises(quire.UnsupportedError, match="got 'mla_hopper', which does not serve flat page tables"):
            quire.plan(spec, flat, **bounds, kernel="mla_hopper")
        for levels, kernels in (
            (128, ["mla_hopper", "mla_hopper"]),
            ([[(2, 64), (2, 64)]], ["mla_hopper", "mla_hopper"]),
            ([[(3, 64), (1, 0)]], ["mla_hopper", "mla"]),
            ([[(2, 64), (2, 128)], [(1, 0), (1, 0), (1, 64), (1, 64)]], ["mla_hopper", "mla", "mla"]),
            ([[(1, 64), (2, 64), (1, 64)]], ["mla", "mla_hopper"]),
        ):
            plan = quire.plan(spec, rectangular, **bounds, shared_prefix=levels)
            assert [launch.name for launch in plan.launch.launches] == kernels, levels
            batches = plan.runner.batches(64)
            assert [part.cu_pages is not None for part in batches] == [name == "mla" for name in kernels]


def test_a_plan_says_what_it_launches_for_a_cache_and_for_queries():
    """A plan is made before both are known. What TMA cannot address goes to the fallback that the plan names."""
    batch = quire.Batch(torch.zeros(1, 40, dtype=torch.int32), torch.tensor([600]).int(), torch.tensor([0, 600]).int())
    q, wide = torch.empty(600, 32, 128, dtype=torch.bfloat16), torch.empty(600, 32, 132, dtype=torch.bfloat16)
    with compile_for(PROPERTIES, on_compile=None):
        plan = quire.plan(SPEC, batch, max_query_len=600, max_seq_len=640)
        pages = quire.PagedKVCache.empty(SPEC, 40, 16)
        rows = torch.empty(40, 16, 8, 132, dtype=torch.bfloat16)
        unaligned = quire.PagedKVCache(rows[..., 4:], pages.v)
        for cache, queries, name in (
            (pages, None, "hopper"),
            (pages, q, "hopper"),
            (pages, q[:0], "hopper"),
            (pages, wide[..., :128], "block"),  # heads do not begin at a multiple of 16 bytes
            (unaligned, None, "block"),
            (unaligned, q, "block"),
        ):
            assert plan.launch_for(cache, queries).name == name
            assert str(plan.launch_for(cache, queries)) in str(plan)
        one_key = quire.AttentionSpec.mla(num_q_heads=128, softmax_scale=0.1)
        latents = quire.plan(one_key, batch, max_query_len=1, max_seq_len=640, num_tokens=1)
        for page_size, name in ((64, "mla_hopper"), (1, "mla")):
            assert latents.launch_for(quire.PagedKVCache.empty(one_key, 4, page_size)).name == name


def test_launches_with_other_arguments_have_other_keys():
    request = Request(SPEC, 8, True, Bounds(4, 4096, 32), PROPERTIES)
    kinds = [(a, b) for a in (False, True) for b in (False, True)]
    keys = {decide(replace(request, has_intervals=a, has_tree=b), Options())[0].compile_keys() for a, b in kinds}
    assert len(keys) == 4


def test_a_request_that_no_family_serves_names_what_each_refused(monkeypatch):
    refuse = {name: (lambda request, options, name=name: f"the {name} case") for name in ("first", "second")}
    monkeypatch.setitem(decide.__globals__, "FAMILIES", refuse)
    with pytest.raises(quire.UnsupportedError, match="first does not serve the first case, second does not serve"):
        decided(1, 64, 32, 32)


def test_bounds_that_are_looser_than_the_tokens_allow_need_no_other_kernels():
    """An engine may bound the queries of a sequence by its longest chunk, where the whole batch has fewer tokens."""
    device = TARGETS["sm90"].properties
    for heads in ((4, 2, 16), (32, 8, 128)):
        spec = quire.AttentionSpec(**dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), heads, strict=True)))
        for num_tokens in (0, 1, 9, 63):
            warm = [kernels_of(x) for x in launches_within(spec, device, 4, max(1, num_tokens), 19, False)]
            launch, _ = decide(Request(spec, 4, True, Bounds(64, 19, num_tokens), device), Options())
            assert kernels_of(launch) <= frozenset().union(*warm)
