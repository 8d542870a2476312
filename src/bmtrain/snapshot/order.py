"""What a program asks to be saved: the same on all ranks, and what JSON can hold."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from bmtrain.errors import CheckpointError
from bmtrain.optim.flat import parameters_of
from bmtrain.optim.manager import OptimManager
from bmtrain.runtime.arguments import COUNT, check

_SHOWN = 120  # characters of a value in a message


def described(
    step: int,
    model: torch.nn.Module,
    optim_manager: OptimManager | None,
    facts: Mapping[str, Any] | None,
    only: Collection[str] | None,
) -> dict[str, str]:
    """What all ranks must give `save` alike, as texts.

    The parameters of optimizers are among it, in their order: states are kept by number, and each
    rank writes its part of them.

    Raises:
        CheckpointError: for facts that JSON does not give back as they are.
    """
    check("CheckpointManager.save", CheckpointError, step=(step, COUNT))
    return {
        "step": str(step),
        "facts": _as_json(facts),
        "only": "None" if only is None else str(sorted(only)),
        "optim_manager": "None" if optim_manager is None else "an OptimManager",
        "optimizers": str(names_of(model, optim_manager)),
    }


def names_of(model: torch.nn.Module, optim_manager: OptimManager | None) -> list[list[str]]:
    """The names of each optimizer's parameters, in their order: "another" if not the model's."""
    names = {id(param): name for name, param in model.named_parameters()}
    optimizers = [] if optim_manager is None else optim_manager.optimizers
    params = [parameters_of(optimizer.param_groups) for optimizer in optimizers]
    return [[names.get(id(param), "another") for param in one] for one in params]


def check_names(saved: Sequence[Sequence[str]], own: Sequence[Sequence[str]]) -> None:
    """CheckpointError for optimizers that have the saved ones' parameters in another order.

    States are kept by number: each parameter would go on with the state of another.
    """
    for number, (before, now) in enumerate(zip(saved, own, strict=False)):
        if list(before) != list(now) and sorted(before) == sorted(now):
            at = next(n for n, (a, b) in enumerate(zip(before, now, strict=True)) if a != b)
            raise CheckpointError(
                f"optimizer {number} was saved with its parameters in another order: number {at} "
                f"was {before[at]!r} and is {now[at]!r}. Give them to it in the same order."
            )


def check_order(own: Mapping[str, str], first: Mapping[str, str]) -> None:
    """CheckpointError unless this rank asks for what rank 0 does."""
    for name, value in own.items():
        if value != first[name]:
            raise CheckpointError(
                f"save got other {name} than rank 0: {_from_difference(value, first[name])}. "
                "Nothing was saved. Give all ranks the same; what each has for itself is `state`."
            )


def _from_difference(own: str, first: str) -> str:
    """Both texts, from shortly before where they part."""
    at = next((n for n, (a, b) in enumerate(zip(own, first, strict=False)) if a != b), 0)
    start = max(at - _SHOWN // 2, 0)
    here, there = (
        ("... " if start else "") + text[start : start + _SHOWN] for text in (own, first)
    )
    return f"{here} here, {there} there"


def _as_json(facts: Mapping[str, Any] | None) -> str:
    given = dict(facts or {})
    try:
        text = json.dumps(given, allow_nan=False, sort_keys=True)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"save got facts that JSON cannot hold ({error}). {_CURE}") from error
    back = json.loads(text)
    for name, value in given.items():
        if name not in back or back[name] != value:
            raise CheckpointError(
                f"save got the fact {name!r}: {str(value)[:_SHOWN]}, which JSON would give back as "
                f"{str(back.get(str(name)))[:_SHOWN]}. {_CURE}"
            )
    return text


_CURE = (
    "Facts are finite numbers, texts, lists and dicts with texts as keys; tensors, tuples and the "
    "like are kept in `state`."
)
