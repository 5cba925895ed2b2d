"""Quire behind other projects' interfaces. A module here uses Quire's public names only."""

from functools import lru_cache

from quire import AttentionSpec

layer_spec = lru_cache(maxsize=256)(AttentionSpec)  # cached: checked once for the same fields
