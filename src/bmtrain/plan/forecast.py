"""`bmtrain.plan.forecast`: memory of a run before it is started."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.block.whole_model import MARGIN, MOST
from bmtrain.errors import ConfigurationError
from bmtrain.plan.outline import WHOLE, Outline, numel_of, outline, without_values
from bmtrain.plan.settings import DTYPES, GIB, Machine, Settings
from bmtrain.plan.step import Memory, Moment
from bmtrain.recompute.level import AUTO, Level
from bmtrain.shard.module import DistributedModule
from bmtrain.torch_internals import without_memory


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model to forecast.

    Attributes:
        name: for the report.
        build: makes the module; called with the meta device as the default one.
        loss: of the module, a batch size and a number of tokens: a scalar; makes its own inputs.
        blocks: paths of modules that are Blocks beside the members of ModuleLists, with
            use_checkpoint=False.
        adapt: changes the module once it has its dtype.
    """

    name: str
    build: Callable[[], torch.nn.Module]
    loss: Callable[[torch.nn.Module, int, int], torch.Tensor]
    blocks: Sequence[str] = ()
    adapt: Callable[[torch.nn.Module], object] = id


@dataclasses.dataclass(frozen=True, kw_only=True)
class Forecast:
    """The memory that a run will take.

    Attributes:
        settings: of the run.
        machine: its hosts and GPUs.
        peak: the moment of a step that takes most, bytes by part on one GPU.
        recompute: how many calls of blocks are at each level.
        parameters: number of elements of all parameters.
        trained: of those that are trained.
        host: bytes of host memory on one host.
        notes: what is uncertain.
    """

    settings: Settings
    machine: Machine
    peak: Moment
    recompute: dict[str, int]
    parameters: int
    trained: int
    host: int
    notes: tuple[str, ...]

    @classmethod
    def of(cls, memory: Memory) -> Forecast:
        """The forecast of a traced model with some settings on a machine."""
        settings, machine, whole = memory.settings, memory.machine, memory.outline.whole
        if (
            whole is not None
            and whole.calls
            and not whole.notes  # it is compiled
            and settings.recompute in (AUTO, "nothing")
            and settings.tp_size == settings.pipe_size == 1
        ):
            own = Memory(whole, settings, machine)
            if own.peak([Level.NOTHING]).total < machine.room * (1 - MARGIN):
                memory = own
        traced = memory.outline
        levels = memory.levels(settings.recompute, machine.room)
        groups = [*itertools.chain(*traced.blocks), *traced.others]
        return cls(
            settings=settings,
            machine=machine,
            peak=memory.peak(levels),
            recompute=dict(Counter(level.name.lower() for level in levels)),
            parameters=numel_of(groups),
            trained=numel_of(group for group in groups if group[2]),
            host=memory.on_host(levels),
            notes=(
                ("the model is small and runs as one compiled graph, not block by block",)
                if traced is whole
                else traced.notes
            ),
        )

    @property
    def fits(self) -> bool:
        """Whether both GPU and host have the memory."""
        limit = self.machine.host_memory
        return self.peak.total <= self.machine.room and (limit is None or self.host <= limit * GIB)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, bytes as integers."""
        found = dataclasses.asdict(self)
        peak, host = found.pop("peak"), found.pop("host")
        return {
            **found,
            "fits": self.fits,
            "peak_bytes": self.peak.total,
            "peak_at": peak["name"],
            "parts": peak["parts"],
            "room_bytes": self.machine.room,
            "host_bytes": host,
        }


def trace(source: Source, settings: Settings, machine: Machine) -> Outline:
    """Build the model and run it without memory, forward and backward.

    Only `batch`, `seq`, `dtype` and `compiled` of the settings matter, and the memory of a GPU: a
    model that is small beside it is also run as one graph.
    """
    with torch.device("meta"):
        model = source.build()
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(
            f"{source.name} returned {type(model).__name__}: expected a torch.nn.Module, or, of "
            "module:function, a bmtrain.plan.Source."
        )
    with without_memory():
        model = without_values(model, DTYPES[settings.dtype])
        model.train()
        source.adapt(model)
        run = functools.partial(
            outline,
            model,
            lambda module: source.loss(module, settings.batch, settings.seq),
            compiled=settings.compiled,
        )
        num_bytes = sum(2 * param.nbytes for param in model.parameters())
        is_small = num_bytes <= MOST * machine.memory and not isinstance(model, DistributedModule)
        whole = run(more=WHOLE) if is_small and settings.compiled else None
        found = run(more=source.blocks)
    notes = list(found.notes)
    if not found.calls:
        notes.append("no member of a ModuleList is called: nothing is gathered block by block")
    if settings.pipe_size > 1:
        notes.append("stages are assumed equal: embedding and head add to the first and the last")
    return dataclasses.replace(found, notes=tuple(notes), whole=whole)


def forecast(
    model: Callable[[], torch.nn.Module],
    loss: Callable[[torch.nn.Module, int, int], torch.Tensor],
    settings: Settings | None = None,
    machine: Machine | None = None,
) -> Forecast:
    """Memory of training a model, before anything is allocated.

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
    settings, machine = settings or Settings(), machine or Machine(gpu="h200")
    return Forecast.of(Memory(trace(source, settings, machine), settings, machine))
