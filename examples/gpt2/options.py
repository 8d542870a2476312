"""Presets and command-line flags."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from model_center.arguments import MASTER_WEIGHTS, MOMENTS, above_zero, curve_names

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preset:
    """What a preset chooses; each field is also a flag that overrides it.

    Units: see the flags' help.
    """

    layers: int
    dim: int
    heads: int
    vocab_size: int
    seq_len: int
    batch_size: int
    steps: int
    lr: float
    warmup: int
    dtype: str
    save_every: int
    val_every: int
    sample_every: int
    recompute: bool
    text: str


PRESETS = {
    # Sized so that two processes on two CPU cores write words within four minutes, vocabulary
    # included.
    "cpu": Preset(
        layers=4,
        dim=128,
        heads=4,
        vocab_size=2048,
        seq_len=128,
        batch_size=8,
        steps=600,
        lr=4e-3,
        warmup=60,
        dtype="fp32",
        save_every=100,
        val_every=100,
        sample_every=200,
        recompute=False,
        text="documentation",
    ),
    "gpt2": Preset(
        layers=12,
        dim=768,
        heads=12,
        vocab_size=50304,
        seq_len=1024,
        batch_size=16,
        steps=600,
        lr=6e-4,
        warmup=60,
        dtype="bf16",
        save_every=200,
        val_every=100,
        sample_every=200,
        recompute=False,
        text="source",
    ),
    "medium": Preset(
        layers=24,
        dim=1024,
        heads=16,
        vocab_size=50304,
        seq_len=1024,
        batch_size=16,
        steps=600,
        lr=4e-4,
        warmup=60,
        dtype="bf16",
        save_every=200,
        val_every=100,
        sample_every=200,
        recompute=False,
        text="source",
    ),
    "1.3b": Preset(
        layers=24,
        dim=2048,
        heads=16,
        vocab_size=50304,
        seq_len=1024,
        batch_size=16,
        steps=600,
        lr=2e-4,
        warmup=60,
        dtype="bf16",
        save_every=200,
        val_every=100,
        sample_every=200,
        recompute=True,
        text="source",
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Preset):
    """One run, fully decided. The fields beyond the preset's are the flags of the same name."""

    preset: str
    dim_ff: int
    grad_accumulation: int
    zero_level: int
    tp: int
    pp: int
    micro_batches: int
    offload: bool
    moments: str
    master_weights: str
    compile: bool | None
    fp8: bool
    deterministic: bool
    max_bad_steps: int
    data: Path | None
    text_field: str
    cache_dir: Path
    save_dir: Path
    restart: bool
    seed: int
    log_every: int
    val_samples: int
    sample_tokens: int
    prompt: str
    curves: tuple[str, ...]
    peak_tflops: float | None

    def flops_per_token(self) -> int:
        """Of a training step, for the model FLOPs utilisation in the log.

        Each element of a matrix counts 6; attention counts the pairs that causality lets see each
        other. Source: Chowdhery et al., "PaLM" (2022), appendix B.
        """
        layer = 4 * self.dim**2 + 2 * self.dim * self.dim_ff
        products = self.layers * layer + self.vocab_size * self.dim
        return 6 * products + 6 * self.layers * self.dim * self.seq_len

    def model_arguments(self) -> dict[str, int]:
        """The arguments of `GPT` that fix the shape of its parameters."""
        return {
            "num_layers": self.layers,
            "vocab_size": self.vocab_size,
            "dim_model": self.dim,
            "dim_head": self.dim // self.heads,
            "num_heads": self.heads,
            "dim_ff": self.dim_ff,
            "max_distance": self.seq_len,
        }


def build_parser() -> argparse.ArgumentParser:
    """All flags. Those that a preset decides default to None here."""
    parser = argparse.ArgumentParser(
        # short: every rank prints it before an error
        usage="%(prog)s [--FLAG VALUE ...]   (--help lists the flags)",
        description="Train a GPT-2. Start with: torchrun --standalone --nproc_per_node=2 "
        "examples/gpt2/train.py. "
        "Start it again after an interruption and it resumes from its last checkpoint.",
        epilog=_preset_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model_flags(parser.add_argument_group("model"))
    _add_training_flags(parser.add_argument_group("training"))
    _add_file_flags(parser.add_argument_group("text and files"))
    return parser


def _add_model_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--preset",
        choices=PRESETS,
        help="sizes to start from (default: cpu on a CPU, gpt2 on a GPU); the flags below "
        "override it",
    )
    group.add_argument("--layers", type=_positive, help="number of transformer blocks")
    group.add_argument("--dim", type=_positive, help="width of the model")
    group.add_argument(
        "--heads", type=_positive, help="number of attention heads; must divide --dim"
    )
    group.add_argument(
        "--dim-ff", type=_positive, help="width inside the feed-forward layers (default: 4 x --dim)"
    )
    group.add_argument(
        "--vocab-size", type=_vocabulary, help="number of tokens in the vocabulary, at least 257"
    )
    group.add_argument("--seq-len", type=_positive, help="tokens per sequence")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        help="type of parameters and computation; fp16 turns loss scaling on",
    )


