"""Recorded calls: what a file holds, how it is replayed, and what is refused."""

import json
import os
import threading
import warnings
import zipfile
from dataclasses import replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import quire
from quire import api, debug
from quire.checks.attention import check_attention
from quire.cli import main
from quire.cli.check_features import FEATURES, LATENT_FEATURES, LATENTS, Feature
from quire.debug import replaying
from quire.debug.memory import Place, allocate, describe
from quire.dispatch.device import is_served_by_torch
from quire.testing import Problem, make_problem, random_norm_rope, unwritten
from tests.extended import extended

DTYPE = torch.float32
SMALL = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 32, "dtype": DTYPE}
LENS = ((1, 50), (3, 3), (7, 40), (0, 9), (1, 0))
SERVED = [feature for feature in FEATURES + LATENT_FEATURES if not feature.captured and not feature.plan]


def plan_for(problem: Problem, **options) -> quire.Plan:
    return quire.plan(problem.spec, problem.batch, **problem.bounds, **options)


def small(device: str, **spec) -> tuple[Problem, quire.Plan]:
    problem = make_problem(quire.AttentionSpec(**SMALL | spec), LENS, device=device)
    return problem, plan_for(problem)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "call.quire"


def recorded(path: Path, problem: Problem, plan: quire.Plan, q=None, contents: bool = False, **new) -> debug.Call:
    """Record a call and read it."""
    with debug.record(path, contents=contents):
        quire.attention(problem.q if q is None else q, problem.cache, plan, **problem.tables, **new)
    return debug.load(path)


@pytest.mark.parametrize("feature", SERVED, ids=lambda feature: feature.name)
def test_every_kind_of_call_is_replayed(feature: Feature, path, device):
    if not is_served_by_torch(torch.device(device)) and feature.spec(DTYPE).head_dim > 64:
        pytest.skip("wide heads take long in the interpreter; PyTorch replays them")
    problem = make_problem(feature.spec(DTYPE), feature.lens, device=device, **feature.problem)
    plan = plan_for(problem)
    new = {}
    if feature.append:
        cache, new = unwritten(problem)
        new |= random_norm_rope(problem, **feature.norm_rope)
        problem = replace(problem, cache=cache)
    for contents in (False, True):
        call = recorded(path, problem, plan, contents=contents, **new)
        done = debug.replay(call, device)
        assert done.passed, done
        assert done.notes == []
        assert str(plan.launch) in done.plan


def test_a_call_with_shared_prefixes_is_replayed_with_its_launches(path, device):
    problem = make_problem(quire.AttentionSpec(**SMALL), ((1, 50), (1, 35)), device=device)
    problem.batch.page_table[1, :2] = problem.batch.page_table[0, :2]
    plan = plan_for(problem, shared_prefix=32)
    done = debug.replay(recorded(path, problem, plan, contents=True), device)
    assert done.passed and done.notes == [] and str(plan.launch) in done.plan


def test_numbers_are_replayed_bit_for_bit(path, device):
    for spec, options in (({}, {}), ({"kv_dtype": torch.int8}, {"scales": "token"}), (LATENTS, {"page_size": 7})):
        problem = make_problem(quire.AttentionSpec(**SMALL | spec), LENS, device=device, **options)
        plan = plan_for(problem)
        call = recorded(path, problem, plan, contents=True)
        rebuilt, *_ = replaying.rebuild(call, torch.device(device))
        expected = quire.attention(problem.q, problem.cache, plan)
        assert torch.equal(quire.attention(rebuilt.q, rebuilt.cache, plan_for(rebuilt)), expected)


def test_new_tokens_are_recorded_before_they_are_written(path, device):
    """A replay writes them, to the same bits; the cache of the file is that of before the call."""
    for features in ({}, {"kv_dtype": torch.int8}, LATENTS):
        problem = make_problem(quire.AttentionSpec(**SMALL | features), ((1, 50), (3, 40)), device=device)
        cache, new = unwritten(problem)
        problem = replace(problem, cache=cache)
        plan = plan_for(problem)
        call = recorded(path, problem, plan, contents=True, **new)
        expected = quire.attention(problem.q, cache, plan)
        rebuilt, _, again = replaying.rebuild(call, torch.device(device))
        assert again["k"].stride() == new["k"].stride()
        before = rebuilt.cache.k.flatten(0, 1)[again["slot_mapping"]]
        assert bool((before == 127).all() if features.get("kv_dtype") else before.isnan().all())
        assert torch.equal(quire.attention(rebuilt.q, rebuilt.cache, plan_for(rebuilt), **again), expected)
        debug.save(path, problem.q, cache, plan, **new)
        assert debug.replay(debug.load(path), device).passed


