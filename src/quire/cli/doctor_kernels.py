"""The process in which `quire doctor` compiles and runs kernels: a crash or a hang there does not end the command.

It prints JSON, one object a line: the start of each check, and its result.
"""

import json
import signal
import time
from dataclasses import asdict

import torch

from quire.cli.check import check_feature, features
from quire.cli.check_features import Feature
from quire.cli.check_lines import name_of
from quire.cli.threads import one_thread
from quire.dispatch.device import is_served_by_torch

WANTED = (
    "decode",
    "prefill",
    "split keys",
    "MLA: decode",
    "prompts on Hopper",
    "MLA on Hopper, 16 heads",
)  # one feature for each kernel family


def main() -> None:
    """Run the kernels that this device has."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the command reports an interrupt
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    how = "running" if is_served_by_torch(device) else "compiling and running"
    with one_thread(device.type == "cpu"):
        for feature in features(device, dtype):
            if feature.name in WANTED:
                print(json.dumps({"step": f"{how}: {feature.name}"}), flush=True)
                print(json.dumps(outcome(feature, device, dtype)), flush=True)


def outcome(feature: Feature, device: torch.device, dtype: torch.dtype) -> dict:
    """Return what came of a feature."""
    begun = time.perf_counter()
    try:
        found = asdict(check_feature(feature, device, dtype))
    except Exception as error:  # a compiler or a driver may raise anything
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "without a message")
        found = {"kernel": "attention", "dtype": name_of(dtype), "feature": feature.name}
        found["failure"] = f"{type(error).__name__}: {first[:200]}."
    return found | {"seconds": time.perf_counter() - begun}


if __name__ == "__main__":
    main()
