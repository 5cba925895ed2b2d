"""What the compiler makes of attention for GPUs that no one here can run: against a record, which a page shows.

    python -m tests.compile.static                   # compile, and print what differs from the record; some minutes
    python -m tests.compile.static --write           # write the record and docs/results/targets.md again
    python -m tests.compile.static --only 'sm120|prompt'

A time needs the card. What a compiler decides does not: registers and what spills, how many programs an SM holds, how
many bytes are under way while a tile is multiplied, and how many instructions a tile of keys takes. A change that is
good for one target may spoil another by these numbers, and a test says so.
"""

import argparse
import json
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch
import triton

import quire
from quire import targets
from quire.kernels.choose import variant_of
from quire.targets import TARGETS, Launch
from tests.compile import loops

ROOT = Path(__file__).parents[2]
RECORD, PAGE = Path(__file__).parent / "static.json", ROOT / "docs/results/targets.md"
CARDS = {"sm100": "B200", "sm120": "RTX PRO 6000", "gfx942": "MI300X", "gfx950": "MI355X"}
E4M3 = {"kv_dtype": torch.float8_e4m3fn}
CASES = {  # heads, columns of a head, further fields; sequences, queries and keys of each, query tokens
    "decode 128 × 2,048": ((32, 8, 128, {}), (128, 1, 2048, 128)),
    "decode 1 × 16,384": ((32, 8, 128, {}), (1, 1, 16384, 1)),
    "decode 128 × 2,048, e4m3": ((32, 8, 128, E4M3), (128, 1, 2048, 128)),
    "prompt of 4,096": ((32, 8, 128, {}), (1, 4096, 4096, 4096)),
    "prompt of 4,096, heads of 64": ((32, 8, 64, {}), (1, 4096, 4096, 4096)),
    "prompt of 4,096, heads of 256": ((16, 8, 256, {}), (1, 4096, 4096, 4096)),
    "prompt of 4,096, e4m3": ((32, 8, 128, E4M3), (1, 4096, 4096, 4096)),
    "chunk of 64 on 16,384": ((32, 8, 128, {}), (1, 64, 16384, 64)),
    "latents, decode 32 × 4,096": ((16, None, None, {}), (32, 1, 4096, 32)),
}
ATTENDS = "portable_kernel", "mla_kernel"
TOLERANCE = 1.02  # of instructions: a kernel may have so many more than the record says
LATENCY = 0.7  # µs from a load to its data, assumed: that of an H200
LABEL, BRANCH = re.compile(r"^(\.LBB\d+_\d+):"), re.compile(r"^s_c?branch\w*\s+(\.LBB\d+_\d+)")
OPCODE = re.compile(r"^\s+([a-z]\w+)")


@dataclass(frozen=True)
class Made:
    """What the compiler made of a launch's attention kernel."""

    variant: str
    registers: int
    spills: int  # bytes of a thread
    shared: int  # bytes of a program
    occupancy: int  # programs of an SM; of AMD's, waves of a SIMD
    in_flight: int  # bytes that a program loads while it multiplies a tile
    instructions: int  # of a warp, of the loop over tiles that has the fewest
    products: int  # matrix instructions among them


def spec_of(heads: int, kv_heads: int | None, columns: int | None, fields: dict) -> quire.AttentionSpec:
    """Return the spec of a case: of latents, where no KV heads are named."""
    if kv_heads is None or columns is None:
        return quire.AttentionSpec.mla(num_q_heads=heads, softmax_scale=0.1, **fields)
    return quire.AttentionSpec(num_q_heads=heads, num_kv_heads=kv_heads, head_dim=columns, **fields)


def loops_of_amd(text: str) -> Iterator[list[str]]:
    """Yield the opcodes of each innermost loop with matrix instructions and exponentials, of an AMD GPU's assembly."""
    opcodes, labels, branches = [], {}, []
    for line in text.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif found := OPCODE.match(line):
            opcodes.append(found[1])
            if target := BRANCH.match(line.strip()):
                branches.append((target[1], len(opcodes)))
    spans = {(labels[name], end) for name, end in branches if labels.get(name, end) < end}

    def attends(begin: int, end: int) -> bool:
        body = opcodes[begin:end]
        return any("mfma" in code for code in body) and any(code.startswith("v_exp") for code in body)

    found = [span for span in spans if attends(*span)]
    for begin, end in found:
        if not any((begin, end) != (a, b) and begin <= a and b <= end for a, b in found):
            yield opcodes[begin:end]


def loop_of(code: dict) -> tuple[int, int]:
    """Return how many instructions the shortest loop over tiles has, and how many of them multiply matrices."""
    if "amdgcn" in code:
        counted = [(len(body), sum("mfma" in each for each in body)) for body in loops_of_amd(code["amdgcn"])]
    else:
        # Where one thread of a warpgroup begins products, others skip them.
        every = loops.loops_with(code, "tensor cores", "exponentials")
        most = min(every, key=len, default=[])
        counted = [(len(body), loops.count_kinds(most)["tensor cores"]) for body in loops.attending(code)]
    return min(counted, default=(0, 0))