def test_how_new_tokens_are_rotated_is_recorded(path, device):
    for features in ({}, {"kv_dtype": torch.int8}):
        problem = make_problem(quire.AttentionSpec(**SMALL | features), ((1, 50), (3, 40)), device=device)
        cache, new = unwritten(problem)
        new |= random_norm_rope(problem, 24, interleaved=True, qk_norm=True)
        new["qk_norm"] = new["qk_norm"]._replace(eps=0.25)
        problem = replace(problem, cache=cache)
        plan = plan_for(problem)
        call = recorded(path, problem, plan, contents=True, **new)
        assert debug.replay(call, device).passed
        *_, again = replaying.rebuild(call, torch.device(device))
        for name in ("rope", "qk_norm"):
            for found, given in zip(again[name], new[name], strict=True):
                assert torch.equal(found, given) if isinstance(given, torch.Tensor) else found == given
        for gone in ("positions", "k_weight"):
            places = {name: place for name, place in call.places.items() if name != gone}
            tensors = {name: tensor for name, tensor in call.tensors.items() if name != gone}
            replace(call, places=places, tensors=tensors).write(path)
            with pytest.raises(ValueError, match=r"it must describe new_k, .* or none of these"):
                debug.load(path)


def test_new_tokens_of_a_large_cache_are_replayed_on_the_pages_that_are_read(path, device):
    problem = make_problem(quire.AttentionSpec(**SMALL), LENS, spare_pages=100, device=device)
    cache, new = unwritten(problem)
    call = recorded(path, replace(problem, cache=cache), plan_for(problem), **new)
    done = debug.replay(call, device, max_bytes=300_000)
    assert done.passed and "pages are renumbered" in done.notes[0]


def test_a_slot_past_the_pool_is_a_finding(path, device):
    problem, plan = small(device)
    cache, new = unwritten(problem)
    call = recorded(path, replace(problem, cache=cache), plan, **new)
    call.tensors["slot_mapping"][3] = 1 << 40
    assert "slot_mapping must hold slots below" in str(debug.replay(call, device).error)


def test_tensors_lie_in_memory_as_they_did(path, device):
    """K and V share a tensor whose pages interleave with another layer's, and q is a slice of a fused projection."""
    spec = quire.AttentionSpec(**SMALL)
    storage = torch.randn(9, 2, 2, 16, 2, 32, dtype=DTYPE, device=device)  # [pages, layers, k or v, slot, head, dim]
    cache = quire.PagedKVCache(storage[:, 1, 0], storage[:, 1, 1])
    q = torch.randn(3, 10, 32, dtype=DTYPE, device=device)[:, 2:8]
    table = torch.tensor([[3, 8], [5, -1]], dtype=torch.int32, device=device)
    lens, starts = (torch.tensor(n, dtype=torch.int32, device=device) for n in ([20, 9], [0, 1, 3]))
    plan = quire.plan(spec, quire.Batch(table, lens, starts), max_query_len=2, max_seq_len=32)
    with debug.record(path):
        quire.attention(q, cache, plan)
    call = debug.load(path)
    rebuilt, *_ = replaying.rebuild(call, torch.device(device))
    assert rebuilt.cache.strides == cache.strides and rebuilt.q.stride() == q.stride()
    assert rebuilt.cache.v.data_ptr() - rebuilt.cache.k.data_ptr() == cache.v.data_ptr() - cache.k.data_ptr()
    assert rebuilt.cache.k.untyped_storage().data_ptr() == rebuilt.cache.v.untyped_storage().data_ptr()
    assert rebuilt.cache.k.data_ptr() % 256 == cache.k.data_ptr() % 256
    used = torch.tensor([3, 8, 5], device=device)
    assert bool(rebuilt.cache.k[used].isfinite().all())
    assert bool(rebuilt.cache.k[0].isnan().all())
    assert debug.replay(call, device).passed


