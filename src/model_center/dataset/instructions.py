"""Instruction tuning and plain texts: rows of which a language model learns.

`rows` says where rows may come from, `conversations` what they may be, `chat` where their answers
are, `tokenised` keeps their tokens.
"""

from __future__ import annotations

import enum
import itertools
import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from model_center.dataset import padding
from model_center.dataset.chat import ChatTokenizer
from model_center.dataset.padding import Item
from model_center.dataset.rows import source
from model_center.dataset.task_dataset import at_least
from model_center.dataset.tokenised import tokens_of
from model_center.errors import DataError


class TooLong(enum.Enum):
    """What becomes of a conversation of more than `max_length` tokens.

    CUT loses its end, DROP all of it; REFUSE is an error.
    """

    CUT = "cut"
    DROP = "drop"
    REFUSE = "refuse"


class InstructionDataset(torch.utils.data.Dataset[Item]):
    """Conversations as `chat.ChatRenderer` writes them; texts between the tokenizer's bos and eos.

    A conversation is a sample. A text is as many as it takes: what does not fit into one goes on in
    the next, and nothing is lost. Items hold `input_ids`, int64 (length,), at most `max_length`;
    `targets`, int64 (length,): the next id where that is part of an answer of the assistant or ends
    it, or of a text, -100 elsewhere; and `input_length`. To waste no padding, see
    `packing.PackedSamples`.

    Attributes:
        source: of the rows.
        tokens: of all rows, whole.
        num_rows: rows of the data.
        num_sides: conversations of each row: 2 of preferences, else 1.
        lengths, num_loss_tokens: int64 (samples,), tokens of each and those in the loss.
        num_cut, num_dropped, tokens_lost: conversations that did not fit, and their tokens.
        passed_over: files of a folder that were not read.
    """

    def __init__(
        self,
        path: str | pathlib.Path,
        tokenizer: ChatTokenizer,
        max_length: int,
        too_long: TooLong = TooLong.CUT,
        *,
        pairs: bool = False,
        cache: pathlib.Path | None = None,
        workers: int = 1,
        report: Callable[[int], object] = lambda rows: None,
    ) -> None:
        """The rows of a file, a folder or a data set of the hub.

        Args:
            path: of the file or folder, or the name of a data set of the hub.
            tokenizer: a fast one of transformers.
            max_length: of samples, tokens.
            too_long: what becomes of conversations that are longer.
            pairs: whether rows are preferences: each is two samples, the better answer first, and
                one is left out with the other.
            cache: a folder in which tokens are kept for the next run; None for nowhere.
            workers: processes that tokenise.
            report: called with the number of rows tokenised so far.

        Raises:
            DataError: for data that are missing or empty, naming file and row for one that cannot
                be read, is not of a known form, is refused by the chat template, or is too long
                where that is refused; and for a tokenizer without offsets.
        """
        at_least(max_length, 2, "max_length")
        if not tokenizer.is_fast:
            raise DataError(
                f"{type(tokenizer).__name__} does not tell where tokens come from: "
                "expected a fast tokenizer."
            )
        data = source(path)
        self.source, self.tokenizer = data, tokenizer
        self.max_length = max_length
        self.passed_over = data.passed_over
        self.tokens = tokens_of(data, tokenizer, cache, pairs=pairs, workers=workers, report=report)
        self.num_sides = size = 2 if pairs else 1  # of a conversation, before it is cut
        lengths = self.tokens.stops - self.tokens.starts
        is_long = (lengths > max_length) & ~self.tokens.is_text
        of_row = np.logical_or.reduce(is_long.reshape(-1, size), axis=1)
        if too_long is TooLong.REFUSE and of_row.any():
            number = int(is_long.argmax())
            first = next(itertools.islice(data.rows(), number // size, None))
            raise DataError(
                f"{first.location}: the conversation has {lengths[number]} tokens, and "
                f"{of_row.sum()} of {len(of_row)} rows have more than {max_length}: raise "
                "max_length, or let them be cut or dropped."
            )
        is_long = of_row.repeat(size)  # a pair goes as a whole
        is_dropped = is_long if too_long is TooLong.DROP else np.zeros_like(is_long)
        counts = np.where(self.tokens.is_text, -(-lengths // max_length), lengths > 0)
        counts[is_dropped] = 0
        # (rows + 1,): the number of the first sample of each row
        self._firsts = np.concatenate([[0], counts.cumsum()])
        row = np.repeat(np.arange(len(lengths)), counts)
        piece = np.arange(self._firsts[-1]) - self._firsts[row]
        self._starts = self.tokens.starts[row] + piece * max_length
        self.lengths: npt.NDArray[np.int64] = np.minimum(
            self.tokens.stops[row] - self._starts, max_length
        )
        # The last token of a text's sample predicts the first one of the next sample.
        self._continues = self.tokens.is_text[row]
        predicting = self.lengths - ~self._continues
        self.num_loss_tokens: npt.NDArray[np.int64] = _sums(
            self.tokens.in_loss, self._starts, predicting
        )
        self.num_rows = len(of_row)
        self.num_dropped = int(is_dropped.sum()) // size
        self.num_cut = int(of_row.sum()) - self.num_dropped
        self.tokens_lost = int(lengths.sum() - self.lengths.sum())

    @property
    def fill(self) -> dict[str, int]:
        """What rows are padded with, by key; 0 for keys that are not named."""
        return {"input_ids": self.tokenizer.pad_token_id or 0, "targets": -100}

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.lengths)

    def samples_of(self, row: int) -> range:
        """The numbers of the samples of a row: none of one that was dropped, several of a text."""
        size = self.num_sides
        return range(int(self._firsts[size * row]), int(self._firsts[size * row + size]))

    def row_and_start(self, index: int) -> tuple[int, int]:
        """The row that sample `index` is of, and the place of its first token in that. Each answer
        of a row of preferences counts as a row.
        """
        row = int(np.searchsorted(self._firsts, index, "right")) - 1
        return row, int(self._starts[index] - self.tokens.starts[row])

    def is_text(self, index: int) -> bool:
        """Whether sample `index` is one of a text."""
        return bool(self._continues[index])

    def num_bytes(self, index: int) -> int | None:
        """Bytes of the text in the loss of sample `index`; None where that is not known."""
        if self.tokens.num_bytes is None:
            return None
        start = int(self._starts[index])
        stop = start + int(self.lengths[index]) - (not self._continues[index])
        following = self.tokens.num_bytes[start + 1 : stop + 1]
        in_loss = self.tokens.in_loss[start:stop][: len(following)]
        return int((following * in_loss.astype(np.int64)).sum())

    def __getitem__(self, index: int) -> Item:
        """Sample `index`."""
        index = range(len(self))[index]
        start, length = int(self._starts[index]), int(self.lengths[index])
        stop = start + length
        ids = torch.from_numpy(self.tokens.ids[start:stop].astype(np.int64))
        # a text's tokens lie one after the other, through all its samples
        following = np.zeros(length, np.int64)
        behind = self.tokens.ids[start + 1 : stop + 1]
        following[: len(behind)] = behind
        in_loss = self.tokens.in_loss[start:stop].astype(bool)
        in_loss[-1] &= self._continues[index]
        targets = torch.from_numpy(np.where(in_loss, following, -100))
        return {"input_ids": ids, "targets": targets, "input_length": torch.tensor(length)}

    def collate(self, items: Sequence[Item]) -> Item:
        """A batch of B `items`: (B, longest) tensors, padded on the right, and (B,) lengths."""
        return padding.collate(items, self.fill)


def _sums(
    values: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The sum of `lengths` values from each start on; what is summed does not overlap."""
    if not len(starts):
        return np.zeros(0, np.int64)
    found = np.zeros(len(starts), np.int64)
    some = np.flatnonzero(lengths)
    ends = np.stack([starts[some], starts[some] + lengths[some]], 1).reshape(-1)
    if len(ends) and ends[-1] == len(values):
        ends = ends[:-1]
    if len(ends):
        found[some] = np.add.reduceat(values, ends, dtype=np.int64)[::2]
    return found
