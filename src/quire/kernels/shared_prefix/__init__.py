"""Leading keys that sequences have in common: read once for each group, and combined with each sequence's own keys."""
