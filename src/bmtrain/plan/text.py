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
    "tp_size": "--tp-size",
}


def report(
    name: str,
    wanted: Forecast,
    levels: Sequence[Forecast],
    advice: Forecast | None,
    gpus_needed: int | None,
    tokens: float | None,
) -> str:
    """All that the command says.

    Args:
        name: of the model.
        wanted: the settings that were asked for.
        levels: the same at each level of recomputation.
        advice: better settings that fit, or the nearest that do; None if there are none.
        gpus_needed: with how many GPUs the wanted settings fit, where they do not.
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
        f"optimizer {settings.optimizer}",
        "",
        f"memory of a GPU at its peak (in {_moment(wanted.peak.name)}):",
        *_parts(wanted),
        "",
        *(_by_level(levels) if levels else ()),
        *_verdict(wanted, advice, gpus_needed, is_brief=not levels),
    ]
    shown = wanted if wanted.fits or advice is None else advice
    lines += _speed(shown, tokens)
    lines += [f"note: {note}" for note in wanted.notes]
    return "\n".join(lines)


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


def _verdict(
    wanted: Forecast, advice: Forecast | None, gpus_needed: int | None, *, is_brief: bool
) -> list[str]:
    if wanted.fits:
        lines = ["fits."]
        changes = "" if advice is None else _changes(wanted.settings, advice.settings)
        if advice is not None and changes and _is_better(wanted, advice):
            lines.append(
                f"faster: {changes} ({advice.tokens_per_second:,.0f} tokens/s, "
                f"{advice.peak.total / GIB:.1f} GiB)."
            )
        return lines
    lines = []
    if wanted.peak.total > wanted.room:
        over = (wanted.peak.total - wanted.room) / GIB
        lines.append(f"does not fit: {over:.1f} GiB too much on each GPU.")
    else:
        lines.append(
            f"does not fit: {wanted.host / GIB:.1f} GiB of host memory are needed, "
            f"{wanted.machine.host_memory:.1f} are there."
        )
    if advice is not None:
        lines.append(
            f"the nearest that does: {_changes(wanted.settings, advice.settings)} "
            f"({advice.peak.total / GIB:.1f} GiB, {advice.host / GIB:.1f} on the host)."
        )
    elif gpus_needed is None and not is_brief:
        lines.append(
            "nothing near fits: take GPUs with more memory, or train adapters (--lora 16)."
        )
    if gpus_needed is not None:
        lines.append(f"with these settings and recompute auto it fits on {gpus_needed} such GPUs.")
    return lines


def _is_better(wanted: Forecast, advice: Forecast) -> bool:
    if wanted.tokens_per_second is None or advice.tokens_per_second is None:
        return False
    return advice.tokens_per_second > 1.03 * wanted.tokens_per_second


def _changes(wanted: Settings, advice: Settings) -> str:
    old, new = dataclasses.asdict(wanted), dataclasses.asdict(advice)
    found = [f"{flag} {new[name]}" for name, flag in _FLAGS.items() if old[name] != new[name]]
    return " ".join(found)


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
