"""The records of sweeps: cases, what each variant did, and what it took."""

import json
import lzma
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from quire.dispatch.device import DeviceProperties
from quire.dispatch.predict import Numbers, Work
from quire.dispatch.request import Options
from quire.kernels.choose import kind_of, variant_of, variants
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.work import Lens, guess, scenarios, work_of
from quire_tools.tuning.drawn import DrawnCase, case_of
from quire_tools.tuning.timing import HALF, candidates


@dataclass(frozen=True)
class Seen:
    """A variant that was timed on a case.

    Attributes:
        variant: its name.
        work: what it did.
        bounded: what it may do, for who knows the bounds of the batch alone, and how much that counts.
        micros: what it took.
        guess: its numbers, if nothing were measured.
        is_variant: whether it may be chosen; not what a fallback alone may be, nor with half the partitions, whose
            times tell what an item costs.
        is_rough: whether it was found hopeless, and its time is rough.
        over_best: its time over that of the best variant of the case.
        after: the portable kernel's launch for decoding sequences, in the same grid; such a variant has the numbers of
            one without, and is judged, not fitted.
    """

    variant: str
    work: Work
    bounded: tuple[tuple[float, Work], ...]
    micros: float
    guess: Numbers
    is_variant: bool = True
    is_rough: bool = False
    over_best: float = 1.0
    after: "Seen | None" = None


@dataclass(frozen=True)
class Timed:
    """A case that was timed.

    Attributes:
        case: the batch.
        kind: of spec.
        seen: what was timed.
    """

    case: DrawnCase
    kind: str
    seen: tuple[Seen, ...]

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


def read_records(paths: Iterable[Path]) -> tuple[dict[str, Any], list[Timed]]:
    """Read the records of sweeps, also compressed ones (.xz): the first header, and the cases that were timed."""
    header: dict[str, Any] = {}
    found: list[Timed] = []
    for path in paths:
        content = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
        for text in content.decode(errors="replace").splitlines():
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
    may_be_chosen, _ = variants(case.request(device), Options(batch_invariant=case.batch_invariant))
    for name, result in times.items():
        variant = name.removesuffix(HALF)
        micros = result.get("micros", result.get("rough"))
        if variant not in launches or micros is None:
            continue
        launch = launches[variant]
        if isinstance(launch, PortableLaunch) and result.get("partitions"):
            launch = replace(launch, num_partitions=result["partitions"])
        bounded = tuple((share, work_of(launch, some)) for share, some in may_be)
        is_variant, is_rough = name in may_be_chosen, "rough" in result
        seen = Seen(variant, work_of(launch, lens), bounded, micros, guess(launch), is_variant, is_rough)
        if isinstance(launch, PortableLaunch) and launch.decode is not None:
            seen = replace(seen, after=after(launch.decode, lens, may_be))
        found.append(seen)
    best = min((seen.micros for seen in found if seen.is_variant), default=0.0)
    kind = kind_of(case.spec, case.batch_invariant)
    return Timed(case, kind, tuple(replace(s, over_best=s.micros / best) for s in found)) if best else None


def after(decode: PortableLaunch, lens: Lens, may_be: list[tuple[float, Lens]]) -> Seen:
    """Return the launch for decoding sequences of a batch that has some lengths, or may have others."""

    def work(lens: Lens) -> Work:
        decoding = tuple(each for each in lens if each[0] <= decode.max_decode_queries)
        return work_of(decode, decoding) if decoding else Work(1, 1, 0, 0, 0, 0, 0)

    return Seen(
        variant_of(decode), work(lens), tuple((share, work(some)) for share, some in may_be), 0.0, guess(decode)
    )
