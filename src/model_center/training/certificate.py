"""What a run learns, beside what it should learn.

Steps are computed as the run computes them, and then each conversation alone. The gradient of a
step's loss by a token's last hidden state tells its weight and what it is trained to predict;
the hidden state itself its position and what it has seen; and what it may not see is found by
changing that.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

import bmtrain as bmt
from bmtrain.distributed.agreement import attempt, everyone, largest
from bmtrain.distributed.collectives import gather_objects
from model_center.dataset.expected import Expected, difference, expected_of
from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.mixture import Mixture
from model_center.dataset.packing import PackedSamples
from model_center.dataset.padding import Item
from model_center.dataset.preferences import PreferencePairs
from model_center.dataset.rows import kind_of
from model_center.errors import DataError
from model_center.training.batches import grouped, make_loader
from model_center.training.objectives import Goal
from model_center.training.trained_model import Batch

ROUNDING = 2e-3  # of fp32 through a model, of a hidden state's or gradient's size
# Files that are read as a whole: a short look leaves large ones alone.
WHOLE, LARGE = (".json", ".txt", ".md"), 2**26


class Finding(NamedTuple):
    """What is not as it should be: where, and what of it."""

    location: str
    text: str


@dataclasses.dataclass
class Certificate:
    """What was compared, of all ranks.

    Attributes:
        steps, conversations, tokens, loss_tokens: how many.
        findings: what differs, the first of each conversation.
        unknown: rows of which nothing could be said: their template writes no other contents.
        deviation: the largest of a weight that was taken for right, relative to it.
    """

    steps: int = 0
    conversations: int = 0
    tokens: int = 0
    loss_tokens: int = 0
    findings: list[Finding] = dataclasses.field(default_factory=list)
    unknown: list[str] = dataclasses.field(default_factory=list)
    deviation: float = 0.0

    def add(self, other: Certificate) -> None:
        """What another rank has compared of the same steps."""
        self.conversations += other.conversations
        self.tokens += other.tokens
        self.findings += other.findings
        self.unknown += other.unknown
        self.deviation = max(self.deviation, other.deviation)


class _PackedSample(NamedTuple):
    """A sample in a micro-batch.

    Attributes:
        place: of its row in the data.
        batch, row: where it is: the number of the micro-batch in its step, and of the row there.
        columns: of the row that hold it.
        expected: of its row in the data; None where nothing can be said.
        start: of its first token in that.
        is_text: whether its last token is in the loss, too.
    """

    location: str
    batch: int
    row: int
    columns: slice
    expected: Expected | None
    start: int
    is_text: bool

    def of(self, batches: Sequence[Batch], name: str) -> torch.Tensor:
        return batches[self.batch][name][self.row, self.columns]


class _NumberedRows(torch.utils.data.Dataset[Item]):
    """Packed rows that know their numbers."""

    def __init__(self, packed: PackedSamples) -> None:
        self._packed, self.collate = packed, packed.collate

    def __len__(self) -> int:
        return len(self._packed)

    def __getitem__(self, index: int) -> Item:
        return {**self._packed[index], "number": torch.tensor(index)}


def certify(
    goal: Goal, packed: PackedSamples | PreferencePairs, args: argparse.Namespace, num_steps: int
) -> Certificate:
    """Compare the first steps of a run with what they should be. Collective.

    Args:
        goal: of the run, with a trained_model in fp32.
        packed: the rows that the run learns from, or pairs.
        args: of the run, whose batches are taken.
        num_steps: at most.

    Raises:
        DataError: for data that cannot be read.
    """
    rows_of_run = packed if isinstance(packed, PreferencePairs) else _NumberedRows(packed)
    loader = make_loader(rows_of_run, args, shuffle=True)
    steps = list(itertools.islice(grouped(loader, args.gradient_accumulation), num_steps))
    rows = attempt(lambda: _rows_of(steps, packed), everyone(), DataError)
    found = Certificate(steps=len(steps))
    trained_model = goal.trained_model
    was_training = trained_model.model.training
    trained_model.model.eval()  # dropout would differ from token to token
    sides = 2 if isinstance(packed, PreferencePairs) else 1  # samples that have one loss
    for number, batches in enumerate(steps, start=1):
        _step(goal, batches, _pieces(batches, packed, rows), number, found, sides)
    trained_model.model.train(was_training)
    axis = everyone()
    if axis is not None:
        first, *others = gather_objects(found, axis, "certificates")
        for other in others:
            first.add(other)
        found = first
    return found


def first_rows(parts: Iterable[InstructionDataset], num_rows: int) -> tuple[int, list[Finding]]:
    """The short form: how many rows of the beginning of each data set were looked at, and the first
    difference of each.
    """
    looked, findings = 0, []
    for samples in parts:
        first = next(iter(samples.source.files), None)
        if first is not None and kind_of(first) in WHOLE and first.stat().st_size > LARGE:
            continue
        for number, row in enumerate(itertools.islice(samples.source.rows(), num_rows)):
            try:
                expected = expected_of(row, samples.tokenizer, pairs=samples.num_sides == 2)
            except DataError:
                continue
            looked += 1
            words = [lost for one in expected for lost in one.lost]
            for index in samples.samples_of(number):
                side = expected[samples.row_and_start(index)[0] % samples.num_sides]
                words += _difference(samples[index], side, samples, index)
            findings += [Finding(row.location, word) for word in words[:1]]
    return looked, findings


def _difference(
    item: Item, expected: Expected, samples: InstructionDataset, index: int
) -> list[str]:
    start, is_text = samples.row_and_start(index)[1], samples.is_text(index)
    found = difference(item, expected, start, continues=is_text, tokenizer=samples.tokenizer)
    return [] if found is None else [found]


Rows = dict[tuple[int, int], tuple[str, Expected | None]]  # place, and what is expected


def _rows_of(steps: Sequence[Sequence[Batch]], packed: PackedSamples | PreferencePairs) -> Rows:
    """What is expected of each row of the data that is in the steps, by data set and number."""
    wanted: dict[int, tuple[InstructionDataset, set[int]]] = {}
    for batch in itertools.chain.from_iterable(steps):
        for number in batch["number"].tolist():
            for sample in packed.rows[number]:
                samples, index = _origin(packed, sample)
                numbers = wanted.setdefault(id(samples), (samples, set()))[1]
                numbers.add(samples.row_and_start(index)[0])
    found: Rows = {}
    for key, (samples, numbers) in wanted.items():
        size = samples.num_sides
        stop = max(numbers) // size + 1
        for number, row in enumerate(itertools.islice(samples.source.rows(), stop)):
            own = range(size * number, size * number + size)
            if numbers.isdisjoint(own):
                continue
            expected: Sequence[Expected | None]
            try:
                expected = expected_of(row, samples.tokenizer, pairs=size == 2)
            except DataError:
                expected = [None] * size
            for place, one, side in zip(own, expected, ("chosen", "rejected"), strict=False):
                found[key, place] = f"{row.location}, {side}" if size == 2 else row.location, one
    return found


def _origin(packed: PackedSamples | PreferencePairs, sample: int) -> tuple[InstructionDataset, int]:
    samples = packed.samples
    return samples.origin(sample) if isinstance(samples, Mixture) else (samples, sample)


def _pieces(
    batches: Sequence[Batch], packed: PackedSamples | PreferencePairs, rows: Rows
) -> list[_PackedSample]:
    """The samples of batches; the two of a pair one after the other."""
    found = []
    for place, batch in enumerate(batches):
        numbers = batch["number"].tolist()
        for row, number in enumerate(numbers):
            column = 0
            for side, sample in enumerate(packed.rows[number]):
                samples, index = _origin(packed, sample)
                source, start = samples.row_and_start(index)
                where, expected = rows[id(samples), source]
                stop = column + int(samples.lengths[index])
                columns, is_text = slice(column, stop), samples.is_text(index)
                at = row
                if isinstance(packed, PreferencePairs):  # the better answers of a batch come first
                    at, columns = row + side * len(numbers), slice(0, stop - column)
                found.append(_PackedSample(where, place, at, columns, expected, start, is_text))
                column = stop
    return found


def _step(
    goal: Goal,
    batches: Sequence[Batch],
    pieces: Sequence[_PackedSample],
    number: int,
    found: Certificate,
    sides: int,
) -> None:
    """Compare one step, and add to what was found. Collective.

    Args:
        sides: how many pieces, one after the other, have one loss.
    """
    trained_model = goal.trained_model
    states, gradients = _of_run(goal, batches)
    beside, behind = _attended_tokens(goal, batches, pieces, states)
    wanted = [_targets(piece, batches) for piece in pieces]
    counts = [sum(int((one != -100).sum()) for one in wanted), len(pieces) // sides]
    sums = bmt.sum_loss(torch.tensor(counts, dtype=torch.float64, device=bmt.device()))
    loss_tokens, pairs = (max(round(one * bmt.world_size()), 1) for one in sums.tolist())
    total = loss_tokens if sides == 1 else pairs
    found.loss_tokens += loss_tokens
    found.conversations += len(pieces)
    axis = everyone()
    most = int(largest([len(pieces)], axis, "conversations of a step")[0]) if axis else len(pieces)
    for place in range(0, most, sides):
        # a rank with fewer goes on with its first: all gather weights together
        at = place if place < len(pieces) else 0
        group, targets = pieces[at : at + sides], wanted[at : at + sides]
        alone = _computed_alone(goal, group, targets, batches, total)
        if place >= len(pieces):
            continue
        for piece, own, (state, gradient) in zip(group, targets, alone, strict=True):
            found.tokens += len(own)
            text = _row(piece, batches, trained_model.tokenizer)
            spot = piece.batch, (piece.row, piece.columns)
            marks = beside[spot[0]][spot[1]], behind[spot[0]][spot[1]]
            run = states[spot[0]][spot[1]], gradients[spot[0]][spot[1]]
            words = _TokenNames(piece, batches, trained_model.tokenizer)
            other, deviation = _computed(
                run, (state, gradient), marks, total if sides == 1 else None, words
            )
            found.deviation = max(found.deviation, deviation)
            if piece.expected is None:
                found.unknown.append(piece.location)
            lost = piece.expected.lost[:1] if piece.expected else []
            for said in [*lost, *filter(None, [text or other])]:
                found.findings.append(Finding(f"step {number}, {piece.location}", said))


class _TokenNames(NamedTuple):
    """Names of the tokens of a piece."""

    piece: _PackedSample
    batches: Sequence[Batch]
    tokenizer: Any

    def of(self, place: int) -> str:
        ids = _ids(self.piece, self.batches).tolist()
        token = (
            repr(self.tokenizer.decode(ids[place : place + 1])) if place < len(ids) else "behind"
        )
        return f"token {self.piece.start + place}, {token}"


def _ids(piece: _PackedSample, batches: Sequence[Batch]) -> torch.Tensor:
    """The ids of its text."""
    own = piece.of(batches, "input_ids")
    if piece.expected is None:
        return own
    ids = piece.expected.ids[piece.start : piece.start + len(own)]
    return torch.tensor(ids, device=own.device)


def _targets(piece: _PackedSample, batches: Sequence[Batch]) -> torch.Tensor:
    """What should follow each token, -100 where that is not in the loss; where both are right, as
    the run has it.
    """
    own = piece.of(batches, "targets")
    if piece.expected is None:
        return own
    found = []
    for place, target in enumerate(own.tolist()):
        following = piece.start + place + 1
        is_seen = following < len(piece.expected.ids) and (piece.is_text or place + 1 < len(own))
        in_loss = piece.expected.in_loss[following] if is_seen else False
        in_loss = target != -100 if in_loss is None else in_loss
        found.append(piece.expected.ids[following] if in_loss else -100)
    return torch.tensor(found, device=own.device)


def _row(piece: _PackedSample, batches: Sequence[Batch], tokenizer: Any) -> str | None:
    """What differs in the row itself, in words."""
    if piece.expected is None:
        return None
    item = {name: piece.of(batches, name) for name in ("input_ids", "targets")}
    text = difference(
        item, piece.expected, piece.start, continues=piece.is_text, tokenizer=tokenizer
    )
    if text is not None:
        return text
    positions = piece.of(batches, "position_ids").tolist()
    wrong = next((n for n, position in enumerate(positions) if position != n), None)
    if wrong is None:
        return None
    word = _TokenNames(piece, batches, tokenizer).of(wrong)
    return f"{word}, has the position {positions[wrong]}, and is at {wrong}"


@contextlib.contextmanager
def _captured(trunk: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """The last hidden states (batch, length, width) of each call, as the head reads them."""
    seen: list[torch.Tensor] = []
    handle = trunk.register_forward_hook(lambda _, __, out: seen.append(out.last_hidden_state))
    try:
        yield seen
    finally:
        handle.remove()


Tensors = list[torch.Tensor]


def _of_run(goal: Goal, batches: Sequence[Batch]) -> tuple[Tensors, Tensors]:
    """The hidden states of each micro-batch, and the gradient of the step's loss by them."""
    states, gradients = [], []
    with _captured(goal.trained_model.trunk) as seen:
        for loss in goal.losses(batches):
            (gradient,) = torch.autograd.grad(loss, seen[-1])
            states.append(seen[-1].detach())
            gradients.append(gradient / bmt.world_size())  # ranks add up
    return states, gradients


