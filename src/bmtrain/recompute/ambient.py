"""Ambient state of a forward pass: generators, autocast, the default device, torch's switches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from bmtrain.runtime.seeding import Draws, is_same_state, read_generator, write_generator
from bmtrain.torch_internals import DeviceContext, function_modes

# Getter and setter of each. They select kernels, and so which tensors are saved for backward.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
)


class AmbientState:
    """The ambient state at the time of construction.

    Args:
        draws: of the rank.
        generators: those that the pass may draw from.
    """

    def __init__(self, draws: Draws, generators: Iterable[Any]) -> None:
        self._draws, self._are_own = draws, draws.are_own
        self._generators = [(generator, read_generator(generator)) for generator in generators]
        self._switches = [read() for read, _ in _SWITCHES]
        self._default_device = _default_device()
        self._autocast = [
            (kind, _autocast_of(kind)) for kind in dict.fromkeys((draws.device.type, "cpu"))
        ]

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        """Set the recorded state inside, then the present one again.

        Generators continue where the program left them: a recomputation draws nothing new.
        """
        now = [(generator, read_generator(generator)) for generator, _ in self._generators]
        switches = [read() for read, _ in _SWITCHES]
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._draws.kept(self._are_own))
            if _default_device() is not self._default_device:
                stack.enter_context(self._default_device or torch.device("cpu"))
            for kind, state in self._autocast:
                if state != _autocast_of(kind):
                    enabled, dtype, caches = state
                    stack.enter_context(
                        torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=caches)
                    )
            try:
                _set(self._switches, switches)
                for (generator, state), (_, present) in zip(self._generators, now, strict=True):
                    if not is_same_state(state, present):
                        write_generator(generator, state)
                yield
            finally:
                for generator, state in now:
                    write_generator(generator, state)
                _set(switches, [read() for read, _ in _SWITCHES])


def _set(wanted: Iterable[Any], present: Iterable[Any]) -> None:
    for (_, write), value, found in zip(_SWITCHES, wanted, present, strict=True):
        if value != found:
            write(value)


def _default_device() -> DeviceContext | None:
    for mode in reversed(function_modes()):
        if isinstance(mode, DeviceContext):
            return mode
    return None


def _autocast_of(kind: str) -> tuple[bool, torch.dtype, bool]:
    return (
        torch.is_autocast_enabled(kind),
        torch.get_autocast_dtype(kind),
        torch.is_autocast_cache_enabled(),
    )
