"""Write the results page of SGLang from the files of a run.

    python scripts/report_sglang.py FOLDER...     # writes docs/results/sglang.json and docs/results/sglang.md

A folder has `machine.json`; `speed-BACKEND-PAGE-ROUND.json` of Llama-3.1-8B's geometry; `tokens-BACKEND-PAGE.json` and
`tokens-BACKEND-PAGE-deterministic.json` of a small model, with `judge.txt`, a line for each in the order of
`judged_files.txt`; and `kit.xml`, pytest's report of SGLang's own kit. What is missing is left out of the page.
"""

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from xml.etree import ElementTree

RESULTS = Path(__file__).parents[1] / "docs" / "results"
OURS = "quire"
MARGIN = re.compile(r"margin max ([\d.]+) mean ([\d.]+); tokens that are the float32 argmax ([\d.]+)")
LONG = 10_000  # tokens of a prompt whose decode is of one request alone


def collect(folders: Iterable[Path]) -> dict:
    """Return what the files say, by kind."""
    run: dict = {"machine": {}, "speed": [], "tokens": [], "kit": {}}
    for folder in folders:
        for file in sorted(folder.rglob("*.json")):
            kind, *name = file.stem.split("-")
            content = json.loads(file.read_text())
            if kind == "machine":
                run["machine"] |= content
            elif kind == "speed":
                run["speed"].append({"page": int(name[1]), "round": int(name[2])} | content)
            elif kind == "tokens":
                alike = [a == b for a, b in zip(content["alone"], content["tokens"], strict=False)]
                row = {"backend": content["backend"], "page": int(name[1]), "deterministic": len(name) > 2}
                run["tokens"].append(row | {"file": file.name, "alone": sum(alike), "of": len(alike)})
        for file in folder.rglob("judge.txt"):
            judged = (file.parent / "judged_files.txt").read_text().split()
            margins = MARGIN.findall(file.read_text())
            for name, numbers in zip(judged, margins, strict=True):
                row = next(row for row in run["tokens"] if row["file"] == name)
                row["margin_max"], row["margin_mean"], row["argmax"] = map(float, numbers)
        for file in folder.rglob("kit.xml"):
            suite = next(ElementTree.parse(file).iter("testsuite"))
            run["kit"] = {name: int(suite.get(name, 0)) for name in ("tests", "failures", "errors", "skipped")}
    return run


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
        cells = [f"{medians[name]:.{digits}f}" if name in medians else "" for name in names]
        text.append(f"| {entry} | {' | '.join(cells)} | {ratio} |")
    return [*text, ""]


def speed(runs: list[dict]) -> list[str]:
    """Return what was measured of the large model."""
    rounds = {run["round"] for run in runs}
    text = [
        "Llama-3.1-8B's geometry with 32 layers and random weights in bfloat16, by SGLang's offline engine, with",
        "graphs and without a radix cache. All backends ran at the same time, each on a GPU of its own, and on another",
        f"one in the next round. Medians of {len(rounds)} rounds, each of which is the better one of two.",
        "The last column compares the first one with the fastest of the other backends.",
        "",
    ]
    rows = [(column(run), row) for run in runs for row in run["rows"]]
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
    return text + table("start, s", starts, 0)


def tokens(rows: list[dict]) -> list[str]:
    """Return what was found of the small model's tokens."""
    text = [
        "Greedy tokens of a small Llama, of twelve prompts of 1 to 1,500 tokens together, and of some alone.",
        "A margin is how far a token's logit is below the largest under eager float32: rounding gives small ones.",
        "",
        "| backend | deterministic | alone as together | largest margin | mean | are float32's token |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in sorted(rows, key=lambda row: (row["deterministic"], row["backend"], row["page"])):
        mode, alone = "yes" if row["deterministic"] else "no", f"{row['alone']} of {row['of']}"
        found = (
            (f"{row['margin_max']:.3f}", f"{row['margin_mean']:.5f}", f"{row['argmax']:.2%}") if "argmax" in row else ""
        )
        text.append(f"| {column(row)} | {mode} | {alone} | {' | '.join(found or ('', '', ''))} |")
    return [*text, ""]


def page(run: dict) -> str:
    """Return the page."""
    machine, kit = run["machine"], run["kit"]
    about = [machine.get("gpu", "?"), *(f"{name} {machine.get(name, '?')}" for name in ("torch", "triton", "sglang"))]
    text = ["# SGLang end to end", "", f"{', '.join(about)}, {machine.get('date', '?')}.", ""]
    text += ["`python scripts/report_sglang.py` writes this page from [what was measured](sglang.json).", ""]
    text += speed(run["speed"]) if run["speed"] else []
    text += tokens(run["tokens"]) if run["tokens"] else []
    if kit:
        passed = kit["tests"] - kit["failures"] - kit["errors"] - kit["skipped"]
        text += [f"{passed} of {kit['tests']} tests of `tests/engines/test_sglang_kit.py` pass on the GPU.", ""]
    return "\n".join(text)


def main() -> None:
    run = collect(Path(folder) for folder in sys.argv[1:])
    (RESULTS / "sglang.json").write_text(json.dumps(run, indent=1) + "\n")
    (RESULTS / "sglang.md").write_text(page(run))


if __name__ == "__main__":
    main()
