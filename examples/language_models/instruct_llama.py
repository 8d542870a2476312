"""Teach LLaMA, Qwen2 or Mistral to follow instructions: it learns the answers of conversations,
whole or by LoRA.

The data are conversations in JSON lines, train.jsonl and val.jsonl in `<base>/chat`, packed into
rows of --max-length tokens.
"""

from __future__ import annotations

import pathlib
from typing import Any

import torch

import bmtrain as bmt
from adapters import add_lora, save_lora
from classification import Batch
from folders import data_folder
from model_center.arguments import make_parser, parse_args
from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.dataset.packing import PackedSamples, segment_mask
from model_center.model import Llama
from model_center.tokenizer import LlamaTokenizer, MistralTokenizer, Qwen2Tokenizer
from model_center.training import Run, class_of, make_loader, pretrained, save_model, setup

TOKENIZERS: dict[str, Any] = {
    "Llama": LlamaTokenizer,
    "Mistral": MistralTokenizer,
    "Qwen2": Qwen2Tokenizer,
}


def answer_loss(model: Llama, batch: Batch) -> torch.Tensor:
    """Summed over the tokens of answers; nothing else is scored."""
    mask = segment_mask(batch["segments"])
    out = model(
        batch["input_ids"],
        attention_mask=mask,
        position_ids=batch["position_ids"],
        output_logits=False,
    )
    learnt = batch["targets"] != -100
    logits = model.logits(out.last_hidden_state[learnt])
    return bmt.loss.FusedCrossEntropy(reduction="sum")(logits, batch["targets"][learnt])


@torch.no_grad()
def mean_loss(model: Llama, loader: DistributedDataLoader) -> float:
    """The loss per token of all answers."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=bmt.device())  # loss, tokens
    for batch in loader:
        sums[0] += answer_loss(model, batch)
        sums[1] += (batch["targets"] != -100).sum()
    model.train()
    loss, tokens = bmt.sum_loss(sums).tolist()
    return float(loss / tokens)


def main() -> None:
    """The program."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--lora-rank",
        type=int,
        default=0,
        help="of the adapters; 0 trains all weights (default: 0)",
    )
    parser.add_argument(
        "--lora-alpha", type=int, default=16, help="adapters count alpha / rank times (default: 16)"
    )
    parser.add_argument(
        "--lora-dropout", type=float, default=0.0, help="of what adapters read (default: 0)"
    )
    args = parse_args(parser, required=("--model-config", "--base-path"))
    setup(args)
    kind = class_of(args.model_config, Llama)
    tokenizer = TOKENIZERS[kind.__name__].from_pretrained(args.model_config)
    path = data_folder(args.base_path, "chat")
    train, dev = (
        make_loader(
            PackedSamples(
                InstructionDataset(path / f"{split}.jsonl", tokenizer, args.max_length),
                args.max_length,
            ),
            args,
            shuffle=split == "train",
        )
        for split in ("train", "val")
    )
    model = pretrained(kind, args)
    lora = (
        add_lora(model, args.lora_rank, args.lora_alpha, args.lora_dropout)
        if args.lora_rank
        else None
    )

    with Run(model, train, args) as run:
        for _ in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["targets"] for batch in batches)
                run.update(mean(answer_loss(model, batch)) for batch in batches)
            run.record(validation_loss=mean_loss(model, dev))
        if lora is None:
            save_model(model, args, tokenizer)
        elif args.save is not None:
            save_lora(
                model, lora, pathlib.Path(args.save, args.save_name or "adapter"), args.model_config
            )


if __name__ == "__main__":
    main()
