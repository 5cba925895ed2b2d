"""Fit the numbers of variants to the records of a sweep, and judge choices by them on other seeds.

Each variant of a kind of spec has eight numbers (`quire.dispatch.predict.Numbers`): a guess from floors of bytes and
products (`quire.kernels.work.guess`) times a factor each. Factors are fitted by least squares of the logarithms of
times, with the Levenberg-Marquardt method: of all variants that are used alike, of those of a kind of spec, and of each
one. What few cases say little about stays near the factors before.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from quire.dispatch.device import DeviceProperties
from quire.dispatch.predict import POWER, Numbers, Work, micros, times
from quire.kernels.choose import family_of, kind_of
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.work import guess, scenarios, work_of
from quire_tools.tuning.drawn import DrawnCase, case_of
from quire_tools.tuning.timing import HALF, candidates

SIGMA, SIGMA_OF_KIND, SIGMA_OF_VARIANT = 2.0, 0.7, 0.4  # of the logarithms of factors, around those before
NOISE, NOISE_OF_ROUGH = 0.06, 0.2  # of the logarithm of a time


@dataclass(frozen=True)
class Seen:
    """A variant that was timed on a case.

    Attributes:
        variant: its name.
        work: what it did.
        bounded: what it may do, for who knows the bounds of the batch alone, and how much that counts.
        micros: what it took.
        guess: its numbers, if nothing were measured.
        is_variant: whether it may be chosen; not with half the partitions, whose times tell what an item costs.
        is_rough: whether it was found hopeless, and its time is rough.
    """

    variant: str
    work: Work
    bounded: tuple[tuple[float, Work], ...]
    micros: float
    guess: Numbers
    is_variant: bool = True
    is_rough: bool = False


@dataclass(frozen=True)
class Timed:
    """A case that was timed.

    Attributes:
        case: the batch.
        kind: of spec.
        seen: what was timed.
        now: µs of what was chosen when the sweep was made; 0 where that was not timed.
    """

    case: DrawnCase
    kind: str
    seen: tuple[Seen, ...]
    now: float = 0.0

    @property
    def variants(self) -> list[Seen]:
        """What may be chosen."""
        return [seen for seen in self.seen if seen.is_variant]

    @property
    def best(self) -> float:
        """The least time of any variant."""
        return min(seen.micros for seen in self.variants)

    @property
    def best_variant(self) -> str:
        """The name of the variant that took the least time."""
        return min(self.variants, key=lambda seen: seen.micros).variant

    @property
    def seed(self) -> str:
        """The seed that the case is of."""
        return self.case.name.split("/")[0]


@dataclass(frozen=True)
class Fitted:
    """What was fitted.

    Attributes:
        kinds: numbers, by kind of spec and variant.
        factors: of what is used alike, by `family_of`: on a guess of the numbers of what was not measured.
    """

    kinds: dict[str, dict[str, Numbers]]
    factors: dict[str, Numbers]


def read_records(paths: Iterable[Path]) -> tuple[dict[str, Any], list[Timed]]:
    """Read the records of sweeps: the first header, and the cases that were timed."""
    header: dict[str, Any] = {}
    found: list[Timed] = []
    for path in paths:
        for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                line = json.loads(text)
            except (ValueError, RecursionError):  # the last line of a sweep that was cut off, or something else
                continue
            if not isinstance(line, dict):
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
    lens, may_be = tuple((q, s, 1) for q, s in case.lens), scenarios(case.request(device))
    launches, times, found = candidates(case, device), line["times"], []
    for name, result in times.items():
        variant = name.removesuffix(HALF)
        micros = result.get("micros", result.get("rough"))
        if variant not in launches or micros is None:
            continue
        launch = launches[variant]
        if isinstance(launch, PortableLaunch) and result.get("partitions"):
            launch = replace(launch, num_partitions=result["partitions"])
        bounded = tuple((share, work_of(launch, some)) for share, some in may_be)
        is_variant, is_rough = not name.endswith(HALF), "rough" in result
        found.append(Seen(variant, work_of(launch, lens), bounded, micros, guess(launch), is_variant, is_rough))
    now, kind = times.get("now", {}).get("micros", 0.0), kind_of(case.spec, case.batch_invariant)
    return Timed(case, kind, tuple(found), now) if any(seen.is_variant for seen in found) else None


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


def fit_factors(seen: Sequence[Seen], prior: np.ndarray, sigma: float, steps: int = 60) -> np.ndarray:
    """Return the logarithms of factors that predict times best; `sigma` is how far they may be from `prior`."""
    works = np.array([s.work for s in seen], dtype=np.float64)
    guesses, target = np.array([s.guess for s in seen]).T, np.log(np.array([s.micros for s in seen]))
    noise = np.array([NOISE_OF_ROUGH if s.is_rough else NOISE for s in seen])

    def residuals(x: np.ndarray) -> np.ndarray:
        errors = (np.log(predicted(works, guesses * np.exp(x)[:, None])) - target) / noise
        errors = np.sign(errors) * np.sqrt(2 * (np.sqrt(1 + errors * errors) - 1))  # outliers count less
        return np.concatenate([errors, (x - prior) / sigma])

    x, damping = prior.copy(), 1.0
    now = residuals(x)
    for _ in range(steps):
        slopes = np.stack([(residuals(x + 1e-4 * step) - now) / 1e-4 for step in np.eye(len(x))], axis=1)
        gradient, hessian = slopes.T @ now, slopes.T @ slopes
        step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient)
        trial = np.clip(x - step, prior - 6, prior + 6)
        after = residuals(trial)
        if after @ after < now @ now:
            gained = now @ now - after @ after
            x, now, damping = trial, after, max(1e-6, damping / 4)
            if gained < 1e-6 * (now @ now):
                break
        else:
            damping = min(1e8, damping * 4)
    return x


def numbers_from(guessed: Numbers, factors: np.ndarray) -> Numbers:
    """Return a guess times factors, given as logarithms."""
    return Numbers(*(float(f"{value:.4g}") for value in np.array(guessed) * np.exp(factors)))


def fit_all(timed: Sequence[Timed]) -> Fitted:
    """Fit the numbers of each variant of each kind of spec."""
    by_family: dict[str, list[Seen]] = defaultdict(list)
    by_kind: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    by_variant: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for each in timed:
        for seen in each.seen:
            family = family_of(seen.variant)
            by_family[family].append(seen)
            by_kind[each.kind, family].append(seen)
            by_variant[each.kind, seen.variant].append(seen)
    none = np.zeros(len(Numbers._fields))
    of_family = {family: fit_factors(seen, none, SIGMA) for family, seen in by_family.items()}
    of_kind = {key: fit_factors(seen, of_family[key[1]], SIGMA_OF_KIND) for key, seen in by_kind.items()}
    kinds: dict[str, dict[str, Numbers]] = defaultdict(dict)
    for (kind, variant), seen in sorted(by_variant.items()):
        factors = fit_factors(seen, of_kind[kind, family_of(variant)], SIGMA_OF_VARIANT)
        kinds[kind][variant] = numbers_from(seen[0].guess, factors)
    ones = Numbers(*[1.0] * len(Numbers._fields))
    return Fitted(dict(kinds), {family: numbers_from(ones, factors) for family, factors in of_family.items()})


def numbers_of(fitted: Fitted, kind: str, seen: Seen) -> Numbers:
    """Return the numbers of a variant; a guess times the factors of those that are used alike if it was not timed."""
    own = fitted.kinds.get(kind, {}).get(seen.variant)
    factors = fitted.factors.get(family_of(seen.variant))
    return own or (seen.guess if factors is None else times(seen.guess, factors))


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
        known = {seen: numbers_of(fitted, each.kind, seen) for seen in each.variants}
        cost = dict.fromkeys(known, 0.0)
        for i, (share, _) in enumerate(each.variants[0].bounded):
            taken = {seen: micros(seen.bounded[i][1], numbers) for seen, numbers in known.items()}
            for seen, time in taken.items():
                cost[seen] += share * time / min(taken.values())
        chosen = min(cost, key=cost.__getitem__)
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
        "regret_95": round(percentile(regrets), 3),
        "worst_regret": round(max(regrets), 3),
        "now_mean": round(statistics.geometric_mean(now), 4) if now else 0.0,
        "now_worst": round(max(now), 3) if now else 0.0,
        "median_error": round(statistics.median(errors), 4),
        "error_95": round(percentile(errors), 4),
    }


def percentile(numbers: Sequence[float]) -> float:
    """Return the number that 95 % of some numbers do not exceed."""
    return sorted(numbers)[math.ceil(0.95 * len(numbers)) - 1]


def cross_judged(timed: Sequence[Timed]) -> list[Judged]:
    """Judge the cases of each seed by numbers that were fitted to the others."""
    found: list[Judged] = []
    seeds = sorted({each.seed for each in timed})
    for seed in seeds if len(seeds) > 1 else ():
        fitted = fit_all([each for each in timed if each.seed != seed])
        found += judge(fitted, [each for each in timed if each.seed == seed])
    return found


def as_json(fitted: Fitted, provenance: dict[str, Any], properties: dict[str, Any]) -> str:
    """Return numbers as the file that plans read."""

    def listed(numbers: dict[str, Numbers], indent: str) -> str:
        return ",\n".join(f"{indent}{json.dumps(name)}: {json.dumps(own)}" for name, own in sorted(numbers.items()))

    kinds = [
        f"    {json.dumps(kind)}: {{\n{listed(variants, '      ')}}}" for kind, variants in sorted(fitted.kinds.items())
    ]
    head = json.dumps(provenance | {"numbers": ", ".join(Numbers._fields)})
    parts = '  "factors": {\n' + listed(fitted.factors, "    ") + '},\n  "kinds": {\n' + ",\n".join(kinds) + "}"
    return f'{{\n  "fitted_on": {head},\n  "properties": {json.dumps(properties)},\n{parts}\n}}\n'