def test_queries_to_latents_are_replayed_as_the_pair_they_were(path, device):
    problem, plan = small(device, **LATENTS)
    call = recorded(path, problem, plan, q=problem.halves)
    assert {"q_nope", "q_pe"} <= call.places.keys() and "q" not in call.places
    assert debug.replay(call, device).passed


def test_packed_keys_are_replayed(path, device):
    spec = quire.AttentionSpec(**SMALL)
    q, k, v = (torch.randn(30, heads, 32, dtype=DTYPE, device=device) for heads in (6, 2, 2))
    starts = torch.tensor([0, 4, 25], dtype=torch.int32, device=device)
    plan = quire.plan(spec, quire.Batch.varlen(starts, starts), max_query_len=21, max_seq_len=21)
    for contents in (False, True):
        with debug.record(path, contents=contents):
            quire.varlen_attention(q[:25], k, v, plan)
        assert debug.replay(debug.load(path), device).passed


def test_memory_that_may_not_be_read_holds_nan_in_a_replay(path, device):
    problem, plan = small(device, sliding_window=9)
    call = recorded(path, problem, plan)
    rebuilt, *_ = replaying.rebuild(call, torch.device(device))
    replaying.poison_slots(rebuilt, call, {})
    assert torch.equal(rebuilt.cache.k.isnan(), problem.cache.k.isnan())


def test_expanded_scales_and_caches_are_replayed(path, device):
    spec = quire.AttentionSpec(**SMALL | {"kv_dtype": torch.float8_e4m3fn})
    k = torch.randn(1, 16, 2, 32, device=device).to(torch.float8_e4m3fn).expand(4, 16, 2, 32)
    cache = quire.PagedKVCache(k, k, k_scale=0.5, v_scale=2.0)
    table = torch.tensor([[0, 3]], dtype=torch.int32, device=device)
    lens = torch.tensor([20], dtype=torch.int32, device=device)
    plan = quire.plan(spec, quire.Batch(table, lens), max_query_len=1, max_seq_len=32)
    for contents in (False, True):
        with debug.record(path, contents=contents):
            quire.attention(torch.randn(1, 6, 32, dtype=DTYPE, device=device), cache, plan)
        assert debug.replay(debug.load(path), device).passed


@pytest.mark.triton
def test_the_recorded_launch_is_run_again(path, device):
    problem = make_problem(quire.AttentionSpec(**SMALL), ((1, 300), (1, 5)), device=device)
    for options in ({"num_splits": 5}, {"batch_invariant": True}):
        plan = plan_for(problem, **options)
        call = recorded(path, problem, plan)
        assert str(plan.launch) in (done := debug.replay(call, device)).plan
        assert done.passed
    done = debug.replay(call, device, replan=True)
    assert done.passed and done.notes == ["The plan is made here, as was asked."]
    assert str(plan.launch) in done.plan  # batch-invariant again


def test_a_launch_for_another_device_is_planned_again(path, device):
    problem, plan = small(device)
    call = recorded(path, problem, plan)
    text = call.launch.replace('"num_sms": ', '"num_sms": 1')
    assert text != call.launch
    done = debug.replay(replaying.replace(call, launch=text), device)
    assert done.passed and "is for another device" in done.notes[0]
    done = debug.replay(replaying.replace(call, launch='{"class": "quire.kernels.gone:Launch"}'), device)
    assert done.passed and "another version of Quire" in done.notes[0]


@pytest.mark.parametrize(
    "name",
    ["subprocess:run", "quire.plan:import_module", "quire.kernels.launch:Any", "quire.dispatch.device:find_spec"],
)
def test_a_launch_is_made_of_launches_alone(name):
    assert replaying.decode_launch(json.dumps({"class": name, "name": "antigravity"})) is None


def test_a_large_cache_is_replayed_on_the_pages_that_are_read(path, device):
    problem, plan = small(device)
    for contents in (False, True):
        call = recorded(path, problem, plan, contents=contents)
        whole = sum(place.end for place in call.places.values())
        done = debug.replay(call, device, max_bytes=whole - 1)
        assert done.passed and "pages are renumbered" in done.notes[0]
        with pytest.raises(ValueError, match="max_bytes must be at least"):
            debug.replay(call, device, max_bytes=1000)


