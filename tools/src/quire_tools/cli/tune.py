"""`quire tune`: measure this GPU and fit a decision tree, by which plans then choose configurations.

Every legal configuration is checked and then timed, on cases from the whole range that is served. A small tree is
fitted that loses least against the best configuration of each case. It is then timed against the default, on other
cases as well, and written to the folder that plans read. A sweep that was stopped continues from its records.
"""

import argparse
from pathlib import Path
from typing import Any

import torch

from quire.cli.arguments import CommandError, add_card, run_code_of
from quire.dispatch.device import device_properties
from quire.dispatch.tree import fitted_trees
from quire.dispatch.tree_file import GENERIC, USER_TREES, VARIABLE, load_tree, read_tree, user_folder
from quire_tools.cli.arguments import check_file, require
from quire_tools.cli.tune_variants import add_fit, add_sweep
from quire_tools.tuning.configs import LATENT_SECTION, SECTION
from quire_tools.tuning.fit import explain

EXAMPLES = """examples:
  quire tune --quick                    # some minutes; every plan uses the tree from then on
  quire tune                            # all cases and configurations; Ctrl-C stops it, and the next call continues
  quire tune --output mine.json         # a tree somewhere else, which no plan uses
  quire tune --explain                  # the tree that plans use here, as text
  quire tune --explain mine.json
  quire tune --as sm86 --quick          # a tree for sm86 code on this GPU, which no other plan uses
  quire tune --fit mine.jsonl --output mine.json   # fit the tree again to what was measured, without a GPU
"""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "tune",
        help=summary,
        description=__doc__,
        epilog=f"{EXAMPLES}\nplans look for trees in {USER_TREES},\nand choose among them by device properties",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer cases, and only the usual winners")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the tree there (default: where plans look for trees)",
    )
    parser.add_argument(
        "--records", type=Path, metavar="FILE", help="measured times, line by line (default: next to the tree, .jsonl)"
    )
    add_card(parser)
    parser.add_argument("--commit", help="the commit that is measured; git is asked when not given")
    parser.add_argument(
        "--fit", type=Path, metavar="RECORDS", help="measure nothing: fit a tree to these times and judge it by them"
    )
    parser.add_argument(
        "--explain",
        nargs="?",
        const="",
        metavar="FILE",
        help="print a tree as text, and measure nothing; the tree in use here when no file is given",
    )
    parser.set_defaults(run=run)
    verbs = parser.add_subparsers(metavar="sweep | fit", title="variants")
    add_sweep(verbs)
    add_fit(verbs)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    run_code_of(args.card)
    if args.explain is not None:
        print(explain_tree(*tree_to_explain(args.explain)), end="")
        return 0
    require("tune", "rich")

    from quire.cli.console import CommandConsole
    from quire_tools.cli import tune_sweep

    console = CommandConsole()
    if args.fit:
        if args.output is None:
            raise CommandError("--output must name the tree that --fit writes, got none; give a file")
        check_files(args.output, args.fit)
        tune_sweep.fit_again(args.fit, args.output, console)
        return 0
    if not torch.cuda.is_available():
        raise CommandError(
            "quire tune must have a GPU to measure, got none; --explain prints trees that were fitted elsewhere"
        )
    tree = args.output or default_path(tune_sweep.title_here())
    records = args.records or tree.with_suffix(".quick.jsonl" if args.quick else ".jsonl")
    check_files(tree, records)
    check_file("--records", records)
    return tune_sweep.tune_here(tree, records, args.quick, args.commit, console)


def check_files(tree: Path, records: Path) -> None:
    """Raise CommandError unless the tree can be written, and to another file than the records."""
    check_file("--output", tree)
    table = tree.with_suffix(".md").resolve()
    if table in (tree.resolve(), records.resolve()):
        raise CommandError(
            f"--output must not end in .md, nor have the records' name, got {tree}; a table gets that name"
        )
    if tree.resolve() == records.resolve():
        raise CommandError(f"--output must be another file than the records, got {tree} for both; name another")


def default_path(device_name: str) -> Path:
    """Return the file of the user's tree for a device."""
    folder = user_folder()
    if folder is None:
        raise CommandError(
            f"--output must name a file where the user has no home directory, got none; give one, or set {VARIABLE}"
        )
    return folder / f"{'_'.join(device_name.lower().split())}.json"


def tree_to_explain(file: str) -> tuple[str, dict[str, Any]]:
    """Return the name and content of the tree in a file; of the tree in use here when `file` is empty."""
    if file:
        if not Path(file).exists():
            raise CommandError(
                f"--explain must be a tree that `quire tune` wrote, got {file}, which is not there; name another"
            )
        try:
            return file, read_tree(Path(file))
        except ValueError as error:
            raise CommandError(f"--explain {error}") from None
    if torch.cuda.is_available():
        found = fitted_trees(device_properties(torch.device("cuda", torch.cuda.current_device())))
        if found:
            return found[0]
    return GENERIC, load_tree(GENERIC)


def explain_tree(name: str, tree: dict[str, Any]) -> str:
    """Return a tree and its provenance as text."""
    facts = ", ".join(f"{key} {value}" for key, value in tree["fitted_on"].items() if not isinstance(value, dict))
    lines = [f"{name}: {facts}"]
    for part, regret in tree["fitted_on"].get("regret", {}).items():
        words = f"{regret['mean']:.3f} in geometric mean, {regret['worst']:.3f} at worst"
        lines.append(f"regret, {part.replace('_', ' ')}: {words}")
    if "covers" in tree:
        kinds = (", ".join(f"{feature} {value}" for feature, value in kind.items()) for kind in tree["covers"])
        lines.append(f"serves {'; '.join(kinds)}; the generic tree serves the others")
    lines += ["", "kernel of prompts, where the Hopper kernel serves:", explain(tree.get("hopper", GENERIC), "  ")]
    titles = {
        SECTION: "configuration of the portable kernels",
        LATENT_SECTION: "configuration of the kernel for latents",
    }
    sections = (f"{title}:\n{explain(tree[name], '  ')}" for name, title in titles.items() if name in tree)
    return "\n".join(lines) + "\n".join(sections)
