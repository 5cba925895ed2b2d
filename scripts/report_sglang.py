"""Write the results page of SGLang from the files of a run.

    python scripts/report_sglang.py FOLDER...     # writes docs/results/sglang_h200.json and docs/results/sglang_h200.md
    python scripts/report_sglang.py               # writes the page again, from the JSON

A folder has `machine.json`; `speed-BACKEND-PAGE-ROUND.json` of Llama-3.1-8B's geometry; `tokens-BACKEND-PAGE.json` and
`tokens-BACKEND-PAGE-deterministic.json` of a small model, with `judge.txt`, a line for each in the order of
`judged_files.txt`; and `kit.xml`, pytest's report of SGLang's own kit.
`notes.json` has what the files do not say: "how" the backends shared the machine, "left_out", the rows of speed
that are wrong, each with its reason, and "notes", sentences that end the page.
What deterministic mode and the kit lack is said on the page; anything else that is missing is left out.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

RESULTS = Path(__file__).parents[1] / "docs" / "results"
NAME = "sglang_h200"
OURS = "quire"
REFERENCE = "fa3"  # the backend whose tokens the others are compared with
MARGIN = re.compile(r"margin max ([\d.]+) mean ([\d.]+); tokens that are the float32 argmax ([\d.]+)")
LONG = 10_000  # tokens of a prompt whose decode is of one request alone


def collect(folders: Iterable[Path]) -> dict:
    """Return what the files say, by kind."""
    run: dict = {"machine": {}, "speed": [], "tokens": [], "kit": {}, "how": "", "left_out": [], "notes": []}
    written: dict[str, list[list[int]]] = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.json")):
            kind, *name = file.stem.split("-")
            content = json.loads(file.read_text())
            if kind == "machine":
                run["machine"] |= content
            elif kind == "notes":
                run |= content
            elif kind == "speed":
                run["speed"].append({"page": int(name[1]), "round": int(name[2])} | content)
            elif kind == "tokens":
                alike = [a == b for a, b in zip(content["alone"], content["tokens"], strict=False)]
                row = {"backend": content["backend"], "page": int(name[1]), "deterministic": len(name) > 2}
                run["tokens"].append(row | {"file": file.name, "alone": sum(alike), "of": len(alike)})
                written[file.name] = content["tokens"]
        for file in folder.rglob("judge.txt"):
            judged = (file.parent / "judged_files.txt").read_text().split()
            margins = MARGIN.findall(file.read_text())
            for name, numbers in zip(judged, margins, strict=True):
                row = next(row for row in run["tokens"] if row["file"] == name)
                row["margin_max"], row["margin_mean"], row["argmax"] = map(float, numbers)
        for file in folder.rglob("kit.xml"):
            suite = next(ElementTree.parse(file).iter("testsuite"))
            run["kit"] = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    reference = next((row["file"] for row in run["tokens"] if row["backend"] == REFERENCE), None)
    for row in run["tokens"]:
        if reference is not None:
            row["equal"], row["num_tokens"] = equal(written[row["file"]], written[reference])
    return run


def equal(tokens: list[list[int]], others: list[list[int]]) -> tuple[int, int]:
    """Return how many tokens are those of another backend in the same places, and how many there are."""
    pairs = [pair for some, other in zip(tokens, others, strict=True) for pair in zip(some, other, strict=True)]
    return sum(a == b for a, b in pairs), len(pairs)


def column(run: dict) -> str:
    """Return the name of a backend in a table."""
    return f"{OURS}, pages of {run['page']}" if run["backend"] == OURS else run["backend"]


def table(heading: str, lines: dict[str, list[tuple[str, float]]], digits: int) -> list[str]:
    """Return a table of medians, with how many times as fast Quire's first column is as the fastest other backend.

    Args:
        heading: of the first column.
        lines: by its entry, backends with what was measured, less of which is better.
        digits: after the point.
    """
    names = {name for values in lines.values() for name, _ in values}
    names = sorted(names, key=lambda name: (not name.startswith(OURS), len(name), name))
    text = [f"| {heading} | {' | '.join(names)} | × as fast |", "| --- |" + " --- |" * (len(names) + 1)]
    for entry, values in lines.items():
        medians = {name: median(v for n, v in values if n == name) for name in names if name in dict(values)}
        others = [value for name, value in medians.items() if not name.startswith(OURS)]
        ratio = f"{min(others) / medians[names[0]]:.2f}" if others and names[0] in medians else ""
        cells = [f"{medians[name]:,.{digits}f}" if name in medians else "" for name in names]
        text.append(f"| {entry} | {' | '.join(cells)} | {ratio} |")
    return [*text, ""]


def is_left_out(run: dict, row: dict, left_out: list[dict]) -> bool:
    """Return whether a row of speed is wrong."""
    place = {"backend": run["backend"], "page": run["page"], "round": run["round"]} | row
    return any(all(place[key] == wrong[key] for key in wrong if key != "why") for wrong in left_out)


def speed(runs: list[dict], how: str, left_out: list[dict]) -> list[str]:
    """Return what was measured of the large model."""
    rounds = {run["round"] for run in runs}
    many = f"Medians of {len(rounds)} rounds" if len(rounds) > 1 else "One round"
    text = [
        "## Speed",
        "",
        "Llama-3.1-8B's geometry with 32 layers and random weights in bfloat16, by SGLang's offline engine, with",
        "graphs and without a radix cache. A prefill is the time of one token for each request.",
        "A step is the time of 257 tokens less that, over 256.",
        *([how] if how else []),
        f"{many}: a time is the better one of two calls, where nothing else is said.",
        '"× as fast" is the time of the fastest other backend over that of the first column: below 1 Quire is slower.',
        "",
    ]
    rows = [(column(run), row) for run in runs for row in run["rows"] if not is_left_out(run, row, left_out)]
    for heading, field, digits, scale in (("one step, ms", "step_ms", 2, 1), ("prefill, ms", "prefill_s", 0, 1000)):
        lines: dict[str, list[tuple[str, float]]] = {}
        for name, row in rows:
            if field == "prefill_s" or row["prompt"] < LONG:
                lines.setdefault(f"{row['batch']} × {row['prompt']:,}", []).append((name, scale * row[field]))
        text += table(f"requests × tokens of a prompt; {heading}", lines, digits)
    starts: dict[str, list[tuple[str, float]]] = {}
    for run in runs:
        entry = "nothing compiled before" if run["round"] == min(rounds) else "started before on the machine"
        starts.setdefault(entry, []).append((column(run), run["startup_s"]))
    text += table("start, s", starts, 0)
    for wrong in left_out:
        text.append(f"Left out: {wrong['batch']} × {wrong['prompt']:,} of {column(wrong)}. {wrong['why']}")
    return [*text, ""] if left_out else text


def tokens(rows: list[dict]) -> list[str]:
    """Return what was found of the small model's tokens."""
    text = [
        "## Tokens",
        "",
        "Greedy tokens of a small Llama in bfloat16, of twelve prompts of 1 to 1,500 tokens together, some alone too.",
        "A margin is how far a token's logit is below the largest under eager float32: rounding gives small ones.",
        "Where two logits are that close, backends may choose differently. The prompt's later tokens then differ too.",
        "",
        f"| backend | deterministic | alone as together | tokens that are {REFERENCE}'s | largest margin | mean "
        "| are float32's token |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (row["deterministic"], row["backend"], row["page"])):
        mode, alone = "yes" if row["deterministic"] else "no", f"{row['alone']} of {row['of']}"
        found = (
            (f"{row['margin_max']:.3f}", f"{row['margin_mean']:.5f}", f"{row['argmax']:.2%}") if "argmax" in row else ""
        )
        same = f"{row['equal']} of {row['num_tokens']}" if "equal" in row else ""
        text.append(f"| {column(row)} | {mode} | {alone} | {same} | {' | '.join(found or ('', '', ''))} |")
    return [*text, ""]


def page(run: dict) -> str:
    """Return the page."""
    machine, kit = run["machine"], run["kit"]
    about = [machine.get("gpu", "?"), *(f"{name} {machine.get(name, '?')}" for name in ("torch", "triton", "sglang"))]
    text = ["# SGLang end to end", "", f"{', '.join(about)}, {machine.get('date', '?')}.", ""]
    text += [f"`python scripts/report_sglang.py` writes this page from [what was measured]({NAME}.json).", ""]
    text += speed(run["speed"], run["how"], run["left_out"]) if run["speed"] else []
    text += tokens(run["tokens"]) if run["tokens"] else []
    if kit:
        passed = kit["tests"] - kit["failures"] - kit["errors"] - kit["skipped"]
        text += [f"{passed} of {kit['tests']} tests of `tests/engines/test_sglang_kit.py` pass on the GPU.", ""]
    absent = ["deterministic mode"] if not any(row["deterministic"] for row in run["tokens"]) else []
    absent += ["SGLang's own kit for attention backends (0.5.23)"] if not kit else []
    text += ["## Not run", "", f"Not run on a GPU: {' and '.join(absent)}.", ""] if absent else []
    text += ["## Notes", "", *(f"* {note}" for note in run["notes"]), ""] if run["notes"] else []
    return "\n".join(text)


def main() -> None:
    data = RESULTS / f"{NAME}.json"
    if sys.argv[1:]:
        data.write_text(json.dumps(collect(map(Path, sys.argv[1:])), indent=1) + "\n", encoding="utf-8")
    (RESULTS / f"{NAME}.md").write_text(page(json.loads(data.read_text(encoding="utf-8"))), encoding="utf-8")


if __name__ == "__main__":
    main()
