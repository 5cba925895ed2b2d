"""For a bug report: write what a call of `quire.attention` was given to a file, and run it again on any machine.

`record` writes the file, and `quire replay FILE` runs it. A file says what was computed, how it was launched, and how
the tensors lie in memory: shapes, strides, and which tensors share a storage. Lengths and page tables are always
in it. The numbers in the queries and the cache are in it on request; else a replay makes random ones.
"""

from quire.debug.call import Call, load
from quire.debug.recording import record, save
from quire.debug.replaying import Replay, replay

__all__ = ["Call", "Replay", "load", "record", "replay", "save"]
