"""Train CPM-2 from scratch on pairs of what the encoder reads and what the decoder writes.

--base-path is a folder of token data, --dataset-name the PREFIX of PREFIX_context.bin and .idx and
PREFIX_target.bin and .idx in it: sequence by sequence what belongs together. The decoder begins
with the first id of a target and writes the others.
"""

from __future__ import annotations

import pathlib

import torch

import bmtrain as bmt
from classification import Batch
from model_center.arguments import make_parser, parse_args
from model_center.dataset.cpm2 import CPM2_Dataset
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.model import CPM2
from model_center.training import Run, make_loader, save_model, setup, untrained


def main() -> None:
    """The program."""
    args = parse_args(
        make_parser(__doc__), required=("--model-config", "--base-path", "--dataset-name")
    )
    setup(args)
    prefix = pathlib.Path(args.base_path, args.dataset_name)
    context, target = (MMapIndexedDataset(f"{prefix}_{part}") for part in ("context", "target"))
    pairs = CPM2_Dataset(context, target, args.max_encoder_length, args.max_decoder_length)
    loader = make_loader(torch.utils.data.Subset(pairs, pairs.short), args, shuffle=True)
    model = untrained(CPM2, args)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum")

    def loss(batch: Batch) -> torch.Tensor:
        # rows are padded beyond that
        longest, steps = int(batch["len_ctx"].max()), int(batch["len_tgt"].max())
        read, targets = batch["tgt"][:, :steps].clamp(min=0), batch["tgt"][:, 1 : steps + 1]
        out = model(
            batch["ctx"][:, :longest], batch["len_ctx"], read, batch["len_tgt"], output_logits=False
        )
        written = targets != -100
        return loss_sum(model.logits(out.last_hidden_state[written]), targets[written])

    with Run(model, loader, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["tgt"][:, 1:] for batch in batches)
                run.update(mean(loss(batch)) for batch in batches)
        save_model(model, args)


if __name__ == "__main__":
    main()
