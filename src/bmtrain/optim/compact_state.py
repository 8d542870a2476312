"""Adam's state in fewer bits: moments in blocks of 8 bits, remainders of bf16 weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bmtrain.kernels.adam_compact import CompactTensors
from bmtrain.kernels.bf16 import are_neighbours, joined, remainders_of
from bmtrain.kernels.blockwise import BLOCK, Blocks, num_blocks
from bmtrain.optim.form import StateForm
from bmtrain.optim.host_memory import Make
from bmtrain.optim.masters import follow_weights
from bmtrain.optim.runs import Run
from bmtrain.shard.cut import Cut
from bmtrain.shard.layout import Piece, Split
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded
from bmtrain.shard.slices import local_of

# Of quantised moments; where blocks lie is for scales another matter than where elements do.
CODES, SCALES = "_codes", "_scales"
MEAN, SQUARE = "exp_avg", "exp_avg_sq"
MOMENTS = (MEAN, SQUARE)
# Of a parameter's tensors, in any form. One whose weights are their own masters has no masters.
NAMES = (
    *("master", "remainder", *MOMENTS),
    *(name + kind for name in MOMENTS for kind in (CODES, SCALES)),
)


class CompactState:
    """State of one parameter, as a run of its own: the places of its elements make random bits.

    Args:
        run: of one parameter, in fp32, or in the dtypes of its form.
        make: makes its tensors.
        form: in how many bits.
        number: of the parameter in its optimizer.
    """

    def __init__(self, run: Run, make: Make, form: StateForm, number: int) -> None:
        values, param = run.values, run.params[0]
        self._form, self._number = form, number
        self._start = param.cut.piece.start if isinstance(param, DistributedParameter) else 0
        self.mean, self.square = (
            Blocks.zeros(run.numel, codes, make)
            if form.is_quantised
            else make(run.numel, torch.float32)
            for codes in (torch.int8, torch.uint8)
        )
        self.is_exact = values.dtype == torch.float32
        # Weights that are their own masters are not held: see `Storage.is_held`.
        self.master: torch.Tensor | None = None
        if self.is_exact:
            pass
        elif form.master_weights == "fp32":
            self.master = make(run.numel, torch.float32).copy_(values)
        elif form.master_weights == "split":
            self.master = make(run.numel, torch.int16)
        self._run = run

    @property
    def flat(self) -> list[torch.Tensor]:
        """The memory of the state."""
        return list(self.shown(0, 0).values())

    @property
    def follows_weights(self) -> bool:
        """Whether it has master weights that can be told of weights written by others."""
        return not self.is_exact and self.master is not None and not self.needs_weights

    @property
    def needs_weights(self) -> bool:
        """Whether it has remainders, which mean nothing without the weights of the last step."""
        return self.master is not None and self.master.dtype == torch.int16

    def follow(self, run: Run) -> None:
        """Update master weights from weights written by others."""
        if self.master is not None:
            follow_weights(self.master, run.values)

    def tensors(self, run: Run, piece: Run, grad: torch.Tensor) -> CompactTensors:
        """What an update reads and writes."""
        weight = piece.values
        master = weight if self.is_exact else self.master
        return CompactTensors(
            weight, grad, master, self.mean, self.square, self._number, self._start
        )

    def shown(self, begin: int, end: int) -> dict[str, torch.Tensor]:
        """The state's own tensors by name."""
        out: dict[str, torch.Tensor] = {}
        if self.needs_weights and self.master is not None:
            out["remainder"] = self.master
        elif self.master is not None:
            out["master"] = self.master
        for name, moment in ((MEAN, self.mean), (SQUARE, self.square)):
            if isinstance(moment, Blocks):
                out |= {name + CODES: moment.codes, name + SCALES: moment.scales}
            else:
                out[name] = moment
        return out

    def adopt(self, begin: int, end: int, old: Mapping[str, torch.Tensor]) -> None:
        """Take over a state of this form or in fp32, what there is of it."""
        for name, own in self.shown(begin, end).items():
            if name in old:
                own.copy_(old[name].reshape(-1))
        for name, moment in ((MEAN, self.mean), (SQUARE, self.square)):
            if name in old and isinstance(moment, Blocks):
                moment.fill(old[name].reshape(-1).to(moment.codes.device, torch.float32))
        if self.needs_weights and "master" in old and self.master is not None:
            masters = old["master"].reshape(-1).to(self.master.device, torch.float32)
            self.master.copy_(remainders_of(masters, self._run.values))


def names_of(form: StateForm, param: torch.Tensor) -> tuple[frozenset[str], frozenset[str]]:
    """Of the tensors that a saved state in this form must have, and of those that it may have.

    An fp32 model has no masters of its own, though the state of a bf16 one has.
    """
    kinds = (CODES, SCALES) if form.is_quantised else ("",)
    needed = frozenset(name + kind for name in MOMENTS for kind in kinds)
    if form.master_weights == "split" and param.dtype == torch.bfloat16:
        needed |= {"remainder"}
    return needed, frozenset({"master"} if form.master_weights == "fp32" else ())


def foreign_masters(
    params: Sequence[torch.Tensor], states: Mapping[int, Mapping[str, Any]]
) -> list[int]:
    """Indices of bf16 parameters whose saved masters are not those of their weights.

    Args:
        params: of the optimizer.
        states: to be loaded, by the parameter's index: this rank's slices.
    """
    kept = {
        index: (local_of(state["master"]).reshape(-1), local_of(params[index].detach()).reshape(-1))
        for index, state in states.items()
        if state.get("step") and "master" in state and params[index].dtype == torch.bfloat16
    }
    return [index for index, pair in kept.items() if not are_neighbours(*pair)]


def in_fp32(state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """A parameter's state as every form of Adam can take it over: copies on the CPU."""
    own = {name: local_of(state[name]) for name in NAMES if name in state}
    found = {name: own[name] for name in ("master", *MOMENTS) if name in own}
    if "remainder" in own:
        found["master"] = joined(local_of(param.detach()).reshape(-1), own["remainder"])
    for name in MOMENTS:
        if name + CODES in own:
            found[name] = Blocks(own[name + CODES], own[name + SCALES]).values()
    values: dict[str, Any] = {name: x.to("cpu", copy=True) for name, x in found.items()}
    if isinstance(param, DistributedParameter):
        values = {name: Sharded(x, param.cut) for name, x in values.items()}
    return {"step": state["step"], **values}


def cut_of(name: str, cut: Cut) -> Cut:
    """How a state of this name is cut: elements as the parameter's, scales by whole blocks.

    Blocks of tensor-parallel parts are rows: another number of parts has other blocks.
    """
    if not name.endswith(SCALES):
        return cut
    pieces = tuple(
        Piece(
            piece.begin // BLOCK,
            piece.begin // BLOCK + num_blocks(piece.numel),
            piece.start // BLOCK,
        )
        for piece in cut.pieces
    )
    split = cut.split or Split(0, 0, 1)
    length = num_blocks(cut.shape.numel())
    return dataclasses.replace(
        cut,
        shape=torch.Size((1, length)),
        whole_shape=torch.Size((split.count, length)),
        split=None if cut.split is None else Split(0, split.index, split.count),
        pieces=pieces,
        name=f"{name} of {cut.name}",
    )
