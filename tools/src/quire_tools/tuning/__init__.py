"""`quire tune`, offline: cases that are drawn, the sweep that times variants on them, and the fit of their numbers."""
