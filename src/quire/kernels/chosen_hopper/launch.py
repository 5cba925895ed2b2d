"""`ChosenHopperLaunch`: a launch of the kernel of chosen keys over latents for Hopper GPUs, and what it serves."""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from quire.batch import Batch
from quire.cache import PagedKVCache
from quire.dispatch.config import power_of_two
from quire.dispatch.device import DeviceProperties
from quire.dispatch.request import Options, Request, cdiv
from quire.kernels.chosen.launch import ChosenLaunch
from quire.kernels.chosen.launch import variants as portable_variants
from quire.kernels.launch import Launch, Runner, constexprs_of, key_of
from quire.kernels.mla_hopper.launch import MAX_COLUMN_ROWS, MIN_COLUMNS, ROWS, TILE, WIDTHS
from quire.kernels.scratch import ScratchSize, counter_bytes
from quire.spec import AttentionSpec

MOST_WAVES = 2  # of programs that have parts of lists
START, COMBINE = 1.5, 2.0  # what an item costs before its first tile, and the second launch, in tiles
PARTS_ALIKE = 2, 4, 8  # numbers of parts that stand for all others
PARTIAL_ROW = 1 / 1280  # what a row of a partial costs there (NVIDIA H200, 2026-11-29)
MANY_ROWS = 512  # of a batch, from which on a program of the second launch has all columns of its rows
COMBINE_NUMBERS = 4096  # of partials that it holds at once, then
# Unions of lists of neighbouring tokens (`unions.py`): most tokens of one; sixteenths of a list that may be new; bytes
# of all bitmaps, and slots for which a word has bits. A bitmap of all slots that an entry can name is as large.
MOST_UNITED, NEW = 4, 9
MAP_BYTES, SLOTS_OF_WORD = 1 << 26, 8
UNITE_BLOCK = 2048  # entries that a program unites at once


