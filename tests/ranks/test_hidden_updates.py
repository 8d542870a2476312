"""The offloaded update beside the program: whoever reads or writes weights or states waits for it,
and the values are bit for bit those of an update that nobody passes.
"""

from __future__ import annotations

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
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, ParameterError, RanksPartedError, StaleParameterError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager
from bmtrain.optim.streaming import Load, Passage, StreamedUpdate
from bmtrain.recompute.memory import Uncounted, memory_of
from bmtrain.runtime import world
from bmtrain.runtime.world import World
from bmtrain.shard.slices import local_of
from bmtrain.snapshot import CheckpointManager

DIM, ROWS, NUM_BLOCKS = 10, 4, 3


class LatePassage(Passage):
    """On a GPU, begins each load late; on a CPU, loads wait for whoever asks for them anyway.

    Args:
        world: of the run.
        cycles: of the GPU, before each load.
    """

    def __init__(self, world: World, cycles: Callable[[], int] = lambda: 20_000_000) -> None:
        super().__init__(world)
        self.load_bytes, self._cycles = 3000, cycles

    def run(self, load: Load, verdict: torch.Tensor | None) -> torch.Event | None:
        if self.is_beside:
            with torch.cuda.stream(self._update):
                torch.cuda._sleep(self._cycles())
        return super().run(load, verdict)


def use_passage(passage: Passage) -> None:
    """For optimizers that are made from now on."""
    world.current().services[Passage] = passage


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(*shape, device=bmt.device())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 3 * DIM)
        self.down = nn.Linear(3 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x))))
        return y


def make_plain() -> nn.Sequential:
    return nn.Sequential(
        nn.Embedding(17, DIM), *(Layer() for _ in range(NUM_BLOCKS)), nn.Linear(DIM, 17)
    )


def make_model(dtype: torch.dtype, zero_level: int, use_checkpoint: bool = False) -> Any:
    torch.manual_seed(5)
    model = make_plain().to(bmt.device(), dtype)
    for place in range(1, NUM_BLOCKS + 1):
        model[place] = bmt.Block(model[place], zero_level=zero_level, use_checkpoint=use_checkpoint)
    return bmt.BMTrainModelWrapper(model)


def batch(step: int) -> torch.Tensor:
    rows = torch.randint(17, (ROWS, 6), generator=torch.Generator().manual_seed(step))
    return rows.chunk(bmt.world_size())[bmt.rank()].to(bmt.device())


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    ids = batch(step)
    logits = model(ids[:, :-1]).float()
    return nn.functional.cross_entropy(logits.reshape(-1, 17), ids[:, 1:].reshape(-1))


def values_of(model: nn.Module, optimizer: AdamOffloadOptimizer) -> dict[str, torch.Tensor]:
    """Copies of this rank's weights and states, wherever those are."""
    found = {name: local_of(x).detach().cpu().clone() for name, x in model.named_parameters()}
    for place, state in enumerate(optimizer.state_dict()["state"].values()):
        found |= {f"{place} {name}": torch.as_tensor(x).cpu().clone() for name, x in state.items()}
    return found


def check_same(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), f"{name}: {got[name]} is not {value}"


# ---- every reader waits ----


@dataclasses.dataclass
class Run:
    """A program after its second step."""

    model: Any
    optimizer: AdamOffloadOptimizer
    manager: OptimManager
    folder: pathlib.Path

    @property
    def param(self) -> Any:
        """Of the block that is updated last."""
        return self.model[NUM_BLOCKS].up.weight


def read_state(run: Run, name: str) -> Any:
    return run.optimizer.state[run.param][name]


def saved_file(run: Run) -> Any:
    bmt.save(run.model, str(run.folder / "model.pt"))
    return torch.load(run.folder / "model.pt") if bmt.rank() == 0 else None


def checkpointed(run: Run) -> Any:
    with CheckpointManager(run.folder / "checkpoints") as checkpoints:
        checkpoints.save(2, run.model, run.manager)
    other = start(run.folder, overlap=False, num_steps=0)
    with CheckpointManager(run.folder / "checkpoints") as checkpoints:
        checkpoints.restore(other.model, other.manager)
    return values_of(other.model, other.optimizer)


def written(run: Run, write: Callable[[Any], object]) -> Any:
    with torch.no_grad():
        write(run.param)
    return run.param.local.clone()


def written_and_trained(run: Run) -> Any:
    """Masters follow weights that the program writes after the step, and only those."""
    with torch.no_grad():
        run.param.mul_(0.5)
    train(run, 2)
    return values_of(run.model, run.optimizer)


def restored(run: Run) -> Any:
    """What a load gives is not overwritten by an update that was under way."""
    saved = copy.deepcopy(run.optimizer.state_dict())
    weights = {name: x.clone() for name, x in run.model.state_dict().items()}
    train(run, 2)
    run.model.load_state_dict(weights)
    run.optimizer.load_state_dict(saved)
    first = values_of(run.model, run.optimizer)
    train(run, 3)
    return [first, values_of(run.model, run.optimizer)]


