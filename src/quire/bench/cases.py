"""The workloads, by name: which sequences a batch holds, of which model, in which dtype and page size.

A case holds host numbers only.
`SETS` groups the cases by the question that they answer; `cases_from_trace` makes cases of recorded lengths.
"""

import csv
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, TypedDict, Unpack, get_args

import torch

import quire

Kind = Literal["decode", "drafts", "prefill", "chunk", "mixed", "MLA decode", "MLA prefill"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Layout = Literal["pages", "latents", "packed"]
DEFAULT_MODEL = "Llama-3-8B"


@dataclass(frozen=True)
class Model:
    """The attention of one kind of layer of a model; the fields are those of `quire.AttentionSpec`."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None = None
    sinks: bool = False
    head_dim_v: int | None = None
    softmax_scale: float | None = None
    latent: bool = False
    softcap: float | None = None

    def __str__(self) -> str:
        if self.latent:
            return f"{self.num_q_heads} query heads over a latent of {self.head_dim}, values of {self.head_dim_v}"
        values = "" if self.head_dim_v is None else f", values of {self.head_dim_v}"
        return f"{self.num_q_heads} query heads over {self.num_kv_heads} of {self.head_dim}{values}"


def latents(num_q_heads: int) -> Model:
    """Return DeepSeek-V3's attention over latents, with the heads of one tensor-parallel rank."""
    return Model(num_q_heads, 1, 576, head_dim_v=512, softmax_scale=192**-0.5, latent=True)


def expanded(num_heads: int) -> Model:
    """Return DeepSeek-V3's attention over expanded keys and values, with the heads of one tensor-parallel rank."""
    return Model(num_heads, num_heads, 192, head_dim_v=128)


MODELS = {
    "Llama-3-8B": Model(32, 8, 128),
    "Llama-3-70B": Model(64, 8, 128),
    "Llama-3.2-1B": Model(32, 8, 64),
    "Qwen2.5-1.5B": Model(12, 2, 128),
    "Qwen2.5-7B": Model(28, 4, 128),
    "Qwen3-30B-A3B": Model(32, 4, 128),
    "Gemma-3-12B": Model(16, 8, 256),
    "Gemma-3-12B, local": Model(16, 8, 256, sliding_window=1024),
    "Gemma-4-31B": Model(32, 4, 512),
    "Gemma-4-31B, local": Model(32, 16, 256, sliding_window=1024),
    "Qwen3.5, 24/4": Model(24, 4, 256),
    "Qwen3.5, 64/4": Model(64, 4, 256),
    "Qwen3.5, 24/2": Model(24, 2, 256),
    "gpt-oss-120b": Model(64, 8, 64, sinks=True),
    "gpt-oss-120b, local": Model(64, 8, 64, sliding_window=128, sinks=True),
    "Mistral window": Model(32, 8, 128, sliding_window=1024),
    "MQA": Model(16, 1, 128),
}
KV_MODELS = tuple(MODELS)  # whose keys and values are of one width
MODELS |= {f"MLA, {heads} heads": latents(heads) for heads in (16, 32, 64, 128)}
MODELS |= {f"MLA, {heads} heads, expanded": expanded(heads) for heads in (16, 128)}


class CaseOptions(TypedDict, total=False):
    """The fields of a case that have a default."""

    model: str
    page_size: int
    dtype: str
    kv_dtype: str | None
    packed: bool


class CaseBounds(TypedDict):
    """The bounds that `quire.plan` takes."""

    max_query_len: int
    max_seq_len: int
    num_tokens: int


@dataclass(frozen=True)
class Case:
    """A named batch.

    Attributes:
        name: unique among the cases.
        kind: one of KINDS.
        lens: (query length, sequence length) of each sequence, new tokens included.
        model: a key of MODELS; where there is a `layer`, its heads in words.
        page_size: tokens per page.
        dtype: name of the torch dtype of the queries.
        kv_dtype: name of the torch dtype of the cache; `dtype` when not given.
        packed: keys and values are not paged but packed, sequence after sequence. The page size is then 1.
        layer: the attention of a layer that none of MODELS has.
    """

    name: str
    kind: Kind
    lens: tuple[tuple[int, int], ...]
    model: str = DEFAULT_MODEL
    page_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str | None = None
    packed: bool = False
    layer: Model | None = None

    @property
    def attention(self) -> Model:
        """The attention of the layer."""
        return MODELS[self.model] if self.layer is None else self.layer

    @cached_property
    def spec(self) -> quire.AttentionSpec:
        """The spec of the layer, in these dtypes."""
        model = self.attention
        return quire.AttentionSpec(
            num_q_heads=model.num_q_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=getattr(torch, self.dtype),
            kv_dtype=getattr(torch, self.kv_dtype or self.dtype),
            sliding_window=model.sliding_window,
            sinks=model.sinks,
            head_dim_v=model.head_dim_v,
            softmax_scale=model.softmax_scale,
            latent=model.latent,
            softcap=model.softcap,
        )

    @property
    def layout(self) -> Layout:
        """How keys and values are stored: in pages, as latents in pages, or packed."""
        if self.packed:
            return "packed"
        return "latents" if self.spec.latent else "pages"

    @cached_property
    def bounds(self) -> CaseBounds:
        """Arguments for `quire.plan`."""
        return {
            "max_query_len": max(q for q, _ in self.lens),
            "max_seq_len": max(s for _, s in self.lens),
            "num_tokens": self.num_tokens,
        }

    @property
    def query_lens(self) -> list[int]:
        """Queries of each sequence."""
        return [q for q, _ in self.lens]

    @property
    def seq_lens(self) -> list[int]:
        """Keys of each sequence."""
        return [s for _, s in self.lens]

    @property
    def pages_per_seq(self) -> list[int]:
        """Pages of each sequence."""
        return [-(-s // self.page_size) for s in self.seq_lens]

    @property
    def num_tokens(self) -> int:
        """Query tokens of the batch."""
        return sum(self.query_lens)

    @property
    def decode_share(self) -> float:
        """The share of the sequences that have one query."""
        return sum(q == 1 for q in self.query_lens) / len(self.lens)

    @property
    def uniform(self) -> bool:
        """Whether all sequences have the same lengths."""
        return len(set(self.lens)) == 1

    @property
    def bytes_per_key(self) -> int:
        """Bytes of a token's keys and values in one layer. A latent is both."""
        spec = self.spec
        width = spec.head_dim if spec.latent else spec.head_dim + spec.head_dim_v
        return spec.num_kv_heads * width * spec.kv_dtype.itemsize

    @cached_property
    def nbytes(self) -> int:
        """Bytes that must be moved: every visible key and value once, queries, outputs."""
        spec = self.spec
        cache = sum(min(s, spec.window[0] + q) for q, s in self.lens) * self.bytes_per_key
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
    """Count the (query, key) pairs of a causal sequence whose queries are its last and see at most `window` keys."""
    before = seq_len - q_len
    short = max(0, min(q_len, window - before))  # queries that see every key up to their own
    return short * (2 * before + short + 1) // 2 + (q_len - short) * window


def decode(num_seqs: int, length: int, suffix: str = "", **options: Unpack[CaseOptions]) -> Case:
    """Make a case of sequences of one length, one query each."""
    return Case(f"decode {num_seqs}x{length}{suffix}", "decode", ((1, length),) * num_seqs, **options)


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
    """Return what a case's name ends with: the model, unless it is the default."""
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
        *(decode(32, 2048, suffix_of(name), model=name) for name in KV_MODELS if name != DEFAULT_MODEL),
        *(prompts(f"prefill 4096{suffix_of(name)}", [4096], model=name) for name in KV_MODELS if name != DEFAULT_MODEL),
    ),
    "formats": (
        *(decode(32, 2048, f" pages of {n}", page_size=n) for n in (1, 32, 128, 528)),
        *(prompts(f"prefill 2048 pages of {n}", [2048], page_size=n) for n in (1, 128, 528)),
        *(decode(32, 2048, f" {name}", dtype=name) for name in ("float16", "float32")),
        *(decode(32, 2048, f" {name}", kv_dtype=name) for name in ("float8_e5m2", "int8")),
    ),
    "mla": MLA,
    "mla_prefill": MLA_PREFILL,
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
    return case.lens, case.spec, case.page_size, case.packed


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
        rows = list(csv.reader(path.read_text(encoding="utf-8").splitlines()))
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
