"""The documentation: links resolve, examples run, lines are short enough to review, and retired words stay retired."""

import ast
import contextvars
import importlib
import re
import runpy
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import quire
from quire.dispatch.constants import forget
from quire.dispatch.device import compile_for
from quire.kernels import launcher
from quire.targets import TARGETS

ROOT = Path(__file__).parent.parent
WRITTEN_BY_COMMANDS = {"h200.md", "h200_graphs.md", "h200_peers.md", "vllm_h200.md"}  # of results
PAGES = sorted(
    page.relative_to(ROOT)
    for page in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("src/quire/**/*.md"),
        *ROOT.glob("tools/*.md"),
    ]
    if page.parent.name != "results" or page.name not in WRITTEN_BY_COMMANDS
)
WITH_EXAMPLES = (
    "README.md",
    "docs/start.md",
    "docs/usage.md",
    "docs/intervals.md",
    "docs/scores.md",
    "docs/serving.md",
    "docs/flash_attn.md",
    "docs/flashinfer.md",
    "docs/mla.md",
    "docs/quantise.md",
    "docs/shared_prefix.md",
    "docs/distributed.md",
    "docs/debug.md",
)
MAY_NAME_OLD_WORDS = {Path("CHANGELOG.md")}
LONGEST_LINE = 200
FENCE = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?:!?\[[^\]]*\]\(|<img\b[^>]* src=\")([^)\s\"]+)[)\"]")

RETIRED = {  # as a regular expression: what to say instead
    r"copy engine": "TMA",
    r"matrix units?": "tensor core",
    r"multiprocessors?": "SM",
    r"num_shares|equal shares": "num_partitions, partitions",
    r"num_parts": "num_splits",
    r"Fast(Tile|_tile)|FAST_TILES|Plan\.fast": "HopperConfig",
    r"Plan\.(tile|traits|beside|instead|few|prepared|chunk|why)": "Plan.launch",
    r"merge[_ ]cost": "combine cost",
    r"device_traits|Traits": "DeviceProperties",
    r"unmasked[_ ]loop|loops? without masks": "full-tile loop",
    r"(blocks|shares|prefill|merge)_kernel": "portable_kernel, hopper_kernel, combine_kernel",
    r"kernels/(blocks|shares|merge|attention)\.py|hopper/(prefill|fetch|block|attention)\.py": "the new path",
    r"tuning/(traits|select)\.py|bench/page\.py": "the new path",
    r"the warp that fetches|fetching warp": "producer warp",
    r"compile ring|test ring|GPU ring": "compile tests, GPU tests",
    r"beside|anew|mended?|nobody|shall|lays? out|laid out": "plain English",
}


def prose(page: Path) -> str:
    """Return the text of a page without its blocks of code, each line in its place."""
    return FENCE.sub(lambda block: "\n" * block[0].count("\n"), (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    slugs, seen = set(), Counter()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        slugs.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return slugs


def broken_links(page: Path) -> list[str]:
    """Return the links of a page into the repository that lead nowhere."""
    broken = []
    for link in LINK.findall(prose(page)):
        path, _, anchor = link.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.resolve().relative_to(ROOT.resolve()))):
            broken.append(link)
    return broken


def long_lines(page: Path) -> list[int]:
    """Return the numbers of lines of prose over LONGEST_LINE columns. Tables and the targets of links do not count."""
    lines = enumerate(prose(page).splitlines(), start=1)
    return [
        i for i, line in lines if not line.startswith("|") and len(re.sub(r"\]\([^)]*\)", "]", line)) > LONGEST_LINE
    ]


def retired_words(text: str) -> list[str]:
    """Return the retired words of a text, each with what to say instead."""
    found = []
    for pattern, instead in RETIRED.items():
        found += [f"{match[0]!r}: say {instead}" for match in re.finditer(rf"\b(?:{pattern})\b", text)]
    return found


