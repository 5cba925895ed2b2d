"""The current stream, and which CUDA graph is being captured on it."""

import ctypes
from functools import cache
from typing import Any

import torch


def current_stream(device: torch.device) -> int:
    """Return the address of a device's current stream; 0 for its default stream, and for a CPU."""
    return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


def is_capturing(device: torch.device) -> bool:
    """Return whether what is launched on the current stream is captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def capture_id(device: torch.device) -> int:
    """Return a number of the capture that the current stream is in, another one for each capture; 0 outside of one."""
    if not is_capturing(device):
        return 0
    status, number = ctypes.c_int(), ctypes.c_uint64()
    error = get_capture_info()(ctypes.c_void_p(current_stream(device)), status, number)
    if error:
        raise RuntimeError(f"the driver must know the capture of the current stream, got error {error}")
    return number.value


@cache
def get_capture_info() -> Any:
    """Return the runtime's `cudaStreamGetCaptureInfo`, of which the first three parameters are used.

    AMD's `hipStreamGetCaptureInfo` has these three alone. The other ones of newer CUDA versions may be null.
    """
    if torch.version.hip is not None:
        function = ctypes.CDLL("libamdhip64.so").hipStreamGetCaptureInfo
    else:
        function = ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    handle, number, null = ctypes.c_void_p, ctypes.POINTER(ctypes.c_uint64), ctypes.c_void_p
    function.argtypes = [handle, ctypes.POINTER(ctypes.c_int), number, *[null] * (0 if torch.version.hip else 3)]
    if torch.version.hip is not None:
        return lambda stream, status, found: function(stream, ctypes.byref(status), ctypes.byref(found))
    return lambda stream, status, found: function(stream, ctypes.byref(status), ctypes.byref(found), None, None, None)
