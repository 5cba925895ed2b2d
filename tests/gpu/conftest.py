"""The GPU ring is collected where there is a GPU."""

import torch

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]
