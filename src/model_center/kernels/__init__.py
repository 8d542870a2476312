"""Triton kernels of generation, one file per kernel: fast path and plain-torch twin."""
