"""Measure every legal configuration on every case, successively fewer of them for longer, and write each number down as soon as it is known.

A case begins with all configurations of the space that are legal for it. Those whose results are wrong are out before anything is timed. The rest are timed
in rounds: after each, those that cannot win are dropped, and the next measures longer. What the default tree chooses stays to the end, so that
a tree can be compared with it. Records are lines of JSON in one file, only ever appended to: a sweep that is stopped goes on where it was.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Protocol

import torch

from quire.batch import Batch
from quire.bench.cases import Case, decode, decoding, log_normal, prompts, share
from quire.bench.measure import Inputs, Sample, capture, describe_error, make_inputs, replay
from quire.bench.peers import quire_calls
from quire.dispatch.config import HINTS, KernelConfig, fit, hopper_config
from quire.dispatch.device import DeviceProperties
from quire.dispatch.tree import decision, features_of, load_tree, padded, rounded
from quire.plan import decide
from quire.service import name as name_of_kernel
from quire.targets import Launch
from quire.tuning.space import tiles

HOPPER = "hopper"  # the configuration that is a kernel of its own
Config = KernelConfig | str
ROUNDS = (3, 7, 15)  # replays of each
WITHIN = (1.5, 1.15)  # of the best: who goes on to the second round, and to the third
AT_MOST = (24, 8)
MOST_SPILLS = 16  # bytes per thread, which ptxas parks by its own choice; a configuration that spills more is never timed, so no tree has it
TABLES = 32  # page tables of a case, at most


@dataclass(frozen=True)
class Job:
    """A case to tune for.

    Attributes:
        case: the batch.
        held_out: to judge a tree by, not to fit it to.
    """

    case: Case
    held_out: bool = False


def jobs(quick: bool) -> list[Job]:
    """Return the cases of a sweep: those to fit to, and others with other lengths, seeds and heads to judge by."""
    trained = ("Llama-3-8B", "Llama-3.2-1B", "Gemma-3-12B", "Qwen2.5-7B", *(() if quick else ("MQA", "Qwen2.5-1.5B")))
    other = ("Llama-3-70B", "Qwen3-30B-A3B")
    few = (1, 1500), (1, 8192), (3, 2500), (8, 1024), (24, 900), (40, 1800), (128, 1024)
    if quick:
        contexts = (
            (4, 128),
            (1, 512),
            *few,
            (1, 3500),
            (1, 30000),
            (2, 4096),
            (4, 6000),
            (12, 3000),
            (32, 512),
            (32, 2048),
            (64, 512),
            (100, 700),
        )
        drafts = (8, 4, 2048), (16, 8, 2048), (1, 8, 8192), (6, 5, 1200), (24, 3, 3000)
        lengths = [64], [128], [512], [1024], [4096]
        chunks = (32, 4096), (128, 8192), (256, 4096)
    else:
        contexts = (4, 128), *product((1, 16, 256), (256, 4096)), (1, 65536), *few, (4, 6000), (100, 700)
        drafts = (1, 4, 4096), (1, 8, 8192), (8, 4, 2048), (16, 8, 2048), (6, 5, 1200), (24, 3, 3000)
        lengths = [64], [128], [300], [512], [1024], [4096], log_normal(8, 512, 6)
        chunks = (32, 4096), (128, 8192), (256, 4096), (1024, 16384)
    found = []
    for model in trained:
        found += [Job(decode(n, length, f" {model}", model=model)) for n, length in contexts]
        found.append(Job(decoding(f"decode 32 log-normal 1024 {model}", log_normal(32, 1024, 5), model=model)))
        found += [Job(Case(f"drafts {n}x{q} on {s} {model}", "drafts", ((q, s),) * n, model)) for n, q, s in drafts]
        found += [Job(prompts(f"prefill {len(ns)} of {max(ns)} {model}", ns, model=model)) for ns in lengths]
        found += [Job(Case(f"chunk {q} on {s} {model}", "chunk", ((q, s),), model)) for q, s in chunks]
        found.append(Job(share(8, 50, unequal=True, model=model)))
    if quick:
        found += [
            Job(decode(n, length, f" {model}", model=model)) for model in ("MQA", "Qwen2.5-1.5B") for n, length in few
        ]
    else:
        fp8 = tuple(product((1, 16, 128), (1024, 4096)))
        found += [Job(decode(n, length, " fp8", kv_dtype="float8_e4m3fn")) for n, length in fp8]
        found += [Job(prompts(f"prefill {n} fp8", [n], kv_dtype="float8_e4m3fn")) for n in (256, 2048)]
    for model in (*trained[:2], *other):
        some = [
            decode(n, length, f" {model}", model=model) for n, length in ((2, 3000), (1, 5500), (48, 1500), (90, 600))
        ]
        some.append(prompts(f"prefill 700 {model}", [700], model=model))
        some.append(decoding(f"decode 20 log-normal 3000 {model}", log_normal(20, 3000, 11), model=model))
        some.append(Case(f"drafts 12x5 on 1500 {model}", "drafts", ((5, 1500),) * 12, model))
        some.append(prompts(f"prefill 6 log-normal 900 {model}", log_normal(6, 900, 12), model=model))
        some.append(Case(f"chunk 200 on 6000 {model}", "chunk", ((200, 6000),), model))
        some.append(share(12, 50, unequal=True, seed=13, model=model))
        found += [Job(case, held_out=True) for case in some]
    return found


def features(case: Case, properties: DeviceProperties) -> dict[str, float]:
    """Return what a tree sees of a case."""
    return features_of(case.spec, properties, *rounded(case.spec, properties, **case.bounds))


def default(case: Case, properties: DeviceProperties) -> KernelConfig:
    """Return what the generic tree chooses, fitted to the device."""
    return tile_of(
        decision(load_tree("generic")["attention"], features(case, properties), "attention"), case, properties
    )


def tile_of(leaf: dict, case: Case, properties: DeviceProperties) -> KernelConfig:
    """Return the tile that a tree's leaf means for a case."""
    spec = case.spec
    return fit(KernelConfig(**leaf, block_d=padded(spec.head_dim), block_dv=padded(spec.head_dim_v)), spec, properties)


