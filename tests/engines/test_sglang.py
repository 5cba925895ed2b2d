"""The plug-in in the real SGLang, on either end of the supported range.

SGLang's own `ForwardBatch`, `RadixAttention` and pools drive the backend on a CPU, and the float64 oracle judges it.
The scheduler drives a model in `test_sglang_scheduler.py`.
"""
# ruff: noqa: E402

import ast
import collections
import dataclasses
import importlib
import importlib.util
import pkgutil
import sys
from dataclasses import astuple
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import tests.engines.sglang_environment  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
    from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor import model_runner
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.plugins.hook_registry import HookRegistry
    from sglang.srt.speculative.eagle_info import EagleVerifyInput
    from sglang.srt.speculative.eagle_utils import TreeMaskMode
    from sglang.srt.speculative.ngram_info import NgramVerifyInput

    from quire.integrations.sglang import register

    register()
    from quire.integrations.sglang import ahead
    from quire.integrations.sglang.backend import QuireBackend

import quire
from quire import AttentionSpec, Batch, PagedKVCache
from quire.testing import Problem, error_budget
from tests.engines import flashinfer_imports
from tests.score_functions import inkling

NEW = importlib.util.find_spec("sglang.srt.layers.attention.verify_mask") is not None  # all but 0.5.12
HEADS, KV_HEADS, DIM = 4, 2, 32
RANK, ROPE = 64, 16
CONTEXT = 160
FILL = 1  # the length of a graph's padding rows


def make_pool(kind: str, page_size: int, dtype: torch.dtype = torch.float32):
    """Return one of SGLang's pools of 1,024 slots with one layer, or one of full attention and one of windows."""
    common = {"size": 1024, "page_size": page_size, "dtype": dtype, "device": "cpu"}
    if kind == "mla":
        pool = MLATokenToKVPool(
            **common, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=1, enable_memory_saver=False
        )
        pool.kv_buffer[0].fill_(float("nan"))
        return pool
    if kind == "windows":
        pool = SWAKVPool(
            **common,
            size_swa=512,
            head_num=KV_HEADS,
            head_dim=DIM,
            swa_attention_layer_ids=[1],
            full_attention_layer_ids=[0],
            **({} if NEW else {"enable_kvcache_transpose": False}),
        )
        return pool
    pool = MHATokenToKVPool(**common, head_num=KV_HEADS, head_dim=DIM, layer_num=1, enable_memory_saver=False)
    if dtype == torch.float32:
        for buffer in (*pool.k_buffer, *pool.v_buffer):
            buffer.fill_(float("nan"))  # what is not written may not be read
    return pool


def make_runner(pool, page_size: int, **options):
    """Return what the backend asks of a model runner."""
    requests = ReqToTokenPool(size=8, max_context_len=CONTEXT, device="cpu", enable_memory_saver=False)
    return SimpleNamespace(
        server_args=SimpleNamespace(**options),
        token_to_kv_pool=pool,
        req_to_token_pool=requests,
        page_size=page_size,
        dtype=torch.float32,
        device="cpu",
        use_mla_backend=isinstance(pool, MLATokenToKVPool),
        model_config=SimpleNamespace(context_len=CONTEXT),
    )


