"""What a rank says of itself when the run stands still, and what follows from all of it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import socket
from collections.abc import Mapping, Sequence

_MOST_STACKS = 20_000  # characters of a rank's stacks that travel
_STATES = {
    "T": "is stopped (SIGSTOP)",
    "t": "is stopped by a debugger",
    "Z": "has ended",
    "D": "is waiting for a disk or a network file system",
}


@dataclasses.dataclass(frozen=True)
class Process:
    """Where a rank runs."""

    host: str
    number: int

    def state(self) -> str:
        """What this process can tell of it; the form continues "rank 1 "."""
        where = f"process {self.number} on {self.host}"
        if self.host != socket.gethostname():
            return f"does not answer ({where})"
        try:
            fields = pathlib.Path(f"/proc/{self.number}/stat").read_text(errors="replace")
        except OSError:
            has_proc = pathlib.Path("/proc/self/stat").exists()
            return f"{'has ended' if has_proc else 'does not answer'} ({where})"
        # the name before it may hold blanks and brackets
        letter = fields.rpartition(")")[2].split()[0]
        says = _STATES.get(letter, "runs, but Python does not: a call into C holds its lock")
        return f"{says} ({where})"


@dataclasses.dataclass(frozen=True)
class Line:
    """The collectives of a rank on one axis.

    Attributes:
        ranks: of the axis.
        number: how many it has begun.
        digest: of their names, so that ranks that did different things can be told.
        last: the last of them, at most a few, the newest last.
    """

    ranks: tuple[int, ...]
    number: int
    digest: int
    last: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Part:
    """What a rank says.

    Attributes:
        rank: it.
        idle: seconds since its last progress.
        is_waiting: whether it waits for others or for its device.
        place: in the user's program.
        lines: its collectives.
        stacks: of its threads.
        extra: what the backend knows.
    """

    rank: int
    idle: float
    is_waiting: bool
    place: str
    lines: tuple[Line, ...]
    stacks: str
    extra: str = ""

    def dumped(self) -> str:
        """As JSON."""
        return json.dumps(
            dataclasses.asdict(dataclasses.replace(self, stacks=self.stacks[-_MOST_STACKS:]))
        )

    @classmethod
    def loaded(cls, text: str | bytes) -> Part:
        """From `dumped`."""
        fields = json.loads(text)
        lines = tuple(
            Line(tuple(line["ranks"]), line["number"], line["digest"], tuple(line["last"]))
            for line in fields.pop("lines")
        )
        return cls(**fields, lines=lines)


def named(ranks: Sequence[int]) -> str:
    """`rank 1`, or `ranks 0, 2`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def report(parts: Mapping[int, Part], silent: Mapping[int, str], limit: float, outcome: str) -> str:
    """The text for the user.

    Args:
        parts: of the ranks that have answered, at least one.
        silent: what is known of the others.
        limit: seconds after which this was asked for.
        outcome: a sentence on what becomes of the run.
    """
    head = [
        f"the run stands still: nothing has gone on for {limit:.0f} s. {outcome}",
        *_causes(parts, silent),
    ]
    for rank in sorted(parts):
        head += _told(parts[rank])
    by_text: dict[str, list[int]] = {}
    for rank in sorted(parts):
        by_text.setdefault(parts[rank].stacks, []).append(rank)
    for stacks, ranks in by_text.items():
        head += [f"-- stacks of {named(ranks)}:", stacks]
    return "\n".join(head) + "\n"


def _causes(parts: Mapping[int, Part], silent: Mapping[int, str]) -> list[str]:
    """Who is to blame, most certain first."""
    found = [f"rank {rank} {what}." for rank, what in sorted(silent.items())]
    late = {rank: what for rank in sorted(parts) if (what := _missed(rank, parts))}
    found += [f"rank {rank} {what}" for rank, what in late.items()]
    if found:
        return found
    waiting = [part for part in parts.values() if part.is_waiting]
    if waiting and len(waiting) < len(parts):
        return [
            f"rank {part.rank} does not wait for the others, which wait: it is at {part.place}"
            for part in parts.values()
            if not part.is_waiting
        ]
    return _differing(parts) or ["all ranks stand still, as far as they have come equally."]


def _missed(rank: int, parts: Mapping[int, Part]) -> str | None:
    """What the others have begun and this rank has not; None if it is with them."""
    for line in parts[rank].lines:
        others = [
            (other, theirs)
            for other in parts
            for theirs in parts[other].lines
            if theirs.ranks == line.ranks and theirs.number > line.number
        ]
        if others and not parts[rank].is_waiting:
            number = max(theirs.number for _, theirs in others)
            ahead = [other for other, theirs in others if theirs.number == number]
            what = next(theirs.last[-1:] for other, theirs in others if other == ahead[0])
            return (
                f"has not come to {' '.join(what) or 'the next collective'} (number {number}), in "
                f"which {named(ahead)} {'waits' if len(ahead) == 1 else 'wait'}; it is at "
                f"{parts[rank].place}"
            )
    return None


def _differing(parts: Mapping[int, Part]) -> list[str]:
    """Ranks that wait in different collectives."""
    deeds: dict[tuple[int, ...], dict[tuple[int, int], list[int]]] = {}
    texts: dict[int, str] = {}
    for rank, part in sorted(parts.items()):
        for line in part.lines:
            deeds.setdefault(line.ranks, {}).setdefault((line.number, line.digest), []).append(rank)
            texts.setdefault(rank, f"number {line.number}: {''.join(line.last[-1:])}")
    return [
        f"{named(ranks)} did {texts[ranks[0]]}"
        for groups in deeds.values()
        if len(groups) > 1
        for ranks in groups.values()
    ]


def _told(part: Part) -> list[str]:
    doing = "waits for others or its device" if part.is_waiting else "does not wait for others"
    lines = [
        f"rank {part.rank} {doing}, {part.idle:.0f} s after its last progress, at {part.place}"
    ]
    for line in part.lines:
        if line.last:
            lines.append(
                f"  collectives with {named(line.ranks)}: {line.number}, the last "
                + " < ".join(reversed(line.last))
            )
    return [*lines, f"  {part.extra}"] if part.extra else lines
