"""The sweep with made-up times: stopped and resumed, wrong results left out, the best of a known landscape found."""

import json
from dataclasses import dataclass, field

import pytest
import torch

import quire
from quire.cli import main
from quire.dispatch.config import HINTS, KernelConfig
from quire.dispatch.tree import fitted_trees, forget_trees
from quire.dispatch.tree_file import check_tree, load_tree, user_trees
from quire.targets import TARGETS
from quire_tools.bench.case import Case
from quire_tools.cli import tune_sweep
from quire_tools.cli.tune import explain_tree
from quire_tools.tuning.configs import (
    HOPPER,
    Config,
    config_of,
    configs_of,
    default_config,
    features,
    key_of,
    launches,
    leaf_of,
)
from quire_tools.tuning.fit import explain
from quire_tools.tuning.jobs import jobs
from quire_tools.tuning.judge import choice, summarize, validate
from quire_tools.tuning.records import Records, header
from quire_tools.tuning.space import legal_configs
from quire_tools.tuning.sweep import sweep
from quire_tools.tuning.train import as_json, train

SM90 = TARGETS["sm90"].properties
FEW = [job for job in jobs(quick=True) if "Llama-3-8B" in job.case.name or "70B" in job.case.name]
FACTS = {"triton": "3.6.0", "torch": "2.11", "commit": "abc", "date": "today"}
HEADER = header("a made-up device", SM90, True, FEW, FACTS)


def made_up_time(case: Case, config: Config) -> float:
    """Decode prefers 64 keys and three programs, long contexts 128 keys; prompts of 32 prefer the Hopper kernel."""
    if isinstance(config, str):
        return 9.0 if case.bounds["max_query_len"] >= 32 else 30.0
    best_block_n = 128 if case.bounds["max_seq_len"] > 4096 else 64
    off = abs(config.block_n - best_block_n) / 32 + abs(config.programs_per_sm - 3)
    off += abs(config.num_stages - 3) + abs(config.num_warps - 4) / 4
    return 10.0 + off + (abs(config.block_m - 64) / 16 if case.bounds["max_query_len"] > 16 else 0)


def is_wrong(config: Config) -> bool:
    """Some configurations give wrong results."""
    return isinstance(config, KernelConfig) and (config.num_stages, config.block_n) == (2, 32)


@dataclass
class Gpu:
    """A made-up GPU, which makes the sessions of a sweep.

    Attributes:
        max_seqs: a case of more sequences does not fit its memory.
        stop_after: times after which the user stops the sweep; never when None.
        checked: (case, configuration) of each check.
        timed: (case, configuration, replays) of each time.
    """

    max_seqs: int = 1 << 30
    stop_after: int | None = None
    checked: list[tuple[str, Config]] = field(default_factory=list)
    timed: list[tuple[str, Config, int]] = field(default_factory=list)

    def __call__(self, case: Case) -> "GpuSession":
        if len(case.lens) > self.max_seqs:
            raise torch.cuda.OutOfMemoryError
        return GpuSession(self, case)


@dataclass
class GpuSession:
    """What measures one case on the made-up GPU."""

    gpu: Gpu
    case: Case

    def check(self, config: Config) -> str | None:
        self.gpu.checked.append((self.case.name, config))
        return "error 3" if is_wrong(config) else None

    def time(self, configs, replays: int) -> list[float]:
        times = []
        for config in configs:
            if len(self.gpu.timed) == self.gpu.stop_after:
                raise KeyboardInterrupt
            self.gpu.timed.append((self.case.name, config, replays))
            times.append(made_up_time(self.case, config))
        return times


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def records(tmp_path) -> Records:
    return Records.open(tmp_path / "records.jsonl", HEADER)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home directory, and no tree remembered from other tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    forget_trees()
    yield tmp_path
    forget_trees()


def test_jobs_have_unique_names():
    for quick in (True, False):
        chosen = jobs(quick)
        assert len({job.case.name for job in chosen}) == len(chosen)
    assert len(jobs(True)) < 200 < len(jobs(False))