def _add_training_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--steps", type=_positive, help="optimizer steps in all")
    group.add_argument("--batch-size", type=_positive, help="sequences per process and micro-batch")
    group.add_argument(
        "--grad-accumulation", type=_positive, default=1, help="micro-batches per step (default: 1)"
    )
    group.add_argument(
        "--lr",
        type=float,
        help="highest learning rate, reached after the warm-up; falls to 0 along a cosine",
    )
    group.add_argument("--warmup", type=int, help="warm-up steps of the learning rate")
    group.add_argument(
        "--zero-level",
        type=int,
        choices=(2, 3),
        default=3,
        help="2 keeps gathered parameters until backward, 3 gathers them again (default: 3)",
    )
    group.add_argument(
        "--tp",
        type=_positive,
        default=1,
        help="processes that share each layer (tensor parallelism); must divide the number "
        "of processes, --heads, --dim-ff and "
        "--vocab-size (default: 1)",
    )
    group.add_argument(
        "--pp",
        type=_positive,
        default=1,
        help="stages of a pipeline that the layers are cut into; must divide the number of "
        "processes (default: 1)",
    )
    group.add_argument(
        "--micro-batches",
        type=_positive,
        help="parts that the batches of a pipeline's stages pass in; must divide --pp x "
        "--batch-size (default: as many as stages)",
    )
    group.add_argument(
        "--recompute",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="recompute activations in backward: less memory, about a third more work",
    )
    group.add_argument(
        "--no-checkpoint",
        dest="recompute",
        action="store_false",
        help="another name for --no-recompute",
    )
    group.add_argument(
        "--offload", action="store_true", help="keep the optimizer's states in host memory"
    )
    group.add_argument(
        "--moments",
        choices=MOMENTS,
        default="fp32",
        help="of Adam's two moments: 8bit takes 2.1 bytes an element, fp32 8 (default: fp32)",
    )
    group.add_argument(
        "--master-weights",
        choices=MASTER_WEIGHTS,
        default="fp32",
        help="of bf16 weights: fp32 takes 4 bytes an element, split 2; with none, weights are "
        "rounded stochastically (default: fp32)",
    )
    group.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="torch.compile the blocks (default: on GPUs)",
    )
    group.add_argument(
        "--fp8",
        action="store_true",
        help="compute the linear maps of blocks in eight bits, on GPUs that can",
    )
    group.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on GPUs, kernels that repeat bit by bit, so that a resumed run does too "
        "(default: on; off is a little faster)",
    )
    group.add_argument(
        "--max-bad-steps",
        type=_positive,
        default=10,
        help="steps in a row that may be skipped, because loss or gradients are not finite, before "
        "the run ends and names the cause (default: 10)",
    )
    group.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of initialisation and of the order of the text (default: 0)",
    )


def _add_file_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--data",
        type=Path,
        help="your own text: a text file, a .jsonl file or a folder of them (default: "
        "Python's standard library)",
    )
    group.add_argument(
        "--text",
        choices=("documentation", "source"),
        help="of Python's standard library, without --data: the sentences of its documentation, or "
        "its source",
    )
    group.add_argument(
        "--text-field",
        default="text",
        help="field of a JSONL line that holds its text (default: text)",
    )
    root = Path(__file__).resolve().parents[2]
    group.add_argument(
        "--cache-dir",
        type=Path,
        default=root / ".cache" / "gpt2",
        help="where vocabularies and tokens are kept (default: .cache/gpt2 in the repository)",
    )
    group.add_argument(
        "--save-dir",
        type=Path,
        help="checkpoints, metrics, picture, samples (default: runs/gpt2-PRESET)",
    )
    group.add_argument("--save-every", type=_positive, help="steps between checkpoints")
    group.add_argument(
        "--val-every", type=_positive, help="steps between measurements of the validation loss"
    )
    group.add_argument(
        "--val-samples",
        type=_positive,
        default=128,
        help="held-out sequences per measurement (default: 128)",
    )
    group.add_argument(
        "--log-every",
        type=_positive,
        default=10,
        help="steps between log lines if the output is not a terminal (default: 10)",
    )
    group.add_argument(
        "--curves",
        type=curve_names,
        default=(),
        metavar="NAMES",
        help="where curves go beside metrics.jsonl, with commas between: tensorboard, wandb (its "
        "project as wandb:PROJECT)",
    )
    group.add_argument(
        "--peak-tflops",
        type=above_zero,
        help="of one device, for the MFU in the log where the device is not known",
    )
    _add_sample_flags(group)
    group.add_argument(
        "--restart",
        action="store_true",
        help="delete what --save-dir holds of an earlier run and start over",
    )


