"""A plugin of pytest: where there are several GPUs, the processes of pytest-xdist take turns at them.

It is loaded before PyTorch, since CUDA reads the variable once: `pytest -p tests.gpu_of_worker -n 32`.
"""

import os
from pathlib import Path

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
VISIBLE = os.environ.get("CUDA_VISIBLE_DEVICES")
FOUND = len(list(Path("/dev").glob("nvidia[0-9]*")))
NAMES = [str(i) for i in range(FOUND)] if VISIBLE is None else VISIBLE.split(",")
GPUS = len(NAMES)
if WORKER is not None and GPUS > 1:
    os.environ["CUDA_VISIBLE_DEVICES"] = NAMES[int(WORKER.removeprefix("gw")) % GPUS]
