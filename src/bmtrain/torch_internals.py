"""Every non-public name of torch that the packages use: the first place to check on an upgrade.

Works with torch 2.8 to 2.13. `torch._dynamo` and its neighbours are named inside functions only:
naming one at import would load torch's compiler, which takes a second.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import inspect
import json
import logging
import operator
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as modules
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.dropout import _DropoutNd as Dropouts
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils._pytree import tree_map_only as _tree_map_only

__all__ = [
    "BatchNorm",
    "InstanceNorm",
    "DeviceContext",
    "Dropouts",
    "StorageWeakRef",
    "TorchDispatchMode",
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_unflatten",
]  # re-exports only; this module's own functions are below


TORCH_VERSION = tuple(map(int, torch.__version__.split(".")[:2]))  # major, minor


#: torch's function, which alone makes a tuple of a torch.Size
tree_map_only = functools.partial(_tree_map_only, is_leaf=lambda node: isinstance(node, torch.Size))


_Function = TypeVar("_Function", bound=Callable[..., Any])
_dynamo = torch._C._dynamo.eval_frame
# What a function calls is not traced either.
_UNTRACED = _dynamo._FrameExecStrategy(_dynamo._FrameAction.SKIP, _dynamo._FrameAction.SKIP)


def untraced(function: _Function, *, leaves_graphs: bool = True) -> _Function:
    """The function, which `torch.compile` of a program runs as it is, with all that it calls.

    Unlike `torch.compiler.disable` this does not load the compiler, which takes seconds.

    Args:
        leaves_graphs: whether graphs end where it is called, instead of containing it.
    """
    of_python: Any = function
    codes = [of_python.__code__]
    for code in codes:
        _dynamo.set_code_exec_strategy(code, _UNTRACED)
        codes += [x for x in code.co_consts if isinstance(x, types.CodeType)]
    if leaves_graphs:
        vars(function)["_torchdynamo_disable"] = True
    return function


def leave_untraced(packages: tuple[str, ...], in_graphs: tuple[str, ...]) -> None:
    """Make the functions and methods of loaded modules `untraced`. Functions may be in graphs.

    Args:
        packages: the modules, by how their names begin.
        in_graphs: those among them whose methods may be in graphs too.
    """
    for name in [x for x in sys.modules if x.startswith(packages)]:
        own = [x for x in vars(sys.modules[name]).values() if getattr(x, "__module__", "") == name]
        members = [y for x in own if isinstance(x, type) for y in vars(x).values()]
        for member in (*own, *members):
            parts = (member.fget, member.fset) if isinstance(member, property) else (member,)
            for function in map(inspect.unwrap, parts):
                if isinstance(function, types.FunctionType) and function.__module__ == name:
                    is_method = "." in function.__qualname__
                    untraced(function, leaves_graphs=is_method and not name.startswith(in_graphs))


# torch 2.13 renamed the two flat collectives and deprecated the names of 2.8 to 2.12.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def current_stream_number(device: torch.device) -> int:
    """Of the current CUDA stream of a device; 0 for a CPU. A tenth of torch.cuda's time."""
    return 0 if device.type == "cpu" else int(torch._C._cuda_getCurrentRawStream(device.index))


# Nested values
# --------------------------------------------------------------------------------------------------

_NO_TENSORS = frozenset({type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size})
#: types in which nothing has to be looked for
PLAIN = _NO_TENSORS | {torch.Tensor}


def tensors_of(out: Any) -> list[torch.Tensor]:
    """The tensors in `out`."""
    found: list[torch.Tensor] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x

    map_tensors(note, out)
    return found


def has_extra_state(module: torch.nn.Module) -> bool:
    """Whether a module gives a state beside tensors, and takes it back."""
    none, kind = torch.nn.Module, module.__class__  # that of a Block is its module's
    return (
        kind.get_extra_state is not none.get_extra_state
        and kind.set_extra_state is not none.set_extra_state
    )


