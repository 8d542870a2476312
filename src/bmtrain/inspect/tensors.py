"""Tensors recorded in forward and backward passes, and their statistics over all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from bmtrain.distributed import collectives
from bmtrain.errors import ConfigurationError, UnknownNameError
from bmtrain.inspect.statistics import entry, statistics_of
from bmtrain.runtime import world
from bmtrain.runtime.arguments import Rule, check, optional, unknown
from bmtrain.shard.recording import Position, Recorder
from bmtrain.shard.unshard import Unshard

TEXT = Rule("a string such as 'hidden'", lambda text: isinstance(text, str) and text != "")


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


def full_name(name: str, group: str | None, index: int) -> str:
    """`[group.]index.name`."""
    return f"{index}.{name}" if group is None else f"{group}.{index}.{name}"


def numbered(keys: Iterable[Key]) -> dict[Key, int]:
    """Each key once, by segment and stage and else as given, with its number in its group."""
    counts: Counter[tuple[str | None, str]] = Counter()
    numbers: dict[Key, int] = {}
    for key in sorted(dict.fromkeys(keys), key=lambda key: (key.segment, key.stage)):
        numbers[key] = counts[key.group, key.name]
        counts[key.group, key.name] += 1
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


class Inspector:
    """The tensors recorded on this rank inside `with inspect_tensor() as inspector`."""

    def __init__(self, position: Position) -> None:
        self._begin = position.segment - position.segment % 2
        # Copies with their gradients, by micro-batch; outside of pipelined passes there is one.
        self._parts: dict[Key, dict[int, torch.Tensor]] = {}
        # the recorded tensors themselves, outside of pipelined passes
        self._in_graph: dict[Key, torch.Tensor] = {}
        self._counts: Counter[tuple[str | None, str, Position]] = Counter()
        self._agreed: dict[Key, int] = {}  # indices across ranks, as of the last get_summary
        self._hooks: list[Any] = []

    def record(self, x: torch.Tensor, name: str, group: str | None, position: Position) -> None:
        """Keep a copy of `x`, and the gradient that backward passes compute, summed."""
        count = self._counts[group, name, position]
        self._counts[group, name, position] += 1
        # Count segments from the opening of this inspector. Ranks may have run different numbers of
        # pipelined passes before, and their keys for the same tensor would not match.
        key = Key(group, name, position.segment - self._begin, position.stage, count)
        copy = x.detach().clone()
        self._parts.setdefault(key, {})[position.micro_batch] = copy

        def add(grad: torch.Tensor) -> None:
            copy.grad = grad.detach().clone() if copy.grad is None else copy.grad + grad

        if x.requires_grad:
            self._hooks.append(x.register_hook(add))
        if not key.is_pipelined:
            self._in_graph[key] = x
            if x.requires_grad:
                x.retain_grad()

    def close(self) -> None:
        """Remove the gradient hooks; records and gradients so far are kept."""
        for hook in self._hooks:
            hook.remove()

    def _joined(
        self, key: Key, rows: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The values of all parts, by micro-batch, and their gradients; None if there are none."""
        parts = [part for _, part in sorted(self._parts[key].items())]
        values = torch.cat([rows(part) for part in parts])
        if all(part.grad is None for part in parts):
            return values, None
        grads = (torch.zeros_like(part) if part.grad is None else part.grad for part in parts)
        return values, torch.cat([rows(grad) for grad in grads])

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
        if any(key.is_pipelined for key in self._parts):
            raise ConfigurationError(
                "Inspector.summary: tensors of a pipelined pass cannot be taken into a loss; "
                "expected records of layers outside of a PipelineTransformerBlockList. "
                "get_tensor(name) and get_summary() show these too."
            )
        nothing = dict.fromkeys(
            ("min", "max", "mean", "std", "grad_mean", "grad_std", "inside_pipe")
        )
        numbers = numbered(self._in_graph)
        return [
            {
                "name": key.name,
                "summary_name": full_name(key.name, key.group, numbers[key]),
                "group": key.group,
                "tensor": x,
                "shape": x.shape,
                "requires_grad": x.requires_grad,
                **nothing,
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
        own = {key: [tuple(x.shape) for x in parts.values()] for key, parts in self._parts.items()}
        shapes: dict[Key, list[tuple[int, ...]]] = {}
        for theirs in collectives.gather_objects(own, axis, "get_summary"):
            for key, found in theirs.items():
                shapes.setdefault(key, []).extend(found)
        self._agreed = numbered(shapes)
        tensors = (
            x
            for key in self._agreed
            for x in (self._joined(key, torch.ravel) if key in self._parts else (None, None))
        )
        statistics = statistics_of(tensors, current.device, axis)
        halves = zip(statistics[::2], statistics[1::2], strict=True)
        return [
            entry(full_name(key.name, key.group, index), shape_of_all(shapes[key]), *both)
            for (key, index), both in zip(self._agreed.items(), halves, strict=True)
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
            UnknownNameError: nothing of that name, group and index was recorded on this rank; the
                message has the closest names.
            ConfigurationError: in a pipeline, `get_summary` has not been called since the last
                record. It numbers the records across stages.
        """
        numbers = self._agreed
        if any(key not in numbers for key in self._parts):
            if any(key.is_pipelined for key in self._parts):
                raise ConfigurationError(
                    "get_tensor: in a pipeline the index of a tensor depends on other "
                    "stages: call get_summary() on every rank first."
                )
            numbers = numbered(self._parts)
        known = {(key.group, key.name, numbers[key]): key for key in self._parts}
        if index is None:
            index = min((i for g, n, i in known if (g, n) == (group, name)), default=0)
        key = known.get((group, name, index))
        if key is None:
            wanted = full_name(name, group, index)
            names = [full_name(n, g, i) for g, n, i in known]
            raise UnknownNameError(unknown("this rank's inspector", [wanted], names))
        if len(self._parts[key]) == 1:
            return next(iter(self._parts[key].values()))
        values, grad = self._joined(key, torch.atleast_1d)
        values.grad = grad
        return values


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
    with recorder.listening(inspector.record):
        try:
            yield inspector
        finally:
            inspector.close()


def record_tensor(
    x: torch.Tensor, name: str, group: str | None = None, requires_grad: bool = True
) -> None:
    """Record `x`, an activation in model code, with all open inspectors.

    A no-op if no inspector is open, during recomputation, and in compiled code.

    Args:
        x: a tensor of any shape and dtype. A copy is kept, so `x` may be changed in place later.
        name: its name. Records of equal name and group are numbered in the order of recording.
        group: a prefix of the number: "encoder" and "hidden" give "encoder.0.hidden",
            "encoder.1.hidden", ...
        requires_grad: of BMTrain 0.1, without effect: gradients are recorded where there are any.

    Raises:
        ConfigurationError: for a parameter (use `inspect_model`), for anything that is no tensor,
            and for a name or group that is no string or empty; also if no inspector is open.
    """
    if torch.compiler.is_compiling():  # a copy kept by Python would cause a graph break
        return
    check("record_tensor", name=(name, TEXT), group=(group, optional(TEXT)))
    if not isinstance(x, torch.Tensor):
        raise ConfigurationError(
            f"record_tensor got {type(x).__name__} as {name!r}: expected a tensor."
        )
    in_block = x.grad_fn is not None and x.grad_fn.name() == f"{Unshard.__name__}Backward"
    if isinstance(x, torch.nn.Parameter) or in_block:
        raise ConfigurationError(
            f"record_tensor got a parameter of shape {tuple(x.shape)} as {name!r}: expected an "
            "activation; inspect_model(model, pattern) shows parameters and their gradients."
        )
    if world.is_initialized():
        world.current("record_tensor").service(Recorder).record(x, name, group)
