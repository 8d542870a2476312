"""`python -m bmtrain plan MODEL`: memory of a run before it is started, and what changes it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from bmtrain.errors import ConfigurationError
from bmtrain.plan.forecast import Forecast, Source, trace
from bmtrain.plan.outline import Outline
from bmtrain.plan.settings import GIB, LEVELS, RECOMPUTE, Machine, Settings
from bmtrain.plan.sources import of_function, of_transformers
from bmtrain.plan.step import Memory

# Exit statuses. argparse exits with 2 for bad arguments, as BAD_INPUT does.
FITS, TOO_LARGE, BAD_INPUT = 0, 1, 2
EPILOG = "Exit status: 0 it fits, 1 it does not, 2 bad arguments."
ERROR = 0.053  # the margin that nine of ten runs stay within: benchmarks/results/forecast.json
MOMENTS_OF_A_STEP = {
    "forward": "the forward pass",
    "turn": "the head and the loss",
    "backward": "the backward pass",
    "update": "the optimizer's step",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command to its parser."""
    parser.epilog = EPILOG
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a folder with a config.json or a name that transformers knows, or module:function "
        "that returns a torch.nn.Module",
    )
    add_run_arguments(parser)


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that describe machine and settings."""
    for kind, title in ((Machine, "machine"), (Settings, "settings")):
        group = parser.add_argument_group(title)
        for field in dataclasses.fields(kind):
            how = {"default": field.default, "dest": field.name, **field.metadata}
            if how["type"] is bool:
                how = {**how, "action": argparse.BooleanOptionalAction}
                del how["type"], how["choices"]
            else:
                how["help"] += "" if field.default is None else f" ({field.default})"
            name = "compile" if field.name == "compiled" else field.name
            group.add_argument(f"--{name.replace('_', '-')}", **how)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--brief", action="store_true", help="these settings only")


def run(arguments: argparse.Namespace) -> int:
    """Forecast, print, return the exit status."""
    if "" not in sys.path:
        sys.path.insert(0, "")  # modules in the current folder, however this was started
    name: str = arguments.model
    return report(arguments, lambda: (of_function if ":" in name else of_transformers)(name))


def report(arguments: argparse.Namespace, source: Callable[[], Source]) -> int:
    """The same for a model that `source` names.

    `arguments` are those of `add_run_arguments`.
    """
    of_machine, of_settings = (
        {field.name: vars(arguments)[field.name] for field in dataclasses.fields(kind)}
        for kind in (Machine, Settings)
    )
    try:
        machine, settings = Machine(**of_machine), Settings(**of_settings)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of packages that build the model: none is the user's
            model = source()
            wanted, changed = _forecasts(model, settings, machine, only=arguments.brief)
    except ConfigurationError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    if arguments.json:
        changes = {flags: one.as_dict() for flags, one in changed.items()}
        print(json.dumps({"model": model.name, **wanted.as_dict(), "changes": changes}, indent=1))
    else:
        print("\n".join(_lines(model.name, wanted, changed)))
    return FITS if wanted.fits else TOO_LARGE


def _forecasts(
    source: Source, settings: Settings, machine: Machine, *, only: bool
) -> tuple[Forecast, dict[str, Forecast]]:
    """Of the settings, and of those that differ from them in one, by the flags of that one."""
    traced, found = dict[int, Outline](), dict[str, Forecast]()
    for change in ({}, *(() if only else _changes(settings, machine))):
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in change.items())
        of_machine = {name: change.pop(name) for name in ("gpus", "hosts") if name in change}
        own = dataclasses.replace(settings, **change)
        if own.batch not in traced:
            traced[own.batch] = trace(source, own, machine)
        other = dataclasses.replace(machine, **of_machine)
        found[flags] = Forecast.of(Memory(traced[own.batch], own, other))
    return found.pop(""), found


def _changes(settings: Settings, machine: Machine) -> Iterator[dict[str, Any]]:
    """What to try, one at a time: recomputation, ZeRO level, batch, where and in how many bits the
    optimizer's states are; and more GPUs.
    """
    yield from ({"recompute": level} for level in RECOMPUTE if level != settings.recompute)
    if machine.world_size > 1:
        yield {"zero_level": 5 - settings.zero_level}
    if settings.batch > 1:
        yield {"batch": settings.batch // 2}
    if settings.optimizer != "offload":
        yield {"optimizer": "offload"}
    if settings.optimizer != "torch" and not settings.form.is_compact:
        split = {} if settings.dtype == "fp16" else {"master_weights": "split"}
        yield {"moments": "8bit", **split}
    yield {"gpus": 2 * machine.gpus} if machine.gpus < 8 else {"hosts": 2 * machine.hosts}


def _fits(one: Forecast) -> str:
    """In a word. What "auto" fills is not tight as long as it can recompute more."""
    if not one.fits:
        return "no"
    can_recompute = one.settings.recompute not in LEVELS and "nothing" in one.recompute
    is_far = one.peak.total * (1 + ERROR) < one.machine.room
    return "yes" if is_far or can_recompute else "tight"


def _lines(name: str, wanted: Forecast, changed: dict[str, Forecast]) -> Iterator[str]:
    """All that the command says."""
    machine, settings, peak = wanted.machine, wanted.settings, wanted.peak
    yield f"{name}: {wanted.parameters:,} parameters, {wanted.trained:,} of them trained"
    yield (
        f"{machine.hosts} x {machine.gpus} x {machine.gpu or 'GPU'} with "
        f"{machine.memory / GIB:.1f} GiB; {settings.batch} x {settings.seq} tokens a GPU, "
        f"{settings.dtype}, ZeRO-{settings.zero_level}, optimizer {settings.optimizer} with "
        f"{settings.moments} moments and {settings.master_weights} master weights"
    )
    levels = ", ".join(f"{count} {level}" for level, count in wanted.recompute.items())
    yield f"blocks recompute: {levels or 'there are none'}"
    yield from ("", f"memory of a GPU at its peak (in {MOMENTS_OF_A_STEP[peak.name]}):")
    room = f" of {machine.room / GIB:.1f} that can be used"
    limit = "" if machine.host_memory is None else f" of {machine.host_memory:.1f}"
    parts = {**peak.parts, "all": peak.total, "memory of a host": wanted.host}
    behind = {"all": room, "memory of a host": limit}
    for part, size in parts.items():
        if size:
            yield f"  {part:<26}{size / GIB:8.2f} GiB{behind.get(part, '')}"
    over = (peak.total - machine.room) / GIB
    where = f"{over:.1f} GiB too much on each GPU" if over > 0 else "too much on the host"
    tight = f"fits, but {-over:.1f} GiB to spare are less than forecasts err by ({ERROR:.0%})."
    yield from ("", {"yes": "fits.", "no": f"does not fit: {where}."}.get(_fits(wanted), tight))
    if changed:
        yield from ("", f"{'with one change':<38}       peak    of a host  fits")
    for flags, one in changed.items():
        sizes = f"{one.peak.total / GIB:>7.1f} GiB{one.host / GIB:>9.1f} GiB"
        yield f"{flags:<38}{sizes}  {_fits(one)}"
    if changed and not any(one.fits for one in (wanted, *changed.values())):
        yield "none of them fits: change several, or train adapters."
    yield from (f"note: {note}" for note in wanted.notes)