# What a replay finds


def test_a_wrong_result_is_found(path, device, monkeypatch):
    problem, plan = small(device)
    call = recorded(path, problem, plan)
    right = replaying.attention
    monkeypatch.setattr(replaying, "attention", lambda q, *args, **kwargs: right(q * 1.01, *args, **kwargs))
    done = debug.replay(call, device)
    assert not done.passed and done.verdict is not None and done.verdict.out > 1


def test_a_call_that_fails_is_a_finding(path, device, monkeypatch):
    problem, plan = small(device)
    call = recorded(path, problem, plan)

    def crash(*args, **kwargs):
        raise RuntimeError("illegal memory access")

    monkeypatch.setattr(replaying, "attention", crash)
    done = debug.replay(call, device)
    assert done.error == "the call fails: RuntimeError: illegal memory access" and not done.passed


@pytest.mark.parametrize("contents", [False, True])
def test_a_batch_that_breaks_its_contract_is_a_finding(contents, path, device):
    """A page that the cache does not have: on a GPU, the call that is recorded reads whatever is there."""
    problem, plan = small(device)
    problem.batch.page_table[0, 1] = 99
    debug.save(path, problem.q, problem.cache, plan, contents=contents)
    for max_bytes in (replaying.MAX_BYTES, 76_000):
        done = debug.replay(debug.load(path), device, max_bytes=max_bytes)
        assert not done.passed and done.error is not None and "the batch breaks its contract: page_table" in done.error


def test_numbers_that_are_nan_are_a_finding(path, device):
    problem, plan = small(device)
    problem.q[0, 0, 0] = float("nan")
    done = debug.replay(recorded(path, problem, plan, contents=True), device)
    assert not done.passed and done.error is not None and "NaN" in done.error


# Recording


def test_recording_costs_nothing_when_it_is_off(path, device):
    problem, plan = small(device)
    assert api.check_attention is check_attention
    with debug.record(path):
        assert api.check_attention is not check_attention
        quire.attention(problem.q, problem.cache, plan)
    assert api.check_attention is check_attention


def test_the_call_after_those_skipped_is_recorded(path, device):
    problem, plan = small(device)
    with debug.record(path, contents=True, skip=2):
        for factor in range(4):
            assert path.exists() == (factor > 2)
            quire.attention(problem.q * factor, problem.cache, plan)
    call = debug.load(path)
    assert torch.equal(call.tensors["q"], 2 * problem.q.cpu())


def test_a_union_counts_as_its_calls(path, device):
    problem = make_problem(quire.AttentionSpec(**SMALL), ((1, 50), (1, 9)), device=device)
    both = quire.intervals.prefix_and_window(problem.batch, 2, prefix=1, size=4)
    plans = [quire.plan(problem.spec, b, **problem.bounds) for b in both]
    for skip in range(2):
        with debug.record(path, contents=True, skip=skip):
            quire.union_attention(problem.q, problem.cache, plans)
        assert torch.equal(debug.load(path).tensors["key_begin"], both[skip].key_begin.cpu())
    with pytest.warns(UserWarning, match="2 calls of quire.attention"), debug.record(path, skip=2):
        quire.union_attention(problem.q, problem.cache, plans)


def test_sinks_in_float64_are_recorded(path, device):
    problem, plan = small(device, sinks=True)
    problem = replace(problem, sinks=problem.sinks.double())
    assert debug.replay(recorded(path, problem, plan, contents=True), device).passed


def test_an_empty_view_of_a_buffer_is_recorded(path, device):
    """Its address is 0, wherever the buffer is."""
    buffer = torch.zeros(64, dtype=torch.int32, device=device)
    problem, _ = small(device)
    batch = quire.Batch(buffer[:0].view(0, 2), buffer[:0], buffer[32:33])
    problem = replace(problem, batch=batch, q=problem.q[:0])
    plan = quire.plan(problem.spec, batch, max_query_len=1, max_seq_len=8)
    assert debug.replay(recorded(path, problem, plan), device).passed


