"""Whether a change of kernels leaves their machine code as it was: compare what two source trees compile to.

PYTHONPATH=before/src python -m tests.compile.code keep /tmp/before     # the IR of each launch of sm90, some minutes
PYTHONPATH=after/src python -m tests.compile.code keep /tmp/after --only 'prefill|drafts' --all
python -m tests.compile.code compare /tmp/before /tmp/after             # compiles to the end where the IR differs

Launches are those of the compile suite, more of latents, and those of batch-invariant plans. `keep` ends after Triton's
first stage, whose IR is without names and lines. Where it is the same, so is all that follows. Where it differs,
`compare` goes on to PTX, and where that differs to machine code: its text, registers, stack, and innermost loops.
Without --all, Gluon kernels alone are kept.
"""

import argparse
import hashlib
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["TRITON_DISABLE_LINE_INFO"] = "1"

import torch
from triton._C.libtriton import ir
from triton.backends.compiler import Language
from triton.compiler import make_backend
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.runtime.jit import JITFunction

import quire
from quire import targets
from quire.targets import TARGETS, Launch, compiling
from tests.compile import launches, loops

TARGET = TARGETS["sm90"]
ASKED = ("num_warps", "num_stages", "maxnreg", "launch_pdl", "enable_fp_fusion", "ptx_version")  # what stages read
VALUE = re.compile(r"%[A-Za-z0-9_$.-]+")
LOCATION = re.compile(r" ?loc\((?:[^()\"]|\"[^\"]*\"|\([^()]*\))*\)")
LATENT_BATCHES = ((32, 1, 4096), (1, 1, 16384), (8, 3, 4096), (2, 300, 2000))  # sequences, queries and keys of each


def cases() -> Iterator[tuple[str, Any]]:
    """Return the launches, with names."""
    for name, head_dim, batch in itertools.product(
        launches.FEATURES | launches.COMBINED, launches.HEAD_DIMS, launches.BATCHES
    ):
        yield f"{batch} | {head_dim} | {name}", partial(launches.attend, batch, head_dim, name)
    wide = (320, 512)
    for head_dim, batch in itertools.product((*launches.ODD_HEAD_DIMS, *wide), launches.BATCHES):
        for name in ("plain", "e4m3", "many, with lse", "pages of 1, flat"):
            yield f"{batch} | {head_dim} | {name}", partial(launches.attend, batch, head_dim, name)
    for head_dim, batch, name in itertools.product(
        (64, 96, 128, 256), launches.BATCHES, ("plain", "many, with lse", "e4m3", "intervals")
    ):
        title = f"{batch} | {head_dim} | {name} | invariant"
        yield title, partial(launches.attend, batch, head_dim, name, batch_invariant=True)
    element = {"bfloat16": {}, "float16": {"dtype": torch.float16}, "e4m3": {"kv_dtype": torch.float8_e4m3fn}}
    element["fp8 products"] = element["e4m3"] | {"allow_fp8": True}
    for heads, (name, dtypes), batch, page_size in itertools.product(
        (8, 16, 32, 128), element.items(), LATENT_BATCHES, (64, 1)
    ):
        if page_size == 64 or heads == 16:
            spec = quire.AttentionSpec.mla(num_q_heads=heads, softmax_scale=0.1, **dtypes)
            num_seqs, q_len, kv_len = batch
            decode = Launch(spec, num_seqs, q_len, kv_len, num_seqs * q_len, page_size, return_lse=q_len > 1)
            yield f"latents of {heads} heads, pages of {page_size} | {name} | {batch}", partial(decode.compile, TARGET)
    for name in launches.CHOSEN:
        yield f"chosen | {name}", partial(launches.attend_to_chosen, name)
    for batch, name in itertools.product(("decode", "drafts"), ("bfloat16", "e4m3")):
        yield (
            f"{batch} | latents | {name} | invariant",
            partial(launches.attend_to_latents, batch, name, batch_invariant=True),
        )


class Kept:
    """What the launches of a case compile to, up to the first stage."""

    def __init__(self, folder: Path, gluon_alone: bool) -> None:
        self.folder, self.gluon_alone, self.of_launch, self.texts = folder, gluon_alone, [], {}

    def first_stage(
        self, kernel: Any, key: Any, signature: Any, device: Any, constexprs: Any, options: Any, attrs: Any, warmup: Any
    ) -> Any:
        """Take the place of `JITFunction._do_compile`: keep the IR of kernels that are asked for, and compile none."""
        is_gluon = isinstance(kernel, GluonJITFunction)
        if self.gluon_alone and not is_gluon:
            return None
        known = repr((kernel.__name__, key))
        if known not in self.texts:
            _, _, target, backend, _ = kernel.device_caches[device]
            context, stages = ir.context(), {}
            ir.load_dialects(context)
            backend.load_dialects(context)
            source = kernel.ASTSource(kernel, signature, constexprs, attrs)
            functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
            module = source.make_ir(target, options, functions, modules, context)
            backend.add_stages(stages, options, source.language)
            if not is_gluon:
                module = stages["ttir"](module, {})
            text = without_names(str(stages["ttgir"](module, {})))
            asked = {name: value for name, value in vars(options).items() if name in ASKED}
            name = hashlib.sha256(f"{asked}{text}".encode()).hexdigest()[:16]
            (self.folder / f"{name}.ttgir").write_text(text)
            (self.folder / f"{name}.json").write_text(json.dumps(asked))
            self.texts[known] = name
        self.of_launch.append(self.texts[known])
        return None


