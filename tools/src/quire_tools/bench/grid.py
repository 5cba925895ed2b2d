"""Cases drawn at random from the space that attention serves, by `quire.drawn`: `quire bench run --grid`."""

from dataclasses import replace

from quire.drawn import Drawn, Limits, heads_of
from quire.drawn import draw as draw_batches
from quire_tools.bench.case import Case, Kind, Model

MEASURED = Limits(num_seqs=256, queries=4096, context=60_000, nbytes=256 << 20, flops=2 * 10**12)
DRAFTS = 16  # queries of a sequence up to which a batch counts as draft tokens


def draw(count: int, seed: int, limits: Limits = MEASURED, latents: bool = False) -> list[Case]:
    """Return the first `count` cases of a seed; see `quire.drawn.draw`."""
    return [as_case(batch) for batch in draw_batches(count, seed, limits, latents)]


def as_case(batch: Drawn) -> Case:
    """Return a batch as a case."""
    spec = batch.spec
    layer = Model(
        spec.num_q_heads,
        spec.num_kv_heads,
        spec.head_dim,
        sliding_window=spec.sliding_window,
        sinks=spec.sinks,
        head_dim_v=None if spec.head_dim_v == spec.head_dim else spec.head_dim_v,
        softmax_scale=spec.softmax_scale if spec.latent else None,
        latent=spec.latent,
        softcap=spec.softcap,
    )
    case = Case(batch.name, "decode", batch.lens, heads_of(spec), batch.page_size, layer=layer)
    if spec.kv_dtype is not spec.dtype:
        case = replace(case, kv_dtype=str(spec.kv_dtype).removeprefix("torch."))
    return replace(case, kind="MLA decode" if spec.latent else kind_of(case))


def kind_of(case: Case) -> Kind:
    """Return the kind of a batch."""
    queries = case.query_lens
    if max(queries) == 1:
        return "decode"
    if case.query_lens == case.seq_lens:
        return "prefill"
    if min(queries) == 1:
        return "mixed"
    return "drafts" if max(queries) <= DRAFTS else "chunk"
