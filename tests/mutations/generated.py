"""Generated mutants: each place of a function where one small change can be made, and the tests that must notice.

Those of `mutants.py` are chosen by hand, and every one of them must be noticed. Of these, a share is: some change
nothing that can be seen. `floors.json` has, for each group of files, what was measured and the least share allowed.
`python -m tests.mutations` judges a sample.
"""

import ast
import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.mutations.server import PACKAGE

FLOORS = Path(__file__).parent / "floors.json"
FLIPPED = {"<": "<=", "<=": "<", ">": ">=", ">=": ">"}
SWAPPED = {"minimum": "maximum", "maximum": "minimum", "min": "max", "max": "min"}
RANGES = ("range", "static_range")
SYNCHRONISES = re.compile(r"wait|barrier|arrive|fence|release|expect|commit")
SAYS_SOMETHING = ("static_assert", "static_print", "device_assert")  # calls that compute nothing


class Judges(NamedTuple):
    """The tests of a group of files, those that fail soonest first, and where they run."""

    interpreted: bool  # by Triton's interpreter and the simulator, or on the path for CPU tensors
    tests: tuple[str, ...]  # node ids relative to tests/


ATTENTION, SIMULATED, CUTS = (f"kernels/test_{of}.py::test_" for of in ("attention", "hopper_simulator", "cuts"))
INTERVALS, TREES, NORM_ROPE, INVARIANCE = (
    f"kernels/test_{of}.py::test_" for of in ("intervals", "draft_trees", "norm_rope", "invariance")
)
DENSE = (
    ATTENTION + "features", ATTENTION + "pages_and_layouts", ATTENTION + "full_tiles_in_a_loop_without_masks",
    ATTENTION + "empty_sequences_and_masked_rows", ATTENTION + "quantised_caches", INTERVALS + "every_kind_of_interval",
    TREES + "every_kind_of_tree", ATTENTION + "splits_of_long_sequences[7]",
)  # fmt: skip
HOPPER = (
    SIMULATED + "features", SIMULATED + "pages", SIMULATED + "splits", SIMULATED + "intervals", CUTS + "features",
    SIMULATED + "any_order_of_events_gives_the_same_bits",
)  # fmt: skip
LATENTS = (
    SIMULATED + "latents", SIMULATED + "pages_of_latents", SIMULATED + "lengths_of_latents",
    SIMULATED + "products_of_latents_in_fp8", SIMULATED + "any_order_of_events_gives_the_same_bits_over_latents",
    SIMULATED + "chosen_keys_of_latents", SIMULATED + "queries_of_latents_that_are_large_in_one_half_of_the_columns",
    SIMULATED + "chosen_keys_after_the_end_are_left_out",
)  # fmt: skip
ROTATIONS = (
    NORM_ROPE + "a_step_that_rotates_is_a_rotation_and_a_step",
    NORM_ROPE + "tables_of_any_dtype_and_rows_of_any_distance",
    NORM_ROPE + "positions_outside_of_the_table_are_clamped",
    NORM_ROPE + "columns_that_are_not_rotated_keep_their_bits",
)
DECISIONS = "test_dispatch.py", "test_variants.py", "test_service.py"
RIGHT_CALLS = "test_bad_input.py::test_the_calls_are_right_before_anything_is_replaced"
# A file belongs to the first group whose pattern it matches.
GROUPS = {
    "kernels/primitives.py": Judges(True, ("kernels/test_primitives.py", *DENSE, "kernels/test_append.py")),
    "kernels/states.py": Judges(True, (*DENSE, "kernels/test_merge.py", "kernels/test_quantised_out.py")),
    "kernels/mods.py": Judges(True, ("kernels/test_mods.py", ATTENTION + "features", "kernels/test_write.py")),
    "kernels/combine.py": Judges(True, ("kernels/test_merge.py", "kernels/test_primitives.py")),
    "kernels/copy.py": Judges(True, ("kernels/test_copy.py",)),
    "kernels/write*.py": Judges(True, ("kernels/test_write.py", "kernels/test_write_latent.py")),
    "kernels/rotate.py": Judges(True, ROTATIONS),
    "kernels/*/variants.py": Judges(False, DECISIONS),
    "kernels/*/launch.py": Judges(False, DECISIONS),
    "kernels/portable/*.py": Judges(
        True,
        (
            *DENSE,
            ATTENTION + "the_loop_without_masks_ends_where_the_first_draft_s_keys_end",
            "kernels/test_schedule.py",
            "kernels/test_combine_launch.py",
            "kernels/test_invariance.py",
            "kernels/test_append.py",
        ),
    ),
    "kernels/schedule.py": Judges(
        True,
        (
            "kernels/test_schedule.py",
            "kernels/test_work_tile.py",
            "kernels/test_cuts.py::test_those_row_blocks_are_cut_that_were",
            "kernels/test_order_of_work_tiles.py::test_each_row_block_is_found_once_and_the_longest_sequence_first",
            "kernels/test_order_of_work_tiles.py::test_sequences_stay_in_the_batch_s_order_where_the_longest_work_tile_is_a_"
            "small_part_of_all_work",
        ),
    ),
    "kernels/mla/kernel.py": Judges(True, ("kernels/test_mla.py",)),
    "kernels/gluon/*.py": Judges(
        True,
        (
            *HOPPER,
            SIMULATED + "tiles_that_lie_in_one_page_and_tiles_in_two",
            SIMULATED + "windows_of_gathered_rows",
            *LATENTS,
        ),
    ),
    "kernels/hopper/work_tile.py": Judges(True, ("kernels/test_work_tile.py", *HOPPER)),
    "kernels/hopper/*.py": Judges(True, (*HOPPER, "kernels/test_order_of_work_tiles.py")),
    "kernels/mla_hopper/*.py": Judges(True, LATENTS),
    "kernels/cpu/*.py": Judges(
        False,
        (
            *DENSE,
            "kernels/test_merge.py",
            "kernels/test_write.py",
            "kernels/test_formats.py",
            "kernels/test_indexer.py",
            "test_cpu_path.py",
        ),
    ),
    "distributed/*.py": Judges(False, ("test_distributed.py",)),
    "intervals.py": Judges(False, ("kernels/test_intervals.py", RIGHT_CALLS)),
    "draft_trees.py": Judges(False, ("kernels/test_draft_trees.py", RIGHT_CALLS)),
    "allocator.py": Judges(False, ("test_allocator.py",)),
    "compile_ahead/launches.py": Judges(False, ("test_service.py",)),
    "dispatch/constants/*.py": Judges(False, DECISIONS),
}


