"""In how many bits Adam keeps moments and master weights, and what its states are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.kernels.bf16 import joined
from bmtrain.kernels.blockwise import BLOCK, Blocks, num_blocks
from bmtrain.runtime.arguments import Rule, check
from bmtrain.shard.cut import Cut
from bmtrain.shard.layout import Piece, Split
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.sharded import Sharded
from bmtrain.shard.slices import local_of

MOMENTS = ("fp32", "8bit")
MASTER_WEIGHTS = ("fp32", "split", "none")
# Of quantised moments; where blocks lie is for scales another matter than where elements do.
CODES, SCALES = "_codes", "_scales"
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")
# Of a parameter's tensors, in any form. One whose weights are their own masters has no masters.
NAMES = (
    *("master", "remainder", *MOMENT_NAMES),
    *(name + kind for name in MOMENT_NAMES for kind in (CODES, SCALES)),
)


@dataclasses.dataclass(frozen=True)
class StateForm:
    """See AdamOptimizer.

    Attributes:
        moments: "fp32" or "8bit".
        master_weights: "fp32", "split" or "none".
    """

    moments: str = "fp32"
    master_weights: str = "fp32"

    @classmethod
    def checked(cls, owner: str, moments: str, master_weights: str = "fp32") -> StateForm:
        """Refuse others.

        Raises:
            ConfigurationError: naming the owner, the argument and what was expected.
        """
        rules = [
            Rule(f"one of {', '.join(known)}", known.__contains__)
            for known in (MOMENTS, MASTER_WEIGHTS)
        ]
        check(owner, moments=(moments, rules[0]), master_weights=(master_weights, rules[1]))
        return cls(moments, master_weights)

    @property
    def is_compact(self) -> bool:
        """Whether anything is kept in fewer bits than fp32 has."""
        return self != StateForm()

    @property
    def is_quantised(self) -> bool:
        """Whether moments are."""
        return self.moments == "8bit"

    def num_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """Bytes of the state of so many elements that lie together.

        Args:
            numel: elements on this rank; of one parameter if the form is compact.
            dtype: of the parameter.
        """
        exact = torch.promote_types(dtype, torch.float32)
        each = numel + 4 * num_blocks(numel) if self.is_quantised else exact.itemsize * numel
        if dtype == exact:  # the weights are their own masters
            return 2 * each
        return 2 * each + {"fp32": 4, "split": 2, "none": 0}[self.master_weights] * numel

    def check_params(self, owner: str, params: Iterable[torch.Tensor]) -> None:
        """Refuse parameters of dtypes that have no such form.

        Raises:
            ConfigurationError: naming the first of them.
        """
        if not self.is_compact:
            return
        halves = (torch.float16, torch.bfloat16)
        known = halves if self.master_weights == "fp32" else (torch.bfloat16,)
        for param in params:
            if param.dtype not in (*known, torch.float32):
                raise ConfigurationError(
                    f"{owner}: moments={self.moments!r} with master_weights="
                    f"{self.master_weights!r} is for parameters in fp32 and "
                    f"{' or '.join(str(dtype).removeprefix('torch.') for dtype in known)}, got one "
                    f"of shape {tuple(param.shape)} in {param.dtype}."
                )

    def names(self, param: torch.Tensor) -> tuple[frozenset[str], frozenset[str]]:
        """Names of the tensors that a saved state of it must have, and of those that it may have.

        An fp32 model has no masters of its own, though the state of a bf16 one has.
        """
        kinds = (CODES, SCALES) if self.is_quantised else ("",)
        needed = frozenset(name + kind for name in MOMENT_NAMES for kind in kinds)
        if self.master_weights == "split" and param.dtype == torch.bfloat16:
            needed |= {"remainder"}
        return needed, frozenset({"master"} if self.master_weights == "fp32" else ())


def in_fp32(state: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """A parameter's state as every form of Adam can take it over: copies on the CPU."""
    own = {name: local_of(state[name]) for name in NAMES if name in state}
    found = {name: own[name] for name in ("master", *MOMENT_NAMES) if name in own}
    if "remainder" in own:
        found["master"] = joined(local_of(param.detach()).reshape(-1), own["remainder"])
    for name in MOMENT_NAMES:
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
    pieces = []
    for piece in cut.pieces:
        begin = piece.begin // BLOCK
        pieces.append(Piece(begin, begin + num_blocks(piece.numel), piece.start // BLOCK))
    split = cut.split or Split(0, 0, 1)
    length = num_blocks(cut.shape.numel())
    return dataclasses.replace(
        cut,
        shape=torch.Size((1, length)),
        whole_shape=torch.Size((split.count, length)),
        split=None if cut.split is None else Split(0, split.index, split.count),
        pieces=tuple(pieces),
        name=f"{name} of {cut.name}",
    )
