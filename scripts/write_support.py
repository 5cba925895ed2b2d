"""Write docs/support.md: what each kernel, target and engine serves, asked of the code, and the words of each refusal.

    python scripts/write_support.py

Nothing is compiled or measured. Plans are made for the nine targets of `quire.targets`, and for CPU tensors. What an
engine's integration passes on is read from its source, so no engine has to be installed.
"""

import argparse
import ast
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

import quire
from quire.checks.attention import check_out_scale
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels.choose import FAMILIES, variants
from quire.kernels.launch import Launch
from quire.plan import decide
from quire.targets import TARGETS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/support.md"
INTEGRATIONS = ROOT / "src/quire/integrations"
LATENTS = [
    INTEGRATIONS / "vllm" / name for name in ("mla.py", "prefill.py", "sparse.py")
]  # vLLM's backends of MLA alone
CPU = torch.device("cpu")
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
PROMPT = {"num_seqs": 1, "max_query_len": 2048, "num_tokens": 2048}
KINDS = {  # of batches: which bounds they have
    "decode": {"num_seqs": 32, "max_query_len": 1, "num_tokens": 32},
    "draft tokens": {"num_seqs": 32, "max_query_len": 4, "num_tokens": 128},
    "prompt": PROMPT,
    "chunk of a prompt": {"num_seqs": 1, "max_query_len": 256, "num_tokens": 256},
    "prompts and decoding sequences": {"num_seqs": 33, "max_query_len": 1024, "num_tokens": 1056},
}
BOTH = ("decode", "prompt")


@dataclass(frozen=True)
class Feature:
    """A line of the matrix.

    Attributes:
        name: of the feature.
        spec: fields of the spec; `mla` for the arguments of `AttentionSpec.mla`.
        kinds: of batches, keys of KINDS.
        options: of `quire.plan`.
        per_token: fields of the batch that have an entry for each query token.
        cache: of `PagedKVCache.empty`, by its layout; "scales per token" for one with these; "" for any cache.
    """

    name: str
    spec: dict[str, Any] = field(default_factory=dict)
    kinds: tuple[str, ...] = BOTH
    options: dict[str, Any] = field(default_factory=dict)
    per_token: tuple[str, ...] = ()
    cache: str = ""

    @property
    def attention_spec(self) -> quire.AttentionSpec:
        """The spec, with the heads of Llama-3-8B or of DeepSeek-V3 unless the feature says otherwise."""
        if "kv_lora_rank" in self.spec:
            fields = {"num_q_heads": 128, "softmax_scale": 192**-0.5, **self.spec}
            return quire.AttentionSpec.mla(**fields)
        return quire.AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **self.spec})

    def launch_for_cache(self, launch: Launch) -> Launch:
        """Return the launch that serves the feature's cache: the one that was planned, or its fallback."""
        if not self.cache:
            return launch
        if self.cache != "scales per token":
            return launch.for_cache(quire.PagedKVCache.empty(self.attention_spec, 4, 64, layout=self.cache))
        pages = quire.PagedKVCache.empty(self.attention_spec, 4, 64)
        scales = torch.ones(pages.k.shape[:3])
        return launch.for_cache(quire.PagedKVCache(pages.k, pages.v, k_scale=scales, v_scale=scales))


