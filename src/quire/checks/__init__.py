"""Checks of arguments, one meaning a module; only `batch` reads what tensors hold.

The others compare what the host knows: types, shapes, dtypes, strides and devices. A verb that runs once per layer
tests everything in one expression and looks for the reason only if that fails.
"""
