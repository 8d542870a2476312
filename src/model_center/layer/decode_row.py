"""Linear maps that share an input of one row, as in a decode step, fused into one kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from bmtrain.torch_internals import has_global_module_hooks, hooks_of
from model_center.kernels import is_fused
from model_center.kernels.row_products import MOST_COLUMNS, MOST_WEIGHTS, RowProducts, row_products
from model_center.layer.layernorm import LayerNorm
from model_center.layer.linear import Linear


def fused_row_linear(
    x: torch.Tensor,
    maps: Sequence[torch.nn.Module],
    *,
    norm: torch.nn.Module | None = None,
    act: str | None = None,
    residual: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """The outputs of linear maps for one row, concatenated; None if they must be called themselves:
    for more rows, with gradients, without a GPU, and where one of the maps is more than its weight
    and bias (adapters, hooks, quantised weights).

    Args:
        x: (1, ..., 1, dim_in).
        maps: the linear maps that read x.
        norm: applied to x first.
        act: of one map, or of the first of two, which the second is multiplied by.
        residual: (1, ..., 1, dim_out), added to the result of one map.

    Returns (1, ..., 1, outputs of all maps).
    """
    if not is_row(x) or len(maps) > MOST_WEIGHTS:
        return None
    linear = [one for one in maps if isinstance(one, Linear) and is_unmodified(one, Linear)]
    if len(linear) < len(maps) or not all(_is_product(one, x) for one in linear):
        return None
    sizes = {one.weight.shape[0] for one in linear}
    # torch reports wrong shapes; a kernel would read out of bounds
    is_uneven = act is not None and len(sizes) > 1
    if is_uneven or (residual is not None and {residual.numel()} != sizes):
        return None
    weight, eps = None, 0.0
    if isinstance(norm, LayerNorm) and is_unmodified(norm, LayerNorm) and _is_scale(norm, x):
        weight, eps = norm.weight, norm.eps
    elif norm is not None:
        x = norm(x)
    case = RowProducts(
        x=x.reshape(-1),
        weights=[one.weight for one in linear],
        biases=[one.bias for one in linear],
        norm=weight,
        eps=eps,
        act=act,
        residual=None if residual is None else residual.reshape(-1),
    )
    return row_products(case).view(*x.shape[:-1], -1)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | None:
    """`x W^T` of one row (1, ..., 1, dim_in) by a kernel; None as in `fused_row_linear`."""
    fits = is_row(x) and x.shape[-1] <= MOST_COLUMNS and weight.shape[1:] == x.shape[-1:]
    if not (fits and _are_plain(x, weight)):
        return None
    case = RowProducts(x=x.reshape(-1), weights=[weight], biases=[None])
    return row_products(case).view(*x.shape[:-1], -1)


def is_row(x: torch.Tensor) -> bool:
    """Whether x is one row to compute with by kernels. To be asked first: it is compiled too."""
    return is_fused(x) and x.numel() == x.shape[-1]


def is_unmodified(module: torch.nn.Module, *kinds: type[torch.nn.Module]) -> bool:
    """Whether calling the module runs exactly the forward of one of these classes: it has no hooks,
    no `forward` of its own, and is no subclass.
    """
    return (
        type(module) in kinds
        and "forward" not in vars(module)
        and not any(hooks_of(module))
        and not has_global_module_hooks()
    )


def is_inactive_dropout(dropout: torch.nn.Module) -> bool:
    """Whether it is a dropout in evaluation mode."""
    return is_unmodified(dropout, torch.nn.Dropout) and not dropout.training


def _is_product(linear: Linear, x: torch.Tensor) -> bool:
    """Whether the map of x is weight and bias, as they are in memory."""
    weight, bias, columns = linear.weight, linear.bias, x.shape[-1]
    if "product" in vars(linear) or linear.length_scale or columns > MOST_COLUMNS:
        return False
    fits = weight.shape[1:] == (columns,) and (bias is None or bias.shape == weight.shape[:1])
    return fits and _are_plain(x, weight, bias)


def _is_scale(norm: LayerNorm, x: torch.Tensor) -> bool:
    """Whether it is an RMS norm of x."""
    fits = norm.bias is None and norm.weight.shape == x.shape[-1:]
    return fits and _are_plain(x, norm.weight)


def _are_plain(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether they are memory beside x, row after row."""
    return is_fused(x, *others) and all(
        other is None
        or (
            other.device == x.device
            and other.is_contiguous()
            and type(other).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        )
        for other in others
    )
