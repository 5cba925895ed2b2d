"""`quire.score` and `quire.mask`: what they read, what they refuse, and what stays equal over processes."""

import math
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import quire
from quire import debug, launch_codec, score_functions
from quire.dispatch.request import spec_for_kernels
from quire.score_functions import Function, softcap_of
from quire.testing import error_budget, make_problem
from tests import score_functions as functions
from tests.test_docs import ROOT, examples

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 16, "dtype": torch.float32}
TABLE, NUMBER, LATER = torch.zeros(3), 3, "no number"


class Holder:
    number = 2.0


def fails(function, error, message, kind=quire.score, **options):
    with pytest.raises(error, match=message) as caught:
        kind(function, **options)
    return str(caught.value)


def test_a_function_is_kept_as_text_with_its_constants():
    def own(score, q_pos):
        """A docstring."""
        factor = NUMBER * 2
        score *= factor / 4
        return torch.where(0 <= q_pos < factor, score, -math.inf)

    found = quire.score(own)
    assert found.source == (
        "def own(score, q_pos):\n    score = score * 1.5\n    return where((0 <= q_pos) & (q_pos < 6), score, -1e309)"
    )
    assert found.name == "own" and repr(found) == "<quire.score own>"
    assert Function("score", found.source) == found and hash(Function("score", found.source)) == hash(found)


def test_a_changed_constant_is_another_function_and_the_same_one_is_equal():
    def capped(cap):
        @quire.score
        def soft(score):
            return cap * torch.tanh(score / cap)

        return soft

    assert capped(2.0) == capped(2.0) and hash(capped(2.0)) == hash(capped(2.0))
    assert capped(2.0) != capped(3.0)
    specs = [quire.AttentionSpec(**HEADS, score=capped(cap)) for cap in (2.0, 2.0, 3.0)]
    assert specs[0] == specs[1] != specs[2] and hash(specs[0]) == hash(specs[1])


def print_it(score):
    print(score)
    return score


def assign_global(score):
    global NUMBER
    NUMBER = 4
    return score


def assign_attribute(score):
    Holder.number = score
    return score


def loop(score, kv_pos):
    for _ in range(3):
        score = score + 1.0
    return score


def branch(score, q_pos):
    if q_pos > 3:
        score = score + 1.0
    return score


