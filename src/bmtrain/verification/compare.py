"""Comparison of the ranks' records with the reference: the first difference and its size.

Tolerances follow from dtypes: how much rounding differs between two orders of the same sums. A sum
of n terms, added in two orders, differs by about eps * sqrt(n) of its largest terms, where eps is
that of the accumulation dtype, which is fp32 for half precision. Storing the sum adds half an eps
of its own dtype. FACTOR accounts for the depth of the model. On a GPU, other shapes select kernels
of other tilings, and fp32 matmuls may round their inputs to the 10 mantissa bits of tf32. Each step
starts from the result of the last one, so errors add up over steps.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import torch

from bmtrain.verification.record import Key, Kind, Record

FACTOR = 8.0
FACTOR_OF_GPU = 4.0
EPS_OF_TF32 = 2.0**-10
# The order in which a step produces them, so that the first difference is nearest to its cause.
ORDER = (Kind.LOSS, Kind.BUFFER, Kind.RANDOM, Kind.GRADIENT, Kind.NORM, Kind.PARAMETER, Kind.STATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that differs from the reference on a rank.

    Attributes:
        key: the tensor.
        rank: the rank.
        what: the difference in words.
        error: of the worst element, absolute; NaN if the difference has no size (a missing tensor,
            another shape or dtype, a random state).
        allowed: the largest error of that element that would not count; NaN as above.
    """

    key: Key
    rank: int
    what: str
    error: float = float("nan")
    allowed: float = float("nan")

    def __str__(self) -> str:
        name = f"{self.key.kind.value} {self.key.name}".rstrip()
        when = f"step {self.key.step}" if self.key.step else "before the first step"
        return f"{when}, {name}, rank {self.rank}: {self.what}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The outcome of `verify`.

    Attributes:
        verdict: "same"; "different", and `first` says where; "refused", if all ranks raised one of
            bmtrain.errors; "failed", if a rank raised another error, raised alone, died or hung.
        text: the outcome in words.
        first: the first tensor that differs.
        compared: the number of tensors compared, by kind, over all ranks.
        closest: the largest error as a fraction of its tolerance; infinite if a tensor differs.
    """

    verdict: str
    text: str
    first: Difference | None = None
    compared: dict[str, int] = dataclasses.field(default_factory=dict)
    closest: float = 0.0

    def __bool__(self) -> bool:
        return self.verdict == "same"

    def __str__(self) -> str:
        return f"{self.verdict}: {self.text}"


def compare(
    reference: Record, ranks: Sequence[Record], device: str = "cpu", slack: float = 1.0
) -> Report:
    """Compare the ranks' records with the reference; stops at the first difference.

    Every tensor of every rank, by step and then by `ORDER`; those that the reference lacks last.
    """
    counts: Counter[str] = Counter()
    closest, allowance = 0.0, Allowance(reference, device, slack)

    def different(key: Key, rank: int, what: str, *sizes: float) -> Report:
        error, allowed = sizes or (math.nan, math.nan)
        first = Difference(key=key, rank=rank, what=what, error=error, allowed=allowed)
        return Report(
            verdict="different",
            text=str(first),
            first=first,
            compared=dict(counts),
            closest=math.inf,
        )

    # The sort is stable: within a kind, names stay in the order of recording.
    for key in sorted(reference.values, key=lambda key: (key.step, ORDER.index(key.kind))):
        want = reference.values[key]
        allowed = None if want is None else allowance.of(key, want)
        for rank, record in enumerate(ranks):
            counts[key.kind.value] += 1
            got = record.values.get(key)
            if key not in record.values:
                return different(key, rank, "there is none; one process has it")
            if got is None or want is None or allowed is None:
                if got is want:
                    continue
                has, lacks = ("none", "one") if got is None else ("one", "none")
                return different(key, rank, f"there is {has}; one process has {lacks}")
            if got.shape != want.shape or got.dtype != want.dtype:
                own, other = (f"{x.dtype} of shape {tuple(x.shape)}" for x in (got, want))
                return different(key, rank, f"{own} instead of {other}")
            share, what, *sizes = _beside(key.kind, got, want, allowed)
            if share > 1.0:
                return different(key, rank, what, *sizes)
            closest = max(closest, share)
    for rank, record in enumerate(ranks):
        for key in record.values:
            if key not in reference.values:
                counts[key.kind.value] += 1
                return different(key, rank, "one process has none")
    steps = max((key.step for key in reference.values), default=0)
    listed = ", ".join(f"{number} of kind {kind}" for kind, number in counts.items())
    text = (
        f"{steps} steps on {len(ranks)} ranks; tensors compared: {listed}; at most "
        f"{closest:.2g} of a tolerance was taken"
    )
    return Report(verdict="same", text=text, compared=dict(counts), closest=closest)


def _beside(
    kind: Kind, got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor
) -> tuple[float, str, float, float]:
    """Of the worst element the share of its tolerance, what it is, its error and its tolerance.

    NaN and infinities must match, others must be within the tolerance.
    """
    if not want.numel():
        return 0.0, "", 0.0, 0.0
    mine, theirs = got.double().reshape(-1), want.double().reshape(-1)
    bounds = allowed.expand(want.shape).reshape(-1)
    alike = (mine == theirs) | (mine.isnan() & theirs.isnan())
    errors = torch.where(alike, 0.0, (mine - theirs).abs()).nan_to_num(math.inf, math.inf)
    shares = torch.where(alike, 0.0, errors / bounds.clamp(min=1e-300))
    worst = int(shares.argmax())
    share, error, bound = (float(x[worst]) for x in (shares, errors, bounds))
    place = tuple(int(x) for x in torch.unravel_index(torch.tensor(worst), want.shape))
    what = (
        f"{float(mine[worst]):.9g} instead of {float(theirs[worst]):.9g} at {place}, off by "
        f"{error:.3g}, allowed {bound:.3g}; the largest element is {float(theirs.abs().max()):.3g}"
    )
    if kind is Kind.RANDOM:
        return share, "the generator's state differs from one process", math.nan, math.nan
    return share, what, error, bound


def relative_tolerance(record: Record, dtype: torch.dtype, step: int, device: str) -> float:
    """The tolerance relative to a tensor's largest element; 0 for integers and at step 0."""
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
    """The absolute tolerance of each element of a tensor.

    `of` must be called once for each tensor of the reference, in the order of the comparison:
    tolerances of parameters depend on the gradients before them.
    """

    def __init__(self, reference: Record, device: str, slack: float) -> None:
        self._reference, self._device, self._slack = reference, device, slack
        # Largest elements of gradients and states of a kind, and of moves of parameters, by step.
        self._largest: dict[tuple[int, Kind, str], float] = {}
        self._fastest: dict[int, float] = {}
        for key, value in reference.values.items():
            if value is None:
                continue
            alike = _alike(key)
            self._largest[alike] = max(self._largest.get(alike, 0.0), _largest(value))
            before = reference.values.get(dataclasses.replace(key, step=key.step - 1))
            if key.kind is not Kind.PARAMETER or before is None:
                continue
            if before.shape == value.shape:
                move = _largest(value.double() - before.double())
                self._fastest[key.step] = max(self._fastest.get(key.step, 0.0), move)
        self._moved: dict[str, torch.Tensor] = {}
        self._farthest = 0.0
        self._noise: dict[str, torch.Tensor] = {}
        self._before: dict[str, torch.Tensor] = {}

    def of(self, key: Key, value: torch.Tensor) -> torch.Tensor:
        """The tolerance as an fp64 tensor that broadcasts to `value`."""
        kind, name = key.kind, key.name
        if kind is Kind.RANDOM or not value.numel():
            return torch.zeros((), dtype=torch.float64)
        tolerance = self._slack * relative_tolerance(
            self._reference, value.dtype, key.step, self._device
        )
        allowed = torch.tensor(tolerance * _largest(value), dtype=torch.float64)
        if kind in (Kind.GRADIENT, Kind.STATE):
            # A gradient that is zero in exact arithmetic (of the bias of attention keys, for
            # example) consists of rounding errors of terms as large as other gradients.
            allowed = allowed + tolerance / FACTOR * self._largest[_alike(key)]
        if kind is Kind.GRADIENT:
            noise = (allowed / value.double().abs().clamp(min=1e-300)).clamp(max=1.0)
            self._noise[name] = torch.maximum(self._noise.get(name, torch.zeros(())), noise)
        if kind is Kind.PARAMETER:
            allowed = allowed + self._of_steps(key.step, name, value)
        if kind is Kind.BUFFER and value.dtype.is_floating_point:
            # Buffers depend on parameters: the running mean of a BatchNorm on the preceding bias,
            # whose gradient is only rounding error.
            allowed = allowed + self._farthest
        if kind is Kind.STATE:
            owner = name.rpartition(": ")[0]
            param = self._before.get(owner)
            if param is not None and param.shape == value.shape:
                # A master copy of its parameter moves with it.
                error = (param - value.double()).abs().max()
                if bool(error <= self._reference.coarsest * param.abs().max()):
                    allowed = allowed + self._moved[owner]
        return allowed

    def _of_steps(self, step: int, name: str, value: torch.Tensor) -> torch.Tensor:
        """The tolerance for elements of a parameter whose gradient is mostly rounding error.

        An optimizer that normalises gradients (Adam) turns rounding error into a step of full size.
        Full size is the largest step of any element of this parameter, or of any parameter if the
        whole gradient is rounding error.
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


def _alike(key: Key) -> tuple[int, Kind, str]:
    """What tensors are measured with: all gradients of a step, all states of one name."""
    return key.step, key.kind, key.name.rpartition(": ")[2] if key.kind is Kind.STATE else ""


def _largest(value: torch.Tensor) -> float:
    return float(value.double().abs().nan_to_num(0.0, 0.0, 0.0).max()) if value.numel() else 0.0
