"""The portable kernel: attention over pages on every target, for partitions of a batch or for its row blocks."""
