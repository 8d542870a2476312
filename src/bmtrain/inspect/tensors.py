"""inspect_tensor and record_tensor: values and gradients of activations, as a model computes
them.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError
from bmtrain.inspect.moments import add_ranks, measure, statistics_of
from bmtrain.inspect.records import Key, full_name, in_order, number, shape_of_all
from bmtrain.inspect.summary import entry
from bmtrain.runtime import world
from bmtrain.shard.recording import Position, Recorder
from bmtrain.shard.unshard import Unshard


class Part:
    """A copy of what was recorded, as it was then, and the gradient that backward computes for
    it.
    """

    def __init__(self, x: torch.Tensor) -> None:
        self.values = x.detach().clone()
        self._hook = x.register_hook(self._add) if x.requires_grad else None

    @property
    def grad(self) -> torch.Tensor | None:
        """The sum over all backward passes so far."""
        return self.values.grad

    def close(self) -> None:
        """Take no more gradients."""
        if self._hook is not None:
            self._hook.remove()

    def _add(self, grad: torch.Tensor) -> None:
        before = self.values.grad
        self.values.grad = grad.detach().clone() if before is None else before + grad


class Record:
    """One recorded tensor on this rank, in parts where it was recorded once for each
    micro-batch.
    """

    def __init__(self) -> None:
        self._parts: dict[int, Part] = {}

    def add(self, x: torch.Tensor, micro_batch: int) -> None:
        """Keep a copy of `x`, and let its gradient come here."""
        self._parts[micro_batch] = Part(x)

    def close(self) -> None:
        """Take no more gradients."""
        for part in self._parts.values():
            part.close()

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of all parts."""
        return [tuple(part.values.shape) for part in self._parts.values()]

    def flat(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """All values and their gradients, (n,) each: whatever the shapes of the parts."""
        parts = list(self._parts.values())
        values = _joined([part.values.reshape(-1) for part in parts])
        if all(part.grad is None for part in parts):
            return values, None
        return values, _joined([_grad_or_zeros(part).reshape(-1) for part in parts])

    def tensor(self) -> torch.Tensor:
        """The values of all parts in order of micro-batches, along dim 0, with their gradient."""
        parts = [part for _, part in sorted(self._parts.items())]
        values = _joined([part.values for part in parts])
        if len(parts) > 1 and any(part.grad is not None for part in parts):
            values.grad = _joined([_grad_or_zeros(part) for part in parts])
        return values


class Inspector:
    """What was recorded on this rank while it was open; made by `inspect_tensor`."""

    def __init__(self, position: Position) -> None:
        self._begin = position.segment - position.segment % 2
        self._records: dict[Key, Record] = {}
        self._counts: dict[tuple[str | None, str, Position], int] = {}
        self._agreed: dict[Key, int] = {}  # the indices, when the ranks last spoke of them
        # what was recorded itself, outside of pipelined passes
        self._in_graph: dict[Key, torch.Tensor] = {}

    def record(self, x: torch.Tensor, name: str, group: str | None, position: Position) -> None:
        """Keep a copy of `x`, and let its gradient come here."""
        count = self._counts.get((group, name, position), 0)
        self._counts[group, name, position] = count + 1
        # Passes before this inspector was opened do not count: ranks may have had different numbers
        # of them.
        key = Key(group, name, position.segment - self._begin, position.stage, count)
        self._records.setdefault(key, Record()).add(x, position.micro_batch)
        if not key.is_pipelined:
            self._in_graph[key] = x
            if x.requires_grad:
                x.retain_grad()

    def close(self) -> None:
        """Take no more gradients. What is there stays."""
        for record in self._records.values():
            record.close()

    @property
    def summary(self) -> list[dict[str, Any]]:
        """What was recorded on this rank, in order, as programs of BMTrain take it for losses of
        their own (distillation).

        Each dict has name and group as recorded, summary_name (`[group.]index.name`), `tensor`, its
        shape and requires_grad. The tensor is the recorded one and not a copy, in the graph, with
        its gradient in `.grad`: the inspector keeps the graph alive.

        Raises:
            ConfigurationError: in a pipelined pass something was recorded: its graph belongs to the
                pipeline.
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

    _summary = summary  # programs of BMTrain read either

    def get_summary(self) -> list[dict[str, Any]]:
        """Statistics over all ranks of everything recorded on any rank, in the order of recording.
        Collective.

        Returns:
            On every rank, for each tensor, a dict with name (`[group.]index.name`), shape, std,
            mean, max, min, grad_std and
            grad_mean: those of the tensors of all ranks that recorded it together, one below the
                other along dim 0. In the
            shape a dim in which they differ is -1. A number that does not exist is None, as in
            `inspect_model`.
        """
        current = world.current("get_summary")
        axis = current.mesh.world
        everyone = collectives.gather_objects(
            {key: record.shapes for key, record in self._records.items()}, axis
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
        """This rank's part of a recorded tensor: a copy of its values, outside the graph, with its
        gradient in `.grad`.

        Args:
            name, group: as recorded.
            index: which of the records of that name and group, as in the summary; None is the
                first.

        Returns:
            What was recorded here, of the same shape, dtype and device; the micro-batches of a
            pipelined pass one below the other along dim 0. `.grad` is None where backward has not
            run inside the context or has not come by.

        Raises:
            KeyError: nothing of that name, group and index was recorded on this rank; the message
                names the nearest.
            RuntimeError: records of a pipeline are numbered over its stages, by `get_summary`,
                which was not called since.
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
    """`with inspect_tensor() as inspector`: inside, `record_tensor` keeps what it is given, until
    the inspector is dropped.

    Gradients are kept if backward runs inside too. Compiled blocks run uncompiled inside; other
    compiled code records nothing. May be nested: every open inspector keeps its own copies.

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
    """Show `x` to the open inspectors, from model code. Without one nothing happens, nor in
    recomputation or compiled code.

    Args:
        x: an activation of any shape and dtype. A copy is kept, so it may be changed in place
            afterwards.
        name: what to call it. Records of the same name and group are numbered in the order of
            recording.
        group: goes before the number: "encoder" and "hidden" give "encoder.0.hidden",
            "encoder.1.hidden", ...

    Raises:
        ConfigurationError: for a parameter, which `inspect_model` shows, for anything else that is
            no tensor, and for names that are no strings or empty; whether an inspector is open or
            not.
    """
    if torch.compiler.is_compiling():  # a copy kept by Python would break the graph in two
        return
    _check(x, name, group)
    if world.is_initialized():
        world.current("record_tensor").service(Recorder).record(x, name, group)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """Along dim 0, where a number is a row; one part alone as it is."""
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
