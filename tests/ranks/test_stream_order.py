"""The engine's passes on simulated streams: its events order every read, write and release of
memory; without one they do not.
"""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from tests.ranks import models
from tests.ranks.passes import Layer
from tests.ranks.runner import run_ranks
from tests.ranks.stream_order import (
    COMPUTE,
    EARLY_FREE,
    EARLY_READ,
    EARLY_WRITE,
    UNORDERED_WRITES,
    SimulatedStreams,
    watching,
)
from torch import nn

import bmtrain as bmt
from bmtrain.distributed import exchange, transport
from bmtrain.distributed.exchange import joined
from bmtrain.distributed.transport import Transport
from bmtrain.recompute.level import Level
from bmtrain.recompute.offload import Host
from model_center.generation.resident import ResidentWeights

DIM, ROWS, NUM_BLOCKS = 8, 3, 4  # one block more than a ring has buffers
long = pytest.mark.long


def read_elsewhere(streams, orderly):
    x = torch.zeros(4)
    with streams.gathering(streams.mark_compute() if orderly else None):
        x.clone()
    return x


def write_elsewhere(streams, orderly):
    x = torch.empty(4)  # whoever had this memory before may still read it
    with streams.gathering(streams.mark_compute() if orderly else None):
        x.fill_(1.0)
    return x


def read_and_overwrite(streams, orderly):
    x = torch.zeros(4)
    with streams.reducing():
        x.clone()
        end = streams.mark_current()
    streams.compute_waits(end if orderly else None)
    return x.fill_(1.0)


def read_and_free(streams, orderly):
    x = torch.zeros(4)
    with streams.reducing():
        x.clone()
        end = streams.mark_current()
    del x
    streams.compute_waits(end if orderly else None)
    torch.ones(4)


def write_side_by_side(streams, orderly):
    x = torch.zeros(4)
    halves = x.chunk(2) if orderly else (x, x)
    streams.side_by_side([lambda: halves[0].fill_(1.0), lambda: halves[1].fill_(2.0)])
    return x.clone()


@pytest.mark.parametrize(
    ("program", "race"),
    [
        (read_elsewhere, EARLY_READ),
        (write_elsewhere, UNORDERED_WRITES),
        (read_and_overwrite, EARLY_WRITE),
        (read_and_free, EARLY_FREE),
        (write_side_by_side, UNORDERED_WRITES),
    ],
)
def test_the_checker(program, race):
    """It finds what is there, and nothing where streams wait or bytes are others."""
    for orderly, expected in ((True, set()), (False, {race})):
        with watching() as order:
            kept = program(SimulatedStreams(order, "test"), orderly)
        assert {what for what, _, _ in order.races} == expected
        del kept  # to free it would be a race too


@contextlib.contextmanager
def checked():
    """Small shards travel as big ones do, and of gradients some parts are copied from where they
    are, some joined before.
    """
    numbers = []

    def counting(parts):
        found = joined(parts)
        numbers.append((len(parts), len(found)))
        return found

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(transport, "SMALLEST_SHARED_BYTES", 0))
        stack.enter_context(mock.patch.object(exchange, "LEAST_COPIED", 256))
        stack.enter_context(mock.patch.object(exchange, "joined", counting))
        yield stack.enter_context(watching())
    assert not numbers or any(1 < after < before for before, after in numbers)


def accumulate(model, manager, num_batches, *, reduce_each):
    """Gradients of some batches, and the step."""
    manager.zero_grad()
    for number in range(num_batches):
        loss = model(torch.randn(ROWS, DIM)).square().mean()
        manager.backward(loss, reduce_gradients=reduce_each or number == num_batches - 1)
    manager.clip_grad_norm(manager.optimizers[0].param_groups, 1.0)
    manager.step()


def end_early(blocks):
    """Passes behind which something is under way that nobody will ask for: a gather, inputs that
    come back from the host.
    """
    x = torch.randn(ROWS, DIM)
    with torch.no_grad():
        blocks[0](x)
    middle = blocks[1](blocks[0](x))
    torch.autograd.grad(blocks[3](blocks[2](middle)).sum(), middle)


def train(zero_level, use_checkpoint, num_batches):
    """Three steps, each with passes behind it that do not train; at the end the values are changed
    and read.
    """
    with checked() as order:
        torch.manual_seed(0)
        blocks = [
            bmt.Block(Layer(DIM, 2 * DIM), use_checkpoint=use_checkpoint, zero_level=zero_level)
            for _ in range(NUM_BLOCKS)
        ]
        model = nn.Sequential(
            bmt.TransformerBlockList(blocks), bmt.Block(nn.Linear(DIM, 5), zero_level=zero_level)
        )
        manager = models.managed(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2))
        for step in range(3):
            accumulate(model, manager, num_batches, reduce_each=step > 0)
            with torch.no_grad():
                model(torch.randn(ROWS, DIM))
            end_early(blocks)
        with torch.no_grad():
            torch._foreach_mul_(list(model.parameters()), 0.5)
        model.state_dict()
    return order


def races_in_training(zero_level, use_checkpoint, num_batches):
    """What was found, and the streams that something ran on."""
    order = train(zero_level, use_checkpoint, num_batches)
    return list(order.races), {
        stream.split(":")[-1].strip() for stream, clock in order.clocks.items() if clock.get(stream)
    }


