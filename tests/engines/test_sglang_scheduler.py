"""SGLang's scheduler, radix cache and model runner on a CPU: a small model writes eager attention's tokens.

The model is SGLang's wrapper of Transformers' Llama, since SGLang's own models call its kernels for GPUs.
The scheduler is driven step by step, as its event loop drives it, in a process of its own.
"""
# ruff: noqa: E402

import importlib
import inspect
import multiprocessing
import traceback
from array import array
from pathlib import Path

import pytest
import torch
import transformers

import tests.engines.sglang_environment  # noqa: F401
from tests.extended import slow

pytestmark = pytest.mark.filterwarnings("ignore")

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from quire.integrations.sglang import register

    register()
    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.server_args import PortArgs, ServerArgs

    from quire.integrations.sglang import ahead, contract

import quire

NEW_TOKENS = 12
OLD = "running_batch" not in inspect.signature(Scheduler.get_next_batch_to_run).parameters  # 0.5.12
TAKES_RANKS = "gpu_id" in inspect.signature(Scheduler).parameters  # 0.5.12 and 0.5.17; later, they are published


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return a Llama of two layers, and the folder that it was saved to."""
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():  # enough spread that rounding does not choose the next token
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    model.set_attn_implementation("eager")
    model.generation_config.eos_token_id = None
    return model, folder


def make_scheduler(folder: Path, **options) -> Scheduler:
    args = ServerArgs(
        model_path=str(folder),
        model_impl="transformers",
        device="cpu",
        dtype="float32",
        attention_backend="quire",
        sampling_backend="pytorch",
        skip_tokenizer_init=True,
        disable_overlap_schedule=True,
        disable_cuda_graph=True,
        mem_fraction_static=0.1,
        chunked_prefill_size=64,
        max_running_requests=8,
        log_level="warning",
        **options,
    )
    ports = PortArgs.init_new(args)
    if not OLD:
        context = importlib.import_module("sglang.srt.runtime_context")
        if not TAKES_RANKS:
            context.publish(args, role="scheduler", ranks=context.SpawnRanks(world_rank=0, gpu_id=0))
            return Scheduler(args, ports)
        context.publish(args, role="scheduler")
    # Newer Transformers say of more layers how ranks share them, in words that these refuse. Here is one rank.
    wrapper = importlib.import_module("sglang.srt.models.transformers")
    wrapper._normalize_tp_style = lambda style: style if style in ("colwise", "rowwise") else "replicate"
    allocation = "mem_cache.common" if OLD else "mem_cache.allocation"
    for name in (allocation, "model_executor.forward_batch_info"):  # which ask the backend's name, not the device
        importlib.import_module(f"sglang.srt.{name}").support_triton = lambda backend: False
    ranks = [name for name in inspect.signature(Scheduler).parameters if name.endswith(("_rank", "_id"))]
    return Scheduler(args, ports, **dict.fromkeys(ranks, 0) | {"dp_rank": None})


def send(scheduler: Scheduler, name: str, prompt: list[int]) -> None:
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    sampling.normalize(None)
    fields = {
        "rid": name,
        "input_text": None,
        "input_ids": prompt if OLD else array("q", prompt),
        "input_embeds": None,
        "mm_inputs": None,
        "token_type_ids": None,
        "sampling_params": sampling,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
    }
    known = inspect.signature(TokenizedGenerateReqInput).parameters
    scheduler.handle_generate_request(TokenizedGenerateReqInput(**{k: v for k, v in fields.items() if k in known}))


@torch.inference_mode()
def run(scheduler: Scheduler) -> dict:
    """Take the steps of the event loop until there is nothing to do; return the requests by name."""
    requests = {}
    for _ in range(1000):
        if OLD:
            batch = scheduler.get_next_batch_to_run()
        else:
            batches = {"running_batch": scheduler.running_batch, "last_batch": scheduler.last_batch}
            plan = scheduler.get_next_batch_to_run(**batches)
            scheduler.running_batch, batch = plan.running_batch, plan.batch_to_run
        scheduler.last_batch = batch
        if batch:
            requests |= {request.rid: request for request in batch.reqs}
            scheduler.process_batch_result(batch, scheduler.run_batch(batch))
        elif scheduler.waiting_queue:
            scheduler.on_idle()
        else:
            return requests
    raise AssertionError(f"requests still wait: {[request.rid for request in scheduler.waiting_queue]}")


def greedy(model, prompt: list[int]) -> list[int]:
    tokens = model.generate(torch.tensor([prompt]), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
    return tokens[0, len(prompt) :].tolist()


def serve(folder: Path, prompts: list[list[int]], page_size: int, num_slots: int) -> dict:
    """Serve all prompts but the last, then the last; return what became of them and of the pool."""
    scheduler = make_scheduler(folder, page_size=page_size, max_total_tokens=num_slots)
    free = scheduler.token_to_kv_pool_allocator.available_size()
    requests = {}
    for names in (range(len(prompts) - 1), (len(prompts) - 1,)):
        for name in names:
            send(scheduler, str(name), prompts[name])
        requests |= run(scheduler)
    left = scheduler.token_to_kv_pool_allocator.available_size() + scheduler.tree_cache.evictable_size()
    return {
        "cache": type(scheduler.tree_cache).__name__,
        "backend": type(scheduler.tp_worker.model_runner.attn_backend).__name__,
        "tokens": [list(requests[str(name)].output_ids) for name in range(len(prompts))],
        "cached": requests[str(len(prompts) - 1)].cached_tokens,
        "lost": free - left,
    }


def in_a_process(function, *args):
    """Call a function in a copy of this process: SGLang has one scheduler a process."""
    forked = multiprocessing.get_context("fork")
    receive, send = forked.Pipe(duplex=False)

    def call() -> None:
        try:
            send.send(function(*args))
        except BaseException:
            send.send(traceback.format_exc())

    process = forked.Process(target=call)
    process.start()
    send.close()
    try:
        return receive.recv()
    finally:
        process.join()


@pytest.mark.parametrize(("page_size", "num_slots"), [slow(1, 2048), (64, 2048), (1, 256)])
def test_the_scheduler_writes_the_tokens_of_eager_attention(page_size, num_slots, model):
    """Prompts come in chunks, decode together, find each other's beginnings, and wait where the pool is too small."""
    if TAKES_RANKS and page_size > 1:
        pytest.skip("SGLang 0.5.12 and 0.5.17 allocate pages of several tokens by a Triton kernel, which needs a GPU")
    eager, folder = model
    random = torch.Generator().manual_seed(1)
    prompts = [torch.randint(3, 97, (n,), generator=random).tolist() for n in (5, 40, 1, 140, 33, 64, 17)]
    prompts.append(prompts[3][:130] + [9, 8, 7])
    served = in_a_process(serve, folder, prompts, page_size, num_slots)
    assert isinstance(served, dict), served
    assert served["tokens"] == [greedy(eager, prompt) for prompt in prompts]
    assert served["backend"] == "QuireBackend" and served["cache"].endswith("RadixCache")
    assert served["lost"] == 0
    if num_slots == 2048:
        assert served["cached"] == 130 // page_size * page_size


