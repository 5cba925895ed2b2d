"""The mutants: each one place of the package, broken, and the tests that must notice."""

from tests.mutations.server import Mutant

ATTENTION = "kernels/test_attention.py::test_"
COPY, WRITE, MERGE = "kernels/test_copy.py", "kernels/test_write.py", "kernels/test_merge.py"
FULL_TILES = ATTENTION + "full_tiles_in_a_loop_without_masks"
LONG = ATTENTION + "splits_of_long_sequences"
OFFSETS = "kernels/test_offsets.py::test_far_strides_reach_what_they_say"

IN_INTERPRETER = {
    # primitives.py
    "causal mask dropped": Mutant("kernels/primitives.py", "(kv_pos[None, :] <= last[:, None])", "(kv_pos[None, :] < 1000000)", ATTENTION + "features[causal-1]"),
    "window off by one": Mutant("kernels/primitives.py", "(kv_pos[None, :] >= first[:, None])", "(kv_pos[None, :] > first[:, None])", ATTENTION + "features[window-1]"),
    "values not masked": Mutant("kernels/primitives.py", "tl.load(ptrs, mask=keep[:, None], other=0.0)", "tl.load(ptrs)", ATTENTION + "features[causal-1]"),
    "rescale dropped": Mutant("kernels/primitives.py", "v, acc * alpha[:, None], input_precision", "v, acc, input_precision", LONG + "[1]"),
    "denominator not rescaled": Mutant("kernels/primitives.py", "l_i = l_i * alpha + tl.sum(p, 1)", "l_i = l_i + tl.sum(p, 1)", LONG + "[1]"),
    "states added without weights": Mutant("kernels/primitives.py", "tl.fma(l_i, alpha, other_l * beta)", "l_i + other_l", MERGE + "::test_any_tree_shape"),
    "sink forgotten": Mutant("kernels/primitives.py", "sink, tl.zeros_like(sink) + 1.0)", "sink, tl.zeros_like(sink))", ATTENTION + "features[sinks-1]"),
    "odd dims of fp8 pairs dropped": Mutant("kernels/primitives.py", "tl.dot(q_odd, tl.trans(k_odd), tl.dot(q_even, tl.trans(k_even)))", "tl.dot(q_even, tl.trans(k_even))", "kernels/test_attention.py::test_fp8_in_pairs"),
    "page stride ignored": Mutant("kernels/primitives.py", "(page * kv.k_page + kv_head * kv.k_head)", "(page * kv.k_slot + kv_head * kv.k_head)", ATTENTION + "features[causal-1]"),
    "pages past the last key read": Mutant("kernels/primitives.py", "tl.load(row + pos // PAGE_SIZE, mask=pos < kv_stop, other=0)", "tl.load(row + pos // PAGE_SIZE)", "kernels/test_primitives.py"),
    "pages before the window read": Mutant("kernels/primitives.py", "mask=(kv_pos >= kv_start) & (kv_pos < kv_stop), other=0)", "mask=kv_pos < kv_stop, other=0)", "kernels/test_primitives.py"),
    "small values scaled in float16": Mutant("kernels/primitives.py", "T.TOKEN_SCALES and q.dtype == tl.float16 if", "False if", ATTENTION + "small_values_survive_scales_per_token"),
    "NaN taken for no key": Mutant("kernels/primitives.py", "empty = l_i == 0.0", "empty = (l_i > 0.0) == 0", ATTENTION + "a_query_of_nan_gives_nan[False-1]"),
    "K's head offset in int32": Mutant("kernels/block/kernel.py", "kv_head = (pid % NUM_KV_HEADS).to(tl.int64)", "kv_head = pid % NUM_KV_HEADS", OFFSETS + "[heads]"),
    "slots in int32": Mutant("kernels/primitives.py", "slot, offs_d, offs_dv = slot.to(tl.int64),", "_, offs_d, offs_dv = slot.to(tl.int64),", OFFSETS + "[tokens]"),
    "query heads in int32": Mutant("kernels/primitives.py", "head = (kv_head * GROUP + row % GROUP).to(tl.int64)", "head = (kv_head * GROUP + row % GROUP).to(tl.int32)", OFFSETS + "[query heads]"),
    # block/
    "full tiles end a key late": Mutant("kernels/block/kernel.py", "full_stop = tl.maximum(tl.minimum(low_pos + window_right + 1, seq_len), 0)", "full_stop = tl.maximum(tl.minimum(low_pos + window_right + 2, seq_len), 0)", FULL_TILES),
    "full tiles begin by the first row's window": Mutant("kernels/block/kernel.py", "tl.maximum(high_pos - window_left, 0)", "tl.maximum(low_pos - window_left, 0)", FULL_TILES),
    "full tiles past the last key": Mutant("kernels/block/kernel.py", "full_stop = tl.maximum(tl.minimum(low_pos + window_right + 1, seq_len), 0)", "full_stop = tl.maximum(low_pos + window_right + 1, 0)", FULL_TILES),
    "a block's last tile forgotten": Mutant("kernels/block/kernel.py", "tl.range(1, 1 + num_before + stop - full_stop)", "tl.range(1, num_before + stop - full_stop)", ATTENTION + "features[causal-1]"),
    "a row block too many searched": Mutant("kernels/block/kernel.py", "GROUP // BLOCK_M + middle <= row_block", "GROUP // BLOCK_M + middle < row_block", ATTENTION + "features[causal-1]"),
    # split_kv/
    "full tiles of a partition end a token late": Mutant("kernels/split_kv/kernel.py", "tl.minimum(low_pos + window_right + 1, kv_stop)", "tl.minimum(low_pos + window_right + 2, kv_stop)", ATTENTION + "the_loop_without_masks_ends_where_the_first_draft_s_keys_end"),
    "full tiles of a partition by the last row": Mutant("kernels/split_kv/kernel.py", "low_pos = first_pos + row_block * BLOCK_M // GROUP", "low_pos = first_pos + 1 + row_block * BLOCK_M // GROUP", ATTENTION + "the_loop_without_masks_ends_where_the_first_draft_s_keys_end"),
    "full tiles of a partition before the window": Mutant("kernels/split_kv/kernel.py", " & (high_pos - window_left <= begin * BLOCK_N)", "", ATTENTION + "drafts_on_long_sequences[16-2-450]"),
    "the first partial from the wrong slot": Mutant("kernels/split_kv/kernel.py", "                    2 * first_partition + 1,\n", "                    2 * first_partition,\n", LONG + "[7]"),
    "a partial forgotten": Mutant("kernels/split_kv/kernel.py", "- first_partition + 1\n", "- first_partition\n", LONG + "[7]"),
    "a partition cut short": Mutant("kernels/split_kv/schedule.py", "high = tl.minimum(low + size, total)", "high = tl.minimum(low + size, total - 1)", LONG + "[7]"),
    "sequences found one too late": Mutant("kernels/split_kv/schedule.py", "before = ends <= unit", "before = ends < unit", LONG + "[7]"),
    "the shortest partition by another formula": Mutant("kernels/split_kv/schedule.py", "mean > S.TWO_LEVEL_MIN_TILES", "mean >= S.TWO_LEVEL_MIN_TILES", "kernels/test_schedule.py"),
    "the host's shortest partition by another formula": Mutant("kernels/split_kv/launch.py", "math.sqrt(mean * cost)", "math.sqrt(mean) * cost", "kernels/test_schedule.py"),
    "partials combined without weights": Mutant("kernels/split_kv/reduce.py", "acc += accs[i] * alpha[:, None]", "acc += accs[i]", LONG + "[7]"),
    "a counter left as it is": Mutant("kernels/split_kv/reduce.py", "tl.store(scratch.counter + counter, 0)", "tl.store(scratch.counter + counter, num_arrivals)", "kernels/test_attention.py::test_runs_are_bitwise_equal"),
    "the tail of a round counted twice": Mutant("kernels/split_kv/reduce.py", "present = (first + i + 0 * offs_r) < num_partials", "present = (first + 0 * offs_r) < num_partials", LONG + "[7]"),
    "splits of a fixed size added in another order": Mutant("kernels/split_kv/kernel.py", "acc, m_i, l_i = combine(acc, m_i, l_i, split_acc, split_m, split_l, PACKED_FP8)", "acc, m_i, l_i = combine(split_acc, split_m, split_l, acc, m_i, l_i, PACKED_FP8)", "kernels/test_invariance.py"),
    # combine.py
    "an lse of +inf taken for a weight": Mutant("kernels/combine.py", "empty = tl.abs(other_lse) == float(\"inf\")", "empty = other_lse == float(\"-inf\")", MERGE + "::test_a_state_with_an_infinite_lse_is_empty"),
    "what an empty state holds is read": Mutant("kernels/combine.py", "held = (~empty)[:, None] & (offs_dv < HEAD_DIM_V)[None, :]", "held = (~empty | empty)[:, None] & (offs_dv < HEAD_DIM_V)[None, :]", MERGE + "::test_what_an_empty_state_holds_does_not_matter"),
    "lse in base 2": Mutant("kernels/combine.py", "other_lse * LOG2E)", "other_lse)", MERGE + "::test_any_tree_shape"),
    "a token of no sequence combined": Mutant("kernels/combine.py", "if token >= tl.load(cu_seqlens_q + num_seqs):", "if token > tl.load(cu_seqlens_q + num_seqs):", MERGE + "::test_states_side_by_side_merge_into_tensors_of_any_stride"),
    "states in int32": Mutant("kernels/combine.py", "out_ptrs + tl.cast(i, tl.int64) * stride_state", "out_ptrs + tl.cast(i * stride_state, tl.int32)", OFFSETS + "[combine]"),
    # copy.py
    "a negative destination copied to": Mutant("kernels/copy.py", "if (from_page < 0) | (to_page < 0):", "if from_page < 0:", COPY),
    "pages copied backwards": Mutant("kernels/copy.py", "from_page = tl.load(page_pairs + 2 * pair)", "from_page = tl.load(page_pairs + 2 * pair + 1)", COPY),
    "V's scales copied from K's": Mutant("kernels/copy.py", "copy_tile(v_scale, from_page", "copy_tile(k_scale, from_page", COPY),
    "the source's strides in the target": Mutant("kernels/copy.py", "i1 * t.target_1", "i1 * t.source_1", COPY),
    "dimensions joined that do not lie side by side": Mutant("kernels/copy.py", "dims[-1][1:] == (size * step, size * target_step)", "dims[-1][1] == size * step", COPY),
    # write.py
    "slots written elsewhere": Mutant("kernels/write.py", "position // PAGE_SIZE, position % PAGE_SIZE", "position // PAGE_SIZE, (position + 1) % PAGE_SIZE", WRITE + "::test_pages_of_any_size"),
    "padding written": Mutant("kernels/write.py", "if position < 0:", "if position < -1:", WRITE + "::test_nothing_to_write"),
    "V quantised by K's scale": Mutant("kernels/write.py", "        v_vec, v_scale, offs_scale", "        v_vec, k_scale, offs_scale", WRITE + "::test_quantised_values_are_the_nearest"),
    "infinity taken for the largest": Mutant("kernels/write.py", "tl.where(tl.abs(x) < float(\"inf\"), tl.abs(x), 0.0)", "tl.abs(x)", WRITE + "::test_a_token_s_scale_minds_neither_what_is_not_finite_nor_what_is_next_to_nothing"),
    # mods.py
    "softcap without its cap": Mutant("kernels/mods.py", "return cap * tanh(scores / cap)", "return tanh(scores / cap)", ATTENTION + "features[softcap-1]"),
    "tanh's series cut": Mutant("kernels/mods.py", "x2 * (2.0 / 15 + ", "x2 * (2.0 / 16 + ", "kernels/test_mods.py"),
    "ALiBi ahead as a bonus": Mutant("kernels/mods.py", "tl.abs(q_pos[:, None] - kv_pos[None, :])", "(q_pos[:, None] - kv_pos[None, :])", ATTENTION + "features[alibi\u0020bidirectional-1]"),
    "softcap after ALiBi": Mutant("kernels/mods.py", "return alibi(softcap(scores, q_pos, kv_pos, slopes, cap), q_pos, kv_pos, slopes, cap)", "return softcap(alibi(scores, q_pos, kv_pos, slopes, cap), q_pos, kv_pos, slopes, cap)", ATTENTION + "features[everything-1]"),
    "int8 down to -128": Mutant("kernels/mods.py", "tl.maximum(x, -127.0)", "tl.maximum(x, -128.0)", WRITE + "::test_ties_subnormals_and_any_bits_of_float32"),
    "fp8 rounded half up": Mutant("kernels/mods.py", "((1 << (DROP - 1)) - 1) + ((wide >> DROP) & 1)", "(1 << (DROP - 1))", WRITE + "::test_ties_subnormals_and_any_bits_of_float32"),
    "e4m3 without its bias": Mutant("kernels/mods.py", ".to(tl.float32) * 256.0", ".to(tl.float32) * 128.0", ATTENTION + "quantised_caches"),
    "e4m3 pairs in the wrong order": Mutant("kernels/mods.py", "return even.to(tl.float16, bitcast=True) * 256.0, odd.to(tl.float16, bitcast=True) * 256.0", "return odd.to(tl.float16, bitcast=True) * 256.0, even.to(tl.float16, bitcast=True) * 256.0", "kernels/test_attention.py::test_fp8_in_pairs"),
    # host
    "offsets never wide": Mutant("cache.py", "(slots - 1) * s.slot + (dim // s.vec_size - 1) * s.vec + s.vec_size > 1 << 31", "False", OFFSETS + "[tokens]"),
    "a plan's other strides": Mutant("kernels/portable.py", "key = cache.kind, q.stride(), out.stride()", "key = cache.kind, q.stride(), q.stride()", "compile/test_relaunch.py"),
}  # fmt: skip

OUTSIDE: dict[str, Mutant] = {}