INTERVALS, TREE, CHOSEN = ("key_begin", "key_end"), ("tree_bits",), ("chosen",)
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
FEATURES = (
    *(Feature(kind, kinds=(kind,)) for kind in KINDS),
    Feature("float16", {"dtype": torch.float16}),
    Feature("float32", {"dtype": torch.float32}),
    Feature("one KV head for all (MQA)", {"num_kv_heads": 1}),
    Feature("a KV head for each (MHA)", {"num_kv_heads": 32}),
    Feature("head_dim 64", {"head_dim": 64}),
    Feature("head_dim 256", {"head_dim": 256}),
    Feature("head_dim 512", {"head_dim": 512}),
    Feature("head_dim 72, a multiple of 8", {"head_dim": 72}),
    Feature("keys of 192, values of 128", {"head_dim": 192, "head_dim_v": 128, "num_kv_heads": 32}),
    Feature("e4m3 cache", {"kv_dtype": E4M3}),
    Feature("e5m2 cache", {"kv_dtype": E5M2}),
    Feature("int8 cache", {"kv_dtype": torch.int8}),
    Feature("e4m3 cache, scales per token", {"kv_dtype": E4M3}, cache="scales per token"),
    Feature('`kv_format="int4"`', {"kv_format": "int4"}),
    Feature('`kv_format="nvfp4"`', {"kv_format": "nvfp4"}),
    Feature('`kv_format="k8v4"`', {"kv_format": "k8v4"}),
    Feature("e4m3 cache, `allow_fp8`", {"kv_dtype": E4M3, "allow_fp8": True}),
    Feature("sliding window", {"sliding_window": 1024}),
    Feature("bidirectional", {"causal": False}),
    Feature("softcap", {"softcap": 30.0}),
    Feature("ALiBi", {"alibi": True}),
    Feature("attention sinks", {"sinks": True}),
    Feature("a score function", {"score": quire.score(lambda score, kv_pos: score - kv_pos)}),
    Feature("a mask function", {"mask": quire.mask(lambda q_pos, kv_pos: (q_pos - kv_pos) % 2 == 0)}),
    Feature("an interval of keys for each token", per_token=INTERVALS),
    Feature("draft trees", kinds=("draft tokens",), per_token=TREE),
    Feature("chosen keys", per_token=CHOSEN),
    Feature('chosen keys, `kv_format="int4"`', {"kv_format": "int4"}, per_token=CHOSEN),
    Feature("`batch_invariant=True`", options={"batch_invariant": True}),
    Feature("`num_splits=4`", options={"num_splits": 4}),
    Feature("latents of 512 + 64, bfloat16", LATENT),
    Feature("latents of 512 + 64, e4m3", {**LATENT, "kv_dtype": E4M3}),
    Feature("latents of 512 + 64, `fp8_ds_mla`", {**LATENT, "kv_dtype": E4M3}, cache="fp8_ds_mla"),
    Feature(
        "latents of 512, `fp8_ds_mla_584`, chosen keys",
        {"kv_lora_rank": 512, "qk_rope_head_dim": 0, "kv_dtype": E4M3, "sinks": True},
        cache="fp8_ds_mla_584",
        per_token=CHOSEN,
    ),
    Feature("latents of 256 + 32", {"kv_lora_rank": 256, "qk_rope_head_dim": 32}),
    Feature("latents, softcap", {**LATENT, "softcap": 30.0}),
    Feature("latents, a score function", {**LATENT, "score": quire.score(lambda score, kv_pos: score - kv_pos)}),
    Feature("latents, an interval of keys for each token", LATENT, per_token=INTERVALS),
    Feature("latents, chosen keys", LATENT, per_token=CHOSEN),
)


def requests(feature: Feature, target: str) -> Iterable[Request]:
    """Return the batches of a feature on a target."""
    for kind in feature.kinds:
        bounds = KINDS[kind]
        limits = Bounds(bounds["max_query_len"], 4096, bounds["num_tokens"])
        properties = TARGETS[target].properties
        seen = "key_begin" in feature.per_token, "tree_bits" in feature.per_token
        request = Request(feature.attention_spec, bounds["num_seqs"], kind != "decode", limits, properties, *seen)
        yield replace(request, chosen=(1, False, False, 64)) if feature.per_token == CHOSEN else request


@cache
def refusals(feature_name: str, kernel: str) -> dict[tuple[str, int], str | None]:
    """Return by target and batch in which words a kernel refuses a feature; None where it serves it."""
    feature = next(f for f in FEATURES if f.name == feature_name)
    found = {}
    for target in TARGETS:
        for i, request in enumerate(requests(feature, target)):
            launches, refused = variants(request, Options(**feature.options, kernel=kernel))
            if not launches:
                found[target, i] = refused[kernel]
            else:
                launch = next(iter(launches.values()))
                served = feature.launch_for_cache(launch) is launch
                found[target, i] = None if served else f"{feature.cache}, which its fallback serves"
    return found


