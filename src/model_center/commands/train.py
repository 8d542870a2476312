"""`python -m model_center train`: a decoder learns from rows of data, whole, by LoRA, or anew."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import math
import os
import pathlib
import shutil
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import bmtrain as bmt
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.runtime import log, world
from model_center.arguments import (
    above_zero,
    add_model_config_args,
    add_run_args,
    amount,
    count,
    positive,
    problem_of,
    share,
)
from model_center.commands.configuration import differences, keep, model_in, words_of
from model_center.commands.run_summary import data_summary, marked_text, run_summary
from model_center.commands.vocabulary import check_size, vocabulary_of
from model_center.dataset.chat import PLAIN
from model_center.dataset.concatenated import ConcatenatedTexts
from model_center.dataset.instructions import InstructionDataset, TooLong
from model_center.dataset.mixture import Mixture, MixturePart, set_aside, weighted
from model_center.dataset.packing import PackedSamples, Packing
from model_center.dataset.preferences import PreferencePairs
from model_center.errors import ConfigError, DataError
from model_center.training import Run, make_loader, setup
from model_center.training.adapters import ALL
from model_center.training.certificate import first_rows
from model_center.training.listener import OnStep
from model_center.training.objectives import Goal, Objective, Preference, goal_of
from model_center.training.setup import default_dtype
from model_center.training.trained_model import TrainedModel, trained_model_of

CERTIFIED = 16  # rows of each data set that are looked at before a run
GIVEN, WRITTEN = 16, 128  # tokens of a text that samples begin with, and that are written
DRAWN = {"do_sample": True, "temperature": 0.8, "top_p": 0.95}  # likeliest texts go in circles
PROGRESS = (
    TextColumn("{task.description}"),
    BarColumn(),
    MofNCompleteColumn(),
    TimeElapsedColumn(),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.description = (
        "Train a causal language model, of this package or of transformers, on conversations, "
        "questions with answers, or texts, on all GPUs of this host, or on those of several as "
        "torchrun and other launchers start it."
    )
    add_model_config_args(parser, dtype=None, use_checkpoint="auto")
    parser.add_argument("--config", metavar="FILE", help="of flags and values, as YAML or JSON")
    parser.add_argument(
        "--ranks", type=positive, metavar="N", help="processes to start (default: one per GPU)"
    )
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="start from random weights; only the configuration and tokenizer of --model-config "
        "are used",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="MODEL",
        help="with --from-scratch: folder or name of the tokenizer (default: of --model-config)",
    )
    parser.add_argument(
        "--vocab-size",
        type=positive,
        metavar="N",
        help="with --from-scratch: tokens of the vocabulary; without --tokenizer, a byte-level BPE "
        "of that size is trained on --data (default: as the configuration says)",
    )
    data = parser.add_argument_group("data: docs/site/en/guides/fine-tuning.md")
    data.add_argument(
        "--data",
        nargs="+",
        metavar="NAME[:WEIGHT]",
        help="training data: files (JSON lines or array, Parquet, CSV, text), folders of them, "
        "token data of preprocess, or data sets of the hub; WEIGHT is how often each pass reads "
        "them, a share if below 1",
    )
    data.add_argument("--validation", nargs="+", metavar="NAME", help="validation data")
    data.add_argument(
        "--validation-share",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="share of the rows of each --data to validate on, without --validation (default: 0)",
    )
    data.add_argument(
        "--too-long",
        type=TooLong,
        default=TooLong.CUT,
        metavar="{cut,drop,refuse}",
        help="conversations of more than --max-length tokens are truncated, dropped, or an error "
        "(default: cut). Texts continue in the next row",
    )
    data.add_argument(
        "--packing",
        type=Packing,
        default=Packing.SEPARATE,
        metavar="{separate,concatenated}",
        help="samples of a row do not see one another, or texts one after the other are cut into "
        "rows, of which each token sees all before it (default: separate)",
    )
    data.add_argument(
        "--cache",
        metavar="FOLDER",
        help="cache of tokens, so that data are tokenised once (default: tokens in --save)",
    )
    data.add_argument(
        "--look", type=positive, metavar="N", help="print N rows with their loss mask, and exit"
    )
    data.add_argument(
        "--eval-iters", type=positive, help="steps between measurements (default: once a pass)"
    )
    data.add_argument(
        "--samples",
        type=count,
        default=0,
        help="answers to the first conversations of the validation data, or texts that begin as "
        "its first ones, written into the log at each measurement (default: 0)",
    )
    wanted = parser.add_argument_group("objective: docs/site/en/guides/preferences.md")
    wanted.add_argument(
        "--objective",
        type=Objective,
        default=Objective.NEXT_TOKEN,
        metavar="{next-token,dpo,orpo,simpo,reward}",
        help="the next token, or which of two answers is better: rows with chosen and rejected, "
        "--batch-size of them a step and process (default: next-token)",
    )
    wanted.add_argument(
        "--beta",
        type=above_zero,
        help="strength of the preference term (default: dpo 0.1, orpo 0.1, simpo 2)",
    )
    wanted.add_argument("--margin", type=amount, default=1.0, help="gamma of simpo (default: 1)")
    lora = parser.add_argument_group("LoRA")
    lora.add_argument(
        "--lora-rank", type=count, default=0, help="0 trains all weights (default: 0)"
    )
    lora.add_argument(
        "--lora-alpha", type=float, default=16, help="adapters are scaled by alpha / rank"
    )
    lora.add_argument(
        "--lora-dropout", type=float, default=0.0, help="dropout of the adapters' inputs"
    )
    lora.add_argument(
        "--lora-targets",
        nargs="+",
        metavar="LAYER",
        help=f"names of layers, or {ALL} (default: those of attention)",
    )
    lora.add_argument(
        "--load-in-4bit",
        action="store_true",
        help="QLoRA: the model's own linear layers in 4 bits (needs bitsandbytes)",
    )
    add_run_args(parser, lr=None, lr_decay_style="cosine", warmup_iters=0.03)


def train(arguments: Sequence[str], on_step: OnStep | None = None) -> None:
    """Train as the command line would, from a program of others; errors are raised.

    Args:
        arguments: of the command.
        on_step: is handed the figures of each step; see `Listener`.
    """
    parser = argparse.ArgumentParser(prog="python -m model_center train")
    add_arguments(parser)
    run(parser.parse_args(words_of(arguments, parser)), on_step)


Packed = PackedSamples | ConcatenatedTexts | PreferencePairs


class Prepared(NamedTuple):
    """What a run begins with."""

    trained_model: TrainedModel
    training_parts: list[MixturePart]
    measured: list[MixturePart]
    packed: Packed


def prepare(args: argparse.Namespace) -> Prepared | None:
    """The model and the rows as the flags say; None where they were only to be looked at.

    Raises:
        ConfigError, DataError, IdentifierError, WeightsError: for what cannot be trained.
    """
    problem = problem_of(args, ("--model-config", "--data"))
    if problem is not None:
        raise ConfigError(f"{problem}.")
    if args.load_in_4bit and (args.from_scratch or not args.lora_rank):
        raise ConfigError("--load-in-4bit needs pretrained weights and adapters: add --lora-rank.")
    if args.objective.takes_pairs and args.packing is Packing.CONCATENATED:
        raise ConfigError("--packing concatenated is for texts, not for pairs: leave it out.")
    if args.lr is None:
        args.lr = 1e-4 if args.lora_rank else 3e-4 if args.from_scratch else 1e-5
        if args.objective.takes_pairs and args.objective is not Objective.REWARD:
            args.lr /= 10  # which of two answers is the better one is soon learned
    setup(args)
    args.dtype = args.dtype or default_dtype()
    args.model_config, adapters = model_in(args.model_config)
    if adapters is not None:
        raise ConfigError(
            f"{adapters} holds adapters: merge them into their model with python -m model_center "
            "merge, and name the result."
        )
    names = [_path_and_weight(name)[0] for name in args.data]
    # Of a host one process makes vocabulary and tokens. Those that wait for it are watched on: else
    # nobody would tell if it were stopped.
    makes = world.current().local_rank == 0
    with bmt.unwatched() if makes else contextlib.nullcontext():
        vocabulary = vocabulary_of(args, names, _say)
        trained_model = trained_model_of(
            args.model_config, is_reward=args.objective is Objective.REWARD, vocabulary=vocabulary
        )
        if args.from_scratch:
            check_size(trained_model.tokenizer, trained_model.vocab_size)
        training_parts, measured = _read(args, trained_model.tokenizer)
    if not all(part.samples.tokens.is_text.all() for part in training_parts):
        # It is saved with the model, which then is asked as it was taught.
        trained_model.tokenizer.chat_template = trained_model.tokenizer.chat_template or PLAIN
    _check_ids([*training_parts, *measured], trained_model)
    if args.look:
        samples = Mixture(training_parts)
        names = [" chosen", " rejected"] if args.objective.takes_pairs else [""]
        for number in range(min(args.look * len(names), len(samples))):
            row, side = divmod(number, len(names))
            text = marked_text(samples[number], trained_model.tokenizer)
            _say(f"row {row + 1}{names[side]}\n{text}\n")
        packed = _packed(training_parts, args, trained_model)
        for line in data_summary(training_parts, packed, packed.overview(), args):
            _say(line)
        return None
    args.dataset_name = _name_of(training_parts, args)
    trained_model.load(args)
    if trained_model.num_positions is not None and args.max_length > trained_model.num_positions:
        raise ConfigError(
            f"--max-length {args.max_length}: the model has {trained_model.num_positions} "
            "positions; give at most that many."
        )
    for parts in filter(None, (training_parts, measured)):
        trained_model.take_lengths(_lengths(parts, args), args)
    packed = _packed(training_parts, args, trained_model)
    trained_model.adapt(args)
    return Prepared(trained_model, training_parts, measured, packed)


def run(args: argparse.Namespace, on_step: OnStep | None = None) -> None:
    """Train as the arguments say; the result is in --save.

    Args:
        args: the arguments.
        on_step: is handed the figures of each step; see `Listener`.

    Raises:
        ConfigError, DataError, IdentifierError, WeightsError: before the first step.
    """
    prepared = prepare(args)
    if prepared is None:
        return
    trained_model, training_parts, measured, packed = prepared
    rows = make_loader(packed, args, shuffle=True)
    for line in run_summary(training_parts, packed, trained_model, args):
        _say(line)
    goal = goal_of(trained_model, args)
    _warn(training_parts)
    evaluator = (
        Evaluator(goal, measured, training_parts, args) if measured or args.samples else None
    )
    if isinstance(goal, Preference) and isinstance(packed, PreferencePairs):
        goal.add_reference(packed, args.dataset_name)
    goal.begin()
    flops = trained_model.flops(args.max_length)
    folder = pathlib.Path(args.save) if args.save else None
    differing = differences(args, folder) if folder is not None and args.resume else []
    with Run(trained_model.model, rows, args, flops, on_step) as training:
        for line in differing:
            training.log.message(f"  other than before: {line}")
        attempt(lambda: _keep(args, folder, trained_model.model), everyone(), ConfigError)
        every = args.eval_iters
        is_due = every and training.step > 0 and training.step % every == 0
        if evaluator is not None and is_due and not training.is_recorded:
            evaluator.report(training)  # the run before has saved that step, and came no further
        for _ in training.epochs():
            for batches in training.steps():
                training.update(goal.losses(batches))
                if evaluator is not None and every and training.step % every == 0:
                    evaluator.report(training)
            if evaluator is not None and not every:
                evaluator.report(training)
        trained_model.save(args)


def _warn(training_parts: Sequence[MixturePart]) -> None:
    """Say once if the loss of the first rows does not cover what their text says."""
    if bmt.rank() == 0:
        written = {
            id(p.samples): p.samples for p in training_parts if not p.samples.source.is_tokens
        }
        looked, found = first_rows(written.values(), CERTIFIED)
        for place, text in found[:1]:
            _say(
                f"warning: {len(found)} of the first {looked} rows have a loss mask that differs "
                f"from their text. {place}: {text}. See all: python -m model_center certify"
            )


def _keep(args: argparse.Namespace, folder: pathlib.Path | None, model: torch.nn.Module) -> None:
    """Write the flags into the run's folder, if what is trained has room there.

    Raises:
        ConfigError: on a disk that is too full for the result.
    """
    if folder is None or bmt.rank() != 0 or args.replay_step is not None:
        return
    keep(args, folder)
    trained = (param for param in model.parameters() if param.requires_grad)
    needed = sum(param.numel() * param.element_size() for param in trained)
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"--save {folder}: {free:,} bytes are free there, and what is trained takes {needed:,} "
            "in the end, checkpoints with the optimizer's states several times that. Free some "
            "space, or name another folder."
        )


class Evaluator:
    """Measures a model on data that it does not learn from, and shows what it writes. Collective.

    Args:
        goal: what is measured.
        parts: data to measure it on; without any nothing is measured.
        training_parts: data that samples are of where there are no others.
        args: the flags.
    """

    def __init__(
        self,
        goal: Goal,
        parts: Sequence[MixturePart],
        training_parts: Sequence[MixturePart],
        args: argparse.Namespace,
    ) -> None:
        self._goal, self._trained_model, self._args = goal, goal.trained_model, args
        self._loader, self._num_bytes = None, None
        if parts:
            rows = _packed(parts, args, goal.trained_model, shuffle=False)
            if isinstance(rows, PreferencePairs):
                if isinstance(goal, Preference):
                    goal.add_reference(rows, _name_of(parts, args))
            elif all(part.samples.tokens.is_text.all() for part in parts):
                self._num_bytes = rows.num_bytes()
            if isinstance(rows, PackedSamples):
                rows.fill_up(bmt.world_size())
            try:
                self._loader = make_loader(rows, args, shuffle=False)
            except DataError as error:
                raise DataError(f"the validation data: {error}") from error
        self._questions = _questions(Mixture(parts or training_parts), args.samples)

    def report(self, training: Run) -> None:
        """Record loss and what else is measured, and show answers."""
        if self._loader is not None:
            training.record(**self.record(self._loader))
        for asked in self._questions:
            training.log.message(self.answer(asked))

    @torch.no_grad()
    def record(self, loader: Iterable[Any]) -> dict[str, float]:
        """What the goal measures, over all that counts; of texts bits per byte."""
        self._trained_model.model.eval()
        found: list[torch.Tensor] = []
        for batch in loader:
            counted = (self._goal.counted(batch) != -100).sum()[None].double()
            found.append(torch.cat([self._goal.sums(batch), counted]))
        self._goal.begin()
        *sums, number = bmt.sum_loss(torch.stack(found).sum(0)).tolist()
        record = self._goal.record([one / number for one in sums])
        if self._num_bytes:
            nats = sums[0] * bmt.world_size()
            record["bits_per_byte"] = nats / math.log(2) / self._num_bytes
        return record

    def answer(self, asked: Question) -> str:
        """The tokens of a conversation up to its last answer, or the first ones of a text, and
        what the model writes behind them, as text.
        """
        room = max(self._args.max_length - len(asked.ids), 1)
        if asked.is_text:
            room = min(room, WRITTEN)
            found = self._trained_model.answer(asked.ids[None], room, seed=self._args.seed, **DRAWN)
        else:
            found = self._trained_model.answer(asked.ids[None], room)
        decode = self._trained_model.tokenizer.decode
        return str(decode(asked.ids.tolist()) + decode(found))


Parts = tuple[list[MixturePart], list[MixturePart]]  # training data, and validation data


def _read(args: argparse.Namespace, tokenizer: Any) -> Parts:
    """The data, tokenised by one process of each host where the others find it. Collective."""
    if args.validation and args.validation_share:
        raise ConfigError("--validation and --validation-share exclude each other: give one.")
    keeps = args.cache is not None or args.save is not None
    is_first = not keeps or not world.is_initialized() or world.current().local_rank == 0
    first = attempt(lambda: _parts(args, tokenizer) if is_first else None, everyone(), DataError)
    return attempt(lambda: first or _parts(args, tokenizer), everyone(), DataError)


def _parts(args: argparse.Namespace, tokenizer: Any) -> Parts:
    training_parts, measured = [], [_part(name, args, tokenizer) for name in args.validation or ()]
    for place, name in enumerate(args.data):
        path, weight = _path_and_weight(name)
        rest, aside = set_aside(
            _part(path, args, tokenizer), args.validation_share, args.seed, place
        )
        training_parts.append(weighted(rest, weight, args.seed, place))
        measured += [aside] if aside.numbers else []
    return training_parts, measured


def _part(name: str, args: argparse.Namespace, tokenizer: Any) -> MixturePart:
    folder = args.cache or (args.save and pathlib.Path(args.save, "tokens"))
    console = Console(stderr=True)
    is_shown = bmt.rank() == 0 and console.is_terminal
    with Progress(*PROGRESS, console=console, transient=True, disable=not is_shown) as bar:
        task = bar.add_task(f"tokens of {name}", total=None)
        samples = InstructionDataset(
            name,
            tokenizer,
            args.max_length,
            args.too_long,
            pairs=args.objective.takes_pairs,
            cache=pathlib.Path(folder) if folder else None,
            workers=os.cpu_count() or 1,
            report=lambda rows: bar.update(task, completed=rows),
        )
    return MixturePart(samples, range(samples.num_rows))


def _name_of(parts: Sequence[MixturePart], args: argparse.Namespace) -> str:
    """What a run that goes on compares: the tokens that are trained on, wherever the data lie."""
    found = hashlib.sha256(f"{args.max_length} {args.too_long.value}".encode())
    if args.packing is not Packing.SEPARATE:
        found.update(args.packing.value.encode())
    for part in parts:
        found.update(part.samples.tokens.key.encode())
        found.update(torch.tensor(part.numbers).numpy().tobytes())
    return f"{sum(len(part.numbers) for part in parts)} rows {found.hexdigest()[:12]}"


def _packed(
    parts: Sequence[MixturePart],
    args: argparse.Namespace,
    trained_model: TrainedModel,
    *,
    shuffle: bool = True,
) -> Packed:
    if args.objective.takes_pairs:
        return PreferencePairs(Mixture(parts))
    if args.packing is Packing.CONCATENATED:
        how = args.max_length, bmt.world_size(), args.seed
        return ConcatenatedTexts(parts, *how, shuffle=shuffle)
    return PackedSamples(
        Mixture(parts), args.max_length, least=bmt.world_size(), alone=not trained_model.is_packed
    )


def _lengths(parts: Sequence[MixturePart], args: argparse.Namespace) -> npt.NDArray[np.int64]:
    """Tokens of what shares micro-batches: samples, or rows of texts one after the other."""
    if args.packing is Packing.CONCATENATED:
        return ConcatenatedTexts(parts, args.max_length).row_lengths()
    samples = Mixture(parts)
    return samples.lengths[samples.num_loss_tokens > 0]


def _check_ids(parts: Sequence[MixturePart], trained_model: TrainedModel) -> None:
    """Refuse ids that the model does not know."""
    for part in parts:
        ids = part.samples.tokens.ids
        largest = int(ids.max()) if len(ids) else 0
        if largest >= trained_model.vocab_size:
            raise DataError(
                f"the tokenizer produces id {largest} "
                f"({trained_model.tokenizer.convert_ids_to_tokens(largest)!r}) of the data, and "
                f"the model has {trained_model.vocab_size}: expected a tokenizer of this model."
            )


def _say(text: str) -> None:
    log.tell(text)


def _path_and_weight(name: str) -> tuple[str, float]:
    """`NAME` or `NAME:WEIGHT`; a file whose name ends so is taken as it is."""
    path, colon, text = name.rpartition(":")
    if not colon or pathlib.Path(name).exists():
        return name, 1.0
    try:
        weight = float(text)
    except ValueError:
        return name, 1.0  # a split of a data set of the hub
    if not 0 < weight < math.inf:
        raise DataError(f"--data {name}: expected NAME or NAME:WEIGHT, the weight above 0.")
    return path, weight


class Question(NamedTuple):
    """What a model is to write on: the first tokens of a text, or a conversation."""

    ids: torch.Tensor
    is_text: bool


def _questions(samples: Mixture, count: int) -> list[Question]:
    """The first conversations that end with an answer, without it, and beginnings of texts."""
    found: list[Question] = []
    for number in range(len(samples)):
        if len(found) == count:
            break
        if samples.is_text(number):
            if samples.begins(number):
                ids = samples[number]["input_ids"]
                found.append(Question(ids[: min(GIVEN, max(len(ids) // 2, 1))], is_text=True))
            continue
        targets = samples[number]["targets"]
        in_loss = (targets != -100).nonzero()[:, 0]
        silent = (targets[: in_loss[-1]] == -100).nonzero()[:, 0] if len(in_loss) else in_loss
        if len(silent):
            ids = samples[number]["input_ids"][: int(silent[-1]) + 2]
            found.append(Question(ids, is_text=False))
    return found