def changes_state_dict(module: torch.nn.Module) -> bool:
    """Whether code that is not torch's adds to a module's state dict, or changes it."""
    own = module.__class__._save_to_state_dict, *module._state_dict_hooks.values()
    return any(x.__module__.partition(".")[0] not in ("torch", "bmtrain") for x in own)


def map_tensors(fn: Callable[[Any], Any], out: Any) -> Any:
    """`out` with `fn` applied to its tensors; the same object if none changes."""
    kind = type(out)
    if isinstance(out, torch.Tensor):
        return fn(out)
    if kind in _NO_TENSORS:
        return out
    # Every call of a block comes here, and torch's pytree takes ten times as long.
    if kind in (tuple, list, dict):
        values = out.values() if kind is dict else out
        mapped = [map_tensors(fn, value) for value in values]
        if all(map(operator.is_, mapped, values)):
            return out
        return dict(zip(out, mapped, strict=True)) if kind is dict else kind(mapped)
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        fields = [
            (field.name, getattr(out, field.name))
            for field in dataclasses.fields(out)
            # a property may compute, together with other ranks
            if field.init and not isinstance(getattr(kind, field.name, None), property)
        ]
        changed = {
            name: new for name, value in fields if (new := map_tensors(fn, value)) is not value
        }
        # transformers' outputs hold their values as items too
        is_dict = isinstance(out, dict) and bool(changed)
        made = dataclasses.replace(out, **changed) if is_dict else copy.copy(out)
        for name, new in () if is_dict else changed.items():
            object.__setattr__(made, name, new)
        return made if changed else out
    leaves, spec = tree_flatten(out)
    is_leaf = len(leaves) == 1 and leaves[0] is out
    mapped = leaves if is_leaf else [map_tensors(fn, leaf) for leaf in leaves]
    return out if all(map(operator.is_, mapped, leaves)) else tree_unflatten(mapped, spec)


# Tensors
# --------------------------------------------------------------------------------------------------

#: `x.copy_(y)` and `x.add_(y)` for each pair of two lists
copy_each_: Callable[..., None] = torch._foreach_copy_
add_each_: Callable[..., None] = torch._foreach_add_

# A context in which functions on a subclass of Tensor bypass its `__torch_function__`.
plain_functions = torch._C.DisableTorchFunctionSubclass
# A `__torch_function__` that does nothing: results are plain tensors.
no_torch_function: Any = torch._C._disabled_torch_function_impl
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
# Makes kernels that ask this tensor for its data pointer raise RuntimeError.
throw_on_data_ptr: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
fused_adamw: Callable[..., None] = torch._fused_adamw_


def version_of(tensor: torch.Tensor) -> int:
    """The version counter of a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def versions_of(tensors: Sequence[torch.Tensor]) -> list[int]:
    """`version_of` each; without a call in Python where none is an inference tensor."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [version_of(tensor) for tensor in tensors]


_version = operator.attrgetter("_version")


def num_users(storage: torch.UntypedStorage) -> int:
    """Number of tensors and other objects that share a storage."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


#: TorchScript's callables, which do not ask their arguments for `__torch_function__`
SCRIPTED: Any = (torch.jit.ScriptFunction, torch._C.ScriptMethod)


def tensors_over(storages: Iterable[StorageWeakRef]) -> Iterator[torch.Tensor]:
    """The tensors of this process, wherever Python holds them, that lie in the memory of storages
    which are alive. If any is, a walk over all objects: a tenth of a second.
    """
    wanted = {reference.cdata for reference in storages if not reference.expired()}
    with plain_functions():
        for thing in gc.get_objects() if wanted else ():
            if issubclass(type(thing), torch.Tensor):  # `isinstance` would ask proxies
                with contextlib.suppress(RuntimeError):  # it has no storage
                    if thing.untyped_storage()._cdata in wanted:
                        yield thing


#: A context in which detached tensors share version counters, also with what autograd saved.
sharing_versions: Callable[[], contextlib.AbstractContextManager[object]] = functools.partial(
    torch._C._SetExcludeDispatchKeyGuard, torch._C.DispatchKey.ADInplaceOrView, False
)
#: The class of functions in a graph that call another graph.
HigherOrderOperator: type = torch._ops.HigherOrderOperator


def is_mutable(operator: Any) -> bool:
    """Whether an operator, as passed to `__torch_dispatch__`, writes into an argument."""
    found: bool = operator._schema.is_mutable
    return found


def argument_names(function: Any) -> list[str]:
    """The names of an operator's arguments, in order; none for a function of Python."""
    schema = getattr(function, "_schema", None)
    return [] if schema is None else [argument.name for argument in schema.arguments]


