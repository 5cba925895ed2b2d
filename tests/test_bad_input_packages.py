"""The matrix of bad input for `quire.distributed`, `quire.debug` and `quire.integrations.flashinfer`."""

import functools
import inspect
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import quire
from quire import debug, distributed
from quire.dispatch.device import interprets
from quire.integrations import flashinfer
from tests.extended import extended
from tests.test_bad_input import (
    SPEC,
    Call,
    attend_by_definition,
    complaint,
    hostile,
    int32,
    paged_problem,
    within_budget,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(interprets(), reason="the interpreter runs kernels, which do not look at contents"),
]


@pytest.fixture(scope="module", autouse=True)
def alone() -> Iterator[None]:
    """A group of this process alone. What meta tensors need is imported before calls are timed."""
    (int32(0, 1).to("meta").diff().clamp(min=0) // 2 % 3).long()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory) -> Iterator[Path]:
    """The current folder, where the files of hostile paths may be written."""
    folder = tmp_path_factory.mktemp("records")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        debug.save("good", **decode_call())
        yield folder


def decode_call() -> dict[str, Any]:
    p = paged_problem()
    ends = p.batch.query_starts[1:]
    batch = quire.Batch(p.batch.page_table, p.batch.seq_lens)
    return dict(q=p.q[ends - 1], cache=p.cache, plan=quire.plan(SPEC, batch, max_query_len=1, max_seq_len=9))


# quire.distributed


def with_sinks(state: quire.State, sinks: torch.Tensor | None) -> quire.State:
    """A sink is a key whose value is 0."""
    if sinks is None:
        return state
    lse = torch.logaddexp(state.lse, sinks.to(state.lse.dtype).expand_as(state.lse))
    return quire.State(state.out * (state.lse - lse).exp()[..., None], lse)


def near(found: quire.State, expected: quire.State) -> bool:
    return all(torch.allclose(x, y, atol=1e-5, rtol=1e-5) for x, y in zip(found, expected, strict=True))


def make_sharded() -> tuple[Callable, dict[str, Any]]:
    return distributed.sharded_attention, decode_call() | dict(sinks=torch.randn(4), group=None, scatter_heads=False)


def confirm_sharded(a: dict[str, Any], state: Any) -> bool:
    return near(state, with_sinks(quire.attention(a["q"], a["cache"], a["plan"], return_lse=True), a["sinks"]))


def make_merge() -> tuple[Callable, dict[str, Any]]:
    state = quire.State(torch.randn(2, 4, 16), torch.randn(2, 4))
    return distributed.merge_over_ranks, dict(state=state, sinks=torch.randn(4), group=None, scatter_heads=False)


def make_plan_ring() -> tuple[Callable, dict[str, Any]]:
    return distributed.plan_ring, dict(spec=SPEC, seq_lens=[8, 3], group=None, device="cpu")


def make_ring() -> tuple[Callable, dict[str, Any]]:
    q, k, v = torch.randn(11, 4, 16), torch.randn(11, 2, 16), torch.randn(11, 2, 16)
    plan = distributed.plan_ring(SPEC, [8, 3], device="cpu")
    return distributed.ring_attention, dict(q=q, k=k, v=v, plan=plan, sinks=torch.randn(4))


def confirm_ring(a: dict[str, Any], state: Any) -> bool:
    return near(
        state, with_sinks(quire.varlen_attention(a["q"], a["k"], a["v"], varlen_plan(), return_lse=True), a["sinks"])
    )


def varlen_plan() -> quire.Plan:
    batch = quire.Batch.varlen(int32(0, 8, 11), int32(0, 8, 11))
    return quire.plan(SPEC, batch, max_query_len=8, max_seq_len=8)


def confirm_plan_ring(a: dict[str, Any], plan: Any) -> bool:
    tokens = sum(a["seq_lens"])
    return plan.tokens.tolist() == list(range(tokens)) and plan.num_tokens == (tokens,)


def shard() -> distributed.ContextShard:
    return distributed.ContextShard(1, 2, 2)


def held(position: int) -> bool:
    return position // 2 % 2 == 1


def num_held(length: int) -> int:
    return max(0, length) // 4 * 2 + max(0, max(0, length) % 4 - 2)


def confirm_num_keys(a: dict[str, Any], found: torch.Tensor) -> bool:
    return found.is_meta or found.flatten().tolist() == [num_held(n) for n in a["seq_lens"].flatten().tolist()]


def make_slot_mapping() -> tuple[Callable, dict[str, Any]]:
    table = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 0]], dtype=torch.int32)
    return shard().slot_mapping, dict(positions=torch.tensor([3, 4, 7]), page_table=table, page_size=4)


