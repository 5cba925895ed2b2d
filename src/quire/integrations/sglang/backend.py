"""SGLang's attention backend: a step's metadata, eager or for a captured graph, and a layer's write and attention.

Keys and values of the step are written to SGLang's pool first. Then decode, drafts and prompts are one call: attention
to the pool through the step's page table. Only the prompts of latent attention that SGLang expands attend to keys and
values outside of the pool.
"""

from typing import Any

import torch

import quire
from quire import Batch, UnsupportedError
from quire.integrations import layer_spec
from quire.integrations.engine import LEAST_KEYS, START
from quire.integrations.sglang import ahead, contract
from quire.integrations.sglang.layers import Layer, Layers, write
from quire.integrations.sglang.refusals import (
    drafts_branch,
    refuse_arguments,
    refuse_drafts,
    refuse_layer,
    refuse_options,
    refuse_trees,
)
from quire.integrations.sglang.scores import score_of
from quire.integrations.sglang.steps import Plans, Step, StepMemory, fill_table, with_trees
from quire.integrations.sglang.trees import Trees, fill_words, has_mask

contract.check_version()

base: Any = contract.load("sglang.srt.layers.attention.base_attn_backend")
WindowPool: Any = contract.load("sglang.srt.mem_cache.swa_memory_pool").SWAKVPool


