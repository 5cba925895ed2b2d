"""SGLang's own kit of tests for attention backends, which is in its wheel, and its wrappers, around this backend.

The kit brings cases, small modules, pools and references, and judges by tolerances of its own. Where a server captures
a graph, it calls what a capture and a replay call, but captures none: on a GPU the fixture `graphs` does.
0.5.12 has no kit, and that of 0.5.17 imports SGLang's kernels for GPUs.
"""
# ruff: noqa: E402

import importlib
from types import SimpleNamespace

import pytest
import torch

import tests.engines.sglang_environment  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore")

import warnings

KIT = "sglang.test.kits.attention_unittest"
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip(KIT, reason="this SGLang has no kit of tests for attention backends")
    context = importlib.import_module("sglang.srt.runtime_context")
    with context.get_parallel().override() as parallel:  # its modules set what they say of ranks for good
        dense = importlib.import_module(f"{KIT}.attention_methods.dense_attention")
        mla = importlib.import_module(f"{KIT}.attention_methods.mla_attention")
        decode_graphs = pytest.importorskip(
            f"{KIT}.runner_modes.cuda_graph_decode_runner",
            reason="the kit of SGLang 0.5.17 imports kernels for GPUs",
            exc_type=ImportError,
        )
        draft_graphs = importlib.import_module(f"{KIT}.runner_modes.speculative_cuda_graph_runner")
        split = importlib.import_module(f"{KIT}.runner_modes.split_op_runner")
        verify = importlib.import_module(f"{KIT}.runner_modes.speculative_target_verify_runner")
        RANKS = dict(parallel._overrides)
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.layers.attention.hybrid_attn_backend import HybridAttnBackend
    from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
    from sglang.srt.layers.attention.tbo_backend import TboAttnBackend
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from quire.integrations.sglang import register

    register()


@pytest.fixture(scope="module", autouse=True)
def ranks():
    """Let what the kit says of ranks hold for its own tests, and for no other of this process."""
    with context.get_parallel().override(**RANKS):
        yield


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYOUTS = ("shuffled_pages", "contiguous", "interleaved_pages")
DENSE, MLA = dense.make_dense_cases("quire"), mla.make_mla_cases("quire")
WINDOWS = (
    *dense.make_swa_no_prefix_input_config_cases("quire"),
    *dense.make_swa_prefix_input_config_cases("quire"),
    dense.DenseAttentionCase(
        "swa_decode_window_edges", "quire", ForwardMode.DECODE, 4, 4, 16, (3, 4, 5, 19), sliding_window_size=4
    ),
)
NARROW = {"qk_rope_head_dim": 0}
ROPE = {"qk_rope_head_dim": 16}  # Quire's latents have a multiple of 16 columns with positions


def drafts(case_type, page_size: int):
    """Return a case that verifies three drafts of each of two requests."""
    heads = {"num_heads": 4} | ({"num_kv_heads": 2} if case_type is dense.DenseAttentionCase else {})
    sizes = {"page_size": page_size, "prefix_lens": (3, 15), "extend_lens": (3, 3)}
    return case_type(f"verify_page{page_size}", "quire", ForwardMode.TARGET_VERIFY, **heads, **sizes)


def layouts(case):
    """Return how the kit may scatter the tokens of a case; the last one scatters them within pages, which none does."""
    return (*LAYOUTS, "non_monotonic_extend") if case.page_size == 1 else LAYOUTS


def cases():
    """Yield the functions of the kit that a backend is meant to pass, with a case and options for each."""
    for case in (*DENSE, *WINDOWS):
        for layout in layouts(case):
            yield dense.run_dense_attention_case, case, {"loc_layout": layout}
    for case in MLA:
        for rope in (NARROW, ROPE):
            for layout in layouts(case):
                yield mla.run_mla_attention_case, case, {"loc_layout": layout, **rope}
    for case in (*DENSE, *WINDOWS):
        if case.forward_mode.is_decode():
            yield decode_graphs.run_dense_cuda_graph_decode_case, case, {}
        else:
            for breakable in (False, True):
                for tokens in (None, case.num_input_tokens + 3):
                    options = {"breakable": breakable, "static_num_tokens": tokens}
                    yield split.run_dense_split_op_extend_case, case, options
    for case in MLA:
        if case.forward_mode.is_decode():
            yield decode_graphs.run_mla_cuda_graph_decode_case, case, {}
        else:
            for breakable in (False, True):
                yield split.run_mla_split_op_extend_case, case, {"breakable": breakable}
    for page_size in (1, 16):
        for topk, kind in ((1, "eagle"), (2, "eagle"), (1, "dflash"), (1, "frozen_kv_mtp"), (2, "ngram")):
            options = {"topk": topk, "spec_kind": kind}
            yield verify.run_dense_spec_verify_case, drafts(dense.DenseAttentionCase, page_size), options
            if page_size > 1:  # else the kit's second copy of a prefix overwrites its first
                case = drafts(dense.DenseAttentionCase, page_size)
                yield verify.run_dense_spec_verify_cuda_graph_case, case, options
        yield verify.run_mla_eagle_verify_case, drafts(mla.MLAAttentionCase, page_size), {"topk": 1}
    yield verify.run_mla_eagle_verify_cuda_graph_case, drafts(mla.MLAAttentionCase, 16), {"topk": 1}


