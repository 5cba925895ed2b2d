"""For bug reports: write the arguments of a call of `quire.attention` to a file, and repeat the call on any machine.

`record` writes the file, and `quire replay FILE` runs it. A file holds the spec, the launch, and the memory layout of
the tensors: shapes, strides, and which tensors share a storage. It always holds lengths and page tables. It holds the
contents of the queries and the cache on request; otherwise a replay makes random ones.
"""

from quire.debug.call import Call, load
from quire.debug.recording import record, save
from quire.debug.replaying import Replay, replay

__all__ = ["Call", "Replay", "load", "record", "replay", "save"]
