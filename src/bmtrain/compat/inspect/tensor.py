"""`bmtrain.inspect.tensor`: names of inspect/tensors.py."""

from bmtrain.inspect.tensors import Inspector as InspectTensor
from bmtrain.inspect.tensors import inspect_tensor, record_tensor

InspectTensorManager = inspect_tensor

__all__ = ["InspectTensor", "InspectTensorManager", "inspect_tensor", "record_tensor"]
