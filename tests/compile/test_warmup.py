"""What `quire.warmup` compiles is all that batches within its bounds need, on GPUs that are not here too."""

import random
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import triton
from triton.runtime.jit import JITFunction

import quire
from quire import ops, targets
from quire.kernels.shared_prefix.launch import spec_of_shared_keys
from quire.targets import TARGETS, compiling
from tests.compile import launches

if triton.knobs.runtime.interpret:
    pytest.skip("compiles nothing under Triton's interpreter", allow_module_level=True)

SPEC = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.float16)
BOUNDS = {"max_num_seqs": 3, "max_num_tokens": 400, "max_seq_len": 2000}


@pytest.fixture
def without_compiler(monkeypatch, request):
    """Return a function from a target's name to a target for which Triton binds arguments, then takes a stand-in.

    The stand-in is for the compiled kernel. `test_compile` compiles kernels; here they would take most of the time.
    """

    def take_stand_in(self, key, signature, device, *others, **more):
        return self.device_caches[device][0].setdefault(key, SimpleNamespace())

    monkeypatch.setattr(JITFunction, "_do_compile", take_stand_in)
    monkeypatch.setattr(targets, "inspect", lambda name, *args: SimpleNamespace(kernel=name))
    # Triton keeps binders and kernels by this name. A test must not find those of another one.
    return lambda target="sm90": replace(TARGETS[target], name=f"{target}, without a compiler: {request.node.name}")


@pytest.mark.parametrize("append", [False, True])
def test_nothing_compiles_for_outputs_in_e4m3_after_warmup(append, without_compiler):
    cache = quire.PagedKVCache.empty(SPEC, 2, 16)
    with compiling(without_compiler()) as compiled:
        quire.warmup(SPEC, cache, **BOUNDS | {"max_num_tokens": 70}, append=append, out_scale=True)
        kernels = {c.kernel for c in compiled}
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            for lens in (((1, 5),), ((1, 1999), (1, 3)), ((3, 90), (1, 1)), ((64, 2000),), ((12, 12), (40, 500))):
                q_lens, seq_lens = zip(*lens, strict=True)
                starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
                table = torch.zeros(len(lens), 125, dtype=torch.int32)
                batch = quire.Batch(table, torch.tensor(seq_lens, dtype=torch.int32), starts)
                bounds = {"max_query_len": max(q_lens), "max_seq_len": max(seq_lens), "num_tokens": sum(q_lens)}
                plan = quire.plan(SPEC, batch, **bounds)
                q = torch.empty(sum(q_lens), 32, 128, dtype=torch.float16)
                new = {}
                if append:
                    k, v = torch.empty(sum(q_lens), 48, 128, dtype=torch.float16)[:, 32:].split(8, 1)
                    new = dict(k=k, v=v, slot_mapping=torch.zeros(sum(q_lens), dtype=torch.int64))
                scale = torch.zeros(5)[1:2]  # which 16 bytes do not divide
                quire.attention(q, cache, plan, **new, out_scale=scale)
                with pytest.raises(AssertionError, match="compiled in service"):
                    quire.attention(q, cache, plan, **new)
    combining = {"combine_kernel", "combine_partials_kernel"}
    attending = {"schedule_kernel", "portable_kernel", "hopper_schedule_kernel", "hopper_kernel"}
    assert kernels == {"write_kernel"} | attending | combining


def test_nothing_compiles_for_shared_prefixes_after_a_warm_up_of_both_parts_and_a_call(without_compiler):
    """As vLLM's builder warms up. The call compiles what combines the parts, in batches of both kinds."""
    cache = quire.PagedKVCache.empty(SPEC, 2, 16)
    with compiling(without_compiler()):
        for part in (spec_of_shared_keys(SPEC), SPEC):
            quire.warmup(part, cache, **BOUNDS, return_lse=True)

        def attend(num_seqs: int, queries: int, shared: int, longest: int, ragged: bool) -> None:
            table, lens = torch.zeros(num_seqs, 125, dtype=torch.int32), torch.zeros(num_seqs, dtype=torch.int32)
            starts = torch.arange(0, queries * num_seqs + 1, queries, dtype=torch.int32) if ragged else None
            bounds = {"max_query_len": queries, "max_seq_len": longest}
            plan = quire.plan(SPEC, quire.Batch(table, lens, starts), **bounds, shared_prefix=shared)
            quire.attention(torch.empty(num_seqs * queries, 32, 128, dtype=torch.float16), cache, plan)

        for ragged in (False, True):
            attend(2, 1, 16, 32, ragged)
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            for step in product((2, 3), (1, 5, 130), (16, 1024), (1200, 2000), (True,)):
                attend(*step)
            for step in product((2, 3), (1,), (16, 1024), (1200, 2000), (False,)):
                attend(*step)


