"""Fine-tune T5 on SQuAD: it writes the answer to a question about a text.

Evaluated by beam search, divided among ranks.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from classification import Batch
from folders import data_folder
from model_center.arguments import make_parser, parse_args
from model_center.dataset.loader import DistributedDataLoader
from model_center.dataset.t5dataset import DATASET
from model_center.generation.t5 import T5BeamSearch
from model_center.metrics import AnswerScore
from model_center.model import T5
from model_center.tokenizer import T5Tokenizer
from model_center.training import Run, make_loader, pretrained, save_model, setup


def evaluate(
    model: T5,
    tokenizer: T5Tokenizer,
    loader: DistributedDataLoader,
    beam_size: int,
    max_length: int,
) -> dict[str, float]:
    """Exact match and F1 of the answers to all questions."""
    search, score = T5BeamSearch(model, tokenizer), AnswerScore()
    for batch in loader:
        score.update(
            search.generate(batch["inputs"], beam_size=beam_size, max_length=max_length),
            batch["targets"],
        )
    model.train()
    exact, f1 = score.compute()
    return {"exact_match": exact, "f1": f1}


def main() -> None:
    """The program."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--beam-size",
        type=int,
        default=3,
        help="of the beam search that writes answers (default: 3)",
    )
    args = parse_args(parser, required=("--model-config", "--base-path"))
    setup(args)
    tokenizer = T5Tokenizer.from_pretrained(args.model_config)
    path = data_folder(args.base_path, "squad")
    lengths = args.max_encoder_length, args.max_decoder_length
    splits = {name: DATASET["SQuAD"](path, name, tokenizer, *lengths) for name in ("train", "dev")}
    train, dev = (
        make_loader(splits["train"], args, shuffle=True),
        make_loader(splits["dev"], args, shuffle=False),
    )
    model = pretrained(T5, args)
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum", ignore_index=-100)

    def loss(batch: Batch) -> torch.Tensor:
        lengths = (batch[name].sum(1) for name in ("attention_mask", "decoder_attention_mask"))
        logits = model(
            batch["input_ids"], next(lengths), batch["decoder_input_ids"], next(lengths)
        ).logits
        return loss_sum(logits.flatten(0, 1), batch["targets"].flatten())

    with Run(model, train, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["targets"] for batch in batches)
                run.update(mean(loss(batch)) for batch in batches)
            run.record(**evaluate(model, tokenizer, dev, args.beam_size, args.max_decoder_length))
        save_model(model, args, tokenizer)


if __name__ == "__main__":
    main()
