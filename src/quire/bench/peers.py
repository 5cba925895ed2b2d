"""The libraries that are measured, Quire among them.

Each has an adapter. A library that is not installed is reported as absent.

An adapter takes a case's inputs and the output tensor, and returns `plan(page_table) -> call`.
`plan` is what a server does once per step, `call` what it does once per layer.
A call writes `out`, or returns its result with the tokens in the same order.
Libraries that read no pages get contiguous copies of the keys and values. The copies are not timed, which favours them.

To add a library, write one adapter and add one line to `PEERS`.
"""

from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch

import quire
from quire.bench.cases import Layout
from quire.bench.inputs import Inputs
from quire.bench.measure import Call, NotServed, Peer, Planner
from quire.bench.naive import naive_attention, owners

FLASHINFER_WORKSPACE = 256 << 20  # bytes
MAX_NAIVE_FLOPS = 5e10  # for which the naive kernel takes 20 ms (NVIDIA H200, 2026-11-21)


def refuse(condition: bool, why: str) -> None:
    """Raise NotServed if a library lacks what a case needs."""
    if condition:
        raise NotServed(why)


def refuse_special_dtypes_and_scores(inputs: Inputs) -> None:
    """Raise NotServed unless queries and cache have the same 16-bit dtype, and there are neither sinks nor softcap."""
    spec = inputs.case.spec
    dtypes = f"{spec.dtype} on {spec.kv_dtype}".replace("torch.", "")
    refuse(spec.dtype.itemsize != 2 or spec.kv_dtype != spec.dtype, f"does not serve {dtypes}")
    refuse(spec.sinks, "does not serve sinks")
    refuse(spec.softcap is not None, "does not serve softcap")


def refuse_other_values(spec: quire.AttentionSpec) -> None:
    """Raise NotServed unless values are as wide as keys."""
    refuse(spec.head_dim_v != spec.head_dim, "does not serve values of another width")


def window_of(spec: quire.AttentionSpec) -> tuple[int, int]:
    """Return the window as FlashAttention takes it: keys to the left and right of a query's own, -1 for no limit."""
    return (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)


def quire_calls(inputs: Inputs, out: torch.Tensor, **options: Any) -> Planner:
    """Call Quire; `options` are those of `quire.plan`."""
    workspace: torch.Tensor | None = (
        None  # of the first plan; the others may share it, since no two run at the same time
    )

    def plan(table: torch.Tensor) -> Call:
        nonlocal workspace
        made = inputs.plan(table, workspace=workspace, **options)
        if workspace is None:
            workspace = made.workspace
        if inputs.case.packed:
            return partial(quire.varlen_attention, inputs.q, *inputs.packed(table), made, out=out)
        return partial(quire.attention, inputs.q, inputs.cache, made, sinks=inputs.sinks, out=out)

    return plan


def quire_with_config(inputs: Inputs, out: torch.Tensor, **fields: int | bool) -> Planner:
    """Call Quire's portable kernels, with some fields of the chosen configuration replaced."""
    launch: Any = inputs.plan(inputs.tables[0], kernel="portable").launch
    return quire_calls(inputs, out, config=replace(launch.config, **fields))


def naive_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    spec, case = inputs.case.spec, inputs.case
    refuse(case.flops > MAX_NAIVE_FLOPS, "too slow to wait for")
    refuse(spec.sinks or spec.sliding_window is not None or spec.kv_dtype != spec.dtype, "serves causal attention only")
    refuse(spec.softcap is not None, "serves causal attention only")
    refuse_other_values(spec)
    seq_of, pos_of = owners(case.query_lens, case.seq_lens, inputs.q.device)

    def plan(table: torch.Tensor) -> Call:
        return partial(naive_attention, inputs.q, inputs.cache, table, seq_of, pos_of, spec.softmax_scale, out)

    return plan


