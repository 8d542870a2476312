"""What a run says before its first step: rows, tokens, model, and a row with its loss mask."""

from __future__ import annotations

import argparse
import collections
import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import bmtrain as bmt
from model_center.dataset.concatenated import ConcatenatedTexts
from model_center.dataset.mixture import MixturePart
from model_center.dataset.packing import PackedSamples
from model_center.dataset.padding import Item, Overview
from model_center.dataset.preferences import PreferencePairs
from model_center.plan import Settings
from model_center.plan.outline import groups_of
from model_center.plan.step import shard_of
from model_center.training.optimization import in_steps
from model_center.training.trained_model import TrainedModel

SHOWN = 1200  # characters of a row
OPEN, CLOSE = "[[", "]]"  # around tokens in the loss


def run_summary(
    parts: Sequence[MixturePart],
    packed: PackedSamples | ConcatenatedTexts | PreferencePairs,
    trained_model: TrainedModel,
    args: argparse.Namespace,
) -> Iterator[str]:
    """The lines."""
    if args.from_scratch:
        yield _vocabulary(trained_model)
    seen = packed.overview()
    yield from data_summary(parts, packed, seen, args)
    yield f"  {seen.layout}"
    counts = [(param.numel(), param.requires_grad) for param in trained_model.model.parameters()]
    trained = sum(number for number, is_trained in counts if is_trained)
    yield (
        f"model: {type(trained_model.model).__name__}, {sum(number for number, _ in counts):,} "
        f"parameters, {trained:,} trained"
    )
    yield from (f"  {note}" for note in trained_model.notes())
    yield _memory(trained_model, args)
    size = args.batch_size * bmt.world_size() * args.gradient_accumulation
    steps = min(args.epochs * -(-len(packed) // size), args.train_iters)
    where = (
        pathlib.Path(args.save, args.save_name or ("adapter" if args.lora_rank else "model"))
        if args.save
        else "nowhere, for want of --save"
    )
    yield (
        f"steps: {steps:,}, the first {in_steps(args.warmup_iters, steps):,} of them warm-up, "
        f"learning rate {args.lr:g} ({args.lr_decay_style}); saved: {where}"
    )
    text = marked_text(seen.first, trained_model.tokenizer)
    yield f"the first row, tokens in the loss between {OPEN} and {CLOSE}:\n{text}"


def data_summary(
    parts: Sequence[MixturePart],
    packed: PackedSamples | ConcatenatedTexts | PreferencePairs,
    seen: Overview,
    args: argparse.Namespace,
) -> Iterator[str]:
    """How many rows and tokens of `parts` were read, and what was left out and why."""
    tokens = int(packed.samples.lengths.sum())
    rows = sum(len(part.numbers) for part in parts)
    share = f"{seen.num_loss_tokens:,} in the loss ({seen.num_loss_tokens / tokens:.1%})"
    yield f"data: {rows:,} rows, {tokens:,} tokens, {share}"
    data = {id(part.samples): part.samples for part in parts}.values()
    lost = {
        f"{args.too_long.value} for being longer than --max-length {args.max_length}": sum(
            one.num_cut + one.num_dropped for one in data
        ),
        "left out because no token within that length is in the loss": seen.num_left_out,
    }
    if any(lost.values()):
        gone = sum(one.tokens_lost for one in data)
        reasons = "; ".join(f"{number:,} rows {why}" for why, number in lost.items() if number)
        yield f"  {reasons}; {gone:,} tokens lost"
    unread_files = [str(path) for one in data for path in one.passed_over]
    if unread_files:
        more = " ..." if len(unread_files) > 5 else ""
        yield f"  files that are not read: {', '.join(unread_files[:5])}{more}"
    unread: collections.Counter[str] = collections.Counter()
    for one in data:
        unread.update(one.tokens.unread)
    if unread:
        names = ", ".join(f"{name} ({number:,} rows)" for name, number in unread.most_common(8))
        yield f"  fields that are not read: {names}"


def _vocabulary(trained_model: TrainedModel) -> str:
    """Of tokenizer and model, and what a text of the tokenizer ends with."""
    tokenizer = trained_model.tokenizer
    if tokenizer.eos_token is None:
        ends = "which knows no token that ends a text: the model will not learn where to end"
    else:
        ends = f"texts end with {tokenizer.eos_token}"
    return (
        f"tokenizer: {len(tokenizer):,} tokens, of {trained_model.vocab_size:,} ids of the model; "
        f"{ends}"
    )


def _memory(trained_model: TrainedModel, args: argparse.Namespace) -> str:
    """What one process holds all the time, whatever the rows are."""
    optimizer = "offload" if args.optimizer == "adam-offload" else "adam"
    forms = {"moments": args.moments, "master_weights": args.master_weights}
    settings = Settings(dtype=args.dtype, optimizer=optimizer, **forms)
    groups = groups_of(trained_model.model.named_parameters())
    shards = [shard_of(group, bmt.world_size(), settings) for group in groups]
    weights = sum(one.num_bytes for one in shards)
    gradients = sum(one.num_bytes for one in shards if one.trained)
    states = sum(one.state_bytes for one in shards)
    sizes = [f"{size / 2**30:.3g} GiB" for size in (weights, gradients, states)]
    where = " in host memory" if optimizer == "offload" else ""
    return (
        f"memory of a process: weights {sizes[0]}, gradients {sizes[1]}, optimizer {sizes[2]}"
        f"{where}; activations come on top, see python -m model_center plan"
    )


def marked_text(item: Item, tokenizer: Any) -> str:
    """A sample as text, its tokens in the loss between brackets."""
    ids = item["input_ids"].tolist()
    in_loss = [False, *(item["targets"][:-1] != -100).tolist()]
    pairs = zip(ids, in_loss, strict=True)
    parts = []
    for is_in_loss, run in itertools.groupby(pairs, key=lambda pair: pair[1]):
        text = tokenizer.decode([number for number, _ in run])
        parts.append(f"{OPEN}{text}{CLOSE}" if is_in_loss else text)
    if int(item["targets"][-1]) != -100:
        parts.append(" (continues)")
    text = "".join(parts)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text):,} characters)"
