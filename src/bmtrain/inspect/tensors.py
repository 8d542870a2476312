"""Tensors recorded in forward and backward passes, and their statistics over all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NoReturn

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.inspect.statistics import add_ranks, entry, measure, statistics_of
from bmtrain.runtime import world
from bmtrain.shard.recording import Position, Recorder
from bmtrain.shard.unshard import Unshard


@dataclasses.dataclass(frozen=True)
class Key:
    """The identity of a recorded tensor, the same on all ranks that record it.

    Attributes:
        group, name: as given to `record_tensor`.
        segment, stage: where it was recorded (see `Position`).
        count: its index among the records of equal group, name, segment and stage.
    """

    group: str | None
    name: str
    segment: int
    stage: int
    count: int

    @property
    def is_pipelined(self) -> bool:
        """Whether it was recorded in a pipelined pass: odd segments are passes."""
        return self.segment % 2 == 1

    def text(self, index: int) -> str:
        """`[group.]index.name`."""
        return full_name(self.name, self.group, index)


def full_name(name: str, group: str | None, index: int) -> str:
    """`[group.]index.name`."""
    return f"{index}.{name}" if group is None else f"{group}.{index}.{name}"


def in_order(keys: Iterable[Key]) -> list[Key]:
    """Each key once, sorted by segment and stage and otherwise in the order given."""
    return sorted(dict.fromkeys(keys), key=lambda key: (key.segment, key.stage))


def number(keys: Iterable[Key]) -> dict[Key, int]:
    """Number the keys of each name and group from 0, in the order given."""
    counts: dict[tuple[str | None, str], int] = {}
    numbers: dict[Key, int] = {}
    for key in keys:
        numbers[key] = counts.get((key.group, key.name), 0)
        counts[key.group, key.name] = numbers[key] + 1
    return numbers


def shape_of_all(shapes: Collection[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of all ranks' tensors concatenated along dim 0; -1 for dims in which they differ.

    A 0-dim tensor counts as one row.
    """
    rows = [shape or (1,) for shape in shapes]
    if len({len(shape) for shape in rows}) > 1:
        return (-1,)
    first, *others = zip(*rows, strict=True)
    return (sum(first), *(sizes[0] if len(set(sizes)) == 1 else -1 for sizes in others))


