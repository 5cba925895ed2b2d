"""`quire env`: what is installed, what the device can do, and what a plan would choose on it and why."""

import argparse
import importlib.metadata
import json
import platform
import sys
from dataclasses import asdict

import torch

from quire.batch import Batch
from quire.dispatch.device import device_properties
from quire.plan import plan
from quire.spec import AttentionSpec

TYPICAL = {
    "decode, 32 sequences of 2,048": ((1, 2048),) * 32,
    "decode, one sequence of 16,384": ((1, 16384),),
    "prefill of 4,096": ((4096, 4096),),
    "chunk of 512 on 16,384": ((512, 16384),),
}


def add_parser(subparsers) -> None:
    """Add the command to the `quire` parser."""
    parser = subparsers.add_parser(
        "env", help="versions, device, and what would be chosen and why", description=__doc__,
        epilog="examples:\n  quire env\n  quire env --json | jq .device", formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def describe() -> dict:
    """Collect what the command prints."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    versions = {"python": platform.python_version()}
    for name in ("quire", "torch", "triton", "transformers", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    spec = AttentionSpec(num_q_heads=32, num_kv_heads=8, head_dim=128, dtype=dtype)
    plans = {}
    for name, lens in TYPICAL.items():
        ones = torch.ones(len(lens), dtype=torch.int32, device=device)
        batch = Batch(
            torch.zeros(len(lens), 1, dtype=torch.int32, device=device),
            ones,
            torch.zeros(len(lens) + 1, dtype=torch.int32, device=device),
        )
        bounds = {
            "max_query_len": max(q for q, _ in lens),
            "max_seq_len": max(s for _, s in lens),
            "num_tokens": sum(q for q, _ in lens),
        }
        plans[name] = repr(plan(spec, batch, **bounds))
    return {
        "versions": versions,
        "device": {
            "name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine() + " CPU",
            **asdict(device_properties(device)),
        },
        "plans": {"spec": f"32 query heads over 8 KV heads of 128, {dtype}".replace("torch.", ""), **plans},
    }


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    facts = describe()
    if args.json:
        json.dump(facts, sys.stdout, indent=2)
        print()
        return 0
    for title, rows in facts.items():
        print(title)
        for name, value in rows.items():
            print(f"  {name:32} {value}")
    return 0
