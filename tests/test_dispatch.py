"""Choices: numbers and where they come from, the variants that serve a request, and which of them a plan takes."""

import errno
import itertools
import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

import quire
from quire.compile_ahead.launches import launches_within
from quire.dispatch import constants
from quire.dispatch.config import HopperConfig, KernelConfig
from quire.dispatch.device import compile_for
from quire.dispatch.predict import Numbers, micros
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels import choose
from quire.kernels.hopper.variants import configs_of as hopper_configs
from quire.kernels.hopper.variants import tokens_of_tile
from quire.kernels.launch import kernels_of
from quire.kernels.portable.variants import configs_of as portable_configs
from quire.kernels.shared_prefix.launch import levels_of
from quire.kernels.work import lens_of, scenarios, tiles_of_sequence, units_of_band, work_of
from quire.launch_codec import decode, decode_options
from quire.plan import decide, decide_launch
from quire.targets import TARGETS

SPEC = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
PROPERTIES = replace(TARGETS["sm90"].properties, num_sms=120)  # of no device that was measured
LEAF = {"block_m": 16, "block_n": 32, "num_warps": 8, "num_stages": 2, "full_tile_loop": False, "programs_per_sm": 1}
E4M3, INT8 = torch.float8_e4m3fn, torch.int8


@pytest.fixture(autouse=True)
def user_files(tmp_path, monkeypatch):
    """A home directory with a folder for the user's numbers, and nothing remembered from other tests."""
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = tmp_path / ".config" / "quire" / "constants"
    folder.mkdir(parents=True)
    constants.forget()
    yield folder
    constants.forget()


def own_file(folder: Path, device=PROPERTIES, **changes) -> None:
    """Write numbers of a device into a folder of the user's."""
    factors = {"portable whole": [2.0] * 8}
    file = {"fitted_on": {"device": "mine"}, "properties": asdict(device), "factors": factors, "kinds": {}} | changes
    (folder / "mine.json").write_text(json.dumps(file))
    constants.forget()


def decided(max_query_len: int, max_seq_len: int, num_tokens: int, num_seqs: int, device=PROPERTIES, **options):
    """Return the launch that is decided for a batch, with cu_seqlens_q where sequences may have several queries."""
    bounds = Bounds(max_query_len, max_seq_len, num_tokens)
    return decide(Request(SPEC, num_seqs, max_query_len > 1, bounds, device), Options(**options))[0]


def test_a_user_s_own_numbers_come_first_where_they_were_measured(user_files):
    assert "mine.json" not in constants.constants_of(PROPERTIES).name
    own_file(user_files)
    assert constants.constants_of(PROPERTIES).name == str(user_files / "mine.json")
    assert constants.constants_of(replace(PROPERTIES, memory_gbps=4500)).name == str(user_files / "mine.json")
    assert constants.constants_of(replace(PROPERTIES, memory_gbps=4000)).name == "nvidia_h200, scaled"
    assert constants.constants_of(replace(PROPERTIES, num_sms=2)).name == "nvidia_h200, scaled"


def test_numbers_of_another_device_are_scaled_by_its_memory_and_clock():
    measured = TARGETS["sm90"].properties
    own, slower = constants.constants_of(measured), replace(measured, memory_gbps=2407, clock_mhz=1485)
    assert own.name == "nvidia_h200"
    found = constants.constants_of(slower)
    assert found.name == "nvidia_h200, scaled"
    of_memory, of_clock = ("megabyte", "partial_megabyte"), ("item", "tile", "sm_tile", "partial")
    for name, numbers in own.kinds["128 2/2"].items():
        for field, value in numbers._asdict().items():
            factor = 2 if field in of_memory else 4 / 3 if field in of_clock else 1
            assert getattr(found.kinds["128 2/2"][name], field) == pytest.approx(factor * value, rel=0.01)


@pytest.mark.parametrize("target", TARGETS)
def test_a_device_has_the_numbers_of_one_that_multiplies_like_it(target):
    properties = TARGETS[target].properties
    name = constants.constants_of(properties).name
    assert name.removesuffix(", scaled") == ("nvidia_h200_sm80" if properties.has_mma_sync else "nvidia_h200")
    assert name.endswith(", scaled") == (target != "sm90")


def test_a_decision_is_kept_until_numbers_are_forgotten(user_files):
    first = planned()
    assert planned().launch is first.launch
    assert planned(max_seq_len=1984).launch != first.launch
    assert planned(num_splits=2).launch != first.launch
    assert planned(batch_invariant=True).launch != first.launch
    own_file(user_files)
    assert "mine.json" in planned().reason and planned().launch is not first.launch
    assert planned().asked == first.asked  # which `torch.compile` has seen


def planned(**options) -> quire.Plan:
    """Plan a step of 32 decoding sequences for the device, with tensors of its own."""
    batch = quire.Batch(torch.zeros(32, 128, dtype=torch.int32), torch.zeros(32, dtype=torch.int32))
    with compile_for(PROPERTIES, on_compile=lambda *facts: None):
        return quire.plan(SPEC, batch, **{"max_query_len": 1, "max_seq_len": 2048} | options)


