"""Record a call of `quire.attention`: write its arguments to a file before it is launched."""

import importlib.metadata
import platform
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quire import api, errors
from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.checks.attention import NewTokens, check_attention
from quire.debug.call import EXTRAS, INDICES, LISTS, NEW, QK_NORM, ROPE, STORED, Call, units_read
from quire.debug.memory import describe, indexed
from quire.dispatch.device import device_properties, interprets, is_served_by_torch
from quire.errors import check_flag, check_integer
from quire.launch_codec import encode
from quire.norm_rope import QKNorm, Rope
from quire.plan import Plan
from quire.version import commit

PACKAGES = ("quire", "torch", "triton", "numpy", "transformers", "vllm")


@contextmanager
def record(path: Path | str, *, contents: bool = False, skip: int = 0) -> Iterator[None]:
    """Record one call of `quire.attention` or `quire.varlen_attention` that is made in the context.

    The file is written before the call is launched, so a call that crashes leaves one. Writing it waits for the device.
    While nothing is recorded, nothing is asked per call: the context puts itself in front of a check that every call
    makes. Calls in all threads count. A call while a CUDA graph is captured does not, nor does the replay of a graph.
    `out` and `out_scale` are not recorded: a replay has a new output, of the queries' dtype.

    Args:
        path: of the file; its folder must be there.
        contents: also write the numbers of the queries, and of the pages that the batch reads. Without them, a replay
            uses random numbers.
        skip: calls to pass over before one is recorded.

    Warns:
        UserWarning: a kernel wrote to the lengths, and `plan.update()` was not called; or no call was recorded.

    Raises:
        TypeError: an argument is of another type.
        ValueError: skip is negative, the folder is not there, or another recording is under way.

    Examples:
        >>> import tempfile
        >>> from quire import debug
        >>> spec = quire.AttentionSpec(num_q_heads=4, num_kv_heads=2, head_dim=16, dtype=torch.float32)
        >>> cache = quire.PagedKVCache.empty(spec, num_pages=8, page_size=4)
        >>> batch = quire.Batch(torch.tensor([[3, 5]], dtype=torch.int32), torch.tensor([6], dtype=torch.int32))
        >>> plan = quire.plan(spec, batch, max_query_len=1, max_seq_len=6)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with debug.record(f"{folder}/call.quire"):
        ...         out = quire.attention(torch.randn(1, 4, 16), cache, plan)
        ...     call = debug.load(f"{folder}/call.quire")
        >>> debug.replay(call).passed  # with other numbers, since contents were not recorded
        True
    """
    recording = Recording(check_path(path), contents, check_integer("skip", skip, "0 records the first call", 0))
    check_flag("contents", contents, "the numbers are large, and may be private")
    if api.check_attention is not check_attention:
        raise ValueError("record must be entered once at a time, got a second recording; leave the first context")
    api.check_attention = recording.check
    try:
        yield
    finally:
        api.check_attention = check_attention
    if not recording.is_done:
        warnings.warn(
            f"{path} was not written: {skip - recording.skip} calls of quire.attention were passed over and none was "
            "recorded; calls from a captured CUDA graph do not count",
            stacklevel=3,
        )


class Recording:
    """Takes the place of `check_attention` while a call is to be recorded.

    Args:
        path: of the file.
        contents: see `record`.
        skip: see `record`.
    """

    def __init__(self, path: Path, contents: bool, skip: int) -> None:
        self.path, self.contents, self.skip = path, contents, skip
        self.is_done = False
        self.lock = threading.Lock()

    def check(self, *arguments: Any) -> None:
        """Check arguments, as `check_attention` does, and record those of the call that is wanted."""
        check_attention(*arguments)
        if self.is_done or torch.compiler.is_compiling():
            return
        if arguments[1].device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        with self.lock:
            if self.is_done:
                return
            if self.skip:
                self.skip -= 1
                return
            self.is_done = True
            warn_if_stale(arguments[2].batch)
            call_of(self.contents, *arguments).write(self.path)


def warn_if_stale(batch: Batch) -> None:
    """Warn if lengths are not those that a schedule was found for, and no launch would notice. Waits for the device."""
    if is_served_by_torch(batch.device):
        return
    from quire.kernels.scheduler import schedulers_for  # which imports Triton

    stale = [scheduler for scheduler in schedulers_for(batch) if scheduler.is_stale()]
    if stale:
        warnings.warn(
            "seq_lens and the batch's other lengths must be written by PyTorch or be followed by plan.update(), got "
            "values that a kernel wrote unnoticed, for which results are NaN; call plan.update() after that kernel. "
            "The recorded call reads them again",
            stacklevel=4,
        )


