"""Portable Triton kernels, one file per verb; `views` and `primitives` are what they share."""
