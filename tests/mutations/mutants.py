"""The mutants: each one place of the package, broken, and the tests that must notice."""

from tests.mutations.server import Mutant

ATTENTION = "kernels/test_attention.py::test_"
LATENT = "kernels/test_write_latent.py"
MLA = "kernels/test_mla.py::test_"
COPY, WRITE, MERGE = "kernels/test_copy.py", "kernels/test_write.py", "kernels/test_merge.py"
KEPT = "kernels/test_mma_sync.py::test_rows_keep_their_maxima_in_full_tiles"
FULL_TILES = ATTENTION + "full_tiles_in_a_loop_without_masks"
BAD_INPUT = "test_bad_input.py::test_"
INTERVALS, TREES = "kernels/test_intervals.py::test_", "kernels/test_draft_trees.py::test_"
RULES = INTERVALS + "every_rule_is_as_a_plain_program_says"
LONG = ATTENTION + "splits_of_long_sequences"
SPLITS, SCHEDULE = "kernels/schedule.py", "kernels/test_schedule.py::test_"
PARTS = SCHEDULE + "equal_partitions_of_a_batch_have_each_visible_tile_once"
STALE = SCHEDULE + "a_stale_schedule_gives_the_right_result_or_nan"
FOUND_AGAIN = SCHEDULE + "a_schedule_is_found_once_and_again_after_a_write_or_in_a_capture"
BY_A_SECOND_LAUNCH = (
    "kernels/test_combine_launch.py::test_partials_are_combined_by_the_last_program_or_by_a_second_launch"
)
HOW_SPLIT = "kernels/test_invariance.py::test_how_a_prompt_is_split_changes_nothing[{}]"
PROOF = "kernels/test_proof.py::test_"
CHUNKS_ALIKE = PROOF + "every_cut_of_a_context_into_chunks_has_one_tree[chunks]"
PARTITIONS_ALIKE = PROOF + "every_cut_of_splits_into_partitions_has_one_tree[four sums-{}]"
ALIKE = PROOF + "random_batches_have_the_trees_of_one_chunk[{}]"
SHARED = "kernels/test_shared_prefix.py::test_"
QUANTISED_OUT = "kernels/test_quantised_out.py::test_"
CHOSEN = "kernels/test_chosen.py::test_"
APPEND = "kernels/test_append.py::test_a_step_that_appends_is_a_write_and_a_step"
NORM_ROPE = "kernels/test_norm_rope.py::test_"
OFFSETS = "kernels/test_offsets.py::test_far_strides_reach_what_they_say"
ATTEND, SOFTMAX, LAZY_MAX, PRODUCER = (
    f"kernels/hopper/{name}.py" for name in ("attend", "softmax", "lazy_max", "producer")
)
RESCALE = "kernels/mla_hopper/rescale.py"
DECODED = "kernels/test_decoded.py::test_"
HOPPER = "gpu/test_hopper.py::test_"
PARTIALS, CUT = "kernels/hopper/partials.py", "kernels/test_cuts.py::test_"
ORDER = "kernels/test_order_of_work_tiles.py::test_"
SIMULATED, LATENTS = "kernels/test_hopper_simulator.py::test_", "kernels/mla_hopper/"
RAISED = SIMULATED + "a_maximum_is_raised_where_a_thread_adds_more_than_the_limit[dtype0-64-64-48-16]"
PRODUCTS = LATENTS + "many_rows_fp8.py"
GATHERED, CHOSEN_LATENTS = "kernels/mla_hopper/gather.py", SIMULATED + "chosen_keys_of_latents"
UNIONS = SIMULATED + "neighbouring_tokens_attend_to_the_union_of_their_lists"
UNITED = "kernels/chosen_hopper/unions.py"
ENTRIES = "kernels/test_unions.py::test_an_entry_says_which_tokens_name_its_slot"
BITS = "kernels/test_formats.py::test_"
ORDERS_OF_PRODUCTS = SIMULATED + "any_order_of_events_gives_the_same_bits_of_products_of_latents_in_fp8"