@pytest.mark.parametrize("quick", [True, False])
def test_held_out_jobs_share_no_shape_with_the_others_and_have_models_that_these_lack(quick):
    train_on = [job.case for job in jobs(quick) if not job.held_out]
    held_out = [job.case for job in jobs(quick) if job.held_out]
    assert not {(case.spec, case.lens) for case in train_on} & {(case.spec, case.lens) for case in held_out}
    assert {case.model for case in held_out} - {case.model for case in train_on}


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("target", ["sm90", "sm86", "gfx942"])
def test_the_space_is_legal_and_begins_with_the_default(target, quick):
    properties = TARGETS[target].properties
    for job in FEW:
        configs = configs_of(job.case, properties, quick)
        assert len(set(configs)) == len(configs)
        assert configs[0] == default_config(job.case, properties)
        for config in configs[1:]:
            if isinstance(config, KernelConfig):
                shared_memory = config.shared_memory(job.case.spec, properties)
                assert shared_memory * config.programs_per_sm <= properties.shared_memory
        assert (HOPPER in configs) == (target == "sm90" and job.case.bounds["max_query_len"] > 1)


def test_the_space_has_no_more_rows_than_a_sequence_and_less_of_it_is_tried_when_quick():
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    every = set(legal_configs(spec, SM90, 4))
    assert {config.block_m for config in every} == {16}
    assert set(legal_configs(spec, SM90, 4, quick=True)) < every


def test_only_amd_s_compiler_is_given_hints():
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    hinted = {
        target
        for target in TARGETS
        if any(config.hints for config in legal_configs(spec, TARGETS[target].properties, 1024))
    }
    assert hinted == {"gfx90a", "gfx942", "gfx950"}


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_hints_ask_for_the_waves_of_the_expected_programs_or_for_small_matrix_instructions(target):
    spec, properties = Case("p", "prefill", ((256, 256),)).spec, TARGETS[target].properties
    every = list(legal_configs(spec, properties, 1024))
    waves, sizes = ([config for config in every if config.hints.keys() == {name}] for name in HINTS)
    assert waves
    assert all(4 * config.waves_per_eu == config.num_warps * config.programs_per_sm for config in waves)
    assert sizes
    assert all(config.block_m >= 32 for config in sizes)
    assert all(config.matrix_instr_nonkdim == 16 for config in sizes)
    assert len({key_of(config.leaf) for config in every}) == len(every)
    assert not any(config.hints for config in legal_configs(spec, properties, 1024, quick=True))


def test_a_leaf_keeps_hints_and_leaves_out_those_that_are_not_given():
    case, properties = Case("p", "prefill", ((256, 256),)), TARGETS["gfx942"].properties
    hinted = KernelConfig(64, 32, 4, 1, True, 2, 128, 128, waves_per_eu=2)
    assert config_of(json.loads(json.dumps(hinted.leaf)), case, properties) == hinted
    assert ", waves_per_eu 2" in explain(hinted.leaf)
    assert "waves_per_eu" not in KernelConfig(64, 32, 4, 1, True, 2, 128, 128).leaf


