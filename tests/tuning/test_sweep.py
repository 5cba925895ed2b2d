"""The sweep with a made-up timer: stopped and resumed, wrong results kept out, the best of a known landscape found."""

import json

import pytest
import torch

import quire
from quire import targets
from quire.bench.cases import Case
from quire.cli import main
from quire.cli import tune as command
from quire.dispatch import tree as trees
from quire.dispatch.config import HINTS, KernelConfig
from quire.dispatch.tree import load_tree
from quire.targets import TARGETS
from quire.tuning.fit import explain
from quire.tuning.space import tiles
from quire.tuning.sweep import (
    HOPPER,
    Records,
    choice,
    configurations,
    default,
    features,
    header,
    jobs,
    key_of,
    launches,
    leaf_of,
    sweep,
    tile_of,
    validate,
)

TRAITS = TARGETS["sm90"].properties
FEW = [job for job in jobs(quick=True) if "Llama-3-8B" in job.case.name or "70B" in job.case.name]


def made_up_time(case, config) -> float:
    """Decode likes 64 keys and three programs, long contexts 128 keys; prompts like the Hopper kernel beyond 128 queries."""
    if config == HOPPER:
        return 9.0 if case.bounds["max_query_len"] >= 32 else 30.0
    likes = 128 if case.bounds["max_seq_len"] > 4096 else 64
    off = (
        abs(config.block_n - likes) / 32
        + abs(config.programs_per_sm - 3)
        + abs(config.num_stages - 3)
        + abs(config.num_warps - 4) / 4
    )
    return 10.0 + off + (abs(config.block_m - 64) / 16 if case.bounds["max_query_len"] > 16 else 0)


class MadeUp:
    """A session whose times are known, which may stop after so many of them."""

    calls: list = []
    stop_after: int | None = None

    def __init__(self, case) -> None:
        self.case = case

    def check(self, config):
        self.calls.append(("check", self.case.name, config))
        return (
            "error 3" if isinstance(config, KernelConfig) and config.num_stages == 2 and config.block_n == 32 else None
        )

    def time(self, configs, replays):
        times = []
        for config in configs:
            if self.stop_after is not None and sum(kind == "time" for kind, *_ in self.calls) >= self.stop_after:
                raise KeyboardInterrupt
            self.calls.append(("time", self.case.name, config, replays))
            times.append(made_up_time(self.case, config))
        return times


@pytest.fixture
def session(monkeypatch):
    monkeypatch.setattr(MadeUp, "calls", [])
    monkeypatch.setattr(MadeUp, "stop_after", None)
    return MadeUp


def start(path, **changes):
    return Records(
        path,
        header(
            "a made-up device",
            TRAITS,
            True,
            FEW,
            {"triton": "3.6.0", "torch": "2.11", "commit": "abc", "date": "today"},
        )
        | changes,
    )


def test_jobs_have_names_of_their_own_and_held_out_ones_share_no_shape():
    for quick in (True, False):
        chosen = jobs(quick)
        assert len({job.case.name for job in chosen}) == len(chosen)
        train = {(job.case.spec, job.case.lens) for job in chosen if not job.held_out}
        assert not train & {(job.case.spec, job.case.lens) for job in chosen if job.held_out}
        assert {job.case.model for job in chosen if job.held_out} - {
            job.case.model for job in chosen if not job.held_out
        }
    assert len(jobs(True)) < 200 < len(jobs(False))


@pytest.mark.parametrize("target", ["sm90", "sm86", "gfx942"])
def test_the_space_is_legal_and_holds_the_default(target):
    properties = TARGETS[target].properties
    for job in FEW:
        spec = job.case.spec
        for quick in (True, False):
            configs = configurations(job.case, properties, quick)
            assert len(set(configs)) == len(configs) and configs[0] == default(job.case, properties)
            assert all(
                t.shared_memory(spec) * t.programs_per_sm <= properties.shared_memory
                for t in configs[1:]
                if isinstance(t, KernelConfig)
            )
            assert (HOPPER in configs) == (target == "sm90" and job.case.bounds["max_query_len"] > 1)
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    every = list(tiles(spec, properties, 4, 128, 128))
    assert {t.block_m for t in every} == {16} and set(tiles(spec, properties, 4, 128, 128, quick=True)) < set(every)


