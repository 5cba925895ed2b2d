"""What tiles of keys say of a function's indices and conditions, compared with the values of all rows and keys."""

import ast
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quire
from quire.kernels.user_mods import SIZE_STEP, Writer
from quire.kernels.user_tiles import Tile
from quire.score_functions import tree_of, value_of
from tests import score_functions as functions


@quire.score(extras={"bias": ("num_q_heads", None)})
def banded(score, q_pos, kv_pos, q_head, bias):
    behind = q_pos - kv_pos
    bucket = abs(behind - 3) // 5 - (-behind >> 2)
    behind = behind + 1
    return torch.where((behind <= 20) | (kv_pos < 4), score, bias[q_head, min(bucket, 30)] * score)


@quire.score(extras={"bias": (40, 3)})
def steps(score, q_pos, kv_pos, bias):
    shown = torch.where(kv_pos - q_pos > -30, q_pos - kv_pos, 30 + int(torch.sqrt(float(max(q_pos - kv_pos, 0))) * 1.5))
    return score + bias[shown, 1] + bias[kv_pos - q_pos + 40, 2]


@quire.score(extras={"bias": (None, 40)})
def of_keys(score, q_head, kv_pos, bias):
    return score * bias[kv_pos, q_head]


FUNCTIONS = (functions.relative, functions.inkling, functions.t5, functions.hiding, banded, steps, of_keys)


def tensor_op(operation):
    return lambda *args, **options: operation(*map(torch.as_tensor, args))


LANGUAGE = SimpleNamespace(
    int32=torch.int32,
    float32=torch.float32,
    PropagateNan=SimpleNamespace(ALL=None),
    **{name: tensor_op(getattr(torch, name)) for name in ("minimum", "maximum", "abs", "log", "sqrt", "where")},
)
NAMES = {
    "tl": LANGUAGE,
    "clamped": lambda index, size: torch.as_tensor(index).clamp(0, size - 1),
    "size_of": lambda number: number // SIZE_STEP,
    "floor_divide": lambda a, b: a // b,
}


def tile_of(function):
    """Return the tile of a function, its extras, and what jit functions get for them."""
    extras = tuple(extra.resolved(num_q_heads=4, num_kv_heads=2) for extra in function.extras)
    writer = Writer(extras, {"num_q_heads": 4, "num_kv_heads": 2}, 4, False, False)
    passed = []
    for extra in extras:
        passed += [None, *(SIZE_STEP * 17 + 3 for size in extra.shape if size is None)]
    return Tile(writer, tree_of(function.source)), extras, passed


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.name)
@settings(max_examples=60, deadline=None, derandomize=True)
@given(q_low=st.integers(0, 400), rows=st.integers(1, 20), pos=st.integers(0, 400), keys=st.integers(1, 40))
def test_intervals_have_all_values(function, q_low, rows, pos, keys):
    tile, extras, passed = tile_of(function)
    found = dict(NAMES, q_low=torch.tensor(q_low), q_high=torch.tensor(q_low + rows - 1), extras=passed)
    found |= {"pos": torch.tensor(pos), "last": torch.tensor(pos + keys - 1)}
    exec("\n".join(tile.lines), found)
    serves = {form: bool(eval(text, found)) for form, text in tile.forms}
    scalars = eval(tile.scalars, found)
    q_pos, kv_pos = torch.arange(q_low, q_low + rows)[:, None], torch.arange(pos, pos + keys)[None]
    known = {"q_pos": q_pos, "kv_pos": kv_pos, "score": torch.zeros(rows, keys), "q_head": torch.zeros(rows, 1).long()}
    known |= {extra.name: torch.zeros(extra.with_size(17)) for extra in extras}
    known |= dict.fromkeys(("token", "seq"), torch.tensor(0))
    for statement in tile.tree.body:
        for node in ast.walk(statement):
            if (leaf := tile.leaves.get(id(node))) is not None:
                values = value_of(node, known, torch.float32).long()  # pyright: ignore[reportArgumentType]
                size = None if leaf.size is None else eval(leaf.size, found)
                if serves.get("flat"):
                    flat = values if size is None else values.clamp(0, size - 1)
                    assert (flat == scalars[leaf.number]).all()
                if serves.get("inside"):
                    assert (
                        (values == scalars[leaf.number]).all()
                        if size is None
                        else ((values >= 0) & (values < size)).all()
                    )
        if isinstance(statement, ast.Assign):
            known[statement.targets[0].id] = value_of(statement.value, known, torch.float32)


def test_forms_serve_where_they_should():
    """Far keys have one bucket, keys within the table no index out of range."""

    def forms(function, q_low, q_high, pos, last):
        tile, _, passed = tile_of(function)
        found = dict(NAMES, q_low=q_low, q_high=q_high, pos=pos, last=last, extras=passed)
        found = {name: torch.tensor(value) if type(value) is int else value for name, value in found.items()}
        exec("\n".join(tile.lines), found)
        return [form for form, text in tile.forms if eval(text, found)]

    assert forms(functions.t5, 300, 331, 0, 63) == ["flat"]
    assert forms(functions.t5, 300, 331, 192, 255) == []
    assert forms(functions.relative, 300, 331, 0, 63) == ["flat"]
    assert forms(functions.relative, 40, 43, 32, 39) == ["inside"]
    assert forms(functions.relative, 40, 43, 32, 47) == []
    assert forms(functions.inkling, 300, 331, 0, 63) == ["flat"]
    assert forms(functions.inkling, 40, 43, 32, 39) == ["inside"]
    assert forms(functions.inkling, 1 << 27, 1 << 27, 0, 63) == []
    assert forms(functions.hiding, 3, 3, 8, 15) == ["inside"]
    assert tile_of(functions.alibi)[0].forms == tile_of(functions.softcap)[0].forms == []
