"""The spine: full parameters out of shards in forward, full gradients into shards in backward."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from bmtrain.errors import ParameterError, StaleParameterError
from bmtrain.shard.engine import Residence
from bmtrain.shard.gradient import refuse_create_graph
from bmtrain.shard.label import Phase
from bmtrain.shard.slices import Slices
from bmtrain.shard.storage import Storage
from bmtrain.torch_internals import (
    NO_PASS,
    active_saved_tensors_hooks,
    at_end_of_backward,
    backward_pass,
    hooks_are_disabled,
    in_backward,
    in_transform,
    map_tensors,
    node_number,
    plain_functions,
    sharing_versions,
    tensors_of,
    version_of,
    will_run,
)


class Unshard(torch.autograd.Function):
    """Gathered views of the slots of some storages; backward reduces all their gradients at once.

    Full parameters are not leaves of the graph: autograd accumulates nothing into them, and no
    AccumulateGrad node keeps a full buffer alive. The sharded parameters are inputs, so that
    `backward(inputs=[parameter])` reaches this node; autograd gets no gradient for them.
    """

    @staticmethod
    def forward(
        ctx: Any, use: Use, views: Sequence[torch.Tensor], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.use = use
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*views)  # numbers, not values: see `Use.lend`
        ctx.mark_non_differentiable(*itertools.compress(views, map(operator.not_, use.trainable)))
        return tuple(views)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        refuse_create_graph()
        (leaf, _), *params = ctx.next_functions
        # backward(inputs=...): the leaf is not among them
        if ctx.use.engine.backward.reduces and not will_run(leaf):
            wanted = [node is not None and will_run(node) for node, _ in params]
            grads = tuple(
                [grad if is_wanted else None for grad, is_wanted in zip(grads, wanted, strict=True)]
            )
        return (None, None, None, *ctx.use.end(grads))


def refuse_transforms() -> None:
    """ParameterError inside a transform of torch.func: gathers do not follow a transform. Also
    where a graph may save nothing by hooks.
    """
    if in_transform():
        raise ParameterError(
            "a sharded parameter was used inside of a transform of torch.func (grad, "
            "vmap, jvp and the like): take whole = param.gather() of all parameters outside, and "
            "compute with those, torch.func.functional_call(model, wholes, inputs), or use "
            "torch.autograd."
        )
    if torch.is_grad_enabled() and hooks_are_disabled():
        raise ParameterError(
            "torch.autograd.graph.disable_saved_tensors_hooks is active, and a sharded block keeps "
            "by such hooks what backward needs: call the model outside of it."
        )


@dataclasses.dataclass(frozen=True)
class Packed:
    """A saved tensor in a full buffer: where to find it after the next gather."""

    use: Use
    storage: Storage
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def __call__(self) -> torch.Tensor:
        """The tensor at this place."""
        full = self.use.hold(self.storage)
        if full.dtype != self.dtype:
            full = full.view(self.dtype)
        return full.as_strided(self.size, self.stride, self.offset)


class Kept:
    """A saved tensor under hooks of this library, which autograd does not compare by version."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: a node that saves its own result would hold itself through the result's graph,
        # for ever where backward never comes. Autograd puts the graph back. Hooks run below
        # autograd, where `detach` gives a new version counter: the shared one is compared.
        with sharing_versions():
            self._tensor = tensor.detach()
        self._version = version_of(self._tensor)

    def __call__(self) -> torch.Tensor:
        """The tensor.

        Raises:
            RuntimeError: if it was changed in place since.
        """
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                f"inplace operation: a tensor of shape {tuple(self._tensor.shape)} that a block "
                f"has saved is at version {version_of(self._tensor)}; expected version "
                f"{self._version} instead. Change a clone of it."
            )
        return self._tensor


# What is kept of a saved tensor; called for it.
Unpack = Callable[[], torch.Tensor]


# Gives a module the tensors of a use, one per slot of all storages; returns a function that takes
# them back.
Bind = Callable[[Sequence[torch.Tensor]], Callable[[], None]]


class Loan:
    """Full tensors of a use, lent to code that runs in backward: recomputation and user hooks.

    To autograd the tensors are those of forward: a custom function asks for gradients with respect
    to parameters that it was given in forward. A nested backward pass, as reentrant checkpointing
    runs one, leaves its gradients here. Only autograd's queue of callbacks for the pass keeps the
    loan alive. The loan therefore ends with the pass, also when the pass raises.
    """

    def __init__(self, num_slots: int, give_back: Callable[[], None]) -> None:
        self._give_back = give_back
        #: of nested passes
        self.grads: list[torch.Tensor | None] = [None] * num_slots
        self.pass_number = backward_pass()
        self.is_open = True  # until `end`

    def end(self) -> list[torch.Tensor | None]:
        """Take the tensors back; returns the gradients of nested passes."""
        if self.is_open:
            self.is_open = False
            # The pass keeps this object until its end, and `give_back` holds the tensors: without
            # the exchange, their memory would stay allocated as long.
            give_back, self._give_back = self._give_back, lambda: None
            give_back()
        grads, self.grads = self.grads, []
        return grads

    __del__ = end