def kernel_cell(feature: Feature, kernel: str) -> str:
    """Return where a kernel serves a feature, or its words where it does not."""
    found = refusals(feature.name, kernel)
    served = dict.fromkeys(target for (target, _), why in found.items() if why is None)
    reasons = list(dict.fromkeys(why for why in found.values() if why is not None))
    if not reasons:
        return "yes"
    if not served:  # a refusal that all targets share says more than one about the target
        shared = [
            why for why in reasons if all(why in (found[t, 0], found[t, len(feature.kinds) - 1]) for t in TARGETS)
        ]
        ours = [found[target, i] for target, i in found if target == "sm90"]
        words = dict.fromkeys(why for why in (shared or ours) if why is not None)
        return f"no: {'; '.join(words)}"
    where = "yes" if len(served) == len(TARGETS) else ", ".join(served)
    kinds = [k for i, k in enumerate(feature.kinds) if any(found[t, i] is None for t in served)]
    return where if len(kinds) == len(feature.kinds) else f"{where}: {', '.join(kinds)}"


def target_cell(feature: Feature, target: str) -> str:
    """Return among which kernels a plan takes one for a feature on a target."""
    names: dict[str, None] = {}
    for request in requests(feature, target):
        launches, _ = variants(request, Options(**feature.options))
        names |= dict.fromkeys(f"`{feature.launch_for_cache(launch).name}`" for launch in launches.values())
    return ", ".join(sorted(names)) or "none"


