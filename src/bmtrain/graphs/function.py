"""bmtrain.cuda_graph: forward and backward of a small model as one CUDA graph."""

from __future__ import annotations

import dataclasses
import enum
import functools
import gc
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, overload

import torch

from bmtrain.block.context import Context
from bmtrain.distributed.agreement import largest
from bmtrain.errors import ConfigurationError
from bmtrain.graphs.capture import Graphs, Repeat, make_graphs
from bmtrain.graphs.tape import Capture, Rehearsal, taped
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.shard.backward import Backward, Draws
from bmtrain.shard.engine import Engine
from bmtrain.shard.residence import Residence
from bmtrain.torch_internals import (
    TreeSpec,
    in_backward,
    num_collectives,
    tree_flatten,
    tree_unflatten,
)

Function = TypeVar("Function", bound=Callable[..., Any])
# The first compiles and learns the order of gathers; the second runs as all later ones.
NUM_REHEARSALS = 2


@overload
def cuda_graph(function: Function, *, max_graphs: int = 8) -> Function: ...


@overload
def cuda_graph(function: None = None, *, max_graphs: int = 8) -> Callable[[Function], Function]: ...


def cuda_graph(function: Callable[..., Any] | None = None, *, max_graphs: int = 8) -> Any:
    """Capture the device work of `function` as a CUDA graph and replay it without Python.

    For models that are launch-bound.

        @bmtrain.cuda_graph
        def forward_and_backward(ids, targets):
            loss = model(ids, targets)
            optim_manager.backward(loss)
            return loss

        loss = forward_and_backward(ids, targets)
        optim_manager.clip_grad_norm(optimizer.param_groups, 1.0); optim_manager.step();
        optim_manager.zero_grad()

    Values, gradients, accumulation into `.grad` and random numbers are the same as without it. Keep
    clipping, `step` and everything else that counts or decides on the host outside: Python code of
    `function` runs in the first calls only. Gradients are added to `.grad` after each replay, by
    the engine: `function` can clear them (`OptimManager.zero_grad`), not read or set them.

    With several ranks the graph does not communicate. All parameters that `function` reads are
    gathered before each replay, and their buffers stay; gradients of all of them wait for the end
    of the replay, when they are reduced. In bf16 that takes 4 bytes a parameter.

    Args:
        function: takes tensors on this rank's device in any containers, and constants; returns
            tensors in containers. Arguments are copied in, results are copies without a graph.
            Anything else that it reads on the device must keep its address, as parameters and
            buffers do. Ordinary parameters must belong to an optimizer of an OptimManager.
        max_graphs: how many kinds of calls are captured. The kind of a call consists of the shapes,
            dtypes and constants of the arguments, training and gradient mode, autocast, and which
            parameters are trained.

    The first two calls of a kind run eagerly. All graphs share one memory pool. If something cannot
    be captured (a value read by the host, tensors on the CPU, ranks that communicate in `function`,
    pipeline or tensor parallelism, too many kinds), one warning names it and `function` runs
    eagerly from then on, on all ranks. On the CPU it always runs eagerly.

    Raises:
        ConfigurationError: for a `max_graphs` below 1, or a `function` that cannot be called.
    """
    if type(max_graphs) is not int or max_graphs < 1:
        raise ConfigurationError(
            f"max_graphs is {max_graphs!r}: expected a whole number, at least 1."
        )
    if function is None:  # @cuda_graph(max_graphs=2)
        return functools.partial(cuda_graph, max_graphs=max_graphs)
    if not callable(function):
        raise ConfigurationError(
            f"cuda_graph got {type(function).__name__}: expected a function of tensors."
        )
    graphed = GraphedFunction(function, max_graphs)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return graphed(*args, **kwargs)

    return call


