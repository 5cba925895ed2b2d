"""The GPU suite is itself tested: in a copy of the package with one place of the Hopper kernel broken, it must fail.

Nothing but a Hopper GPU runs this kernel. No mutant here breaks a barrier: it would hang the GPU instead of failing.
"""

from collections.abc import Iterator

import pytest
import torch

from quire.dispatch.device import device_properties
from tests.mutations.server import Mutant, Server

if not (torch.cuda.is_available() and device_properties(torch.device("cuda")).has_wgmma):
    pytest.skip("the Hopper kernel runs on Hopper GPUs alone", allow_module_level=True)

KERNEL, PRODUCER = "kernels/hopper/kernel.py", "kernels/hopper/producer.py"
GATHER = "kernels/hopper/gather.py"
HOPPER = "gpu/test_hopper.py::test_"
CAUSAL, WINDOW = HOPPER + "features[{}-64-dtype0]", HOPPER + "features[{'sliding_window': 100}-64-dtype0]"
EDGES = HOPPER + "tiles_at_whose_edges_intervals_begin_and_end"
MUTANTS = {
    "a key past the diagonal seen": Mutant(
        KERNEL,
        "gl.minimum(q_pos + scoring.window_right, work.seq_len - 1)",
        "gl.minimum(q_pos + 1 + scoring.window_right, work.seq_len - 1)",
        CAUSAL,
    ),
    "full tiles a key too far": Mutant(
        KERNEL,
        "gl.minimum(low_pos + scoring.window_right + 1, work.seq_len)",
        "gl.minimum(low_pos + scoring.window_right + 2, work.seq_len)",
        HOPPER + "a_prompt_that_begins_two_keys_before_the_end_of_a_tile",
    ),
    "full tiles by the first row's window": Mutant(
        KERNEL, "(pos < high_pos - scoring.window_left)", "(pos < low_pos - scoring.window_left)", WINDOW
    ),
    "denominator not rescaled": Mutant(
        KERNEL, "l_i * alpha + gl.sum(p, 1), alpha", "l_i + gl.sum(p, 1), alpha", CAUSAL
    ),
    "values before the window not zeroed": Mutant(
        PRODUCER, "((kv_pos >= kv_low) & (kv_pos < kv_high))[:, None]", "(kv_pos < kv_high)[:, None]", WINDOW
    ),
    "boxes of a tile from one slot": Mutant(
        PRODUCER, "row + (pos + box * KV_BOX) % PAGE_SIZE", "row + pos % PAGE_SIZE", HOPPER + "pages[NHD-24]"
    ),
    "gathered rows before the window": Mutant(
        GATHER,
        "mask=(kv_pos >= kv_low) & (kv_pos < stop)",
        "mask=(kv_pos < stop)",
        HOPPER + "features_of_gathered_rows[{'sliding_window': 100}-64-1]",
    ),
    "gathered rows past the sequence": Mutant(
        PRODUCER,
        "pages = load_pages_of_rows(row, k_pipe, pos, kv_high, kv_low, PAGE_SIZE)",
        "pages = load_pages_of_rows(row, k_pipe, pos, pos + BLOCK_N, kv_low, PAGE_SIZE)",
        HOPPER + "features_of_gathered_rows[{}-64-4]",
    ),
    "gathered rows from the first slot of a page": Mutant(
        GATHER, "slots = rows % PAGE_SIZE", "slots = rows * 0", HOPPER + "pages[NHD-4]"
    ),
    "gathered rows of pages that divide no tile, from its first slot": Mutant(
        GATHER, "slots = (pos + rows) % PAGE_SIZE", "slots = rows % PAGE_SIZE", HOPPER + "pages[NHD-3]"
    ),
    "gathered rows of the first head": Mutant(
        GATHER, "(head * (stride_head // VEC))", "(head * 0)", HOPPER + "pages[HND-2]"
    ),
    "intervals with a key more": Mutant(
        KERNEL, "Sight(begin, end - 1, keys", "Sight(begin, end, keys", HOPPER + "every_kind_of_interval[causal-64]"
    ),
    "full tiles of intervals a key too far": Mutant(
        KERNEL, "> sight.full_stop)", "> sight.full_stop + 1)", EDGES + "[None-{}]"
    ),
    "full tiles of intervals a key too early": Mutant(
        KERNEL, "(pos < sight.full_start)", "(pos + 1 < sight.full_start)", EDGES + "[None-{}]"
    ),
    "values outside of intervals not zeroed": Mutant(
        PRODUCER, "kv_low, kv_high = keys.kv_low, keys.kv_high", "kv_low, kv_high = 0, seq_len", EDGES + "[None-{}]"
    ),
    "values outside of intervals converted": Mutant(
        "kernels/hopper/convert.py",
        "kv_low, kv_high = keys.kv_low, keys.kv_high",
        "kv_low, kv_high = 0, work.seq_len",
        EDGES + "[None-{'kv_dtype': torch.float8_e4m3fn}]",
    ),
    "intervals of the first row block": Mutant(
        KERNEL,
        "work.q_start + tokens, tokens < work.q_len",
        "work.q_start + rows % BLOCK_T, tokens < work.q_len",
        HOPPER + "every_kind_of_interval[causal-64]",
    ),
    "gathered values of the next tile": Mutant(
        PRODUCER,
        "v_source, kv_head, v_pipe, tile_i, pages_of_rows,",
        "v_source, kv_head, v_pipe, tile_i, pages,",
        HOPPER + "pages[NHD-1]",
    ),
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_is_noticed(name, server):
    verdict = server.judge(MUTANTS[name])
    assert verdict.noticed, f"{MUTANTS[name].judge} ended with {verdict.status}\n{verdict.output}"
