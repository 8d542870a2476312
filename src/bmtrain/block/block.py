"""Block: a module whose parameters are sharded together and gathered while it runs.

While code of the module computes, gathered full tensors stand in the places of its parameters.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import operator
import re
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.block.adopt import (
    Place,
    adopt,
    move_buffers,
    move_to_stage,
    open_slots,
    places_of,
    share_buffers,
    share_extra_states,
)
from bmtrain.block.context import Context
from bmtrain.block.shardable import check_shardable
from bmtrain.compile.fp8 import call_in_fp8, check_fp8, marked
from bmtrain.compile.programs import Structure
from bmtrain.errors import ConfigurationError, ParameterError
from bmtrain.recompute.level import Level, level_of
from bmtrain.recompute.offload import is_movable
from bmtrain.recompute.plan import Option
from bmtrain.recompute.planner import Subject
from bmtrain.recompute.probe import Trials, measure
from bmtrain.recompute.recomputation import (
    HostState,
    ModuleCall,
    Recomputation,
    Runner,
    Selective,
    parts_with_blocks,
)
from bmtrain.recompute.recomputation import call as call_module
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.shard.gradient import ShardPolicy
from bmtrain.shard.module import DistributedModule, has_blocks
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import ordinary
from bmtrain.shard.slices import Slices
from bmtrain.shard.storage import Storage
from bmtrain.shard.unshard import Use, before_backward_of, refuse_transforms, tied_to
from bmtrain.shard.window import as_copy
from bmtrain.torch_internals import (
    PLAIN,
    has_global_module_hooks,
    hooks_of,
    in_backward,
    lay_out_weights,
    map_tensors,
    next_node_number,
    no_torch_function,
    renew_weights,
    untraced,
    versions_of,
)

_NATIVE_DATA: Any = torch.Tensor.data  # torch's descriptor
# The first runs of a module, in which checksums of its parameters detect writes around torch. Each
# check reads all parameters twice.
_NUM_LOOKS = 2
_MOST_SUMMED = 2**22  # numbers at a time
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Row(NamedTuple):
    """A place and the distributed parameter that is stored there between calls."""

    place: Place
    param: DistributedParameter


class ParameterTable(tuple[Row, ...]):
    """All parameters of some modules by place, and facts derived from them.

    Valid until the modules change: see `are_current`.

    Attributes:
        modules: with their paths.
        storages: the storages of the parameters, in order of first appearance.
        positions: index of each parameter among the slots of all storages.
        are_copies: whether gathered tensors are copies; on one rank they alias the parameters.
        is_replaced: whether ordinary tensors stand in all places, as in
            `torch.func.functional_call`: there is nothing to gather.
    """

    def __new__(cls, modules: Sequence[tuple[str, torch.nn.Module]]) -> ParameterTable:
        places = list(places_of(modules))
        values = [place.value for place in places if not isinstance(place.value, Bound)]
        if not any(isinstance(value, torch.nn.Parameter | Slices) for value in values):
            return super().__new__(cls)
        return super().__new__(cls, [Row(place, _sharded(place)) for place in places])

    def __init__(self, modules: Sequence[tuple[str, torch.nn.Module]]) -> None:
        self.modules = modules
        self.is_replaced = not self and any(True for _ in places_of(modules))
        self.params = [param for _, param in self]
        self.homes = [(place.module._parameters, place.name) for place, _ in self]
        self.storages = list(dict.fromkeys([param.storage_of for param in self.params]))
        starts = dict(
            zip(
                self.storages,
                itertools.accumulate([len(s.layout.slots) for s in self.storages], initial=0),
                strict=False,
            )
        )
        self.positions = [
            starts[param.storage_of] + param.index_in_storage for param in self.params
        ]
        self.are_copies = any(storage.axis.size > 1 for storage in self.storages)
        self.rnns = [module for _, module in modules if isinstance(module, torch.nn.RNNBase)]
        self._dicts: list[dict[str, Any]] = [
            found for _, m in modules for found in (m._modules, m._parameters)
        ]
        self._lengths = [len(found) for found in self._dicts]
        self._values = [value for found in self._dicts for value in found.values()]
        # Storages are registered once: another number may mean other ones.
        self._engine = self.storages[0].engine if self.storages else None
        self._num_registered = self._engine.num_registered if self._engine else 0

    def are_current(self) -> bool:
        """Whether the modules still have the same children and parameters, by the same names, in
        the same storages.
        """
        return (
            (self._engine is None or self._engine.num_registered == self._num_registered)
            and list(map(len, self._dicts)) == self._lengths
            and all(
                map(
                    operator.is_,
                    itertools.chain.from_iterable(map(dict.values, self._dicts)),
                    self._values,
                )
            )
            and all(map(operator.is_, itertools.starmap(dict.get, self.homes), self.params))
        )


class _Plain(torch.Tensor):
    """Computes, and pickles, as an ordinary tensor."""

    __torch_function__: Any = no_torch_function

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)


class Bound(_Plain):
    """A full tensor in the place of a parameter: isinstance(x, torch.nn.Parameter) is true."""

    _is_param = True  # read by isinstance(x, torch.nn.Parameter)

    def set_(self, *args: Any) -> Bound:
        """torch's, but that a tensor which becomes itself is not written: a parametrization does
        so with the parameter when it is registered.
        """
        if len(args) != 1 or args[0] is not self:
            super().set_(*args)
        return self


class _Copy(_Plain):
    """A gathered copy. numpy's view of it is read-only: no version counts its writes."""

    def numpy(self, *args: Any, **kwargs: Any) -> Any:
        """torch's, of which a write would be lost."""
        return as_copy(super().numpy(*args, **kwargs))

    def __deepcopy__(self, memo: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).__deepcopy__(memo)


