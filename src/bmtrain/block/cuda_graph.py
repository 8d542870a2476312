"""bmtrain.cuda_graph: models that are not wrapped run as one compiled graph each."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable
from typing import Any

import torch

from bmtrain.block.block import Block
from bmtrain.block.kinds import become_distributed, is_made_distributed
from bmtrain.block.whole_model import as_whole
from bmtrain.errors import ConfigurationError
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter


def cuda_graph(function: Any = None, *, max_graphs: int = 8) -> Any:
    """Run the models of a function as CUDA graphs: the GPU no longer waits for Python.

    Models that BMTrainModelWrapper has wrapped do so by themselves if they are small. This is for
    those whose class derives from DistributedModule. Each becomes one compiled graph (see the
    page on speed), and everything else in the function runs as it is written. What cannot be
    compiled, or does not fit, is named in a warning and runs block by block, with the same values.
    On a CPU models run compiled only after `init_distributed(compile=True)`.

    Args:
        function: a model, or a function that uses its models by name: variables, arguments, or
            attributes of the object whose method it is. None to decorate with
            `@cuda_graph(max_graphs=2)`.
        max_graphs: shapes of arguments that are recorded; others run compiled.

    Returns:
        The model itself, or a function with the same arguments and results.

    Raises:
        ConfigurationError: for what is neither, or `max_graphs` below 1.
    """
    if not isinstance(max_graphs, int) or max_graphs < 1:
        raise ConfigurationError(f"cuda_graph got max_graphs {max_graphs!r}: expected 1 or more.")
    if function is None:
        return functools.partial(cuda_graph, max_graphs=max_graphs)
    if not callable(function):
        raise ConfigurationError(
            f"cuda_graph got {type(function).__name__}: expected a model or a function."
        )
    if isinstance(function, torch.nn.Module):
        _record([function], max_graphs)
        return function
    has_looked = False

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal has_looked
        if not has_looked:
            world.current("cuda_graph")
            has_looked = True
            if not _record([*_used_by(function), *args, *kwargs.values()], max_graphs):
                name = getattr(function, "__qualname__", type(function).__name__)
                warn(f"cuda_graph: {name} uses no sharded model by name; it runs as it is.")
        return function(*args, **kwargs)

    return run


def _used_by(function: Any) -> Iterable[Any]:
    """What the function names outside of itself."""
    if isinstance(function, functools.partial):
        return [*_used_by(function.func), *function.args, *function.keywords.values()]
    function = inspect.unwrap(function)
    if not inspect.isroutine(function):  # an object with a method __call__
        return [function]
    if not inspect.isfunction(inspect.unwrap(getattr(function, "__func__", function))):
        return []
    names = inspect.getclosurevars(function)
    own = [function.__self__] if inspect.ismethod(function) else []
    return [*own, *names.nonlocals.values(), *names.globals.values()]


def _record(used: Iterable[Any], max_graphs: int) -> bool:
    """Let the models among these objects, or among their attributes, run whole; whether any is."""
    found = False
    for each in used:
        own = [] if isinstance(each, torch.nn.Module) else getattr(each, "__dict__", {}).values()
        for model in (each, *own):
            if isinstance(model, torch.nn.Module) and any(
                isinstance(param, DistributedParameter) for param in model.parameters()
            ):
                found = True
                is_own = isinstance(model, DistributedModule) and not isinstance(model, Block)
                if is_own and not is_made_distributed(model):
                    become_distributed(model, _recorded(as_whole, num_graphs=max_graphs))
    return found


# The same object for the same arguments: classes are made once for each.
_recorded = functools.cache(functools.partial)