@pytest.mark.parametrize(
    ("kind", "append"),
    [
        *product(["plain", "e4m3", "e4m3, scales per token"], [False, True, "rotated"]),
        ("pages of 1072, heads of 256", False),
        ("int4", False),
    ],
)
def test_nothing_compiles_after_warmup(kind, append, without_compiler):
    """Some tiles in pages of 1072 are one box, where a query may see more than 1024 keys."""
    spec = replace(SPEC, kv_dtype=torch.float8_e4m3fn) if "e4m3" in kind else SPEC
    spec = replace(spec, head_dim=256, head_dim_v=256) if "256" in kind else spec
    spec = replace(spec, kv_dtype=None, kv_format="int4") if kind == "int4" else spec
    decodes = spec.kv_dtype is not spec.dtype
    cache = quire.PagedKVCache.empty(spec, 2, 1072 if "1072" in kind else 16)
    if "token" in kind:  # which the Hopper kernel serves only once they are decoded
        cache = quire.PagedKVCache(cache.k, cache.v, "NHD", torch.ones(2, 16, 8), torch.ones(2, 16, 8))
    with compiling(without_compiler()) as compiled:
        how = {}
        if append == "rotated":
            cos, sin = torch.zeros(2000, 128).chunk(2, 1)
            how["rope"] = quire.Rope(cos, sin, torch.zeros(1, dtype=torch.int64))
            how["qk_norm"] = quire.QKNorm(*torch.ones(2, 128))
        quire.warmup(spec, cache, **BOUNDS, append=bool(append), **how)
        kernels = {c.kernel for c in compiled}
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            for lens in (
                ((1, 5),),
                ((1, 1999), (1, 3)),
                ((300, 300),),
                ((130, 130), (1, 1500), (2, 700)),
                ((133, 2000), (133, 2000), (133, 133)),
                ((7, 90),),
                ((16, 90),),
                ((3, 1990), (2, 70)),
                ((40, 1999),),
                ((33, 1500), (33, 33)),
                ((400, 1024),),
                ((400, 1030),),
            ):
                starts = torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).to(torch.int32)
                table = torch.zeros(len(lens), 125, dtype=torch.int32)
                batch = quire.Batch(table, torch.tensor([s for _, s in lens], dtype=torch.int32), starts)
                q_lens = [q for q, _ in lens]
                keys = max(s for _, s in lens)
                bounds = {"max_query_len": max(q_lens), "max_seq_len": keys, "num_tokens": sum(q_lens)}
                plan = quire.plan(spec, batch, **bounds)
                q = torch.empty(sum(q_lens), 32, spec.head_dim, dtype=torch.float16)
                if decodes:  # also where that is not the fastest
                    quire.attention(q, cache, quire.plan(spec, batch, **bounds, kernel="decoded"))
                # New tokens are slices of a fused projection.
                k, v = torch.empty(sum(q_lens), 48, spec.head_dim, dtype=torch.float16)[:, 32:].split(8, 1)
                new = dict(k=k, v=v, slot_mapping=torch.zeros(sum(q_lens), dtype=torch.int64))
                if append == "rotated":
                    rope = how["rope"]._replace(positions=torch.zeros(sum(q_lens), dtype=torch.int64))
                    new |= how | {"rope": rope}
                quire.attention(q, cache, plan, **new if append else {})
                if plan.appender(cache) is not None and not append:  # which has another kernel
                    with pytest.raises(AssertionError, match="compiled in service"):
                        quire.attention(q, cache, plan, **new)
    write = "norm_rope_kernel" if append == "rotated" else "write_kernel"
    portable = {"schedule_kernel", "portable_kernel", "combine_partials_kernel"}
    of_hopper = {"hopper_schedule_kernel", "hopper_kernel", "combine_kernel"}
    assert kernels == {write} | portable | of_hopper | ({"decode_kernel"} if decodes else set())


