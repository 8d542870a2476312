"""Comparison of the ranks' records with the reference: the first difference and its size."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

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
    """Compare the ranks' records with the reference; stops at the first difference."""
    counts: Counter[str] = Counter()
    closest = 0.0
    for key, found in _each(reference, ranks, device, slack):
        counts[key.kind.value] += 1
        if found.first is not None:
            return Report(
                verdict="different",
                text=str(found.first),
                first=found.first,
                compared=dict(counts),
                closest=float("inf"),
            )
        closest = max(closest, found.share)
    steps = max((key.step for key in reference.values), default=0)
    listed = ", ".join(f"{number} of kind {kind}" for kind, number in counts.items())
    text = (
        f"{steps} steps on {len(ranks)} ranks; tensors compared: {listed}; at most "
        f"{closest:.2g} of a tolerance was taken"
    )
    return Report(verdict="same", text=text, compared=dict(counts), closest=closest)


def first_difference(
    reference: Record, ranks: Sequence[Record], device: str = "cpu", slack: float = 1.0
) -> Difference | None:
    """The first difference that `compare` finds; None if there is none."""
    return compare(reference, ranks, device, slack).first


@dataclasses.dataclass(frozen=True)
class _Found:
    share: float = 0.0
    first: Difference | None = None


def _each(
    reference: Record, ranks: Sequence[Record], device: str, slack: float
) -> Iterator[tuple[Key, _Found]]:
    """Compare every tensor of every rank with the reference, by step and then by `ORDER`.

    Tensors that the reference lacks come last.
    """
    allowance = Allowance(reference, device, slack)
    for key in _ordered(reference):
        want = reference.values[key]
        allowed = None if want is None else allowance.of(key.step, key.kind, key.name, want)
        for rank, record in enumerate(ranks):
            if key not in record.values:
                yield (
                    key,
                    _Found(
                        first=Difference(
                            key=key, rank=rank, what="there is none; one process has it"
                        )
                    ),
                )
            else:
                yield key, _beside(key, rank, record.values[key], want, allowed)
    for rank, record in enumerate(ranks):
        for key in _ordered(record):
            if key not in reference.values:
                yield key, _Found(first=Difference(key=key, rank=rank, what="one process has none"))


def _ordered(record: Record) -> list[Key]:
    # The sort is stable: within a kind, names stay in the order of recording.
    return sorted(record.values, key=lambda key: (key.step, ORDER.index(key.kind)))


def _beside(
    key: Key,
    rank: int,
    got: torch.Tensor | None,
    want: torch.Tensor | None,
    allowed: torch.Tensor | None,
) -> _Found:
    if got is None or want is None or allowed is None:
        if got is want:
            return _Found()
        what = (
            "there is none; one process has one"
            if got is None
            else "there is one; one process has none"
        )
        return _Found(first=Difference(key=key, rank=rank, what=what))
    if got.shape != want.shape or got.dtype != want.dtype:
        what = (
            f"{got.dtype} of shape {tuple(got.shape)} instead of {want.dtype} of shape "
            f"{tuple(want.shape)}"
        )
        return _Found(first=Difference(key=key, rank=rank, what=what))
    if torch.equal(got, want) or not want.numel():
        return _Found()
    return _measured(key, rank, got, want, allowed)


def _measured(
    key: Key, rank: int, got: torch.Tensor, want: torch.Tensor, allowed: torch.Tensor
) -> _Found:
    """Compare elements: NaN and infinities must match, others must be within the tolerance."""
    mine, theirs = got.double(), want.double()
    error = (mine - theirs).abs()
    alike = (mine == theirs) | (mine.isnan() & theirs.isnan())
    error = torch.where(alike, 0.0, error).nan_to_num(float("inf"), float("inf"))
    share = torch.where(alike, 0.0, error / allowed.clamp(min=1e-300)).expand(error.shape)
    worst = int(share.reshape(-1).argmax())
    if not float(share.reshape(-1)[worst]) > 1.0:
        return _Found(share=float(share.reshape(-1)[worst]))
    off, bound = (
        float(error.reshape(-1)[worst]),
        float(allowed.expand(error.shape).reshape(-1)[worst]),
    )
    if key.kind is Kind.RANDOM:
        return _Found(
            first=Difference(
                key=key, rank=rank, what="the generator stands elsewhere than in one process"
            )
        )
    place = (
        tuple(int(x) for x in torch.unravel_index(torch.tensor(worst), error.shape))
        if error.dim()
        else ()
    )
    values = (
        f"{float(mine.reshape(-1)[worst]):.9g} instead of {float(theirs.reshape(-1)[worst]):.9g}"
    )
    what = (
        f"{values} at {place}, off by {off:.3g}, allowed {bound:.3g}; the largest element "
        f"is {float(theirs.abs().max()):.3g}"
    )
    return _Found(first=Difference(key=key, rank=rank, what=what, error=off, allowed=bound))