class Server:
    """Requests whose tokens have slots in a shuffled order of pages, and a backend that serves their steps.

    It keeps all keys and values of each request itself, so the oracle knows nothing of SGLang's pool.
    """

    def __init__(self, kind: str = "mha", page_size: int = 1, dtype=torch.float32, **options) -> None:
        self.page_size, self.random = page_size, torch.Generator().manual_seed(page_size)
        self.pool = make_pool(kind, page_size, dtype)
        self.runner = make_runner(self.pool, page_size, **options)
        self.backend = QuireBackend(self.runner)
        self.table = self.runner.req_to_token_pool.req_to_token
        self.pages = (torch.randperm(1024 // page_size, generator=self.random) + 1).tolist()  # page 0 is for padding
        self.past: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {request: [] for request in range(1, 9)}
        self.lens = [0] * 9
        self.latent = kind == "mla"
        if kind == "windows":
            self.mapping = torch.zeros(1024 + page_size + 1, dtype=torch.int64)
            self.window_pages = (torch.randperm(512 // page_size, generator=self.random) + 1).tolist()
            self.pool.register_mapping(self.mapping)

    def rand(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.random)

    def grow(self, request: int, count: int) -> torch.Tensor:
        """Give a request slots for more tokens, and return them."""
        slots, size = [], self.page_size
        for position in range(self.lens[request], self.lens[request] + count):
            if position % size == 0:
                page = self.pages.pop()
                if hasattr(self, "mapping"):
                    window = self.window_pages.pop()
                    self.mapping[page * size : (page + 1) * size] = torch.arange(window * size, (window + 1) * size)
            slots.append(page * size + position % size if position % size == 0 or slots else self.next_slot(request))
            page = slots[-1] // size
            self.table[request, position] = slots[-1]
        self.lens[request] += count
        return torch.tensor(slots, dtype=torch.int64)

    def next_slot(self, request: int) -> int:
        return int(self.table[request, self.lens[request] - 1]) + 1

    def step(self, mode: ForwardMode, counts: dict[int, int], pad_to: int = 0, **fields) -> ForwardBatch:
        """Return SGLang's batch of a step that gives each request so many new tokens; rows to pad a graph follow."""
        before = [self.lens[request] for request in counts]
        slots = torch.cat([self.grow(request, count) for request, count in counts.items()])
        after = before if mode.is_target_verify() else [self.lens[request] for request in counts]
        if mode.is_extend() and not mode.is_target_verify():
            fields |= {
                "extend_seq_lens": torch.tensor(list(counts.values()), dtype=torch.int32),
                "extend_seq_lens_cpu": list(counts.values()),
                "extend_prefix_lens": torch.tensor(before),
                "extend_prefix_lens_cpu": before,
            }
        pads = max(0, pad_to - len(counts))
        width = next(iter(counts.values()))
        slots = torch.cat([slots, torch.zeros(pads * width, dtype=torch.int64)])
        lens = torch.tensor(after + [FILL] * pads)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(counts) + pads,
            input_ids=torch.zeros(slots.shape[0], dtype=torch.int64),
            req_pool_indices=torch.tensor(list(counts) + [0] * pads),
            seq_lens=lens,
            seq_lens_cpu=lens,
            seq_lens_sum=int(lens.sum()),
            out_cache_loc=slots,
            **fields,
        )

    def problem(self, layer, q, counts: dict[int, int], k, v, sinks=None, trees=None) -> Problem:
        """Add the step's keys and values to what the requests have, and return the step as the oracle sees it.

        `trees` has the parents of each request's drafts; its layers say windows by each draft's own path.
        """
        for request, part_k, part_v in zip(
            counts, k.split(list(counts.values())), v.split(list(counts.values())), strict=True
        ):
            self.past[request].append((part_k, part_v))
        all_k = torch.cat([part[0] for request in counts for part in self.past[request]])
        all_v = torch.cat([part[1] for request in counts for part in self.past[request]])
        lens = [sum(part[0].shape[0] for part in self.past[request]) for request in counts]
        table = torch.full((len(counts), max(lens)), -1, dtype=torch.int32)
        for row, end, length in zip(table, torch.tensor(lens).cumsum(0).tolist(), lens, strict=True):
            row[:length] = torch.arange(end - length, end)
        window = layer.sliding_window_size
        spec = AttentionSpec(
            num_q_heads=HEADS,
            num_kv_heads=1 if self.latent else KV_HEADS,
            head_dim=layer.qk_head_dim,
            head_dim_v=layer.v_head_dim,
            dtype=torch.float32,
            softmax_scale=layer.scaling,
            sliding_window=None if window < 0 or trees else window + 1,
            softcap=layer.logit_cap or None,
            sinks=sinks is not None,
            latent=self.latent,
        )
        if self.latent:
            cache = PagedKVCache.from_latents(all_k.view(-1, 1, RANK + ROPE), RANK)
        else:
            cache = PagedKVCache(all_k.unsqueeze(1).contiguous(), all_v.unsqueeze(1).contiguous())
        query_lens = tuple(counts.values())
        starts = torch.tensor([0, *query_lens]).cumsum(0).int()
        batch = Batch(table, torch.tensor(lens, dtype=torch.int32), starts, **seen_by_drafts(trees, lens, window))
        q = q.view(-1, HEADS, layer.qk_head_dim)[: sum(query_lens)]
        return Problem(spec, batch, cache, q, query_lens, tuple(lens), sinks, None)

    def inputs(self, layer, num_tokens: int):
        """Return random q, k and v of a step; values of latents are their first columns."""
        q = self.rand(num_tokens, HEADS * layer.qk_head_dim)
        if self.latent:
            k = self.rand(num_tokens, 1, RANK + ROPE)
            return q, k, k[..., :RANK]
        return q, self.rand(num_tokens, KV_HEADS, DIM), self.rand(num_tokens, KV_HEADS, DIM)

    def verify(self, trees: dict[int, list[int]], layout: str, algorithm: str = "EAGLE"):
        """Return what SGLang knows of trees that it verifies, which are the parents of each request's drafts."""
        num_drafts = len(next(iter(trees.values())))
        rows = [
            [context_row + among for among in sees(parents)]
            for request, parents in trees.items()
            for context_row in [[True] * self.lens[request] * (layout.startswith("FULL_MASK"))]
        ]
        bits = [row for request in rows for row in request]
        if layout == "QLEN_ONLY_BITPACKING":
            mask = torch.tensor([sum(bit << at for at, bit in enumerate(row)) for row in bits], dtype=torch.uint8)
        else:
            mask = torch.tensor([bit for row in bits for bit in row])
        if layout == "FULL_MASK and more":  # as SGLang allocates it when it knows a bound of the lengths alone
            mask = torch.cat([mask, torch.ones(999, dtype=torch.bool)])
        if layout == "verify_mask":
            kept = self.backend.verify_mask
            assert kept.mode == TreeMaskMode.QLEN_ONLY and kept.is_read and kept.fits(len(trees))
            kept.buffer.fill_(True)
            kept.buffer[: mask.shape[0]] = mask
            mask = kept.buffer
        tokens = torch.zeros(len(trees) * num_drafts, dtype=torch.int64)
        if algorithm == "NGRAM":
            return NgramVerifyInput(tokens, mask, None, None, None, None, num_drafts)
        others = [field.name for field in dataclasses.fields(EagleVerifyInput) if field.default is dataclasses.MISSING]
        given = {"topk": 4, "spec_steps": 3, "draft_token_num": num_drafts}
        return EagleVerifyInput(**dict.fromkeys(others) | {"draft_token": tokens, "custom_mask": mask} | given)

    def run(self, mode: ForwardMode, counts: dict[int, int], layer, *, pad: int = 0, **fields):
        """Run an eager step of one layer, and return whether it is within the error budget."""
        passed = {name: fields.pop(name) for name in ("sinks", "trees", "score_mod") if name in fields}
        batch = self.step(mode, counts, **fields)
        self.backend.init_forward_metadata(batch)
        return self.forward(batch, counts, layer, sum(counts.values()) + pad, **passed)

    def forward(self, batch, counts, layer, num_tokens, *, sinks=None, pair=False, trees=None, score_mod=None):
        """Run one layer of a prepared step."""
        q, k, v = self.inputs(layer, num_tokens)
        real, extra = sum(counts.values()), {} if sinks is None else {"sinks": sinks}
        problem = self.problem(layer, q, counts, k[:real].clone(), v[:real].clone(), sinks, trees)
        if score_mod is not None:  # as Inkling's
            logits = self.rand(num_tokens, HEADS, 17)
            extra |= {"score_mod": score_mod, "aux_tensors": [logits]}
            spec = dataclasses.replace(problem.spec, score=inkling)
            problem = dataclasses.replace(problem, spec=spec, extras=(logits[:real],))
        if pair:
            heads = q.view(num_tokens, HEADS, -1)
            extra |= {"q_rope": heads[..., RANK:], "k_rope": k[..., RANK:]}
            q, k = heads[..., :RANK], k[..., :RANK]
        if num_tokens > batch.out_cache_loc.shape[0]:
            batch.out_cache_loc = torch.nn.functional.pad(
                batch.out_cache_loc, (0, num_tokens - batch.out_cache_loc.shape[0])
            )
        out = self.backend.forward(q, k, v, layer, batch, **extra)
        assert out.shape == (num_tokens, HEADS * layer.v_head_dim)
        return error_budget(problem, out.view(num_tokens, HEADS, -1)[:real]).passed


def make_layer(layer_id: int = 0, **fields) -> RadixAttention:
    return RadixAttention(HEADS, DIM, DIM**-0.5, KV_HEADS, layer_id, **fields)


def latent_layer() -> RadixAttention:
    return RadixAttention(HEADS, RANK + ROPE, 0.1, 1, 0, v_head_dim=RANK)


def drafts(count: int):
    """Return what SGLang knows of a chain of drafts that it verifies."""
    return SimpleNamespace(draft_token_num=count, topk=1, num_tokens_per_req=count)


def path(parents: list[int], draft: int) -> list[int]:
    """Return a draft and its ancestors, the draft first."""
    found = [draft]
    while parents[found[-1]] >= 0:
        found.append(parents[found[-1]])
    return found


def sees(parents: list[int]) -> list[list[bool]]:
    """Return which drafts each draft sees."""
    return [[other in path(parents, draft) for other in range(len(parents))] for draft in range(len(parents))]


def seen_by_drafts(trees: dict[int, list[int]] | None, lens: list[int], window: int) -> dict[str, torch.Tensor]:
    """Return the fields of the oracle's batch; `window` is the number of keys that a layer sees before its own."""
    if trees is None:
        return {}
    words, begins = [], []
    for parents, length in zip(trees.values(), lens, strict=True):
        for draft in range(len(parents)):
            ancestors = path(parents, draft)
            near = ancestors if window < 0 else ancestors[: window + 1]
            words.append(sum(1 << other for other in near))
            first = length - len(parents)
            begins.append(0 if window < 0 else max(0, first + len(ancestors) - 1 - window))
    return {"tree_bits": torch.tensor(words), "key_begin": torch.tensor(begins, dtype=torch.int32)}


BUSHY = [-1, 0, 0, 1, 1, 2, 3, 6]
DEEP = [-1, 0, 1, 2, 2, 0, 5, 5]
LAYOUTS = ["FULL_MASK", "FULL_MASK and more", "QLEN_ONLY", "QLEN_ONLY_BITPACKING", *(["verify_mask"] if NEW else [])]
EAGLE = {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}
NGRAM = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 8}


def test_sglang_finds_the_plug_in_and_takes_it_twice():
    assert [e.value for e in entry_points(group="sglang.srt.plugins") if e.name == "quire"] == [
        "quire.integrations.sglang:register"
    ]
    register()
    for choices in (
        server_args.ATTENTION_BACKEND_CHOICES,
        server_args.DETERMINISTIC_ATTENTION_BACKEND_CHOICES,
        server_args.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND,
    ):
        assert choices.count("quire") == 1
    assert isinstance(ATTENTION_BACKENDS["quire"](make_runner(make_pool("mha", 1), 1)), QuireBackend)


def test_the_log_says_that_sglang_chose_quire(caplog):
    with caplog.at_level("DEBUG", "quire.start"):
        Server("mla", page_size=16)
    (message,) = caplog.messages
    assert message.startswith("SGLang chose Quire for latents in pages of 16, contexts of ")


def test_the_command_line_takes_the_name():
    import argparse

    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    arguments = parser.parse_args(["--model-path", "x", "--attention-backend", "quire"])
    assert arguments.attention_backend == "quire"


def test_quire_s_kernels_compile_after_sglang_has_replaced_functions_of_triton():
    """SGLang puts a plain function in place of `triton.next_power_of_2`; a kernel that names one has no hash."""
    import triton

    from quire.targets import TARGETS, Launch

    assert triton.next_power_of_2.__module__.startswith("sglang")
    for module in pkgutil.walk_packages(quire.kernels.__path__, "quire.kernels."):
        for value in vars(importlib.import_module(module.name)).values():
            if isinstance(value, triton.JITFunction):
                value.cache_key  # noqa: B018
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    Launch(spec, 1, 1, 2048, 1, 16).compile(TARGETS["sm90"])


@pytest.mark.skipif(not NEW, reason="the runner has the pools in SGLang 0.5.12")
def test_models_find_the_pools_in_the_backend():
    server = Server()
    batch = server.step(ForwardMode.EXTEND, {3: 20})
    context = importlib.import_module("sglang.srt.model_executor.forward_context")
    with context.forward_context(context.ForwardContext(attn_backend=server.backend)):
        assert context.get_token_to_kv_pool() is server.pool
        assert context.get_req_to_token_pool() is server.runner.req_to_token_pool
        importlib.import_module("sglang.srt.models.utils").enable_fused_set_kv_buffer(batch)
    assert server.backend.max_context_len == CONTEXT


# What SGLang reads of backends of its own, or after it asked whether it is there.
OF_OTHERS = {
    "conv_state_metadata": "wrappers of linear attention",
    "linear_attn_backend": "wrappers of linear attention",
    "update_mamba_state_after_mtp_verify": "wrappers of linear attention",
    "data_type": "fp8 queries of other backends, read by name",
    "dispatch_reason": "FlashInfer's",
    "enable_early_verify_metadata": "where glue_target_verify_metadata gives no reason against it",
    "extend_attention_block_m": "after hasattr",
    "forward_metadata": "set by init_forward_metadata",
    "get_cpu_graph_seq_len_fill_value": "graphs of CPUs",
    "init_cpu_graph_state": "graphs of CPUs",
    "init_forward_metadata_capture_cpu_graph": "graphs of CPUs",
    "init_mha_chunk_metadata": "after hasattr",
    "tail_forward_metadata": "where folds_encoder_swa_replay",
    "tbo_supports_cuda_graph": "after getattr with a default",
    "use_mha": "after getattr with a default",
    "host": "another kind of primary",
    "port": "another kind of primary",
    "size": "another kind of backend",
    "_replay_forward_batch": "set by SGLang",
}


def test_the_backend_has_what_sglang_reads_of_one():
    """Of its runners, workers and wrappers. What models read differs: many have a backend of their own."""
    root, read = Path(importlib.import_module("sglang").__file__).parent / "srt", {}
    wrappers = [
        root / "layers/attention" / f"{name}_backend.py" for name in ("hybrid_attn", "hybrid_linear_attn", "tbo")
    ]
    folders = [root / name for name in ("model_executor", "managers", "speculative")]
    for file in (*wrappers, root / "layers/radix_attention.py", *(f for at in folders for f in at.rglob("*.py"))):
        text = file.read_text(encoding="utf-8-sig")
        for node in ast.walk(ast.parse(text)) if any(name in text for name in BACKENDS) else ():
            if isinstance(node, ast.Attribute) and name_of(node.value) in BACKENDS:
                read.setdefault(node.attr, file.name)
    backend = Server().backend
    assert {name: file for name, file in read.items() if name not in OF_OTHERS and not hasattr(backend, name)} == {}
    assert len(read) > 15


BACKENDS = {"attn_backend", "get_attn_backend", "full_attn_backend", "primary", "decode_backend", "prefill_backend"}


def name_of(node: ast.expr) -> str:
    """Return the last name of an expression, or of the function that it calls."""
    node = node.func if isinstance(node, ast.Call) else node
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


class Unread(TorchDispatchMode):
    """Refuses what makes a host wait for a device: to read a tensor, and results whose size is in one."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        assert name not in ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero"), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["mha", "mla", "windows"])
def test_no_step_reads_a_tensor_of_the_device(kind):
    """Where an earlier step still runs, the host has no lengths, and a read would wait for it."""
    trees = {3: BUSHY, 5: DEEP}
    server = Server(kind, 16, **({} if kind == "mla" else EAGLE))
    layer = latent_layer() if kind == "mla" else make_layer(int(kind == "windows"), sliding_window_size=2)
    backend, steps = server.backend, [(ForwardMode.EXTEND, {3: 20, 5: 9}, {}), (ForwardMode.DECODE, {3: 1, 5: 1}, {})]
    assert not backend.needs_cpu_seq_lens
    assert server.run(ForwardMode.EXTEND, {3: 62, 5: 30}, layer)  # to bind the layer, once
    steps.append((ForwardMode.TARGET_VERIFY, {3: 4, 5: 4}, {"spec_info": drafts(4)}))
    if kind != "mla":
        for layout in LAYOUTS:
            steps.append((ForwardMode.TARGET_VERIFY, {3: 8, 5: 8}, {"spec_info": layout, "trees": trees}))
    for mode, counts, fields in steps:
        planned = fields.pop("trees", None)
        if planned:
            fields = {"spec_info": server.verify(planned, fields["spec_info"])}
        batch = server.step(mode, counts, **fields)
        batch.seq_lens_cpu = batch.seq_lens_sum = None
        with Unread():
            backend.init_forward_metadata(batch)
        assert server.forward(batch, counts, layer, sum(counts.values()), trees=planned)


@pytest.mark.parametrize("width", [1, 4])
def test_no_replay_reads_a_tensor_of_the_device(width):
    server, layer = Server(page_size=16), make_layer()
    fields = {"spec_info": drafts(width)} if width > 1 else {}
    mode = ForwardMode.TARGET_VERIFY if width > 1 else ForwardMode.DECODE
    assert server.run(ForwardMode.EXTEND, {3: 62, 5: 30}, layer)
    server.backend.init_cuda_graph_state(4, 4 * width)
    slots = torch.zeros(4 * width, dtype=torch.int64)
    requests, ones = torch.zeros(4, dtype=torch.int64), torch.full((4,), FILL)
    prepare(server.backend, ForwardBatch(mode, 4, slots, requests, ones, slots, 4, **fields), capture=True)
    for stale in (None, ones):  # lengths of another step, as some releases leave them to a verify
        batch = server.step(mode, dict.fromkeys((3, 5), width), pad_to=4, **fields)
        batch.seq_lens_cpu = stale if width > 1 else None
        with Unread():
            prepare(server.backend, batch, capture=False)
        assert server.forward(batch, dict.fromkeys((3, 5), width), layer, 4 * width)


def test_names_that_sglang_imports_from_flashinfer_are_served_or_known():
    found, served = flashinfer_imports.imported("sglang"), set(flashinfer_imports.flashinfer.__all__)
    assert found - served <= set(flashinfer_imports.WITHOUT)
    assert found & served == set(flashinfer_imports.OF_SGLANG.split())


def test_a_version_out_of_range_is_refused_by_name(monkeypatch):
    monkeypatch.setattr(sys.modules["sglang"], "__version__", "0.4.9")
    with pytest.raises(quire.UnsupportedError, match=r"sglang must be from 0\.5\.12 to before 0\.6, got 0\.4\.9"):
        ATTENTION_BACKENDS["quire"](None)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_prompts_with_a_cached_prefix_mixed_batches_and_decode(kind, page_size):
    server, layer = Server(kind, page_size), latent_layer() if kind == "mla" else make_layer()
    assert server.run(ForwardMode.EXTEND, {3: 70, 5: 9}, layer)
    assert server.run(ForwardMode.EXTEND, {3: 20, 7: 33}, layer)  # the first has a prefix
    assert server.run(ForwardMode.MIXED, {5: 1, 2: 12, 3: 1}, layer)
    for counts in ({3: 1, 5: 1, 7: 1}, {7: 1, 2: 1}, {2: 1, 3: 1, 5: 1, 7: 1}):
        assert server.run(ForwardMode.DECODE, counts, layer)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_chains_of_drafts_are_verified(kind, page_size):
    server, layer = Server(kind, page_size), latent_layer() if kind == "mla" else make_layer()
    assert server.run(ForwardMode.EXTEND, {3: 62, 5: 9}, layer)
    assert server.run(ForwardMode.TARGET_VERIFY, {3: 4, 5: 4}, layer, spec_info=drafts(4))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 64])
def test_trees_of_drafts_are_verified(page_size, layout):
    server, layer = Server(page_size=page_size, **EAGLE), make_layer()
    assert server.run(ForwardMode.EXTEND, {3: 62, 5: 9, 7: 1}, layer)
    for trees in ({3: BUSHY, 5: DEEP}, {7: DEEP, 3: BUSHY, 5: BUSHY}):
        counts = {request: len(parents) for request, parents in trees.items()}
        assert server.run(ForwardMode.TARGET_VERIFY, counts, layer, trees=trees, spec_info=server.verify(trees, layout))


def test_a_chain_and_a_tree_of_the_same_size_have_plans_of_their_own():
    server, layer = Server(**EAGLE), make_layer()
    assert server.run(ForwardMode.EXTEND, {3: 70, 5: 9}, layer)
    assert server.run(ForwardMode.TARGET_VERIFY, {3: 8, 5: 8}, layer, spec_info=drafts(8))
    trees = {3: BUSHY, 5: DEEP}
    spec_info = server.verify(trees, "QLEN_ONLY")
    assert server.run(ForwardMode.TARGET_VERIFY, {3: 8, 5: 8}, layer, trees=trees, spec_info=spec_info)


@pytest.mark.parametrize("kind", ["mha", "windows"])
def test_a_window_counts_along_the_path_of_a_draft(kind):
    """Drafts that branch share positions, so the number of a draft is not its position."""
    server = Server(kind, **EAGLE)
    layer = make_layer(int(kind == "windows"), sliding_window_size=2)
    assert server.run(ForwardMode.EXTEND, {3: 40, 5: 9}, layer)
    for trees in ({3: BUSHY, 5: DEEP}, {5: BUSHY, 3: DEEP}):  # the second step finds the memory of the first
        counts = dict.fromkeys(trees, 8)
        spec_info = server.verify(trees, "FULL_MASK")
        assert server.run(ForwardMode.TARGET_VERIFY, counts, layer, trees=trees, spec_info=spec_info)


def test_drafts_of_n_grams_branch_with_any_breadth():
    server, layer = Server(**NGRAM, speculative_ngram_max_bfs_breadth=1), make_layer()
    assert server.run(ForwardMode.EXTEND, {3: 62, 5: 9}, layer)
    trees = {3: BUSHY, 5: DEEP}
    spec_info = server.verify(trees, "FULL_MASK", "NGRAM")
    assert server.run(ForwardMode.TARGET_VERIFY, {3: 8, 5: 8}, layer, trees=trees, spec_info=spec_info)


def test_the_mask_of_a_chain_is_not_read():
    """A chain is causal, which every kernel serves; in newer versions, SGLang is told so."""
    server, layer = Server(**EAGLE | {"speculative_eagle_topk": 1}), make_layer()
    assert server.run(ForwardMode.EXTEND, {3: 62, 5: 9}, layer)
    spec_info = server.verify({3: BUSHY, 5: BUSHY}, "FULL_MASK")
    spec_info.topk = 1
    assert server.run(ForwardMode.TARGET_VERIFY, {3: 8, 5: 8}, layer, spec_info=spec_info)
    assert server.backend.verify_mask is None if not NEW else not server.backend.verify_mask.is_read


def test_masks_have_a_buffer_where_drafts_are_verified():
    assert (Server(**EAGLE).backend.verify_mask is not None) == NEW
    assert Server().backend.verify_mask is None
    runner = make_runner(make_pool("mha", 1), 1, **EAGLE)
    runner.is_draft_worker = True
    assert QuireBackend(runner).verify_mask is None
    Server(**EAGLE).backend.update_verify_buffers_to_fill_after_draft(None, None)


@pytest.mark.skipif(not NEW, reason="older versions write resolved options into server_args")
def test_options_of_drafts_are_those_that_sglang_has_resolved(monkeypatch):
    context = importlib.import_module("sglang.srt.runtime_context")
    monkeypatch.setattr(context, "get_spec", lambda: SimpleNamespace(**EAGLE))
    backend = Server(speculative_num_draft_tokens=None).backend
    assert backend.drafts_branch and backend.verify_mask.buffer.shape[0] == backend.req_to_token.shape[0] * 8 * 8


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["mha", "windows"])
def test_a_graph_of_trees_is_replayed_with_other_trees(kind, layout):
    server = Server(kind, **EAGLE)
    layer = make_layer(int(kind == "windows"), **({"sliding_window_size": 2} if kind == "windows" else {}))
    backend = server.backend
    backend.init_cuda_graph_state(4, 32)
    spec_info = server.verify({1: BUSHY}, "FULL_MASK")
    spec_info.draft_token, spec_info.custom_mask = None, torch.ones(99, dtype=torch.bool)  # says nothing yet
    slots, ones = torch.zeros(32, dtype=torch.int64), torch.full((4,), FILL)
    requests = torch.zeros(4, dtype=torch.int64)
    dummy = ForwardBatch(ForwardMode.TARGET_VERIFY, 4, slots, requests, ones, slots, 4, spec_info=spec_info)
    prepare(backend, dummy, capture=True)
    step = backend.forward_metadata
    backend.forward(*server.inputs(layer, 32), layer, dummy)
    plans = dict(step.plans)
    assert server.run(ForwardMode.EXTEND, {3: 62, 5: 9, 7: 16}, layer)
    # In the second step, the full mask of the one request has as many entries as a mask among the graph's 32 drafts.
    for trees in ({3: BUSHY, 5: DEEP, 7: BUSHY}, {7: DEEP}, {3: DEEP, 7: BUSHY}):
        spec_info = server.verify(trees, layout)
        counts = dict.fromkeys(trees, 8)
        batch = server.step(ForwardMode.TARGET_VERIFY, counts, pad_to=4, spec_info=spec_info)
        prepare(backend, batch, capture=False)
        assert backend.forward_metadata is step
        assert server.forward(batch, counts, layer, 32, trees=trees)
        assert step.plans == plans  # the captured launches serve it


def test_the_first_layer_of_the_first_graph_compiles_the_kernels_of_all_steps(monkeypatch):
    """Together, before a launch would compile one alone. Drafts that branch have further kernels."""
    asked, launched = [], quire.attention
    monkeypatch.setattr(quire, "warmup", lambda spec, pages, **options: asked.append((spec, options)) or [])
    monkeypatch.setattr(quire, "attention", lambda *args, **kw: asked.append(None) or launched(*args, **kw))
    for options, window in ((EAGLE, -1), (EAGLE, 2), ({}, 2)):
        server, layers = Server(**options), [make_layer(sliding_window_size=window) for _ in range(2)]
        assert server.run(ForwardMode.EXTEND, {3: 20}, layers[0])
        server.backend.init_cuda_graph_state(4, 4)
        slots, ones = torch.zeros(4, dtype=torch.int64), torch.full((4,), FILL)
        batch = ForwardBatch(ForwardMode.DECODE, 4, slots, torch.zeros(4, dtype=torch.int64), ones, slots, 4)
        prepare(server.backend, batch, capture=True)
        for layer in layers:
            server.backend.forward(*server.inputs(layer, 4), layer, batch)
    kinds = [call and (call[0].sliding_window, call[1].get("trees"), call[1].get("intervals")) for call in asked]
    assert kinds == [
        None, (None, True, False), None, None,
        None, (3, None, None), (None, True, True), None, None,
        None, (3, None, None), None, None,
    ]  # fmt: skip


@pytest.fixture
def begun(monkeypatch):
    """Apply the hooks by SGLang's registry, as on a GPU, and return the warm-ups that are begun.

    SGLang then loads a "model" by calling a function that makes layers.
    """
    found = []
    importlib.import_module("sglang.srt.managers.scheduler")  # as processes that run a model do
    monkeypatch.setattr(RadixAttention, "__init__", RadixAttention.__init__)  # to restore it
    monkeypatch.setattr(model_runner.ModelRunner, "load_model", lambda runner: runner.make())
    monkeypatch.setattr(HookRegistry, "_hooks", collections.defaultdict(list))
    monkeypatch.setattr(HookRegistry, "_patched", set())
    monkeypatch.setattr(ahead, "BEGUN", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(quire, "begin_warmup", lambda *nouns, **more: found.append((nouns, more)))
    ahead.register_hooks.cache_clear()
    register()
    register()
    HookRegistry.apply_hooks()
    yield found
    ahead.register_hooks.cache_clear()


def load(make, use_mla: bool = False, **changes) -> SimpleNamespace:
    """Load a model on a GPU, as SGLang's runner does; `changes` are those of its options, or of the runner."""
    options = {
        "attention_backend": "quire",
        "prefill_attention_backend": None,
        "decode_attention_backend": None,
        "disable_cuda_graph": False,
        "kv_cache_dtype": "auto",
        "max_running_requests": None,
        "chunked_prefill_size": 4096,
        "speculative_algorithm": None,
        "speculative_eagle_topk": None,
        "speculative_num_draft_tokens": None,
        "enable_deterministic_inference": False,
    }
    runner = {
        "device": "cuda",
        "page_size": 1,
        "use_mla_backend": use_mla,
        "is_generation": True,
        "is_draft_worker": False,
        "model_config": SimpleNamespace(context_len=CONTEXT, dtype=torch.bfloat16),
    }
    options |= {name: value for name, value in changes.items() if name in options}
    runner |= {name: value for name, value in changes.items() if name in runner}
    loading = SimpleNamespace(**runner, server_args=SimpleNamespace(**options), make=make)
    model_runner.ModelRunner.load_model(loading)
    return loading


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("kind", ["mha", "mla", "windows"])
def test_a_warm_up_begins_while_a_model_is_loaded_for_what_is_compiled_later(kind, page_size, begun, monkeypatch):
    """Once for layers that are alike, and with the bounds of the later warm-up, by which it finds the process."""
    windows = [-1, 15, -1, 15] if kind == "windows" else [-1, -1]

    def make_layers():
        with torch.device("cpu"):  # as SGLang's loaders say where a model is made
            for window in windows:
                layers.append(
                    latent_layer() if kind == "mla" else make_layer(int(window > 0), sliding_window_size=window)
                )
                counts.append(len(begun))

    layers, counts, warmed = [], [], []
    load(make_layers, kind == "mla", page_size=page_size)
    assert counts == ([1, 2, 2, 2] if kind == "windows" else [1, 1])
    monkeypatch.setattr(quire, "warmup", lambda *nouns, **more: warmed.append((nouns, more)) or [])
    runner = make_runner(make_pool(kind, page_size, torch.bfloat16), page_size)
    runner.dtype = torch.bfloat16
    backend = QuireBackend(runner)
    backend.init_cuda_graph_state(4, 4)
    for layer in layers:
        backend.warm_up(backend.layers.bind(layer, has_sinks=False))

    def compiled(nouns, options):
        spec, pages = nouns
        return spec, pages.layout, pages.strides, pages.page_size, pages.dtype, pages.scale_kind, options

    assert all(options.pop("device") == torch.device("cuda", 0) for _, options in begun)
    assert [compiled(*call) for call in warmed] == [compiled(*call) for call in begun]
    assert all(pages.k.device.type == "meta" and pages.k.numel() * 2 >= 1 << 31 for (_, pages), _ in begun)


def test_bounds_that_were_expected_too_small_are_those_of_the_backend(begun, monkeypatch):
    load(make_layer, max_running_requests=3)
    [((spec, _), options)] = begun
    assert options["max_num_seqs"] == 4 and options["max_seq_len"] == CONTEXT + 1
    bounds = {name: value for name, value in options.items() if name != "device"}
    assert ahead.bounds_of(spec, bounds | {"max_num_seqs": 2, "max_seq_len": 99}) == bounds
    for change in ({"max_num_seqs": 9}, {"min_seq_len": 9}, {"batch_invariant": True}):
        assert ahead.bounds_of(spec, bounds | change) == bounds | change
    other = dataclasses.replace(spec, sinks=True)
    assert ahead.bounds_of(other, bounds | {"max_num_seqs": 2}) == bounds | {"max_num_seqs": 2}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_backend": "triton", "prefill_attention_backend": "quire"},
        {"attention_backend": None, "decode_attention_backend": "quire"},
        {"kv_cache_dtype": "bf16"},
        EAGLE | {"speculative_eagle_topk": 1},
    ],
    ids=str,
)
def test_servers_whose_warm_ups_begin_early(changes, begun):
    load(make_layer, **changes)
    [(_, bounds)] = begun
    drafts = changes.get("speculative_num_draft_tokens", 1)
    assert (bounds["max_num_seqs"], bounds["max_num_tokens"], bounds["max_seq_len"]) == (4097, 8192, CONTEXT + drafts)