def test_a_plan_with_splits_serves_what_tma_cannot_address_and_crosses_an_operator(without_compiler):
    wanted = launches.FEATURES["plain"]
    with compiling(without_compiler()) as compiled:
        plan = launches.plan_of("chunk, split", SPEC, wanted)
        inputs = launches.make_inputs(plan, wanted)
        uneven = torch.empty(64, 32, 132, dtype=torch.float16)[..., :128]  # heads are 264 bytes apart
        quire.attention(**inputs | {"q": uneven}, plan=plan)
        out = torch.empty_like(inputs["q"])
        ops.attention(inputs["q"], inputs["cache"], plan, out, None, None, None, None)
        assert [c.kernel for c in compiled] == [
            "schedule_kernel",
            "portable_kernel",
            "combine_partials_kernel",
            "hopper_schedule_kernel",
            "hopper_kernel",
            "combine_kernel",
        ]
    assert plan.launch.num_splits > 1


@pytest.mark.parametrize("target", ["sm90", "sm80"])
@pytest.mark.parametrize("kind", ["16 bits", "e4m3", "e4m3, heads of 64", "int4"])
def test_nothing_compiles_for_random_batches_after_warmup(kind, target, without_compiler):
    """Judged by Triton's own keys, which also have what no `compile_keys` names."""
    spec = replace(SPEC, head_dim=64, head_dim_v=64) if "64" in kind else SPEC
    spec = replace(spec, kv_dtype=torch.float8_e4m3fn) if "e4m3" in kind else spec
    spec = replace(spec, kv_dtype=None, kv_format="int4") if kind == "int4" else spec
    cache, draw = quire.PagedKVCache.empty(spec, 2, 16), random.Random(f"{kind} {target}")
    with compiling(without_compiler(target)):
        quire.warmup(spec, cache, max_num_seqs=40, max_num_tokens=900, max_seq_len=3000)
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            for _ in range(50):
                num_seqs = draw.randint(1, 40)
                most = draw.choice((1, 4, 900 // num_seqs))
                q_lens = [draw.choice((1, most, draw.randint(1, most))) for _ in range(num_seqs)]
                seq_lens = [max(q, int(3000 ** draw.random())) for q in q_lens]
                starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
                table = torch.zeros(num_seqs, 188, dtype=torch.int32)
                batch = quire.Batch(table, torch.tensor(seq_lens, dtype=torch.int32), starts)
                bounds = {"max_query_len": max(q_lens), "max_seq_len": max(seq_lens), "num_tokens": sum(q_lens)}
                q = torch.empty(sum(q_lens), 32, spec.head_dim, dtype=torch.float16)
                quire.attention(q, cache, quire.plan(spec, batch, **bounds))


def test_nothing_compiles_for_intervals_and_trees_after_warmup(without_compiler):
    cache = quire.PagedKVCache.empty(SPEC, 2, 16)
    with compiling(without_compiler()):
        quire.warmup(SPEC, cache, **BOUNDS | {"max_num_tokens": 70}, intervals=True, trees=True)
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            for lens in (((1, 5),), ((1, 1999), (1, 3)), ((3, 90), (1, 1)), ((7, 2000),), ((12, 12), (40, 500))):
                q_lens, seq_lens = zip(*lens, strict=True)
                lengths = torch.tensor(seq_lens, dtype=torch.int32)
                num_tokens, table = sum(q_lens), torch.zeros(len(lens), 125, dtype=torch.int32)
                ends, words = torch.zeros(num_tokens, dtype=torch.int32), torch.zeros(num_tokens, dtype=torch.int64)
                one_each = (None,) if max(q_lens) == 1 else ()
                for starts in (*one_each, torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)):
                    for seen in (
                        {"key_begin": ends, "key_end": ends.clone()},
                        {"tree_bits": words},
                        {"tree_bits": words, "key_begin": ends},
                    ):
                        batch = quire.Batch(table, lengths, starts, **seen)
                        bounds = {"max_query_len": max(q_lens), "max_seq_len": max(seq_lens), "num_tokens": num_tokens}
                        plan = quire.plan(SPEC, batch, **bounds)
                        quire.attention(torch.empty(num_tokens, 32, 128, dtype=torch.float16), cache, plan)


@pytest.mark.parametrize("features", ["bfloat16", "records", "records of 584 bytes", None])
@pytest.mark.parametrize("lists", [{"are_slots": True}, {"block_size": 8}], ids=str)
@pytest.mark.parametrize("second_cache", [False, True])
def test_nothing_compiles_for_chosen_keys_after_warmup(features, lists, second_cache, without_compiler):
    if second_cache and features is None:
        pytest.skip("only latents have keys in a second cache")
    spec, layout = SPEC, "HND"
    if features is not None:
        spec, layout = launches.latent_spec(features, 8), launches.LATENTS[features][2]
    spec = replace(spec, causal="are_slots" not in lists)
    cache = quire.PagedKVCache.empty(spec, 2, 64, layout=layout)

    def lists_of(num_tokens, strided=False):
        """Return lists whose last column says how many entries count; `strided` ones have a list for each KV head."""
        shape = (num_tokens, spec.num_kv_heads, 801) if strided else (num_tokens, 801)
        column = torch.zeros(shape, dtype=torch.int32)
        return quire.ChosenKeys(column[..., :-1], column[..., -1], **lists)

    def extra_of(num_tokens):
        indices = torch.zeros(num_tokens, 130, dtype=torch.int32)
        return quire.ChosenKeys(indices[:, :128], are_slots=True) if second_cache else None

    extra_cache = quire.PagedKVCache.empty(spec, 2, 16, layout=layout) if second_cache else None
    with compiling(without_compiler()) as compiled:
        limits = {"max_num_seqs": 300, "max_num_tokens": 1300, "max_seq_len": 2000}
        limits |= {"chosen": lists_of(1), "extra_chosen": extra_of(1)}
        quire.warmup(spec, cache, **limits, extra_cache=extra_cache)
        kernels = {"chosen_kernel" if features is None else "chosen_latents_kernel", "combine_chosen_kernel"}
        if features in ("bfloat16", "records") and "are_slots" in lists and not second_cache:  # of 512 + 64 columns
            kernels = {"chosen_hopper_kernel", "combine_lists_kernel", "unite_lists_kernel"}
        assert kernels < {c.kernel for c in compiled}
        size = quire.workspace_size(spec, **limits, device=cache.device)
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            few = ((1, 5),), ((1, 1999), (1, 3)), ((3, 90), (1, 1))
            for lens in (*few, ((64, 2000),), ((1, 7),) * 299, ((1200, 2000),)):
                q_lens, seq_lens = zip(*lens, strict=True)
                lengths, num_tokens = torch.tensor(seq_lens, dtype=torch.int32), sum(q_lens)
                one_each = (None,) if max(q_lens) == 1 else ()
                for starts in (*one_each, torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)):
                    chosen = lists_of(num_tokens, strided=len(lens) > 1)
                    batch = quire.Batch(
                        torch.zeros(len(lens), 32, dtype=torch.int32),
                        lengths,
                        starts,
                        chosen=chosen,
                        extra_chosen=extra_of(num_tokens),
                    )
                    bounds = {"max_query_len": max(q_lens), "max_seq_len": max(seq_lens), "num_tokens": num_tokens}
                    workspace = torch.zeros(size, dtype=torch.uint8)
                    plan = quire.plan(spec, batch, **bounds, workspace=workspace)
                    quire.attention(
                        torch.empty(num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype),
                        cache,
                        plan,
                        extra_cache=extra_cache,
                    )


