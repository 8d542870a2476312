"""The offloaded update beside the program: whoever reads or writes weights or states waits for it,
and the values are bit for bit those of an update that nobody passes.

A CPU updates in the step. `LateStreamer` makes it stand for a GPU.
"""

import contextlib
import copy
import dataclasses
import errno
import functools
import math
import os
import pathlib
import random
import shutil
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.ranks import models
from tests.ranks.passes import Layer
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.checkpoint import CheckpointManager
from bmtrain.errors import (
    ConfigurationError,
    ParameterError,
    RanksDivergedError,
    StaleParameterError,
)
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.optim.streaming import StateStreamer
from bmtrain.recompute.memory import Memory, memory_of
from bmtrain.runtime import world
from bmtrain.shard.slices import local_of

DIM, ROWS, NUM_BLOCKS = 10, 4, 3
DTYPE = torch.bfloat16
HERE = pathlib.Path()
long = pytest.mark.long


class LateStreamer(StateStreamer):
    """Updates chunks late: a GPU after so many cycles; on a CPU, which stands for one, each chunk
    when somebody waits for it or for a later one.
    """

    def __init__(self, cycles=lambda: 20_000_000):
        super().__init__(world.current())
        self.chunk_bytes, self._cycles = 3000, cycles
        self.is_gpu, self.is_beside = self.is_beside, True
        self._waiting: list[Callable[[], object]] = []
        self._num_begun = 0

    def make_slots(self):
        if self.is_gpu:
            super().make_slots()

    def run(self, chunk, verdict, slot):
        if self.is_gpu:
            with torch.cuda.stream(self._update):
                torch.cuda._sleep(self._cycles())
            event = super().run(chunk, verdict, slot)
            self.ran(chunk)
            return event
        run, reference = super().run, None if verdict is None else weakref.ref(verdict)

        def late():
            # as on a GPU: what is read late must be alive, else its memory would be in use again
            assert all(part.update.tensors is not None for part in chunk)
            number = None if reference is None else reference()
            assert number is not None or reference is None, "freed before it was read"
            run(chunk, number, None)
            self.ran(chunk)

        self._waiting.append(late)
        return self._num_begun + len(self._waiting)

    def ran(self, chunk):
        """The update of a chunk has been issued."""

    def wait_for(self, done):
        if self.is_gpu:
            super().wait_for(done)
        while not self.is_gpu and self._num_begun < (done or 0):
            self._num_begun += 1
            self._waiting.pop(0)()

    def wait(self):
        self.wait_for(self._num_begun + len(self._waiting)) if not self.is_gpu else super().wait()

    def is_done(self, update):
        done: Any = update.done
        return done is None or (done.query() if self.is_gpu else done <= self._num_begun)


def use_streamer(streamer):
    """For optimizers that are made from now on."""
    world.current().services[StateStreamer] = streamer
    return streamer


def ones(*shape):
    return torch.ones(*shape, device=bmt.device())


def layers_of(count):
    return [Layer(DIM, 3 * DIM) for _ in range(count)]


def make_model(dtype, zero_level, use_checkpoint=False):
    torch.manual_seed(5)
    layers = layers_of(NUM_BLOCKS)
    model = nn.Sequential(nn.Embedding(17, DIM), *layers, nn.Linear(DIM, 17))
    model = model.to(bmt.device(), dtype)
    for place in range(1, NUM_BLOCKS + 1):
        model[place] = bmt.Block(model[place], zero_level=zero_level, use_checkpoint=use_checkpoint)
    return bmt.BMTrainModelWrapper(model)


def loss_of(model, step):
    rows = torch.randint(17, (ROWS, 6), generator=torch.Generator().manual_seed(step))
    ids = models.own(rows).to(bmt.device())
    logits = model(ids[:, :-1]).float()
    return nn.functional.cross_entropy(logits.reshape(-1, 17), ids[:, 1:].reshape(-1))


# ---- every reader waits ----


