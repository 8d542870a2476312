"""One call of a module whose saved tensors are computed again in backward.

The first run saves tensors as any forward pass does. When it is over, and nothing has happened that
a second run could not repeat, they are dropped, and backward runs the call again for them.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from bmtrain.errors import RecomputationError
from bmtrain.recompute.host_state import Begun, changed_in_place
from bmtrain.shard.unshard import Kept
from bmtrain.torch_internals import at_end_of_backward, version_of
from bmtrain.torch_internals import saved_tensors_hooks as outer_hooks

# Runs the module on these arguments; the flag says that it runs again.
Body = Callable[[tuple[Any, ...], dict[str, Any], bool], Any]


class _Saved:
    """What autograd holds in the place of a saved tensor.

    Attributes:
        tensor: itself, while the first run goes on.
        kept: the same from then on, if it is kept.
        place: where it is, if it is a parameter.
        by_hooks: what the program's hooks have made of one that is kept.
    """

    def __init__(self, index: int, tensor: torch.Tensor, place: Any) -> None:
        self.index, self.shape, self.dtype = index, tensor.shape, tensor.dtype
        self.tensor = tensor if place is None else None
        self.place = place
        self.kept: Kept | None = None
        self.by_hooks: _ByHooks | None = None

    def settle(self, hooks: Any, *, is_kept: bool) -> None:
        """The first run is over."""
        tensor, self.tensor = self.tensor, None
        if not is_kept:
            self.place = None
        elif tensor is not None and hooks is not None:
            self.by_hooks = _ByHooks(hooks[0](tensor))
        elif tensor is not None:
            self.kept = Kept(tensor)


@dataclasses.dataclass(frozen=True)
class _Input:
    """A tensor among the arguments, as it was."""

    place: int  # among those that autograd has saved
    tensor: weakref.ref[torch.Tensor]
    version: int
    requires_grad: bool
    is_leaf: bool


@dataclasses.dataclass(frozen=True)
class _ByHooks:
    """What the program's own hooks have made of a saved tensor."""

    value: Any


class _Inputs(torch.autograd.Function):
    """Saves tensors under the hooks in force; its node is never run."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise RuntimeError("the node that holds the inputs of a block was run")


class _Enough(BaseException):
    """All tensors that backward needs have been computed. No error: programs catch those."""

    def __init__(self, call: Recomputation) -> None:
        super().__init__()
        self.call = call


class Recomputation:
    """One call.

    Args:
        body: runs the module.
        begun: the state in which the call begins.
        place_of, find: the place of a tensor in gathered parameters, or None; the tensor there.
        on_kept: called with the reason if the call is not recomputed.
    """

    def __init__(
        self,
        body: Body,
        begun: Begun,
        place_of: Callable[[torch.Tensor], Any],
        find: Callable[[Any], torch.Tensor],
        on_kept: Callable[[str], None],
    ) -> None:
        self._body, self._begun = body, begun
        self._place_of, self._find, self._on_kept = place_of, find, on_kept
        self._outer: Any = outer_hooks()  # the program's: they see what stays until backward
        self._saved: list[weakref.ref[_Saved]] = []
        self._values: dict[int, torch.Tensor] = {}
        self._given: dict[int | str, Any] = {}  # arguments by place or name, without tensors
        self._tensors: dict[int | str, _Input] = {}
        self._anchor: Any = None

    def save(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Save the arguments for the second run: tensors with autograd, under its hooks."""
        self._given = dict(itertools.chain(enumerate(args), kwargs.items()))
        tensors = {key: x for key, x in self._given.items() if isinstance(x, torch.Tensor)}
        # A module may ask whether two arguments are one tensor, as attention does.
        different = {id(x): x for x in tensors.values()}
        leaf = torch.empty(0, requires_grad=True, device="cpu")
        # The node lives as long as its output.
        self._anchor = _Inputs.apply(leaf, *different.values())
        places = {number: place for place, number in enumerate(different)}
        for key, x in tensors.items():
            self._given[key] = None
            self._tensors[key] = _Input(
                places[id(x)], weakref.ref(x), version_of(x), x.requires_grad, x.grad_fn is None
            )

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The first run."""
        obstacle: str | None = "an error"
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                out = self._body(args, kwargs, False)
            obstacle = self._begun.obstacle()
            self._begun.owner.is_repeatable = obstacle is None
            if obstacle is not None:
                self._on_kept(obstacle)
        finally:
            for saved in [saved for ref in self._saved if (saved := ref()) is not None]:
                saved.settle(self._outer, is_kept=obstacle is not None)
        return out

    def _pack(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(len(self._saved), tensor, self._place_of(tensor))
        self._saved.append(weakref.ref(saved))
        return saved

    def _unpack(self, saved: _Saved) -> torch.Tensor:
        if saved.tensor is not None:
            return saved.tensor
        if saved.kept is not None:
            return saved.kept.get()
        if saved.by_hooks is not None:
            return self._outer[1](saved.by_hooks.value)
        if saved.place is not None:
            return self._find(saved.place)
        if saved.index not in self._values:
            self._compute_again()
        found = self._values.pop(saved.index, None)
        if found is None or (found.shape, found.dtype) != (saved.shape, saved.dtype):
            self._values.clear()
            raise RecomputationError(
                "the recomputation of a block did not reproduce the tensors of its forward pass "
                f"({'none' if found is None else tuple(found.shape)} for {tuple(saved.shape)}): "
                "let it depend on its arguments, parameters and attributes alone, or give the "
                "block use_checkpoint=False."
            )
        return found

    def _arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments again, apart from the graph."""
        try:
            tensors = self._anchor.grad_fn.saved_tensors
        except RuntimeError as error:
            for key, was in self._tensors.items():
                x = was.tensor()
                if x is not None and version_of(x) != was.version:
                    raise changed_in_place(f"argument {key!r}") from error
            raise
        found = dict(self._given)
        again: dict[int, torch.Tensor] = {}
        for key, was in self._tensors.items():
            if was.place not in again:
                own = tensors[was.place].detach().requires_grad_(was.requires_grad)
                again[was.place] = own if was.is_leaf else own.view_as(own)
            found[key] = again[was.place]
        args = tuple([value for key, value in found.items() if isinstance(key, int)])
        return args, {key: value for key, value in found.items() if isinstance(key, str)}

    def _compute_again(self) -> None:
        self._begun.check()
        with torch.enable_grad():
            args, kwargs = self._arguments()
        wanted = {saved.index for ref in self._saved if (saved := ref()) is not None}
        # Not the last that is wanted: what the graph has dropped is up to each rank's collector,
        # and all ranks must come to the same collectives in the module.
        values, last, count = self._values, len(self._saved) - 1, itertools.count()
        values.clear()
        at_end_of_backward(values.clear)  # what no node has asked for would stay with the graph

        def catch(tensor: torch.Tensor) -> torch.Tensor:
            index = next(count)
            if index in wanted:
                values[index] = tensor.detach()
            if index == last:
                raise _Enough(self)
            return tensor.detach()

        hooks = saved_tensors_hooks(catch, lambda tensor: tensor)
        try:
            with torch.enable_grad(), self._begun.restored(), hooks:
                self._body(args, kwargs, True)
        except _Enough as enough:
            if enough.call is not self:
                raise