@pytest.mark.parametrize(
    "changes",
    [
        {"attention_backend": "triton"},
        {"disable_cuda_graph": True},
        {"device": "cpu"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"is_draft_worker": True},
        {"is_generation": False},
        EAGLE,
        NGRAM,
    ],
    ids=str,
)
def test_servers_whose_warm_ups_do_not_begin_early(changes, begun):
    load(make_layer, **changes)
    assert not begun


def test_layers_whose_warm_ups_do_not_begin_early(begun, monkeypatch, caplog):
    make_layer()  # outside of a runner
    fp8 = SimpleNamespace(
        get_quant_method=lambda layer, prefix: SimpleNamespace(
            create_weights=lambda layer: None, quant_config=SimpleNamespace(kv_cache_quant_algo="FP8")
        )
    )
    load(lambda: make_layer(quant_config=fp8))
    load(lambda: RadixAttention(HEADS, 48, 0.1, HEADS, 0, v_head_dim=32), use_mla=True)  # of expanded latents
    with caplog.at_level("DEBUG", "quire.start"):
        load(lambda: make_layer(attn_type=AttentionType.ENCODER_ONLY))
    assert not begun and "attn_type of a layer must be" in caplog.text


def test_no_start_fails_of_a_warm_up_that_cannot_begin(begun, monkeypatch, caplog):
    def fail(*nouns, **more):
        raise RuntimeError("no process")

    monkeypatch.setattr(quire, "begin_warmup", fail)
    layers = []
    with caplog.at_level("DEBUG", "quire.start"):
        load(lambda: layers.append(make_layer()))
        load(lambda: layers.append(make_layer()), model_config=None)
    assert len(layers) == 2 and "no process" in caplog.text and "NoneType" in caplog.text
    with pytest.raises(ZeroDivisionError):  # of SGLang's own
        load(lambda: 1 / 0)
    assert ahead.LOADING.get() is None


