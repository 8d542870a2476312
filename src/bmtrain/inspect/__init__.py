"""Inspection of a run: parameters, activations, their gradients, and the dtypes in use."""

from bmtrain.inspect.parameters import inspect_model
from bmtrain.inspect.precision import PrecisionRow, precision_report
from bmtrain.inspect.summary import format_summary
from bmtrain.inspect.tensors import Inspector, inspect_tensor, record_tensor
from bmtrain.inspect.tree import ParameterRow, print_inspect

__all__ = [
    "Inspector",
    "ParameterRow",
    "PrecisionRow",
    "format_summary",
    "inspect_model",
    "inspect_tensor",
    "precision_report",
    "print_inspect",
    "record_tensor",
]
