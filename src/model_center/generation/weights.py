"""The weights that a generation computes with: whole on this rank, from its start to its end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from model_center.generation.resident import ResidentWeights


class Weights(Protocol):
    """Weights of a model that are whole on this rank."""

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Inside, they are there. Collective where they are gathered."""

    def memory(self) -> Sequence[object]:
        """What to hold for them to be gathered to the same memory again, and only if they have
        changed; nothing where they are the model's own.
        """

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the model computes with them."""

    def addresses(self) -> Sequence[object]:
        """Where they are in memory while they are held, and how they lie there: a recorded step
        reads them so.
        """

    def fits(self, spare: int) -> bool:
        """Whether this rank has room for them, and for `spare` further bytes."""


class OwnWeights:
    """Those of a model that is not sharded."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def memory(self) -> Sequence[object]:
        """None but the model's."""
        return ()

    def bound(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to do."""
        return contextlib.nullcontext()

    def addresses(self) -> Sequence[object]:
        """As in Weights."""
        return [
            (parameter.data_ptr(), parameter.shape, parameter.stride(), parameter.dtype)
            for parameter in self._model.parameters()
        ]

    def fits(self, spare: int) -> bool:
        """They are there."""
        return True


def weights_of(model: torch.nn.Module, *, is_sharded: bool) -> Weights | None:
    """The weights of a model; None if they cannot be whole on a rank."""
    return ResidentWeights.of(model) if is_sharded else OwnWeights(model)


@contextlib.contextmanager
def without_plans(device: torch.device) -> Iterator[None]:
    """Attention by kernels that take any length as it is.

    cuDNN's make a plan for each new length, for milliseconds; in generation every length is new.
    """
    backends = torch.backends.cuda
    if device.type == "cpu" or not (backends.cudnn_sdp_enabled() and backends.math_sdp_enabled()):
        yield
        return
    backends.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        backends.enable_cudnn_sdp(True)