@pytest.mark.skipif(not NEW, reason="older versions write resolved options into server_args")
def test_options_of_a_start_are_those_that_sglang_has_resolved(begun, monkeypatch):
    context = importlib.import_module("sglang.srt.runtime_context")
    kernel = SimpleNamespace(attention_backend="quire", prefill_attention_backend=None, decode_attention_backend=None)
    decode = SimpleNamespace(backend="full")
    graph = SimpleNamespace(cuda_graph_config=SimpleNamespace(decode=decode))
    monkeypatch.setattr(context, "get_exec", lambda: SimpleNamespace(kernel=kernel, graph=graph))
    load(make_layer, attention_backend="triton", disable_cuda_graph=True)
    assert len(begun) == 1
    decode.backend = "disabled"
    load(lambda: make_layer(logit_cap=5.0), attention_backend="quire", disable_cuda_graph=False)
    assert len(begun) == 1


def test_only_processes_that_run_a_model_get_hooks(monkeypatch):
    """Others would import SGLang's model runner to apply them."""
    monkeypatch.setattr(HookRegistry, "_hooks", collections.defaultdict(list))
    ahead.register_hooks.cache_clear()
    monkeypatch.delitem(sys.modules, "sglang.srt.managers.scheduler", raising=False)
    register()
    assert not HookRegistry._hooks