def configurations(case: Case, properties: DeviceProperties, quick: bool) -> list[Config]:
    """Return what is legal for a case: the default first, then the space, and the Hopper kernel where it serves."""
    spec = case.spec
    some = tiles(
        spec,
        properties,
        features(case, properties)["rows_per_seq"],
        padded(spec.head_dim),
        padded(spec.head_dim_v),
        quick,
    )
    found: list[Config] = list(dict.fromkeys([default(case, properties), *some]))
    if case.bounds["max_query_len"] > 1 and not isinstance(hopper_config(spec, properties, short=False), str):
        found.append(HOPPER)
    return found


def leaf_of(config: Config) -> dict | str:
    """Return a configuration as it stands in records and trees."""
    return config if isinstance(config, str) else config.leaf


def key_of(leaf: dict | str) -> str:
    """Return a name of what stands in records: of a tile, "rows x keys, warps, stages, u for the loop without masks, programs", AMD's hints."""
    if isinstance(leaf, str):
        return leaf
    unmasked = "u" if leaf["full_tile_loop"] else ""
    hints = "".join(f" {hint} {leaf[hint]}" for hint in HINTS if leaf.get(hint))
    return f"{leaf['block_m']}x{leaf['block_n']} w{leaf['num_warps']} s{leaf['num_stages']}{unmasked} p{leaf['programs_per_sm']}{hints}"


def options_of(config: Config) -> dict:
    """Return what `quire.plan` is given."""
    return {"kernel": HOPPER} if isinstance(config, str) else {"tile": config}


# Compilation


