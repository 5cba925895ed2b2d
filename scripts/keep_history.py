"""Add a run of `quire bench` to a history, and say which cases became slower.

    python scripts/keep_history.py results/ history.json

The history is JSON: a list with an entry for each run, which has the device, versions, the commit, the date, and of
each case Quire's time in µs. A run is compared with the last seven of the same device. A case became slower if it
took longer than in each of these, and by more than 3 % longer than in their median. The exit code is then 1, and
also if a case has no time that had one in the last run. The run is added in any case.
"""

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from quire_tools.bench.results import QUIRE, Report, load

RUNS = 7  # that a run is compared with
FEWEST = 3  # that say something
SLOWER = 1.03
FACTS = ("device", "code", "quire", "commit", "torch", "triton", "cuda", "driver", "date")


def entry(report: Report) -> dict[str, Any]:
    """Return what a history keeps of a run."""
    facts = {name: getattr(report.provenance, name) for name in FACTS}
    return facts | {"micros": {row.case: round(row.times[QUIRE], 3) for row in report.rows if QUIRE in row.times}}


def verdicts(history: list[dict[str, Any]], new: dict[str, Any]) -> list[str]:
    """Return a sentence for each case of a run that became slower, or that has no time any more."""
    alike = [run["micros"] for run in history if all(run[fact] == new[fact] for fact in ("device", "code"))][-RUNS:]
    found = [f"{case} has no time" for case in (alike[-1] if alike else ()) if case not in new["micros"]]
    for case, micros in new["micros"].items():
        before = [run[case] for run in alike if case in run]
        if len(before) < FEWEST:
            continue
        median = statistics.median(before)
        if micros > max(before) and micros > SLOWER * median:
            found.append(f"{case} takes {micros:.4g} µs, {median:.4g} in the median of {len(before)} runs before")
    return found


def main() -> None:
    """Add a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a results.json of `quire bench`, or its folder")
    parser.add_argument("history", type=Path, help="a JSON file, which is made if there is none")
    args = parser.parse_args()
    history = json.loads(args.history.read_text("utf-8")) if args.history.exists() else []
    new = entry(load(args.run))
    found = verdicts(history, new)
    partial = args.history.with_name(f"{args.history.name}.part")
    partial.write_text(json.dumps([*history, new], indent=1) + "\n", encoding="utf-8")
    partial.replace(args.history)
    print(f"{args.history} has {len(history) + 1} runs, the last one with {len(new['micros'])} cases")
    for sentence in found:
        print(sentence)
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
