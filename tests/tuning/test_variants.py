"""The sweep over variants and the fit of their numbers, with times that a known model invents."""

import json
import random
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from quire.cli import main
from quire.dispatch.constants import constants_of
from quire.dispatch.predict import Numbers, micros
from quire.dispatch.request import Options
from quire.drawn import flops_of
from quire.kernels.choose import kind_of, variants
from quire.kernels.work import lens_of, work_of
from quire.targets import TARGETS
from quire_tools.tuning.drawn import KINDS, MAX_BYTES, MAX_FLOPS, case_of, draw
from quire_tools.tuning.fit import cross_judged, fit_all, predicted, summary
from quire_tools.tuning.records import read_records
from quire_tools.tuning.sweep import Compilations, sweep
from quire_tools.tuning.timing import HALF, candidates

SM90 = TARGETS["sm90"]
CASES = list(islice(draw(7), 100))


def known(name: str) -> Numbers:
    """Return the numbers of a variant in the known model."""
    draw_number = random.Random(name.removesuffix(HALF))
    base = (2.5, 0.8, 0.45, 0.3, 0.24, 1.2, 0.06, 0.3)
    return Numbers(*(number * 2 ** draw_number.gauss(0, 0.4) for number in base))


def invented(case, names):
    """Return the times of variants of a case in the known model, with some noise."""
    noise, found = random.Random(case.name), candidates(case, SM90.properties)
    lens = tuple((q, s, 1) for q, s in case.lens)
    exact = {name: micros(work_of(found[name], lens), known(name)) for name in names}
    return {name: {"micros": time * (1 + noise.gauss(0, 0.01))} for name, time in exact.items()}


@pytest.fixture(scope="module")
def records(tmp_path_factory) -> list[Path]:
    """Records of three seeds, as the sweep writes them."""
    folder, paths = tmp_path_factory.mktemp("records"), []
    for seed in (1, 2, 3):
        paths.append(folder / f"{seed}.jsonl")
        header = {"device": "a made-up device", "properties": asdict(SM90.properties), "seed": seed}
        done = sweep(paths[-1], header, seed, 150, Compilations(SM90, 0), invented, seconds=600, say=lambda text: None)
        assert done == 150
    return paths


def test_cases_are_the_same_for_a_seed_within_limits_and_of_all_kinds():
    assert list(islice(draw(7), 100)) == CASES and CASES[0] != next(draw(8))
    assert all(case.nbytes <= MAX_BYTES and flops_of(case.spec, case.lens) <= MAX_FLOPS for case in CASES)
    assert len({kind_of(case.spec) for case in CASES}) >= len(set(KINDS))
    assert len({case.name for case in CASES}) == 100


def test_a_case_comes_back_from_its_line():
    assert [case_of(json.loads(json.dumps(case.as_json()))) for case in CASES] == CASES


def attending(found):
    """Return launches; of those that decode before, what attends."""
    return [getattr(launch, "attend", launch) for launch in found.values()]


@pytest.mark.parametrize("target", ["sm80", "sm86", "sm90", "sm120", "gfx942"])
def test_each_request_has_variants_and_each_of_these_some_work(target):
    properties = TARGETS[target].properties
    for case in CASES:
        request = case.request(properties)
        found = variants(request, Options(batch_invariant=case.batch_invariant))[0]
        assert 1 <= len(found) <= 30, (case, found)
        for launch in attending(found):
            for lens in (lens_of(request), tuple((q, s, 1) for q, s in case.lens)):
                work = work_of(launch, lens)
                assert work.programs > 0 and work.tiles >= work.longest > 0 and work.items >= work.programs - 1e-6
                assert work.nbytes > 0 and (work.partials > 1) >= (work.partial_bytes > 0)


def test_the_fit_predicts_as_plans_do():
    works = [
        work_of(launch, lens_of(case.request(SM90.properties)))
        for case in CASES[:30]
        for launch in attending(variants(case.request(SM90.properties), Options())[0])
    ]
    numbers = known("any")
    many = predicted(np.array(works, dtype=np.float64), np.array(numbers))
    assert np.allclose(many, [micros(work, numbers) for work in works], rtol=1e-12)


def test_more_work_never_takes_less_time():
    draws, numbers = random.Random(0), known("any")
    for case in CASES:
        for launch in attending(variants(case.request(SM90.properties), Options())[0]):
            work = work_of(launch, lens_of(case.request(SM90.properties)))
            for field in ("tiles", "nbytes"):
                more = work._replace(**{field: getattr(work, field) * (1 + draws.random())})
                if field == "tiles":
                    more = more._replace(longest=more.longest * more.tiles / work.tiles)
                assert micros(more, numbers) >= micros(work, numbers)


def test_a_known_model_is_found_again_and_its_best_variants_are_chosen(records):
    _, timed = read_records(records)
    assert len(timed) == 450
    judged = cross_judged(timed)
    of_all = summary(judged)
    assert of_all["median_error"] < 0.03 and of_all["error_95"] < 0.25, of_all
    equal = [each for each in judged if len(set(each.timed.case.lens)) == 1]  # whose lengths are their bounds
    assert len(equal) > 100
    assert summary(equal)["mean_regret"] < 1.05, summary(equal)


