"""PipelineTransformerBlockList: blocks in stages, through which micro-batches flow."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from bmtrain.block.block import Block
from bmtrain.block.stack import BlockList, plan_gathers, run_block, wrap_all
from bmtrain.distributed import autograd, collectives, stages
from bmtrain.distributed.collectives import Transfer
from bmtrain.distributed.stages import Head, Links, Share
from bmtrain.errors import ConfigurationError
from bmtrain.parallel.microbatch import Call, read_call, rows_per_micro_batch, stage_layers
from bmtrain.recompute.level import Level
from bmtrain.runtime import world
from bmtrain.runtime.mesh import Axis
from bmtrain.runtime.world import World
from bmtrain.shard.engine import Engine
from bmtrain.shard.recording import Recorder
from bmtrain.shard.sharded import ordinary
from bmtrain.torch_internals import map_tensors, tree_unflatten

Hidden = tuple[torch.Tensor, ...]


class PipelineTransformerBlockList(BlockList):
    """`x = blocks(x, *rest)` as TransformerBlockList, with the layers spread over pipeline stages.

    Layers are cut into `pipe_size` contiguous stages. Every rank of the pipeline passes its own
    batch and gets its own rows back: the batches are joined, cut into `num_micro_batches` (both
    given to `init_distributed`) and run through the stages, which work on different micro-batches
    at the same time. Inside a stage, parameters are sharded with ZeRO-2 over its ranks. Every rank
    must run backward through the result if any does. An exception inside a layer on some ranks only
    leaves the others hanging until the time limit of the run.

    The running statistics of a layer are those of its stage, over all micro-batches of a pass.
    `save` and `state_dict` write these.

    Args:
        modules: blocks or plain modules, which are wrapped; the same on every rank.
        num_hidden: number of leading arguments that each block replaces by its result (a tensor for
            1, else a tuple).
        use_checkpoint: for the Blocks made of plain modules.

    Raises:
        ConfigurationError: for more stages than layers.
        ParameterError: for parameters that layers of different stages share.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism" (2019).
    """

    def __init__(
        self,
        modules: Iterable[torch.nn.Module],
        num_hidden: int = 1,
        *,
        use_checkpoint: bool | str | Level = True,
    ) -> None:
        current = world.current("PipelineTransformerBlockList")
        blocks = wrap_all(modules, num_hidden, use_checkpoint)
        super().__init__(blocks, num_hidden)
        pipe = current.mesh.pipe
        layers_of = stage_layers(len(blocks), pipe.size)
        for stage, layers in enumerate(layers_of):
            for part in _with_inner(blocks[layer] for layer in layers):
                part.move_to_stage(stage)
        # A plain list: the blocks are registered already.
        self._own = [blocks[layer] for layer in layers_of[pipe.index]]
        # By key of a call, the tensors that travel in it, learned in the first: into this stage,
        # and back to the owners of the rows.
        self._known: dict[object, tuple[list[Head], list[Share]]] = {}
        plan_gathers(self._own)

    def forward(
        self,
        *args: Any,
        return_hidden_states: bool = False,
        batch_related: Iterable[int | str] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run all blocks on this rank's rows.

        Args:
            args: the hidden tensors (rows, ...), then other arguments of every block.
            return_hidden_states: whether to return the input of every block too.
            batch_related: the arguments with a row per sample, by position after the hidden ones or
                by name. By default the tensors whose dim 0 is as long as that of the hidden ones.
                The others are not cut: each stage uses those of its own call for all rows.
            kwargs: keyword arguments of every block.

        Returns the hidden tensor, or a tuple of `num_hidden`; with `return_hidden_states`
        additionally one stacked tensor (len(self), rows, ...) per hidden.

        Raises:
            ConfigurationError: on every rank, if arguments differ between ranks or cannot be cut.
        """
        current = world.current("PipelineTransformerBlockList")
        axis, count = current.mesh.pipe, current.num_micro_batches
        args, kwargs = map_tensors(ordinary, (args, kwargs))
        call, key = self._agree(current, args, kwargs, batch_related, return_hidden_states)
        incoming, shares = self._known.get(key, (None, None))
        joined = _Joined(call, axis, count)
        passing = _Passing(self._own, current.service(Links), incoming, return_hidden_states)
        with contextlib.ExitStack() as stack:
            for part in _with_inner(self._own):
                stack.enter_context(part.together())
            stack.enter_context(current.draws.own())
            enter = stack.enter_context(current.service(Recorder).pipelined_pass(axis.index))
            for number in range(count):
                with enter(number):
                    passing.run(joined, number)
        # Do not prefetch what is gathered next: other stages may need activations from this rank
        # before they join that gather, a deadlock.
        current.service(Engine).schedule.interrupt()
        if shares is None:
            shares = _agree_on_shares(passing.results(), call.num_rows, axis)
            self._known[key] = passing.incoming, shares
        held = passing.finish()
        results = stages.to_owners(
            held, shares, [*joined.ties, *passing.ties], axis, current.device
        )
        finals = tuple(result[0] for result in results[: self.num_hidden])
        out = finals + results[self.num_hidden :]
        return out[0] if len(out) == 1 else out

    def _agree(
        self,
        current: World,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        batch_related: Iterable[int | str] | None,
        return_hidden_states: bool,
    ) -> tuple[Call, object]:
        """The call, and a key of all that decides which tensors travel, equal on all ranks."""
        axis, kind = current.mesh.pipe, current.device.type
        call, signature, error = None, None, None
        try:
            call = read_call(args, kwargs, self.num_hidden, batch_related)
            rows_per_micro_batch(call.num_rows, axis.size, current.num_micro_batches)
            mode = (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled(kind),
                torch.get_autocast_dtype(kind),
                self.training,
            )
            signature = (call.signature(), return_hidden_states, mode)
        except ConfigurationError as failure:
            error = str(failure)
        trainable = tuple(
            param.requires_grad for block in self._own for param in block.parameters()
        )
        told = collectives.gather_objects(
            (error, signature, trainable), axis, "a call of a pipeline"
        )
        for rank, (problem, _, _) in zip(axis.ranks, told, strict=True):
            if problem is not None:
                raise ConfigurationError(f"{problem} (on rank {rank})")
        for rank, (_, other, _) in zip(axis.ranks, told, strict=True):
            if other != told[0][1]:
                raise ConfigurationError(
                    f"the ranks of the pipeline pass different arguments: rank {axis.ranks[0]} "
                    f"{told[0][1]}, rank {rank} {other}; expected equal shapes, dtypes and modes."
                )
        return call, (signature, tuple(flags for _, _, flags in told))  # type: ignore[return-value]  # None has raised above