def loaded_at_once(run: Run) -> Any:
    weights = {
        name: torch.full_like(x, 0.25) for name, x in make_model(DTYPE, 3).state_dict().items()
    }
    run.model.load_state_dict(weights)
    return values_of(run.model, run.optimizer)


def copied(run: Run) -> Any:
    memo: dict[int, Any] = {}
    model = copy.deepcopy(run.model, memo)
    optimizer = copy.deepcopy(run.optimizer, memo)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    other = Run(model, optimizer, manager, run.folder)
    train(other, 2)
    return [values_of(one.model, one.optimizer) for one in (run, other)]


def stepped_by_another(run: Run) -> Any:
    other = torch.optim.SGD([run.param], lr=0.1)
    run.param.grad = torch.ones_like(run.param)
    other.step()
    return run.param.local.clone()


def stepped_on_the_device(run: Run) -> Any:
    other = AdamOptimizer([run.param], lr=0.1)
    run.param.grad = torch.ones_like(run.param)
    other.step()
    return run.param.local.clone()


def evaluated(run: Run) -> Any:
    run.model.eval()
    with torch.no_grad():
        return loss_of(run.model, 9)


def evaluated_in_inference_mode(run: Run) -> Any:
    with torch.inference_mode():
        return loss_of(run.model, 9).clone()


def gathered_then_trained(run: Run) -> Any:
    whole = run.param.gather().detach().clone()
    train(run, 2)
    return [whole, values_of(run.model, run.optimizer)]


def cleared(run: Run) -> Any:
    run.optimizer.zero_grad(set_to_none=False)
    return values_of(run.model, run.optimizer)


def overwritten_gradients(run: Run) -> Any:
    for param in run.model.parameters():
        grad_of(param).fill_(100.0)
    return values_of(run.model, run.optimizer)


def grown(run: Run) -> Any:
    run.optimizer.add_param_group({"params": [bmt.DistributedParameter(ones(5))]})
    return values_of(run.model, run.optimizer)


def stepped_without_forward(run: Run) -> Any:
    for param in run.model.parameters():
        grad_of(param).mul_(2.0)
    run.optimizer.step()
    run.optimizer.step()
    return values_of(run.model, run.optimizer)


def ran_backward_again(run: Run) -> Any:
    """A graph of weights before the step is refused, whether the new ones are there or not."""
    loss = loss_of(run.model, 7)
    loss.backward(retain_graph=True)
    run.manager.step()
    with pytest.raises(StaleParameterError, match="changed in place"):
        loss.backward()
    run.manager.zero_grad()
    train(run, 2)
    return values_of(run.model, run.optimizer)


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
    "function of a state": lambda run: read_state(run, "exp_avg_sq").norm(),
    "copy of a state": lambda run: copy.deepcopy(read_state(run, "exp_avg")).local,
    "alias of a state": lambda run: read_state(run, "exp_avg").detach().local,
    "local": lambda run: run.param.local,
    "data": lambda run: run.param.data.local,
    "function": lambda run: (run.param * 2).local,
    "norm": lambda run: run.param.norm(),
    "gather": lambda run: run.param.gather(),
    "matmul": lambda run: ones(1, DIM) @ run.param.float().T,
    "item": lambda run: run.param[0, 0].item(),
    "bmt.save": saved_file,
    "CheckpointManager": checkpointed,
    "mul_": lambda run: written(run, lambda param: param.mul_(3.0)),
    "data.copy_": lambda run: written(run, lambda param: param.data.copy_(ones(30, DIM))),
    "data =": lambda run: written(
        run, lambda param: type(param).data.fset(param, ones(30, DIM).to(param.dtype))
    ),
    "set_full": lambda run: written(run, lambda param: param.set_full(ones(30, DIM))),
    "written and trained": written_and_trained,
    "load_state_dict of both": restored,
    "load_state_dict of the model": loaded_at_once,
    "deepcopy": copied,
    "SGD": stepped_by_another,
    "AdamOptimizer": stepped_on_the_device,
    "evaluation": evaluated,
    "inference mode": evaluated_in_inference_mode,
    "gathered then trained": gathered_then_trained,
    "zero_grad": cleared,
    "overwritten gradients": overwritten_gradients,
    "add_param_group": grown,
    "steps without forward": stepped_without_forward,
    "backward of an old graph": ran_backward_again,
    "training loss": lambda run: loss_of(run.model, 5).detach(),
    "inspect": lambda run: repr(bmt.inspect.inspect_model(run.model, "*")),
}
DTYPE = torch.bfloat16


def train(run: Run, step: int) -> None:
    run.manager.zero_grad()
    run.manager.backward(loss_of(run.model, step))
    run.manager.clip_grad_norm(run.optimizer.param_groups, 0.3)
    run.manager.step()


