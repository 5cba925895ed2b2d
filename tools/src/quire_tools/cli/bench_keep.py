"""Keep the results of an earlier run, where `quire bench` writes those of another run into the same folder."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

from rich.console import Console

from quire_tools.bench.results import FILE_NAME, Report, load


@contextmanager
def earlier_run_kept(folder: Path, console: Console, advice: str = "") -> Iterator[None]:
    """Rename the results of a run that a folder has; rename them back if the context writes none."""
    kept = keep_earlier_run(folder, console, advice)
    try:
        yield
    finally:
        if kept is not None and not (folder / FILE_NAME).exists():
            kept.rename(folder / FILE_NAME)
            say(f"There are no new results: {kept.name} is {FILE_NAME} again.", console)


def keep_earlier_run(folder: Path, console: Console, advice: str = "", new: Report | None = None) -> Path | None:
    """Rename the results of a run that a folder has to `results.1.json`, or the next number, and print that.

    Results without times are not kept: the same command computes them again, from a data sheet and by the compiler.

    Args:
        folder: where the results of another run will be written.
        console: to print on.
        advice: what is printed after that.
        new: what will be written, if it is known. The same results are not kept twice.

    Returns:
        The new path; None if nothing is kept.
    """
    file = folder / FILE_NAME
    if not file.exists():
        return None
    try:
        earlier = load(file)
    except ValueError:  # of another version of Quire, perhaps
        what = "an earlier run"
    else:
        has_times = bool(earlier.graph_range) or any(row.timed for row in earlier.rows)
        if earlier == new or not has_times:
            return None
        number = len(earlier.rows) or len(earlier.graph_range)
        what = f"an earlier run of {number} case{'' if number == 1 else 's'}"
    names = (f"{file.stem}.{number}{file.suffix}" for number in count(1))
    kept = next(path for path in map(folder.joinpath, names) if not path.exists())
    file.rename(kept)
    say(f"{folder} has {what}: its {FILE_NAME} is now {kept.name}.{advice}", console)
    return kept


def say(words: str, console: Console) -> None:
    """Print a sentence."""
    console.print(words, highlight=False, markup=False, soft_wrap=True)