class _Joined:
    """The batches of all ranks, cut into micro-batches; hidden tensors on the first stage only."""

    def __init__(self, call: Call, axis: Axis, num_micro_batches: int) -> None:
        self._call = call
        self._num_rows = rows_per_micro_batch(call.num_rows, axis.size, num_micro_batches)
        self._hidden = [stages.ToFirst.apply(x, axis) for x in call.hidden]
        self._leaves = [
            _join(x, axis) if cut else x for x, cut in zip(call.leaves, call.is_cut, strict=True)
        ]
        # The layers of this stage may ignore some of these, while other stages have gradients of
        # them to reduce. Tied to the result, their backward runs on every stage: without it the
        # others would hang.
        self.ties = [
            x
            for x in (*self._hidden, *self._leaves)
            if isinstance(x, torch.Tensor) and x.requires_grad
        ]
        self.num_micro_batches = num_micro_batches

    def part(self, number: int) -> tuple[Hidden, tuple[tuple[Any, ...], dict[str, Any]]]:
        """A micro-batch: its hidden tensors, on the first stage, and the other arguments."""
        rows = slice(number * self._num_rows, (number + 1) * self._num_rows)
        leaves = [
            x[rows] if cut else x for x, cut in zip(self._leaves, self._call.is_cut, strict=True)
        ]
        rest = tree_unflatten(leaves, self._call.spec)
        # on other stages the hidden ones are tokens without rows
        return tuple(x[rows] for x in self._hidden if x.dim()), rest


