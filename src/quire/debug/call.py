"""`Call`: what `quire.attention` was given, as a file holds it.

The file is what `torch.save` writes of a dict: a number for the format, a header in JSON, and tensors. It is read with
`weights_only=True`, so that an untrusted file cannot run code, and everything in the header is checked.
"""

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, get_origin

import torch

from quire.batch import Batch, ChosenKeys
from quire.cache import PagedKVCache
from quire.chosen import entries_of
from quire.debug.memory import DTYPES, Place, allocate
from quire.errors import describe
from quire.launch_codec import decode, encode
from quire.score_functions import MOST_EXTRAS, Function
from quire.spec import AttentionSpec

FORMAT = 1
INDICES = (
    *("page_table", "seq_lens", "cu_seqlens_q", "cu_pages", "query_offsets"),
    *("key_begin", "key_end", "tree_bits"),
)
LISTS = ("chosen", "chosen_lens")  # indices and lens of the batch's chosen keys, if it had them
NEW = ("new_k", "new_v", "slot_mapping")  # k, v and slot_mapping of the call, if it had them
EXTRAS = tuple(f"extra_{i}" for i in range(MOST_EXTRAS))  # of the spec's functions, in their order
ROPE, QK_NORM = ("cos", "sin", "positions"), ("q_weight", "k_weight")  # of its rope and its qk_norm, if it had them
BLOCKS = "k_block_scale", "v_block_scale"  # of nvfp4
NAMES = (
    *("q", "q_nope", "q_pe", "k", "v", "latents", "k_scale", "v_scale", *BLOCKS, "sinks", "alibi_slopes"),
    *(*NEW, *ROPE, *QK_NORM, *EXTRAS, *INDICES, *LISTS),
)
STORED = ("slot_mapping", "positions", *INDICES, *LISTS)  # with and without contents
BOUNDS = ("max_query_len", "max_seq_len", "num_tokens")


@dataclass(frozen=True, eq=False)
class Call:
    """A call of `quire.attention`.

    Attributes:
        spec: what was computed.
        bounds: those of the plan.
        layout: of the cache.
        paged: whether the batch was; False for `varlen_attention`.
        plan: the plan in words.
        launch: the plan's launch, encoded.
        versions: of Python and the packages, by name, and the commit of Quire.
        device: its name and properties.
        has_contents: whether the numbers of queries and cache were recorded.
        places: where each tensor lay, by name.
        tensors: the batch's tensors and the slots and positions of new tokens; with contents also all others. Of the
            cache and its scales per token, only the pages that the batch reads.
        interleaved: of the rope, if there was one.
        eps: of the qk_norm, if there was one.
        chosen_size: `block_size` of the chosen keys, if there were some.
        chosen_are_slots: their `are_slots`.
    """

    spec: AttentionSpec
    bounds: dict[str, int]
    layout: str
    paged: bool
    plan: str
    launch: str
    versions: dict[str, str]
    device: dict[str, Any]
    has_contents: bool
    places: dict[str, Place]
    tensors: dict[str, torch.Tensor]
    interleaved: bool = False
    eps: float = 1e-6
    chosen_size: int = 1
    chosen_are_slots: bool = False

    def write(self, path: Path) -> None:
        """Write the file in one step."""
        header = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "tensors"}
        header |= {
            "spec": spec_to_json(self.spec),
            "places": {name: asdict(place) for name, place in self.places.items()},
        }
        partial = path.with_name(f"{path.name}.part")
        torch.save({"format": FORMAT, "header": json.dumps(header), "tensors": self.tensors}, partial)
        partial.replace(path)

    @property
    def batch(self) -> Batch:
        """The batch, on the CPU."""
        return batch_of(self.tensors, self)

    @cached_property
    def cache(self) -> PagedKVCache:
        """The cache without its numbers, on the device "meta"."""
        return cache_of(allocate(self.places, torch.device("meta")), self.spec, self.layout)

    @property
    def in_units(self) -> tuple[str, ...]:
        """The names of the tensors whose first dimension counts pages, or tokens where keys are not paged."""
        per_token = ("k_scale", "v_scale") if self.cache.scale_kind == "token" else ()
        names = ("k", "v", "latents", *per_token, *BLOCKS)
        return tuple(name for name in names if name in self.places)

    @property
    def page_size(self) -> int:
        """Tokens per unit."""
        return self.cache.page_size if self.paged else 1


