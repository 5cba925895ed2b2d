"""The verbs for CPU tensors, in PyTorch. Nothing here imports Triton."""