def test_a_plan_says_what_it_is_predicted_to_take():
    plan, more = planned(), planned(max_seq_len=4096)
    assert 0 < plan.predicted_us < more.predicted_us
    assert f"predicted {plan.predicted_us:.3g} µs" in str(plan)
    equal, shorter = plan.predict([2048] * 32), plan.predict([2048] + [64] * 31)
    assert equal == pytest.approx(plan.predicted_us) and shorter < equal
    with pytest.raises(ValueError, match="query_lens must have a number for each of 2 sequences, got 1"):
        plan.predict([5, 6], [1])


SHARED = {  # samples, keys of their prompt: µs that shares it, and flat (docs/results/intervals_h200.md)
    (64, 8192): (64.6, 322.7), (8, 2048): (23.1, 17.4), (16, 1024): (22.9, 18.5), (4, 8192): (27.9, 32.7),
    (8, 4096): (26.5, 27.3), (16, 2048): (24.8, 28.4), (64, 512): (40.8, 41.7), (2, 32768): (52.2, 74.5),
    (8, 8192): (31.1, 47.2), (32, 2048): (34.0, 50.7), (64, 1024): (42.3, 60.2),
}  # fmt: skip


@pytest.mark.parametrize(("samples", "prompt"), SHARED)
def test_a_prefix_is_worth_sharing_where_an_h200_took_less(samples, prompt):
    batch = quire.Batch(*(torch.zeros(samples, *more, dtype=torch.int32) for more in ((1,), ())))
    bounds, (once, again) = {"max_query_len": 1, "max_seq_len": prompt + 256}, SHARED[samples, prompt]
    with compile_for(TARGETS["sm90"].properties, on_compile=None):
        assert quire.is_worth_sharing(SPEC, batch, shared_prefix=prompt, **bounds) == (once < again)
        assert not quire.is_worth_sharing(replace(SPEC, sliding_window=64), batch, shared_prefix=prompt, **bounds)
        plan = quire.plan(SPEC, batch, **bounds, shared_prefix=prompt)
        assert plan.predicted_us == pytest.approx(once, rel=0.2)
    assert not quire.is_worth_sharing(SPEC, batch, shared_prefix=prompt, **bounds)  # PyTorch serves the CPU


def test_a_choice_is_of_the_least_predicted_time_where_lengths_are_known():
    """Of one sequence, the bounds say all."""
    draw = random.Random(3)
    for _ in range(60):
        queries = draw.choice((1, 1, draw.randint(2, 40), draw.randint(41, 5000)))
        request = Request(SPEC, 1, queries > 1, Bounds(queries, draw.randint(queries, 60000), queries), PROPERTIES)
        found, _ = choose.variants(request, Options())
        launch, _ = decide(request, Options())
        least = min(choose.predicted(each, lens_of(request)) for each in found.values())
        assert choose.predicted(launch, lens_of(request)) == least and choose.predicted_us(launch) == least


def test_each_variant_has_the_name_by_which_its_numbers_are_found():
    for target in ("sm90", "sm80", "gfx942"):
        for spec, queries, invariant in itertools.product(
            (SPEC, quire.AttentionSpec.mla(num_q_heads=64, softmax_scale=0.1)), (1, 7, 300), (False, True)
        ):
            request = Request(spec, 5, queries > 1, Bounds(queries, 3000, 2 * queries + 3), TARGETS[target].properties)
            found, _ = choose.variants(request, Options(batch_invariant=invariant))
            assert found and all(choose.variant_of(launch) == name for name, launch in found.items())


def test_up_to_eight_rows_below_eight_bits_may_have_turned_products_where_mma_sync_multiplies():
    for kv_format, target, queries in itertools.product((None, "int4"), ("sm90", "sm80", "gfx942"), (1, 2, 3)):
        spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, kv_format=kv_format)
        request = Request(spec, 9, queries > 1, Bounds(queries, 3000, 9 * queries), TARGETS[target].properties)
        found = choose.variants(request, Options(kernel="portable"))[0].values()
        rows = {launch.config.block_m for launch in found}
        assert (8 in rows) == (kv_format == "int4" and target != "gfx942" and queries < 3), (kv_format, target, queries)
        assert max(rows) >= 16


def test_more_bytes_products_and_partials_take_longer():
    numbers = Numbers(2.0, 1.0, 0.5, 0.2, 0.25, 1.0, 0.05, 0.3)
    for queries, num_seqs in ((1, 40), (300, 3)):
        request = Request(SPEC, num_seqs, queries > 1, Bounds(queries, 9000, num_seqs * queries), PROPERTIES)
        for launch in choose.variants(request, Options())[0].values():
            for _, lens in scenarios(request):
                work = work_of(launch, lens)
                for field in ("tiles", "nbytes", "items"):
                    more = work._replace(**{field: 1.5 * getattr(work, field)})
                    assert micros(more, numbers) >= micros(work, numbers) > 0, (launch, field)


