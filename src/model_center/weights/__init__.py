"""Weights in and out: names of checkpoints, where they come from, reading, writing and converting
them.
"""