STREAMS = {
    "collective": {COMPUTE, "gather", "reduce"},
    "copy_engine": {COMPUTE, "gather", "gather, side 1", "reduce", "reduce, side 1"},
}


LEVELS = [Level.NOTHING, Level.CHEAP, Level.BLOCK, Level.OFFLOADED]
# transport, level of ZeRO, recomputation, micro-batches
CASES = [("copy_engine", 3, Level.OFFLOADED, 2), ("collective", 2, Level.BLOCK, 1)]


@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *(
            pytest.param(case, marks=long)
            for case in itertools.product(STREAMS, (2, 3), LEVELS, (1, 2))
            if case not in CASES
        ),
    ],
    ids=str,
)
def test_training_is_ordered(case):
    carrier, *rest = case
    found = run_ranks(races_in_training, 2, *rest, init={"transport": carrier})
    assert found == [([], STREAMS[carrier])] * 2


def write(how, block, value):
    """The same value everywhere in a block."""
    values = {"weight": torch.full((DIM, DIM), value), "bias": torch.full((DIM,), value)}
    if how == "load_state_dict":
        block.load_state_dict(values)
        return
    for name, param in block.named_parameters():
        assert isinstance(param, bmt.DistributedParameter)
        param.set_full(values[name])


def races_of_writes(how, zero_level):
    """Two models take turns, and what is written is a later block of the second.

    Nothing but the write itself makes its gather wait: that of the first block has begun before, as
    from the second turn on the order of gathers is known.
    """
    found = []
    with checked() as order, torch.no_grad():
        torch.manual_seed(0)
        blocks = [bmt.Block(nn.Linear(DIM, DIM), zero_level=zero_level) for _ in range(6)]
        first, second = nn.Sequential(*blocks[:3]), nn.Sequential(*blocks[3:])
        x = torch.ones(1, DIM)
        for turn in range(1, 5):
            first(x)
            write(how, second[1], float(turn))
            hidden = second[0](x)
            found.append(float((second[1](hidden) - turn * (hidden.sum() + 1)).abs().max()))
    return list(order.races), found


def races_of_holding(zero_level):
    """Whole weights are held again and again in the same memory; in between there is training, or
    values are written, or nothing is.
    """
    found = []
    with checked() as order, torch.no_grad():
        torch.manual_seed(0)
        blocks = [bmt.Block(nn.Linear(DIM, DIM), zero_level=zero_level) for _ in range(4)]
        model, x = nn.Sequential(*blocks), torch.ones(1, DIM)
        kept = []
        for turn in range(1, 7):
            resident = ResidentWeights.of(model)
            assert resident is not None
            kept = list(resident.memory())
            with resident.held():
                for _ in range(2):
                    with resident.bound():
                        hidden = blocks[0](x)
                        out = blocks[1](hidden)
                found.append(float((out - (turn // 2 or 1) * (hidden.sum() + 1)).abs().max()))
            if turn % 2:
                write("set_full", blocks[1], float(turn // 2 + 1))
                with torch.enable_grad():
                    model(x).sum().backward()
    del kept
    return list(order.races), found[1:]


def others_are_ordered(zero_level):
    for races, errors in (
        races_of_holding(zero_level),
        *(races_of_writes(how, zero_level) for how in ("set_full", "load_state_dict")),
    ):
        assert races == []
        assert max(errors) < 1e-3


@pytest.mark.parametrize(
    ("carrier", "zero_level"),
    [
        ("copy_engine", 3),
        *(pytest.param(*case, marks=long) for case in (("collective", 2), ("collective", 3))),
        pytest.param("copy_engine", 2, marks=long),
    ],
)
def test_held_weights_and_writes_are_ordered(carrier, zero_level):
    run_ranks(others_are_ordered, 2, zero_level, init={"transport": carrier})


def let_go_at_once(carrier):
    """As `_make_room`, without waiting."""
    carrier._filling = None
    carrier._reductions.clear()


WITHOUT = {
    "compute waits for events": (SimulatedStreams, "compute_waits", lambda self, event: None),
    "gathers wait for writes and for the last reader": (
        SimulatedStreams,
        "gathering",
        lambda self, after: self._order.on(self._gather_name),
    ),
    "reductions wait for what they read": (
        SimulatedStreams,
        "reducing",
        lambda self: self._order.on(self._reduce_name),
    ),
    "memory of gradients is waited for": (Transport, "_make_room", let_go_at_once),
    "compute waits for the host": (Host, "receive", lambda self, event: None),
}


def races_without(wait, run, *args):
    """The races that are found once something waits no longer."""
    with mock.patch.object(*WITHOUT[wait]):
        return run(*args)[0]


WAITS = list(WITHOUT)
MISSING = [
    *((wait, races_in_training, 3, Level.OFFLOADED, 1) for wait in WAITS),
    *((wait, races_of_holding, 3) for wait in WAITS[:2]),
]


@pytest.mark.fresh
@pytest.mark.parametrize(
    ("carrier", "case"),
    [
        *(("copy_engine", case) for case in MISSING[::4]),
        *(
            pytest.param(carrier, case, marks=long)
            for carrier in STREAMS
            for case in MISSING
            if carrier == "collective" or case not in MISSING[::4]
        ),
    ],
)
def test_a_wait_that_is_missing_is_found(carrier, case):
    assert all(run_ranks(races_without, 2, *case, init={"transport": carrier}))