def test_a_sweep_that_was_stopped_goes_on_and_finds_the_same(tmp_path, gpu):
    whole = Records.open(tmp_path / "whole.jsonl", HEADER)
    sweep(FEW, whole, SM90, True, gpu)

    path, stopped = tmp_path / "records.jsonl", Gpu(stop_after=len(gpu.timed) // 2)
    with pytest.raises(KeyboardInterrupt):
        sweep(FEW, Records.open(path, HEADER), SM90, True, stopped)
    with path.open("a") as file:
        file.write('{"case": "cut off in the mi')
    kept = Records.open(path, HEADER)
    assert len(kept.times) > 10
    assert 0 < len(kept.done) < len(FEW)

    resumed = Gpu()
    sweep(FEW, kept, SM90, True, resumed)
    lost = len(stopped.timed) + len(resumed.timed) - len(gpu.timed)  # of the round that was stopped
    assert 0 <= lost <= max(len(configs_of(job.case, SM90, True)) for job in FEW)
    for found in (kept, Records.read(path)):
        assert found.times == whole.times
        assert found.wrong == whole.wrong
        assert found.done == {job.case.name for job in FEW}


LATENTS = [job for job in jobs(quick=False) if job.case.spec.latent]


@pytest.mark.parametrize("target", TARGETS)
def test_latents_have_a_space_of_their_own(target):
    properties = TARGETS[target].properties
    for job in LATENTS:
        configs = configs_of(job.case, properties, quick=False)
        assert configs[0] == default_config(job.case, properties)
        assert len(configs) > 10
        assert HOPPER not in configs
        for config in configs:
            assert isinstance(config, KernelConfig)
            assert config.block_m <= max(16, features(job.case, properties)["rows_per_seq"])
            assert not config.full_tile_loop
        for config in configs[1:]:
            assert config.shared_memory(job.case.spec, properties) * config.programs_per_sm <= properties.shared_memory
        assert set(configs_of(job.case, properties, quick=True)) <= set(configs)


def test_latents_are_tuned_apart_from_keys_and_values(tmp_path, gpu):
    chosen = [*FEW, *LATENTS]
    records = Records.open(tmp_path / "records.jsonl", header("a made-up device", SM90, True, chosen, FACTS))
    sweep(chosen, records, SM90, True, gpu)
    tree = json.loads(as_json(train(chosen, records, SM90)))
    check_tree(tree)
    alone = Records.open(tmp_path / "alone.jsonl", HEADER)
    sweep(FEW, alone, SM90, True, gpu)
    without = train(FEW, alone, SM90)
    assert "mla" not in without
    assert tree["attention"] == without["attention"]
    assert len(tree["covers"]) > len(without["covers"])
    for job in LATENTS:
        found, best = choice(job.case, tree, SM90), min(records.last(job.case.name).values())
        assert made_up_time(job.case, found) <= 1.1 * best
        assert choice(job.case, without, SM90) == default_config(job.case, SM90)
    rows = validate(chosen, records, tree, SM90, gpu, 5)
    assert {row["case"] for row in rows} == {job.case.name for job in chosen}
    assert summarize(rows)["held_out"]["mean"] < 1.1
    text = explain_tree("fitted", tree)
    assert "configuration of the kernel for latents:" in text
    assert "configuration of the kernel for latents:" not in explain_tree("fitted", without)


def test_a_sweep_that_is_finished_measures_nothing(records, gpu):
    sweep(FEW, records, SM90, True, gpu)
    again = Gpu()
    sweep(FEW, Records.open(records.path, HEADER), SM90, True, again)
    assert not again.checked
    assert not again.timed


def test_records_of_another_device_or_version_are_not_mixed(records):
    with pytest.raises(ValueError, match=r"triton '3\.6\.0' there, '3\.9\.0' here; name another file"):
        Records.open(records.path, HEADER | {"triton": "3.9.0"})


def test_records_that_cannot_be_written_are_refused_before_anything_is_measured(records):
    for path in (records.path / "records.jsonl", records.path / "folder" / "records.jsonl"):  # below a file
        with pytest.raises(
            ValueError, match=r"records\.jsonl must be a file that can be written, got .*; name another"
        ):
            Records.open(path, HEADER)


LEAF = KernelConfig(16, 64, 4, 2, False, 1, 128, 128).leaf
TIME = {"case": "a", "config": LEAF, "round": 0, "micros": 9.5}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([{"rows": []}], "no device, jobs, properties, quick in the header, in line 1"),
        ([HEADER | {"properties": {}}], "no has_mfma, "),
        ([HEADER | {"jobs": "all"}], '"all" at jobs, which must be a list of names, in line 1'),
        ([HEADER | {"quick": 1}], "1 at quick"),
        ([[]], r"\[\] where an object is expected, in line 1"),
        ([HEADER, {}], "no case, config, micros, round in a line of a time, in line 2"),
        ([HEADER, {"done": 5}], "5 at done, which must be a string, in line 2"),
        ([HEADER, TIME, TIME | {"micros": "9"}], '"9" at micros, which must be a positive number, in line 3'),
        ([HEADER, TIME | {"micros": -1}], "-1 at micros"),
        ([HEADER, TIME | {"round": 0.5}], "0.5 at round"),
        ([HEADER, TIME | {"case": None}], "null at case"),
        ([HEADER, TIME | {"config": "block"}], '"block" at config'),
        ([HEADER, TIME | {"config": LEAF | {"block_m": 17}}], "block_m must be a power of two"),
        ([HEADER, TIME | {"config": {"tile": 1}}], "no block_m, "),
        ([HEADER, {"case": "a", "config": LEAF, "wrong": 1}], "1 at wrong"),
        ([HEADER, {"case": "a", "config": LEAF, "wrong": "x", "by": 1}], "the unknown 'by' in a line of a wrong"),
    ],
)  # fmt: skip
def test_malformed_records_are_refused_by_name_and_line(tmp_path, lines, reason):
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    before = path.read_bytes()
    for read in (Records.read, lambda path: Records.open(path, HEADER)):
        with pytest.raises(
            ValueError, match=f"records.jsonl must hold the records of a sweep, got .*{reason}"
        ) as raised:
            read(path)
        assert str(raised.value).endswith("; name a .jsonl file that `quire tune` wrote, or a new one")
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"\xff\xfe\x00", "text that is not UTF-8"),
        (b"hello\n", "invalid JSON in line 1"),
        (b"hello", "invalid JSON in line 1"),
        (b"[" * 100_000, "nested too deeply"),
        (json.dumps(HEADER).encode() + b"\n{\n" + json.dumps(TIME).encode(), "invalid JSON in line 2"),
    ],
)
def test_a_file_of_something_else_is_refused_and_left_as_it_is(tmp_path, content, reason):
    path = tmp_path / "records.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=reason):
        Records.open(path, HEADER)
    assert path.read_bytes() == content


