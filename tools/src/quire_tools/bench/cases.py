"""The workloads, by name: which sequences a batch holds, of which model, in which dtype and page size.

`SETS` groups the cases by the question that they answer; `cases_from_trace` makes cases of recorded lengths.
"""

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Unpack

import torch

from quire_tools.bench.case import DEFAULT_MODEL, KV_FORMATS, KV_MODELS, RECORDS, Case, CaseOptions, Kind, Pool
from quire_tools.bench.scores import SCORES


def decode(num_seqs: int, length: int, suffix: str = "", **options: Unpack[CaseOptions]) -> Case:
    """Make a case of sequences of one length, one query each."""
    return Case(f"decode {num_seqs}x{length}{suffix}", "decode", ((1, length),) * num_seqs, **options)


def samples(num_seqs: int, shared_prefix: int, own: int) -> Case:
    """Make a case of samples of one prompt, whose pages they share; each has `own` further keys."""
    name = f"decode {num_seqs} samples of {shared_prefix} with {own} own keys"
    return Case(name, "decode", ((1, shared_prefix + own),) * num_seqs, shared_prefix=shared_prefix)


def decoding(name: str, lengths: Iterable[int], **options: Unpack[CaseOptions]) -> Case:
    """Make a case of sequences of these lengths, one query each."""
    return Case(name, "decode", tuple((1, n) for n in lengths), **options)


def prompts(name: str, lengths: Iterable[int], **options: Unpack[CaseOptions]) -> Case:
    """Make a case of whole prompts of these lengths."""
    return Case(name, "prefill", tuple((n, n) for n in lengths), **options)


def several(
    kind: Kind, num_seqs: int, q_len: int, seq_len: int, suffix: str = "", **options: Unpack[CaseOptions]
) -> Case:
    """Make a case of sequences that have `q_len` queries after a context: draft tokens, or a chunk of a prompt."""
    count = f"{num_seqs}x" if num_seqs > 1 else ""
    return Case(f"{kind} {count}{q_len} on {seq_len}{suffix}", kind, ((q_len, seq_len),) * num_seqs, **options)


def at_random(num_seqs: int, low: int, high: int, seed: int) -> list[int]:
    """Draw lengths from a uniform distribution, both ends included."""
    return torch.randint(low, high + 1, (num_seqs,), generator=torch.Generator().manual_seed(seed)).tolist()


def log_normal(num_seqs: int, median: int, seed: int) -> list[int]:
    """Draw lengths from a log-normal distribution, as in serving, between a sixteenth and 16 times the median."""
    rng = random.Random(seed)
    return [int(min(max(median * rng.lognormvariate(0, 0.8), median / 16, 1), median * 16)) for _ in range(num_seqs)]


def mixed(num_decoding: int, num_prompts: int, seed: int) -> Case:
    """Make a case of sequences that decode and of whole prompts."""
    lens = [(1, n) for n in at_random(num_decoding, 512, 4096, seed)]
    lens += [(n, n) for n in at_random(num_prompts, 64, 1024, seed)]
    return Case(f"mixed {num_decoding} decoding + {num_prompts} prompts", "mixed", tuple(lens))


def step(num_decoding: int, keys: int, *chunks: tuple[int, int], model: str = DEFAULT_MODEL) -> Case:
    """Make a case of a server's step: sequences that decode on `keys`, and chunks of (queries, keys)."""
    words = [f"{q}" if q == n else f"{q} on {n}" for q, n in chunks]
    name = " + ".join([f"mixed {num_decoding}x1 on {keys}", *words])
    return Case(name + suffix_of(model), "mixed", ((1, keys),) * num_decoding + chunks, model)


def share(num_seqs: int, percent: int, unequal: bool, seed: int = 3, model: str = DEFAULT_MODEL) -> Case:
    """Make a case in which `percent` of the sequences decode on 2,048 keys and the others are prompts of 512.

    If `unequal`, these two lengths are the medians of log-normal distributions.
    """
    num_decoding = num_seqs * percent // 100
    num_prompts = num_seqs - num_decoding
    contexts = log_normal(num_decoding, 2048, seed) if unequal else [2048] * num_decoding
    lengths = log_normal(num_prompts, 512, seed + 1) if unequal else [512] * num_prompts
    lens = [(1, n) for n in contexts] + [(n, n) for n in lengths]
    kinds: dict[int, Kind] = {0: "prefill", 100: "decode"}
    name = f"{num_seqs} sequences, {percent} % decode{', log-normal' if unequal else ''}{suffix_of(model)}"
    return Case(name, kinds.get(percent, "mixed"), tuple(lens), model)


