"""Command-line flags of training programs: ModelCenter's, all with a meaning, and more.

`get_args()` reads them all. A program with flags of its own adds them to `make_parser()` and calls
`parse_args`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

DECAY_STYLES = ("constant", "linear", "cosine", "wsd", "exponential", "noam")
DTYPES = ("bf16", "fp16", "fp32")
OPTIMIZERS = ("adam", "adam-offload")
# As bmtrain.optim.AdamOptimizer has them.
MOMENTS = ("fp32", "8bit")
MASTER_WEIGHTS = ("fp32", "split", "none")
ON_SPIKE = ("warn", "skip", "back")
CURVES = ("tensorboard", "wandb")


def get_args() -> argparse.Namespace:
    """The values of all flags on the command line; exits on `--help` or unfit values."""
    return parse_args(make_parser())


def make_parser(description: str | None = None) -> argparse.ArgumentParser:
    """A parser with all flags of `get_args`, to which a program adds its own.

    `description` is shown by `--help`.
    """
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
    problem = problem_of(args, required)
    if problem is not None:
        parser.error(problem)
    return args


def problem_of(args: argparse.Namespace, required: Sequence[str] = ()) -> str | None:
    """Why these flags cannot go together, or which of those `required` is missing; else None."""
    missing = [flag for flag in required if vars(args)[flag.lstrip("-").replace("-", "_")] is None]
    if missing:
        return f"this program needs {', '.join(missing)}"
    if args.start_step >= args.train_iters:
        return (
            f"--start-step {args.start_step} leaves nothing to do before --train-iters "
            f"{args.train_iters}"
        )
    if args.master_weights != "fp32" and args.dtype == "fp16":
        return (
            f"--master-weights {args.master_weights} is for weights in bf16: leave it out, which "
            "keeps them in fp32"
        )
    if args.device_states and args.optimizer != "adam-offload":
        return f"--device-states {args.device_states} goes with --optimizer adam-offload"
    return _problem_of_folders(args)


def _problem_of_folders(args: argparse.Namespace) -> str | None:
    if args.resume and args.save is None:
        return "--resume reads the checkpoints in --save: give that folder too"
    if args.replay_step is not None and args.save is None:
        return "--replay-step computes a step of the run in --save again: give that folder too"
    drawn = [name for name in ("curves", "tensorboard", "wandb") if vars(args)[name]]
    if drawn and args.log_dir is None and args.save is None:
        return f"--{drawn[0]} needs a place for its files: give --log-dir or --save"
    return None


def add_model_config_args(
    parser: argparse.ArgumentParser, **defaults: Any
) -> argparse.ArgumentParser:
    """Add the flags that say which model, and how it is computed; `defaults` as `add_run_args`."""
    add = _adder(parser.add_argument_group("model"), defaults)
    where = "folder or name of the model: its configuration, and its weights where needed"
    add("--model-config", None, where, metavar="MODEL")
    instead = "weights to start from instead of those of --model-config: a file or folder"
    add("--load", None, instead, metavar="PATH")
    exact = "dtype of weights and computation; the optimizer computes in fp32"
    if "dtype" in defaults:
        exact += " (default: bf16, on a CPU that does not compute in it fp32)"
    add("--dtype", "bf16", exact, choices=DTYPES)
    add(
        "--use-checkpoint",
        True,
        "recompute activations in the backward pass: less memory, about a third more work",
        action=argparse.BooleanOptionalAction,
    )
    keeps = "2 keeps gathered weights until the backward pass, 3 gathers them again"
    add("--zero-level", 3, keeps, type=int, choices=(2, 3))
    return parser


def add_training_args(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the flags that say what is learned from, how, and what is kept of it."""
    _add_data_flags(_adder(parser.add_argument_group("data")))
    return add_run_args(parser)


def add_run_args(parser: argparse.ArgumentParser, **defaults: Any) -> argparse.ArgumentParser:
    """Add the flags of `training.Run`: batches, length, optimizer, checkpoints and log.

    Args:
        parser: gets them.
        defaults: that this program has in place of ModelCenter's, by flag.
    """

    def adder(title: str) -> Callable[..., object]:
        return _adder(parser.add_argument_group(title), defaults)

    _add_batch_flags(adder("batches"))
    _add_length_flags(adder("length of training; a step is one update of the weights"))
    _add_optimizer_flags(adder("optimizer and learning rate"), defaults)
    _add_number_flags(adder("NaN, inf and loss spikes"))
    _add_file_flags(adder("checkpoints and log"))
    return parser


