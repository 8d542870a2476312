"""What the packages use of torch that is not public, all of it: where a new version of torch is
looked at first.

Known to work with torch 2.8 to 2.13. `torch._dynamo` and its neighbours are named in functions
only: torch loads its compiler, which takes a second, when one of them is first named.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_leaves,
    tree_map,
    tree_map_only,
    tree_unflatten,
)

__all__ = [
    "DeviceContext",
    "TorchDispatchMode",
    "TreeSpec",
    "tree_flatten",
    "tree_leaves",
    "tree_map",
    "tree_map_only",
    "tree_unflatten",
]  # of this module's imports; its own functions are below


def torch_version() -> tuple[int, ...]:
    """Major and minor."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


# torch 2.13 renamed the two flat collectives and deprecated the names that 2.8 to 2.12 have.
all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_flat = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# Tensors
# --------------------------------------------------------------------------------------------------

# A context: functions of a subclass of Tensor are torch's own inside, without its
# `__torch_function__`.
plain_functions = torch._C.DisableTorchFunctionSubclass
# A `__torch_function__` that does nothing: results are plain tensors.
no_torch_function: Any = torch._C._disabled_torch_function_impl
make_subclass: Callable[..., Any] = torch.Tensor._make_subclass
make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
# Kernels that ask this tensor for its memory get a RuntimeError.
throw_on_data_ptr: Callable[[torch.Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
scaled_mm: Callable[..., torch.Tensor] = torch._scaled_mm
fused_adamw: Callable[..., None] = torch._fused_adamw_


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place; 0 of one that does not count."""
    return 0 if tensor.is_inference() else tensor._version


def num_users(storage: torch.UntypedStorage) -> int:
    """How many tensors and other objects share a storage."""
    count: int = torch._C._storage_Use_Count(storage._cdata)
    return count


def sharing_versions() -> contextlib.AbstractContextManager[object]:
    """Tensors that are detached inside share their version counters with the originals, where
    autograd is saving, too.
    """
    guard: contextlib.AbstractContextManager[object] = torch._C._SetExcludeDispatchKeyGuard(
        torch._C.DispatchKey.ADInplaceOrView, False
    )
    return guard


def is_mutable(operator: Any) -> bool:
    """Whether an operator, as `__torch_dispatch__` gets it, writes into an argument."""
    found: bool = operator._schema.is_mutable
    return found


def argument_names(operator: Any) -> list[str]:
    """Of an operator, in order."""
    return [argument.name for argument in operator._schema.arguments]


def overloads(target: object) -> list[Any]:
    """The operators that a graph's node may call; none if it calls something else."""
    if isinstance(target, torch._ops.OpOverloadPacket):
        return [getattr(target, name) for name in target.overloads()]
    return [target] if isinstance(target, torch._ops.OpOverload) else []


# Autograd
# --------------------------------------------------------------------------------------------------

NO_PASS = -1
# The number of the backward pass that runs on this thread, or NO_PASS.
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
# Whether the backward pass that runs will come to this node.
will_run: Callable[[Any], bool] = torch._C._will_engine_execute_node
# The number that the next node of the graph gets on this thread.
next_node_number: Callable[[], int] = torch._C._autograd._get_sequence_nr


def in_backward() -> bool:
    """Whether autograd runs a backward pass on this thread, recomputation included."""
    return backward_pass() != NO_PASS


def node_number(node: Any) -> int:
    """The number of a node: larger than those of all nodes that were made on its thread before."""
    number: int = node._sequence_nr()
    return number


def at_end_of_backward(function: Callable[[], None]) -> None:
    """Have autograd call it when the backward pass that runs now has ended."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


def saved_tensors_hooks() -> object:
    """Those that are in force now, or None."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# Who looks at what is computed
# --------------------------------------------------------------------------------------------------

num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
function_modes: Callable[[], list[Any]] = _get_current_function_mode_stack
is_tracing: Callable[[], bool] = torch._C._is_tracing
has_global_module_hooks: Callable[[], bool] = torch.nn.modules.module._has_any_global_hook


def in_transform() -> bool:
    """Whether a transform of torch.func (grad, vmap, jvp and the like) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether something is called with what goes through the module."""
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def renew_weights(module: torch.nn.RNNBase) -> None:
    """The list from which a recurrent module reads its weights, made anew of its parameters."""
    module._flat_weights = [module._parameters[name] for name in module._flat_weights_names]


# TorchScript
# --------------------------------------------------------------------------------------------------

last_script_graph: Callable[[], Any] = torch._C._last_executed_optimized_graph


def compiled_script(module: torch.jit.ScriptModule) -> Any:
    """The compiled module behind one of TorchScript's, with `getattr` and `setattr`."""
    return module._c


def script_attributes(module: torch.jit.ScriptModule) -> Iterable[str]:
    """Names of all attributes of compiled code, parameters and buffers among them."""
    names: Iterable[str] = module._concrete_type.get_attributes()
    return names


# The compiler
# --------------------------------------------------------------------------------------------------


def find_backend(name: str) -> Callable[..., Any]:
    """The backend that torch.compile has under this name."""
    found: Callable[..., Any] = torch._dynamo.lookup_backend(name)
    return found


def inductor_mode(name: str) -> dict[str, Any]:
    """The options of inductor that a mode of torch.compile stands for."""
    return dict(torch._inductor.list_mode_options(name))


def has_joint_pass() -> bool:
    """Whether the program has given inductor a pass over forward and backward together."""
    return torch._inductor.config.joint_custom_post_pass is not None


def graph_pass_class() -> type[Any]:
    """The base of passes that inductor runs over graphs."""
    found: type[Any] = torch._inductor.custom_graph_pass.CustomGraphPass
    return found


def lowering_config() -> Any:
    """Of the compiler's part between forward graphs and backends."""
    return torch._functorch.config


def patches_compiler() -> bool:
    """Whether compiled code may change options of its own compilation, for `run_any_number`."""
    return getattr(torch._dynamo, "patch_dynamo_config", None) is not None


def run_any_number(function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, to be compiled: whole numbers that are attributes of modules are
    variables.
    """
    with torch._dynamo.patch_dynamo_config(allow_unspec_int_on_nn_module=True):
        return function(*args)


def several_graphs_error() -> type[Exception]:
    """What the compiler raises that has found code which it cannot take into one graph."""
    found: type[Exception] = torch._dynamo.exc.Unsupported
    return found


def too_many_forms_error() -> type[Exception]:
    """What the compiler raises that has compiled a function too often."""
    found: type[Exception] = torch._dynamo.exc.FailOnRecompileLimitHit
    return found


def is_of_compiler(error: BaseException, files: Iterable[str]) -> bool:
    """Whether the compiler raised it, or it came through the compiler: `files` are those of its
    traceback.
    """
    return (
        isinstance(error, torch._dynamo.exc.TorchDynamoException)
        or torch._dynamo.convert_frame.__file__ in files
    )


# Devices and ranks
# --------------------------------------------------------------------------------------------------


def end_allocation(device_index: int, pool: Any) -> None:
    """Of a CUDA graph into its pool; RuntimeError if there is none."""
    torch._C._cuda_endAllocateToPool(device_index, pool)


def is_collective(function: Any) -> bool:
    """Whether it is one of torch.distributed's, whose writes no version counter sees."""
    return getattr(function, "namespace", "") == "c10d" or getattr(
        function, "__module__", ""
    ).startswith("torch.distributed")


def wait_for(result: Any) -> None:
    """Until what a collective returns has arrived: its work, or a tuple with it."""
    for x in result if isinstance(result, tuple | list) else (result,):
        wait = getattr(x, "wait", None)
        if wait is not None:
            wait()


def default_store() -> Any:
    """The store of the run, through which ranks have found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def store_of(group: Any) -> Any:
    """The store of a process group."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def symmetric_memory() -> Any:
    """Torch's class itself: the module of functions around it imports much more, which every
    program would pay for.
    """
    return torch._C._distributed_c10d._SymmetricMemory