def start(folder: pathlib.Path, *, overlap: bool, num_steps: int = 2, device_bytes: int = 0) -> Run:
    model = make_model(DTYPE, 3)
    optimizer = AdamOffloadOptimizer(
        model.parameters(), lr=0.05, weight_decay=0.1, overlap=overlap, device_bytes=device_bytes
    )
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    run = Run(model, optimizer, manager, folder)
    for step in range(num_steps):
        train(run, step)
    return run


def plain(value: Any) -> Any:
    """Nothing of it changes later."""
    if isinstance(value, dict):
        return {name: plain(x) for name, x in value.items()}
    if isinstance(value, list):
        return [plain(x) for x in value]
    return local_of(value).detach().clone() if isinstance(value, torch.Tensor) else value


def check_equal(got: Any, want: Any, place: str) -> None:
    if isinstance(want, dict):
        assert got.keys() == want.keys(), place
        for name in want:
            check_equal(got[name], want[name], f"{place} {name}")
    elif isinstance(want, list):
        for number, (one, other) in enumerate(zip(got, want, strict=True)):
            check_equal(one, other, f"{place} {number}")
    elif isinstance(want, torch.Tensor):
        assert torch.equal(got.nan_to_num(9.5), want.nan_to_num(9.5)), (
            f"{place}: {got} is not {want}"
        )
    else:
        assert got == want, place


def is_done(update: StreamedUpdate) -> bool:
    return update.num_left == 0 and (update.done is None or update.done.query())


def read(name: str, folder: pathlib.Path) -> None:
    cycles = [0]
    use_passage(LatePassage(world.current(), lambda: cycles[0]))
    want = plain(READERS[name](start(folder / "at once", overlap=False)))
    run = start(folder / "beside", overlap=True, num_steps=1)
    run.optimizer.settle()
    cycles[0] = 100_000_000  # longer than the host needs from the last load to the next line
    train(run, 1)
    assert not all(map(is_done, run.optimizer._updates)), "nothing was hidden"
    check_equal(plain(READERS[name](run)), want, name)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("names", [list(READERS)[place::6] for place in range(6)], ids=str)
def test_every_reader_waits(names: list[str], world_size: int, tmp_path: pathlib.Path) -> None:
    """However late the update is, each way to weights and states finds those of the step."""
    run_ranks(read_all, world_size, names, tmp_path, timeout=180)


def read_all(names: list[str], folder: pathlib.Path) -> None:
    for place, name in enumerate(names):
        for kind in ("at once", "beside"):
            (folder / str(place) / kind).mkdir(parents=True, exist_ok=True)
        read(name, folder / str(place))


# ---- the same values as of an update that nobody passes ----


@dataclasses.dataclass(frozen=True)
class Case:
    """A program drawn from a seed."""

    seed: int
    overlap: bool = True

    @property
    def draws(self) -> random.Random:
        return random.Random(self.seed)


def groups_of(model: nn.Module, split: bool) -> Any:
    if not split:
        return model.parameters()
    named = list(model.named_parameters())
    return [
        {"params": [x for name, x in named if x.dim() > 1], "weight_decay": 0.2},
        {"params": [x for name, x in named if x.dim() <= 1], "lr": 0.02, "hold_steps": 1},
    ]


def program(case: Case) -> list[Any]:
    """Train by a program drawn from the seed; returns everything that it has seen."""
    draws = case.draws
    dtype = draws.choice([torch.float32, torch.bfloat16, torch.float16])
    model = make_model(dtype, draws.choice([2, 3]), draws.random() < 0.3)
    if draws.random() < 0.3:
        model[NUM_BLOCKS + 1].weight = model[0].weight  # tied
    is_scaled = dtype == torch.float16 or draws.random() < 0.3
    params = groups_of(model, draws.random() < 0.5)
    ordinary = nn.Parameter(ones(3).to(dtype)) if draws.random() < 0.3 else None
    device_bytes = draws.choice([0, 0, 5000, 10**6])
    without_masters = dtype != torch.float16 and draws.random() < 0.2
    optimizers: list[Any] = [
        AdamOffloadOptimizer(
            params,
            lr=0.05,
            weight_decay=draws.choice([0.0, 0.1]),
            moments=draws.choice(["fp32", "fp32", "8bit"]),
            master_weights="none" if without_masters else "fp32",
            record_delta=draws.random() < 0.3,
            overlap=case.overlap,
            device_bytes=device_bytes if case.overlap else 0,
        )
    ]
    if ordinary is not None:
        optimizers.append(AdamOffloadOptimizer([ordinary], lr=0.1, overlap=case.overlap))
    manager = OptimManager(loss_scale=64 if is_scaled else None, loss_scale_steps=3)
    manager.add_optimizer(optimizers[0], bmt.lr_scheduler.Linear(optimizers[0], 0.05, 2, 20))
    for optimizer in optimizers[1:]:
        manager.add_optimizer(optimizer)
    seen: list[Any] = []
    kept: list[Any] = []
    for step in range(8):
        one_step(case, draws, step, model, manager, optimizers, ordinary, seen, kept)
    seen.append(values_of(model, optimizers[0]))
    seen.append([local_of(x).cpu() for x in kept])
    seen.append([manager.skipped_steps, manager.loss_scale, optimizers[0].param_groups[0]["lr"]])
    return seen


