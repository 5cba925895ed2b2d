"""`quire env`: installed versions, the device, Quire's variables, and the plans of typical batches, with reasons."""

import argparse
import importlib.metadata
import json
import os
import platform
from dataclasses import asdict
from typing import Any

import torch

from quire import log
from quire.batch import Batch
from quire.dispatch.constants import VARIABLE as CONSTANTS
from quire.dispatch.device import device_properties, is_served_by_torch
from quire.kernels.ranges import VARIABLE as RANGES
from quire.plan import Plan, plan
from quire.spec import AttentionSpec
from quire.version import commit

EXAMPLES = """examples:
  quire env
  quire env --verbose                   # for a bug report: what torch says of the system as well
  quire env --json | jq .device
"""
VARIABLES = {
    log.VARIABLE: "not set; plan, launch or all says each decision once, on standard error",
    RANGES: "not set; 1 gives launches NVTX ranges",
    CONSTANTS: "not set; names the folder of the user's numbers for predicted times",
}
PACKAGES = ("quire", "torch", "triton", "transformers", "numpy")
TYPICAL_BATCHES = {  # (query length, sequence length) of each sequence
    "decode, 32 sequences of 2,048": ((1, 2048),) * 32,
    "decode, one sequence of 16,384": ((1, 16384),),
    "prefill of 4,096": ((4096, 4096),),
    "chunk of 512 on 16,384": ((512, 16384),),
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]", summary: str) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "env",
        help=summary,
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--verbose", action="store_true", help="add what `python -m torch.utils.collect_env` prints, for a bug report"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    facts = describe()
    if args.json:
        print(json.dumps(facts | ({"collect_env": collect_env()} if args.verbose else {}), indent=2))
        return 0
    for title, values in facts.items():
        print(title)
        for name, value in values.items():
            print(f"  {name:32} {value}")
    if args.verbose:
        print("torch.utils.collect_env")
        for line in collect_env().splitlines():
            print(f"  {line}".rstrip())
    return 0


def describe() -> dict[str, dict[str, Any]]:
    """Collect what the command prints. Where PyTorch serves, no plan depends on properties of the device."""
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    name = f"{platform.machine()} CPU"
    if gpu:
        from quire.targets import title_here  # here, since it needs Triton

        name = title_here()
    dtype = torch.bfloat16 if gpu else torch.float32
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype)
    plans = {title: str(plan_for(spec, lens, device)) for title, lens in TYPICAL_BATCHES.items()}
    found = {package: version_of(package) for package in PACKAGES}
    return {
        "versions": {"python": platform.python_version(), "commit of quire": commit()} | found,
        "device": {"name": name} | ({} if is_served_by_torch(device) else asdict(device_properties(device))),
        "environment": {name: os.environ.get(name) or words for name, words in VARIABLES.items()},
        "plans": {"spec": f"32 query heads over 8 KV heads of 128, {dtype}".replace("torch.", "")} | plans,
    }


def version_of(package: str) -> str:
    """Return the version of a package that is installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def plan_for(spec: AttentionSpec, lens: tuple[tuple[int, int], ...], device: torch.device) -> Plan:
    """Plan for a batch of these (query length, sequence length) without its cache, which planning does not read."""
    page_table = torch.zeros(len(lens), 1, dtype=torch.int32, device=device)
    seq_lens = torch.ones(len(lens), dtype=torch.int32, device=device)
    cu_seqlens_q = torch.zeros(len(lens) + 1, dtype=torch.int32, device=device)
    return plan(
        spec,
        Batch(page_table, seq_lens, cu_seqlens_q),
        max_query_len=max(q for q, _ in lens),
        max_seq_len=max(s for _, s in lens),
        num_tokens=sum(q for q, _ in lens),
    )


def collect_env() -> str:
    """Return what torch says of the system, for bug reports."""
    from torch.utils.collect_env import get_pretty_env_info

    return get_pretty_env_info()