def save(
    path: Path | str,
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    cache: PagedKVCache,
    plan: Plan,
    *,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    slot_mapping: torch.Tensor | None = None,
    rope: Rope | None = None,
    qk_norm: QKNorm | None = None,
    sinks: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    extras: Sequence[torch.Tensor] = (),
    contents: bool = False,
) -> None:
    """Write the record of a call of `quire.attention` with these arguments, without making the call.

    Args:
        path: of the file; its folder must be there.
        q: as for `quire.attention`.
        cache: as for `quire.attention`.
        plan: as for `quire.attention`.
        k: as for `quire.attention`.
        v: as for `quire.attention`.
        slot_mapping: as for `quire.attention`.
        rope: as for `quire.attention`.
        qk_norm: as for `quire.attention`.
        sinks: as for `quire.attention`.
        alibi_slopes: as for `quire.attention`.
        extras: as for `quire.attention`.
        contents: as for `record`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit the plan, or the folder is not there.
    """
    where = check_path(path)
    check_flag("contents", contents, "the numbers are large, and may be private")
    new = NewTokens(k, v, slot_mapping, rope, qk_norm)  # pyright: ignore[reportArgumentType]
    new = None if all(part is None for part in new) else new
    check_attention(q, cache, plan, sinks, alibi_slopes, new, extras)
    call_of(contents, q, cache, plan, sinks, alibi_slopes, new, extras).write(where)


def check_path(path: Path | str) -> Path:
    """Return the path of a file that can be written, or raise."""
    if not isinstance(path, Path | str):
        raise TypeError(f"path must be a path, got {errors.describe(path)}; name a file")
    where = Path(path)
    name = errors.describe(str(path))
    try:
        where.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # too long, or with a null byte
        reason = getattr(error, "strerror", None) or error  # an OSError's own words have the whole name
        raise ValueError(f"path must be the name of a file, got {name}, {reason}; choose another one") from None
    if where.is_dir() or not where.parent.is_dir():
        raise ValueError(f"path must be a file in a folder that is there, got {name}; make the folder first")
    return where


def call_of(
    contents: bool,
    q: Any,
    cache: PagedKVCache,
    plan: Plan,
    sinks: Any,
    alibi_slopes: Any,
    new: NewTokens | None = None,
    extras: Sequence[torch.Tensor] = (),
) -> Call:
    """Return the arguments of a call, described; `contents` is that of `record`, the others those of its checks."""
    if plan.batch.extra_chosen is not None:
        raise errors.UnsupportedError(
            "plan must be of a batch without extra_chosen while a call is recorded, got some; record another call"
        )
    *tokens, rope, qk_norm = new or (None,) * 5
    queries = {"q_nope": q[0], "q_pe": q[1]} if isinstance(q, tuple) else {"q": q}
    pages = {"latents": cache.latents} if cache.is_latent else {"k": cache.k, "v": cache.v, "v_scale": cache.v_scale}
    blocks = {"k_block_scale": cache.k_block_scale, "v_block_scale": cache.v_block_scale}
    every: dict[str, Any] = queries | pages | {"k_scale": cache.k_scale} | blocks
    every |= {"sinks": sinks, "alibi_slopes": alibi_slopes} | {name: getattr(plan.batch, name) for name in INDICES}
    chosen = plan.batch.chosen
    lists = () if chosen is None else (chosen.indices, chosen.lens)
    for names, some in ((LISTS, lists), (NEW, tokens), (ROPE, rope), (QK_NORM, qk_norm), (EXTRAS, extras)):
        every.update(zip(names, some or (), strict=False))  # numbers come after tensors
    tensors = {name: tensor.detach() for name, tensor in every.items() if tensor is not None}
    stored = {name: copied(tensors[name]) for name in STORED if name in tensors}
    call = Call(
        spec=plan.spec,
        bounds=asdict(plan.bounds),
        layout=cache.layout,
        paged=plan.batch.paged,
        plan=str(plan),
        launch=encode(plan.launch),
        versions={"python": platform.python_version(), "commit": commit()} | versions(),
        device=describe_device(cache.device),
        has_contents=contents,
        places=describe(tensors),
        tensors=stored,
        interleaved=rope is not None and Rope(*rope).interleaved,
        eps=1e-6 if qk_norm is None else float(QKNorm(*qk_norm).eps),
        chosen_size=1 if chosen is None else chosen.block_size,
        chosen_are_slots=chosen is not None and chosen.are_slots,
    )
    if contents:
        units = units_read(call).to(cache.device)
        for name in tensors.keys() - stored.keys():
            tensor = tensors[name]
            stored[name] = copied(indexed(tensor)[units].view(tensor.dtype) if name in call.in_units else tensor)
    return call


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous copy on the CPU: torch.save writes the whole storage of a tensor."""
    return tensor.cpu().clone(memory_format=torch.contiguous_format)


def versions() -> dict[str, str]:
    """Return the versions of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def describe_device(device: torch.device) -> dict[str, Any]:
    """Return a device's name and properties."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    if interprets():
        name += ", Triton interpreter"
    return {"name": name} | asdict(device_properties(device))
