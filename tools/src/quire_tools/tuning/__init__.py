"""`quire tune`, offline: the space of configurations, the sweep that measures it, the fit of a tree, and its judge."""