@pytest.mark.parametrize("features", ["bfloat16", "e4m3"])
def test_nothing_compiles_for_latents_after_warmup(features, without_compiler):
    """Plans for latents distinguish three quarters of a power of two queries, too."""
    spec = launches.latent_spec(features, 8)
    cache = quire.PagedKVCache.empty(spec, 2, 64)
    with compiling(without_compiler("sm80")) as compiled:
        names = quire.warmup(spec, cache, max_num_seqs=2, max_num_tokens=14, max_seq_len=300)
        assert {c.kernel for c in compiled} == {"write_latent_kernel", "schedule_kernel", "mla_kernel"}
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            for lens in (
                ((1, 5),),
                ((1, 299), (1, 3)),
                ((3, 30),),
                ((5, 290), (1, 1)),
                ((7, 7), (7, 300)),
                ((11, 40),),
            ):
                starts = torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).to(torch.int32)
                table = torch.zeros(len(lens), 5, dtype=torch.int32)
                batch = quire.Batch(table, torch.tensor([s for _, s in lens], dtype=torch.int32), starts)
                q_lens, seq_lens = zip(*lens, strict=True)
                bounds = {"max_query_len": max(q_lens), "max_seq_len": max(seq_lens), "num_tokens": sum(q_lens)}
                plan = quire.plan(spec, batch, **bounds)
                assert plan.kernel == "mla"
                quire.attention(torch.empty(sum(q_lens), 8, spec.head_dim, dtype=spec.dtype), cache, plan)
    assert sum("MLA kernel" in name for name in names) == len(names) - 1


