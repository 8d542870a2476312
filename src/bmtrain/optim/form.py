"""In how many bits an optimizer keeps moments and master weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.kernels.blockwise import num_blocks
from bmtrain.runtime.arguments import Rule, check

MOMENTS = ("fp32", "8bit")
MASTER_WEIGHTS = ("fp32", "split", "none")
_MASTER_BYTES = {"fp32": 4, "split": 2, "none": 0}


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
        check(
            owner,
            moments=(moments, _one_of(MOMENTS)),
            master_weights=(master_weights, _one_of(MASTER_WEIGHTS)),
        )
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
        moments = 2 * each
        if dtype == exact:  # the weights are their own masters
            return moments
        return moments + _MASTER_BYTES[self.master_weights] * numel

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


def _one_of(known: tuple[str, ...]) -> Rule:
    return Rule(f"one of {', '.join(known)}", lambda value: value in known)