class Use:
    """One call of a module: holds the full buffers of its storages while anything may read them.

    The same object serves forward, recomputation and backward, and dies with the graph.

    Args:
        storages: that it gathers.
        residences: where their full values are, if not where the storages have them.
    """

    def __init__(
        self, storages: Sequence[Storage], residences: Sequence[Residence] | None = None
    ) -> None:
        self.storages = storages
        self.engine: Any = storages[0].engine if storages else None
        self._full: dict[Storage, torch.Tensor] = {}
        #: for saved tensors: the program's, or those of a call around it; None without any
        self.hooks: Any = active_saved_tensors_hooks()
        self._running = 0
        self._with_grad = torch.is_grad_enabled()
        self.order = next(_ORDER)
        self._loan: weakref.ref[Loan] | None = None
        self._lent: list[torch.Tensor] = []  # while they become those of forward
        self._has_end = True
        #: number of the backward pass that has come to its end, or NO_PASS
        self.ended_in = NO_PASS
        #: whether it serves several calls, so that backward reaches it once per call
        self.is_repeated = False
        # The views that calls inside of `together` share, to the graph one call; empty before the
        # first, None outside.
        self._shared_views: list[torch.Tensor] | None = None
        #: whether backward gathers again what forward has gathered (ZeRO-3)
        self.is_gathered_again = False
        self._residences: dict[Storage, Residence] = {}
        self._versions: list[int] = []
        self.trainable: list[bool] = []  # by slot
        with plain_functions():  # ten times as fast, at every call
            for number, storage in enumerate(storages):
                residence = storage.residence if residences is None else residences[number]
                self._residences[storage] = residence
                self.is_gathered_again = self.is_gathered_again or not residence.survives_forward
                self._versions.append(storage.version())
                for reference in storage.references:
                    param = reference()
                    self.trainable.append(param is not None and param.requires_grad)

    @property
    def is_droppable(self) -> bool:
        """Whether no gradient will end this use and no module is running in it.

        Backward can then drop it once it has left it behind.
        """
        return (
            not (any(self.trainable) and self._has_end)
            and not self._running
            and not self.is_repeated
        )

    def gather_in_graph(self) -> list[torch.Tensor]:
        """Gather; one view per slot of all storages, in the graph where gradients are wanted."""
        if not self.storages:
            return []
        if not (torch.is_grad_enabled() and any(self.trainable)):
            # A custom function may run here that was given the parameters themselves.
            params: list[Any] = [x for one in self.storages for x in one.params]
            for param in params:
                if param is not None:
                    param.expect_whole_gradients()
            return self.gather_views()
        refuse_transforms()
        if self._shared_views:
            return self._shared_views
        for storage, _ in self.trained():
            storage.gradient.prepare_for_backward()
        with torch.no_grad():
            views = self.gather_views()
        views = self._in_graph(views)
        if self._shared_views is not None:
            self._shared_views = views
        return views

    def _in_graph(self, views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        leaf, params = self.engine.leaf, list[Any]()
        for storage in self.storages:
            for reference in storage.references:
                param = reference()
                # The leaf stands for those that the program has dropped: the node's inputs are
                # matched with the slots by their number.
                params.append(leaf if param is None else param)
        # What the node saves of its n-th view is n.
        number = functools.partial(next, itertools.count())
        with torch.autograd.graph.saved_tensors_hooks(number, self._lent.__getitem__):
            return list(Unshard.apply(self, views, leaf, *params))

    def gather_views(self) -> list[torch.Tensor]:
        """One view per slot of all storages, outside the graph."""
        views: list[torch.Tensor] = []
        for storage in self.storages:
            views += storage.views(self.hold(storage))
        return views

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A module computes with the views inside."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            # Forward is over: release all but what backward will read from here (ZeRO-2), else
            # every block's buffer would stay until then. In backward, `end` and `release_all` do;
            # while a run is nested in another, the outer still reads.
            if not (in_backward() or self._running):
                for storage in list(self._full):
                    residence = self._residences[storage]
                    if not residence.survives_forward or not torch.is_grad_enabled():
                        residence.release(self._full.pop(storage))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Calls inside are one to autograd, which sums their gradients and ends the use once."""
        self.is_repeated, self._shared_views = True, []
        try:
            with self.running():
                yield
        finally:
            # The graph of the views refers to this use: a cycle that Python's collector cannot see,
            # since autograd holds one of its edges. Keeping the views would leak both.
            self._shared_views = None

    def hold(self, storage: Storage) -> torch.Tensor:
        """The full buffer of `storage`, gathered if this use does not hold it."""
        full = self._full.get(storage)
        if full is None:
            backward = in_backward()
            if backward:
                self._check_versions()
                storage.engine.backward.begin_use(self)
            residence = self._residences[storage]
            full = storage.engine.acquire(
                residence, Phase.BACKWARD if backward else Phase.FORWARD, with_grad=self._with_grad
            )
            gathered = residence.version
            if gathered is not None and gathered != storage.version():
                # A holder that is never released would pin the buffer.
                residence.release(full)
                raise StaleParameterError(
                    f"parameters of {storage.residence.label.text} were written in place in the "
                    "middle of a forward pass, after their gather had "
                    "begun: set them with param.set_full(...) or load_state_dict, "
                    "which start it again, or write between passes."
                )
            self._full[storage] = full
        return full

    def lend(self, bind: Bind, end: Any) -> None:
        """Backward has reached this call: lend its module full parameters.

        They are lent until all gradients of the call are computed or the pass ends.

        Args:
            bind: gives the module the tensors.
            end: the node that will end this use; None if all parameters are frozen.
        """
        if not self.storages or self.ended_in == backward_pass() or self._open_loan() is not None:
            return
        self._check_versions()
        self.engine.backward.begin_use(self)
        # No gradient gets past a checkpoint that runs a nested backward pass: then this pass may
        # have no path to the node that ends the use.
        self._has_end = end is not None and will_run(end)
        tensors = self.gather_views()
        if end is not None:
            self._lent[:] = tensors
            try:
                tensors = list(end.saved_tensors)
            except RuntimeError:  # freed: another output of the call has had its own pass
                with torch.enable_grad():
                    tensors = self._in_graph(tensors)
            self._lent.clear()
        loan = Loan(len(tensors), bind(tensors))
        # Weak: after a pass that raised, a strong reference would keep the loan open for as long as
        # the graph lives, and full tensors in the module.
        self._loan = weakref.ref(loan)
        at_end_of_backward(lambda: self.release_all() if loan.is_open else None)

    def _open_loan(self) -> Loan | None:
        loan = None if self._loan is None else self._loan()
        return loan if loan is not None and loan.is_open else None

    def release_all(self) -> None:
        """Release all full buffers, and reduce gradients that only the loan has collected."""
        loan = self._open_loan()
        if loan is not None:
            if backward_pass() not in (NO_PASS, loan.pass_number):
                return  # only a nested pass is over: the outer one still needs the tensors
            late = loan.end()
            if in_backward():
                self._reduce(late)
        self._has_end = True
        for storage in reversed(list(self._full)):
            self._residences[storage].release(self._full.pop(storage))

    def end(self, grads: Sequence[torch.Tensor | None]) -> Sequence[torch.Tensor | None]:
        """Backward has computed the gradients of all slots: release the buffers, then reduce.

        In this order: the memory of the parameters can then serve the full gradient. A pass inside
        the one that still reads lent tensors leaves its gradients with the loan.

        Returns:
            What autograd gets: no gradients unless `Backward.reduces` is False.
        """
        self._check_versions()
        loan = self._open_loan()
        if loan is not None:
            grads = loan.grads = [
                late if grad is None else grad if late is None else grad + late
                for grad, late in zip(grads, loan.grads, strict=True)
            ]
            if loan.pass_number != backward_pass():
                return [None] * len(grads)
            loan.end()
        self.ended_in = backward_pass()
        self.release_all()
        self.engine.backward.uses.pop(self, None)
        if not self.engine.backward.reduces:
            return grads
        self._reduce(grads)
        return [None] * len(grads)

    def _reduce(self, grads: Sequence[torch.Tensor | None]) -> None:
        found = []
        for storage, own in self.trained():
            found.append((storage.gradient, grads[own]))
        if found:
            self.engine.backward.add(found)

    def trained(self) -> Iterator[tuple[Storage, slice]]:
        """The storages with something to train, each with its range of slots among those of all."""
        end = 0
        for storage in self.storages:
            own = slice(end, end := end + len(storage.layout.slots))
            if any(self.trainable[own]):
                yield storage, own

    def saving(
        self, keep: Callable[[torch.Tensor], Unpack]
    ) -> contextlib.AbstractContextManager[object]:
        """Hooks of a call that keeps by `keep` what autograd saves; none if autograd can itself."""
        by_autograd = keep == self.keep and self.hooks is None and not self.is_gathered_again
        if by_autograd or not torch.is_grad_enabled():
            return contextlib.nullcontext()
        return torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved())

    def keep(self, tensor: torch.Tensor) -> Unpack:
        """Keep a saved tensor.

        Of parameters their places are kept: views would keep buffers until backward. All else goes
        the way of the program's own hooks.
        """
        place = self.place_of(tensor)
        if place is not None:
            return place
        if self.hooks is None:
            return Kept(tensor)
        pack, unpack = self.hooks
        return functools.partial(unpack, pack(tensor))

    def place_of(self, tensor: torch.Tensor) -> Packed | None:
        """Where `tensor` is in a full buffer; None if it is in none.

        None, too, for views of parameters that the program's hooks see in plain PyTorch.
        """
        # Sharded and sparse tensors have no memory of their own.
        if isinstance(tensor, Slices) or tensor.layout is not torch.strided:
            return None
        address = tensor.untyped_storage().data_ptr()
        for storage, full in self._full.items():
            if full.untyped_storage().data_ptr() != address:
                continue
            size, stride, offset = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            place = tuple(size), stride, offset - int(full.storage_offset())
            if self.hooks is None or place in [
                (slot.shape, slot.stride, slot.offset) for slot in storage.layout.slots
            ]:
                return Packed(self, storage, tensor.dtype, size, stride, offset)
        return None

    def _check_versions(self) -> None:
        for storage, version in zip(self.storages, self._versions, strict=True):
            if storage.version() != version:
                raise StaleParameterError(
                    f"parameters of {storage.residence.label.text} were changed in place after the "
                    "forward pass that this backward pass belongs "
                    "to: call backward before the optimizer's step, or run the forward pass again. "
                    "An embedding with max_norm changes them in each look-up: look all rows up at "
                    "once, embedding(torch.cat([...]))."
                )


# Numbers of calls. Backward reaches later calls first.
_ORDER = itertools.count()


def before_backward_of(out: Any, since: int, do: Callable[[], None]) -> None:
    """Run `do` each time backward reaches a tensor of `out` that this call has computed.

    Its node has a number from `since` on; that of an argument which is passed on is older.
    """
    for x in tensors_of(out):
        if x.grad_fn is not None and node_number(x.grad_fn) >= since:
            x.grad_fn.register_prehook(lambda _: do())


class _Tie(torch.autograd.Function):
    """A copy of `x` whose backward leads to the node of `end` too, with no gradient for it.

    A copy, because torch refuses in-place writes to views that a Function returns, and programs
    write to what a block returns.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, end: torch.Tensor | None) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None