def test_row_blocks_are_counted_as_the_kernel_packs_rows():
    for group, queries, rows in itertools.product((1, 3, 5, 6, 7, 12, 24), (1, 2, 5, 40), (16, 64)):
        blocks, tiles, most = tiles_of_sequence((1 << 30, 0), queries, 640 + queries, rows / group, 64)
        assert blocks == -(-queries * group // rows)
        assert 10 <= most <= 11 and blocks * 10 <= tiles <= blocks * 12


def test_tiles_of_a_window_are_those_that_hold_a_key_of_it():
    for left, queries, keys, size in itertools.product((0, 19, 63, 200), (1, 2, 7), (7, 64, 357, 1000), (16, 64)):
        first = max(0, keys - queries - left)  # key that the first query sees
        tiles = {key // size for key in range(first, keys)}
        assert units_of_band(left, queries, keys, size) == len(tiles)
        assert tiles_of_sequence((left, 0), queries, keys, 16, size) == (1, len(tiles), len(tiles))


def test_a_tile_of_fewer_columns_takes_as_much_less_time():
    numbers = Numbers(2.0, 1.0, 5.0, 2.0, 0.0, 1.0, 0.05, 0.3)
    for kernel, columns, share in (
        ("portable", (32, 512), 0.56),
        ("portable", (176, 176), 1.0),
        ("hopper", (176, 176), 0.78),
    ):
        spec = quire.AttentionSpec(num_q_heads=16, num_kv_heads=4, head_dim=columns[0], head_dim_v=columns[1])
        request = Request(spec, 9, True, Bounds(8, 3000, 72), PROPERTIES)
        for launch in choose.variants(request, Options(kernel=kernel))[0].values():
            work = work_of(launch, lens_of(request))
            assert work.width == pytest.approx(share, abs=0.01)
            assert micros(work, numbers) < micros(work._replace(width=1.01), numbers)


def test_the_user_s_decision_trees_are_refused(tmp_path, monkeypatch):
    folder = tmp_path / ".config" / "quire" / "trees"
    folder.mkdir()
    assert planned().launch  # an empty folder holds none
    (folder / "mine.json").write_text("{}")
    constants.forget()
    with pytest.raises(ValueError, match=r"must have no decision trees, got mine\.json; plans take the variant of"):
        planned()
    monkeypatch.setenv("QUIRE_TREES", str(tmp_path / "elsewhere"))
    constants.forget()
    assert planned().launch


def check_that_it_is_left_out(path: Path, reason: str) -> None:
    """Assert that planning goes on without the file, and that one warning, given once, names it."""
    constants.forget()
    with pytest.warns(UserWarning) as warned:
        found = constants.constants_of(PROPERTIES)
        constants.constants_of(replace(PROPERTIES, num_sms=2))
    (message,) = [str(w.message) for w in warned]
    assert message.startswith(f"{path} must be what `quire tune fit` wrote, got ")
    assert reason in message
    assert message.endswith("fit the numbers again, or move the file away. Quire plans without it.")
    assert found.name == "nvidia_h200, scaled"


@pytest.mark.parametrize(
    ("part", "value", "reason"),
    [
        ("properties", {"num_sms": 3}, "at properties, which must have"),
        ("properties", [], "[] at properties"),
        ("factors", [], "[] at factors, which must be an object"),
        ("factors", {"mla": [1.0] * 7}, "at factors.mla, which must be 8 numbers from 0"),
        ("factors", {"mla": [1.0] * 7 + [-1]}, "at factors.mla"),
        ("factors", {"mla": [1.0] * 7 + ["1"]}, "at factors.mla"),
        ("factors", {"mla": [1.0] * 7 + [float("inf")]}, "at factors.mla"),
        ("kinds", [], "[] at kinds, which must be an object"),
        ("kinds", {"128 2/2": 3}, "3 at kinds.128 2/2, which must be an object"),
        ("kinds", {"128 2/2": {"mla": 3}}, "3 at kinds.128 2/2.mla, which must be 8 numbers from 0"),
    ],
)
def test_a_user_s_file_that_is_not_sound_is_left_out_with_a_warning(user_files, part, value, reason):
    own_file(user_files, **{part: value})
    check_that_it_is_left_out(user_files / "mine.json", reason)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "invalid JSON"),
        (b"{", "invalid JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe", "not UTF-8"),
        (b"[]", "[] where an object with fitted_on, properties, factors, kinds is expected"),
        (b"{}", "{} where an object"),
        (b"1" * 5000, "digits"),
    ],
)
def test_a_file_that_holds_no_numbers_is_left_out(user_files, content, reason):
    (user_files / "mine.json").write_bytes(content)
    check_that_it_is_left_out(user_files / "mine.json", reason)