def warm_ups(folder: Path) -> dict:
    """Start a scheduler as on a GPU that captures graphs, as far as what Quire compiles; return both warm-ups."""
    events, warmed = [], []
    loader = importlib.import_module("sglang.srt.model_loader.loader").DefaultModelLoader
    load = loader.load_weights_and_postprocess
    loader.load_weights_and_postprocess = staticmethod(lambda *args: (events.append("weights"), load(*args))[1])
    quire.begin_warmup = lambda *nouns, **more: events.append(compiled(*nouns, **more))
    quire.warmup = lambda *nouns, **more: warmed.append(compiled(*nouns, **more)) or []
    captures_decode = contract.captures_decode
    ahead.has_gpu, contract.captures_decode = lambda runner: True, lambda options: True
    torch.cuda.current_device = lambda: 0
    importlib.import_module("sglang.srt.plugins").load_plugins()
    runner = make_scheduler(folder).tp_worker.model_runner
    runner.attn_backend.init_cuda_graph_state(4, 4)
    for layer in runner.model.attention_instances.values():
        runner.attn_backend.warm_up(runner.attn_backend.layers.bind(layer, has_sinks=False))
    return {"events": events, "warmed": warmed, "captures": captures_decode(runner.server_args)}


def compiled(spec, pages, device=None, **bounds) -> tuple:
    return spec, pages.layout, pages.strides, pages.page_size, pages.dtype, bounds


def test_a_warm_up_begins_before_weights_are_loaded_for_what_is_compiled_later(model):
    found = in_a_process(warm_ups, model[1])
    assert isinstance(found, dict), found
    [warmed] = found["warmed"]
    assert found["events"] == [warmed, "weights"]
    assert not found["captures"]  # which is what the server is told
    assert warmed[-1]["max_num_seqs"] == 9 and warmed[-1]["max_seq_len"] == 513
