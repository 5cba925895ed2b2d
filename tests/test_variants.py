"""What variants promise, whichever is chosen: they fit the device, fill it, and are offered where they serve."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

import quire
from quire.dispatch.request import Bounds, Options, Request
from quire.kernels.choose import variants
from quire.kernels.hopper.launch import HopperLaunch
from quire.kernels.hopper.variants import MAX_SPLITS, MIN_KEYS_OF_SPLIT, UNCUT_KEYS
from quire.kernels.mla import variants as mla
from quire.kernels.portable import variants as portable
from quire.kernels.portable.launch import PortableLaunch
from quire.kernels.scratch import MOST_STATES
from quire.targets import TARGETS
from tests.test_service import draw_request, draw_spec

LLAMA = {"num_q_heads": 32, "num_kv_heads": 8}
SM90 = TARGETS["sm90"].properties
# From the least shared memory for which tiles of some size are left, to that of a Hopper GPU.
DEVICES = [replace(TARGETS["sm86"].properties, shared_memory=size * 1024) for size in (48, 64, 99, 163)]
DEVICES += [TARGETS[name].properties for name in ("sm80", "sm90", "sm120", "gfx942")]


def drawn(seed: int, count: int):
    """Yield requests, whether their plans are batch-invariant, and the variants that serve each."""
    draw = random.Random(seed)
    for _ in range(count):
        spec, device, invariant = draw_spec(draw), draw.choice(DEVICES), draw.random() < 0.2
        request = draw_request(draw, spec, device, (256, 4096, 65536), ((False, False),))
        yield request, invariant, variants(request, Options(batch_invariant=invariant))[0]


def portable_launches(launch):
    """Return the launches of the portable kernels that a launch may make."""
    found = [getattr(launch, name, None) for name in ("attend", "decode", "fallback")]
    inner = [each for other in found if other is not None for each in portable_launches(other)]
    return [launch, *inner] if isinstance(launch, PortableLaunch) else inner


def test_every_batch_has_variants_and_all_fit_the_device():
    for request, _, found in drawn(0, 400):
        assert found, request
        for launch in itertools.chain.from_iterable(map(portable_launches, found.values())):
            config, device = launch.config, request.device
            is_least = (config.block_m, config.block_n, config.num_stages) == (16, 16, 1)
            fits = config.shared_memory(launch.request.spec, device) <= device.shared_memory
            assert fits or is_least, (request, launch)


def test_partitions_are_as_many_as_run_at_once_and_no_more_than_there_are_units():
    for request, invariant, found in drawn(1, 400):
        for launch in itertools.chain.from_iterable(map(portable_launches, found.values())):
            if launch.kernel == "mla":
                continue
            most = request.device.num_sms * launch.config.programs_per_sm
            assert launch.num_partitions * launch.lanes <= max(most, launch.lanes), (request, launch)
            assert launch.num_partitions <= max(1, launch.max_units)
            if invariant and launch.num_partitions:
                assert launch.scratch_size().total <= MOST_STATES, (request, launch)


def test_short_sequences_are_not_cut_and_long_ones_may_be():
    spec = quire.AttentionSpec(**LLAMA, head_dim=128)
    for queries, num_seqs in itertools.product((1, 5), (1, 4)):
        for keys in (32, 64, 4096):
            request = Request(spec, num_seqs, queries > 1, Bounds(queries, keys, num_seqs * queries), SM90)
            found = variants(request, Options(kernel="portable"))[0].values()
            assert any(launch.num_partitions for launch in found) == (keys == 4096), (queries, keys)
    for keys, ragged in itertools.product((UNCUT_KEYS, 2 * UNCUT_KEYS), (False, True)):
        request = Request(spec, 4, True, Bounds(40, keys, 90 if ragged else 160), SM90)
        found = variants(request, Options(kernel="hopper"))[0]
        cut = {name.split()[-1] for name in found}
        assert cut == ({"whole"} if keys == UNCUT_KEYS else {"whole", "cut", "split"}), (keys, ragged)


def test_equal_splits_fill_the_device_once():
    for tokens, keys, heads in itertools.product((9, 40, 64, 300), (1100, 2000, 60_000), (1, 8)):
        spec = quire.AttentionSpec(num_q_heads=4 * heads, num_kv_heads=heads, head_dim=128)
        request = Request(spec, 1, True, Bounds(tokens, keys, tokens), SM90)
        for launch in variants(request, Options(kernel="hopper"))[0].values():
            assert isinstance(launch, HopperLaunch)
            if launch.num_splits > 1:
                assert launch.num_splits * launch.num_work_tiles(tokens) <= SM90.num_sms
                assert launch.num_splits <= min(MAX_SPLITS, -(-keys // MIN_KEYS_OF_SPLIT))
                tiles = -(-keys // launch.config.block_n)
                longest, of_fewer = -(-tiles // launch.num_splits), -(-tiles // (launch.num_splits - 1))
                assert longest < of_fewer, "fewer splits would be as short"
            elif launch.num_work_tiles(tokens) * 2 <= SM90.num_sms:
                assert any("split" in name for name in variants(request, Options(kernel="hopper"))[0])


@pytest.mark.parametrize("target", ["sm80", "sm90"])
def test_what_is_listed_for_a_device_fits_it_as_it_is(target):
    device = TARGETS[target].properties
    for dtype, kv_dtype in ((torch.bfloat16, None), (torch.bfloat16, torch.float8_e4m3fn)):
        for head_dim, head_dim_v in ((64, 64), (128, 128), (256, 256), (16, 256), (256, 16), (96, 128)):
            widths = {"head_dim": head_dim, "head_dim_v": head_dim_v}
            spec = quire.AttentionSpec(**LLAMA, **widths, dtype=dtype, kv_dtype=kv_dtype)
            listed = [" ".join(words.split()[:4]) for words in portable.entries_of(spec, device)]
            found = portable.configs_of(spec, device)
            assert list(found) == listed, (widths, kv_dtype)
            assert all(each.block_d >= head_dim and each.block_dv >= head_dim_v for each in found.values())


def test_a_head_has_the_tiles_of_its_wider_columns():
    for device, (narrow, wide) in itertools.product((SM90, DEVICES[2]), ((16, 64), (64, 128), (128, 512))):
        both = [quire.AttentionSpec(**LLAMA, head_dim=wide, head_dim_v=each) for each in (narrow, wide)]
        assert portable.entries_of(both[0], device) == portable.entries_of(both[1], device)


def test_a_tile_may_be_listed_for_batches_of_one_query_each_alone():
    spec = quire.AttentionSpec(**LLAMA, head_dim=128)
    own, others = (portable.uses_listed(spec, SM90, one_each, True) for one_each in (True, False))
    low = [name for name, config in portable.configs_of(spec, SM90).items() if config.block_m <= 16]
    assert {name for name in low if own[name]} > {name for name in low if others[name]} > set()
    tall = [name for name in own if name not in low]
    assert tall and all(own[name] == others[name] for name in tall)


def test_taller_tiles_of_batch_invariant_plans_have_as_many_stages_as_fit():
    seen = set()
    for device, head_dim in itertools.product(DEVICES, (64, 128, 256)):
        spec = quire.AttentionSpec(**LLAMA, head_dim=head_dim)
        first, *taller = portable.invariant_configs(spec, device).values()
        for config in taller:
            seen.add(config.num_stages)
            room = device.shared_memory - 4 * config.block_m * config.block_dv
            assert config.shared_memory(spec, device) <= room
            if config.num_stages < first.num_stages:
                assert replace(config, num_stages=config.num_stages + 1).shared_memory(spec, device) > room
    assert len(seen) > 1


def test_a_section_has_the_same_number_of_kv_heads_as_the_others():
    found = set()
    for kv_heads, tokens in itertools.product((16, 33, 40, 51), (300, 20_000)):
        spec = quire.AttentionSpec(num_q_heads=2 * kv_heads, num_kv_heads=kv_heads, head_dim=128)
        request = Request(spec, 2, True, Bounds(tokens, tokens, 2 * tokens), SM90)
        sections = {launch.section_heads for launch in variants(request, Options(kernel="hopper"))[0].values()}
        assert all(heads is None or kv_heads % heads == 0 for heads in sections)
        found |= sections
    assert found > {None}


@pytest.mark.parametrize("head_dim", [128, 256])
def test_decoding_sequences_beside_prompts_have_few_rows_and_a_program_for_each_multiprocessor(head_dim):
    device, spec = TARGETS["sm80"].properties, quire.AttentionSpec(**LLAMA, head_dim=head_dim)
    request = Request(spec, 40, True, Bounds(2000, 4096, 4000), device)
    found = variants(request, Options())[0]
    mixed = {name: launch for name, launch in found.items() if name.endswith("mixed")}
    assert mixed
    for name, launch in mixed.items():
        decode = launch.decode
        assert decode.config.block_m <= portable.MAX_DECODE_ROWS < launch.config.block_m, name
        assert decode.config.num_warps == launch.config.num_warps
        assert decode.config.num_stages == launch.config.num_stages
        assert 1 <= decode.num_partitions * spec.num_kv_heads <= device.num_sms
        assert decode.max_decode_queries * spec.group_size <= portable.MAX_DECODE_ROWS


def test_caches_are_decoded_for_prompts_unless_bits_are_fixed():
    spec = quire.AttentionSpec(**LLAMA, head_dim=128, kv_dtype=torch.float8_e4m3fn)
    request = Request(spec, 2, True, Bounds(2000, 4096, 4000), SM90)
    assert any(name.startswith("decoded") for name in variants(request, Options())[0])
    found, refused = variants(request, Options(batch_invariant=True))
    assert not any(name.startswith("decoded") for name in found)
    assert refused["decoded"] == "a quantised cache with batch_invariant"
    for own in (replace(request, spec=quire.AttentionSpec(**LLAMA, head_dim=128)), replace(request, device=DEVICES[3])):
        assert not any(name.startswith("decoded") for name in variants(own, Options())[0])


def test_batch_invariant_latents_have_room_for_a_state_on_every_device():
    spec = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1)
    for device in DEVICES:
        for invariant in (False, True):
            (config, *_) = mla.configs_of(spec, device, invariant).values()
            state = 4 * config.block_m * config.block_dv if invariant else 0
            least = config.block_n == 16 and config.num_stages <= 2
            assert config.shared_memory(spec, device) + state <= device.shared_memory or least, (device, invariant)
    small, large = (next(iter(mla.configs_of(spec, device, True).values())) for device in (DEVICES[1], SM90))
    assert small.block_n * small.num_stages < large.block_n * large.num_stages


@pytest.mark.parametrize("changes", [{"softcap": 30.0}, {"sinks": True}, {"alibi": True}, {"dtype": torch.float32}])
def test_the_hopper_kernel_for_chosen_keys_serves_plain_latents_alone(changes):
    plain = quire.AttentionSpec.mla(num_q_heads=64, softmax_scale=0.1)
    for spec, serves in ((plain, True), (replace(plain, **changes, **kv_dtype_of(changes)), False)):
        request = Request(spec, 4, False, Bounds(1, 4096, 4), SM90, chosen=(1, True, False, 2048))
        found, refused = variants(request, Options())
        assert ("chosen_hopper" in found) == serves and ("chosen_hopper" in refused) != serves, refused


def kv_dtype_of(changes):
    """Return the dtype of a cache whose queries have another one."""
    return {"kv_dtype": changes["dtype"]} if "dtype" in changes else {}
