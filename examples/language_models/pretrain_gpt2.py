"""Train GPT-2 from scratch on token data: --base-path is the folder, --dataset-name the PREFIX of
PREFIX.bin and PREFIX.idx.

`python -m model_center preprocess --append-eod` makes them from text.
"""

from __future__ import annotations

import pathlib

import torch

import bmtrain as bmt
from classification import Batch
from model_center.arguments import make_parser, parse_args
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.dataset.packed import PackedDataset
from model_center.model import GPT2
from model_center.training import Run, make_loader, save_model, setup, untrained


def main() -> None:
    """The program."""
    args = parse_args(
        make_parser(__doc__), required=("--model-config", "--base-path", "--dataset-name")
    )
    setup(args)
    tokens = MMapIndexedDataset(str(pathlib.Path(args.base_path, args.dataset_name)))
    loader = make_loader(PackedDataset(tokens, args.max_length, args.seed), args, shuffle=True)
    model = untrained(GPT2, args)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum", ignore_index=-100)

    def loss(batch: Batch) -> torch.Tensor:
        return loss_sum(model(batch["input_ids"]).logits.flatten(0, 1), batch["targets"].flatten())

    with Run(model, loader, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["targets"] for batch in batches)
                run.update(mean(loss(batch)) for batch in batches)
        save_model(model, args)


if __name__ == "__main__":
    main()