class QuireBackend(base.AttentionBackend):
    """Attention of all layers of one model runner.

    SGLang's models, wrappers and workers read `token_to_kv_pool`, `req_to_token_pool`, `max_context_len` and
    `kv_index_translator` of a backend.
    """

    needs_cpu_seq_lens = False  # so an overlapped verify does not wait until its lengths are on the host

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        options = model_runner.server_args
        speculation = contract.speculation(options)
        refuse_options(model_runner, options, speculation)
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.req_to_token: torch.Tensor = self.req_to_token_pool.req_to_token
        self.page_size = int(getattr(model_runner, "page_size", 1) or 1)
        self.device = model_runner.device
        self.has_window_pool = isinstance(self.token_to_kv_pool, WindowPool)
        self.use_mla = bool(model_runner.use_mla_backend)
        self.kv_index_translator = getattr(model_runner, "kv_index_translator", None)
        self.max_context_len = min(model_runner.model_config.context_len, self.req_to_token.shape[1])
        self.batch_invariant = bool(getattr(options, "enable_deterministic_inference", False))
        self.plans = Plans(self.req_to_token.shape[0], self.max_context_len, self.device, self.batch_invariant)
        self.memory = StepMemory(self.device, self.has_window_pool)
        pool = self.token_to_kv_pool
        self.layers = Layers(pool, self.page_size, model_runner.dtype, self.use_mla, self.has_window_pool)
        self.drafts_branch = drafts_branch(speculation)
        self.mask_of_drafts = self.make_verify_mask(model_runner, speculation)
        self.captured: dict[tuple[int, int], Step] = {}  # by forward mode and number of requests
        self.warm: set[quire.AttentionSpec] = set()  # of layers whose kernels are compiled
        self.forward_metadata: Step | None = None
        kind = "latents" if self.use_mla else "keys and values"
        START.debug(
            "SGLang chose Quire for %s in pages of %d, contexts of %d", kind, self.page_size, self.max_context_len
        )

    def make_verify_mask(self, model_runner: Any, speculation: Any) -> Any:
        """Return the buffer for masks of drafts; None for the draft model, and for servers without drafts."""
        num_drafts = getattr(speculation, "speculative_num_draft_tokens", None)
        if not num_drafts or getattr(model_runner, "is_draft_worker", False):
            return None
        return contract.verify_mask(self.req_to_token.shape[0], num_drafts, self.drafts_branch, self.device)

    @property
    def verify_mask(self) -> Any:
        """SGLang's name of the buffer into which it draws the masks of drafts."""
        return self.mask_of_drafts

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """Do nothing: SGLang prepares the verify of a tree after its draft, so the words are right already."""

    # A step without a graph.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare an eager step."""
        batch, mode = forward_batch, forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        refuse_drafts(mode, batch.spec_info)
        num_seqs = batch.seq_lens.shape[0]
        longest = longest_of(batch.seq_lens_cpu, self.max_context_len)
        if mode.is_decode():
            max_query_len, num_tokens = 1, num_seqs
        elif mode.is_target_verify():
            max_query_len = batch.spec_info.draft_token_num
            num_tokens, longest = num_seqs * max_query_len, longest + max_query_len
        else:
            query_lens = [int(n) for n in batch.extend_seq_lens_cpu]  # a list, or a tensor of SGLang 0.5.12
            max_query_len, num_tokens = max(query_lens), sum(query_lens)
        max_seq_len = min(max(LEAST_KEYS, 1 << max(0, longest - 1).bit_length()), self.max_context_len)
        max_seq_len = max(max_seq_len, longest)  # drafts may pass the longest context
        width = -(-max_seq_len // self.page_size)
        if self.memory.reserve(num_seqs, num_seqs * width, num_tokens):
            self.plans.kept.clear()
        step = self.step_in(self.memory, num_seqs, width, num_tokens, max_query_len, max_seq_len, mode.is_decode())
        step.trees = self.trees_in(self.memory, mode, batch.spec_info)
        if step.starts is not None:
            if mode.is_target_verify():
                torch.arange(0, num_tokens + 1, max_query_len, out=step.starts)
            else:
                step.starts[0] = 0
                torch.cumsum(batch.extend_seq_lens[:num_seqs], 0, out=step.starts[1:])
        self.fill(step, batch.req_pool_indices, batch.seq_lens, batch.out_cache_loc, mode, longest, batch.spec_info)
        self.forward_metadata = step

    def trees_in(self, memory: StepMemory, mode: Any, spec_info: Any) -> Trees | None:
        """Return a memory's place for trees if the step verifies drafts that branch."""
        if not mode.is_target_verify() or not has_mask(spec_info):
            return None
        refuse_trees(spec_info, self.use_mla)
        return memory.trees

    def step_in(
        self,
        memory: StepMemory,
        num_seqs: int,
        width: int,  # pages per sequence
        num_tokens: int,
        max_query_len: int,
        max_seq_len: int,
        one_query_each: bool,
    ) -> Step:
        """Return a step whose tensors are views of a memory."""
        entries = num_seqs * width

        def table(flat: torch.Tensor) -> torch.Tensor:
            return flat[:entries].view(num_seqs, width)

        return Step(
            num_tokens=num_tokens,
            max_query_len=max_query_len,
            max_seq_len=max_seq_len,
            starts=None if one_query_each else memory.starts[: num_seqs + 1],
            seq_lens=memory.seq_lens[:num_seqs],
            table=table(memory.table),
            window_table=None if memory.window_table is None else table(memory.window_table),
            window_slots=None if memory.window_slots is None else memory.window_slots[:num_tokens],
        )

    def fill(
        self,
        step: Step,
        requests: torch.Tensor,  # [num_seqs], rows of req_to_token
        seq_lens: torch.Tensor,  # [num_seqs], without the tokens of a verify
        slots: torch.Tensor | None,  # [num_tokens] int64, where the step writes
        mode: Any,
        longest: int,
        spec_info: Any,
    ) -> None:
        """Write what differs from step to step into a step's tensors."""
        num_seqs = step.seq_lens.shape[0]
        step.seq_lens.copy_(seq_lens[:num_seqs])
        if mode.is_target_verify():
            step.seq_lens.add_(step.max_query_len)
        if step.trees is not None:
            mask, kept = spec_info.custom_mask, self.mask_of_drafts
            is_buffer = kept is not None and mask.data_ptr() == kept.buffer.data_ptr()
            words = step.trees.words[: step.num_tokens]
            fill_words(words, spec_info, seq_lens[:num_seqs], step.max_query_len, is_buffer)
            step.trees.fill(Batch(step.table, step.seq_lens, step.starts), step.num_tokens)
        fill_table(step.table, self.req_to_token, requests[:num_seqs], longest, self.page_size, None)
        if step.window_table is not None:
            mapping = self.token_to_kv_pool.full_to_swa_index_mapping
            fill_table(step.window_table, self.req_to_token, requests[:num_seqs], longest, self.page_size, mapping)
            if not step.captured and slots is not None and step.window_slots is not None:
                step.window_slots.copy_(mapping[slots[: step.num_tokens]])

    # A step with a graph.

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Reserve the memory that captured graphs read."""
        self.graph_memory = StepMemory(self.device, self.has_window_pool)
        drafts = max(1, max_num_tokens // max(max_bs, 1))
        self.graph_max_seq_len = self.max_context_len + drafts
        self.plans.max_seq_len = max(self.plans.max_seq_len, self.graph_max_seq_len)  # so they are warmed up for it
        width = -(-self.graph_max_seq_len // self.page_size)
        self.graph_memory.reserve(max_bs, max_bs * width, max_num_tokens)
        self.captured.clear()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the length of a padding row, which then reads the slot that SGLang keeps for padding."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Prepare a step of a graph, before its capture or its replay; newer than SGLang 0.5.12."""
        batch, num_seqs = forward_batch, forward_batch.batch_size
        mode, drafts = batch.forward_mode, batch.spec_info
        if in_capture:
            self.begin_capture(mode, num_seqs, batch.input_ids.shape[0], drafts)
        lengths = batch.seq_lens, batch.seq_lens_cpu
        self.replay(mode, num_seqs, batch.req_pool_indices, *lengths, batch.out_cache_loc, drafts)

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
    ) -> None:
        """Prepare a capture; SGLang 0.5.12."""
        self.begin_capture(forward_mode, bs, num_tokens, spec_info)
        self.replay(forward_mode, bs, req_pool_indices, seq_lens, None, None, spec_info)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: Any,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor | None,
        out_cache_loc: torch.Tensor | None = None,
    ) -> None:
        """Prepare a replay; SGLang 0.5.12."""
        self.replay(forward_mode, bs, req_pool_indices, seq_lens, seq_lens_cpu, out_cache_loc, spec_info)

    def begin_capture(self, mode: Any, num_seqs: int, num_tokens: int, spec_info: Any) -> None:
        """Make the step that a graph will always read, with the largest lengths."""
        refuse_drafts(mode, spec_info)
        if not (mode.is_decode() or mode.is_target_verify()):
            raise UnsupportedError(
                f"forward_mode must be DECODE or TARGET_VERIFY in a captured graph, got {mode.name}; "
                "switch off the full graphs of prefill"
            )
        width = -(-self.graph_max_seq_len // self.page_size)
        per_seq = num_tokens // num_seqs
        sizes = num_seqs, width, num_tokens, per_seq, self.graph_max_seq_len
        step = self.step_in(self.graph_memory, *sizes, mode.is_decode())
        step.captured = True
        step.trees = self.trees_in(self.graph_memory, mode, spec_info)
        if step.starts is not None:  # a tensor of its own: graphs of other sizes have other starts
            step.starts = torch.arange(0, num_tokens + 1, per_seq, dtype=torch.int32, device=self.device)
        self.captured[int(mode), num_seqs] = step

    def replay(
        self,
        mode: Any,
        num_seqs: int,
        requests: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor | None,  # None, or lengths of an earlier step, where drafts are verified
        slots: torch.Tensor | None,
        spec_info: Any,
    ) -> None:
        """Write a step's lengths and tables where its graph reads them."""
        refuse_drafts(mode, spec_info)
        step = self.captured[int(self.mode_of_graph(mode)), num_seqs]
        longest = step.max_seq_len
        if not mode.is_target_verify():
            longest = min(longest, longest_of(seq_lens_cpu, longest))
        self.fill(step, requests, seq_lens, slots, mode, longest, spec_info)
        self.forward_metadata = step

    def mode_of_graph(self, mode: Any) -> Any:
        """Return the forward mode under which a graph was captured: an idle rank replays that of decode."""
        return type(mode).DECODE if mode.is_idle() else mode

    def warm_up(self, layer: Layer) -> None:
        """Compile what any later step can need of a layer like this, before the first graph launches any of it."""
        if layer.spec in self.warm:
            return
        self.warm.add(layer.spec)
        names, bounds = [], ahead.bounds_of(layer.spec, self.plans.bounds())
        computed, seen = with_trees(layer.spec)
        if computed != layer.spec or not self.drafts_branch:
            names += quire.warmup(layer.spec, layer.pages, **bounds)
        if self.drafts_branch:
            names += quire.warmup(computed, layer.pages, **bounds, **seen)
        if names:
            contract.logger.info("Quire has %d kernels ready for %s", len(names), layer.spec)

    # A layer.

    def forward_decode(
        self,
        q: torch.Tensor,  # [num_tokens, num_heads * head_dim], or the latent columns where q_rope is given
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,  # SGLang's RadixAttention
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> torch.Tensor:
        """Write the step's keys and values, and attend to the pool."""
        return self.attend(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **others: Any,
    ) -> torch.Tensor:
        """As `forward_decode`, for prompts, mixed batches and the verification of drafts."""
        if self.use_mla and k is not None and layer.tp_k_head_num != 1:
            return self.attend_expanded(q, k, v, layer, forward_batch, save_kv_cache, **others)
        return self.attend(q, k, v, layer, forward_batch, save_kv_cache, **others)

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        sinks: torch.Tensor | None = None,
        q_rope: torch.Tensor | None = None,
        k_rope: torch.Tensor | None = None,
        score_mod: Any = None,
        aux_tensors: Any = None,
        **others: Any,
    ) -> torch.Tensor:
        """Write the step's keys and values, and attend to the pool."""
        refuse_arguments(others | ({"score_mod": score_mod} if self.drafts_branch else {}))
        step = self.forward_metadata
        assert step is not None, "SGLang calls init_forward_metadata first"
        score, extras = score_of(score_mod, aux_tensors)
        bound = self.layers.bind(layer, sinks is not None, score)
        if step.captured:
            self.warm_up(bound)
        if save_kv_cache and k is not None and v is not None:
            slots = forward_batch.out_cache_loc
            if bound.in_window_pool:  # in a graph, too: older versions tell a replay no slots
                slots = self.token_to_kv_pool.full_to_swa_index_mapping[slots] if step.captured else step.window_slots
            assert slots is not None
            write(k, v, k_rope, bound, slots)
        queries: Any = q.reshape(q.shape[0], layer.tp_q_head_num, -1)
        if q_rope is not None:
            queries = queries[: step.num_tokens], q_rope.view(q.shape[0], layer.tp_q_head_num, -1)[: step.num_tokens]
        else:
            queries = queries[: step.num_tokens]
        plan = self.plans.plan(bound.spec, step, step.num_tokens, in_window_pool=bound.in_window_pool)
        out = q.new_empty(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        if q.shape[0] > step.num_tokens:
            out[step.num_tokens :] = 0  # padding
        quire.attention(queries, bound.pages, plan, sinks=sinks, extras=extras, out=out[: step.num_tokens])
        return out.view(q.shape[0], -1)

    def attend_expanded(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        **others: Any,
    ) -> torch.Tensor:
        """Attend to latents that SGLang has expanded to a key and a value per head, in prompts without a prefix."""
        refuse_arguments(others)
        refuse_layer(layer)
        step = self.forward_metadata
        assert step is not None and v is not None, "SGLang calls init_forward_metadata first"
        if save_kv_cache or k.shape[0] != q.shape[0] or getattr(forward_batch, "mha_return_lse", False):
            raise UnsupportedError(
                f"k must be the step's own {q.shape[0]} tokens where latents are expanded, got {k.shape[0]} tokens; "
                "leave --attention-backend to Quire for all of the model's layers, or to none"
            )
        spec = layer_spec(
            num_q_heads=layer.tp_q_head_num,
            num_kv_heads=layer.tp_k_head_num,
            head_dim=layer.qk_head_dim,
            head_dim_v=layer.v_head_dim,
            dtype=q.dtype,
            softmax_scale=float(layer.scaling),
            softcap=float(layer.logit_cap) or None,
        )
        plan = step.plans.get((id(spec), False))
        if plan is None:
            starts = step.starts
            assert starts is not None, "prompts have starts"
            plan = step.plans[id(spec), False] = quire.plan(
                spec,
                quire.Batch.varlen(starts, starts),
                max_query_len=step.max_query_len,
                max_seq_len=step.max_query_len,
                num_tokens=step.num_tokens,
                batch_invariant=self.batch_invariant,
            )
        rows = step.num_tokens
        out = q.new_zeros(q.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        heads_q, heads_k = layer.tp_q_head_num, layer.tp_k_head_num
        q, k, v = (
            q.view(-1, heads_q, spec.head_dim),
            k.view(-1, heads_k, spec.head_dim),
            v.view(-1, heads_k, v.shape[-1]),
        )
        quire.varlen_attention(q[:rows], k[:rows], v[:rows], plan, out=out[:rows])
        return out.view(out.shape[0], -1)


def longest_of(seq_lens_cpu: torch.Tensor | None, bound: int) -> int:
    """Return the longest of a batch's sequences; the bound if the host does not know it, since to ask is to wait."""
    if seq_lens_cpu is None:
        return bound
    return max(1, int(seq_lens_cpu.max())) if seq_lens_cpu.numel() else 1
