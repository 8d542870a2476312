"""DistributedParameter: a parameter of which this rank holds a slice of the flattened tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch

from bmtrain.distributed import autograd
from bmtrain.errors import ParameterError
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.shard.engine import Engine
from bmtrain.shard.layout import Split
from bmtrain.shard.placement import Placement
from bmtrain.shard.storage import ShardPolicy, Storage
from bmtrain.shard.unshard import Use
from bmtrain.shard.whole import Whole

Initializer = Callable[[torch.Tensor], object]
_DATA: Any = torch.Tensor.data  # torch's descriptor of what a tensor shows as its values


class ParameterInitializer:
    """An initialisation to run later: calling it with the full tensor runs `fn(tensor, *args, **kwargs)`."""

    def __init__(self, fn: Callable[..., object], *args: Any, **kwargs: Any) -> None:
        self.fn, self.args, self.kwargs = fn, args, kwargs

    def __call__(self, tensor: torch.Tensor) -> None:
        self.fn(tensor, *self.args, **self.kwargs)


class DistributedParameter(torch.nn.Parameter):
    """An nn.Parameter whose data is this rank's 1-D slice of the flattened full tensor.

    Element-wise optimizers, parameter groups and clipping work on it as on any parameter; `.grad` is the same slice of the
    gradient, summed over ranks.

    Args:
        data: the full tensor, on any device, the same on every rank; a meta tensor allocates only the slice. With `tp_mode`
            this tensor rank's part of it.
        requires_grad: whether to train it.
        init_method: called with the whole tensor by `init_parameters`.
        group: a name under which `grouped_parameters` lists it.
        tp_mode: whether the whole tensor is cut along `tp_split_dim` over the tensor-parallel ranks, in equal parts.
        tp_split_dim: the dim of that cut, from 0 on; -1 for none.
    """

    _storage: Storage
    _index: int
    _original_shape: torch.Size
    _tp_original_shape: torch.Size
    _init_method: Initializer | None
    _never_set: bool
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
        current = world.current("DistributedParameter")
        if not isinstance(data, torch.Tensor):
            raise ParameterError(
                f"DistributedParameter got {type(data).__name__}: expected a tensor, for example torch.empty(rows, columns)."
            )
        defaults = current.defaults
        policy = ShardPolicy(zero_level=2, reduce_dtype=defaults.reduce_dtype, accumulate_dtype=defaults.accumulate_dtype)
        split = _split_of(data, tp_split_dim, current.mesh.tp) if tp_mode else None
        storage = Storage(
            current.service(Engine), [("parameter", data.shape)], data.dtype, policy,
            placement=Placement(tensor_parallel=split is not None), splits=[split], adoptable=True,
        )  # fmt: skip
        storage.fill(0, data)
        param = cls.at(storage, 0, requires_grad)
        param._init_method, param.group = init_method, group
        param._never_set = data.is_meta
        storage.attach([param])
        return param

    @classmethod
    def at(cls, storage: Storage, index: int, requires_grad: bool) -> DistributedParameter:
        """The parameter of one slot of a storage."""
        param = torch.Tensor._make_subclass(cls, storage.local(index), requires_grad)
        param._storage, param._index = storage, index
        slot = storage.layout.slots[index]
        param._original_shape, param._tp_original_shape = torch.Size(slot.shape), torch.Size(slot.whole_shape)
        param._init_method, param.group = None, None
        param._never_set = False
        return param

    def move_to(self, storage: Storage, index: int) -> None:
        """Live in another storage from now on; its slot must already hold the values."""
        _DATA.__set__(self, storage.local(index))
        self.grad = None
        self._storage, self._index = storage, index

    @property
    def data(self) -> torch.Tensor:
        """This rank's slice, outside of any graph. Can be written into, but not replaced: other ranks would not hear of it."""
        values: torch.Tensor = _DATA.__get__(self)
        return values

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        raise ParameterError(
            f"the data of a sharded parameter cannot be replaced (by a tensor of shape {tuple(value.shape)}): write into this "
            "rank's slice, param.data.copy_(...), or give all ranks the full tensor, param.set_full(...)."
        )

    @property
    def storage_of(self) -> Storage:
        """The storage this parameter lives in."""
        return self._storage

    @property
    def index_in_storage(self) -> int:
        """Its slot there."""
        return self._index

    @property
    def init_method(self) -> Initializer | None:
        """What `init_parameters` calls with the full tensor."""
        return self._init_method

    @property
    def never_set(self) -> bool:
        """True while a parameter made from a meta tensor has no values yet."""
        return self._never_set

    def gather(self) -> torch.Tensor:  # type: ignore[override]  # BMTrain's name, which torch uses for something else
        """The full tensor, differentiable: its gradient is summed over ranks into this slice. Collective."""
        use = Use([self._storage])
        with use.running():
            view = use.open()[self._index]
            return view if self._storage.residence.survives_forward else view.clone()

    def gather_all(self) -> torch.Tensor:
        """The whole tensor, `_tp_original_shape`: gathered, with the tensor-parallel split undone too. As `gather` otherwise."""
        split = self._storage.layout.slots[self._index].split
        full = self.gather()
        return full if split is None else torch.cat(list(autograd.all_gather(full, self._storage.engine.mesh.tp)), split.dim)

    def tp_gather(self) -> torch.Tensor:
        """The slices of all tensor-parallel ranks, one after the other, 1-D: the split undone, the sharding kept. Collective."""
        split = self._storage.layout.slots[self._index].split
        return self if split is None else autograd.all_gather(self, self._storage.engine.mesh.tp).view(-1)

    def set_full(self, value: torch.Tensor) -> None:
        """Take this rank's slice of the whole tensor `value`."""
        if tuple(value.shape) != tuple(self._tp_original_shape):
            raise ParameterError(f"a parameter of shape {tuple(self._tp_original_shape)} got values of shape {tuple(value.shape)}.")
        self.set_slice(self._storage.slice_of_whole(self._index, value))

    def set_slice(self, values: torch.Tensor) -> None:
        """Take the values of this rank's slice, (numel of the slice,)."""
        with torch.no_grad():
            self.copy_(values)
        self.mark_set()

    def mark_unset(self) -> None:
        """The parameter waits for `init_parameters` or a checkpoint."""
        self._never_set = True

    def mark_set(self) -> None:
        """The parameter has other values now. To be called by all who write it between gathers, alike on all ranks."""
        self._never_set = False
        self._storage.mark_written()

    def __deepcopy__(self, memo: dict[int, Any]) -> DistributedParameter:
        if id(self) not in memo:
            _copy_storage(self._storage, memo)
        found: DistributedParameter = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParameterError(
            "a DistributedParameter is one slice of a tensor and cannot be pickled: use bmtrain.save or state_dict()."
        )


