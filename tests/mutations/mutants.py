"""The mutants: each one place of the package, broken, and the tests that must notice."""

from tests.mutations.server import Mutant

ATTENTION = "kernels/test_attention.py::test_"
LATENT = "kernels/test_write_latent.py"
MLA = "kernels/test_mla.py::test_"
COPY, WRITE, MERGE = "kernels/test_copy.py", "kernels/test_write.py", "kernels/test_merge.py"
FULL_TILES = ATTENTION + "full_tiles_in_a_loop_without_masks"
BAD_INPUT = "test_bad_input.py::test_"
INTERVALS, TREES = "kernels/test_intervals.py::test_", "kernels/test_draft_trees.py::test_"
RULES = INTERVALS + "every_rule_is_as_a_plain_program_says"
LONG = ATTENTION + "splits_of_long_sequences"
BY_A_SECOND_LAUNCH = (
    "kernels/test_combine_launch.py::test_partials_are_combined_by_the_last_program_or_by_a_second_launch"
)
WHICH_FOLDS = "kernels/test_invariance.py::test_which_launch_folds_states_changes_nothing"
HOW_SPLIT = "kernels/test_invariance.py::test_how_a_prompt_is_split_changes_nothing[{}]"
SHARED = "kernels/test_shared_prefix.py::test_"
QUANTISED_OUT = "kernels/test_quantised_out.py::test_"
APPEND = "kernels/test_append.py::test_a_step_that_appends_is_a_write_and_a_step"
NORM_ROPE = "kernels/test_norm_rope.py::test_"
OFFSETS = "kernels/test_offsets.py::test_far_strides_reach_what_they_say"
KERNEL, CONSUMER, ATTEND, SOFTMAX, STEADY = (
    f"kernels/hopper/{name}.py" for name in ("kernel", "consumer", "attend", "softmax", "steady")
)
RESCALE = "kernels/mla_hopper/rescale.py"
ANY_PRODUCTS, PRODUCER, RESULTS, GATHER, SOFTCAP = (
    f"kernels/hopper/{name}.py" for name in ("products", "producer", "results", "gather", "softcap")
)
HOPPER = "gpu/test_hopper.py::test_"
CUTS, PARTIALS, CUT = "kernels/hopper/cuts.py", "kernels/hopper/partials.py", "kernels/test_cuts.py::test_"
AS_SAID = "every_row_block_is_cut_as_a_plain_program_says"
BOXES_OF_EIGHT = (
    "kernels/test_work_tile.py::test_boxes_of_eight_rows_are_for_8_bit_caches_and_for_rows_that_cannot_be_gathered"
)
ORDER = "kernels/test_order_of_work_tiles.py::test_"
SIMULATED, LATENTS = "kernels/test_hopper_simulator.py::test_", "kernels/mla_hopper/"
RAISED = SIMULATED + "a_maximum_is_raised_where_a_thread_adds_more_than_the_limit[dtype0-64-64-48-16]"
EXPONENTS = SIMULATED + "exponents_of_capped_scores[(0.2, 0.002)-50.0-64]"
PRODUCTS = LATENTS + "many_rows_fp8.py"
SCORES_IN_PIECES = SIMULATED + "scores_in_pieces[{'head_dim': 192}-16]"
ORDERS_OF_PRODUCTS = SIMULATED + "any_order_of_events_gives_the_same_bits_of_products_of_latents_in_fp8"