def cpu_cell(feature: Feature) -> str:
    """Return whether a plan for CPU tensors serves a feature, or its words where it does not."""
    table, lengths = torch.zeros(1, 256, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    values = {"tree_bits": lengths.long(), "chosen": quire.ChosenKeys(lengths[:, None])}
    seen = {name: values.get(name, lengths) for name in feature.per_token}
    batch = quire.Batch(table, lengths, **seen)
    try:
        quire.plan(feature.attention_spec, batch, max_query_len=1, max_seq_len=4096, **feature.options)
    except quire.UnsupportedError as error:
        return f"no: {error}"
    return "yes"


def heads_of(**fields: Any) -> Callable[[], object]:
    """Return what makes a spec with these fields."""
    return lambda: quire.AttentionSpec(**{"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, **fields})


def planned(kernel: str, name: str) -> Callable[[], object]:
    """Return what plans a feature with a kernel on an H200."""
    feature = next(f for f in FEATURES if f.name == name)
    return lambda: decide(next(iter(requests(feature, "sm90"))), Options(**feature.options, kernel=kernel))


def refused_requests() -> dict[str, Callable[[], object]]:
    """Return requests that nothing serves, by how they are written."""
    first_latent = next(f.name for f in FEATURES if "kv_lora_rank" in f.spec)
    found: dict[str, Callable[[], object]] = {
        "`AttentionSpec(head_dim=20)`": heads_of(head_dim=20),
        "`AttentionSpec(head_dim=520)`": heads_of(head_dim=520),
        "`AttentionSpec(dtype=torch.float64)`": heads_of(dtype=torch.float64),
        "`AttentionSpec(kv_dtype=torch.uint8)`": heads_of(kv_dtype=torch.uint8),
        "`AttentionSpec.mla(kv_lora_rank=1024)`": lambda: Feature("", {**LATENT, "kv_lora_rank": 1024}).attention_spec,
    }
    for kernel in FAMILIES:
        for name in (FEATURES[0].name, first_latent):
            found[f"`plan(kernel={kernel!r})`: {name}"] = planned(kernel, name)
        found[f"`attention(out_scale=...)` with `{kernel}`"] = partial(check_out_scale, torch.ones(1), kernel, CPU)
    return found


def words_of(request: Callable[[], object]) -> str | None:
    """Return in which words a request is refused; None if it is served."""
    try:
        request()
    except quire.UnsupportedError as error:
        return str(error)
    return None


def engines() -> dict[str, list[Path]]:
    """Return the source files of each integration. What they share is in `arguments.py` and `engine.py`.

    `deep_gemm.py` computes no attention.
    """
    found = {}
    for path in sorted(INTEGRATIONS.iterdir()):
        if path.is_dir() and (path / "__init__.py").exists():
            found[path.name] = sorted(path.glob("*.py"))
        elif path.suffix == ".py" and path.stem not in ("__init__", "arguments", "engine", "deep_gemm"):
            found[path.stem] = [path]
    return found


def versions(engine: str) -> str:
    """Return the versions of an engine that its extra asks for."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for requirement in extras.get(engine, []):
        if requirement.startswith(engine):
            return requirement.removeprefix(engine)
    return ""


def engine_cell(engine: str, name: str) -> str:
    """Return whether an integration passes a name on."""
    if name not in passed_on(engine):
        return "–"
    return "yes" if name == "latent" or name in passed_on(engine, for_latents=False) else "MLA only"


@cache
def passed_on(engine: str, for_latents: bool = True) -> frozenset[str]:
    """Return the names that an integration passes on: keywords of its calls, and keys of its dictionaries.

    A function of `quire.intervals` passes `key_begin` on.
    """
    names: set[str] = set()
    for path in engines()[engine]:
        if path in LATENTS and not for_latents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                names |= {keyword.arg for keyword in node.keywords if keyword.arg}
                if ast.unparse(node.func).startswith("quire.intervals."):
                    names.add("key_begin")
            elif isinstance(node, ast.Dict):
                names |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
    return frozenset(names)


def refusals_of(engine: str) -> list[str]:
    """Return the words of each UnsupportedError that an integration raises, with `…` for what it fills in."""
    found = []
    for path in engines()[engine]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
                called = node.exc.func
                if isinstance(called, ast.Name) and called.id == "UnsupportedError" and node.exc.args:
                    found.append(literal(node.exc.args[0]))
    return list(dict.fromkeys(found))


def literal(node: ast.expr) -> str:
    """Return the words of a string or an f-string."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def escaped(cell: str) -> str:
    """Return the text of a cell as Markdown takes it."""
    return re.sub(r"\s+", " ", cell).replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(head), ["---" for _ in head], *([escaped(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


ASKED = {  # what an engine may ask for: the field of the spec, or the argument of the plan
    "sliding windows": "sliding_window",
    "windows that look ahead": "sliding_window_right",
    "bidirectional": "causal",
    "softcap": "softcap",
    "ALiBi": "alibi",
    "attention sinks": "sinks",
    "functions on scores": "score",
    "outputs in e4m3": "out_scale",
    "intervals of keys": "key_begin",
    "draft trees": "tree_bits",
    "chosen keys": "chosen",
    "values of another width": "head_dim_v",
    "quantised caches": "kv_dtype",
    "latents": "latent",
    "batch-invariant plans": "batch_invariant",
}


def kernels_table(features: Sequence[Feature]) -> str:
    """Return what the kernels serve of some features; those that serve none of them are named below the table."""
    cells = {kernel: [kernel_cell(f, kernel) for f in features] for kernel in FAMILIES}
    serving = [kernel for kernel, column in cells.items() if not all(cell.startswith("no: ") for cell in column)]
    head = ["feature", *(f"`{kernel}`" for kernel in serving), "CPU tensors"]
    rows = [[f.name, *(cells[kernel][i] for kernel in serving), cpu_cell(f)] for i, f in enumerate(features)]
    words = {kernel: column[0].removeprefix("no: ") for kernel, column in cells.items() if kernel not in serving}
    return (
        table(head, rows)
        + "\n"
        + "".join(f"`{kernel}` refuses all of these: {why}.\n" for kernel, why in words.items())
    )


def targets_table() -> str:
    """Return which kernels serve features on each target; targets with the same answers share a column."""
    columns: dict[tuple[str, ...], list[str]] = {}
    for target in TARGETS:
        columns.setdefault(tuple(target_cell(f, target) for f in FEATURES), []).append(target)
    head = ["feature", *(", ".join(targets) for targets in columns.values())]
    return table(head, zip((f.name for f in FEATURES), *columns, strict=True))


def page() -> str:
    """Return the page."""
    refused = ((name, words_of(request)) for name, request in refused_requests().items())
    names = list(engines())
    by_engine = table(
        ["feature", *(f"`{name}`" for name in names)],
        [
            ["versions", *(versions(name) or "not needed" for name in names)],
            *([label, *(engine_cell(e, name) for e in names)] for label, name in ASKED.items()),
        ],
    )
    unchosen = [f for f in FEATURES if f.per_token != CHOSEN]
    return TEXT.format(
        num_targets=len(TARGETS),
        targets=", ".join(TARGETS),
        keys_and_values=kernels_table([f for f in unchosen if not f.attention_spec.latent]),
        latents=kernels_table([f for f in unchosen if f.attention_spec.latent]),
        chosen=kernels_table([f for f in FEATURES if f.per_token == CHOSEN]),
        by_target=targets_table(),
        messages=table(["request", "error"], ((name, words) for name, words in refused if words is not None)),
        by_engine=by_engine,
        engine_pages=f"More: {', '.join(f'[{e}]({e}.md)' for e in names if PAGE.with_name(f'{e}.md').exists())}.",
        engine_refusals=table(["engine", "error"], ((f"`{e}`", words) for e in names for words in refusals_of(e))),
    )


TEXT = """\
# What is supported

<!-- Written by `python scripts/write_support.py`. Change the script, not this page. -->

A script wrote this page by asking the code: a cell is what a plan answers, and a refusal is in the words of the code.
[Using Quire](usage.md#what-is-supported) has the same in short.
`print(plan)` says which kernel a plan takes on your machine, and why.

Unless a row says otherwise, queries and cache are bfloat16, and 32 query heads are over 8 KV heads of 128.
Latents have 128 query heads.
Two more pages say what goes with [shared prefixes](shared_prefix.md#what-a-sequence-must-hold), and what with
[new tokens in the same call](usage.md#new-tokens-in-the-same-call).

## Features and kernels

The kernels are those that `plan(kernel=...)` names: `hopper` for prompts on Hopper GPUs, `portable` for every GPU, and
`mla_hopper` and `mla` for [latents](mla.md). Without `kernel`, a plan takes the one of least predicted time.
"yes" is for decode and for prompts, on {num_targets} [targets](#features-and-targets): {targets}.
Other cells name the targets or the batches that are served, or say what the kernel does not serve.

### Keys and values

{keys_and_values}
### Latents

{latents}
### Chosen keys

{chosen}
## Features and targets

The kernels that serve decode and a prompt of 2,048 tokens; a plan takes the one of least predicted time.
`split_kv` and `block` are the two forms of the portable kernel: with keys split over programs, and without.
Where it says "none", a plan is refused.
The tests compile for all targets. The H200 and the H100 were measured, no other ([results](results/README.md)).

{by_target}
NVIDIA's targets are sm80 (A100), sm86 (A40), sm89 (L40S), sm90 (H100, H200), sm100 (B200) and sm120 (RTX PRO 6000).
AMD's are gfx90a (MI250), gfx942 (MI300X) and gfx950 (MI355X).

## Refusals

A sound request that nothing serves raises `UnsupportedError`:

{messages}
## Features and engines

What an integration passes on to Quire. An engine may have no way to ask for the rest.
{engine_pages}

{by_engine}
What an integration refuses, with "…" for what the message fills in:

{engine_refusals}"""


def main() -> None:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="the page to write")
    parser.parse_args().output.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