def confirm_slot_mapping(a: dict[str, Any], found: torch.Tensor) -> bool:
    size, slots = int(a["page_size"]), []
    for position, row in zip(a["positions"].tolist(), a["page_table"].tolist(), strict=True):
        slot = num_held(position)
        slots.append(row[slot // size] * size + slot % size if position >= 0 and held(position) else -1)
    return found.tolist() == slots or (found.shape[0] == len(slots) and max(*found.tolist(), *slots) < 0)


def make_shard_batch(num_queries: int) -> tuple[Callable, dict[str, Any]]:
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    return shard().batch, dict(page_table=table, seq_lens=int32(9, 5), num_queries=num_queries)


def confirm_shard_batch(a: dict[str, Any], batch: quire.Batch) -> bool:
    rows = range(int(a["num_queries"]))
    lens = [num_held(n - len(rows) + 1 + i) for n in a["seq_lens"].tolist() for i in rows]
    return batch.seq_lens.tolist() == lens and batch.page_table.tolist() == [
        row for row in a["page_table"].tolist() for _ in rows
    ]


# quire.debug


def record(path: Any, *, contents: Any, skip: Any) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "new was not written", UserWarning)
        with debug.record(path, contents=contents, skip=skip):
            quire.attention(**decode_call())


def confirm_record(a: dict[str, Any], result: Any) -> bool:
    if a.get("skip", 0):
        return not Path(a["path"]).exists()
    replay = debug.replay(debug.load(a["path"]))
    return replay.passed or "the batch breaks its contract" in (replay.error or "")  # which is a finding of a replay


def make_record(contents: bool) -> tuple[Callable, dict[str, Any]]:
    Path("new").unlink(missing_ok=True)
    return functools.wraps(debug.record)(record), dict(path=Path("new"), contents=contents, skip=0)


def make_save() -> tuple[Callable, dict[str, Any]]:
    call = decode_call()
    batch, cache = call["plan"].batch, call["cache"]
    last = batch.seq_lens.long() - 1
    pages = batch.page_table.gather(1, (last // cache.page_size)[:, None])[:, 0].long()
    k, v = torch.randn(2, len(last), SPEC.num_kv_heads, SPEC.head_dim)
    new = dict(k=k, v=v, slot_mapping=pages * cache.page_size + last % cache.page_size)
    new |= dict(rope=quire.Rope(torch.rand(9, 4), torch.rand(9, 4), last), qk_norm=None)
    return debug.save, dict(path="new", **call, **new, sinks=None, alibi_slopes=None, extras=(), contents=True)


def make_replay() -> tuple[Callable, dict[str, Any]]:
    call = debug.load("good")
    return debug.replay, dict(call=call, device="cpu", replan=False, max_bytes=1 << 30, on_step=lambda step: None)


# quire.integrations.flashinfer: each plan is run, and each run was planned.

SCORES = dict(
    window_left=3, logits_soft_cap=2.0, sm_scale=0.5, pos_encoding_mode="NONE", rope_scale=None, rope_theta=None
)
HEADS = dict(num_qo_heads=4, num_kv_heads=2)
DTYPES = dict(q_data_type="float32", kv_data_type=torch.float32, o_data_type=None)
SPLITS = dict(non_blocking=True, fixed_split_size=None, disable_split_kv=False, use_token_head_sf=False)
MASKS = dict(custom_mask=None, packed_custom_mask=None, use_fp16_qk_reduction=False)
ITEMS = dict(prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None)
BOUNDS = dict(max_token_per_sequence=2, max_sequence_kv=7, seq_lens_q=None, uniform_q_len=None)
WIDTHS = dict(head_dim_qk=16, head_dim_vo=16)


def pages_of(prefix: str) -> dict[str, Any]:
    return {
        f"{prefix}indptr": int32(0, 1, 3),
        f"{prefix}indices": int32(1, 2, 0),
        f"{prefix}last_page_len": int32(2, 3),
    }


def workspace() -> torch.Tensor:
    return torch.zeros(1024, dtype=torch.uint8)


def decode_plan() -> dict[str, Any]:
    options = dict(head_dim=16, page_size=4, data_type=None, block_tables=None, seq_lens=None, q_len_per_req=1)
    return pages_of("") | HEADS | DTYPES | SCORES | SPLITS | options | dict(window_right=0, is_causal=None)


def prefill_plan() -> dict[str, Any]:
    options = dict(qo_indptr=int32(0, 1, 3), page_size=4, causal=True, seq_lens=None, block_tables=None)
    return pages_of("paged_kv_") | HEADS | DTYPES | SCORES | SPLITS | MASKS | ITEMS | BOUNDS | WIDTHS | options


def ragged_plan() -> dict[str, Any]:
    starts = dict(qo_indptr=int32(0, 1, 3), kv_indptr=int32(0, 2, 9), causal=True, seq_lens=None)
    more = dict.fromkeys(("v_indptr", "o_indptr", "qo_indptr_cpu", "kv_indptr_cpu"))
    return starts | HEADS | DTYPES | SCORES | SPLITS | MASKS | ITEMS | BOUNDS | WIDTHS | more


def run_of(tokens: int, paged: bool = True) -> dict[str, Any]:
    k, v = (torch.randn(3, 4, 2, 16) if paged else torch.randn(9, 2, 16) for _ in "kv")
    keys = {"paged_kv_cache": (k, v)} if paged else {"k": k, "v": v}
    scales = dict(q_scale=None, k_scale=None, v_scale=None, kv_cache_sf=None, enable_pdl=None)
    room = dict(out=torch.full((tokens, 4, 16), 7.0), lse=torch.full((tokens, 4), 7.0), return_lse=True)
    return dict(q=torch.randn(tokens, 4, 16)) | keys | scales | room


def custom_mask() -> torch.Tensor:
    """Of `prefill_plan`, whose second sequence has two drafts that do not see each other."""
    context = torch.ones(2, 5, dtype=torch.bool)
    return torch.cat([torch.ones(2, dtype=torch.bool), torch.cat([context, torch.eye(2).bool()], 1).flatten()])


def packed_custom_mask() -> torch.Tensor:
    return torch.from_numpy(np.concatenate([np.packbits(x, bitorder="little") for x in np.split(custom_mask(), [2])]))


MORE = {  # of `run`, by wrapper
    "decode": dict(
        window_left=None, sinks=torch.randn(4), q_len_per_req=None, skip_softmax_threshold_scale_factor=None
    ),
    "prefill": dict(window_left=None, sinks=torch.randn(4), skip_softmax_threshold_scale_factor=None)
    | dict(lse_base="ln", lse_layout="NH", use_fp16_softmax=None, uses_spcompress=None),
    "ragged": dict(o_scale=None, lse_base="ln", lse_layout="NH", sinks=torch.randn(4)),
}
WRAPPERS: dict[str, tuple[Any, Callable, int, bool]] = {
    "decode": (flashinfer.BatchDecodeWithPagedKVCacheWrapper, decode_plan, 2, True),
    "prefill": (flashinfer.BatchPrefillWithPagedKVCacheWrapper, prefill_plan, 3, True),
    "ragged": (flashinfer.BatchPrefillWithRaggedKVCacheWrapper, ragged_plan, 3, False),
}


def attend_planned(planned: dict[str, Any], a: dict[str, Any]) -> Callable[[torch.dtype], torch.Tensor]:
    """Attention by the definition, for the arguments of `plan` and of `run`."""
    scores = dict(
        softmax_scale=(planned["sm_scale"] or 0.25) * (a.get("q_scale") or 1),
        softcap=max(0, planned["logits_soft_cap"] or 0), alibi_slopes=None,
        window_size=(planned["window_left"], -1), s_aux=a.get("sinks"), causal=planned.get("causal", True),
    )  # fmt: skip

    def sequences() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        if "k" in a:
            starts, ends = planned["qo_indptr"].tolist(), planned["kv_indptr"].tolist()
            for q0, q1, k0, k1 in zip(starts, starts[1:], ends, ends[1:], strict=False):
                yield a["q"][q0:q1], a["k"][k0:k1], a["v"][k0:k1]
            return
        prefix, size = ("paged_kv_" if "qo_indptr" in planned else ""), int(planned["page_size"])
        first, pages, last = (planned[prefix + name].tolist() for name in ("indptr", "indices", "last_page_len"))
        starts = planned["qo_indptr"].tolist() if prefix else range(len(first))
        for i, (q0, q1) in enumerate(itertools.pairwise(starts)):
            own = pages[first[i] : first[i + 1]]
            length = (len(own) - 1) * size + last[i] if own else 0
            if planned["seq_lens"] is not None:
                length = int(planned["seq_lens"][i])
            cache = a["paged_kv_cache"]
            k, v = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
            yield a["q"][q0:q1], k[own].flatten(0, 1)[:length], v[own].flatten(0, 1)[:length]

    def attend(dtype: torch.dtype) -> torch.Tensor:
        masks = masks_of(planned, [(len(q), len(k)) for q, k, _ in sequences()])
        both = zip(sequences(), masks, strict=True)
        return torch.cat([attend_by_definition(*one, scores | dict(seen=seen), dtype) for one, seen in both])

    return attend


def masks_of(planned: dict[str, Any], lens: list[tuple[int, int]]) -> list[torch.Tensor | None]:
    """Which keys the queries of each sequence see, [queries, keys], by FlashInfer's masks; None without one."""
    masks = (planned.get(name) for name in ("custom_mask", "packed_custom_mask"))
    bits, packed = (mask if isinstance(mask, torch.Tensor) else None for mask in masks)
    if bits is None and packed is None:
        return [None] * len(lens)
    sizes = [queries * keys for queries, keys in lens]
    if packed is not None:
        sizes = [size + -size % 8 for size in sizes]
        bits = torch.from_numpy(np.unpackbits(packed.numpy(), bitorder="little")).bool()
    assert bits is not None
    parts = bits[: sum(sizes)].split(sizes)
    return [part[: n * m].view(n, m) for part, (n, m) in zip(parts, lens, strict=True)]


def confirm_planned(planned: dict[str, Any], a: dict[str, Any], result: Any) -> bool:
    return within_budget(attend_planned(planned, a), result[0] if isinstance(result, tuple) else result)


def make_fi_plan(kind: str, **more: Any) -> tuple[Callable, dict[str, Any]]:
    wrapper, plan, tokens, paged = WRAPPERS[kind]
    planned = wrapper(workspace())
    run = run_of(tokens, paged) | MORE[kind]

    @functools.wraps(planned.plan)
    def plan_and_run(**arguments: Any) -> Any:
        planned.plan(**arguments)
        return run, planned.run(**run)

    return plan_and_run, plan() | more


def make_fi_run(kind: str, method: str = "run") -> tuple[Callable, dict[str, Any]]:
    wrapper, plan, tokens, paged = WRAPPERS[kind]
    planned = wrapper(workspace())
    planned.plan(**plan())
    arguments = run_of(tokens, paged)
    if method == "run":
        return planned.run, arguments | MORE[kind]
    names = inspect.signature(planned.forward).parameters
    both = {name: value for name, value in arguments.items() if name in names} | SCORES
    more = {} if kind == "decode" else dict(causal=True, use_fp16_qk_reduction=False)
    return getattr(planned, method), both | more


def confirm_fi_run(kind: str) -> Callable[[dict[str, Any], Any], bool]:
    def confirm(a: dict[str, Any], result: Any) -> bool:
        planned = WRAPPERS[kind][1]()
        if "sm_scale" in a:  # `forward` has scores of its own
            planned |= {name: a[name] for name in (*SCORES, "causal") if name in a}
        return confirm_planned(planned, a, result)

    return confirm


def make_wrapper(kind: str, **more: torch.Tensor) -> tuple[Callable, dict[str, Any]]:
    """A wrapper for CUDA graphs, which takes every buffer."""
    starts, indices, last = int32(0, 0, 0), int32(0, 0, 0), int32(0, 0)
    common = dict(
        float_workspace_buffer=workspace(),
        kv_layout="NHD",
        use_cuda_graph=True,
        backend="auto",
        jit_args=None,
        jit_kwargs=None,
    )
    if kind == "decode":
        buffers = dict(zip(("indptr", "indices", "last_page_len"), (starts, indices, last), strict=True))
        names = {f"paged_kv_{name}_buffer": x for name, x in buffers.items()} | dict(use_tensor_cores=False)
    else:
        names = dict(qo_indptr_buf=starts.clone(), custom_mask_buf=None, mask_indptr_buf=None)
        names |= dict(variant_owns_mask=False) | ({"max_total_num_rows": 3} if kind == "prefill" else {})
        kept = dict(paged_kv_indptr_buf=starts, paged_kv_indices_buf=indices, paged_kv_last_page_len_buf=last)
        names |= kept if kind == "prefill" else dict(kv_indptr_buf=starts)
    return WRAPPERS[kind][0], common | names | more


def confirm_wrapper(kind: str, **more: Any) -> Callable[[dict[str, Any], Any], bool]:
    def confirm(a: dict[str, Any], wrapper: Any) -> bool:
        plan, run = WRAPPERS[kind][1]() | more, run_of(*WRAPPERS[kind][2:])
        if a["kv_layout"] == "HND":
            return True
        wrapper.plan(**plan)
        return confirm_planned(plan, run, wrapper.run(**run))

    return confirm


def make_reset(wrapper: Any, name: str) -> tuple[Callable, dict[str, Any]]:
    """Quire needs no workspace, so it ignores the second one."""

    @functools.wraps(wrapper.reset_workspace_buffer)
    def reset(**arguments: Any) -> torch.device:
        wrapper.reset_workspace_buffer(**arguments)
        return getattr(wrapper, "device", None) or wrapper._levels[0].device

    return reset, {"float_workspace_buffer": workspace(), name: None}


def confirm_reset(a: dict[str, Any], device: torch.device) -> bool:
    return device == a["float_workspace_buffer"].device


def make_graph_wrapper() -> tuple[Callable, dict[str, Any]]:
    buffers = dict(indptr_buffer=int32(0, 0, 0), indices_buffer=int32(0, 0, 0), last_page_len_buffer=int32(0, 0))
    options = dict(workspace_buffer=workspace(), kv_layout="NHD", use_tensor_cores=False)
    return flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper, buffers | options


def make_single(decode: bool, **changed: Any) -> tuple[Callable, dict[str, Any]]:
    one = dict(
        k=torch.randn(5, 2, 16), v=torch.randn(5, 2, 16), kv_layout="NHD", return_lse=True, k_scale=None, v_scale=None
    )
    if decode:
        more = dict(q=torch.randn(4, 16), use_tensor_cores=True, q_scale=None)
        return flashinfer.single_decode_with_kv_cache, one | SCORES | more
    more = dict(q=torch.randn(3, 4, 16), causal=True, backend="auto", o_dtype=None, kv_cache_sf=None)
    scales = dict.fromkeys(("scale_q", "scale_k", "scale_v"))
    return flashinfer.single_prefill_with_kv_cache, one | SCORES | MASKS | more | scales | changed


def confirm_single(a: dict[str, Any], result: Any) -> bool:
    out = result[0] if isinstance(result, tuple) else result
    decode = a["q"].dim() == 2
    q = a["q"][None] if decode else a["q"]
    starts = dict(
        qo_indptr=int32(0, len(q)), kv_indptr=int32(0, len(a["k"])), causal=decode or a["causal"], seq_lens=None
    )
    given = {n: a[n] for n in (*SCORES, "custom_mask", "packed_custom_mask") if n in a}
    if given.get("custom_mask") is not None:
        given["custom_mask"] = given["custom_mask"].flatten()
    return confirm_planned(given | starts, a | {"q": q}, out[None] if decode else out)


def merged_in_base_2(states: list[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    lses = torch.stack([lse.double() for _, lse in states])
    lse = torch.logsumexp(lses * math.log(2), 0) / math.log(2)
    return (torch.exp2(lses - lse)[..., None] * torch.stack([out.double() for out, _ in states])).sum(0), lse


def near_in_base_2(found: Any, states: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
    expected, (out, lse) = merged_in_base_2(states), found
    tolerance = 1e-5 if out.dtype is torch.float32 else 2e-3
    return torch.allclose(out.double(), expected[0], atol=tolerance) and torch.allclose(
        lse.double(), expected[1], atol=1e-2
    )


def make_merge_state() -> tuple[Callable, dict[str, Any]]:
    shapes = dict(v_a=(3, 4, 16), s_a=(3, 4), v_b=(3, 4, 16), s_b=(3, 4))
    return flashinfer.merge_state, {name: torch.randn(shape) for name, shape in shapes.items()}


def make_merge_in_place() -> tuple[Callable, dict[str, Any]]:
    """The state before is not seen afterwards, so the call returns it."""
    shapes = dict(v=(3, 4, 16), s=(3, 4), v_other=(3, 4, 16), s_other=(3, 4))

    @functools.wraps(flashinfer.merge_state_in_place)
    def merge(**a: Any) -> Any:
        before = [x.clone() if isinstance(x, torch.Tensor) else x for x in (a["v"], a["s"])]
        flashinfer.merge_state_in_place(**a)
        return before

    mask = torch.tensor([True, False, True])
    return merge, {name: torch.randn(shape) for name, shape in shapes.items()} | dict(mask=mask)


def confirm_merge_in_place(a: dict[str, Any], before: Any) -> bool:
    rows = torch.ones(3, dtype=torch.bool) if a["mask"] is None else a["mask"].bool()
    untouched = all(torch.equal(x[~rows], y[~rows]) for x, y in zip((a["v"], a["s"]), before, strict=True))
    states = [(before[0][rows], before[1][rows]), (a["v_other"][rows], a["s_other"][rows])]
    return untouched and near_in_base_2((a["v"][rows], a["s"][rows]), states)


def make_append() -> tuple[Callable, dict[str, Any]]:
    tokens = dict(append_key=torch.randn(3, 2, 16), append_value=torch.randn(3, 2, 16), kv_layout="NHD")
    where = dict(batch_indices=int32(0, 1, 1), positions=int32(1, 1, 2))
    cache = dict(paged_kv_cache=(torch.zeros(3, 4, 2, 16), torch.zeros(3, 4, 2, 16)))
    return flashinfer.append_paged_kv_cache, tokens | where | cache | pages_of("kv_")


def confirm_append(a: dict[str, Any], result: Any) -> bool:
    cache = a["paged_kv_cache"]
    k, v = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
    slots: dict[tuple[int, int], list[int]] = {}
    for token, (sequence, position) in enumerate(
        zip(a["batch_indices"].tolist(), a["positions"].tolist(), strict=True)
    ):
        if sequence < 0:
            continue
        page = int(a["kv_indices"][int(a["kv_indptr"][sequence]) + position // 4])
        slots.setdefault((page, position % 4), []).append(token)
    return all(  # one of the tokens with a slot is in it
        any(torch.equal(k[slot], a["append_key"][i]) and torch.equal(v[slot], a["append_value"][i]) for i in tokens)
        for slot, tokens in slots.items()
    )


def make_positions() -> tuple[Callable, dict[str, Any]]:
    room = dict(batch_indices=int32(7, 7, 7, 7), positions=int32(7, 7, 7, 7))
    starts = dict(append_indptr=int32(0, 1, 3), seq_lens=int32(2, 5), nnz=4)
    return flashinfer.get_batch_indices_positions, starts | room


def confirm_positions(a: dict[str, Any], result: Any) -> bool:
    starts, lens, expected = a["append_indptr"].tolist(), a["seq_lens"].tolist(), []
    for token in range(int(a["nnz"])):
        sequence = sum(end <= token for end in starts[1:])
        own = sequence < len(lens)
        expected.append((sequence, lens[sequence] + token - starts[sequence + 1]) if own else (-1, 0))
    return list(zip(*(x.tolist() for x in result), strict=True)) == [(s, as_int32(p)) for s, p in expected]


def as_int32(number: int) -> int:
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def confirm_seq_lens(a: dict[str, Any], result: torch.Tensor) -> bool:
    counts, size = a["kv_indptr"].diff().tolist(), int(a["page_size"])
    full = [max(0, count - 1) * size for count in counts]
    return result.tolist() == [as_int32(n + last) for n, last in zip(full, a["kv_last_page_len"].tolist(), strict=True)]


def make_cascade(method: str) -> tuple[Callable, dict[str, Any]]:
    """Two levels: one shared page, then pages of each sequence."""
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, workspace())
    lists = dict(
        qo_indptr_arr=[int32(0, 2), int32(0, 1, 2)],
        paged_kv_indptr_arr=[int32(0, 1), int32(0, 1, 2)],
        paged_kv_indices_arr=[int32(0), int32(1, 2)],
        paged_kv_last_page_len=[int32(4), int32(2, 3)],
    )
    scores = SCORES | dict(window_left=-1)
    dtypes = dict(q_data_type="float32", kv_data_type=torch.float32)
    plan = lists | HEADS | scores | dtypes | dict(head_dim=16, page_size=4, causal=False, use_fp16_qk_reduction=False)
    run = dict(q=torch.randn(2, 4, 16), paged_kv_cache=(torch.randn(3, 4, 2, 16), torch.randn(3, 4, 2, 16)))
    if method == "plan":

        @functools.wraps(wrapper.plan)
        def plan_and_run(**arguments: Any) -> Any:
            wrapper.plan(**arguments)
            return run, wrapper.run(**run)

        return plan_and_run, plan
    wrapper.plan(**plan)
    return wrapper.run, run


def confirm_cascade(a: dict[str, Any], result: Any) -> bool:
    planned, run, out = (a, *result) if isinstance(result, tuple) else (make_cascade("plan")[1], a, result)
    cache = run["paged_kv_cache"]
    k, v = cache.unbind(1) if isinstance(cache, torch.Tensor) else cache
    first, own = planned["paged_kv_indices_arr"][0].tolist(), planned["paged_kv_indices_arr"][1].tolist()
    shared = int(planned["paged_kv_last_page_len"][0][0])
    scores = dict(
        softmax_scale=planned["sm_scale"], softcap=max(0, planned["logits_soft_cap"] or 0), alibi_slopes=None,
        window_size=(-1, -1), s_aux=None, causal=False,
    )  # fmt: skip

    def attend(dtype: torch.dtype) -> torch.Tensor:
        outs, left = [], int(planned["window_left"]) if int(planned["window_left"]) >= 0 else 1 << 40
        for i, length in enumerate(planned["paged_kv_last_page_len"][1].tolist()):
            begins = max(0, shared - 2 + i - left), max(0, length - 1 - left)  # each level has a window of its own
            keys, values = (torch.cat([x[first[0]][begins[0] : shared], x[own[i]][begins[1] : length]]) for x in (k, v))
            outs.append(attend_by_definition(run["q"][i : i + 1], keys, values, scores, dtype))
        return torch.cat(outs)

    return within_budget(attend, out)


def make_cascade_wrapper() -> tuple[Callable, dict[str, Any]]:
    options = dict(num_levels=2, float_workspace_buffer=workspace(), kv_layout="NHD", use_cuda_graph=False)
    names = (
        "qo_indptr_buf_arr",
        "paged_kv_indptr_buf_arr",
        "paged_kv_indices_buf_arr",
        "paged_kv_last_page_len_buf_arr",
    )
    return flashinfer.MultiLevelCascadeAttentionWrapper, options | dict.fromkeys(names)


CALLS = {
    "sharded_attention": Call(make_sharded, confirm_sharded),
    "merge_over_ranks": Call(make_merge, lambda a, state: near(state, with_sinks(a["state"], a["sinks"]))),
    "plan_ring": Call(make_plan_ring, confirm_plan_ring),
    "ring_attention": Call(make_ring, confirm_ring),
    "ContextShard": Call(
        lambda: (distributed.ContextShard, dict(rank=0, world_size=2, interleave=2)),
        lambda a, shard: all(getattr(shard, name) == value for name, value in a.items()),
    ),
    "ContextShard.num_keys": Call(lambda: (shard().num_keys, dict(seq_lens=int32(9, 5))), confirm_num_keys),
    "ContextShard.slot_mapping": Call(make_slot_mapping, confirm_slot_mapping),
    "ContextShard.batch": Call(lambda: make_shard_batch(1), confirm_shard_batch),
    "ContextShard.batch, drafts": Call(lambda: make_shard_batch(2), confirm_shard_batch),
    "record": Call(lambda: make_record(contents=False), confirm_record),
    "save": Call(make_save, confirm_record),
    "load": Call(lambda: (debug.load, dict(path="good")), lambda a, call: debug.replay(call).passed),
    "replay": Call(make_replay, lambda a, replay: replay.passed),
    **{
        name: call
        for kind, (wrapper, *_) in WRAPPERS.items()
        for name, call in {
            wrapper.__name__: Call(lambda kind=kind: make_wrapper(kind), confirm_wrapper(kind)),
            f"{wrapper.__name__}.plan": Call(
                lambda kind=kind: make_fi_plan(kind), lambda a, result: confirm_planned(a, *result)
            ),
            f"{wrapper.__name__}.run": Call(lambda kind=kind: make_fi_run(kind), confirm_fi_run(kind)),
            f"{wrapper.__name__}.forward": Call(lambda kind=kind: make_fi_run(kind, "forward"), confirm_fi_run(kind)),
            f"{wrapper.__name__}.forward_return_lse": Call(
                lambda kind=kind: make_fi_run(kind, "forward_return_lse"), confirm_fi_run(kind)
            ),
            f"{wrapper.__name__}.reset_workspace_buffer": Call(
                lambda wrapper=wrapper: make_reset(wrapper(workspace()), "int_workspace_buffer"), confirm_reset
            ),
        }.items()
    },
    **{
        f"BatchPrefillWithPagedKVCacheWrapper.plan, {name}": Call(
            lambda name=name, make=make: make_fi_plan("prefill", window_left=-1, **{name: make()}),
            lambda a, result: confirm_planned(a, *result),
        )
        for name, make in {"custom_mask": custom_mask, "packed_custom_mask": packed_custom_mask}.items()
    },
    "BatchPrefillWithPagedKVCacheWrapper, masks": Call(
        lambda: make_wrapper("prefill", custom_mask_buf=workspace(), mask_indptr_buf=int32(0, 0, 0)),
        confirm_wrapper("prefill", window_left=-1, custom_mask=custom_mask()),
    ),
    "CUDAGraphBatchDecodeWithPagedKVCacheWrapper": Call(make_graph_wrapper, confirm_wrapper("decode")),
    "MultiLevelCascadeAttentionWrapper": Call(make_cascade_wrapper, lambda a, wrapper: True),
    "MultiLevelCascadeAttentionWrapper.plan": Call(lambda: make_cascade("plan"), confirm_cascade),
    "MultiLevelCascadeAttentionWrapper.reset_workspace_buffer": Call(
        lambda: make_reset(flashinfer.MultiLevelCascadeAttentionWrapper(1, workspace()), "int_workspace_buffers"),
        confirm_reset,
    ),
    "MultiLevelCascadeAttentionWrapper.run": Call(lambda: make_cascade("run"), confirm_cascade),
    "single_decode_with_kv_cache": Call(lambda: make_single(decode=True), confirm_single),
    "single_prefill_with_kv_cache": Call(lambda: make_single(decode=False), confirm_single),
    "single_prefill_with_kv_cache, custom_mask": Call(
        lambda: make_single(decode=False, window_left=-1, custom_mask=torch.ones(3, 5).bool().tril(2)), confirm_single
    ),
    "single_prefill_with_kv_cache, packed_custom_mask": Call(
        lambda: make_single(decode=False, window_left=-1, packed_custom_mask=torch.tensor([255, 127]).byte()),
        confirm_single,
    ),
    "merge_state": Call(
        make_merge_state, lambda a, result: near_in_base_2(result, [(a["v_a"], a["s_a"]), (a["v_b"], a["s_b"])])
    ),
    "merge_state_in_place": Call(make_merge_in_place, confirm_merge_in_place),
    "merge_states": Call(
        lambda: (flashinfer.merge_states, dict(v=torch.randn(3, 2, 4, 16), s=torch.randn(3, 2, 4))),
        lambda a, result: near_in_base_2(result, list(zip(a["v"].unbind(1), a["s"].unbind(1), strict=True))),
    ),
    "append_paged_kv_cache": Call(make_append, confirm_append),
    "get_batch_indices_positions": Call(make_positions, confirm_positions),
    "get_seq_lens": Call(
        lambda: (flashinfer.get_seq_lens, dict(kv_indptr=int32(0, 2), kv_last_page_len=int32(3), page_size=4)),
        confirm_seq_lens,
    ),
}
WITH_MASKS = (  # what is read differently where there are masks; the other rows have the other arguments
    *("custom_mask", "packed_custom_mask", "custom_mask_buf", "mask_indptr_buf", "window_left", "causal", "qo_indptr"),
    *("paged_kv_indptr", "paged_kv_last_page_len", "page_size", "seq_lens", "max_token_per_sequence", "q", "k"),
)
OTHER_NAMES = ".forward", ".forward_return_lse"  # of `run`
EXEMPT = {
    "RingPlan": "made by plan_ring alone",
    "Call": "made by load alone",
    "Replay": "made by replay alone",
    **dict.fromkeys(
        (
            *("BatchAttention", "BatchAttentionWithAttentionSinkWrapper", "BatchMLAPagedAttentionWrapper"),
            *("BlockSparseAttentionWrapper", "VariableBlockSparseAttentionWrapper"),
            *("append_paged_mla_kv_cache", "fast_decode_plan", "trtllm_batch_context_with_kv_cache"),
            *("trtllm_batch_decode_with_kv_cache", "trtllm_batch_decode_with_kv_cache_mla"),
            *("trtllm_ragged_attention_deepseek", "xqa_batch_decode_with_kv_cache"),
            "xqa_batch_decode_with_kv_cache_mla",
        ),
        "the bad input of tests/integrations/test_flashinfer.py",
    ),
}


def test_every_public_function_and_argument_is_in_the_matrix():
    named = {call.split(",")[0].split(".")[0] for call in CALLS}
    assert named == {*distributed.__all__, *debug.__all__, *flashinfer.__all__} - set(EXEMPT)
    for call in CALLS.values():
        function, arguments = call.make()
        parameters = inspect.signature(function).parameters.values()
        assert set(arguments) == {p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}


@pytest.mark.parametrize("name", CALLS)
def test_the_calls_are_right_before_anything_is_replaced(name):
    torch.manual_seed(0)
    function, arguments = CALLS[name].make()
    assert CALLS[name].confirm(arguments, function(**arguments))


@pytest.mark.parametrize(
    "call", [extended(call) if call.partition(",")[0].endswith(OTHER_NAMES) else call for call in CALLS]
)
def test_hostile_values_are_refused_or_served_rightly(call):
    torch.manual_seed(0)
    wrong = []
    for name, good in CALLS[call].make()[1].items():
        if "mask" in call and name not in WITH_MASKS:
            continue
        for kind, value in hostile(good):
            if name == "on_step" and callable(value):  # a function of the caller's may raise what it likes
                continue
            what = complaint(CALLS[call], name, value, [])
            if what:
                wrong.append(f"{name} = {kind}: {what[:300]}")
    assert not wrong, "\n".join(wrong)