class Part:
    """A copy of a tensor at the time of recording, and the gradient that backward computes."""

    def __init__(self, x: torch.Tensor) -> None:
        self.values = x.detach().clone()
        self._hook = x.register_hook(self._add) if x.requires_grad else None

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient, summed over all backward passes so far."""
        return self.values.grad

    def close(self) -> None:
        """Remove the gradient hook."""
        if self._hook is not None:
            self._hook.remove()

    def _add(self, grad: torch.Tensor) -> None:
        before = self.values.grad
        self.values.grad = grad.detach().clone() if before is None else before + grad


class Record:
    """One recorded tensor on this rank, with one part per micro-batch in a pipelined pass."""

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}

    def add(self, x: torch.Tensor, micro_batch: int) -> None:
        """Keep a copy of `x` and hook its gradient."""
        self._parts[micro_batch] = Part(x)

    def close(self) -> None:
        """Remove the gradient hooks."""
        for part in self._parts.values():
            part.close()

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of all parts."""
        return [tuple(part.values.shape) for part in self._parts.values()]

    def flat(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values of all parts, 1-D, and their gradients likewise; None if there are none."""
        parts = list(self._parts.values())
        values = _joined([part.values.reshape(-1) for part in parts])
        if all(part.grad is None for part in parts):
            return values, None
        return values, _joined([_grad_or_zeros(part).reshape(-1) for part in parts])

    def tensor(self) -> torch.Tensor:
        """The values of all parts, concatenated along dim 0 by micro-batch, with `.grad`."""
        parts = [part for _, part in sorted(self._parts.items())]
        values = _joined([part.values for part in parts])
        if len(parts) > 1 and any(part.grad is not None for part in parts):
            values.grad = _joined([_grad_or_zeros(part) for part in parts])
        return values


class Inspector:
    """The tensors recorded on this rank while it is open; created by `inspect_tensor`."""

    def __init__(self, position: Position) -> None:
        self._begin = position.segment - position.segment % 2
        self._records: dict[Key, Record] = {}
        self._counts: dict[tuple[str | None, str, Position], int] = {}
        self._agreed: dict[Key, int] = {}  # indices across ranks, as of the last get_summary
        # the recorded tensors themselves, outside of pipelined passes
        self._in_graph: dict[Key, torch.Tensor] = {}

    def record(self, x: torch.Tensor, name: str, group: str | None, position: Position) -> None:
        """Keep a copy of `x` and hook its gradient."""
        count = self._counts.get((group, name, position), 0)
        self._counts[group, name, position] = count + 1
        # Count segments from the opening of this inspector. Ranks may have run different numbers of
        # pipelined passes before, and their keys for the same tensor would not match.
        key = Key(group, name, position.segment - self._begin, position.stage, count)
        self._records.setdefault(key, Record()).add(x, position.micro_batch)
        if not key.is_pipelined:
            self._in_graph[key] = x
            if x.requires_grad:
                x.retain_grad()

    def close(self) -> None:
        """Remove the gradient hooks; records and gradients so far are kept."""
        for record in self._records.values():
            record.close()

    @property
    def summary(self) -> list[dict[str, Any]]:
        """The tensors recorded on this rank, in order, for losses on activations (distillation).

        Each dict has name and group as recorded, summary_name (`[group.]index.name`), `tensor`, its
        shape and requires_grad, in BMTrain's format. The tensor is the recorded one, in the graph,
        with its gradient in `.grad`, and not a copy: the inspector keeps the graph alive.

        Raises:
            ConfigurationError: if anything was recorded in a pipelined pass, whose graph belongs to
                the pipeline.
        """
        if any(key.is_pipelined for key in self._records):
            raise ConfigurationError(
                "Inspector.summary: tensors of a pipelined pass cannot be taken into a "
                "loss; expected records of layers outside "
                "of a PipelineTransformerBlockList. get_tensor(name) and get_summary() "
                "show these too."
            )
        unknown = dict.fromkeys(
            ("min", "max", "mean", "std", "grad_mean", "grad_std", "inside_pipe")
        )
        names = {key: key.text(index) for key, index in number(in_order(self._in_graph)).items()}
        return [
            {
                "name": key.name,
                "summary_name": names[key],
                "group": key.group,
                "tensor": x,
                "shape": x.shape,
                "requires_grad": x.requires_grad,
                **unknown,
            }
            for key, x in self._in_graph.items()
        ]

    _summary = summary  # programs written for BMTrain use both names

    def get_summary(self) -> list[dict[str, Any]]:
        """Statistics of all tensors recorded on any rank, in the order of recording. Collective.

        Returns:
            On every rank, for each tensor, a dict with name (`[group.]index.name`), shape, std,
            mean, max, min, grad_std and grad_mean. They describe the tensors of all ranks that
            recorded it, concatenated along dim 0. In the shape, a dim in which ranks differ is -1.
            An undefined number is None, as in `inspect_model`.
        """
        current = world.current("get_summary")
        axis = current.mesh.world
        everyone = collectives.gather_objects(
            {key: record.shapes for key, record in self._records.items()}, axis, "get_summary"
        )
        shapes: dict[Key, list[tuple[int, ...]]] = {}
        for key, found in (pair for own in everyone for pair in own.items()):
            shapes.setdefault(key, []).extend(found)
        keys = in_order(shapes)
        self._agreed = number(keys)
        tensors = (
            x
            for key in keys
            for x in (self._records[key].flat() if key in self._records else (None, None))
        )
        statistics = statistics_of(add_ranks(measure(tensors, current.device), axis))
        return [
            entry(
                key.text(self._agreed[key]),
                shape_of_all(shapes[key]),
                statistics[2 * place],
                statistics[2 * place + 1],
            )
            for place, key in enumerate(keys)
        ]

    def get_tensor(
        self, name: str, group: str | None = None, index: int | None = None
    ) -> torch.Tensor:
        """A detached copy of a tensor recorded on this rank, with its gradient in `.grad`.

        Args:
            name, group: as recorded.
            index: the index of the record within its name and group, as in the summary; None for
                the first.

        Returns:
            The values, with the recorded shape, dtype and device; micro-batches of a pipelined pass
            are concatenated along dim 0. `.grad` is None if no backward pass has reached the tensor
            inside the context.

        Raises:
            KeyError: nothing of that name, group and index was recorded on this rank; the message
                has the closest names.
            RuntimeError: in a pipeline, `get_summary` has not been called since the last record. It
                numbers the records across stages.
        """
        numbers = self._numbers()
        known = {(key.group, key.name, numbers[key]): key for key in self._records}
        wanted = (
            min((i for g, n, i in known if (g, n) == (group, name)), default=0)
            if index is None
            else index
        )
        key = known.get((group, name, wanted))
        if key is None:
            _raise_unknown(
                full_name(name, group, wanted), [key.text(numbers[key]) for key in self._records]
            )
        return self._records[key].tensor()

    def _numbers(self) -> dict[Key, int]:
        """The index of every record of this rank."""
        if all(key in self._agreed for key in self._records):
            return self._agreed
        if any(key.is_pipelined for key in self._records):
            raise RuntimeError(
                "get_tensor: in a pipeline the index of a tensor depends on other "
                "stages: call get_summary() on every rank first."
            )
        return number(in_order(self._records))


@contextlib.contextmanager
def inspect_tensor() -> Iterator[Inspector]:
    """`with inspect_tensor() as inspector`: inside, `record_tensor` keeps copies of tensors.

    The copies live as long as the inspector. Gradients are kept if backward runs inside, too.
    Blocks with compiled code run uncompiled inside; other compiled code records nothing. Contexts
    may be nested: each inspector keeps its own copies.

    Raises:
        NotInitializedError: before `init_distributed`.
    """
    recorder = world.current("inspect_tensor").service(Recorder)
    inspector = Inspector(recorder.position)
    with recorder.listening(inspector):
        try:
            yield inspector
        finally:
            inspector.close()


def record_tensor(x: torch.Tensor, name: str, group: str | None = None) -> None:
    """Record `x`, an activation in model code, with all open inspectors.

    A no-op if no inspector is open, during recomputation, and in compiled code.

    Args:
        x: a tensor of any shape and dtype. A copy is kept, so `x` may be changed in place later.
        name: its name. Records of equal name and group are numbered in the order of recording.
        group: a prefix of the number: "encoder" and "hidden" give "encoder.0.hidden",
            "encoder.1.hidden", ...

    Raises:
        ConfigurationError: for a parameter (use `inspect_model`), for anything that is no tensor,
            and for a name or group that is no string or empty; also if no inspector is open.
    """
    if torch.compiler.is_compiling():  # a copy kept by Python would cause a graph break
        return
    _check(x, name, group)
    if world.is_initialized():
        world.current("record_tensor").service(Recorder).record(x, name, group)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Concatenate along dim 0, 0-dim parts as one row each; a single part stays as it is."""
    return parts[0] if len(parts) == 1 else torch.cat([torch.atleast_1d(part) for part in parts])


def _grad_or_zeros(part: Part) -> torch.Tensor:
    return torch.zeros_like(part.values) if part.grad is None else part.grad


def _check(x: torch.Tensor, name: str, group: str | None) -> None:
    if not isinstance(name, str) or not name:
        raise ConfigurationError(
            f"record_tensor got the name {name!r}: expected a string such as 'hidden'."
        )
    if not (group is None or (isinstance(group, str) and group)):
        raise ConfigurationError(
            f"record_tensor got the group {group!r} for {name!r}: expected a string or None."
        )
    if not isinstance(x, torch.Tensor):
        raise ConfigurationError(
            f"record_tensor got {type(x).__name__} as {name!r}: expected a tensor."
        )
    in_block = x.grad_fn is not None and x.grad_fn.name() == f"{Unshard.__name__}Backward"
    if isinstance(x, torch.nn.Parameter) or in_block:
        raise ConfigurationError(
            f"record_tensor got a parameter of shape {tuple(x.shape)} as {name!r}: "
            "expected an activation; "
            "inspect_model(model, pattern) shows parameters and their gradients."
        )


def _raise_unknown(wanted: str, known: list[str]) -> NoReturn:
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.0)
    there = (
        f"the nearest are {', '.join(map(repr, near))} of {len(known)}"
        if near
        else "nothing was recorded on this rank"
    )
    raise KeyError(f"no tensor {wanted!r} was recorded on this rank: {there}.")