def suffix_of(model: str) -> str:
    """Return the end of a case's name: the model, unless it is the default."""
    return "" if model == DEFAULT_MODEL else f" {model}"


def over_latents(
    num_heads: int, lengths: Iterable[int], name: str, q_len: int = 1, kv_dtype: str | None = None
) -> Case:
    """Make a case of sequences whose latents are attended to, in pages of 64."""
    queries = f", {q_len} queries" if q_len > 1 else ""
    name = f"MLA {name} h{num_heads}{queries}{' fp8' if kv_dtype else ''}"
    lens = tuple((q_len, n) for n in lengths)
    return Case(name, "MLA decode", lens, f"MLA, {num_heads} heads", page_size=64, kv_dtype=kv_dtype)


def latent_cases(num_heads: int, sizes: Iterable[tuple[int, int]], kv_dtype: str | None = None) -> Iterator[Case]:
    """Make cases of (sequences, length of each), and one of 64 sequences of random lengths."""
    for num_seqs, length in sizes:
        yield over_latents(num_heads, [length] * num_seqs, f"{num_seqs}x{length}", kv_dtype=kv_dtype)
    yield over_latents(num_heads, at_random(64, 16, 8192, 0), "64 of 16 to 8192", kv_dtype=kv_dtype)


def over_expanded(num_heads: int, lens: Sequence[tuple[int, int]], name: str) -> Case:
    """Make a case of (query length, sequence length) pairs over keys that were expanded from latents."""
    model = f"MLA, {num_heads} heads, expanded"
    return Case(f"MLA {name} h{num_heads}", "MLA prefill", tuple(lens), model, page_size=1, packed=True)


def over_lists(num_heads: int, num_seqs: int, *, kv_dtype: str | None = None) -> Case:
    """Make a case of sequences that decode, each over a list of latents."""
    name = f"chosen {num_seqs}x{LIST} h{num_heads}{' records' if kv_dtype else ''}"
    lens, model = ((1, LIST),) * num_seqs, f"MLA, {num_heads} heads"
    return Case(name, "chosen decode", lens, model, page_size=64, kv_dtype=kv_dtype, pool=Pool(POOL))


def prompt_over_lists(num_heads: int, shared: float = 0.0) -> Case:
    """Make a case of a prompt of 8,192 tokens, each over a list of latents."""
    name = f"chosen prefill 8192x{LIST} h{num_heads}{f', {100 * shared:.0f} % shared' if shared else ''}"
    model = f"MLA, {num_heads} heads"
    return Case(name, "chosen prefill", ((8192, LIST),), model, page_size=64, pool=Pool(POOL, shared))


def with_scores(case: Case) -> Iterator[Case]:
    """Make a case as it is, and with each change of scores."""
    yield case
    for name in SCORES:
        yield replace(case, name=f"{case.name} {name}", scores=name)