class BoundCopy(_Copy, Bound):
    """A gathered copy, which the next release discards.

    `.data` shares the version counter of the tensor. The native `.data` has a counter of its own,
    so a write through it would be lost in silence.
    """

    def detach(self) -> torch.Tensor:
        """torch's."""
        return super().detach().as_subclass(_Copy)

    #: the values, detached, with this tensor's version counter
    data: Any = property(detach, _NATIVE_DATA.__set__)


class Binding:
    """Binds tensors to the parameters of a module and the plain modules below it.

    Between calls the modules hold their sharded parameters. During a call, and while backward
    passes through one, they hold full tensors. Modules may be added and removed between calls.

    Args:
        modules: returns the modules with their paths, the root first.
    """

    def __init__(self, modules: Callable[[], Sequence[tuple[str, torch.nn.Module]]]) -> None:
        self._modules = modules
        self._resting_table: ParameterTable | None = None
        self._bound_table: ParameterTable | None = None  # set while full tensors are bound
        # Full tensors that stay bound between calls, during backward. See `lend`.
        self._lent: list[torch.Tensor] | None = None
        self._num_runs = 0
        self.is_running = False

    def __getstate__(self) -> dict[str, Any]:
        """State for a copy, which must build its own table: this one is of other modules."""
        return {**self.__dict__, "_resting_table": None}

    def table(self) -> ParameterTable:
        """All parameters by place, whatever is bound there now.

        Raises:
            ParameterError: for a parameter that is not sharded.
        """
        if self._bound_table is not None:
            return self._bound_table
        if self._resting_table is None or not self._resting_table.are_current():
            self._resting_table = ParameterTable(self._modules())
        return self._resting_table

    @contextlib.contextmanager
    def running(
        self, table: ParameterTable, views: Sequence[torch.Tensor], *, is_compiled: bool
    ) -> Iterator[None]:
        """Bind full tensors to the modules while the body runs.

        Args:
            views: one for each slot of the table's storages, new ones.
            is_compiled: whether compiled code computes. It gets plain tensors, no `Bound`.

        Raises:
            ParameterError: if the body rebinds or writes a parameter.
        """
        outer, lent = self.is_running, self._lent
        bound = list(map(views.__getitem__, table.positions))
        standing = list(itertools.starmap(dict.__getitem__, table.homes))
        versions = versions_of(bound)
        if not is_compiled:
            kind = BoundCopy if table.are_copies else Bound
            for view in bound:
                view.__class__ = kind
        self._num_runs += 1
        # Only in the first runs, as it synchronises, which a stream that is captured cannot do.
        is_looking = (
            table.are_copies
            and self._num_runs <= _NUM_LOOKS
            and not (bound[0].is_cuda and torch.cuda.is_current_stream_capturing())
        )
        sums = _sums(bound) if is_looking else None
        self._bound_table, self.is_running = table, True
        self._put(table, bound)
        for rnn in table.rnns:
            lay_out_weights(rnn)
        addresses = list(map(_address, bound))
        try:
            yield
            held = itertools.starmap(dict.get, table.homes)
            _refuse(table, map(operator.is_not, held, bound))
            _refuse(table, map(operator.ne, map(_address, bound), addresses))
            if versions_of(bound) != versions:
                raise _written(table, bound)
            if sums is not None:  # writes that bypass torch, such as numpy's, count no version
                _refuse(table, map(operator.not_, map(torch.equal, _sums(bound), sums)))
        # Autograd reports an in-place write at the next use of the view, which may be in the body.
        except RuntimeError as error:
            if versions_of(bound) != versions:
                raise _written(table, bound) from error
            if "support saved tensor hooks" in str(error):
                raise ParameterError(
                    "the forward pass of a block takes gradients by torch.func: give the block "
                    "zero_level=2 and use_checkpoint=False, or use torch.autograd.grad."
                ) from error
            raise
        except ValueError as error:
            if "non-leaf" in str(error):
                raise ParameterError(
                    "the forward pass made a parameter an attribute of a module. Inside it the "
                    "parameter is a gathered copy: assign it before the model is wrapped."
                ) from error
            raise
        finally:
            self.is_running = outer
            # A surrounding call, or a loan still open, expects its own tensors back: sharded
            # parameters here would break what it computes next.
            is_expected = outer or (lent is not None and lent is self._lent)
            self._put(table, standing if is_expected else None)

    def lend(
        self,
        table: ParameterTable,
        marked: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
        tensors: Sequence[torch.Tensor],
    ) -> Callable[[], None]:
        """Bind tensors outside of calls too, until the returned function is called.

        For hooks and checkpoints inside the module, whose Python code runs during backward.

        Args:
            marked: makes of the tensors those that the module computes with.
            tensors: one for each slot of the table's storages.
        """
        tensors = marked(tensors)
        lent = list(map(tensors.__getitem__, table.positions))
        self._bound_table, self._lent = table, lent
        self._put(table, lent)

        def give_back() -> None:
            if self._lent is lent:  # else a later loan is bound, and this must not end it
                self._lent = None
                if not self.is_running:
                    self._put(table)

        return give_back

    def _put(
        self, table: ParameterTable, values: Sequence[torch.Tensor | None] | None = None
    ) -> None:
        """Bind values, one for each row of the table; without any, the sharded parameters."""
        if values is None:
            values, self._bound_table = table.params, None
        for (home, name), value in zip(table.homes, values, strict=True):
            home[name] = value  # type: ignore[assignment]
        # Recurrent modules keep their own list of weights and pass that to the kernel: without an
        # update they would compute with the previous ones.
        for rnn in table.rnns:
            renew_weights(rnn, is_sharded=self._bound_table is None)