def _adder(
    group: argparse._ArgumentGroup, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Callable[..., object]:
    """A function that adds a flag to the group, with its default in the help text."""

    def add(flags: str, default: Any, text: str, **options: Any) -> object:
        default = defaults.get(flags.split(maxsplit=1)[0].lstrip("-").replace("-", "_"), default)
        if default not in (None, ()) and default is not True and default is not False:
            text += f" (default: {default})"
        return group.add_argument(*flags.split(), default=default, help=text, **options)

    return add


def optimizer(text: str) -> str:
    """Of OPTIMIZERS, also by the name that `plan` has for it."""
    return {"offload": "adam-offload"}.get(text, text)


def _add_data_flags(add: Callable[..., object]) -> None:
    where = "where the data are: FOLDER/down_data/superglue/BoolQ, for example"
    add("--base-path", None, where, metavar="FOLDER")
    names = "--dataset_name --dataset-name --dataset"
    add(names, None, "task or data set", dest="dataset_name", metavar="NAME")
    add("--max-encoder-length", 512, "the same, for the encoder", type=positive)
    add("--max-decoder-length", 256, "the same, for the decoder", type=positive)


def _add_batch_flags(add: Callable[..., object]) -> None:
    add("--batch-size", 32, "rows per process and micro-batch", type=positive)
    add("--max-length", 512, "maximum tokens per row", type=positive)
    workers = "processes that prepare data, for each rank; 0 for none"
    add("--num-workers", 0, workers, type=count)


def _add_length_flags(add: Callable[..., object]) -> None:
    add("--epochs", 1, "passes over the training data", type=positive)
    add("--train-iters", 1000000, "stop after this step even if epochs are left", type=positive)
    done = "number of steps done before, when only weights are loaded"
    add("--start-step", 0, done, type=count)
    add("--gradient-accumulation", 1, "micro-batches per step", type=positive, metavar="N")
    add("--seed", 1234, "seed of initial values, dropout and data order", type=int)
    # Launchers of old pass it; the rank comes from the environment.
    add("--local_rank --local-rank", None, argparse.SUPPRESS, dest="local_rank", type=int)


def _add_optimizer_flags(add: Callable[..., object], defaults: Mapping[str, Any]) -> None:
    which = "adam-offload (or offload, as plan says) keeps its states in host memory"
    add("--optimizer", "adam", which, choices=OPTIMIZERS, type=optimizer)
    small = "of Adam's two moments: 8bit takes 2.1 bytes an element, fp32 8"
    add("--moments", "fp32", small, choices=MOMENTS)
    masters = "of bf16 weights: fp32 takes 4 bytes an element, split 2; with none, weights are "
    masters += "rounded stochastically"
    add("--master-weights", "fp32", masters, choices=MASTER_WEIGHTS)
    room = "GiB of each GPU for states of adam-offload; auto for what the first step leaves free"
    add("--device-states", 0.0, room, type=amount_or_auto, metavar="GIB")
    largest = "learning rate at the end of the warm-up; noam divides it by the root of its steps"
    if "lr" in defaults:
        largest += " (default: 1e-5, with adapters 1e-4, from scratch 3e-4)"
    add("--lr", 1e-4, largest, type=amount)
    add(
        "--adam-betas",
        (0.9, 0.999),
        "Adam's betas",
        type=share,
        nargs=2,
        metavar=("BETA1", "BETA2"),
    )
    add("--weight-decay", 1e-2, "weight decay; norms and biases are not decayed", type=amount)
    add("--clip-grad", 1.0, "largest norm of the gradient; 0 for no limit", type=amount)
    add("--loss-scale", 65536, "initial loss scale, with fp16 only; 0 for none", type=amount)
    rises = "warm-up steps of the learning rate; below 1, a share of all steps"
    add("--warmup-iters", 0.01, rises, type=amount)
    fallen = "step at which the decay ends (default: the last one)"
    add("--lr-decay-iters", None, fallen, type=positive)
    add("--lr-decay-style", "noam", "learning-rate schedule", choices=DECAY_STYLES)
    add("--lr-end", 0.0, "final learning rate of linear, cosine and wsd", type=amount)
    stable = "decay steps of wsd, after its stable phase; below 1, a share of all steps"
    add("--wsd-decay", 0.1, stable, type=amount)


def _add_number_flags(add: Callable[..., object]) -> None:
    ends = "steps in a row that may be skipped (NaN, inf, spikes) before the run ends"
    add("--max-bad-steps", 10, ends, type=positive, metavar="N")
    spike = "a loss far above the recent ones: warn, skip its step, or roll back to the last "
    spike += "checkpoint and leave out the batches since"
    add("--on-spike", "warn", spike, choices=ON_SPIKE)
    far = "how far above their median, in standard deviations of the last 128 losses"
    add("--spike-factor", 10.0, far, type=above_zero, metavar="FACTOR")
    again = "compute this step of the run in --save twice, compare, and end"
    add("--replay-step", None, again, type=positive, metavar="STEP")


def _add_file_flags(add: Callable[..., object]) -> None:
    kept = "where checkpoints and, at the end, the model go (default: nothing is kept)"
    add("--save", None, kept, metavar="FOLDER")
    add(
        "--save-name", None, "name of the model's folder in --save (default: model)", metavar="NAME"
    )
    add("--save-iters", 1000, "steps between checkpoints", type=positive)
    add("--save-keep", 2, "number of newest checkpoints to keep", type=positive)
    regular = "also keep checkpoints whose step is a multiple of this"
    add("--save-keep-every", None, regular, type=positive)
    standing = "make training wait for each checkpoint to be written: takes less host memory"
    add("--save-blocking", False, standing, action="store_true")
    within = (
        "seconds for the last step and its checkpoint after a signal (default: under torchrun 25)"
    )
    add("--stop-patience", None, within, type=seconds)
    longest = "seconds that ranks wait for each other: to join, and in any collective"
    add("--timeout", 1800.0, longest, type=seconds)
    hung = "seconds without progress after which the run ends, from the first step on; auto ends "
    hung += "a run that cannot recover after 35 s, any other after about --timeout"
    add("--watchdog", "auto", hung, type=seconds_or_auto)
    newest = "resume from the newest checkpoint in --save, if there is one"
    add("--resume", False, newest, action="store_true")
    others = "with --resume: keep weights and optimizer, but train on other data than before"
    add("--continue-with-other-data", False, others, action="store_true")
    add("--inspect-iters", 1000, "steps between tables of weights and gradients", type=positive)
    lines = "steps between log lines if the output is not a terminal"
    add("--log-iters", 10, lines, type=positive)
    add("--log-dir", None, "where metrics.jsonl goes (default: --save)", metavar="FOLDER")
    where = "where curves go besides metrics.jsonl, separated by commas: tensorboard, wandb, "
    where += "wandb:PROJECT"
    add("--curves", (), where, type=curve_names, metavar="NAMES")
    add("--tensorboard", False, "another name for --curves tensorboard", action="store_true")
    add("--wandb", None, "another name for --curves wandb:PROJECT", metavar="PROJECT")
    peak = "peak of one device in TFLOP/s, for the MFU of a device that is not known"
    add("--peak-tflops", None, peak, type=above_zero, metavar="PEAK")


def curve_names(text: str) -> tuple[str, ...]:
    """Names of `CURVES` with commas between; `wandb` may name its project: wandb:PROJECT."""
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        kind, colon, project = name.partition(":")
        if kind not in CURVES or (colon and (kind != "wandb" or not project)):
            raise argparse.ArgumentTypeError(
                f"{name!r} is none of {', '.join(CURVES)}, wandb:PROJECT"
            )
    return names


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return _whole(text, 1)


def count(text: str) -> int:
    """A whole number from 0 on."""
    return _whole(text, 0)


def seconds(text: str) -> float:
    """A positive number."""
    value = amount(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds, got {text!r}")
    return value


def seconds_or_auto(text: str) -> float | str:
    """A positive number, or "auto"."""
    return text if text == "auto" else seconds(text)


def _whole(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least} on")
    return number


def above_zero(text: str) -> float:
    """A finite number above 0."""
    number = amount(text)
    if number == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return number


def share(text: str) -> float:
    """A number from 0 to below 1."""
    number = amount(text)
    if number >= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to below 1")
    return number


def amount_or_auto(text: str) -> float | str:
    """A finite number from 0 on, or "auto"."""
    return text if text == "auto" else amount(text)


def amount(text: str) -> float:
    """A finite number from 0 on."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 on")
    return number