LIST, POOL = 2048, 8 * 32768  # keys that a token chooses, and slots of 8 sequences among which it does
FP8: CaseOptions = {"kv_dtype": "float8_e4m3fn"}
DECODE = (
    *(decode(1, n) for n in (128, 1024, 4096, 16384, 131072)),
    decode(1, 4096, " 12/2/128", model="Qwen2.5-1.5B"),
    decode(1, 4096, " 28/4/128", model="Qwen2.5-7B"),
    *(decode(8, n) for n in (128, 1024, 4096)),
    *(decode(32, n) for n in (512, 2048)),
    *(decode(128, n) for n in (512, 4096)),
    decode(256, 1024),
    decode(32, 2048, " 16/1/128", model="MQA"),
    decode(32, 2048, " 32/8/64", model="Llama-3.2-1B"),
    decode(16, 2048, " 16/8/256", model="Gemma-3-12B"),
    decode(8, 8192, " window 1024", model="Mistral window"),
    decoding("decode 16 of 64 to 8192", at_random(16, 64, 8192, 0)),
    decoding("decode 64 of 16 to 4096", at_random(64, 16, 4096, 1)),
    decoding("decode 128 of 16 to 1024", at_random(128, 16, 1024, 2)),
    decoding("decode 1x131072 with 31x4096", [131072] + [4096] * 31),
    several("drafts", 16, 4, 2048),
    several("drafts", 32, 8, 4096),
    decode(32, 2048, " fp8", **FP8),
    decode(128, 4096, " fp8", **FP8),
    decode(1, 131072, " fp8", **FP8),
    several("drafts", 32, 8, 4096, " fp8", **FP8),
)
PREFILL = (
    *(prompts(f"prefill {n}", [n]) for n in (128, 512, 2048, 8192, 16384)),
    prompts("prefill 8x512", [512] * 8),
    prompts("prefill 8x2048", [2048] * 8),
    prompts("prefill 8 of 33 to 3000", at_random(8, 33, 3000, 14)),
    several("chunk", 1, 64, 16384),
    several("chunk", 1, 512, 16384),
    several("chunk", 1, 2048, 30720),
    prompts("prefill 8192 28/4/128", [8192], model="Qwen2.5-7B"),
    prompts("prefill 4096 32/8/64", [4096], model="Llama-3.2-1B"),
    prompts("prefill 4096 16/8/256", [4096], model="Gemma-3-12B"),
    mixed(32, 2, 15),
    mixed(64, 4, 15),
    mixed(8, 8, 15),
    prompts("prefill 8192 fp8", [8192], **FP8),
)
FEW_ROWS = (1, 1024), (1, 8192), (1, 131072), (8, 4096), (32, 2048), (32, 8192), (128, 4096)
MANY_ROWS = *FEW_ROWS[:6], (128, 1024), (128, 4096)
MLA = (
    *latent_cases(16, FEW_ROWS),
    over_latents(32, [4096] * 32, "32x4096"),
    over_latents(64, [4096] * 32, "32x4096"),
    *latent_cases(128, MANY_ROWS),
    over_latents(128, [4096] * 32, "32x4096", q_len=2),
    over_latents(16, [4096] * 32, "32x4096", q_len=4),
    *latent_cases(16, FEW_ROWS, "float8_e4m3fn"),
    *latent_cases(128, MANY_ROWS, "float8_e4m3fn"),
)
MLA_PREFILL = (
    over_expanded(16, [(2048, 2048)], "prefill 2048"),
    over_expanded(16, [(8192, 8192)], "prefill 8192"),
    over_expanded(128, [(4096, 4096)], "prefill 4096"),
    over_expanded(128, [(1024, 1024)] * 8, "prefill 8x1024"),
    over_expanded(16, [(2048, 16384)], "chunk 2048 on 16384"),
)
CHOSEN = *((16, n) for n in (1, 8, 32, 128)), *((128, n) for n in (8, 32, 128))  # heads and sequences
SETS = {
    "decode": DECODE,
    "prefill": PREFILL,
    "share": tuple(
        share(n, percent, unequal) for n in (8, 32) for percent in (0, 50, 100) for unequal in (False, True)
    ),
    "mixed": (
        step(32, 2048, (512, 4096)),
        step(32, 4096, (3000, 3000)),
        step(32, 4096, (2000, 2000), (1500, 1500)),
        step(120, 1000, (300, 300)),
        step(200, 1500, (256, 256), (700, 700)),
        step(4, 2048, (33, 33), (500, 500), (1200, 1200), (3000, 3000)),
        step(8, 8192, (512, 512)),
        step(16, 8192, (2048, 2048)),
        step(64, 4096, (2048, 8192)),
        step(30, 2048, (512, 6000), (400, 4000)),
        step(32, 2048, (512, 512), (512, 512), model="Llama-3.2-1B"),
        step(32, 4096, (1024, 1024), (1024, 1024), model="Gemma-3-12B"),
        step(32, 4096, (512, 512), (512, 512), model="Mistral window"),
    ),
    "length": (
        *(decode(n, length) for n in (1, 32) for length in (256, 512, 1024, 2048, 8192, 32768)),
        *(prompts(f"prefill {n}", [n]) for n in (256, 1024, 4096)),
    ),
    "batch": tuple(decode(n, 2048) for n in (1, 2, 4, 8, 16, 64, 128, 256)),
    "models": (
        *(decode(32, 2048, suffix_of(name), model=name) for name in KV_MODELS if name != DEFAULT_MODEL),
        *(prompts(f"prefill 4096{suffix_of(name)}", [4096], model=name) for name in KV_MODELS if name != DEFAULT_MODEL),
    ),
    "formats": (
        *(decode(32, 2048, f" pages of {n}", page_size=n) for n in (1, 32, 128, 528)),
        *(prompts(f"prefill 2048 pages of {n}", [2048], page_size=n) for n in (1, 128, 528)),
        *(decode(32, 2048, f" {name}", dtype=name) for name in ("float16", "float32")),
        *(decode(32, 2048, f" {name}", kv_dtype=name) for name in ("float8_e5m2", "int8")),
    ),
    "bits": tuple(
        case
        for name in ("float8_e4m3fn", *KV_FORMATS)
        for case in (
            *(decode(n, length, f" {name}", kv_dtype=name) for n, length in ((128, 4096), (32, 4096), (1, 131072))),
            prompts(f"prefill 8192 {name}", [8192], kv_dtype=name),
        )
    ),
    "shared": (samples(64, 8192, 256), samples(8, 2048, 256), samples(16, 32768, 512)),
    "scores": tuple(
        case
        for plain in (
            decode(1, 4096),
            decode(32, 2048),
            prompts("prefill 2048", [2048]),
            prompts("prefill 8192", [8192]),
            step(32, 2048, (512, 4096)),
            decode(32, 2048, " 32/8/64", model="Llama-3.2-1B"),
            prompts("prefill 4096 32/8/64", [4096], model="Llama-3.2-1B"),
            step(32, 2048, (512, 512), (512, 512), model="Llama-3.2-1B"),
        )
        for case in with_scores(plain)
    ),
    "mla": MLA,
    "mla_prefill": MLA_PREFILL,
    "chosen": (
        *(over_lists(*sizes, kv_dtype=kv_dtype) for kv_dtype in (None, RECORDS) for sizes in CHOSEN),
        *(prompt_over_lists(heads, shared) for heads, shared in ((16, 0.0), (16, 0.75), (64, 0.0), (128, 0.0))),
    ),
}
QUICK = (
    "decode 1x4096",
    "decode 32x2048",
    "decode 128x4096",
    "decode 64 of 16 to 4096",
    "drafts 32x8 on 4096",
    "decode 32x2048 fp8",
    "prefill 512",
    "prefill 2048",
    "prefill 8x512",
    "chunk 512 on 16384",
    "mixed 32 decoding + 2 prompts",
    "decode 16x2048 16/8/256",
)


