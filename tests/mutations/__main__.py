"""Judge a sample of generated mutants: `python -m tests.mutations`. It fails if too few of them are noticed."""

import argparse
import fnmatch
import json
import signal
import sys
import time
from collections import defaultdict

from tests.mutations.generated import FLOORS, GROUPS, Generated, floors, sample
from tests.mutations.server import Server, Verdict


def arguments() -> argparse.Namespace:
    """Return the arguments of the command."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument(
        "--files", nargs="+", default=["*"], metavar="GROUP", help="groups of generated.GROUPS, by glob"
    )
    parser.add_argument("--count", type=int, default=100, help="about how many mutants to judge (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0, those that floors were set by)")
    parser.add_argument("--list", action="store_true", help="print the sample and judge nothing")
    parser.add_argument("--write", action="store_true", help="set the floors by what is measured, one mutant below it")
    return parser.parse_args()


def was_noticed(verdict: Verdict) -> bool:
    """A judge that never ends says that something is wrong, too."""
    return verdict.noticed or verdict.status in (-signal.SIGXCPU, -signal.SIGALRM)


def describe(mutant: Generated) -> str:
    """Return where a mutant is, and its change in one line."""
    before, after = (" ".join(text.split()) for text in (mutant.before, mutant.after))
    return f"{mutant.file}:{mutant.line}  {mutant.change}: {before}  ->  {after}"


def main() -> int:
    """Judge, print what survives and the shares; return 1 if one is below its floor."""
    asked = arguments()
    groups = [group for group in GROUPS if any(fnmatch.fnmatch(group, pattern) for pattern in asked.files)]
    chosen = list(sample(groups, asked.count, asked.seed))
    if asked.list:
        for group, mutant in chosen:
            print(f"{group:28} {describe(mutant)}")
        return 0
    servers: dict[bool, Server] = {}
    noticed, judged = defaultdict(int), defaultdict(int)
    for group, mutant in chosen:
        judges, began = GROUPS[group], time.monotonic()
        if judges.interpreted not in servers:
            servers[judges.interpreted] = Server(judges.interpreted)
        verdict = servers[judges.interpreted].run(mutant.file, mutant.text(), judges.tests)
        judged[group] += 1
        noticed[group] += was_noticed(verdict)
        word = "noticed" if was_noticed(verdict) else "SURVIVES" if verdict.status == 0 else f"ended {verdict.status}"
        print(f"{word:8} {time.monotonic() - began:5.1f} s  {describe(mutant)}", flush=True)
    for server in servers.values():
        server.close()
    known, low = floors(), []
    for group, count in judged.items():
        share, floor = noticed[group] / count, known.get(group, {}).get("floor", 0.0)
        print(f"{group:28} {noticed[group]:3} of {count:3} noticed, {share:.2f}; floor {floor:.2f}")
        low += [group] if share < floor else []
        floor = max(0, noticed[group] - 1) / count
        known[group] = {"judged": count, "noticed": noticed[group], "floor": round(floor, 2)}
    print(f"{sum(noticed.values())} of {sum(judged.values())} noticed")
    if asked.write:
        FLOORS.write_text(json.dumps(known, indent=1) + "\n")
    for group in low:
        print(f"{group}: fewer are noticed than the floor in {FLOORS.name} says", file=sys.stderr)
    return bool(low) and not asked.write


if __name__ == "__main__":
    sys.exit(main())
