"""Kernels for Hopper GPUs, in Gluon: what the portable ones leave of the matrix units and the copy engine."""
