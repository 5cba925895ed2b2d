"""The verbs for CPU tensors, in PyTorch alone: what runs where Triton has no device. Nothing here imports Triton."""