class Readiness(enum.IntEnum):
    """How far a rank is. All ranks act on the lowest level of any."""

    NEVER = 0
    EAGER = 1
    READY = 2  # to be captured
    CAPTURED = 3


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of a call: tensors, everything else, and how they are nested."""

    tensors: list[torch.Tensor]
    constants: tuple[Any, ...]  # with a `_Tensor` in place of each tensor
    spec: TreeSpec

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
        """Split up the arguments of a call."""
        leaves, spec = tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return cls(
            tensors,
            tuple(_Tensor.of(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves),
            spec,
        )

    def with_tensors(
        self, tensors: Iterable[torch.Tensor]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of the call with other tensors."""
        rest = iter(tensors)
        leaves = [next(rest) if isinstance(leaf, _Tensor) else leaf for leaf in self.constants]
        args, kwargs = tree_unflatten(leaves, self.spec)
        return args, kwargs

    def kind(self) -> Hashable:
        """Key of the arguments: equal for calls that one graph can serve."""
        return (str(self.spec), tuple((type(leaf), leaf) for leaf in self.constants))

    def obstacle(self, device: torch.device) -> str | None:
        """Why no graph can take these arguments, or None."""
        for tensor in self.tensors:
            what = f"an argument of shape {tuple(tensor.shape)}"
            if tensor.device != device:
                return f"{what} is on {tensor.device}, not on {device}"
            if tensor.requires_grad:
                return f"{what} requires grad, which would not get there"
            if type(tensor) is not torch.Tensor:
                return f"{what} is a {type(tensor).__name__}"
        try:
            hash(self.kind())
        except TypeError as error:
            return f"a non-tensor argument cannot be compared ({error})"
        return None


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """The layout of a tensor, as far as a graph depends on it."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Tensor:
        return cls(tensor.shape, tensor.stride(), tensor.dtype)


@dataclasses.dataclass(frozen=True)
class _Graph:
    """A captured pass: its replay, the host's part, and its results."""

    replay: Repeat
    tape: Capture
    results: Sequence[Any]
    spec: TreeSpec

    def run(self, backward: Backward) -> Any:
        """Replay the pass; returns copies of its results, which the next replay overwrites.

        The parameters that it reads must have been gathered.
        """
        for work in self.tape.before:
            work()
        self.replay()
        try:
            for work in self.tape.after:
                work()
        except BaseException:
            backward.abandon()  # as after a backward pass that raised
            raise
        return tree_unflatten([_copy(leaf) for leaf in self.results], self.spec)


class _CallKind:
    """Calls of one kind: static input tensors, and the graph once it is captured."""

    def __init__(self, function: Callable[..., Any], arguments: Arguments, engine: Engine) -> None:
        self._function, self._engine = function, engine
        # Drop the caller's tensors: holding them would keep their memory for good.
        self._arguments = dataclasses.replace(arguments, tensors=[])
        with torch.inference_mode(False):
            self._places = [torch.empty_like(tensor) for tensor in arguments.tensors]
        self._num_rehearsals = 0
        self._rehearsal = Rehearsal()
        self._gathered: list[Residence] = []  # held for as long as the graph reads them
        self._graph: _Graph | None = None

    @property
    def level(self) -> Readiness:
        if self._graph is not None:
            return Readiness.CAPTURED
        return Readiness.READY if self._num_rehearsals >= NUM_REHEARSALS else Readiness.EAGER

    def take(self, arguments: Arguments) -> None:
        """Copy the tensors of a call into the static inputs."""
        with torch.no_grad():
            for place, tensor in zip(self._places, arguments.tensors, strict=True):
                place.copy_(tensor)

    def rehearse(self, graphs: Graphs) -> tuple[Any, str | None]:
        """Run a call eagerly; returns its result, and why it cannot be captured, or None."""
        self._rehearsal = Rehearsal()
        with graphs.aside(), taped(self._engine.host, self._rehearsal):
            leaves, spec = tree_flatten(self._run())
        self._num_rehearsals += 1
        self._gathered = [self._engine.fixed(residence) for residence in self._rehearsal.used]
        return tree_unflatten([_copy(leaf) for leaf in leaves], spec), _strangers(
            leaves, self._engine
        )

    def gather(self) -> None:
        """Bring the full parameters to where the graph reads them. Collective."""
        self._engine.bring(self._gathered)

    def capture(self, graphs: Graphs) -> str | None:
        """Capture the graph, after `gather`; returns why that failed, or None."""
        engine = self._engine
        out: list[Any] = []
        tapes: list[Capture] = []

        def body(draws: Sequence[Draws]) -> None:
            tape = Capture(self._rehearsal, self._gathered, draws)
            before = num_collectives()
            with (
                engine.transport.ledger.sealed(tape.refuse_communication),
                taped(engine.host, tape),
                engine.replicated.put_off(),
            ):
                out.extend(tree_flatten(self._run()))
            # Those that the program has called past this library are in the graph by now.
            if num_collectives() != before:
                tape.refuse_communication("a collective of torch.distributed")
            tapes.append(tape)

        try:
            replay = graphs.capture(body, engine.transport.streams, self._rehearsal.num_twice)
        # The function may still run eagerly, and then raises again if the error is its own.
        except Exception as error:
            return (
                f"{type(error).__name__}: "
                f"{(str(error).strip() or 'no reason given').splitlines()[0]}"
            )
        results = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in out[0]]
        self._graph = _Graph(replay, tapes[0], results, out[1])
        return None

    def replay(self) -> Any:
        """Replay the graph on the static inputs."""
        if self._graph is None:
            raise RuntimeError("a graph was replayed before it was captured")
        return self._graph.run(self._engine.backward)

    def _run(self) -> Any:
        args, kwargs = self._arguments.with_tensors(self._places)
        return self._function(*args, **kwargs)