def test_what_is_not_a_readable_file_is_left_out_and_a_pipe_is_never_opened(user_files):
    path = user_files / "mine.json"
    path.mkdir()
    check_that_it_is_left_out(path, "not a regular file")
    path.rmdir()
    path.symlink_to(user_files / "gone")
    check_that_it_is_left_out(path, "No such file")
    path.unlink()
    os.mkfifo(path)
    check_that_it_is_left_out(path, "not a regular file")


def test_a_file_without_permission_is_left_out(user_files, monkeypatch):
    own_file(user_files)
    (user_files / "mine.json").chmod(0)
    if os.access(user_files / "mine.json", os.R_OK):  # root may read every file
        monkeypatch.setattr(Path, "read_text", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        constants.load("nvidia_h200")
    check_that_it_is_left_out(user_files / "mine.json", "Permission denied")


def test_a_broken_file_does_not_hide_a_sound_one(user_files):
    own_file(user_files)
    (user_files / "broken.json").write_text("{")
    with pytest.warns(UserWarning, match=r"broken\.json must be"):
        assert "mine.json" in constants.constants_of(PROPERTIES).name


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ".config/quire/constants"),
        ({"XDG_CONFIG_HOME": "{tmp}/settings"}, "settings/quire/constants"),
        ({"XDG_CONFIG_HOME": "relative"}, ".config/quire/constants"),
        ({"XDG_CONFIG_HOME": ""}, ".config/quire/constants"),
        ({"XDG_CONFIG_HOME": "{tmp}/settings", "QUIRE_CONSTANTS": "{tmp}/mine"}, "mine"),
        ({"QUIRE_CONSTANTS": "~/mine"}, "mine"),
    ],
)
def test_variables_say_where_the_files_are(variables, expected, tmp_path, monkeypatch):
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(tmp=tmp_path))
    folder = constants.user_folder()
    assert folder == tmp_path / expected
    folder.mkdir(parents=True, exist_ok=True)
    own_file(folder)
    assert "mine.json" in constants.constants_of(PROPERTIES).name


IMPORT_AND_PLAN = """
import pwd
pwd.getpwuid = {}.__getitem__  # no user has an entry
import torch, quire
spec = quire.AttentionSpec(num_q_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float32)
batch = quire.Batch(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
quire.plan(spec, batch, max_query_len=1, max_seq_len=1)
from quire.dispatch import constants
from quire.dispatch.device import device_properties
assert constants.user_folder() is None
print(constants.constants_of(device_properties(torch.device("cpu"))).name)
"""


@pytest.mark.slow
def test_a_user_without_a_home_directory_has_no_files():
    """As in containers with arbitrary user ids: neither HOME nor an entry in the list of users."""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    command = [sys.executable, "-c", IMPORT_AND_PLAN]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nvidia_h200, scaled")


