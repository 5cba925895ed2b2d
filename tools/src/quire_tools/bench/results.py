"""The results of a run of the bench as typed rows, and the file `results.json` that holds them."""

import json
import statistics
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
import triton

import quire
from quire.targets import Compiled, title_of
from quire.version import commit as commit_here
from quire_tools.bench.case import Case, Kind, Model
from quire_tools.bench.cases import sets_of
from quire_tools.bench.measure import NoResult, Timing
from quire_tools.bench.roofline import Ceilings
from quire_tools.bench.schema import from_json, require_positive, to_json

FILE_NAME = "results.json"
QUIRE = "Quire"


@dataclass(frozen=True)
class Result(Timing):
    """A timing, and its share of the device's ceilings.

    Attributes:
        of_floor: the floor of the case over the time.
    """

    of_floor: float

    def __post_init__(self) -> None:
        require_positive(micros=self.micros, low=self.low, high=self.high)


@dataclass(frozen=True)
class Row:
    """A case: its shape, what it needs, and what every library reaches.

    Attributes:
        case: its name.
        kind: one of `cases.KINDS`.
        sets: the sets that hold it.
        model: a key of `cases.MODELS`; where there is a `layer`, its heads in words.
        num_seqs: sequences.
        num_tokens: query tokens.
        mean_query_len: queries per sequence.
        mean_seq_len: keys per sequence.
        max_seq_len: most keys of any sequence.
        decode_share: the share of the sequences that have one query.
        uniform: whether all sequences have the same lengths.
        page_size: tokens per page.
        dtype: of queries.
        kv_dtype: of the cache.
        nbytes: bytes that must be moved.
        flops: operations.
        intensity: operations per byte.
        floor_micros: the least time in µs that the ceilings allow.
        bound: which ceiling that is.
        results: by library.
        compiled: what its kernels compiled to, where nothing was measured; None where nothing was compiled either.
        plan: the plan that they were compiled for, in words.
        why: why they were not compiled.
        layer: the attention of a layer that none of `cases.MODELS` has.
    """

    case: str
    kind: Kind
    sets: list[str]
    model: str
    num_seqs: int
    num_tokens: int
    mean_query_len: float
    mean_seq_len: float
    max_seq_len: int
    decode_share: float
    uniform: bool
    page_size: int
    dtype: str
    kv_dtype: str
    nbytes: int
    flops: int
    intensity: float
    floor_micros: float
    bound: Literal["memory", "compute"]
    results: dict[str, Result | NoResult]
    compiled: list[Compiled] | None = None
    plan: str | None = None
    why: str | None = None
    layer: Model | None = None

    def __post_init__(self) -> None:
        require_positive(
            num_seqs=self.num_seqs,
            max_seq_len=self.max_seq_len,
            intensity=self.intensity,
            floor_micros=self.floor_micros,
        )

    @property
    def timed(self) -> dict[str, Result]:
        """The libraries that have a time."""
        return {name: result for name, result in self.results.items() if isinstance(result, Result)}

    @property
    def times(self) -> dict[str, float]:
        """Their times in µs."""
        return {name: result.micros for name, result in self.timed.items()}

    @property
    def reasons(self) -> dict[str, str]:
        """The libraries that have none, and why."""
        return {name: result.why for name, result in self.results.items() if isinstance(result, NoResult)}


@dataclass(frozen=True)
class RangeRow:
    """A graph captured for a range of lengths, replayed at one of them.

    Attributes:
        num_seqs: sequences, one query each.
        captured_for: keys of each sequence that the graph allows.
        seq_len: keys of each sequence at replay.
        micros: time of a call in µs.
        own_micros: the same in a graph captured for `seq_len`.
    """

    num_seqs: int
    captured_for: int
    seq_len: int
    micros: float
    own_micros: float

    def __post_init__(self) -> None:
        require_positive(**asdict(self))

    @property
    def ratio(self) -> float:
        """Time over that of the graph captured for this length."""
        return self.micros / self.own_micros


@dataclass(frozen=True, kw_only=True)
class Provenance:
    """What the numbers belong to: a device, versions, a commit and a date.

    Attributes:
        code: the older card whose code ran on the device; None where it ran its own.
    """

    device: str
    code: str | None = None
    quire: str
    commit: str
    torch: str
    triton: str
    cuda: str | None = None
    driver: str | None = None
    date: str

    @property
    def title(self) -> str:
        """The device in words, and whose code it ran where that was not its own."""
        return title_of(self.device, self.code)


