"""Unions of the lists of neighbouring tokens: `unite_lists_kernel` against sets, in the interpreter or on a GPU."""

from functools import partial

import numpy as np
import pytest
import torch

import quire
from quire.dispatch.device import interprets
from quire.testing import make_problem, random_chosen

if not (interprets() or torch.cuda.is_available()):
    pytest.skip("a Triton kernel", allow_module_level=True)

from quire.kernels.chosen_hopper.launch import NEW
from quire.kernels.chosen_hopper.unions import unite_lists_kernel

SHAPES = ((9, 90), (1, 40), (0, 7), (6, 200), (3, 3))
WORDS, ROOM = 90, 400
LISTS = {
    "positions": {"width": 60, "shared": 0.8},
    "slots, counted": {"width": 60, "shared": 0.8, "slots_of": 16, "counted": True},
    "in several blocks": {"width": 150, "shared": 0.7},
    "little in common": {"width": 60, "counted": True},
    "no entries": {"width": 0},
}


def slots_of(p, token):
    """Return the slots that a token's list names and the token sees, in the order of entries."""
    chosen, starts = p.batch.chosen, p.batch.query_starts.tolist()
    count = chosen.width if chosen.lens is None else int(chosen.lens[token])
    entries = chosen.indices[token, :count].tolist()
    if chosen.are_slots:
        return [entry for entry in entries if entry >= 0], count
    seq = next(s for s in range(p.batch.num_seqs) if starts[s] <= token < starts[s + 1])
    keys, size = int(p.batch.seq_lens[seq]), p.cache.page_size
    end = keys - (starts[seq + 1] - 1 - token) if p.spec.causal else keys
    return [
        int(p.batch.page_table[seq, e // size]) * size + e % size for e in entries if 0 <= e < end
    ], count  # fmt: skip


def union_of(p, tokens):
    """Return entries, as slots and the tokens that name them, or None where the tokens have little in common."""
    owners, most = {}, 0
    for i, token in enumerate(tokens):
        slots, count = slots_of(p, token)
        for slot in slots:
            owners[slot] = owners.get(slot, 0) | 1 << i
        most += count if i == 0 else count * NEW // 16
        if len(owners) > most:
            return None
    return list(owners.items())


@pytest.mark.parametrize("lists", LISTS)
@pytest.mark.parametrize(("union", "programs", "causal"), [(4, 1, True), (4, 3, False), (2, 2, True), (3, 9, True)])
def test_an_entry_says_which_tokens_name_its_slot(device, lists, union, programs, causal):
    """In the order in which tokens name them first. All bitmaps are clear afterwards, and nothing else is written."""
    causal = causal and "slots_of" not in LISTS[lists]
    spec = quire.AttentionSpec.mla(num_q_heads=2, softmax_scale=0.1, dtype=torch.float32, causal=causal)
    choose = partial(random_chosen, causal=causal, **LISTS[lists])
    p = make_problem(spec, SHAPES, device=device, per_token=choose, page_size=16)
    batch, chosen, tokens = p.batch, p.batch.chosen, sum(q for q, _ in SHAPES)
    unions, ints = -(-tokens // union), {"dtype": torch.int32, "device": device}
    entries, counts = torch.full((unions + 1, ROOM), -7, **ints), torch.full((unions + 1,), -7, **ints)
    maps = torch.full((programs + 1, WORDS), 5, **ints)  # memory that is cleared first
    assert p.cache.latents.shape[0] * 16 <= 8 * WORDS
    table, stride = (None, 0) if chosen.are_slots else (batch.page_table, batch.page_table.stride(0))
    unite_lists_kernel[programs,](
        chosen.indices, tokens, WORDS, entries, counts, maps, ROOM, table, batch.seq_lens, batch.cu_seqlens_q, None,
        batch.num_seqs, chosen.lens, chosen.width, chosen.indices.stride(0), 1, int(causal), stride,
        PAGE_SIZE=16, UNION=union, BLOCK=64, PDL=False,
    )  # fmt: skip
    found = []
    for i in range(unions):
        wanted = union_of(p, range(i * union, min(tokens, (i + 1) * union)))
        found.append(wanted)
        if wanted is None:
            assert counts[i] == -1
            continue
        assert counts[i] == len(wanted)
        got = entries[i, : len(wanted)].tolist()
        assert [(entry >> union, entry & (1 << union) - 1) for entry in got] == wanted
    assert (counts[unions:] == -7).all() and (entries[unions:] == -7).all() and (maps[programs:] == 5).all()
    assert not maps[:programs].any()
    if lists == "little in common":
        assert None in found
    elif lists != "no entries":
        assert any(found) and np.mean([each is None for each in found]) < 0.5
