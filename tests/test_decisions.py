"""Which launch is chosen for a request does not change unless it is meant to."""

import json

from quire.dispatch.tree import forget_trees
from tests.decisions import RECORDED, decisions


def test_requests_are_decided_as_they_were(tmp_path, monkeypatch):
    """If they are meant to be decided otherwise, `python -m tests.decisions` records them, and its diff says how."""
    monkeypatch.setenv("HOME", str(tmp_path))  # without trees of the user's
    forget_trees()
    found = decisions()
    recorded = json.loads(RECORDED.read_text())
    assert found.keys() == recorded.keys()
    changed = {request: (recorded[request], now) for request, now in found.items() if now != recorded[request]}
    assert not changed, "\n".join(f"{request}\n  was {was}\n  is  {now}" for request, (was, now) in changed.items())
    kernels = {words.split(",")[0] for words in found.values()}
    assert kernels == {"block", "split_kv", "hopper", "mla", "mla_hopper"}
