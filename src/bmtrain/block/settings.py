"""Whole numbers that a program puts on modules between calls: the same on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch

from bmtrain.block.block import Block
from bmtrain.distributed.ledger import Ledger
from bmtrain.runtime import world
from bmtrain.runtime.world import World
from bmtrain.shard.parting import checksum

_Held = dict[tuple[int, str], tuple[weakref.ref[torch.Tensor], int]]


class Settings:
    """Compares tensors of integers that are attributes of modules outside of blocks.

    One per run. They choose what a model computes, as the label words that are looked up in its
    logits do: ranks that have taken them from their own rows train different models. What a forward
    pass leaves behind may be of its rows, and so may floating point and boolean tensors, which are
    not compared.
    """

    def __init__(self, world: World) -> None:
        self._axis, self._ledger = world.mesh.world, world.service(Ledger)
        self._left: weakref.WeakKeyDictionary[torch.nn.Module, _Held] = weakref.WeakKeyDictionary()
        self._depth = 0

    def begin(self, model: torch.nn.Module) -> None:
        """A call of `model` begins: note what has been put on its modules since the last one.

        Raises:
            RanksPartedError: on all ranks, on GPUs at the next comparison, if it differs.
        """
        self._depth += 1
        if self._depth > 1 or self._axis.size == 1:
            return
        left = self._left.get(model, {})
        for path, key, tensor in _held(model):
            reference, version = left.get(key, (None, -1))
            if reference is None or reference() is not tensor or version != _version(tensor):
                what = (
                    f"a call with {path} set to {tensor.dtype} {tuple(tensor.shape)}, values "
                    f"{checksum(tensor)} (put the same on a module on all ranks, of the rows of "
                    "all, and pass a rank's own rows as arguments)"
                )
                self._ledger.enter(self._axis, what, is_on_host=False)

    def end(self, model: torch.nn.Module) -> None:
        """A call of `model` has ended, by an error too: what is there now may be of its rows."""
        self._depth = max(self._depth - 1, 0)  # an earlier hook may have raised before `begin`
        if self._depth == 0 and self._axis.size > 1:
            self._left[model] = {
                key: (weakref.ref(tensor), _version(tensor)) for _, key, tensor in _held(model)
            }


def watch_settings(model: torch.nn.Module) -> None:
    """Compare at every call of `model` what the program has put on its modules."""
    if _begin not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(_begin)
        model.register_forward_hook(_end, always_call=True)


def _begin(model: torch.nn.Module, args: Any) -> None:
    if not torch.compiler.is_compiling() and world.is_initialized():
        world.current().service(Settings).begin(model)


def _end(model: torch.nn.Module, args: Any, result: Any) -> None:
    if not torch.compiler.is_compiling() and world.is_initialized():
        world.current().service(Settings).end(model)


def _held(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, str], torch.Tensor]]:
    """(path, key, tensor) of tensors of integers that modules outside of blocks hold."""
    waiting, seen = [("", model)], set()
    while waiting:
        prefix, module = waiting.pop()
        if id(module) in seen or isinstance(module, Block):
            continue
        seen.add(id(module))
        for name, value in vars(module).items():
            if type(value) is torch.Tensor and _is_integer(value):
                yield prefix + name, (id(module), name), value
        waiting += [(f"{prefix}{name}.", x) for name, x in module._modules.items() if x is not None]


def _is_integer(x: torch.Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _version(x: torch.Tensor) -> int:
    return 0 if x.is_inference() else x._version