def flash_attention_calls(inputs: Inputs, out: torch.Tensor, version: int) -> Planner:
    from vllm.vllm_flash_attn import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
        get_scheduler_metadata,
    )

    spec, case, bounds = inputs.case.spec, inputs.case, inputs.case.bounds
    refuse(spec.kv_dtype != spec.dtype, "fp8 caches only with fp8 queries")
    refuse(spec.sinks and version < 3, "does not serve sinks")
    if version < 3:
        refuse_other_values(spec)
    metadata = None
    query: dict[str, Any] = {"q": inputs.q}
    if spec.latent:  # the rotary columns are q and k, the latents v; q_v are the queries of the latents
        q_nope, q_pe = halves(inputs.q, spec)
        query = {"q": q_pe, "q_v": q_nope}

    def keys_of(table: torch.Tensor) -> dict[str, Any]:
        if case.packed:
            k, v = inputs.packed(table)
            return {"k": k, "v": v, "cu_seqlens_k": inputs.cu_seqlens_k}
        k = inputs.cache.k[..., spec.head_dim_v :] if spec.latent else inputs.cache.k
        return {"k": k, "v": inputs.cache.v, "seqused_k": inputs.seq_lens, "block_table": table}

    def plan(table: torch.Tensor) -> Call:
        nonlocal metadata
        if version == 3 and not case.packed:
            metadata = get_scheduler_metadata(
                batch_size=len(case.lens),
                max_seqlen_q=bounds["max_query_len"],
                max_seqlen_k=bounds["max_seq_len"],
                num_heads_q=spec.num_q_heads,
                num_heads_kv=spec.num_kv_heads,
                headdim=query["q"].shape[-1],
                headdim_v=spec.head_dim_v,
                cache_seqlens=inputs.seq_lens,
                qkv_dtype=spec.dtype,
                cu_seqlens_q=inputs.cu_seqlens_q,
                page_size=case.page_size,
                causal=True,
                window_size=window_of(spec),
                has_softcap=spec.softcap is not None,
                num_splits=0,
            )
        return partial(
            flash_attn_varlen_func,
            **query,
            **keys_of(table),
            max_seqlen_q=bounds["max_query_len"],
            cu_seqlens_q=inputs.cu_seqlens_q,
            max_seqlen_k=bounds["max_seq_len"],
            softmax_scale=spec.softmax_scale,
            causal=True,
            window_size=list(window_of(spec)),
            softcap=spec.softcap or 0.0,
            out=out,
            scheduler_metadata=metadata,
            num_splits=0,
            fa_version=version,
            s_aux=inputs.sinks,
        )

    return plan


