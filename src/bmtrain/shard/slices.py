"""A tensor that looks whole, of which this rank stores a slice; its place in autograd's graph.

Gradients follow the rule of differentiable collectives: the loss of the run is the sum of all
ranks' losses.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import torch

from bmtrain.distributed import autograd, collectives
from bmtrain.distributed.agreement import differ, largest
from bmtrain.errors import AddressError, ParameterError
from bmtrain.shard.cut import Cut
from bmtrain.torch_internals import (
    in_backward,
    is_collective,
    is_mutable,
    make_wrapper_subclass,
    run_collective,
    throw_on_data_ptr,
    tree_leaves,
    tree_map_only,
)


class Slices(torch.Tensor):
    """This rank's slice of a flattened tensor, with the whole's shape.

    `Sharded` says what functions do with it. To torch it is a tensor without memory: code that does
    not know of slices cannot read or write one by mistake.
    """

    #: (numel of the slice,), without a graph; `local` waits for what is still written to it
    local_tensor: torch.Tensor
    cut: Cut  # how the tensor is cut
    #: the class of results
    kind: ClassVar[type[Slices]]
    _num_holders: int = 0
    #: how often the tensor was written through this object; see `num_written`
    num_own_writes: int = 0
    #: whether it is a gradient that the engine shows
    is_gradient: bool = False
    #: what `.grad` shows, without the collective that deferred gradients need; None if it is no
    #: parameter
    shown_grad: Any = None

    def __new__(cls, local: torch.Tensor, cut: Cut) -> Slices:
        """A tensor that looks whole over `local`, this rank's slice in `cut`."""
        out = without_memory(cls, cut.shape, local)
        out.local_tensor, out.cut = local, cut
        return out

    @property
    def local(self) -> torch.Tensor:
        """This rank's slice of the flattened tensor, 1-D, without a graph.

        A write to it is a write to the tensor.
        """
        return self.local_tensor

    @property
    def is_held(self) -> bool:
        """Whether more refer to the slice's tensor than at the last `count_holders`."""
        return sys.getrefcount(self.local_tensor) > self._num_holders

    def count_holders(self) -> None:
        """Only the library refers to the slice's tensor now."""
        self._num_holders = sys.getrefcount(self.local_tensor)

    @property
    def data(self) -> torch.Tensor:
        """The same values outside of any graph; a write to them is a write to this tensor."""
        return self.owner.alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.copy_(value)

    def set_(self, *args: Any) -> Slices:
        """Take the values of a tensor of this shape and dtype, as parametrizations do when they are
        registered and removed; see `data`.

        Raises:
            AddressError: for anything else, as no memory on one rank holds all of this tensor.
        """
        source = args[0] if len(args) == 1 else None
        if source is not self:
            if not isinstance(source, torch.Tensor) or (source.shape, source.dtype) != (
                self.shape,
                self.dtype,
            ):
                raise AddressError(
                    "set_ of a sharded tensor: it cannot take the memory of another. Write values "
                    "into it, param.data.copy_(values)."
                )
            self.data = source
        return self

    def read(self) -> torch.Tensor:
        """The slice, for a function that computes with it outside of any graph."""
        self.expect_whole_gradients()
        return self.local

    def alias(self) -> Slices:
        """Another tensor with the same values in the same memory, outside of any graph."""
        return self.kind(self.local, self.cut)

    def differentiable_local(self) -> torch.Tensor:
        """The slice in the graph: its gradient is that of the sum of the ranks' losses."""
        out: torch.Tensor = _LocalOf.apply(self)
        return out

    def differentiable_whole(self) -> torch.Tensor:
        """The whole tensor in the graph. Collective."""
        out: torch.Tensor = _Gather.apply(self.differentiable_local(), self.cut)
        return out

    def whole(self) -> torch.Tensor:
        """The whole tensor, a copy outside of any graph. Collective.

        Of a tensor-parallel one, this tensor rank's part.
        """
        self.expect_whole_gradients()
        with torch.inference_mode(False), torch.no_grad():
            return self.cut.gathered(self.local)

    def expect_whole_gradients(self) -> None:
        """Torch's own code may have put this tensor itself into its graph. Without gradients."""

    def full_tensor(self) -> torch.Tensor:
        """A copy of the whole tensor, without a graph, under DTensor's name. Collective.

        A tensor-parallel split is undone.
        """
        with torch.inference_mode(False), torch.no_grad():
            return self.cut.whole(self.local)

    def mark_written(self) -> None:
        """The tensor was written.

        Called alike on all ranks, whether they own elements of it or not.
        """
        self.num_own_writes += 1

    @property
    def owner(self) -> Slices:
        """The object that counts writes to this memory."""
        return self

    @property
    def num_written(self) -> int:
        """How often the tensor was written: the same on all ranks."""
        return self.owner.num_own_writes

    def take_whole(self, whole: torch.Tensor) -> None:
        """Take this rank's slice of `whole`, of this tensor's shape or its whole shape. Collective.

        Raises:
            ParameterError: for another shape, and for values that differ between ranks.
        """
        check_alike(whole, self.cut)
        self.take_same(whole)

    def take_whole_in_graph(self, whole: torch.Tensor) -> None:
        """`take_whole` of values that have a graph, which this tensor gets too. Collective.

        Raises:
            ParameterError: for values that differ between ranks, and for a parameter, which would
                be none any more.
        """
        check_alike(whole.detach(), self.cut)
        write_in_graph(self, self.cut.own(whole))

    def take_same(self, whole: torch.Tensor) -> None:
        """`take_whole` of values that are known to be the same on all ranks.

        Raises:
            ParameterError: for another shape.
        """
        is_part = whole.shape == self.cut.shape
        if not is_part and whole.shape != self.cut.whole_shape:
            raise ParameterError(
                f"a sharded tensor of shape {tuple(self.cut.shape)} cannot become one "
                f"of shape {tuple(whole.shape)}."
            )
        with torch.no_grad():
            self.local.copy_(self.cut.own(whole if is_part else self.cut.part(whole)))
        self.mark_written()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch says no more than Any
        """Not collective: a debugger on one rank must not hang."""
        piece = self.cut.piece
        return (
            f"{type(self).__name__}(shape={tuple(self.cut.shape)}, "
            f"dtype={self.local_tensor.dtype}, device='{self.local_tensor.device}', "
            f"local=elements {piece.start} to {piece.stop})"
        )

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec) if len(self.cut.shape) else format(self.item(), spec)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = copied = self.kind(self.local.clone(), self.cut)
        return copied

    def __copy__(self) -> Any:
        return self.owner.alias()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParameterError(
            f"a {type(self).__name__} is one slice of a tensor and cannot be pickled: "
            "use bmtrain.save or model.state_dict() for a "
            "model, OptimManager.state_dict(gather_opt=True) for optimizers."
        )

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Torch's C++ code below `__torch_function__`, as autograd's accumulation."""
        kwargs = kwargs or {}
        if is_collective(func):
            return communicate(func, args, kwargs)
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        sharded = [x for x in tensors if isinstance(x, Slices)]
        if torch.is_grad_enabled():
            with torch.no_grad():
                for x in sharded:
                    x.expect_whole_gradients()
        cut = sharded[0].cut
        # In backward, a 0-dim operand may depend on this rank's rows: the slices would be of
        # different results.
        is_backward, writes = in_backward(), is_mutable(func)
        fits = all(
            x.cut.is_like(cut)
            if isinstance(x, Slices)
            else x.dim() == 0 and writes and not is_backward
            for x in tensors
        )
        if not fits or not (torch.Tag.pointwise in func.tags or func in _COPIES):
            if writes:
                raise ParameterError(
                    f"{func} was called with a sharded tensor by code that cannot take "
                    "one: pass param.gather()."
                )
            if func in _SUMS and is_backward:  # one is this rank's, the other of all ranks
                raise ParameterError(
                    "a sharded tensor was used by TorchScript and by Python: give one of "
                    "them param.gather()."
                )
            # Callers below `__torch_function__` compute with whole tensors.
            args, kwargs = tree_map_only(Slices, lambda x: x.whole(), (args, kwargs))
            return func(*args, **kwargs)
        args, kwargs = tree_map_only(Slices, lambda x: x.local, (args, kwargs))
        out = func(*args, **kwargs)
        same = next((x for x in sharded if x.local is out), None)
        return same if same is not None else cls.kind(out, cut)


def communicate(func: Any, args: Any, kwargs: Any) -> Any:
    """A collective of torch.distributed, on whole tensors; results are copied back to the slices.

    Raises:
        ParameterError: for point-to-point messages, and for results that differ between ranks, of
            which each would keep its slice.
    """
    name = func.__name__
    if any(word in name for word in ("send", "recv", "p2p")):
        raise ParameterError(
            f"{name} of a sharded tensor: call whole = param.gather() on all ranks, then send that."
        )
    sharded = {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Slices)}
    wholes: dict[int, torch.Tensor] = {}
    for key, x in sharded.items():
        x.cut.note(name, x.cut.mesh.world)
        wholes[key] = x.whole()
    args, kwargs = tree_map_only(Slices, lambda x: wholes[id(x)], (args, kwargs))
    out = run_collective(func, args, kwargs)  # waits: it may still be writing `wholes`
    for key, x in sharded.items():
        x.take_whole(wholes[key])
    return out


_SUMS = (torch.ops.aten.add.Tensor, torch.ops.aten.add_.Tensor)
_COPIES = (
    torch.ops.aten.detach.default,
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
)


def check_alike(whole: torch.Tensor, cut: Cut) -> None:
    """ParameterError on all ranks unless `whole`, to be cut, is the same on all. Collective."""
    if any(differ([whole], cut.axis, "a value")):  # other stages of a pipeline may not come here
        raise ParameterError(
            f"a sharded tensor of shape {tuple(cut.shape)} was given values that differ between "
            "ranks, each of which would keep its own slice. Compute them from the same rows and "
            "random numbers on all ranks, or sum them over ranks first."
        )


def without_memory(
    kind: type[Any], shape: torch.Size, like: torch.Tensor, *, requires_grad: bool = False
) -> Any:
    """A tensor of class `kind` without memory.

    Kernels that ask for its address get a RuntimeError; a null pointer would crash a GPU's kernel,
    and with it the process.
    """
    out = make_wrapper_subclass(
        kind, shape, dtype=like.dtype, device=like.device, requires_grad=requires_grad
    )
    throw_on_data_ptr(out)
    return out


def local_of(x: torch.Tensor) -> torch.Tensor:
    """This rank's values: the 1-D slice of a sharded tensor, else the tensor itself."""
    return x.local if isinstance(x, Slices) else x


