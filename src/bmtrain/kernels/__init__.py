"""Arithmetic as pure functions of tensors, one file per kernel: fast path and plain-torch twin."""