def _computed_alone(
    goal: Goal,
    group: Sequence[_PackedSample],
    targets: Sequence[torch.Tensor],
    batches: Sequence[Batch],
    total: int,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Of samples by themselves: hidden states (length, width), and the gradient of their loss by
    them.
    """
    first = group[0]
    samples = [(_ids(piece, batches), own) for piece, own in zip(group, targets, strict=True)]
    references = batches[first.batch].get("reference")
    with _captured(goal.trained_model.trunk) as seen:
        loss = goal.loss_alone(samples, None if references is None else references[first.row])
    own = seen[-len(group) :]
    gradients = torch.autograd.grad(loss / total, own)
    return [(one[0].detach(), grad[0]) for one, grad in zip(own, gradients, strict=True)]


@torch.no_grad()
def _attended_tokens(
    goal: Goal, batches: Sequence[Batch], pieces: Sequence[_PackedSample], states: Tensors
) -> tuple[Tensors, Tensors]:
    """Which tokens (batch, length) change with those of other samples of their row, and with those
    that follow. Collective.
    """
    numbers = [torch.zeros_like(batch["input_ids"]) for batch in batches]  # 0 is padding
    later = [torch.zeros_like(number, dtype=torch.bool) for number in numbers]
    for piece in pieces:
        row = numbers[piece.batch][piece.row]
        row[piece.columns] = row.max() + 1
        half = (piece.columns.start + piece.columns.stop + 1) // 2
        later[piece.batch][piece.row, half : piece.columns.stop] = True
    most = float(max(int(number.max()) for number in numbers))
    axis = everyone()
    bits = int(largest([most], axis, "samples in a row")[0] if axis else most).bit_length()
    beside, behind = ([torch.zeros_like(one) for one in later] for _ in range(2))
    for place, batch in enumerate(batches):
        # any two samples differ in one bit of their numbers
        for bit, side in itertools.product(range(bits), (0, 1)):
            changed = (numbers[place] >> bit) % 2 == side
            beside[place] |= _moved(goal, batch, changed, states[place]) & (numbers[place] > 0)
        behind[place] |= _moved(goal, batch, later[place], states[place]) & ~beside[place]
    return beside, behind


def _moved(goal: Goal, batch: Batch, changed: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Which of the other tokens are computed otherwise when these are exchanged."""
    ids = batch["input_ids"]
    others = torch.where(changed, (ids * 7 + 13) % goal.trained_model.vocab_size, ids)
    with _captured(goal.trained_model.trunk) as seen:
        goal.loss_sum({**batch, "input_ids": others})
    return ~changed & ~_same(seen[-1], states, ROUNDING / 10)


def _same(one: torch.Tensor, other: torch.Tensor, rounding: float) -> torch.Tensor:
    """Which vectors are, up to rounding."""
    one, other = one.float(), other.float()
    return (one - other).norm(dim=-1) <= rounding * other.norm(dim=-1)


def _computed(
    run: Sequence[torch.Tensor],
    alone: Sequence[torch.Tensor],
    seen: Sequence[torch.Tensor],
    total: int | None,
    words: _TokenNames,
) -> tuple[str | None, float]:
    """The first token that the run computes or learns otherwise, in words; the largest deviation of
    a weight before it.
    """
    own, gradient = alone
    size, other_size = gradient.norm(dim=-1), run[1].norm(dim=-1)
    noise = 1e-4 * float(torch.maximum(size, other_size).max())
    # (length,): the run's weight of each token as a multiple of what it should be
    ratio = (run[1] * gradient).sum(-1) / (size * size).clamp(min=1e-30)
    along = (run[1] - ratio[:, None] * gradient).norm(dim=-1) <= 10 * ROUNDING * other_size + noise
    is_in_loss, weighs = size > noise, other_size > noise
    is_same = _same(run[0], own, ROUNDING)
    is_right = torch.where(is_in_loss, along & ((ratio - 1).abs() <= 10 * ROUNDING), ~weighs)
    wrong = seen[0] | seen[1] | ~is_same | ~is_right
    place = int(wrong.int().argmax()) if bool(wrong.any()) else len(wrong)
    good = is_in_loss[:place]
    deviation = float((ratio[:place][good] - 1).abs().max()) if bool(good.any()) else 0.0
    if place == len(wrong):
        return None, deviation
    here, following = words.of(place), words.of(place + 1)
    reasons = {
        f"{here}, sees other samples of its row": seen[0][place],
        f"{here}, sees what follows it": seen[1][place],
        f"{here}, is computed otherwise than alone: its position, or what it sees of its own "
        "sample, differs": not is_same[place],
        f"{following}, weighs in the loss, but should not be in it": not is_in_loss[place],
        f"{here}, is not trained to predict {following}": not along[place],
        f"{following}, weighs {_weights(float(ratio[place]), total)}": True,
    }
    return next(reason for reason, holds in reasons.items() if holds), deviation


def _weights(ratio: float, total: int | None) -> str:
    """A token's weight and what it should be, in words; of a pair they are known as a ratio."""
    if total is None:
        return f"{ratio:.4g} times what it should in the loss of its pair"
    return f"{ratio / total:.4g} in the loss, and should 1/{total}"