def one_step(
    case: Case,
    draws: random.Random,
    step: int,
    model: Any,
    manager: OptimManager,
    optimizers: list[Any],
    ordinary: nn.Parameter | None,
    seen: list[Any],
    kept: list[Any],
) -> None:
    num_micro = draws.choice([1, 1, 2, 3])
    defers, is_spoilt = draws.random() < 0.3, draws.random() < 0.15
    for number in range(num_micro):
        loss = loss_of(model, 10 * step + number) / num_micro
        if ordinary is not None:
            loss = loss + ordinary.float().square().sum()
        if is_spoilt and number == num_micro - 1:
            loss = loss * math.inf
        manager.backward(loss, reduce_gradients=not defers or number == num_micro - 1)
        seen.append(loss.detach())
    params = [x for group in optimizers[0].param_groups for x in group["params"]]
    what = draws.randrange(8)
    if what == 0:
        seen.append(manager.clip_grad_norm(params, draws.choice([0.01, 1e3])))
    elif what == 1:
        grad_of(params[3]).mul_(0.5)
    elif what == 2:
        params[2].grad = None
    manager.step()
    param = params[draws.randrange(len(params))]
    after = draws.randrange(12)
    if after == 0:
        seen.append(values_of(model, optimizers[0]))
    elif after == 1:
        with torch.no_grad():
            param.mul_(0.9)
    elif after == 2:
        with torch.no_grad():
            seen.append(loss_of(model, 100 + step))
    elif after == 3:
        kept.append(param.local)  # from now on the program can read it without asking
    elif after == 4:
        state = optimizers[0].state.get(param, {})
        kept.extend(local_of(x) for name, x in state.items() if name == "exp_avg")
    elif after == 5:
        saved = copy.deepcopy(manager.state_dict())
        weights = {name: x.clone() for name, x in model.state_dict().items()}
        model.load_state_dict(weights)
        manager.load_state_dict(saved)
    elif after == 6 and optimizers[0]._record_delta:
        # sums in another order where states are in other places
        deltas = optimizers[0].get_avg_delta(), optimizers[0].get_var_delta()
        seen.append([round(x, 12) for x in deltas])
    elif after == 7:
        seen.append(param.gather().detach().clone())
    elif after == 8:
        grad_of(params[1]).zero_() if params[1].grad is not None else None
    seen.append([x.cpu().clone() for x in map(local_of, kept)])
    manager.zero_grad(set_to_none=draws.random() < 0.6)


def compare(seeds: list[int]) -> None:
    for seed in seeds:
        draws = random.Random(seed + 1000 * bmt.rank())
        cycles = functools.partial(draws.choice, [0, 0, 4_000_000, 20_000_000])
        use_passage(LatePassage(world.current(), cycles))
        want = plain(program(Case(seed, overlap=False)))
        check_equal(plain(program(Case(seed))), want, f"seed {seed}:")


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("first", range(0, 16, 4))
def test_programs_see_the_same_values(first: int, world_size: int) -> None:
    """Bit for bit, whatever the program does and however late the update is."""
    run_ranks(compare, world_size, list(range(first, first + 4)), timeout=180)


# ---- states are not touched while they are on their way ----


class WatchedPassage(LatePassage):
    """As a device that goes on copying a load until the host has waited for it."""

    def __init__(self) -> None:
        super().__init__(world.current())
        self.sent: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self, load: Load, verdict: torch.Tensor | None) -> torch.Event | None:
        event = super().run(load, verdict)
        if self.is_beside:
            self._down.synchronize()  # for the values to compare with

        def keep(state: torch.Tensor) -> torch.Tensor:
            self.sent.append((state, state.clone()))
            return state

        for member in load:
            member.tensors.placed(keep)
        return event

    def wait(self) -> None:
        self.check()
        super().wait()
        self.sent.clear()

    def check(self) -> None:
        for state, value in self.sent:
            assert torch.equal(state, value), "written while it was on its way"


def written_states(run: Run) -> None:
    loss_of(run.model, 3)  # sends all up
    run.optimizer.state[run.param]["master"].mul_(2.0)


def written_slices(run: Run) -> None:
    loss_of(run.model, 3)
    run.optimizer.state[run.param]["master"].local.mul_(2.0)


