"""Hooks of sharded parameters, called at the end of a backward pass."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bmtrain.errors import ParameterError
from bmtrain.shard.sharded import Sharded, cut_like
from bmtrain.shard.slices import Slices

Hook = Callable[[torch.Tensor], torch.Tensor | None]


class Hooked(Sharded):
    """A sharded tensor whose gradient comes from the engine, which therefore runs its hooks."""

    grad_hooks: collections.OrderedDict[int, Hook]
    post_hooks: collections.OrderedDict[int, Callable[[Any], None]]

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(grad)` at the end of each backward pass; it may return another gradient.

        `grad` is the gradient of that pass alone, summed over ranks.

        Raises:
            ParameterError: if the parameter does not require grad.
        """
        if not self.requires_grad:
            raise ParameterError(
                "a hook was registered on a sharded parameter that does not require grad: call "
                "param.requires_grad_() first."
            )
        handle = RemovableHandle(self.grad_hooks)
        self.grad_hooks[handle.id] = hook
        return handle

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call `hook(param)` once `.grad` is complete, after each pass that gave it a gradient.

        Raises:
            ParameterError: if the parameter does not require grad.
        """
        if not self.requires_grad:
            raise ParameterError(
                "a hook was registered on a sharded parameter that does not require grad: call "
                "param.requires_grad_() first."
            )
        handle = RemovableHandle(self.post_hooks)
        self.post_hooks[handle.id] = hook
        return handle

    def hooked(self, grad: Slices) -> Slices:
        """The gradient of a pass after its hooks have run, sharded as the parameter."""
        for hook in list(self.grad_hooks.values()):
            result = hook(grad)
            grad = grad if result is None else cut_like(result, self)
        return grad

    def run_post_hooks(self) -> None:
        """Called when `.grad` is complete."""
        for hook in list(self.post_hooks.values()):
            hook(self)