@pytest.mark.slow
def test_no_file_is_read_at_import(user_files):
    """A broken file of the user's warns when something is planned for a GPU, not before."""
    (user_files / "broken.json").write_text("{")
    code = (
        "import quire\nfrom quire.dispatch import constants\n"
        "print(*[f.cache_info().misses for f in (constants.user_files, constants.load)])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "0 0\n"
    assert "broken" not in done.stderr


def test_shipped_numbers_are_sound_and_say_where_they_come_from():
    for name, file in constants.shipped_files():
        constants.check(file)
        assert {"device", "commit", "date", "seeds", "cases", "judged_by_other_seeds"} <= file["fitted_on"].keys(), name


def test_batch_invariant_tiles_have_as_many_keys_for_every_number_of_queries():
    for device in (PROPERTIES, TARGETS["sm86"].properties, TARGETS["gfx942"].properties):
        found = [
            launch
            for queries, keys in itertools.product((1, 4, 8, 16, 64, 2048), (40, 2048, 8192))
            for request in [Request(SPEC, 1, True, Bounds(queries, max(queries, keys), queries), device)]
            for launch in choose.variants(request, Options(batch_invariant=True))[0].values()
        ]
        found += [launch.fallback for launch in found if launch.name == "hopper"]
        assert {launch.config.block_m for launch in found if launch.name != "hopper"} >= {16, 32}
        tiles = {launch.config.block_n for launch in found}
        splits = {launch.fixed_split_size for launch in found}
        assert len(tiles) == len(splits) == 1 and splits.pop() % tiles.pop() == 0


def test_taller_batch_invariant_tiles_are_for_devices_that_round_them_alike():
    def rows(device, dtype=torch.bfloat16):
        spec = replace(SPEC, kv_dtype=dtype)
        request = Request(spec, 1, True, Bounds(2048, 2048, 2048), device)
        found = choose.variants(request, Options(batch_invariant=True, kernel="portable"))[0].values()
        for launch in found:
            assert (launch.fallback is None) == (dtype is torch.bfloat16 or launch.config.block_m == 16)
        return {launch.config.block_m for launch in found}

    unknown = replace(PROPERTIES, has_wgmma=False)  # has Hopper's shared memory
    assert rows(unknown) == {16, 32}
    older = replace(unknown, supports_pdl=False)
    amd = replace(older, has_mfma=True, shared_memory=65536)
    assert rows(older) == {16, 32, 64} and rows(PROPERTIES) == {16, 32, 64, 128}
    request = Request(SPEC, 1, False, Bounds(1, 2048, 1), amd)
    assert decide(request, Options(batch_invariant=True))[0].config.matrix_instr_nonkdim == 16
    assert rows(PROPERTIES, E4M3) == {16, 32, 64}
    assert rows(older, torch.float8_e5m2) == {16, 32}  # mma.sync takes both operands from registers
    assert rows(amd, E4M3) == rows(PROPERTIES, INT8) == {16}


def test_every_width_of_a_16_bit_cache_has_configurations_of_the_hopper_kernel_and_of_the_portable_one():
    for head_dim, head_dim_v in itertools.product(range(16, 513, 8), (16, 72, 128, 200, 512)):
        spec = replace(SPEC, head_dim=head_dim, head_dim_v=head_dim_v)
        assert 1 <= len(hopper_configs(spec, PROPERTIES, False)) <= 8, (head_dim, head_dim_v)
        for target in TARGETS.values():
            found = portable_configs(spec, target.properties)
            assert 1 <= len(found) <= 8
            assert all(
                c.shared_memory(spec, target.properties) <= target.properties.shared_memory for c in found.values()
            )


@pytest.mark.parametrize(
    ("group_size", "apart", "tokens"),
    [(1, False, 128), (4, False, 32), (5, False, 25), (7, False, 18), (13, False, 9), (1, True, 128), (5, True, 24)],
)
def test_work_tiles_have_all_heads_of_a_group_where_few_rows_are_left_over(group_size, apart, tokens):
    assert tokens_of_tile(128, group_size, apart) == tokens
    if apart:
        config = HopperConfig(2, tokens, 64, 2, 2, apart=True)
        with pytest.raises(ValueError, match="apart must be False with num_warpgroups 1"):
            replace(config, num_warpgroups=1, block_t=8)
        with pytest.raises(ValueError, match="apart must be False with num_warpgroups 2 and block_t 7"):
            replace(config, block_t=7)


@pytest.mark.parametrize(
    ("reason", "target", "changes"),
    [
        ("GPUs other than Hopper", "sm80", {}),
        ("float32 queries", "sm90", {"dtype": torch.float32, "kv_dtype": torch.float32}),
        ("head_dim 256 of a float8_e4m3fn cache", "sm90", {"head_dim": 256, "head_dim_v": 256, "kv_dtype": E4M3}),
        ("head_dim 80 of a int8 cache", "sm90", {"head_dim": 80, "head_dim_v": 80, "kv_dtype": INT8}),
        ("head_dim 128 with head_dim_v 64 of a int8 cache", "sm90", {"head_dim_v": 64, "kv_dtype": INT8}),
    ],
)
def test_what_the_hopper_kernel_does_not_serve(reason, target, changes):
    request = Request(replace(SPEC, **changes), 1, True, Bounds(99, 99, 99), TARGETS[target].properties)
    assert choose.variants(request, Options())[1]["hopper"] == reason
    with pytest.raises(quire.UnsupportedError, match=f"got 'hopper', which does not serve {reason}"):
        decide(request, Options(kernel="hopper"))


def test_intervals_take_the_variants_that_a_band_does():
    for max_query_len, max_seq_len, num_seqs, num_tokens in itertools.product(
        (1, 16, 33, 64, 512), (512, 4096, 16384), (1, 8), (None, 600)
    ):
        bounds = Bounds(max_query_len, max_seq_len, num_tokens or num_seqs * max_query_len)
        request = Request(SPEC, num_seqs, True, bounds, PROPERTIES)
        band, seen = (choose.variants(replace(request, has_intervals=has), Options())[0] for has in (False, True))
        assert {name for name in band if not name.endswith(" cut")} <= seen.keys() <= band.keys()
        for name, launch in seen.items():
            assert launch.request.has_intervals and "intervals of keys" in str(launch)
            assert band[name].compile_keys() != launch.compile_keys()


@pytest.mark.parametrize(
    ("num_q_heads", "queries", "kv_dtype", "allow_fp8", "may"),
    [
        (128, 1, E4M3, True, True),
        (33, 1, E4M3, True, True),
        (16, 4, E4M3, True, True),
        (32, 1, E4M3, True, True),
        (16, 1, E4M3, True, False),
        (128, 1, E4M3, False, False),
        (128, 1, None, True, False),
    ],
)
def test_products_over_latents_are_in_fp8_only_if_that_is_allowed_and_there_are_many_rows(
    num_q_heads, queries, kv_dtype, allow_fp8, may
):
    spec = quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=0.1, kv_dtype=kv_dtype, allow_fp8=allow_fp8)
    request = Request(spec, 8, queries > 1, Bounds(queries, 4096, 8 * queries), PROPERTIES)
    found, _ = choose.variants(request, Options())
    num_rows = num_q_heads * queries
    blocks = ["few"] if num_rows <= 16 else ["narrow"] if num_rows <= 32 else ["narrow", "wide"]
    for how in ("cut", "whole"):
        names = {f"mla_hopper {rows} {how}" for rows in blocks}
        every = {name for name in found if name.startswith("mla_hopper") and name.endswith(how)}
        assert every == names | ({f"mla_hopper fp8 {how}"} if may else set())
        assert all(found[name].constexprs()["FP8_MMA"] is False for name in names)
        if may:
            launch = found[f"mla_hopper fp8 {how}"]
            assert launch.constexprs()["FP8_MMA"] and "products in fp8" in str(launch)
    assert decide(request, Options(batch_invariant=True))[0].name == "mla"


