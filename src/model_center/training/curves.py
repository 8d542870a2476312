"""Curves in TensorBoard and Weights & Biases, which need not be installed unless asked for."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from model_center.errors import ConfigError
from model_center.optional import package

WANDB_ID = "wandb-id"  # a file in the folder of a run: by its content W&B knows the run again
WITHOUT = "leave it out"


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
        module = package(
            "torch.utils.tensorboard",
            "--curves tensorboard",
            ConfigError,
            name="tensorboard",
            instead=WITHOUT,
        )
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
        project: its project there; the run has the folder's name. None for the project that W&B
            is set up for, by WANDB_PROJECT for example.

    Raises:
        ConfigError: where the package `wandb` is missing.
    """

    def __init__(self, folder: pathlib.Path, project: str | None) -> None:
        module = package("wandb", "--curves wandb", ConfigError, instead=WITHOUT)
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


def requested_curves(args: argparse.Namespace) -> tuple[str, ...]:
    """What `--curves` and its other names, `--tensorboard` and `--wandb`, ask for."""
    by_name = ("tensorboard",) if args.tensorboard else ()
    project = (f"wandb:{args.wandb}",) if args.wandb else ()
    return (*args.curves, *by_name, *project)


def open_curves(names: Iterable[str], folder: pathlib.Path, first_step: int) -> list[Curves]:
    """Where the curves of a run go.

    Args:
        names: "tensorboard", "wandb" or "wandb:PROJECT"; a name that is there twice counts once.
        folder: of the run.
        first_step: the last step done before; points after it are written anew.

    Raises:
        ConfigError: for another name, or a package that is missing.
    """
    opened: list[Curves] = []
    for name in dict.fromkeys(names):
        kind, _, project = name.partition(":")
        if kind == "wandb":
            opened.append(Wandb(folder, project or None))
        elif name == "tensorboard":
            opened.append(TensorBoard(folder, first_step))
        else:
            raise ConfigError(
                f"curves {name!r}: expected 'tensorboard', 'wandb' or 'wandb:PROJECT'."
            )
    return opened


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in values.items() if isinstance(value, int | float)}
