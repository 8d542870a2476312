"""What a block is called with, and how the call runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.block.binding import Slices
from bmtrain.block.compiled import CompiledByDefault, CompiledModule
from bmtrain.block.programs import Call
from bmtrain.shard.unshard import Use


@dataclasses.dataclass(frozen=True)
class Given:
    """A call of a block: its arguments, its parameters, and the compiled code that may compute it."""

    slices: Slices
    use: Use
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    compiled: CompiledModule | CompiledByDefault | None

    @property
    def is_compiled(self) -> bool:
        """Whether there is such code."""
        return self.compiled is not None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those among the arguments."""
        return [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, torch.Tensor)]


@dataclasses.dataclass(frozen=True)
class Run:
    """How a call runs: the slices that full tensors replace, who gathers those, what computes with them.

    packs: whether autograd saves tensors of this run until backward.
    is_compiled: whether that is compiled code.
    lends: whether Python code of the module may run in backward, hooks and recomputation inside it, and need full parameters.
    moved: tensors that are saved on the host.
    """

    slices: Slices
    use: Use
    call: Call
    packs: bool
    is_compiled: bool
    lends: bool = True
    moved: Sequence[torch.Tensor] = ()