def test_a_request_that_no_family_serves_names_what_each_refused():
    latent = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1)
    request = Request(latent, 8, True, Bounds(64, 4096, 512), PROPERTIES, has_intervals=True)
    refused = (
        "mla_hopper does not serve intervals of keys, .*mla does not serve intervals of keys, hopper does not serve"
    )
    with pytest.raises(quire.UnsupportedError, match=refused):
        decide(request, Options())


def test_batch_invariant_prompts_with_wide_values_have_a_part_of_the_columns_at_a_time():
    def of(head_dim_v):
        spec = quire.AttentionSpec(num_q_heads=16, num_kv_heads=8, head_dim=256, head_dim_v=head_dim_v)
        request = Request(spec, 1, True, Bounds(2048, 2048, 2048), PROPERTIES)
        return decide(request, Options(batch_invariant=True))[0]

    wide, narrow = of(256), of(128)
    assert (wide.name, wide.column_parts, narrow.name, narrow.column_parts) == ("hopper", 2, "hopper", 1)
    assert wide.num_work_tiles(2048) == 2 * narrow.num_work_tiles(2048)
    # Two parts of 128 have columns in common, which both compute.
    shared = of(200)
    assert (shared.name, shared.column_parts, shared.part_width, shared.last_part) == ("hopper", 2, 128, 72)
    assert (wide.last_part, narrow.last_part, narrow.part_width) == (None, None, 128)
    # Both have three parts of 128, of which one launch has no column in common.
    even, uneven = of(384), of(344)
    assert even.constexprs() == uneven.constexprs() and even.compile_keys() != uneven.compile_keys()


def test_compiled_code_decides_as_the_plan_did_and_sees_one_text():
    """The operator knows the batch, and two strings and some numbers. The strings are those of all steps."""
    rng, texts, kernels = random.Random(0), set(), set()
    spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=4, head_dim=128)
    for _ in range(200):
        lens = [rng.choice([1, 1, 4, 300]) for _ in range(rng.randint(1, 40))]
        longest = rng.choice([300, 2000, 30_000])
        bounds = Bounds(max(lens), longest + max(lens), sum(lens))
        levels = [[(len(lens), 256)]] if rng.random() < 0.2 else None
        starts = None if max(lens) == 1 else torch.tensor([0, *lens]).cumsum(0).int()
        batch = quire.Batch(torch.zeros(len(lens), 2048).int(), torch.zeros(len(lens)).int(), starts)
        with compile_for(TARGETS["sm90"].properties, on_compile=lambda *facts: None):
            plan = quire.plan(spec, batch, **asdict(bounds), shared_prefix=levels)
            text, options, numbers = plan.asked
            decided = decide_launch(decode(text), batch, bounds, decode_options(options), levels_of(numbers))
        assert decided == (plan.launch, plan.reason)
        texts.add((text, options))
        kernels.add(plan.kernel)
    assert len(texts) == 1 and {"split_kv", "hopper", "shared_prefix"} <= kernels


def test_decoding_sequences_grow_for_64_steps_with_one_decision():
    """The plan's own bounds are exact, and so is the decision where tiles or queries may depend on each key."""
    steps = [planned(max_seq_len=keys) for keys in range(1985, 2049)]
    assert all(step.launch is steps[-1].launch for step in steps)
    assert [step.bounds.max_seq_len for step in steps] == list(range(1985, 2049))
    assert "1985 keys" in str(steps[0])
    assert planned(max_seq_len=2049).launch is not steps[-1].launch
    for bounds in (Bounds(1, 63, 4), Bounds(2, 1985, 8), Bounds(1985, 1985, 1985), Bounds(0, 1985, 0)):
        assert bounds.for_decision() is bounds