def test_records_that_cannot_be_read_are_refused_by_name(tmp_path):
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none.jsonl", "No such file")):
        with pytest.raises(ValueError, match=f"{path.name} must hold the records of a sweep, got {reason}"):
            Records.read(path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="got nothing; sweep first"):
        Records.read(tmp_path / "empty.jsonl")


def test_wrong_results_are_never_timed(records, gpu):
    sweep(FEW, records, SM90, True, gpu)
    assert any(is_wrong(config) for _, config in gpu.checked)
    assert not any(is_wrong(config) for _, config, _ in gpu.timed)
    assert set(records.wrong.values()) == {"error 3"}


def test_few_configurations_are_timed_long_and_the_default_and_the_best_are_among_them(records, gpu):
    sweep(FEW, records, SM90, True, gpu)
    timed = {(name, config) for name, config, _ in gpu.timed}
    long = {(name, config) for name, config, replays in gpu.timed if replays == 15}
    assert 0 < len(long) < len(timed) / 2
    for job in FEW:
        name, configs = job.case.name, configs_of(job.case, SM90, True)
        assert (name, default_config(job.case, SM90)) in long
        best = min((c for c in configs if not is_wrong(c)), key=lambda config: made_up_time(job.case, config))
        assert (name, best) in long
        times = records.last(name)
        assert min(times, key=lambda key: times[key]) == key_of(leaf_of(best))


def test_cases_too_large_for_a_gpu_are_left_out(records):
    small = Gpu(max_seqs=63)
    sweep(FEW, records, SM90, True, small)
    rows = validate(FEW, records, train(FEW, records, SM90), SM90, small, 25)
    too_large = {job.case.name for job in FEW if len(job.case.lens) >= 64}
    assert too_large
    assert {job.case.name for job in FEW} - {row["case"] for row in rows} == too_large


