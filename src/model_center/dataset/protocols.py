"""What a dataset may offer beside rows, and how to ask for it; what an example of a task is."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch.utils.data import Dataset, Subset


@runtime_checkable
class Collates(Protocol):
    """A dataset that knows how its rows become a batch, by padding for example."""

    def collate(self, rows: Sequence[Any]) -> Any:
        """The batch of `rows`, each what `__getitem__` returned."""


@runtime_checkable
class HasEpochs(Protocol):
    """A dataset whose rows differ from epoch to epoch, such as random spans."""

    def set_epoch(self, epoch: int) -> None:
        """Rows are those of `epoch`, from 0 on, from now on, in live worker processes too."""


@runtime_checkable
class Sharded(Protocol):
    """A dataset that holds one rank's part of the rows itself."""

    @property
    def num_shards(self) -> int:
        """Among how many readers the rows are divided; 1 when all are here."""


@runtime_checkable
class Stateful(Protocol):
    """A stream that can tell how far it has been read, and go on from there."""

    def state_dict(self) -> dict[str, Any]:
        """The place in the stream."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from that place."""


def shards_of(dataset: Any) -> int:
    """Among how many readers the rows of a dataset are divided by itself; 1 when all are there."""
    return dataset.num_shards if isinstance(dataset, Sharded) else 1


def may_be_empty(dataset: Any) -> bool:
    """Whether a dataset says that it may have no rows: that of a test split that is missing."""
    return bool(getattr(dataset, "may_be_empty", False))


class Epoch:
    """The number of an epoch, in memory that long-lived worker processes share."""

    def __init__(self) -> None:
        self._number = torch.zeros((), dtype=torch.int64).share_memory_()

    @property
    def number(self) -> int:
        """The epoch, counted from 0."""
        return int(self._number)

    @number.setter
    def number(self, epoch: int) -> None:
        self._number.fill_(epoch)


def collate_of(dataset: Dataset[Any]) -> Callable[[Sequence[Any]], Any] | None:
    """The dataset's own way to make batches, also under torch's `Subset`; None when it has none."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    return dataset.collate if isinstance(dataset, Collates) else None


def begin_epoch(dataset: Dataset[Any], epoch: int) -> None:
    """Tell the dataset which epoch begins, also under torch's `Subset`, if it wants to know."""
    while isinstance(dataset, Subset):
        dataset = dataset.dataset
    if isinstance(dataset, HasEpochs):
        dataset.set_epoch(epoch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example:
    """What a task's prompt is made of, and what the answer is.

    `fields` are texts by name (ReCoRD's `entities` is a list of texts). `label` is None where the
    file holds none, as in the test split. `group` names the question that several examples belong
    to (MultiRC, ReCoRD), `answers` are the texts that count as right for it (ReCoRD).
    """

    fields: Mapping[str, Any]
    label: int | None
    group: str = ""
    answers: tuple[str, ...] = ()


# The examples that one line of a file holds. Raises KeyError for a missing field, ValueError for a
# wrong one.
Reader = Callable[[str], list[Example]]