def written_at_once(run: Run) -> None:
    run.optimizer.state[run.param]["master"].local.mul_(2.0)


def written_weights(run: Run) -> None:
    loss_of(run.model, 3)
    with torch.no_grad():
        run.param.mul_(0.5)
    run.optimizer.state_dict()  # masters follow


def loaded_states(run: Run) -> None:
    saved = copy.deepcopy(run.optimizer.state_dict())
    train(run, 3)
    loss_of(run.model, 3)
    run.optimizer.load_state_dict(saved)


def filled_states(run: Run) -> None:
    state = run.optimizer.sharded_state_dict()
    train(run, 3)
    loss_of(run.model, 3)
    for values in run.optimizer.begin_restore(state).values():
        local_of(values["master"]).zero_()


def kept_states(run: Run) -> None:
    kept = run.optimizer.state[run.param]["master"].local
    train(run, 3)
    kept.mul_(2.0)


def stepped_again(run: Run) -> None:
    loss_of(run.model, 3)
    train(run, 4)


STATE_WRITERS = [
    *(written_states, written_slices, written_at_once, written_weights),
    *(loaded_states, filled_states, kept_states, stepped_again),
]


def write_states(overlap: bool) -> None:
    for write in STATE_WRITERS:
        passage = WatchedPassage()
        use_passage(passage)
        model = make_model(torch.bfloat16, 3)
        optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.05, overlap=overlap)
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        run = Run(model, optimizer, manager, pathlib.Path())
        for step in range(2):
            train(run, step)
        write(run)
        passage.check()
        train(run, 5)
        optimizer.settle()
        assert not passage.sent, write


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_states_are_not_written_while_they_are_on_their_way(overlap: bool, world_size: int) -> None:
    """The device copies them when the program has long gone on."""
    run_ranks(write_states, world_size, overlap)


def write_ordinary_states() -> None:
    passage = WatchedPassage()
    use_passage(passage)
    param = nn.Parameter(ones(5).bfloat16())
    optimizer = AdamOffloadOptimizer([param], lr=0.05)
    for _ in range(3):
        param.grad = ones(5).bfloat16()
        optimizer.step()
        optimizer.state[param]["master"].mul_(2.0)
        passage.check()


def test_states_of_ordinary_parameters_are_the_programs_after_a_step() -> None:
    run_ranks(write_ordinary_states, 1)


# ---- what is hidden, and in which order ----


def hides(zero_level: int, use_checkpoint: bool) -> None:
    """Nothing of the library's own counts as memory that the program holds."""
    use_passage(LatePassage(world.current()))
    model = make_model(torch.bfloat16, zero_level, use_checkpoint)
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.05)
    manager = OptimManager()
    manager.add_optimizer(optimizer)
    run = Run(model, optimizer, manager, pathlib.Path())
    layouts = set()
    for step in range(4):
        train(run, step)
        assert not optimizer._held
        layouts.add(id(optimizer._layout))
    assert len(layouts) == 1, "states were moved, which a step must not do"
    model.state_dict()
    kept = run.param.local
    train(run, 4)
    assert optimizer._held == {id(run.param.storage_of)}
    del kept
    state = read_state(run, "exp_avg").local[:3]  # empty on a rank that has none of it
    train(run, 5)
    assert optimizer._held == {id(run.param.storage_of)}
    del state
    train(run, 6)
    assert not optimizer._held
    manager.backward(loss_of(model, 7))
    for _ in range(2):  # an update that is under way holds views of what it updates
        optimizer.step()
        assert not optimizer._held


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("zero_level", [2, 3])
def test_updates_of_ordinary_programs_are_hidden(
    zero_level: int, use_checkpoint: bool, world_size: int
) -> None:
    """All of them, but for those of which the program holds memory."""
    run_ranks(hides, world_size, zero_level, use_checkpoint, timeout=120)


