"""Small models: the whole forward pass as one compiled graph, on a GPU recorded as CUDA graphs.

The blocks of a small model are bound by the host, and what stands around them (embeddings, head,
loss) would run uncompiled. Such a model needs no gather per block: its full parameters are leaves
at fixed addresses, brought up to date once per call, and the compiler sees a plain model. The node
of the compiled code hands all their gradients to the engine, which reduces them together.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import itertools
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from bmtrain.block.batch_norm import OfAllRanks
from bmtrain.block.block import Binding, Block, ParameterTable
from bmtrain.block.context import Context
from bmtrain.compile import backend
from bmtrain.compile.graph import copies, refuse_shared
from bmtrain.compile.programs import (
    CompiledOnly,
    Gate,
    Methods,
    NoProgramError,
    Program,
    changing,
    is_watched,
)
from bmtrain.distributed.agreement import largest
from bmtrain.errors import StaleParameterError
from bmtrain.recompute.memory import memory_of
from bmtrain.recompute.recomputation import ModuleCall, Trial, parts_with_blocks
from bmtrain.runtime import world
from bmtrain.runtime.log import warn
from bmtrain.runtime.world import World
from bmtrain.shard.engine import Residence
from bmtrain.shard.gradient import refuse_create_graph
from bmtrain.shard.parameter import DistributedParameter
from bmtrain.shard.parting import note_call
from bmtrain.shard.sharded import ordinary
from bmtrain.shard.storage import Storage
from bmtrain.shard.unshard import Use, tied_to
from bmtrain.torch_internals import (
    COMPILED_NODE,
    NO_PASS,
    BatchNorm,
    StorageWeakRef,
    active_saved_tensors_hooks,
    hooks_of,
    in_backward,
    in_transform,
    map_tensors,
    next_node_number,
    node_number,
    tensors_of,
    told_once,
    untraced,
    will_run,
)

# Full parameters and full gradients take four bytes a parameter in bf16. A model is small if they
# take at most this part of the device's memory.
MOST = 1 / 40
_MOST_ON_CPU = 2**31  # bytes
MARGIN = 0.15  # of the device's memory, left free after the forward pass of a trial
_STATES = 16  # bytes per parameter of a shard: gradients and the optimizer's states, still to come
# Attempts to compile. What a first call does once, as warnings, is often what does not compile.
_MOST_FAILURES = 2
_ELSEWHERE = "another rank could not compile it"
_KEY = "_whole_model"  # in the `__dict__` of a wrapped model
_NUM_SPECIAL = 2  # shapes that are recorded: those of a step, and of an epoch's last one
_ON_GPU = {"options": {"triton.cudagraphs": True}}

Forward = Callable[..., Any]


class Stage(enum.Enum):
    """How far a model has come.

    A trial makes UNTRIED to WHOLE, or to APART if the model does not compile or fit. Compiled code
    that fails later makes WHOLE to APART, which is final.
    """

    UNTRIED = enum.auto()
    WHOLE = enum.auto()
    APART = enum.auto()


class Results(torch.autograd.Function):
    """What a call has computed; the first node of the call that backward reaches.

    `owner` is an input too: backward comes to this call on every rank, whatever its rows have
    computed, and `backward(inputs=[parameter])` has a path to the parameters.
    """

    @staticmethod
    def forward(
        ctx: Any, gradients: LeafGradients, owner: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.gradients = gradients
        ctx.set_materialize_grads(False)
        return tuple([x.data for x in tensors])  # the program may write into them

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        refuse_create_graph()
        (owner, _), *results = ctx.next_functions
        ctx.gradients.begin(results, grads, owner)
        return (None, None, *grads)


class Owner(torch.autograd.Function):
    """A tensor that depends on a leaf of the engine and on parameters, which get no gradient.

    Made once and part of many graphs: autograd comes to older nodes later, so the host passes these
    edges after it has started the backward pass of the compiled code.
    """

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        return leaf.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


class LeafGradients:
    """Hands the gradients of one call's leaves to its use, in each pass that reaches the call.

    Args:
        use: of the call.
        leaves: one per slot of all its storages.
        node: of the compiled code, whose inputs they are; None if the results depend on no leaf.
    """

    def __init__(self, use: Use, leaves: Sequence[torch.Tensor], node: Any) -> None:
        self._use, self._leaves, self._node = use, leaves, node
        self._takes_all = True  # whether the running pass is one for all parameters
        if node is not None:
            # Weak, for `node` is held here: a graph that no backward pass frees would live until
            # Python's collector comes. The node of the results keeps this object.
            node.register_hook(functools.partial(_if_alive, weakref.WeakMethod(self._arrive)))

    def begin(
        self, results: Sequence[tuple[Any, int]], grads: Sequence[torch.Tensor | None], owner: Any
    ) -> None:
        """Backward has reached the call.

        Args:
            results: node and number of each result of the call.
            grads: of the results.
            owner: the node of the parameters' owner.
        """
        (leaf, _), *params = owner.next_functions
        self._takes_all = will_run(leaf)
        if self._takes_all:
            if self._node is None:
                self._use.end([None for _ in self._leaves])
            return
        # backward(inputs=...): the leaf is not among them
        wanted = [node is not None and will_run(node) for node, _ in params]
        if any(wanted):  # no leaf is among the pass's inputs: autograd leaves them out
            asked = [leaf for leaf, is_asked in zip(self._leaves, wanted, strict=True) if is_asked]
            known = [
                (GradientEdge(*edge), grad)
                for edge, grad in zip(results, grads, strict=True)
                if edge[0] is not None and grad is not None
            ]
            edges, given = [edge for edge, _ in known], [grad for _, grad in known]
            rest = iter(
                torch.autograd.grad(edges, asked, given, retain_graph=True, allow_unused=True)
            )
            self._use.end([next(rest) if is_asked else None for is_asked in wanted])

    def _arrive(self, grads: Sequence[Any], _: object) -> Sequence[Any]:
        """The compiled code has computed the gradients of all its inputs."""
        rest = list(grads)
        if self._takes_all:
            places = {id(leaf): place for place, leaf in enumerate(self._leaves)}
            own: list[torch.Tensor | None] = [None for _ in self._leaves]
            for index, (node, _) in enumerate(self._node.next_functions):
                place = places.get(id(getattr(node, "variable", None)))
                if place is not None:
                    own[place], rest[index] = grads[index], None
            self._use.end(own)
        # Gradients of the call's arguments are the program's: without a copy, the next replay of a
        # CUDA graph overwrites them.
        return tuple([x.clone() if x is not None and x.is_cuda else x for x in rest])


def _if_alive(method: weakref.WeakMethod[Callable[..., Any]], *given: Any) -> Any:
    found = method()
    return None if found is None else found(*given)


def compiled_node(tensors: Sequence[torch.Tensor], since: int) -> Any:
    """The node of compiled code above the results of a call, whose nodes have numbers from `since`
    on; None if they do not depend on it.
    """
    waiting = [x.grad_fn for x in tensors if x.grad_fn is not None]
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        if node.name() == COMPILED_NODE:
            return node
        new = {x for x, _ in node.next_functions if x is not None and node_number(x) >= since}
        waiting += new - seen
        seen |= new
    return None


def copying(lower: backend.Lower) -> backend.Lower:
    """A compiler backend whose code gives copies of what it computes.

    A CUDA graph overwrites its results in the next replay, while the program may keep them,
    returned or as attributes of modules. What lies in the memory of an argument is no result: a
    buffer, or a view of one.
    """

    def lower_copies(
        graph: torch.fx.GraphModule, inputs: Sequence[torch.Tensor], **options: Any
    ) -> backend.Lowered:
        refuse_shared(graph)
        # Numbers that vary are tensors of the host. Recorded code that reads them crashes in
        # backward (torch 2.11).
        if any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in inputs):
            options.pop("options", None)
        lowered = lower(graph, inputs, **options)
        return lambda *arguments: copies(lowered(*arguments), arguments)

    return lower_copies


def as_whole(kind: Any, num_graphs: int | None = None) -> Forward:
    """A method `forward` for wrapped models of a class: runs small ones whole where that can be.

    Args:
        num_graphs: shapes that are recorded, where the program has asked for it; blocks then need
            not run as by default.
    """

    def forward(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return kind.forward(model, *args, **kwargs)  # programs exchange it

    @untraced
    @functools.wraps(kind.forward)
    def run(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_grad_enabled():
            whole = self.__dict__.get(_KEY)
            if whole is None and world.is_initialized():
                whole = self.__dict__[_KEY] = WholeModel(self, forward, world.current(), num_graphs)
            if whole is not None:
                return whole.run(self, args, kwargs)
        return forward(self, args, kwargs)

    return run


class WholeModel:
    """Calls of a wrapped model as one graph.

    All ranks agree on it at every call. The first call is a trial: it compiles, runs, and must
    leave room on the device. So is a call with larger arguments than those before. Keeps no
    reference to the model, whose `__dict__` keeps this object.
    """

    def __init__(
        self, model: torch.nn.Module, forward: ModuleCall, current: World, num_graphs: int | None
    ) -> None:
        self._num_graphs = num_graphs
        self._name, self._forward, self._world = type(model).__name__, forward, current
        self._context = current.service(Context)
        self._engine, self._axis = self._context.engine, self._context.mesh.world
        self._memory = current.service(memory_of)
        # Stands for the model, with the same parameters, buffers and children.
        self._root = torch.nn.Module()
        for name in ("_parameters", "_buffers", "_modules"):
            self._root.__dict__[name] = model.__dict__[name]
        self._binding = Binding(functools.partial(parts_with_blocks, self._root))
        self._gate = Gate(copying(backend.AtOnce(backend.inductor)))
        #: by whether it is recorded, training mode and methods
        self._programs: dict[tuple[bool, bool, Hashable], Program] = {}
        self._methods = Methods()
        self._residences: list[Residence] = []  # that hold the full parameters
        self._leaves: list[torch.Tensor] = []  # the full parameters
        self._owner: torch.Tensor | None = None
        self._versions: dict[Storage, int] = {}  # in the last call
        self._table: ParameterTable | None = None
        self._blocks: list[tuple[dict[str, Any], str, torch.nn.Module]] = []
        self._hooks: list[Mapping[int, Any]] = []  # of modules below the model
        self._last: weakref.ref[Use] | None = None  # that of the last call
        self._num_failed = 0  # attempts to compile
        self._failure: str | None = None  # why compiled code was missing later, on this rank
        self._tried = 0  # elements of the largest arguments that a trial has run with
        self._kept = 0  # bytes that its forward pass has left on the device
        self._stage = Stage.UNTRIED if self._is_small() else Stage.APART

    def __reduce__(self) -> Any:
        return (type(None), ())  # copies of the model, and pickled ones, make their own

    def _is_small(self) -> bool:
        """The same on all ranks, whose models and settings are."""
        defaults, mesh = self._context.defaults, self._context.mesh
        blocks = [part for part in self._root.modules() if isinstance(part, Block)]
        if (
            not defaults.compile
            or defaults.fp8
            or self._world.pipe_enabled
            or mesh.tp.size > 1
            # Its statistics are sums over the ranks, which a graph does not take.
            or (
                mesh.world.size > 1
                and any(isinstance(x, OfAllRanks | BatchNorm) for x in self._root.modules())
            )
            or not all(block.may_run_whole(self._num_graphs is not None) for block in blocks)
            or not self._is_sharded()
        ):
            return False
        num_bytes = sum(2 * x.numel() * x.element_size() for x in self._root.parameters())
        if self._context.device.type == "cpu":
            return num_bytes <= _MOST_ON_CPU
        return num_bytes <= MOST * torch.cuda.mem_get_info(self._context.device)[1]

    def run(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model computes, as one graph or block by block.

        Where the program asks for the gradient of a tensor that it has made, it may differentiate
        that, as for a gradient penalty or for forces. Compiled code cannot.
        """
        context = self._context
        outer = context.runs_eagerly
        if not outer:
            given = tensors_of((args, kwargs))
            context.runs_eagerly = any(x.requires_grad and x.is_leaf for x in given)
        try:
            found = self._call(model, args, kwargs)
            return self._forward(model, args, kwargs) if found is None else found[0]
        finally:
            context.runs_eagerly = outer

    def _call(
        self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any] | None:
        """What the model computes for these arguments; None if its blocks have to compute it.

        Collective while the model is not APART.
        """
        # This is a call from inside of another, or other tensors stand in the places of parameters:
        # those of a block around it, or of functional_call.
        if (
            self._stage is Stage.APART
            or self._binding.is_running
            or in_backward()
            or not self._is_sharded()
        ):
            return None
        num_elements = sum(x.numel() for x in tensors_of((args, kwargs)))
        has_failed, is_impossible, agreed = largest(
            [self._failure is not None, self._is_impossible(args, kwargs), num_elements],
            self._axis,
            "a call of the whole model",
        )
        if has_failed:
            self._end(self._failure or _ELSEWHERE)
        if has_failed or is_impossible:
            return None
        if agreed > self._tried:
            return self._try(model, args, kwargs, int(agreed))
        return (self._run(model, args, kwargs),)

    def _is_sharded(self) -> bool:
        return (self._table is not None and self._table.are_current()) or all(
            isinstance(param, DistributedParameter)
            for _, part in parts_with_blocks(self._root)
            for param in part._parameters.values()
            if param is not None
        )

    def _is_impossible(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        self._current()
        return (
            in_transform()
            or bool(self._context.recorder.listeners)
            or is_watched(())
            # Hooks of the model itself run around `forward`.
            or any(hooks and {*hooks.values()} != {note_call} for hooks in self._hooks)
            or changing((*args, *kwargs.values())) is not None
            or self._context.runs_eagerly
            or active_saved_tensors_hooks() is not None
            or not self._has_room()
        )

    def _has_room(self) -> bool:
        """Whether what another call keeps fits beside what the last one has kept."""
        last = None if self._last is None else self._last()
        if last is None or last.ended_in != NO_PASS or self._memory.limit_is_open:
            return True
        return self._memory.allocated() + self._kept < self._memory.limit()

    def _current(self) -> ParameterTable:
        table = self._binding.table()
        if table is not self._table:
            self._table = table
            self._residences = [self._engine.fixed(each.residence) for each in table.storages]
            self._leaves, self._owner = [], None
            # A program registers hooks of a block's module with the block.
            blocks = [x for x in self._root.modules() if isinstance(x, Block)]
            parts = [part for _, part in table.modules[1:]]
            self._hooks = [hooks for part in (*parts, *blocks) for hooks in hooks_of(part)]
            self._blocks = [
                (part._modules, name, parts_with_blocks(child)[0][1])
                for _, part in table.modules
                for name, child in part._modules.items()
                if isinstance(child, Block)
            ]
        return table

    def _try(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        num_elements: int,
    ) -> tuple[Any] | None:
        """Compile, then run and look at what is left of the memory. Collective.

        On all ranks or on none. Where a rank has no room, random numbers and buffers are as before.
        """
        if self._stage is Stage.UNTRIED:
            reason: str | None = "it computes nothing"
            try:
                self._run(model, args, kwargs, runs=False)
            except CompiledOnly:
                reason = None
            except NoProgramError as error:
                reason = str(error)
            (has_failed,) = largest([reason is not None], self._axis, "compiling a model")
            if has_failed:
                self._num_failed += 1
                if self._num_failed == _MOST_FAILURES:
                    self._end(reason or _ELSEWHERE)
                return None
        memory, given = self._memory, (*args, *kwargs.values())
        trial = Trial([part for _, part in parts_with_blocks(model)], given)
        before = memory.allocated()
        out, fits, why = None, True, "its activations would not leave enough memory"
        try:
            with warnings.catch_warnings():
                # The compiler's memory pool for graphs begins with one.
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                out = self._run(model, args, kwargs)
            if not memory.limit_is_open:
                self._kept = max(self._kept, memory.allocated() - before)
                to_come = _STATES * sum(x.layout.shard_numel for x in self._current().storages)
                limit = memory.limit()
                fits = memory.allocated() + to_come + MARGIN * limit < limit
        except NoProgramError as error:
            fits, why = False, str(error)
        except torch.OutOfMemoryError:
            fits = False
        (is_too_large,) = largest([not fits], self._axis, "room for a model")
        if not is_too_large:
            self._stage, self._tried = Stage.WHOLE, num_elements
            return (out,)
        out = None
        trial.undo(self._name)
        self._end(why)
        return None

    def _end(self, reason: str) -> None:
        """No call runs whole any more."""
        self._stage, self._programs, self._table = Stage.APART, {}, None
        self._residences, self._leaves, self._owner = [], [], None
        self._context.whole.discard(self)
        warn(f"{self._name} runs block by block, not as one compiled graph: {reason}.")

    def _run(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        runs: bool = True,
    ) -> Any:
        """The call as one graph. Collective.

        If there is no compiled code for it on this rank, it runs uncompiled, with the same
        collectives, and later calls run block by block on all ranks.

        Raises:
            NoProgramError: in the first trial, if there is none.
            CompiledOnly: if it shall not run, and there is.
        """
        first_node = next_node_number()
        table, engine = self._table or self._current(), self._engine
        args, kwargs = map_tensors(ordinary, (args, kwargs))
        engine.rest()
        engine.bring(self._residences)
        use = Use(table.storages, self._residences)
        self._last = weakref.ref(use)
        draws = self._context.draws
        draws_own = model.training and not draws.are_own
        with self._plain_blocks(), draws.own() if draws_own else contextlib.nullcontext():
            leaves = self._leaves_for(use, table)
            try:
                # What is said once was said in the call after the first attempt.
                with (
                    told_once() if self._num_failed else contextlib.nullcontext(),
                    self._binding.running(table, leaves, is_compiled=True),
                ):
                    out = self._gate.run(self._program(model), model, args, kwargs, leaves, runs)
            except NoProgramError as error:
                if self._stage is Stage.UNTRIED:
                    raise
                self._failure = str(error)
                return self._run_uncompiled(model, args, kwargs, table, use, first_node)
        return self._results(out, (args, kwargs), use, leaves, first_node)

    def _leaves_for(self, use: Use, table: ParameterTable) -> Sequence[torch.Tensor]:
        """The full parameters as leaves, one per slot of all storages."""
        if not self._leaves:
            with torch.inference_mode(False):
                self._leaves = [
                    leaf
                    for storage, residence in zip(table.storages, self._residences, strict=True)
                    # A gather writes the memory; for a graph that has saved a leaf it is no change.
                    for leaf in storage.views(residence.memory.data)
                ]
        if [leaf.requires_grad for leaf in self._leaves] != use.trainable or self._owner is None:
            arrive = weakref.WeakMethod(self._arrive_alone)
            slots = [(each, i) for each in table.storages for i in range(len(each.params))]
            for leaf, is_trained, slot in zip(self._leaves, use.trainable, slots, strict=True):
                leaf.requires_grad_(is_trained)
                if is_trained:
                    hook = functools.partial(_if_alive, arrive, *slot)
                    leaf.register_post_accumulate_grad_hook(hook)
            root = self._engine.leaf
            params = [root if x is None else x for each in table.storages for x in each.params]
            self._owner = Owner.apply(root, *params)
        self._versions = {storage: storage.version() for storage in table.storages}
        for storage, _ in use.trained():
            storage.gradient.prepare_for_backward()
        return self._leaves

    def _arrive_alone(self, storage: Storage, index: int, leaf: torch.Tensor) -> None:
        """Take a gradient that came to a leaf by another way than the call's results.

        The program has got a parameter from the call, or keeps what forward has computed.

        Raises:
            StaleParameterError: if parameters were written since the last call.
        """
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        refuse_create_graph()
        if storage.version() != self._versions[storage]:
            raise StaleParameterError(
                "parameters were changed in place after the forward pass that this backward pass "
                "belongs to: call backward before the optimizer's step."
            )
        grads: list[torch.Tensor | None] = [None] * len(storage.layout.slots)
        grads[index] = grad
        self._engine.backward.add([(storage.gradient, grads)])

    def _results(
        self, out: Any, given: Any, use: Use, leaves: Sequence[torch.Tensor], first_node: int
    ) -> Any:
        """What compiled code has returned, for the program."""
        tensors = {id(x): x for x in tensors_of(out)}
        wanted = {key: x for key, x in tensors.items() if x.requires_grad}
        if not wanted and any(use.trainable):  # arguments are passed on
            inputs = {id(x) for x in tensors_of(given)}
            wanted = {
                key: x for key, x in tensors.items() if key in inputs and x.is_floating_point()
            }
        if not wanted:
            return out
        node = compiled_node(list(wanted.values()), first_node)
        gradients = LeafGradients(use, leaves, node)
        copies = Results.apply(gradients, self._owner, *wanted.values())
        shown = dict(zip(wanted, copies, strict=True))
        return map_tensors(lambda x: shown.get(id(x), x), out)

    def _run_uncompiled(
        self,
        model: torch.nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        table: ParameterTable,
        use: Use,
        first_node: int,
    ) -> Any:
        with use.running():
            views = use.gather_in_graph()
            with self._binding.running(table, views, is_compiled=False):
                out = self._forward(model, args, kwargs)
        if self._axis.size > 1:
            end = next(itertools.compress(views, use.trainable), None)
            out = tied_to(end, out, (args, kwargs), first_node, is_gathered_again=False)
            # On one rank their memory is that of the shards, which never becomes stale.
            for storage, residence in zip(table.storages, self._residences, strict=True):
                storage.residence.handed_out.append(
                    StorageWeakRef(residence.memory.untyped_storage())
                )
        self._residences, self._leaves = [], []  # what is alive of them is the program's
        return out

    def _program(self, model: torch.nn.Module) -> Program:
        parts = [part for _, part in self._current().modules[1:]]
        models = self._context.whole
        models.add(self)
        # A call of one recorded model frees what another has saved for a backward pass to come.
        is_recorded = self._context.device.type != "cpu" and (
            len(models) == 1 or self._num_graphs is not None
        )
        key = is_recorded, model.training, self._methods.of([model, *parts])
        if key not in self._programs:
            # Recordings hold memory of the device.
            self._programs = {x: y for x, y in self._programs.items() if x[0] == is_recorded}
            special = _ON_GPU if is_recorded else {}
            self._programs[key] = Program(
                self._forward, self._gate, self._num_graphs or _NUM_SPECIAL, special
            )
        return self._programs[key]

    @contextlib.contextmanager
    def _plain_blocks(self) -> Iterator[None]:
        """Inside, the inner modules of blocks stand in their places."""
        blocks = [home[name] for home, name, _ in self._blocks]
        try:
            for home, name, inner in self._blocks:
                home[name] = inner
            yield
        finally:
            for (home, name, _), block in zip(self._blocks, blocks, strict=True):
                home[name] = block