def _copy_storage(source: Storage, memo: dict[int, Any]) -> None:
    """Copy a storage with all its parameters; they stay together, as in the original."""
    shapes = [(slot.name, torch.Size(slot.shape)) for slot in source.layout.slots]
    target = Storage(
        source.engine, shapes, source.dtype, source.policy,
        placement=source.placement, splits=[slot.split for slot in source.layout.slots], adoptable=source.adoptable,
    )  # fmt: skip
    target.shard.copy_(source.shard)
    params = []
    for index, old in enumerate(source.params):
        trainable = old is not None and old.requires_grad
        new = DistributedParameter.at(target, index, trainable)
        if isinstance(old, DistributedParameter):
            new._init_method, new.group, new._never_set = copy.copy(old._init_method), old.group, old._never_set
            memo[id(old)] = new
        params.append(new)
    target.attach(params)
    memo[id(target)] = params  # keeps all alive until the copy is complete


def full_values(params: Iterator[tuple[str, torch.nn.Parameter]]) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, whole tensor on the CPU) for each parameter, one storage gathered at a time. Collective."""
    by_storage: dict[Storage, list[tuple[str, int]]] = {}
    for name, param in params:
        if isinstance(param, DistributedParameter):
            by_storage.setdefault(param.storage_of, []).append((name, param.index_in_storage))
        else:
            yield name, param.detach().cpu()
    for storage, members in by_storage.items():
        whole = Whole(storage)
        for name, index in members:
            value = whole[index]
            yield name, value.clone() if value.device.type == "cpu" else value.cpu()
        del whole, value  # before the next is gathered


def _split_of(data: torch.Tensor, dim: int, tp: Axis) -> Split | None:
    """How `data` is a part of the whole; None where there is nothing to split."""
    if dim == -1 or tp.size == 1:
        return None
    if not 0 <= dim < data.dim():
        raise ParameterError(
            f"tp_split_dim is {dim} for a parameter of shape {tuple(data.shape)}: expected 0 to {data.dim() - 1}, or -1 for none."
        )
    return Split(dim, tp.index, tp.size)


def grouped_parameters(module: torch.nn.Module) -> Iterator[tuple[str | None, list[torch.nn.Parameter]]]:
    """(group name, parameters) for each `group` given to the DistributedParameters of `module`; others are under None."""
    groups: dict[str | None, list[torch.nn.Parameter]] = {}
    for param in module.parameters():
        name = param.group if isinstance(param, DistributedParameter) else None
        groups.setdefault(name, []).append(param)
    yield from groups.items()