class Watch(nn.Module):
    """Tells that a block begins."""

    def __init__(self, inner: nn.Module, tell: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self.tell = inner, tell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tell()
        y: torch.Tensor = self.inner(x)
        return y


def in_order() -> None:
    use_passage(LatePassage(world.current()))  # whose loads are shorter than a block
    torch.manual_seed(1)
    done: list[int] = []
    # made in another order than they are called in
    parts = [Watch(Layer(), lambda: done.append(sum(map(is_done, updates())))) for _ in range(5)]
    blocks = bmt.TransformerBlockList(bmt.Block(part, use_checkpoint=False) for part in parts[::-1])
    params = [param for part in parts for param in part.parameters()]
    optimizer = AdamOffloadOptimizer(params, lr=0.05)
    manager = OptimManager()
    manager.add_optimizer(optimizer)

    def updates() -> list[StreamedUpdate]:
        return optimizer._updates

    for _ in range(3):
        done.clear()
        manager.backward(blocks(ones(2, 3, DIM)).square().sum())
        manager.step()
        manager.zero_grad()
    assert done == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_block_waits_for_its_own_update_only(world_size: int) -> None:
    """Blocks are updated in the order in which the forward pass comes to them, and the gather of
    the next one, which waits for it, is not begun before a block runs.
    """
    run_ranks(in_order, world_size)


def hides_what_fits(num_blocks: float) -> None:
    """Ranks have room for different numbers of copies; the least counts."""
    found = []
    for overlap in (True, False):
        model = make_model(torch.bfloat16, 3)
        blocks = [model[place].up.weight.storage_of for place in range(1, NUM_BLOCKS + 1)]
        room = int(2 * blocks[0].layout.shard_numel * num_blocks)
        is_least = bmt.rank() == bmt.world_size() - 1
        world.current().services[memory_of] = Uncounted(room if is_least else 9 * room)
        optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.05, overlap=overlap)
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        run = Run(model, optimizer, manager, pathlib.Path())
        num_hidden = int(num_blocks) * overlap  # the last ones; the head takes the rest
        for step in range(3):
            train(run, step)
            late = [block.residence.is_late for block in blocks]
            assert late == [place >= NUM_BLOCKS - num_hidden for place in range(NUM_BLOCKS)]
        found.append(values_of(model, optimizer))
    check_same(*found)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("num_blocks", [0, 0.9, 1.9, 2.9])
def test_as_many_updates_are_hidden_as_copies_have_room(num_blocks: float, world_size: int) -> None:
    run_ranks(hides_what_fits, world_size, num_blocks)


class BrokenPassage(Passage):
    def run(self, load: Load, verdict: torch.Tensor | None) -> torch.Event | None:
        raise MemoryError("no memory for a load")


def fails() -> None:
    passage = BrokenPassage(world.current())
    use_passage(passage)
    run = start(pathlib.Path(), overlap=True, num_steps=0)
    with pytest.raises(MemoryError, match="no memory for a load"):
        train(run, 0)
        run.optimizer.settle()
    broken = pytest.raises(
        ParameterError, match="was broken off by MemoryError: weights and states"
    )
    for _ in range(2):
        with broken:
            run.optimizer.state_dict()
        with broken:
            run.model.state_dict()
        with broken:
            loss_of(run.model, 2)
        with broken:
            run.manager.step()


class InterruptedPassage(Passage):
    """Interrupted when a load has been updated, before the caller knows."""

    def run(self, load: Load, verdict: torch.Tensor | None) -> torch.Event | None:
        super().run(load, verdict)
        raise KeyboardInterrupt


def is_interrupted() -> None:
    use_passage(InterruptedPassage(world.current()))
    run = start(pathlib.Path(), overlap=True, num_steps=0)
    with pytest.raises(KeyboardInterrupt):
        train(run, 0)
        loss_of(run.model, 2)
    with pytest.raises(ParameterError, match="was broken off by KeyboardInterrupt"):
        loss_of(run.model, 2)


def test_an_interrupt_of_an_update_is_no_error_of_whoever_asks_next() -> None:
    run_ranks(is_interrupted, 1)


