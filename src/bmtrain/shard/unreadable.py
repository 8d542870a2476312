"""What `.grad` shows while a CUDA graph is captured."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from bmtrain.errors import ParameterError
from bmtrain.torch_internals import make_wrapper_subclass


class Unreadable(torch.Tensor):
    """Stands for a gradient whose values and memory are known after the replay only.

    It can be replaced by None, as clearing gradients does. Everything else raises ParameterError,
    which ends the capture.
    """

    @staticmethod
    def like(param: torch.Tensor) -> Unreadable:
        """In the place of the gradient of `param`; without memory."""
        found: Unreadable = make_wrapper_subclass(
            Unreadable, param.shape, dtype=param.dtype, device=param.device
        )
        return found

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _refused()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        raise _refused()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch says no more than Any
        return "Unreadable()"


def _refused() -> ParameterError:
    return ParameterError(
        "gradients are read inside: they are summed after each replay, so read and change them "
        "after the function"
    )
