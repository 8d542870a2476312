"""Arithmetic as pure functions of tensors, one file per kernel: a fast path per device beside its
plain-torch twin.
"""