@pytest.mark.parametrize("contents", [False, True])
def test_the_default_device_does_not_matter(contents, path, device):
    problem, plan = small(device)
    with torch.device("meta"):
        done = debug.replay(recorded(path, problem, plan, contents=contents), device)
    assert done.passed, done


def test_a_call_that_fails_leaves_a_file(path, device, monkeypatch):
    problem, plan = small(device)

    def crash(*args):
        raise RuntimeError("illegal memory access")

    object.__setattr__(plan, "runner", crash)
    with pytest.raises(RuntimeError), debug.record(path):
        quire.attention(problem.q, problem.cache, plan)
    assert api.check_attention is check_attention
    assert debug.replay(debug.load(path), device).passed


def test_a_context_without_a_call_says_so(path, device):
    with pytest.warns(UserWarning, match="was not written: 0 calls"), debug.record(path):
        pass
    problem, plan = small(device)
    with pytest.warns(UserWarning, match="was not written: 1 calls"), debug.record(path, skip=1):
        quire.attention(problem.q, problem.cache, plan)
    assert not path.exists()


def test_calls_of_all_threads_count_and_one_is_recorded(path, device):
    problem, plan = small(device)
    with debug.record(path):
        threads = [
            threading.Thread(target=quire.attention, args=(problem.q, problem.cache, plan_for(problem)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert debug.replay(debug.load(path), device).passed


def test_bad_arguments_are_refused(path, tmp_path, device):
    problem, plan = small(device)
    for bad, kind in ((tmp_path, ValueError), (tmp_path / "gone" / "file", ValueError), (3, TypeError)):
        with pytest.raises(kind, match="path must be a"), debug.record(bad):
            pass
        with pytest.raises(kind, match="path must be a"):
            debug.save(bad, problem.q, problem.cache, plan)
    for name, reason in (("x" * 5000, "File name too long"), ("a\0b", "embedded null byte")):
        with pytest.raises(ValueError, match=f"path must be the name of a file, .{{3,60}}, {reason}; choose another"):
            debug.save(name, problem.q, problem.cache, plan)
    with pytest.raises(ValueError, match="skip must be"), debug.record(path, skip=-1):
        pass
    with pytest.raises(TypeError, match="contents must be"), debug.record(path, contents="yes"):
        pass
    with pytest.raises(ValueError, match="once at a time"), debug.record(path), debug.record(path):
        pass
    with pytest.raises(ValueError, match="q must"):
        debug.save(path, problem.q[:, :1], problem.cache, plan)
    assert api.check_attention is check_attention and not path.exists()


def test_only_what_the_batch_reads_is_in_the_file(path, device):
    problem = make_problem(quire.AttentionSpec(**SMALL), LENS, device=device, spare_pages=3000)
    plan = plan_for(problem)
    debug.save(path, problem.q, problem.cache, plan)
    without = path.stat().st_size
    debug.save(path, problem.q, problem.cache, plan, contents=True)
    numbers = problem.q.nbytes + 2 * sum(-(-n // 16) for q_len, n in LENS if q_len) * 16 * 2 * 32 * 4
    assert without < 20_000 and numbers < path.stat().st_size < without + numbers + 5_000


def test_a_call_of_torch_compile_is_recorded(path, device):
    problem, plan = small(device)
    compiled = torch.compile(lambda q: quire.attention(q, problem.cache, plan), backend="aot_eager")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with debug.record(path):
            compiled(problem.q)
    assert debug.replay(debug.load(path), device).passed


# Files that are not sound


@pytest.mark.parametrize("content", [b"", b"nothing of the kind", bytes(range(256)), None, "folder"])
def test_files_of_another_kind_are_refused(content, path, capsys):
    if content == "folder":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    assert main(["replay", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"{path} must be a record of `quire.debug.record`, got")
    assert captured.err.count("\n") == 1


class Payload:
    def __reduce__(self):
        return os.mkdir, (os.environ["QUIRE_TEST_PAYLOAD"],)


def test_a_file_with_code_in_it_runs_none(path, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QUIRE_TEST_PAYLOAD", str(tmp_path / "payload"))
    torch.save({"format": 1, "header": "{}", "tensors": Payload()}, path)
    assert main(["replay", str(path)]) == 2
    assert "must be a record" in capsys.readouterr().err
    assert not (tmp_path / "payload").exists()


def test_a_file_that_was_cut_off_is_refused(path, device):
    problem, plan = small(device)
    recorded(path, problem, plan, contents=True)
    whole = path.read_bytes()
    for length in (10, len(whole) // 2, len(whole) - 30):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="must be a record"):
            debug.load(path)


def test_a_file_of_a_later_format_is_named(path, device):
    problem, plan = small(device)
    recorded(path, problem, plan)
    content = torch.load(path, weights_only=True)
    torch.save(content | {"format": 2}, path)
    with pytest.raises(ValueError, match="its format is 2, and this version of Quire reads 1"):
        debug.load(path)


def leaves(value, where=()):
    """Return the paths of all values in some JSON."""
    yield where
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from leaves(value[key], (*where, key))


@pytest.mark.slow
@pytest.mark.parametrize("values", [(None, 2**61, "text", [[1]]), extended((-1, [], {}, 1.5))], ids=str)
def test_no_broken_header_is_run(values, path, device):
    """Every value of the header is dropped, and replaced by values of other kinds: each is refused, or does no harm."""
    problem, plan = small(device)
    debug.save(path, problem.q, problem.cache, plan, contents=True)
    content = torch.load(path, weights_only=True)
    original = json.loads(content["header"])
    count = 0
    for where in list(leaves(original))[1:]:
        for bad in values:
            header = json.loads(content["header"])
            place = header
            for key in where[:-1]:
                place = place[key]
            place[where[-1]] = bad
            torch.save(content | {"header": json.dumps(header)}, path)
            try:
                call = debug.load(path)
            except ValueError as error:
                assert str(error).startswith(f"{path} must be a record")
                count += 1
                continue
            try:
                done = debug.replay(call, device, max_bytes=1 << 24)
            except (ValueError, TypeError, quire.UnsupportedError):
                continue
            assert done.passed or done.error or done.verdict
    assert count > 100


@pytest.mark.slow
def test_a_broken_header_of_a_tensor_reaches_no_other_memory():
    problem = make_problem(quire.AttentionSpec(**SMALL), LENS)
    places = describe({"k": problem.cache.k, "q": problem.q})
    for name, tensor in allocate(places, torch.device("cpu")).items():
        last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = (tensor.storage_offset() + last + 1) * tensor.itemsize
        assert end <= tensor.untyped_storage().nbytes(), name
    with pytest.raises(ValueError, match="at least 0"):
        Place("float32", (3,), (-1,), 0, 0)


# The command


def test_the_command_prints_the_verdict(path, device, capsys, monkeypatch):
    problem, plan = small(device)
    recorded(path, problem, plan)
    assert main(["replay", str(path)]) == 0
    text = capsys.readouterr().out
    assert f"{path} was recorded on" in text and f"torch {version('torch')}" in text
    assert str(plan.launch) in text and "The numbers were not recorded" in text
    assert text.endswith("PASS: the result is right here.\n")
    right = replaying.attention
    monkeypatch.setattr(replaying, "attention", lambda q, *args, **kwargs: right(q * 1.01, *args, **kwargs))
    assert main(["replay", str(path), "--replan", "--memory", "1"]) == 1
    assert capsys.readouterr().out.endswith("FAIL: the result is wrong here.\n")


def test_what_this_machine_cannot_replay_leaves_with_2(path, device, capsys):
    problem, plan = small(device)
    recorded(path, problem, plan)
    assert main(["replay", str(path), "--memory", "0.00001"]) == 2
    assert "must be a call that can be made again here: max_bytes must be at least" in capsys.readouterr().err
    for value in ("0", "-1", "much"):
        with pytest.raises(SystemExit):
            main(["replay", str(path), "--memory", value])


def test_a_record_is_a_zip_file_without_code(path, device):
    problem, plan = small(device)
    recorded(path, problem, plan, contents=True)
    assert zipfile.is_zipfile(path)
    spans = sorted((place.offset, place.end) for place in debug.load(path).places.values() if place.storage == 0)
    assert all(a <= b for (a, _), (b, _) in pairwise(spans))