def test_a_plan_from_a_kept_decision_is_checked_as_the_first_one_was():
    first = planned()
    assert first.workspace is not None
    small, fitting = (torch.zeros(first.workspace.numel() - less, dtype=torch.uint8) for less in (1, 0))
    assert planned(workspace=fitting).workspace is fitting
    with pytest.raises(ValueError, match="workspace must be uint8 with at least"):
        planned(workspace=small)
    with pytest.raises(TypeError, match="max_seq_len must be an integer"):
        planned(max_seq_len=2048.0)
    with pytest.raises(quire.UnsupportedError, match="kernel must be"):
        planned(kernel="mla")
    for _ in range(2):  # a refusal is no decision that is kept
        with pytest.raises(ValueError, match="config must have block_d"):
            planned(config=KernelConfig(**LEAF, block_d=16, block_dv=16))


@pytest.mark.parametrize(
    "changes",
    [
        {"block_m": 24}, {"block_m": 0}, {"block_m": None}, {"block_n": 8}, {"block_d": -16}, {"block_dv": 17},
        {"num_warps": 64}, {"num_warps": 3}, {"num_stages": 0}, {"num_stages": 2.0}, {"num_stages": True},
        {"programs_per_sm": 0}, {"full_tile_loop": "no"}, {"waves_per_eu": -1}, {"matrix_instr_nonkdim": 8},
    ],
)  # fmt: skip
def test_a_kernel_config_must_be_legal(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name} must be .*, got .*; "):
        replace(KernelConfig(**LEAF, block_d=128, block_dv=128), **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"num_warpgroups": 3}, {"block_t": 256}, {"block_t": 0}, {"block_n": 100}, {"num_stages": 0},
        {"num_q_stages": 0}, {"num_quantised_stages": -1}, {"fp8_mma": 2},
    ],
)  # fmt: skip
def test_a_hopper_config_must_be_legal(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name} must be .*, got .*; "):
        replace(HopperConfig(2, 32, 128, 2, 2), **changes)


def test_a_hopper_config_for_fp8_has_two_warpgroups_and_stages_for_bytes():
    with pytest.raises(ValueError, match="num_warpgroups must be 2"):
        HopperConfig(1, 32, 64, 2, 2, num_quantised_stages=1)
    with pytest.raises(ValueError, match="num_quantised_stages must be at least 1"):
        HopperConfig(2, 32, 64, 2, 2, fp8_mma=True)


def test_launches_have_one_key_if_and_only_if_they_have_one_kernel():
    """The programs of an SM are no constexpr, but constexprs follow from them."""
    launches = []
    devices = PROPERTIES, TARGETS["sm80"].properties  # of which one combines in a second launch
    for device, num_kv_heads, programs, keys in itertools.product(devices, (2, 12), (1, 2), (128, 2048, 32768)):
        spec = replace(SPEC, num_q_heads=12, num_kv_heads=num_kv_heads, head_dim=128)
        config = KernelConfig(16, 64, 4, 3, False, programs, 128, 128)
        launch, _ = decide(Request(spec, 1, False, Bounds(1, keys, 1), device), Options(config=config))
        launches.append(launch)

    def kernels(launch):
        combine = launch.combine_constexprs() if getattr(launch, "has_combine_launch", False) else None
        return launch.name, launch.constexprs(), combine

    pairs = list(itertools.combinations(launches, 2))
    same_kernels = [kernels(a) == kernels(b) for a, b in pairs]
    assert [a.compile_keys() == b.compile_keys() for a, b in pairs] == same_kernels
    assert any(same_kernels)
    for device in devices:
        assert len({launch.compile_keys() for launch in launches if launch.request.device == device}) > 2


@pytest.mark.parametrize("seen", [(True, False), (False, True), (True, True)])
def test_trees_take_the_portable_kernels_and_latents_have_neither_trees_nor_intervals(seen):
    """On a Hopper GPU too, where a prompt would take the Hopper kernel."""
    request = Request(SPEC, 8, True, Bounds(64, 4096, 512), PROPERTIES, *seen)
    words = "draft trees" if seen[1] else "intervals of keys"
    if seen[1]:
        launch, _ = decide(request, Options())
        assert launch.name in ("block", "split_kv")
        assert words in str(launch)
        with pytest.raises(quire.UnsupportedError, match=f"got 'hopper', which does not serve {words}"):
            decide(request, Options(kernel="hopper"))
    latent = replace(request, spec=quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1))
    with pytest.raises(quire.UnsupportedError, match=f"mla_hopper does not serve {words}, mla does not serve {words}"):
        decide(latent, Options())


@pytest.mark.parametrize("name", ["subprocess:run", "quire.plan:import_module", "quire.plan:nothing"])
def test_a_text_of_a_launch_names_dataclasses_of_launches_alone(name):
    """Also with `python -O`, which leaves assertions out."""
    with pytest.raises(ValueError, match=f"class must be a dataclass of launches, got {name}"):
        decode(json.dumps({"class": name, "name": "antigravity"}))