def launches(
    wanted: Iterable[tuple[Case, Sequence[Config]]], properties: DeviceProperties
) -> dict[Launch, list[tuple[str, str]]]:
    """Return the launches that differ in what is compiled, each with the (case, configuration) names that it stands for."""
    found: dict[tuple, Launch] = {}
    stands_for: dict[Launch, list[tuple[str, str]]] = defaultdict(list)
    for case, configs in wanted:
        lens = torch.zeros(len(case.lens) + 1, dtype=torch.int32)
        starts = None if case.bounds["max_query_len"] == 1 else lens
        batch = Batch(torch.zeros(len(case.lens), 1, dtype=torch.int32), lens[1:], starts)
        for config in configs:
            bounds = case.bounds
            plan = decide(
                case.spec,
                batch,
                properties,
                bounds["max_query_len"],
                bounds["max_seq_len"],
                bounds["num_tokens"],
                **options_of(config),
            )
            kind = case.spec, case.page_size, name_of_kernel(plan)
            if kind not in found:
                found[kind] = Launch(
                    case.spec,
                    len(case.lens),
                    **bounds,
                    page_size=case.page_size,
                    options=tuple(options_of(config).items()),
                )
            stands_for[found[kind]].append((case.name, key_of(leaf_of(config))))
    return stands_for


# Records


class Records:
    """A sweep's file: a header, then one line for each thing found.

    Args:
        path: read if it exists, and appended to.
        header: what the numbers belong to; "properties" and others that must be those of the file.

    Raises:
        ValueError: the file is of another device, software or kind of sweep.
    """

    def __init__(self, path: Path, header: dict) -> None:
        lines = read_lines(path) if path.exists() else []
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("r+" if lines else "w")
        if lines:
            differ = [
                name
                for name in ("device", "properties", "triton", "quick", "jobs")
                if lines[0].get(name) != header.get(name)
            ]
            if differ:
                told = "; ".join(f"{name} {lines[0].get(name)!r} there, {header.get(name)!r} here" for name in differ)
                raise ValueError(f"{path} must be of the same sweep, got {told}; name another file with --records")
            self._begin(*lines)
            self.file.seek(0)
            self.file.truncate()  # a last line that was cut off goes
            self.file.writelines(json.dumps(line) + "\n" for line in lines)
            self.file.flush()
        else:
            self._begin(header)
            self._write(header)

    @classmethod
    def reread(cls, lines: list[dict]) -> "Records":
        """Make records of lines alone, to which nothing is added."""
        found = cls.__new__(cls)
        found._begin(*lines)
        return found

    def _begin(self, header: dict, *lines: dict) -> None:
        self.header = header
        self.wrong: dict[tuple[str, str], str] = {}
        self.times: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self.leaves: dict[str, dict | str] = {}
        self.done: set[str] = set()
        for line in lines:
            self._take(line)

    def add(self, **line) -> None:
        """Write a line down and take note of it."""
        self._take(line)
        self._write(line)

    def _write(self, line: dict) -> None:
        self.file.write(json.dumps(line) + "\n")
        self.file.flush()

    def _take(self, line: dict) -> None:
        if "done" in line:
            self.done.add(line["done"])
            return
        key = key_of(line["config"])
        self.leaves[key] = line["config"]
        if "wrong" in line:
            self.wrong[line["case"], key] = line["wrong"]
        else:
            self.times[line["case"], key][line["round"]] = line["micros"]

    def of(self, case: str) -> dict[str, dict[int, float]]:
        """Return the times of a case by configuration and round."""
        return {key: rounds for (name, key), rounds in self.times.items() if name == case and rounds}

    def last(self, case: str) -> dict[str, float]:
        """Return the µs of a case by configuration, each of the last round that it came to."""
        return {key: rounds[max(rounds)] for key, rounds in self.of(case).items()}


def read_lines(path: Path) -> list[dict]:
    """Read the whole lines of a file of records."""
    found = []
    for line in path.read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            break  # the sweep was stopped while it wrote this one
    return found


