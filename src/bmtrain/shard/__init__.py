"""Sharded parameters: the flat storages they live in, how these are gathered, and how gradients
come back.
"""