def test_only_amd_s_compiler_is_given_hints():
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    every = {target: list(tiles(spec, TARGETS[target].properties, 1024, 128, 128)) for target in TARGETS}
    assert {target for target, some in every.items() if any(tile.hints for tile in some)} == {
        "gfx90a",
        "gfx942",
        "gfx950",
    }
    for target in ("gfx942", "gfx950"):
        waves, sizes = ([tile for tile in every[target] if tile.hints.keys() == {name}] for name in HINTS)
        assert waves and all(4 * tile.waves_per_eu == tile.num_warps * tile.programs_per_sm for tile in waves)
        assert sizes and all(tile.block_m >= 32 and tile.matrix_instr_nonkdim == 16 for tile in sizes)
        assert len(set(map(key_of, (tile.leaf for tile in every[target])))) == len(every[target])
        assert not any(tile.hints for tile in tiles(spec, TARGETS[target].properties, 1024, 128, 128, quick=True))
        case = Case("p", "prefill", ((256, 256),))
        assert tile_of(json.loads(json.dumps(waves[0].leaf)), case, TARGETS[target].properties) == waves[0]
    assert "waves_per_eu" not in every["sm90"][0].leaf and ", waves_per_eu 2" in explain(
        KernelConfig(64, 32, 4, 1, True, 2, 128, 128, 2).leaf
    )


def test_a_sweep_that_was_stopped_goes_on_with_nothing_lost(tmp_path, session):
    path = tmp_path / "records.jsonl"
    whole = start(tmp_path / "whole.jsonl")
    sweep(FEW, whole, TRAITS, True, session)
    timed = [call for call in session.calls if call[0] == "time"]
    session.calls.clear()

    session.stop_after = len(timed) // 2
    with pytest.raises(KeyboardInterrupt):
        sweep(FEW, start(path), TRAITS, True, session)
    with path.open("a") as file:
        file.write('{"case": "cut off in the mi')
    kept = start(path)
    assert len(kept.times) > 10 and kept.done and len(kept.done) < len(FEW)
    before = len([call for call in session.calls if call[0] == "time"])

    session.stop_after = None
    sweep(FEW, kept, TRAITS, True, session)
    again = [call for call in session.calls if call[0] == "time"][before:]
    lost = before + len(again) - len(timed)  # those of the round that was stopped, which were not yet written down
    assert 0 <= lost <= max(len(configurations(job.case, TRAITS, True)) for job in FEW)
    assert (
        start(path).times == whole.times
        and start(path).wrong == whole.wrong
        and start(path).done == {job.case.name for job in FEW}
    )
    session.calls.clear()
    sweep(FEW, start(path), TRAITS, True, session)
    assert not session.calls


def test_records_of_another_device_or_version_are_not_mixed(tmp_path):
    start(tmp_path / "records.jsonl")
    with pytest.raises(ValueError, match=r"triton '3\.6\.0' there, '3\.9\.0' here; name another file"):
        start(tmp_path / "records.jsonl", triton="3.9.0")


def test_wrong_results_are_never_timed_and_few_are_timed_long(tmp_path, session):
    records = start(tmp_path / "records.jsonl")
    sweep(FEW, records, TRAITS, True, session)
    timed = {(name, config) for kind, name, config, *_ in session.calls if kind == "time"}
    assert records.wrong and not [
        c for _, c in timed if isinstance(c, KernelConfig) and (c.num_stages, c.block_n) == (2, 32)
    ]
    long = [(name, config) for kind, name, config, *rest in session.calls if kind == "time" and rest == [15]]
    assert 0 < len(long) < len(timed)
    for job in FEW:
        names = {key_of(leaf_of(config)) for name, config in long if name == job.case.name}
        assert key_of(default(job.case, TRAITS).leaf) in names  # the default stays to the end
        right = [
            c
            for c in configurations(job.case, TRAITS, True)
            if (job.case.name, key_of(leaf_of(c))) not in records.wrong
        ]
        best = min(right, key=lambda c, case=job.case: made_up_time(case, c))
        assert min(records.of(job.case.name).items(), key=lambda item: item[1][max(item[1])])[0] == key_of(
            leaf_of(best)
        )


def test_cases_too_large_for_a_gpu_are_left_out(tmp_path, session):
    class Small(MadeUp):
        def __init__(self, case) -> None:
            if len(case.lens) >= 64:
                raise torch.cuda.OutOfMemoryError
            super().__init__(case)

    records = start(tmp_path / "records.jsonl")
    sweep(FEW, records, TRAITS, True, Small)
    rows = validate(FEW, records, command.fitted(FEW, records, TRAITS), TRAITS, Small, 25)
    assert (
        {job.case.name for job in FEW} - {row["case"] for row in rows}
        == {job.case.name for job in FEW if len(job.case.lens) >= 64}
        != set()
    )


def test_what_compiles_badly_is_out_but_for_the_default(tmp_path, session):
    records, job = start(tmp_path / "records.jsonl"), FEW[0]
    bad = frozenset((job.case.name, key_of(leaf_of(c))) for c in configurations(job.case, TRAITS, True)[:4])
    sweep([job], records, TRAITS, True, session, bad)
    assert len([why for why in records.wrong.values() if "compiles" in why]) == 3
    assert (job.case.name, key_of(default(job.case, TRAITS).leaf)) in records.times