_address = torch.Tensor.data_ptr


def _refuse(table: ParameterTable, are_lost: Iterable[bool]) -> None:
    """Raise ParameterError for the first parameter whose value would be lost, if any."""
    row = next(itertools.compress(table, are_lost), None)
    if row is not None:
        raise _lost_value([row])


def _written(table: ParameterTable, bound: Sequence[torch.Tensor]) -> ParameterError:
    """The error for a module that has written into a gathered parameter."""
    # Views of one buffer share a counter: which of them was written, values tell.
    rows = list(zip(table, bound, strict=True))
    written = [row for row, view in rows if _differs(row.param, view)]
    return _lost_value(written[:1] or table[:3])


def _differs(param: DistributedParameter, view: torch.Tensor) -> bool:
    """Whether this rank's part of a gathered parameter is other than its shard."""
    storage, index = param.storage_of, param.index_in_storage
    own = storage.cuts[index].own(view.detach())
    return storage.axis.size > 1 and not torch.equal(own, storage.local(index))


def _sharded(place: Place) -> DistributedParameter:
    param = place.value
    if isinstance(param, DistributedParameter):
        return param
    if not isinstance(param, torch.nn.Parameter):
        raise ParameterError(
            f"parameter {place.path!r} of a block was replaced by a tensor, as "
            "torch.func.functional_call does, but others of the block were not: replace all of "
            "them by whole tensors, param.gather()."
        )
    raise ParameterError(
        f"parameter {place.path!r} of a block is not sharded: it was put in after the "
        "block was made. Call "
        "model = bmtrain.BMTrainModelWrapper(model) again, then give the new "
        "parameters to an optimizer."
    )