def look_whole(local: torch.Tensor, cut: Cut, kind: type[Slices]) -> Slices:
    """The sharded tensor over these slices, in the graph if they are."""
    out: Slices = (
        _Look.apply(local, cut, kind)
        if local.requires_grad and torch.is_grad_enabled()
        else kind(local.detach() if local.requires_grad else local, cut)
    )
    return out


def write_in_graph(x: Slices, values: torch.Tensor) -> Slices:
    """Write the slice `values`, which has a graph, into `x`, which gets that graph. Returns `x`.

    As torch does when values with a graph are written in place: `weight.data += delta`.

    Raises:
        ParameterError: for a parameter, which would be none any more.
    """
    if isinstance(x, torch.nn.Parameter):
        raise ParameterError(
            "a sharded parameter is changed in place by values that require grad: do it under "
            "torch.no_grad() or on param.data."
        )
    with torch.no_grad():
        x.local.copy_(values)
    x.mark_written()
    out: Slices = _Write.apply(x, values)
    return out


class _Write(torch.autograd.Function):
    """From a slice to the sharded tensor that it was written into."""

    @staticmethod
    def forward(ctx: Any, x: Slices, values: torch.Tensor) -> Slices:
        ctx.mark_dirty(x)
        ctx.set_materialize_grads(False)
        ctx.cut = x.cut
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        return None, _own_gradient(grad, ctx.cut)