@dataclasses.dataclass
class Run:
    """A program, in the readers below after its second step."""

    model: Any
    optimizer: AdamOffloadOptimizer
    manager: OptimManager
    folder: pathlib.Path

    @property
    def param(self):
        """Of the block that is updated last."""
        return self.model[NUM_BLOCKS].up.weight

    @property
    def values(self):
        """Copies of this rank's weights and states, wherever those are."""
        found = {name: local_of(x) for name, x in self.model.named_parameters()}
        for place, state in enumerate(self.optimizer.state_dict()["state"].values()):
            found |= {f"{place} {name}": torch.as_tensor(x) for name, x in state.items()}
        return {name: x.detach().cpu().clone() for name, x in found.items()}


def train(run, *steps):
    for step in steps:
        run.manager.zero_grad()
        run.manager.backward(loss_of(run.model, step))
        run.manager.clip_grad_norm(run.optimizer.param_groups, 0.3)
        run.manager.step()
    return run


def start(place=HERE, num_steps=0, model=None, **options):
    model = model or make_model(DTYPE, 3)
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.05, weight_decay=0.1, **options)
    manager = models.managed(optimizer)
    return train(Run(model, optimizer, manager, place), *range(num_steps))


def read_state(run, name):
    """Its codes, where it has 8 bits."""
    state = run.optimizer.state[run.param]
    return state[name if name in state else f"{name}_codes"]


def saved_file(run):
    bmt.save(run.model, str(run.folder / "model.pt"))
    return torch.load(run.folder / "model.pt") if bmt.rank() == 0 else None


def checkpointed(run):
    with CheckpointManager(run.folder / "checkpoints") as checkpoints:
        checkpoints.save(2, run.model, run.manager)
    other = start(overlap=False)
    with CheckpointManager(run.folder / "checkpoints") as checkpoints:
        checkpoints.restore(other.model, other.manager)
    return other.values


def written(write, *steps):
    """Masters follow weights that the program writes after the step, and only those."""

    def change(run):
        with torch.no_grad():
            write(run.param)
        now = run.param.local.clone()
        return [now, train(run, *steps).values]

    return change


def restored(run):
    """What a load gives is not overwritten by an update that was under way."""
    saved = copy.deepcopy(run.optimizer.state_dict())
    weights = {name: x.clone() for name, x in run.model.state_dict().items()}
    train(run, 2)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(saved)
    return [run.values, train(run, 3).values]


def zeroed(run):
    run.optimizer.zero_grad(set_to_none=False)
    return run.values


def loaded_at_once(run):
    weights = make_model(run.param.dtype, 3).state_dict()
    run.model.load_state_dict({name: torch.full_like(x, 0.25) for name, x in weights.items()})
    return run.values


def copied(run):
    memo: dict[int, Any] = {}
    model, optimizer = copy.deepcopy(run.model, memo), copy.deepcopy(run.optimizer, memo)
    manager = models.managed(optimizer)
    other = train(Run(model, optimizer, manager, run.folder), 2)
    return [one.values for one in (run, other)]


def stepped_by(kind):
    def step(run):
        other = kind([run.param], lr=0.1)
        run.param.grad = torch.ones_like(run.param)
        other.step()
        return run.param.local.clone()

    return step


def evaluated(mode):
    def evaluate(run):
        run.model.eval()
        with mode():
            return loss_of(run.model, 9).clone()

    return evaluate


def changed_gradients(change):
    def steps(run):
        for param in run.model.parameters():
            change(grad_of(param))
        first = run.values
        run.optimizer.step()
        run.optimizer.step()
        return [first, run.values]

    return steps


def grown(run):
    run.optimizer.add_param_group({"params": [bmt.DistributedParameter(ones(5))]})
    return run.values


def ran_backward_again(run):
    """A graph of weights before the step is refused, whether the new ones are there or not."""
    loss = loss_of(run.model, 7)
    loss.backward(retain_graph=True)
    run.manager.step()
    with pytest.raises(StaleParameterError, match="changed in place"):
        loss.backward()
    run.manager.zero_grad()
    return train(run, 2).values


