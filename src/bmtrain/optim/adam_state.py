"""Adam's state: flat tensors per span of parameters, and batches that are updated together."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch

from bmtrain.errors import ParameterError
from bmtrain.kernels.adam import AdamTensors
from bmtrain.kernels.bf16 import remainders_of
from bmtrain.kernels.blockwise import Blocks, num_blocks
from bmtrain.optim.flat import FlatSpan, gradient_of, gradients_of, parameters_of, spans_of
from bmtrain.optim.form import CODES, MOMENT_NAMES, NAMES, SCALES, StateForm, cut_of
from bmtrain.shard.cut import Cut
from bmtrain.shard.engine import num_references
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded, cut_like
from bmtrain.shard.slices import Slices, local_of

# Makes zeros (numel,) of a dtype.
Make = Callable[[int, torch.dtype], torch.Tensor]


class SpanState:
    """State of one span: both moments, and what half-precision weights need beside themselves.

    Args:
        span: in a compact form of one parameter: the places of its elements make random bits.
        make: makes its tensors.
        form: in how many bits; fp32 is fp64 for fp64 parameters.
        group, number: of the span's first parameter in its optimizer.

    Attributes:
        tensors: by name, (numel,) each; scales have one number for each block.
        states: what the optimizer shows of each parameter.
        num_holders: how many tensors and other objects share the memory of the layout itself.
    """

    def __init__(
        self, span: FlatSpan, make: Make, form: StateForm, group: int, number: int
    ) -> None:
        self.span, self.group, self._number = span, group, number
        self._is_compact, self.num_holders = form.is_compact, 0
        self.states: list[dict[str, Any]] = []
        values = span.values
        exact = torch.promote_types(values.dtype, torch.float32)
        # Weights that are their own masters are not held: see `Storage.is_held`.
        self._is_exact = values.dtype == exact
        self.tensors: dict[str, torch.Tensor] = {}
        if not self._is_exact and form.master_weights == "fp32":
            self.tensors["master"] = make(span.numel, exact).copy_(values)
        elif not self._is_exact and form.master_weights == "split":
            self.tensors["remainder"] = make(span.numel, torch.int16)
        for name, dtype in zip(MOMENT_NAMES, (torch.int8, torch.uint8), strict=True):
            if form.is_quantised:
                self.tensors[name + CODES] = make(span.numel, dtype)
                self.tensors[name + SCALES] = make(num_blocks(span.numel), torch.float32)
            else:
                self.tensors[name] = make(span.numel, exact)

    def update_of(self, piece: FlatSpan, grad: torch.Tensor) -> AdamTensors:
        """The tensors that an update of `piece`, a part of the span, reads and writes."""
        weight, master = piece.values, self.tensors.get("master", self.tensors.get("remainder"))
        moments: list[Any] = self._moments()
        if piece is not self.span:  # that of a compact form has one parameter
            master = None if master is None else self.span.cut(master, piece)
            moments = [self.span.cut(x, piece) for x in moments]
        mean, square = moments
        if self._is_exact:
            master = weight
        param = self.span.params[0]
        start = param.cut.piece.start if isinstance(param, DistributedParameter) else 0
        return AdamTensors(weight, grad, master, mean, square, self._number, start)

    def views(self, param: torch.nn.Parameter) -> dict[str, torch.Tensor]:
        """The state of a parameter of the span, by name."""
        if self._is_compact:
            return dict(self.tensors)
        begin, end = self.span.offset(param)
        return {name: x[begin:end] for name, x in self.tensors.items()}

    def adopt(self, param: torch.nn.Parameter, old: Mapping[str, torch.Tensor]) -> None:
        """Take over the state of a parameter, in this form or in fp32, what there is of it."""
        for name, view in self.views(param).items():
            if name in old:
                view.copy_(old[name].reshape(-1))
        for name, moment in zip(MOMENT_NAMES, self._moments(), strict=True):
            if name in old and isinstance(moment, Blocks):
                moment.fill(old[name].reshape(-1).to(moment.codes.device, torch.float32))
        remainder = self.tensors.get("remainder")
        if remainder is not None and "master" in old:
            masters = old["master"].reshape(-1).to(remainder.device, torch.float32)
            remainder.copy_(remainders_of(masters, self.span.values))

    def count_holders(self) -> int:
        """How many tensors and other objects share the memory of the state."""
        return sum(map(num_references, self.tensors.values()))

    def _moments(self) -> list[torch.Tensor | Blocks]:
        own = self.tensors
        return [
            own[name] if name in own else Blocks(own[name + CODES], own[name + SCALES])
            for name in MOMENT_NAMES
        ]


class ShardedState(Sharded):
    """A state of a sharded parameter. Whoever reads or writes it waits for an update that is under
    way, and until nothing copies from or to its memory.
    """

    _param: DistributedParameter
    _wait_for_copies: Callable[[], None]

    def __new__(
        cls,
        param: DistributedParameter,
        local: torch.Tensor,
        cut: Cut,
        wait_for_copies: Callable[[], None],
    ) -> ShardedState:
        out: ShardedState = super().__new__(cls, local, cut)  # type: ignore[assignment]
        out._param, out._wait_for_copies = param, wait_for_copies
        return out

    @property
    def local(self) -> torch.Tensor:
        self._param.storage_of.wait_for_updates()
        self._wait_for_copies()
        return self.local_tensor


class UpdatePart(NamedTuple):
    """A piece of a span, and what an update of it reads and writes."""

    span: FlatSpan
    piece: FlatSpan
    tensors: AdamTensors


@dataclasses.dataclass
class ParamBatch:
    """Parameters of one group with a gradient and the same step count, updated together.

    Attributes:
        group: index of the group.
        states: the states of the parameters.
        parts: what the step updates.
    """

    group: int
    states: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    parts: list[UpdatePart] = dataclasses.field(default_factory=list)

    def count_step(self) -> int:
        """Count a step, and a write to each sharded parameter; the number of the step."""
        for state in self.states:
            state["step"] += 1
        for part in self.parts:
            for param in part.piece.params:
                if isinstance(param, DistributedParameter):
                    param.count_write()
        step: int = self.states[0]["step"]
        return step


class AdamLayout:
    """Lays out the state of all parameters of an optimizer; existing state is copied in.

    Args:
        groups: the optimizer's parameter groups.
        states: its `state`, by parameter; filled with a step count and views of the flat tensors.
        memory_of: what makes the tensors of the state of a span.
        form: of the states; compact ones are made for each parameter by itself.
        wait_for_copies: returns when nothing copies from or to states in host memory.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        states: MutableMapping[torch.Tensor, dict[str, Any]],
        memory_of: Callable[[FlatSpan], Make],
        form: StateForm,
        wait_for_copies: Callable[[], None],
    ) -> None:
        self._states, self._wait_for_copies = states, wait_for_copies
        self._span_states: dict[int, SpanState] = {}  # by id of the span
        # by id of the storage or parameter: states whose master weights follow the weights
        self._rounded: dict[int, list[SpanState]] = {}
        self._versions: dict[int, int] = {}  # of their memory when it was last looked at
        # Spans, of one parameter each, whose state means nothing without the weights of the last
        # step; and what was counted of writes to them.
        self._bound: list[FlatSpan] = []
        self._seen: dict[int, tuple[int, int, int]] = {}
        numbers = {param: number for number, param in enumerate(parameters_of(groups))}
        self._spans: list[FlatSpan] = []
        for group, own in enumerate(groups):
            for whole in spans_of(own["params"]):
                for span in whole.split(id) if form.is_compact else [whole]:
                    number = numbers[span.params[0]]
                    state = SpanState(span, memory_of(span), form, group, number)
                    self._span_states[id(span)] = state
                    if "master" in state.tensors:
                        self._rounded.setdefault(span.owner, []).append(state)
                    if "remainder" in state.tensors:
                        self._bound.append(span)
                    for param in span.params:
                        self._show(param, state)
                    state.states = [states[param] for param in span.params]
                    self._spans.append(span)
        # the layout holds its parameters, so that ids are not used again
        self._ids = [list(map(id, group["params"])) for group in groups]
        self._params = parameters_of(groups)
        self._dicts = [states[param] for param in self._params]
        # of tensors: a step count is another object after each step
        views = [(own, name) for own in self._dicts for name in own if name != "step"]
        self._places = [own for own, _ in views], [name for _, name in views]
        self._views = list(map(dict.get, *self._places))
        for view in self._views:
            if isinstance(view, ShardedState):
                view.count_holders()
        for state in self._span_states.values():
            state.num_holders = state.count_holders()
        self.trust_weights()

    def is_current(
        self, groups: Sequence[dict[str, Any]], states: MutableMapping[torch.Tensor, dict[str, Any]]
    ) -> bool:
        """Whether the groups still hold the same parameters, and the states are this layout's."""
        return (
            states is self._states
            and [list(map(id, group["params"])) for group in groups] == self._ids
            and all(map(operator.is_, map(states.get, self._params), self._dicts))
            and all(map(operator.is_, map(dict.get, *self._places), self._views))
        )

    def follow(self) -> None:
        """Bring master weights and weights together that others have written.

        Master weights of a state that was loaded are compared with the weights once: those may
        come of elsewhere, before or after the state.

        Raises:
            ParameterError: on all ranks, for states that need the weights as they were. Before the
                first step of a parameter the remainders are zero: its weights may be any.
        """
        for span, now in zip(self._bound, self._writes().values(), strict=True):
            # Writes through a parameter are counted for it, alike on all ranks. Those to its slice
            # (`param.local`) are seen in the version of its storage's memory alone: where that has
            # changed and no parameter in the storage has counted a write, any may be written.
            own, version, counted = self._seen[id(span)]
            is_written = now[0] != own or (now[1] != version and now[2] == counted)
            if is_written and self._step_of(span.params[0]):
                raise ParameterError(
                    f"a parameter of shape {tuple(span.params[0].shape)} was written since the "
                    "last step or load of the optimizer: its master weights are the weights and a "
                    "remainder (master_weights='split'), which the write made inconsistent. Use "
                    "master_weights='fp32', or load the weights first, then the optimizer's state."
                )
        for owner, states in self._rounded.items():
            if states[0].span.version != self._versions.get(owner):
                for state in states:
                    # Weights equal to the rounded master are the optimizer's own: the master,
                    # which has more bits, stays.
                    master = state.tensors["master"]
                    values = state.span.values.to(master.device)
                    is_own = master.to(values.dtype) == values
                    master.copy_(torch.where(is_own, master, values.to(master.dtype)))

    def held_owners(self) -> set[int]:
        """Ids of storages of whose weights or states the program holds memory.

        It can read that at any time without asking.
        """
        return {
            state.span.owner
            for state in self._span_states.values()
            if state.span.storage is not None
            and (
                state.count_holders() > state.num_holders
                or any(
                    x.is_held
                    for own in state.states
                    for x in own.values()
                    if isinstance(x, ShardedState)
                )
                or state.span.storage.is_held
            )
        }

    def _writes(self) -> dict[int, tuple[int, int, int]]:
        """By bound span: writes to its parameter, version of its memory, and writes to all
        parameters in that memory.
        """
        found: dict[int, tuple[int, int, int]] = {}
        memories: dict[int, tuple[int, int]] = {}
        for span in self._bound:
            param = span.params[0]
            own = param.num_written if span.storage is not None else param._version
            if span.owner not in memories:
                params = [param] if span.storage is None else span.storage.params
                counted = [x.num_written for x in params if isinstance(x, DistributedParameter)]
                memories[span.owner] = span.version, sum(counted) if counted else own
            found[id(span)] = own, *memories[span.owner]
        return found

    def close(self) -> None:
        """Record the weights' versions: the last write was the optimizer's."""
        self._versions = {owner: own[0].span.version for owner, own in self._rounded.items()}
        self._seen = self._writes()

    def trust_weights(self) -> None:
        """The weights are those of the states, which are new or being loaded."""
        self._versions.clear()  # unknown: masters follow once
        self._seen = self._writes()

    def updates(self) -> list[ParamBatch]:
        """Updates of all parameters that have a gradient now."""
        batches: dict[tuple[int, int], ParamBatch] = {}
        sharded, ordinary = gradients_of(self._spans)
        for part in (*sharded, *ordinary):
            first = part.piece.params[0]
            if (grad := gradient_of(first)) is not None and grad.is_sparse:
                raise ParameterError(
                    f"the gradient of a parameter of shape {first.shape} is sparse, which "
                    "Adam does not take: give the embedding sparse=False, or leave it to "
                    "torch.optim.SparseAdam."
                )
            state, flat = self._span_states[id(part.span)], part.grad.reshape(-1)
            known = state.states if part.piece is part.span else []
            are_alike = bool(known) and all(x["step"] == known[0]["step"] for x in known)
            for piece in [part.piece] if are_alike else part.piece.split(self._step_of):
                key = state.group, self._step_of(piece.params[0])
                batch = batches.setdefault(key, ParamBatch(state.group))
                batch.states += (
                    known if are_alike else [self._states[param] for param in piece.params]
                )
                tensors = state.update_of(piece, part.piece.cut(flat, piece))
                batch.parts.append(UpdatePart(part.span, piece, tensors))
        return list(batches.values())

    def _show(self, param: torch.nn.Parameter, state: SpanState) -> None:
        """Replace the state of a parameter by views of the flat state."""
        old = self._states[param]
        state.adopt(param, {name: _local(old[name], param) for name in NAMES if name in old})
        views = state.views(param)
        if isinstance(param, DistributedParameter):
            views = {
                name: ShardedState(param, view, cut_of(name, param.cut), self._wait_for_copies)
                for name, view in views.items()
            }
        self._states[param] = {"step": int(old.get("step", 0)), **views}

    def _step_of(self, param: torch.nn.Parameter) -> int:
        step: int = self._states[param]["step"]
        return step


def _local(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """This rank's elements of a state: a sharded tensor, a full tensor, or a slice already."""
    if (
        isinstance(param, DistributedParameter)
        and not isinstance(value, Slices)
        and value.shape == param.shape
    ):
        return cut_like(value, param).local
    return local_of(value)