def test_a_fitted_tree_chooses_what_is_best_also_where_it_was_not_fitted(tmp_path, session):
    records = start(tmp_path / "records.jsonl")
    sweep(FEW, records, TRAITS, True, session)
    tree = command.fitted(FEW, records, TRAITS)
    tree = json.loads(command.written(tree))
    assert (
        tree["properties"]["num_sms"] == TRAITS.num_sms
        and tree["fitted_on"]["commit"] == "abc"
        and tree["fitted_on"]["held_out"] == sum(job.held_out for job in FEW)
    )
    rows = validate(FEW, records, tree, TRAITS, session, 25)
    summary = command.summed_up(rows)
    assert (
        summary["training"]["mean"] < 1.02
        and summary["held_out"]["mean"] < 1.05
        and summary["held_out"]["over_default"] < 1
    )
    prompt = next(job.case for job in FEW if job.case.name.startswith("prefill 1 of 4096"))
    assert choice(prompt, tree, TRAITS) == HOPPER and "the Hopper kernel" in explain(tree["hopper"])
    assert "up to 1:\n  the portable kernels" in explain(["queries_per_seq", 1, False, "generic"])
    assert choice(prompt, {**tree, "hopper": False}, TRAITS) != HOPPER
    assert all(features(job.case, TRAITS)["head_dim"] == 128 for job in FEW) and [
        kind["head_dim"] for kind in tree["covers"]
    ] == [128]
    assert choice(FEW[0].case, load_tree("generic"), TRAITS) == default(FEW[0].case, TRAITS)


def test_a_tree_is_fitted_again_from_records_alone(tmp_path, session, capsys):
    path, place = tmp_path / "mine.jsonl", tmp_path / "mine.json"
    records = start(path)
    sweep(FEW, records, TRAITS, True, session)
    measured = len(session.calls)
    assert main(["tune", "--fit", str(path), "--output", str(place)]) == 0 and len(session.calls) == measured
    tree, text = json.loads(place.read_text()), capsys.readouterr().out
    assert tree["attention"] == json.loads(command.written(command.fitted(FEW, records, TRAITS)))["attention"]
    assert (
        tree["fitted_on"]["judged"] == "by the sweep's own times"
        and tree["fitted_on"]["regret"]["held_out"]["mean"] < 1.05
    )
    assert "held out: regret 1.0" in text and "a tree that no plan uses yet" in text
    assert main(["tune", "--fit", str(tmp_path / "none.jsonl"), "--output", str(place)]) == 2
    assert main(["tune", "--fit", str(path)]) == 2


def test_launches_that_compile_alike_are_compiled_once():
    some = [job.case for job in FEW[:3]]
    found = launches([(case, configurations(case, TRAITS, True)) for case in some], TRAITS)
    names = [name for stands_for in found.values() for name in stands_for]
    assert (
        len(names) == len(set(names)) == sum(len(configurations(case, TRAITS, True)) for case in some) > 2 * len(found)
    )


def test_the_command_stops_and_goes_on_and_writes_a_tree(tmp_path, session, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Made-Up Device")
    monkeypatch.setattr(targets, "current_target", lambda: TARGETS["sm90"])
    for name, stand_in in {
        "device_properties": lambda device: TRAITS,
        "OnGpu": session,
        "compile_beforehand": lambda *args: frozenset(),
    }.items():
        monkeypatch.setattr(command, name, stand_in)
    monkeypatch.setattr(command, "jobs", lambda quick: FEW)
    monkeypatch.setenv("HOME", str(tmp_path))
    session.stop_after = 100
    assert main(["tune", "--quick"]) == 130
    assert "the same command goes on from" in capsys.readouterr().err
    session.stop_after = None
    assert main(["tune", "--quick"]) == 0
    text = capsys.readouterr().out
    assert "plans use it from now on" in text and "held out: regret 1.0" in text and "held out: decode 2x3000" in text
    (place,) = (tmp_path / ".config" / "quire" / "trees").glob("a_made-up_device.json")
    tree = json.loads(place.read_text())
    assert tree["fitted_on"]["regret"]["held_out"]["mean"] < 1.05 and tree["fitted_on"]["commit"]
    assert "| decode 2x3000 Llama-3-70B | yes |" in place.with_suffix(".md").read_text()
    trees.forget_trees()
    assert trees.fitted_trees(TRAITS)[0] == (str(place), tree)  # nothing beside it is taken for a tree
    trees.forget_trees()
    assert main(["tune", "--explain", str(place)]) == 0
    assert "regret, held out" in capsys.readouterr().out
    assert (
        main(["tune", "--quick", "--records", str(place.with_suffix(".quick.jsonl"))]) == 0
    )  # nothing is measured twice but for the proof
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    assert main(["tune", "--quick", "--records", str(place.with_suffix(".quick.jsonl"))]) == 2
    assert "must be of the same sweep" in capsys.readouterr().err