def test_latents_come_as_one_tensor_or_with_their_rope_columns_apart():
    server, layer = Server("mla", 64), latent_layer()
    for mode, counts in ((ForwardMode.EXTEND, {3: 70, 5: 9}), (ForwardMode.DECODE, {3: 1, 5: 1})):
        batch = server.step(mode, counts)
        server.backend.init_forward_metadata(batch)
        assert server.forward(batch, counts, layer, sum(counts.values()), pair=True)


def test_prompts_of_expanded_latents():
    server = Server("mla")
    layer = RadixAttention(HEADS, 48, 0.1, HEADS, 0, v_head_dim=32)
    counts = {3: 21, 5: 9}
    server.backend.init_forward_metadata(server.step(ForwardMode.EXTEND, counts))
    q, k, v = (server.rand(30, HEADS, width) for width in (48, 48, 32))
    out = server.backend.forward_extend(q.view(30, -1), k, v, layer, SimpleNamespace(), save_kv_cache=False)
    spec = AttentionSpec(
        num_q_heads=HEADS, num_kv_heads=HEADS, head_dim=48, head_dim_v=32, dtype=torch.float32, softmax_scale=0.1
    )
    starts = torch.tensor([0, 21, 30], dtype=torch.int32)
    problem = Problem(spec, Batch.varlen(starts, starts), PagedKVCache(k, v, "THD"), q, (21, 9), (21, 9), None, None)
    assert error_budget(problem, out.view(30, HEADS, 32)).passed
    with pytest.raises(quire.UnsupportedError, match="k must be the step's own 30 tokens"):
        server.backend.forward_extend(q, k[:9], v[:9], layer, SimpleNamespace(), save_kv_cache=False)