READERS: dict[str, Callable[[Run], Any]] = {
    "state_dict of the model": lambda run: dict(run.model.state_dict()),
    "state_dict of the optimizer": lambda run: run.optimizer.state_dict()["state"],
    "gathered state_dict": lambda run: run.optimizer.state_dict(gather=True)["state"],
    "state_dict of the manager": lambda run: run.manager.state_dict()["optimizers"][0]["state"],
    "sharded_state_dict": lambda run: {
        place: {name: local_of(x) if name != "step" else x for name, x in state.items()}
        for place, state in run.optimizer.sharded_state_dict()["state"].items()
    },
    "state": lambda run: read_state(run, "exp_avg").local,
    "function of a state": lambda run: (read_state(run, "exp_avg_sq") + 1).local,
    "copy of a state": lambda run: copy.deepcopy(read_state(run, "exp_avg")).local,
    "alias of a state": lambda run: read_state(run, "exp_avg").detach().local,
    "local": lambda run: run.param.local,
    "data": lambda run: run.param.data.local,
    "function": lambda run: (run.param * 2).local,
    "norm": lambda run: run.param.norm(),
    "gather": lambda run: [run.param.gather().detach().clone(), train(run, 2).values],
    "matmul": lambda run: ones(1, DIM) @ run.param.float().T,
    "item": lambda run: run.param[0, 0].item(),
    "bmt.save": saved_file,
    "CheckpointManager": checkpointed,
    "mul_": written(lambda param: param.mul_(3.0)),
    "data.copy_": written(lambda param: param.data.copy_(ones(30, DIM))),
    "data =": written(lambda param: type(param).data.fset(param, ones(30, DIM).to(param.dtype)), 2),
    "set_full": written(lambda param: param.set_full(ones(30, DIM)), 2),
    "written and trained": written(lambda param: param.mul_(0.5), 2),
    "load_state_dict of both": restored,
    "load_state_dict of the model": loaded_at_once,
    "deepcopy": copied,
    "SGD": stepped_by(torch.optim.SGD),
    "AdamOptimizer": stepped_by(AdamOptimizer),
    "evaluation": evaluated(torch.no_grad),
    "inference mode": evaluated(torch.inference_mode),
    "zero_grad": zeroed,
    "overwritten gradients": changed_gradients(lambda grad: grad.fill_(100.0)),
    "add_param_group": grown,
    "steps without forward": changed_gradients(lambda grad: grad.mul_(2.0)),
    "backward of an old graph": ran_backward_again,
    "training loss": lambda run: loss_of(run.model, 5).detach(),
    "inspect": lambda run: [*repr(bmt.inspect.inspect_model(run.model, "*")).encode()],
}


def plain(value):
    """Nothing of it changes later."""
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, list):
        return [plain(x) for x in value]
    return local_of(value).detach().clone() if isinstance(value, torch.Tensor) else value


check_equal = functools.partial(models.assert_equal, equal_nan=True)


def read(name, folder):
    for kind in ("at once", "beside"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    cycles = [0]
    streamer = use_streamer(LateStreamer(lambda: cycles[0]))
    want = plain(READERS[name](start(folder / "at once", 2, overlap=False)))
    run = start(folder / "beside", 1)
    run.optimizer.wait()
    cycles[0] = 100_000_000  # longer than the host needs from the last chunk to the next line
    train(run, 1)
    assert not all(map(streamer.is_done, run.optimizer._updates)), "nothing was hidden"
    check_equal(plain(READERS[name](run)), want, name)


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=long), pytest.param(2, marks=long)])
def test_every_reader_waits(first, tmp_path):
    """However late the update is, each way to weights and states finds those of the step."""
    run_ranks(read_all, 2, list(READERS)[first::3], tmp_path, timeout=180)


def read_all(names, folder):
    for place, name in enumerate(names):
        read(name, folder / str(place))


# ---- the same values as of an update that nobody passes ----


# with states of their own in files, or gradients that need not be there
NOT_DRAWN = {"bmt.save", "CheckpointManager", "overwritten gradients", "steps without forward"}


