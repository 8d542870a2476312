"""Sharded parameters: the flat storages they live in, their gathers and their gradients."""
