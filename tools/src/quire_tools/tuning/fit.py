"""Fit the numbers of variants to the records of a sweep, and judge choices by them on other seeds.

Each variant of a kind of spec has eight numbers (`quire.dispatch.predict.Numbers`): a guess from floors of bytes and
products (`quire.kernels.work.guess`) times a factor each. Factors are fitted by least squares of the logarithms of
times, with the Levenberg-Marquardt method: of all variants that are used alike, of those of heads of some width, of
those of a kind of spec, and of each one. What few cases say little about stays near the factors before.

A choice compares the variants of a case. So those of a kind are fitted together in the end, and what they err by alike
counts less than what they differ by.

Few records say enough about a few kinds only. `fit_around` begins with the numbers that plans follow now, stays near
them, and leaves the other kinds as they are.
"""

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quire.dispatch.constants import constants_of
from quire.dispatch.device import DeviceProperties
from quire.dispatch.predict import POWER, POWER_ALONE, Numbers, micros, times
from quire.dispatch.request import Options
from quire.kernels.choose import family_of, least, like, numbers_of_kind, variants
from quire_tools.tuning.records import Seen, Timed

# Of the logarithms of factors, around those before.
SIGMA, SIGMA_OF_USE, SIGMA_OF_KIND, SIGMA_OF_VARIANT, SIGMA_AROUND = 2.0, 0.7, 0.7, 1.0, 0.15
NOISE, NOISE_OF_ROUGH = 0.05, 0.2  # of the logarithm of a time
NOISE_OF_SLOWER = 0.15  # more of it, times the logarithm of a time over the best one: choices are among the best
ALIKE = 0.7  # share of the mean error of a case's variants that counts for none of them


@dataclass(frozen=True)
class Fitted:
    """What was fitted.

    Attributes:
        kinds: numbers, by kind of spec and variant.
        factors: of what is used alike, by `family_of`: on a guess of the numbers of what was not measured.
    """

    kinds: dict[str, dict[str, Numbers]]
    factors: dict[str, Numbers]


