"""Fine-tune T5 (T5 v1.1, mT5, Flan-T5) on a task of SuperGLUE: it learns the word of the class that
fills the prompt's gap.
"""

from __future__ import annotations

from functools import partial

import bmtrain as bmt
import superglue
from classification import evaluate, seq2seq_scores, words_of
from model_center.arguments import make_parser, parse_args
from model_center.dataset.t5dataset import DATASET
from model_center.model import T5
from model_center.tokenizer import T5Tokenizer
from model_center.training import Run, pretrained, save_model, setup


def main() -> None:
    """The program."""
    args = parse_args(
        make_parser(__doc__), required=("--model-config", "--base-path", "--dataset-name")
    )
    setup(args)
    tokenizer = T5Tokenizer.from_pretrained(args.model_config)
    train, dev = superglue.load(
        DATASET, args, tokenizer, args.max_encoder_length, args.max_decoder_length
    )
    words = words_of(DATASET[args.dataset_name], tokenizer)
    model = pretrained(T5, args)
    scores = partial(seq2seq_scores, model, words=words)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum")

    with Run(model, train, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["targets"] for batch in batches)
                run.update(mean(loss_sum(scores(batch), batch["targets"])) for batch in batches)
            run.record(
                **evaluate(
                    model, dev, superglue.scorer(args.dataset_name, dev.dataset), scores, "targets"
                )
            )
        save_model(model, args, tokenizer)


if __name__ == "__main__":
    main()
