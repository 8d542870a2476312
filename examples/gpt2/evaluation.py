"""What a model has learned: its loss on held-out text, and text that it writes.

All ranks call these together.
"""

from __future__ import annotations

import torch

import bmtrain as bmt
from data import IGNORED, Position, TokenData, validation_batches
from layers import rows_of_all
from models import GPT
from options import Options
from report import Report
from together import from_rank_zero


def batch_loss(
    model: GPT, loss_function: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    """Loss of int64 (batch, seq) inputs and targets, on whichever device they are; with those of
    all tensor-parallel ranks.
    """
    inputs, targets = (
        inputs.to(bmt.device(), non_blocking=True),
        targets.to(bmt.device(), non_blocking=True),
    )
    positions = torch.arange(inputs.shape[1], device=inputs.device).expand_as(inputs)
    logits = model(inputs, positions, None)  # sequences are packed: nothing is padding
    loss: torch.Tensor = loss_function(logits.flatten(0, 1), rows_of_all(targets).flatten())
    return loss


@torch.no_grad()
def validate(
    model: GPT, data: TokenData, position: Position, options: Options, report: Report
) -> None:
    """Mean loss per held-out token, over all ranks."""
    loss_function = bmt.loss.FusedCrossEntropy(ignore_index=IGNORED, reduction="sum", parallel=True)
    model.eval()
    sums = torch.zeros(2, device=bmt.device())  # loss, tokens
    batches = validation_batches(
        data.valid,
        options.seq_len,
        options.batch_size,
        bmt.rank(),
        bmt.world_size(),
        options.val_samples,
    )
    for inputs, targets in batches:
        # each of them sums all their rows
        sums[0] += batch_loss(model, loss_function, inputs, targets) / bmt.config["tp_size"]
        sums[1] += (targets != IGNORED).sum()
    model.train()
    loss, tokens = bmt.sum_loss(sums).tolist()
    if tokens:
        report.record(position.step, validation_loss=loss / tokens)
    else:
        report.message("no validation loss: the held-out text is shorter than one sequence.")


@torch.no_grad()
def write_text(
    model: GPT,
    data: TokenData,
    prompt: str,
    *,
    num_tokens: int,
    seq_len: int,
    temperature: float = 0.6,
    top_k: int = 40,
) -> str:
    """The prompt and up to `num_tokens` tokens that the model adds, until it ends the text.

    All ranks add what rank 0 draws. The random generator is its own: training goes on as if no text
    had been written.
    """
    tokens = [data.end_of_text, *data.tokenizer.encode(prompt).ids]
    start = len(tokens)
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(seq_len, device=bmt.device()).unsqueeze(0)
    was_training = model.training
    model.eval()
    for _ in range(num_tokens):
        window = tokens[-seq_len:]
        # Always the same shape, so that a compiled model is compiled once; what follows the window
        # is not seen by it.
        padded = torch.tensor(
            [window + [data.end_of_text] * (seq_len - len(window))], device=bmt.device()
        )
        # a pipeline cuts what it gets into so many parts
        padded = padded.expand(bmt.config["micros"], -1)
        # the scores of this rank's part of the vocabulary
        own = model(padded, positions, None)[0, len(window) - 1]
        logits = bmt.distributed.all_gather(own, bmt.config["tp_comm"]).flatten().float().cpu()
        values, candidates = logits.topk(min(top_k, len(logits)))
        drawn = torch.multinomial(
            torch.softmax(values / temperature, dim=0), 1, generator=generator
        )
        # Ranks that differed in one bit of a score could end the text at different places and wait
        # for each other for ever.
        tokens.append(from_rank_zero(int(candidates[drawn])))
        if tokens[-1] == data.end_of_text:
            break
    model.train(was_training)
    return prompt + str(
        data.tokenizer.decode([token for token in tokens[start:] if token != data.end_of_text])
    )


def show_sample(
    model: GPT, data: TokenData, position: Position, options: Options, report: Report
) -> None:
    """Let the model write, unless no sample is wanted."""
    if options.sample_tokens > 0:
        text = write_text(
            model, data, options.prompt, num_tokens=options.sample_tokens, seq_len=options.seq_len
        )
        report.sample(position.step, text)
