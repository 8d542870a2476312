"""Recomputation in backward: levels, plans that fit into memory, and replayed forward passes."""
