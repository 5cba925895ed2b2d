"""Keys and values that are decoded once: the kernel that decodes, in Triton's interpreter, and its launches."""

from dataclasses import replace
from functools import partial

import pytest
import torch

import quire
from quire import intervals, reference
from quire.dispatch.device import interprets
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels import choose
from quire.kernels.decoded.launch import DecodedLaunch
from quire.kernels.scratch import MOST_STATES
from quire.targets import TARGETS
from quire.testing import make_problem
from tests.pairs import in_turn

HEADS = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
LENS = ((40, 200), (1, 17), (0, 50), (3, 0), (33, 33), (9, 70))
E4M3, E5M2, INT8 = ({"kv_dtype": dtype} for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8))
INT4, NVFP4, K8V4 = ({"kv_format": name} for name in ("int4", "nvfp4", "k8v4"))
PROPERTIES = TARGETS["sm90"].properties


def decoding(problem, num_sms=1):
    """Return a plan of the launch with the fewest programs, for a GPU of few SMs, with poison in its scratch."""
    from tests.hopper_simulator.launch import simulated_hopper

    with simulated_hopper(num_sms=num_sms):
        plan = quire.plan(problem.spec, problem.batch, **problem.bounds, kernel="decoded")
    plan.memory[plan.launch.scratch_size().counters :] = 255  # NaN
    return plan


def decode(problem):
    """Return a plan, and of each sequence the keys and values in scratch; None of those that are not decoded."""
    from tests.hopper_simulator.launch import simulated_hopper

    plan = decoding(problem)
    runner, launch = plan.runner, plan.launch
    with simulated_hopper(num_sms=1):
        runner.decode((launch.num_decoders, 1, 1), (problem.cache,), None, runner.arguments)
    shape = launch.most_seqs, launch.most_keys, problem.spec.num_kv_heads, -1
    of_scratch = [part.tensor().view(shape) for part in (runner.k, runner.v)]
    found = []
    for q_len, start in zip(problem.query_lens, runner.starts.tensor().tolist(), strict=True):
        place = sum(each is not None for each in found)
        found.append([x[place] for x in of_scratch] if q_len > launch.attend.max_decode_queries else None)
        assert found[-1] is None or start == place * launch.most_keys
    return plan, found


def without_scales_of_heads(cache):
    """Return a cache with scales of 1 in place of those of heads, by which scores and results are multiplied."""
    if cache.scale_kind != "head":
        return cache
    return quire.PagedKVCache(cache.k, cache.v, cache.layout, **cache.scales | {"k_scale": 1.0, "v_scale": 1.0})


@pytest.mark.skipif(not interprets(), reason="the kernel runs in Triton's interpreter")
@pytest.mark.parametrize(
    *in_turn(
        stored=[INT4, NVFP4, K8V4, E4M3, E5M2, INT8],
        extra=[{}, {"sliding_window": 30}, {"num_q_heads": 6, "head_dim": 80}, {"head_dim": 192, "head_dim_v": 192}],
        pages=[{"page_size": 16}, {"page_size": 1, "layout": "HND"}, {"page_size": 40, "flat_table": True}],
        scales=["head", "token"],
    ),
    ids=str,
)  # fmt: skip
def test_numbers_are_decoded_to_the_bits_of_the_reference(stored, extra, pages, scales):
    """All keys that queries see, and no others: sequences of few queries are left to the decode launch."""
    spec = quire.AttentionSpec(**HEADS | stored | extra)
    p = make_problem(spec, LENS, scales=scales, **pages)
    plan, found = decode(p)
    cache = without_scales_of_heads(p.cache)
    assert plan.launch.attend.max_decode_queries >= 2
    left, _ = spec.window
    for seq, (q_len, kv_len) in enumerate(LENS):
        if found[seq] is None:
            continue
        first = max(0, kv_len - q_len - left)
        positions = torch.arange(first, kv_len)
        expected = reference.gather(cache, p.batch, seq, positions, torch.float32)
        for here, exact in zip(found[seq], expected, strict=True):
            assert torch.equal(here[first:kv_len], exact.half()), (seq, q_len)
            assert here[:first].isnan().all() and here[kv_len:].isnan().all(), seq
    assert sum(each is not None for each in found) in (3, 4)


@pytest.mark.skipif(not interprets(), reason="the kernel runs in Triton's interpreter")
def test_more_sequences_than_are_read_at_once():
    lens = [(5 + seq % 3 if seq % 7 else 1, 10 + seq % 40) for seq in range(150)]
    p = make_problem(quire.AttentionSpec(**HEADS | INT4 | {"num_q_heads": 8}), lens)
    _, found = decode(p)
    for seq, (q_len, kv_len) in enumerate(lens):
        assert (found[seq] is None) == (q_len == 1)
        if found[seq] is not None:
            exact = reference.gather(p.cache, p.batch, seq, torch.arange(kv_len), torch.float32)
            assert all(torch.equal(x[:kv_len], one.half()) for x, one in zip(found[seq], exact, strict=True)), seq


@pytest.mark.skipif(not interprets(), reason="the kernel runs in Triton's interpreter")
def test_with_intervals_all_keys_are_decoded():
    p = make_problem(
        quire.AttentionSpec(**HEADS | NVFP4), ((40, 200),), per_token=partial(intervals.chunked_local, size=32)
    )
    # Pages before the first interval hold poison, which is read and not used.
    _, ((k, _),) = decode(p)
    exact, _ = reference.gather(without_scales_of_heads(p.cache), p.batch, 0, torch.arange(160, 200), torch.float32)
    assert torch.equal(k[160:200], exact.half())