def program(seed, overlap):
    """Train by settings and readers drawn from the seed; returns everything that they have seen."""
    draws = random.Random(seed)
    dtype = draws.choice([torch.float32, torch.bfloat16, torch.float16])
    model = make_model(dtype, draws.choice([2, 3]), draws.random() < 0.3)
    if draws.random() < 0.3:
        model[NUM_BLOCKS + 1].weight = model[0].weight  # tied
    device_bytes = draws.choice([0, 0, 5000, 10**6])
    run = start(
        model=model,
        moments=draws.choice(["fp32", "8bit"]),
        master_weights=draws.choice(["fp32", "none"]) if dtype != torch.float16 else "fp32",
        overlap=overlap,
        device_bytes=device_bytes if overlap else 0,
    )
    run.manager = OptimManager(64, loss_scale_steps=3)
    run.manager.add_optimizer(run.optimizer, bmt.lr_scheduler.Linear(run.optimizer, 0.05, 2, 20))
    seen: list[Any] = []
    for step in range(8):
        count, params = draws.choice([1, 2, 3]), list(model.parameters())
        for number in range(count):
            loss = loss_of(model, 10 * step + number) * (math.inf if draws.random() < 0.1 else 1)
            run.manager.backward(loss, reduce_gradients=draws.random() < 0.5 or number == count - 1)
        what = draws.randrange(4)
        if what == 0:
            seen.append(run.manager.clip_grad_norm(params, draws.choice([0.01, 1e3])))
        elif what == 1:
            params[2].grad = None
        elif what == 2:
            grad_of(params[3]).mul_(0.5)
        run.manager.step()
        seen.append(plain(READERS[draws.choice(sorted(READERS.keys() - NOT_DRAWN))](run)))
        run.manager.zero_grad(set_to_none=draws.random() < 0.6)
    return [*seen, run.values, run.manager.state_dict()["loss_scale_state"]]


def compare(seeds):
    for seed in seeds:
        draws = random.Random(seed + 1000 * bmt.rank())
        cycles = functools.partial(draws.choice, [0, 0, 4_000_000, 20_000_000])
        use_streamer(LateStreamer(cycles))
        want = plain(program(seed, overlap=False))
        check_equal(plain(program(seed, overlap=True)), want, f"seed {seed}:")


@pytest.mark.parametrize(("first", "end"), [(0, 2), pytest.param(2, 16, marks=long)])
def test_programs_see_the_same_values(first, end):
    """Bit for bit, whatever the program does and however late the update is."""
    run_ranks(compare, 2, list(range(first, end)), timeout=180)


# ---- states are not touched while they are on their way ----


class WatchedStreamer(LateStreamer):
    """As a device that goes on copying a chunk until the host has waited for it."""

    def __init__(self):
        super().__init__()
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def ran(self, chunk):
        if self.is_gpu:
            self._down.synchronize()  # for the values to compare with

        def keep(state):
            self.sent.append((state, state.clone()))
            return state

        for part in chunk:
            part.tensors.placed(keep)

    def wait(self):
        super().wait()
        self.check()
        self.sent.clear()

    def check(self):
        for state, value in self.sent:
            assert torch.equal(state, value), "written while it was on its way"


def written_weights(run):
    with torch.no_grad():
        run.param.mul_(0.5)
    run.optimizer.state_dict()  # masters follow


def loaded_states(run):
    saved = copy.deepcopy(run.optimizer.state_dict())
    loss_of(train(run, 3).model, 3)
    run.optimizer.load_state_dict(saved)


def filled_states(run):
    state = run.optimizer.sharded_state_dict()
    loss_of(train(run, 3).model, 3)
    for values in run.optimizer.begin_restore(state).values():
        local_of(values["master"]).zero_()


def kept_states(run):
    kept = read_state(run, "master").local
    train(run, 3)
    kept.mul_(2.0)


STATE_WRITERS: list[Callable[[Run], object]] = [
    lambda run: read_state(run, "master").mul_(2.0),
    lambda run: read_state(run, "master").local.mul_(2.0),
    *(written_weights, loaded_states, filled_states, kept_states),
    lambda run: train(run, 4),
]


def write_states(overlap):
    for write in STATE_WRITERS:
        for sends_all in (True, False):
            streamer = use_streamer(WatchedStreamer())
            run = start(num_steps=2, overlap=overlap)
            if sends_all:
                loss_of(run.model, 3)
            write(run)
            streamer.check()
            train(run, 5)
            run.optimizer.wait()
            assert not streamer.sent, write


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=long), True])
def test_states_are_not_written_while_they_are_on_their_way(overlap):
    """The device copies them when the program has long gone on; those of ordinary parameters are
    the program's after a step.
    """
    run_ranks(write_states, 2, overlap)
    run_ranks(write_ordinary_states, 1)


