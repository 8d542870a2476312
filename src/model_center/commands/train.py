"""`python -m model_center train`: a decoder learns from JSON lines, whole or by LoRA."""

from __future__ import annotations

import argparse
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import torch

import bmtrain as bmt
from model_center.arguments import (
    add_model_config_args,
    add_run_args,
    count,
    positive,
    problem_of,
    share,
)
from model_center.dataset.chat import PLAIN, Writer
from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.mixture import Mixture, Part, set_aside, weighted
from model_center.dataset.packing import PackedSamples, segment_mask
from model_center.errors import ConfigError, DataError
from model_center.generation import generate
from model_center.model.causal import CausalModel, TokenModel
from model_center.model.llama import Llama
from model_center.tokenizer import (
    GPT2Tokenizer,
    GPTjTokenizer,
    LlamaTokenizer,
    MistralTokenizer,
    OPTTokenizer,
    Qwen2Tokenizer,
)
from model_center.training import Run, class_of, make_loader, pretrained, save_model, setup
from model_center.training import untrained as from_scratch
from model_center.training.adapters import ALL, ATTENTION, Lora
from model_center.training.flops import flops_per_token
from model_center.training.listener import OnStep
from model_center.training.quantization import quantize

Batch = dict[str, torch.Tensor]
# By the model's class, whose tokens each reads.
TOKENIZERS: dict[str, Any] = {
    "GPT2": GPT2Tokenizer,
    "GPTj": GPTjTokenizer,
    "Llama": LlamaTokenizer,
    "Mistral": MistralTokenizer,
    "OPT": OPTTokenizer,
    "Qwen2": Qwen2Tokenizer,
    "Qwen3": Qwen2Tokenizer,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.description = (
        "Train GPT-2, GPT-J, LLaMA, Mistral, OPT or Qwen on conversations, questions with answers, "
        "or texts. Start it with torchrun on as many GPUs as there are: torchrun "
        "--nproc_per_node=8 -m model_center train ..."
    )
    add_model_config_args(parser)
    parser.add_argument(
        "--from-scratch",
        action="store_true",
        help="begin with random weights: of --model-config only configuration and tokenizer count",
    )
    data = parser.add_argument_group("data: JSON lines; docs/site/en/guides/fine-tuning.md")
    data.add_argument(
        "--data",
        nargs="+",
        metavar="FILE[:WEIGHT]",
        help="to learn from; with a weight, as many times in each pass, or the share below 1",
    )
    data.add_argument("--validation", nargs="+", metavar="FILE", help="to measure the loss on")
    data.add_argument(
        "--validation-share",
        type=share,
        default=0.0,
        metavar="SHARE",
        help="of each --data file, set aside in place of --validation (default: 0)",
    )
    data.add_argument(
        "--eval-iters", type=positive, help="steps between measurements (default: once a pass)"
    )
    data.add_argument(
        "--samples",
        type=count,
        default=0,
        help="answers to the first conversations of the validation data, written into the log at "
        "each measurement (default: 0)",
    )
    lora = parser.add_argument_group("LoRA")
    lora.add_argument(
        "--lora-rank", type=count, default=0, help="0 trains all weights (default: 0)"
    )
    lora.add_argument(
        "--lora-alpha", type=float, default=16, help="adapters count alpha / rank times"
    )
    lora.add_argument("--lora-dropout", type=float, default=0.0, help="of what adapters read")
    lora.add_argument(
        "--lora-targets",
        nargs="+",
        default=list(ATTENTION),
        metavar="LAYER",
        help=f"names of layers, or {ALL} (default: those of attention)",
    )
    lora.add_argument(
        "--load-in-4bit",
        action="store_true",
        help="QLoRA: the model's own linear layers in 4 bits (needs bitsandbytes)",
    )
    add_run_args(parser)


def train(arguments: Sequence[str], on_step: OnStep | None = None) -> None:
    """Train as the command line would, from a program of others; errors are raised.

    Args:
        arguments: of the command.
        on_step: is handed the figures of each step; see `Listener`.
    """
    parser = argparse.ArgumentParser(prog="python -m model_center train")
    add_arguments(parser)
    run(parser.parse_args(arguments), on_step)


def run(args: argparse.Namespace, on_step: OnStep | None = None) -> None:
    """Train as the arguments say; the result is in --save.

    Args:
        args: the arguments.
        on_step: is handed the figures of each step; see `Listener`.

    Raises:
        ConfigError, DataError, IdentifierError, WeightsError: before the first step.
    """
    problem = problem_of(args, ("--model-config", "--data"))
    if problem is not None:
        raise ConfigError(f"{problem}.")
    if args.load_in_4bit and (args.from_scratch or not args.lora_rank):
        raise ConfigError("--load-in-4bit is for pretrained weights beside adapters: --lora-rank.")
    args.dataset_name = " ".join(args.data)
    setup(args)
    kind = class_of(args.model_config, CausalModel)
    if kind is CausalModel:
        raise ConfigError(
            f"the configuration of {args.model_config} names no model_type: make it one of Hugging "
            "Face by python -m model_center convert --to hf."
        )
    if not issubclass(kind, TokenModel | Llama):
        raise ConfigError(f"{kind.__name__} is not trained by this program.")
    tokenizer = TOKENIZERS[kind.__name__].from_pretrained(args.model_config)
    # It is saved with the model, which then is asked as it was taught.
    tokenizer.chat_template = tokenizer.chat_template or PLAIN
    learnt, measured = _parts(args, tokenizer)
    rows = make_loader(_packed(learnt, args), args, shuffle=True)
    model = (from_scratch if args.from_scratch else pretrained)(kind, args)
    lora = _lora(model, args)
    judge = Judge(model, tokenizer, measured, args) if measured else None
    flops = flops_per_token(model, args.max_length)
    with Run(model, rows, args, flops, on_step) as training:
        every = args.eval_iters
        step = training.step
        is_due = step > 0 and (step % every == 0 if every else step >= args.train_iters)
        if judge is not None and is_due and not training.is_recorded:
            judge.report(training)  # the run before has saved that step, and came no further
        for _ in training.epochs():
            for batches in training.steps():
                mean = bmt.loss.TokenMean(batch["targets"] for batch in batches)
                training.update(mean(loss_sum(model, batch)) for batch in batches)
                if judge is not None and every and training.step % every == 0:
                    judge.report(training)
            if judge is not None and not every:
                judge.report(training)
        if lora is None:
            save_model(model, args, tokenizer)
        elif args.save is not None:
            lora.save(pathlib.Path(args.save, args.save_name or "adapter"), tokenizer)


def loss_sum(model: CausalModel, batch: Batch) -> torch.Tensor:
    """The cross-entropy of all targets of packed rows, summed."""
    out = model(
        batch["input_ids"],
        attention_mask=segment_mask(batch["segments"]),
        position_ids=model.position_ids_of(batch["position_ids"]),
        output_logits=False,
    )
    learnt = batch["targets"] != -100
    logits = model.logits(out.last_hidden_state[learnt])
    return bmt.loss.FusedCrossEntropy(reduction="sum")(logits, batch["targets"][learnt])


class Judge:
    """Measures a model on data that it does not learn from. Collective."""

    def __init__(
        self, model: CausalModel, tokenizer: Any, parts: Sequence[Part], args: argparse.Namespace
    ) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._loader = make_loader(_packed(parts, args), args, shuffle=False)
        self._questions = _questions(parts, args.samples)
        self._max_length = args.max_length

    def report(self, training: Run) -> None:
        """Record loss and perplexity per token, and show answers."""
        loss = self.mean_loss()
        training.record(validation_loss=loss, perplexity=math.exp(min(loss, 700.0)))
        for fields in self._questions:
            training.log.say(self.answer(fields))

    @torch.no_grad()
    def mean_loss(self) -> float:
        """The loss per token that is learnt."""
        self._model.eval()
        sums = torch.zeros(2, dtype=torch.float64, device=bmt.device())  # loss, tokens
        for batch in self._loader:
            sums[0] += loss_sum(self._model, batch)
            sums[1] += (batch["targets"] != -100).sum()
        self._model.train()
        loss, tokens = bmt.sum_loss(sums).tolist()
        return float(loss / tokens)

    def answer(self, fields: dict[str, Any]) -> str:
        """A conversation up to its last answer, and the model's."""
        asked = Writer(self._tokenizer, fields["tools"]).text(fields["messages"][:-1], answer=True)
        ids = torch.tensor([self._tokenizer.encode(asked, add_special_tokens=False)])
        end = self._tokenizer.eos_token_id
        room = max(self._max_length - ids.shape[1], 1)
        found = generate(self._model, ids, eos_token_id=end, max_new_tokens=room)
        return asked + self._tokenizer.decode(found.rows()[0])


def _lora(model: CausalModel, args: argparse.Namespace) -> Lora | None:
    if args.load_in_4bit:
        quantize(model)
    if not args.lora_rank:
        return None
    return Lora(
        model,
        args.lora_rank,
        args.lora_alpha,
        args.lora_dropout,
        args.lora_targets,
        args.model_config,
    )


def _parts(args: argparse.Namespace, tokenizer: Any) -> tuple[list[Part], list[Part]]:
    """What is learnt, and what is measured."""
    if args.validation and args.validation_share:
        raise ConfigError("--validation and --validation-share: give one of them.")
    learnt, measured = [], [_part(name, args, tokenizer) for name in args.validation or ()]
    for place, name in enumerate(args.data):
        path, weight = _path_and_weight(name)
        rest, aside = set_aside(
            _part(path, args, tokenizer), args.validation_share, args.seed, place
        )
        learnt.append(weighted(rest, weight, args.seed, place))
        measured += [aside] if aside.numbers else []
    return learnt, measured


def _packed(parts: Sequence[Part], args: argparse.Namespace) -> PackedSamples:
    return PackedSamples(Mixture(parts), args.max_length, least=bmt.world_size())


def _part(path: str, args: argparse.Namespace, tokenizer: Any) -> Part:
    samples = InstructionDataset(path, tokenizer, args.max_length)
    return Part(samples, range(len(samples)))


def _path_and_weight(name: str) -> tuple[str, float]:
    """`FILE` or `FILE:WEIGHT`; a file whose name ends so is taken as it is."""
    path, colon, text = name.rpartition(":")
    if not colon or pathlib.Path(name).exists():
        return name, 1.0
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise DataError(f"--data {name}: expected FILE or FILE:WEIGHT, the weight above 0.")
    return path, weight


def _questions(parts: Sequence[Part], count: int) -> list[dict[str, Any]]:
    """The first conversations that end with an answer."""
    rows = (part.samples.examples[number].fields for part in parts for number in part.numbers)
    found: list[dict[str, Any]] = []
    for row in rows:
        if len(found) == count:
            break
        if "messages" in row and row["messages"][-1]["role"] == "assistant":
            found.append(dict(row))
    return found