class _Passing:
    """One call on one stage: receives micro-batches, runs the blocks, sends the results on."""

    def __init__(
        self, blocks: Sequence[Block], links: Links, incoming: list[Head] | None, with_states: bool
    ) -> None:
        self._blocks, self._upstream, self._downstream = blocks, links.upstream, links.downstream
        self._is_known = incoming is not None
        self.incoming: list[Head] = incoming or []
        self.ties: list[torch.Tensor] = []
        self._arriving: Transfer | None = None
        self._with_states = with_states
        self._inputs: list[list[Hidden]] = []  # per micro-batch, per block, with `with_states`
        self._outputs: list[Hidden] = []

    def run(self, joined: _Joined, number: int) -> None:
        """Run micro-batch `number` through the blocks of this stage."""
        hidden, (args, kwargs) = joined.part(number)
        is_first, link = number == 0 and not self._is_known, self._upstream
        if link is not None:
            if is_first:
                self.incoming = link.receive_heads()
            arriving = self._arriving or link.receive(self.incoming)
            more = number + 1 < joined.num_micro_batches  # receive the next one during compute
            self._arriving = link.receive(self.incoming) if more else None
            hidden = stages.take_over(self.incoming, arriving, link, joined.ties)
            self.ties += [x for x in hidden if x.requires_grad]
        inputs = []
        for block in self._blocks:
            if self._with_states:
                inputs.append(hidden)
            hidden = run_block(block, hidden, args, kwargs)
        self._inputs.append(inputs)
        self._outputs.append(hidden)
        if self._downstream is None:
            return
        if is_first:
            self._downstream.send_heads([Head.of(x) for x in hidden])
        self.ties.append(stages.PassOn.apply(self._downstream, *hidden))

    def results(self) -> list[list[torch.Tensor]]:
        """What this stage holds for the owners of the rows, of the first micro-batch: for each
        hidden the output, none but on the last stage, then the states.
        """
        last = [] if self._downstream is not None else [self._outputs[0]]
        groups = [last, self._inputs[0]] if self._with_states else [last]
        places = range(len(self._outputs[0]))
        return [[hidden[place] for hidden in group] for group in groups for place in places]

    def finish(self) -> list[torch.Tensor | None]:
        """Complete sends; returns all rows of `results`, stacked: (count, rows of all ranks, ...);
        None where there are none.
        """
        if self._downstream is not None:
            # The last send is in flight and keeps its activations alive.
            self._downstream.flush()
        out: list[torch.Tensor | None] = [
            None if self._downstream is not None else torch.cat(parts).unsqueeze(0)
            for parts in zip(*self._outputs, strict=True)
        ]
        if self._with_states:
            for place in range(len(out)):
                layers = zip(*self._inputs, strict=True)
                states = [torch.cat([hidden[place] for hidden in layer]) for layer in layers]
                out.append(torch.stack(states))
        return out


def _with_inner(blocks: Iterable[Block]) -> Iterable[Block]:
    """The blocks and all blocks inside them, each once."""
    parts = (part for block in blocks for part in block.modules())
    return dict.fromkeys(part for part in parts if isinstance(part, Block))


def _join(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The rows of all ranks, in rank order."""
    needs_grad = torch.is_grad_enabled() and x.requires_grad
    return (
        autograd.all_gather(x, axis) if needs_grad else collectives.all_gather(x, axis)
    ).flatten(0, 1)


def _agree_on_shares(
    results: Sequence[Sequence[torch.Tensor]], num_rows: int, axis: Axis
) -> list[Share]:
    """Agree on what each stage holds for the owners of the rows, before any waits for theirs.

    Raises:
        ConfigurationError: on all ranks, for hidden states that cannot be stacked.
    """
    own = [
        [Head((num_rows, *x.shape[1:]), x.dtype, x.requires_grad) for x in tensors]
        for tensors in results
    ]
    shares = []
    told = collectives.gather_objects(own, axis, "shares of a pipeline")
    for entries in zip(*told, strict=True):
        heads = [head for several in entries for head in several]
        kinds = dict.fromkeys((head.shape, head.dtype) for head in heads)
        if len(kinds) != 1:
            raise ConfigurationError(
                f"return_hidden_states: hidden tensors before different blocks are {[*kinds]}: "
                "expected the same everywhere, as they are stacked."
            )
        needs_grad = any(head.requires_grad for head in heads)
        head = dataclasses.replace(heads[0], requires_grad=needs_grad)
        shares.append(Share(head, tuple(map(len, entries))))
    return shares
