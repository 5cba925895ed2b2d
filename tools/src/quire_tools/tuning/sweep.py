"""Time every variant on cases drawn at random, and keep each case's times as a line of JSON.

Other cores compile the variants of the next cases meanwhile. A case is timed as soon as all of its kernels are
compiled. Lines are only appended, so what was measured before a sweep is cut off is kept, and the same command goes on
after it. A case that was begun is not begun again: it may be the one that has lost the device.
"""

import gc
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from quire.targets import Target, _prepare_process
from quire_tools.tuning.drawn import DrawnCase, draw, in_words
from quire_tools.tuning.timing import Session, candidates, compile_variant

AHEAD = 30  # cases whose kernels are asked for before they are timed
Measure = Callable[[DrawnCase, list[str]], dict[str, dict[str, Any]]]


def measure_here(
    case: DrawnCase, names: list[str], millis: float, device: torch.device, before: Callable[[], object] = int
) -> dict[str, dict[str, Any]]:
    """Return the times of some variants of a case, on a device of this process; `before` is called before each step."""
    before()
    session = Session(case, device)
    for name in names:
        before()
        session.prepare(name)
    before()
    session.time_all(millis)
    found = session.times()
    session.ready.clear()
    session.synchronise()
    del session
    gc.collect()
    return found


class Compilations:
    """Compilations that other processes make, by the kernels that they need.

    Args:
        target: what is compiled for.
        processes: how many compile at once.
        compile_one: `compile_variant`, or what takes its place in a test.
    """

    def __init__(self, target: Target, processes: int, compile_one: Callable[..., Any] = compile_variant) -> None:
        context = multiprocessing.get_context("spawn")
        self.pool = ProcessPoolExecutor(processes, context, _prepare_process) if processes else None
        self.target, self.compile_one = target, compile_one
        self.found: dict[Hashable, Future[Any]] = {}

    def ask(self, case: DrawnCase, families: tuple[str, ...] = ()) -> dict[str, Future[Any]]:
        """Return a future for each variant of a case; of these kernels alone, if there are any."""
        asked: dict[str, Future[Any]] = {}
        for name, launch in candidates(case, self.target.properties).items():
            if families and name.split()[0] not in families:
                continue
            key = case.spec, case.page_size, launch.compile_keys()
            if key not in self.found:
                if self.pool is None:
                    self.found[key] = Future()
                    self.found[key].set_result((0.0, []))
                else:
                    self.found[key] = self.pool.submit(self.compile_one, case, name, self.target)
            asked[name] = self.found[key]
        return asked

    def stop(self) -> None:
        """End all processes, whatever they do."""
        if self.pool is not None:
            processes = list(getattr(self.pool, "_processes", {}).values())
            self.pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()


def sweep(
    path: Path,
    header: dict[str, Any],
    seed: int,
    count: int,
    compilations: Compilations,
    measure: Measure,
    seconds: float,
    say: Callable[[str], None] = print,
    only: str = "",
    families: tuple[str, ...] = (),
) -> int:
    """Time variants of drawn cases, and write a line for each case.

    Args:
        path: of the records; cases that were begun in them are left out.
        header: the first line: what the numbers belong to.
        seed: of the cases.
        count: how many cases, at most.
        compilations: what compiles ahead.
        measure: returns the times of some variants of a case.
        seconds: no case is begun after so many.
        say: takes a line for each case.
        only: leave out cases whose words don't contain this.
        families: leave out variants of other kernels than these, if there are any, and cases without two of theirs.

    Returns:
        How many cases were timed.
    """
    begun, done, earlier = time.perf_counter(), 0, names_begun(path)
    wanted = (case for case in draw(seed) if only in in_words(case))
    cases = (case for case in islice(wanted, count) if case.name not in earlier)
    pending: list[tuple[DrawnCase, dict[str, Future[Any]]]] = []

    def spent() -> float:
        return time.perf_counter() - begun

    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        while spent() < seconds:
            while len(pending) < AHEAD and (case := next(cases, None)) is not None:
                asked = compilations.ask(case, families)
                if not families or len(asked) > 1:
                    pending.append((case, asked))
            if not pending:
                break
            ready = next((i for i, (_, asked) in enumerate(pending) if all(f.done() for f in asked.values())), None)
            if ready is None:
                waiting = [future for _, asked in pending for future in asked.values() if not future.done()]
                wait(waiting, timeout=max(0.05, min(5.0, seconds - spent())), return_when=FIRST_COMPLETED)
                continue
            case, asked = pending.pop(ready)
            results = {name: future.result() for name, future in asked.items()}
            failed = {name: {"wrong": found} for name, (_, found) in results.items() if isinstance(found, str)}
            at = spent()
            file.write(json.dumps({"begun": case.name}) + "\n")
            file.flush()
            try:
                times = measure(case, [name for name in asked if name not in failed])
            except torch.cuda.OutOfMemoryError as error:
                times = {"": {"wrong": str(error)[:100]}}
            except Exception:
                say(f"{in_words(case)}: after this, the device is lost")
                raise
            line = case.as_json() | {"times": times | failed, "compiled": compiled_of(results)}
            line["seconds"] = [round(at, 2), round(spent() - at, 2)]
            file.write(json.dumps(line) + "\n")
            file.flush()
            done += 1
            say(f"{spent():6.1f} s  {spent() - at:5.2f} s  {len(times)} variants  {in_words(case)}")
    return done


def names_begun(path: Path) -> set[str]:
    """Return the names of the cases that were begun in a file of records, if there is one."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return {json.loads(line)["begun"] for line in lines if line.startswith('{"begun"') and line.endswith("}")}


def compiled_of(results: dict[str, tuple[float, Any]]) -> dict[str, list[Any]]:
    """Return what variants compiled to: seconds, then registers, spills, shared memory and programs an SM of each."""
    found: dict[str, list[Any]] = {}
    for name, (seconds, kernels) in results.items():
        if not isinstance(kernels, str):
            numbers = [[k["kernel"], k["registers"], k["spills"], k["shared"], k["held"]] for k in kernels]
            found[name] = [round(seconds, 1), *numbers]
    return found


def cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0))