class ShortPassage(Passage):
    """Begins loads as soon as they are full, as on a GPU, and fails at the third."""

    def __init__(self) -> None:
        super().__init__(world.current())
        self.load_bytes, self.num_loads = 3000, 0

    def begin(self) -> None:
        self.is_beside = True

    def make_slots(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def run(self, load: Load, verdict: torch.Tensor | None) -> torch.Event | None:
        self.num_loads += 1
        if self.num_loads == 3:
            raise torch.OutOfMemoryError("no memory for a load")
        self.is_beside = False
        try:
            return super().run(load, verdict)
        finally:
            self.is_beside = True


def fails_in_the_step(overlap: bool, device_bytes: int) -> None:
    use_passage(ShortPassage())
    run = start(pathlib.Path(), overlap=overlap, num_steps=0, device_bytes=device_bytes)
    with pytest.raises(torch.OutOfMemoryError, match="no memory for a load"):
        train(run, 0)
    last: list[Any] = list(run.model.parameters())[-4:]  # of none of them an update has begun
    for param in [x for x in last if id(x.storage_of) not in run.optimizer._resident]:
        with pytest.raises(ParameterError, match="was broken off by OutOfMemoryError: weights and"):
            param.norm()
    with pytest.raises(ParameterError, match="was broken off"):
        run.optimizer.state_dict()


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("device_bytes", [0, 2000])
def test_values_of_before_a_step_do_not_pass_for_those_after_it(
    device_bytes: int, overlap: bool
) -> None:
    """Where an update fails whose successors have not begun."""
    run_ranks(fails_in_the_step, 1, overlap, device_bytes)


class FullPassage(Passage):
    def make_slots(self) -> None:
        raise torch.OutOfMemoryError("no memory for loads")


def has_no_memory(device_bytes: int) -> None:
    found = []
    for is_full in (False, True):
        run = start(pathlib.Path(), overlap=True, num_steps=0)
        run.optimizer = AdamOffloadOptimizer(
            run.model.parameters(), lr=0.05, device_bytes=device_bytes
        )
        loss_of(run.model, 0).backward()
        if is_full:
            use_passage(FullPassage(world.current()))
            full = AdamOffloadOptimizer(run.model.parameters(), lr=0.05, device_bytes=device_bytes)
            before = values_of(run.model, full)
            with pytest.raises(torch.OutOfMemoryError, match="no memory for loads"):
                full.step()
            check_same(values_of(run.model, full), before)
        run.optimizer.step()
        found.append(values_of(run.model, run.optimizer))
    check_same(*found)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("device_bytes", [0, 4000])
def test_a_step_without_memory_changes_nothing(device_bytes: int, world_size: int) -> None:
    """Neither states that are on the device nor step counts; the step can be taken later."""
    run_ranks(has_no_memory, world_size, device_bytes)


def test_an_error_of_an_update_comes_up_wherever_values_are_asked_for() -> None:
    """Again and again: no checkpoint can be taken of half a step."""
    run_ranks(fails, 1)


# ---- ranks of which each knows something else ----


def is_held_on_one_rank() -> None:
    """Of one block, of all but one, and of all."""
    for names in (["1.up"], ["1", "2", "4"], [""]):
        found = []
        for overlap in (False, True):
            run = start(pathlib.Path(), overlap=overlap, num_steps=1)
            kept = [
                param.local
                for name, param in run.model.named_parameters()
                if bmt.rank() == 0 and name.startswith(tuple(names))
            ]
            late = []
            for step in range(1, 5):
                train(run, step)
                late.append(
                    [run.model[place].up.weight.storage_of.residence.is_late for place in (1, 2, 3)]
                )
            assert late == 4 * [3 * [overlap]], "ranks gather in another order"
            copies = [x.clone() for x in kept]
            found.append(values_of(run.model, run.optimizer))
            for one, other in zip(kept, copies, strict=True):
                assert torch.equal(one, other), "held memory was written after the step"
        check_same(*found)


def test_memory_that_one_rank_alone_holds() -> None:
    """That rank alone waits; all gather in one order."""
    run_ranks(is_held_on_one_rank, 2)


def trains_one_stage() -> None:
    found = []
    for overlap in (False, True):
        torch.manual_seed(3)
        blocks = bmt.PipelineTransformerBlockList([Layer() for _ in range(4)])
        for name, param in blocks.named_parameters():
            param.requires_grad_(int(name.split(".")[0]) < 2)
        optimizer = AdamOffloadOptimizer(blocks.parameters(), lr=0.05, overlap=overlap)
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        for step in range(3):
            manager.zero_grad()
            torch.manual_seed(step)
            manager.backward(blocks(torch.randn(4, 3, DIM, requires_grad=True)).square().sum())
            manager.step()
        found.append({name: local_of(x).clone() for name, x in blocks.named_parameters()})
    check_same(*found)


def test_a_stage_of_a_pipeline_that_trains_nothing() -> None:
    """It has no copies of gradients, but agrees with the others about their room."""
    run_ranks(trains_one_stage, 2, init={"pipe_size": 2})


# ---- what a step has changed ----


def copies_changes() -> None:
    model = make_model(DTYPE, 3)
    optimizer = AdamOffloadOptimizer(
        model.parameters(), lr=0.05, record_delta=True, device_bytes=4000
    )
    loss_of(model, 0).backward()
    optimizer.step()
    memo: dict[int, Any] = {}
    copy.deepcopy(model, memo)
    other = copy.deepcopy(optimizer, memo)
    want = optimizer.get_avg_delta(), optimizer.get_var_delta()
    assert want[1] > 0
    assert (other.get_avg_delta(), other.get_var_delta()) == want


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_copy_knows_what_the_last_step_has_changed(world_size: int) -> None:
    run_ranks(copies_changes, world_size)


# ---- where states are ----


def takes_too_much(moments: str, host_bytes: int) -> None:
    model = make_model(torch.bfloat16, 3)
    optimizer = AdamOffloadOptimizer(model.parameters(), moments=moments, host_bytes=host_bytes)
    loss_of(model, 0).backward()
    with pytest.raises(ConfigurationError, match="of host memory on each rank, host_bytes allows"):
        optimizer.step()
    assert not optimizer.state, "states were made"


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_that_the_host_has_no_room_for_are_refused(world_size: int) -> None:
    """On all ranks, before there are any, in each form that takes too much; and only then."""
    count = sum(x.numel() for x in make_plain().parameters())
    exact, small = 12 * count // world_size, 6 * count // world_size
    run_ranks(takes_too_much, world_size, "fp32", exact - 1)
    run_ranks(takes_too_much, world_size, "8bit", small)
    run_ranks(fits, world_size, "fp32", exact + 12 * 64 * 30)
    run_ranks(fits, world_size, "8bit", exact)


def in_files(folder: pathlib.Path) -> None:
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
        model = make_model(DTYPE, 3)
        optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.05, **places)
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        run = Run(model, optimizer, manager, folder)
        for step in range(3):
            train(run, step)
        read_state(run, "exp_avg").local.mul_(0.5)
        train(run, 3)
        found += [values_of(model, optimizer), copied(run)]
        assert bool(optimizer._filed) == bool(places)
    for place in (2, 4):
        check_equal(plain(found[place : place + 2]), plain(found[:2]), "in files")
    assert not list(folder.iterdir()), "files are left"


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_in_files(world_size: int, tmp_path: pathlib.Path) -> None:
    run_ranks(in_files, world_size, tmp_path)