def _add_sample_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sample-every", type=_positive, help="steps between texts that the model writes"
    )
    group.add_argument(
        "--sample-tokens",
        type=int,
        default=80,
        help="length of the text sample, 0 for none (default: 80)",
    )
    group.add_argument(
        "--prompt",
        help="how the text sample begins, without a blank at its end, since a word's token holds "
        "the blank before it (default: 'Return' after documentation, 'def' after source, nothing "
        "with --data)",
    )


def parse_options(arguments: Sequence[str], device_type: str) -> Options:
    """The decided run; explains itself and exits on `--help` or on arguments that do not fit.

    Args:
        arguments: the command line without the program's name.
        device_type: "cpu" or "cuda": chooses the preset where none is named.
    """
    parser = build_parser()
    values = vars(parser.parse_args(arguments))
    own_warmup = values["warmup"] is not None
    values["preset"] = values["preset"] or ("gpt2" if device_type == "cuda" else "cpu")
    for name, value in dataclasses.asdict(PRESETS[values["preset"]]).items():
        if values[name] is None:
            values[name] = value
    if values["dim_ff"] is None:
        values["dim_ff"] = 4 * values["dim"]
    if values["save_dir"] is None:
        values["save_dir"] = Path("runs") / f"gpt2-{values['preset']}"
    if values["prompt"] is None:
        prompts = {"documentation": "Return", "source": "def"}
        values["prompt"] = prompts[values["text"]] if values["data"] is None else ""
    _check_sizes(parser, values)
    if values["master_weights"] != "fp32" and values["dtype"] == "fp16":
        parser.error(f"--master-weights {values['master_weights']} is for weights in bf16")
    if not values["lr"] > 0:
        parser.error(f"--lr is {values['lr']}: expected a number above 0")
    if not own_warmup:  # a short run of a preset should not need a second flag
        values["warmup"] = min(values["warmup"], values["steps"] // 10)
    elif not 0 <= values["warmup"] < values["steps"]:
        parser.error(
            f"--warmup is {values['warmup']}: expected 0 to {values['steps'] - 1}, less "
            "than --steps"
        )
    return Options(**values)


def _check_sizes(parser: argparse.ArgumentParser, values: dict[str, Any]) -> None:
    """Exit with a message where one size does not divide another; the number of micro-batches is
    decided here.
    """
    if values["dim"] % values["heads"]:
        parser.error(f"--dim {values['dim']} is not divisible by --heads {values['heads']}")
    for name in ("heads", "dim_ff", "vocab_size"):
        if values[name] % values["tp"]:
            parser.error(
                f"--{name.replace('_', '-')} {values[name]} is not divisible by --tp {values['tp']}"
            )
    if values["micro_batches"] is None:
        values["micro_batches"] = values["pp"]
    if values["pp"] > values["layers"]:
        parser.error(f"--pp {values['pp']} is more than --layers {values['layers']}")
    if values["pp"] * values["batch_size"] % values["micro_batches"]:
        parser.error(
            f"--micro-batches {values['micro_batches']} does not divide --pp "
            f"{values['pp']} x --batch-size {values['batch_size']}"
        )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a whole number above 0")
    return number


def _vocabulary(text: str) -> int:
    number = int(text)
    if number < 257:
        raise argparse.ArgumentTypeError(
            f"{number} is too small: 256 bytes and the end-of-text token need 257"
        )
    return number


def _preset_table() -> str:
    fields = [field.name for field in dataclasses.fields(Preset)]
    lines = ["presets:"]
    for name, preset in PRESETS.items():
        lines.append(
            f"  {name}: "
            + ", ".join(f"{field.replace('_', '-')} {getattr(preset, field)}" for field in fields)
        )
    return "\n".join(lines)
