"""Named workloads, a method, adapters for other libraries, and reports: the inside of `quire bench`."""