def without_names(text: str) -> str:
    """Return IR without locations, and with its values numbered in order of appearance."""
    lines = [line for line in text.splitlines() if not line.startswith("#loc")]
    numbers: dict[str, str] = {}
    text = "\n".join(LOCATION.sub("", line) for line in lines)
    return VALUE.sub(lambda found: numbers.setdefault(found[0], f"%v{len(numbers)}"), text)


def keep(folder: Path, only: str, gluon_alone: bool) -> None:
    """Write the IR of each launch to a folder, and which launch has which."""
    folder.mkdir(parents=True, exist_ok=True)
    kept, found = Kept(folder, gluon_alone), {}
    first_stage = mock.patch.object(JITFunction, "_do_compile", lambda *args, **more: kept.first_stage(*args, **more))
    with first_stage, mock.patch.object(targets, "inspect"):
        for name, launch in cases():
            if not re.search(only, name):
                continue
            kept.of_launch = []
            try:
                with compiling(TARGET):
                    launch()
            except quire.UnsupportedError as error:
                print(f"{name}: {error}", flush=True)
            if kept.of_launch:
                found[name] = kept.of_launch
    (folder / "launches.json").write_text(json.dumps(found, indent=1))
    print(f"{len(found)} launches of {len(set(kept.texts.values()))} kernels in {folder}")


def finish(folder: Path, name: str) -> tuple[str, Callable[[], bytes]]:
    """Return the PTX of a kernel that was kept, and a function that returns its machine code."""
    backend = make_backend(TARGET.gpu)
    asked = json.loads((folder / f"{name}.json").read_text())
    options = backend.parse_options(asked | {"arch": "sm90"})
    context, stages = ir.context(), {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    module: Any = ir.parse_mlir_module(str(folder / f"{name}.ttgir"), context)
    module.context = context
    backend.add_stages(stages, options, Language.GLUON)
    metadata = {"target": TARGET.gpu, **vars(options)}
    ptx = stages["ptx"](stages["llir"](module, metadata), metadata)
    return ptx, lambda: stages["cubin"](ptx, metadata)


def describe(cubin: bytes) -> tuple[str, list[str]]:
    """Return the machine code as text, and a line for its resources and for each innermost loop."""
    code = loops.disassemble(cubin)
    instructions = "\n".join(line.strip() for line in code.splitlines() if loops.INSTRUCTION.match(line))
    kernel: Any = mock.Mock(asm={"cubin": cubin})
    kernel.metadata.num_warps = kernel.metadata.shared = 1
    registers, stack, _, _ = targets.inspect_nvidia(kernel, TARGET)
    lines = [f"{registers} registers, {stack} bytes of stack, {len(instructions.splitlines())} instructions"]
    return instructions, lines + [f"a loop of {loops.describe(loop)}" for loop in loops.innermost_loops(code)]


def compare(before: Path, after: Path) -> bool:
    """Print which launches differ, and how. Return whether all machine code is the same."""
    first, second = (json.loads((folder / "launches.json").read_text()) for folder in (before, after))
    both = [name for name in second if name in first]
    missing = [name for name in second if name not in first]
    pairs: dict[tuple[str, str], str] = {}
    for name in both:
        if len(first[name]) != len(second[name]):
            missing.append(name)
        for pair in zip(first[name], second[name], strict=False):
            pairs.setdefault(pair, name)
    same = sum(a == b for a, b in pairs)
    print(f"{len(both)} launches of {len(pairs)} kernels; the same IR: {same}; not in both: {missing}", flush=True)
    counts = {"PTX": 0, "machine code": 0, "resources and loops": 0, "different": 0}
    for (a, b), name in pairs.items():
        if a == b:
            continue
        (old_ptx, old_cubin), (new_ptx, new_cubin) = finish(before, a), finish(after, b)
        if old_ptx == new_ptx:
            counts["PTX"] += 1
            continue
        (old, old_lines), (new, new_lines) = describe(old_cubin()), describe(new_cubin())
        verdict = "machine code" if old == new else "different"
        if verdict == "different" and old_lines == new_lines:
            verdict = "resources and loops"
        counts[verdict] += 1
        if verdict != "machine code":
            print(f"{name}: {verdict} ({a}, {b})", *old_lines, "->", *new_lines, sep="\n    ", flush=True)
    print("other IR, and the same", ", ".join(f"{what}: {number}" for what, number in counts.items()))
    return not missing and counts["different"] == 0


def main() -> None:
    """Parse the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("keep", "compare"))
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--only", default="", help="keep: launches whose name this pattern matches")
    parser.add_argument("--all", action="store_true", help="keep: kernels in plain Triton too")
    args = parser.parse_args()
    same = True
    if args.command == "keep":
        keep(args.folders[0], args.only, not args.all)
    else:
        same = compare(*args.folders)
    sys.stdout.flush()
    os._exit(not same)  # Triton 3.9's bindings print what Gluon did not free


if __name__ == "__main__":
    main()
