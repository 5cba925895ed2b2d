"""Record a call of `quire.attention`: write its arguments to a file before it is launched."""

import importlib.metadata
import platform
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from quire import api, errors
from quire.cache import PagedKVCache
from quire.checks import NewTokens, check_attention
from quire.debug.call import INDICES, NEW, QK_NORM, ROPE, STORED, Call, batch_of, units_read
from quire.debug.memory import describe, read_units
from quire.dispatch.device import device_properties, interprets
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

    def check(
        self,
        q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
        cache: PagedKVCache,
        plan: Plan,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        new: NewTokens | None = None,
    ) -> None:
        """Check the arguments of a call, and record them if it is the one that is wanted."""
        check_attention(q, cache, plan, sinks, alibi_slopes, new)
        if self.is_done or torch.compiler.is_compiling():
            return
        if cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        with self.lock:
            if self.is_done:
                return
            if self.skip:
                self.skip -= 1
                return
            self.is_done = True
            call_of(q, cache, plan, sinks, alibi_slopes, new, self.contents).write(self.path)


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
        contents: as for `record`.

    Raises:
        TypeError: an argument is of another type.
        ValueError: an argument does not fit the plan, or the folder is not there.
    """
    where = check_path(path)
    check_flag("contents", contents, "the numbers are large, and may be private")
    new = NewTokens(k, v, slot_mapping, rope, qk_norm)  # pyright: ignore[reportArgumentType]
    new = None if all(part is None for part in new) else new
    check_attention(q, cache, plan, sinks, alibi_slopes, new)
    call_of(q, cache, plan, sinks, alibi_slopes, new, contents).write(where)


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
        raise ValueError(f"path must be the name of a file, got {name}, {error}; choose another one") from None
    if where.is_dir() or not where.parent.is_dir():
        raise ValueError(f"path must be a file in a folder that is there, got {name}; make the folder first")
    return where


def call_of(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    cache: PagedKVCache,
    plan: Plan,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    new: NewTokens | None,
    contents: bool,
) -> Call:
    """Return the arguments of a call, described."""
    tensors = named_tensors(q, cache, plan, sinks, alibi_slopes, new)
    batch = plan.batch
    stored = {name: tensors[name].detach().cpu().contiguous() for name in STORED if name in tensors}
    bounds = plan.bounds
    rope, qk_norm = (None, None) if new is None else (new.rope, new.qk_norm)
    call = Call(
        spec=plan.spec,
        bounds={
            "max_query_len": bounds.max_query_len,
            "max_seq_len": bounds.max_seq_len,
            "num_tokens": bounds.num_tokens,
        },
        layout=cache.layout,
        paged=batch.paged,
        plan=str(plan),
        launch=encode(plan.launch),
        versions={"python": platform.python_version(), "commit": commit()} | versions(),
        device=describe_device(cache.device),
        has_contents=contents,
        places=describe(tensors),
        tensors=stored,
        interleaved=rope is not None and Rope(*rope).interleaved,
        eps=1e-6 if qk_norm is None else float(QKNorm(*qk_norm).eps),
    )
    if contents:
        units = units_read(batch_of(stored, batch.paged), call.page_size, call.num_units).to(cache.device)
        for name in tensors.keys() - stored.keys():
            tensor = tensors[name].detach()
            numbers = read_units(tensor, units) if name in call.in_units else tensor.contiguous()
            # A copy, since torch.save writes the whole storage of a tensor.
            stored[name] = numbers.clone().cpu()
    stored.update({name: tensor.clone() for name, tensor in stored.items()})
    return call


def named_tensors(
    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor | None],
    cache: PagedKVCache,
    plan: Plan,
    sinks: torch.Tensor | None,
    alibi_slopes: torch.Tensor | None,
    new: NewTokens | None,
) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a call by name; k and v are the cache's, for which latents may stand."""
    queries = {"q_nope": q[0], "q_pe": q[1]} if isinstance(q, tuple) else {"q": q}
    pages = {"latents": cache.latents} if cache.is_latent else {"k": cache.k, "v": cache.v}
    scales = {"k_scale": cache.k_scale, "v_scale": None if cache.is_latent else cache.v_scale}
    indices = {name: getattr(plan.batch, name) for name in INDICES}
    step: dict[str, Any] = {}
    if new is not None:
        *tokens, rope, qk_norm = new
        for names, some in ((NEW, tokens), (ROPE, rope), (QK_NORM, qk_norm)):
            step.update(zip(names, some or (), strict=False))  # numbers come after tensors
    every = {**queries, **pages, **scales, "sinks": sinks, "alibi_slopes": alibi_slopes, **step, **indices}
    return {name: tensor for name, tensor in every.items() if tensor is not None}


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
