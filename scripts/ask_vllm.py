"""Write into docs/notes/vllm.md what Quire's backends answer to vLLM, which asks them before it chooses one.

    PYTHONPATH=.overlays/vllm-0.33.0:.overlays/vllm-needs:.overlays/transformers-5.17.0 python scripts/ask_vllm.py

The questions come from vLLM: each argument of `validate_configuration` that says yes or no, each dtype of caches, and
each kind of attention. The columns of the installed version are replaced, and the others stay. Cells are vLLM's words.
Questions with the same answers share a row.
"""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import torch

from quire.integrations.vllm import register

PAGE = Path(__file__).parent.parent / "docs/notes/vllm.md"
BEGIN, END = "<!-- Written by `python scripts/ask_vllm.py`. -->\n", "<!-- The end of what it writes. -->\n"
KINDS = ("keys and values", "latents")
NOT_ASKED = "–"
Cells = dict[str, dict[str, str]]  # by question and column


def asked_of(kind: str) -> dict[str, Any]:
    """Return what vLLM asks of a plain decoder in bfloat16 on an H200."""
    latents = kind == "latents"
    return {
        "head_size": 576 if latents else 128,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "auto",
        "block_size": 64 if latents else 16,
        "use_mla": latents,
        "has_sink": False,
        "use_sparse": False,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": SimpleNamespace(major=9, minor=0),
        "attn_type": "decoder",
    }


def questions(validate: Callable[..., list[str]]) -> dict[str, dict[str, Any]]:
    """Return what differs in each question."""
    vllm = importlib.import_module("vllm.config.cache")
    types = importlib.import_module("vllm.v1.attention.backend").AttentionType
    flags = [name for name in inspect.signature(validate).parameters if name.startswith(("use_", "has_"))]
    capabilities = {f"sm{major}{minor}": SimpleNamespace(major=major, minor=minor) for major, minor in GPUS}
    return {
        **{f"`{kind.value}` attention": {"attn_type": kind} for kind in types},
        **{f"a model in {name}": {"dtype": getattr(torch, name)} for name in ("float16", "float32")},
        **{f"`--kv-cache-dtype {name}`": {"kv_cache_dtype": name} for name in get_args(vllm.CacheDType)},
        **{f"pages of {size}": {"block_size": size} for size in (1, 48, 544)},
        **{f"`{name}`": {name: True} for name in flags if name != "use_mla"},
        **{f"a GPU of {name}": {"device_capability": value} for name, value in capabilities.items()},
    }


GPUS = ((7, 5), (8, 0), (9, 0), (10, 0), (12, 0))


def answers() -> Cells:
    """Return what the backends answer in the installed version of vLLM."""
    register()
    version = importlib.import_module("vllm").__version__
    backends = (
        importlib.import_module("quire.integrations.vllm.backend").QuireBackend,
        importlib.import_module("quire.integrations.vllm.mla").QuireMLABackend,
    )
    found: Cells = {}
    for kind, backend in zip(KINDS, backends, strict=True):
        for name, changes in questions(backend.validate_configuration).items():
            reasons = backend.validate_configuration(**asked_of(kind) | changes)
            words = "; ".join(dict.fromkeys(reasons))
            found.setdefault(name, {})[f"{version}, {kind}"] = words or "yes"
    return found


def read(text: str) -> Cells:
    """Return the cells of the page's table."""
    lines = text[text.index(BEGIN) + len(BEGIN) : text.index(END)].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("|")]
    columns = rows[0][1:] if rows else []
    return {name: dict(zip(columns, cells, strict=True)) for names, *cells in rows[2:] for name in names.split(", ")}


def table(cells: Cells) -> str:
    """Return the table."""
    columns = sorted({column for row in cells.values() for column in row})
    lines = [["vLLM asks", *columns], ["---"] * (1 + len(columns))]
    names: dict[tuple[str, ...], list[str]] = {}  # of the questions, by their answers
    for name, row in cells.items():
        names.setdefault(tuple(row.get(column, NOT_ASKED) for column in columns), []).append(name)
    lines += [[", ".join(asked), *same] for same, asked in names.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def merged(old: Cells, new: Cells) -> Cells:
    """Return the table's cells with those of the installed version replaced, in the order of its questions."""
    columns = {column for row in new.values() for column in row}
    names = [*new, *(name for name in old if name not in new)]
    kept = {name: {c: cell for c, cell in old.get(name, {}).items() if c not in columns} for name in names}
    found = {name: {**kept[name], **new.get(name, {})} for name in names}
    return {name: row for name, row in found.items() if any(cell != NOT_ASKED for cell in row.values())}


def main() -> None:
    """Write the table into the page."""
    text = PAGE.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    PAGE.write_text(before + "\n" + table(merged(read(text), answers())) + "\n" + after, encoding="utf-8")


if __name__ == "__main__":
    main()
