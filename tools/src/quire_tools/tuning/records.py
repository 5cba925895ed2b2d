"""The file of a sweep: a header, then one line of JSON for each result, in the order of the sweep.

Lines are only ever appended, so a sweep that was stopped goes on where it was.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from quire.dispatch.device import DeviceProperties
from quire.dispatch.tree_file import check_config, check_keys, check_object, check_properties, is_number, shown
from quire_tools.tuning.configs import HOPPER, key_of
from quire_tools.tuning.jobs import Job

Line = dict[str, Any]
SAME_SWEEP = "device", "properties", "triton", "quick", "jobs"  # of a header, what a sweep that goes on must share


class Records:
    """What a sweep has found.

    Attributes:
        header: what the numbers belong to.
        wrong: what is wrong with a configuration, by (case, configuration) names.
        times: µs by round, by (case, configuration) names.
        leaves: configurations as trees hold them, by name.
        done: names of the cases that are finished.
    """

    def __init__(self, header: Line, lines: Sequence[Line] = (), path: Path | None = None) -> None:
        self.header = header
        self.path = path  # lines that are added are appended to it
        self.wrong: dict[tuple[str, str], str] = {}
        self.times: dict[tuple[str, str], dict[int, float]] = defaultdict(dict)
        self.leaves: dict[str, dict[str, Any] | str] = {}
        self.done: set[str] = set()
        for line in lines:
            self._take(line)

    @classmethod
    def open(cls, path: Path, header: Line) -> "Records":
        """Go on with the records of a sweep, or begin them.

        Args:
            path: the file; made if it does not exist.
            header: of the sweep that is to be made.

        Raises:
            ValueError: the file is of another device, software or kind of sweep, is not a file of records, or cannot be
                written.
        """
        lines = read_lines(path) if path.exists() else []
        if not lines:
            lines = [header]
        elif differ := [name for name in SAME_SWEEP if lines[0].get(name) != header.get(name)]:
            words = "; ".join(f"{name} {lines[0].get(name)!r} there, {header.get(name)!r} here" for name in differ)
            raise ValueError(f"{path} must be of the same sweep, got {words}; name another file with --records")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_name(f"{path.name}.part")
            partial.write_text("".join(json.dumps(line) + "\n" for line in lines))  # but a last line that was cut off
            partial.replace(path)
        except OSError as error:
            raise ValueError(
                f"{path} must be a file that can be written, got {error.strerror}; name another with --records"
            ) from None
        return cls(lines[0], lines[1:], path)

    @classmethod
    def read(cls, path: Path) -> "Records":
        """Read the records of a sweep, to which nothing is added.

        Raises:
            ValueError: the file cannot be read, or holds something else.
        """
        lines = read_lines(path)
        if not lines:
            raise ValueError(f"{path} must hold the records of a sweep, got nothing; sweep first")
        return cls(lines[0], lines[1:])

    @property
    def properties(self) -> DeviceProperties:
        """Properties of the device that was measured."""
        return DeviceProperties(**self.header["properties"])

    def add(self, **line: Any) -> None:
        """Add a line, also to the file."""
        self._take(line)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")

    def _take(self, line: Line) -> None:
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
        """Return the µs of a case by configuration, each of the last round that it reached."""
        return {key: rounds[max(rounds)] for key, rounds in self.of(case).items()}


def header(device: str, properties: DeviceProperties, quick: bool, chosen: Sequence[Job], facts: Line) -> Line:
    """Return the first line of a file of records."""
    jobs = [job.case.name for job in chosen]
    return {"device": device, "properties": asdict(properties), "quick": quick, "jobs": jobs, **facts}


def read_lines(path: Path) -> list[Line]:
    """Read a file of records and check every line.

    A last line that is cut off, as a stopped sweep leaves it, is left out.

    Raises:
        ValueError: the file cannot be read, or a line is not one of records. The message names the file and the line.
    """
    found: list[Line] = []
    number = 1
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                found.append(json.loads(line))
            except ValueError:
                if number > 1 and number == len(lines) and not line.endswith("\n"):
                    break
                raise ValueError(f"invalid JSON in line {number}") from None
            check_line(found[-1], first=number == 1)
    except OSError as error:
        wrong = error.strerror or str(error)
    except RecursionError:
        wrong = f"JSON that is nested too deeply in line {number}"
    except UnicodeDecodeError:
        wrong = "text that is not UTF-8"
    except ValueError as error:
        wrong = str(error) if "in line" in str(error) else f"{error}, in line {number}"
    else:
        return found
    raise ValueError(
        f"{path} must hold the records of a sweep, got {wrong}; "
        "name a .jsonl file that `quire tune` wrote, or a new one"
    )


def check_line(line: object, first: bool) -> None:
    """Raise ValueError unless `line` is a line of records: the header, if it is the first, otherwise a result."""
    if not isinstance(line, dict):
        raise ValueError(f"{shown(line)} where an object is expected")
    if first:
        if missing := {"device", "properties", "quick", "jobs"} - line.keys():
            raise ValueError(f"no {', '.join(sorted(missing))} in the header")
        check_properties(line["properties"])
        if not isinstance(line["quick"], bool):
            raise ValueError(f"{shown(line['quick'])} at quick, which must be true or false")
        if not isinstance(line["jobs"], list) or not all(isinstance(name, str) for name in line["jobs"]):
            raise ValueError(f"{shown(line['jobs'])} at jobs, which must be a list of names")
    elif "done" in line:
        check_keys(line, {"done"}, set(), "a line of a finished case")
        check_text(line, "done")
    elif "wrong" in line:
        check_keys(line, {"case", "config", "wrong"}, set(), "a line of a wrong result")
        check_text(line, "case", "wrong")
        check_leaf(line["config"])
    else:
        check_keys(line, {"case", "config", "round", "micros"}, set(), "a line of a time")
        check_text(line, "case")
        check_leaf(line["config"])
        if type(line["round"]) is not int:
            raise ValueError(f"{shown(line['round'])} at round, which must be an int")
        if not is_number(line["micros"]) or line["micros"] <= 0:
            raise ValueError(f"{shown(line['micros'])} at micros, which must be a positive number")


def check_text(line: Line, *names: str) -> None:
    """Raise ValueError unless some values of a line are strings."""
    for name in names:
        if not isinstance(line[name], str):
            raise ValueError(f"{shown(line[name])} at {name}, which must be a string")


def check_leaf(leaf: object) -> None:
    """Raise ValueError unless `leaf` is a configuration as records hold it."""
    if leaf != HOPPER:
        check_config(check_object(leaf, "config"), True, "config")