class Generated(NamedTuple):
    """One change of a file."""

    file: str  # relative to the package
    line: int
    change: str
    before: str
    after: str
    start: int  # byte of the file where `before` begins
    rank: str  # mutants in the order of their ranks are a sample that changes elsewhere leave alone

    def text(self) -> str:
        """Return the text of the broken file."""
        text = (PACKAGE / self.file).read_bytes()
        before = self.before.encode()
        assert text[self.start :].startswith(before)
        return (text[: self.start] + self.after.encode() + text[self.start + len(before) :]).decode()


class Places(ast.NodeVisitor):
    """Finds the places of a file: (change, start, end, what to put there), in the bodies of its functions."""

    def __init__(self, text: bytes) -> None:
        self.text, self.found, self.functions = text, [], []
        self.starts = [0]
        for line in text.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def span(self, node: ast.AST) -> tuple[int, int]:
        return (
            self.starts[node.lineno - 1] + node.col_offset,
            self.starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def source(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.text[start:end].decode()

    def add(self, change: str, node: ast.AST, after: str) -> None:
        if self.functions:
            self.found.append((change, *self.span(node), after, ".".join(self.functions)))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in ("__str__", "__repr__", "describe"):
            return
        self.functions.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.functions.pop()

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave out what states a fact."""

    visit_Raise = visit_JoinedStr = visit_AnnAssign = visit_Assert

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Call) and SYNCHRONISES.search(name_of(node.value)):
            self.add("drop a call that synchronises", node, "pass")
        self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp | ast.While) -> None:
        if not isinstance(node, ast.While) and "None" not in self.source(node.test):
            self.add("negate a condition", node.test, f"(not ({self.source(node.test)}))")
        self.generic_visit(node)

    visit_IfExp = visit_While = visit_If

    def visit_Compare(self, node: ast.Compare) -> None:
        if len(node.ops) == 1:
            (start, end), left, right = self.span(node), self.span(node.left)[1], self.span(node.comparators[0])[0]
            sign = re.search(rb"[<>]=?", self.text[left:right])
            if sign:
                between = self.text[left:right].replace(sign[0], FLIPPED[sign[0].decode()].encode())
                self.add("flip < and <=", node, (self.text[start:left] + between + self.text[right:end]).decode())
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        word = " and " if isinstance(node.op, ast.And) else " or "
        for left_out in node.values:
            others = [f"({self.source(value)})" for value in node.values if value is not left_out]
            if "None" not in self.source(left_out):
                self.add("drop a term", node, f"({word.join(others)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if isinstance(node.op, ast.BitAnd):
            for kept in (node.left, node.right):
                self.add("drop a term", node, f"({self.source(kept)})")
        is_one = isinstance(node.right, ast.Constant) and node.right.value == 1
        if isinstance(node.op, ast.Add | ast.Sub) and is_one:
            self.add("one less or more", node, f"({self.source(node.left)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        name = name_of(node)
        if name in SAYS_SOMETHING:
            return
        if name in SWAPPED and isinstance(node.func, ast.Attribute | ast.Name) and node.args:
            function = re.sub(rf"{name}$", SWAPPED[name], self.source(node.func))
            self.add("swap minimum and maximum", node.func, function)
        if name in RANGES and node.args:
            stop = node.args[0 if len(node.args) == 1 else 1]
            for more in ("+ 1", "- 1"):
                self.add("one less or more", stop, f"({self.source(stop)}) {more}")
        self.generic_visit(node)


def name_of(call: ast.Call) -> str:
    """Return the last part of the name of what is called."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def mutants_of(file: str) -> list[Generated]:
    """Return the mutants of a file, in an order that is the same while their functions are."""
    text = (PACKAGE / file).read_bytes()
    places = Places(text)
    places.visit(ast.parse(text))
    found, seen = [], {}
    for change, start, end, after, function in places.found:
        before = text[start:end].decode()
        key = file, function, change, before, after
        seen[key] = seen.get(key, 0) + 1
        rank = hashlib.sha256(repr((*key, seen[key])).encode()).hexdigest()
        found.append(Generated(file, text[:start].count(b"\n") + 1, change, before, after, start, rank))
    return sorted(found, key=lambda mutant: mutant.rank)


def files_of(group: str) -> list[str]:
    """Return the files of a group, relative to the package."""
    earlier = [pattern for pattern in GROUPS if list(GROUPS).index(pattern) < list(GROUPS).index(group)]
    taken = {path for pattern in earlier for path in PACKAGE.glob(pattern)}
    return sorted(str(path.relative_to(PACKAGE)) for path in PACKAGE.glob(group) if path not in taken)


def sample(groups: Sequence[str], count: int, seed: int) -> Iterator[tuple[str, Generated]]:
    """Yield some `count` mutants with their groups: each group has its share, by how many mutants it has, and two."""
    by_group = {group: [m for file in files_of(group) for m in mutants_of(file)] for group in groups}
    total = sum(map(len, by_group.values()))
    for group, mutants in by_group.items():
        mutants.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.rank}".encode()).digest())
        for mutant in mutants[: max(2, round(count * len(mutants) / total))]:
            yield group, mutant


def floors() -> dict[str, dict]:
    """Return, by group, how many were judged and noticed when floors were set, and the least share."""
    return json.loads(FLOORS.read_text()) if FLOORS.exists() else {}