def overloads(target: object) -> list[Any]:
    """The operators that a graph node's target may call; empty if it is no operator."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


# Autograd
# --------------------------------------------------------------------------------------------------

NO_PASS = -1
# The id of the backward pass running on this thread, or NO_PASS.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
# Whether the running backward pass will execute this node.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
# The sequence number of the next autograd node created on this thread.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
# The innermost active saved-tensor hooks, or None.
active_saved_tensors_hooks: Callable[[], object] = functools.partial(
    torch._C._autograd._top_saved_tensors_default_hooks, True
)
# The message of `disable_saved_tensors_hooks` where it is active, or None.
hooks_are_disabled: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)
# Has autograd call a function at the end of the running backward pass.
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback
)


def in_backward() -> bool:
    """Whether a backward pass, recomputation included, is running on this thread."""
    return backward_pass() != NO_PASS


COMPILED_NODE = "CompiledFunctionBackward"  # name of compiled code's node in a graph


# A node's sequence number: larger than those of all earlier nodes of the same thread.
node_number: Callable[[Any], int] = operator.methodcaller("_sequence_nr")


# Modes, hooks and transforms that observe computation
# --------------------------------------------------------------------------------------------------

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
dispatch_modes: Callable[[], list[Any]] = _get_current_dispatch_mode_stack
is_tracing: Callable[[], bool] = torch._C._is_tracing
#: The mode by which torch.export and make_fx trace, or None: `dispatch_mode(PROXIES)`.
dispatch_mode = torch._C._get_dispatch_mode
PROXIES = torch._C._TorchDispatchModeKey.PROXY
has_global_module_hooks: Callable[[], bool] = modules._has_any_global_hook
#: what loads a module's own entries of a state dict; classes override it
loader_of: Callable[[Any], Any] = operator.attrgetter("_load_from_state_dict")
#: what moves and casts a module; classes override it
mover_of: Callable[[Any], Any] = operator.attrgetter("_apply")
#: those of forward passes, and which of them take keywords
global_module_hooks = (
    modules._global_forward_hooks,
    modules._global_forward_pre_hooks,
    modules._global_forward_hooks_with_kwargs,
)


def in_transform() -> bool:
    """Whether a torch.func transform (grad, vmap, jvp, ...) or forward-mode AD is active."""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.autograd.forward_ad._current_level >= 0
    )


def hooks_of(module: torch.nn.Module) -> tuple[Mapping[int, Any], ...]:
    """The module's own hooks of forward and backward, which change with it."""
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


def renew_weights(module: torch.nn.RNNBase, *, is_sharded: bool) -> None:
    """Rebuild the list from which a recurrent module reads its weights.

    While they are sharded, the list has none: `flatten_parameters`, which programs call, does
    nothing then.
    """
    names = module._flat_weights_names
    # The module stands for a weight that is computed: torch reads that anew in the next call.
    weights: list[Any] = [module._parameters.get(name, module) for name in names]
    module._flat_weights = [None for _ in weights] if is_sharded else weights
    if is_sharded or any(x is module for x in weights):
        module._flat_weight_refs = list(map(weakref.ref, weights))