@pytest.mark.parametrize("kind", ["mha", "windows"])
@pytest.mark.parametrize("page_size", [1, 64])
def test_layers_with_a_sliding_window_a_softcap_and_sinks(kind, page_size):
    server = Server(kind, page_size)
    layers = make_layer(0), make_layer(1 if kind == "windows" else 0, sliding_window_size=15, logit_cap=5.0)
    sinks = server.rand(HEADS)
    for layer, has_sinks in ((layers[0], None), (layers[1], sinks)):
        server.past = {request: [] for request in range(1, 9)}
        server.lens = [0] * 9
        server.backend.layers.bound.clear()
        assert server.run(ForwardMode.EXTEND, {3: 40, 5: 9}, layer, sinks=has_sinks)
        assert server.run(ForwardMode.EXTEND, {3: 30}, layer, sinks=has_sinks)
        assert server.run(ForwardMode.DECODE, {3: 1, 5: 1}, layer, sinks=has_sinks)


@pytest.mark.parametrize("kind", ["mha", "windows"])
def test_inkling_s_relative_bias(kind):
    """Inkling's layers with windows and those without hand the score mod and numbers of each token to the backend."""
    mods = pytest.importorskip("sglang.kernels.ops.attention.score_mod", reason="SGLang has it since 0.5.23")
    server = Server(kind, 64)
    layer = make_layer(1 if kind == "windows" else 0, sliding_window_size=15 if kind == "windows" else -1)
    relative = {"score_mod": mods.relative_bias_score_mod}
    assert server.run(ForwardMode.EXTEND, {3: 40, 5: 9}, layer, **relative)
    assert server.run(ForwardMode.EXTEND, {3: 30}, layer, pad=2, **relative)
    assert server.run(ForwardMode.DECODE, {3: 1, 5: 1}, layer, **relative)
    assert server.run(ForwardMode.DECODE, {3: 1, 5: 1}, layer)
    with pytest.raises(quire.UnsupportedError, match="score_mod must be relative_bias_score_mod, got other"):
        server.run(ForwardMode.DECODE, {3: 1}, layer, score_mod=SimpleNamespace(__name__="other"))


