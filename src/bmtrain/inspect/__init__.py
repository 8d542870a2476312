"""Inspection of a run: parameters, activations, their gradients, and the dtypes in use."""

from bmtrain.inspect.finite import NonFinite, find_non_finite
from bmtrain.inspect.parameters import inspect_model
from bmtrain.inspect.statistics import format_summary
from bmtrain.inspect.tables import ParameterRow, PrecisionRow, precision_report, print_inspect
from bmtrain.inspect.tensors import Inspector, inspect_tensor, record_tensor

__all__ = [
    "Inspector",
    "NonFinite",
    "ParameterRow",
    "PrecisionRow",
    "find_non_finite",
    "format_summary",
    "inspect_model",
    "inspect_tensor",
    "precision_report",
    "print_inspect",
    "record_tensor",
]