def lay_out_weights(module: torch.nn.RNNBase) -> None:
    """Lay a recurrent module's weights out for the kernels of GPUs, in other memory, as the module
    itself would in its next call. Not where some are computed: that reads them.
    """
    if all(x is not module for x in module._flat_weights):
        module._init_flat_weights()


# TorchScript
# --------------------------------------------------------------------------------------------------

last_script_graph: Callable[[], Any] = torch._C._last_executed_optimized_graph


# The C++ module behind a ScriptModule, with `getattr` and `setattr`.
compiled_script: Callable[[torch.jit.ScriptModule], Any] = operator.attrgetter("_c")


# The compiler
# --------------------------------------------------------------------------------------------------


def find_backend(name: str) -> Callable[..., Any]:
    """The backend registered with torch.compile under this name."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def inductor_mode(name: str) -> dict[str, Any]:
    """The inductor options behind a mode of torch.compile."""
    return dict(torch._inductor.list_mode_options(name))


def inductor_config() -> Any:
    """Inductor's options, as the program has set them."""
    return torch._inductor.config


def graph_pass_class() -> type[Any]:
    """The base class of inductor's custom graph passes."""
    found: type[Any] = torch._inductor.custom_graph_pass.CustomGraphPass
    return found


def lowering_config() -> Any:
    """The configuration of AOTAutograd, between dynamo and the backends."""
    return torch._functorch.config


# Inductor's option: the functions that may be cached, by name, each with a key of its code.
CACHEABLE = "unsafe_marked_cacheable_functions"


def call_of_autograd_function() -> str:
    """The name of the operator that calls an autograd function, as in CACHEABLE."""
    operator = torch.ops.higher_order.autograd_function_apply
    return f"{operator.__module__}.{operator.__name__}"


# In the meta of a graph's recomputed region: what says which results are kept, if any are.
CONTEXT_FN = "_checkpoint_context_fn"


def patches_compiler() -> bool:
    """Whether compiled code may patch its own compile options, which `run_any_number` needs."""
    return getattr(torch._dynamo, "patch_dynamo_config", None) is not None


