"""Texts one after the other, cut into rows: a token sees all of its row before it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from model_center.dataset import padding
from model_center.dataset.mixture import Mixture, MixturePart
from model_center.dataset.packed import IGNORED, Concatenation
from model_center.dataset.padding import Item, Overview
from model_center.errors import DataError


class ConcatenatedTexts(Concatenation):
    """All texts one after the other, cut into rows of `max_length` tokens.

    Texts are in another order in each epoch (`set_epoch`), so rows join others each time. Items
    hold, int64 (length,): `input_ids`; `targets`, the ids one place later; and `input_length`. Over
    the rows of an epoch every token is a target once, but for the first one of all, and for the
    token that begins texts, which would be trained to follow the one that ends them.

    Args:
        parts: texts, by number.
        max_length: of rows, tokens.
        least: rows that there are at least, one a rank; rows without targets make them up.
        seed: of the orders.
        shuffle: False leaves the texts in their order.

    Attributes:
        samples: of the parts.

    Raises:
        DataError: for conversations, and where there are fewer than two tokens.
    """

    def __init__(
        self,
        parts: Sequence[MixturePart],
        max_length: int,
        least: int = 1,
        seed: int = 0,
        *,
        shuffle: bool = True,
    ) -> None:
        self.samples = Mixture(parts)
        self._tokens = [part.samples.tokens for part in parts]
        numbers = [np.array(part.numbers, np.int64) for part in parts]
        pairs = list(zip(self._tokens, numbers, strict=True))
        if not all(tokens.is_text[some].all() for tokens, some in pairs):
            raise DataError(
                "conversations cannot be concatenated, because an answer would see other rows: "
                "give texts, or use --packing separate."
            )
        self._part = np.repeat(np.arange(len(pairs)), [len(some) for some in numbers])
        self._starts = np.concatenate([tokens.starts[some] for tokens, some in pairs])
        self._stops = np.concatenate([tokens.stops[some] for tokens, some in pairs])
        self._least, self._bos = least, parts[0].samples.tokenizer.bos_token_id
        super().__init__("the text", max_length, seed, shuffle=shuffle)

    def _sizes(self) -> npt.NDArray[np.int64]:
        return self._stops - self._starts

    def __len__(self) -> int:
        """Rows of an epoch, the last one included that may not be full."""
        return max(super().__len__(), self._least)

    def __getitem__(self, index: int) -> Item:
        """Row `index`."""
        start = range(len(self))[index] * self._length
        stop = min(start + self._length, self.num_tokens - 1)
        if stop <= start:  # one of those that make up for ranks
            return _item(self._read(0, 1)[0], np.array([IGNORED]))
        ids, is_first = self._read(start, stop + 1)
        begins = is_first[1:] & (ids[1:] == self._bos)
        return _item(ids[:-1], np.where(begins, IGNORED, ids[1:]))

    def collate(self, items: Sequence[Item]) -> Item:
        """A batch: (B, longest) tensors, padded on the right, and (B,) lengths."""
        return padding.collate(items, self.samples.fill)

    def overview(self) -> Overview:
        """What there is to say of the rows."""
        is_any = self._sizes() > 0
        first = self._part[is_any], self._starts[is_any]
        begins = sum(
            self._tokens[part].ids[at] == self._bos for part, at in zip(*first, strict=True)
        )
        learnt = self.num_tokens - max(int(begins), 1)
        layout = f"one after the other, in {len(self):,} rows of {self._length}"
        return Overview(learnt, 0, layout, self[0])

    def num_bytes(self) -> int | None:
        """Bytes of the text that is a target in an epoch; None where that is not known."""
        total = 0
        for part, start, size in zip(self._part, self._starts, self._sizes(), strict=True):
            sizes = self._tokens[part].num_bytes
            if sizes is None:
                return None
            total += int(sizes[start : start + size].sum(dtype=np.int64))
        return total - self._bytes_of_the_first()

    def _bytes_of_the_first(self) -> int:
        """Of the first token of all, which nothing predicts."""
        first, *_ = next(self._spans(0, 1))
        sizes = self._tokens[self._part[first]].num_bytes
        return 0 if sizes is None else int(sizes[self._starts[first]])

    def _read(self, start: int, stop: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        """The tokens [start, stop) of the epoch, and which of them begin a text."""
        parts, begins = [], []
        for number, done, count in self._spans(start, stop):
            first = self._starts[number] + done
            some = self._tokens[self._part[number]].ids[first : first + count]
            parts.append(some.astype(np.int64))
            begins.append(np.arange(done, done + count) == 0)
        return np.concatenate(parts), np.concatenate(begins)


def _item(ids: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> Item:
    return {
        "input_ids": torch.from_numpy(ids),
        "targets": torch.from_numpy(targets),
        "input_length": torch.tensor(len(ids)),
    }
