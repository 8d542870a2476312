"""Curves in TensorBoard and Weights & Biases, which need not be installed unless asked for."""

from __future__ import annotations

import importlib
import pathlib
from collections.abc import Mapping
from typing import Any, Protocol

from model_center.errors import ConfigError

WANDB_ID = "wandb-id"  # a file in the folder of a run: by its content W&B knows the run again


class Curves(Protocol):
    """Takes the numbers of steps."""

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """One point for each value that is a number."""
        ...

    def close(self) -> None:
        """Write what is waiting."""
        ...


class TensorBoard:
    """Writes TensorBoard's files in a folder.

    Raises:
        ConfigError: where the package `tensorboard` is missing.
    """

    def __init__(self, folder: pathlib.Path, first_step: int) -> None:
        module = _imported("torch.utils.tensorboard", "tensorboard")
        # Steps after `first_step`, of an interrupted run that now goes on from there, are hidden.
        self._writer: Any = module.SummaryWriter(str(folder), purge_step=first_step + 1)

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """One point for each value that is a number."""
        for name, value in _numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what is waiting."""
        self._writer.close()


class Wandb:
    """Sends to Weights & Biases: a run that goes on in its folder goes on there too.

    Args:
        folder: of the run.
        project: its project there; the run has the folder's name.

    Raises:
        ConfigError: where the package `wandb` is missing.
    """

    def __init__(self, folder: pathlib.Path, project: str) -> None:
        module = _imported("wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        known = folder / WANDB_ID
        before = known.read_text(encoding="utf-8").strip() if known.exists() else None
        self._run: Any = module.init(
            project=project, name=folder.name, dir=str(folder), id=before, resume="allow"
        )
        known.write_text(f"{self._run.id}\n", encoding="utf-8")

    def add(self, step: int, values: Mapping[str, Any]) -> None:
        """One point for each value that is a number; steps that are there already stay."""
        self._run.log(_numbers(values), step=step)

    def close(self) -> None:
        """Send what is waiting."""
        self._run.finish()


def _imported(module: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--{package} needs the package {package}: pip install {package}, or leave it out."
        ) from error


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
