"""Fit the numbers of variants to the records of a sweep, and judge choices by them on other seeds.

Each variant of a kind of spec has eight numbers (`quire.dispatch.predict.Numbers`). They are fitted by least squares of
the logarithms of times, with the Levenberg-Marquardt method. What few cases say little about stays near the numbers of
all variants of the kind, and those near a first guess.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quire.dispatch.device import DeviceProperties
from quire.dispatch.predict import POWER, Numbers, Work, micros
from quire.kernels.variants import kind_of
from quire.kernels.work import lens_of, work_of
from quire_tools.tuning.drawn import DrawnCase, case_of
from quire_tools.tuning.timing import HALF, NOW, candidates

GUESS = Numbers(3.0, 1.0, 0.5, 0.25, 0.24, 1.0, 0.05, 0.3)  # µs
SIGMA_OF_GUESS, SIGMA_OF_KIND = 2.0, 0.5  # of logarithms, around the guess and around the numbers of the kind
NOISE = 0.06  # of the logarithm of a time


@dataclass(frozen=True)
class Seen:
    """A variant that was timed on a case.

    Attributes:
        variant: its name.
        work: what it did.
        bounded: what it is taken to do by who knows the bounds of the batch alone.
        micros: what it took.
    """

    variant: str
    work: Work
    bounded: Work
    micros: float


@dataclass(frozen=True)
class Timed:
    """A case that was timed.

    Attributes:
        case: the batch.
        kind: of spec.
        seen: by variant.
        rough: variants that were found hopeless, and what they took, roughly.
        others: what was timed and is no variant: one with half the partitions, by whose time numbers are fitted too.
        now: µs of what is chosen without numbers; 0 where that was not timed.
    """

    case: DrawnCase
    kind: str
    seen: tuple[Seen, ...]
    rough: dict[str, float]
    others: tuple[Seen, ...] = ()
    now: float = 0.0

    @property
    def best(self) -> float:
        """The least time of any variant."""
        return min(seen.micros for seen in self.seen)

    @property
    def seed(self) -> str:
        """The seed that the case is of."""
        return self.case.name.split("/")[0]


Fitted = dict[str, dict[str, Numbers]]  # by kind of spec, and variant or family


def read_records(paths: Iterable[Path]) -> tuple[dict[str, Any], list[Timed]]:
    """Read the records of sweeps: the first header, and the cases that were timed."""
    header: dict[str, Any] = {}
    found: list[Timed] = []
    for path in paths:
        for text in path.read_text(encoding="utf-8").splitlines():
            try:
                line = json.loads(text)
            except ValueError:  # the last line of a sweep that was cut off
                continue
            if "properties" in line:
                header = header or line
                properties = DeviceProperties(**line["properties"])
            elif "times" in line and (timed := timed_of(line, properties)) is not None:  # pyright: ignore[reportPossiblyUnboundVariable]
                found.append(timed)
    return header, found


def timed_of(line: dict[str, Any], device: DeviceProperties) -> Timed | None:
    """Return the case of a line; None if no variant was timed."""
    case = case_of(line)
    lens, bounds = [(q, s, 1) for q, s in case.lens], lens_of(case.request(device))
    found, times = candidates(case, device), line["times"]
    seen, others = [], []
    for name, launch in found.items():
        if name != NOW and "micros" in times.get(name, {}):
            works = work_of(launch, lens), work_of(launch, bounds)
            (others if name.endswith(HALF) else seen).append(
                Seen(name.removesuffix(HALF), *works, times[name]["micros"])
            )
    rough = {name: result["rough"] for name, result in times.items() if "rough" in result}
    now, kind = times.get(NOW, {}).get("micros", 0.0), kind_of(case.spec, case.batch_invariant)
    return Timed(case, kind, tuple(seen), rough, tuple(others), now) if seen else None


def predicted(works: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return what `quire.dispatch.predict.micros` does, for many rows of `Work`."""
    launch, item, tile, sm_tile, megabyte, combine, partial, partial_megabyte = numbers
    slots, sms, programs, items, tiles, longest, nbytes, partials, partial_bytes = works.T
    programs = np.maximum(programs, 1e-9)
    rounds, mean = programs / slots, tiles / programs
    rounds = rounds + (np.ceil(rounds) - rounds) * np.minimum(1.0, mean / np.maximum(longest, 1e-9))
    path = np.maximum(longest * tile, rounds * mean * tile) + np.maximum(1.0, rounds) * items / programs * item
    products, memory = tiles * sm_tile / sms, nbytes * megabyte / 1048576
    time = launch + (path**POWER + products**POWER + memory**POWER) ** (1 / POWER)
    return time + (partials > 0) * (combine + partials * partial + partial_bytes * partial_megabyte / 1048576)