class _Look(torch.autograd.Function):
    """From a slice to a sharded tensor, in the graph."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, cut: Cut, kind: type[Slices]) -> Slices:
        ctx.cut = cut
        ctx.set_materialize_grads(False)
        return kind(local.detach(), cut)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None]:
        return _own_gradient(grad, ctx.cut), None, None


def _own_gradient(grad: torch.Tensor | None, cut: Cut) -> torch.Tensor | None:
    """This rank's slice of the gradient of a sharded tensor."""
    if grad is None:
        return None
    if isinstance(grad, Slices):
        return grad.differentiable_local() if grad.requires_grad else grad.local
    # Code that knows nothing of slices has computed with this tensor: the gradient is whole, and of
    # this rank's loss alone.
    return cut.own(autograd.all_reduce(grad, "sum", cut.users))


class _LocalOf(torch.autograd.Function):
    """From a sharded tensor to its slice, in the graph."""

    @staticmethod
    def forward(ctx: Any, sharded: Slices) -> torch.Tensor:
        ctx.cut, ctx.kind = sharded.cut, sharded.kind
        ctx.set_materialize_grads(False)
        return sharded.local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Slices | None:
        return None if grad is None else look_whole(grad, ctx.cut, ctx.kind)


class _Gather(torch.autograd.Function):
    """The whole tensor of slices.

    Every rank computes with all of it, so gradients are summed over ranks and cut.
    """

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, cut: Cut) -> torch.Tensor:
        ctx.cut = cut
        ctx.dtype, ctx.device = local.dtype, local.device
        ctx.set_materialize_grads(False)
        return cut.gathered(local)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        # Stages of a pipeline may have a gradient where others have none. All ranks take part in
        # the sum, or none does: else those that do would hang.
        ctx.cut.note("gradient", ctx.cut.users)
        if not any(largest([float(grad is not None)], ctx.cut.users, "a gradient")):
            return None, None
        grad = (
            torch.zeros(ctx.cut.shape, dtype=ctx.dtype, device=ctx.device) if grad is None else grad
        )
        return ctx.cut.own(autograd.all_reduce(grad, "sum", ctx.cut.users)), None


def norm(x: Slices, order: float) -> torch.Tensor:
    """The vector norm of all elements, 0-dim, outside of any graph. Collective."""
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    local = x.local.to(wide)
    own = torch.linalg.vector_norm(local, order) if local.numel() else local.new_zeros(())
    x.cut.note("norm", x.cut.mesh.world)
    # over the whole run, where every element is owned by exactly one rank
    everyone = collectives.all_gather(own, x.cut.mesh.world)
    return torch.linalg.vector_norm(everyone, order).to(x.dtype)


def total(x: Slices) -> torch.Tensor:
    """The sum of all elements, 0-dim, differentiable. Collective."""
    local = x.differentiable_local() if x.requires_grad and torch.is_grad_enabled() else x.local
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    x.cut.note("sum", x.cut.mesh.world)
    return autograd.all_reduce(local.sum(dtype=wide), "sum", x.cut.mesh.world).to(x.dtype)
