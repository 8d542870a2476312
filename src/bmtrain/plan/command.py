"""`python -m bmtrain plan MODEL`: memory and time of a run before it is started."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable

from bmtrain.errors import ConfigurationError
from bmtrain.optim.form import MASTER_WEIGHTS, MOMENTS
from bmtrain.plan import search, text
from bmtrain.plan.forecast import Forecaster, Source
from bmtrain.plan.machine import GPUS, Machine
from bmtrain.plan.reference import Sizes
from bmtrain.plan.settings import DTYPES, OPTIMIZERS, RECOMPUTE, Settings
from bmtrain.plan.sources import of_function, of_sizes, of_transformers

# Exit statuses. argparse exits with 2 for bad arguments, as BAD_INPUT does.
FITS, TOO_LARGE, BAD_INPUT = 0, 1, 2
EPILOG = "Exit status: 0 it fits, 1 it does not, 2 bad arguments."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.epilog = EPILOG
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder with a config.json or a name that transformers knows, or module:function "
        "that returns a torch.nn.Module; left out where sizes are given",
    )
    sizes = parser.add_argument_group("sizes in place of MODEL")
    for name, about in (
        ("layers", "number of layers"),
        ("hidden", "features"),
        ("heads", "attention heads"),
        ("vocab", "tokens known"),
        ("ff", "width of the feed-forward network"),
        ("kv-heads", "heads of keys and values"),
    ):
        sizes.add_argument(f"--{name}", type=int, help=about)
    sizes.add_argument(
        "--gated",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="as LLaMA (the default) or as GPT-2",
    )
    sizes.add_argument("--tied", action="store_true", help="the head has the embedding's weight")
    sizes.add_argument("--fused-head", action="store_true", help="never hold all logits")
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that describe machine and settings."""
    machine = parser.add_argument_group("machine")
    machine.add_argument("--gpus", type=int, default=1, help="of each host (1)")
    machine.add_argument("--hosts", type=int, default=1, help="(1)")
    machine.add_argument("--gpu", choices=sorted(GPUS), help="kind of GPU")
    machine.add_argument("--gpu-memory", type=float, metavar="GIB", help="of each GPU")
    machine.add_argument("--host-memory", type=float, metavar="GIB", help="of each host")
    run = parser.add_argument_group("settings")
    run.add_argument("--batch", type=int, default=1, help="rows on each GPU (1)")
    run.add_argument("--seq", type=int, default=1024, help="tokens of a row (1024)")
    run.add_argument("--recompute", choices=RECOMPUTE, default="auto", help="(auto)")
    run.add_argument("--zero-level", type=int, default=3, choices=(2, 3), help="(3)")
    run.add_argument("--tp-size", type=int, default=1, help="ranks that share each layer (1)")
    run.add_argument("--pipe-size", type=int, default=1, help="pipeline stages (1)")
    run.add_argument("--dtype", choices=tuple(DTYPES), default="bf16", help="(bf16)")
    run.add_argument("--optimizer", choices=OPTIMIZERS, default="adam", help="(adam)")
    run.add_argument("--moments", choices=MOMENTS, default="fp32", help="of adam, offload (fp32)")
    run.add_argument(
        "--master-weights", choices=MASTER_WEIGHTS, default="fp32", help="of adam, offload (fp32)"
    )
    run.add_argument(
        "--device-states", type=float, default=0.0, metavar="GIB", help="of a GPU, with offload (0)"
    )
    run.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="update beside the forward pass, with offload (on)",
    )
    run.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, default=True, help="blocks (on)"
    )
    run.add_argument(
        "--lora", type=int, default=0, metavar="RANK", help="adapters, all else frozen"
    )
    run.add_argument("--fp8", action="store_true", help="linear layers of blocks in FP8")
    run.add_argument("--tokens", type=float, help="to train on, for the hours")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument(
        "--brief", action="store_true", help="these settings only: no other levels, no advice"
    )


