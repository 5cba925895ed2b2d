"""cuDNN, by its Python front end."""

from functools import partial
from typing import Any

import torch

from quire_tools.bench.inputs import Inputs
from quire_tools.bench.measure import Call, Planner
from quire_tools.bench.peers.arguments import refuse_other_values, refuse_special_dtypes_and_scores


def cudnn_calls(inputs: Inputs, out: torch.Tensor) -> Planner:
    """Build cuDNN's graph of attention over pages: queries are packed, and a ragged offset says where each starts."""
    import cudnn  # pyright: ignore[reportMissingImports]

    refuse_special_dtypes_and_scores(inputs)
    refuse_other_values(inputs.case.spec)
    spec, case, q, cache = inputs.case.spec, inputs.case, inputs.q, inputs.cache
    num_seqs, max_query_len = len(case.lens), case.bounds["max_query_len"]
    kind = {torch.bfloat16: cudnn.data_type.BFLOAT16, torch.float16: cudnn.data_type.HALF}[spec.dtype]
    graph = cudnn.pygraph(
        io_data_type=kind, intermediate_data_type=cudnn.data_type.FLOAT, compute_data_type=cudnn.data_type.FLOAT
    )
    numbers_per_token = spec.num_q_heads * spec.head_dim
    shape = [num_seqs, spec.num_q_heads, max_query_len, spec.head_dim]
    strides = [max_query_len * numbers_per_token, spec.head_dim, numbers_per_token, 1]
    starts, query_lens, seq_lens = (
        x.view(-1, 1, 1, 1)
        for x in (inputs.cu_seqlens_q * numbers_per_token, inputs.cu_seqlens_q.diff(), inputs.seq_lens)
    )
    k, v = cache.k.transpose(1, 2), cache.v.transpose(1, 2)
    table = inputs.tables[0][:, None, :, None]
    queries = graph.tensor(dim=shape, stride=strides, data_type=kind, name="q")
    names = [graph.tensor_like(x) for x in (starts, k, v, table, table, query_lens, seq_lens)]
    is_packed = any(q_len != max_query_len for q_len in case.query_lens)
    if is_packed:
        queries.set_ragged_offset(names[0])
    band: dict[str, Any] = {}
    if max_query_len > 1 or spec.sliding_window is not None:
        band = {"diagonal_alignment": cudnn.diagonal_alignment.BOTTOM_RIGHT, "diagonal_band_right_bound": 0}
        if spec.sliding_window is not None:
            band["diagonal_band_left_bound"] = spec.sliding_window
    results, _ = graph.sdpa(
        name="sdpa",
        q=queries,
        k=names[1],
        v=names[2],
        is_inference=True,
        attn_scale=spec.softmax_scale,
        use_padding_mask=True,
        seq_len_q=names[5],
        seq_len_kv=names[6],
        paged_attention_k_table=names[3],
        paged_attention_v_table=names[4],
        paged_attention_max_seq_len_kv=case.bounds["max_seq_len"],
        **band,
    )
    results.set_output(True).set_dim(shape).set_stride(strides)
    if is_packed:
        results.set_ragged_offset(names[0])
    graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    workspace = torch.empty(max(1, graph.get_workspace_size()), dtype=torch.uint8, device=q.device)
    handle = cudnn.create_handle()
    fixed = {queries: q, results: out, names[1]: k, names[2]: v, names[5]: query_lens, names[6]: seq_lens}
    if is_packed:
        fixed[names[0]] = starts

    def run(tensors: dict[Any, torch.Tensor]) -> None:
        cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        graph.execute(tensors, workspace, handle=handle)

    def plan(table: torch.Tensor) -> Call:
        paged = table[:, None, :, None]
        return partial(run, fixed | {names[3]: paged, names[4]: paged})

    return plan
