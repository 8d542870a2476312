"""Subclasses for modules sharded in place: of the original class and of DistributedModule."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import CheckpointError, ParameterError
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.shard.listing import in_whole
from bmtrain.shard.module import DistributedModule

Method = Callable[..., Any]
_CLASS: Any = vars(object)["__class__"]  # Python's descriptor


def once_per_kind(make: Method) -> Method:
    """Makes one class of each class, and forgets it with its last module.

    `functools.cache` would keep a class for ever, and a sharded model that one of its methods holds
    by a closure.
    """
    made = weakref.WeakValueDictionary[Any, Any]()

    def find(kind: Any, *args: Any) -> Any:
        key = id(kind), *args  # what is made holds `kind`
        return made.get(key) or made.setdefault(key, make(kind, *args))

    return find


def become_distributed(
    module: torch.nn.Module, forward: Callable[[Any], Method] | None = None
) -> None:
    """Change the class of `module` to one that gathers parameters when they are read.

    The object stays the same, so a replaced `forward`, hooks and references to it still work. Of a
    class that was made here before, the original counts.

    Args:
        module: becomes distributed.
        forward: makes the class's method `forward`, given the original class.
    """
    kind: Any = module.__class__ if is_made_distributed(module) else type(module)
    _CLASS.__set__(module, _distributed(kind, forward))


def is_made_distributed(module: torch.nn.Module) -> bool:
    """Whether `become_distributed` has made the module's class."""
    return vars(type(module)).get("compile") is _compile


def has_methods_of_whole_models(module: torch.nn.Module) -> bool:
    """Whether the module has methods that need to know that it is sharded."""
    return bool(_methods_of_whole_models(type(module)))


@once_per_kind
def _distributed(kind: Any, forward: Callable[[Any], Method] | None) -> Any:
    # Programs look up `module.__class__` and its name: report the original class. Python itself
    # uses type().
    names = {"__doc__": kind.__doc__, "__module__": kind.__module__}
    names |= {"__class__": property(lambda _: kind, _become), "compile": _compile}
    if forward is not None:
        names["forward"] = forward(kind)
    # transformers looks up conversions of a model's tensors by the name of its type.
    bases = (kind,) if issubclass(kind, DistributedModule) else (DistributedModule, kind)
    return type(kind.__name__, bases, names | _methods_of_whole_models(kind))


def _methods_of_whole_models(kind: Any) -> dict[str, Method]:
    """Methods of transformers' and peft's models that are adapted to several ranks, or refused."""
    told = {
        "save_pretrained": ("is_main_process", _saving),
        "generate": ("synced_gpus", _generating),
        "merge_and_unload": ("safe_merge", _merging),
    }
    out = {}
    for name, (argument, adapt) in told.items():
        method = getattr(kind, name, None)
        if inspect.isfunction(method) and _takes(kind, name, argument):
            out[name] = adapt(method)
    if inspect.isfunction(getattr(kind, "resize_token_embeddings", None)):
        out["resize_token_embeddings"] = _refuse_to_resize
    return out


def _takes(kind: Any, name: str, argument: str) -> bool:
    """Whether a method has the argument, or hands keywords on to one of a base class that has it.

    OpenPrompt's `PromptForGeneration.generate` hands them on to that of transformers.
    """
    for base in kind.__mro__:
        method = vars(base).get(name)
        if inspect.isfunction(method):
            params = inspect.signature(method).parameters
            if argument in params:
                return True
            if all(param.kind is not inspect.Parameter.VAR_KEYWORD for param in params.values()):
                return False
    return False


def _refuse_to_resize(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Replaces a method that would write to gathered copies, and the write be lost."""
    raise ParameterError(
        "resize_token_embeddings cannot change the weights of a sharded model: call it before "
        "bmtrain.BMTrainModelWrapper(model)."
    )


def _become(self: torch.nn.Module, kind: type) -> None:
    """Setter of `__class__`, which torch's parametrizations change while they are there.

    Raises:
        ParameterError: for a class that is not made of the module's own alone, or is its base:
            torch's `fully_shard` mixes in another.
    """
    own = self.__class__
    if kind.__mro__[1:] != own.__mro__ and own.__mro__[1:] != kind.__mro__:
        raise ParameterError(
            f"a sharded model cannot become a {kind.__name__}: it is sharded already; use it as it "
            "is, or build a new one."
        )
    _CLASS.__set__(self, _distributed(kind, None))


def _compile(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
    """Replaces `nn.Module.compile`: a sharded model compiles by default, where it compiles."""


def _call_with(
    method: Method, given: tuple[Any, ...], kwargs: dict[str, Any], name: str, change: Method
) -> Any:
    """Call a method with `change(*what the program gives for an argument)` in the place of that.

    Args:
        given: the positional arguments, the model first.
        name: of the argument, named by the method or handed on among other keywords.
    """
    bound = inspect.signature(method).bind(*given, **kwargs)
    params, place = bound.signature.parameters, bound.arguments
    if name not in params:
        (more,) = (p.name for p in params.values() if p.kind is inspect.Parameter.VAR_KEYWORD)
        place = bound.arguments.setdefault(more, {})
    place[name] = change(*([place[name]] if name in place else []))
    return method(*bound.args, **bound.kwargs)


def _saving(method: Method) -> Method:
    """Rank 0 writes what it would of a model that is not sharded; a failure on one rank raises on
    all.

    The method finds whole parameters on every rank: transformers leaves out names of tied ones by
    the memory that they share, and peft does more on the rank that writes than on others.
    """

    @functools.wraps(method)
    def save_pretrained(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = world.current("save_pretrained")
        result, failure = None, None

        def writes(wanted: Any = True) -> bool:
            return bool(wanted) and current.rank == 0

        try:
            with in_whole(self):
                result = _call_with(method, (self, *args), kwargs, "is_main_process", writes)
        except Exception as error:
            failure = error
        told = collectives.gather_objects(
            None if failure is None else repr(failure), current.mesh.world, "save_pretrained"
        )
        if failure is not None:
            raise failure
        for rank, reason in enumerate(told):
            if reason is not None:
                raise CheckpointError(f"save_pretrained failed on rank {rank}: {reason}")
        return result

    return save_pretrained


def _generating(method: Method) -> Method:
    """Default `synced_gpus` to True on several ranks.

    Ranks whose sequences have finished go on running the model until all have: else the gathers of
    the other ranks would hang.
    """

    @functools.wraps(method)
    def generate(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _call_with(
            method,
            (self, *args),
            kwargs,
            "synced_gpus",
            lambda wanted=None: True if wanted is None and world.world_size() > 1 else wanted,
        )

    return generate


def _merging(method: Method) -> Method:
    """Write into the configuration whether embedding and head are one parameter afterwards.

    peft compares their addresses, which sharded weights do not have, and leaves a configuration
    that says "tied" where it gets none: files of a model that came apart would lack the head.
    """

    @functools.wraps(method)
    def merge_and_unload(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        model = method(self, *args, **kwargs)
        if getattr(getattr(model, "config", None), "tie_word_embeddings", False):
            ends = (model.get_input_embeddings(), model.get_output_embeddings())
            first, last = (getattr(end, "weight", None) for end in ends)
            if first is not None and last is not None and first is not last:
                model.config.tie_word_embeddings = False
                warn(
                    "the embedding and the head are no longer tied after merging: "
                    "config.tie_word_embeddings is False now."
                )
        return model

    return merge_and_unload