def run(arguments: argparse.Namespace) -> int:
    """Forecast, print, return the exit status."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder, however this was started
    return report(arguments, lambda: _source(arguments))


def report(arguments: argparse.Namespace, source: Callable[[], Source]) -> int:
    """The same for a model that `source` names.

    `arguments` are those of `add_run_arguments`.
    """
    try:
        machine, settings = _machine(arguments), _settings(arguments)
        if arguments.tokens is not None and not arguments.tokens > 0:
            raise ConfigurationError(f"plan: tokens is {arguments.tokens:g}: expected more than 0.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that build the model: none is the user's
            return _print(source(), machine, settings, arguments)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT


def _print(
    source: Source, machine: Machine, settings: Settings, arguments: argparse.Namespace
) -> int:
    forecaster = Forecaster(source, every_level=not arguments.brief)
    wanted = forecaster(settings, machine)
    levels = [] if arguments.brief else search.levels(forecaster, settings, machine)
    advice, smaller, needed = None, None, None
    if wanted.fits and not arguments.brief:
        advice = search.advice(forecaster, settings, machine)
    elif not arguments.brief:
        advice = search.nearest(forecaster, settings, machine)
        smaller = search.with_smaller_states(forecaster, settings, machine, advice)
        needed = search.gpus_needed(forecaster, settings, machine)
    if arguments.json:
        found = {
            "model": source.name,
            **wanted.as_dict(),
            "levels": {one.settings.recompute: one.as_dict() for one in levels},
            "advice": None if advice is None else advice.as_dict(),
            "smaller_states": None if smaller is None else smaller.as_dict(),
            "gpus_needed": needed,
        }
        rate = wanted.tokens_per_second
        if arguments.tokens is not None and rate is not None:
            found["hours"] = arguments.tokens / rate / 3600
        print(json.dumps(found, indent=1))
    else:
        found_by = text.Advice(advice, smaller, needed)
        print(text.report(source.name, wanted, levels, found_by, arguments.tokens))
    return FITS if wanted.fits else TOO_LARGE


def _machine(arguments: argparse.Namespace) -> Machine:
    return Machine(
        gpus=arguments.gpus,
        hosts=arguments.hosts,
        gpu=arguments.gpu,
        gpu_memory=arguments.gpu_memory,
        host_memory=arguments.host_memory,
    )


def _settings(arguments: argparse.Namespace) -> Settings:
    return Settings(
        batch=arguments.batch,
        seq=arguments.seq,
        zero_level=arguments.zero_level,
        tp_size=arguments.tp_size,
        pipe_size=arguments.pipe_size,
        recompute=arguments.recompute,
        dtype=arguments.dtype,
        optimizer=arguments.optimizer,
        moments=arguments.moments,
        master_weights=arguments.master_weights,
        device_states=arguments.device_states,
        overlap=arguments.overlap,
        compiled=arguments.compile,
        lora=arguments.lora,
        fp8=arguments.fp8,
    )


def _source(arguments: argparse.Namespace) -> Source:
    needed = ("layers", "hidden", "heads", "vocab")
    given = [name for name in (*needed, "ff", "kv_heads") if vars(arguments)[name] is not None]
    if arguments.model is not None:
        extra = [*given, *(["fused_head"] if arguments.fused_head else [])]
        if extra:
            raise ConfigurationError(
                f"plan: --{extra[0].replace('_', '-')} goes with sizes alone, and a MODEL is given."
            )
        name: str = arguments.model
        return of_function(name) if ":" in name else of_transformers(name)
    missing = [f"--{name}" for name in needed if name not in given]
    if missing:
        raise ConfigurationError(f"plan needs a MODEL, or sizes: {' '.join(missing)} missing.")
    sizes = Sizes(
        layers=arguments.layers,
        hidden=arguments.hidden,
        heads=arguments.heads,
        vocab=arguments.vocab,
        ff=arguments.ff,
        kv_heads=arguments.kv_heads,
        gated=arguments.gated,
        tied=arguments.tied,
    )
    return of_sizes(sizes, arguments.fused_head)
