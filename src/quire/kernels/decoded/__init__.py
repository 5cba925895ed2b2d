"""Quantised caches whose keys and values are decoded once, before the Hopper kernel attends to them."""