class GraphedFunction:
    """The callable that `cuda_graph` returns a wrapper of."""

    def __init__(self, function: Callable[..., Any], max_graphs: int) -> None:
        self._function, self._max_graphs = function, max_graphs
        self._kinds: dict[Hashable, _CallKind] = {}
        # Storages ever made, storages alive, blocks alive. A change may mean that the function runs
        # other modules, so graphs are discarded.
        self._inventory = (0, 0, 0)
        self._obstacle: str | None = None
        self._gave_up = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        current = world.current("cuda_graph")
        graphs, engine = current.service(make_graphs), current.service(Engine)
        if graphs is None or self._gave_up or engine.host.tape is not None or in_backward():
            return self._plainly(args, kwargs)
        arguments = Arguments.of(args, kwargs)
        obstacle = self._obstacle or _split(current) or arguments.obstacle(engine.device)
        engine.rest()
        kind = None if obstacle else self._kind(arguments, current)
        obstacle = obstacle or self._too_many()
        level = _agree(
            Readiness.NEVER if obstacle or kind is None else kind.level, current.mesh.world
        )
        if level is Readiness.NEVER or kind is None:
            self._give_up(obstacle or "another rank cannot")
            return self._plainly(args, kwargs)
        kind.take(arguments)
        if level is Readiness.EAGER:
            out, self._obstacle = kind.rehearse(graphs)
            return out
        kind.gather()
        if level is Readiness.READY and not self._capture(kind, graphs, current.mesh.world):
            return self._plainly(args, kwargs)
        with current.draws.own():
            return kind.replay()

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function eagerly; results are detached, as those of a replay are."""
        leaves, spec = tree_flatten(self._function(*args, **kwargs))
        return tree_unflatten(
            [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves], spec
        )

    def _kind(self, arguments: Arguments, current: World) -> _CallKind:
        """The kind of a call with these arguments, in the present state of the program."""
        engine, modules = current.service(Engine), current.service(Context).modules
        # Modules were made or dropped: the function may run other ones, on other memory.
        if (engine.num_registered, engine.num_alive, len(modules)) != self._inventory:
            gc.collect()  # else objects that die later change the count, and discard graphs again
            self._kinds, self._inventory = (
                {},
                (engine.num_registered, engine.num_alive, len(modules)),
            )
        device = engine.device.type
        state = (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device),
            torch.get_autocast_dtype(device),
            # A WeakSet keeps its order while the modules are alive.
            tuple(module.training for module in modules),
            tuple(engine.trainable()),
        )
        key = (arguments.kind(), state)
        if key not in self._kinds:
            self._kinds[key] = _CallKind(self._function, arguments, engine)
        return self._kinds[key]

    def _too_many(self) -> str | None:
        return (
            f"it was called in more than {self._max_graphs} different ways"
            if len(self._kinds) > self._max_graphs
            else None
        )

    def _capture(self, kind: _CallKind, graphs: Graphs, axis: Axis) -> bool:
        """Capture on the ranks that have not yet, or give up on all."""
        engine = world.current("cuda_graph").service(Engine)
        problem = None if kind.level is Readiness.CAPTURED else kind.capture(graphs)
        level = _agree(Readiness.NEVER if problem else Readiness.CAPTURED, axis)
        if level is Readiness.CAPTURED:
            return True
        engine.rest()
        self._give_up(problem or "another rank cannot")
        return False

    def _give_up(self, reason: str) -> None:
        self._gave_up, self._kinds = True, {}
        name = getattr(self._function, "__name__", type(self._function).__name__)
        warn(f"{name} runs without a CUDA graph from now on: {reason}.")


def _agree(level: Readiness, axis: Axis) -> Readiness:
    """The lowest level of any rank."""
    (negative,) = largest([-level], axis, "a graph")
    return Readiness(-int(negative))


def _split(current: World) -> str | None:
    """Why no function of this run can be captured, or None."""
    if current.pipe_enabled:
        return "it is pipelined"
    return "it is tensor-parallel" if current.mesh.tp.size > 1 else None


def _copy(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _strangers(results: Sequence[Any], engine: Engine) -> str | None:
    """Name a parameter whose gradient cannot be shown in `.grad` after a replay, or None."""
    known = {id(param) for param in engine.replicated} | {id(engine.leaf)}
    for leaf in _leaves_behind(results):
        if id(leaf) not in known:
            return (
                f"a parameter of shape {tuple(leaf.shape)} is neither sharded nor in an "
                "optimizer of an OptimManager"
            )
    return None


def _leaves_behind(results: Sequence[Any]) -> Iterator[torch.Tensor]:
    """Leaves into which a backward pass from the results would accumulate."""
    waiting = [
        leaf.grad_fn
        for leaf in results
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        variable = getattr(node, "variable", None)
        if isinstance(variable, torch.Tensor):
            yield variable
        following = {
            next_node for next_node, _ in node.next_functions if next_node is not None
        } - seen
        seen |= following
        waiting.extend(following)
