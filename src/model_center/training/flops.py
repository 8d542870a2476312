"""Model FLOPs utilisation: the share of a GPU's peak that a training step has used.

Source: Chowdhery et al., "PaLM" (2022), appendix B. Recomputed activations do not count.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from model_center.layer.linear import Linear
from model_center.model.causal import CausalModel

# Dense products of 16-bit numbers a second, by what a GPU's name holds, of its maker's data sheets;
# the first that fits.
PEAKS = {
    "A10G": 70e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "H800": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "RTX 3090": 71e12,
    "RTX 4090": 165e12,
}


def peak_flops() -> float | None:
    """Of this rank's GPU; None where it is not known, and on a CPU."""
    if bmt.device().type == "cpu":
        return None
    name = torch.cuda.get_device_name(bmt.device())
    return next((peak for part, peak in PEAKS.items() if part in name), None)


def flops_per_token(model: CausalModel, length: int) -> float:
    """Of a training step on rows of `length` tokens.

    Each element of a matrix counts 2 in forward, 2 for the gradient of its input and, where it is
    trained, 2 for its own; attention counts the pairs that causality lets see each other.
    """
    config = model.config
    matrices = [
        (module.dim_in * module.dim_out, module.weight)
        for module in model.modules()
        if isinstance(module, Linear)
    ]
    if config.tied or model.ALWAYS_TIED:
        matrices.append((model.input_embedding.weight.numel(), model.input_embedding.weight))
    products = sum(numel * (6 if weight.requires_grad else 4) for numel, weight in matrices)
    return float(products + 6 * config.num_layers * config.num_heads * config.dim_head * length)
