"""CUDA graphs: device work that is captured once and replayed without the host."""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import torch

from bmtrain.distributed.transport import Streams
from bmtrain.runtime.world import World
from bmtrain.torch_internals import end_allocation

Repeat = Callable[[], None]
#: Per thread: watchdog threads of libraries query events during a capture, which would invalidate
#: it in the global mode.
MODE = "thread_local"
Contexts = Iterator[contextlib.AbstractContextManager[object]]
Body = Callable[[Sequence[Contexts]], None]


class Graphs(ABC):
    """Captures graphs. A replay uses the memory addresses of the capture: they must stay valid."""

    @abstractmethod
    def aside(self) -> contextlib.AbstractContextManager[object]:
        """Run the body on the capture stream, ordered with the work before and after it."""

    @abstractmethod
    def capture(self, body: Body, streams: Streams, num_twice: int) -> Repeat:
        """Capture what `body` issues on the current stream, without running it.

        `body` issues nothing on `streams`; what it waits for there has been waited for. It gets two
        contexts for each of `num_twice` parts of its work: what is computed in them draws the same
        random numbers.

        Returns the replay. Raises what `body` raises, and RuntimeError for what cannot be captured;
        the capture is undone then.
        """


class CudaGraphs(Graphs):
    """Graphs of one GPU. They share one memory pool, so a replay overwrites results of others."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._open_pool()

    def aside(self) -> contextlib.AbstractContextManager[None]:
        return aside(self._stream)

    def capture(self, body: Body, streams: Streams, num_twice: int) -> Repeat:
        torch.cuda.synchronize(self._device)
        gc.collect()
        torch.cuda.empty_cache()  # memory of eager passes, of no use to the graph's own pool
        graph = torch.cuda.CUDAGraph()
        random = _RandomNumbers(self._device, num_twice)
        with torch.cuda.stream(self._stream):
            random.register(graph)
            streams.renew()
            try:
                graph.capture_begin(pool=self._pool, capture_error_mode=MODE)
                body([iter(random.twice(number)) for number in range(num_twice)])
                graph.capture_end()
            except BaseException:
                self._abandon(graph)
                raise
            finally:
                streams.renew()

        def replay() -> None:
            random.advance()
            graph.replay()

        return replay

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed.

        If CUDA has invalidated the capture, `capture_end` fails and leaves torch's allocator in
        capture mode for the pool: end that by hand.
        """
        with warnings.catch_warnings():
            # torch warns of a graph without work, which a pass that stops early leaves behind: the
            # caller says why it stopped.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            has_failed = fails(graph.capture_end)
        if has_failed:
            fails(lambda: end_allocation(self._device.index, self._pool))
            # The device's generator stays registered to the lost capture until another one ends, as
            # this one does.
            self._open_pool()

    def _open_pool(self) -> None:
        """Open a memory pool, with a graph that keeps it: torch refuses a pool without graphs."""
        self._pool, self._keeper = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            self._keeper.capture_begin(pool=self._pool, capture_error_mode=MODE)
            torch.zeros(1, device=self._device)
            self._keeper.capture_end()


class _RandomNumbers:
    """Generator states for the parts of a graph that are computed twice, in forward and backward.

    Both times start from equal states, so that both draw the same numbers. A replay advances the
    device's generator along its sequence. The states start 2**40 apart from it and from each other,
    further than any run draws.
    """

    DISTANCE = 2**40

    def __init__(self, device: torch.device, num_twice: int) -> None:
        self._generator = torch.cuda.default_generators[device.index]
        self._own = self._generator.graphsafe_get_state()
        self._states = [
            (self._generator.clone_state(), self._generator.clone_state()) for _ in range(num_twice)
        ]

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        """Register the states with a graph, before its capture."""
        for state in itertools.chain.from_iterable(self._states):
            graph.register_generator_state(state)

    def twice(self, number: int) -> list[contextlib.AbstractContextManager[object]]:
        """The contexts of part `number`: one for each time it is computed."""
        return [self._drawing_from(state) for state in self._states[number]]

    def advance(self) -> None:
        """Move all states to fresh random numbers. Call before each replay."""
        if not self._states:
            return
        seed, offset = self._generator.initial_seed(), self._generator.get_offset()
        for number, pair in enumerate(self._states, start=1):
            for state in pair:
                state.manual_seed(seed)
                state.set_offset(offset + number * self.DISTANCE)
        # A replay that draws from these states only leaves the device's generator alone: without
        # this step, the next replay would repeat its numbers.
        self._generator.set_offset(offset + 4)

    @contextlib.contextmanager
    def _drawing_from(self, state: torch.Generator) -> Iterator[None]:
        self._generator.graphsafe_set_state(state)
        try:
            yield
        finally:
            self._generator.graphsafe_set_state(self._own)


@contextlib.contextmanager
def aside(stream: torch.cuda.Stream) -> Iterator[None]:
    """Run the body on `stream`, ordered with the work of the current one before and after it."""
    before = torch.cuda.current_stream(stream.device)
    # Without the wait the body could read arguments before earlier work has written them.
    stream.wait_stream(before)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        # Later work reads what the body wrote and may reuse its memory: without the wait it would
        # race with the capture stream.
        before.wait_stream(stream)


def fails(step: Callable[[], object]) -> bool:
    """Whether a step towards the end of a broken capture raises, as it then may."""
    try:
        step()
    except RuntimeError:
        return True
    return False


def make_graphs(world: World) -> Graphs | None:
    """Captures graphs on this rank's device. None on the CPU, which has no launch latency."""
    return None if world.device.type == "cpu" else CudaGraphs(world.device)
