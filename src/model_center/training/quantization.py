"""A model whose own weights are kept in 4 bits, for adapters to be trained beside them.

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).
"""

from __future__ import annotations

import types
from collections.abc import Collection
from typing import Any

import torch

import bmtrain as bmt
from model_center.layer.linear import Linear
from model_center.layer.quantized import QuantizedLinear, frozen, library, whole


def quantize(model: torch.nn.Module, others: Collection[torch.nn.Module | None] = ()) -> None:
    """Freeze a model and keep the weights of its linear layers, but for the head's, in 4 bits.
    Collective if it is sharded; the memory of a block is free once all of it was replaced.

    Args:
        model: of this package or of transformers.
        others: layers that stay as they are: the head of one of transformers.

    Raises:
        ConfigError: where bitsandbytes is missing; the model is unchanged.
    """
    library()
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        is_layer = isinstance(module, Linear) and not path.endswith("_projection")
        if is_layer or (type(module) is torch.nn.Linear and module not in others):
            parent, _, name = path.rpartition(".")
            made[module] = made.get(module) or QuantizedLinear(_linear_attributes(module))
            model.get_submodule(parent).add_module(name, made[module])
    # What is left of a block shares its memory with the weights that are gone.
    fresh: dict[torch.Tensor, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False)):
            if isinstance(param, bmt.DistributedParameter):
                fresh[param] = fresh[param] if param in fresh else frozen(whole(param))
                module.register_parameter(name, fresh[param])
    model.requires_grad_(False)
    if bmt.is_initialized():
        bmt.BMTrainModelWrapper(model)


def _linear_attributes(layer: torch.nn.Module) -> Any:
    """A linear layer of torch with what QuantizedLinear reads of one of this package."""
    if isinstance(layer, Linear):
        return layer
    return types.SimpleNamespace(
        dim_in=layer.in_features,
        dim_out=layer.out_features,
        length_scale=False,
        length_scale_before=False,
        weight=layer.weight,
        bias=layer.bias,
    )