def test_numbers_come_near_those_of_the_model_where_many_cases_depend_on_them(records):
    fitted = fit_all(read_records(records)[1])
    name = "portable 16x64 w4 s3 p2 joined"
    found, true = fitted.kinds["128 2/2"][name], known(name)
    assert found.megabyte == pytest.approx(true.megabyte, rel=0.25), (found, true)


def test_a_sweep_that_is_cut_off_keeps_its_cases_and_is_read(records, tmp_path):
    cut = tmp_path / "cut.jsonl"
    cut.write_text(records[0].read_text()[:-300])
    assert len(read_records([cut])[1]) == 149


def test_a_sweep_goes_on_after_the_case_that_lost_the_device(tmp_path):
    path, names = tmp_path / "on.jsonl", []

    def measure(case, variants):
        names.append(case.name)
        if len(names) == 3:
            raise RuntimeError("an illegal memory access")
        return {variant: {"micros": 1.0} for variant in variants}

    def go_on():
        header = {"properties": asdict(SM90.properties)}
        sweep(path, header, 5, 6, Compilations(SM90, 0), measure, 60, lambda text: None)

    with pytest.raises(RuntimeError):
        go_on()
    go_on()
    assert names == [case.name for case in islice(draw(5), 6)]
    assert [each.case.name for each in read_records([path])[1]] == names[:2] + names[3:]


def test_what_does_not_compile_is_recorded_and_not_timed(tmp_path):
    class Failing(Compilations):
        def ask(self, case, families=()):
            asked = super().ask(case, families)
            first = next(iter(asked.values()))
            first._result = (1.0, "CompilationError: too large")
            return asked

    def measure(case, names):
        return {name: {"micros": 1.0} for name in names}

    path = tmp_path / "one.jsonl"
    header = {"properties": asdict(SM90.properties)}
    sweep(path, header, 5, 3, Failing(SM90, 0), measure, 60, lambda text: None)
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if "times" in line]
    assert len(lines) == 3
    for line in lines:
        wrong = [name for name, found in line["times"].items() if "wrong" in found]
        assert wrong and all(line["times"][name]["wrong"].startswith("CompilationError") for name in wrong)


def test_fit_prints_regret_and_writes_numbers(records, tmp_path, capsys):
    output = tmp_path / "numbers.json"
    assert main(["tune", "fit", *map(str, records[:2]), "--output", str(output)]) == 0
    text = capsys.readouterr().out
    assert "each seed by the others" in text and "mean regret" in text
    written = json.loads(output.read_text())
    assert written["fitted_on"]["device"] == "a made-up device"
    assert all(len(numbers) == 8 for kind in written["kinds"].values() for numbers in kind.values())


def test_a_fit_around_the_numbers_of_now_keeps_what_was_not_timed(records, tmp_path, capsys):
    output, now = tmp_path / "numbers.json", constants_of(SM90.properties)
    assert main(["tune", "fit", *map(str, records[:2]), "--around", "--output", str(output)]) == 0
    assert "each seed by the others" in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert written["fitted_on"]["around"] == now.name
    timed = {each.kind for each in read_records(records[:2])[1]}
    assert now.kinds.keys() - timed and now.kinds.keys() <= written["kinds"].keys()
    for kind, of_kind in now.kinds.items():
        if kind not in timed:
            assert written["kinds"][kind] == {name: list(own) for name, own in of_kind.items()}, kind
    before, after = now.kinds["128 2/2"], written["kinds"]["128 2/2"]
    name = "portable 16x64 w4 s3 p2 joined"
    assert after[name] != list(before[name]) and before.keys() <= after.keys()
    tile = Numbers(*after[name]).tile / before[name].tile
    assert tile == pytest.approx(1.0, abs=1.0)


def test_a_sweep_may_be_of_some_cases_and_kernels(tmp_path):
    path = tmp_path / "some.jsonl"
    header = {"properties": asdict(SM90.properties)}
    compilations = Compilations(SM90, 0)
    done = sweep(path, header, 5, 4, compilations, invented, 60, lambda text: None, "mixed", ("hopper",))
    lines = [line for line in map(json.loads, path.read_text().splitlines()) if "times" in line]
    assert len(lines) == done and 0 < done <= 4
    for line in lines:
        assert "mixed" in line["case"] and len(line["times"]) > 1
        assert all(name.startswith("hopper") for name in line["times"])


def test_a_sweep_without_a_gpu_and_records_that_are_not_there_say_what_to_do(tmp_path, capsys):
    assert main(["tune", "sweep", "--output", str(tmp_path / "x.jsonl")]) == 2
    assert "must have a GPU" in capsys.readouterr().err
    assert main(["tune", "fit", str(tmp_path / "none.jsonl")]) == 2
    assert "name others" in capsys.readouterr().err
