"""Variants: all launches of a request give the same result, and the sweep times those that do."""

import pytest
import torch

from quire.dispatch.device import interprets
from quire.spec import AttentionSpec
from quire_tools.tuning.drawn import DrawnCase
from quire_tools.tuning.timing import Session

if not interprets():
    pytest.skip("variants run in Triton's interpreter here", allow_module_level=True)
pytestmark = pytest.mark.slow

HALF = {"dtype": torch.float16}
LAYERS = {
    "decode": (AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, **HALF), ((1, 700), (1, 40), (1, 7))),
    "ragged": (AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, **HALF), ((20, 100), (1, 40), (3, 7))),
    "window": (AttentionSpec(num_q_heads=4, num_kv_heads=1, head_dim=128, sliding_window=30, **HALF), ((2, 100),) * 2),
    "invariant": (AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=64, **HALF), ((20, 300), (1, 40), (3, 7))),
    "e4m3": (
        AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=32, kv_dtype=torch.float8_e4m3fn, **HALF),
        ((1, 100), (1, 40)),
    ),
    "latents": (
        AttentionSpec.mla(num_q_heads=4, softmax_scale=0.1, kv_lora_rank=64, qk_rope_head_dim=16, **HALF),
        ((2, 100), (2, 60)),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_all_variants_of_a_request_give_the_same_result(name):
    spec, lens = LAYERS[name]
    session = Session(DrawnCase(name, spec, 16, lens, name == "invariant"), torch.device("cpu"))
    for variant in session.launches:
        session.prepare(variant)
    assert not session.wrong and len(session.launches) > 1
    assert all(ready.error < 0.01 for ready in session.ready.values())
    session.time_all(1.0)
    assert all(found.get("micros", found.get("rough")) > 0 for found in session.times().values())
