"""Fine-tune BERT on a task of SuperGLUE: a new head on what the pooler makes of the first token."""

from __future__ import annotations

import pathlib

import torch

import bmtrain as bmt
import superglue
from classification import Batch, evaluate
from model_center.arguments import make_parser, parse_args
from model_center.dataset.bertdataset import DATASET
from model_center.layer import Linear
from model_center.model import Bert
from model_center.tokenizer import BertTokenizer
from model_center.training import Run, pretrained, save_model, setup

# COPA: a score for each of its choices
HEADS = {"BoolQ": 2, "CB": 3, "COPA": 1, "RTE": 2, "WiC": 2, "WSC": 2}


class Classifier(torch.nn.Module):
    """BERT with scores for classes."""

    def __init__(self, bert: Bert, num_scores: int) -> None:
        super().__init__()
        self.bert = bert
        self.dense = Linear(
            bert.config.dim_model, num_scores, dtype=bert.config.dtype, init_std=0.02, bias=True
        )
        bmt.init_parameters(self.dense)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores (batch, classes)."""
        if "input_ids" in batch:
            return self.scores(batch, "")
        return torch.cat([self.scores(batch, choice) for choice in "01"], dim=1)

    def scores(self, batch: Batch, choice: str) -> torch.Tensor:
        """(batch, num_scores) for the inputs whose names end in `choice`."""
        inputs = {
            name: batch[name + choice] for name in ("input_ids", "attention_mask", "token_type_ids")
        }
        return self.dense(
            self.bert(**inputs, output_logits=False, output_pooler_output=True).pooler_output
        )


def main() -> None:
    """The program."""
    args = parse_args(
        make_parser(__doc__), required=("--model-config", "--base-path", "--dataset-name")
    )
    setup(args)
    tokenizer = BertTokenizer.from_pretrained(args.model_config)
    train, dev = superglue.load(DATASET, args, tokenizer, args.max_encoder_length)
    model = Classifier(pretrained(Bert, args), HEADS[args.dataset_name])
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum")

    with Run(model, train, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["labels"] for batch in batches)
                run.update(mean(loss_sum(model(batch), batch["labels"])) for batch in batches)
            run.record(
                **evaluate(
                    model, dev, superglue.scorer(args.dataset_name, dev.dataset), model, "labels"
                )
            )
        folder = save_model(model.bert, args, tokenizer)
        if folder is not None:
            bmt.save(model.dense, str(pathlib.Path(folder, "head.pt")))


if __name__ == "__main__":
    main()