def halves(q: torch.Tensor, spec: quire.AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of the queries of the latents and of their rotary columns."""
    return q[..., : spec.head_dim_v], q[..., spec.head_dim_v :]


def flashinfer_calls(inputs: Inputs, out: torch.Tensor, backend: str) -> Planner:
    import flashinfer  # pyright: ignore[reportMissingImports]

    spec, case = inputs.case.spec, inputs.case
    if case.packed:
        return flashinfer_ragged_calls(inputs, out, backend)
    if spec.latent:
        return flashinfer_mla_calls(inputs, out, backend)
    refuse(spec.sinks, "sinks only through a variant compiled at run time")
    refuse(
        backend == "fa3" and (case.bounds["max_query_len"] == 1 or spec.kv_dtype != spec.dtype),
        "its fa3 kernels are for prefill in 16 bits",
    )
    refuse_other_values(spec)
    pages = case.pages_per_seq
    indptr = torch.tensor([0, *pages]).cumsum(0).to(torch.int32)
    last = torch.tensor([(s - 1) % case.page_size + 1 for s in case.seq_lens], dtype=torch.int32)
    starts = inputs.cu_seqlens_q.cpu()
    heads = (spec.num_q_heads, spec.num_kv_heads, spec.head_dim, case.page_size)
    options = {
        "window_left": window_of(spec)[0],
        "q_data_type": spec.dtype,
        "kv_data_type": spec.kv_dtype,
        "sm_scale": spec.softmax_scale,
        "logits_soft_cap": spec.softcap,
    }
    shared = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=inputs.q.device)

    def plan(table: torch.Tensor) -> Call:
        indices = torch.cat([row[:n] for row, n in zip(table, pages, strict=True)])
        if case.bounds["max_query_len"] == 1:
            wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
                shared, "NHD", use_tensor_cores=spec.group_size > 1, backend=backend
            )
            wrapper.plan(indptr, indices, last, *heads, **options)
        else:
            wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(shared, "NHD", backend=backend)
            wrapper.plan(starts, indptr, indices, last, *heads, causal=True, **options)
        return partial(wrapper.run, inputs.q, (inputs.cache.k, inputs.cache.v), out=out)

    return plan


def flashinfer_ragged_calls(inputs: Inputs, out: torch.Tensor, backend: str) -> Planner:
    import flashinfer  # pyright: ignore[reportMissingImports]

    spec = inputs.case.spec
    shared = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
    starts, key_starts = inputs.cu_seqlens_q.cpu(), inputs.cu_seqlens_k.cpu()

    def plan(table: torch.Tensor) -> Call:
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(shared, "NHD", backend=backend)
        wrapper.plan(
            starts,
            key_starts,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            head_dim_vo=spec.head_dim_v,
            causal=True,
            sm_scale=spec.softmax_scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
        )
        return partial(wrapper.run, inputs.q, *inputs.packed(table), out=out)

    return plan


def flashinfer_mla_calls(inputs: Inputs, out: torch.Tensor, backend: str) -> Planner:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata  # pyright: ignore[reportMissingImports]

    spec, case = inputs.case.spec, inputs.case
    is_fp8 = spec.kv_dtype != spec.dtype
    refuse(is_fp8 and backend != "fa3", "fp8 latents only in its fa3 kernels")
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if is_fp8 else {}
    pages = case.pages_per_seq
    indptr = torch.tensor([0, *pages]).cumsum(0).to(torch.int32)
    starts, lens = inputs.cu_seqlens_q.cpu(), inputs.seq_lens.cpu()
    shared = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=inputs.q.device)

    def plan(table: torch.Tensor) -> Call:
        indices = torch.cat([row[:n] for row, n in zip(table, pages, strict=True)])
        wrapper = BatchMLAPagedAttentionWrapper(shared, backend=backend)
        wrapper.plan(
            metadata=MLAPlanMetadata.csr(starts, indptr, indices, lens),
            num_heads=spec.num_q_heads,
            head_dim_ckv=spec.head_dim_v,
            head_dim_kpe=spec.head_dim - spec.head_dim_v,
            page_size=case.page_size,
            causal=True,
            sm_scale=spec.softmax_scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
        )
        return partial(wrapper.run, query=inputs.q, kv_cache=inputs.cache.latents, out=out, **scales)

    return plan


def flash_mla_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call FlashMLA as SGLang ships it; it takes fp8 latents with fp8 queries, which are converted beforehand."""
    from flash_mla import flash_mla_with_kvcache, get_mla_decoding_metadata  # pyright: ignore[reportMissingImports]
    from flash_mla.flash_mla_interface import FlashMLASchedMeta  # pyright: ignore[reportMissingImports]

    spec = inputs.case.spec
    q = uniform_tokens(inputs)
    is_fp8 = spec.kv_dtype != spec.dtype
    options: dict[str, Any] = {"is_fp8_kvcache": is_fp8, "use_legacy": True}  # the new kernels are for Blackwell GPUs
    scales: dict[str, torch.Tensor] = {}
    if is_fp8:
        q, one = q.to(spec.kv_dtype), torch.ones(1, device=q.device)
        scales = {"descale_q": one, "descale_k": one}

    def plan(table: torch.Tensor) -> Call:
        metadata, num_splits = get_mla_decoding_metadata(
            inputs.seq_lens, q.shape[1] * spec.num_q_heads, spec.num_kv_heads, **options
        )
        schedule = FlashMLASchedMeta(tile_scheduler_metadata=metadata, num_splits=num_splits)
        call = partial(
            flash_mla_with_kvcache,
            q,
            inputs.cache.k,
            table,
            inputs.seq_lens,
            spec.head_dim_v,
            schedule,
            softmax_scale=spec.softmax_scale,
            causal=True,
            **options,
            **scales,
        )
        return lambda: call()[0]  # and not the lse

    return plan


def vllm_flash_mla_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from vllm.third_party.flashmla.flash_mla_interface import (  # pyright: ignore[reportMissingImports]
        flash_mla_with_kvcache,
        get_mla_metadata,
    )

    spec = inputs.case.spec
    refuse(spec.kv_dtype != spec.dtype, "fp8 latents only by other functions")
    q = uniform_tokens(inputs)
    shaped = out.view(*q.shape[:3], spec.head_dim_v)

    def plan(table: torch.Tensor) -> Call:
        schedule, _ = get_mla_metadata()
        call = partial(
            flash_mla_with_kvcache,
            q,
            inputs.cache.k,
            table,
            inputs.seq_lens,
            spec.head_dim_v,
            schedule,
            softmax_scale=spec.softmax_scale,
            causal=True,
            out=shaped,
        )
        call()  # which makes the schedule
        return lambda: call()[0]

    return plan


def uniform_tokens(inputs: Inputs) -> torch.Tensor:
    """Return the queries, [num_seqs, query_len, num_q_heads, head_dim]; refuse batches of several query lengths."""
    lens = set(inputs.case.query_lens)
    refuse(len(lens) > 1, "one query length per batch")
    return inputs.q.view(-1, *lens, *inputs.q.shape[1:])


def vllm_triton_mla_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call vLLM's Triton kernel for latents as its newest backend does.

    Queries of one sequence become sequences of their own. Their tables and lengths are made beforehand.
    """
    from vllm.v1.attention.ops.triton_decode_attention import (  # pyright: ignore[reportMissingImports]
        decode_attention_fwd,
    )

    spec, case, q = inputs.case.spec, inputs.case, inputs.q
    q_len = uniform_tokens(inputs).shape[1]
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    ideal = 1 << (max(1, case.bounds["max_seq_len"] // 512) - 1).bit_length()
    num_splits = min(ideal, 2 * num_sms)
    scratch = torch.empty(*q.shape[:2], num_splits, spec.head_dim_v + 1, dtype=torch.float32, device=q.device)
    lse, one = q.new_empty(q.shape[:2]), torch.ones((), device=q.device)
    before = torch.arange(1 - q_len, 1, dtype=torch.int32, device=q.device)
    seq_lens = (inputs.seq_lens[:, None] + before).flatten()
    return lambda table: partial(
        decode_attention_fwd,
        q,
        inputs.cache.k,
        inputs.cache.v,
        out,
        lse,
        table.repeat_interleave(q_len, 0),
        seq_lens,
        scratch,
        num_splits,
        spec.softmax_scale,
        case.page_size,
        k_scale=one,
        v_scale=one,
        is_mla=True,
    )


def vllm_triton_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from vllm.v1.attention.ops.triton_unified_attention import (  # pyright: ignore[reportMissingImports]
        unified_attention,
    )

    spec, bounds = inputs.case.spec, inputs.case.bounds
    refuse(spec.kv_dtype is torch.int8, "its int8 caches have scales per token")
    refuse_other_values(spec)
    shape = (inputs.q.shape[0], spec.num_q_heads, 16)
    segment_out = torch.empty(
        *shape, 1 << (spec.head_dim - 1).bit_length(), dtype=torch.float32, device=inputs.q.device
    )
    segment_max = torch.empty(shape, dtype=torch.float32, device=inputs.q.device)
    segment_expsum = torch.empty_like(segment_max)
    return lambda table: partial(
        unified_attention,
        inputs.q,
        inputs.cache.k,
        inputs.cache.v,
        out,
        inputs.cu_seqlens_q,
        bounds["max_query_len"],
        inputs.seq_lens,
        bounds["max_seq_len"],
        spec.softmax_scale,
        True,
        window_of(spec),
        table,
        spec.softcap or 0,
        None,
        None,
        None,
        seq_threshold_3D=128 // spec.num_kv_heads,
        num_par_softmax_segments=16,
        sinks=inputs.sinks,
        softmax_segm_output=segment_out,
        softmax_segm_max=segment_max,
        softmax_segm_expsum=segment_expsum,
    )


def cudnn_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    import cudnn  # pyright: ignore[reportMissingImports]

    refuse_special_dtypes_and_scores(inputs)
    spec, case = inputs.case.spec, inputs.case
    refuse_other_values(spec)
    q_len = case.lens[0][0]
    refuse(any(q != q_len for q, _ in case.lens), "one query length per batch")
    refuse(
        q_len > 1 and any(q != s for q, s in case.lens),
        "queries of several tokens only where they are the whole sequence",
    )
    refuse(spec.sliding_window is not None, "no window together with a page table here")
    num_seqs, device = len(case.lens), inputs.q.device
    kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[spec.dtype]
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT
    )
    q, o = (x.view(num_seqs, q_len, spec.num_q_heads, spec.head_dim).transpose(1, 2) for x in (inputs.q, out))
    k, v = inputs.cache.k.transpose(1, 2), inputs.cache.v.transpose(1, 2)
    lens = (
        torch.full((num_seqs, 1, 1, 1), q_len, dtype=torch.int32, device=device),
        inputs.seq_lens.view(num_seqs, 1, 1, 1),
    )
    table = inputs.tables[0][:, None, :, None]
    names = [graph.tensor_like(x) for x in (q, k, v, table, table, *lens)]
    result, _ = graph.sdpa(
        name="sdpa",
        q=names[0],
        k=names[1],
        v=names[2],
        is_inference=True,
        attn_scale=spec.softmax_scale,
        use_causal_mask=q_len > 1,
        use_padding_mask=True,
        seq_len_q=names[5],
        seq_len_kv=names[6],
        paged_attention_k_table=names[3],
        paged_attention_v_table=names[4],
        paged_attention_max_seq_len_kv=case.bounds["max_seq_len"],
    )
    result.set_output(True).set_dim(list(o.shape)).set_stride(list(o.stride()))
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=device)
    handle = cudnn.create_handle()

    def run(tensors: dict[Any, torch.Tensor]) -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(tensors, workspace, handle=handle)

    def plan(table: torch.Tensor) -> Call:
        paged = table[:, None, :, None]
        return partial(run, dict(zip([*names, result], [q, k, v, paged, paged, *lens, o], strict=True)))

    return plan


def contiguous_kv(inputs: Inputs, table: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys and values of sequences of one length, [num_seqs, num_kv_heads, seq_len, head_dim] each."""
    seq_len = inputs.case.lens[0][1]

    def gather(cache: torch.Tensor) -> torch.Tensor:
        return cache[table.long()].flatten(1, 2)[:, :seq_len].transpose(1, 2).contiguous()

    return gather(inputs.cache.k), gather(inputs.cache.v)


def uniform_queries(inputs: Inputs) -> tuple[torch.Tensor, int, int]:
    """Return the queries, [num_seqs, num_q_heads, query_len, head_dim], and both lengths; refuse other batches."""
    refuse_special_dtypes_and_scores(inputs)
    refuse(not inputs.case.uniform, "one length per batch, keys not paged")
    q_len, seq_len = inputs.case.lens[0]
    return inputs.q.view(-1, q_len, *inputs.q.shape[1:]).transpose(1, 2), q_len, seq_len


def sdpa_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    q, q_len, seq_len = uniform_queries(inputs)
    spec = inputs.case.spec
    refuse(spec.sliding_window is not None, "does not serve windows")
    options: dict[str, Any] = {"scale": spec.softmax_scale, "enable_gqa": True}
    if q_len == seq_len:
        options["is_causal"] = True
    elif q_len > 1:
        options["attn_mask"] = causal_lower_right(q_len, seq_len)

    def plan(table: torch.Tensor) -> Call:
        k, v = contiguous_kv(inputs, table)
        return lambda: scaled_dot_product_attention(q, k, v, **options).transpose(1, 2)

    return plan


def flex_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    q, q_len, seq_len = uniform_queries(inputs)
    spec = inputs.case.spec
    before, window = seq_len - q_len, spec.sliding_window or seq_len
    mask = None
    if q_len > 1 or window < seq_len:

        def is_visible(
            batch: torch.Tensor, head: torch.Tensor, q_index: torch.Tensor, kv_index: torch.Tensor
        ) -> torch.Tensor:
            return (kv_index <= q_index + before) & (kv_index > q_index + before - window)

        mask = create_block_mask(is_visible, None, None, q_len, seq_len, device=inputs.q.device.type)
    compiled = torch.compile(flex_attention, dynamic=False)

    def plan(table: torch.Tensor) -> Call:
        k, v = contiguous_kv(inputs, table)
        return lambda: compiled(q, k, v, block_mask=mask, scale=spec.softmax_scale, enable_gqa=True).transpose(1, 2)

    return plan


NAIVE = "Quire, naive"
EVERYTHING: tuple[Layout, ...] = get_args(Layout)
LATENTS: tuple[Layout, ...] = ("latents",)
PEERS = (
    Peer("Quire", "quire", quire_calls, plans=True, serves=EVERYTHING),
    Peer(
        "Quire, batch-invariant",
        "quire",
        partial(quire_calls, batch_invariant=True),
        plans=True,
        serves=("pages", "latents"),
    ),
    Peer("Quire, portable", "quire", partial(quire_calls, kernel="mla"), plans=True, serves=LATENTS),
    Peer("FlashMLA", "flash_mla", flash_mla_calls, plans=True, package="sgl-flash-mla", serves=LATENTS, in_fp8=True),
    Peer("FlashMLA in vLLM", "vllm.third_party.flashmla.flash_mla_interface", vllm_flash_mla_calls, serves=LATENTS),
    Peer(
        "FlashAttention 3",
        "vllm.vllm_flash_attn._vllm_fa3_C",
        partial(flash_attention_calls, version=3),
        plans=True,
        serves=EVERYTHING,
    ),
    Peer("FlashAttention 2", "vllm.vllm_flash_attn._vllm_fa2_C", partial(flash_attention_calls, version=2)),
    Peer(
        "FlashInfer fa2",
        "flashinfer",
        partial(flashinfer_calls, backend="fa2"),
        plans=True,
        package="flashinfer-python",
        serves=EVERYTHING,
    ),
    Peer(
        "FlashInfer fa3",
        "flashinfer",
        partial(flashinfer_calls, backend="fa3"),
        plans=True,
        package="flashinfer-python",
        serves=EVERYTHING,
    ),
    Peer("vLLM Triton", "vllm.v1.attention.ops.triton_unified_attention", vllm_triton_calls),
    Peer("vLLM Triton MLA", "vllm.v1.attention.ops.triton_decode_attention", vllm_triton_mla_calls, serves=LATENTS),
    Peer("cuDNN", "cudnn", cudnn_calls, package="nvidia-cudnn-frontend"),
    Peer("SDPA, not paged", "torch", sdpa_calls),
    Peer("FlexAttention, not paged", "torch", flex_calls, slow=True),
    Peer(NAIVE, "quire", naive_calls),
)
BASELINES = ("SDPA, not paged", "FlexAttention, not paged")  # they read no pages, so neither is "the best other"
