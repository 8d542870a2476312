"""DistributedModule: a module with distributed parameters that saves and loads full tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from bmtrain.errors import ParameterError
from bmtrain.runtime import world
from bmtrain.runtime.config import device_of_state_dicts
from bmtrain.shard.listing import full_values
from bmtrain.shard.parameter import DistributedParameter, check_made_of_whole
from bmtrain.shard.parting import check_same_state
from bmtrain.shard.slices import Slices
from bmtrain.shard.window import Window, WindowSource
from bmtrain.torch_internals import loader_of, mover_of


class DistributedModule(torch.nn.Module):
    """An nn.Module with distributed parameters that saves and loads them as full tensors.

    Its attributes are the parameters: they can be frozen, written, hooked and tied, and functions
    that compute with them gather them; inside a running Block they are the block's gathered views.
    `state_dict()` is collective and returns full tensors on the CPU on every rank
    (`config["save_param_to_cpu"] = False`: on the rank's device). They are copies, but an in-place
    write to one is written to the model. `load_state_dict` takes full tensors.
    """

    is_block = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module; in training it draws random numbers of this rank's own (see `Draws`).

        Not one with Blocks below it, which do: all ranks must decide alike which of them run.
        """
        is_own = torch.compiler.is_compiling() or not (self.training and world.is_initialized())
        draws = None if is_own else world.current().draws
        if draws is None or draws.are_own or has_blocks(self):
            return super().__call__(*args, **kwargs)
        with draws.own():
            return super().__call__(*args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        registered = self.__dict__.get("_parameters", {}).get(name)
        if (
            isinstance(registered, DistributedParameter)
            and isinstance(value, torch.Tensor)
            and not isinstance(value, torch.nn.Parameter)
        ):
            raise ParameterError(
                f"cannot assign a tensor to the distributed parameter {name!r}: to tie "
                "two parameters, assign the parameter of the "
                f"other module; to change its values, write them, module.{name}.data.copy_(values)."
            )
        check_made_of_whole(name, value)
        super().__setattr__(name, value)

    def __prepare_scriptable__(self) -> NoReturn:
        """ParameterError from `torch.jit.script`."""
        raise ParameterError(
            "a sharded model cannot be scripted: script one that is not sharded, after "
            "plain.load_state_dict(model.state_dict())."
        )

    def sharded_modules(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """(prefix, module) of the modules whose parameters this one saves and loads: itself.

        The class of the first says how.
        """
        yield "", self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """For copies; pickling, which would write this rank's slices, is refused by `_Kind`."""
        made: Any = super().__reduce_ex__(protocol)
        return (_remade, (_Kind(type(self)),), *made[2:])

    def settle_buffers(self) -> None:
        """Make this module's buffers ready for rank 0 to save. Collective."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]  # torch's overloads
        """Full tensors on the CPU of every rank, under the names of the unwrapped module.

        Collective; `args` and `kwargs` are those of nn.Module.state_dict.
        """
        self.settle_buffers()
        keep = kwargs.pop("keep_vars", False)
        into = kwargs.get("destination")
        known = set(into) if into is not None else set()
        _, owner = next(iter(self.sharded_modules()))
        save = super().state_dict if owner is self else owner.state_dict
        out: dict[str, Any] = save(*args, keep_vars=True, **kwargs)
        fresh = [name for name in out if name not in known]
        # buffers too: a program may have registered old values of parameters
        sharded = ((name, out[name]) for name in fresh if isinstance(out[name], Slices))
        for name, whole in full_values(sharded):
            value = whole.to(device_of_state_dicts())
            out[name] = Window.onto(value, WindowSource(value, out[name], is_snapshot=True))
        for name in fresh:
            if isinstance(out[name], torch.Tensor) and not keep:
                out[name] = out[name].detach()
        return out

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load full tensors; each rank copies its slices. Collective; returns what torch returns.

        Args:
            state_dict: full tensors by the names of `state_dict()`, on any device, of any dtype.
            strict: whether missing and unexpected names are a RuntimeError, as in torch. Tensors of
                another shape always are.

        Raises:
            ParameterError: for `assign=True`, which would replace the shards.
            RanksDivergedError: on all ranks, for parameters that differ between them; the model is
                as it was. Buffers may differ.
        """
        if assign:
            raise ParameterError(
                "load_state_dict(assign=True) would replace the shards of a distributed "
                "module: use assign=False."
            )
        params = dict(self.named_parameters())
        # All of them before one is copied; a module compares its own again, which its hooks may
        # have renamed. Where whole tensors stand in their places one rank may load alone.
        if any(isinstance(param, DistributedParameter) for param in params.values()):
            check_same_state(state_dict, params)
        return super().load_state_dict(state_dict, strict=strict)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: Any,
        unexpected_keys: Any,
        error_msgs: list[str],
    ) -> None:
        own = {
            f"{prefix}{path}{name}": param
            for path, module in self.sharded_modules()
            for name, param in module._parameters.items()
            if isinstance(param, DistributedParameter)
        }
        check_same_state(state_dict, own)  # before any slice is copied
        for key, param in own.items():
            value = state_dict.get(key)
            if param.cut.split is not None and isinstance(value, torch.Tensor):
                if value.shape == param.cut.whole_shape:
                    state_dict[key] = param.cut.part(value)
                else:
                    error_msgs.append(
                        f"size mismatch for {key}: the state has {tuple(value.shape)}, "
                        f"the model {tuple(param.cut.whole_shape)}."
                    )
                    state_dict[key] = param.detach()  # already reported above
        _, owner = next(iter(self.sharded_modules()))
        is_cutting = isinstance(owner, DistributedModule)  # would cut once more
        load = loader_of(super(DistributedModule, owner) if is_cutting else owner)
        load(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)

    def _apply(
        self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True
    ) -> DistributedModule:
        """Move or cast everything but the shards, which stay in their storage.

        Raises:
            ParameterError: for a cast or a move of a sharded parameter.
        """
        hidden: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        _, owner = next(iter(self.sharded_modules()))
        for _, module in self.sharded_modules():
            sharded = {
                name: param
                for name, param in module._parameters.items()
                if isinstance(param, DistributedParameter)
            }
            for name, param in sharded.items():
                probe = fn(param.local[:0])
                if probe.dtype != param.dtype or probe.device != param.device:
                    raise ParameterError(
                        f"parameter {name!r} is sharded as {param.dtype} on "
                        f"{param.device} and cannot become {probe.dtype} on "
                        f"{probe.device}: choose dtype and device before it is sharded."
                    )
            hidden.append((module, sharded))
        for module, sharded in hidden:
            module._parameters.update(dict.fromkeys(sharded))
        try:
            apply = super()._apply if owner is self else mover_of(owner)
            apply(fn, *([] if recurse else [False]))
        finally:
            for module, sharded in hidden:
                module._parameters.update(sharded)
        return self


def has_blocks(module: torch.nn.Module) -> bool:
    """Whether there is a Block below `module`."""
    return any(
        (isinstance(child, DistributedModule) and child.is_block) or has_blocks(child)
        for child in module._modules.values()
        if child is not None
    )


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The class of a sharded module, in the recipe by which `copy` makes another.

    Raises:
        ParameterError: when it is pickled.
    """

    kind: type

    def __deepcopy__(self, memo: Any) -> _Kind:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ParameterError(
            f"a sharded {self.kind.__name__} cannot be pickled, because a rank holds only slices "
            "of it: save its values, bmtrain.save(model, file) or torch.save(model.state_dict(), "
            "file), and load them into a new model."
        )


def _remade(kind: _Kind) -> Any:
    made: Any = kind.kind
    return made.__new__(made)
