"""Fine-tune CPM-2 on LCQMC, pairs of Chinese questions: the word that the decoder writes says if
they ask the same.
"""

from __future__ import annotations

from functools import partial

import bmtrain as bmt
from classification import Scorer, evaluate, seq2seq_scores, words_of
from folders import data_folder
from model_center.arguments import make_parser, parse_args
from model_center.dataset.cpm2dataset import DATASET
from model_center.model import CPM2
from model_center.tokenizer import CPM2Tokenizer
from model_center.training import Run, make_loader, pretrained, save_model, setup


def main() -> None:
    """The program."""
    args = parse_args(make_parser(__doc__), required=("--model-config", "--base-path"))
    setup(args)
    tokenizer = CPM2Tokenizer.from_pretrained(args.model_config)
    task, path = DATASET[args.dataset_name or "LCQMC"], data_folder(args.base_path, "paraphrase")
    lengths = args.max_encoder_length, args.max_decoder_length
    splits = {name: task(path, name, 0, 1, tokenizer, *lengths) for name in ("train", "dev")}
    train, dev = (
        make_loader(splits["train"], args, shuffle=True),
        make_loader(splits["dev"], args, shuffle=False),
    )
    words = words_of(task, tokenizer)
    model = pretrained(CPM2, args)
    scores = partial(seq2seq_scores, model, words=words)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum")

    with Run(model, train, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["targets"] for batch in batches)
                run.update(mean(loss_sum(scores(batch), batch["targets"])) for batch in batches)
            run.record(**evaluate(model, dev, Scorer(len(words)), scores, "targets"))
        save_model(model, args, tokenizer)


if __name__ == "__main__":
    main()
