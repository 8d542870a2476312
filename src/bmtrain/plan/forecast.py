"""`bmtrain.plan.forecast`: memory and time of a run before it is started."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.errors import ConfigurationError
from bmtrain.plan import lora
from bmtrain.plan.blocks import COUNTED
from bmtrain.plan.machine import HOST_PROCESS, HOST_SYSTEM, Machine
from bmtrain.plan.outline import Outline, along, outline, without_values
from bmtrain.plan.settings import DTYPES, LEVELS, Settings
from bmtrain.plan.speed import Seconds, seconds
from bmtrain.plan.step import Memory, Moment, elements
from bmtrain.recompute.level import AUTO, Level
from bmtrain.torch_internals import without_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model to forecast.

    Attributes:
        name: for the report.
        build: makes the module; called with the meta device as the default one.
        loss: of the module, a batch size and a number of tokens: a scalar; makes its own inputs.
        whole: paths of modules that are Blocks beside the members of ModuleLists, with
            use_checkpoint=False and zero_level=2.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module, int, int], torch.Tensor]
    whole: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run will take.

    Attributes:
        settings, machine: of the run.
        peak: the moment of a step that takes most, bytes by part on one GPU.
        activations: bytes that all blocks keep together, by level.
        recompute: how many calls of blocks are at each level.
        parameters, trained: elements of the model.
        host: bytes of host memory on one host.
        seconds: of a step; None for a GPU whose speed is not known.
        tokens_per_second: on all GPUs together; None likewise.
        notes: what is uncertain.
    """

    settings: Settings
    machine: Machine
    peak: Moment
    activations: dict[str, int]
    recompute: dict[str, int]
    parameters: int
    trained: int
    host: int
    seconds: Seconds | None
    tokens_per_second: float | None
    notes: tuple[str, ...] = ()

    @property
    def room(self) -> int:
        """`Machine.room`."""
        return self.machine.room

    @property
    def fits(self) -> bool:
        """Whether both GPU and host have the memory."""
        limit = self.machine.host_memory
        return self.peak.total <= self.room and (limit is None or self.host <= limit * 2**30)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, bytes as integers."""
        rate = self.tokens_per_second
        return {
            "settings": dataclasses.asdict(self.settings),
            "machine": dataclasses.asdict(self.machine),
            "fits": self.fits,
            "peak_bytes": self.peak.total,
            "peak_at": self.peak.name,
            "parts": self.peak.parts,
            "room_bytes": self.room,
            "activations": self.activations,
            "recompute": self.recompute,
            "parameters": self.parameters,
            "trained": self.trained,
            "host_bytes": self.host,
            "step_seconds": None if self.seconds is None else self.seconds.total,
            "tokens_per_second": rate,
            "notes": list(self.notes),
        }


class Forecaster:
    """Forecasts of one model; what has been traced for one forecast serves the next.

    Args:
        source: the model.
        every_level: whether to count all levels of recomputation, also where the settings name one.
        memory: what puts the parts together; for other versions of this library.
    """

    def __init__(
        self, source: Source, *, every_level: bool = True, memory: type[Memory] = Memory
    ) -> None:
        self.source, self._every_level, self._memory = source, every_level, memory
        self._traced: dict[Any, tuple[Outline, tuple[str, ...]]] = {}

    def __call__(
        self, settings: Settings, machine: Machine, *, near: int | None = None
    ) -> Forecast:
        """What a run with these settings takes.

        Args:
            settings, machine: of the run.
            near: a batch from which other batches are extrapolated; None traces each batch.

        Raises:
            ConfigurationError: for settings that cannot be.
        """
        settings.check_world(machine.world_size)
        traced, notes = self.outline(settings) if near is None else self._near(settings, near)
        memory = self._memory(traced, settings, machine)
        chosen = _levels(memory, settings, machine.room)
        peak, time = memory.peak(chosen), seconds(traced, memory, settings, machine, chosen)
        per_step = settings.batch * settings.seq * machine.world_size
        parameters, trained = elements(traced)
        return Forecast(
            settings=settings,
            machine=machine,
            peak=peak,
            activations={
                name: memory.kept(level) for name, level in LEVELS.items() if memory.has(level)
            },
            recompute=dict(Counter(level.name.lower() for level in chosen)),
            parameters=parameters,
            trained=trained,
            host=self._host(memory, machine, chosen),
            seconds=time,
            tokens_per_second=None if time is None else per_step / time.total,
            notes=notes,
        )

    def outline(self, settings: Settings) -> tuple[Outline, tuple[str, ...]]:
        """The traced model and notes about it."""
        levels = self._levels_of(settings)
        key = (levels, *(getattr(settings, name) for name in _TRACED))
        if key not in self._traced:
            self._traced[key] = self._trace(settings, levels)
        return self._traced[key]

    def _near(self, settings: Settings, batch: int) -> tuple[Outline, tuple[str, ...]]:
        """The outline as that of two batches, `batch` and a neighbour, lets expect."""
        other = batch // 2 or 2
        if settings.batch in (batch, other):
            return self.outline(settings)
        one, notes = self.outline(dataclasses.replace(settings, batch=batch))
        two, _ = self.outline(dataclasses.replace(settings, batch=other))
        return along(one, two, (settings.batch - batch) / (other - batch)), notes

    def _levels_of(self, settings: Settings) -> tuple[Level, ...]:
        if self._every_level or settings.recompute in (AUTO, "offloaded"):
            return COUNTED
        return tuple(dict.fromkeys((Level.NOTHING, LEVELS[settings.recompute])))

    def _trace(
        self, settings: Settings, levels: Sequence[Level]
    ) -> tuple[Outline, tuple[str, ...]]:
        with torch.device("meta"):
            model = self.source.build()
        if not isinstance(model, torch.nn.Module):
            raise ConfigurationError(
                f"{self.source.name} returns {type(model).__name__}: expected a torch.nn.Module."
            )
        notes: list[str] = []
        with without_memory():
            model = without_values(model, DTYPES[settings.dtype])
            model.train()
            if settings.lora:
                lora.add(model, settings.lora, DTYPES[settings.dtype])

            def loss(module: torch.nn.Module) -> torch.Tensor:
                return self.source.loss(module, settings.batch, settings.seq)

            found = outline(
                model,
                loss,
                compiled=settings.compiled,
                in_fp8=settings.fp8,
                whole=self.source.whole,
                levels=levels,
                tell=notes.append,
            )
        if not found.calls:
            notes.append("no member of a ModuleList is called: nothing is gathered block by block")
        if settings.pipe_size > 1:
            notes.append(
                "stages are taken as equal: the first and the last also have what is not a layer"
            )
        return found, tuple(notes)

    def _host(self, memory: Memory, machine: Machine, levels: Sequence[Level]) -> int:
        calls = memory.outline.calls
        inputs = sum(
            call.costs.inputs
            for call, level in zip(calls, levels, strict=True)
            if level is Level.OFFLOADED
        )
        return HOST_SYSTEM + machine.gpus * (HOST_PROCESS + memory.host + inputs)


_TRACED = ("batch", "seq", "dtype", "compiled", "lora", "fp8")


def _levels(memory: Memory, settings: Settings, room: int) -> list[Level]:
    if settings.recompute == AUTO:
        limit = settings.memory_limit
        return memory.levels(room, None if limit is None else int(limit * 2**30))
    return memory.whole_levels(LEVELS[settings.recompute])


def forecast(
    model: Callable[[], torch.nn.Module],
    loss: Callable[[torch.nn.Module, int, int], torch.Tensor],
    settings: Settings | None = None,
    machine: Machine | None = None,
) -> Forecast:
    """Memory and time of training a model, before anything is allocated.

    The model is built on the meta device and run without memory, forward and backward; blocks, the
    members of its ModuleLists, are counted at each level of recomputation, compiled as on a GPU.
    Nothing of it needs a GPU or the process group.

    Args:
        model: makes the plain module, not wrapped.
        loss: of the module, a batch size and a number of tokens: a scalar. It makes its own inputs,
            on the CPU.
        settings: of the run; by default a row of 1024 tokens, what fits kept.
        machine: by default one H200.

    Raises:
        ConfigurationError: for settings that cannot be, or a `model` that makes no module.
    """
    source = Source(name="the model", build=model, loss=loss)
    return Forecaster(source)(settings or Settings(), machine or Machine(gpu="h200"))
