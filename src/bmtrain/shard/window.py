"""Window: a gathered tensor, or a view of one, whose writes reach the sharded tensor behind it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch

from bmtrain.errors import ParameterError, StaleParameterError
from bmtrain.runtime import world
from bmtrain.shard import elementwise
from bmtrain.shard.slices import Slices
from bmtrain.torch_internals import (
    is_collective,
    plain_functions,
    tree_leaves,
    tree_map_only,
    version_of,
    wait_for,
)


class WindowSource:
    """A gathered whole tensor that has windows.

    Args:
        whole: all of it. Written values may bring a graph with them, if it has none itself.
        behind: the sharded tensor it was gathered from.
        is_snapshot: whether it may still be read after `behind` has changed.
    """

    def __init__(self, whole: torch.Tensor, behind: Slices, *, is_snapshot: bool = False) -> None:
        # what is in a graph is not kept alive, and not written
        self.has_graph = whole.requires_grad
        self.whole = whole.detach() if self.has_graph else whole
        self._behind, self._is_snapshot = behind, is_snapshot
        self._num_written = behind.num_written

    def check_read(self) -> None:
        """StaleParameterError if `behind` has changed since, unless this is a snapshot."""
        if not self._is_snapshot:
            self._refuse_stale("was read")

    def _refuse_stale(self, what: str) -> None:
        if self._behind.num_written != self._num_written:
            raise StaleParameterError(
                f"a view or state dict of a sharded parameter {what} after the parameter had "
                "changed: it holds a copy of earlier values. "
                "Take the view, or state_dict(), again."
            )

    def write_back(self) -> None:
        """Copy what was written into `whole` to the slices behind it. Collective.

        Raises:
            StaleParameterError: if `behind` has changed since: the copy would undo that change.
        """
        self._refuse_stale("was written to")
        if self.whole.requires_grad and torch.is_grad_enabled():
            self._behind.take_whole_in_graph(self.whole)
        else:
            self._behind.take_whole(self.whole.detach())
        self._num_written = self._behind.num_written


class Window(torch.Tensor):
    """Whole values of a sharded tensor. Views of it are windows too, other results are ordinary.

    In one process a view of a parameter shares its memory. Here the whole is a copy: a write to a
    window is copied to the slice behind it, and a window whose values have changed since is
    refused.

    Raises:
        StaleParameterError: when the values behind it have been changed in other ways since it was
            made. A snapshot, as state_dict() gives them, can still be read then, but not written.
        ParameterError: when a window that has a graph is written, as in one process the parameter
            itself could not be.
    """

    _gathered: WindowSource  # the tensor this is a view of

    @classmethod
    def onto(cls, view: torch.Tensor, gathered: WindowSource) -> Window:
        """The window `view`, which shares memory with the gathered tensor."""
        with plain_functions():
            window = view.as_subclass(cls)
        window._gathered = gathered
        return window

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        windows = list(
            {id(x): x for x in tree_leaves((args, kwargs)) if isinstance(x, Window)}.values()
        )
        for window in windows:
            window._gathered.check_read()
        with plain_functions():
            before = [version_of(window) for window in windows]
        if not all(
            issubclass(kind, Window) or kind is torch.nn.Parameter
            for kind in types
            if kind is not torch.Tensor
        ):
            # Another subclass takes part: its `__torch_function__` gets ordinary tensors.
            with plain_functions():
                plain = {id(window): window.as_subclass(torch.Tensor) for window in windows}
            args, kwargs = tree_map_only(Window, lambda x: plain[id(x)], (args, kwargs))
            out = func(*args, **kwargs)
        else:
            with plain_functions():
                out = func(*args, **kwargs)
        with plain_functions():
            may_write = is_collective(func)
            written = [
                w
                for w, version in zip(windows, before, strict=True)
                if may_write or version_of(w) != version
            ]
            uncounted = written_uncounted(func, args, kwargs)
            written += [window for window in windows if any(window is x for x in uncounted)]
        if may_write:
            wait_for(out)  # an asynchronous collective may still be writing the window
        for window in written:
            window._write_back()
        if getattr(func, "__name__", "") in ("numpy", "__array__"):
            return as_copy(out)
        return tree_map_only(torch.Tensor, functools.partial(_shown, windows), out)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy of the values, not tied to the parameter."""
        with plain_functions():
            memo[id(self)] = copied = self.detach().as_subclass(torch.Tensor).clone()
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as an ordinary tensor."""
        with plain_functions():
            return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __copy__(self) -> torch.Tensor:
        with plain_functions():
            return copy.copy(self.as_subclass(torch.Tensor))

    def _write_back(self) -> None:
        if self._gathered.has_graph and torch.is_grad_enabled():
            raise ParameterError(
                "a view of a sharded parameter that requires grad was changed in "
                "place: use torch.no_grad() or param.data."
            )
        self._gathered.write_back()


def written_uncounted(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """What a function writes in inference mode, where version counters stand still.

    Found by the function's name and its `out`.
    """
    if not torch.is_inference_mode_enabled():
        return []
    out = kwargs.get("out")
    outs = list(out) if isinstance(out, tuple | list) else [] if out is None else [out]
    return [*args[:1], *outs] if elementwise.writes(getattr(func, "__name__", "")) else outs


def as_copy(array: Any) -> Any:
    """A numpy array of gathered values, read-only on the CPU.

    There it would share memory with the gathered copy, and writes would not reach the parameter.
    From a GPU it is a copy in one process too, and may be written.
    """
    if world.is_initialized() and world.device().type == "cpu":
        array.flags.writeable = False
    return array


def _shown(windows: Sequence[Window], out: torch.Tensor) -> torch.Tensor:
    """What the program gets for the result `out`: a window if it shares memory with one."""
    with plain_functions():
        if isinstance(out, Window) and any(out is window for window in windows):
            return out
        plain = out.as_subclass(torch.Tensor) if isinstance(out, Window) else out
        for window in windows:
            if shares_memory(plain, window):
                return Window.onto(plain, window._gathered)
    return plain


def shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two ordinary tensors are views of the same memory."""
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr() and a.numel() > 0
    except (RuntimeError, NotImplementedError):  # no storage: a sparse layout
        return False
