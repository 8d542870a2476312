"""CUDA graphs: work of a device that is captured once, and then repeated without the host's part in
it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from bmtrain.distributed.transport import Streams
from bmtrain.runtime.log import warn
from bmtrain.runtime.world import World
from bmtrain.torch_internals import end_allocation

Repeat = Callable[[], None]
# By thread: libraries watch their own work from threads of theirs while a graph is captured.
_MODE = "thread_local"
Contexts = Iterator[contextlib.AbstractContextManager[object]]
Body = Callable[[Sequence[Contexts]], None]


class Graphs(ABC):
    """Makes graphs. What a graph reads and writes stays where it was when it was captured."""

    @abstractmethod
    def aside(self) -> contextlib.AbstractContextManager[object]:
        """The body's work goes where captured work goes, after what came before; what follows comes
        after it.
        """

    @abstractmethod
    def capture(self, body: Body, streams: Streams, num_twice: int) -> Repeat:
        """Capture what `body` issues on the current stream and on `streams`, without doing it;
        returns what does it.

        `body` gets two contexts for each of `num_twice` parts of its work: what is computed in them
        draws the same random numbers.

        Raises what `body` raises, and RuntimeError for what cannot be captured. Nothing of the
        capture is left then.
        """


class CudaGraphs(Graphs):
    """Graphs of one GPU, all of which use the same memory in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._open_pool()

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            before.wait_stream(self._stream)

    def capture(self, body: Body, streams: Streams, num_twice: int) -> Repeat:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()  # what passes have used so far, and the graph will not
        graph = torch.cuda.CUDAGraph()
        random = _RandomNumbers(self._device, num_twice)
        with torch.cuda.stream(self._stream):
            random.register(graph)
            streams.renew()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode=_MODE)
                streams.fork()
                body([iter(random.twice(number)) for number in range(num_twice)])
                streams.join()
                graph.capture_end()
            except BaseException:
                self._abandon(graph, streams)
                raise
            finally:
                streams.renew()

        def replay() -> None:
            random.advance()
            graph.replay()

        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph, streams: Streams) -> None:
        """End a capture that failed.

        One that CUDA itself has given up cannot be ended, and leaves torch waiting for its end.
        """
        _fails(streams.join)
        if _fails(graph.capture_end):
            _fails(lambda: end_allocation(self._device.index, self._pool))
            # the generator of random numbers counts for the lost capture until another one ends
            self._open_pool()

    def _open_pool(self) -> None:
        """Memory for graphs, with a graph that keeps it: torch does not let a pool be used again
        that has lost all its graphs.
        """
        self._pool, self._keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._keeper.capture_begin(pool=self._pool, capture_error_mode=_MODE)
            torch.zeros(1, device=self._device)
            self._keeper.capture_end()


class _RandomNumbers:
    """Random numbers of the parts of a graph that are computed twice: each time from a state of
    their own that starts alike.

    The device's generator takes the numbers of a replay from consecutive places of its sequence.
    The states begin far behind those, at distances that no run covers.
    """

    DISTANCE = 2**40

    def __init__(self, device: torch.device, num_twice: int) -> None:
        self._generator = torch.cuda.default_generators[device.index]
        self._own = self._generator.graphsafe_get_state()
        self._states = [
            (self._generator.clone_state(), self._generator.clone_state()) for _ in range(num_twice)
        ]

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Make the states part of a graph that is about to be captured."""
        for state in itertools.chain.from_iterable(self._states):
            graph.register_generator_state(state)

    def twice(self, number: int) -> list[contextlib.AbstractContextManager[object]]:
        """The contexts of one part."""
        return [self._drawing_from(state) for state in self._states[number]]

    def advance(self) -> None:
        """Before each replay: the next numbers of the device's sequence, in all states."""
        if not self._states:
            return
        seed, offset = self._generator.initial_seed(), self._generator.get_offset()
        for number, pair in enumerate(self._states, start=1):
            for state in pair:
                state.manual_seed(seed)
                state.set_offset(offset + number * self.DISTANCE)
        # a replay that draws from these states only draws others next time
        self._generator.set_offset(offset + 4)

    @contextlib.contextmanager
    def _drawing_from(self, state: torch.Generator) -> Iterator[None]:
        self._generator.graphsafe_set_state(state)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(self._own)


def _fails(step: Callable[[], object]) -> bool:
    try:
        step()
    except RuntimeError:
        return True
    return False


def make_graphs(world: World) -> Graphs | None:
    """What makes graphs on this rank's device. None on the CPU, whose work waits for nobody's
    launches, and for several ranks.

    Replays with communication in them have been seen to stop on two GPUs, and what stops there
    stops for good.
    """
    if world.device.type == "cpu":
        return None
    if world.world_size > 1:
        warn(
            "cuda_graph captures nothing in a run of several ranks: functions are called "
            "as they are."
        )
        return None
    return CudaGraphs(world.device)