@pytest.mark.skipif(not interprets(), reason="the kernel runs in Triton's interpreter")
def test_numbers_beyond_the_range_of_float16_are_its_largest():
    p = make_problem(quire.AttentionSpec(**HEADS | INT4), ((9, 20),))
    p.cache.k_scale.mul_(2.0**40)
    _, ((k, _),) = decode(p)
    exact, _ = reference.gather(p.cache, p.batch, 0, torch.arange(20), torch.float32)
    assert torch.equal(k[:20], exact.clamp(-65504, 65504).half())


def request_of(spec, num_seqs, queries, keys, device=PROPERTIES, **fields):
    return Request(spec, num_seqs, True, Bounds(queries, keys, num_seqs * queries), device, **fields)


def test_bounds_of_too_many_keys_are_left_to_other_kernels():
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, kv_format="int4")
    most = MOST_STATES // (2 * 8 * 128 * 2)  # keys of a sequence
    fits = choose.variants(request_of(spec, 4, 512, most // 4), Options(kernel="decoded"))[0]
    assert {launch.scratch_size().total - launch.decoded_at for launch in fits.values()} == {MOST_STATES}
    above = request_of(spec, 4, 512, most // 4 + 1)
    found, refusals = choose.variants(above, Options())
    assert not any(isinstance(launch, DecodedLaunch) for launch in found.values()) and found
    assert refusals["decoded"] == f"bounds of keys that take more than {MOST_STATES:,} bytes when decoded"
    with pytest.raises(quire.UnsupportedError, match="got 'decoded', which does not serve bounds of keys"):
        choose.choose(above, Options(kernel="decoded"))


@pytest.mark.parametrize(
    ("reason", "fields", "options", "target"),
    [
        ("caches that aren't quantised", {}, {}, "sm90"),
        ("a quantised cache with batch_invariant", INT4, {"batch_invariant": True}, "sm90"),
        ("GPUs other than Hopper", INT4, {}, "sm80"),
        ("float32 queries", INT4 | {"dtype": torch.float32}, {}, "sm90"),
        ("config or num_splits", INT4, {"num_splits": 2}, "sm90"),
    ],
)
def test_what_is_not_served(reason, fields, options, target):
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, **fields)
    request = request_of(spec, 1, 99, 99, TARGETS[target].properties)
    assert choose.variants(request, Options(**options))[1]["decoded"] == reason


def test_a_prompt_on_four_bits_takes_it_and_decode_does_not():
    for stored in (INT4, NVFP4, K8V4):
        spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, **stored)
        prompt, _ = choose.choose(request_of(spec, 1, 8192, 8192), Options())
        decode, _ = choose.choose(request_of(spec, 8, 1, 8192), Options())
        assert (prompt.name, decode.name) == ("decoded", "split_kv")
        assert "decoded once" in str(prompt) and choose.predicted_us(prompt) > choose.predicted_us(prompt.attend)


def test_a_decode_launch_reads_the_cache_as_it_is_stored():
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, **INT4)
    request = replace(request_of(spec, 8, 512, 4096), bounds=Bounds(512, 4096, 600))
    launch, _ = choose.choose(request, Options(kernel="decoded"))
    assert launch.attend.decode.request.spec is spec and launch.attend.request.spec.kv_format is None
    assert (launch.attend.max_decode_queries, launch.attend.decode.config.block_m) == (2, 8)


def test_states_of_splits_lie_after_the_partials_of_the_decode_launch_which_may_run_at_the_same_time():
    spec = quire.AttentionSpec(num_q_heads=16, num_kv_heads=2, head_dim=128, **E4M3)
    problem = make_problem(spec, ((16, 4096), (1, 4096), (1, 4096)))
    request = replace(request_of(spec, 3, 16, 4096), bounds=Bounds(16, 4096, 18))
    found, _ = choose.variants(request, Options(kernel="decoded"))
    (launch,) = (launch for launch in found.values() if launch.attend.num_splits > 1)
    workspace = torch.empty(launch.scratch_size().total, dtype=torch.uint8)
    runner, partials = launch.attend.bind(problem.batch, workspace), launch.attend.decode.scratch_size()
    begins = [states.data_ptr() - workspace.data_ptr() for states in (runner.split_out, runner.split_lse)]
    assert partials.total > partials.counters and min(begins) >= partials.total
    assert begins[1] + 4 * runner.split_lse.numel() <= launch.table_at < launch.decoded_at


def test_the_time_of_a_decode_launch_adds_to_that_of_prompts_which_fill_the_device():
    """As measured: 270 us of an H200 where the longer of both is 173, and the sum 274."""
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, **INT4)
    prompts, decoding = ((2048, 4096, 1),), ((1, 4096, 31),)
    request = replace(request_of(spec, 32, 2048, 4096), bounds=Bounds(2048, 4096, 2079))
    attend = choose.choose(request, Options(kernel="decoded"))[0].attend
    alone, decode = choose.predicted(replace(attend, decode=None), prompts), choose.predicted(attend.decode, decoding)
    assert choose.predicted(attend, prompts + decoding) == pytest.approx(alone + decode)
