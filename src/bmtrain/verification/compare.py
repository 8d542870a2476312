"""Comparison of the ranks' records with the reference: the first difference and its size."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence

import torch

from bmtrain.verification.record import Key, Kind, Record
from bmtrain.verification.tolerance import Allowance

# The order in which a step produces them, so that the first difference is nearest to its cause.
ORDER = (Kind.LOSS, Kind.BUFFER, Kind.RANDOM, Kind.GRADIENT, Kind.NORM, Kind.PARAMETER, Kind.STATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that differs from the reference on a rank.

    Attributes:
        key: the tensor.
        rank: the rank.
        what: the difference in words.
        error, allowed: of the worst element, absolute; NaN if the difference has no size (a missing
            tensor, another shape or dtype, a random state).
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
        found = dict(counts)
        return Report(
            verdict="different", text=str(first), first=first, compared=found, closest=math.inf
        )

    for key in _ordered(reference):
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
        for key in _ordered(record):
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


def _ordered(record: Record) -> list[Key]:
    # The sort is stable: within a kind, names stay in the order of recording.
    return sorted(record.values, key=lambda key: (key.step, ORDER.index(key.kind)))


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
        return share, "the generator stands elsewhere than in one process", math.nan, math.nan
    return share, what, error, bound