def test_a_plan_for_latents_on_a_flat_page_table_names_the_kernel_that_runs():
    """The MLA kernel for Hopper GPUs reads rectangular tables alone. Shared prefixes make flat ones of their own."""
    spec = quire.AttentionSpec.mla(num_q_heads=128, softmax_scale=0.1)
    table, seq_lens = torch.zeros(4, 40, dtype=torch.int32), torch.full((4,), 600, dtype=torch.int32)
    rectangular = quire.Batch(table, seq_lens)
    flat = quire.Batch(table.flatten(), seq_lens, cu_pages=torch.arange(0, 161, 40, dtype=torch.int32))
    bounds = {"max_query_len": 1, "max_seq_len": 640}
    with compile_for(PROPERTIES, on_compile=None):
        assert quire.plan(spec, rectangular, **bounds).kernel == "mla_hopper"
        assert quire.plan(spec, flat, **bounds).kernel == "mla"
        with pytest.raises(quire.UnsupportedError, match="got 'mla_hopper', which does not serve flat page tables"):
            quire.plan(spec, flat, **bounds, kernel="mla_hopper")
        for levels, are_flat in (
            (128, [False, False]),
            ([[(2, 64), (2, 64)]], [False, False]),
            ([[(3, 64), (1, 0)]], [False, True]),
            ([[(2, 64), (2, 128)], [(1, 0), (1, 0), (1, 64), (1, 64)]], [False, True, True]),
            ([[(1, 64), (2, 64), (1, 64)]], [True, False]),
        ):
            plan = quire.plan(spec, rectangular, **bounds, shared_prefix=levels)
            assert [launch.request.has_flat_table for launch in plan.launch.launches] == are_flat, levels
            assert not any(
                launch.name == "mla_hopper" and flat
                for launch, flat in zip(plan.launch.launches, are_flat, strict=True)
            )
            batches = plan.runner.batches(64)
            assert [part.cu_pages is not None for part in batches] == are_flat


def test_a_plan_says_what_it_launches_for_a_cache_and_for_queries():
    """A plan is made before both are known. What TMA cannot address goes to the fallback that the plan names."""
    batch = quire.Batch(torch.zeros(1, 40, dtype=torch.int32), torch.tensor([600]).int(), torch.tensor([0, 600]).int())
    q, wide = torch.empty(600, 32, 128, dtype=torch.bfloat16), torch.empty(600, 32, 132, dtype=torch.bfloat16)
    with compile_for(PROPERTIES, on_compile=None):
        plan = quire.plan(SPEC, batch, max_query_len=600, max_seq_len=640)
        pages = quire.PagedKVCache.empty(SPEC, 40, 16)
        rows = torch.empty(40, 16, 8, 132, dtype=torch.bfloat16)
        unaligned = quire.PagedKVCache(rows[..., 4:], pages.v)
        for cache, queries, name in (
            (pages, None, "hopper"),
            (pages, q, "hopper"),
            (pages, q[:0], "hopper"),
            (pages, wide[..., :128], "block"),  # heads do not begin at a multiple of 16 bytes
            (unaligned, None, "block"),
            (unaligned, q, "block"),
        ):
            assert plan.launch_for(cache, queries).name == name
            assert str(plan.launch_for(cache, queries)) in str(plan)
        one_key = quire.AttentionSpec.mla(num_q_heads=128, softmax_scale=0.1)
        latents = quire.plan(one_key, batch, max_query_len=1, max_seq_len=640, num_tokens=1)
        records = replace(one_key, kv_dtype=torch.float8_e4m3fn)
        for spec, layout, page_size, name in (
            (one_key, "NHD", 64, "mla_hopper"),
            (one_key, "NHD", 1, "mla_hopper"),  # rows are gathered
            (records, "fp8_ds_mla", 64, "mla"),
        ):
            assert latents.launch_for(quire.PagedKVCache.empty(spec, 4, page_size, layout=layout)).name == name


def test_launches_with_other_arguments_have_other_keys():
    request = Request(SPEC, 8, True, Bounds(4, 4096, 32), PROPERTIES)
    kinds = [(a, b) for a in (False, True) for b in (False, True)]
    keys = {decide(replace(request, has_intervals=a, has_tree=b), Options())[0].compile_keys() for a, b in kinds}
    assert len(keys) == 4


def test_bounds_that_are_looser_than_the_tokens_allow_need_no_other_kernels():
    """An engine may bound the queries of a sequence by its longest chunk, where the whole batch has fewer tokens."""
    device = TARGETS["sm90"].properties
    for heads in ((4, 2, 16), (32, 8, 128)):
        spec = quire.AttentionSpec(**dict(zip(("num_q_heads", "num_kv_heads", "head_dim"), heads, strict=True)))
        for num_tokens in (0, 1, 9, 63):
            warm = [kernels_of(x) for x in launches_within(spec, device, 4, max(1, num_tokens), 19, False)]
            launch, _ = decide(Request(spec, 4, True, Bounds(64, 19, num_tokens), device), Options())
            assert kernels_of(launch) <= frozenset().union(*warm)
