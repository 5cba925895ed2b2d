"""Measure what each format of a cache costs in accuracy: errors of attention, and perplexity of the embedded model.

    python scripts/measure_formats.py           # minutes on two cores; writes docs/results/formats.json and a figure
    python scripts/measure_formats.py --draw    # the figure alone, from the file

Keys and values go through `quire.write_kv` into a cache and come back as the numbers that attention reads. The error is
that of attention over these numbers to attention over the keys and values as they were, both in float64: the norm of
the difference over the norm of the exact outputs. Kernels add no more to it than their error budget says.

Three kinds of keys: Gaussian ones; the same with four channels of 128 of another mean and spread, as many models have
them; and those of the embedded model (`quire generate`), after their rotary embedding, on files of this repository,
which it was not trained on. Rotated: queries, keys and values are multiplied by signs and a Hadamard matrix, and
outputs back.
"""

import argparse
import json
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from figures import COLOURS, ROOT, STYLE, WIDTH
from matplotlib import pyplot
from matplotlib.figure import Figure

import quire
from quire import reference

RESULT = ROOT / "docs/results/formats.json"
FORMATS: dict[str, tuple[dict[str, Any], str]] = {  # fields of the spec, and scales
    "bfloat16": ({}, ""),
    "e4m3, per tensor": ({"kv_dtype": torch.float8_e4m3fn}, "tensor"),
    "e4m3, per token": ({"kv_dtype": torch.float8_e4m3fn}, "token"),
    "int8, per token": ({"kv_dtype": torch.int8}, "token"),
    "k8v4": ({"kv_format": "k8v4"}, "token"),
    "nvfp4": ({"kv_format": "nvfp4"}, "tensor"),
    "int4": ({"kv_format": "int4"}, "token"),
}
ROTATED = "k8v4", "nvfp4", "int4"
LARGEST = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
KEYS, QUERIES, WIDTH_OF_HEAD = 2048, 64, 128
ENDS = 16, 64  # first and last keys that a query sees in 16 bits, where they are apart
WINDOW, WINDOWS = 512, 24  # tokens of the model's context, and how many contexts
MODEL = ROOT / "src/quire/demo_model"
TEXT = sorted((ROOT / "src/quire").rglob("*.py"))