def fit_numbers(seen: Sequence[Seen], prior: Numbers, sigma: float, steps: int = 60) -> Numbers:
    """Return the numbers that predict times best; `sigma` is how far their logarithms may be from those of `prior`."""
    works = np.array([tuple(s.work) for s in seen], dtype=np.float64)
    target = np.log(np.array([s.micros for s in seen]))
    centre = np.log(np.array(prior))

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = (np.log(predicted(works, np.exp(x))) - target) / NOISE
        errors = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors * errors) - 1))  # outliers count less
        return np.concatenate([errors, (x - centre) / sigma])

    x, damping = centre.copy(), 1.0
    now = residuals(x)
    for _ in range(steps):
        slopes = np.stack([(residuals(x + 1e-4 * step) - now) / 1e-4 for step in np.eye(len(x))], axis=1)
        gradient, hessian = slopes.T @ now, slopes.T @ slopes
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
        trial = np.clip(x - step, centre - 6, centre + 6)
        after = residuals(trial)
        if after @ after < now @ now:
            gained = now @ now - after @ after
            x, now, damping = trial, after, max(1e-6, damping / 4)
            if gained < 1e-6 * (now @ now):
                break
        else:
            damping = min(1e8, damping * 4)
    return Numbers(*(float(f"{value:.4g}") for value in np.exp(x)))


def fit_all(timed: Sequence[Timed]) -> Fitted:
    """Fit the numbers of each variant of each kind of spec."""
    by_family: dict[str, list[Seen]] = defaultdict(list)
    by_kind: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    by_variant: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for each in timed:
        for seen in (*each.seen, *each.others):
            family = seen.variant.split()[0]
            by_family[family].append(seen)
            by_kind[each.kind, family].append(seen)
            by_variant[each.kind, seen.variant].append(seen)
    of_family = {family: fit_numbers(seen, GUESS, SIGMA_OF_GUESS) for family, seen in by_family.items()}
    of_kind = {key: fit_numbers(seen, of_family[key[1]], SIGMA_OF_KIND * 2) for key, seen in by_kind.items()}
    fitted: Fitted = defaultdict(dict)
    for (kind, variant), seen in sorted(by_variant.items()):
        fitted[kind][variant] = fit_numbers(seen, of_kind[kind, variant.split()[0]], SIGMA_OF_KIND)
    for (kind, family), numbers in of_kind.items():
        fitted[kind][family] = numbers
    return dict(fitted)


def numbers_of(fitted: Fitted, kind: str, variant: str) -> Numbers | None:
    """Return the numbers of a variant; those of its family where it was not timed, and None without any."""
    of_kind = fitted.get(kind, {})
    return of_kind.get(variant) or of_kind.get(variant.split()[0])


@dataclass(frozen=True)
class Judged:
    """A choice on a case.

    Attributes:
        timed: the case.
        variant: that was chosen.
        regret: its time over the least one.
        errors: of each variant, the predicted over the measured time.
    """

    timed: Timed
    variant: str
    regret: float
    errors: dict[str, float]


def judge(fitted: Fitted, timed: Sequence[Timed]) -> list[Judged]:
    """Judge what is chosen by the bounds of each case, and what is predicted by its lengths."""
    found: list[Judged] = []
    for each in timed:
        known = {seen: numbers for seen in each.seen if (numbers := numbers_of(fitted, each.kind, seen.variant))}
        if not known:
            continue
        chosen = min(known, key=lambda seen: micros(seen.bounded, known[seen]))
        errors = {seen.variant: micros(seen.work, numbers) / seen.micros for seen, numbers in known.items()}
        found.append(Judged(each, chosen.variant, chosen.micros / each.best, errors))
    return found


def summary(judged: Sequence[Judged]) -> dict[str, float]:
    """Return the regret, in geometric mean and at worst, and the error of predicted times of what was chosen."""
    if not judged:
        return {"cases": 0}
    regrets = [each.regret for each in judged]
    now = [each.timed.now / each.timed.best for each in judged if each.timed.now]
    errors = sorted(abs(each.errors[each.variant] - 1) for each in judged)
    return {
        "cases": len(judged),
        "mean_regret": round(statistics.geometric_mean(regrets), 4),
        "worst_regret": round(max(regrets), 3),
        "now_mean": round(statistics.geometric_mean(now), 4) if now else 0.0,
        "now_worst": round(max(now), 3) if now else 0.0,
        "median_error": round(statistics.median(errors), 4),
        "error_95": round(errors[min(len(errors) - 1, math.ceil(0.95 * len(errors)) - 1)], 4),
    }


def cross_judged(timed: Sequence[Timed]) -> list[Judged]:
    """Judge the cases of each seed by numbers that were fitted to the others."""
    found: list[Judged] = []
    for seed in sorted({each.seed for each in timed}):
        fitted = fit_all([each for each in timed if each.seed != seed])
        found += judge(fitted, [each for each in timed if each.seed == seed])
    return found


def as_json(fitted: Fitted, provenance: dict[str, Any]) -> str:
    """Return numbers as the file that plans read."""
    kinds = []
    for kind, variants in sorted(fitted.items()):
        lines = ",\n".join(f"      {json.dumps(name)}: {json.dumps(numbers)}" for name, numbers in variants.items())
        kinds.append(f"    {json.dumps(kind)}: {{\n{lines}}}")
    names = ", ".join(Numbers._fields)
    head = json.dumps(provenance | {"numbers": names})
    return '{\n  "fitted_on": ' + head + ',\n  "kinds": {\n' + ",\n".join(kinds) + "}\n}\n"
