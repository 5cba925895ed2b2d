"""The implementation of `quire bench`: named workloads, the method, adapters for other libraries, and reports."""
