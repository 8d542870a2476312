"""An opened checkpoint: headers when it is opened, then full tensors or parts of them."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import torch


@dataclasses.dataclass(frozen=True)
class Header:
    """The shape and dtype of one tensor in a file, known before its values are read."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Source:
    """An opened checkpoint.

    Attributes:
        path: the file or folder.
        headers: the tensors' headers by name.
        others: the values that are not tensors, by name.
        has_extra: whether it would hold extra states of modules, if these have any.
    """

    has_extra = True

    def __init__(
        self, path: pathlib.Path, headers: Mapping[str, Header], others: Mapping[str, Any]
    ) -> None:
        self.path = path
        self.headers = headers
        self.others = others

    def file_of(self, name: str) -> pathlib.Path:
        """The file that holds `name`."""
        return self.path

    def part(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, 1-D, on the CPU, in the file's dtype.

        A source has this or `read` of its own.
        """
        size = (stop - start) * self.headers[name].dtype.itemsize
        return self.read(name, start, stop, torch.empty(size, dtype=torch.uint8, device="cpu"))

    def mapped(self, name: str) -> torch.Tensor:
        """The full tensor; where the format allows, a memory-mapped view of the file: its pages are
        read on first access.
        """
        return self.whole(name)

    def read(self, name: str, start: int, stop: int, scratch: torch.Tensor) -> torch.Tensor:
        """Elements [start, stop) of the flattened tensor, in memory, in any shape.

        Args:
            scratch: uint8, 1-D, on the CPU: memory that the result may use, large enough for all
                rows that the elements touch.
        """
        values = self.part(name, start, stop)
        return scratch[: values.nbytes].view(values.dtype).copy_(values)

    def whole(self, name: str) -> torch.Tensor:
        """The full tensor, in its own shape."""
        shape = self.headers[name].shape
        return self.part(name, 0, torch.Size(shape).numel()).view(shape)
