"""Forecasts as text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bmtrain.plan.forecast import Forecast
from bmtrain.plan.settings import Settings

GIB = 2**30
# What differs between two settings, in the words of the command line.
_FLAGS = {
    "batch": "--batch",
    "zero_level": "--zero-level",
    "recompute": "--recompute",
    "optimizer": "--optimizer",
    "moments": "--moments",
    "master_weights": "--master-weights",
    "device_states": "--device-states",
    "overlap": "--overlap",
    "tp_size": "--tp-size",
}


@dataclasses.dataclass(frozen=True)
class Advice:
    """What else could be done.

    Attributes:
        settings: better settings that fit, or the nearest that do; None if there are none.
        smaller_states: those with states in fewer bits, where nothing exact fits as well.
        gpus_needed: with how many GPUs the wanted settings fit, where they do not.
    """

    settings: Forecast | None
    smaller_states: Forecast | None
    gpus_needed: int | None


def report(
    name: str, wanted: Forecast, levels: Sequence[Forecast], advice: Advice, tokens: float | None
) -> str:
    """All that the command says.

    Args:
        name: of the model.
        wanted: the settings that were asked for.
        levels: the same at each level of recomputation.
        advice: what else could be done.
        tokens: to train on, for the hours.
    """
    machine, settings = wanted.machine, wanted.settings
    gpu = machine.gpu or "GPU"
    trained = (
        "" if wanted.trained == wanted.parameters else f", {_count(wanted.trained)} of them trained"
    )
    lines = [
        f"{name}: {_count(wanted.parameters)} parameters{trained}",
        f"{machine.world_size} x {gpu} with {machine.memory / GIB:.1f} GiB"
        + (f" on {machine.hosts} hosts" if machine.hosts > 1 else ""),
        f"{settings.batch} x {settings.seq} tokens a GPU, {settings.dtype}, "
        f"ZeRO-{settings.zero_level}, recompute {settings.recompute}, "
        f"optimizer {settings.optimizer}{_form(settings)}",
        "",
        f"memory of a GPU at its peak (in {_moment(wanted.peak.name)}):",
        *_parts(wanted),
        "",
        *(_by_level(levels) if levels else ()),
        *(_when_it_fits(wanted, advice) if wanted.fits else _when_not(wanted, advice, levels)),
    ]
    shown = wanted if wanted.fits else advice.settings or advice.smaller_states or wanted
    lines += _speed(shown, tokens)
    lines += [f"note: {note}" for note in wanted.notes]
    return "\n".join(lines)


def _form(settings: Settings) -> str:
    """Of states that are not in fp32."""
    moments, masters = settings.moments, settings.master_weights
    return (f", {moments} moments" if moments != "fp32" else "") + (
        f", {masters} master weights" if masters != "fp32" else ""
    )


def _count(number: int) -> str:
    for size, unit in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _moment(name: str) -> str:
    names = {
        "forward": "the forward pass",
        "turn": "the head and the loss",
        "backward": "the backward pass",
        "update": "the optimizer's step",
    }
    return names[name]


def _parts(found: Forecast) -> list[str]:
    width = max(map(len, found.peak.parts))
    lines = [
        f"  {name:<{width}}  {size / GIB:8.2f} GiB"
        for name, size in found.peak.parts.items()
        if size
    ]
    total = found.peak.total
    lines.append(
        f"  {'all':<{width}}  {total / GIB:8.2f} GiB of {found.room / GIB:.1f} that can be used"
    )
    host, limit = found.host / GIB, found.machine.host_memory
    lines.append(
        f"  {'host memory':<{width}}  {host:8.2f} GiB"
        + (f" of {limit:.1f}" if limit is not None else "")
        + " on each host"
    )
    return lines


def _by_level(levels: Sequence[Forecast]) -> list[str]:
    lines = ["recompute    activations       peak  fits   tokens/s"]
    for found in levels:
        name = found.settings.recompute
        kept = found.activations.get(name)
        activations = "" if kept is None else f"{kept / GIB:.2f} GiB"
        rate = found.tokens_per_second
        lines.append(
            f"{name:<11}{activations:>13}{found.peak.total / GIB:>7.1f} GiB  "
            f"{'yes' if found.fits else 'no':<4}{'-' if rate is None else f'{rate:,.0f}':>11}"
        )
    return [*lines, ""]


def _when_it_fits(wanted: Forecast, advice: Advice) -> list[str]:
    lines, found = ["fits."], advice.settings
    changes = "" if found is None else _changes(wanted.settings, found.settings)
    if found is not None and changes and _is_better(wanted, found):
        lines.append(
            f"faster: {changes} ({found.tokens_per_second:,.0f} tokens/s, "
            f"{found.peak.total / GIB:.1f} GiB)."
        )
    return lines


def _when_not(wanted: Forecast, advice: Advice, levels: Sequence[Forecast]) -> list[str]:
    lines = []
    if wanted.peak.total > wanted.room:
        over = (wanted.peak.total - wanted.room) / GIB
        lines.append(f"does not fit: {over:.1f} GiB too much on each GPU.")
    else:
        lines.append(
            f"does not fit: {wanted.host / GIB:.1f} GiB of host memory are needed, "
            f"{wanted.machine.host_memory:.1f} are there."
        )
    if advice.settings is not None:
        lines.append(f"the nearest that does: {_change_to(advice.settings, wanted)}.")
    if advice.smaller_states is not None:
        lines.append(
            f"with smaller optimizer states, which changes numbers (docs: guides/precision): "
            f"{_change_to(advice.smaller_states, wanted)}."
        )
    if advice.gpus_needed is not None:
        lines.append(
            f"with these settings and recompute auto it fits on {advice.gpus_needed} such GPUs."
        )
    if levels and advice == Advice(None, None, None):
        lines.append(
            "nothing near fits: take GPUs with more memory, or train adapters (--lora 16)."
        )
    return lines


def _change_to(found: Forecast, wanted: Forecast) -> str:
    return (
        f"{_changes(wanted.settings, found.settings)} ({found.peak.total / GIB:.1f} GiB, "
        f"{found.host / GIB:.1f} on the host)"
    )


def _is_better(wanted: Forecast, advice: Forecast) -> bool:
    if wanted.tokens_per_second is None or advice.tokens_per_second is None:
        return False
    return advice.tokens_per_second > 1.03 * wanted.tokens_per_second


def _changes(wanted: Settings, advice: Settings) -> str:
    old, new = dataclasses.asdict(wanted), dataclasses.asdict(advice)
    return " ".join(
        _said(flag, new[name]) for name, flag in _FLAGS.items() if old[name] != new[name]
    )


def _said(flag: str, value: object) -> str:
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-")
    return f"{flag} {value:g}" if isinstance(value, float) else f"{flag} {value}"


def _speed(found: Forecast, tokens: float | None) -> list[str]:
    if found.seconds is None or found.tokens_per_second is None:
        return ["the speed of this GPU is not known here: no forecast of time."]
    rate = found.tokens_per_second
    lines = [
        f"about {rate:,.0f} tokens/s on all GPUs, {found.seconds.total:.2f} s a step "
        "(rough: large kernels at their usual share of the GPU's peak)"
    ]
    if tokens is not None:
        hours = tokens / rate / 3600
        lines.append(f"about {hours:,.1f} hours for {tokens:,.0f} tokens")
    return lines
