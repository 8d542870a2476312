"""Comparing what ranks have recorded with what one process has: the first tensor that differs, and
by how much.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from bmtrain.verification.record import Key, Kind, Record
from bmtrain.verification.tolerance import Allowance

# As a step makes them.
ORDER = (Kind.LOSS, Kind.BUFFER, Kind.RANDOM, Kind.GRADIENT, Kind.NORM, Kind.PARAMETER, Kind.STATE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """A tensor that is another one on a rank.

    `error` and `allowed` are absolute; NaN where there is no number to give.
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

    verdict: "same"; "different", and `first` says where; "refused", when ranks raised one of
    bmtrain.errors; "failed", when a rank
        raised something else, died or hung.
    text: the outcome in words.
    first: the first tensor that differs.
    compared: how many tensors of each kind were compared, on all ranks together.
    closest: the largest share of its tolerance that any tensor took.
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
    """The report on these ranks' records."""
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
    """The first of `compare`."""
    return compare(reference, ranks, device, slack).first


@dataclasses.dataclass(frozen=True)
class _Found:
    share: float = 0.0
    first: Difference | None = None


def _each(
    reference: Record, ranks: Sequence[Record], device: str, slack: float
) -> Iterator[tuple[Key, _Found]]:
    """Every tensor of every rank beside the reference's, in the order of `ORDER` within each
    step.
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
    # stable: names stay as they came
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
    """Elements that are not finite must be the same; the others may be off by what is allowed."""
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