def hadamard(width: int) -> torch.Tensor:
    """Return an orthogonal matrix of signs and Walsh's functions, for a width that is a power of two."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < width:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return signs * matrix / math.sqrt(width)


def spec_of(fields: dict[str, Any], heads: int, width: int) -> quire.AttentionSpec:
    """Return the spec of a layer with as many query heads as KV heads."""
    dtype = torch.float32 if fields else torch.bfloat16
    return quire.AttentionSpec(num_q_heads=heads, num_kv_heads=heads, head_dim=width, dtype=dtype, **fields)


def bytes_per_token(name: str, width: int) -> int:
    """Return the bytes of a token and KV head, with scales per token."""
    fields, scales = FORMATS[name]
    own = spec_of(fields, 1, width).bytes_per_token
    return own + (8 if scales == "token" and "kv_format" not in fields else 0)


def stored(k: torch.Tensor, v: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values, [tokens, heads, width] float32, as a cache of this format holds them."""
    fields, scales = FORMATS[name]
    if not fields:
        return k.bfloat16().float(), v.bfloat16().float()
    tokens, heads, width = k.shape
    cache = quire.PagedKVCache.empty(spec_of(fields, heads, width), -(-tokens // 16), 16)
    made: dict[str, Any] = {}
    if scales == "tensor":  # calibrated on the numbers themselves
        largest = 6 * 448.0 if "kv_format" in fields else LARGEST[fields["kv_dtype"]]
        made = {"k_scale": float(k.abs().max()) / largest, "v_scale": float(v.abs().max()) / largest}
    elif "kv_format" not in fields:
        made = {f"{side}_scale": torch.ones(cache.num_pages, 16, heads) for side in "kv"}
    cache = quire.PagedKVCache(cache.k, cache.v, cache.layout, **cache.scales | made)
    slots = torch.arange(tokens)
    quire.write_kv(k, v, cache, slots)
    k, v = reference.read(cache, slots // 16, slots % 16, torch.float32)
    return k, v


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Attend in float64: q [heads, queries, width], k and v [heads, keys, width]."""
    scores = q.double() @ k.double().transpose(1, 2) * q.shape[2] ** -0.5
    if causal:
        scores += torch.full(scores.shape[1:], -math.inf, dtype=torch.float64).triu(1)
    return scores.softmax(-1) @ v.double()


def attend_with_ends(q: torch.Tensor, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Do what `attend` does of causal queries, where the first keys and the last that each query sees are in 16 bits.

    `parts` are keys and values in 16 bits, and as a format stores them.
    """
    at, (first, last) = torch.arange(q.shape[1]), ENDS
    is_end = (at[None, :] < first) | (at[None, :] > at[:, None] - last)
    ends, middle = (q.double() @ k.double().transpose(1, 2) * q.shape[2] ** -0.5 for k, _ in parts)
    scores = torch.where(is_end, ends, middle).masked_fill(at[None, :] > at[:, None], -math.inf)
    weights = scores.softmax(-1)
    return (weights * is_end) @ parts[0][1].double() + (weights * ~is_end) @ parts[1][1].double()


def error(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, name: str, rotated: bool, causal: bool, ends: bool = False
) -> float:
    """Return the relative error of attention over stored keys and values; all are [tokens, heads, width]."""
    group = q.shape[1] // k.shape[1]

    def result(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (x.transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
        return attend(q.transpose(0, 1), k, v, causal)

    exact = result(q, k, v)
    turn = hadamard(q.shape[2]) if rotated else torch.eye(q.shape[2])
    q, k, v = q @ turn, k @ turn, v @ turn
    if ends:
        own = [[x.transpose(0, 1).repeat_interleave(group, 0) for x in stored(k, v, of)] for of in ("bfloat16", name)]
        out = attend_with_ends(q.transpose(0, 1), [(keys, values) for keys, values in own])
    else:
        out = result(q, *stored(k, v, name))
    out = out @ turn.T.double()
    return float((out - exact).norm() / exact.norm())


def made_up(outliers: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return queries, keys and values whose scores have a standard deviation of two or three."""
    generator = torch.Generator().manual_seed(7)
    q, k, v = (torch.randn(n, 8, WIDTH_OF_HEAD, generator=generator) for n in (QUERIES, KEYS, KEYS))
    if not outliers:
        return 2 * q, k, v
    mean, spread = torch.zeros(WIDTH_OF_HEAD), torch.ones(WIDTH_OF_HEAD)
    mean[[5, 37, 70, 101]], spread[[5, 37, 70, 101]] = torch.tensor([12.0, -15.0, 10.0, -18.0]), 3.0
    return 2 * q, k * spread + mean, v


class Layers:
    """The embedded model, whose attention keeps what it was given, or stores keys and values in a format."""

    def __init__(self) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

        AttentionInterface.register("stored", self.attention)
        self.model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="stored")
        tokenizer = AutoTokenizer.from_pretrained(MODEL)
        texts = [tokenizer(path.read_text()).input_ids[:WINDOW] for path in TEXT]
        self.windows = [torch.tensor([ids]) for ids in texts if len(ids) == WINDOW][:WINDOWS]
        self.change: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None = None
        self.seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def attention(self, module: Any, q: Any, k: Any, v: Any, mask: Any, scaling: float, **others: Any) -> Any:
        """Attend as Transformers asks: q, k and v are [1, heads, tokens, width]."""
        own = [x[0].transpose(0, 1) for x in (q, k, v)]
        if self.change is None:
            self.seen.append((own[0], own[1], own[2]))
        else:
            k, v = (x.transpose(0, 1)[None] for x in self.change(own[1], own[2]))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return out.transpose(1, 2).contiguous(), None

    @torch.no_grad()
    def loss(self, change: Callable[..., tuple[torch.Tensor, torch.Tensor]] | None) -> float:
        """Return the mean loss of a token, in nats."""
        self.change, losses = change, []
        for ids in self.windows:
            losses.append(float(self.model(ids, labels=ids, use_cache=False).loss))
        return sum(losses) / len(losses)


def rows() -> Iterator[tuple[str, bool]]:
    """Return the formats, and whether they are rotated."""
    for name in FORMATS:
        yield name, False
        if name in ROTATED:
            yield name, True


def turned(name: str, rotated: bool) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return what a layer reads of its keys and values: rotated, stored, and rotated back."""

    def change(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        turn = hadamard(k.shape[2]) if rotated else torch.eye(k.shape[2])
        k, v = stored(k @ turn, v @ turn, name)
        return k @ turn.T, v @ turn.T

    return change


def measure() -> dict[str, Any]:
    """Return all numbers."""
    layers = Layers()
    exact = layers.loss(None)
    of_model = layers.seen[:: len(layers.seen) // 64 + 1]  # layers of several windows
    gaussian, outliers = made_up(False), made_up(True)
    found = []
    for name, rotated in rows():
        errors, with_ends = ([error(*case, name, rotated, True, ends) for case in of_model] for ends in (False, True))
        loss = layers.loss(turned(name, rotated))
        found.append(
            {
                "format": name,
                "rotated": rotated,
                "bytes": bytes_per_token(name, WIDTH_OF_HEAD),
                "bytes_of_model": bytes_per_token(name, of_model[0][0].shape[2]),
                "gaussian": error(*gaussian, name, rotated, False),
                "outliers": error(*outliers, name, rotated, False),
                "model": sum(errors) / len(errors),
                "model_with_ends": sum(with_ends) / len(with_ends),
                "perplexity": math.exp(loss),
            }
        )
        print(found[-1], flush=True)
    return {
        "perplexity_of_float32": math.exp(exact),
        "tokens": sum(ids.shape[1] - 1 for ids in layers.windows),
        "torch": torch.__version__,
        "quire": quire.__version__,
        "rows": found,
    }


def table(results: dict[str, Any]) -> str:
    """Return the numbers as the table of docs/quantise.md."""
    lines = [
        "| format | bytes, 128 columns | Gaussian keys | four channels apart | the model's keys | ends | perplexity |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        f"| float32 | 1024 | 0 | 0 | 0 | 0 | {results['perplexity_of_float32']:.2f} |",
    ]
    for row in results["rows"]:
        name = f"{row['format']}, rotated" if row["rotated"] else row["format"]
        errors = " | ".join(f"{100 * row[kind]:.1f} %" for kind in ("gaussian", "outliers", "model", "model_with_ends"))
        lines.append(f"| {name} | {row['bytes']} | {errors} | {row['perplexity']:.2f} |")
    return "\n".join(lines)


def draw(results: dict[str, Any]) -> Figure:
    """Return errors over bytes, a panel for each kind of keys."""
    figure, panels = pyplot.subplots(1, 3, figsize=(WIDTH, 3.6), sharey=True, layout="constrained")
    titles = {"gaussian": "Gaussian keys", "outliers": "four channels of 128 apart", "model": "the embedded model's"}
    names = [row["format"] for row in results["rows"] if not row["rotated"]]
    for panel, (kind, title) in zip(panels, titles.items(), strict=True):
        for row in results["rows"]:
            nbytes = row["bytes_of_model" if kind == "model" else "bytes"]
            colour = ("#495057", *COLOURS)[names.index(row["format"])]
            style: dict[str, Any] = {"mfc": "white"} if row["rotated"] else {}
            label = f"{row['format']}, rotated" if row["rotated"] else row["format"]
            panel.plot(nbytes, row[kind], "o", color=colour, ms=7, mew=1.6, label=label, **style)
        panel.set(yscale="log", xlabel="bytes of a token and head")
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_xlim(0, panel.get_xlim()[1] * 1.05)
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("relative error of outputs")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def main() -> None:
    """Measure, write the file and the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draw", action="store_true", help="draw the figure from the file, and measure nothing")
    args = parser.parse_args()
    if not args.draw:
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n")
    print(table(json.loads(RESULT.read_text())))
    with pyplot.rc_context(STYLE):  # pyright: ignore[reportArgumentType]
        draw(json.loads(RESULT.read_text())).savefig(ROOT / "docs/figures/formats.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