@pytest.mark.parametrize("kind", ["mha", "mla", "windows"])
@pytest.mark.parametrize("mode", [ForwardMode.DECODE, ForwardMode.TARGET_VERIFY])
def test_a_graph_is_replayed_with_other_lengths_and_fewer_requests(kind, mode):
    server = Server(kind, 64)
    layer = latent_layer() if kind == "mla" else make_layer(int(kind == "windows"))
    width = 3 if mode == ForwardMode.TARGET_VERIFY else 1
    fields = {"spec_info": drafts(3)} if width == 3 else {}
    backend = server.backend
    backend.init_cuda_graph_state(4, 4 * width)
    assert backend.get_cuda_graph_seq_len_fill_value() == FILL

    def dummy():
        slots = torch.zeros(4 * width, dtype=torch.int64)
        ones = torch.full((4,), FILL)
        return ForwardBatch(mode, 4, slots, torch.zeros(4, dtype=torch.int64), ones, slots, 4, **fields)

    prepare(backend, dummy(), capture=True)
    step = backend.forward_metadata
    assert step.max_seq_len == backend.plans.bounds()["max_seq_len"]  # of which the workspace and the warm-up know
    q, k, v = server.inputs(layer, 4 * width)
    backend.forward(q, k, v, layer, dummy())
    plans = dict(step.plans)
    assert server.run(ForwardMode.EXTEND, {3: 62, 5: 9, 7: 30}, layer)
    for counts in ({3: width, 5: width, 7: width}, {7: width}, {3: width, 7: width}):
        batch = server.step(mode, counts, pad_to=4, **fields)
        prepare(backend, batch, capture=False)
        assert backend.forward_metadata is step
        assert server.forward(batch, counts, layer, 4 * width)
        assert step.plans == plans  # the captured launches serve it


