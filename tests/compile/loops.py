"""The loops of a kernel's machine code, and how many instructions of each kind they have."""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

import triton

KINDS = {  # opcodes begin with these
    "tensor cores": ("HMMA", "HGMMA", "QGMMA", "IMMA", "QMMA", "OMMA", "UTCHMMA", "UTCQMMA"),
    "loads": ("LDG", "LDGSTS", "UTMALDG", "UBLKCP", "LD."),
    "stores": ("STG", "ST.", "UTMASTG", "RED", "ATOM"),
    "shared memory": ("LDS", "STS", "LDSM", "STSM", "ATOMS"),
    "local memory": ("LDL", "STL"),
    "barriers": ("BAR", "SYNCS", "DEPBAR", "LDGDEPBAR", "WARPSYNC", "WARPGROUP", "MEMBAR", "FENCE", "ARRIVES"),
    "exponentials": ("MUFU",),
    "conversions": ("F2F", "F2I", "I2F", "PRMT"),
    "float": ("FFMA", "FADD", "FMUL", "FMNMX", "FSETP", "FSEL", "HFMA", "HADD", "HMUL", "HMNMX"),
    "shuffles and moves": ("SHFL", "MOV", "R2UR", "S2R", "UMOV", "SEL", "USEL", "CS2R", "S2UR"),
}
SHORTEST = 16
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(?:@!?U?P[T0-9]+\s+)?([A-Z][A-Z0-9_.]*)(.*)$")
LABEL = re.compile(r"^(\.L_x_\d+):")


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a kernel for an NVIDIA GPU as text. Triton brings the disassembler."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, "-c", file.name], capture_output=True, text=True, check=True).stdout


def innermost_loops(code: str, kinds: tuple[str, ...] = (), usual: bool = False) -> list[list[str]]:
    """Return the opcodes of each loop with instructions of each kind that has no such loop inside, the longest first.

    A loop ends in a branch backwards. Loops of fewer than SHORTEST instructions wait for something, and do not count.
    Nor does a branch from behind the end of the program, where the compiler puts further attempts to wait.
    `usual`: without the instructions that a branch forwards skips, if they are SHORTEST or more.
    """
    opcodes, labels, branches = [], {}, []
    for line in code.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(opcodes)
        elif found := INSTRUCTION.match(line):
            opcodes.append(found[1])
            target = re.search(r"\(?(\.L_x_\d+)\)?", found[2]) if found[1].startswith("BRA") else None
            if target:
                branches.append((target[1], len(opcodes)))
    spans = {(labels[name], end) for name, end in branches if labels.get(name, end) <= end - SHORTEST}
    loops = [(begin, end) for begin, end in spans if "EXIT" not in opcodes[begin:end]]
    if kinds:
        loops = [(a, b) for a, b in loops if all(count_kinds(opcodes[a:b])[kind] for kind in kinds)]
    inner = [(a, b) for a, b in loops if not any((a, b) != (c, d) and a <= c and d <= b for c, d in loops)]
    if not usual:
        return sorted((opcodes[begin:end] for begin, end in inner), key=len, reverse=True)
    skips = [(begin, labels[name]) for name, begin in branches if labels.get(name, 0) >= begin + SHORTEST]
    found = []
    for begin, end in inner:
        skipped = {at for a, b in skips if begin <= a and b < end for at in range(a, b)}
        found.append([opcodes[at] for at in range(begin, end) if at not in skipped])
    return sorted(found, key=len, reverse=True)


def count_kinds(opcodes: list[str]) -> Counter[str]:
    """Return how many of some instructions are of each kind."""
    kinds = Counter[str]()
    for opcode in opcodes:
        # The longest beginning decides: LDSM is no LDS, LDGDEPBAR is no LDG.
        matches = [(len(start), kind) for kind, starts in KINDS.items() for start in starts if opcode.startswith(start)]
        kinds[max(matches)[1] if matches else "integers and branches"] += 1
    return kinds


def loops_with(code: dict, *kinds: str) -> list[list[str]]:
    """Return the innermost loops of a kernel for an NVIDIA GPU that have instructions of each kind."""
    return innermost_loops(disassemble(code["cubin"]), kinds)


def attending(code: dict) -> list[list[str]]:
    """Return the innermost loops of a kernel for an NVIDIA GPU that compute scores and their exponentials.

    They are without what a tile skips that rows see whole and that raises no maximum.
    """
    return innermost_loops(disassemble(code["cubin"]), ("tensor cores", "exponentials"), usual=True)


def describe(opcodes: list[str]) -> str:
    """Return one line about a loop."""
    return f"{len(opcodes)} instructions: " + ", ".join(f"{n} {kind}" for kind, n in count_kinds(opcodes).most_common())