# The sweep


class Session(Protocol):
    """What measures the configurations of one case."""

    def check(self, config: Config) -> str | None:
        """Make a configuration ready to be timed; return what is wrong with its result, or None."""
        ...

    def time(self, configs: Sequence[Config], replays: int) -> list[float]:
        """Return the median time of each in µs, measured in turn."""
        ...


class OnGpu:
    """Measures on the current GPU, as the bench does."""

    def __init__(self, case: Case) -> None:
        self.inputs: Inputs = make_inputs(case, max_tables=TABLES)
        self.sample = Sample(self.inputs, self.inputs.tables[0])
        self.ready: dict[Config, tuple[torch.cuda.CUDAGraph, list]] = {}

    def check(self, config: Config) -> str | None:
        out = torch.full_like(self.inputs.q, float("nan"))
        try:
            plan = quire_calls(self.inputs, out, **options_of(config))
            calls = [plan(table) for table in self.inputs.tables]
            calls[0]()
            verdict = self.sample.judge(out)
            if not verdict.passed:
                return f"error {verdict.error:.2g}, {verdict.out:.1f} times its budget"
            self.ready[config] = capture(calls), calls
        except Exception as error:  # Triton's compiler raises many kinds
            torch.cuda.synchronize()  # raises where the device is lost to this process
            return describe_error(error)
        return None

    def time(self, configs: Sequence[Config], replays: int) -> list[float]:
        times: list[list[float]] = [[] for _ in configs]
        for _ in range(replays):
            for config, some in zip(configs, times, strict=True):
                some.append(replay(self.ready[config][0]) / len(self.inputs.tables))
        return [statistics.median(some) for some in times]


class Remembered:
    """Measures nothing: tells what records hold, of the last round that each configuration came to."""

    def __init__(self, records: Records, case: Case) -> None:
        self.times = records.last(case.name)

    def check(self, config: Config) -> str | None:
        return None if key_of(leaf_of(config)) in self.times else "no time in the records"

    def time(self, configs: Sequence[Config], replays: int) -> list[float]:
        return [self.times[key_of(leaf_of(config))] for config in configs]


def sweep(
    chosen: Sequence[Job], records: Records, properties: DeviceProperties, quick: bool, session: Callable[[Case], Session], out: frozenset[tuple[str, str]] = frozenset(),
    advance: Callable[[str, int], None] = lambda name, count: None,
) -> None:  # fmt: skip
    """Measure what the records lack.

    Args:
        chosen: the cases.
        records: read and added to.
        properties: of the device.
        quick: measure the usual winners only.
        session: makes what measures a case.
        out: (case, configuration) names that compilation has ruled out.
        advance: is told the case and how many configurations were finished.
    """
    for job in chosen:
        case = job.case
        configs = configurations(case, properties, quick)
        if case.name in records.done:
            advance(case.name, len(configs))
            continue
        try:
            measured = session(case)
        except torch.cuda.OutOfMemoryError:  # a smaller GPU than the largest cases were made for
            records.add(done=case.name)
            advance(case.name, len(configs))
            continue
        stays, alive = configs[0], []
        for config in configs:
            key = case.name, key_of(leaf_of(config))
            why = (
                records.wrong.get(key)
                or ("ruled out by what it compiles to" if key in out and config is not stays else None)
                or measured.check(config)
            )
            if why is None:
                alive.append(config)
            elif key not in records.wrong:
                records.add(case=case.name, config=leaf_of(config), wrong=why)
            advance(case.name, 1)
        for turn, replays in enumerate(ROUNDS):
            known = {c: records.times[case.name, key_of(leaf_of(c))] for c in alive}
            missing = [c for c in alive if turn not in known[c]]
            for config, micros in zip(missing, measured.time(missing, replays) if missing else [], strict=True):
                records.add(case=case.name, config=leaf_of(config), round=turn, micros=micros)
            if turn + 1 < len(ROUNDS):
                alive = halve(alive, {c: known[c][turn] for c in alive}, WITHIN[turn], AT_MOST[turn], stays)
        records.add(done=case.name)
        del measured


