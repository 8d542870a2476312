"""Inspection of a run: parameters, activations and their gradients."""

from bmtrain.inspect.finite import NonFinite, find_non_finite
from bmtrain.inspect.parameters import inspect_model, print_inspect
from bmtrain.inspect.statistics import format_summary
from bmtrain.inspect.tensors import Inspector, inspect_tensor, record_tensor

__all__ = [
    "Inspector",
    "NonFinite",
    "find_non_finite",
    "format_summary",
    "inspect_model",
    "inspect_tensor",
    "print_inspect",
    "record_tensor",
]
