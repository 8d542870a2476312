"""Command-line flags of training programs: ModelCenter's, with a meaning for every one of them, and
some more.

`get_args()` reads them all. A program with flags of its own adds them to `make_parser()` and calls
`parse_args`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

DECAY_STYLES = ("constant", "linear", "cosine", "exponential", "noam")
DTYPES = ("bf16", "fp16", "fp32")
OPTIMIZERS = ("adam", "adam-offload")


def get_args() -> argparse.Namespace:
    """The values of all flags on the command line; explains itself and exits on `--help` or on
    values that do not fit.
    """
    return parse_args(make_parser())


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """A parser with all flags of this module."""
    parser = argparse.ArgumentParser(
        # short: every rank prints it before an error
        usage="%(prog)s [--FLAG VALUE ...]   (--help lists the flags)",
        description=description,
        allow_abbrev=False,
    )
    return add_training_args(add_model_config_args(parser))


def parse_args(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None = None,
    required: Sequence[str] = (),
) -> argparse.Namespace:
    """The values of the flags.

    Args:
        parser: what `make_parser` returned, with flags of the program's own.
        arguments: a command line without the program's name; that of the process if None.
        required: flags that this program cannot do without, "--model-config" for example.
    """
    args = parser.parse_args(arguments)
    missing = [flag for flag in required if vars(args)[flag.lstrip("-").replace("-", "_")] is None]
    if missing:
        parser.error(f"this program needs {', '.join(missing)}")
    if args.resume and args.save is None:
        parser.error("--resume goes on from the checkpoints in --save: give that folder too")
    if args.start_step >= args.train_iters:
        parser.error(
            f"--start-step {args.start_step} leaves nothing to do before --train-iters "
            f"{args.train_iters}"
        )
    if args.tensorboard and args.log_dir is None and args.save is None:
        parser.error("--tensorboard needs a place for its files: give --log-dir or --save")
    return args


def add_model_config_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that say which model, and how it is computed."""
    group = parser.add_argument_group("model")
    add = group.add_argument
    add(
        "--model-config",
        metavar="MODEL",
        help="folder or name of the model: its configuration, and its weights where needed",
    )
    add(
        "--load",
        metavar="PATH",
        help="weights to start from in place of those of --model-config: a file or folder",
    )
    add(
        "--dtype",
        choices=DTYPES,
        default="bf16",
        help="of weights and computation; the optimizer is exact (default: bf16)",
    )
    add(
        "--use-checkpoint",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="recompute activations in the backward pass: less memory, about a third more work",
    )
    add(
        "--zero-level",
        type=int,
        choices=(2, 3),
        default=3,
        help="2 keeps gathered weights until the backward pass, 3 gathers them again (default: 3)",
    )
    return parser


def add_training_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that say what is learned from, how, and what is kept of it."""
    _add_data_flags(parser.add_argument_group("data"))
    _add_length_flags(
        parser.add_argument_group("length of training; a step is one update of the weights")
    )
    _add_optimizer_flags(parser.add_argument_group("optimizer and learning rate"))
    _add_file_flags(parser.add_argument_group("checkpoints and log"))
    return parser


def _add_data_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--base-path",
        metavar="FOLDER",
        help="where the data are: FOLDER/down_data/superglue/BoolQ, for example",
    )
    add(
        "--dataset_name",
        "--dataset-name",
        "--dataset",
        dest="dataset_name",
        metavar="NAME",
        help="task or data set",
    )
    add(
        "--batch-size",
        type=_positive,
        default=32,
        help="rows per process and micro-batch (default: 32)",
    )
    add("--max-length", type=_positive, default=512, help="tokens of a row at most (default: 512)")
    add(
        "--max-encoder-length",
        type=_positive,
        default=512,
        help="the same for what an encoder reads (default: 512)",
    )
    add(
        "--max-decoder-length",
        type=_positive,
        default=256,
        help="the same for a decoder (default: 256)",
    )
    add(
        "--num-workers",
        type=_count,
        default=0,
        help="processes that prepare data, for each rank (default: 0, none)",
    )


def _add_length_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--epochs", type=_positive, default=1, help="passes over the training data (default: 1)")
    add(
        "--train-iters",
        type=_positive,
        default=1000000,
        help="stop after this step even if epochs are left (default: 1000000)",
    )
    add(
        "--start-step",
        type=_count,
        default=0,
        help="number of steps done before, when only weights are loaded (default: 0)",
    )
    add(
        "--gradient-accumulation",
        type=_positive,
        default=1,
        metavar="N",
        help="micro-batches per step (default: 1)",
    )
    add(
        "--seed",
        type=int,
        default=1234,
        help="of first values, dropout and the order of the data (default: 1234)",
    )
    # Launchers of old pass it; the rank comes from the environment.
    add("--local_rank", "--local-rank", dest="local_rank", type=int, help=argparse.SUPPRESS)


def _add_optimizer_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adam",
        help="adam-offload keeps its states in host memory (default: adam)",
    )
    add(
        "--lr",
        type=_amount,
        default=1e-4,
        help="learning rate that the schedule starts from (default: 1e-4)",
    )
    add(
        "--weight-decay",
        type=_amount,
        default=1e-2,
        help="of all but norms and biases (default: 1e-2)",
    )
    add(
        "--clip-grad",
        type=_amount,
        default=1.0,
        help="largest norm of the gradient; 0 for no limit (default: 1.0)",
    )
    add(
        "--loss-scale",
        type=_amount,
        default=65536,
        help="the first one, with fp16 only; 0 for none (default: 65536)",
    )
    add(
        "--warmup-iters",
        type=_amount,
        default=0.01,
        help="steps in which the learning rate rises; below 1 a share of all steps (default: 0.01)",
    )
    add(
        "--lr-decay-iters",
        type=_positive,
        help="step at which the learning rate has fallen (default: the last one)",
    )
    add(
        "--lr-decay-style",
        choices=DECAY_STYLES,
        default="noam",
        help="how the learning rate falls (default: noam)",
    )


def _add_file_flags(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--save",
        metavar="FOLDER",
        help="where checkpoints and, at the end, the model go (default: nothing is kept)",
    )
    add("--save-name", metavar="NAME", help="of the model's folder in --save (default: model)")
    add(
        "--save-iters",
        type=_positive,
        default=1000,
        help="steps between checkpoints (default: 1000)",
    )
    add(
        "--resume",
        action="store_true",
        help="go on from the newest checkpoint in --save, if there is one",
    )
    add(
        "--inspect-iters",
        type=_positive,
        default=1000,
        help="steps between tables of weights and gradients (default: 1000)",
    )
    add(
        "--log-iters",
        type=_positive,
        default=10,
        help="steps between lines where the output is no terminal (default: 10)",
    )
    add("--log-dir", metavar="FOLDER", help="where metrics.jsonl goes (default: --save)")
    add(
        "--tensorboard",
        action="store_true",
        help="write curves for TensorBoard beside metrics.jsonl",
    )


def _positive(text: str) -> int:
    return _whole(text, 1)


def _count(text: str) -> int:
    return _whole(text, 0)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return number


def _amount(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return number