IN_INTERPRETER = {
    # decoded/
    "keys before a window, where a cache is decoded": Mutant(
        "kernels/decoded/kernel.py",
        "keep = (kv_pos >= start) & (kv_pos < stop)",
        "keep = kv_pos < stop",
        DECODED + "numbers_are_decoded_to_the_bits_of_the_reference",
    ),
    "a zero point that is not subtracted where a cache is decoded": Mutant(
        "kernels/decoded/kernel.py",
        "- (of_token * zero)[:, None]",
        "- (of_token * 0.0)[:, None]",
        DECODED + "numbers_are_decoded_to_the_bits_of_the_reference",
    ),
    "room of the sequences that were read before": Mutant(
        "kernels/decoded/kernel.py",
        "before += tl.sum(ours, 0)",
        "before += 0",
        DECODED + "more_sequences_than_are_read_at_once",
    ),
    # chosen/
    "a chosen key after the token": Mutant(
        "kernels/chosen/kernel.py",
        "end = tl.minimum(end, position + 1)",
        "end = tl.minimum(end, position + 2)",
        CHOSEN + "rows_see_what_lists_name[1-regions of 8-True]",
    ),
    "entries of a list that do not count": Mutant(
        "kernels/chosen/kernel.py",
        "mask=(n // N.BLOCK_SIZE < place.count) & is_first, other=-1",
        "mask=(n // N.BLOCK_SIZE <= place.count) & is_first, other=-1",
        CHOSEN + "rows_see_what_lists_name[1-counted-True]",
    ),
    "a negative entry taken for a key": Mutant(
        "kernels/chosen/kernel.py",
        "    keep = entry >= 0\n",
        "    keep = entry >= -1\n",
        CHOSEN + "rows_see_what_lists_name[1-one list-True]",
    ),
    "the list of another KV head": Mutant(
        "kernels/chosen/kernel.py",
        "lists.token + kv_head.to(tl.int64) * lists.head",
        "lists.token",
        CHOSEN + "rows_see_what_lists_name[1-a list for each head-True]",
    ),
    "the last tile of a part of a list": Mutant(
        "kernels/chosen/kernel.py",
        "tl.minimum((split + 1) * size, num_tiles)",
        "tl.minimum((split + 1) * size, num_tiles - 1)",
        CHOSEN + "parts_of_lists_are_combined[2-fields0]",
    ),
    "a part of a list that is not combined": Mutant(
        "kernels/chosen/kernel.py",
        "present = i < num_partials",
        "present = i < num_partials - 1",
        CHOSEN + "parts_of_lists_are_combined[2-fields0]",
    ),
    "tokens of no sequence are written": Mutant(
        "kernels/chosen/kernel.py",
        "owned = token < q_start + q_len",
        "owned = token >= 0",
        CHOSEN + "rows_of_no_sequence_are_left_as_they_are",
    ),
    # primitives.py
    "causal mask dropped": Mutant(
        "kernels/primitives.py",
        "(kv_pos[None, :] <= last[:, None])",
        "(kv_pos[None, :] < 1000000)",
        ATTENTION + "features[causal-1]",
    ),
    "window off by one": Mutant(
        "kernels/primitives.py",
        "(kv_pos[None, :] >= first[:, None])",
        "(kv_pos[None, :] > first[:, None])",
        ATTENTION + "features[window-1]",
    ),
    "values not masked": Mutant(
        "kernels/panels.py",
        "tl.load(ptrs, mask=rows, other=0.0)",
        "tl.load(ptrs)",
        ATTENTION + "features[causal-1]",
    ),
    "rescale dropped": Mutant(
        "kernels/states.py", "tl.fma(acc, alpha[:, None] + tl.zeros_like(acc), product)", "acc + product", LONG + "[1]"
    ),
    "rescale dropped, 16 bits": Mutant(
        "kernels/states.py",
        "v, acc * alpha[:, None], TURNED",
        "v, acc, TURNED",
        ATTENTION + "full_tiles_in_a_loop_without_masks[causal-dtype1]",
    ),
    "zero points of keys left out": Mutant(
        "kernels/codes.py",
        "(products - sums[:, None] * zero[None, :]) * scale",
        "products * scale",
        BITS + "attention_is_that_of_the_numbers[int4-NHD-dtype0-1]",
    ),
    "zero points of values left out": Mutant(
        "kernels/codes.py",
        "number - sums[:, None] if ZERO else number",
        "number",
        BITS + "attention_is_that_of_the_numbers[k8v4-NHD-dtype0-1]",
    ),
    "block scales of the first panel's half for all": Mutant(
        "kernels/codes.py",
        "load_tile(ptrs[:, None] + word[None, :]",
        "load_tile(ptrs[:, None] + 0 * word[None, :]",
        BITS + "attention_is_that_of_the_numbers[nvfp4-NHD-dtype0-1]",
    ),
    "the first of four block scales for all": Mutant(
        "kernels/codes.py",
        "// SIZE % AT_ONCE * 8",
        "// SIZE % AT_ONCE * 0",
        BITS + "fewer_rows_than_a_product_has[nvfp4-3]",
    ),
    "probabilities times scales beyond float16": Mutant(
        "kernels/codes.py",
        "tl.max(exponents + log2_scale[None, :], 1) - HEADROOM)",
        "tl.max(exponents, 1) - HEADROOM)",
        BITS + "scales_of_values_may_differ_by_any_factor[int4-dtype1]",
    ),
    "a range without 0": Mutant(
        "kernels/codes.py",
        "tl.minimum(tl.min(finite, 0), 0.0)",
        "tl.min(finite, 0)",
        BITS + "written_numbers_are_the_nearest_and_all_else_is_kept[int4-NHD-dtype0-64]",
    ),
    "denominator not rescaled": Mutant(
        "kernels/states.py",
        "return l_i * alpha[:, None] + sums_of_columns",
        "return l_i + sums_of_columns",
        LONG + "[2]",
    ),
    "denominator not rescaled, row blocks that are not cut": Mutant(
        "kernels/states.py",
        "return l_i * alpha + tl.sum(p, 1)",
        "return l_i + tl.sum(p, 1)",
        LONG + "[1]",
    ),
    "states added without weights": Mutant(
        "kernels/states.py", "tl.fma(l_i, alpha, other_l * beta)", "l_i + other_l", ATTENTION + "features[sinks-1]"
    ),
    "sums of merged states added without weights": Mutant(
        "kernels/states.py", "tl.sum(ls * betas, 0)", "tl.sum(ls, 0)", MERGE + "::test_any_tree_shape"
    ),
    "merged states not rescaled": Mutant(
        "kernels/states.py", "accs * betas[:, None]", "accs", MERGE + "::test_any_tree_shape"
    ),
    "sink forgotten": Mutant(
        "kernels/states.py",
        "sink, tl.zeros_like(sink) + 1.0)",
        "sink, tl.zeros_like(sink))",
        ATTENTION + "features[sinks-1]",
    ),
    "output not divided by its scale": Mutant(
        "kernels/states.py",
        "encode(out, tl.load(out_scale_ptr), mods.to_e4m3_in_software)",
        "encode(out, None, mods.to_e4m3_in_software)",
        QUANTISED_OUT + "a_float32_result_is_rounded_once[block]",
    ),
    "page stride ignored": Mutant(
        "kernels/primitives.py",
        "page * in_units(kv.k_page, T.STRIDE_UNIT)",
        "page * in_units(kv.k_slot, T.STRIDE_UNIT)",
        ATTENTION + "features[causal-1]",
    ),
    "pages past the last key read": Mutant(
        "kernels/primitives.py",
        "tl.load(row + pos // PAGE_SIZE, mask=pos < kv_stop, other=0)",
        "tl.load(row + pos // PAGE_SIZE)",
        "kernels/test_primitives.py",
    ),
    "pages before the window read": Mutant(
        "kernels/primitives.py",
        "mask=(kv_pos >= kv_start) & (kv_pos < kv_stop), other=0)",
        "mask=kv_pos < kv_stop, other=0)",
        "kernels/test_primitives.py",
    ),
    "NaN taken for no key": Mutant(
        "kernels/states.py",
        "empty = l_i == 0.0",
        "empty = (l_i > 0.0) == 0",
        ATTENTION + "a_query_of_nan_gives_nan[False-1]",
    ),
    "K's head offset in int32": Mutant(
        "kernels/primitives.py",
        "slot, kv_head = slot.to(tl.int64), kv_head.to(tl.int64)",
        "slot = slot.to(tl.int64)",
        OFFSETS + "[heads]",
    ),
    "slots in int32": Mutant(
        "kernels/primitives.py",
        "slot, kv_head = slot.to(tl.int64), kv_head.to(tl.int64)",
        "kv_head = kv_head.to(tl.int64)",
        OFFSETS + "[tokens]",
    ),
    # sequences without queries
    "keys of sequences without queries read": Mutant(
        SPLITS,
        "kv_stop = tl.where(q_len > 0, kv_stop, 0)",
        "pass",
        "kernels/test_idle_rows.py",
    ),
    # primitives.py: intervals and trees
    "drafts before the first key of a row not read": Mutant(
        "kernels/primitives.py",
        "first = tl.minimum(sight.begin, sight.end)",
        "first = sight.begin",
        TREES + "drafts_before_the_first_key_of_a_row_are_seen[1]",
    ),
    "intervals begin a key late": Mutant(
        "kernels/primitives.py",
        "(kv_pos[None, :] >= sight.begin[:, None])",
        "(kv_pos[None, :] > sight.begin[:, None])",
        INTERVALS + "every_kind_of_interval[chunks-1]",
    ),
    "intervals end a key late": Mutant(
        "kernels/primitives.py",
        "(kv_pos[None, :] < sight.end[:, None])",
        "(kv_pos[None, :] <= sight.end[:, None])",
        INTERVALS + "every_kind_of_interval[chunks-1]",
    ),
    "intervals past the sequence": Mutant(
        "kernels/primitives.py",
        "end = tl.minimum(tl.load(kv.key_end + rows.token, mask=rows.owned, other=0), seq_len)",
        "end = tl.load(kv.key_end + rows.token, mask=rows.owned, other=0)",
        INTERVALS + "decode_with_intervals[False-1]",
    ),
    "the first draft for all of the context": Mutant(
        "kernels/primitives.py",
        "(draft >= 0) & (draft < 64)",
        "(draft < 64)",
        TREES + "every_kind_of_tree[trees with a window-1]",
    ),
    "the 64th draft forgotten": Mutant(
        "kernels/primitives.py", "tl.maximum(draft, 0), 63)", "tl.maximum(draft, 0), 62)", TREES + "64_drafts[1]"
    ),
    # portable/
    "full tiles end a key late": Mutant(
        "kernels/primitives.py",
        "full_stop = tl.minimum(low_pos + scoring.window_right + 1, seq_len)",
        "full_stop = tl.minimum(low_pos + scoring.window_right + 2, seq_len)",
        FULL_TILES + "[causal-dtype0]",
    ),
    "full tiles begin by the first row's window": Mutant(
        "kernels/primitives.py",
        "full_start = high_pos - scoring.window_left",
        "full_start = low_pos - scoring.window_left",
        FULL_TILES + "[window-dtype0]",
    ),
    "full tiles past the last key": Mutant(
        "kernels/primitives.py",
        "full_stop = tl.minimum(low_pos + scoring.window_right + 1, seq_len)",
        "full_stop = low_pos + scoring.window_right + 1",
        ATTENTION + "the_loop_without_masks_ends_with_the_keys[200]",
    ),
    "a row block's last tile forgotten": Mutant(
        "kernels/portable/kernel.py",
        "begin, end = 1, 1 + num_before + stop - full_stop",
        "begin, end = 1, num_before + stop - full_stop",
        ATTENTION + "features[causal-1]",
    ),
    "sums too large go unnoticed": Mutant(
        "kernels/states.py",
        "tl.max(l_i, 0) > MOST_SUM",
        "tl.max(l_i, 0) < 0",
        KEPT + "[10.0-None-1]",
    ),
    "row blocks counted with the programs before them": Mutant(
        "kernels/portable/kernel.py",
        "seq, row_block = index - num_beside if BESIDE else index, 0",
        "seq, row_block = (index - num_beside) // 2 if BESIDE else index, 0",
        "kernels/test_mma_sync.py::test_rows_of_a_decoding_sequence_may_be_fewer_or_more_than_a_tile_has[3-128x32]",
    ),
    "the last row block forgotten": Mutant(
        "kernels/portable/kernel.py",
        "NUM_KV_HEADS - 1 - index",
        "NUM_KV_HEADS - index",
        "kernels/test_mma_sync.py::test_rows_of_a_decoding_sequence_may_be_fewer_or_more_than_a_tile_has[3-64x64]",
    ),
    "rows without a maximum keep it": Mutant(
        "kernels/portable/kernel.py",
        "tl.where(has_after | has_before, full_start",
        "tl.where(start <= stop, full_start",
        KEPT + "[0.25-None-2]",
    ),
    "a partial forgotten": Mutant(
        "kernels/portable/reduce.py", "- first_partition + 1\n", "- first_partition\n", LONG + "[7]"
    ),
    "MLA: a sequence has no time to begin": Mutant(
        SPLITS,
        "0, high - (end_place + overhead))",
        "0, high - end_place)",
        SCHEDULE + "equal_partitions_of_each_row_block_have_each_visible_tile_once[7-False]",
    ),
    "MLA: whole sequences begin in the partition before": Mutant(
        SPLITS,
        "(whole > 0) & (low > place)",
        "(whole > 0) & (low >= place)",
        SCHEDULE + "equal_partitions_of_each_row_block_have_each_visible_tile_once[1-True]",
    ),
    "MLA: the last whole sequence of a partition is left out": Mutant(
        SPLITS,
        "((whole > 0) & (high > end_place))",
        "(whole > 1)",
        SCHEDULE + "equal_partitions_of_each_row_block_have_each_visible_tile_once[1-True]",
    ),
    "MLA: barriers are used before they are ready": Mutant(
        "kernels/gluon/pipeline.py",
        "    wait(ready, 0)",
        "    wait(ready, 1)",
        "kernels/test_hopper_simulator.py::test_whole_sequences_of_latents_need_no_second_launch",
    ),
    "MLA: a second launch where no sequence is cut": Mutant(
        "kernels/mla_hopper/runner.py",
        "and not decided.whole",
        "and True",
        "kernels/test_hopper_simulator.py::test_whole_sequences_of_latents_need_no_second_launch",
    ),
    "Hopper: splits of a row block have the slots of another": Mutant(
        SPLITS,
        "first_slot = of_slots + (((in_cut >> of_place) * head_blocks) << of_place)",
        "first_slot = of_slots + (in_cut >> of_place << of_place)",
        SCHEDULE + "an_order_of_row_blocks_has_each_visible_tile_once[5]",
    ),
    "a partition cut short": Mutant(
        SPLITS,
        "low = index * size\n        high = tl.minimum(low + size, total)",
        "low = index * size\n        high = tl.minimum(low + size, total - 1)",
        LONG + "[7]",
    ),
    "sequences found one too late": Mutant(
        SPLITS, "seq_unit, ends, ends <= unit)", "seq_unit, ends, ends < unit)", LONG + "[7]"
    ),
    "the last row blocks of a sequence are those of another length": Mutant(
        SPLITS,
        "tl.where(is_last & (last_unit + last_units == high), NO_END, last_block)",
        "last_block",
        SCHEDULE + "queries_may_move_between_sequences_under_a_schedule",
    ),
    "a stale schedule gives numbers": Mutant(
        "kernels/portable/kernel.py",
        'tl.where(as_planned, 0.0, float("nan"))',
        "0.0",
        STALE + "[1-the last program combines]",
    ),
    "other lengths than planned go unnoticed": Mutant(
        "kernels/portable/kernel.py",
        "tl.where(as_planned, 0.0",
        "tl.where(planned == num_units, 0.0",
        STALE + "[1-the last program combines]",
    ),
    "MLA: a stale schedule gives numbers": Mutant(
        "kernels/mla/kernel.py",
        'tl.where(is_as_planned(sequence, known) & (planned == num_units), 0.0, float("nan"))',
        "0.0",
        MLA + "a_stale_schedule_gives_the_right_result_or_nan",
    ),
    "lengths that were written to are not read again": Mutant(
        "kernels/scheduler.py",
        "wanted = asked, capture_id(self.device), *self.versions()",
        "wanted = asked, capture_id(self.device)",
        FOUND_AGAIN,
    ),
    "a new plan with the schedule of one before": Mutant(
        "kernels/scheduler.py",
        "found.forget()",
        "pass",
        SCHEDULE + "plans_for_the_same_lengths_share_a_schedule_and_others_do_not",
    ),
    "a graph without its schedule": Mutant(
        "kernels/scheduler.py",
        "wanted = asked, capture_id(self.device), *self.versions()",
        "wanted = asked, 0, *self.versions()",
        FOUND_AGAIN,
    ),
    "partials combined without weights": Mutant(
        "kernels/portable/reduce.py", "acc += accs[i] * alpha[:, None]", "acc += accs[i]", LONG + "[7]"
    ),
    "a counter left as it is": Mutant(
        "kernels/portable/reduce.py",
        "tl.store(scratch.counter + counter, 0)",
        "tl.store(scratch.counter + counter, num_arrivals)",
        "kernels/test_attention.py::test_runs_are_bitwise_equal",
    ),
    "the tail of a round counted twice": Mutant(
        "kernels/portable/reduce.py",
        "present = (first + i + 0 * offs_r) < slots.num_partials",
        "present = (first + 0 * offs_r) < slots.num_partials",
        LONG + "[7]",
    ),
    "the sign of a zero": Mutant(
        "kernels/states.py",
        "(tl.fma(acc[i], inverse[:, None] + zeros, zeros),)",
        "(acc[i] * inverse[:, None],)",
        "kernels/test_invariance.py::test_a_zero_has_one_sign",
    ),
    "splits of a fixed size added in another order": Mutant(
        "kernels/portable/kernel.py",
        "fold_split(whole_acc, whole_m, whole_l, acc, m_i, l_i)",
        "fold_split(acc, m_i, total(l_i), whole_acc, whole_m, whole_l[:, None])",
        "kernels/test_invariance.py",
    ),
    # Of batch-invariant plans: each gives right results, by other additions in some launches.
    "proof: a split and those before it exchanged": Mutant(
        "kernels/states.py",
        "return combine(acc, m_i, l_i, split_acc, split_m, total(split_l))",
        "return combine(split_acc, split_m, total(split_l), acc, m_i, l_i)",
        PARTITIONS_ALIKE.format("cut"),
    ),
    "proof: a round of partials from its end": Mutant(
        "kernels/portable/reduce.py",
        "combine((acc,), m_i, l_i, (accs[i],), ms[i], ls[i])",
        "combine((acc,), m_i, l_i, (accs[WIDTH - 1 - i],), ms[WIDTH - 1 - i], ls[WIDTH - 1 - i])",
        PARTITIONS_ALIKE.format("cut"),
    ),
    "proof: another product rounded by the second launch": Mutant(
        "kernels/portable/combine.py",
        "acc = tl.fma(acc, alpha + tl.zeros_like(acc), accs[i] * beta)",
        "acc = tl.fma(accs[i], beta + tl.zeros_like(acc), acc * alpha)",
        PARTITIONS_ALIKE.format("joined"),
    ),
    "proof: states of a second launch from their end": Mutant(
        "kernels/portable/combine.py",
        "        alpha, beta = tl.exp2(m_i - shift), tl.exp2(ms[i] - shift)\n        acc =",
        "        i = len(ms) - 1 - i\n        m_new = tl.maximum(m_i, ms[i])\n"
        "        shift = tl.where(m_new == float('-inf'), 0.0, m_new)\n"
        "        alpha, beta = tl.exp2(m_i - shift), tl.exp2(ms[i] - shift)\n        acc =",
        PARTITIONS_ALIKE.format("joined"),
    ),
    "proof: a stored split's sums added by the layout": Mutant(
        "kernels/portable/kernel.py",
        "m_i, total(l_i), columns",
        "m_i, tl.sum(l_i, 1), columns",
        PARTITIONS_ALIKE.format("cut"),
    ),
    "proof: full tiles before others": Mutant(
        "kernels/portable/kernel.py",
        "IN_ORDER: tl.constexpr = (PARTITIONED and not KEEPS) or FIXED_SPLIT > 0",
        "IN_ORDER: tl.constexpr = PARTITIONED",
        ALIKE.format("window"),
    ),
    "proof: splits counted from the first tile": Mutant(
        "kernels/portable/kernel.py",
        "((tile + 1) % TILES == 0) | (tile == stop - 1)",
        "((tile + 1 - start) % TILES == 0) | (tile == stop - 1)",
        ALIKE.format("window"),
    ),
    "proof: sums of a group by the layout": Mutant(
        "kernels/states.py",
        "    for _ in tl.static_range(3):\n        p = tl.sum(tl.reshape(p, [p.shape[0], p.shape[1] // 2, 2]), 2)\n",
        "    p = tl.sum(tl.reshape(p, [p.shape[0], SUMS, 8]), 2)\n",
        CHUNKS_ALIKE,
    ),
    "proof: two additions exchanged in tiles of more rows": Mutant(
        "kernels/states.py",
        "    p = sums_of_columns(p, 8 * SUMS)\n",
        "    if p.shape[0] > 16:\n        return sums_of_columns(p, SUMS)\n    p = sums_of_columns(p, 8 * SUMS)\n",
        CHUNKS_ALIKE,
    ),
    "proof: values added to a product in tiles of more rows": Mutant(
        "kernels/states.py",
        "        return multiply(p, v, acc * alpha[:, None], TURNED, INPUT_PRECISION)\n",
        "        if acc.shape[0] > 16:\n"
        "            return acc * alpha[:, None] + multiply(p, v, None, TURNED, INPUT_PRECISION)\n"
        "        else:\n"
        "            return multiply(p, v, acc * alpha[:, None], TURNED, INPUT_PRECISION)\n",
        CHUNKS_ALIKE,
    ),
    "the last partial of a second launch left out": Mutant(
        SPLITS,
        "(unit + num_units - 1) // size - first + 1",
        "(unit + num_units - 1) // size - first",
        BY_A_SECOND_LAUNCH + "[decode-True]",
    ),
    "a prompt's splits are cut elsewhere than decode's": Mutant(
        "kernels/portable/kernel.py",
        "if ((tile + 1) % TILES == 0) | (tile == stop - 1):",
        "if ((tile + 1 + (not F.PARTITIONED)) % TILES == 0) | (tile == stop - 1):",
        HOW_SPLIT,
    ),
    # mla/
    "MLA: rotary columns forgotten": Mutant(
        "kernels/mla/kernel.py",
        "products = tl.dot(q_pe, tl.trans(r), input_precision=T.INPUT_PRECISION)",
        "products = 0.0 * tl.dot(q_pe, tl.trans(r), input_precision=T.INPUT_PRECISION)",
        MLA + "features[causal-1]",
    ),
    "MLA: causal mask dropped": Mutant(
        "kernels/mla/kernel.py",
        " & (kv_pos[None, :] <= high[:, None])",
        "",
        MLA + "features[causal-1]",
    ),
    "MLA: values of records without scales": Mutant(
        "kernels/mla/kernel.py",
        "weights = p * scales[i][None, :]",
        "weights = p",
        MLA + "records_with_scales_of_their_own[fp8_ds_mla-64-dtype1-False]",
    ),
    "MLA: one scale for both groups of a part": Mutant(
        "kernels/mla/kernel.py",
        "power = tl.where((share == i)[None, :], other, power)",
        "power = tl.where((share == i)[None, :], power, power)",
        CHOSEN + "latents_are_read[fields6-fp8_ds_mla_528-slots]",
    ),
    "MLA: rotary columns that are no values": Mutant(
        "kernels/mla/kernel.py",
        "parts = parts + (r,)",
        "parts = parts + (r * 0.0,)",
        CHOSEN + "latents_are_read[fields5-fp8_ds_mla_584-slots]",
    ),
    "MLA: denominators not rescaled": Mutant(
        "kernels/mla/kernel.py", "l_i = l_i * alpha[:, None] + p", "l_i = l_i + p", MLA + "features[causal-1]"
    ),
    "MLA: the last tile of a row block left out": Mutant(
        "kernels/mla/kernel.py",
        "tl.cdiv(tl.maximum(high_pos + window_right + 1, 0), BLOCK_N)",
        "tl.cdiv(tl.maximum(high_pos + window_right, 0), BLOCK_N)",
        MLA + "features[causal-1]",
    ),
    # combine.py
    "an lse of +inf taken for a weight": Mutant(
        "kernels/combine.py",
        'empty = tl.abs(other_lse) == float("inf")',
        'empty = other_lse == float("-inf")',
        MERGE + "::test_a_state_with_an_infinite_lse_is_empty",
    ),
    "what an empty state holds is read": Mutant(
        "kernels/combine.py",
        "other = tl.where(empty[:, None], 0.0, other.to(tl.float32))",
        "other = other.to(tl.float32)",
        MERGE + "::test_what_an_empty_state_holds_does_not_matter",
    ),
    "lse in base 2": Mutant("kernels/combine.py", "other_lse * LOG2E)", "other_lse)", MERGE + "::test_any_tree_shape"),
    "states in int32": Mutant(
        "kernels/combine.py",
        "outs + (i * stride_state)[:, None]",
        "outs + (i * stride_state).to(tl.int32)[:, None]",
        OFFSETS + "[combine]",
    ),
    # copy.py
    "pages copied backwards": Mutant(
        "kernels/copy.py",
        "from_page = tl.load(page_pairs + 2 * pair)",
        "from_page = tl.load(page_pairs + 2 * pair + 1)",
        COPY,
    ),
    "V's scales copied from K's": Mutant(
        "kernels/copy.py", "copy_tile(v_scale, from_page", "copy_tile(k_scale, from_page", COPY
    ),
    # write.py
    "slots written elsewhere": Mutant(
        "kernels/write.py",
        "position // PAGE_SIZE, position % PAGE_SIZE",
        "position // PAGE_SIZE, (position + 1) % PAGE_SIZE",
        WRITE + "::test_pages_of_any_size",
    ),
    "padding written": Mutant(
        "kernels/write.py", "if position < 0:", "if position < -1:", WRITE + "::test_nothing_to_write"
    ),
    "V quantised by K's scale": Mutant(
        "kernels/write.py",
        "v_vec, v_scale, offs_scale",
        "v_vec, k_scale, offs_scale",
        WRITE + "::test_quantised_values_are_the_nearest[kv_dtype2-dtype0-head-NHD]",
    ),
    # mods.py
    "softcap without its cap": Mutant(
        "kernels/mods.py",
        "return cap * tanh(scores * scale / cap)",
        "return tanh(scores * scale / cap)",
        ATTENTION + "features[softcap-1]",
    ),
    "tanh's series cut": Mutant("kernels/mods.py", "x2 * (2.0 / 15 + ", "x2 * (2.0 / 16 + ", "kernels/test_mods.py"),
    "ALiBi ahead as a bonus": Mutant(
        "kernels/mods.py",
        "tl.abs(q_pos[:, None] - kv_pos[None, :])",
        "(q_pos[:, None] - kv_pos[None, :])",
        ATTENTION + "features[alibi bidirectional-1]",
    ),
    "int8 down to -128": Mutant(
        "kernels/mods.py",
        "tl.maximum(x, -127.0)",
        "tl.maximum(x, -128.0)",
        WRITE + "::test_ties_subnormals_and_any_bits_of_float32[dtype2]",
    ),
    "fp8 rounded half up": Mutant(
        "kernels/mods.py",
        "((1 << (DROP - 1)) - 1) + ((wide >> DROP) & 1)",
        "(1 << (DROP - 1))",
        WRITE + "::test_ties_subnormals_and_any_bits_of_float32[dtype0]",
    ),
    "e4m3 without its bias": Mutant(
        "kernels/mods.py",
        ".to(tl.float32) * 256.0",
        ".to(tl.float32) * 128.0",
        ATTENTION + "quantised_caches[tensor-torch.float8_e4m3fn-torch.float16]",
    ),
    # write_latent.py
    "rotary columns over the latent": Mutant(
        "kernels/write_latent.py",
        "token * stride_k_pe, target + RANK,",
        "token * stride_k_pe, target,",
        LATENT + "::test_pages_of_any_size",
    ),
    "records with scales below their peaks": Mutant(
        "kernels/write_latent.py",
        "(bits + 0x1FFFFF) & 0x7F800000",
        "bits & 0x7F800000",
        LATENT + "::test_scales_of_records_are_powers_of_two_of_which_448_hold_the_peak",
    ),
    # rotate.py
    "pairs rotated backwards": Mutant(
        "kernels/rotate.py",
        "tl.where(is_first[None, :], -sin, sin)",
        "tl.where(is_first[None, :], sin, -sin)",
        NORM_ROPE + "a_step_that_rotates_is_a_rotation_and_a_step[decode]",
    ),
    "columns after the rotary ones rotated": Mutant(
        "kernels/rotate.py",
        "x = tl.where(in_pairs, rotated, x) if ROTARY_DIM < DIM else rotated",
        "x = rotated",
        NORM_ROPE + "columns_that_are_not_rotated_keep_their_bits",
    ),
    "positions not clamped": Mutant(
        "kernels/rotate.py",
        "position = tl.minimum(tl.maximum(position, 0), norm_rope.max_positions - 1)",
        "position = position % norm_rope.max_positions",
        NORM_ROPE + "positions_outside_of_the_table_are_clamped",
    ),
    # write_new of primitives.py
    "the last new token not written": Mutant(
        "kernels/primitives.py",
        "new.slot_mapping + token, mask=i < count, other=-1",
        "new.slot_mapping + token, mask=i < count - 1, other=-1",
        APPEND + "[drafts]",
    ),
    # hopper/, in the simulator
    "Hopper: a key past the diagonal seen": Mutant(
        SOFTMAX,
        "gl.minimum(q_pos + scoring.window_right, work.seq_len - 1)",
        "gl.minimum(q_pos + 1 + scoring.window_right, work.seq_len - 1)",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: full tiles a key too far": Mutant(
        SOFTMAX,
        "gl.minimum(low_pos + scoring.window_right + 1, work.seq_len)",
        "gl.minimum(low_pos + scoring.window_right + 2, work.seq_len)",
        SIMULATED + "a_prompt_that_begins_two_keys_before_the_end_of_a_tile",
    ),
    "Hopper: denominator not rescaled": Mutant(
        SOFTMAX, "l_i = l_i * alpha + gl.sum(", "l_i = l_i + gl.sum(", SIMULATED + "products_in_fp8[{}-24]"
    ),
    "Hopper: a maximum never raised": Mutant(
        LAZY_MAX, "{ANY_EXCEEDS} @!some bra.uni DONE;", "{ANY_EXCEEDS} bra.uni DONE;", RAISED
    ),
    "Hopper: accumulators not rescaled where a maximum is raised": Mutant(
        LAZY_MAX, "{rescale} setp.gt.f32 fresh", "setp.gt.f32 fresh", RAISED
    ),
    "Hopper: probabilities of two columns swapped": Mutant(
        LAZY_MAX, "e{2 * i + 1}, e{2 * i};", "e{2 * i}, e{2 * i + 1};", SIMULATED + "features[{}-None]"
    ),
    "latents: accumulators not rescaled": Mutant(
        RESCALE,
        "results = results + (rescaled_acc(accs[i], factor),)",
        "results = results + (accs[i],)",
        SIMULATED + "scores_that_grow_from_tile_to_tile[latents-False]",
    ),
    "Hopper: values before the window not zeroed": Mutant(
        PRODUCER,
        "seen = (rows >= seen_from) & (rows < seen_to)",
        "seen = rows < seen_to",
        SIMULATED + "features[{'sliding_window': 100}-None]",
    ),
    "Hopper: values after the last key not zeroed": Mutant(
        PRODUCER, "(row < seen_from) | (row + 8 > seen_to)", "row < seen_from", SIMULATED + "features[{}-None]"
    ),
    "Hopper: gathered rows past the sequence": Mutant(
        PRODUCER,
        "pages = load_places(row, k, pos, kv_high, kv_low, config.PAGE_SIZE)",
        "pages = load_places(row, k, pos, pos + BLOCK_N, kv_low, config.PAGE_SIZE)",
        SIMULATED + "pages[NHD-3]",
    ),
    "Hopper: work tiles at the back taken twice": Mutant(
        "kernels/hopper/queue.py",
        "of_back = queue.num_work_tiles - 1 - queue.from_back - back",
        "of_back = queue.num_work_tiles - queue.from_back - back",
        ORDER + "half_of_the_programs_begin_with_sequences_of_one_row_block[3-16]",
    ),
    "Hopper: partials past the scratch": Mutant(
        SPLITS, "(stop <= cut_slots)", "(stop <= 2 * cut_slots)", CUT + "what_does_not_fit_is_not_cut"
    ),
    "Hopper: a partial combined twice": Mutant(
        PARTIALS, "at = i * WARPGROUPS * SIZE", "at = i // 2 * WARPGROUPS * SIZE", CUT + "features[{}-4000]"
    ),
    "Hopper: partials not rescaled": Mutant(
        PARTIALS, "acc += accs[i] * weight[:, None]", "acc += accs[i]", CUT + "features[{}-4000]"
    ),
    "Hopper: capped scores without the cap": Mutant(
        "kernels/hopper/softcap.py", "m_i + cap * LOG2E", "m_i", SIMULATED + "features[{'softcap': 20.0}-None]"
    ),
    "Hopper: the sign of an output's scale dropped": Mutant(
        "kernels/hopper/convert.py",
        "factor = gl.where(scale < 0.0, -factor, factor)",
        "factor = factor",
        SIMULATED + "results_are_quantised_to_the_bits_of_a_division[-0.7]",
    ),
    # Barriers, fences and waits of the kernels for Hopper GPUs, which the simulator judges
    "Hopper: stages overwritten": Mutant(
        "kernels/gluon/pipeline.py",
        "wait_at(self.empty, i % self.STAGES, i // self.STAGES + 1)",
        "pass",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: stages read before they are full": Mutant(
        "kernels/gluon/pipeline.py",
        "wait_at(self.full, i % self.FULLS, i // self.FULLS, condition)",
        "pass",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: converted tiles not fenced": Mutant(
        "kernels/gluon/pipeline.py",
        "fence_async_shared()  # as in",
        "pass  # as in",
        SIMULATED + "quantised_caches[kv_dtype0-64-16]",
    ),
    "Hopper: zeroed values not fenced": Mutant(
        PRODUCER,
        "        fence_async_shared()  # consumers read by the async proxy what was stored by the generic one\n"
        "        expect_bytes(v_pipe.full.index(stage), 0)",
        "        expect_bytes(v_pipe.full.index(stage), 0)",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: partials not released": Mutant(PARTIALS, 'sem="acq_rel"', 'sem="relaxed"', CUT + "features[{}-20000]"),
    "latents on Hopper: places overwritten": Mutant(
        LATENTS + "latents.py",
        "stage = quarters.acquire(i)",
        "stage = quarters.stage_of(i)",
        SIMULATED + "any_order_of_events_gives_the_same_bits_over_latents[16-narrow-None]",
    ),
    "latents on Hopper: probabilities not fenced": Mutant(
        LATENTS + "many_rows.py",
        "    s.maximum.index(PARITY).store(m_i)\n    fence_async_shared()\n",
        "    s.maximum.index(PARITY).store(m_i)\n",
        SIMULATED + "latents[40-True-wide-None]",
    ),
    "latents in fp8 on Hopper: output not rescaled": Mutant(
        PRODUCTS,
        "s.alpha.index(stage).store(alpha)",
        "s.alpha.index(stage).store(gl.zeros_like(alpha) + 1.0)",
        ORDERS_OF_PRODUCTS,
    ),
    "chosen keys on Hopper: an entry after the count": Mutant(
        GATHERED, "mask=i < place.count, other=-1", "mask=i <= place.count, other=-1", CHOSEN_LATENTS
    ),
    "chosen keys on Hopper: a tile with keys that are not seen taken for a full one": Mutant(
        LATENTS + "lists.py",
        "flags.slice(0, 1).load(FIRST), 0) < 1 << C.UNION",
        "flags.slice(0, 1).load(FIRST), 0) < 1",
        CHOSEN_LATENTS,
    ),
    "unions: every token sees every key": Mutant(
        LATENTS + "lists.py", "is_seen = is_seen >> token & 1", "is_seen = is_seen | token", UNIONS
    ),
    "unions: a tile that one token sees taken for a full one": Mutant(
        LATENTS + "lists.py", "(gl.min(flags, 0) // ALL << UNION)", "(gl.min(flags, 0) << UNION)", UNIONS
    ),
    "unions: tokens of a union attend again": Mutant(
        LATENTS + "lists.py", "item // lists.num_united) >= 0", "item // lists.num_united) >= 1 << 20", UNIONS
    ),
    "unions: bits stay for the next one": Mutant(UNITED, "~(ALL << shift)", "~(1 << shift)", ENTRIES),
    "unions: a slot of each token": Mutant(UNITED, "(before == 0)", "(before >= 0)", ENTRIES),
    "unions: as long as they get": Mutant(UNITED, "length * NEW // 16", "length", ENTRIES),
    "unions: another token's bit": Mutant(UNITED, "bit *= 2", "bit *= 4", ENTRIES),
    "chosen keys on Hopper: copies not waited for": Mutant(
        GATHERED,
        "async_copy.mbarrier_arrive(full, increment_count=False)",
        "mbarrier.arrive(full, count=128)",
        CHOSEN_LATENTS,
    ),
    "chosen keys on Hopper: a place overwritten": Mutant(
        GATHERED,
        "stage = quarters.acquire(n + i)",
        "stage = quarters.stage_of(n + i)",
        SIMULATED + "any_order_of_events_gives_the_same_bits_of_chosen_keys",
    ),
    "chosen keys on Hopper: the next part": Mutant(
        LATENTS + "combine.py",
        "slots = (base + part * gl.num_programs(1))",
        "slots = (base + part)",
        CHOSEN_LATENTS,
    ),
}

CPU, SHIM = "test_cpu_path.py", "integrations/test_flash_attn.py::test_"
INFER = "integrations/test_flashinfer.py::test_"
SCHEDULER = "kernels/test_work_tile.py"
TRANSFORMERS, VLLM = "engines/test_transformers.py::test_", "engines/test_vllm.py::test_"
VLLM_SHARDED, VLLM_SPANS, VLLM_ENCODERS = (
    f"engines/test_vllm_{of}.py::test_" for of in ("sharded", "spans", "encoders")
)
OTHER_KINDS = (
    "compile/test_relaunch.py::test_a_step_whose_tensors_are_of_another_kind_goes_through_the_binder[decode, 64]"
)

OUTSIDE = {
    # distributed/
    "ranks: a token on two ranks": Mutant(
        "distributed/sharded.py",
        "held = (run % self.world_size == self.rank)",
        "held = (run % self.world_size <= self.rank)",
        "test_distributed.py::test_every_token_is_on_one_rank_at_the_end_of_its_pages",
    ),
    "ranks: early queries see a higher rank's keys": Mutant(
        "distributed/ring.py",
        "query_lens = [length(late) for _, late in queries]",
        "pass",
        "test_distributed.py::test_the_steps_of_a_ring_see_each_visible_key_once",
    ),
    # shared_prefix/
    "shared prefix: sinks counted at each level": Mutant(
        "kernels/shared_prefix/runner.py",
        "run(q, cache, level_out, level_lse, None, None)",
        "run(q, cache, level_out, level_lse, sinks, None)",
        SHARED + "every_feature_of_a_flat_plan",
    ),
    "shared prefix: rows of a run see one another's order": Mutant(
        "kernels/shared_prefix/launch.py",
        "replace(spec, causal=False, sinks=False)",
        "replace(spec, sinks=False)",
        SHARED + "shared_prefixes_give_what_a_flat_plan_gives",
    ),
    # intervals and trees
    "a key in a prefix and in a window": Mutant(
        "intervals.py", "(end - size).clamp(min=prefix)", "(end - size).clamp(min=prefix - 1)", RULES
    ),
    "parents without their parents": Mutant(
        "draft_trees.py",
        "range(num_drafts.bit_length())",
        "range(1)",
        BAD_INPUT + "the_calls_are_right_before_anything_is_replaced[draft_trees.from_parents]",
    ),
    "ancestors outside of the window": Mutant(
        "draft_trees.py",
        "bits_of(words) * (away < size)",
        "bits_of(words)",
        BAD_INPUT + "the_calls_are_right_before_anything_is_replaced[draft_trees.windowed]",
    ),
    "a dense mask taken for a tree": Mutant(
        "draft_trees.py",
        "if not bool(context.all()):",
        "if False:",
        BAD_INPUT + "a_general_dense_mask_is_refused_by_name",
    ),
    "more tokens than intervals": Mutant(
        "checks/attention.py",
        "            and (batch.max_tokens is None or num_tokens <= batch.max_tokens)\n",
        "",
        BAD_INPUT + "what_a_batch_says_of_each_token_is_checked_before_a_launch",
    ),
    # lists of chosen keys
    "an entry that repeats": Mutant(
        "checks/batch.py",
        "        if bool(twice.any()):\n",
        "        if False:\n",
        "test_chosen.py::test_attention_refuses_lists_before_it_writes",
    ),
    "slots outside of the cache": Mutant(
        "checks/batch.py",
        "seen & (key >= num_slots)",
        "seen & (key > 1 << 40)",
        "test_chosen.py::test_contents_of_lists_are_checked",
    ),
    "CPU: a chosen key after the token": Mutant(
        "chosen.py",
        "tokens.position[rows] + 1",
        "tokens.position[rows] + 2",
        CHOSEN + "rows_see_what_lists_name[1-regions of 8-True]",
    ),
    # cpu/
    "CPU: causal mask dropped": Mutant(
        "kernels/cpu/attention.py",
        "q_pos - window_left, q_pos + window_right + 1",
        "q_pos - window_left, torch.full_like(q_pos, 1 << 30)",
        ATTENTION + "features[causal-1]",
    ),
    "CPU: window off by one": Mutant(
        "kernels/cpu/attention.py",
        "begin, end = q_pos - window_left,",
        "begin, end = q_pos - window_left + 1,",
        ATTENTION + "features[window-1]",
    ),
    "CPU: what is not seen is read": Mutant(
        "kernels/cpu/attention.py",
        "    return k.masked_fill(unread, 0.0), v.masked_fill(unread, 0.0)",
        "    return k, v",
        ATTENTION + "features[window-1]",
    ),
    "CPU: V by K's scale": Mutant(
        "kernels/cpu/attention.py",
        "v * v_scale[..., None]",
        "v * k_scale[..., None]",
        ATTENTION + "quantised_caches[token-torch.float8_e4m3fn-torch.float32]",
    ),
    "CPU: an lse of +inf taken for a weight": Mutant(
        "kernels/cpu/combine.py",
        'lses.masked_fill(lses == float("inf"), float("-inf"))',
        "lses",
        MERGE + "::test_a_state_with_an_infinite_lse_is_empty",
    ),
    "CPU: int8 rounded down": Mutant(
        "kernels/cpu/cache_ops.py",
        "x.round().nan_to_num(0.0)",
        "x.floor().nan_to_num(0.0)",
        WRITE + "::test_every_float16_is_rounded_to_the_nearest",
    ),
    # nouns and verbs
    "devices not compared": Mutant(
        "checks/attention.py",
        "    if not q.device == cache.device == batch.device:",
        "    if False:",
        "test_api.py::test_tensors_on_two_devices_are_refused",
    ),
    # hopper/, and what only a compiler sees
    "Hopper: splits overlap": Mutant(
        SPLITS,
        "(stop - start) * (split + 1) // num_splits",
        "(stop - start) * (split + 1) // num_splits + 1",
        SCHEDULER,
    ),
    "Hopper: the last tile forgotten": Mutant(
        SPLITS,
        "(kv_stop + BLOCK_N - 1) // BLOCK_N, start + 1)",
        "kv_stop // BLOCK_N, start + 1)",
        SCHEDULER,
    ),
    "Hopper: intervals past the sequence": Mutant(
        SPLITS, "tl.maximum(tl.minimum(end, seq_len), 0)", "tl.maximum(end, 0)", SCHEDULER
    ),
    "workspace_size without the most partitions": Mutant(
        "compile_ahead/launches.py",
        "size = launch.with_most_partitions().scratch_size().total",
        "size = launch.scratch_size().total",
        "test_service.py::test_a_workspace_of_the_size_that_limits_need_serves_scratch_that_does_not_grow_with_keys",
    ),
    "a warm-up of the variants that are few enough": Mutant(
        "compile_ahead/launches.py",
        "yield from launch.alike()",
        "yield launch",
        "test_service.py::test_no_batch_within_limits_needs_a_kernel_or_scratch_that_the_limits_do_not",
    ),
    "the most predicted time": Mutant(
        "kernels/choose.py",
        "sorted(found, key=cost.__getitem__)",
        "sorted(found, key=cost.__getitem__, reverse=True)",
        "test_dispatch.py::test_a_choice_is_of_the_least_predicted_time_where_lengths_are_known",
    ),
    "a launch of other numbers": Mutant(
        "kernels/launcher.py",
        "kind is int or value is None:\n        return value\n",
        "kind is int or value is None:\n        return None\n",
        OTHER_KINDS,
    ),
    "a launch with the tensors of an earlier step": Mutant(
        "kernels/launcher.py",
        "found._replace(fixed=passed)",
        "found",
        "compile/test_relaunch.py::test_a_relaunch_passes_what_the_binder_passes[sm90-plain-decode-128]",
    ),
    "a shared page taken over": Mutant(
        "allocator.py", "self._owners[sequence.pages[-1]] > 1", "False", "test_allocator.py"
    ),
    # front doors
    "flash_attn: rotary angles of the next position": Mutant(
        "integrations/flash_attn/kvcache.py",
        "positions = first + torch.arange(new.length",
        "positions = first + 1 + torch.arange(new.length",
        SHIM + "append_then_attend",
    ),
    "flash_attn: a slot past the capacity written": Mutant(
        "integrations/flash_attn/kvcache.py",
        "(positions >= 0) & (positions < self.capacity), slot, -1)",
        "(positions >= 0), slot, -1)",
        SHIM + "a_cache_is_never_overrun_where_lengths_cannot_be_read",
    ),
    "FlashInfer: an lse in base e": Mutant(
        "integrations/flashinfer/planned.py",
        'if getattr(a, "lse_base", "log2") == "ln" else sums.mul_(LOG2E)',
        "if True else sums.mul_(LOG2E)",
        INFER + "decode_attends_to_pages",
    ),
    "FlashInfer: a window without the query's own key": Mutant(
        "integrations/flashinfer/arguments.py",
        "None if self.window_left < 0 else self.window_left + 1",
        "None if self.window_left < 1 else self.window_left",
        INFER + "decode_attends_to_pages",
    ),
    "FlashInfer: lengths that graphs do not see": Mutant(
        "integrations/flashinfer/planned.py",
        "buffer[: len(x)].copy_(x, non_blocking=non_blocking)",
        'buffer[: len(x) if name != "seq_lens" else 0].copy_(x[: len(x) if name != "seq_lens" else 0])',
        INFER + "a_decode_wrapper_for_graphs_keeps_its_tensors_and_its_plan",
    ),
    "Transformers: the ring's past a token late": Mutant(
        "integrations/transformers/batching.py",
        "query_offsets=past_lens)",
        "query_offsets=past_lens + 1)",
        TRANSFORMERS + "continuous_batching_writes_the_tokens_of_eager_attention[mistral]",
    ),
    "Transformers: a layer that attends twice": Mutant(
        "integrations/transformers/batching.py",
        "if before is not None and before.is_same(step):",
        "if False:",
        TRANSFORMERS + "a_layer_that_attends_twice_is_refused",
    ),
    "a launch on the current device": Mutant(
        "triton_internals.py",
        "is_observed() or active.get_current_device() != device:",
        "is_observed():",
        "compile/test_relaunch.py::test_kernels_are_launched_on_the_device_of_their_tensors",
    ),
    "vLLM: padding written": Mutant(
        "integrations/vllm/backend.py",
        "slots = attn_metadata.slot_mapping\n",
        "slots = attn_metadata.slot_mapping.clamp(min=0)\n",
        VLLM + "the_write_skips_padding",
    ),
    "vLLM: scales left out": Mutant(
        "integrations/vllm/backend.py",
        "if self.kv_dtype in QUANTISED else (None, None)",
        "if False else (None, None)",
        VLLM + "fp8_caches_with_the_layer_s_scales",
    ),
    "vLLM: queries counted as one each": Mutant(
        "integrations/vllm/backend.py",
        "None if step.one_query_each else step.query_start_loc",
        "None",
        VLLM + "a_step_in_every_cache_contract",
    ),
    "vLLM: drafts of ranks see later ones": Mutant(
        "integrations/vllm/sharded.py",
        "of_own_keys(impl.spec, metadata.causal)",
        "of_own_keys(impl.spec, False)",
        VLLM_SHARDED + "ranks_that_share_contexts_attend_to_all_keys",
    ),
}

# Of which only a Hopper GPU judges.
ON_HOPPER = {
    "splits folded where decode does not": Mutant(
        ATTEND,
        "if pos % config.FIXED_SPLIT == 0:",
        "if pos % (2 * config.FIXED_SPLIT) == 0:",
        HOPPER + "a_token_has_the_same_bits_by_decode_drafts_chunks_and_prompts[{}-16]",
    ),
}
