"""PreferencePairs of a better and a worse answer to the same prompt, as batches of rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from model_center.dataset import padding
from model_center.dataset.mixture import Mixture
from model_center.dataset.padding import Item
from model_center.errors import DataError


class PreferencePairs(torch.utils.data.Dataset[Item]):
    """The pairs of a mixture whose parts were read with `pairs=True`.

    An item is two samples. A batch of B items has 2 B rows, the better answers first. It holds,
    int64 (2 B, longest), `input_ids`; `targets`, the next id where it is part of the answer, -100
    elsewhere; `position_ids`; `segments`, 1 for tokens and 0 for padding; and of each pair
    `reference`, float32 (B, 2), what the attribute says of it, and `number`, int64 (B,).

    Attributes:
        samples: of the mixture, two of each pair.
        rows: the numbers of the two samples of each pair.
        num_without_answer: pairs left out because one of the answers is not within `max_length`.
        reference: float32 (pairs, 2): log-probabilities of both answers by the reference model; 0
            before they are computed.

    Raises:
        DataError: if no pair is left.
    """

    def __init__(self, samples: Mixture) -> None:
        self.samples = samples
        useful = samples.num_loss_tokens.reshape(-1, 2).min(1) > 0
        self.rows = [[2 * n, 2 * n + 1] for n in np.flatnonzero(useful).tolist()]
        self.num_without_answer = len(useful) - len(self.rows)
        if not self.rows:
            raise DataError(
                f"of no pair are both answers within the first {samples.max_length} tokens: raise "
                "max_length."
            )
        self.reference = torch.zeros(len(self.rows), 2)

    def __len__(self) -> int:
        """The number of pairs."""
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        """Pair `index`: of both samples `input_ids` and `targets`, and its reference and number."""
        better, worse = (self.samples[number] for number in self.rows[index])
        return {
            "better": better["input_ids"],
            "worse": worse["input_ids"],
            "better_targets": better["targets"],
            "worse_targets": worse["targets"],
            "reference": self.reference[index],
            "number": torch.tensor(index),
        }

    def collate(self, items: Sequence[Item]) -> Item:
        """A batch, its rows padded on the right."""
        ids, targets = (
            [item[side + end] for side in ("better", "worse") for item in items]
            for end in ("", "_targets")
        )
        rows = [
            {
                "input_ids": row,
                "targets": target,
                "position_ids": torch.arange(len(row)),
                "segments": torch.ones_like(row),
            }
            for row, target in zip(ids, targets, strict=True)
        ]
        return {
            **padding.collate(rows, self.samples.fill),
            "reference": torch.stack([item["reference"] for item in items]),
            "number": torch.stack([item["number"] for item in items]),
        }
