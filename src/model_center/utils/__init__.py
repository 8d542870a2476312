"""Small helpers under the path where ModelCenter has them."""

from __future__ import annotations

import torch

import bmtrain as bmt
from model_center.hub.resolving import resolve


def print_inspect(model: torch.nn.Module, param_name: str, prefix: str = "") -> None:
    """Print shape, extremes, mean and deviation of matching parameters and gradients. Collective.

    Args:
        model: any module, in a process group.
        param_name: a pattern, "*" for all.
        prefix: put before the names printed.
    """
    bmt.print_rank(bmt.inspect.format_summary(bmt.inspect.inspect_model(model, param_name, prefix)))


def check_web_and_convert_path(path: str, load_type: str) -> str:
    """The folder that a path or a known name stands for, downloaded if need be.

    Args:
        path: a folder or a name.
        load_type: what is read of it: "config", "model" or "tokenizer".
    """
    return str(resolve(path, load_type))