def write_ordinary_states():
    streamer = use_streamer(WatchedStreamer())
    param = nn.Parameter(ones(5).bfloat16())
    optimizer = AdamOffloadOptimizer([param], lr=0.05)
    for _ in range(3):
        param.grad = ones(5).bfloat16()
        optimizer.step()
        optimizer.state[param]["master"].mul_(2.0)
        streamer.check()


# ---- what is hidden, and in which order ----


def hides(zero_level, use_checkpoint):
    """Nothing of the library's own counts as memory that the program holds."""
    use_streamer(LateStreamer())
    run = start(model=make_model(DTYPE, zero_level, use_checkpoint))
    optimizer, layouts = run.optimizer, set()
    for step in range(4):
        train(run, step)
        assert not optimizer._held
        layouts.add(id(optimizer._layout))
    assert len(layouts) == 1, "states were moved, which a step must not do"
    run.model.state_dict()
    for step, keep in enumerate(
        (lambda: run.param.local, lambda: read_state(run, "exp_avg").local[:3])
    ):
        kept = keep()
        train(run, 4 + step)
        assert optimizer._held == {id(run.param.storage_of)}
        del kept
    train(run, 6)
    assert not optimizer._held
    run.manager.backward(loss_of(run.model, 7))
    for _ in range(2):  # an update that is under way holds views of what it updates
        optimizer.step()
        assert not optimizer._held


@pytest.mark.parametrize(
    ("zero_level", "use_checkpoint"), [(3, True), pytest.param(2, False, marks=long)]
)
def test_updates_of_ordinary_programs_are_hidden(zero_level, use_checkpoint):
    """All of them, but for those of which the program holds memory."""
    run_ranks(hides, 2, zero_level, use_checkpoint)


def in_order():
    streamer = use_streamer(LateStreamer())  # whose chunks are shorter than a block
    torch.manual_seed(1)
    done: list[int] = []
    run: Run
    # made in another order than they are called in
    parts = nn.ModuleList(layers_of(5))
    for part in parts:
        part.get_submodule("norm").register_forward_pre_hook(
            lambda *_: done.append(sum(map(streamer.is_done, run.optimizer._updates)))
        )
    blocks = bmt.TransformerBlockList(
        bmt.Block(part, use_checkpoint=False) for part in list(parts)[::-1]
    )
    run = start(model=parts)
    for _ in range(3):
        done.clear()
        run.manager.backward(blocks(ones(2, 3, DIM)).square().sum())
        run.manager.step()
        run.manager.zero_grad()
    assert done == [1, 2, 3, 4, 5]


def late_blocks(run):
    return [run.model[place].up.weight.storage_of.residence.is_late for place in (1, 2, 3)]


def hides_what_fits(num_blocks):
    """Ranks have room for different numbers of copies; the least counts."""
    use_streamer(LateStreamer())
    found = []
    for overlap in (True, False):
        model = make_model(DTYPE, 3)
        room = int(2 * model[1].up.weight.storage_of.layout.shard_numel * num_blocks)
        is_least = bmt.rank() == bmt.world_size() - 1
        world.current().services[memory_of] = Memory(room if is_least else 9 * room)
        run = start(model=model, overlap=overlap)
        num_hidden = int(num_blocks) * overlap  # the last ones; the head takes the rest
        for step in range(3):
            train(run, step)
            assert late_blocks(run) == [place >= NUM_BLOCKS - num_hidden for place in range(3)]
        found.append(run.values)
    check_equal(found[0], found[1])


def held_on_one_rank():
    """Of one block, of all but one, and of all: that rank alone waits, all gather in one order."""
    use_streamer(LateStreamer())
    for names in (["1.up"], ["1", "2", "4"], [""]):
        found = []
        for overlap in (False, True):
            run = start(num_steps=1, overlap=overlap)
            kept = [
                param.local
                for name, param in run.model.named_parameters()
                if bmt.rank() == 0 and name.startswith(tuple(names))
            ]
            for step in range(1, 5):
                train(run, step)
                assert late_blocks(run) == 3 * [overlap], "ranks gather in another order"
            copies = [x.clone() for x in kept]
            found.append(run.values)
            check_equal(kept, copies, "held memory was written after the step")
        check_equal(found[0], found[1])


def places_itself():
    """Without a GPU everything stays in host memory; the values are those of any placement."""
    found = [start(num_steps=3, device_bytes=where).values for where in ("auto", 0)]
    check_equal(found[0], found[1])