def run_any_number(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, compiled with integer attributes of modules as dynamic values."""
    with torch._dynamo.patch_dynamo_config(allow_unspec_int_on_nn_module=True):
        return function(*args)


def told_once() -> contextlib.AbstractContextManager[object]:
    """Inside, functions compile without what they log by methods `..._once` of loggers."""
    known = [method for name, method in vars(logging.Logger).items() if name.endswith("_once")]
    found: contextlib.AbstractContextManager[object] = torch._dynamo.config.patch(
        ignore_logging_functions={*torch._dynamo.config.ignore_logging_functions, *known}
    )
    return found


def size_at_hand(size: int | torch.SymInt) -> int | None:
    """A size in a traced graph: of one that varies, that of the inputs it was traced with.

    None if it depends on data. Unlike `int`, it does not fix the size.
    """
    if isinstance(size, int):
        return size
    return size.node.hint if size.node.has_hint() else None


def too_many_forms_error() -> type[Exception]:
    """The error of the compiler when a function reaches the recompile limit."""
    found: type[Exception] = torch._dynamo.exc.FailOnRecompileLimitHit
    return found


def is_of_compiler(error: BaseException, files: Iterable[str]) -> bool:
    """Whether the compiler raised `error` or it passed through the compiler.

    `files` are the file names in its traceback.
    """
    return (
        isinstance(error, torch._dynamo.exc.TorchDynamoException)
        or torch._dynamo.convert_frame.__file__ in files
    )


# Devices and ranks
# --------------------------------------------------------------------------------------------------


#: Ends allocation into a CUDA graph's pool, given the device's index and the pool; RuntimeError if
#: none is active. A torch without CUDA has none.
end_allocation: Any = getattr(torch._C, "_cuda_endAllocateToPool", None)
# The descriptors of a tensor's gradient, under both of its names.
native_gradients: tuple[Any, ...] = (torch.Tensor.grad, torch.Tensor._grad)


def is_of_torch(function: Any) -> bool:
    """Whether `function` is torch's own, which its name tells.

    An operator or a function of a program may bear the name of one.
    """
    if isinstance(function, torch._ops.OpOverload | torch._ops.OpOverloadPacket):
        return f"{function}".startswith(("aten.", "prims."))
    module = getattr(function, "__module__", None)
    return module is None or f"{module}.".startswith("torch.")


def is_collective(function: Any) -> bool:
    """Whether `function` is one of torch.distributed's, whose writes no version counter records."""
    return getattr(function, "namespace", "") == "c10d" or getattr(
        function, "__module__", ""
    ).startswith("torch.distributed")


def run_collective(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call a function of torch.distributed and wait for its result, which is returned.

    An operator is called with `async_op=True`: without, NCCL returns a null work handle, and torch
    crashes when it makes an object of Python of it.
    """
    names = argument_names(function)
    if "async_op" in names:
        place = names.index("async_op")
        kwargs = {**kwargs, **dict(zip(names[place:], args[place:], strict=False))}
        args, kwargs["async_op"] = args[:place], True
    out = function(*args, **kwargs)
    wait_for(out)
    return out


def wait_for(result: Any) -> None:
    """Wait for the result of a collective: its work handle, or a tuple that contains it."""
    for x in result if isinstance(result, tuple | list) else (result,):
        wait = getattr(x, "wait", None)
        if wait is not None:
            wait()


#: The store through which the ranks of the run found each other.
default_store: Callable[[], Any] = dist.distributed_c10d._get_default_store
#: The key-value store of a process group.
store_of: Callable[[Any], Any] = dist.distributed_c10d._get_process_group_store


#: Torch's C++ class of symmetric memory, if it has one. The public Python module around it imports
#: much more, at a cost for every program.
symmetric_memory: Any = getattr(torch._C._distributed_c10d, "_SymmetricMemory", None)


def flight_record() -> str:
    """The last three collectives that NCCL has begun and not ended, by torch's flight recorder.

    Empty where the recorder is off, or torch has none.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    try:
        entries = json.loads(dump()).get("entries", []) if dump is not None else []
    except (RuntimeError, ValueError) as error:
        return f"the flight recorder: {error}"
    active = [entry for entry in entries if entry.get("state") != "completed"]
    return "; ".join(
        f"NCCL {entry.get('profiling_name')} of {entry.get('input_sizes')}, number "
        f"{entry.get('collective_seq_id')} of group {entry.get('process_group')}: "
        f"{entry.get('state')}"
        for entry in active[-3:]
    )


# Tensors without memory, and programs that are traced but not compiled
# --------------------------------------------------------------------------------------------------


def without_memory() -> contextlib.AbstractContextManager[Any]:
    """A context in which tensors have shape, dtype and device, and no memory."""
    module = importlib.import_module("torch._subclasses.fake_tensor")
    mode: contextlib.AbstractContextManager[Any] = module.FakeTensorMode(allow_non_fake_inputs=True)
    return mode


def has_no_memory(x: torch.Tensor) -> bool:
    """Whether operations on the tensor are traced: by `without_memory`, or behind Dynamo."""
    detect = importlib.import_module("torch._guards").detect_fake_mode
    return detect([x]) is not None


def lower_as_inductor(
    graph: torch.fx.GraphModule,
    inputs: Sequence[torch.Tensor],
    take: Callable[..., Any],
    patches: dict[str, Any],
) -> Callable[..., Any]:
    """The graph split by inductor into forward and backward, each given to `take`.

    No code is made of them: `take(graph, inputs, **options)` returns what is called in its place.
    """
    module = importlib.import_module("torch._inductor.compile_fx")
    lowered: Callable[..., Any] = module.compile_fx(
        graph, inputs, inner_compile=take, config_patches=patches
    )
    return lowered
