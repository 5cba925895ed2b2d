"""What a server does before its first request: find the kernels and the scratch of its plans, and compile them."""
