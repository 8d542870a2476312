"""A model whose own weights are kept in 4 bits, for adapters to be trained beside them.

Source: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023).
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from model_center.layer.linear import Linear
from model_center.layer.quantized import QuantizedLinear, frozen, library, whole


def quantize(model: torch.nn.Module) -> None:
    """Freeze a model and keep the weights of its linear layers, but for the head's, in 4 bits.
    Collective if it is sharded; the memory of a block is free once all of it was replaced.

    Raises:
        ConfigError: where bitsandbytes is missing; the model is unchanged.
    """
    library()
    made: dict[torch.nn.Module, torch.nn.Module] = {}
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, Linear) and not path.endswith("_projection"):
            parent, _, name = path.rpartition(".")
            made[module] = made.get(module) or QuantizedLinear(module)
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