def test_a_plan_with_shared_prefixes_launches_a_kernel_for_each_level_and_one_that_combines(without_compiler):
    cache = quire.PagedKVCache.empty(SPEC, 2, 16)
    table, lens = torch.zeros(64, 16, dtype=torch.int32), torch.full((64,), 256, dtype=torch.int32)
    with compiling(without_compiler()) as compiled:
        levels = [[(64, 64)], [(40, 128), (24, 0)]]
        plan = quire.plan(SPEC, quire.Batch(table, lens), max_query_len=1, max_seq_len=256, shared_prefix=levels)
        quire.attention(torch.zeros(64, 32, 128, dtype=torch.float16), cache, plan, return_lse=True)
    assert [launch.request.bounds.max_query_len for launch in plan.launch.launches] == [64, 40, 1]
    assert len(compiled) >= 3 and compiled[-1].kernel == "combine_kernel"


def at_any_address(tensor, first=1):
    """Return a copy that begins `first` numbers into its memory, which 16 bytes do not divide."""
    memory = tensor.new_empty(tensor.numel() + first)
    moved = memory[first:].view(tensor.shape).copy_(tensor)
    assert moved.data_ptr() % 16
    return moved


@pytest.mark.parametrize(
    ("kind", "lens"),
    [
        ("decode", ((1, 5), (1, 700), (1, 30), (1, 2))),
        ("mixed", ((1, 5), (1, 1900), (3, 30), (300, 500))),
        ("e4m3", ((1, 5), (1, 700), (1, 30), (1, 2))),
        ("appending", ((1, 5), (1, 700), (3, 30), (1, 2))),
        ("intervals", ((1, 5), (1, 700), (3, 30), (1, 2))),
        ("batch-invariant", ((1, 5), (1, 700), (3, 30), (1, 2))),
        ("latents", ((1, 5), (1, 700), (3, 30), (1, 2))),
        ("latents on sm80", ((1, 5), (1, 700), (3, 30), (1, 2))),
    ],
)
def test_nothing_compiles_for_slices_of_what_is_read_one_number_at_a_time(kind, lens, without_compiler):
    """Of everything but queries, outputs, new tokens and the cache. The second call has no aligned one before it."""
    q_lens, seq_lens = zip(*lens, strict=True)
    num_tokens, int32 = sum(q_lens), dict(dtype=torch.int32)
    heads = {"num_q_heads": 6, "num_kv_heads": 2, "head_dim": 64}
    spec = quire.AttentionSpec(
        **heads, sinks=kind != "batch-invariant", kv_dtype=torch.float8_e4m3fn if kind == "e4m3" else None
    )
    if kind.startswith("latents"):
        spec = quire.AttentionSpec.mla(num_q_heads=6, softmax_scale=0.1)
    cache = quire.PagedKVCache.empty(spec, 2, 64)
    if kind == "e4m3":
        cache = quire.PagedKVCache(cache.k, cache.v, k_scale=torch.ones(2), v_scale=torch.ones(2))
    more = {"append": kind == "appending", "intervals": kind == "intervals", "batch_invariant": "inv" in kind}
    rotations = torch.zeros(2000, 64).chunk(2, 1)

    def step(move, workspace):
        batch = quire.Batch(
            move(torch.zeros(len(lens), 32, **int32)),
            move(torch.tensor(seq_lens, **int32)),
            None if max(q_lens) == 1 else move(torch.tensor([0, *q_lens], **int32).cumsum(0).to(torch.int32)),
            **dict.fromkeys(("key_begin", "key_end")[: 2 * more["intervals"]], move(torch.zeros(num_tokens, **int32))),
        )
        bounds = {"max_query_len": max(q_lens), "max_seq_len": max(seq_lens), "num_tokens": num_tokens}
        options = {"batch_invariant": more["batch_invariant"], "workspace": workspace}
        plan = quire.plan(spec, batch, **bounds, **options)
        q = torch.empty(num_tokens, spec.num_q_heads, spec.head_dim, dtype=spec.dtype)
        out = torch.empty(num_tokens, spec.num_q_heads, spec.head_dim_v, dtype=spec.dtype)
        into = quire.State(out, move(torch.empty(num_tokens, spec.num_q_heads)))
        slots = move(torch.zeros(num_tokens, dtype=torch.int64))
        new = {}
        if spec.latent:
            quire.write_latent(q[:, 0, :512], q[:, 0, 512:], moved_cache(move), slots)
        else:
            k, v = torch.empty(2, num_tokens, 2, 64, dtype=spec.dtype)
            if kind == "appending":
                new = {"k": k, "v": v, "slot_mapping": slots}
                new["rope"] = quire.Rope(*rotations, move(torch.zeros(num_tokens, dtype=torch.int64)))
            else:
                quire.write_kv(k, v, moved_cache(move), slots)
        sinks = move(torch.zeros(6, dtype=spec.dtype)) if spec.sinks else None
        quire.attention(q, moved_cache(move), plan, out=into, sinks=sinks, **new)

    def moved_cache(move):
        if cache.k_scale is None or spec.latent:
            return cache
        return quire.PagedKVCache(cache.k, cache.v, k_scale=move(cache.k_scale), v_scale=move(cache.v_scale))

    with compiling(without_compiler("sm80" if "sm80" in kind else "sm90")) as compiled:
        rope = {"rope": quire.Rope(*rotations, torch.zeros(1, dtype=torch.int64))} if kind == "appending" else {}
        limits = {"max_num_seqs": 4, "max_num_tokens": num_tokens, "max_seq_len": 2000}
        quire.warmup(spec, cache, **limits, return_lse=True, **more, **rope)
        size = quire.workspace_size(spec, **limits, **{name: more[name] for name in ("batch_invariant", "intervals")})
        assert compiled
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            for move in (at_any_address, torch.clone):
                step(move, None)
                step(move, torch.zeros(size, dtype=torch.uint8))


@pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("return_lse", [False, True])
def test_sinks_of_the_dtype_that_warmup_was_told_of_compile_nothing(dtype, return_lse, without_compiler):
    """It is the spec's where none is told, as of a model's weights."""
    spec = quire.AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=64, sinks=True)
    cache, limits = quire.PagedKVCache.empty(spec, 4, 16), {"max_num_seqs": 8, "max_num_tokens": 8, "max_seq_len": 256}
    with compiling(without_compiler()):
        quire.warmup(spec, cache, **limits, return_lse=return_lse, per_head_dtype=dtype)
        batch = quire.Batch(torch.zeros(4, 16, dtype=torch.int32), torch.full((4,), 200, dtype=torch.int32))
        plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=256)
        q, sinks = torch.empty(4, 6, 64, dtype=spec.dtype), torch.zeros(6, dtype=dtype or torch.bfloat16)
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            quire.attention(q, cache, plan, sinks=sinks, return_lse=return_lse)
            with pytest.raises(AssertionError, match="compiled in service"):
                quire.attention(q, cache, plan, sinks=sinks, return_lse=not return_lse)


def test_strides_of_the_lse_compile_nothing(without_compiler):
    lens = torch.full((4,), 200, dtype=torch.int32)
    batch = quire.Batch(torch.zeros(4, 16, dtype=torch.int32), lens)
    cache, q = quire.PagedKVCache.empty(SPEC, 4, 16), torch.empty(4, 32, 128, dtype=torch.float16)
    with compiling(without_compiler()):
        plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=256)
        quire.attention(q, cache, plan, return_lse=True)
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            quire.attention(q, cache, plan, out=quire.State(torch.empty_like(q), torch.empty(4, 33)[:, :32]))


