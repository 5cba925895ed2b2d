"""Results as files: what is written is read again, old files too, and what is no report is refused with a reason."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.targets import Compiled
from quire_tools.bench import results
from quire_tools.bench.measure import NoResult
from quire_tools.bench.report import markdown
from quire_tools.bench.results import Provenance, Report, Result

RESULTS = Path(__file__).parents[2] / "docs" / "results"


@pytest.mark.parametrize("name", ["h200.json", "h200_peers.json"])
def test_the_results_in_the_docs_are_read_and_written_unchanged(name, tmp_path):
    report = results.load(RESULTS / name)
    results.save(report, tmp_path)
    assert (tmp_path / "results.json").read_text() == (RESULTS / name).read_text()


@pytest.mark.parametrize("name", ["h200", "h200_peers"])
def test_a_page_in_the_docs_has_what_the_command_writes(name):
    _, _, below_the_heading = markdown(results.load(RESULTS / f"{name}.json")).partition("\n\n")
    assert (RESULTS / f"{name}.md").read_text().endswith(below_the_heading)


def test_rows_are_typed():
    report = results.load(RESULTS / "h200.json")
    assert isinstance(report, Report)
    assert isinstance(report.provenance, Provenance)
    (row,) = (row for row in report.rows if row.case == "prefill 128")
    assert isinstance(row.results["Quire"], Result)
    assert isinstance(row.results["FlashInfer XQA"], NoResult)
    assert row.times["Quire"] == pytest.approx(5.5529, abs=0.001)
    assert row.reasons == {"FlashInfer XQA": "decode and drafts only"}
    assert set(row.times) | set(row.reasons) == set(row.results)


def test_everything_that_a_report_holds_comes_back(make_report, tmp_path):
    report = make_report()
    kernel = Compiled("portable_kernel", 128, 0, 0, 1024, 2, 4, "m64, n64")
    report.rows[0] = replace(report.rows[0], compiled=[kernel], plan="Plan(...)")
    report.rows[1] = replace(report.rows[1], compiled=[], why="it does not compile")
    results.save(report, tmp_path)
    assert results.load(tmp_path) == report
    assert results.load(tmp_path / "results.json") == report


def test_a_result_says_how_near_it_comes_to_the_floor(make_report):
    row = make_report().rows[0]
    assert row.timed["Quire"].of_floor == pytest.approx(row.floor_micros / row.times["Quire"])


def test_a_run_that_is_stopped_while_it_writes_leaves_the_file_before(make_report, tmp_path, monkeypatch):
    report = make_report()
    results.save(report, tmp_path)

    def stop(*args: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", stop)
    with pytest.raises(KeyboardInterrupt):
        results.save(make_report(2.0), tmp_path)
    assert results.load(tmp_path) == report


def leaves(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """Return the path of every value in parsed JSON, the containers included."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, item in items for leaf in leaves(item, (*path, key)))]


def small_report(make_report) -> dict:
    """Return a report of one row as parsed JSON; one library has no time."""
    report = make_report()
    report.rows = report.rows[3:4]
    report.seconds = 0.4
    return results.to_json(report)


def test_no_value_of_another_type_is_accepted(make_report, tmp_path):
    path, data = tmp_path / "results.json", small_report(make_report)
    hostile = [None, "text", True, -1, 1.5, float("nan"), float("inf"), [], {}, [None], {"a": 1}, 10**400]
    unchecked = 0
    for place in leaves(data):
        for value in hostile:
            changed = json.loads(json.dumps(data))
            if place:
                holder = changed
                for key in place[:-1]:
                    holder = holder[key]
                holder[place[-1]] = value
            else:
                changed = value
            path.write_text(json.dumps(changed))
            try:
                report = results.load(path)
            except ValueError as error:
                assert str(error).startswith(f"{path} must be a results.json of `quire bench`"), (place, value)
                continue
            # What is accepted is of the right type: it is written as it was read.
            assert json.loads(json.dumps(results.to_json(report))) == without_defaults(changed), (place, value)
            unchecked += 1
    assert unchecked > 0


def without_defaults(data: dict) -> dict:
    """Leave out what a file need not say."""
    kept = {key: value for key, value in data.items() if (key, value) not in (("seconds", None), ("graph_range", []))}
    optional = ("cuda", "driver")
    facts = {k: v for k, v in data["provenance"].items() if k not in optional or v is not None}
    return kept | {"provenance": facts}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["rows"][0].pop("floor_micros"), r"report\.rows\[0\] must have the key 'floor_micros'"),
        (lambda data: data["rows"][0].update(speed=3), r"report\.rows\[0\] must have no keys but .*, got 'speed'"),
        (lambda data: data.pop("rows"), "report must have the key 'rows'"),
        (lambda data: data["provenance"].pop("date"), r"report\.provenance must have the key 'date'"),
        (
            lambda data: data["rows"][0]["results"]["Quire"].update(micros="7"),
            r"report\.rows\[0\]\.results\['Quire'\]\.micros must be a number of at least 0, got '7'",
        ),
        (
            lambda data: data["rows"][0]["results"]["Quire"].update(micros=0),
            r"report\.rows\[0\]\.results\['Quire'\]\.micros must be larger than 0, got 0",
        ),
        (
            lambda data: data["rows"][0]["results"]["Quire"].pop("micros"),
            r"report\.rows\[0\]\.results\['Quire'\] must have the key 'micros'",
        ),
        (lambda data: data["rows"][0].update(kind="verse"), r"report\.rows\[0\]\.kind must be one of decode, drafts"),
        (lambda data: data["rows"][0].update(num_seqs=2.5), r"num_seqs must be an integer of at least 0, got 2\.5"),
        (lambda data: data["ceilings"].update(bytes_per_second=0), r"bytes_per_second must be larger than 0, got 0"),
    ],
)
def test_a_broken_file_is_refused_with_its_name_and_the_place(make_report, tmp_path, change, message):
    data = small_report(make_report)
    change(data)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as caught:
        results.load(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [None, b"", b"[]", b"{}", b"3", b"not json", b"\xff\xfe\x00", b"[" * 100_000])
def test_what_is_no_report_is_refused(tmp_path, content):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"must be a results\.json of `quire bench`") as caught:
        results.load(path)
    assert str(path) in str(caught.value)


def test_the_results_of_another_tool_are_refused():
    with pytest.raises(
        ValueError, match=r"vllm_h200\.json must be a results\.json of `quire bench`, but report must have"
    ):
        results.load(RESULTS / "vllm_h200.json")
