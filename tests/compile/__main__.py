"""Print the resources of every launch of the compile suite on a target, for work on kernels or trees.

python -m tests.compile sm90                        # everything, some minutes
python -m tests.compile sm90 gfx942 --batch decode --features plain e4m3 --head-dim 128
python -m tests.compile gfx942 --spills             # only launches that spill or do not fit
python -m tests.compile sm90 --batch decode --features plain --head-dim 128 --loops   # what the loops consist of
python -m tests.compile sm90 --latents 16 128 --loops   # decode over latents of 512 + 64, with 16 and 128 query heads
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch

import quire
from quire import targets
from quire.targets import TARGETS, Compiled, Launch, Target, compiling
from tests.compile import launches, loops


def main() -> None:
    """Parse the arguments, compile, print a line for each kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", nargs="+", choices=TARGETS)
    parser.add_argument("--batch", nargs="+", choices=launches.BATCHES, default=list(launches.BATCHES))
    parser.add_argument(
        "--features", nargs="+", choices=launches.FEATURES | launches.COMBINED, default=list(launches.FEATURES)
    )
    parser.add_argument("--head-dim", nargs="+", type=int, default=launches.HEAD_DIMS)
    parser.add_argument(
        "--spills",
        action="store_true",
        help="print only launches that fail, spill, or need more shared memory than there is",
    )
    parser.add_argument("--loops", action="store_true", help="NVIDIA: count the instructions of the innermost loops")
    parser.add_argument("--latents", nargs="+", type=int, metavar="HEADS", help="only decode over latents")
    args = parser.parse_args()
    launch = f"{'target':7} {'batch':13} {'dim':>3} {'features':18}"
    needs = f"{'registers':>9} {'spills':>6} {'scalar':>6} {'shared':>7} {'occupancy':>9}"
    print(f"{launch} {needs}  {'s':>4}  configuration", flush=True)
    for target in map(TARGETS.__getitem__, args.target):
        for num_q_heads in args.latents or ():
            for name, kv_dtype in (("bfloat16", None), ("e4m3", torch.float8_e4m3fn)):
                spec = quire.AttentionSpec.mla(num_q_heads=num_q_heads, softmax_scale=0.1, kv_dtype=kv_dtype)
                decode = Launch(spec, 8, 1, 4096, 8, page_size=64)
                title = f"{target.name:7} {'latents':13} {576:3} {f'{num_q_heads} heads, {name}':18}"
                show(title, target, partial(decode.compile, target), args.spills, args.loops)
        for head_dim in () if args.latents else args.head_dim:
            for features in args.features:
                for batch in args.batch:
                    title = f"{target.name:7} {batch:13} {head_dim:3} {features:18}"
                    attend = partial(launches.attend, batch, head_dim, features)
                    show(title, target, attend, args.spills, args.loops)


def show(name: str, target: Target, launch: Callable[[], Any], only_bad: bool, with_loops: bool) -> None:
    """Compile one launch and print a line for each of its kernels."""
    begun = time.perf_counter()
    compiled: list[Compiled] = []
    cubins: list[bytes | None] = []

    def inspect(kernel_name: str, kernel: Any, *others: Any) -> Compiled:
        cubins.append(kernel.asm.get("cubin"))
        compiled.append(read(kernel_name, kernel, *others))
        return compiled[-1]

    read = targets.inspect
    try:
        with mock.patch.object(targets, "inspect", inspect), compiling(target):
            launch()
    except Exception as error:  # Triton's compiler raises many kinds
        print(f"{name} {type(error).__name__}: {error}", flush=True)
        return
    for c, cubin in zip(compiled, cubins, strict=True):
        if c.spills or c.shared > target.shared_memory or not only_bad:
            numbers = f"{c.registers:9} {c.spills:6} {c.scalar_spills:6} {c.shared:7} {c.occupancy:9}"
            print(f"{name} {numbers}  {time.perf_counter() - begun:4.1f}  {c.config}", flush=True)
            if with_loops and cubin:
                for loop in loops.innermost_loops(loops.disassemble(cubin)):
                    print(f"    a loop of {loops.describe(loop)}", flush=True)


if __name__ == "__main__":
    main()