def has_no_folder(
    folder: pathlib.Path, words: str, error: type[Exception] = ConfigurationError
) -> None:
    model = make_model(DTYPE, 3)
    optimizer = AdamOffloadOptimizer(model.parameters(), host_bytes=6000, folder=folder)
    loss_of(model, 0).backward()
    with pytest.raises(error, match=words):
        optimizer.step()


@pytest.mark.parametrize("world_size", [1, 2])
def test_folders_that_cannot_be_used(world_size: int, tmp_path: pathlib.Path) -> None:
    """One that is not there, and a full disk: on all ranks, before there are any states."""
    run_ranks(has_no_folder, world_size, tmp_path / "none", "the folder cannot be used: .*No such")
    run_ranks(on_a_full_disk, world_size, tmp_path)


def on_one_full_disk(folder: pathlib.Path, host_bytes: int | None) -> None:
    """Or where one rank alone has a limit."""
    usage = shutil.disk_usage(folder)
    full = mock.patch.object(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    model = make_model(DTYPE, 3)
    before = {name: local_of(x).clone() for name, x in model.named_parameters()}
    optimizer = AdamOffloadOptimizer(
        model.parameters(), host_bytes=6000 if bmt.rank() else host_bytes, folder=folder
    )
    loss_of(model, 0).backward()
    with (
        pytest.raises(ConfigurationError, match="that the rest of all ranks here takes"),
        full if bmt.rank() else contextlib.nullcontext(),
    ):
        optimizer.step()
    assert not optimizer.state
    for name, param in model.named_parameters():
        assert torch.equal(local_of(param), before[name])


@pytest.mark.parametrize("host_bytes", [6000, None])
def test_a_host_that_has_no_room_is_told_of_on_all_ranks(
    host_bytes: int | None, tmp_path: pathlib.Path
) -> None:
    """Before any of them takes the step."""
    run_ranks(on_one_full_disk, 2, tmp_path, host_bytes)


def on_a_full_disk(folder: pathlib.Path) -> None:
    usage = shutil.disk_usage(folder)
    with mock.patch.object(shutil, "disk_usage", lambda _: usage._replace(free=1000)):
        has_no_folder(folder, "has 0.0 GiB of the 0.0 that the rest of all ranks here takes")
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", mock.Mock(side_effect=full)):
        has_no_folder(folder, "No space left", OSError)


def fits(moments: str, host_bytes: int) -> None:
    model = make_model(torch.bfloat16, 3)
    optimizer = AdamOffloadOptimizer(model.parameters(), moments=moments, host_bytes=host_bytes)
    loss_of(model, 0).backward()
    optimizer.step()
    assert len(optimizer.state) == len(list(model.parameters()))


def places_itself() -> None:
    """Without a GPU everything stays in host memory; the values are those of any placement."""
    found = []
    for device_bytes in ("auto", 0):
        model = make_model(torch.bfloat16, 3)
        optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.05, device_bytes=device_bytes)
        manager = OptimManager()
        manager.add_optimizer(optimizer)
        run = Run(model, optimizer, manager, pathlib.Path())
        for step in range(3):
            train(run, step)
        found.append(values_of(model, optimizer))
    check_same(*found)


@pytest.mark.parametrize("world_size", [1, 2])
def test_states_place_themselves(world_size: int) -> None:
    run_ranks(places_itself, world_size)


def parts_ways(name: str) -> None:
    model = make_model(torch.bfloat16, 3)
    settings = {"overlap": bmt.rank() == 0} if name == "overlap" else {"device_bytes": bmt.rank()}
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=0.05, **settings)
    with pytest.raises(RanksPartedError, match=name):
        loss_of(model, 0).backward()
        optimizer.step()
        loss_of(model, 1)


@pytest.mark.parametrize("name", ["overlap", "device_bytes"])
def test_ranks_that_hide_otherwise_are_told(name: str) -> None:
    """They would gather in another order, or have states in other places."""
    run_ranks(parts_ways, 2, name)