def named(function, case, options):
    """Return a case as a parameter of a test."""
    what = function.__name__.removeprefix("run_").removesuffix("_case")
    return pytest.param(function, case, options, id="-".join((what, case.name, *map(str, options.values()))))


@pytest.fixture(autouse=True)
def options_of_the_server(monkeypatch):
    """The kit publishes options and leaves them; tests of other files have their own."""
    made, override = [], context.RuntimeContext.override_server_args

    def kept(self, **fields):
        made.append(override(self, **fields))
        return made[-1]

    monkeypatch.setattr(context.RuntimeContext, "override_server_args", kept)
    monkeypatch.setattr(dense, "_SWA_DECODE_EXTEND_WINDOW", dense._SWA_DECODE_EXTEND_WINDOW | {"quire"})
    yield
    for options in reversed(made):
        options.restore()


@pytest.fixture(autouse=DEVICE == "cuda")
def graphs(monkeypatch):
    """On a GPU, capture the forward pass where the kit would, and replay it on the values of the kit's next batch."""
    graphs, static, phase = [], [], [""]

    def tensors(batch, inputs):
        return [inputs["input_hidden"], batch.out_cache_loc, batch.positions, batch.seq_lens, batch.req_pool_indices]

    def in_phase(name, prepare):
        def prepared(backend, size, batch):
            phase[0] = name
            return prepare(backend, size, batch)

        return prepared

    def captured(run):
        def runs(fixture, batch, inputs):
            now, phase[0] = phase[0], ""  # the next run is not of a graph unless its preparation says so
            if now == "capture":
                static[:] = tensors(batch, inputs)
                run(fixture, batch, inputs)  # so that nothing is compiled while the graph is captured
                graphs[:] = [torch.cuda.CUDAGraph()]
                with torch.cuda.graph(graphs[0]):
                    static.append(run(fixture, batch, inputs))
            elif now == "replay":
                for old, new in zip(static, tensors(batch, inputs), strict=False):
                    old.copy_(new)
                graphs[0].replay()
            else:
                return run(fixture, batch, inputs)
            return static[-1]

        return runs

    for module in (decode_graphs, draft_graphs):
        for name in ("capture", "replay"):
            function = f"_init_cuda_graph_{name}_metadata"
            monkeypatch.setattr(module, function, in_phase(name, getattr(module, function)))
    for module in (decode_graphs, verify):
        for name in ("run_dense_forward", "run_mla_forward"):
            monkeypatch.setattr(module, name, captured(getattr(module, name)))


def fails(reason: str) -> None:
    pytest.fail(reason)


KITS_TESTCASE = SimpleNamespace(skipTest=fails)


def run(function, case, options) -> None:
    with torch.no_grad():
        function(KITS_TESTCASE, case, device=DEVICE, **options)


@pytest.mark.parametrize(("function", "case", "options"), [named(*found) for found in cases()])
def test_a_case_of_the_kit_passes(function, case, options):
    run(function, case, options)


class NoLinearAttention(AttentionBackend):
    """The half of a hybrid that has no layers here: those of linear attention need a GPU."""

    needs_cpu_seq_lens = False

    def nothing(self, *args, **kwargs) -> None:
        pass

    init_forward_metadata = init_forward_metadata_out_graph = init_forward_metadata_in_graph = nothing
    init_cuda_graph_state = on_after_cuda_graph_warmup = supports_prefill_graph_extend = nothing


WRAPPERS = {
    "prefill and decode apart": lambda runner, make: HybridAttnBackend(runner, make(runner), make(runner)),
    "hybrid of linear attention": lambda runner, make: HybridLinearAttnBackend(make(runner), NoLinearAttention(), [0]),
    "two batches that overlap": lambda runner, make: TboAttnBackend(make(runner), [make(runner), make(runner)]),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_sglang_s_wrappers_take_the_backend(wrapper, monkeypatch):
    make = attention_registry.ATTENTION_BACKENDS["quire"]
    monkeypatch.setitem(attention_registry.ATTENTION_BACKENDS, "quire", lambda runner: WRAPPERS[wrapper](runner, make))
    for case in (DENSE[0], DENSE[6], DENSE[8], WINDOWS[1]):
        run(dense.run_dense_attention_case, case, {})
    for case in (MLA[0], MLA[6], MLA[8]):
        run(mla.run_mla_attention_case, case, {})
    verified = drafts(dense.DenseAttentionCase, 16), {"topk": 2}
    run(verify.run_dense_spec_verify_case, *verified)
    if "overlap" not in wrapper:  # a replay in two batches asks for more than the kit's batch has
        run(decode_graphs.run_dense_cuda_graph_decode_case, DENSE[8], {})
        run(decode_graphs.run_mla_cuda_graph_decode_case, MLA[8], {})
    if "hybrid" in wrapper:  # prefill's backend has graphs only where a server's options name drafts
        run(verify.run_dense_spec_verify_cuda_graph_case, *verified)
