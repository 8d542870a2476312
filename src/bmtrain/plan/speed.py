"""Time of one step: products, attention, element-wise passes, communication, the update.

A rough figure, unlike that of memory: it knows neither launch overheads of small models nor data
loading. Efficiencies are the same for all models; benchmarks/forecast.py sets them beside
measurements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from bmtrain.optim.form import StateForm
from bmtrain.plan.machine import NETWORK, Machine
from bmtrain.plan.outline import Outline
from bmtrain.plan.settings import DTYPES, Settings
from bmtrain.plan.step import Memory
from bmtrain.recompute.level import Level

# Shares of a GPU's peaks that large kernels reach: products of matrices (bound by power),
# attention, memory; and the factor on products in FP8, whose operands are quantised first.
PRODUCTS, ATTENTION, BANDWIDTH, FP8 = 0.68, 0.35, 0.7, 1.6
LINK = 0.75  # share of a link's peak that copies reach
# Bytes that Adam reads and writes for an element with states in fp32; the bytes a second that come
# up from host memory, while as many go down.
UPDATE, BUS = 28, 48e9
# Of the time of both passes: the forward pass, beside which states in host memory are updated.
FORWARD = 0.3
# Passes over an activation that is kept: written, read, read or written by its gradient.
PASSES = 3


@dataclasses.dataclass(frozen=True)
class Seconds:
    """Of one step. Communication overlaps compute; what is longer counts. Of an update that goes on
    beside the forward pass only the rest counts.
    """

    compute: float
    communication: float
    update: float

    @property
    def total(self) -> float:
        """Of the step."""
        return max(self.compute, self.communication) + self.update


def seconds(
    outline: Outline, memory: Memory, settings: Settings, machine: Machine, levels: Sequence[Level]
) -> Seconds | None:
    """Time of one step with each call of a block at its level; None for an unknown GPU."""
    gpu = machine.kind
    if not gpu.flops:
        return None
    plain, in_blocks, attention, kept = outline.flops * 3, 0.0, outline.attention * 3.5, 0.0
    for call, level in zip(outline.calls, levels, strict=True):
        passes = 3.0 + level.is_whole()
        if outline.whole[call.number]:
            plain += call.costs.flops * passes
        else:
            in_blocks += call.costs.flops * passes
        attention += call.costs.attention * (passes + 0.5)
        kept += call.costs.levels[Level.NOTHING].kept * (1.0 + 0.4 * (level is not Level.NOTHING))
    compute = (
        (plain + in_blocks / (FP8 if settings.fp8 else 1.0)) / (gpu.flops * PRODUCTS)
        + attention / (gpu.flops * ATTENTION)
        + PASSES * kept / (gpu.bandwidth * BANDWIDTH)
    )
    update = _update(memory, settings, machine)
    update -= min(update * memory.hidden, FORWARD * compute)
    return Seconds(compute, _communication(memory, settings, machine), update)


def _communication(memory: Memory, settings: Settings, machine: Machine) -> float:
    ranks = machine.world_size
    if ranks == 1:
        return 0.0
    gathers = 2 if settings.zero_level == 3 else 1
    moved = (memory.weights * gathers + memory.gradients) * (ranks - 1)
    speed = machine.kind.link if machine.hosts == 1 else min(machine.kind.link, NETWORK)
    return moved / settings.tp_size / (speed * LINK)


def _update(memory: Memory, settings: Settings, machine: Machine) -> float:
    trained = sum(shard.used for shard in memory.everything if shard.trained)
    exact, own = (
        form.num_bytes(trained, DTYPES[settings.dtype]) for form in (StateForm(), settings.form)
    )
    moved = trained * UPDATE - 2 * (exact - own)  # states are read and written
    return memory.host / BUS + moved / (machine.kind.bandwidth * BANDWIDTH)