def predicted(works: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Return what `quire.dispatch.predict.micros` does, for many rows of `Work`."""
    launch, item, tile, sm_tile, megabyte, combine, partial, partial_megabyte = numbers
    slots, sms, programs, items, tiles, longest, nbytes, partials, partial_bytes, loads, width = works.T
    programs = np.maximum(programs, 1e-9)
    rounds, share, mean = programs / slots, programs / sms, tiles / programs
    equal = np.minimum(1.0, mean / np.maximum(longest, 1e-9))
    rounds, share = (number + (np.ceil(number) - number) * equal for number in (rounds, share))
    path = np.maximum(longest, rounds * mean) * width * tile + np.maximum(1.0, rounds) * items / programs * item
    products, memory = share * mean * np.maximum(width * sm_tile, loads), nbytes * megabyte / 1048576
    power = np.where(slots > sms, POWER, POWER_ALONE)
    time = launch + (np.maximum(path, products) ** power + memory**power) ** (1 / power)
    return time + (partials > 0) * (combine + partials * partial + partial_bytes * partial_megabyte / 1048576)


@dataclass(frozen=True)
class Rows:
    """What was timed, as arrays with a row for each time.

    Attributes:
        works: rows of `Work`.
        guesses: rows of `Numbers`.
        target: logarithms of times.
        noise: of these.
        which: of the factors that are fitted, which belong to a row.
        case: the number of its case.
    """

    works: np.ndarray
    guesses: np.ndarray
    target: np.ndarray
    noise: np.ndarray
    which: np.ndarray
    case: np.ndarray

    def errors(self, x: np.ndarray) -> np.ndarray:
        """Return the logarithms of predicted over measured times."""
        return np.log(predicted(self.works, (self.guesses * np.exp(x[self.which])).T)) - self.target

    def less_alike(self, of_rows: np.ndarray, alike: float) -> np.ndarray:
        """Return numbers of rows over the noise, less a share of the mean of each case."""
        weights = 1 / self.noise**2
        total = np.zeros((self.case.max() + 1, of_rows.shape[1]))
        np.add.at(total, self.case, weights[:, None] * of_rows)
        mean = total / np.bincount(self.case, weights)[:, None]
        return (of_rows - alike * mean[self.case]) / self.noise[:, None]


def rows_of(seen: Sequence[Seen], which: Sequence[int], case: Sequence[int]) -> Rows:
    """Return what was timed as arrays."""
    noise = np.array([NOISE_OF_ROUGH if s.is_rough else NOISE for s in seen])
    noise += NOISE_OF_SLOWER * np.maximum(0.0, np.log(np.array([s.over_best for s in seen])))
    works, guesses = (np.array(rows, dtype=np.float64) for rows in ([s.work for s in seen], [s.guess for s in seen]))
    target = np.log(np.array([s.micros for s in seen]))
    return Rows(works, guesses, target, noise, np.array(which), np.array(case))


def fit_factors(rows: Rows, prior: np.ndarray, sigma: float, alike: float = 0.0, steps: int = 60) -> np.ndarray:
    """Return the logarithms of factors that predict times best, a row for each that `rows.which` names.

    Args:
        rows: what was timed.
        prior: the logarithms to begin with.
        sigma: how far they may be from these.
        alike: share of the mean error of a case that counts for none of its times.
        steps: the most that are made.
    """
    size, count = prior.shape[1], len(rows.target)

    def tried(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
        errors = rows.errors(x)
        whole = rows.less_alike(errors[:, None], alike)[:, 0]
        robust = np.sign(whole) * np.sqrt(2 * (np.sqrt(1 + whole * whole) - 1))  # outliers count less
        away = (x - prior) / sigma
        return errors, np.stack([whole, robust]), float(robust @ robust + np.sum(away * away))

    x, damping = prior.copy(), 1.0
    errors, (whole, robust), cost = tried(x)
    for _ in range(steps):
        slopes = np.zeros((count, prior.size))
        for i in range(size):
            moved = x.copy()
            moved[:, i] += 1e-4
            slopes[np.arange(count), rows.which * size + i] = (rows.errors(moved) - errors) / 1e-4
        shape = np.where(np.abs(robust) > 1e-9, whole / np.sqrt(1 + whole * whole) / np.where(robust, robust, 1), 1.0)
        slopes = rows.less_alike(slopes, alike) * shape[:, None]
        gradient = slopes.T @ robust + (x - prior).ravel() / sigma**2
        hessian = slopes.T @ slopes + np.eye(prior.size) / sigma**2
        while True:
            step = np.linalg.solve(hessian + damping * np.diag(np.diag(hessian)), gradient).reshape(x.shape)
            trial = x - np.clip(step, -1, 1)
            *after, least = tried(trial)
            if least < cost:
                break
            damping *= 4
            if damping > 1e8:
                return x
        gained, damping = cost - least, max(1e-6, damping / 4)
        x, (errors, (whole, robust)), cost = trial, after, least
        if gained < 1e-5 * cost:
            break
    return x


def numbers_from(guessed: Numbers, factors: np.ndarray) -> Numbers:
    """Return a guess times factors, given as logarithms."""
    return Numbers(*(float(f"{value:.4g}") for value in np.array(guessed) * np.exp(factors)))


def fit_all(timed: Sequence[Timed]) -> Fitted:
    """Fit the numbers of each variant of each kind of spec."""
    by_family: dict[str, list[Seen]] = defaultdict(list)
    by_width: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    by_kind: dict[tuple[str, str], list[Seen]] = defaultdict(list)
    for each in timed:
        for seen in (seen for seen in each.seen if seen.after is None):
            family = family_of(seen.variant)
            by_family[family].append(seen)
            by_width[each.kind.removesuffix(" invariant"), family].append(seen)
            by_kind[each.kind, family].append(seen)

    def fitted(seen: list[Seen], prior: np.ndarray, sigma: float) -> np.ndarray:
        return fit_factors(rows_of(seen, [0] * len(seen), range(len(seen))), prior, sigma)

    none = np.zeros((1, len(Numbers._fields)))
    of_family: dict[str, np.ndarray] = {}
    for family in sorted(by_family, key=lambda family: not family.endswith("whole")):
        whole = of_family.get(f"{family.split()[0]} whole")  # whose loop over tiles is the same
        prior, sigma = (none, SIGMA) if whole is None else (whole, SIGMA_OF_USE)
        of_family[family] = fitted(by_family[family], prior, sigma)
    of_width = {key: fitted(seen, of_family[key[1]], SIGMA_OF_KIND) for key, seen in by_width.items()}
    of_kind: dict[tuple[str, str], np.ndarray] = {}
    for (kind, family), seen in by_kind.items():
        alike = kind.removesuffix(" invariant"), family
        is_all = len(seen) == len(by_width[alike])
        of_kind[kind, family] = of_width[alike] if is_all else fitted(seen, of_width[alike], SIGMA_OF_VARIANT)
    kinds = {
        kind: fit_kind(of_its(timed, kind), lambda name, kind=kind: of_kind[kind, family_of(name)], SIGMA_OF_VARIANT)
        for kind, _ in by_kind
    }
    ones = Numbers(*[1.0] * len(Numbers._fields))
    return Fitted(kinds, {family: numbers_from(ones, factors[0]) for family, factors in of_family.items()})


def fit_around(timed: Sequence[Timed], device: DeviceProperties) -> Fitted:
    """Fit the numbers of each kind of spec that was timed, near those that plans on the device follow now."""
    now = constants_of(device)
    plans = Fitted(dict(now.kinds), now.factors)
    none, found = np.zeros((1, len(Numbers._fields))), dict(now.kinds)
    for kind in sorted({each.kind for each in timed}):
        begun = [
            replace(each, seen=tuple(replace(seen, guess=numbers_of(plans, kind, seen)) for seen in each.seen))
            for each in of_its(timed, kind)
        ]
        found[kind] = now.kinds.get(kind, {}) | fit_kind(begun, lambda name: none, SIGMA_AROUND)
    return Fitted(found, now.factors)


def of_its(timed: Sequence[Timed], kind: str) -> list[Timed]:
    """Return the cases of a kind of spec."""
    return [each for each in timed if each.kind == kind]


def fit_kind(timed: Sequence[Timed], prior: Callable[[str], np.ndarray], sigma: float) -> dict[str, Numbers]:
    """Fit the numbers of each variant of a kind of spec, together.

    Args:
        timed: the cases of the kind.
        prior: returns the logarithms of a variant's factors to begin with, by its name.
        sigma: how far the logarithms may be from these.
    """
    timed = [each for each in timed if any(seen.after is None for seen in each.seen)]
    seen = [(number, each) for number, case in enumerate(timed) for each in case.seen if each.after is None]
    if not seen:
        return {}
    guesses = {each.variant: each.guess for _, each in seen}
    names = sorted(guesses)
    rows = rows_of([each for _, each in seen], [names.index(each.variant) for _, each in seen], [n for n, _ in seen])
    factors = fit_factors(rows, np.concatenate([prior(name) for name in names]), sigma, ALIKE)
    return {name: numbers_from(guesses[name], own) for name, own in zip(names, factors, strict=True)}


def numbers_of(fitted: Fitted, kind: str, seen: Seen) -> Numbers:
    """Return the numbers of a variant, of one like it, or a guess times the factors of those that are used alike."""
    of_kind = fitted.kinds.get(kind, {})
    name = seen.variant.replace("mixed", "whole")
    own = of_kind.get(name) or like(name, of_kind)
    factors = fitted.factors.get(family_of(name))
    return own or (seen.guess if factors is None else times(seen.guess, factors))


def time_of(fitted: Fitted, kind: str, seen: Seen, scenario: int | None = None) -> float:
    """Return the predicted time of a variant; for the lengths of a scenario, where one is given."""
    work = seen.work if scenario is None else seen.bounded[scenario][1]
    time = micros(work, numbers_of(fitted, kind, seen))
    return time if seen.after is None else max(time, time_of(fitted, kind, seen.after, scenario))


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
        cost = dict.fromkeys(each.variants, 0.0)
        for i, (share, _) in enumerate(each.variants[0].bounded):
            taken = {seen: time_of(fitted, each.kind, seen, i) for seen in cost}
            for seen, time in taken.items():
                cost[seen] += share * time / min(taken.values())
        chosen = min(cost, key=cost.__getitem__)
        errors = {seen.variant: time_of(fitted, each.kind, seen) / seen.micros for seen in cost}
        found.append(Judged(each, chosen.variant, chosen.micros / each.best, errors))
    return found


def judge_now(timed: Sequence[Timed], device: DeviceProperties) -> list[Judged]:
    """Judge what plans on a device choose now. Cases of which that was not timed, such as to decode, are left out."""
    factors, found = constants_of(device).factors, list[Judged]()
    for each in timed:
        case = each.case
        launches, _ = variants(case.request(device), Options(batch_invariant=case.batch_invariant))
        first = least(launches)[0]
        chosen = next(name for name, launch in launches.items() if launch is first)
        micros = {seen.variant: seen.micros for seen in each.variants}
        if chosen in micros:
            numbers = Fitted({each.kind: numbers_of_kind(case.spec, device, case.batch_invariant)}, factors)
            errors = judge(numbers, [each])[0].errors
            found.append(Judged(each, chosen, micros[chosen] / each.best, errors))
    return found


def summary(judged: Sequence[Judged]) -> dict[str, float]:
    """Return the regret, in geometric mean and at worst, and the error of predicted times of what was chosen."""
    if not judged:
        return {"cases": 0}
    regrets = [each.regret for each in judged]
    errors = sorted(abs(each.errors[each.variant] - 1) for each in judged)
    return {
        "cases": len(judged),
        "mean_regret": round(statistics.geometric_mean(regrets), 4),
        "regret_95": round(percentile(regrets), 3),
        "worst_regret": round(max(regrets), 3),
        "median_error": round(statistics.median(errors), 4),
        "error_95": round(percentile(errors), 4),
    }


def percentile(numbers: Sequence[float]) -> float:
    """Return the number that 95 % of some numbers do not exceed."""
    return sorted(numbers)[math.ceil(0.95 * len(numbers)) - 1]


def cross_judged(timed: Sequence[Timed], fit: Callable[[list[Timed]], Fitted] = fit_all) -> list[Judged]:
    """Judge the cases of each seed by numbers that were fitted to the others."""
    found: list[Judged] = []
    seeds = sorted({each.seed for each in timed})
    for seed in seeds if len(seeds) > 1 else ():
        fitted = fit([each for each in timed if each.seed != seed])
        found += judge(fitted, [each for each in timed if each.seed == seed])
    return found


def as_json(fitted: Fitted, provenance: dict[str, Any], properties: dict[str, Any]) -> str:
    """Return numbers as the file that plans read. What decodes a cache is not timed, and keeps the factors before."""

    def listed(numbers: dict[str, Numbers], indent: str) -> str:
        return ",\n".join(f"{indent}{json.dumps(name)}: {json.dumps(own)}" for name, own in sorted(numbers.items()))

    kinds = [
        f"    {json.dumps(kind)}: {{\n{listed(variants, '      ')}}}" for kind, variants in sorted(fitted.kinds.items())
    ]
    head = json.dumps(provenance | {"numbers": ", ".join(Numbers._fields)})
    before = constants_of(DeviceProperties(**properties)).factors
    factors = {name: own for name, own in before.items() if name == "decoded"} | fitted.factors
    parts = '  "factors": {\n' + listed(factors, "    ") + '},\n  "kinds": {\n' + ",\n".join(kinds) + "}"
    return f'{{\n  "fitted_on": {head},\n  "properties": {json.dumps(properties)},\n{parts}\n}}\n'
