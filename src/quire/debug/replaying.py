"""Run a recorded call again, on this machine, and judge the result by the float64 oracle."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch

from quire import reference
from quire.api import attention, write_kv, write_latent
from quire.checks.batch import check_reads, check_slots
from quire.debug.call import EXTRAS, STORED, Call, batch_of, cache_of, units_read
from quire.debug.memory import DTYPES, allocate, sizes, write
from quire.dispatch.device import device_properties, is_served_by_torch
from quire.dispatch.request import Bounds, Request
from quire.errors import UnsupportedError, check_device, check_flag, check_integer, check_served, describe
from quire.kernels.launch import Launch
from quire.launch_codec import decode
from quire.norm_rope import QKNorm, Rope
from quire.plan import Plan, make_plan, plan
from quire.spec import FORMAT_DTYPE, QUANTISED_DTYPES
from quire.state import State
from quire.testing import Oracle, Problem, Verdict, owned_slots, poison, random_cache

MAX_BYTES = 4 << 30


@dataclass(frozen=True)
class Replay:
    """What came of a replay.

    Attributes:
        plan: the plan that was run, in words.
        notes: how the replay differs from the call that was recorded, a sentence each.
        verdict: of the result; None if there was none.
        error: why there was none, or why the oracle has none.
    """

    plan: str
    notes: list[str]
    verdict: Verdict | None
    error: str | None

    @property
    def passed(self) -> bool:
        """Whether the result is right."""
        return self.error is None and self.verdict is not None and self.verdict.passed


def replay(
    call: Call,
    device: torch.device | str = "cpu",
    *,
    replan: bool = False,
    max_bytes: int = MAX_BYTES,
    on_step: Callable[[str], None] = lambda step: None,
) -> Replay:
    """Run a recorded call again and compare the result with the float64 oracle.

    The tensors have the recorded layout in memory: shapes, strides, gaps and shared storages. Numbers that were not
    recorded are random, and memory that may not be read holds NaN. The launch is the recorded one where the device has
    the same properties; else a plan is made for this device.

    Args:
        call: from `load`.
        device: where to run.
        replan: make a plan even where the recorded launch could run.
        max_bytes: of tensors. Pages are renumbered if the recorded cache takes more.
        on_step: called before each step, with a sentence that says what comes next.

    Returns:
        The verdict, and the differences from the recorded call.

    Raises:
        TypeError: an argument is of another type.
        ValueError: the tensors do not fit together, or take more than `max_bytes`.
        UnsupportedError: nothing on this device serves the call.
    """
    if not isinstance(call, Call):
        raise TypeError(f"call must be a Call, got {describe(call)}; read it with `quire.debug.load`")
    device, notes = check_device("device", device, "name one where the call can run") or torch.device("cpu"), []
    check_served("device", device)
    check_flag("replan", replan, "say whether to make a plan where the recorded launch could run")
    max_bytes = check_integer("max_bytes", max_bytes, "it bounds the memory of the tensors", 0, (1 << 63) - 1)
    if not callable(on_step):
        raise TypeError(f"on_step must be a function of a sentence, got {describe(on_step)}; pass print, for instance")
    on_step("making the tensors")
    with torch.device("cpu"):  # whatever the default is: the tensors that were recorded are there
        call = renumber(call, max_bytes, notes)
        problem, pair, new = rebuild(call, device)
    bounds = {name: call.bounds[name] for name in ("max_query_len", "max_seq_len")}
    try:
        check_reads(problem.batch, problem.cache, call.spec, num_tokens=problem.q.shape[0], **bounds)
        check_new_slots(problem, new)
    except ValueError as error:
        return Replay("none", notes, None, f"the batch breaks its contract: {error}")
    if not call.has_contents:
        poison_slots(problem, call, new)
    on_step("planning")
    chosen = choose_plan(call, problem, replan, notes)
    on_step(f"running the {chosen.kernel} kernel")
    spec, q = call.spec, problem.q
    out = torch.zeros(q.shape[0], spec.num_q_heads, spec.head_dim_v, dtype=spec.dtype, device=device)
    state = State(out, torch.full(q.shape[:2], float("-inf"), dtype=torch.float32, device=device))
    try:
        expected = with_step(problem, new)
        tables: dict[str, Any] = problem.tables
        attention(q if pair is None else pair, problem.cache, chosen, **new, **tables, out=state)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    except UnsupportedError:
        raise
    except Exception as error:  # which is what the report is about
        return Replay(str(chosen), notes, None, f"the call fails: {type(error).__name__}: {error}")
    on_step("computing the same in float64")
    oracle = Oracle(expected)
    error = None
    if not bool(oracle.exact.out.isfinite().all()):
        error = "the numbers that were recorded give NaN or infinity in float64 too: the inputs are wrong"
    return Replay(str(chosen), notes, oracle.judge(state), error)


def renumber(call: Call, max_bytes: int, notes: list[str]) -> Call:
    """Return the call on as many pages as the batch reads, if its tensors take more than `max_bytes`."""
    needed = sum(sizes(call.places).values())
    if needed <= max_bytes:
        return call
    batch = call.batch
    units = units_read(call)
    count = max(1, len(units))
    places = {n: place.with_length(count) if n in call.in_units else place for n, place in call.places.items()}
    size, page_size = call.chosen_size, call.page_size
    is_whole = not call.chosen_are_slots or size % page_size == 0 or page_size % size == 0  # blocks stay whole
    least = sum(sizes(places).values()) if call.paged and is_whole else needed
    if least > max_bytes:
        raise ValueError(
            f"max_bytes must be at least {least} ({least / 2**30:.1f} GiB) for this call, got {max_bytes}; "
            "allow more, or use another machine"
        )
    notes.append(
        f"The tensors took {needed / 2**30:.1f} GiB: pages are renumbered, and only the {len(units)} that the batch "
        "reads are here."
    )
    number = torch.full((call.cache.num_pages,), -1, dtype=torch.int64)
    number[units] = torch.arange(len(units))
    table = batch.page_table.long()
    is_page = (table >= 0) & (table < call.cache.num_pages)
    # A number in use that the cache does not have stays one that it does not have.
    beyond = torch.where(table >= call.cache.num_pages, count, -1)
    renumbered = torch.where(is_page, number[table.clamp(0, call.cache.num_pages - 1)], beyond)
    tensors = call.tensors | {"page_table": renumbered.to(batch.page_table.dtype)}
    if call.chosen_are_slots:
        entries = tensors["chosen"].long()
        page = number[(entries * size // page_size).clamp(0, call.cache.num_pages - 1)]
        moved = (page * page_size + entries * size % page_size) // size
        tensors["chosen"] = torch.where((entries >= 0) & (page >= 0), moved, -1).int()
    if "slot_mapping" in tensors:
        slots = tensors["slot_mapping"]
        page, slot = number[(slots // call.page_size).clamp(0, call.cache.num_pages - 1)], slots % call.page_size
        tensors["slot_mapping"] = torch.where((slots >= 0) & (page >= 0), page * call.page_size + slot, -1)
    return replace(call, places=places, tensors=tensors)


def rebuild(
    call: Call, device: torch.device
) -> tuple[Problem, tuple[torch.Tensor, torch.Tensor | None] | None, dict[str, Any]]:
    """Allocate the tensors of a call and fill them.

    Returns:
        The problem, the queries as a pair if they were recorded as one, and the new tokens as `attention` takes them.
    """
    tensors = allocate(call.places, device)
    units = units_read(call)
    numbers = call.tensors if call.has_contents else call.tensors | random_numbers(call, len(units))
    for name, tensor in tensors.items():
        write(tensor, numbers[name].to(device), units.to(device) if name in call.in_units else None)
    batch = batch_of(tensors, call)
    cache = cache_of(tensors, call.spec, call.layout)
    pair = (tensors["q_nope"], tensors.get("q_pe")) if "q" not in tensors else None
    q = tensors["q"] if pair is None else torch.cat([part for part in pair if part is not None], -1)
    starts = batch.query_starts.tolist()
    query_lens = tuple(end - start for start, end in pairwise(starts))
    tables = tensors.get("sinks"), tensors.get("alibi_slopes")
    new = {}
    if "slot_mapping" in tensors:
        new = {"k": tensors["new_k"], "v": tensors.get("new_v"), "slot_mapping": tensors["slot_mapping"]}
    if "cos" in tensors:
        new["rope"] = Rope(tensors["cos"], tensors["sin"], tensors["positions"], call.interleaved)
    if "q_weight" in tensors:
        new["qk_norm"] = QKNorm(tensors["q_weight"], tensors["k_weight"], call.eps)
    lens = query_lens, tuple(batch.seq_lens.tolist())
    extras = tuple(tensors[name] for name in EXTRAS[: len(call.spec.extras)])
    return Problem(call.spec, batch, cache, q, *lens, *tables, extras=extras), pair, new


def check_new_slots(problem: Problem, new: dict[str, Any]) -> None:
    """Raise ValueError if a new token goes to a slot that the cache does not have, or where it is not read."""
    if not new:
        return
    slots, num_slots = new["slot_mapping"], problem.cache.num_pages * problem.cache.page_size
    if slots.numel() and int(slots.max()) >= num_slots:
        raise ValueError(f"slot_mapping must hold slots below {num_slots}, got {int(slots.max())}")
    check_slots(problem.batch, problem.cache, slots)


def with_step(problem: Problem, new: dict[str, Any]) -> Problem:
    """Return a problem whose cache is a copy with the new tokens, as the oracle takes it."""
    if not new:
        return problem
    cache, k, v, slots = deepcopy(problem.cache), new["k"], new["v"], new["slot_mapping"]
    if cache.is_latent:
        write_latent(k, v, cache, slots)
        return replace(problem, cache=cache)
    norm_rope = {name: new[name] for name in ("rope", "qk_norm") if name in new}
    if norm_rope:
        k = reference.norm_rope(k, norm_rope.get("rope"), norm_rope.get("qk_norm"), of_keys=True).to(k.dtype)
    write_kv(k, v, cache, slots)
    # Keys that were rotated are exact in the oracle, unless a cache rounds them.
    is_exact = norm_rope and problem.spec.kv_dtype not in (*QUANTISED_DTYPES, FORMAT_DTYPE)
    return replace(problem, cache=cache, step=new if is_exact else norm_rope)


def random_numbers(call: Call, num_units: int) -> dict[str, torch.Tensor]:
    """Return numbers for the tensors of a call that were not recorded.

    Args:
        call: what was recorded.
        num_units: pages, or tokens where keys are not paged, to make numbers for.
    """
    spec, places = call.spec, call.places
    generator = torch.Generator().manual_seed(0)
    scale = places.get("k_scale")
    kind = "head"
    if scale is not None:
        kind = "token" if len(scale.shape) == 3 else "tensor" if 0 in scale.strides else "head"
    layout = call.layout if spec.latent or spec.kv_format else "NHD"
    cache = random_cache(spec, max(1, num_units), call.page_size, layout, kind, generator)
    made = {"k_scale": cache.k_scale, "v_scale": cache.v_scale}
    made |= {"k_block_scale": cache.k_block_scale, "v_block_scale": cache.v_block_scale}
    made |= {"latents": cache.latents} if spec.latent else {"k": cache.k, "v": cache.v}
    heads = 1 + torch.arange(spec.num_q_heads)
    made |= {"alibi_slopes": 2.0 ** -(8.0 * heads / spec.num_q_heads)}
    numbers = {}
    for name, place in places.items():
        shape = (num_units, *place.shape[1:]) if name in call.in_units else place.shape
        found = made.get(name)
        if found is None:
            found = torch.randn(shape, generator=generator)
        elif name in call.in_units:
            found = found[:num_units]
        numbers[name] = found.reshape(shape).to(DTYPES[place.dtype])
    return {name: some for name, some in numbers.items() if name not in STORED}


def poison_slots(problem: Problem, call: Call, new: dict[str, Any]) -> None:
    """Overwrite the slots that no query sees, in pages that the batch reads, with NaN; other pages hold it already.

    So do the slots of new tokens, which the call writes.
    """
    cache = problem.cache
    if not call.paged or cache.is_expanded:
        return
    owned = owned_slots(problem.batch, cache, call.spec, problem.extras)
    if new:
        owned.view(-1)[new["slot_mapping"][new["slot_mapping"] >= 0]] = False
    is_read = torch.zeros(cache.num_pages, dtype=torch.bool, device=cache.device)
    is_read[units_read(call).to(cache.device)] = True
    poison(cache, owned | ~is_read[:, None])


def choose_plan(call: Call, problem: Problem, replan: bool, notes: list[str]) -> Plan:
    """Return a plan with the recorded launch if this device can run it; else a plan for this device."""
    spec, batch, device = call.spec, problem.batch, problem.batch.device
    recorded = decode_launch(call.launch)
    served_by_torch = is_served_by_torch(device)
    if recorded is None:
        notes.append("The recorded launch is of another version of Quire: the plan is made here.")
    elif replan:
        notes.append("The plan is made here, as was asked.")
    elif recorded.request.spec != spec or recorded.request.num_seqs != batch.num_seqs:
        notes.append("The recorded launch is of another batch: the plan is made here.")
    elif recorded.request.device != device_properties(device) or is_of_torch(recorded) != served_by_torch:
        notes.append(f"The recorded launch ({recorded.name}) is for another device: the plan is made for this one.")
    else:
        return make_plan(spec, batch, recorded, "as recorded", bounds=Bounds(**call.bounds))
    is_invariant = getattr(recorded, "fixed_split_size", 0) > 0 and not served_by_torch
    bounds: dict[str, Any] = call.bounds
    return plan(spec, batch, **bounds, batch_invariant=is_invariant)


def is_of_torch(launch: Launch) -> bool:
    """Return whether PyTorch runs a launch, or the parts of one for shared prefixes."""
    return all(part.name == "torch" for part in getattr(launch, "launches", (launch,)))


def decode_launch(text: str) -> Launch | None:
    """Return an encoded launch, made of Quire's dataclasses alone; None if this version of Quire has no such launch."""
    try:
        launch = decode(text)
        return launch if isinstance(launch.request, Request) and callable(launch.bind) else None
    except Exception:  # of what a file holds, anything may be wrong
        return None
