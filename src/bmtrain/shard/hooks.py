"""Hooks of sharded parameters, which are called at the end of a backward pass."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bmtrain.errors import ParameterError
from bmtrain.shard.sharded import Sharded, cut_like

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class Hooked(Sharded):
    """A sharded tensor whose gradient comes from the engine, not from autograd, and so do the calls
    of its hooks.
    """

    grad_hooks: collections.OrderedDict[int, Hook]
    post_hooks: collections.OrderedDict[int, Callable[[Any], None]]

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """`hook(grad)` at the end of a backward pass, with the gradient of that pass, summed over
        ranks; it may return another.
        """
        if not self.requires_grad:
            raise ParameterError(
                "a hook was registered on a sharded parameter that does not require grad."
            )
        handle = RemovableHandle(self.grad_hooks)
        self.grad_hooks[handle.id] = hook
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """`hook(param)` at the end of each backward pass that has given this parameter a gradient,
        when `.grad` has it.
        """
        if not self.requires_grad:
            raise ParameterError(
                "a hook was registered on a sharded parameter that does not require grad."
            )
        handle = RemovableHandle(self.post_hooks)
        self.post_hooks[handle.id] = hook
        return handle

    def hooked(self, grad: torch.Tensor) -> torch.Tensor:
        """What the hooks make of the gradient of a pass, sharded as the parameter."""
        for hook in list(self.grad_hooks.values()):
            result = hook(grad)
            grad = grad if result is None else cut_like(result, self)
        return grad

    def run_post_hooks(self) -> None:
        """`.grad` is complete."""
        for hook in list(self.post_hooks.values()):
            hook(self)