IN_INTERPRETER = {
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
        "kernels/primitives.py",
        "tl.load(ptrs, mask=keep[:, None], other=0.0)",
        "tl.load(ptrs)",
        ATTENTION + "features[causal-1]",
    ),
    "rescale dropped": Mutant(
        "kernels/states.py", "tl.fma(acc, alpha[:, None] + tl.zeros_like(acc), product)", "acc + product", LONG + "[1]"
    ),
    "rescale dropped, 16 bits": Mutant(
        "kernels/states.py",
        "v, acc * alpha[:, None], input",
        "v, acc, input",
        ATTENTION + "full_tiles_in_a_loop_without_masks[causal-dtype1]",
    ),
    "denominator not rescaled": Mutant(
        "kernels/states.py",
        "l_i = l_i * alpha[:, None] + sums_of_columns",
        "l_i = l_i + sums_of_columns",
        LONG + "[2]",
    ),
    "denominator not rescaled, block kernel": Mutant(
        "kernels/states.py",
        "l_i = l_i * alpha + tl.sum(p, 1)",
        "l_i = l_i + tl.sum(p, 1)",
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
    "the operator's plan has the bounds of the launch": Mutant(
        "plan.py",
        "workspace, bounds=bounds, asked=asked)",
        "workspace, asked=asked)",
        "kernels/test_attention.py::test_a_step_that_was_decided_for_more_keys_crosses_the_operator",
    ),
    "taller tiles for fp8 numbers that are not in pairs": Mutant(
        "kernels/portable.py",
        "if self.decided.fallback is not None and not self.decided.packs_fp8(cache):",
        "if False:",
        "kernels/test_invariance.py::test_fp8_numbers_in_pairs_have_taller_tiles_and_others_a_fallback[kv_dtype0]",
    ),
    "odd dims of fp8 pairs dropped": Mutant(
        "kernels/primitives.py",
        "for i in tl.static_range(1, len(k)):",
        "for i in tl.static_range(2, len(k)):",
        "kernels/test_attention.py::test_fp8_in_pairs[kv_dtype0-1]",
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
    "small values scaled in float16": Mutant(
        "kernels/primitives.py",
        "T.TOKEN_SCALES and q[0].dtype == tl.float16",
        "False",
        ATTENTION + "small_values_survive_scales_per_token[kv_dtype0-0.001]",
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
        "kernels/split_kv/schedule.py",
        "kv_stop = tl.where(q_len > 0, kv_stop, 0)",
        "pass",
        "kernels/test_idle_rows.py",
    ),
    # primitives.py: intervals and trees
    "drafts before the first key of a row not read": Mutant(
        "kernels/primitives.py",
        "tl.where(rows.owned, tl.minimum(begin, end), 2147483647)",
        "tl.where(rows.owned, begin, 2147483647)",
        TREES + "drafts_before_the_first_key_of_a_row_are_seen[1]",
    ),
    "units of drafts before the first key left out": Mutant(
        "kernels/split_kv/schedule.py",
        "start = tl.minimum(start, tl.minimum(begin, first_pos))",
        "start = tl.minimum(start, begin)",
        TREES + "drafts_before_the_first_key_of_a_row_are_seen[3]",
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
    "rows that see nothing widen the tiles": Mutant(
        "kernels/primitives.py",
        "seen = rows.owned & (begin < end)",
        "seen = rows.owned",
        INTERVALS + "pages_that_no_row_sees_may_be_junk[1]",
    ),
    "full tiles begin where one row does": Mutant(
        "kernels/primitives.py",
        "full_start = tl.max(tl.where(rows.owned, begin, 0), 0)",
        "full_start = tl.min(tl.where(rows.owned, begin, 2147483647), 0)",
        INTERVALS + "full_tiles_are_those_that_every_row_sees[chunks]",
    ),
    "full tiles end where one row does": Mutant(
        "kernels/primitives.py",
        "full_stop = tl.min(tl.where(rows.owned, full_end, 2147483647), 0)",
        "full_stop = tl.max(tl.where(rows.owned, full_end, 0), 0)",
        INTERVALS + "full_tiles_are_those_that_every_row_sees[causal]",
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
    "full tiles up to the first draft alone": Mutant(
        "kernels/primitives.py",
        "lowest_zero = ~x & (x + 1)",
        "lowest_zero = ~x & (x + 2)",
        TREES + "the_lowest_ones_of_a_word_are_counted",
    ),
    # block/
    "full tiles end a key late": Mutant(
        "kernels/block/kernel.py",
        "seen_until = tl.minimum(low_pos + window_right + 1, seq_len)",
        "seen_until = tl.minimum(low_pos + window_right + 2, seq_len)",
        FULL_TILES + "[causal-dtype0]",
    ),
    "full tiles begin by the first row's window": Mutant(
        "kernels/block/kernel.py",
        "seen_by_all = high_pos - window_left",
        "seen_by_all = low_pos - window_left",
        FULL_TILES + "[window-dtype0]",
    ),
    "full tiles past the last key": Mutant(
        "kernels/block/kernel.py",
        "seen_until = tl.minimum(low_pos + window_right + 1, seq_len)",
        "seen_until = low_pos + window_right + 1",
        ATTENTION + "the_loop_without_masks_ends_with_the_keys[200]",
    ),
    "a block's last tile forgotten": Mutant(
        "kernels/block/kernel.py",
        "tl.range(1, 1 + num_before + stop - full_stop)",
        "tl.range(1, num_before + stop - full_stop)",
        ATTENTION + "features[causal-1]",
    ),
    "a row block too many searched": Mutant(
        "kernels/block/kernel.py",
        "GROUP // BLOCK_M + middle <= row_block",
        "GROUP // BLOCK_M + middle < row_block",
        ATTENTION + "features[causal-1]",
    ),
    "drafts counted from the second": Mutant(
        "kernels/block/kernel.py",
        "sight = Sight(begin, end, bits, first_pos)",
        "sight = Sight(begin, end, bits, first_pos + 1)",
        TREES + "every_kind_of_tree[trees-1]",
    ),
    # split_kv/
    "units of the first intervals alone": Mutant(
        "kernels/split_kv/schedule.py",
        "query = done + i",
        "query = i",
        INTERVALS + "several_row_blocks_of_a_cut_sequence[chunks]",
    ),
    "units of the last interval alone": Mutant(
        "kernels/split_kv/schedule.py",
        "stop = tl.where(seen, tl.maximum(stop, end), stop)",
        "stop = tl.where(seen, end, stop)",
        INTERVALS + "full_tiles_of_drafts_are_those_that_every_row_sees[begins0-2]",
    ),
    "a row block's splits end with its own keys": Mutant(
        "kernels/split_kv/kernel.py",
        "tl.cdiv(seq_stop, BLOCK_N)) - 1",
        "tl.cdiv(kv_stop, BLOCK_N)) - 1",
        INTERVALS + "batch_invariant_plans_with_intervals",
    ),
    "a row block's splits begin with its own keys": Mutant(
        "kernels/split_kv/kernel.py",
        "            if FIXED_SPLIT > 0:  # splits without keys have states too\n                tile_begin = begin\n",
        "",
        INTERVALS + "batch_invariant_plans_with_intervals",
    ),
    "full tiles of a partition end a token late": Mutant(
        "kernels/split_kv/kernel.py",
        "tl.minimum(low_pos + window_right + 1, kv_stop)",
        "tl.minimum(low_pos + window_right + 2, kv_stop)",
        ATTENTION + "the_loop_without_masks_ends_where_the_first_draft_s_keys_end[None]",
    ),
    "full tiles of a partition by the last row": Mutant(
        "kernels/split_kv/kernel.py",
        "low_pos = first_pos + row_block * BLOCK_M // GROUP",
        "low_pos = first_pos + 1 + row_block * BLOCK_M // GROUP",
        ATTENTION + "the_loop_without_masks_ends_where_the_first_draft_s_keys_end[None]",
    ),
    "full tiles of a partition before the window": Mutant(
        "kernels/split_kv/kernel.py",
        " & (seen_by_all <= tile_begin * BLOCK_N)",
        "",
        ATTENTION + "the_loop_without_masks_ends_where_the_first_draft_s_keys_end[350]",
    ),
    "the first partial from the wrong slot": Mutant(
        "kernels/split_kv/reduce.py",
        "first_slot, next_slot, step = 2 * first_partition + 1,",
        "first_slot, next_slot, step = 2 * first_partition,",
        LONG + "[7]",
    ),
    "a partial forgotten": Mutant(
        "kernels/split_kv/reduce.py", "- first_partition + 1\n", "- first_partition\n", LONG + "[7]"
    ),
    "a partition cut short": Mutant(
        "kernels/split_kv/schedule.py",
        "high = tl.minimum(low + size, total)",
        "high = tl.minimum(low + size, total - 1)",
        LONG + "[7]",
    ),
    "sequences found one too late": Mutant(
        "kernels/split_kv/schedule.py", "before = ends <= unit", "before = ends < unit", LONG + "[7]"
    ),
    "the shortest partition by another formula": Mutant(
        "kernels/split_kv/schedule.py",
        "mean > S.TWO_LEVEL_MIN_TILES",
        "mean >= S.TWO_LEVEL_MIN_TILES",
        "kernels/test_schedule.py",
    ),
    "partitions made twice as much longer as allowed": Mutant(
        "kernels/split_kv/schedule.py", "size // 32,", "size // 16,", "kernels/test_schedule.py"
    ),
    "partitions of whole sequences made longer as those of parts are": Mutant(
        "kernels/split_kv/schedule.py", "2 * size <= longest", "size > 0", "kernels/test_schedule.py"
    ),
    "the host's shortest partition by another formula": Mutant(
        "kernels/split_kv/choice.py", "math.sqrt(mean * cost)", "math.sqrt(mean) * cost", "kernels/test_schedule.py"
    ),
    "partials combined without weights": Mutant(
        "kernels/split_kv/reduce.py", "acc += accs[i] * alpha[:, None]", "acc += accs[i]", LONG + "[7]"
    ),
    "a counter left as it is": Mutant(
        "kernels/split_kv/reduce.py",
        "tl.store(scratch.counter + counter, 0)",
        "tl.store(scratch.counter + counter, num_arrivals)",
        "kernels/test_attention.py::test_runs_are_bitwise_equal",
    ),
    "the tail of a round counted twice": Mutant(
        "kernels/split_kv/reduce.py",
        "present = (first + i + 0 * offs_r) < slots.num_partials",
        "present = (first + 0 * offs_r) < slots.num_partials",
        LONG + "[7]",
    ),
    "splits of a fixed size added in another order": Mutant(
        "kernels/split_kv/kernel.py",
        "acc, m_i, l_i = fold_split(acc, m_i, l_i, split_acc, split_m, split_l)",
        "acc, m_i, l_i = fold_split(split_acc, split_m, total(split_l), acc, m_i, l_i[:, None])",
        "kernels/test_invariance.py",
    ),
    "a combine launch whose fold begins a state late": Mutant(
        "kernels/split_kv/combine.py",
        "scratch, (first_partition + 1) * size - 1, stop",
        "scratch, (first_partition + 1) * size, stop",
        WHICH_FOLDS + "[decode]",
    ),
    "a combine launch whose fold forgets what is between its first rounds": Mutant(
        "kernels/split_kv/combine.py",
        "tl.range(first + num_first, stop",
        "tl.range(first + AHEAD, stop",
        WHICH_FOLDS + "[several rounds]",
    ),
    "partials of a second launch read from each slot": Mutant(
        "kernels/split_kv/combine.py", "tl.where(i == 0, 0, 2 * i - 1)", "i", BY_A_SECOND_LAUNCH + "[decode-True]"
    ),
    "the last partial of a second launch left out": Mutant(
        "kernels/split_kv/combine.py",
        "(stop - 1) // size - first_partition + 1",
        "(stop - 1) // size - first_partition",
        BY_A_SECOND_LAUNCH + "[decode-True]",
    ),
    "a second launch combines one round of partials": Mutant(
        "kernels/split_kv/combine.py",
        "tl.range(0, num_partials, AHEAD, num_stages=1)",
        "tl.range(0, AHEAD, AHEAD, num_stages=1)",
        BY_A_SECOND_LAUNCH + "[more partials than fit-True]",
    ),
    "a second launch with tiles of another length": Mutant(
        "kernels/split_kv/runner.py",
        '"BLOCK_N": self.block_n(cache)',
        '"BLOCK_N": decided.config.block_n',
        BY_A_SECOND_LAUNCH + "[int8-True]",
    ),
    "a second launch combines row blocks that are whole": Mutant(
        "kernels/split_kv/combine.py",
        "if ((first_partition + 1) * size < stop) &",
        "if ((first_partition + 1) * size <= stop) &",
        "kernels/test_combine_launch.py::test_the_second_launch_writes_whole_row_blocks_no_second_time",
    ),
    "states combined at once without the sum so far": Mutant(
        "kernels/states.py",
        "l_i * alpha + tl.sum(ls * betas, 0)",
        "tl.sum(ls * betas, 0)",
        BY_A_SECOND_LAUNCH + "[more partials than fit-True]",
    ),
    "a second panel that begins a column late": Mutant(
        "kernels/panels.py",
        "return i * panel_width(DIM, EACH, ROWS, 0) + tl.arange",
        "return i * panel_width(DIM, EACH, ROWS, 0) + i + tl.arange",
        "kernels/test_combine_launch.py::test_heads_in_two_panels",
    ),
    "row blocks of a combine launch found one too late": Mutant(
        "kernels/split_kv/schedule.py", "before = ends <= index", "before = ends < index", WHICH_FOLDS + "[decode]"
    ),
    "a combine launch looks at the first sequences alone": Mutant(
        "kernels/split_kv/schedule.py",
        "num_seqs if S.MORE_SEQS else 1, S.SEQS",
        "S.SEQS, S.SEQS",
        WHICH_FOLDS + "[decode]",
    ),
    "a prompt's splits are cut elsewhere than decode's": Mutant(
        "kernels/block/kernel.py",
        "                page = next_page\n                if (tile + 1) % TILES == 0:",
        "                page = next_page\n                if (tile + 2) % TILES == 0:",
        HOW_SPLIT,
    ),
    "a prompt's last split forgotten": Mutant(
        "kernels/block/kernel.py",
        "changes nothing.\n        acc, m_i, l_i =",
        "changes nothing.\n        split_acc, split_m, split_l =",
        HOW_SPLIT,
    ),
    # mla/
    "MLA: rotary columns forgotten": Mutant(
        "kernels/mla/kernel.py",
        "scores += tl.dot(q_pe, tl.trans(r), input_precision=T.INPUT_PRECISION)",
        "scores += 0.0 * tl.dot(q_pe, tl.trans(r), input_precision=T.INPUT_PRECISION)",
        MLA + "features[causal-1]",
    ),
    "MLA: keys outside the window read": Mutant(
        "kernels/mla/kernel.py",
        "keep = (kv_pos - kv_start).to(tl.uint32) < tl.maximum(kv_stop - kv_start, 0).to(tl.uint32)",
        "keep = kv_pos < kv_stop",
        MLA + "features[window-1]",
    ),
    "MLA: causal mask dropped": Mutant(
        "kernels/mla/kernel.py",
        " & (kv_pos[None, :] <= high[:, None])",
        "",
        MLA + "features[causal-1]",
    ),
    "MLA: the first slot of another page": Mutant(
        "kernels/mla/kernel.py",
        "tl.cast(pos % T.PAGE_SIZE - pos, tl.int64)",
        "tl.cast(-pos, tl.int64)",
        MLA + "pages[64]",
    ),
    "MLA: a part of the columns missing": Mutant(
        "kernels/mla/kernel.py",
        "scores = products if i == 0 else scores + products",
        "scores = products",
        MLA + "widths[256-64]",
    ),
    "MLA: values of records without scales": Mutant(
        "kernels/mla/kernel.py",
        "weights = p * scales[i][None, :]",
        "weights = p",
        MLA + "records_with_scales_of_their_own[dtype1-False]",
    ),
    "MLA: denominators not rescaled": Mutant(
        "kernels/mla/kernel.py", "l_i = l_i * alpha[:, None] + p", "l_i = l_i + p", MLA + "features[causal-1]"
    ),
    "MLA: bands overlap": Mutant(
        "kernels/mla/kernel.py",
        "first_row = (band * ROW_BLOCKS + row_block) * BLOCK_M",
        "first_row = (band + row_block) * BLOCK_M",
        MLA + "prompts_have_several_bands[None-False]",
    ),
    "MLA: row blocks share a partial": Mutant(
        "kernels/mla/kernel.py",
        "columns, partition, row_block, unit",
        "columns, partition, 0, unit",
        MLA + "many_partials_are_combined_in_two_levels[30-20]",
    ),
    "MLA: the last tile of a row block left out": Mutant(
        "kernels/mla/kernel.py",
        "tl.cdiv(tl.maximum(high_pos + window_right + 1, 0), BLOCK_N)",
        "tl.cdiv(tl.maximum(high_pos + window_right, 0), BLOCK_N)",
        MLA + "features[causal-1]",
    ),
    "MLA: states of splits in another order": Mutant(
        "kernels/mla/kernel.py",
        "combine(acc, m_i, l_i, joined, joined_m, joined_l)",
        "combine(joined, joined_m, joined_l, acc, m_i, l_i)",
        MLA + "batch_invariant_results_do_not_depend_on_the_batch",
    ),
    "MLA: a strided half of the queries": Mutant(
        "kernels/mla/launch.py",
        "((0, 0) if q_pe is None else q_pe.stride()[:2])",
        "((0, 0) if q_pe is None else q_nope.stride()[:2])",
        MLA + "halves_of_the_queries_may_be_two_tensors",
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
    "a token of no sequence combined": Mutant(
        "kernels/combine.py",
        "if token >= tl.load(cu_seqlens_q + num_seqs):",
        "if token > tl.load(cu_seqlens_q + num_seqs):",
        MERGE + "::test_states_side_by_side_merge_into_tensors_of_any_stride",
    ),
    "states in int32": Mutant(
        "kernels/combine.py",
        "outs + (i * stride_state)[:, None]",
        "outs + (i * stride_state).to(tl.int32)[:, None]",
        OFFSETS + "[combine]",
    ),
    "states at unequal distances read where they lie": Mutant(
        "kernels/combine.py",
        "x.storage_offset() == begin + i * distance",
        "x.storage_offset() >= begin",
        MERGE + "::test_states_at_equal_distances_in_one_memory_are_not_copied",
    ),
    # copy.py
    "a negative destination copied to": Mutant(
        "kernels/copy.py",
        "if (from_page < 0) | (to_page < 0):",
        "if from_page < 0:",
        COPY + "::test_a_negative_destination_is_not_a_page_before_the_first",
    ),
    "pages copied backwards": Mutant(
        "kernels/copy.py",
        "from_page = tl.load(page_pairs + 2 * pair)",
        "from_page = tl.load(page_pairs + 2 * pair + 1)",
        COPY,
    ),
    "V's scales copied from K's": Mutant(
        "kernels/copy.py", "copy_tile(v_scale, from_page", "copy_tile(k_scale, from_page", COPY
    ),
    "the source's strides in the target": Mutant("kernels/copy.py", "i1 * t.target_1", "i1 * t.source_1", COPY),
    "dimensions joined that do not lie side by side": Mutant(
        "kernels/copy.py", "dims[-1][1:] == (size * step, size * target_step)", "dims[-1][1] == size * step", COPY
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
    "infinity taken for the largest": Mutant(
        "kernels/write.py",
        'tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)',
        "tl.abs(x)",
        WRITE + "::test_a_token_s_scale_minds_neither_what_is_not_finite_nor_what_is_next_to_nothing",
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
    "softcap after ALiBi": Mutant(
        "kernels/mods.py",
        "alibi(capped, 1.0, q_pos, kv_pos, slopes, cap)",
        "softcap_in_float32(alibi(scores, scale, q_pos, kv_pos, slopes, cap), 1.0, q_pos, kv_pos, slopes, cap)",
        ATTENTION + "features[everything-1]",
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
        ATTENTION + "quantised_caches[dtype0-kv_dtype0-tensor]",
    ),
    "e4m3 pairs in the wrong order": Mutant(
        "kernels/mods.py",
        "return even.to(tl.float16, bitcast=True) * 256.0, odd.to(tl.float16, bitcast=True) * 256.0",
        "return odd.to(tl.float16, bitcast=True) * 256.0, even.to(tl.float16, bitcast=True) * 256.0",
        "kernels/test_attention.py::test_fp8_in_pairs[kv_dtype0-1]",
    ),
    # host
    "offsets never wide": Mutant(
        "cache.py",
        "(slots - 1) * s.slot + (heads - 1) * s.head + (dim // s.vec_size - 1) * s.vec + s.vec_size > 1 << 31",
        "False",
        "kernels/test_offsets.py::test_the_host_knows_which_offsets_are_wide",
    ),
    # write_latent.py
    "rotary columns over the latent": Mutant(
        "kernels/write_latent.py",
        "token * stride_k_pe, target + RANK,",
        "token * stride_k_pe, target,",
        LATENT + "::test_pages_of_any_size",
    ),
    "one scale for all groups of a record": Mutant(
        "kernels/write_latent.py",
        "tl.store(scales + page * scales_page + slot * scales_slot + offs_group, scale)",
        "tl.store(scales + page * scales_page + slot * scales_slot + offs_group, tl.max(scale, 0))",
        LATENT + "::test_records_are_those_of_vllm",
    ),
    "records with scales below their peaks": Mutant(
        "kernels/write_latent.py",
        "(bits + 0x1FFFFF) & 0x7F800000",
        "bits & 0x7F800000",
        LATENT + "::test_scales_of_records_are_powers_of_two_of_which_448_hold_the_peak",
    ),
    "infinity counted in a record's scale": Mutant(
        "kernels/write_latent.py",
        'tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)',
        "tl.abs(x)",
        LATENT + "::test_records_are_those_of_vllm",
    ),
    "rotary columns truncated": Mutant(
        "kernels/mods.py",
        "(bits + 0x7FFF + ((bits >> 16) & 1)) >> 16",
        "bits >> 16",
        LATENT + "::test_rotary_columns_of_records_are_rounded_half_to_even",
    ),
    "rotary columns not copied": Mutant(
        "kernels/formats.py",
        "        return [as_bytes(cache.k)]",
        "        return [as_bytes(cache.v)]",
        LATENT + "::test_pages_of_latents_are_copied",
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
    "keys normalised by the weights of queries": Mutant(
        "kernels/primitives.py",
        "k_ptrs, i < count, token, norm_rope.k_weight, norm_rope",
        "k_ptrs, i < count, token, norm_rope.q_weight, norm_rope",
        NORM_ROPE + "a_step_that_rotates_is_a_rotation_and_a_step[e4m3]",
    ),
    "positions not clamped": Mutant(
        "kernels/rotate.py",
        "position = tl.minimum(tl.maximum(position, 0), norm_rope.max_positions - 1)",
        "position = position % norm_rope.max_positions",
        NORM_ROPE + "positions_outside_of_the_table_are_clamped",
    ),
    # write_new of primitives.py
    "new values of another KV head": Mutant(
        "kernels/primitives.py",
        "new.v + token * new.v_token + kv_head * new.v_head",
        "new.v + token * new.v_token",
        APPEND + "[decode]",
    ),
    "the last new token not written": Mutant(
        "kernels/primitives.py",
        "new.slot_mapping + token, mask=i < count, other=-1",
        "new.slot_mapping + token, mask=i < count - 1, other=-1",
        APPEND + "[drafts]",
    ),
    "new values stored by the scale of keys": Mutant(
        "kernels/primitives.py",
        "v_scale = tl.load(cache.v_scale + kv_head * kv.scale_head)\n        k, v = encode",
        "v_scale = k_scale\n        k, v = encode",
        APPEND + "[e4m3]",
    ),
    "new tokens without a slot written": Mutant(
        "kernels/primitives.py",
        "store_rows(v, v_rows, position >= 0, kv.v_vec",
        "store_rows(v, v_rows, i < count, kv.v_vec",
        "kernels/test_append.py::test_tokens_without_a_slot_are_left_out",
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
    "Hopper: full tiles by the first row's window": Mutant(
        SOFTMAX,
        "(pos < high_pos - scoring.window_left)",
        "(pos < low_pos - scoring.window_left)",
        SIMULATED + "features[{'sliding_window': 100}-None]",
    ),
    "Hopper: denominator not rescaled": Mutant(
        SOFTMAX, "l_i = l_i * alpha + gl.sum(", "l_i = l_i + gl.sum(", SIMULATED + "products_in_fp8[{}-24]"
    ),
    "Hopper: a maximum never raised": Mutant(
        STEADY, "{ANY_EXCEEDS} @!some bra.uni DONE;", "{ANY_EXCEEDS} bra.uni DONE;", RAISED
    ),
    "Hopper: all maxima of a warp raised where one is": Mutant(
        STEADY, "selp.f32 highestROW, highestROW, MAX, raisesROW; ", "", RAISED
    ),
    "Hopper: accumulators not rescaled where a maximum is raised": Mutant(
        STEADY, "{rescale} setp.gt.f32 fresh", "setp.gt.f32 fresh", RAISED
    ),
    "Hopper: sums not rescaled where a maximum is raised": Mutant(
        STEADY, '    "mul.f32 SUM, SUM, alphaROW;"\n', '    ""\n', RAISED
    ),
    "Hopper: a maximum of one thread's scores": Mutant(
        STEADY,
        "HIGHEST = f\"{LARGEST_OF_QUAD.replace('NAME', 'highestROW')} mul",
        'HIGHEST = f"mul',
        SIMULATED + "the_first_tile_of_a_row_has_probabilities_of_at_most_one",
    ),
    "Hopper: threads of a row that raise its maximum apart": Mutant(
        STEADY,
        "ROW_EXCEEDS = f\"{LARGEST_OF_QUAD.replace('NAME', 'allROW')} setp",
        'ROW_EXCEEDS = f"setp',
        SIMULATED + "one_score_raises_the_maximum_of_its_row",
    ),
    "Hopper: probabilities of two columns swapped": Mutant(
        STEADY, "e{2 * i + 1}, e{2 * i};", "e{2 * i}, e{2 * i + 1};", SIMULATED + "features[{}-None]"
    ),
    "Hopper: scores of the second row by the factor of the first": Mutant(
        STEADY,
        'f"${scale + 2 * row}"',
        'f"${scale}"',
        SIMULATED + "the_first_tile_of_a_row_has_probabilities_of_at_most_one",
    ),
    "latents: keys ahead of a row block left out": Mutant(
        "kernels/mla/kernel.py",
        "tl.maximum(high_pos + window_right + 1, 0)",
        "tl.maximum(high_pos + 1, 0)",
        MLA + "queries_of_a_prompt_see_keys_ahead_of_their_row_block[None]",
    ),
    "latents: accumulators not rescaled": Mutant(
        RESCALE,
        "results = results + (rescaled_acc(accs[i], factor),)",
        "results = results + (accs[i],)",
        SIMULATED + "scores_that_grow_from_tile_to_tile[latents-False]",
    ),
    "Hopper: panels of values at half of their distance": Mutant(
        ANY_PRODUCTS, "descriptor_of(keys * 128)", "descriptor_of(keys * 64)", SIMULATED + "widths[80-80]"
    ),
    "Hopper: the values of the first stage": Mutant(
        ANY_PRODUCTS, "v_pipe.addresses[0] + stage * BYTES", "v_pipe.addresses[0]", SIMULATED + "widths[80-80]"
    ),
    "Hopper: the keys of the first stage": Mutant(
        ANY_PRODUCTS,
        "k_pipe.addresses[0] + stage * BYTES",
        "k_pipe.addresses[0]",
        SCORES_IN_PIECES,
    ),
    "Hopper: the next panel of keys too near": Mutant(
        ANY_PRODUCTS, "keys * 128 - 48 * 2", "keys * 64 - 48 * 2", SCORES_IN_PIECES
    ),
    "Hopper: the first panel of queries for all": Mutant(
        ANY_PRODUCTS,
        "(stage * PANELS + i) * tiles.shape[1]",
        "stage * PANELS * tiles.shape[1]",
        SCORES_IN_PIECES,
    ),
    "Hopper: the queries of the first warpgroup for both": Mutant(
        ANY_PRODUCTS,
        "* tiles.shape[1] + wg * ROWS",
        "* tiles.shape[1]",
        SCORES_IN_PIECES,
    ),
    "Hopper: the sums of the first scores": Mutant(
        "kernels/hopper/capped.py",
        "        numbers += p[i]\n",
        "        pass\n",
        SIMULATED + "scores_in_pieces[{'dtype': torch.bfloat16, 'head_dim': 192, 'softcap': 20.0}-64]",
    ),
    "Hopper: boxes in the first rows of a tile": Mutant(
        "kernels/hopper/pipeline.py",
        "buffers[i * (HEIGHT // EACH) + FIRST // EACH]",
        "buffers[i * (HEIGHT // EACH)]",
        SCORES_IN_PIECES,
    ),
    "Hopper: values zeroed as if all buffers began a tile": Mutant(
        PRODUCER,
        "row = 8 * i % BLOCK_N",
        "row = 8 * i",
        SCORES_IN_PIECES,
    ),
    "Hopper: columns of zeros before keys alone": Mutant(
        PRODUCER, "0, LEAST_ROWS, ZEROS)", "0, LEAST_ROWS)", SIMULATED + "widths[24-40]"
    ),
    "Hopper: keys of the next head": Mutant(
        "kernels/hopper/tma.py",
        "k = matrix_of(cache.k, k_extents, ks[:3])",
        "k = matrix_of(cache.k, k_extents, ks[:3], ends_at_head=False)",
        SIMULATED + "what_a_head_holds_changes_no_bit_of_another[104]",
    ),
    "latents: an older maximum for any score": Mutant(
        RESCALE,
        "SLACK = gl.constexpr(8.0)",
        "SLACK = gl.constexpr(300.0)",
        SIMULATED + "scores_that_grow_from_tile_to_tile[latents-False]",
    ),
    "Hopper: queries released a tile early": Mutant(
        ATTEND,
        "EARLY and i == stop - 1",
        "EARLY and i == stop - 2",
        SIMULATED + "widths[192-192]",
    ),
    "Hopper: the first keys loaded twice": Mutant(
        PRODUCER, "if KEYS_FIRST and work_i > 0:", "if KEYS_FIRST:", SIMULATED + "widths[192-128]"
    ),
    "Hopper: the first keys never loaded": Mutant(
        PRODUCER,
        "                if not KEYS_FIRST or (left < work.num_tiles) | (work_i == 1):\n                    load_keys(",
        "                if not KEYS_FIRST or left < work.num_tiles:\n                    load_keys(",
        SIMULATED + "scores_that_grow_from_tile_to_tile[wide values-False]",
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
    "Hopper: two tiles with invisible rows at one barrier": Mutant(
        PRODUCER,
        "empty.shape[0] + edge_i % SPARES",
        "empty.shape[0] + edge_i * 0",
        SIMULATED + "tiles_at_whose_edges_intervals_begin_and_end[{}]",
    ),
    "Hopper: boxes of a tile from one slot": Mutant(
        PRODUCER, "row + (pos + box * KV_BOX) % PAGE_SIZE", "row + pos % PAGE_SIZE", SIMULATED + "pages[NHD-48]"
    ),
    "Hopper: boxes of a tile of ragged batches from one slot": Mutant(
        PRODUCER, "row + (pos + lane * KV_BOX) % PAGE_SIZE", "row + pos % PAGE_SIZE", SIMULATED + "pages[NHD-48]"
    ),
    "latents: a quarter freed before its product": Mutant(
        LATENTS + "many_rows.py",
        "    left = warpgroup_mma_wait(1, deps=[left])\n    mbarrier.arrive(s.empty[PARITY * 4 + SIDE * 2], count=1)",
        "    mbarrier.arrive(s.empty[PARITY * 4 + SIDE * 2], count=1)\n    left = warpgroup_mma_wait(1, deps=[left])",
        SIMULATED + "latents[40-True-None]",
    ),
    "Hopper: gathered rows before the window": Mutant(
        GATHER,
        "mask=(kv_pos >= kv_low) & (kv_pos < stop)",
        "mask=(kv_pos < stop)",
        SIMULATED + "windows_of_gathered_rows[1]",
    ),
    "Hopper: gathered rows past the sequence": Mutant(
        PRODUCER,
        "pages = load_places(row, k_pipe, pos, kv_high, kv_low, PAGE_SIZE, HAS_BOXES)",
        "pages = load_places(row, k_pipe, pos, pos + BLOCK_N, kv_low, PAGE_SIZE, HAS_BOXES)",
        SIMULATED + "pages[NHD-3]",
    ),
    "Hopper: gathered rows from the first slot of a page": Mutant(
        GATHER, "slots = rows % PAGE_SIZE", "slots = rows * 0", SIMULATED + "pages[NHD-4]"
    ),
    "Hopper: gathered rows of pages that divide no tile, from its first slot": Mutant(
        GATHER, "slots = (pos + rows) % PAGE_SIZE", "slots = rows % PAGE_SIZE", SIMULATED + "pages[NHD-3]"
    ),
    "Hopper: gathered rows of the first head": Mutant(
        GATHER, "(head * (stride_head // VEC))", "(head * 0)", SIMULATED + "pages[HND-4]"
    ),
    "Hopper: the sequence with the fewest keys first": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "others[None, :] <= places[:, None]",
        "others[None, :] >= places[:, None]",
        ORDER + "sequences_of_as_many_tiles_stay_in_the_batch_s_order",
    ),
    "Hopper: the keys of a sequence's first row block decide": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "token = gl.maximum(counts - 1, 0) * BLOCK_T",
        "token = counts * 0",
        ORDER + "each_row_block_is_found_once_and_the_longest_sequence_first[{}-100]",
    ),
    "Hopper: sequences without row blocks in the order": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "gl.where(owns, places, -2147483648)",
        "places",
        ORDER + "each_row_block_is_found_once_and_the_longest_sequence_first[{'max_decode_queries': 3}-100]",
    ),
    "Hopper: of sequences of one row block, the shortest at the end": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "gl.where(singles & mixed, -1 - places, places)",
        "gl.where(singles & mixed, places - 1073741824, places)",
        ORDER + "each_row_block_is_found_once_and_the_longest_sequence_first[{}-100]",
    ),
    "Hopper: splits of prompts counted as those of decoding sequences": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "gl.sum(gl.where(singles, counts, 0), 0)",
        "gl.sum(counts, 0)",
        ORDER + "each_row_block_is_found_once_and_the_longest_sequence_first[{}-100]",
    ),
    "Hopper: all programs begin with prompts": Mutant(
        "kernels/hopper/queue.py",
        "gl.where(num_work_tiles <= MOST, from_back, 0)",
        "num_work_tiles * 0",
        ORDER + "half_of_the_programs_begin_with_sequences_of_one_row_block[2-16]",
    ),
    "Hopper: more work tiles than the counter counts from both ends": Mutant(
        "kernels/hopper/queue.py",
        "gl.where(num_work_tiles <= MOST, from_back, 0)",
        "from_back",
        ORDER + "more_work_tiles_than_are_counted_are_taken_from_the_front",
    ),
    "Hopper: work tiles at the back taken twice": Mutant(
        "kernels/hopper/queue.py",
        "of_back = queue.num_work_tiles - 1 - queue.from_back - back",
        "of_back = queue.num_work_tiles - queue.from_back - back",
        ORDER + "half_of_the_programs_begin_with_sequences_of_one_row_block[3-16]",
    ),
    "Hopper: the queue ends before its ends meet": Mutant(
        "kernels/hopper/queue.py",
        "gl.where(number < queue.num_work_tiles, work_tile, number)",
        "gl.where(number < queue.num_work_tiles - 1, work_tile, number)",
        ORDER + "half_of_the_programs_begin_with_sequences_of_one_row_block[2-16]",
    ),
    "Hopper: programs that stay at the back": Mutant(
        "kernels/hopper/queue.py",
        "backwards & (queue.from_back + back < queue.num_singles)",
        "backwards",
        ORDER + "programs_empty_the_queue_from_both_ends[7]",
    ),
    "Hopper: programs have two of the longest work tiles": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "gl.minimum(from_back, gl.num_programs(0) - num_others)",
        "from_back",
        ORDER + "no_program_has_two_of_the_longest_work_tiles",
    ),
    "Hopper: an order wherever lengths differ": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "(most > least) & (most * SHARE * gl.num_programs(0) > work)",
        "most > least",
        ORDER + "sequences_stay_in_the_batch_s_order_where_the_longest_work_tile_is_a_small_part_of_all_work",
    ),
    "Hopper: the batch's order in a launch": Mutant(
        PRODUCER,
        "(batch.num_seqs > 1) & (num_work_tiles > gl.num_programs(0))",
        "(batch.num_seqs > 1000)",
        ORDER + "chunks_of_as_many_queries_come_in_the_order_of_their_contexts[short]",
    ),
    "Hopper: splits longer than a share": Mutant(
        CUTS, "gl.where(tiles > 2 * share, 1, 0)", "gl.where(tiles > 3 * share, 1, 0)", CUT + AS_SAID + "[{}-3000-127]"
    ),
    "Hopper: row blocks cut that see half of a share": Mutant(
        CUTS, "gl.maximum(share, tiles // 2)", "share // 2", CUT + AS_SAID + "[{}-3000-127]"
    ),
    "Hopper: partials past the scratch": Mutant(
        CUTS, "(stop <= CUT_SLOTS)", "(stop <= 2 * CUT_SLOTS)", CUT + "what_does_not_fit_is_not_cut"
    ),
    "Hopper: partials of a sequence after its slots": Mutant(
        CUTS, "memory.index(3).store(stop - needed)", "memory.index(3).store(stop)", CUT + AS_SAID + "[{}-3000-127]"
    ),
    "Hopper: a sink of minus infinity where a row sees no key": Mutant(
        RESULTS,
        'shift = gl.where(m_new == float("-inf"), 0.0, m_new)  # no key and no sink',
        "shift = m_new  # no key and no sink",
        SIMULATED + "a_sink_of_minus_infinity_is_no_key[((20, 0), (0, 30), (50, 33), (9, 100))-None-1]",
    ),
    "Hopper: sequences after the last that is looked at cut as that one": Mutant(
        CUTS,
        "(in_cut >= 0) & (seq < NUM_SEQS)",
        "in_cut >= 0",
        CUT + "sequences_after_the_last_that_is_looked_at_are_whole_where_that_one_is_cut",
    ),
    "Hopper: heads share the slots of partials": Mutant(
        CUTS,
        "((in_cut >> shift) * HEAD_BLOCKS + head_block) << shift",
        "((in_cut >> shift) * HEAD_BLOCKS) << shift",
        CUT + "features[{}-20000]",
    ),
    "Hopper: warpgroups share the slots of partials": Mutant(
        PARTIALS,
        "ptr = partials + ((cut.first_slot + cut.split) * WARPGROUPS + wg) * SIZE",
        "ptr = partials + ((cut.first_slot + cut.split) * WARPGROUPS) * SIZE",
        CUT + "features[{}-20000]",
    ),
    "Hopper: a row of a partial for each row of the tile": Mutant(
        PARTIALS, "head = index // num_tokens", "head = index // TOKENS", CUT + "features[{}-4000]"
    ),
    "Hopper: rows of the second warpgroup combined by the first": Mutant(
        PARTIALS,
        "of_first = ROWS // TOKENS * num_tokens",
        "of_first = HEADS * num_tokens",
        CUT + "warpgroups_have_their_own_tokens_or_share_them[shared-4]",
    ),
    "Hopper: rows of a head on both warpgroups left out": Mutant(
        PARTIALS,
        "gl.minimum(ROWS % TOKENS, num_tokens)",
        "0",
        CUT + "warpgroups_have_their_own_tokens_or_share_them[shared-6]",
    ),
    "Hopper: the first warpgroup's tokens for both": Mutant(
        CONSUMER,
        "FIRST_TOKEN: gl.constexpr = wg * TOKENS if APART else 0",
        "FIRST_TOKEN: gl.constexpr = 0",
        CUT + "warpgroups_have_their_own_tokens_or_share_them[apart-4]",
    ),
    "Hopper: the first warpgroup's queries for both": Mutant(
        PRODUCER,
        "token = work.q_start + work.token + BLOCK_T // 2",
        "token = work.q_start + work.token",
        CUT + "warpgroups_have_their_own_tokens_or_share_them[apart-4]",
    ),
    "Hopper: a work tile with one token of the second warpgroup skipped": Mutant(
        CONSUMER,
        "is_idle = work.token >= work.q_len",
        "is_idle = work.token + 1 >= work.q_len",
        CUT + "warpgroups_have_their_own_tokens_or_share_them[apart-4]",
    ),
    "Hopper: a skipped tile kept": Mutant(
        CONSUMER,
        "        release_unread(v_pipe, i, RELEASES)\n",
        "",
        CUT + "warpgroups_have_their_own_tokens_or_share_them[apart-4]",
    ),
    "Hopper: skipped keys released before they are there": Mutant(
        CONSUMER,
        "        consumer_wait(k_pipe, i)\n        release_unread(k_pipe, i, RELEASES)\n",
        "        release_unread(k_pipe, i, RELEASES)\n",
        CUT + "a_warpgroup_without_tokens_releases_tiles_when_they_are_there[{}]",
    ),
    "Hopper: skipped values released before they are there": Mutant(
        CONSUMER,
        "        consumer_wait(v_pipe, i)\n        release_unread(v_pipe, i, RELEASES)\n",
        "        release_unread(v_pipe, i, RELEASES)\n",
        CUT + "a_warpgroup_without_tokens_releases_tiles_when_they_are_there[{}]",
    ),
    "Hopper: warpgroups with tokens of their own in batches of prompts": Mutant(
        "kernels/hopper/choice.py",
        "num_tokens <= MOST_OF_APART * num_seqs",
        "num_tokens <= 2 * MOST_OF_APART * num_seqs",
        "test_dispatch.py::test_warpgroups_have_tokens_of_their_own_where_sequences_have_few_on_average[2049-False]",
    ),
    "Hopper: a partial of another row block": Mutant(
        PARTIALS, "present = split + i < num_splits", "present = split + i <= num_splits", CUT + "features[{}-4000]"
    ),
    "Hopper: as many splits of prompts as of decoding sequences": Mutant(
        CUTS, "gl.where(counts == 1, longer, 0)", "longer", CUT + AS_SAID + "[{}-3000-127]"
    ),
    "Hopper: a partial combined twice": Mutant(
        PARTIALS, "at = i * WARPGROUPS * SIZE", "at = i // 2 * WARPGROUPS * SIZE", CUT + "features[{}-4000]"
    ),
    "Hopper: partials not rescaled": Mutant(
        PARTIALS, "acc += accs[i] * weight[:, None]", "acc += accs[i]", CUT + "features[{}-4000]"
    ),
    "Hopper: further partials read from the first ones": Mutant(
        PARTIALS, "of_acc += AT_ONCE * WARPGROUPS * SIZE", "pass", CUT + "more_splits_than_are_combined_at_once[64]"
    ),
    "Hopper: no sinks where a row block sees no keys": Mutant(
        PRODUCER,
        "(pos >= kv_stop) & (split < num_splits - 1)",
        "pos >= kv_stop",
        SIMULATED + "splits[((64, 500), (0, 50), (20, 0))-{'sinks': True, 'softcap': 20.0}-16]",
    ),
    "Hopper: partials of all parts of columns in one slot": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "            of_row_block += part\n",
        "            of_row_block += 0\n",
        CUT + "any_order_of_programs_gives_the_same_bits[512-lens2-20000-seeds2]",
    ),
    "Hopper: combined partials of all parts in the first columns": Mutant(
        "kernels/hopper/partials.py",
        "offsets += first_column_of(work, outputs, HEAD_DIM_V, PARTS)",
        "offsets += 0 * work.split",
        "kernels/test_cuts.py::test_widths[512-512]",
    ),
    "Hopper: the right half of a tile masked as the left one": Mutant(
        "kernels/hopper/softmax.py",
        "right = show_columns(right, first - COLUMNS // 2, last - COLUMNS // 2, False)",
        "right = show_columns(right, first, last, False)",
        SIMULATED + "heads_of_128[{}-16]",
    ),
    "Hopper: all pieces of a partial in the first columns": Mutant(
        "kernels/hopper/partials.py",
        "gl.store(ptrs + (FIRST + i * EACH), parts[i], mask=owned[:, None])",
        "gl.store(ptrs + FIRST, parts[i], mask=owned[:, None])",
        "kernels/test_cuts.py::test_widths[64-184]",
    ),
    "Hopper: all pieces of a split in the first columns": Mutant(
        "kernels/hopper/results.py",
        "gl.store(ptrs + (FIRST + i * COLUMNS), part, mask=inside)",
        "gl.store(ptrs + FIRST, part, mask=inside)",
        SIMULATED + "splits_of_intervals[chunks]",
    ),
    "Hopper: ends of row blocks kept where there is no memory for them": Mutant(
        PRODUCER,
        "(MIXED or (SPLITS and batch.kv.key_begin is None)) and HAS_EDGES",
        "(MIXED or SPLITS) and HAS_EDGES",
        SIMULATED + "splits_of_intervals[chunks]",
    ),
    "Hopper: splits without keys that say nothing": Mutant(
        PRODUCER,
        "store_empty(lse_ptr, stride_lse, num_splits, split, work, BLOCK_T, HEADS)",
        "pass",
        SIMULATED + "splits[((64, 500), (0, 50), (20, 0))-{'sinks': True, 'softcap': 20.0}-16]",
    ),
    "Hopper: partials where the decode launch's are": Mutant(
        "kernels/hopper/launch.py",
        "return max(self.counters, 128 * cdiv(decode, 128))",
        "return self.counters",
        CUT + "scratch_of_cuts_is_apart_from_that_of_the_decode_launch",
    ),
    "Hopper: arrivals where the decode launch's are": Mutant(
        "kernels/hopper/launch.py",
        "self.counters - cut_counter_bytes(self.request.device)",
        "128",
        CUT + "scratch_of_cuts_is_apart_from_that_of_the_decode_launch",
    ),
    "Hopper: intervals with a key more": Mutant(
        CONSUMER, "Sight(begin, end - 1, keys", "Sight(begin, end, keys", SIMULATED + "intervals[{}-16-window]"
    ),
    "Hopper: full tiles of intervals a key too far": Mutant(
        SOFTMAX,
        "> sight.full_stop)",
        "> sight.full_stop + 1)",
        SIMULATED + "tiles_at_whose_edges_intervals_begin_and_end[{}]",
    ),
    "Hopper: full tiles of intervals a key too early": Mutant(
        SOFTMAX,
        "(pos < sight.full_start)",
        "(pos + 1 < sight.full_start)",
        SIMULATED + "tiles_at_whose_edges_intervals_begin_and_end[{}]",
    ),
    "Hopper: values outside of intervals not zeroed": Mutant(
        PRODUCER,
        "kv_low, kv_high = keys.kv_low, keys.kv_high",
        "kv_low, kv_high = 0, seq_len",
        SIMULATED + "tiles_at_whose_edges_intervals_begin_and_end[{}]",
    ),
    "Hopper: values outside of intervals converted": Mutant(
        "kernels/hopper/convert.py",
        "kv_low, kv_high = keys.kv_low, keys.kv_high",
        "kv_low, kv_high = 0, work.seq_len",
        SIMULATED + "tiles_at_whose_edges_intervals_begin_and_end[{'head_dim': 128, 'kv_dtype': torch.float8_e4m3fn}]",
    ),
    "Hopper: intervals of the first row block": Mutant(
        CONSUMER,
        "work.q_start + tokens, tokens < work.q_len",
        "work.q_start + rows % TOKENS, tokens < work.q_len",
        SIMULATED + "intervals[{}-16-window]",
    ),
    "Hopper: a tile of two pages as one box": Mutant(
        PRODUCER,
        "(pos + BLOCK_N <= kv_high) & (pos % PAGE_SIZE + BLOCK_N <= PAGE_SIZE)",
        "(pos + BLOCK_N <= kv_high)",
        SIMULATED + "tiles_that_lie_in_one_page_and_tiles_in_two[528-{}]",
    ),
    "Hopper: a box in the first slots of its page": Mutant(
        PRODUCER,
        "boxes[box] * page_rows + row + (pos + box * KV_BOX) % PAGE_SIZE",
        "boxes[box] * page_rows + row",
        SIMULATED + "pages[NHD-528]",
    ),
    "Hopper: a tile of two pages as one box, where rows are gathered": Mutant(
        "kernels/hopper/gather.py",
        "(pos + BLOCK_N <= stop) & (pos % PAGE_SIZE + BLOCK_N <= PAGE_SIZE)",
        "(pos + BLOCK_N <= stop)",
        SIMULATED + "tiles_that_lie_in_one_page_and_tiles_in_two[131-{'head_dim': 136}]",
    ),
    "Hopper: a tile handed over before its box has arrived": Mutant(
        "kernels/hopper/pipeline.py",
        "count=32 * gl.num_warps() - 1)",
        "count=32 * gl.num_warps())",
        SIMULATED + "tiles_that_lie_in_one_page_and_tiles_in_two[131-{'head_dim': 136}]",
    ),
    "Hopper: a box of keys before the window, where rows are gathered": Mutant(
        GATHER,
        "is_box = (pos >= kv_low) & (pos + BLOCK_N <= stop)",
        "is_box = (pos + BLOCK_N <= stop)",
        SIMULATED + "tiles_that_lie_in_one_page_and_tiles_in_two[131-{'head_dim': 192, 'sliding_window': 100}]",
    ),
    "Hopper: a box of a head's first columns, where rows are gathered": Mutant(
        GATHER,
        "BLOCK_N, 0, BLOCK_N, 0, first_column)",
        "BLOCK_N, 0, BLOCK_N)",
        SIMULATED + "batch_invariant_plans[{'head_dim': 256}-131]",
    ),
    "Hopper: gathered rows of a head's first columns": Mutant(
        GATHER,
        "source += first_column // VEC * VEC",
        "source += 0",
        SIMULATED + "batch_invariant_plans[{'head_dim': 256}-1]",
    ),
    "Hopper: values of the last part from behind the end of a head": Mutant(
        PRODUCER,
        "gl.minimum(first_value, last_part)",
        "first_value",
        SIMULATED + "batch_invariant_plans[{'head_dim': 192}-16]",
    ),
    "Hopper: results of the last part behind the end of a head": Mutant(
        RESULTS,
        "gl.minimum(part * HEAD_DIM_V, outputs.last_part)",
        "part * HEAD_DIM_V",
        SIMULATED + "batch_invariant_plans[{'head_dim': 144}-1]",
    ),
    "Hopper: a last part that begins where the part before it ends": Mutant(
        "kernels/hopper/launch.py",
        "self.request.spec.head_dim_v - self.part_width",
        "self.part_width",
        SIMULATED + "batch_invariant_plans[{'head_dim': 224, 'sinks': True}-16]",
    ),
    "Hopper: boxes of eight rows of 16-bit caches": Mutant(
        "kernels/hopper/tma.py",
        "LEAST_FAST_BOX = 16",
        "LEAST_FAST_BOX = 8",
        BOXES_OF_EIGHT,
    ),
    "Hopper: rows that no 16 bytes divide are gathered": Mutant(
        "kernels/hopper/tma.py",
        "cache.dtype.itemsize == 1 or not has_pieces_of_16_bytes(cache)",
        "cache.dtype.itemsize == 1",
        BOXES_OF_EIGHT,
    ),
    "Hopper: two warpgroups for chunks whose windows are short": Mutant(
        "kernels/hopper/choice.py",
        "if min(request.bounds.max_seq_len, request.keys_seen + flat.block_t) > costs.short_context:",
        "if not is_short(request, costs):",
        "test_dispatch.py::test_chunks_whose_windows_are_a_short_context_have_one_warpgroup",
    ),
    "Hopper: few rows of wide heads that leave SMs idle": Mutant(
        "kernels/hopper/choice.py",
        "if is_idle and is_wide(spec) and not is_widest(spec)",
        "if False and is_wide(spec) and not is_widest(spec)",
        "test_dispatch.py::test_few_rows_of_wide_heads_go_to_the_portable_kernels_where_sms_would_be_idle",
    ),
    "row blocks of windows cut as if they saw all keys": Mutant(
        "kernels/split_kv/choice.py",
        "keys = min(keys, request.keys_seen + config.block_m // request.spec.group_size)",
        "pass",
        "test_dispatch.py::test_row_blocks_that_see_few_keys_of_a_window_are_not_cut",
    ),
    "spare row blocks of equal sequences": Mutant(
        "kernels/split_kv/choice.py",
        "if not request.is_ragged:  # no row block is a spare one",
        "if False:",
        "test_dispatch.py::test_equal_sequences_have_no_spare_row_blocks",
    ),
    "Hopper: no cap too large for a softmax without a maximum": Mutant(
        "kernels/hopper/launch.py",
        "0 < cap <= LARGEST_CAP_WITHOUT_MAXIMUM",
        "0 < cap",
        SIMULATED + "softcap_without_a_running_maximum[{'softcap': 51.0}-16-None]",
    ),
    "Hopper: a running maximum of all capped scores": Mutant(
        "kernels/hopper/launch.py",
        "capped_exponents if has_bounded_scores(spec) else softcap",
        "softcap",
        SIMULATED + "softcap_without_a_running_maximum[{'softcap': 20.0}-16-None]",
    ),
    "Hopper: a polynomial of capped scores that are not small": Mutant(
        SOFTCAP, "mul.f32 limitROW, a, {in_ptx(SMALL)}", "mul.f32 limitROW, a, {in_ptx(2 * SMALL)}", EXPONENTS
    ),
    "Hopper: one coefficient of capped scores for another": Mutant(
        SOFTCAP, "c2_ROW, c1_ROW", "c2_ROW, c0_ROW", EXPONENTS
    ),
    "Hopper: capped scores of a row with another row's factor": Mutant(
        SOFTCAP, 'f"{i // 2 % 2}"', 'f"{i % 2}"', EXPONENTS
    ),
    "Hopper: the first rows say whether a warp's capped scores are small": Mutant(
        SOFTCAP, "setp.le.and.f32 small, largest2, limit1", "setp.le.and.f32 small, largest0, limit0", EXPONENTS
    ),
    "Hopper: all capped scores of a warp by the form that one needs": Mutant(
        SOFTCAP,
        "selp.f32 X, b, a, small;",
        "mov.f32 X, a;",
        SIMULATED + "what_a_warp_holds_changes_no_bit_of_its_other_capped_scores[40.0]",
    ),
    "latents: accumulators of a warp rescaled by its first rows' factors alone": Mutant(
        RESCALE,
        "{2 * numbers + 2}, 0f3F800000, one",
        "{2 * numbers}, 0f3F800000, one",
        SIMULATED + "a_warp_that_rescales_some_rows_of_an_accumulator_rescales_all",
    ),
    "Hopper: the last tile's sums of capped scores alone": Mutant(
        "kernels/hopper/capped.py",
        "sums += sums_of_threads(numbers)",
        "sums = sums_of_threads(numbers)",
        SIMULATED + "softcap_without_a_running_maximum[{'softcap': 20.0}-16-20000]",
    ),
    "Hopper: rows that see no key have a capped score of 0": Mutant(
        "kernels/hopper/capped.py",
        'gl.where(l_i == 0.0, float("-inf"), 0.0)',
        "gl.zeros_like(l_i)",
        SIMULATED + "capped_scores_that_are_all_as_large_as_they_can_be[1]",
    ),
    "Hopper: capped scores of keys that a row does not see": Mutant(
        "kernels/hopper/capped.py",
        "    exponents = hide_unseen(\n"
        "        SCORE_MOD(scores, by_row(scale), scoring.softcap), pos, rows, cols, work, sight, scoring, TOKENS, "
        "False\n    )",
        "    exponents = SCORE_MOD(scores, by_row(scale), scoring.softcap)",
        SIMULATED + "softcap_without_a_running_maximum[{'softcap': 20.0}-16-None]",
    ),
    "Hopper: gathered values of the next tile": Mutant(
        PRODUCER,
        "v_source, v_tile_desc, kv_head, v_pipe, tile_i, of_tile,",
        "v_source, v_tile_desc, kv_head, v_pipe, tile_i, pages,",
        SIMULATED + "pages[NHD-1]",
    ),
    "Hopper: e4m3 results in the rows of the other warpgroup": Mutant(
        RESULTS,
        "return tile.slice(wg * ROWS, ROWS)",
        "return tile.slice(tile.shape[0] - (wg + 1) * ROWS, ROWS)",
        CUT + "outputs_in_e4m3[{}]",
    ),
    "Hopper: columns of e4m3 results left permuted": Mutant(
        RESULTS,
        "undo_permute_for_fp8_operand(staged.load(IN_ROWS))",
        "staged.load(IN_ROWS)",
        SIMULATED + "outputs_in_e4m3[{}-None]",
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
    "Hopper: a free stage taken for a full one": Mutant(
        "kernels/hopper/pipeline.py",
        "wait(pipe.empty, i % STAGES, i // STAGES + 1)",
        "wait(pipe.empty, i % STAGES, i // STAGES)",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: stages overwritten": Mutant(
        "kernels/hopper/pipeline.py",
        "wait(pipe.empty, i % STAGES, i // STAGES + 1)",
        "pass",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: stages read before they are full": Mutant(
        "kernels/hopper/pipeline.py",
        "wait(pipe.full, i % STAGES, i // STAGES, condition)",
        "pass",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: converted tiles not fenced": Mutant(
        "kernels/hopper/pipeline.py",
        "fence_async_shared()  # as in",
        "pass  # as in",
        SIMULATED + "quantised_caches[kv_dtype0-64-16]",
    ),
    "Hopper: staged results not fenced": Mutant(
        RESULTS,
        "        results = loaded\n        fence_async_shared()\n",
        "        results = loaded\n",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: queries never released": Mutant(
        RESULTS,
        "    if not EARLY:\n        consumer_release(q_pipe, work_i)\n    for i in",
        "    for i in",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: queries never released where results are another warpgroup's": Mutant(
        CONSUMER,
        "                consumer_release(q_pipe, work_i)\n            is_last",
        "                pass\n            is_last",
        CUT + "features[{}-20000]",
    ),
    "Hopper: values zeroed while they are loaded": Mutant(
        PRODUCER,
        "wait(v_pipe.full, spare_barrier(v_pipe.empty, edge_i), edge_i // SPARES)",
        "pass",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: zeroed values not fenced": Mutant(
        PRODUCER,
        "        fence_async_shared()\n        expect_bytes(v_pipe.full, stage, 0)",
        "        expect_bytes(v_pipe.full, stage, 0)",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: gathered rows handed over before they arrive": Mutant(
        "kernels/hopper/pipeline.py",
        "async_copy.mbarrier_arrive(pipe.full.index(stage), increment_count=False)",
        "mbarrier.arrive(pipe.full.index(stage), count=32 * gl.num_warps())",
        SIMULATED + "pages[NHD-1]",
    ),
    "Hopper: gathered rows not fenced": Mutant(
        "kernels/hopper/pipeline.py",
        "if is_copied(pipe.full, pipe.empty):",
        "if False:",
        SIMULATED + "pages[NHD-1]",
    ),
    "Hopper: boxes of queries of one head": Mutant(
        "kernels/hopper/runner.py",
        "launch.heads, tokens, columns",
        "1, launch.heads * tokens, columns",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: work by the last row block of each sequence alone": Mutant(
        "kernels/hopper/tile_scheduler.py",
        "seen = counts * (tiles + (first_keys + BLOCK_N - 1) // BLOCK_N) // 2",
        "seen = counts * tiles",
        CUT + AS_SAID + "[{}-3000-40]",
    ),
    "Hopper: the last values released before their product": Mutant(
        ATTEND,
        "    done = warpgroup_mma_wait(0, deps=accs + operands)\n    release_operand(v_pipe, stop - 1)\n",
        "    release_operand(v_pipe, stop - 1)\n    done = warpgroup_mma_wait(0, deps=accs + operands)\n",
        SIMULATED + "any_order_of_events_gives_the_same_bits[64-0]",
    ),
    "Hopper: the next keys not waited for": Mutant(
        ATTEND,
        "k_stage = consumer_wait_without_fence(k_pipe, i + 1, i + 1 < stop)",
        "k_stage = (i + 1) % k_pipe.empty.shape[0]",
        SIMULATED + "any_order_of_events_gives_the_same_bits[64-1]",
    ),
    "Hopper: the next keys waited for where there are none": Mutant(
        ATTEND,
        "k_stage = consumer_wait(k_pipe, tile_i + 1, work.num_tiles > 1)\n    for i in range(tile_i + 1, stop):\n"
        "        pos -= BLOCK_N",
        "k_stage = consumer_wait(k_pipe, tile_i + 1)\n    for i in range(tile_i + 1, stop):\n        pos -= BLOCK_N",
        SIMULATED + "features[{}-None]",
    ),
    "Hopper: a maximum of -inf subtracted": Mutant(
        SOFTMAX,
        "shift = gl.maximum(m_new, LOWEST)",
        "shift = m_new",
        SIMULATED + "products_in_fp8[{'sliding_window': 50, 'softcap': 20.0}-24]",
    ),
    "Hopper: boxes of the first panel": Mutant(
        "kernels/hopper/pipeline.py",
        "column = first_column + i * buffers[0].shape[1] + panel * COLUMNS",
        "column = first_column + i * buffers[0].shape[1]",
        SIMULATED + "widths[192-128]",
    ),
    "Hopper: the counter of work tiles not reset": Mutant(
        PRODUCER, "gl.store(tile_counter, 0)", "pass", SIMULATED + "any_order_of_events_gives_the_same_bits[64-0]"
    ),
    "Hopper: partials not all stored when one thread arrives": Mutant(
        PARTIALS, "    barrier()  # the stores", "    # the stores", CUT + "features[{}-20000]"
    ),
    "Hopper: partials not released": Mutant(PARTIALS, 'sem="acq_rel"', 'sem="relaxed"', CUT + "features[{}-20000]"),
    "Hopper: arrivals not reset": Mutant(PARTIALS, "gl.store(counter, 0)", "pass", CUT + "features[{}-20000]"),
    "latents on Hopper: places overwritten": Mutant(
        LATENTS + "ring.py",
        "wait(ring.empty.index(place), use + 1)",
        "pass",
        SIMULATED + "any_order_of_events_gives_the_same_bits_over_latents[16-None]",
    ),
    "latents on Hopper: places of 64 rows overwritten": Mutant(
        LATENTS + "producer.py", "wait(s.empty[PLACE], use + 1)", "pass", SIMULATED + "latents[40-True-None]"
    ),
    "latents on Hopper: converted latents not fenced": Mutant(
        LATENTS + "producer.py",
        "fence_async_shared()  # tensor cores read",
        "pass  # tensor cores read",
        SIMULATED + "latents[40-True-kv_dtype1]",
    ),
    "latents on Hopper: probabilities not fenced": Mutant(
        LATENTS + "many_rows.py",
        "    s.maximum.index(PARITY).store(m_i)\n    fence_async_shared()\n",
        "    s.maximum.index(PARITY).store(m_i)\n",
        SIMULATED + "latents[40-True-None]",
    ),
    "latents on Hopper: the odd tile's probabilities not waited for": Mutant(
        LATENTS + "many_rows.py", "wait(s.p_full[ODD], odd_use + i)", "pass", SIMULATED + "latents[40-True-None]"
    ),
    "latents on Hopper: the other warpgroup's sum not waited for": Mutant(
        LATENTS + "many_rows.py", "wait(s.total_full, works)", "pass", SIMULATED + "latents[40-True-None]"
    ),
    "latents on Hopper: zeroed latents not fenced": Mutant(
        LATENTS + "few_rows_fp8.py",
        "fence_async_shared()  # TMA overwrites",
        "pass  # TMA overwrites",
        SIMULATED + "any_order_of_events_gives_the_same_bits_over_latents[16-kv_dtype1]",
    ),
    "latents on Hopper: a quarter freed before products have taken it": Mutant(
        LATENTS + "few_rows_fp8.py",
        "        even, odd = value_operands(quarter, OPERAND)\n"
        "        even = warpgroup_mma(even, p, acc[2 * i], is_async=True)\n"
        "        odd = warpgroup_mma(odd, p, acc[2 * i + 1], is_async=True)\n"
        "        # After the products, which wait for the loads: TMA may overwrite a place before a load in flight has "
        "read it.\n"
        "        mbarrier.arrive(s.ring.empty.index(place), count=1)\n",
        "        even, odd = value_operands(quarter, OPERAND)\n"
        "        mbarrier.arrive(s.ring.empty.index(place), count=1)\n"
        "        even = warpgroup_mma(even, p, acc[2 * i], is_async=True)\n"
        "        odd = warpgroup_mma(odd, p, acc[2 * i + 1], is_async=True)\n",
        SIMULATED + "lengths_of_latents[1 of 1-16-kv_dtype1]",
    ),
    "latents in fp8 on Hopper: a quarter freed before a product has taken it": Mutant(
        PRODUCTS,
        "        even = add_product(s, even, acc[2 * i], stage)\n"
        "        mbarrier.arrive(s.ring.empty.index(place_of(s.ring, 4 * tile + 2 * SIDE + i)[0]), count=1)\n",
        "        mbarrier.arrive(s.ring.empty.index(place_of(s.ring, 4 * tile + 2 * SIDE + i)[0]), count=1)\n"
        "        even = add_product(s, even, acc[2 * i], stage)\n",
        ORDERS_OF_PRODUCTS,
    ),
    "latents in fp8 on Hopper: zeroed latents not fenced": Mutant(
        PRODUCTS, "fence_async_shared()  # TMA overwrites", "pass  # TMA overwrites", ORDERS_OF_PRODUCTS
    ),
    "latents in fp8 on Hopper: latents zeroed while keys are multiplied": Mutant(
        PRODUCTS, "wait(s.p_full.index(tile % HANDED), tile // HANDED)", "pass", ORDERS_OF_PRODUCTS
    ),
    "latents in fp8 on Hopper: invisible latents not zeroed": Mutant(
        PRODUCTS, "zero_invisible_rows(s.ring.quarters.index(place), pos, visible)", "pass", ORDERS_OF_PRODUCTS
    ),
    "latents in fp8 on Hopper: probabilities not waited for": Mutant(
        PRODUCTS, "wait(s.p_full.index(stage), use)", "pass", ORDERS_OF_PRODUCTS
    ),
    "latents in fp8 on Hopper: probabilities overwritten": Mutant(
        PRODUCTS, "wait(s.p_empty.index(stage), use + 1)", "pass", ORDERS_OF_PRODUCTS
    ),
    "latents in fp8 on Hopper: probabilities not fenced": Mutant(
        PRODUCTS,
        "    s.alpha.index(stage).store(alpha)\n    fence_async_shared()\n",
        "    s.alpha.index(stage).store(alpha)\n",
        ORDERS_OF_PRODUCTS,
    ),
    "latents in fp8 on Hopper: the rope columns of queries at the strides of the others": Mutant(
        PRODUCTS,
        "token * queries.stride_rope_token",
        "token * queries.stride_nope_token",
        SIMULATED + "queries_of_latents_in_two_parts_of_any_strides[40-fields2]",
    ),
    "latents in fp8 on Hopper: keys of probabilities not permuted": Mutant(
        PRODUCTS, "to_fp8(permute_for_fp8_operand(p))", "to_fp8(p)", ORDERS_OF_PRODUCTS
    ),
    "latents in fp8 on Hopper: output not rescaled": Mutant(
        PRODUCTS,
        "s.alpha.index(stage).store(alpha)",
        "s.alpha.index(stage).store(gl.zeros_like(alpha) + 1.0)",
        ORDERS_OF_PRODUCTS,
    ),
    "latents in fp8 on Hopper: the sum not waited for": Mutant(
        PRODUCTS, "wait(s.total_full, works)", "pass", ORDERS_OF_PRODUCTS
    ),
    "latents in fp8 on Hopper: the sum overwritten": Mutant(
        PRODUCTS, "wait(s.total_empty, works + 1)", "pass", ORDERS_OF_PRODUCTS
    ),
    "latents on Hopper: the first partial in the place of the others": Mutant(
        LATENTS + "combine.py",
        "(part * 2 + (part == 0).to(gl.int32))",
        "(part * 2)",
        SIMULATED + "lengths_of_latents[1 of 600-16-None]",
    ),
}

CPU, SHIM = "test_cpu_path.py", "integrations/test_flash_attn.py::test_"
INFER = "integrations/test_flashinfer.py::test_"
INFER_MASKS = "integrations/test_flashinfer_masks.py::test_"
SCHEDULER = "kernels/test_work_tile.py"
TRANSFORMERS, VLLM = "engines/test_transformers.py::test_", "engines/test_vllm.py::test_"
VLLM_MLA = "engines/test_vllm_mla.py::test_"
VLLM_SHARDED, VLLM_SPANS, VLLM_ENCODERS = (
    f"engines/test_vllm_{of}.py::test_" for of in ("sharded", "spans", "encoders")
)
COVERED = "test_service.py::test_warmup_and_workspace_size_cover_batches_between_powers_of_two"
SLICES = "compile/test_warmup.py::test_nothing_compiles_for_slices_of_what_is_read_one_number_at_a_time"
RELAUNCH = "compile/test_relaunch.py::test_tensors_of_another_kind_go_through_the_binder"
OTHER_KINDS = (
    "compile/test_relaunch.py::test_a_step_whose_tensors_are_of_another_kind_goes_through_the_binder[decode, 64]"
)
TENSOR_MAPS = "compile/test_relaunch.py::test_"
INT64 = "compile/test_int64_offsets.py::test_strides_are_multiplied_as_int64"

OUTSIDE = {
    # cpu/
    "an output on the CPU not divided by its scale": Mutant(
        "kernels/cpu/cache_ops.py",
        "x = x.float() / out_scale.view(())",
        "x = x.float()",
        QUANTISED_OUT + "a_float32_result_is_rounded_once[block]",
    ),
    "an output on the CPU rounded twice": Mutant(
        "kernels/cpu/attention.py",
        "torch.float32 if exact or cache",
        "torch.float32 if cache",
        QUANTISED_OUT + "results_are_not_rounded_to_16_bits_first",
    ),
    # distributed/
    "ranks: a token on two ranks": Mutant(
        "distributed/sharded.py",
        "held = (run % self.world_size == self.rank)",
        "held = (run % self.world_size <= self.rank)",
        "test_distributed.py::test_every_token_is_on_one_rank_at_the_end_of_its_pages",
    ),
    "ranks: the last turn is not cut": Mutant(
        "distributed/sharded.py",
        "(whole % turn - self.rank * size).clamp(0, size)",
        "(whole % turn > self.rank * size) * size",
        "test_distributed.py::test_every_token_is_on_one_rank_at_the_end_of_its_pages",
    ),
    "ranks: early queries see a higher rank's keys": Mutant(
        "distributed/ring.py",
        "query_lens = [length(late) for _, late in queries]",
        "pass",
        "test_distributed.py::test_the_steps_of_a_ring_see_each_visible_key_once",
    ),
    "ranks: tokens of no sequence with any lse": Mutant(
        "distributed/sharded.py",
        'state.lse.fill_(float("-inf"))',
        "pass",
        "test_distributed.py::test_two_ranks_agree_with_the_oracle[tokens of no sequence]",
    ),
    "ranks: sinks counted on each rank": Mutant(
        "distributed/arguments.py",
        "copy_(sinks.expand_as(state.lse))",
        "copy_((sinks + 0.7).expand_as(state.lse))",
        "test_distributed.py::test_two_ranks_agree_with_the_oracle[decode, sinks]",
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
    "shared prefix: own keys counted when the plan was made": Mutant(
        "kernels/shared_prefix/runner.py",
        "        torch.sub(self.batch.seq_lens, self.num_shared, out=self.own_lens)\n",
        "        if not self.own_lens.any():\n"
        "            torch.sub(self.batch.seq_lens, self.num_shared, out=self.own_lens)\n",
        SHARED + "a_plan_reads_lengths_and_pages_that_were_changed_in_place",
    ),
    "shared prefix: query starts of the first call": Mutant(
        "kernels/shared_prefix/runner.py",
        "if self.batch.cu_seqlens_q is not None:",
        "if self.batch.cu_seqlens_q is None:",
        SHARED + "query_starts_that_were_changed_in_place",
    ),
    "shared prefix: a level begins at the table's first page": Mutant(
        "kernels/shared_prefix/runner.py",
        "before[first:end] = [keys + num_keys for keys in before[first:end]]",
        "before[first:end] = [num_keys for keys in before[first:end]]",
        SHARED + "shared_prefixes_give_what_a_flat_plan_gives",
    ),
    "shared prefix: a slice of a table taken for a whole one": Mutant(
        "kernels/shared_prefix/runner.py",
        "stride = table.stride(0)",
        "stride = table.shape[1]",
        SHARED + "a_table_that_is_a_slice_of_a_wider_one",
    ),
    # intervals and trees
    "intervals at offsets as if there were none": Mutant(
        "intervals.py",
        "    if batch.query_offsets is None:",
        "    if True:",
        RULES + "[causal-offsets2]",
    ),
    "a key in a prefix and in a window": Mutant(
        "intervals.py", "(end - size).clamp(min=prefix)", "(end - size).clamp(min=prefix - 1)", RULES
    ),
    "a key ahead too few": Mutant(
        "intervals.py", "tokens.position + 1 + right", "tokens.position + right", RULES + "[window-None]"
    ),
    "tokens of no sequence see keys": Mutant(
        "intervals.py", "torch.where(tokens.owned, tokens.seq_len, 0)", "tokens.seq_len", RULES
    ),
    "the text before a span hidden from it": Mutant(
        "intervals.py",
        "begin = torch.minimum(begin, torch.where(inside, first[which[span]] - at + position, begin))",
        "begin = torch.where(inside, first[which[span]] - at + position, begin)",
        RULES + "[spans-None]",
    ),
    "int32 words with their sign": Mutant(
        "draft_trees.py",
        "return wide & 0xFFFFFFFF if words.dtype is torch.int32 else wide.clone()",
        "return wide.clone()",
        TREES + "words_of_every_dtype_are_unsigned",
    ),
    "windows by the depths of the first sequence": Mutant(
        "draft_trees.py",
        "(torch.arange(words.shape[0], device=words.device) - tokens.query)[:, None] + draft",
        "(0 * tokens.query)[:, None] + draft",
        TREES + "windows_of_drafts_are_as_a_plain_program_says[1-None]",
    ),
    "windows of drafts before the sequence": Mutant(
        "draft_trees.py",
        "torch.minimum(begin.clamp(min=0), tokens.seq_len)",
        "torch.minimum(begin, tokens.seq_len)",
        TREES + "windows_of_drafts_are_as_a_plain_program_says[60-None]",
    ),
    "CPU: intervals past the sequence": Mutant(
        "kernels/cpu/attention.py",
        "begin, end = begin.clamp(min=0), torch.minimum(end, seq_lens)",
        "begin = begin.clamp(min=0)",
        INTERVALS + "every_kind_of_interval[anywhere-1]",
    ),
    "CPU: drafts past the last one": Mutant(
        "kernels/cpu/attention.py",
        "(draft >= 0) & (draft < q_len)",
        "(draft >= 0)",
        TREES + "drafts_among_the_keys[20]",
    ),
    "a chunk begins anywhere": Mutant(
        "intervals.py",
        "tokens.position // size * size, tokens.position + 1",
        "tokens.position + 1 - size, tokens.position + 1",
        BAD_INPUT + "the_calls_are_right_before_anything_is_replaced[intervals.chunked_local]",
    ),
    "a span seen from outside": Mutant(
        "intervals.py",
        "(before > 0) & (at < stop[span])",
        "before > 0",
        BAD_INPUT + "the_calls_are_right_before_anything_is_replaced[intervals.bidirectional_spans]",
    ),
    "parents without their parents": Mutant(
        "draft_trees.py",
        "range(num_drafts.bit_length())",
        "range(1)",
        BAD_INPUT + "the_calls_are_right_before_anything_is_replaced[draft_trees.from_parents]",
    ),
    "a window by flat positions": Mutant(
        "draft_trees.py",
        "tokens.position - tokens.query + depth + 1 - size",
        "tokens.position + 1 - size",
        TREES + "siblings_have_equal_windows",
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
        "checks.py",
        "            and (batch.max_tokens is None or num_tokens <= batch.max_tokens)\n",
        "",
        BAD_INPUT + "what_a_batch_says_of_each_token_is_checked_before_a_launch",
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
        ATTENTION + "quantised_caches[dtype0-kv_dtype0-token]",
    ),
    "CPU: flat tables by the first sequence": Mutant(
        "kernels/cpu/attention.py",
        "batch.cu_pages[seqs].long()[:, None] + entry",
        "batch.cu_pages[seqs * 0].long()[:, None] + entry",
        ATTENTION + "flat_table",
    ),
    "CPU: a sink's value is the last key's": Mutant(
        "kernels/cpu/attention.py",
        "p[..., : kv_pos.shape[0]]",
        "p[..., -kv_pos.shape[0] :]",
        ATTENTION + "features[sinks-1]",
    ),
    "CPU: ALiBi without abs": Mutant(
        "kernels/cpu/attention.py",
        "(q_pos[..., None] - kv_pos).abs()",
        "(q_pos[..., None] - kv_pos)",
        ATTENTION + "features[alibi bidirectional-1]",
    ),
    "CPU: exponentials not divided by their sum": Mutant(
        "kernels/cpu/softmax.py",
        "(p / total)",
        "torch.exp(scores - (top + torch.log(total)))",
        ATTENTION + "probabilities_add_up_to_one_at_large_scores",
    ),
    "CPU: autocast on": Mutant(
        "kernels/cpu/attention.py",
        '@torch.autocast("cpu", enabled=False)\n',
        "",
        CPU + "::test_autocast_changes_nothing",
    ),
    "CPU: an lse of +inf taken for a weight": Mutant(
        "kernels/cpu/combine.py",
        'lses.masked_fill(lses == float("inf"), float("-inf"))',
        "lses",
        MERGE + "::test_a_state_with_an_infinite_lse_is_empty",
    ),
    "CPU: what an empty state holds is read": Mutant(
        "kernels/cpu/combine.py",
        "torch.where(weight[..., None] == 0, 0.0, weight[..., None] * state.out.float())",
        "weight[..., None] * state.out.float()",
        MERGE + "::test_what_an_empty_state_holds_does_not_matter",
    ),
    "CPU: padding written": Mutant(
        "kernels/cpu/cache_ops.py",
        "(slot_mapping >= 0).nonzero()",
        "(slot_mapping >= -1).nonzero()",
        WRITE + "::test_nothing_to_write",
    ),
    "CPU: int8 down to -128": Mutant(
        "kernels/cpu/cache_ops.py",
        ".clamp(-limit, limit)",
        ".clamp(-limit - 1, limit)",
        WRITE + "::test_ties_subnormals_and_any_bits_of_float32",
    ),
    "CPU: int8 rounded down": Mutant(
        "kernels/cpu/cache_ops.py",
        "x.round().nan_to_num(0.0)",
        "x.floor().nan_to_num(0.0)",
        WRITE + "::test_every_float16_is_rounded_to_the_nearest",
    ),
    "CPU: pages copied backwards": Mutant(
        "kernels/cpu/cache_ops.py", "target[to_page] = source[from_page]", "target[from_page] = source[to_page]", COPY
    ),
    "CPU: a slot past the pool found too late": Mutant(
        "kernels/cpu/cache_ops.py",
        "int(slot_mapping.max()) >= num_slots",
        "int(slot_mapping.max()) > num_slots",
        CPU + "::test_a_slot_past_the_pool_leaves_the_cache_as_it_was",
    ),
    "CPU: records without a least scale": Mutant(
        "kernels/cpu/cache_ops.py",
        ".clamp(min=SMALLEST_RECORD_SCALE)",
        "",
        LATENT + "::test_records_are_those_of_vllm",
    ),
    "CPU: records read with one scale": Mutant(
        "kernels/cpu/attention.py",
        "* scales[..., None]",
        "* scales[..., :1, None]",
        CPU + "::test_latents",
    ),
    # nouns and verbs
    "halves of queries not compared": Mutant(
        "checks.py",
        "            pair_fits\n            and num_heads",
        "            num_heads",
        "test_api.py::test_queries_to_latents_are_checked_before_anything_is_written",
    ),
    "keys taken for latents": Mutant(
        "cache.py",
        '"signature": (k.dtype, num_kv_heads, head_dim, head_dim_v, False)',
        '"signature": (k.dtype, num_kv_heads, head_dim, head_dim_v, num_kv_heads == 1)',
        "test_api.py::test_queries_to_latents_are_checked_before_anything_is_written",
    ),
    "devices not compared": Mutant(
        "checks.py",
        "    if not q.device == cache.device == batch.device:",
        "    if False:",
        "test_api.py::test_tensors_on_two_devices_are_refused",
    ),
    "devices not compared where all else fits": Mutant(
        "checks.py",
        "            and first.device == cache.device == batch.device\n",
        "",
        "test_api.py::test_tensors_on_two_devices_are_refused",
    ),
    "strides of scales not compared": Mutant(
        "cache.py",
        "k_scale.shape != v_scale.shape or k_scale.stride() != v_scale.stride()",
        "k_scale.shape != v_scale.shape",
        "test_api.py::test_scales_of_keys_and_values_have_the_same_strides",
    ),
    # hopper/, and what only a compiler sees
    "Hopper: splits overlap": Mutant(
        "kernels/hopper/work_tile.py",
        "(stop - start) * (split + 1) // num_splits",
        "(stop - start) * (split + 1) // num_splits + 1",
        SCHEDULER,
    ),
    "Hopper: the last tile forgotten": Mutant(
        "kernels/hopper/work_tile.py",
        "(kv_stop + BLOCK_N - 1) // BLOCK_N, start + 1)",
        "kv_stop // BLOCK_N, start + 1)",
        SCHEDULER,
    ),
    "Hopper: the window of the last query": Mutant(
        "kernels/hopper/work_tile.py",
        "gl.maximum(first_pos + token - window_left, 0)",
        "gl.maximum(first_pos + token + 1 - window_left, 0)",
        SCHEDULER,
    ),
    "Hopper: keys past the end are visible": Mutant(
        "kernels/hopper/work_tile.py",
        "gl.minimum(work.first_pos + work.q_len + window_right, work.seq_len)",
        "work.first_pos + work.q_len + window_right",
        SCHEDULER,
    ),
    "Hopper: intervals past the sequence": Mutant(
        "kernels/hopper/work_tile.py", "gl.maximum(gl.minimum(end, seq_len), 0)", "gl.maximum(end, 0)", SCHEDULER
    ),
    "Hopper: rows that see nothing widen the range": Mutant(
        "kernels/hopper/work_tile.py", "gl.max(gl.where(begin < end, end, 0), 0)", "gl.max(end, 0)", SCHEDULER
    ),
    "Hopper: tiles without masks that some rows do not see": Mutant(
        "kernels/hopper/work_tile.py",
        "gl.max(begin, 0), gl.min(gl.where(owned, end, 2147483647), 0)",
        "gl.min(begin, 0), gl.min(gl.where(owned, end, 2147483647), 0)",
        SCHEDULER,
    ),
    "Hopper: keys of a token that sees nothing": Mutant(
        "kernels/hopper/work_tile.py",
        "gl.maximum(kv_high, gl.where(last_begin < last_end, last_end, 0))",
        "gl.maximum(kv_high, last_end)",
        SCHEDULER,
    ),
    "Hopper: keys that the last token sees forgotten": Mutant(
        "kernels/hopper/work_tile.py",
        "gl.maximum(kv_high, gl.where(last_begin < last_end, last_end, 0))",
        "kv_high",
        SCHEDULER,
    ),
    "Hopper: a matrix of too few columns": Mutant(
        "kernels/hopper/tma.py",
        "num_columns = dim if head >= slot else (num_heads - 1) * head + dim",
        "num_columns = dim",
        SCHEDULER,
    ),
    "Hopper: a matrix a row short": Mutant(
        "kernels/hopper/tma.py",
        "num_rows = last // slot + 1\n",
        "num_rows = last // slot\n",
        SCHEDULER,
    ),
    "Hopper: heads that overlap slots": Mutant(
        "kernels/hopper/tma.py", " or (head < slot and (num_heads - 1) * head + dim > slot)", "", SCHEDULER
    ),
    "Hopper: unaligned memory": Mutant(
        "kernels/hopper/tma.py",
        "None if tensor.data_ptr() % 16 else _matrix_of",
        "None if False else _matrix_of",
        SCHEDULER,
    ),
    "Hopper: as many splits as SMs": Mutant(
        "kernels/hopper/choice.py",
        ", costs.hopper_max_splits)",
        ", 1000)",
        "test_dispatch.py::test_keys_are_split_where_work_tiles_of_prompts_are_few",
    ),
    "Hopper: more states of splits than there is room for": Mutant(
        "kernels/hopper/choice.py",
        "request.bounds.num_tokens * request.spec.num_q_heads * launch",
        "request.bounds.num_tokens * launch",
        "test_dispatch.py::test_keys_are_split_where_work_tiles_of_prompts_are_few",
    ),
    "Hopper: a window counts as all keys": Mutant(
        "kernels/hopper/choice.py",
        "keys = tree.power_of_two(request.keys_seen)",
        "keys = tree.power_of_two(request.bounds.max_seq_len)",
        "test_dispatch.py::test_wide_heads_with_more_rows_than_a_small_tile_go_to_the_hopper_kernel",
    ),
    "warm-up without the second kind of boxes of long contexts": Mutant(
        "kernels/hopper/launch.py",
        "*absent, self.is_long, *states",
        "*absent, *states",
        "compile/test_warmup.py::test_nothing_compiles_after_warmup[pages of 1072, heads of 256-False]",
    ),
    "plans with kernels of their own": Mutant(
        "plan.py",
        "        if not missing and launch",
        "        if launch",
        COVERED,
    ),
    "plans with more scratch than their corners": Mutant(
        "plan.py",
        "with_most_partitions().scratch_size().total <= most:\n",
        "with_most_partitions().scratch_size().total <= max(most, 1 << 40):\n",
        "test_service.py::test_a_launch_between_points_has_its_own_number_of_sequences",
    ),
    "an upper corner that is exceeded": Mutant(
        "corners.py",
        "[*is_upper, *lens, *of_kind]",
        "[*of_kind, *lens]",
        "test_service.py::test_corners_are_points_of_limits_and_the_upper_one_is_not_exceeded",
    ),
    "warm-up without work tiles between powers of two of queries": Mutant(
        "corners.py",
        "{*lens, *kinds[num_seqs]}",
        "{*lens}",
        "test_service.py::test_corners_are_points_of_limits_and_the_upper_one_is_not_exceeded",
    ),
    "warm-up without the upper corners of limits": Mutant(
        "corners.py",
        "around(grid, least)[-1], around(grid, most)[0]",
        "around(grid, least)[-1], most",
        "test_service.py::test_corners_are_points_of_limits_and_the_upper_one_is_not_exceeded",
    ),
    "as many sequences as at the upper corner": Mutant(
        "plan.py",
        "return with_sequences(upper, request.num_seqs), ",
        "return upper, ",
        "test_service.py::test_a_launch_between_points_has_its_own_number_of_sequences",
    ),
    "workspace_size without the most partitions": Mutant(
        "service.py",
        "max(launch.with_most_partitions().scratch_size().total for launch in launches)",
        "max(launch.scratch_size().total for launch in launches)",
        "test_service.py::test_a_workspace_of_the_size_that_limits_need_serves_scratch_that_does_not_grow_with_keys",
    ),
    "kernels compiled for aligned lengths alone": Mutant(
        "kernels/launcher.py",
        '"seq_lens", ',
        "",
        SLICES,
    ),
    "kernels compiled for aligned new slots alone": Mutant(
        "kernels/launcher.py",
        '"slot_mapping", ',
        "",
        SLICES,
    ),
    "Hopper: one kernel for results and for states": Mutant(
        "kernels/hopper/launch.py",
        "self.is_long, *states, **constexprs_of(self)",
        "self.is_long, **constexprs_of(self)",
        "compile/test_warmup.py::test_launches_with_equal_keys_are_compiled_for_the_same",
    ),
    "Hopper: states of odd numbers of splits are not warmed up": Mutant(
        "kernels/hopper/launch.py",
        "return self, replace(self, num_splits=other)",
        "return (self,)",
        "test_service.py::test_states_of_odd_and_even_numbers_of_splits_are_warmed_up",
    ),
    "warm-up: appends of few and of many tokens are one": Mutant(
        "service.py",
        "(blank.append and as_appending(launch), key)",
        "(blank.append, key)",
        "compile/test_warmup.py::test_one_kernel_is_warmed_up_with_new_tokens_and_without_them",
    ),
    "warm-up with sinks in float32": Mutant(
        "empty_launches.py",
        "dtype or spec.dtype",
        "dtype or torch.float32",
        "compile/test_warmup.py::test_sinks_of_the_dtype_that_warmup_was_told_of_compile_nothing",
    ),
    "batch-invariant tiles as short as contexts": Mutant(
        "kernels/split_kv/choice.py",
        "        config, reason = invariant_config(request)\n",
        "        config, reason = invariant_config(request)\n        config = shrunk(config, request)\n",
        "test_dispatch.py::test_tiles_are_no_longer_than_what_a_query_sees_where_that_is_little",
    ),
    "more stages than shared memory has room for": Mutant(
        "kernels/hopper/choice.py",
        "- OTHER_SHARED_MEMORY - queries",
        "- OTHER_SHARED_MEMORY",
        "test_dispatch.py::test_the_hopper_kernel_serves_heads_of_up_to_512_in_parts_of_their_values",
    ),
    "Hopper: few rows that leave SMs idle": Mutant(
        "kernels/hopper/choice.py",
        "if is_idle and (has_few_rows or not cuts)",
        "if is_idle and not cuts",
        "test_dispatch.py::test_wide_heads_with_more_rows_than_a_small_tile_go_to_the_hopper_kernel",
    ),
    "Hopper: rounds of programs that are not whole": Mutant(
        "kernels/hopper/choice.py",
        "return cdiv(num_work_tiles * number, num_sms) * (keys / number + cost)",
        "return num_work_tiles * number / num_sms * (keys / number + cost)",
        "test_dispatch.py::test_more_splits_are_taken_only_for_a_tenth_of_the_time",
    ),
    "Hopper: partials that cost nothing": Mutant(
        "kernels/hopper/choice.py",
        "(KEYS_OF_PARTIAL if number > 1 else 0)",
        "0",
        "test_dispatch.py::test_more_splits_are_taken_only_for_a_tenth_of_the_time",
    ),
    "Hopper: more splits for nothing": Mutant(
        "kernels/hopper/choice.py",
        "<= MOST_TIME_OF_ROUNDS * keys_in_time(splits)",
        "<= keys_in_time(splits)",
        "test_dispatch.py::test_more_splits_are_taken_only_for_a_tenth_of_the_time",
    ),
    "Hopper: room for one round of splits": Mutant(
        "kernels/hopper/launch.py",
        "return rounds * 64 * self.config.num_warpgroups",
        "return min(rounds, 1) * 64 * self.config.num_warpgroups",
        "test_dispatch.py::test_chunks_have_splits_with_which_rounds_of_programs_end_together",
    ),
    "Hopper: more rounds of splits than there is room for": Mutant(
        "kernels/hopper/choice.py",
        "most = min(most, launch.rounds_of_splits * device.num_sms // num_work_tiles)\n        return",
        "return",
        "test_dispatch.py::test_chunks_have_splits_with_which_rounds_of_programs_end_together",
    ),
    "Hopper: rounds of as many keys for every tile": Mutant(
        "kernels/hopper/choice.py",
        "return rounds * cdiv(keys, config.block_n) * config.block_n",
        "return rounds",
        "test_dispatch.py::test_windows_of_few_keys_have_one_warpgroup_if_its_rounds_have_fewer_keys",
    ),
    "Hopper: short chunks are not split": Mutant(
        "kernels/hopper/choice.py",
        "or (is_chunk(request) and request.keys_seen >= LEAST_SPLIT_OF_CHUNK)",
        "",
        "test_dispatch.py::test_few_queries_take_the_hopper_kernel_with_one_warpgroup",
    ),
    "Hopper: two warpgroups for few rows of ragged batches": Mutant(
        "kernels/hopper/choice.py",
        "is_short(request, costs) or rounded(request)[0] <= TALL",
        "is_short(request, costs)",
        "test_dispatch.py::test_few_queries_take_the_hopper_kernel_with_one_warpgroup",
    ),
    "Hopper: two warpgroups for narrow heads with a softcap": Mutant(
        "kernels/hopper/choice.py",
        " or is_capped_and_narrow(request.spec)",
        "",
        "test_dispatch.py::test_few_queries_take_the_hopper_kernel_with_one_warpgroup",
    ),
    "Hopper: splits and a decode launch": Mutant(
        "kernels/hopper/choice.py",
        "request.is_ragged and launch.num_splits == 1",
        "request.is_ragged",
        "test_dispatch.py::test_keys_are_split_where_work_tiles_of_prompts_are_few",
    ),
    "Hopper: the kernel of another layer relaunched": Mutant(
        "kernels/hopper/runner.py",
        "facts = cache.kind, q.stride()",
        "facts = q.stride()",
        RELAUNCH + "[sm90-prompt-128-hopper]",
    ),
    "Hopper: matrices of a cache of more pages": Mutant(
        "kernels/hopper/runner.py",
        "known = q.shape[0], q.stride(), cache.kind, cache.num_pages,",
        "known = q.shape[0], q.stride(), cache.kind,",
        TENSOR_MAPS + "a_tensor_map_is_encoded_once_for_each_address_shape_and_strides",
    ),
    "Hopper: ever more tensor maps": Mutant(
        "kernels/tensor_maps.py",
        "@lru_cache(maxsize=KEPT)",
        "@lru_cache(maxsize=None)",
        TENSOR_MAPS + "kept_tensor_maps_are_bounded_and_keep_no_memory",
    ),
    "Hopper: shapes of tensor maps in int64": Mutant(
        "triton_internals.py",
        '*["i32"] * rank, *["i64"] * rank',
        '*["i64"] * rank, *["i64"] * rank',
        TENSOR_MAPS + "the_launcher_of_tensor_maps_is_that_of_descriptors",
    ),
    "a profiler is told of first launches only": Mutant(
        "triton_internals.py",
        "if is_observed() or active.get_current_device()",
        "if active.get_current_device()",
        TENSOR_MAPS + "a_profiler_is_told_of_every_launch",
    ),
    "a launch of other numbers": Mutant(
        "kernels/launcher.py",
        "kind is int or value is None:\n        return value\n",
        "kind is int or value is None:\n        return None\n",
        OTHER_KINDS,
    ),
    "True taken for 1 among the arguments of a launch": Mutant(
        "kernels/launcher.py",
        "return kind, value  #",
        "return value  #",
        "compile/test_relaunch.py::test_kinds_differ_where_triton_compiles_another_kernel",
    ),
    "packed keys at an odd place taken for others": Mutant(
        "cache.py",
        "x.stride(), x.storage_offset() % 2, is_small",
        "x.stride(), is_small",
        "test_packed_cache.py::test_it_is_what_the_constructor_makes",
    ),
    "a part of a workspace at its beginning": Mutant(
        "kernels/scratch.py",
        "self.workspace.data_ptr() + self.first",
        "self.workspace.data_ptr()",
        "compile/test_relaunch.py::test_the_binder_gets_tensors_for_parts_of_a_workspace",
    ),
    "a launch with the tensors of an earlier step": Mutant(
        "kernels/launcher.py",
        "found._replace(fixed=passed)",
        "found",
        "compile/test_relaunch.py::test_a_relaunch_passes_what_the_binder_passes[sm90-plain-decode-128]",
    ),
    "a plan with rounded bounds": Mutant(
        "plan.py",
        "bounds or launch.request.bounds",
        "launch.request.bounds",
        "test_dispatch.py::test_decoding_sequences_grow_for_64_steps_with_one_decision",
    ),
    "taller tiles where row blocks are cut": Mutant(
        "kernels/split_kv/choice.py",
        "has_room and fills(request, block_m, config.programs_per_sm)",
        "has_room",
        "test_dispatch.py::test_taller_batch_invariant_tiles_are_for_devices_that_round_them_alike",
    ),
    "a decision of forgotten trees": Mutant(
        "plan.py",
        "CHOICES.append(decide_once)",
        "",
        "test_dispatch.py::test_a_decision_is_kept_until_trees_are_forgotten",
    ),
    "a decision of other families": Mutant(
        "plan.py",
        "families = tuple(FAMILIES.items())",
        "families = ()",
        "test_dispatch.py::test_a_decision_is_that_of_the_families_there_are",
    ),
    "a tensor of other strides relaunched": Mutant(
        "kernels/launcher.py",
        "kinds += not at & 15, tensor.dtype, tensor.stride()",
        "kinds += not at & 15, tensor.dtype",
        RELAUNCH + "[sm80-decode, split-64-split_kv]",
    ),
    "K's head offset in int32, compiled": Mutant(
        "kernels/primitives.py",
        "slot, kv_head = slot.to(tl.int64), kv_head.to(tl.int64)",
        "slot = slot.to(tl.int64)",
        INT64 + "[other value width-True]",
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
    "flash_attn: halves rotated as pairs": Mutant(
        "integrations/flash_attn/kvcache.py",
        "if self.interleaved else rotated.split(half, -1)",
        "if not self.interleaved else rotated.split(half, -1)",
        SHIM + "append_then_attend",
    ),
    "flash_attn: queries rotated alike under a mask": Mutant(
        "integrations/flash_attn/kvcache.py",
        "device=q.device) * int(local))",
        "device=q.device) * 0)",
        SHIM + "append_then_attend",
    ),
    "flash_attn: queries rotated as keys without a mask": Mutant(
        "integrations/flash_attn/kvcache.py",
        "if fused and (local or new.length == 1) and",
        "if fused and",
        SHIM + "attention_rotates_where_queries_and_keys_have_one_position",
    ),
    "new values of another dtype relaunched": Mutant(
        "kernels/launcher.py",
        "kinds += not at & 15, part.dtype",
        "kinds.append(not at & 15)",
        "compile/test_relaunch.py::test_a_relaunch_that_writes_new_tokens_passes_what_the_binder_passes[e4m3]",
    ),
    "a table of other strides relaunched": Mutant(
        "kernels/launcher.py",
        "addresses.append(part)\n            kinds.append(part)",
        "addresses.append(part)",
        "compile/test_relaunch.py::test_a_relaunch_that_rotates_passes_what_the_binder_passes",
    ),
    "flash_attn: a slot past the capacity written": Mutant(
        "integrations/flash_attn/kvcache.py",
        "(positions >= 0) & (positions < self.capacity), slot, -1)",
        "(positions >= 0), slot, -1)",
        SHIM + "a_cache_is_never_overrun_where_lengths_cannot_be_read",
    ),
    "flash_attn: rows in order": Mutant(
        "integrations/flash_attn/kvcache.py",
        "multiples(batch, row_tokens, device, dtype) if rows is None else rows.to(dtype) * row_tokens",
        "multiples(batch, row_tokens, device, dtype)",
        SHIM + "batch_index_left_padding_and_default_length",
    ),
    "FlashInfer: an lse in base e": Mutant(
        "integrations/flashinfer/planned.py",
        'if base == "ln" else sums.mul_(LOG2E)',
        'if base != "" else sums.mul_(LOG2E)',
        INFER + "decode_attends_to_pages",
    ),
    "FlashInfer: an lse that is written only if it is returned": Mutant(
        "integrations/flashinfer/planned.py",
        "wants_lse = a.return_lse or lse is not None",
        "wants_lse = a.return_lse",
        "integrations/test_flashinfer_names.py::test_an_lse_buffer_is_written_whether_or_not_the_lse_is_returned",
    ),
    "FlashInfer: an argument that is not served": Mutant(
        "integrations/flashinfer/signatures.py",
        "if values[name] is not defaults.get(name):",
        "if False:",
        "integrations/test_flashinfer_names.py::test_each_argument_of_a_function_with_a_table_is_served_or_refused_by_name",
    ),
    "FlashInfer: states merged by lse in base 2": Mutant(
        "integrations/flashinfer/cascade.py",
        "State(v, s.float() / LOG2E)",
        "State(v, s.float())",
        INFER + "states_merge_in_base_2",
    ),
    "FlashInfer: a window without the query's own key": Mutant(
        "integrations/flashinfer/arguments.py",
        "None if self.window_left < 0 else self.window_left + 1",
        "None if self.window_left < 1 else self.window_left",
        INFER + "decode_attends_to_pages",
    ),
    "FlashInfer: a padding row with a last page": Mutant(
        "integrations/flashinfer/planned.py",
        "torch.where(pages > 0, (pages - 1) * page_size + last_page_len.to(pages.device), 0)",
        "(pages - 1).clamp(min=0) * page_size + last_page_len.to(pages.device)",
        INFER + "a_padding_row_has_no_length_whatever_its_last_page_says",
    ),
    "FlashInfer: lengths that graphs do not see": Mutant(
        "integrations/flashinfer/planned.py",
        "            (self._seq_lens, seq_lens),\n",
        "",
        INFER + "a_decode_wrapper_for_graphs_keeps_its_tensors_and_its_plan",
    ),
    "FlashInfer: a new plan for a captured graph": Mutant(
        "integrations/flashinfer/planned.py",
        "if not self._use_cuda_graph:\n            self._plans = {}",
        "if True:\n            self._plans = {}",
        INFER + "a_decode_wrapper_for_graphs_keeps_its_tensors_and_its_plan",
    ),
    "FlashInfer: the bound of a graph's first batch": Mutant(
        "integrations/flashinfer/planned.py",
        "return seq_lens, min(len(held) * page_size, LONGEST)",
        "return seq_lens, largest(seq_lens)",
        INFER + "a_decode_wrapper_for_graphs_keeps_its_tensors_and_its_plan",
    ),
    "FlashInfer: a cascade causal at every level": Mutant(
        "integrations/flashinfer/cascade.py",
        "causal=causal and i == last",
        "causal=causal",
        INFER + "a_cascade_is_attention_over_prefix_and_own_pages",
    ),
    "FlashInfer: heads first taken for tokens": Mutant(
        "integrations/flashinfer/arguments.py",
        "(k.transpose(0, 1), v.transpose(0, 1))",
        "(k, v)",
        INFER + "ragged_prefill",
    ),
    "FlashInfer: a token appended to a page of another sequence": Mutant(
        "integrations/flashinfer/page.py",
        "held &= entry < kv_indptr[sequence + 1]",
        "held &= entry >= 0",
        INFER + "a_token_without_a_page_raises_on_a_cpu_and_is_left_out_elsewhere",
    ),
    "FlashInfer: masks of sequences that share a byte": Mutant(
        "integrations/flashinfer/masks.py",
        "pad(part.byte(), (0, -len(part) % 8)) for part in mask[: sum(sizes)].split(sizes)",
        "pad(mask[: sum(sizes)].byte(), (0, -sum(sizes) % 8)) for _ in [0]",
        INFER_MASKS + "trees_over_pages[1-NHD-lens0]",
    ),
    "FlashInfer: words of padding rows left out": Mutant(
        "integrations/flashinfer/masks.py",
        "spread[(keys > 0).repeat_interleave(queries).to(words.device)] = words",
        "spread[: len(words)] = words",
        INFER_MASKS + "trees_over_pages[1-NHD-lens0]",
    ),
    "FlashInfer: a mask that graphs do not see": Mutant(
        "integrations/flashinfer/prefill.py",
        '                batch.tree_bits[:num_rows].copy_(seen["tree_bits"], non_blocking=a.non_blocking)\n',
        "                pass\n",
        INFER_MASKS + "captured_graphs_read_the_masks_of_later_plans[a mask]",
    ),
    "FlashInfer: the old mask where a plan has none": Mutant(
        "integrations/flashinfer/masks.py",
        "seen.tril() if causal else seen",
        "seen.tril()",
        INFER_MASKS + "captured_graphs_read_the_masks_of_later_plans[a mask]",
    ),
    "FlashInfer: a scale left out": Mutant(
        "integrations/flashinfer/arguments.py",
        "torch.full_like(like, 1.0 if x is None else x)",
        "torch.full_like(like, 1.0)",
        INFER + "fp8_caches_with_scales",
    ),
    "Transformers: the ring's past a token late": Mutant(
        "integrations/transformers/batching.py",
        "query_offsets=past_lens)",
        "query_offsets=past_lens + 1)",
        TRANSFORMERS + "continuous_batching_writes_the_tokens_of_eager_attention[mistral]",
    ),
    "Transformers: sinks in both parts": Mutant(
        "integrations/transformers/batching.py",
        "return replace(spec, sinks=False)",
        "return spec",
        TRANSFORMERS + "continuous_batching_writes_the_tokens_of_eager_attention[gpt-oss]",
    ),
    "Transformers: a padding row's slot": Mutant(
        "integrations/transformers/batching.py",
        "torch.where(seq_lens > 0, page * page_size + last % page_size, -1)",
        "page * page_size + last % page_size",
        TRANSFORMERS + "the_slot_of_a_new_token",
    ),
    "Transformers: a plan of another step": Mutant(
        "integrations/transformers/batching.py",
        "if held is None or not held[0].is_same(step):",
        "if held is None:",
        TRANSFORMERS + "layers_share_a_plan_and_steps_do_not",
    ),
    "Transformers: a value as wide as its slot": Mutant(
        "integrations/transformers/batching.py",
        "k[..., :head_dim], v[..., :head_dim_v]",
        "k[..., :head_dim], v",
        TRANSFORMERS + "continuous_batching_writes_the_tokens_of_eager_attention[deepseek-v3]",
    ),
    "Transformers: a key as wide as its slot": Mutant(
        "integrations/transformers/batching.py",
        "k[..., :head_dim], v[..., :head_dim_v]",
        "k, v[..., :head_dim_v]",
        TRANSFORMERS + "continuous_batching_writes_the_tokens_of_eager_attention[deepseek-v3-wide-values]",
    ),
    "Transformers: a layer that attends twice": Mutant(
        "integrations/transformers/batching.py",
        "if before is not None and before.is_same(step):",
        "if False:",
        TRANSFORMERS + "a_layer_that_attends_twice_is_refused",
    ),
    "Transformers: a mask of the model's own": Mutant(
        "integrations/transformers/__init__.py",
        "if attention_mask is not None and (cache is None or attention_mask.numel()):",
        "if attention_mask is not None and cache is None:",
        TRANSFORMERS + "a_mask_of_the_model_s_own_is_refused_in_continuous_batching_too",
    ),
    "Transformers: attention that is not reached": Mutant(
        "integrations/transformers/__init__.py",
        "if not all(module._can_set_attn_implementation() for module in decoder):",
        "if False:",
        TRANSFORMERS + "a_model_is_refused_or_writes_the_tokens_of_eager_attention[falcon]",
    ),
    "Transformers: packed sequences taken for one": Mutant(
        "integrations/transformers/__init__.py",
        "if cu_q is None or cu_k is None:",
        "if cu_q is None or cu_k is not None:",
        "engines/test_transformers.py::test_a_vision_tower_attends_within_images_and_windows",
    ),
    "vLLM: a workspace as long as the decoder's context": Mutant(
        "integrations/vllm/plans.py",
        "return max(longest, of_encoder, positions)",
        "return longest",
        "engines/test_vllm_encoders.py::test_plans_stay_within_the_bounds_of_their_workspace",
    ),
    "a launch on the current device": Mutant(
        "triton_internals.py",
        "is_observed() or active.get_current_device() != device:",
        "is_observed():",
        "compile/test_relaunch.py::test_kernels_are_launched_on_the_device_of_their_tensors",
    ),
    "vLLM: a plan of other memory": Mutant(
        "integrations/vllm/plans.py",
        "max_seq_len, seq_lens.shape[0], memory",
        "max_seq_len, seq_lens.shape[0]",
        VLLM + "plans_are_made_once_for_all_layers_and_kept_over_steps",
    ),
    "vLLM: a sequence without a query counted as one": Mutant(
        "integrations/vllm/plans.py",
        "return int(query_start_loc_cpu[count]) == count",
        "return True",
        VLLM + "a_sequence_without_a_query_may_lie_between_others_beside_padding",
    ),
    "vLLM: a window that does not look ahead": Mutant(
        "integrations/vllm/plans.py",
        "replace(spec, causal=False, sliding_window_right=ahead)",
        "replace(spec, causal=False, sliding_window_right=ahead and 0)",
        VLLM + "steps_that_are_not_causal",
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
    "vLLM: scales per token of keys for values": Mutant(
        "integrations/vllm/contract.py",
        "for x in (keys, values))\n    k_scale",
        "for x in (keys, keys))\n    k_scale",
        VLLM + "caches_with_scales_per_token_and_head",
    ),
    "vLLM: drafts of ranks see the keys of the step twice": Mutant(
        "integrations/vllm/sharded.py",
        "            lens = lens - query_lens\n",
        "",
        VLLM_SHARDED + "ranks_that_share_contexts_attend_to_all_keys",
    ),
    "vLLM: drafts of ranks see later ones": Mutant(
        "integrations/vllm/sharded.py",
        "of_own_keys(impl.spec, metadata.causal)",
        "of_own_keys(impl.spec, False)",
        VLLM_SHARDED + "ranks_that_share_contexts_attend_to_all_keys",
    ),
    "vLLM: ranks without keys before the step stop": Mutant(
        "integrations/vllm/sharded.py",
        "has_context=has_context(common)",
        "has_context=bool(lens.any() and seq_lens.all())",
        VLLM_SHARDED + "ranks_that_share_contexts_attend_to_all_keys",
    ),
    "vLLM: graphs captured without a past": Mutant(
        "integrations/vllm/backend.py",
        "step.sharded.has_context = True",
        "step.sharded.has_context = False",
        VLLM_SHARDED + "prompts_without_a_past_do_not_communicate",
    ),
    "vLLM: the last token of an image not seen": Mutant(
        "integrations/vllm/spans.py",
        "found.append((seq, first, last + 1))",
        "found.append((seq, first, last))",
        VLLM_SPANS + "tokens_of_an_image_see_all_of_it",
    ),
    "vLLM: an image seen past the window": Mutant(
        "integrations/vllm/spans.py",
        '"within_window": clamp}',
        '"within_window": False}',
        VLLM_SPANS + "tokens_of_an_image_see_all_of_it",
    ),
    "vLLM: causal encoders": Mutant(
        "integrations/vllm/backend.py",
        "causal=attn_type == base.AttentionType.DECODER,",
        "causal=not encodes or sliding_window is None,",
        VLLM_ENCODERS + "an_encoder_attends_to_the_step_s_own_tokens_in_both_directions",
    ),
    "vLLM: an encoder's keys not written": Mutant(
        "integrations/vllm/backend.py",
        "quire.write_kv(**cut(new, min(slots.shape[0], key.shape[0])), cache=pages)",
        "quire.write_kv(**cut(new, 0), cache=pages)",
        VLLM_ENCODERS + "cross_attention_writes_the_encoder_s_keys_once_and_attends_to_all_of_them",
    ),
    "vLLM: drafts on latents counted as one query each": Mutant(
        "integrations/vllm/mla.py",
        "None if self.one_query_each else self.query_start_loc",
        "None",
        VLLM_MLA + "decodes_attend_to_latents",
    ),
    "vLLM: the scale of latents left out": Mutant(
        "integrations/vllm/mla.py",
        "scale = k_scale if self.kv_dtype == torch.float8_e4m3fn else None",
        "scale = None",
        VLLM_MLA + "latents_of_deepseek_v3_in_fp8_and_in_records",
    ),
    "vLLM: latents of padding written": Mutant(
        "integrations/vllm/mla.py",
        "slot_mapping.flatten()[: kv_c_normed.shape[0]]",
        "slot_mapping.flatten()[: kv_c_normed.shape[0]].clamp(min=0)",
        VLLM_MLA + "the_write_skips_padding",
    ),
    "vLLM: the past of a prefill masked": Mutant(
        "integrations/vllm/prefill.py",
        "q.dtype, scale, causal),",
        "q.dtype, scale, True),",
        VLLM_MLA + "prefill_attends_to_expanded_latents",
    ),
}

# Of which only a Hopper GPU judges.
ON_HOPPER = {
    "splits folded where decode does not": Mutant(
        ATTEND,
        "if pos % FIXED_SPLIT == 0:",
        "if pos % (2 * FIXED_SPLIT) == 0:",
        HOPPER + "a_token_has_the_same_bits_by_decode_drafts_chunks_and_prompts[{}-16]",
    ),
}

# Whose tests take seconds and that resemble others of the same file: `make test-extended` judges them.
SLOW = {
    "CPU: records read with one scale",
    "Hopper: a box in the first slots of its page",
    "Hopper: a box of a head's first columns, where rows are gathered",
    "Hopper: a box of keys before the window, where rows are gathered",
    "Hopper: a free stage taken for a full one",
    "Hopper: a key past the diagonal seen",
    "Hopper: a matrix a row short",
    "Hopper: a maximum of -inf subtracted",
    "Hopper: a partial combined twice",
    "Hopper: a partial of another row block",
    "Hopper: a polynomial of capped scores that are not small",
    "Hopper: a row of a partial for each row of the tile",
    "Hopper: a running maximum of all capped scores",
    "Hopper: a tile handed over before its box has arrived",
    "Hopper: a tile of two pages as one box",
    "Hopper: a tile of two pages as one box, where rows are gathered",
    "Hopper: all programs begin with prompts",
    "Hopper: arrivals not reset",
    "Hopper: as many splits of prompts as of decoding sequences",
    "Hopper: boxes in the first rows of a tile",
    "Hopper: boxes of a tile from one slot",
    "Hopper: boxes of the first panel",
    "Hopper: capped scores of a row with another row's factor",
    "Hopper: capped scores of keys that a row does not see",
    "Hopper: capped scores without the cap",
    "Hopper: columns of e4m3 results left permuted",
    "Hopper: columns of zeros before keys alone",
    "Hopper: denominator not rescaled",
    "Hopper: e4m3 results in the rows of the other warpgroup",
    "Hopper: ever more tensor maps",
    "Hopper: full tiles a key too far",
    "Hopper: full tiles by the first row's window",
    "Hopper: full tiles of intervals a key too early",
    "Hopper: full tiles of intervals a key too far",
    "Hopper: further partials read from the first ones",
    "Hopper: gathered rows from the first slot of a page",
    "Hopper: gathered rows handed over before they arrive",
    "Hopper: gathered rows not fenced",
    "Hopper: gathered rows of a head's first columns",
    "Hopper: gathered rows of pages that divide no tile, from its first slot",
    "Hopper: gathered rows of the first head",
    "Hopper: gathered rows past the sequence",
    "Hopper: gathered values of the next tile",
    "Hopper: heads share the slots of partials",
    "Hopper: heads that overlap slots",
    "Hopper: intervals with a key more",
    "Hopper: keys past the end are visible",
    "Hopper: matrices of a cache of more pages",
    "Hopper: more work tiles than the counter counts from both ends",
    "Hopper: no cap too large for a softmax without a maximum",
    "Hopper: no sinks where a row block sees no keys",
    "Hopper: one coefficient of capped scores for another",
    "Hopper: panels of values at half of their distance",
    "Hopper: partials not all stored when one thread arrives",
    "Hopper: partials not released",
    "Hopper: partials not rescaled",
    "Hopper: partials of a sequence after its slots",
    "Hopper: partials where the decode launch's are",
    "Hopper: programs have two of the longest work tiles",
    "Hopper: queries never released where results are another warpgroup's",
    "Hopper: queries never released",
    "Hopper: queries released a tile early",
    "Hopper: row blocks cut that see half of a share",
    "Hopper: rows of a head on both warpgroups left out",
    "Hopper: short chunks are not split",
    "Hopper: splits longer than a share",
    "Hopper: splits without keys that say nothing",
    "Hopper: stages read before they are full",
    "Hopper: the batch's order in a launch",
    "Hopper: the counter of work tiles not reset",
    "Hopper: the first keys loaded twice",
    "Hopper: the first keys never loaded",
    "Hopper: the kernel of another layer relaunched",
    "Hopper: the keys of a sequence's first row block decide",
    "Hopper: the last tile's sums of capped scores alone",
    "Hopper: the last values released before their product",
    "Hopper: the next keys not waited for",
    "Hopper: the next keys waited for where there are none",
    "Hopper: the next panel of keys too near",
    "Hopper: the queue ends before its ends meet",
    "Hopper: unaligned memory",
    "Hopper: values before the window not zeroed",
    "Hopper: values outside of intervals converted",
    "Hopper: values zeroed as if all buffers began a tile",
    "Hopper: values zeroed while they are loaded",
    "Hopper: warpgroups share the slots of partials",
    "Hopper: work by the last row block of each sequence alone",
    "Hopper: work tiles at the back taken twice",
    "K's head offset in int32",
    "MLA: bands overlap",
    "MLA: denominators not rescaled",
    "MLA: keys outside the window read",
    "MLA: rotary columns forgotten",
    "MLA: row blocks share a partial",
    "MLA: states of splits in another order",
    "MLA: the last tile of a row block left out",
    "MLA: values of records without scales",
    "NaN taken for no key",
    "Transformers: a padding row's slot",
    "Transformers: a value as wide as its slot",
    "Transformers: sinks in both parts",
    "Transformers: the ring's past a token late",
    "V's scales copied from K's",
    "a combine launch looks at the first sequences alone",
    "a combine launch whose fold begins a state late",
    "a combine launch whose fold forgets what is between its first rounds",
    "a counter left as it is",
    "a partial forgotten",
    "a partition cut short",
    "a plan's other strides",
    "a profiler is told of first launches only",
    "a prompt's splits are cut elsewhere than decode's",
    "a row block too many searched",
    "a row block's splits begin with its own keys",
    "a row block's splits end with its own keys",
    "a second launch combines one round of partials",
    "a second launch with tiles of another length",
    "a table of another dtype relaunched",
    "a token of no sequence combined",
    "an output on the CPU not divided by its scale",
    "an output on the CPU rounded twice",
    "causal mask dropped",
    "columns after the rotary ones rotated",
    "denominator not rescaled",
    "dimensions joined that do not lie side by side",
    "e4m3 without its bias",
    "full tiles begin by the first row's window",
    "full tiles end a key late",
    "full tiles end where one row does",
    "full tiles of a partition before the window",
    "full tiles of a partition end a token late",
    "intervals begin a key late",
    "keys normalised by the weights of queries",
    "keys of sequences without queries read",
    "latents in fp8 on Hopper: a quarter freed before a product has taken it",
    "latents in fp8 on Hopper: invisible latents not zeroed",
    "latents in fp8 on Hopper: keys of probabilities not permuted",
    "latents in fp8 on Hopper: latents zeroed while keys are multiplied",
    "latents in fp8 on Hopper: output not rescaled",
    "latents in fp8 on Hopper: probabilities not fenced",
    "latents in fp8 on Hopper: probabilities not waited for",
    "latents in fp8 on Hopper: the rope columns of queries at the strides of the others",
    "latents in fp8 on Hopper: the sum not waited for",
    "latents in fp8 on Hopper: the sum overwritten",
    "latents in fp8 on Hopper: zeroed latents not fenced",
    "latents on Hopper: converted latents not fenced",
    "latents on Hopper: probabilities not fenced",
    "latents on Hopper: the odd tile's probabilities not waited for",
    "latents on Hopper: the other warpgroup's sum not waited for",
    "latents on Hopper: zeroed latents not fenced",
    "latents: accumulators not rescaled",
    "one scale for all groups of a record",
    "pages copied backwards",
    "pairs rotated backwards",
    "partials combined without weights",
    "partials of a second launch read from each slot",
    "ranks: sinks counted on each rank",
    "ranks: tokens of no sequence with any lse",
    "rescale dropped, 16 bits",
    "rotary columns truncated",
    "row blocks of a combine launch found one too late",
    "sequences found one too late",
    "sink forgotten",
    "slots in int32",
    "small values scaled in float16",
    "softcap after ALiBi",
    "splits of a fixed size added in another order",
    "states added without weights",
    "states combined at once without the sum so far",
    "states in int32",
    "the last new token not written",
    "the last partial of a second launch left out",
    "the tail of a round counted twice",
    "units of the first intervals alone",
    "vLLM: a workspace as long as the decoder's context",
    "values not masked",
    "warm-up without the second kind of boxes of long contexts",
    "warm-up without work tiles between powers of two of queries",
}