def make(target: str, case: str) -> Made:
    """Compile a case for a target."""
    (heads, kv_heads, columns, fields), batch = CASES[case]
    spec, codes, inspect = spec_of(heads, kv_heads, columns, fields), [], targets.inspect

    def collect(name, kernel, *others):
        codes.append(kernel.asm)
        return inspect(name, kernel, *others)

    with mock.patch.object(targets, "inspect", collect):
        plan, compiled = Launch(spec, *batch, page_size=64 if spec.latent else 16).compile(TARGETS[target])
    (kernel, code), *_ = [(k, c) for k, c in zip(compiled, codes, strict=True) if k.kernel in ATTENDS]
    config = plan.launch.config
    width = spec.head_dim if spec.latent else spec.head_dim + spec.head_dim_v
    in_flight = max(0, config.num_stages - 1) * config.block_n * width * spec.kv_dtype.itemsize
    used = kernel.registers, kernel.spills, kernel.shared, kernel.occupancy
    return Made(variant_of(plan.launch), *used, in_flight, *loop_of(code))


def worse(made: Made, known: Made) -> list[str]:
    """Return in words by what a kernel is worse than the record says."""
    found = []
    if made.variant != known.variant:
        found.append(f"{made.variant} in place of {known.variant}")
    for name, most in (("spills", known.spills), ("instructions", TOLERANCE * known.instructions)):
        if getattr(made, name) > most:
            found.append(f"{name} {getattr(known, name)} -> {getattr(made, name)}")
    for name in ("occupancy", "in_flight", "products"):
        if getattr(made, name) < getattr(known, name):
            found.append(f"{name} {getattr(known, name)} -> {getattr(made, name)}")
    return found


def record() -> dict[str, Made]:
    """Return the record: what was made of each target and case."""
    return {name: Made(**made) for name, made in json.loads(RECORD.read_text())["made"].items()}


def page(made: dict[str, Made], version: str) -> str:
    """Return the page that shows a record."""
    lines = [
        "# What other GPUs would run",
        "",
        "Quire hasn't been run on these GPUs. This is what Triton makes of its portable kernels for them: no times.",
        f"Triton {version}, bf16, heads 32/8 of 128 and pages of 16 unless a case says otherwise.",
        "`python -m tests.compile.static --write` wrote this page, and a test compares the compiler's work with it.",
        "",
        "* *Programs* are those that an SM holds at once; on AMD's GPUs, waves of a SIMD.",
        "* *Under way* is what the programs of an SM load while they multiply; of AMD's, what one program loads.",
        "* *Instructions* are those of a warp for a tile of keys that all rows see; in brackets those that multiply "
        "matrices.",
        "* A *variant* is named by the rows and keys of a tile, warps, stages (u: full tiles have their own loop), and "
        "programs.",
        "",
    ]
    for target, card in CARDS.items():
        limits = TARGETS[target]
        needed = limits.memory_gbps * LATENCY / 1.024 / limits.num_sms
        busy = (
            f"If a load takes {LATENCY} µs, {needed:.0f} KB under way on each of {limits.num_sms} SMs keep memory busy."
        )
        lines += [f"## {card} ({target})", "", busy, ""]
        lines += ["| case | variant | registers | bytes spilled | KB shared | programs | KB under way | instructions |"]
        lines += ["| --- | --- | --- | --- | --- | --- | --- | --- |"]
        for case in CASES:
            m = made[f"{target} | {case}"]
            programs = m.occupancy if target.startswith("sm") else 1
            cells = (
                case, m.variant, m.registers, m.spills, f"{m.shared / 1024:.0f}", m.occupancy,
                f"{programs * m.in_flight / 1024:.0f}", f"{m.instructions} ({m.products})",
            )  # fmt: skip
            lines.append("| " + " | ".join(map(str, cells)) + " |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the record and the page")
    parser.add_argument("--only", default="", help="a pattern of targets and cases, such as 'sm120|prompt'")
    args = parser.parse_args()
    known = record() if RECORD.exists() else {}
    for target in CARDS:
        for case in CASES:
            name = f"{target} | {case}"
            if not re.search(args.only, name):
                continue
            made = make(target, case)
            differs = worse(made, known[name]) if name in known else ["new"]
            print(f"{name}: {made}{'; ' * bool(differs)}{', '.join(differs)}", flush=True)
            known[name] = made if args.write else known.get(name, made)
    if args.write:
        text = {"triton": triton.__version__, "made": {name: asdict(made) for name, made in known.items()}}
        RECORD.write_text(json.dumps(text, indent=1) + "\n")
        PAGE.write_text(page(known, triton.__version__))


if __name__ == "__main__":
    main()