def updates_in_the_step():
    """On a CPU: memory that the program holds has the new values, and no block is late."""
    run = start(num_steps=1)
    kept = [param.local for param in run.model.parameters()]
    before = [x.clone() for x in kept]
    run.manager.backward(loss_of(run.model, 1))
    run.manager.step()
    after = [x.clone() for x in kept]
    assert not torch.equal(torch.cat(before), torch.cat(after)) and not any(late_blocks(run))
    check_equal(after, [param.local for param in run.model.parameters()])


def copies_changes():
    use_streamer(LateStreamer())
    run = start(num_steps=1, record_delta=True, device_bytes=4000)
    memo: dict[int, Any] = {}
    copy.deepcopy(run.model, memo)
    other = copy.deepcopy(run.optimizer, memo)
    want = run.optimizer.get_avg_delta(), run.optimizer.get_var_delta()
    assert want[1] > 0
    assert (other.get_avg_delta(), other.get_var_delta()) == want


@pytest.mark.parametrize(
    "check",
    [
        in_order,
        functools.partial(hides_what_fits, 1.9),
        held_on_one_rank,
        places_itself,
        updates_in_the_step,
        copies_changes,
        *(pytest.param(functools.partial(hides_what_fits, x), marks=long) for x in (0, 0.9, 2.9)),
    ],
)
def test_what_is_hidden(check):
    """Blocks are updated in the order of the forward pass, as many later as copies have room; what
    one rank alone holds changes no order; a copy knows what the last step has changed.
    """
    run_ranks(check, 2)


# ---- updates that fail ----


class BrokenStreamer(StateStreamer):
    """Fails at one chunk; an interrupt comes when it has been updated, before the caller knows."""

    def __init__(self, error, number=1):
        super().__init__(world.current())
        self.error, self.chunk_bytes, self.number = error, 3000, number

    def run(self, chunk, verdict, slot):
        self.number -= 1
        if self.number or isinstance(self.error, KeyboardInterrupt):
            super().run(chunk, verdict, slot)
        if not self.number:
            raise self.error


def fails():
    for error in (MemoryError("no memory for a chunk"), KeyboardInterrupt()):
        use_streamer(BrokenStreamer(error))
        run = start()
        with pytest.raises(type(error)):
            train(run, 0)
        uses: list[Callable[[], object]] = [
            lambda run=run: run.optimizer.state_dict(),  # type: ignore[misc]
            lambda run=run: run.model.state_dict(),  # type: ignore[misc]
            lambda run=run: loss_of(run.model, 2),  # type: ignore[misc]
            lambda run=run: run.manager.step(),  # type: ignore[misc]
        ]
        for use in 2 * uses:
            with pytest.raises(ParameterError, match=f"was aborted by {type(error).__name__}"):
                use()


def fails_in_the_middle():
    """Values of before the step do not pass for those after it."""
    for overlap, device_bytes in ((False, 2000), (True, 0)):
        error = torch.OutOfMemoryError("no memory for a chunk")
        use_streamer(BrokenStreamer(error, 3))
        run = start(overlap=overlap, device_bytes=device_bytes)
        with pytest.raises(torch.OutOfMemoryError, match="no memory for a chunk"):
            train(run, 0)
        last: list[Any] = list(run.model.parameters())[-4:]  # of none of them an update has begun
        for param in [x for x in last if id(x.storage_of) not in run.optimizer._resident]:
            with pytest.raises(ParameterError, match="was aborted by OutOfMemoryError"):
                param.norm()
        with pytest.raises(ParameterError, match="was aborted"):
            run.optimizer.state_dict()


def test_an_error_of_an_update_comes_up_wherever_values_are_asked_for():
    """Again and again: no checkpoint can be taken of half a step; an interrupt is no error of
    whoever asks next.
    """
    run_ranks(fails, 1)
    run_ranks(fails_in_the_middle, 1)


class FullStreamer(StateStreamer):
    def make_slots(self):
        raise torch.OutOfMemoryError("no memory for chunks")