def _sums(views: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Integer sum of the bits of each row: the same on all ranks, so all see a write or none."""
    return [_row_sums(view.detach().view(_WHOLE_NUMBERS[view.itemsize])) for view in views]


def _row_sums(numbers: torch.Tensor) -> torch.Tensor:
    rows = torch.atleast_2d(numbers).flatten(0, -2)
    # Torch copies what it sums to int64: of all rows of a bf16 embedding four times its memory.
    parts = rows.split(max(1, _MOST_SUMMED // max(1, rows.shape[-1])))
    return torch.cat([part.sum(-1) for part in parts])


def _lost_value(rows: Sequence[Row]) -> ParameterError:
    names = " or ".join(repr(row.place.path) for row in rows)
    return ParameterError(
        f"the forward pass gave parameter {names} a new value, which would be lost: inside it the "
        "parameter is a gathered copy. Change parameters between passes, or register it as a "
        "buffer."
    )


MODES = ("BLOCK", "PIPE")
# Block and inner module share these: calling, saving and loading go through the block, and hooks
# may be registered on either.
_SHARED_HOOKS = [name for name in vars(torch.nn.Module()) if "_hooks" in name]
# Methods of any module.
_METHODS = {x for x, found in vars(torch.nn.Module).items() if x[0] != "_" and callable(found)}


@dataclasses.dataclass
class BlockCall:
    """One call. Holds no arguments: it lives as long as the graph of the call, and would keep
    inputs resident that are recomputed or offloaded to the host.

    table, use: the sharded parameters, and what gathers them. runner, run: what runs the module,
    and its function for this call.
    """

    table: ParameterTable
    use: Use
    runner: Runner
    run: ModuleCall


class _Method(NamedTuple):
    """A method of any module, which an attribute or the class of the inner module may replace."""

    name: str

    @untraced
    def __get__(self, block: Block | None, kind: type) -> Any:
        own = getattr(DistributedModule, self.name)
        if block is None:
            return own
        inner = vars(block)["_inner"]
        found = inspect.getattr_static(inner, self.name)
        if self.name in vars(inner) or not isinstance(found, types.FunctionType):
            return getattr(inner, self.name)
        is_own = found is vars(torch.nn.Module)[self.name]
        return types.MethodType(own if is_own else found, block)


def _of_inner(function: Any) -> Callable[..., Any]:
    """A method of blocks that is the function of the inner module."""

    def method(self: Block, *args: Any) -> Any:
        return function(self._inner, *args)

    return method


class _WithMethods(DistributedModule):
    """Not in the body of Block: before Python 3.13, `vars` there would drop its `__class__`."""

    vars().update({name: _Method(name) for name in _METHODS - {"state_dict"}})


class Block(_WithMethods):
    """`Block(module)` computes what `module` computes, with its parameters sharded over ranks.

    Args:
        inner_module: any module; its parameters may be plain (on the CPU, on meta or on the rank's
            device) or distributed. It is changed in place: its parameters become this rank's
            shards.
        use_checkpoint: True recomputes the forward pass during backward instead of keeping
            activations, False keeps them, a Level says what is kept, "auto" recomputes what does
            not fit into the memory limit. Dropout replays exactly.
        zero_level: 3 releases full parameters after forward and gathers them again for backward, 2
            keeps them in between; None takes the default given to `init_distributed`.
        mode: "BLOCK" (or "PIPE", the same here), accepted from BMTrain programs.
        reduce_dtype: dtype in which gradients are summed over ranks; None takes the default.
        accumulate_dtype: dtype in which gradients of micro-batches add up; None takes the default.
        compile: whether calls with gradients run compiled code where the module compiles as one
            graph; None takes the default.
        fp8: whether linear layers compute in FP8, on GPUs that have it; None takes the default.

    The state dict, parameters, buffers and attributes have the names of the inner module.

    Raises:
        NotInitializedError: before `init_distributed`.
        ConfigurationError, ParameterError: for arguments or parameters that cannot work; the
            message names them.

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter
    Models" (2020).
    """

    is_block = True
    _inner: Any
    _module = property(operator.attrgetter("_inner"))  # BMTrain's name

    def __init__(
        self,
        inner_module: torch.nn.Module,
        use_checkpoint: bool | str | Level = True,
        zero_level: int | None = None,
        mode: str = "BLOCK",
        *,
        reduce_dtype: torch.dtype | None = None,
        accumulate_dtype: torch.dtype | None = None,
        compile: bool | None = None,
        fp8: bool | None = None,
    ) -> None:
        self._context = context = world.current("Block").service(Context)
        super().__init__()
        if not isinstance(inner_module, torch.nn.Module):
            raise ConfigurationError(
                f"Block got {type(inner_module).__name__}: expected a torch.nn.Module."
            )
        if mode not in MODES:
            raise ConfigurationError(
                f"Block got mode {mode!r}: expected one of {', '.join(MODES)}."
            )
        defaults = context.defaults
        self._policy = ShardPolicy(
            zero_level=defaults.zero_level if zero_level is None else zero_level,
            reduce_dtype=reduce_dtype or defaults.reduce_dtype,
            accumulate_dtype=accumulate_dtype or defaults.accumulate_dtype,
        )
        _, inner = parts_with_blocks(inner_module)[0]
        # Not registered as a child: nn.Module would prefix its names. Sharing its dicts exposes its
        # parameters, buffers and children under their own names.
        self.__dict__["_inner"] = inner
        open_slots(inner)
        self._parameters, self._buffers, self._modules = (
            inner._parameters,
            inner._buffers,
            inner._modules,
        )
        self._non_persistent_buffers_set = inner._non_persistent_buffers_set
        for name in _SHARED_HOOKS:
            self.__dict__[name] = inner.__dict__[name]
        for name in ("training", "_is_full_backward_hook"):
            del self.__dict__[name]  # read from the inner module
        self.use_checkpoint = use_checkpoint
        self._fp8 = check_fp8(defaults.fp8 if fp8 is None else fp8, context.device)
        #: whether a call without gradients does nothing but gather and call the module
        self.runs_plainly = not self._fp8
        if not isinstance(compile, bool | None):
            raise ConfigurationError(
                f"compile is {compile!r}: expected True, False, or None for the default of "
                "init_distributed."
            )
        self._compiles = defaults.compile if compile is None else compile
        #: of torch.compile; None if it does not compile
        self._options: dict[str, Any] | None = {} if self._compiles else None
        self._eager = Runner(call_in_fp8 if self._fp8 else call_module)
        self._runner: Runner = self._eager
        self._printed: str | None = None
        self._stage: int | None = None  # pipeline stage; None outside of a pipeline
        self._shared: Use | None = None  # one use for all calls inside `together`
        #: puts full tensors in the place of the parameters: calls are those of the module then
        self.binding = Binding(functools.partial(parts_of, inner))
        self._host_state = HostState(functools.partial(parts_with_blocks, inner), context.scripts)
        self.shard()
        self._is_made = True

    @untraced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the inner module with its hooks and the block's, which are the same.

        Hooks run inside of a `__call__` of the module's class. `_forward` sets whose random numbers
        are drawn, as DistributedModule does here.
        """
        run = type(self._inner).__call__
        is_hooked = has_global_module_hooks() or any(hooks_of(self))
        if run is DistributedModule.__call__ or not is_hooked:
            run = torch.nn.Module.__call__
        return run(self, *args, **kwargs)

    def may_run_whole(self, is_asked: bool) -> bool:
        """Whether nothing was set for it but that activations are kept, or "auto"; if the program
        has asked for one graph, whether the block may be compiled.
        """
        is_default = isinstance(self._runner, Structure) or self._holds_blocks
        is_default = is_default and not self._options and self._level in (None, Level.NOTHING)
        return self._compiles and (is_asked or is_default)

    @property
    def storages(self) -> Sequence[Storage]:
        """The storages that are gathered for this block."""
        return self.binding.table().storages

    def shard(self) -> None:
        """Shard the parameters that are not sharded yet, those of new modules too. Collective."""
        context = self._context
        open_slots(self._inner)
        parts = parts_of(self._inner)
        places = list(places_of(parts))
        new = [
            (place.path, place.value)
            for place in places
            if not isinstance(place.value, DistributedParameter)
        ]
        check_shardable(new, context.engine)
        context.sameness.check(new)
        adopt(places, self._policy, context.engine)
        for _, part in parts:
            move_buffers(part, context.device)
            if isinstance(part, torch.nn.RNNBase):
                renew_weights(part, is_sharded=True)
        self._holds_blocks = has_blocks(self._inner)
        if self._stage is not None:
            self.move_to_stage(self._stage)
        if self._options is None or self._holds_blocks:
            self._runner = self._eager
        else:
            self._runner = self._structure(self._options)

    def _structure(self, options: dict[str, Any]) -> Structure:
        params = [param for _, param in self.binding.table()]
        structure = self._context.programs.structure
        return structure(self._inner, params, bool(self._fp8), options)

    @property  # type: ignore[misc]  # never assigned
    def __class__(self) -> type:
        """The inner module's class: a block around a Layer is an instance of Block and Layer."""
        return self._inner.__class__

    def _get_name(self) -> str:
        return "Block"

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_inner":
                raise
            return getattr(self._inner, name)

    # A list or table of modules, as torch.nn.Sequential, is used as one by the module it is in. As
    # a key, of dicts that hooks look into, the block is its module.
    __getitem__, __setitem__, __delitem__, __iter__, __len__, __contains__, __bool__ = map(
        _of_inner,
        (operator.getitem, operator.setitem, operator.delitem, iter, len, operator.contains, bool),
    )
    __hash__, __eq__ = map(_of_inner, (hash, operator.eq))

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name == "use_checkpoint":
            own["_level"] = level_of(value)
        if "_is_made" not in own or (
            name != "_inner" and (name in own or name in own["_parameters"])
        ):
            super().__setattr__(name, value)
        else:
            self._inner.__setattr__(name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Not torch's: it sets what it misses, such as the kind of backward hooks, which the inner
        # module has.
        self.__dict__.update(state)

    def __delattr__(self, name: str) -> None:
        if name != "_inner" and name in self.__dict__:
            super().__delattr__(name)
        else:
            self._inner.__delattr__(name)

    def sharded_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """The inner module and its plain descendants, with their paths.

        Leaves out distributed modules, which save and load their own parameters.
        """
        yield "", self._inner
        for path, module in parts_of(self._inner):
            if module is not self._inner and not isinstance(module, DistributedModule):
                yield path, module

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]  # assignments go through __setattr__
        """Computes what the inner module computes for the same arguments.

        A function assigned here becomes the inner module's `forward`.
        """
        return functools.partial(self._forward, self._inner.forward)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.binding.is_running:  # a replacement of `forward` calls `original` from inside
            return original(*args, **kwargs)
        table = self.binding.table()
        if table.is_replaced:
            return original(*args, **kwargs)
        refuse_transforms()
        if not PLAIN.issuperset(map(type, (*args, *kwargs.values()))):
            args, kwargs = map_tensors(ordinary, (args, kwargs))
        use = Use(table.storages) if self._shared is None else self._shared
        if use.storages is not table.storages:
            raise RuntimeError(
                "the parameters of a block changed while its calls were made together"
            )
        # Recorders cannot see tensors inside compiled code. The choice is made once per call:
        # recomputation runs what forward ran, even if recording has stopped by then.
        runner = self._runner
        if runner is not self._eager and (
            self._context.recorder.listeners
            or self._context.runs_eagerly
            or not runner.accepts(
                [part for _, part in parts_of(self._inner)], (*args, *kwargs.values())
            )
        ):
            runner = self._eager
        call = BlockCall(table, use, runner, runner.plain)
        level = self._level if torch.is_grad_enabled() else Level.NOTHING
        if level is None and use.hooks is not None:
            # What they do with what is kept is their business: they recompute it, or move it. Once
            # more the same level, if they are those of a checkpoint.
            level = Level.NOTHING
        draws = self._context.draws
        draws_own = self._inner.training and not (draws.are_own or self._holds_blocks)
        with draws.own() if draws_own else contextlib.nullcontext():
            # During an outer block's recomputation this call belongs to no pass of the planner.
            if level is None and not in_backward():
                return self._run_as_planned(call, args, kwargs)
            # Hold the buffers if compiled code falls back in the middle of the call: without it the
            # fallback gathers a second time, and ranks that did not fall back never join: a hang.
            with use.running():
                return self._run_at(level or Level.BLOCK, call, args, kwargs)

    def _run_as_planned(
        self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        context = self._context
        axis = context.mesh.world if self._stage is None else context.mesh.pp_zero
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)]
        # None: not known yet
        is_repeatable = (
            call.runner.is_compiled or self._holds_blocks or self._host_state.is_repeatable
        )
        subject = Subject(
            block=self,
            kind=self._kind(call, tensors),
            shape=tuple([dim for x in tensors for dim in x.shape]),
            num_dims=tensors[0].dim() if tensors else 0,
            # A measuring run must not appear in the recording, nor change what a pass reads.
            options=None
            if context.recorder.listeners or is_repeatable is None
            else functools.partial(self._measure, call, args, kwargs),
        )
        first_node = next_node_number()
        planner = context.planners.of(axis)
        try:
            with call.use.running():  # one gather for measuring and running
                turn = planner.next(subject)
                out = self._run_at(turn.level, call, args, kwargs)
        except Exception:
            planner.abort()
            raise
        before_backward_of(out, first_node, functools.partial(planner.turn_back, turn))
        return out

    def _measure(
        self,
        call: BlockCall,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        levels: Sequence[Level],
    ) -> dict[Level, Option]:
        """The cost of a call at each level, measured on the parameters that its use holds."""
        if self._holds_blocks or not (call.runner.is_compiled or self._host_state.is_repeatable):
            # Inner blocks communicate: not to be run by one rank for itself.
            return {Level.BLOCK: Option(0, 0, 0.0)}
        use = call.use
        # Views, not detached tensors: `detach` hides that parameters share one buffer, and the
        # compiler then takes such inputs for mutated.
        with torch.no_grad():
            views = [view.view_as(view) for view in use.gather_views()]
        for view, flag in zip(views, use.trainable, strict=True):
            view.requires_grad_(flag)
        begun = self._host_state.begin(args, kwargs, self._context.draws)
        trials = Trials(self._inner, call.runner, self._host_state, begun)
        with self.binding.running(call.table, views, is_compiled=call.runner.is_compiled):
            return measure(trials, levels, views, args, kwargs)

    def _kind(self, call: BlockCall, tensors: Sequence[torch.Tensor]) -> object:
        """What determines how much a call keeps, apart from shapes."""
        if self._printed is None:
            self._printed = re.sub(r" at 0x[0-9a-f]+", "", repr(self._inner))
        arguments = [(x.requires_grad, x.is_leaf, x.dtype) for x in tensors]
        trainable = call.use.trainable
        return (
            self._printed,
            self._inner.training,
            call.runner.is_compiled,
            len(trainable),
            sum(trainable),
            *arguments,
        )

    def _run_at(
        self, level: Level, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the call, and connect its output to the graph.

        On several ranks, backward from any output then reaches this call's gathers and reduction,
        as it does on the other ranks: a rank that skipped them would hang the others. Before
        backward enters the call, its full parameters are lent to the module.
        """
        first_node = next_node_number()
        runner, use, context = call.runner, call.use, self._context
        moved: list[torch.Tensor] = []
        if level is Level.OFFLOADED:
            moved = [x for x in args if isinstance(x, torch.Tensor) and is_movable(x)]
        inside = runner.plain if level is Level.NOTHING else runner.recomputing(level)
        keeping: Any = contextlib.nullcontext(use.keep)
        with context.pinned().keeping(moved, use.keep) if moved else keeping as keep:
            if inside is not None:
                call.run = inside
                with use.saving(keep):
                    out, views = self._compute(call, args, kwargs)
            else:
                results, call.run = None, runner.plain
                if level is Level.CHEAP and not runner.is_compiled:
                    call.run = results = Selective(runner.plain)
                begun = self._host_state.begin(args, kwargs, context.draws)
                body = functools.partial(self._compute, call)
                on_kept = functools.partial(self._warn_of_keeping, results)
                recomputation = Recomputation(body, begun, use, on_kept)
                with recomputation.first_run(args, kwargs, keep):
                    out, views = body(args, kwargs)
        if not torch.is_grad_enabled():
            return out
        end, tied = next(itertools.compress(views, use.trainable), None), out
        if call.table.are_copies:
            again = use.is_gathered_again
            tied = tied_to(end, out, (args, kwargs), first_node, is_gathered_again=again)
        bind = functools.partial(self.binding.lend, call.table, marked if self._fp8 else list)
        node = None if end is None else end.grad_fn
        before_backward_of(tied, first_node, functools.partial(use.lend, bind, node))
        return tied

    def _warn_of_keeping(self, results: Selective | None, reason: str) -> None:
        """The call is not recomputed: its tensors are kept, so results need not be."""
        if results is not None:
            results.forget()
        name = type(self._inner).__name__
        if name not in self._context.kept:
            self._context.kept.add(name)
            warn(
                f"{name} keeps its activations, as with use_checkpoint=False, where {reason}: "
                "computing it again would give other values."
            )

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Calls inside share one gather, and one reduction after all their backward passes.

        For the micro-batches of one pass. The gathered parameters must stay resident from forward
        to backward (ZeRO-2).
        """
        self._shared = Use(self.storages)
        try:
            with self._shared.together():
                yield
        finally:
            self._shared = None

    def move_to_stage(self, stage: int) -> None:
        """Keep the parameters on the ranks of one pipeline stage, as ZeRO-2. Collective."""
        self._stage = stage
        places = list(places_of(parts_of(self._inner)))
        move_to_stage(places, stage, dataclasses.replace(self._policy, zero_level=2))

    def settle_buffers(self) -> None:
        """Copy buffers and extra states from the stage that runs the block to the other stages.
        Collective.
        """
        if self._stage is not None:
            parts = [part for _, part in parts_of(self._inner)]
            share_buffers(parts, self._stage, self._context.mesh.pipe)
            share_extra_states(parts, self._stage, self._context.mesh.pipe)

    def _compute(
        self, call: BlockCall, args: tuple[Any, ...], kwargs: dict[str, Any], is_again: bool = False
    ) -> tuple[Any, list[torch.Tensor]]:
        """Run the module on gathered parameters.

        Args:
            is_again: only what autograd saves is wanted.

        Returns:
            The output and the gathered parameters.
        """
        use = call.use
        with use.running():
            views = use.gather_views() if is_again else use.gather_in_graph()
            # Leaves, so that the second run saves what the first has saved; its graph is dropped.
            if is_again:
                flags = zip(views, use.trainable, strict=True)
                views = [view.detach().requires_grad_(flag) for view, flag in flags]
            with self.binding.running(call.table, views, is_compiled=call.runner.is_compiled):
                return call.run(self._inner, args, kwargs), views

    def compile(self, **options: Any) -> None:
        """Compile the inner module; `options` are the keywords of torch.compile.

        Blocks of equal structure and options share the compiled code. A module that does not
        compile as one graph runs uncompiled, with a warning.
        """
        self._runner = self._structure(options)
        self._options = options

    def train(self, mode: bool = True) -> Block:
        """Set the mode through the inner module, whose `train` may be overridden."""
        self._inner.train(mode)
        return self

    def extra_repr(self) -> str:
        """The inner class and the checkpoint setting."""
        return f"{type(self._inner).__name__}, use_checkpoint={self.use_checkpoint}"


CheckpointBlock = Block


def parts_of(module: torch.nn.Module, path: str = "") -> list[tuple[str, torch.nn.Module]]:
    """A module and what is below it outside of other blocks, with their paths."""
    found = [(path, module)]
    for name, child in module._modules.items():
        if child is not None and not isinstance(child, Block):
            found += parts_of(child, f"{path}{name}.")
    return found
