"""What is measured and how: the command line of throughput.py, which compare.py and the suites
write.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence

from models import SHAPES, Geometry

BACKENDS = ("bmtrain", "fsdp2", "plain", "deepspeed")
CHOICES = (
    "recompute",
    "offload",
    "overlap",
    "device_states",
    "moments",
    "master_weights",
    "micro_batches",
    "zero_level",
    "tp",
    "pipe",
    "transport",
    "fp8",
    "cuda_graph",
    "fused_head",
    "memory_limit",
)
# Which of them a backend has; others are refused before anything is built.
SUPPORTED = {
    "bmtrain": set(CHOICES) - {"cuda_graph"},
    "fsdp2": {"recompute", "offload"},
    "plain": {"recompute", "cuda_graph"},
    "deepspeed": {"recompute", "offload"},
}
RECOMPUTE = {
    "bmtrain": ("none", "all", "auto"),
    "fsdp2": ("none", "all", "selective"),
    "plain": ("none", "all", "selective"),
    "deepspeed": ("none", "all"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """One run of throughput.py; fields are the arguments of `parser`."""

    backend: str
    shape: str = "13b"
    batch: Sequence[int] = (8,)
    compile: bool = True
    recompute: str = "none"
    offload: bool = False
    overlap: bool = True
    device_states: float | str = 0.0
    moments: str = "fp32"
    master_weights: str = "fp32"
    micro_batches: int = 1
    zero_level: int = 3
    tp: int = 1
    pipe: int = 1
    transport: str = "auto"
    fp8: bool = False
    cuda_graph: bool = False
    fused_head: bool = False
    memory_limit: float | None = None
    warmup: int = 3
    steps: int = 5
    profile: str | None = None
    device: str = "cuda"
    out: str | None = None

    @property
    def geometry(self) -> Geometry:
        return SHAPES[self.shape]

    def mode(self) -> dict[str, object]:
        """What was turned on: the same in every record of the run."""
        return {name: getattr(self, name) for name in ("backend", "shape", "compile", *CHOICES)}

    def state_bytes(self, gpus: int) -> float:
        """What weights, gradients and optimizer states take of each GPU: 16 bytes a parameter, 14
        with split masters, 4 with states in host memory.
        """
        shards = 1 if self.backend == "plain" else gpus
        on_gpu = 14.0 if self.master_weights == "split" else 16.0
        return (4.0 if self.offload else on_gpu) * self.geometry.num_parameters / shards


def parser() -> argparse.ArgumentParser:
    """Of the arguments that `Options` holds."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="13b")
    parser.add_argument(
        "--batch", type=int, nargs="+", default=[8], help="sequences per GPU; each is a record"
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument(
        "--recompute",
        nargs="?",
        choices=("none", "all", "auto", "selective"),
        const="all",
        default="none",
        help="activations; auto: as needed; selective: all but products and attention",
    )
    parser.add_argument(
        "--offload", action="store_true", help="states of the optimizer in host memory"
    )
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="with --offload: update beside the next forward pass",
    )
    parser.add_argument(
        "--device-states",
        type=lambda text: text if text == "auto" else float(text),
        metavar="GIB",
        default=0.0,
        help="with --offload: states that stay on the GPU; auto: what the first step leaves",
    )
    parser.add_argument("--moments", choices=("fp32", "8bit"), default="fp32", help="of Adam")
    parser.add_argument(
        "--master-weights", choices=("fp32", "split", "none"), default="fp32", help="of Adam"
    )
    parser.add_argument(
        "--micro-batches", type=int, default=1, help="of --batch rows each, to a step"
    )
    parser.add_argument("--zero-level", type=int, default=3, help="2 or 3")
    parser.add_argument("--tp", type=int, default=1, help="ranks that share each layer")
    parser.add_argument(
        "--pipe", type=int, default=1, help="stages, each of twice as many micro-batches"
    )
    parser.add_argument(
        "--transport",
        choices=("auto", "nccl", "copy_engine"),
        default="auto",
        help="what moves shards",
    )
    parser.add_argument("--fp8", action="store_true", help="linear layers of blocks in FP8")
    parser.add_argument(
        "--cuda-graph", action="store_true", help="torch.compile's mode reduce-overhead"
    )
    parser.add_argument(
        "--fused-head", action="store_true", help="the loss without the logits of all rows"
    )
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GIB",
        help="what --recompute auto may fill, by default the GPU",
    )
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument(
        "--profile",
        nargs="?",
        const="",
        metavar="FILE",
        help="afterwards: GPU time by kind; with FILE a table of kernels too",
    )
    parser.add_argument(
        "--device",
        choices=("cuda", "cpu"),
        default="cuda",
        help="cpu: to try the program, not to measure",
    )
    parser.add_argument("--out", help="file to append the records to")
    return parser


def checked(arguments: argparse.Namespace) -> Options:
    """The options, once it is sure that the backend has them.

    Raises:
        SystemExit: naming the option that it does not have.
    """
    options = Options(**vars(arguments))
    for field in dataclasses.fields(Options):
        chosen = getattr(options, field.name)
        if (
            field.name in CHOICES
            and field.name not in SUPPORTED[options.backend]
            and chosen != field.default
        ):
            raise SystemExit(
                f"--{field.name.replace('_', '-')} {chosen}: {options.backend} does not "
                "have it; leave it out."
            )
    if options.recompute not in RECOMPUTE[options.backend]:
        expected = ", ".join(RECOMPUTE[options.backend])
        raise SystemExit(
            f"--recompute {options.recompute}: {options.backend} does not have it; "
            f"expected one of {expected}."
        )
    if options.backend == "plain" and options.cuda_graph and not options.compile:
        raise SystemExit(
            "--cuda-graph --no-compile: plain has the graphs of torch.compile; leave out "
            "one of both."
        )
    return options


def from_words(words: str) -> Options:
    """The options of a command line."""
    return checked(parser().parse_args(shlex.split(words)))