def halve(alive: list[Config], times: dict[Config, float], within: float, at_most: int, stays: Config) -> list[Config]:
    """Return who goes on: those near the best, the fastest if there are many; the default always, and the Hopper kernel beside the portable ones."""
    best = min(times.values(), default=0.0)
    near = sorted((c for c in alive if times[c] <= within * best or c == HOPPER), key=lambda c: times[c])[:at_most]
    portable = min((c for c in alive if c != HOPPER), key=lambda c: times[c], default=None)
    return [c for c in alive if c in near or c in (stays, HOPPER, portable)]


def header(device: str, properties: DeviceProperties, quick: bool, chosen: Sequence[Job], facts: dict) -> dict:
    """Return the first line of a file of records."""
    return {
        "device": device,
        "properties": asdict(properties),
        "quick": quick,
        "jobs": [job.case.name for job in chosen],
        **facts,
    }


# What a tree would choose


def choice(case: Case, tree: dict, properties: DeviceProperties) -> Config:
    """Return the configuration that plans would have for a case with a tree."""
    seen, lens, bounds = features(case, properties), torch.zeros(len(case.lens) + 1, dtype=torch.int32), case.bounds
    batch = Batch(torch.zeros(len(case.lens), 1, dtype=torch.int32), lens[1:], lens)
    asked = case.spec, batch, properties, bounds["max_query_len"], bounds["max_seq_len"], bounds["num_tokens"]
    if decide(*asked).num_parts > 1:  # whatever a tree says
        return HOPPER
    tile = tile_of(decision(tree["attention"], seen, "attention"), case, properties)
    if (
        bounds["max_query_len"] == 1
        or isinstance(hopper_config(case.spec, properties, short=False), str)
        or not decision(tree["hopper"], seen, "hopper")
    ):
        return tile
    plan = decide(*asked, config=tile)
    return tile if plan.num_shares else HOPPER


def candidates(case: Case, records: Records, tree: dict, properties: DeviceProperties) -> dict[str, Config]:
    """Return what the generic tree chooses, what this one does, and the best that the sweep has found; nothing where it has found none."""
    times = records.last(case.name)
    if not times:
        return {}
    best = records.leaves[min(times, key=lambda key: times[key])]
    best = best if isinstance(best, str) else tile_of(best, case, properties)
    return {
        "default": choice(case, load_tree("generic"), properties),
        "tuned": choice(case, tree, properties),
        "best": best,
    }


def validate(
    chosen: Sequence[Job], records: Records, tree: dict, properties: DeviceProperties, session: Callable[[Case], Session], replays: int,
    advance: Callable[[str, int], None] = lambda name, count: None,
) -> list[dict]:  # fmt: skip
    """Time what a tree chooses beside the default and the best that the sweep has found, in turn; return these times in µs, case by case."""
    found = []
    for job in chosen:
        configs = candidates(job.case, records, tree, properties)
        if not configs:
            advance(job.case.name, 1)
            continue
        measured, distinct = session(job.case), list(dict.fromkeys(configs.values()))
        wrong = {config: why for config in distinct if (why := measured.check(config))}
        if configs["tuned"] in wrong:
            why = wrong[configs["tuned"]]
            raise RuntimeError(
                f"{job.case.name}: what the tree chooses must be right, got {why}; add a case like it to `jobs` and tune again"
            )
        right = [config for config in distinct if config not in wrong]
        micros = dict(zip(right, measured.time(right, replays), strict=True))
        row = {"case": job.case.name, "held_out": job.held_out, "tile": key_of(leaf_of(configs["tuned"]))}
        row |= {name: micros.get(config) for name, config in configs.items()}
        found.append(row | {"regret": row["tuned"] / min(micros.values())})
        advance(job.case.name, 1)
        del measured
    return found
