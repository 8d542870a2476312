"""torch.autograd.grad with respect to sharded parameters."""

from __future__ import annotations

from typing import Any

import torch

from bmtrain.errors import ParameterError
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine
from bmtrain.torch_internals import in_backward, plain_functions


def gradients(  # noqa: PLR0913 (torch's arguments)
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """torch.autograd.grad with sharded parameters among the inputs.

    It runs a backward pass and puts `.grad` back. In a backward pass, where custom functions call
    it, gradients are whole and of this rank's rows, as all are there: what the function returns is
    summed over ranks at the end.

    Raises:
        ParameterError: for create_graph and is_grads_batched, and for an input that the graph does
            not use unless `allow_unused`.
    """
    if create_graph or is_grads_batched:
        raise ParameterError(
            "torch.autograd.grad(create_graph=True) with respect to sharded parameters "
            "is not supported: take it with respect to "
            "whole = param.gather(), and compute with that."
        )
    inputs = [inputs] if isinstance(inputs, torch.Tensor) else list(inputs)
    if in_backward():
        with world.current().service(Engine).backward.not_reducing(), plain_functions():
            return torch.autograd.grad(
                outputs,
                inputs,
                grad_outputs,
                retain_graph,
                allow_unused=allow_unused,
                materialize_grads=materialize_grads,
            )
    before = [None if x.grad is None else x.grad.clone() for x in inputs]
    for x in inputs:
        x.grad = None
    try:
        torch.autograd.backward(outputs, grad_outputs, retain_graph=retain_graph, inputs=inputs)
        found = [None if x.grad is None else x.grad.clone() for x in inputs]
    finally:
        for x, grad in zip(inputs, before, strict=True):
            x.grad = grad
    if materialize_grads:
        found = [
            torch.zeros_like(x) if grad is None else grad
            for x, grad in zip(inputs, found, strict=True)
        ]
    elif not allow_unused and any(grad is None for grad in found):
        raise ParameterError(
            "one of the inputs of torch.autograd.grad was not used in the graph: pass "
            "allow_unused=True if it may be."
        )
    return tuple(found)