@dataclass(frozen=True)
class ChosenHopperLaunch(Launch):
    """Warp-specialised programs that take query tokens, or parts of their lists, in turn.

    Attributes:
        request: the request that was decided about.
        fallback: the launch for caches whose rows are not gathered by 16 bytes, and for an output in e4m3.
        num_splits: parts into which each list is cut, whatever its length is. A second launch combines them.
        union: neighbouring tokens whose lists are united where they have much in common, in two more launches.
    """

    request: Request
    fallback: ChosenLaunch
    num_splits: int = 1
    union: int = 1

    @property
    def name(self) -> str:
        """Name of the kernel family."""
        return "chosen_hopper"

    @property
    def columns(self) -> int:
        """Heads of a row block, a power of two. Up to MAX_COLUMN_ROWS, they are columns of products, and keys rows."""
        return columns_for(self.request.spec.num_q_heads)

    @property
    def row_blocks(self) -> int:
        """Row blocks of a query token."""
        return cdiv(self.request.spec.num_q_heads, self.columns)

    @property
    def partial_rows(self) -> int:
        """Rows of a partial, a power of two."""
        return min(ROWS, power_of_two(self.request.spec.num_q_heads))

    @property
    def programs_at_once(self) -> int:
        """Programs of a row block that run at the same time."""
        return max(1, self.request.device.num_sms // self.row_blocks)

    def programs_of_row_block(self, num_tokens: int) -> int:
        """Return the programs of each row block, which take items in turn."""
        return min(num_tokens * self.num_splits, self.programs_at_once) if self.request.num_seqs else 0

    def constexprs(self) -> dict[str, Any]:
        """Return the kernel's constexprs and compiler options, without those that a cache decides."""
        return {
            "NUM_HEADS": self.request.spec.num_q_heads, "PARTIAL_ROWS": self.partial_rows, "COLUMNS": self.columns,
            "UNION": 1, "num_warps": 4, "launch_pdl": True,
        }  # fmt: skip

    def constexprs_of_unions(self) -> dict[str, Any]:
        """Return what `constexprs` does, of the launch that attends to unions."""
        rows = self.union * self.request.spec.num_q_heads
        return self.constexprs() | {"COLUMNS": columns_for(rows), "UNION": self.union}

    def unite_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the launch that finds unions."""
        return {"UNION": self.union, "BLOCK": UNITE_BLOCK, "PDL": True, "num_warps": 8, "launch_pdl": True}

    def num_unions(self, num_tokens: int) -> int:
        """Return how many unions that many tokens have, if all have one."""
        return cdiv(num_tokens, self.union)

    @property
    def room(self) -> int:
        """Most entries of a union while it is made: one list more than it may have with all tokens but the last."""
        assert self.request.chosen is not None
        width = self.request.chosen[3]
        return 2 * width + (self.union - 2) * (NEW * width // 16)

    def unite_programs(self, num_slots: int, num_tokens: int) -> int:
        """Return the programs that find unions, each with a bitmap of the slots of a cache."""
        most = MAP_BYTES // (4 * words_of_map(num_slots))
        return min(2 * self.request.device.num_sms, self.num_unions(num_tokens), most)

    def combine_constexprs(self) -> dict[str, Any]:
        """Return the constexprs and compiler options of the second launch."""
        heads = self.request.spec.num_q_heads
        parts, block_m, columns = min(8, max(2, power_of_two(self.num_splits))), 1, WIDTHS[0]
        if power_of_two(self.request.bounds.num_tokens) * heads < MANY_ROWS:
            parts, columns = 16, WIDTHS[0] // 4
        elif heads >= 8:
            block_m = COMBINE_NUMBERS // (parts * columns)
        return {
            "NUM_HEADS": heads, "PARTIAL_ROWS": self.partial_rows, "BLOCK_M": block_m, "PARTS": parts,
            "COLUMNS": columns, "num_warps": 4, "launch_pdl": True,
        }  # fmt: skip

    def combine_grid(self, num_tokens: int) -> tuple[int, int, int]:
        """Return the grid of the second launch."""
        meta = self.combine_constexprs()
        blocks = self.partial_rows // meta["BLOCK_M"] * (WIDTHS[0] // meta["COLUMNS"])
        return num_tokens, self.row_blocks, blocks

    @property
    def partials(self) -> int:
        """Partials for which there is room: as many as any batch has for which the number of parts is chosen."""
        if self.num_splits == 1:
            return 0
        wanted = self.request.bounds.num_tokens * self.num_splits * self.row_blocks
        return max(wanted, MOST_WAVES * self.request.device.num_sms)

    def scratch_size(self) -> ScratchSize:
        """Return the size of the scratch for partials, after the counters of other kernels, and for the fallback."""
        fallback, rows = self.fallback.scratch_size(), self.partials * self.partial_rows
        numbers = rows * (WIDTHS[0] + 2)
        if self.union > 1:
            numbers = MAP_BYTES // 4 + self.num_unions(self.request.bounds.num_tokens) * (self.room + 1)
        if not numbers:
            return fallback
        counters = counter_bytes(self.request.device, 0)
        return ScratchSize(max(counters + 4 * numbers, fallback.total), counters)

    def compile_keys(self) -> frozenset[Hashable]:
        """Return a key of each kernel that is launched, as `Launch.compile_keys` has it."""
        assert self.request.chosen is not None
        facts = self.request.has_cu_seqlens, self.request.chosen[:3], self.num_splits > 1
        keys = {key_of(self.name, *facts, **constexprs_of(self))}
        if self.num_splits > 1:
            keys.add(key_of("combine_lists", *facts, **self.combine_constexprs()))
        if self.union > 1:
            keys = {key_of("left_out", each) for each in keys}
            keys.add(key_of("unite_lists", *facts, **self.unite_constexprs()))
            keys.add(key_of("united", *facts, **self.constexprs_of_unions()))
        return frozenset(keys)

    def for_cache(self, cache: PagedKVCache, q: Any = None) -> "ChosenHopperLaunch | ChosenLaunch":
        """Return this launch, one without unions for a cache of very many slots, or a fallback for one not gathered."""
        if not gathers(cache):
            return self.fallback
        return replace(self, union=1) if self.union > 1 and not self.has_maps(cache) else self

    def has_maps(self, cache: PagedKVCache) -> bool:
        """Return whether half as many programs as SMs have room for a bitmap of a cache's slots."""
        sms = self.request.device.num_sms
        return self.unite_programs(slots_of(cache), self.union * sms) >= max(1, sms // 2)

    def unserved(self, cache: PagedKVCache, q: Any = None) -> str:
        """Return why the fallback serves a cache."""
        return "an output in e4m3" if gathers(cache) else "rows not in pieces of 16 bytes, and e4m3 without records"

    def bind(self, batch: Batch, workspace: torch.Tensor | None) -> Runner:
        """Return the runner for a batch, with scratch in a workspace of `scratch_size` bytes."""
        from quire.kernels.chosen_hopper.runner import ChosenHopperRunner

        return ChosenHopperRunner(self, batch, workspace)

    def __str__(self) -> str:
        parts = f" × {self.num_splits} parts of its list" if self.num_splits > 1 else ""
        parts += f", lists of {self.union} tokens united where they have much in common" if self.union > 1 else ""
        return (
            f"Hopper kernel for chosen keys: {self.columns} rows × {TILE} keys, {self.row_blocks} programs for each "
            f"query token{parts}, at most {self.row_blocks * self.programs_at_once} at once; fallback for caches that "
            f"are not gathered by 16 bytes: {self.fallback}"
        )


def columns_for(rows: int) -> int:
    """Return the rows of a row block that has so many: a power of two up to MAX_COLUMN_ROWS, else ROWS."""
    columns = power_of_two(max(MIN_COLUMNS, rows))
    return columns if columns <= MAX_COLUMN_ROWS else ROWS


def slots_of(cache: PagedKVCache) -> int:
    """Return the slots of a cache."""
    return cache.latents.shape[0] * cache.page_size


def words_of_map(num_slots: int) -> int:
    """Return the words of a bitmap of so many slots."""
    return max(1, cdiv(num_slots, SLOTS_OF_WORD))


def gathers(cache: PagedKVCache) -> bool:
    """Return whether the kernel gathers the rows of a cache: in 16 bits, or records."""
    if cache.scale_kind != "record" and (cache.dtype.itemsize != 2 or cache.k_scale is not None):
        return False
    page, slot, *_ = cache.latents.stride()
    size = cache.latents.element_size()
    aligned = all(number * size % 16 == 0 for number in (page, slot))
    return aligned and cache.latents.stride(-1) == 1 and cache.latents.data_ptr() % 16 == 0


def variants(request: Request, options: Options, within: bool = False) -> dict[str, ChosenHopperLaunch] | str:
    """Return the launch of the kernel by name; or, in words, what it does not serve.

    Args:
        request: the batch.
        options: what the caller of `plan` asks for.
        within: return all that any batch with as many queries may have, for a warm-up.
    """
    spec, chosen = request.spec, request.chosen
    assert chosen is not None
    if not spec.latent:
        return "keys and values that aren't latents"
    if not request.device.has_wgmma:
        return "GPUs other than Hopper's"
    if options.config is not None:
        return "config"
    if (spec.kv_lora_rank, spec.qk_rope_head_dim) != WIDTHS:
        return "latents that are not 512 + 64 wide"
    if spec.kv_dtype is not spec.dtype:
        if (spec.dtype, spec.kv_dtype) != (torch.bfloat16, torch.float8_e4m3fn):
            return "quantised caches other than records of e4m3, whose queries are in bfloat16"
        if spec.num_q_heads > MAX_COLUMN_ROWS and not spec.allow_fp8:
            return f"records with more than {MAX_COLUMN_ROWS} heads, which it rounds to bfloat16, without allow_fp8"
    if spec.dtype is torch.float32:
        return "float32"
    if spec.softcap or spec.alibi or spec.sinks:
        return "softcap, ALiBi or sinks"
    if request.has_flat_table:
        return "flat page tables"
    if chosen[0] > 1:
        return "lists of blocks"
    if request.extra_chosen is not None:
        return "keys of a second cache"
    base = portable_variants(request, options)
    if isinstance(base, str):
        return f"{base}, which the fallback does not serve"
    launch = ChosenHopperLaunch(request, base["chosen"])
    if options.num_splits is not None:
        return {"chosen_hopper": replace(launch, num_splits=options.num_splits)}
    if options.batch_invariant:  # a part's end would depend on how many tokens there are
        return {"chosen_hopper": launch}
    united = replace(launch, union=tokens_of_union(request))
    if not within:
        return {"chosen_hopper": united if united.union > 1 else replace(launch, num_splits=choose_num_splits(launch))}
    found, bounds = {"chosen_hopper": launch, "chosen_hopper united": united}, request.bounds
    for splits in PARTS_ALIKE:
        most = MOST_WAVES * request.device.num_sms // (splits * launch.row_blocks)  # tokens
        if bounds.max_query_len <= most:
            few = replace(request, bounds=replace(bounds, num_tokens=min(bounds.num_tokens, most)))
            found[f"chosen_hopper {splits}"] = replace(launch, request=few, num_splits=splits)
    return found


def tokens_of_union(request: Request) -> int:
    """Return of how many neighbouring tokens lists may be united: those of prompts; else 1."""
    is_prompt = request.has_cu_seqlens and request.bounds.max_query_len >= MOST_UNITED
    has_many = request.bounds.num_tokens >= least_united(request.spec, request.device)
    return most_united(request.spec) if is_prompt and has_many else 1


def most_united(spec: AttentionSpec) -> int:
    """Return of how many tokens a row block has the heads, if lists may be united; else 1."""
    # Records of more than MAX_COLUMN_ROWS rows are rounded to bfloat16, which has to be allowed.
    rows = ROWS if spec.kv_dtype is spec.dtype or spec.allow_fp8 else MAX_COLUMN_ROWS
    return max(1, min(MOST_UNITED, rows // spec.num_q_heads))


def least_united(spec: AttentionSpec, device: DeviceProperties) -> int:
    """Return the tokens of a batch from which on lists may be united: each SM has at least two unions."""
    return 2 * most_united(spec) * device.num_sms


def choose_num_splits(launch: ChosenHopperLaunch) -> int:
    """Return into how many parts each list is cut: those that are expected to take the least time, in tiles."""
    request = launch.request
    assert request.chosen is not None
    tokens, tiles = max(1, request.bounds.num_tokens), cdiv(request.chosen[3], TILE)

    def cost(splits: int) -> float:
        items = cdiv(tokens * splits, launch.programs_at_once)
        combine = COMBINE + PARTIAL_ROW * tokens * splits * request.spec.num_q_heads if splits > 1 else 0.0
        return items * (START + cdiv(tiles, splits)) + combine

    most = min(tiles, MOST_WAVES * request.device.num_sms // (tokens * launch.row_blocks))
    return min(range(1, most + 1), key=cost, default=1)
