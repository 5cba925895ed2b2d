"""Which cases and libraries the commands of `quire bench` take."""

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path

from quire.cli.arguments import CommandError, add_grid, check_seed
from quire.dispatch.config import KernelConfig
from quire_tools.bench import cases as workloads
from quire_tools.bench import grid
from quire_tools.bench.case import DEFAULT_MODEL, KV_MODELS, Case
from quire_tools.bench.measure import Peer
from quire_tools.bench.peers import PEERS, quire_with_config

QUIRE = PEERS[0].name
BY_SPEC = {"block_d": 16, "block_dv": 16}  # fields of a configuration that --config cannot set
CONFIG_FIELDS = tuple(field.name for field in fields(KernelConfig) if field.name not in BY_SPEC)
LEGAL_CONFIG = KernelConfig(16, 16, 4, 2, False, 1, **BY_SPEC)


def add_cases(parser: argparse.ArgumentParser, what: str) -> None:
    """Add the options that choose cases; `what` is done with them. Without one, these are all sets."""
    group = parser.add_argument_group(f"what to {what}")
    sources = group.add_mutually_exclusive_group()
    sources.add_argument("--quick", action="store_true", help="a dozen cases")
    sources.add_argument(
        "--set", action="append", choices=workloads.SETS, help="only this set of cases; may be repeated"
    )
    sources.add_argument(
        "--trace", type=Path, metavar="FILE", help="cases from a CSV file of prompt and output tokens instead"
    )
    add_grid(group, what, sources)
    group.add_argument(
        "--models", action="store_true", help="with --grid: batches of models, as a server may have them"
    )
    group.add_argument("--only", default="", metavar="TEXT", help="only cases whose name contains this")
    group.add_argument(
        "--model",
        choices=KV_MODELS,
        default=DEFAULT_MODEL,
        metavar="NAME",
        help="the model whose heads the cases of --trace have (default: %(default)s)",
    )


def add_peers(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose libraries."""
    group = parser.add_argument_group("what to compare")
    group.add_argument(
        "--peers", metavar="NAMES", help="only libraries whose name begins with one of these (comma-separated)"
    )
    group.add_argument(
        "--config",
        action="append",
        default=[],
        type=config_fields,
        metavar="FIELD=N,...",
        help="also time the portable kernels with this configuration; may be repeated",
    )


def config_fields(text: str) -> dict[str, int | bool]:
    """Read the fields of a configuration, for argparse."""
    found: dict[str, int | bool] = {}
    for pair in text.split(","):
        name, _, value = pair.partition("=")
        if name not in CONFIG_FIELDS or not value.isdecimal():
            known = ", ".join(CONFIG_FIELDS)
            raise argparse.ArgumentTypeError(
                f"must be FIELD=N pairs separated by commas, got {text!r}; the fields are {known}"
            )
        found[name] = bool(int(value)) if name == "full_tile_loop" else int(value)
    try:
        replace(LEGAL_CONFIG, **found)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"must be a legal configuration, got {text!r}: {error}") from None
    return found


def choose_cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases that the options of `add_cases` ask for."""
    check_seed(args)
    if args.models and (args.grid is None or args.latents):
        raise CommandError("--models must be given with --grid, and without --latents; add --grid N")
    if args.trace:
        cases = cases_of_trace(args.trace, args.model)
    elif args.grid:
        seed = args.seed or 0
        if args.models:
            cases = grid.draw_served(args.grid, seed)
        else:
            cases = grid.draw(args.grid, seed, latents=args.latents)
    else:
        cases = workloads.cases(["quick"] if args.quick else args.set, args.only)
    cases = [case for case in cases if args.only in case.name]
    if not cases:
        advice = "see quire bench list"
        if args.only.startswith("grid ") and not args.grid:
            advice = "pass --grid N and --seed S too"
        raise CommandError(f"--only must be part of the name of a case, got {args.only!r}; {advice}")
    return cases


def cases_of_trace(file: Path, model: str) -> list[Case]:
    """Return the cases of a log of requests."""
    try:
        return workloads.cases_from_trace(file, model=model)
    except OSError as error:
        raise CommandError(f"--trace must be a file that can be read, got {file} ({error.strerror})") from None
    except ValueError as error:
        raise CommandError(f"--trace {error}") from None


def choose_peers(names: str | None, configs: Sequence[dict[str, int | bool]], is_grid: bool = False) -> list[Peer]:
    """Return the libraries whose name begins with one of the comma-separated `names`, and Quire with each config.

    Without names these are all, and for a grid all but Quire's variants.
    """
    peers = [peer for peer in PEERS if not is_grid or peer.name == QUIRE or not peer.name.startswith(QUIRE)]
    if names is not None:
        prefixes = tuple(name.strip() for name in names.split(",") if name.strip())
        peers = [replace(peer, slow=False) for peer in PEERS if peer.name.startswith(prefixes)]
    variants = [
        Peer(
            f"Quire {' '.join(f'{name}={value}' for name, value in config.items())}",
            "quire",
            partial(quire_with_config, **config),
            plans=True,
        )
        for config in configs
    ]
    if not peers and not variants:
        known = "; ".join(peer.name for peer in PEERS)
        raise CommandError(f"--peers must begin the names of some of {known}, got {names!r}; see the list")
    return peers[:1] + variants + peers[1:]
