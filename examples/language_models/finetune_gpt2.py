"""Fine-tune GPT-2 on a task of SuperGLUE: it learns the prompts as texts, and the word of the class
that follows each.
"""

from __future__ import annotations

from functools import partial

import torch

import bmtrain as bmt
import superglue
from classification import Batch, causal_scores, evaluate, word_scores, words_of
from model_center.arguments import make_parser, parse_args
from model_center.dataset.gpt2dataset import DATASET
from model_center.model import GPT2
from model_center.tokenizer import GPT2Tokenizer
from model_center.training import Run, pretrained, save_model, setup


def main() -> None:
    """The program."""
    args = parse_args(
        make_parser(__doc__), required=("--model-config", "--base-path", "--dataset-name")
    )
    setup(args)
    tokenizer = GPT2Tokenizer.from_pretrained(args.model_config)
    train, dev = superglue.load(DATASET, args, tokenizer, args.max_decoder_length)
    words = words_of(DATASET[args.dataset_name], tokenizer)
    model = pretrained(GPT2, args)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum", ignore_index=-100)

    def loss(
        batch: Batch, of_tokens: bmt.loss.TokenMean, of_classes: bmt.loss.TokenMean
    ) -> torch.Tensor:
        out = model(batch["input_ids"], length=batch["input_length"])
        scores = word_scores(model, out.last_hidden_state, batch["index"], words)
        text = loss_sum(out.logits.flatten(0, 1), batch["targets"].flatten())
        return of_tokens(text) + of_classes(loss_sum(scores, batch["labels"]))

    with Run(model, train, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                of_tokens, of_classes = (
                    bmt.loss.TokenMean(batch[key] for batch in batches)
                    for key in ("targets", "labels")
                )
                run.update(loss(batch, of_tokens, of_classes) for batch in batches)
            scorer = superglue.scorer(args.dataset_name, dev.dataset)
            run.record(
                **evaluate(model, dev, scorer, partial(causal_scores, model, words=words), "labels")
            )
        save_model(model, args, tokenizer)


if __name__ == "__main__":
    main()
