"""Fine-tune LLaMA on a task of SuperGLUE: it learns the word of the class that follows each
prompt.
"""

from __future__ import annotations

from functools import partial

import bmtrain as bmt
import superglue
from classification import causal_scores, evaluate, words_of
from model_center.arguments import make_parser, parse_args
from model_center.dataset.llamadataset import DATASET
from model_center.model import Llama
from model_center.tokenizer import LlamaTokenizer
from model_center.training import Run, pretrained, save_model, setup


def main() -> None:
    """The program."""
    args = parse_args(
        make_parser(__doc__), required=("--model-config", "--base-path", "--dataset-name")
    )
    setup(args)
    tokenizer = LlamaTokenizer.from_pretrained(args.model_config)
    train, dev = superglue.load(DATASET, args, tokenizer, args.max_decoder_length)
    words = words_of(DATASET[args.dataset_name], tokenizer)
    model = pretrained(Llama, args)
    scores = partial(causal_scores, model, words=words)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum")

    with Run(model, train, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["labels"] for batch in batches)
                run.update(mean(loss_sum(scores(batch), batch["labels"])) for batch in batches)
            run.record(
                **evaluate(
                    model, dev, superglue.scorer(args.dataset_name, dev.dataset), scores, "labels"
                )
            )
        save_model(model, args, tokenizer)


if __name__ == "__main__":
    main()