@dataclass(frozen=True)
class Grid:
    """Which cases were drawn at random; see `quire_tools.bench.grid`.

    Attributes:
        count: how many were asked for.
        seed: of the random numbers.
        latents: whether they are over latents.
        models: whether they are batches of models.
    """

    count: int
    seed: int
    latents: bool = False
    models: bool = False

    @property
    def space(self) -> str:
        """From which space they were drawn, in a word; "" for the whole one."""
        return "latents" if self.latents else "models" if self.models else ""


@dataclass(kw_only=True)
class Report:
    """A run of the bench.

    Attributes:
        provenance: what the numbers belong to.
        ceilings: of the device.
        seconds: how long each case was measured; None where nothing was.
        peers: by library its version, or why it is absent.
        rows: one per case.
        graph_range: one per graph and length, where these were measured.
        grid: which cases were drawn; None where they were not.
        stopped: the error that ended the run before all cases were measured.
    """

    provenance: Provenance
    ceilings: Ceilings
    seconds: float | str | None = None
    peers: dict[str, str]
    rows: list[Row]
    graph_range: list[RangeRow] = field(default_factory=list)
    grid: Grid | None = None
    stopped: str | None = None


def is_ours(peer: str) -> bool:
    """Return whether a name is Quire's, or of one of its variants."""
    return peer.startswith(QUIRE)


def make_row(case: Case, ceilings: Ceilings, timings: Mapping[str, Timing | NoResult]) -> Row:
    """Describe a case and what was measured."""
    floor = ceilings.floor(case)
    results: dict[str, Result | NoResult] = {}
    for name, timing in timings.items():
        if isinstance(timing, NoResult):
            results[name] = timing
        else:
            results[name] = Result(**asdict(timing), of_floor=floor / timing.micros)
    return Row(
        case=case.name,
        kind=case.kind,
        sets=sets_of(case),
        model=case.model,
        num_seqs=len(case.lens),
        num_tokens=case.num_tokens,
        mean_query_len=statistics.mean(case.query_lens),
        mean_seq_len=statistics.mean(case.seq_lens),
        max_seq_len=max(case.seq_lens),
        decode_share=case.decode_share,
        uniform=case.uniform,
        page_size=case.page_size,
        dtype=case.dtype,
        kv_dtype=case.kv_dtype or case.dtype,
        nbytes=case.nbytes,
        flops=case.flops,
        intensity=case.intensity,
        floor_micros=floor,
        bound=ceilings.bound(case),
        results=results,
        layer=case.layer,
    )


def provenance(device: str, commit: str | None, code: str | None = None) -> Provenance:
    """Return the provenance of this run's numbers; the commit is this package's when it is not given."""
    has_gpu = torch.cuda.is_available()
    return Provenance(
        device=device,
        code=code,
        quire=quire.__version__,
        commit=commit or commit_here(),
        torch=torch.__version__,
        triton=triton.__version__,
        cuda=(torch.version.cuda or f"hip {torch.version.hip}") if has_gpu else None,
        driver=driver_version() if has_gpu else None,
        date=time.strftime("%Y-%m-%d"),
    )


def driver_version() -> str:
    """Return the version of the NVIDIA driver."""
    path = Path("/proc/driver/nvidia/version")
    words = path.read_text().split() if path.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), "not known")


def save(report: Report, folder: Path) -> None:
    """Write `results.json` in one step, so that it is complete even if the run is stopped."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{FILE_NAME}.part"
    partial.write_text(json.dumps(to_json(report), indent=1), encoding="utf-8")
    partial.replace(folder / FILE_NAME)


def load(path: Path) -> Report:
    """Read a `results.json`, or the one in a folder.

    Raises:
        ValueError: it cannot be read, or is not one.
    """
    path = path / FILE_NAME if path.is_dir() else path
    contract = f"{path} must be a results.json of `quire bench`"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{contract}, got {type(error).__name__}: {error}; give the file or its folder") from None
    try:
        return from_json(Report, data, "report")
    except ValueError as error:
        raise ValueError(f"{contract}, but {error}; give the file or its folder") from None