def test_what_compiles_badly_is_left_out_but_for_the_default(records, gpu):
    job = FEW[0]
    bad = frozenset((job.case.name, key_of(leaf_of(c))) for c in configs_of(job.case, SM90, True)[:4])
    sweep([job], records, SM90, True, gpu, bad)
    assert len([wrong for wrong in records.wrong.values() if "compiles" in wrong]) == 3
    assert (job.case.name, key_of(default_config(job.case, SM90).leaf)) in records.times


def test_a_fitted_tree_chooses_what_is_best_also_where_it_was_not_fitted(records, gpu):
    sweep(FEW, records, SM90, True, gpu)
    tree = json.loads(as_json(train(FEW, records, SM90)))
    summary = summarize(validate(FEW, records, tree, SM90, gpu, 25))
    assert summary["training"]["mean"] < 1.02
    assert summary["held_out"]["mean"] < 1.05
    assert summary["held_out"]["over_default"] < 1


def test_a_fitted_tree_says_where_it_comes_from_and_what_it_covers(records, gpu):
    sweep(FEW, records, SM90, True, gpu)
    tree = json.loads(as_json(train(FEW, records, SM90)))
    assert tree["properties"]["num_sms"] == SM90.num_sms
    assert tree["fitted_on"]["commit"] == "abc"
    assert tree["fitted_on"]["held_out"] == sum(job.held_out for job in FEW)
    assert {features(job.case, SM90)["head_dim"] for job in FEW} == {128}
    assert [kind["head_dim"] for kind in tree["covers"]] == [128]


def test_the_choice_of_a_tree_is_that_of_plans(records, gpu):
    sweep(FEW, records, SM90, True, gpu)
    tree = train(FEW, records, SM90)
    prompt = next(job.case for job in FEW if job.case.name.startswith("prefill 1 of 4096"))
    assert choice(prompt, tree, SM90) == HOPPER
    assert choice(prompt, {**tree, "hopper": False}, SM90) != HOPPER
    assert choice(FEW[0].case, load_tree("generic"), SM90) == default_config(FEW[0].case, SM90)
    assert "the Hopper kernel" in explain(tree["hopper"])
    assert "up to 1:\n  the portable kernels" in explain(["queries_per_seq", 1, False, "generic"])


def test_a_tree_is_fitted_again_from_records_alone(tmp_path, records, gpu, capsys):
    place = tmp_path / "mine.json"
    sweep(FEW, records, SM90, True, gpu)
    measured = len(gpu.timed)
    assert main(["tune", "--fit", str(records.path), "--output", str(place)]) == 0
    assert len(gpu.timed) == measured
    tree, text = json.loads(place.read_text()), capsys.readouterr().out
    assert tree["attention"] == json.loads(as_json(train(FEW, records, SM90)))["attention"]
    assert tree["fitted_on"]["judged"] == "by the sweep's own times"
    assert tree["fitted_on"]["regret"]["held_out"]["mean"] < 1.05
    assert "held out: regret 1.0" in text
    assert "a tree that no plan uses yet" in text
    assert not list(tmp_path.glob("*.part"))


@pytest.mark.parametrize(("name", "used"), [("mine.json", True), ("mine", False)])
def test_the_command_says_whether_plans_use_a_tree(name, used, home, records, gpu, capsys, monkeypatch):
    folder = home / ".config" / "quire" / "trees"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)  # so that the folder is named by no path of its own
    sweep(FEW, records, SM90, True, gpu)
    assert main(["tune", "--fit", str(records.path), "--output", name]) == 0
    forget_trees()
    assert ("plans use it from now on" in capsys.readouterr().out) == used == bool(user_trees())


@pytest.mark.parametrize("name", ["mine.md", "records.json"])
def test_a_table_takes_no_other_file_s_place(name, tmp_path, records, gpu, capsys):
    sweep(FEW[:1], records, SM90, True, gpu)
    written = tmp_path / "records.md"
    written.write_bytes(records.path.read_bytes())
    assert main(["tune", "--fit", str(written), "--output", str(tmp_path / name)]) == 2
    assert "--output must not end in .md, nor have the records' name" in capsys.readouterr().err
    assert written.read_bytes() == records.path.read_bytes()


