"""Which settings fit a machine, and which of them are fastest."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from bmtrain.plan.forecast import Forecast, Forecaster
from bmtrain.plan.machine import Machine
from bmtrain.plan.settings import LEVELS, Settings
from bmtrain.recompute.level import AUTO


def levels(forecaster: Forecaster, settings: Settings, machine: Machine) -> list[Forecast]:
    """The same settings at every level of recomputation, and chosen by "auto"."""
    return [
        forecaster(dataclasses.replace(settings, recompute=name), machine)
        for name in (*LEVELS, AUTO)
    ]


def advice(forecaster: Forecaster, settings: Settings, machine: Machine) -> Forecast | None:
    """The fastest settings that fit, with batch, ZeRO level and recomputation free, or None.

    Batches go down from the one wanted by halves, or up by doubling while they fit.
    """
    tried = [found for found in _around(forecaster, settings, machine) if found.fits]
    for found in sorted(tried, key=_rate, reverse=True):
        exact = forecaster(found.settings, machine)
        if exact.fits:
            return exact
    return None


def nearest(forecaster: Forecaster, settings: Settings, machine: Machine) -> Forecast | None:
    """The settings that fit and change least: recomputation, then batch, then the optimizer.

    None if not even one row with its optimizer in host memory fits.
    """
    optimizers = dict.fromkeys((settings.optimizer, "offload"))
    for optimizer in optimizers:
        batch = settings.batch
        while batch:
            tried = dataclasses.replace(
                settings, recompute=AUTO, batch=batch, optimizer=optimizer, zero_level=3
            )
            if forecaster(tried, machine, near=settings.batch).fits:
                exact = forecaster(tried, machine)
                if exact.fits:
                    return exact
            batch //= 2
    return None


def gpus_needed(forecaster: Forecaster, settings: Settings, machine: Machine) -> int | None:
    """How many GPUs these settings need, by doubling the machine's; None if far more."""
    wanted = dataclasses.replace(settings, recompute=AUTO)
    more = machine
    for _ in range(_DOUBLINGS):
        more = (
            dataclasses.replace(more, gpus=2 * more.gpus)
            if more.gpus < _GPUS_OF_A_HOST
            else dataclasses.replace(more, hosts=2 * more.hosts)
        )
        if forecaster(wanted, more).fits:
            return more.world_size
    return None


_DOUBLINGS, _GPUS_OF_A_HOST = 8, 8
_MOST_BATCH = 64


def _around(forecaster: Forecaster, settings: Settings, machine: Machine) -> Iterator[Forecast]:
    """Forecasts of settings near these: batches up and down, each with both ZeRO levels."""
    stages = (2, 3) if machine.world_size > 1 else (settings.zero_level,)
    batch = settings.batch
    while batch:
        found = [
            forecaster(
                dataclasses.replace(settings, batch=batch, recompute=AUTO, zero_level=stage),
                machine,
                near=settings.batch,
            )
            for stage in stages
        ]
        yield from found
        if any(one.fits for one in found):
            break
        batch //= 2
    batch = 2 * settings.batch
    while settings.batch < batch <= _MOST_BATCH:
        found = [
            forecaster(
                dataclasses.replace(settings, batch=batch, recompute=AUTO, zero_level=stage),
                machine,
                near=settings.batch,
            )
            for stage in stages
        ]
        yield from found
        if not any(one.fits for one in found):
            break
        batch *= 2


def _rate(found: Forecast) -> float:
    """Tokens a second; for a GPU of unknown speed, those of a step."""
    return found.tokens_per_second or float(found.settings.batch)
