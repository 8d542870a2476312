"""Adapters on the linear layers of blocks, for a forecast of LoRA.

Source: Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bmtrain.plan.outline import blocks_of


class Adapted(torch.nn.Module):
    """A frozen linear layer plus the product of two small matrices."""

    def __init__(self, layer: torch.nn.Module, rank: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight: torch.Tensor = layer.get_parameter("weight")
        self.layer = layer
        self.down = torch.nn.Parameter(torch.empty(rank, weight.shape[1], dtype=dtype))
        self.up = torch.nn.Parameter(torch.empty(weight.shape[0], rank, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out + F.linear(F.linear(x, self.down), self.up)


def add(model: torch.nn.Module, rank: int, dtype: torch.dtype) -> None:
    """Freeze a model and put adapters on all linear layers of its blocks, in place."""
    model.requires_grad_(False)
    for block in blocks_of(model):
        for module in list(block.modules()):
            for name, child in list(module.named_children()):
                if _is_linear(child):
                    module._modules[name] = Adapted(child, rank, dtype)


def _is_linear(module: torch.nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.dim() == 2 and type(module).__name__.endswith("Linear")
