"""Kernels and their launches.

Attention has one folder per family: `portable`, `hopper`, `decoded`, `mla`, `mla_hopper`, `chosen`, `chosen_hopper`,
and `cpu` for PyTorch. The other verbs have one file each: `combine`, `write`, `copy`. All of them use `primitives`,
`states`, `mods`, `views` and `launcher`.
"""
