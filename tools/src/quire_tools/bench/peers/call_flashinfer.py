"""FlashInfer: its fa2 and fa3 kernels for pages, packed keys and latents, XQA, and its persistent `BatchAttention`."""

from collections.abc import Callable
from functools import partial

import torch

from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import (
    each_token_a_sequence,
    refuse,
    refuse_other_values,
    refuse_special_dtypes_and_scores,
    uniform_tokens,
    window_of,
)

WORKSPACE = 256 << 20  # bytes
XQA_PAGES = 16, 32, 64, 128  # page sizes
XQA_QUERIES = 32  # of a sequence, at most


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
    refuse(spec.kv_format is not None, f"not measured on {spec.kv_format}")
    refuse_other_values(spec)
    indptr = page_starts(inputs)
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
    shared = torch.empty(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)

    def plan(table: torch.Tensor) -> Call:
        indices = page_numbers(inputs, table)
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
    shared = torch.empty(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)
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


def xqa_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call XQA, which FlashInfer 0.7 and newer choose for decode and drafts on Hopper GPUs."""
    from flashinfer.decode import trtllm_batch_decode_with_kv_cache  # pyright: ignore[reportMissingImports]

    spec, case = inputs.case.spec, inputs.case
    refuse_special_dtypes_and_scores(inputs)
    refuse_other_values(spec)
    refuse(case.page_size not in XQA_PAGES, "pages of 16, 32, 64 or 128 only")
    refuse(max(case.query_lens) > XQA_QUERIES, "decode and drafts only")
    q_len = uniform_tokens(inputs).shape[1]
    mask = None if q_len == 1 else causal_words(q_len, inputs.q.device).repeat(len(case.lens), 1, 1)
    shared = torch.zeros(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)  # counters there must begin at 0
    return lambda table: partial(
        trtllm_batch_decode_with_kv_cache,
        query=inputs.q,
        kv_cache=(inputs.cache.k, inputs.cache.v),
        workspace_buffer=shared,
        block_tables=table,
        seq_lens=inputs.seq_lens,
        max_seq_len=case.bounds["max_seq_len"],
        bmm1_scale=spec.softmax_scale,
        bmm2_scale=1.0,
        window_left=window_of(spec)[0],
        out=out,
        kv_layout="NHD",
        backend="xqa",
        q_len_per_req=q_len,
        mask=mask,
    )


def causal_words(q_len: int, device: torch.device) -> torch.Tensor:
    """Return which drafts of a sequence each draft sees, one bit each, [1, q_len, an even number of words] uint16."""
    bits = torch.ones(q_len, 32 * -(-q_len // 32), dtype=torch.int32).tril()
    words = (bits.view(q_len, -1, 16) << torch.arange(16, dtype=torch.int32)).sum(-1)
    return words.to(torch.uint16)[None].to(device)


def batch_attention_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Call `BatchAttention` of FlashInfer 0.7 and newer, a persistent kernel for decode, prompts and mixed batches."""
    from flashinfer import BatchAttention  # pyright: ignore[reportMissingImports]

    spec, case, q = inputs.case.spec, inputs.case, inputs.q
    refuse_special_dtypes_and_scores(inputs)
    refuse_other_values(spec)
    refuse(spec.sliding_window is not None, "does not serve windows")
    starts, indptr, lens = inputs.cu_seqlens_q.cpu(), page_starts(inputs), inputs.seq_lens.cpu()
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    first: list[
        torch.Tensor
    ] = []  # the workspace of the first wrapper; all share it, since no two run at the same time

    def plan(table: torch.Tensor) -> Call:
        wrapper = BatchAttention("NHD", str(q.device))
        first.append(wrapper.float_workspace_buffer)
        wrapper.float_workspace_buffer = first[0]
        del first[1:]
        wrapper.plan(
            starts,
            indptr,
            page_numbers(inputs, table),
            lens,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.head_dim_v,
            case.page_size,
            causal=True,
            sm_scale=spec.softmax_scale,
            q_data_type=spec.dtype,
            kv_data_type=spec.kv_dtype,
        )
        return partial(call_and_drop, wrapper.run, q, (inputs.cache.k, inputs.cache.v), out=out, lse=lse)

    return plan


def call_and_drop(run: Callable[..., object], *args: object, **keywords: object) -> None:
    """Call what writes `out` and returns more than that."""
    run(*args, **keywords)


def flashinfer_mla_calls(inputs: Inputs, out: torch.Tensor, backend: str) -> Planner:
    from flashinfer.mla import BatchMLAPagedAttentionWrapper, MLAPlanMetadata  # pyright: ignore[reportMissingImports]

    inputs = each_token_a_sequence(inputs)
    spec, case = inputs.case.spec, inputs.case
    is_fp8 = spec.kv_dtype != spec.dtype
    refuse(is_fp8 and backend != "fa3", "fp8 latents only in its fa3 kernels")
    scales = {"ckv_scale": 1.0, "kpe_scale": 1.0} if is_fp8 else {}
    indptr = page_starts(inputs)
    starts, lens = inputs.cu_seqlens_q.cpu(), inputs.seq_lens.cpu()
    shared = torch.empty(WORKSPACE, dtype=torch.uint8, device=inputs.q.device)

    def plan(table: torch.Tensor) -> Call:
        indices = page_numbers(inputs, table)
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
        return partial(wrapper.run, query=inputs.q, kv_cache=inputs.cache_of(table).latents, out=out, **scales)

    return plan


def page_starts(inputs: Inputs) -> torch.Tensor:
    """Return where each sequence's pages begin in the list of `page_numbers`, [num_seqs + 1] int32 on the host."""
    return torch.tensor([0, *inputs.case.pages_per_seq]).cumsum(0).to(torch.int32)


def page_numbers(inputs: Inputs, table: torch.Tensor) -> torch.Tensor:
    """Return the pages of all sequences in one list."""
    return torch.cat([row[:n] for row, n in zip(table, inputs.case.pages_per_seq, strict=True)])