def tied_to(
    end: torch.Tensor | None, out: Any, arguments: Any, since: int, *, is_gathered_again: bool
) -> Any:
    """`out`, tied to the graph so that backward reaches this call's gathers and reductions.

    On some ranks the outputs may have been computed without the block's parameters: `return x if
    x.sum() > 0 else layer(x)`. Backward would gather and reduce nothing there, and the other ranks
    would hang.

    Args:
        end: a gathered parameter of the call that requires grad; None if all are frozen.
        arguments: what the block was called with.
        since: number of the first node of the call.
        is_gathered_again: whether backward gathers again what forward has gathered.
    """
    tensors = tensors_of(out)
    roots = [x.grad_fn for x in tensors if x.grad_fn is not None]
    if end is None:
        # Frozen parameters are gathered by the first node of the call that backward reaches.
        if not is_gathered_again or any(node_number(root) >= since for root in roots):
            return out
    elif end.grad_fn is None or _leads_to(end.grad_fn, roots, since):
        return out
    wanted = {id(x) for x in tensors if x.requires_grad}
    if not wanted and end is not None:  # passed on: an argument without gradient
        given = {id(x) for x in tensors_of(arguments)}
        wanted = {id(x) for x in tensors if id(x) in given and x.is_floating_point()}
    return map_tensors(lambda x: _Tie.apply(x, end) if id(x) in wanted else x, out)


def _leads_to(
    end: torch.autograd.graph.Node, roots: Sequence[torch.autograd.graph.Node], since: int
) -> bool:
    """Whether backward from `roots` reaches `end`.

    Nodes older than both the call and `end` cannot lead there, so the search stops at them.
    """
    oldest = min(since, node_number(end))
    seen, waiting = set(roots), collections.deque(roots)
    while waiting:
        node = waiting.popleft()
        if node is end:
            return True
        for following, _ in node.next_functions:
            if following is not None and following not in seen and node_number(following) >= oldest:
                seen.add(following)
                waiting.append(following)
    return False