def test_records_survive_a_disk_that_is_full_when_a_sweep_goes_on(records, gpu, monkeypatch):
    sweep(FEW[:1], records, SM90, True, gpu)
    before = records.path.read_bytes()

    def write_a_part(path, text):
        path.write_bytes(text[:10].encode())
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(records.path), "write_text", write_a_part)
    with pytest.raises(ValueError, match="must be a file that can be written, got No space left"):
        Records.open(records.path, records.header)
    assert records.path.read_bytes() == before


def test_fitting_again_needs_records_and_an_output(tmp_path, records, capsys):
    assert main(["tune", "--fit", str(tmp_path / "none.jsonl"), "--output", str(tmp_path / "mine.json")]) == 2
    assert f"--fit must be a .jsonl file that `quire tune` wrote, got {tmp_path}" in capsys.readouterr().err
    assert main(["tune", "--fit", str(records.path)]) == 2


def test_launches_that_compile_alike_are_compiled_once():
    cases = [job.case for job in FEW[:3]]
    found = launches([(case, configs_of(case, SM90, True)) for case in cases], SM90)
    names = [name for stands_for in found.values() for name in stands_for]
    assert len(names) == len(set(names)) == sum(len(configs_of(case, SM90, True)) for case in cases)
    assert len(names) > 1.5 * len(found)


@pytest.fixture
def tune(home, gpu, monkeypatch, capsys):
    """`quire tune --quick` on the made-up GPU; returns the exit status, and what was printed to each stream."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Made-Up Device")
    monkeypatch.setattr(tune_sweep, "current_target", lambda: TARGETS["sm90"])
    monkeypatch.setattr(tune_sweep, "device_properties", lambda device: SM90)
    monkeypatch.setattr(tune_sweep, "GpuSession", gpu)
    monkeypatch.setattr(tune_sweep, "compile_beforehand", lambda *args: frozenset())
    monkeypatch.setattr(tune_sweep, "jobs", lambda quick: FEW)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["tune", "--quick", *arguments])
        return status, *capsys.readouterr()

    return run


def test_the_command_stops_and_goes_on(tune, gpu):
    gpu.stop_after = 100
    status, _, err = tune()
    assert status == 130
    assert "the same command continues from" in err
    gpu.stop_after = None
    status, out, _ = tune()
    assert status == 0
    assert "plans use it from now on" in out
    assert "held out: regret 1.0" in out
    assert "held out: decode 2x3000" in out


def test_the_command_writes_a_tree_where_plans_look_for_it(tune, home, capsys):
    assert tune()[0] == 0
    (place,) = (home / ".config" / "quire" / "trees").glob("*.json")
    assert place.name == "a_made-up_device.json"
    tree = json.loads(place.read_text())
    assert tree["fitted_on"]["regret"]["held_out"]["mean"] < 1.05
    assert tree["fitted_on"]["commit"]
    assert "| decode 2x3000 Llama-3-70B | yes |" in place.with_suffix(".md").read_text()
    forget_trees()
    assert fitted_trees(SM90)[0] == (str(place), tree)
    assert main(["tune", "--explain", str(place)]) == 0
    assert "regret, held out" in capsys.readouterr().out


def test_the_command_measures_nothing_twice_but_to_judge_the_tree(tune, gpu, tmp_path):
    path = str(tmp_path / "records.jsonl")
    assert tune("--records", path)[0] == 0
    gpu.timed.clear()
    assert tune("--records", path)[0] == 0
    assert {replays for _, _, replays in gpu.timed} == {tune_sweep.JUDGE_REPLAYS}


def test_the_command_does_not_mix_records_of_two_devices(tune, monkeypatch, tmp_path):
    path = str(tmp_path / "records.jsonl")
    assert tune("--records", path)[0] == 0
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    status, _, err = tune("--records", path)
    assert status == 2
    assert "must be of the same sweep" in err
