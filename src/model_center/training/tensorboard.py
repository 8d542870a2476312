"""Curves for TensorBoard, which need not be installed unless they are asked for."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Mapping
from typing import Any

from model_center.errors import ConfigError


class Curves:
    """Writes numbers of steps into TensorBoard's files in a folder.

    Raises:
        ConfigError: where the package `tensorboard` is missing.
    """

    def __init__(self, folder: pathlib.Path, first_step: int) -> None:
        try:
            module = importlib.import_module("torch.utils.tensorboard")
        except ImportError as error:
            raise ConfigError(
                "--tensorboard needs the package tensorboard: pip install tensorboard, or "
                "leave it out."
            ) from error
        # Steps after `first_step`, of an interrupted run that now goes on from there, are hidden.
        self._writer: Any = module.SummaryWriter(str(folder), purge_step=first_step + 1)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """One point for each value that is a number."""
        for name, value in values.items():
            if isinstance(value, int | float):
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is waiting."""
        self._writer.close()
