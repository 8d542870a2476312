"""Triton kernels beside their twins: written at the top of a file, compiled when they are launched.

Triton is slow to import, and is installed only where CUDA is. So a kernel is a plain function until
its first launch, and `tl` a name that has no value before.
"""

from __future__ import annotations

import contextlib
import functools
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import triton.language as tl
else:
    tl = None  # in the source of a kernel: Triton's language

__all__ = ["Kernel", "kernel", "takes", "tl"]


def takes(x: torch.Tensor) -> bool:
    """Whether kernels run where a tensor is; on a CPU torch's operators do the same."""
    return x.device.type != "cpu"


class Kernel:
    """A function in Triton's language; a call launches it.

    Its source sees, of the globals of its file: other kernels, and whole numbers and floats, as
    constants.

    Args:
        function: the source, annotated as Triton wants it.
        options: of `triton.jit`.
    """

    def __init__(self, function: Callable[..., Any], **options: Any) -> None:
        self._function, self._options = function, options

    def __call__(self, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        """Launch so many programs on the device of the first argument, a tensor; none for a 0.

        Of the constants, dtypes of torch are Triton's to the kernel.
        """
        if 0 in grid:
            return
        for name, value in constants.items():
            if isinstance(value, torch.dtype):
                constants[name] = _dtype(value)
        device = arguments[0].device
        # Triton launches on the current device, wherever the tensors are.
        on_device: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext() if device.type == "cpu" else torch.cuda.device(device)
        )
        with on_device:
            self.compiled[grid](*arguments, **constants)

    @functools.cached_property
    def compiled(self) -> Any:
        """The kernel as Triton has it."""
        import triton
        import triton.language

        source = self._function
        # A namespace of its own: that of the file has neither Triton's language nor its kernels.
        names: dict[str, Any] = {"__name__": source.__module__, "tl": triton.language}
        for name in source.__code__.co_names:
            value = source.__globals__.get(name)
            if isinstance(value, Kernel):
                names[name] = value.compiled
            elif type(value) in (int, float):
                names[name] = triton.language.constexpr(value)
        function = types.FunctionType(source.__code__, names, source.__name__)
        function.__annotations__, function.__doc__ = source.__annotations__, source.__doc__
        return triton.jit(function, **self._options)


#: makes a kernel of a function, which other kernels call, too
kernel: Callable[[Callable[..., Any]], Any] = Kernel


@functools.cache
def _dtype(dtype: torch.dtype) -> Any:
    import triton.language

    return vars(triton.language)[str(dtype).removeprefix("torch.")]
