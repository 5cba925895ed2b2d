"""Stands in for SGLang's kernels for GPUs: its scheduler imports some, which nothing calls on a CPU."""
