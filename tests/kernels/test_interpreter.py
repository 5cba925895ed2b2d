"""What `tests/interpreter.py` leaves out of Triton's interpreter changes no bit of a result."""

import subprocess
import sys
from pathlib import Path

import pytest

from quire.dispatch.device import interprets

ATTEND = """
import hashlib, torch, quire
from quire.testing import make_problem

fp8 = dict(kv_dtype=torch.float8_e4m3fn)
features = dict(softcap=3.0, alibi=True, sinks=True, sliding_window=11)
specs = (
    quire.AttentionSpec(num_q_heads=6, num_kv_heads=2, head_dim=16, dtype=torch.float16, **features, **fp8),
    quire.AttentionSpec.mla(
        num_q_heads=3, softmax_scale=0.2, kv_lora_rank=32, qk_rope_head_dim=16, dtype=torch.float32, **features
    ),
)
digest = hashlib.sha256()
for spec in specs:
    scales = "head" if spec.latent else "token"
    p = make_problem(spec, ((3, 20), (1, 9), (1, 0)), page_size=5, scales=scales)
    plan = quire.plan(spec, p.batch, **p.bounds, num_splits=2)
    state = quire.attention(p.q, p.cache, plan, **p.tables, return_lse=True)
    digest.update(state.out.float().numpy().tobytes() + state.lse.numpy().tobytes())
digest = digest.hexdigest()
"""


@pytest.mark.slow
@pytest.mark.skipif(not interprets(), reason="needs TRITON_INTERPRET=1")
def test_the_faster_interpreter_computes_the_same_bits():
    """Triton's own interpreter computes in another process."""
    root = Path(__file__).parent.parent.parent
    command = [sys.executable, "-W", "ignore", "-c", ATTEND + "print(digest)"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    here: dict = {}
    exec(ATTEND, here)
    assert here["digest"] == done.stdout.strip()
