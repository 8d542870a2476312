"""Weights in and out: where they come from, reading, writing and converting them."""

from model_center.weights.conversions import load_transformers

__all__ = ["load_transformers"]
