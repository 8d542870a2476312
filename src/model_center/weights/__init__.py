"""Weights in and out: where they come from, reading, writing and converting them."""