def identity(case: Case) -> tuple[object, ...]:
    """Return what makes two cases the same batch, whatever their names."""
    return case.lens, case.spec, case.page_size, case.packed, case.shared_prefix, case.pool


def sets_of(case: Case) -> list[str]:
    """Return the sets that hold this batch, under whatever name."""
    return [name for name, some in SETS.items() if any(identity(c) == identity(case) for c in some)]


def cases(sets: list[str] | None = None, only: str = "") -> list[Case]:
    """Return the cases of these sets, each batch once.

    Args:
        sets: keys of SETS; all sets when not given. `["quick"]` stands for a few cases of each kind.
        only: leave out cases whose name does not contain this.
    """
    if sets == ["quick"]:
        by_name = {case.name: case for some in SETS.values() for case in some}
        chosen = [by_name[name] for name in QUICK]
    else:
        chosen = [case for name in sets or SETS for case in SETS[name]]
    found: dict[tuple[object, ...], Case] = {}
    for case in chosen:
        if only in case.name:
            found.setdefault(identity(case), case)
    return list(found.values())


def cases_from_trace(path: Path, seed: int = 0, model: str = DEFAULT_MODEL) -> list[Case]:
    """Make cases of a trace: a CSV file whose rows begin with prompt tokens and output tokens; a header is skipped.

    The batches have 8, 32 and 128 sequences, each at a random point of its output.
    There are two batches of each size: in one all sequences decode, in the other one sequence of 16 is a prompt.

    Args:
        path: of the file.
        seed: of the random choice.
        model: one of KV_MODELS.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not text, or a row does not hold two counts.
    """
    contract = f"{path} must hold `prompt tokens,output tokens` in every row"
    try:
        rows = list(csv.reader(path.read_text(encoding="utf-8-sig").splitlines()))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{contract}, got {type(error).__name__}: {error}; give a CSV file in UTF-8") from None
    pairs = []
    for i, row in enumerate(rows):
        try:
            prompt, output = int(row[0]), int(row[1])
        except (ValueError, IndexError):
            if i == 0 or not row:
                continue
            raise ValueError(f"{contract}, got {row} in row {i + 1}; correct the row") from None
        if prompt > 0:
            pairs.append((prompt, max(0, output)))
    if not pairs:
        raise ValueError(f"{contract}, got no such row; give another trace")
    rng, found = random.Random(seed), []
    for num_seqs in (8, 32, 128):
        drawn = [rng.choice(pairs) for _ in range(num_seqs)]
        contexts = tuple((1, prompt + 1 + rng.randrange(output + 1)) for prompt, output in drawn)
        num_prompts = max(1, num_seqs // 16)
        name = f"{path.stem}: {num_seqs} decoding{suffix_of(model)}"
        found.append(Case(name, "decode", contexts, model))
        lens = contexts[num_prompts:] + tuple((prompt, prompt) for prompt, _ in drawn[:num_prompts])
        name = f"{path.stem}: {num_seqs - num_prompts} decoding + {num_prompts} prompts{suffix_of(model)}"
        found.append(Case(name, "mixed", lens, model))
    return found
