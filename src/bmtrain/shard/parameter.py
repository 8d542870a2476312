"""DistributedParameter: looks whole; this rank stores a slice of the flattened tensor."""

from __future__ import annotations

import collections
import copy
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from bmtrain.distributed import autograd
from bmtrain.errors import ParameterError
from bmtrain.runtime import world
from bmtrain.shard.engine import Engine
from bmtrain.shard.grad_function import gradients
from bmtrain.shard.gradient import ShardPolicy, refuse_create_graph
from bmtrain.shard.placement import Placement, split_of
from bmtrain.shard.sharded import Args, Kwargs, Sharded, cut_like, described, run
from bmtrain.shard.slices import Slices, without_memory
from bmtrain.shard.storage import Storage
from bmtrain.shard.unshard import Use
from bmtrain.torch_internals import native_gradients, plain_functions

Hook = Callable[[torch.Tensor], torch.Tensor | None]
Initializer = Callable[[torch.Tensor], object]


class ParameterInitializer:
    """An initialisation to run later: called with the full tensor, runs `func(tensor, ...)`.

    Args:
        func: a function that writes the tensor in place, such as those of torch.nn.init.
        args, kwargs: passed on to `func` after the tensor.
    """

    def __init__(self, func: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs

    def __call__(self, tensor: torch.Tensor) -> None:
        self.func(tensor, *self.args, **self.kwargs)


class DistributedParameter(Sharded, torch.nn.Parameter):
    """An nn.Parameter that looks whole; this rank stores a slice of the flattened tensor.

    Shape, dim and numel are the whole's (with `tp_mode`, of this tensor rank's part), `local` is
    the slice. Element-wise functions compute on the slices; others gather the whole tensor, or
    raise ParameterError where the result could not be right. `.grad` is of the same kind: the
    gradient summed over ranks.

    Args:
        data: the full tensor, on any device, the same on every rank; a meta tensor allocates only
            the slice. With `tp_mode` this tensor rank's part of it.
        requires_grad: whether to train it.
        init_method: called with the whole tensor by `init_parameters`; it writes it in place.
        group: a name under which `grouped_parameters` lists it.
        tp_mode: whether the whole tensor is cut along `tp_split_dim` over the tensor-parallel
            ranks, in equal parts.
        tp_split_dim: the dim of that cut, from 0 on; -1 for none.

    Raises:
        ParameterError: for data that is no tensor or not floating point, and a `tp_split_dim` that
            it does not have.
    """

    storage_of: Storage
    index_in_storage: int  # its slot in the storage
    #: called by the engine, from which its gradient comes
    grad_hooks: collections.OrderedDict[int, Hook]
    post_hooks: collections.OrderedDict[int, Callable[[Any], None]]
    _original_shape: torch.Size
    _tp_original_shape: torch.Size
    _init_method: Initializer | None
    #: made from a meta tensor, or waiting for `init_parameters` or a checkpoint
    never_set: bool
    _aliases: dict[int, weakref.ref[Slices]]
    _takes_whole_gradients: bool
    group: str | None

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = True,
        init_method: Initializer | None = None,
        group: str | None = None,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
    ) -> DistributedParameter:
        param = cls.unattached(data, requires_grad, tp_mode, tp_split_dim)
        param._init_method, param.group = init_method, group
        param.storage_of.attach([param])
        return param

    @classmethod
    def unattached(
        cls,
        data: torch.Tensor,
        requires_grad: bool = True,
        tp_mode: bool = False,
        tp_split_dim: int = -1,
    ) -> DistributedParameter:
        """A parameter in a new storage of its own, which does not know it before `attach`."""
        current = world.current("DistributedParameter")
        if not isinstance(data, torch.Tensor):
            raise ParameterError(
                f"DistributedParameter got {type(data).__name__}: expected a tensor, "
                "for example torch.empty(rows, columns)."
            )
        defaults = current.defaults
        policy = ShardPolicy(
            zero_level=2,
            reduce_dtype=defaults.reduce_dtype,
            accumulate_dtype=defaults.accumulate_dtype,
        )
        split = split_of(data, tp_split_dim, current.mesh.tp) if tp_mode else None
        storage = Storage(
            current.service(Engine),
            [("parameter", data.shape)],
            data.dtype,
            policy,
            placement=Placement(tensor_parallel=split is not None),
            splits=[split],
            adoptable=True,
        )
        storage.fill(0, data)
        param = cls.at(storage, 0, requires_grad)
        param.never_set = data.is_meta
        return param

    @classmethod
    def at(cls, storage: Storage, index: int, requires_grad: bool) -> DistributedParameter:
        """The parameter of one slot of a storage."""
        cut = storage.cuts[index]
        param = without_memory(cls, cut.shape, storage.shard, requires_grad=requires_grad)
        param._aliases, param.grad_hooks, param.post_hooks = (
            {},
            collections.OrderedDict(),
            collections.OrderedDict(),
        )
        param.shown_grad, param._init_method, param.group = None, None, None
        param.never_set = param._takes_whole_gradients = False
        param.move_to(storage, index)
        return param

    def take_the_place_of(self, old: torch.nn.Parameter) -> DistributedParameter:
        """Turn `old` into a sharded parameter, with its attributes and hooks.

        Returns the object to use: `old` itself, which optimizers, lists and other modules may refer
        to, unless a graph or a weak reference holds it: then the two cannot be swapped, and it is
        this one.
        """
        for name, value in vars(old).items():
            if name not in vars(type(self)) and name not in vars(self):
                vars(self)[name] = value
        if old.grad is not None:
            self.grad = old.grad
        self.grad_hooks.update(old._backward_hooks or {})
        self.post_hooks.update(getattr(old, "_post_accumulate_grad_hooks", None) or {})
        try:
            torch.utils.swap_tensors(old, self)
        except RuntimeError:
            return self
        if not isinstance(old, DistributedParameter):
            raise RuntimeError("a parameter was swapped with a sharded one and is none")
        return old

    def move_to(self, storage: Storage, index: int) -> None:
        """Live in another storage from now on; its slot must already hold the values."""
        self.storage_of, self.index_in_storage, self.shown_grad = storage, index, None
        self.local_tensor, self.cut = storage.local(index), storage.cuts[index]
        self._original_shape, self._tp_original_shape = self.cut.shape, self.cut.whole_shape
        self.count_holders()
        for alias in self._living_aliases():
            alias.local_tensor, alias.cut = self.local_tensor, self.cut

    @property
    def data(self) -> torch.Tensor:
        """The values outside of any graph; a write to them is a write to the parameter.

        Another tensor may be assigned, whole or sharded: its values are copied. Tensors that were
        `.data` before keep their own.
        """
        return self.alias()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if (
            not isinstance(value, torch.Tensor)
            or value.dtype != self.dtype
            or value.shape != self.shape
        ):
            raise ParameterError(
                f"param.data of {tuple(self.shape)} {self.dtype} cannot become "
                f"{described(value)}: cast or reshape it, or put a "
                "torch.nn.Parameter in and call model = bmtrain.BMTrainModelWrapper(model) again."
            )
        owner = value.owner if isinstance(value, Slices) else None
        if owner is self:
            return
        if isinstance(owner, DistributedParameter):
            raise ParameterError(
                "param.data = other.data would tie two sharded parameters by their "
                "memory: tie them by assigning the parameter "
                "object to the second module, or copy the values, param.data.copy_(other.data)."
            )
        if isinstance(value, Slices) and value.is_gradient:
            raise ParameterError(
                "param.data = param.grad would tie a parameter to a gradient by their memory: copy "
                "the values, param.data.copy_(param.grad)."
            )
        values = cut_like(value, self)
        for alias in self._living_aliases():  # in one process they keep their memory
            alias.local_tensor = alias.local.clone()
        self._aliases.clear()
        self.local.copy_(values.local)
        self.mark_written()
        if isinstance(value, Slices) and value.cut.is_like(self.cut):
            value.local_tensor = self.local_tensor
            self._aliases[id(value)] = weakref.ref(value)

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, summed over ranks: sharded as the parameter.

        Collective if `reduce_gradients=False` held gradients back.
        """
        if self.storage_of.gradient.has_deferred:
            self.storage_of.engine.backward.flush()
        return self.shown_grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is None:
            # Else a pass that has raised would take back what is cleared here.
            self.storage_of.engine.backward.abandon_if_dead()
            self.storage_of.gradient.discard_deferred(self.index_in_storage)
            self.shown_grad = None
            return
        if not isinstance(value, torch.Tensor) or value.dtype != self.dtype:
            raise ParameterError(
                f"param.grad got {described(value)}: expected a tensor of {self.dtype}."
            )
        self.shown_grad = cut_like(value, self)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    _grad = grad  # torch's other name of it

    def register_hook(self, hook: Hook) -> RemovableHandle:
        """Call `hook(grad)` at the end of each backward pass; it may return another gradient.

        `grad` is the gradient of that pass alone, summed over ranks.

        Raises:
            ParameterError: if the parameter does not require grad.
        """
        return self._register(self.grad_hooks, hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Any], None]) -> RemovableHandle:
        """Call `hook(param)` once `.grad` is complete, after each pass that gave it a gradient.

        Raises:
            ParameterError: if the parameter does not require grad.
        """
        return self._register(self.post_hooks, hook)

    def _register(self, hooks: collections.OrderedDict[int, Any], hook: Any) -> RemovableHandle:
        if not self.requires_grad:
            raise ParameterError(
                "a hook was registered on a sharded parameter that does not require grad: call "
                "param.requires_grad_() first."
            )
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    @property
    def local(self) -> torch.Tensor:
        """This rank's slice of the flattened tensor: 1-D, possibly empty, on the rank's device.

        It shares the parameter's memory. Waits for an update of an optimizer in flight.
        """
        self.storage_of.wait_for_updates()
        return self.local_tensor

    @property
    def is_held(self) -> bool:
        shared = sum(alias.local_tensor is self.local_tensor for alias in self._living_aliases())
        return sys.getrefcount(self.local_tensor) - shared > self._num_holders

    @property
    def init_method(self) -> Initializer | None:
        """Called by `init_parameters` with the full tensor."""
        return self._init_method

    def alias(self) -> Slices:
        alias = ParameterAlias(self.local_tensor, self.cut)
        alias.param = self
        self._aliases[id(alias)] = weakref.ref(alias)
        if len(self._aliases) > 8:
            self._aliases = {id(alias): weakref.ref(alias) for alias in self._living_aliases()}
        return alias

    def _living_aliases(self) -> list[Slices]:
        return [alias for reference in self._aliases.values() if (alias := reference()) is not None]

    def differentiable_local(self) -> torch.Tensor:
        out: torch.Tensor = _LocalOfParameter.apply(self)
        return out

    def differentiable_whole(self) -> torch.Tensor:
        # Only this tensor: not the rest of its storage, which only some ranks may have.
        storage = self.storage_of
        is_alone = storage.placement.stage is None and len(storage.layout.slots) == 1
        return self.gather() if is_alone else super().differentiable_whole()

    def gather(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """The full tensor, differentiable: its gradient is summed over ranks into this slice.

        Collective. With `args` or `kwargs` it is `torch.gather`: BMTrain's method has torch's name.
        """
        if args or kwargs:
            return torch.gather(self, *args, **kwargs)
        use = Use([self.storage_of])
        with use.running():
            view = use.gather_in_graph()[self.index_in_storage]
            return view.clone() if use.is_gathered_again else view

    def gather_all(self) -> torch.Tensor:
        """As `gather`, with the tensor-parallel split undone: the tensor before the cut."""
        full, split = self.gather(), self.cut.split
        if split is None:
            return full
        return torch.cat(list(autograd.all_gather(full, self.cut.mesh.tp)), split.dim)

    def tp_gather(self) -> torch.Tensor:
        """The slices of all tensor-parallel ranks, one after the other: 1-D, differentiable.

        Collective over the tensor-parallel ranks. Without `tp_mode` it is this rank's slice.
        """
        local = self.differentiable_local()
        if self.cut.split is None:
            return local
        return autograd.all_gather(local, self.cut.mesh.tp).view(-1)

    def set_full(self, value: torch.Tensor) -> None:
        """Take this rank's slice of the whole tensor `value`.

        Raises:
            ParameterError: for another shape.
        """
        if tuple(value.shape) != tuple(self._tp_original_shape):
            raise ParameterError(
                f"a parameter of shape {tuple(self._tp_original_shape)} got values of "
                f"shape {tuple(value.shape)}."
            )
        self.take_same(value)

    def mark_written(self) -> None:
        """The parameter was written: values gathered before are stale.

        Call it after every write between gathers, at the same place on all ranks.
        """
        self.count_write()
        # Where it is forgotten decides which gathers there are: at the same place on all ranks.
        self.storage_of.residence.forget()

    def count_write(self) -> None:
        """`mark_written` for writes at the end of a pass, when no gather has to be forgotten."""
        self.never_set = False
        self.num_own_writes += 1
        self.storage_of.residence.mark_stale()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedParameter:
        if id(self) not in memo:
            _copy_storage(self.storage_of, memo)
        found: DistributedParameter = memo[id(self)]
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None
    ) -> Any:
        if func is torch.autograd.grad:
            return gradients(*args, **(kwargs or {}))
        owner = getattr(func, "__self__", None)
        if any(owner is native for native in native_gradients) and isinstance(args[0], cls):
            # torch's descriptor, called by its name: not the gradient that programs see
            return getattr(vars(DistributedParameter)["grad"], func.__name__)(*args)
        return run(func, args, kwargs or {})

    def expect_whole_gradients(self) -> None:
        """Take whole gradients from torch's own `.grad` and reduce them.

        A custom function, or TorchScript, may be reading the parameter itself: autograd then
        accumulates a whole gradient, of this rank alone, on the native leaf.
        """
        if self._takes_whole_gradients or torch.is_grad_enabled() or not self.requires_grad:
            return
        self._takes_whole_gradients = True
        reference = weakref.ref(self)  # the hook is the parameter's: no cycle

        def collect(grad: torch.Tensor | None) -> torch.Tensor | None:
            param = reference()
            if grad is None or param is None:
                return None
            storage = param.storage_of
            if not storage.engine.backward.reduces:
                return None
            if isinstance(grad, Slices):
                storage.engine.backward.add_slice(
                    storage.gradient, param.index_in_storage, grad.local
                )
            else:
                own = [
                    grad if index == param.index_in_storage else None
                    for index in range(len(storage.layout.slots))
                ]
                storage.engine.backward.add([(storage.gradient, own)])
            return grad.new_zeros(()).expand(grad.shape)

        torch.Tensor.register_hook(self, collect)
        torch.Tensor.register_post_accumulate_grad_hook(self, _forget_native_gradient)


class ParameterAlias(Sharded):
    """`.data` of a sharded parameter, or the parameter detached."""

    param: DistributedParameter

    @property
    def local(self) -> torch.Tensor:
        self.param.storage_of.wait_for_updates()
        return self.local_tensor

    @property
    def owner(self) -> Slices:
        # the parameter may have moved to another storage
        return self.param if self.local_tensor is self.param.local else self

    def mark_written(self) -> None:
        if self.owner is self.param:
            self.param.mark_written()
        else:
            super().mark_written()


class _LocalOfParameter(torch.autograd.Function):
    """The slice of a parameter.

    Its gradient is summed over ranks already and joins those of the storage; autograd accumulates
    nothing into `.grad`.
    """

    @staticmethod
    def forward(ctx: Any, param: DistributedParameter) -> torch.Tensor:
        ctx.param = param
        ctx.set_materialize_grads(False)
        return param.local.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> None:
        refuse_create_graph()
        if grad is not None:
            storage = ctx.param.storage_of
            storage.engine.backward.add_slice(storage.gradient, ctx.param.index_in_storage, grad)


def _forget_native_gradient(param: torch.Tensor) -> None:
    with plain_functions():
        native_gradients[0].__set__(param, None)  # the zeros that `collect` returned


def _copy_storage(source: Storage, memo: dict[int, Any]) -> None:
    """Copy a storage with all its parameters; they stay together, as in the original."""
    target = source.new_like(source.policy, source.placement, adoptable=source.adoptable)
    target.shard.copy_(source.shard)
    params = []
    for index, old in enumerate(source.params):
        trainable = old is not None and old.requires_grad
        new = DistributedParameter.at(target, index, trainable)
        if isinstance(old, DistributedParameter):
            new._init_method, new.group, new.never_set = (
                copy.copy(old._init_method),
                old.group,
                old.never_set,
            )
            for name in set(vars(old)) - set(vars(new)):
                vars(new)[name] = copy.deepcopy(vars(old)[name], memo)
            memo[id(old)] = new
        params.append(new)
    target.attach(params)
    memo[id(target)] = params  # storages hold parameters weakly: keeps them alive


def check_made_of_whole(name: str, value: Any) -> None:
    """ParameterError for an `nn.Parameter` made of a sharded tensor, as a module's parameter."""
    is_sharded = isinstance(value, Slices) and not isinstance(value, DistributedParameter)
    if is_sharded and isinstance(value, torch.nn.Parameter):
        raise ParameterError(
            f"parameter {name!r} is made of a sharded tensor: make it of the whole one, "
            "torch.nn.Parameter(values.full_tensor()), put it in, and call "
            "model = bmtrain.BMTrainModelWrapper(model) again."
        )


def computed_with(x: torch.Tensor) -> torch.Tensor:
    """The tensor that a layer computes with: gathered if the parameter is distributed.

    Of a tensor-parallel parameter it is this rank's part.
    """
    return x.gather() if isinstance(x, DistributedParameter) else x
