"""Train CPM-1 from scratch: of each piece of text it learns to write a random span in the middle,
having read the rest.

--base-path is a folder of token data, --dataset-name the PREFIX of PREFIX.bin and PREFIX.idx in it.
`python -m model_center preprocess --preset cpm1` makes them from text.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import numpy as np
import torch

import bmtrain as bmt
from classification import Batch
from model_center.arguments import make_parser, parse_args
from model_center.dataset.cpm1 import CPM1_Dataset_Merge
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.dataset.packing import best_fit
from model_center.dataset.padding import collate
from model_center.model import CPM1
from model_center.training import Run, make_loader, save_model, setup, untrained


class PackedRows(torch.utils.data.Dataset[Batch]):
    """Pieces of text packed into rows of at most `max_length` tokens, each seeing itself only.

    Rows hold, (length,): `input_ids`; `targets`, -100 for what is not to be written; `context`,
    false in the spans to be written; and `span`, the number of the piece, from 1 on (0 is padding).
    """

    def __init__(self, pieces: CPM1_Dataset_Merge, max_length: int) -> None:
        self.pieces = pieces
        self.rows = best_fit(pieces.sizes.tolist(), max_length)

    def set_epoch(self, epoch: int) -> None:
        """Other spans in every epoch."""
        self.pieces.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Batch:
        pieces = [self.pieces[number] for number in self.rows[index]]
        ids, targets, lengths, context = zip(*pieces, strict=True)
        numbers = torch.arange(1, len(pieces) + 1)
        return {
            "input_ids": torch.from_numpy(np.concatenate(ids).astype(np.int64)),
            "targets": torch.from_numpy(np.concatenate(targets)),
            "context": torch.from_numpy(np.concatenate(context)),
            "span": torch.repeat_interleave(numbers, torch.tensor(lengths)),
        }

    def collate(self, rows: Sequence[dict[str, torch.Tensor]]) -> Batch:
        """A batch (B, longest)."""
        return collate(rows, {"targets": -100, "context": 1})


def main() -> None:
    """The program."""
    args = parse_args(
        make_parser(__doc__), required=("--model-config", "--base-path", "--dataset-name")
    )
    setup(args)
    tokens = MMapIndexedDataset(str(pathlib.Path(args.base_path, args.dataset_name)))
    pieces = CPM1_Dataset_Merge(tokens, args.max_length, args.seed)
    loader = make_loader(PackedRows(pieces, args.max_length), args, shuffle=True)
    model = untrained(CPM1, args)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum")

    def loss(batch: Batch) -> torch.Tensor:
        out = model(
            batch["input_ids"], context=batch["context"], span=batch["span"], output_logits=False
        )
        written = batch["targets"] != -100  # nothing else is scored
        return loss_sum(model.logits(out.last_hidden_state[written]), batch["targets"][written])

    with Run(model, loader, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["targets"] for batch in batches)
                run.update(mean(loss(batch)) for batch in batches)
        save_model(model, args)


if __name__ == "__main__":
    main()