def batch_of(tensors: Mapping[str, torch.Tensor], call: Call) -> Batch:
    """Return the batch of some tensors by name, which are those of a call."""
    batch: dict[str, Any] = {name: tensors[name] for name in INDICES if name in tensors}
    if "chosen" in tensors:
        lists = tensors["chosen"], tensors.get("chosen_lens")
        batch["chosen"] = ChosenKeys(*lists, call.chosen_size, call.chosen_are_slots)
    return Batch(**batch, paged=call.paged)


def cache_of(tensors: Mapping[str, torch.Tensor], spec: AttentionSpec, layout: str) -> PagedKVCache:
    """Return the cache of some tensors by name."""
    scales = tensors.get("k_scale"), tensors.get("v_scale")
    if spec.latent:
        return PagedKVCache.from_latents(tensors["latents"], spec.kv_lora_rank, scale=scales[0])
    blocks = {name: tensors.get(name) for name in BLOCKS}
    return PagedKVCache(tensors["k"], tensors["v"], layout, *scales, kv_format=spec.kv_format, **blocks)


def units_read(call: Call) -> torch.Tensor:
    """Return the pages, or tokens where keys are not paged, that a call's keys are in; [n] int64 in order.

    Page numbers that the cache does not have are left out.
    """
    batch, page_size, num_units = call.batch, call.page_size, call.cache.num_pages
    found = []
    if batch.chosen is not None and batch.chosen.are_slots:
        entries, size = entries_of(batch.chosen, slice(None)).unique(), batch.chosen.block_size
        keys = entries[entries >= 0].long()[:, None] * size + torch.arange(size, device="cpu")
        units = (keys.flatten() // page_size).unique()
        return units[units < num_units]
    for seq, length in enumerate(batch.seq_lens.tolist()):
        if batch.paged:
            row = batch.page_table[seq] if batch.cu_pages is None else batch.page_table[int(batch.cu_pages[seq]) :]
            found.append(row[: -(-max(length, 0) // page_size)].long())
        else:
            first = int(batch.page_table[seq, 0])
            end = min(first + max(length, 0), num_units)
            found.append(torch.arange(max(first, 0), end, device="cpu"))
    units = torch.cat([*found, torch.arange(0, device="cpu")]).unique()
    return units[(units >= 0) & (units < num_units)]


def spec_to_json(spec: AttentionSpec) -> dict[str, Any]:
    """Return the fields of a spec as JSON has them."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    names = {value: name for name, value in DTYPES.items()}
    values |= {name: names[value] for name, value in values.items() if isinstance(value, torch.dtype)}
    return values | {name: encode(value) for name, value in values.items() if isinstance(value, Function)}


def load(path: Path | str) -> Call:
    """Read a file that `record` or `save` has written. It runs no code from the file.

    Args:
        path: of the file.

    Returns:
        The call.

    Raises:
        TypeError: path is no path.
        ValueError: the file cannot be read, or is not a record of a call.
    """
    if not isinstance(path, Path | str):
        raise TypeError(f"path must be a path, got {describe(path)}; name a file")
    contract = f"{str(path)[:300]} must be a record of `quire.debug.record`"
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"{contract}, got {error.strerror or type(error).__name__}; name another file") from None
    except Exception as error:  # a file of another kind may raise anything
        raise ValueError(
            f"{contract}, got a file that torch.load does not read ({type(error).__name__}); name another file"
        ) from None
    try:
        if not isinstance(content, dict) or type(content.get("format")) is not int:
            raise ValueError("it has no format")
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}, and this version of Quire reads {FORMAT}")
        return parse(json.loads(content["header"]), content["tensors"])
    except ValueError as error:  # of ours
        raise ValueError(f"{contract}, got one that breaks a rule: {error}") from None
    except Exception as error:  # of what a file holds, anything may be wrong
        raise ValueError(f"{contract}, got one with a part that is missing or of another kind: {error!r}") from None


def parse(header: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Call:
    """Build a call from the parts of a file, and check them."""
    values: dict[str, Any] = {"tensors": tensors}
    for field in fields(Call):
        if field.name in header or (field.default is MISSING and field.name != "tensors"):
            values[field.name] = header[field.name]  # an older file lacks those that have a default
    spec = header["spec"]
    spec |= {name: DTYPES[value] for name, value in spec.items() if name.endswith("dtype")}
    spec |= {name: decode(spec[name]) for name in ("score", "mask") if spec.get(name) is not None}
    values["spec"] = AttentionSpec(**spec)
    values["bounds"] = {name: header["bounds"][name] for name in BOUNDS}
    places = header["places"].items()
    values["places"] = {n: Place(**p | {"shape": tuple(p["shape"]), "strides": tuple(p["strides"])}) for n, p in places}
    for field in fields(Call):
        kind: Any = get_origin(field.type) or field.type
        if field.name in values and not isinstance(values[field.name], kind):
            raise ValueError(f"{field.name} must be {kind.__name__}, got {values[field.name]!r:.60}")
    for name, bound in values["bounds"].items():
        if type(bound) is not int or bound < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {bound!r}")
    call = Call(**values)
    check_tensors(call)
    return call


def check_tensors(call: Call) -> None:
    """Raise ValueError unless the tensors that a call needs are described, and those that the file holds fit."""
    cache = ("latents",) if call.spec.latent else ("k", "v")
    queries = ("q",) if "q" in call.places else ("q_nope",)
    for name in (*queries, *cache, "page_table", "seq_lens"):
        if name not in call.places:
            raise ValueError(f"it must describe {name}, got {', '.join(call.places)}")
    if unknown := (call.places.keys() | call.tensors.keys()) - set(NAMES):
        raise ValueError(f"it must describe no tensors but {', '.join(NAMES)}, got {', '.join(sorted(unknown))}")
    if "chosen_lens" in call.places and "chosen" not in call.places:
        raise ValueError(f"it must describe chosen with chosen_lens, got {', '.join(call.places)}")
    if any(name in call.places for name in NEW) and not {"new_k", "slot_mapping"} <= call.places.keys():
        raise ValueError(f"it must describe new_k and slot_mapping, or no new tokens, got {', '.join(call.places)}")
    if missing := set(EXTRAS[: len(call.spec.extras)]) - call.places.keys():
        raise ValueError(f"it must describe {', '.join(sorted(missing))}, which the spec's functions read")
    for group in (ROPE, QK_NORM):
        if any(name in call.places for name in group) and not {*group, "new_k"} <= call.places.keys():
            raise ValueError(f"it must describe new_k, {', '.join(group)}, or none of these")
    stored = set(call.places) if call.has_contents else set(STORED) & set(call.places)
    if missing := stored - call.tensors.keys():
        raise ValueError(f"it must hold {', '.join(sorted(missing))}, got {', '.join(call.tensors)}")
    for name, tensor in call.tensors.items():
        place = call.places[name]
        if tensor.dtype is not DTYPES[place.dtype] or tensor.layout is not torch.strided or tensor.device.type != "cpu":
            raise ValueError(f"{name} must be {place.dtype}, got {tensor.dtype}")
        if name in STORED and tuple(tensor.shape) != place.shape:
            raise ValueError(f"{name} must have shape {place.shape}, got {tuple(tensor.shape)}")
    count = len(units_read(call))  # which makes the batch and the cache, and so checks them
    for name, place in call.places.items() if call.has_contents else ():
        wanted = (count, *place.shape[1:]) if name in call.in_units else place.shape
        if tuple(call.tensors[name].shape) != wanted:
            raise ValueError(f"{name} must have shape {wanted}, got {tuple(call.tensors[name].shape)}")