@pytest.mark.parametrize("head_dim", [128, 72])
def test_launches_with_equal_keys_are_compiled_for_the_same(head_dim, monkeypatch, without_compiler):
    """What Triton compiles for, kernel by kernel, follows from the keys of a launch, the cache and the call."""
    import random

    from quire.dispatch.request import Bounds, Options, Request
    from quire.plan import decide, make_plan

    draw, asked, made = random.Random(1), set(), {}

    def record(self, key, *others, **more):
        asked.add((self.__name__, key))
        return SimpleNamespace()

    spec = quire.AttentionSpec(num_q_heads=14, num_kv_heads=2, head_dim=head_dim)
    cache = quire.PagedKVCache.empty(spec, 2, 16)
    with compiling(without_compiler()):
        monkeypatch.setattr(JITFunction, "_do_compile", record)
        for _ in range(150):
            num_seqs, queries = draw.choice((1, 2, 3, 5, 33)), int(2 ** draw.uniform(0, 9))
            num_tokens = draw.choice((num_seqs * queries, draw.randint(queries, num_seqs * queries)))
            keys = max(queries, int(2 ** draw.uniform(0, 15)))
            bounds = Bounds(queries, keys, num_tokens).for_decision()
            launch, _ = decide(Request(spec, num_seqs, True, bounds, TARGETS["sm90"].properties), Options())
            width = launch.request.bounds.max_seq_len // 16 + 1
            table, zeros = torch.zeros(num_seqs, width, dtype=torch.int32), torch.zeros(num_seqs + 1, dtype=torch.int32)
            asked.clear()
            plan = make_plan(spec, quire.Batch(table, zeros[:-1].clone(), zeros), launch, "test")
            quire.attention(torch.empty(num_tokens, 14, head_dim, dtype=spec.dtype), cache, plan)
            assert len(asked) == len(launch.compile_keys()), str(launch)
            for key in launch.compile_keys():
                (compiled,) = [what for name, what in asked if name in (key[0], f"{key[0]}_kernel")]
                assert made.setdefault(key, compiled) == compiled, str(launch)
    assert len(made) > 15


def test_one_kernel_is_warmed_up_with_new_tokens_and_without_them(without_compiler):
    """Up to 64 sequences of up to 16 queries are written by the launch that attends, and more by another."""
    cache, limits = quire.PagedKVCache.empty(SPEC, 2, 16), {"max_num_seqs": 128, "max_num_tokens": 128}
    with compiling(without_compiler()):
        quire.warmup(SPEC, cache, **limits, max_seq_len=512, append=True)
        with mock.patch.object(JITFunction, "_do_compile", side_effect=AssertionError("compiled in service")):
            for num_seqs in (64, 128, 63, 65, 100):
                lens = torch.full((num_seqs,), 500, dtype=torch.int32)
                batch = quire.Batch(torch.zeros(num_seqs, 32, dtype=torch.int32), lens)
                plan = quire.plan(SPEC, batch, max_query_len=1, max_seq_len=512)
                q, slots = torch.empty(num_seqs, 32, 128, dtype=SPEC.dtype), torch.zeros(num_seqs, dtype=torch.int64)
                k, v = torch.empty(2, num_seqs, 8, 128, dtype=SPEC.dtype)
                quire.attention(q, cache, plan, k=k, v=v, slot_mapping=slots)
