"""`python -m model_center generate`: a model continues texts."""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

import bmtrain as bmt
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.distributed.collectives import broadcast_object
from bmtrain.errors import printable
from bmtrain.runtime import world
from model_center.commands.configuration import model_in
from model_center.errors import ConfigError, InputError
from model_center.generation.config import GenerationConfig
from model_center.generation.session import Session
from model_center.generation.text import TextGenerator
from model_center.tokenizer.chat_template import rendered
from model_center.training.adapters import add_adapters
from model_center.training.quantization import quantize
from model_center.training.setup import DTYPES, default_dtype
from model_center.training.trained_model import TransformersModel, native_class, tokenizer_of

NEW_TOKENS = 512  # where the command line names no number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.description = (
        "Answer questions, or continue texts where the model has no chat template; drawn at "
        "random, or the likeliest with --temperature 0. Started with "
        "torchrun, the model is sharded over the GPUs."
    )
    add_model_arguments(parser)
    parser.add_argument(
        "--prompt",
        nargs="+",
        metavar="TEXT",
        help="questions, or texts to be continued (default: each line of the standard input)",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="continue texts as they are, also with a model that has a chat template",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model, and how it draws."""
    parser.add_argument(
        "--model-config",
        required=True,
        metavar="MODEL",
        help="folder or name of the model, or the folder that a training has written",
    )
    parser.add_argument(
        "--adapter", metavar="FOLDER", help="LoRA adapters beside it, as a training writes them"
    )
    parser.add_argument(
        "--load-in-4bit",
        action="store_true",
        help="its linear layers in 4 bits (needs bitsandbytes)",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, help="(default: bf16, on a CPU that does not compute in it fp32)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        help=f"at most (default: {NEW_TOKENS}, or fewer where the model's positions end)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.7, help="0 for the likeliest (default: %(default)s)"
    )
    parser.add_argument(
        "--top-p", type=float, default=0.95, help="of the probability drawn from (default: 0.95)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the drawing (default: 0)")


def run(args: argparse.Namespace) -> None:
    """Print what follows each prompt.

    Raises:
        ConfigError, IdentifierError, InputError, WeightsError: before anything is printed.
    """
    with Session() as session:
        generator = open_generator(args, session)
        prompts = args.prompt or read_on_rank_zero(sys.stdin.read).splitlines()
        for prompt in filter(str.strip, prompts):
            asked = [{"role": "user", "content": prompt}]
            is_chat = generator.tokenizer.chat_template and not args.plain
            for piece in generator.stream_chat(asked) if is_chat else generator.stream(prompt):
                say(piece)
            say("\n")


# What loading a model asks of a training's flags.
TO_TALK = {
    "load": None,
    "from_scratch": False,
    "use_checkpoint": False,
    "batch_size": 1,
    "max_length": 1,
}


class TransformersGenerator:
    """What TextGenerator does, with a model that transformers has and this package has not.

    Texts come whole, not in pieces.
    """

    def __init__(self, args: argparse.Namespace, folder: Callable[[], str]) -> None:
        if not world.is_initialized():
            bmt.init_distributed()
        trained_model = TransformersModel(args.model_config)
        trained_model.load(argparse.Namespace(**{**vars(args), **TO_TALK}))
        if args.load_in_4bit:
            trained_model.quantize()
        if args.adapter:
            trained_model.add_adapters(pathlib.Path(args.adapter))
            trained_model.read_tokenizer(folder())
        self._trained_model, self._args, self.tokenizer = (
            trained_model,
            args,
            trained_model.tokenizer,
        )

    def stream(self, text: str) -> Iterator[str]:
        """What follows the text."""
        return self._answer_text(self._trained_model.tokenizer.encode(text))

    def stream_chat(self, messages: Sequence[Mapping[str, str]]) -> Iterator[str]:
        """The next message of a conversation."""
        tokenizer = self._trained_model.tokenizer
        if not tokenizer.chat_template:
            raise InputError("the tokenizer has no chat template: use generate.")
        text = rendered(tokenizer, messages, add_generation_prompt=True)
        return self._answer_text(tokenizer.encode(text, add_special_tokens=False))

    def _answer_text(self, ids: Sequence[int]) -> Iterator[str]:
        args = self._args
        draws = {"do_sample": False}
        if args.temperature:
            torch.manual_seed(args.seed)
            draws = {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p}
        room = GenerationConfig(
            max_new_tokens=args.max_new_tokens, default_new_tokens=NEW_TOKENS
        ).num_new_tokens(len(ids), self._trained_model.num_positions)
        found = self._trained_model.answer(torch.tensor([list(ids)]), room, **draws)
        yield self._trained_model.tokenizer.decode(found, skip_special_tokens=True)


def open_generator(
    args: argparse.Namespace, session: Session
) -> TextGenerator | TransformersGenerator:
    """The generator of the model and flags; the run is joined where torchrun has started it."""
    if world.launched().size > 1:
        bmt.init_distributed()
    args.dtype = args.dtype or default_dtype()
    args.model_config, adapters = model_in(args.model_config)
    args.adapter = args.adapter or adapters
    kind = native_class(args.model_config)
    if kind is None:
        return TransformersGenerator(
            args, lambda: read_on_rank_zero(lambda: _tokenizer_folder(args))
        )
    model = kind.from_pretrained(args.model_config, dtype=DTYPES[args.dtype])
    if not world.is_initialized():
        model = model.to(bmt.device())
    if args.load_in_4bit:
        quantize(model)
    if args.adapter:
        add_adapters(model, pathlib.Path(args.adapter))
    draws = (
        {"do_sample": True, "temperature": args.temperature, "top_p": args.top_p, "seed": args.seed}
        if args.temperature
        else {}
    )
    folder = read_on_rank_zero(lambda: _tokenizer_folder(args))
    tokenizer = attempt(lambda: tokenizer_of(kind, folder), everyone(), ConfigError)
    limits = {"max_new_tokens": args.max_new_tokens, "default_new_tokens": NEW_TOKENS}
    return TextGenerator(model.eval(), tokenizer, session=session, **limits, **draws)


def _tokenizer_folder(args: argparse.Namespace) -> str:
    """Where the tokenizer is: beside the adapters, which know its chat template, or the model's."""
    is_beside = args.adapter and pathlib.Path(args.adapter, "tokenizer_config.json").is_file()
    return str(args.adapter if is_beside else args.model_config)


def read_on_rank_zero(read: Callable[[], str]) -> str:
    """What `read` gives on the first rank, on all. Collective.

    Raises:
        InputError: on every rank, if it cannot be read.
    """
    text = attempt(lambda: read() if bmt.rank() == 0 else "", everyone(), InputError)
    if world.is_initialized():
        text = broadcast_object(text, 0, world.current().mesh.world, "the input")
    return text


def say(text: str) -> None:
    """On the first rank, at once; what would control a terminal is written out on one."""
    if bmt.rank() == 0:
        sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()
