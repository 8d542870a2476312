"""Fine-tune CPM-1 on LCQMC, pairs of Chinese questions: the word that fills the prompt's blank says
if they ask the same.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from classification import Batch, Scorer, evaluate, word_scores, words_of
from folders import data_folder
from model_center.arguments import make_parser, parse_args
from model_center.dataset.cpm1dataset import DATASET
from model_center.model import CPM1
from model_center.tokenizer import CPM1Tokenizer
from model_center.training import Run, make_loader, pretrained, save_model, setup


def main() -> None:
    """The program."""
    args = parse_args(make_parser(__doc__), required=("--model-config", "--base-path"))
    setup(args)
    tokenizer = CPM1Tokenizer.from_pretrained(args.model_config)
    task, path = DATASET[args.dataset_name or "LCQMC"], data_folder(args.base_path, "paraphrase")
    splits = {name: task(path, name, 0, 1, tokenizer, args.max_length) for name in ("train", "dev")}
    train, dev = (
        make_loader(splits["train"], args, shuffle=True),
        make_loader(splits["dev"], args, shuffle=False),
    )
    words = words_of(task, tokenizer)
    model = pretrained(CPM1, args)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum")

    def scores(batch: Batch) -> torch.Tensor:
        inputs = {"length": batch["input_length"], "context": batch["input_context"]}
        hidden = model(batch["input_tokens"], **inputs, output_logits=False).last_hidden_state
        return word_scores(model, hidden, batch["index"], words)

    with Run(model, train, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["targets"] for batch in batches)
                run.update(mean(loss_sum(scores(batch), batch["targets"])) for batch in batches)
            run.record(**evaluate(model, dev, Scorer(len(words)), scores, "targets"))
        save_model(model, args, tokenizer)


if __name__ == "__main__":
    main()
