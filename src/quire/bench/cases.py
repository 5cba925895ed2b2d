"""The workloads, by name: which sequences a batch holds, of which model, in which dtype and page size.

A case says host numbers only. `SETS` orders them by the question they answer; a trace of real lengths becomes cases by `replay`.
"""

import csv
import random
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

import quire


@dataclass(frozen=True)
class Model:
    """The attention of one kind of layer of a model: heads, and further fields of the spec."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    options: dict = field(default_factory=dict, hash=False)


MODELS = {
    "Llama-3-8B": Model(32, 8, 128),
    "Llama-3-70B": Model(64, 8, 128),
    "Llama-3.2-1B": Model(32, 8, 64),
    "Qwen2.5-1.5B": Model(12, 2, 128),
    "Qwen2.5-7B": Model(28, 4, 128),
    "Qwen3-30B-A3B": Model(32, 4, 128),
    "Gemma-3-12B": Model(16, 8, 256),
    "Gemma-3-12B, local": Model(16, 8, 256, {"sliding_window": 1024}),
    "gpt-oss-120b": Model(64, 8, 64, {"sinks": True}),
    "gpt-oss-120b, local": Model(64, 8, 64, {"sinks": True, "sliding_window": 128}),
    "Mistral window": Model(32, 8, 128, {"sliding_window": 1024}),
    "MQA": Model(16, 1, 128),
}
KINDS = ("decode", "drafts", "prefill", "chunk", "mixed")


@dataclass(frozen=True)
class Case:
    """A named batch.

    Attributes:
        name: unique among the cases.
        kind: one of KINDS.
        lens: (query length, sequence length) of each sequence, new tokens included.
        model: a key of MODELS.
        page_size: tokens per page.
        dtype: of queries, as torch names it.
        kv_dtype: of the cache; `dtype` when not given.
    """

    name: str
    kind: str
    lens: tuple[tuple[int, int], ...]
    model: str = "Llama-3-8B"
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None

    @cached_property
    def spec(self) -> quire.AttentionSpec:
        """What is computed."""
        m = MODELS[self.model]
        dtypes = {"dtype": getattr(torch, self.dtype), "kv_dtype": getattr(torch, self.kv_dtype or self.dtype)}
        return quire.AttentionSpec(
            num_q_heads=m.num_q_heads, num_kv_heads=m.num_kv_heads, head_dim=m.head_dim, **dtypes, **m.options
        )

    @cached_property
    def bounds(self) -> dict[str, int]:
        """What `quire.plan` wants to know."""
        return {
            "max_query_len": max(q for q, _ in self.lens),
            "max_seq_len": max(s for _, s in self.lens),
            "num_tokens": self.num_tokens,
        }

    @property
    def num_tokens(self) -> int:
        """Query tokens in all."""
        return sum(q for q, _ in self.lens)

    @property
    def decode_share(self) -> float:
        """The part of the sequences that have one query."""
        return sum(q == 1 for q, _ in self.lens) / len(self.lens)

    @property
    def uniform(self) -> bool:
        """Whether all sequences are alike."""
        return len(set(self.lens)) == 1

    @cached_property
    def nbytes(self) -> int:
        """Bytes that must be moved: every visible key and value once, queries, outputs."""
        spec = self.spec
        keys = sum(min(s, spec.window[0] + q) for q, s in self.lens)
        cache = keys * spec.num_kv_heads * (spec.head_dim + spec.head_dim_v) * spec.kv_dtype.itemsize
        return cache + self.num_tokens * spec.num_q_heads * (spec.head_dim + spec.head_dim_v) * spec.dtype.itemsize

    @cached_property
    def flops(self) -> int:
        """Operations of the two matrix products over visible keys; a multiply-add is two."""
        spec = self.spec
        pairs = sum(visible_pairs(q, s, spec.window[0] + 1) for q, s in self.lens)
        return 2 * pairs * spec.num_q_heads * (spec.head_dim + spec.head_dim_v)

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.nbytes


def visible_pairs(q_len: int, seq_len: int, window: int) -> int:
    """Return how many (query, key) pairs a causal sequence has, its queries being the last, none seeing more than `window` keys."""
    before = seq_len - q_len
    short = max(0, min(q_len, window - before))  # queries that see everything up to themselves
    return short * (2 * before + short + 1) // 2 + (q_len - short) * window


def decode(num_seqs: int, length: int, note: str = "", **options) -> Case:
    """Sequences of one length, one query each."""
    return Case(f"decode {num_seqs}x{length}{note}", "decode", ((1, length),) * num_seqs, **options)


def decoding(name: str, lengths: list[int], **options) -> Case:
    """Sequences of given lengths, one query each."""
    return Case(name, "decode", tuple((1, n) for n in lengths), **options)


def prompts(name: str, lengths: list[int], **options) -> Case:
    """Whole prompts."""
    return Case(name, "prefill", tuple((n, n) for n in lengths), **options)


def at_random(num_seqs: int, low: int, high: int, seed: int) -> list[int]:
    """Draw lengths evenly."""
    return torch.randint(low, high + 1, (num_seqs,), generator=torch.Generator().manual_seed(seed)).tolist()


def log_normal(num_seqs: int, median: int, seed: int) -> list[int]:
    """Draw lengths as served ones lie: log-normal, between a sixteenth and 16 times the median."""
    rng = random.Random(seed)
    return [int(min(max(median * rng.lognormvariate(0, 0.8), median / 16, 1), median * 16)) for _ in range(num_seqs)]


def mixed(num_decoding: int, num_prompts: int, seed: int) -> Case:
    """Sequences that decode, with prompts between them."""
    lens = [(1, n) for n in at_random(num_decoding, 512, 4096, seed)] + [
        (n, n) for n in at_random(num_prompts, 64, 1024, seed)
    ]
    return Case(f"mixed {num_decoding} decoding + {num_prompts} prompts", "mixed", tuple(lens))


def share(num_seqs: int, percent: int, unequal: bool, seed: int = 3, model: str = "Llama-3-8B") -> Case:
    """A batch of which so many per cent decode on 2,048 keys, the rest being prompts of 512, or log-normal with these medians."""
    num_decoding = num_seqs * percent // 100
    contexts = log_normal(num_decoding, 2048, seed) if unequal else [2048] * num_decoding
    lengths = log_normal(num_seqs - num_decoding, 512, seed + 1) if unequal else [512] * (num_seqs - num_decoding)
    lens = [(1, n) for n in contexts] + [(n, n) for n in lengths]
    kind = {0: "prefill", 100: "decode"}.get(percent, "mixed")
    return Case(
        f"{num_seqs} sequences, {percent} % decode{', log-normal' if unequal else ''}{of(model)}",
        kind,
        tuple(lens),
        model,
    )


def of(model: str) -> str:
    return "" if model == "Llama-3-8B" else f" {model}"


FP8 = {"kv_dtype": "float8_e4m3fn"}
DECODE = (
    decode(1, 128), decode(1, 1024), decode(1, 4096), decode(1, 16384), decode(1, 131072),
    decode(1, 4096, " 12/2/128", model="Qwen2.5-1.5B"), decode(1, 4096, " 28/4/128", model="Qwen2.5-7B"),
    decode(8, 128), decode(8, 1024), decode(8, 4096), decode(32, 512), decode(32, 2048), decode(128, 512), decode(128, 4096), decode(256, 1024),
    decode(32, 2048, " 16/1/128", model="MQA"), decode(32, 2048, " 32/8/64", model="Llama-3.2-1B"), decode(16, 2048, " 16/8/256", model="Gemma-3-12B"),
    decode(8, 8192, " window 1024", model="Mistral window"),
    decoding("decode 16 of 64 to 8192", at_random(16, 64, 8192, 0)), decoding("decode 64 of 16 to 4096", at_random(64, 16, 4096, 1)),
    decoding("decode 128 of 16 to 1024", at_random(128, 16, 1024, 2)), decoding("decode 1x131072 with 31x4096", [131072] + [4096] * 31),
    Case("drafts 16x4 on 2048", "drafts", ((4, 2048),) * 16), Case("drafts 32x8 on 4096", "drafts", ((8, 4096),) * 32),
    decode(32, 2048, " fp8", **FP8), decode(128, 4096, " fp8", **FP8), decode(1, 131072, " fp8", **FP8),
    Case("drafts 32x8 on 4096 fp8", "drafts", ((8, 4096),) * 32, **FP8),
)  # fmt: skip
PREFILL = (
    *(prompts(f"prefill {n}", [n]) for n in (128, 512, 2048, 8192, 16384)),
    prompts("prefill 8x512", [512] * 8), prompts("prefill 8x2048", [2048] * 8), prompts("prefill 8 of 33 to 3000", at_random(8, 33, 3000, 14)),
    Case("chunk 64 on 16384", "chunk", ((64, 16384),)), Case("chunk 512 on 16384", "chunk", ((512, 16384),)),
    Case("chunk 2048 on 30720", "chunk", ((2048, 30720),)),
    prompts("prefill 8192 28/4/128", [8192], model="Qwen2.5-7B"), prompts("prefill 4096 32/8/64", [4096], model="Llama-3.2-1B"),
    prompts("prefill 4096 16/8/256", [4096], model="Gemma-3-12B"),
    mixed(32, 2, 15), mixed(64, 4, 15), mixed(8, 8, 15), prompts("prefill 8192 fp8", [8192], **FP8),
)  # fmt: skip
SETS = {
    "decode": DECODE,
    "prefill": PREFILL,
    "share": tuple(
        share(n, percent, unequal) for n in (8, 32) for percent in (0, 50, 100) for unequal in (False, True)
    ),
    "length": (
        *(decode(n, length) for n in (1, 32) for length in (256, 512, 1024, 2048, 8192, 32768)),
        *(prompts(f"prefill {n}", [n]) for n in (256, 1024, 4096)),
    ),
    "batch": tuple(decode(n, 2048) for n in (1, 2, 4, 8, 16, 64, 128, 256)),
    "models": (
        *(decode(32, 2048, of(name), model=name) for name in MODELS if name != "Llama-3-8B"),
        *(prompts(f"prefill 4096{of(name)}", [4096], model=name) for name in MODELS if name != "Llama-3-8B"),
    ),
    "formats": (
        *(decode(32, 2048, f" pages of {n}", page_size=n) for n in (1, 32, 128, 528)),
        *(prompts(f"prefill 2048 pages of {n}", [2048], page_size=n) for n in (1, 128, 528)),
        *(decode(32, 2048, f" {name}", dtype=name) for name in ("float16", "float32")),
        *(decode(32, 2048, f" {name}", kv_dtype=name) for name in ("float8_e5m2", "int8")),
    ),
}
QUICK = (
    "decode 1x4096", "decode 32x2048", "decode 128x4096", "decode 64 of 16 to 4096", "drafts 32x8 on 4096", "decode 32x2048 fp8", "prefill 512", "prefill 2048",
    "prefill 8x512", "chunk 512 on 16384", "mixed 32 decoding + 2 prompts", "decode 16x2048 16/8/256",
)  # fmt: skip


def sets_of(case: Case) -> list[str]:
    """Return the sets that a batch belongs to, under whatever name."""
    return [
        name
        for name in SETS
        if any((c.lens, c.spec, c.page_size) == (case.lens, case.spec, case.page_size) for c in SETS[name])
    ]


def cases(sets: list[str] | None = None, only: str = "") -> list[Case]:
    """Return the cases of some sets (all, when none is named; "quick" for a few of each kind) whose name contains `only`, each batch once."""
    named = {case.name: case for name in SETS for case in SETS[name]}
    chosen = (
        [named[name] for name in QUICK] if sets == ["quick"] else [case for name in sets or SETS for case in SETS[name]]
    )
    seen: dict[tuple, Case] = {}
    for case in chosen:
        if only in case.name:
            seen.setdefault((case.lens, case.spec, case.page_size), case)
    return list(seen.values())


def replay(path: Path, seed: int = 0, model: str = "Llama-3-8B") -> list[Case]:
    """Make cases from a trace: a CSV file whose rows begin with prompt tokens and output tokens; a header is skipped.

    For batches of 8, 32 and 128: sequences at a random point of their output, with no prompt between them, and with one for every 16.

    Raises:
        ValueError: a row does not hold two counts.
    """
    pairs = []
    for i, row in enumerate(csv.reader(path.read_text().splitlines())):
        try:
            prompt, output = int(row[0]), int(row[1])
        except (ValueError, IndexError):
            if i == 0 or not row:
                continue
            raise ValueError(
                f"{path} must hold `prompt tokens,output tokens` in every row, got {row} in row {i + 1}; mend the row"
            ) from None
        if prompt > 0:
            pairs.append((prompt, max(0, output)))
    if not pairs:
        raise ValueError(f"{path} must hold `prompt tokens,output tokens` rows, got none; give another trace")
    rng, found = random.Random(seed), []
    for num_seqs in (8, 32, 128):
        drawn = [rng.choice(pairs) for _ in range(num_seqs)]
        contexts = tuple((1, prompt + 1 + rng.randrange(output + 1)) for prompt, output in drawn)
        arriving = max(1, num_seqs // 16)
        found.append(Case(f"{path.stem}: {num_seqs} decoding{of(model)}", "decode", contexts, model))
        lens = contexts[arriving:] + tuple((prompt, prompt) for prompt, _ in drawn[:arriving])
        found.append(
            Case(f"{path.stem}: {num_seqs - arriving} decoding + {arriving} prompts{of(model)}", "mixed", lens, model)
        )
    return found