def refused(error, words, **options):
    """A step that changes neither weights, states nor step counts, and can be taken later."""
    want = train(start(num_steps=1), 1).values
    usual: Any = world.current().services.get(StateStreamer)
    run = start()
    before = run.values
    if error is torch.OutOfMemoryError:
        use_streamer(FullStreamer(world.current()))
    broken = start(model=run.model, **options)
    with pytest.raises(error, match=words):
        train(broken, 0)
    assert not any(state["step"] for state in broken.optimizer.state.values())
    use_streamer(usual)
    again = start(model=run.model)
    check_equal(again.values, before, "a refused step")
    check_equal(train(again, 0, 1).values, want, "after a refused step")


@on_ranks(2)
def test_steps_for_which_there_is_no_room_are_refused(tmp_path):
    """On the device, in host memory, in files: on all ranks, before there are any states."""
    count = sum(x.numel() for x in make_model(DTYPE, 3).parameters()) // bmt.world_size()
    for device_bytes in (0, 4000):
        refused(torch.OutOfMemoryError, "no memory for chunks", device_bytes=device_bytes)
    for moments, size, enough in (("fp32", 12 * count - 1, 12 * 64 * 30), ("8bit", 6 * count, 0)):
        words = r"states take 0\.0 GiB of host memory on each rank, host_bytes allows"
        refused(ConfigurationError, words, moments=moments, host_bytes=size)
        start(num_steps=1, moments=moments, host_bytes=12 * count + enough)
    limited = functools.partial(refused, ConfigurationError, host_bytes=6000)
    limited(words="the folder cannot be used: .*No such", folder=tmp_path / "none")
    usage = shutil.disk_usage(tmp_path)
    disk = mock.patch.object(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    beyond = "that the rest of all ranks here takes"
    with disk:
        limited(words=f"has 0.0 GiB of the 0.0 {beyond}", folder=tmp_path)
    with disk if bmt.rank() else contextlib.nullcontext():  # one rank's alone
        limited(words=beyond, folder=tmp_path)
        refused(
            ConfigurationError, beyond, folder=tmp_path, host_bytes=6000 if bmt.rank() else None
        )
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", mock.Mock(side_effect=full)):
        refused(OSError, "No space left", host_bytes=6000, folder=tmp_path)


# ---- ranks of which each knows something else ----


@long
@on_ranks(2, init={"pipe_size": 2})
def test_a_stage_of_a_pipeline_that_trains_nothing():
    """It has no copies of gradients, but agrees with the others about their room."""
    use_streamer(LateStreamer())
    found = []
    for overlap in (False, True):
        torch.manual_seed(3)
        blocks = bmt.PipelineTransformerBlockList(layers_of(4))
        for name, param in blocks.named_parameters():
            param.requires_grad_(int(name.split(".")[0]) < 2)
        run = start(model=blocks, overlap=overlap)
        for step in range(3):
            run.manager.zero_grad()
            torch.manual_seed(step)
            x = torch.randn(4, 3, DIM, requires_grad=True)
            run.manager.backward(blocks(x).square().sum())
            run.manager.step()
        found.append({name: local_of(x).clone() for name, x in blocks.named_parameters()})
    check_equal(found[0], found[1])


def in_files(folder):
    """Training with states on the device, in host memory and in files, or in files alone, against
    host memory alone; copies, checkpoints and readers of states that lie in files.
    """
    found = []
    kinds: list[dict[str, Any]] = [
        {},
        {"device_bytes": 4000, "host_bytes": 6000, "folder": folder},
        {"host_bytes": 0, "folder": folder},
    ]
    for places in kinds:
        run = start(folder, 3, **places)
        read_state(run, "exp_avg").local.mul_(0.5)
        found.append([train(run, 3).values, copied(run)])
        assert bool(run.optimizer._filed) == bool(places)
    for one in found[1:]:
        check_equal(plain(one), plain(found[0]), "in files")
    assert not list(folder.iterdir()), "files are left"


def test_states_in_files(tmp_path):
    run_ranks(in_files, 2, tmp_path)


@pytest.mark.parametrize("name", ["overlap", "device_bytes"])
@on_ranks(2)
def test_ranks_that_hide_otherwise_are_told(name):
    """They would gather in another order, or have states in other places."""
    settings: dict[str, Any] = {name: bmt.rank()}
    run = start(**settings)
    with pytest.raises(RanksDivergedError, match=name):
        train(run, 0, 1)
