"""Which settings fit a machine, and which of them are fastest."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from bmtrain.optim.form import StateForm
from bmtrain.plan.forecast import Forecast, Forecaster
from bmtrain.plan.machine import Machine
from bmtrain.plan.settings import DTYPES, LEVELS, Settings, has_form
from bmtrain.recompute.level import AUTO
from bmtrain.recompute.memory import MARGIN


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

    None if not even one row with its optimizer in host memory fits. Numbers do not change: states
    are as exact as those that are wanted.
    """
    for optimizer in dict.fromkeys((settings.optimizer, "offload")):
        found = _most_rows(forecaster, settings, machine, optimizer, [settings.form])
        if found is not None:
            return found
    return None


def with_smaller_states(
    forecaster: Forecaster, settings: Settings, machine: Machine, exact: Forecast | None
) -> Forecast | None:
    """What fits with states in fewer bits than wanted, where that spares something else.

    Args:
        forecaster, settings, machine: what does not fit.
        exact: what `nearest` has found.

    Returns:
        The settings with most rows, then with most bits; on the GPU if one row fits there. None
        where `exact` has as many rows and its states in the same place.
    """
    for optimizer in dict.fromkeys((settings.optimizer, "offload")):
        forms = _smaller_forms(settings, optimizer)
        found = _most_rows(forecaster, settings, machine, optimizer, forms)
        if found is None:
            if exact is not None and exact.settings.optimizer == optimizer:
                return None
            continue
        is_spared = exact is None or (
            exact.settings.optimizer != optimizer or exact.settings.batch < found.settings.batch
        )
        return found if is_spared else None
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


# That may be proposed, from most to fewest bits. Without masters a model may learn otherwise.
_FORMS = (
    StateForm(master_weights="split"),
    StateForm(moments="8bit"),
    StateForm(moments="8bit", master_weights="split"),
)
GIB = 2**30
_DOUBLINGS, _GPUS_OF_A_HOST = 8, 8
_MOST_BATCH = 64


def _smaller_forms(settings: Settings, optimizer: str) -> list[StateForm]:
    def size(form: StateForm) -> int:
        return form.num_bytes(64, DTYPES[settings.dtype])

    return [
        form
        for form in _FORMS
        if has_form(optimizer, settings.dtype, form) and size(form) < size(settings.form)
    ]


def _most_rows(
    forecaster: Forecaster,
    settings: Settings,
    machine: Machine,
    optimizer: str,
    forms: Sequence[StateForm],
) -> Forecast | None:
    """With this optimizer, as many rows as fit with states in one of these forms, the first."""
    batch = settings.batch
    while batch:
        for form in forms:
            tried = dataclasses.replace(
                settings,
                recompute=AUTO,
                batch=batch,
                optimizer=optimizer,
                moments=form.moments,
                master_weights=form.master_weights,
                zero_level=3,
            )
            for placed in _placed(forecaster, tried, machine, near=settings.batch):
                exact = forecaster(placed, machine)
                if exact.fits:
                    return exact
        batch //= 2
    return None


def _placed(
    forecaster: Forecaster, settings: Settings, machine: Machine, near: int
) -> Iterator[Settings]:
    """These settings where they may fit; where the host has no room for all states, with some of
    them on the GPU: as few as must be, which leaves room to hide updates, or as many as can, the
    faster first.
    """
    found = forecaster(settings, machine, near=near)
    if found.fits:
        yield settings
    if found.fits or settings.optimizer != "offload" or machine.host_memory is None:
        return
    # What "auto" recomputes less, and copies of gradients, take the room that states could have.
    least = dataclasses.replace(settings, recompute="block", device_states=0.0)
    bare = forecaster(dataclasses.replace(least, overlap=False), machine, near=near)
    room = 0.95 * (bare.room - bare.peak.total) / GIB  # slack grows with them
    lacking = (bare.host / GIB - (1 - MARGIN) * machine.host_memory) / machine.gpus
    placed = [
        forecaster(dataclasses.replace(least, device_states=float(states)), machine, near=near)
        for states in {math.ceil(lacking), int(room)}
        if 0 < states <= room
    ]
    for one in sorted(placed, key=_rate, reverse=True):
        if one.fits:
            yield one.settings


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