REFUSED = {  # by what: the function, what is said, and what stands in the line that is named
    "print": (print_it, "print_it must call only torch's where, .* got `print`", "print(score)"),
    "global": (assign_global, "assign_global must assign and return only, got `global NUMBER`", "global NUMBER"),
    "attribute": (assign_attribute, "must assign to local names, got `Holder.number`", "Holder.number = score"),
    "loop": (loop, "must assign and return only, got `for _ in range", "for _ in range(3)"),
    "if": (branch, r"got `if q_pos > 3:` .*; choose by where\(condition, a, b\)", "if q_pos > 3"),
    "unknown name": (lambda score: score + unknown, "use names that are known, got unknown", "unknown"),  # noqa: F821
    "unknown function": (lambda score: torch.sin(score), "call only torch's .* got `torch.sin`", "torch.sin"),
    "a method": (lambda score: score.abs(), "attributes of modules alone, got `score.abs`", "score.abs"),
    "an attribute": (lambda score: score + Holder.number, "attributes of modules alone", "Holder.number"),
    "a tensor": (lambda score, q_pos: score + TABLE[q_pos], "only what is declared in extras", "TABLE[q_pos]"),
    "all of a tensor": (lambda score: score + TABLE, "take numbers from outside.* pass it as an extra", "TABLE"),
    "a text": (lambda score: score + LATER, "take numbers from outside, got `LATER`", "LATER"),
    "an int": (lambda score, q_pos: q_pos, r"return a float, got int `q_pos`.*convert with float\(x\)", "q_pos"),
    "a bool": (lambda score: score > 0, "must return a float, got bool", "score > 0"),
    "nothing": (lambda score: 1.0, "must return what depends on its arguments", "1.0"),
    "a power": (lambda score: score**2, r"use \*\* where it is the same", "score**2"),
    "and": (lambda score, q_pos: torch.where(q_pos > 1 and q_pos < 3, score, 0.0), "write & for and", "and"),
    "a choice": (lambda score, q_pos: score if q_pos else 0.0, "choose by where", "if q_pos"),
    "another argument": (lambda score, place: score, "take score, .* declared extras, got place", "place"),
    "a default": (lambda score, q_pos=3: score, "have plain arguments", "q_pos=3"),
    "float and bool": (lambda score, q_pos: score + (q_pos > 1), r"use \+ where it is the same", "q_pos > 1"),
    "floor of floats": (lambda score: score // 2.0, "use // where it is the same", "//"),
    "division by 0": (lambda score, q_pos: score + q_pos % 0, "divide by no 0", "% 0"),
    "a wide integer": (lambda score, q_pos: score + (q_pos & (1 << 40)), "integers of 32 bits", "1 << 40"),
    "a bool as a number": (lambda score: torch.exp(score > 1), "call exp with numbers", "torch.exp"),
    "no index": (lambda score, bias: score + bias, "read bias by an index", "bias"),
    "two indices": (lambda score, bias: score + bias[1, 2], "read bias by 1 integers", "bias[1, 2]"),
    "a slice": (lambda score, bias: score + bias[1:2], "read bias by 1 integers", "bias[1:2]"),
    "a float as an index": (lambda score, bias: score + bias[score], "read bias by integers", "bias[score]"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_names_the_line(what):
    function, message, code = REFUSED[what]
    extras = {"bias": 1} if "bias" in function.__code__.co_varnames else None
    said = fails(function, ValueError, message, extras=extras)
    line = int(said.split(" in line ")[1].split(" of ")[0])
    assert said.split(" of ")[-1].startswith(__file__) or __file__ in said
    assert code in Path(__file__).read_text().splitlines()[line - 1]


def test_what_is_no_function_of_python_is_refused():
    fails(len, TypeError, "score must be made of a Python function")
    fails(3, TypeError, "score must be made of a Python function, got 3")
    typed = {}
    exec("def typed(score): return score", typed)
    fails(typed["typed"], TypeError, "typed must have source that Python can read")


def test_masks_and_bounds_have_results_of_their_own():
    fails(lambda q_pos: q_pos, ValueError, "must return a bool, got int", quire.mask)
    fails(lambda score: score > 1.0, ValueError, "take q_pos, kv_pos, .* got score", quire.mask)
    good = functions.dilated
    assert good.kind == "mask"

    def visible(q_pos, kv_pos):
        return kv_pos < q_pos

    fails(visible, ValueError, "return two integers", quire.mask, bounds=lambda q_pos: q_pos)
    fails(visible, ValueError, "return two integers", quire.mask, bounds=lambda q_pos: (q_pos, 1.0))
    fails(
        visible, ValueError, "take q_pos, seq, token and declared extras", quire.mask, bounds=lambda q_head: (q_head, 2)
    )


@pytest.mark.parametrize(
    ("extras", "message"),
    [
        ({"bias": "wide"}, "extras\\['bias'\\] must have 1 to 4 dimensions"),
        ({"bias": ()}, "1 to 4 dimensions"),
        ({"bias": 5}, "1 to 4 dimensions"),
        ({"bias": ("heads",)}, "sizes, num_q_heads or num_kv_heads, got 'heads'"),
        ({"bias": (0,)}, "sizes, num_q_heads or num_kv_heads, got 0"),
        ({"bias": (torch.float64, None)}, "dtype of .* got torch.float64"),
        ({"bias": 1, "other": 1}, "extras must be arguments of biased, got other"),
    ],
)
def test_extras_that_are_declared_wrongly_are_refused(extras, message):
    def biased(score, q_pos, bias):
        return score + bias[q_pos]

    fails(biased, ValueError, message, extras=extras)


def test_a_spec_takes_what_the_decorators_made_and_four_tensors():
    with pytest.raises(TypeError, match=r"score must be made by quire\.score, got a value of type function"):
        quire.AttentionSpec(**HEADS, score=lambda score: score)
    with pytest.raises(TypeError, match=r"mask must be made by quire\.mask"):
        quire.AttentionSpec(**HEADS, mask=functions.softcap)

    @quire.score(extras=dict.fromkeys("abc", 1))
    def three(score, q_pos, a, b, c):
        return score + a[q_pos] + b[q_pos] + c[q_pos]

    @quire.mask(extras={"a": 2})
    def other(q_pos, kv_pos, a):
        return a[q_pos, kv_pos] > 0.0

    @quire.mask(extras={"a": 1, "d": 1, "e": 1})
    def more(q_pos, a, d, e):
        return a[q_pos] + d[q_pos] > e[q_pos]

    with pytest.raises(ValueError, match="extras must be declared alike by score and mask"):
        quire.AttentionSpec(**HEADS, score=three, mask=other)
    with pytest.raises(quire.UnsupportedError, match="extras must be at most 4, got 5: a, b, c, d, e"):
        quire.AttentionSpec(**HEADS, score=three, mask=more)
    assert [extra.shape for extra in quire.AttentionSpec(**HEADS, score=functions.relative).extras] == [(4, None)]


def solved(**features):
    spec = quire.AttentionSpec(**HEADS, **features)
    p = make_problem(spec, ((1, 40), (7, 20)))
    return p, quire.plan(spec, p.batch, **p.bounds)


def test_the_tensors_of_a_call_are_checked():
    p, plan = solved(score=functions.relative)
    good = p.extras[0]
    wrong = {
        "none": ((), "extras must be a tuple of bias, as the spec's functions read, got 0"),
        "two": ((good, good), "got 2"),
        "a tensor": (good, "extras must be a tuple of bias"),
        "heads": ((good[:3],), r"extras: bias must be contiguous torch.float32 \[4, any\] on cpu"),
        "dtype": ((good.double(),), r"got a float64 tensor"),
        "dims": ((good[0],), r"\[4, any\]"),
        "strides": ((good.T.contiguous().T,), "contiguous"),
        "empty": ((good[:, :0].contiguous(),), "at least one"),
        "no tensor": ((3,), "extras: bias must be a tensor with strides, got 3"),
    }
    for extras, message in wrong.values():
        with pytest.raises((ValueError, TypeError), match=message):
            quire.attention(p.q, p.cache, plan, extras=extras)
    plain, own = solved()
    with pytest.raises(ValueError, match="extras must be a tuple of nothing, as the spec's functions read, got 1"):
        quire.attention(plain.q, plain.cache, own, extras=(good,))
    quire.attention(plain.q, plain.cache, own, extras=[])


def test_what_does_not_go_with_functions_is_refused():
    p, _ = solved(score=functions.softcap)
    with pytest.raises(quire.UnsupportedError, match="shared_prefix must be left out for a spec with a score"):
        quire.plan(p.spec, p.batch, **p.bounds, shared_prefix=16)
    lists = quire.ChosenKeys(torch.zeros(8, 4, dtype=torch.int32))
    with pytest.raises(quire.UnsupportedError, match="score must be None where the batch has chosen"):
        quire.plan(p.spec, replace(p.batch, chosen=lists), **p.bounds)
    bounded = quire.AttentionSpec(**HEADS, mask=functions.dilated)
    tree = replace(p.batch, tree_bits=torch.ones(8, dtype=torch.int64))
    with pytest.raises(quire.UnsupportedError, match="mask must have no bounds where the batch has tree_bits"):
        quire.plan(bounded, tree, **p.bounds)


def test_a_function_can_be_called_on_tensors():
    distance = torch.arange(5)
    found = functions.alibi(torch.zeros(4, 5), 4, distance, torch.arange(4)[:, None], torch.ones(4))
    assert torch.equal(found, (distance - 4).expand(4, 5).float())
    with pytest.raises(TypeError, match="alibi must get score, q_pos, kv_pos, q_head, slopes"):
        functions.alibi(torch.zeros(3))


@pytest.mark.parametrize("name", functions.FUNCTIONS)
def test_a_spec_survives_pickling_and_the_text_of_launches(name):
    spec = quire.AttentionSpec(**HEADS, **functions.FUNCTIONS[name])
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert pickle.loads(pickle.dumps(spec)).extras == spec.extras
    assert launch_codec.decode(launch_codec.encode(spec)) == spec


def test_a_function_is_the_same_in_another_process():
    code = "from tests.score_functions import t5; print(t5.source, end='')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout == functions.t5.source


@pytest.mark.parametrize(
    "text",
    [
        "def f(score):\n    return __import__('os').system('true')",
        "def f(score):\n    return score + open",
        "import os",
        "def f(score):\n    return score\ndef g(score):\n    return score",
        "def f(score):\n    return (score)",
        "@print\ndef f(score):\n    return score",
        "def f(score=print(3)):\n    return score",
        "def f(score: print(3)):\n    return score",
    ],
)
def test_a_text_that_no_decorator_made_is_refused(text, capsys):
    with pytest.raises(ValueError, match=r"must|source"):
        Function("score", text)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("contents", [False, True])
@pytest.mark.parametrize("mask", [functions.same_document, functions.custom], ids=repr)
def test_a_call_with_functions_is_recorded_and_replayed(mask, contents, tmp_path):
    p, plan = solved(score=functions.relative, mask=mask)
    with debug.record(tmp_path / "call", contents=contents):
        quire.attention(p.q, p.cache, plan, **p.tables)
    call = debug.load(tmp_path / "call")
    assert call.spec == p.spec
    done = debug.replay(call)
    assert done.passed and done.notes == [], done
    debug.save(tmp_path / "saved", p.q, p.cache, plan, **p.tables, contents=True)
    assert debug.replay(debug.load(tmp_path / "saved")).passed


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_calls_are_eager_ones(backend):
    p, plan = solved(score=functions.relative, mask=functions.from_first)
    expected = quire.attention(p.q, p.cache, plan, **p.tables)

    def step(q, cache, plan, extras):
        return quire.attention(q, cache, plan, extras=extras) + 1

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(p.q, p.cache, plan, p.extras), expected + 1)
    with pytest.raises(Exception, match="extras: bias must be contiguous"):
        compiled(p.q, p.cache, plan, (p.extras[0][:3], p.extras[1]))


def test_packed_keys_and_unions_take_tensors_too():
    spec = quire.AttentionSpec(**HEADS, score=functions.relative)
    starts = torch.tensor([0, 20, 27], dtype=torch.int32)
    plan = quire.plan(spec, quire.Batch.varlen(starts, starts), max_query_len=20, max_seq_len=20, num_tokens=27)
    q, (k, v), bias = torch.randn(27, 4, 16), torch.randn(2, 27, 2, 16), torch.randn(4, 9)
    out = quire.varlen_attention(q, k, v, plan, extras=(bias,))
    alone = quire.Batch.varlen(starts[:2], starts[:2])
    first = quire.plan(spec, alone, max_query_len=20, max_seq_len=20, num_tokens=20)
    torch.testing.assert_close(out[:20], quire.varlen_attention(q[:20], k[:20], v[:20], first, extras=(bias,)))
    p = make_problem(spec, ((1, 40), (1, 30)), one_query=True)
    parts = quire.intervals.prefix_and_window(p.batch, 2, prefix=4, size=36)
    plans = [quire.plan(spec, part, max_query_len=1, max_seq_len=40) for part in parts]
    verdict = error_budget(p, quire.union_attention(p.q, p.cache, plans, **p.tables))
    assert verdict.passed, verdict


def test_a_function_that_is_a_softcap_is_known_for_one():
    cap = 2.5

    @quire.score
    def turned(score):
        return torch.tanh(score / cap) * cap

    @quire.score
    def other(score):
        return cap * torch.tanh(score / 2.0)

    @quire.score
    def more(score):
        return cap * torch.tanh(score / cap) + 1.0

    @quire.score
    def of_positions(q_pos):
        return cap * torch.tanh(q_pos / cap)

    assert [softcap_of(f) for f in (functions.softcap, turned, other, more, of_positions)] == [
        2.0,
        2.5,
        None,
        None,
        None,
    ]
    spec = quire.AttentionSpec(**HEADS, score=turned)
    known = spec_for_kernels(spec)
    assert (known.score, known.softcap) == (None, 2.5)
    for last in (replace(spec, softcap=3.0), replace(spec, alibi=True)):  # the function comes after these
        assert spec_for_kernels(last) is last


PORTED = "softcap", "alibi", "buckets", "documents", "neighbours"


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(("name", "original"), [*((name, name) for name in PORTED), ("distances", "buckets")])
def test_what_the_recipe_ports_is_what_flex_attention_computes(name, original):
    names: dict = {}
    for line, code, _ in examples("docs/scores.md"):
        exec(compile("\n" * line + code, str(ROOT / "docs/scores.md"), "exec"), names)
    own, flex = names[name], names[f"flex_{original}"]
    length, causal = 64, name != "neighbours"
    spec = quire.AttentionSpec(**HEADS, causal=causal, **{own.kind: own})
    p = make_problem(spec, ((length, length),), page_size=length)
    page = p.batch.page_table[0, 0]
    q, k, v = (x.transpose(0, 1)[None] for x in (p.q, p.cache.k[page], p.cache.v[page]))

    def past(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    mod = {"score_mod": flex} if own.kind == "score" else {}
    seen = flex if own.kind == "mask" else past
    blocks = create_block_mask(seen, None, None, length, length, device="cpu")
    expected = flex_attention(q, k, v, **mod, block_mask=blocks, enable_gqa=True)
    plan = quire.plan(spec, p.batch, **p.bounds)
    found = quire.attention(p.q, p.cache, plan, extras=tuple(names[extra.name] for extra in spec.extras))
    torch.testing.assert_close(found, expected[0].transpose(0, 1), atol=1e-5, rtol=1e-5)


def test_the_recipe_ports_all_that_it_shows():
    text = (ROOT / "docs/scores.md").read_text()
    assert {f"def flex_{name}(" for name in PORTED} == {
        line.split("(")[0] + "(" for line in text.splitlines() if line.startswith("def flex_")
    }


def test_words_of_the_page_are_those_of_the_module():
    text = (ROOT / "docs/scores.md").read_text()
    assert all(f"`torch.{word}`" in text or f"`{word}(x)`" in text for word in score_functions.WORDS)
    assert all(f"`{argument}`" in text for argument in score_functions.ARGUMENTS)
