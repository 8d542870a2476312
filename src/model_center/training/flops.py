"""Model FLOPs utilisation: the share of a GPU's peak that a training step has used.

Source: Chowdhery et al., "PaLM" (2022), appendix B. Recomputed activations do not count.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

import bmtrain as bmt
from model_center.layer.dense_attention import Attention
from model_center.layer.linear import Linear
from model_center.layer.mask import AttentionMask
from model_center.layer.sparse_attention import SparseSelfAttention
from model_center.layer.transformer import Decoder, Encoder
from model_center.model.base import BaseModel
from model_center.model.causal import CausalModel
from model_center.model.outputs import ModelOutput

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


def peak_flops(given: float | None = None) -> float | None:
    """FLOP/s of this rank's device at most, by its name; None where it is not known, as on a CPU.

    Args:
        given: what the user says of it instead, TFLOP/s.
    """
    if given is not None:
        return given * 1e12
    if bmt.device().type == "cpu":
        return None
    name = torch.cuda.get_device_name(bmt.device())
    return next((peak for part, peak in PEAKS.items() if part in name), None)


class FlopsMeter:
    """Counts the FLOPs of training passes of models of this package, inside any module.

    Each stack of layers says by what it is called with how many tokens it computes with; the heads
    by what they get or give. Passes without gradients do not count, and neither do scores that a
    program takes from `logits` of a model whose head is its embedding.

    Args:
        model: that is trained.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._flops = 0.0
        # Attention within a window computes with fewer pairs than this counts.
        if any(isinstance(module, SparseSelfAttention) for module in model.modules()):
            return
        inside: set[torch.nn.Module] = set()
        for module in model.modules():
            if isinstance(module, Encoder | Decoder):
                inside |= set(module.modules())
                module.register_forward_pre_hook(self._stack, with_kwargs=True)
            elif isinstance(module, BaseModel):
                module.register_forward_hook(self._model)
            elif isinstance(module, Linear) and module not in inside:
                module.register_forward_pre_hook(self._head)

    def take(self) -> float:
        """What was counted since the last time."""
        found, self._flops = self._flops, 0.0
        return found

    def _stack(self, stack: torch.nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        if not torch.is_grad_enabled():
            return
        given = dict(zip(inspect.signature(stack.forward).parameters, args, strict=False)) | named
        hidden, mask = given["hidden_states"], given.get("attention_mask")
        cross = given.get("cross_hidden_states")
        rows, length = hidden.shape[:2]
        keys = 0 if cross is None else cross.shape[1]
        # a pair of a query and a key costs 12 for each element of a head; causality hides half
        own = 6 if isinstance(mask, AttentionMask) and mask.causal else 12
        for name, module in stack.named_modules():
            is_cross = "cross_att" in name
            if isinstance(module, Linear):
                of_keys = is_cross and name.endswith(("project_k", "project_v"))
                self._flops += rows * (keys if of_keys else length) * _of_element(module)
            elif isinstance(module, Attention):
                pairs = 12 * length * keys if is_cross else own * length**2
                self._flops += rows * pairs * module.num_heads * module.dim_head

    def _head(self, head: Linear, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self._flops += args[0].numel() / head.dim_in * _of_element(head)

    def _model(self, model: BaseModel, args: tuple[Any, ...], output: Any) -> None:
        """Scores by the embedding, or by a matrix of its shape that is no Linear."""
        if not isinstance(output, ModelOutput) or "logits" not in output:
            return
        own = {"cls_projection", "output_projection"} & dict(model.named_children()).keys()
        if torch.is_grad_enabled() and not own:
            weight, logits = model.get_parameter("input_embedding.weight"), output["logits"]
            self._flops += logits.numel() / len(weight) * weight.numel() * _cost(weight)


def _of_element(linear: Linear) -> int:
    """FLOPs of a training pass for each row that goes through it."""
    return linear.dim_in * linear.dim_out * _cost(linear.weight)


def _cost(weight: torch.Tensor) -> int:
    """FLOPs for each element and row: forward, gradient of the input and, if trained, its own."""
    return 6 if weight.requires_grad else 4


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