def prepare(backend, batch, capture: bool) -> None:
    """Call what SGLang's runner of graphs calls."""
    if NEW:
        backend.init_forward_metadata_out_graph(batch, in_capture=capture)
    elif capture:
        backend.init_forward_metadata_capture_cuda_graph(
            batch.batch_size, batch.input_ids.shape[0], batch.req_pool_indices, batch.seq_lens, None,
            batch.forward_mode, batch.spec_info,
        )  # fmt: skip
    else:
        backend.init_forward_metadata_replay_cuda_graph(
            batch.batch_size, batch.req_pool_indices, batch.seq_lens, batch.seq_lens_sum, None,
            batch.forward_mode, batch.spec_info, batch.seq_lens_cpu,
        )  # fmt: skip


def test_drafts_past_the_longest_context_get_a_larger_workspace(monkeypatch):
    asked = []
    monkeypatch.setattr(quire, "workspace_size", lambda spec, **bounds: asked.append(bounds["max_seq_len"]) or 0)
    server, layer = Server(), make_layer()
    longest = server.backend.max_context_len
    plans, spec = server.backend.plans, server.backend.layers.bind(layer, has_sinks=False).spec
    for max_seq_len in (longest, longest + 8, longest):
        plans.workspace(spec, 4, 32, max_seq_len, {})
    assert asked == [longest, longest + 8]


def test_counts_of_new_tokens_may_be_a_tensor():
    server, layer = Server(), make_layer()
    batch = server.step(ForwardMode.EXTEND, {3: 7, 5: 2})
    batch.extend_seq_lens_cpu = torch.tensor(batch.extend_seq_lens_cpu)
    server.backend.init_forward_metadata(batch)
    assert server.forward(batch, {3: 7, 5: 2}, layer, 9)


def test_rows_that_pad_an_eager_step_are_zero():
    server, layer = Server(), make_layer()
    batch = server.step(ForwardMode.EXTEND, {3: 7})
    server.backend.init_forward_metadata(batch)
    q, k, v = server.inputs(layer, 9)
    batch.out_cache_loc = torch.nn.functional.pad(batch.out_cache_loc, (0, 2))
    out = server.backend.forward(q, k, v, layer, batch)
    assert bool((out[7:] == 0).all()) and bool((out[:7] != 0).all())


def test_an_fp8_pool_keeps_keys_with_the_layer_s_scales():
    server, layer = Server(dtype=torch.float8_e4m3fn), make_layer()
    layer.k_scale, layer.v_scale = torch.tensor(0.5), torch.tensor(2.0)
    batch = server.step(ForwardMode.EXTEND, {3: 20})
    server.backend.init_forward_metadata(batch)
    q, k, v = server.inputs(layer, 20)
    stored_k, stored_v = ((x / s).to(torch.float8_e4m3fn).float() * s for x, s in ((k, 0.5), (v, 2.0)))
    problem = server.problem(layer, q, {3: 20}, stored_k, stored_v)
    assert error_budget(problem, server.backend.forward(q, k, v, layer, batch).view(20, HEADS, DIM)).passed


def test_deterministic_inference_takes_batch_invariant_plans(monkeypatch):
    """Only what is asked for: for CPU tensors `quire.plan` refuses the option."""
    asked, plan = [], quire.plan
    monkeypatch.setattr(
        quire, "plan", lambda *args, batch_invariant, **kw: asked.append(batch_invariant) or plan(*args, **kw)
    )
    for options in ({}, {"enable_deterministic_inference": True}):
        assert Server(**options).run(ForwardMode.EXTEND, {3: 20}, make_layer())
    assert asked == [False, True]


def test_steps_with_prompts_that_are_almost_as_long_have_one_plan():
    """Of which the bounds of queries are rounded up. A step with a graph has those of its graph."""
    server, layer, seen = Server(), make_layer(), []
    for count in (70, 17, 18, 21):
        server.run(ForwardMode.EXTEND, {3: count, 5: 1}, layer)
        seen += server.backend.forward_metadata.plans.values()
    _, first, second, third = seen
    assert first is second and first is not third
    assert astuple(first.bounds) == (20, 128, 20), first


def test_plans_are_kept_from_step_to_step():
    server, layer = Server(), make_layer()
    server.run(ForwardMode.EXTEND, {3: 20, 5: 20}, layer)
    seen = []
    for _ in range(5):
        server.run(ForwardMode.DECODE, {3: 1, 5: 1}, layer)
        seen += server.backend.forward_metadata.plans.values()
    assert len(set(map(id, seen))) == 1


def test_what_is_not_served_is_refused_by_name():
    for options, reason in (
        (EAGLE | {"speculative_num_draft_tokens": 65}, "speculative_num_draft_tokens must be at most 64 .*, got 65"),
        (EAGLE | {"enable_two_batch_overlap": True}, "enable_two_batch_overlap must be False where drafts branch"),
        ({"dcp_size": 2}, "dcp_size must be 1, got 2"),
    ):
        with pytest.raises(quire.UnsupportedError, match=reason):
            Server(**options)
    server = Server()
    for options in (EAGLE, NGRAM):
        with pytest.raises(quire.UnsupportedError, match="drafts must be chains for latent attention, got trees"):
            Server("mla", **options)
    with pytest.raises(quire.UnsupportedError, match="enable_deterministic_inference must be False for latent"):
        Server("mla", enable_deterministic_inference=True)
    latents = Server("mla")
    with pytest.raises(quire.UnsupportedError, match="drafts must be chains for latent attention, got trees"):
        latents.run(ForwardMode.TARGET_VERIFY, {3: 8}, latent_layer(), spec_info=latents.verify({3: DEEP}, "QLEN_ONLY"))
    with pytest.raises(quire.UnsupportedError, match="forward_mode must be one of the target model"):
        server.run(ForwardMode.DRAFT_EXTEND_V2, {3: 4}, make_layer(), spec_info=drafts(4))
    for fields, reason in (
        ({"attn_type": AttentionType.ENCODER_ONLY}, "attn_type of a layer must be"),
        ({"is_cross_attention": True}, "is_cross_attention of a layer must be"),
        ({"pos_encoding_mode": "ALIBI"}, "pos_encoding_mode of a layer must be"),
        ({"use_irope": True}, "use_irope of a layer must be"),
    ):
        with pytest.raises(quire.UnsupportedError, match=reason):
            Server().run(ForwardMode.EXTEND, {3: 4}, make_layer(**fields))
    server = Server()
    batch = server.step(ForwardMode.EXTEND, {3: 4})
    server.backend.init_forward_metadata(batch)
    with pytest.raises(quire.UnsupportedError, match="score_mod must be relative_bias_score_mod, got len"):
        server.backend.forward(*server.inputs(make_layer(), 4), make_layer(), batch, score_mod=len)
