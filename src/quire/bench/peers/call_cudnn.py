"""cuDNN, by its Python front end."""

from functools import partial
from typing import Any

import torch

from quire.bench.inputs import Inputs
from quire.bench.measure import Call, Planner
from quire.bench.peers.arguments import refuse, refuse_other_values, refuse_special_dtypes_and_scores


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
