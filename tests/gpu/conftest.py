"""The GPU suite is collected only on a machine with a GPU."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
