"""What the families of kernels for Hopper GPUs share: pipelines in shared memory, operands of 8 bits, addresses."""
