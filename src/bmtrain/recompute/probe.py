"""Measures memory and time of one block at each level, by running it beside the training step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bmtrain.recompute.level import Level
from bmtrain.recompute.memory import Memory, Saved, memory_of
from bmtrain.recompute.offload import Host, is_movable
from bmtrain.recompute.plan import Option
from bmtrain.recompute.recomputation import (
    CallState,
    HostState,
    ModuleCall,
    Recomputation,
    Runner,
    Selective,
)
from bmtrain.runtime import world
from bmtrain.shard.unshard import Use
from bmtrain.torch_internals import map_tensors, tensors_of, tree_leaves

_NUM_RUNS = 4  # the first is not timed: it compiles and fills caches


class Trials:
    """How to run a module that has full parameters at each level.

    Args:
        module: its parameters are leaves outside of the graph.
        runner: runs it.
        state: what its calls read.
        begun: in which each run begins; what a run changes, a cache among its arguments for
            example, is put back.
    """

    def __init__(
        self, module: torch.nn.Module, runner: Runner, state: HostState, begun: CallState
    ) -> None:
        self._module, self._runner, self._state, self.begun = module, runner, state, begun

    def run(self, level: Level, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, int]:
        """The output at a level, and kept bytes that autograd does not see."""
        inside = self._runner.plain if level is Level.NOTHING else self._runner.recomputing(level)
        if inside is not None:
            return inside(self._module, args, kwargs), 0
        call: ModuleCall = self._runner.plain
        results = None
        if level is Level.CHEAP and not self._runner.is_compiled:
            call = results = Selective(call)

        def body(given: tuple[Any, ...], named: dict[str, Any], _: bool) -> Any:
            return call(self._module, given, named)

        draws = world.current("Block").draws
        begun = self._state.begin(args, kwargs, draws)

        def keep(_: str) -> None:
            if results is not None:
                results.forget()

        use = Use([])  # keeps by the hooks that count
        recomputation = Recomputation(body, begun, use, keep)
        with recomputation.first_run(args, kwargs, use.keep):
            out = call(self._module, args, kwargs)
        return out, 0 if results is None else results.num_bytes()


def measure(
    runs: Trials,
    levels: Sequence[Level],
    params: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> dict[Level, Option]:
    """Run a block forward and backward at each level and measure memory and time.

    Random generators are restored: the program draws the same numbers as without it.

    Args:
        runs: runs the block.
        params: its full parameters, leaves. Their gradients are computed and dropped.
        args, kwargs: of the block. Tensors in them are detached and shared.

    Levels at which the block cannot run are missing from the result.
    """
    current = world.current("Block")
    memory, options = current.service(memory_of), dict[Level, Option]()
    devices = [] if current.device.type == "cpu" else [current.device]
    for level in [level for level in levels if level is not Level.OFFLOADED]:
        with torch.random.fork_rng(devices):
            run = functools.partial(runs.run, level)
            once = functools.partial(_once, run, params, args, kwargs, memory)
            options[level] = _measure(once, runs.begun)
    moved = [x for x in args if isinstance(x, torch.Tensor) and is_movable(x)]
    if Level.OFFLOADED in levels and Level.BLOCK in options and moved:
        options[Level.OFFLOADED] = _offloaded(options[Level.BLOCK], moved, current.service(Host))
    return options


def _measure(once: Callable[[], Option], begun: CallState) -> Option:
    found = []
    for _ in range(_NUM_RUNS):
        with begun.restored():
            found.append(once())
    timed = found[1:]
    return dataclasses.replace(timed[-1], seconds=min(option.seconds for option in timed))


def _once(
    run: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, int]],
    params: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    memory: Memory,
) -> Option:
    args, kwargs = map_tensors(lambda x: x.detach().requires_grad_(x.requires_grad), (args, kwargs))
    leaves = [x for x in [*tensors_of((args, kwargs)), *params] if x.requires_grad]
    counter = Saved(params)
    memory.synchronize()
    before, start = memory.allocated(), time.perf_counter()
    # Saved-tensor hooks make the compiler recompile. They are only needed on a device that does not
    # count memory.
    with contextlib.nullcontext() if memory.counts else counter:
        out, hidden = run(args, kwargs)
    num_bytes = memory.allocated() - before if memory.counts else counter.num_bytes + hidden
    memory.take_peak()
    ends = [x for x in tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
    del out
    if ends and leaves:
        torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        for leaf in leaves:
            leaf.grad = None
    memory.synchronize()
    return Option(num_bytes, max(memory.take_peak() - before, 0), time.perf_counter() - start)


def _offloaded(block: Option, moved: Sequence[torch.Tensor], host: Host) -> Option:
    """BLOCK with its inputs on the host: the copy there overlaps forward, the one back backward."""
    num_bytes = sum(x.nbytes for x in moved)
    forward, trip = block.seconds / 4, sum(host.seconds(x) for x in moved)
    stall = max(trip - forward, 0.0) + max(trip - 3 * forward, 0.0)
    # In backward the prefetched inputs of the previous block are resident as well. Copies cost all
    # kernels a little memory bandwidth.
    return Option(
        max(block.kept - num_bytes, 0), block.peak + num_bytes, block.seconds + stall + 0.02 * trip
    )
