"""How far two orders of the same sums may lie apart, from the dtypes.

A sum of n terms, added in two orders, differs by about eps * sqrt(n) of its largest terms, where
eps is the spacing of the dtype in which it is added up, which for half precision is fp32; storing
it adds half an eps of its own dtype. FACTOR is for the layers that lie one behind the other. On a
GPU kernels of other tilings, and of other shapes, take the place of one another, and fp32 products
may be rounded to the 10 bits of tf32. Every step starts where the last one has arrived, so errors
of steps add up.
"""

from __future__ import annotations

import torch

from bmtrain.verification.record import Kind, Record

FACTOR = 8.0
FACTOR_OF_GPU = 4.0
EPS_OF_TF32 = 2.0**-10


def relative_tolerance(record: Record, dtype: torch.dtype, step: int, device: str) -> float:
    """Relative to the largest element of a tensor of `dtype`, from step 1 on; 0 before and for
    whole numbers.
    """
    if not dtype.is_floating_point or step == 0:
        return 0.0
    stored = max(record.coarsest, 0.0 if dtype is torch.float64 else torch.finfo(dtype).eps)
    added = min(stored, torch.finfo(torch.float32).eps)
    factor = FACTOR
    if torch.device(device).type != "cpu":
        factor *= FACTOR_OF_GPU
        if torch.backends.cuda.matmul.allow_tf32:
            stored = max(stored, EPS_OF_TF32)
    return factor * (stored + added * record.terms**0.5) * step


class Allowance:
    """What each element of a tensor may be off by.

    Fed with the tensors of the reference in the order of the steps.
    """

    def __init__(self, reference: Record, device: str, slack: float) -> None:
        self._reference, self._device, self._slack = reference, device, slack
        self._largest: dict[tuple[int, Kind, str], float] = {}
        for key, value in reference.values.items():
            if value is not None and key.kind in (Kind.GRADIENT, Kind.STATE):
                alike = (key.step, key.kind, _entry(key.name) if key.kind is Kind.STATE else "")
                self._largest[alike] = max(self._largest.get(alike, 0.0), _largest(value))
        self._fastest = _largest_moves(reference)
        self._moved: dict[str, torch.Tensor] = {}
        self._farthest = 0.0
        self._noise: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    def of(self, step: int, kind: Kind, name: str, value: torch.Tensor) -> torch.Tensor:
        """A tensor that broadcasts to `value`, fp64."""
        tolerance = self._slack * relative_tolerance(
            self._reference, value.dtype, step, self._device
        )
        if kind is Kind.RANDOM or not value.numel():
            return torch.zeros((), dtype=torch.float64)
        allowed = torch.tensor(tolerance * _largest(value), dtype=torch.float64)
        if kind in (Kind.GRADIENT, Kind.STATE):
            # What cancels to nothing, such as the bias of keys, is rounding of terms as large as
            # the other gradients'.
            alike = (step, kind, _entry(name) if kind is Kind.STATE else "")
            allowed = allowed + tolerance / FACTOR * self._largest[alike]
        if kind is Kind.GRADIENT:
            noise = (allowed / value.double().abs().clamp(min=1e-300)).clamp(max=1.0)
            self._noise[name] = torch.maximum(self._noise.get(name, torch.zeros(())), noise)
        if kind is Kind.PARAMETER:
            allowed = allowed + self._of_steps(step, name, value)
        if kind is Kind.BUFFER and value.dtype.is_floating_point:
            # Computed from parameters: the mean of a BatchNorm from the bias before it, whose
            # gradient is rounding.
            allowed = allowed + self._farthest
        if kind is Kind.STATE and self._is_master(name, value):
            allowed = allowed + self._moved[_parameter(name)]
        return allowed

    def _of_steps(self, step: int, name: str, value: torch.Tensor) -> torch.Tensor:
        """An optimizer that normalises makes a whole step of a gradient that is rounding: so far
        may those elements be off.

        A whole step is the largest of this parameter, and of any parameter where all of the
        gradient is rounding.
        """
        now, before = value.double(), self._before.get(name)
        self._before[name] = now
        moved = self._moved.get(name, torch.zeros_like(now))
        if before is not None and name in self._noise and before.shape == now.shape:
            noise = self._noise.pop(name)
            whole = self._fastest[step] if bool((noise >= 1.0).all()) else _largest(now - before)
            moved = moved + 2 * whole * noise
        self._moved[name] = moved
        self._farthest = max(self._farthest, _largest(moved))
        return moved

    def _is_master(self, name: str, value: torch.Tensor) -> bool:
        """Whether a state is a finer copy of its parameter."""
        param = self._before.get(_parameter(name))
        if param is None or param.shape != value.shape:
            return False
        return bool(
            (param - value.double()).abs().max() <= self._reference.coarsest * param.abs().max()
        )


def _largest_moves(reference: Record) -> dict[int, float]:
    """Of any element of any parameter in each step."""
    values = {
        (key.step, key.name): value
        for key, value in reference.values.items()
        if key.kind is Kind.PARAMETER
    }
    moves: dict[int, float] = {}
    for (step, name), value in values.items():
        before = values.get((step - 1, name))
        if value is not None and before is not None and before.shape == value.shape:
            moves[step] = max(moves.get(step, 0.0), _largest(value.double() - before.double()))
    return moves


def _parameter(name: str) -> str:
    """Of the name of an optimizer state."""
    return name.rpartition(": ")[0]


def _entry(name: str) -> str:
    return name.rpartition(": ")[2]


def _largest(value: torch.Tensor) -> float:
    return float(value.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0
