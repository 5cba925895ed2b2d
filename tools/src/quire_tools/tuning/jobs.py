"""The cases of a sweep: those that trees are fitted to, and those that they are judged by."""

from dataclasses import dataclass
from itertools import product

from quire_tools.bench.case import Case
from quire_tools.bench.cases import decode, decoding, log_normal, over_latents, prompts, share

QUICK_MODELS = ("Llama-3-8B", "Llama-3.2-1B", "Gemma-3-12B", "Qwen2.5-7B")
FEW_HEADS = ("MQA", "Qwen2.5-1.5B")  # one and two KV heads
HELD_OUT_MODELS = (
    *QUICK_MODELS[:2],
    "Llama-3-70B",
    "Qwen3-30B-A3B",
)  # the last two are in no case that trees are fitted to

# (sequences, keys of each)
CONTEXTS = (1, 1500), (1, 8192), (3, 2500), (8, 1024), (24, 900), (40, 1800), (128, 1024)
QUICK_CONTEXTS = (
    (4, 128), (1, 512), *CONTEXTS, (1, 3500), (1, 30000), (2, 4096), (4, 6000), (12, 3000), (32, 512), (32, 2048),
    (64, 512), (100, 700),
)  # fmt: skip
ALL_CONTEXTS = (4, 128), *product((1, 16, 256), (256, 4096)), (1, 65536), *CONTEXTS, (4, 6000), (100, 700)
HELD_OUT_CONTEXTS = (2, 3000), (1, 5500), (48, 1500), (90, 600)
FP8_CONTEXTS = tuple(product((1, 16, 128), (1024, 4096)))
# (sequences, queries of each, keys of each)
QUICK_DRAFTS = (8, 4, 2048), (16, 8, 2048), (1, 8, 8192), (6, 5, 1200), (24, 3, 3000)
ALL_DRAFTS = (1, 4, 4096), (1, 8, 8192), (8, 4, 2048), (16, 8, 2048), (6, 5, 1200), (24, 3, 3000)
# MLA: heads, and those of no case that trees are fitted to; (sequences, keys of each); (sequences, queries, keys)
LATENT_HEADS, HELD_OUT_LATENT_HEADS = (16, 128), (16, 64)
QUICK_LATENT_CONTEXTS = (1, 8192), (32, 2048), (128, 1024)
ALL_LATENT_CONTEXTS = *QUICK_LATENT_CONTEXTS, (1, 1024), (1, 65536), (8, 4096), (32, 8192)
HELD_OUT_LATENT_CONTEXTS = (1, 5500), (48, 1500)
QUICK_LATENT_DRAFTS = ((8, 4, 2048),)
ALL_LATENT_DRAFTS = *QUICK_LATENT_DRAFTS, (32, 2, 4096)
# tokens of each prompt of a batch
QUICK_PROMPTS = [64], [128], [512], [1024], [4096]
ALL_PROMPTS = [64], [128], [300], [512], [1024], [4096], log_normal(8, 512, 6)
# (queries, keys) of a prompt's chunk
QUICK_CHUNKS = (32, 4096), (128, 8192), (256, 4096)
ALL_CHUNKS = *QUICK_CHUNKS, (1024, 16384)


@dataclass(frozen=True)
class Job:
    """A case to tune for.

    Attributes:
        case: the batch.
        held_out: whether a tree is judged by it and not fitted to it.
    """

    case: Case
    held_out: bool = False


def jobs(quick: bool) -> list[Job]:
    """Return the cases of a sweep: those to fit to, then others with other lengths, seeds and heads to judge by."""
    found: list[Case] = []
    for model in QUICK_MODELS if quick else (*QUICK_MODELS, *FEW_HEADS):
        found += [
            decode(n, length, f" {model}", model=model) for n, length in (QUICK_CONTEXTS if quick else ALL_CONTEXTS)
        ]
        found.append(decoding(f"decode 32 log-normal 1024 {model}", log_normal(32, 1024, 5), model=model))
        found += [drafts(n, q, s, model) for n, q, s in (QUICK_DRAFTS if quick else ALL_DRAFTS)]
        for lens in QUICK_PROMPTS if quick else ALL_PROMPTS:
            found.append(prompts(f"prefill {len(lens)} of {max(lens)} {model}", lens, model=model))
        found += [chunk(q, s, model) for q, s in (QUICK_CHUNKS if quick else ALL_CHUNKS)]
        found.append(share(8, 50, unequal=True, model=model))
    if quick:
        found += [decode(n, length, f" {model}", model=model) for model in FEW_HEADS for n, length in CONTEXTS]
    else:
        found += [decode(n, length, " fp8", kv_dtype="float8_e4m3fn") for n, length in FP8_CONTEXTS]
        found += [prompts(f"prefill {n} fp8", [n], kv_dtype="float8_e4m3fn") for n in (256, 2048)]
    for heads in LATENT_HEADS:
        contexts = QUICK_LATENT_CONTEXTS if quick else ALL_LATENT_CONTEXTS
        found += [over_latents(heads, [length] * n, f"{n}x{length}") for n, length in contexts]
        drafted = QUICK_LATENT_DRAFTS if quick else ALL_LATENT_DRAFTS
        found += [over_latents(heads, [length] * n, f"{n}x{length}", q) for n, q, length in drafted]
        if not quick:
            found.append(over_latents(heads, log_normal(32, 1024, 5), "32 log-normal 1024"))
            found += [over_latents(heads, [s] * n, f"{n}x{s}", kv_dtype="float8_e4m3fn") for n, s in FP8_CONTEXTS]
    held_out: list[Case] = []
    for heads in HELD_OUT_LATENT_HEADS:
        held_out += [over_latents(heads, [length] * n, f"{n}x{length}") for n, length in HELD_OUT_LATENT_CONTEXTS]
    for model in HELD_OUT_MODELS:
        held_out += [decode(n, length, f" {model}", model=model) for n, length in HELD_OUT_CONTEXTS]
        held_out.append(prompts(f"prefill 700 {model}", [700], model=model))
        held_out.append(decoding(f"decode 20 log-normal 3000 {model}", log_normal(20, 3000, 11), model=model))
        held_out.append(drafts(12, 5, 1500, model))
        held_out.append(prompts(f"prefill 6 log-normal 900 {model}", log_normal(6, 900, 12), model=model))
        held_out.append(chunk(200, 6000, model))
        held_out.append(share(12, 50, unequal=True, seed=13, model=model))
    return [*map(Job, found), *(Job(case, held_out=True) for case in held_out)]


def drafts(num_seqs: int, num_queries: int, num_keys: int, model: str) -> Case:
    """Return sequences of some drafted tokens each."""
    name = f"drafts {num_seqs}x{num_queries} on {num_keys} {model}"
    return Case(name, "drafts", ((num_queries, num_keys),) * num_seqs, model)


def chunk(num_queries: int, num_keys: int, model: str) -> Case:
    """Return one sequence with a chunk of its prompt."""
    return Case(f"chunk {num_queries} on {num_keys} {model}", "chunk", ((num_queries, num_keys),), model)
