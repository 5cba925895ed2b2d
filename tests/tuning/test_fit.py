"""The fit: what is known to be best is found, regret is minimised, and leaves are legal for all that reach them."""

import itertools
import random

import pytest

from quire.dispatch.tree import walk
from quire_tools.tuning.fit import Measured, covers_of, explain, fit_tree, limit_to_measured, regrets, replace_leaves

CONFIGS = ("small", "middle", "large")


def case(rows: int, keys: int, best: str, others: float = 1.5, **features) -> Measured:
    times = {config: 10.0 * (1 if config == best else others) for config in CONFIGS}
    return Measured({"rows_per_seq": rows, "keys_per_seq": keys, "group_size": 4, **features}, times)


def known(rows: int, keys: int) -> str:
    return "large" if rows > 64 else "middle" if keys > 1024 else "small"


GRID = [(rows, keys) for rows in (4, 16, 64, 256, 1024) for keys in (128, 512, 1024, 4096, 16384)]


def test_a_known_rule_is_found_and_holds_for_lengths_never_seen():
    tree = fit_tree([case(rows, keys, known(rows, keys)) for rows, keys in GRID])
    assert regrets([case(rows, keys, known(rows, keys)) for rows, keys in GRID], tree)["worst"] == 1
    unseen = [
        case(rows, keys, known(rows, keys))
        for rows, keys in itertools.product((8, 32, 512, 4096), (256, 800, 8192, 100000))
    ]
    assert regrets(unseen, tree) == {"mean": 1.0, "worst": 1.0, "cases": 16}


def test_a_rule_that_no_single_question_improves_on_is_found():
    def crossed(rows, keys):
        return "large" if (rows > 64) != (keys > 1024) else "small"

    rows = [case(r, k, crossed(r, k)) for r, k in GRID]
    assert regrets(rows, fit_tree(rows))["worst"] == 1


def test_regret_counts_and_not_who_wins():
    """Nine cases are won by a hair, one by far: the one decides."""
    near = [Measured({"keys_per_seq": 128}, {"small": 10.0, "large": 10.01}) for _ in range(9)]
    far = [Measured({"keys_per_seq": 128}, {"small": 20.0, "large": 10.0})]
    assert fit_tree(near + far) == "large"


def test_what_was_not_seen_to_gain_is_left_to_the_generic_tree():
    """Long sequences gain by another configuration; short ones do not, and keep what the generic tree says."""
    rows = [
        Measured({"keys_per_seq": 128}, {"small": 10.0 + i % 2, "middle": 10.0 + (i + 1) % 2, "generic": 10.0})
        for i in range(4)
    ]
    rows += [Measured({"keys_per_seq": 8192}, {"small": 20.0, "middle": 10.0, "generic": 20.0}) for _ in range(4)]
    assert fit_tree(rows) == ["keys_per_seq", 1024, "generic", "middle"]
    assert fit_tree([Measured({"keys_per_seq": 1}, {"small": 10.0, "generic": 10.5})] * 3) == "small"
    assert fit_tree([Measured({"keys_per_seq": 1}, {"small": 10.0, "generic": 10.5})]) == "generic"


def test_what_seldom_counts_gives_way():
    """One configuration for all of them: the case that another kernel serves bears the loss."""
    rows = [
        Measured({"keys_per_seq": 1}, {"small": 10.0, "large": 11.0}),
        Measured({"keys_per_seq": 1}, {"small": 13.0, "large": 10.0}, weight=0.1),
    ]
    assert fit_tree(rows) == "small"
    assert fit_tree([rows[0], Measured(rows[1].features, rows[1].times)]) == "large"


def test_noise_is_not_worth_a_leaf():
    rng = random.Random(0)
    rows = [
        Measured({"rows_per_seq": r, "keys_per_seq": k}, {c: 10 + 0.03 * rng.random() for c in CONFIGS})
        for r, k in GRID
    ]
    assert isinstance(fit_tree(rows), str)


def test_a_leaf_is_legal_for_every_case_that_reaches_it():
    rows = [Measured({"head_dim": 64}, {"fast": 5.0, "safe": 9.0})] * 3 + [
        Measured({"head_dim": 256}, {"safe": 9.0})
    ] * 3
    tree = fit_tree(rows)
    assert all(walk(tree, row.features) in row.times for row in rows)
    assert walk(tree, {"head_dim": 64}) == "fast"
    assert fit_tree(rows, levels=0) == "safe"
    with pytest.raises(ValueError, match="in common"):
        fit_tree([Measured({"head_dim": 64}, {"a": 1.0}), Measured({"head_dim": 64}, {"b": 1.0})])


def test_trees_are_no_deeper_than_asked():
    rng = random.Random(1)
    rows = [case(r, k, rng.choice(CONFIGS), group_size=g) for r, k in GRID for g in (1, 4, 8)]

    def depth(tree):
        return 1 + max(depth(tree[2]), depth(tree[3])) if isinstance(tree, list) else 0

    assert depth(fit_tree(rows)) <= 6
    assert depth(fit_tree(rows, levels=2)) <= 2
    assert regrets(rows, fit_tree(rows))["mean"] < regrets(rows, fit_tree(rows, levels=2))["mean"]


def test_no_rows_no_tree():
    with pytest.raises(ValueError, match="sweep first"):
        fit_tree([])


def test_what_a_tree_covers_and_says():
    kind = {"query_bytes": 2, "kv_bytes": 2, "head_dim": 64, "head_padding": 0}
    rows = [Measured({**kind, "keys_per_seq": k}, {"a": 1.0}) for k in (1, 2)] + [
        Measured({**kind, "head_dim": 128, "keys_per_seq": 1}, {"a": 1.0})
    ]
    assert covers_of(rows) == [kind, {**kind, "head_dim": 128}]
    tree = replace_leaves(["keys_per_seq", 512, "hopper", "portable"], {"hopper": True, "portable": False})
    assert tree == ["keys_per_seq", 512, True, False]
    assert (
        explain(tree)
        == "keys_per_seq up to 512:\n  the Hopper kernel\nkeys_per_seq above 512:\n  the portable kernels\n"
    )


def test_leaves_do_not_extrapolate():
    def cases(queries, *rows_per_sm, head_dim=128):
        return [case(16, 64, "a", queries_per_seq=queries, rows_per_sm=n, head_dim=head_dim) for n in rows_per_sm]

    decoding, prompts = cases(1, 1, 4), cases(64, 1, 4)
    few = "rows_per_sm", 12
    assert limit_to_measured("a", decoding + prompts) == [*few, "a", "generic"]
    assert limit_to_measured("a", decoding) == [*few, ["queries_per_seq", 1, "a", "generic"], "generic"]
    assert limit_to_measured("a", prompts) == [*few, ["queries_per_seq", 1, "generic", "a"], "generic"]
    assert limit_to_measured("a", decoding + prompts + cases(1, 1, head_dim=64)) == [
        "rows_per_sm",
        3,
        "a",
        "generic",
    ]
    assert limit_to_measured("a", decoding, levels=1) == "generic"
    told = ["rows_per_sm", 8, ["queries_per_seq", 8, "a", "b"], "generic"]
    kept = ["rows_per_sm", 8, ["queries_per_seq", 8, ["queries_per_seq", 1, "a", "generic"], "b"], "generic"]
    assert limit_to_measured(told, decoding + prompts) == kept
    assert limit_to_measured(["rows_per_seq", 64, "generic", "generic"], decoding + prompts) == "generic"