def examples(page: str) -> list[tuple[int, str, str]]:
    """Return the Python blocks of a page: line, code, and what a comment ahead of it says that it needs."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = re.finditer(r"(?:<!-- needs (.*?) -->\n)?^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, block.start(2)), block[2], block[1] or "") for block in blocks]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_into_the_repository_resolve(page):
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_lines_of_prose_are_short_enough_to_review(page):
    assert long_lines(page) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page not in MAY_NAME_OLD_WORDS], ids=str)
def test_retired_words_stay_retired(page):
    assert retired_words((ROOT / page).read_text(encoding="utf-8")) == []


def test_retired_words_are_in_no_source():
    found = {}
    for path in [path for folder in ("src", "tests", "scripts", "examples") for path in ROOT.glob(f"{folder}/**/*.py")]:
        if path != Path(__file__) and (words := retired_words(path.read_text(encoding="utf-8"))):
            found[str(path.relative_to(ROOT))] = words
    assert found == {}


@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_examples_run_as_they_stand(page):
    if triton.knobs.runtime.interpret:
        pytest.skip("the examples are in bfloat16, which Triton's interpreter computes wrongly")
    names: dict = {}
    blocks = examples(page)
    assert blocks
    for line, code, needs in blocks:
        if needs == "a GPU" and not torch.cuda.is_available():
            continue
        exec(compile("\n" * line + code, page, "exec"), names)


HEADLINES = runpy.run_path(str(ROOT / "scripts/headlines.py"))
RATIO = re.compile(r"\d(\.\d+)? ?×( as (fast|long)| \|)|\d % (faster|slower)|\b[01]\.\d\d of (the|its|their) ")


@pytest.mark.parametrize("page", HEADLINES["PAGES"])
def test_headlines_say_what_was_measured(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert HEADLINES["rewritten"](text) == text, "run python scripts/headlines.py"


COMPUTED = ["README.md", "docs/vllm.md", "docs/sglang.md", "docs/transformers.md", "docs/mla.md"]


@pytest.mark.parametrize("page", COMPUTED)
def test_no_ratio_stands_in_a_page_for_users_but_those_that_a_script_computed(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert HEADLINES["PLACE"].search(text)
    assert not RATIO.search(HEADLINES["PLACE"].sub("", text))


def test_a_headline_counts_slower_cases_and_leaves_out_those_of_the_portable_kernel_alone():
    def row(case: str, **times: float) -> Any:
        return SimpleNamespace(case=case, kind="decode", times=times)

    rows = [
        row("faster", **{"Quire": 4.0, "FlashAttention 3": 8.0, "vLLM Triton": 9.0}),
        row("slower", **{"Quire": 5.0, "cuDNN": 4.0, "Quire, naive": 1.0}),
        row("alone", **{"Quire": 1.0, "vLLM Triton": 30.0}),
        row("not paged", **{"Quire": 4.0, "SDPA, not paged": 1.0, "FlashInfer fa2": 6.0}),
    ]
    found = HEADLINES["speedups"](rows)
    assert found == {"faster": 2.0, "slower": 0.8, "not paged": 1.5}
    assert HEADLINES["line"]("all", found) == "| all | 3 | 1.34× | 0.80× (slower) | 1 |\n"
    report = SimpleNamespace(rows=rows, provenance=SimpleNamespace(device="NVIDIA H9", date="2026-11-29"))
    assert HEADLINES["glance"]((", all", report, {"decode": ("decode",)}), ("", report, {"any": ("decode",)})) == (
        "| × as fast | H9, all | H9 |\n| --- | --- | --- |\n| decode | 1.34× | 1.34× |\n"
        "| prompts |  |  |\n| mixed |  |  |\n| slower in | 1 of 3 | 1 of 3 |\n"
    )
    assert HEADLINES["losses"](report).splitlines()[2:] == ["| slower | H9, 2026-11-29 | cuDNN | 4.0 | 5.0 | 0.80× |"]
    assert HEADLINES["spread"]([0.97, 1.2, 1.0]) == "0.970 to 1.200× as fast, and slower in 1 of 3 measurements"
    assert HEADLINES["copies"](SimpleNamespace(rows=rows)) == (
        "It's faster than Quire in 1 of 1 cases, all of decode. In the slowest (not paged), Quire runs 0.25× as fast.\n"
    )


def test_the_readme_s_picture_can_be_drawn_again(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib", reason="plots need quire-tools")
    picture, results = tmp_path / "summary.png", ROOT / "docs/results/h200_peers.json"
    monkeypatch.setattr("sys.argv", ["draw_summary.py", str(results), "--out", str(picture)])
    script = runpy.run_path(str(ROOT / "scripts/draw_summary.py"), run_name="__main__")
    assert picture.read_bytes().startswith(b"\x89PNG")
    times = {"Quire": 2.0, "FlashInfer fa2": 7.0, "FlashInfer XQA": 4.0, "FlashInfer BatchAttention": 5.0}
    rows = [{"kind": "decode", "results": {name: {"micros": time} for name, time in times.items()}}]
    assert script["speedups"](rows, "FlashInfer") == [("decode", 2.0)]  # the fastest of all its kernels counts


GPUS = re.compile(r"^\| .* \((\w+(?: to \w+|, \w+)*)\) \| `(\w+)` \| `(\w+)` \| `(\w+)` \| (\w+)", re.MULTILINE)


def test_the_readme_s_table_of_gpus_is_what_plans_take():
    """Of decode, a prompt and latents; Hopper GPUs alone were measured, and have kernels of their own."""
    names, found = [*TARGETS], {}
    for which, *kernels, state in GPUS.findall((ROOT / "README.md").read_text(encoding="utf-8")):
        first, _, last = which.partition(" to ")
        of_row = names[names.index(first) : names.index(last) + 1] if last else which.split(", ")
        found |= {name: (kernels, state) for name in of_row if name not in found}
    lens, i32 = torch.ones(8).int(), partial(torch.zeros, dtype=torch.int32)
    latents = quire.AttentionSpec.mla(num_q_heads=16, softmax_scale=0.1)
    dense = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
    decode, prompt = quire.Batch(i32(8, 256), lens), quire.Batch(i32(1, 128), lens[:1], i32(2))
    for name, target in TARGETS.items():
        with compile_for(target.properties, on_compile=None):
            plans = (
                quire.plan(dense, decode, max_query_len=1, max_seq_len=4096),
                quire.plan(dense, prompt, max_query_len=2048, max_seq_len=2048),
                quire.plan(latents, decode, max_query_len=1, max_seq_len=4096),
            )
        assert found[name] == ([plan.kernel for plan in plans], "measured" if name == "sm90" else "compiled"), name


def test_two_fifths_of_the_kernels_are_for_hopper_gpus():
    def lines(folder: str) -> int:
        return sum(len(path.read_text("utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py"))

    folders = "hopper", "decoded", "mla_hopper", "chosen_hopper", "gluon"
    hopper = sum(lines(f"src/quire/kernels/{name}") for name in folders)
    assert 0.35 < hopper / lines("src/quire/kernels") < 0.45
    assert "make up two fifths of the kernel lines" in (ROOT / "README.md").read_text(encoding="utf-8")


STEP = re.compile(r"^\| `([a-z_/]+\.py)`: `([\w.]+)` \|", re.MULTILINE)


def paths() -> dict[str, list[tuple[str, str]]]:
    """Return the tables of functions in DESIGN.md and docs/kernels, as (file, function), by heading and number."""
    found = {}
    for page in [ROOT / "DESIGN.md", *sorted(ROOT.glob("docs/kernels/*.md"))]:
        for section in re.split(r"^#{1,3} ", page.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
            tables = [STEP.findall(table) for table in re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)]
            steps = [table for table in tables if table]
            found |= {f"{section.splitlines()[0]}, table {i}": table for i, table in enumerate(steps, start=1)}
    return found


def test_the_design_can_be_read_in_one_sitting():
    assert len((ROOT / "DESIGN.md").read_text(encoding="utf-8").split()) <= 3000


def test_every_kernel_family_has_a_page():
    pages = "".join(page.read_text(encoding="utf-8") for page in ROOT.glob("docs/kernels/*.md"))
    folders = {path.parent.name for path in (ROOT / "src/quire/kernels").glob("*/launch.py")}
    assert {folder for folder in folders if f"`kernels/{folder}/`" not in pages} == set()


def test_every_module_is_in_a_layer():
    layers = (ROOT / "DESIGN.md").read_text(encoding="utf-8").split("## Layers")[1].split("\n## ")[0]
    modules = {path.name for path in (ROOT / "src/quire").iterdir() if not path.name.startswith(("__", "py.typed"))}
    assert {name for name in modules if f"{name}`" not in layers and f"`{name}/" not in layers} == {"demo_model"}


def functions_of(file: str) -> dict[str, bool]:
    """Return the functions and methods of a file of the package; whether each is compiled by Triton."""
    found = {}
    for node in ast.parse((ROOT / "src/quire" / file).read_text(encoding="utf-8")).body:
        methods = node.body if isinstance(node, ast.ClassDef) else []
        functions = {f"{node.name}.{n.name}": n for n in methods if isinstance(n, ast.FunctionDef)}
        if isinstance(node, ast.FunctionDef):
            functions[node.name] = node
        found |= {name: any("jit" in ast.unparse(d) for d in f.decorator_list) for name, f in functions.items()}
    return found


@pytest.mark.parametrize("path", paths())
def test_a_path_names_functions_that_exist_and_no_file_twice(path):
    steps = paths()[path]
    assert steps
    assert [step for step in steps if step[1] not in functions_of(step[0])] == []
    assert len({file for file, _ in steps}) == len(steps)


@dataclass(frozen=True)
class Call:
    """The call that takes a path."""

    target: str = "sm90"
    latent: bool = False
    query_len: int = 1

    def enter(self) -> dict[str, list[tuple[str, str]]]:
        """Plan and attend, without compiling; return the functions that were entered by each and by both, in order."""
        entered = []

        def enter(frame, event, _):
            path = Path(frame.f_code.co_filename)
            if event == "call" and path.is_relative_to(ROOT / "src/quire"):
                entered.append((str(path.relative_to(ROOT / "src/quire")), frame.f_code.co_qualname))

        if self.latent:
            spec = quire.AttentionSpec.mla(num_q_heads=32, softmax_scale=0.1)
        else:
            spec = quire.AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128)
        starts = None if self.query_len == 1 else torch.zeros(5, dtype=torch.int32)
        batch = quire.Batch(torch.zeros(4, 128, dtype=torch.int32), torch.zeros(4, dtype=torch.int32), starts)
        cache = quire.PagedKVCache.empty(spec, num_pages=4, page_size=16)
        q = torch.empty(4 * self.query_len, 32, spec.head_dim, dtype=torch.bfloat16)

        def plan_and_attend():
            sys.setprofile(enter)
            plan = quire.plan(spec, batch, max_query_len=self.query_len, max_seq_len=2048)
            planned = len(entered)
            quire.attention(q, cache, plan)
            return planned

        with (
            compile_for(TARGETS[self.target].properties, on_compile=lambda *compiled: None),
            ThreadPoolExecutor(1) as thread,  # whose profile is its own: another test may have left one in this thread
        ):
            planned = thread.submit(contextvars.copy_context().run, plan_and_attend).result()
        assert entered, f"nothing of {ROOT / 'src/quire'} was entered; {quire.plan.__code__.co_filename} was"
        return {"plan": entered[:planned], "attention": entered[planned:], "both": entered}


PATHS = {  # the call that takes the path, and the verbs whose functions are compared
    "A call, table 1": (Call(), "plan"),
    "A call, table 2": (Call(), "attention"),
    "A captured step, table 1": (Call(), "both"),
    "The path of a prompt, table 1": (Call(query_len=2048), "attention"),
    "The path of q over latents, table 1": (Call("sm80", latent=True), "attention"),
    "The path of q over latents on a Hopper GPU, table 1": (Call(latent=True), "attention"),
}


def test_every_path_has_its_call():
    assert PATHS.keys() == paths().keys()


@pytest.mark.parametrize("path", PATHS)
def test_a_call_takes_its_path_in_this_order(path, monkeypatch):
    if triton.knobs.runtime.interpret:
        pytest.skip("plans for a Hopper GPU, whose kernel the interpreter does not run")
    for name in ("combine", "copy", "write", "write_latent"):  # they bind `launch` at import: not the stand-in
        importlib.import_module(f"quire.kernels.{name}")
    monkeypatch.setattr(launcher, "launch", lambda *arguments: None)  # neither compile nor run
    forget()  # nor remember what was chosen before
    call, verbs = PATHS[path]
    entered = dict.fromkeys(call.enter()[verbs])
    on_the_host = [step for step in paths()[path] if not functions_of(step[0])[step[1]]]
    assert [step for step in entered if step in on_the_host] == on_the_host


def test_the_checks_see_what_they_look_for(tmp_path, monkeypatch):
    page = Path("page.md")
    text = f"# A heading\n[here](#a-heading) [gone](#no-heading) [lost](lost.md)\n\n| {'x' * 300} |\n{'y' * 201}\n"
    (tmp_path / page).write_text(f"{text}```\n{'z' * 300} [code](lost.md)\n```\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert broken_links(page) == ["#no-heading", "lost.md"]
    assert long_lines(page) == [5]
    assert [word.split("'")[1] for word in retired_words("The copy engine, mended. Shares of a page.")] == [
        "copy engine",
        "mended",
    ]
