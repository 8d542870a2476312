"""BMTrain's import paths in programs of its users, against plain PyTorch; its gradients of
collectives against its formulas.
"""

from __future__ import annotations

import copy
import math
import pathlib
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError, ConfigurationError, ParameterError

# --------------------------------------------------------------------------------------------------
# gradients of collectives


def of_rank(rank: int, *, zero: bool = False) -> torch.Tensor:
    """A rank's input (4, 3); the first row is the same on all ranks, the last may be 0 on the
    first.
    """
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    x[0] = 1.5
    if zero and rank == 0:
        x[3] = 0
    return x


def weight_of(rank: int, *shape: int) -> torch.Tensor:
    """Makes each rank's loss a different one."""
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(50 + rank), dtype=torch.float64
    )


def local_gradients() -> None:
    """Values of all ranks, gradients as BMTrain gives them; backward on one rank alone waits for
    nobody.
    """
    rank, size = bmt.rank(), bmt.world_size()
    everyone = torch.stack([of_rank(place, zero=True) for place in range(size)])
    own, weight = everyone[rank], weight_of(rank, 4, 3)
    others = torch.cat([everyone[:rank], everyone[rank + 1 :]]).prod(0)
    high, low = everyone.amax(0), everyone.amin(0)
    cases = {
        "sum": (everyone.sum(0), weight),
        "avg": (everyone.mean(0), weight / size),
        "prod": (everyone.prod(0), weight * others),
        "max": (high, weight * (own == high)),
        "min": (low, weight * (own == low)),
    }
    for op, (value, gradient) in cases.items():
        x = own.clone().requires_grad_()
        out = bmt.distributed.all_reduce(x, op, local_gradient=True)
        models.assert_same(out.detach(), value, op, 1e-12)
        if rank == size - 1:
            (out * weight).sum().backward()
            assert x.grad is not None
            models.assert_same(x.grad, gradient, op, 1e-12)
    x, weight = own.clone().requires_grad_(), weight_of(rank, size, 4, 3)
    out = bmt.distributed.all_gather(x, local_gradient=True)
    models.assert_same(out.detach(), everyone, "all_gather", 1e-12)
    if rank == 0:
        (out * weight).sum().backward()
        assert x.grad is not None
        models.assert_same(x.grad, weight[rank], "all_gather", 1e-12)
    loss = own.sum().requires_grad_()
    bmt.sum_loss(loss, bmt.config["comm"], local_gradient=True).backward()
    assert loss.grad is not None and loss.grad.item() == pytest.approx(1 / size)


def local_broadcast() -> None:
    """The sum of all ranks' gradients on every rank, also where only some ranks' inputs want
    one.
    """
    rank, size = bmt.rank(), bmt.world_size()
    total = torch.stack([weight_of(place, 4, 3) for place in range(size)]).sum(0)
    for root in range(size):
        for wanting in ({root}, {size - 1}, set(range(size))):
            x = of_rank(rank).requires_grad_(rank in wanting)
            out = bmt.distributed.broadcast(x, root, local_gradient=True)
            models.assert_same(out.detach(), of_rank(root), "broadcast", 1e-12)
            (out * weight_of(rank, 4, 3)).sum().backward()
            assert (x.grad is not None) == (rank in wanting)
            if x.grad is not None:
                models.assert_same(x.grad, total, "broadcast", 1e-12)


def complete_by_default() -> None:
    """Without the keyword: the gradients of the sum of all ranks' losses, so a mean over ranks
    trains as one process does.
    """
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    model = bmt.BMTrainModelWrapper(copy.deepcopy(plain))
    inputs = torch.randn(6, 3, generator=torch.Generator().manual_seed(5))
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    mean = bmt.sum_loss(model(inputs.chunk(bmt.world_size())[bmt.rank()]).square().mean())
    whole = plain(inputs).square().mean()
    models.assert_same(mean.detach(), whole.detach(), "sum_loss")
    manager.backward(mean)
    whole.backward()
    models.assert_same_dicts(
        models.full_gradients(model), models.plain_gradients(plain), "backward through sum_loss"
    )
    x = of_rank(bmt.rank()).requires_grad_()
    bmt.distributed.all_reduce(x).sum().backward()
    assert x.grad is not None and x.grad.eq(bmt.world_size()).all()
    bad: Any = 1
    for call in (
        bmt.distributed.all_reduce,
        bmt.distributed.all_gather,
        lambda x, **kw: bmt.distributed.broadcast(x, 0, **kw),
    ):
        with pytest.raises(ConfigurationError, match="local_gradient=1"):
            call(x, local_gradient=bad)


def collectives_of_both_kinds() -> None:
    local_gradients()
    local_broadcast()
    complete_by_default()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_gradients_of_collectives(world_size: int) -> None:
    run_ranks(collectives_of_both_kinds, world_size)


# --------------------------------------------------------------------------------------------------
# whole programs

VOCAB, DIM, LAYERS, ROWS, LENGTH = 17, 12, 3, 6, 5


class PlainLinear(nn.Module):
    """A linear map without bias, scaled as CPM's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight) / math.sqrt(DIM)


class PlainEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, DIM))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)

    def projection(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class Layer(nn.Module):
    """A layer of a language model, whose linear maps are of the kind that `make` gives."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if bmt.is_initialized():
            bmt.inspect.record_tensor(hidden, "hidden")
        return x + self.second(torch.tanh(hidden)) * mask


class PlainModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = PlainEmbedding()
        self.layers = nn.ModuleList(Layer(PlainLinear) for _ in range(LAYERS))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, mask = self.embedding(ids), (ids > 0).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embedding.projection(x)


def cpm_model(use_checkpoint: bool = True, zero_level: int = 3) -> nn.Module:
    """The same model as a program of CPM-Live writes it, by BMTrain's old paths."""
    from bmtrain.block_layer import CheckpointBlock, TransformerBlockList  # type: ignore[import-not-found]
    from bmtrain.layer import DistributedModule  # type: ignore[import-not-found]
    from bmtrain.parameter import DistributedParameter, ParameterInitializer  # type: ignore[import-not-found]

    normal = ParameterInitializer(nn.init.normal_, mean=0.0, std=1.0)

    class Linear(DistributedModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = DistributedParameter(torch.empty(DIM, DIM), init_method=normal)

        forward = PlainLinear.forward

    class Embedding(DistributedModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.weight = DistributedParameter(torch.empty(VOCAB, DIM), init_method=normal)

        forward, projection = PlainEmbedding.forward, PlainEmbedding.projection

    class Model(DistributedModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.embedding = Embedding()
            self.layers = TransformerBlockList(
                [CheckpointBlock(Layer(Linear), use_checkpoint, zero_level) for _ in range(LAYERS)]
            )

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.embedding.projection(
                self.layers(self.embedding(ids), (ids > 0).unsqueeze(-1))
            )

    return Model()


def data(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets (ROWS, LENGTH) of all ranks."""
    drawn = torch.randint(
        0, VOCAB, (2, ROWS, LENGTH), generator=torch.Generator().manual_seed(step)
    )
    return drawn[0], drawn[1]


def own(x: torch.Tensor) -> torch.Tensor:
    return x.chunk(bmt.world_size())[bmt.rank()]


def plain_twin(model: nn.Module) -> PlainModel:
    twin = PlainModel()
    twin.load_state_dict(model.state_dict())
    return twin


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


def train_as_cpm(folder: str) -> None:
    """Initialise, train, inspect, save and go on in a fresh model, as CPM-Bee's program does."""
    from bmtrain.global_var import config  # type: ignore[import-not-found]
    from bmtrain.optim.adam_offload import AdamOffloadOptimizer  # type: ignore[import-not-found]
    from bmtrain.optim.optim_manager import OptimManager, check_overflow, grad_rescale  # type: ignore[import-not-found]
    from bmtrain.param_init import grouped_parameters, init_parameters  # type: ignore[import-not-found]
    from bmtrain.store import allgather_objects, load, save  # type: ignore[import-not-found]
    from bmtrain.synchronize import gather_result, sum_loss, synchronize, wait_loader  # type: ignore[import-not-found]

    from bmtrain import inspect, nccl

    model = cpm_model()
    init_parameters(model)
    plain = plain_twin(model)
    assert {name for name, _ in grouped_parameters(model)} == {None}
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=1e-2, weight_decay=0.01)
    scheduler = bmt.lr_scheduler.Noam(
        optimizer, start_lr=1e-2, warmup_iter=2, end_iter=None, num_iter=0
    )
    manager = OptimManager(loss_scale=256, loss_scale_factor=2, loss_scale_steps=2)
    manager.add_optimizer(optimizer, scheduler)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    plain_scheduler = bmt.lr_scheduler.Noam(reference, 1e-2, 2, None)
    for step in range(4):
        ids, targets = data(step)
        wait_loader()
        manager.zero_grad()
        logits = model(own(ids))
        loss = loss_func(logits.view(-1, VOCAB), own(targets).reshape(-1).long())
        global_loss = sum_loss(loss).item()
        manager.backward(loss)
        check_overflow(optimizer.param_groups)
        norm = manager.clip_grad_norm(optimizer.param_groups, 0.5, norm_type=2)
        manager.step()
        reference.zero_grad()
        whole = cross_entropy(plain(ids), targets)
        whole.backward()
        models.assert_same(norm, nn.utils.clip_grad_norm_(plain.parameters(), 0.5), "norm")
        reference.step()
        plain_scheduler.step()
        assert global_loss == pytest.approx(whole.item(), rel=1e-5)
        synchronize()
    models.assert_same_dicts(model.state_dict(), plain.state_dict(), "trained")
    rows = inspect.inspect_model(model, "*layers*")
    assert len(rows) == 2 * LAYERS and "layers.0.first.weight" in inspect.format_summary(rows)
    assert allgather_objects({"rank": bmt.rank()}) == [
        {"rank": rank} for rank in range(bmt.world_size())
    ]
    assert (
        gather_result(torch.ones(1)).numel()
        == nccl.commCount(config["comm"])
        == config["world_size"]
    )
    grads = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    grad_rescale(optimizer.param_groups, 2.0)
    for grad, param in zip(
        grads, (p for p in model.parameters() if p.grad is not None), strict=True
    ):
        assert param.grad is not None and torch.equal(torch.as_tensor(param.grad), grad / 2)
    file = str(pathlib.Path(folder, "model.pt"))
    save(model, file)
    second = cpm_model(zero_level=2)
    load(second, file)
    models.assert_same_dicts(second.state_dict(), plain.state_dict(), "loaded")
    bad = [param for param in model.parameters() if param.grad is not None]
    with torch.no_grad():
        if bmt.rank() == 0:  # it has elements of every parameter
            bad[0].grad.local.fill_(torch.inf)  # type: ignore[union-attr]
    with pytest.raises(OverflowError):
        check_overflow(optimizer.param_groups)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_program_of_cpm(world_size: int, tmp_path: pathlib.Path) -> None:
    run_ranks(train_as_cpm, world_size, str(tmp_path))


def plain_hidden(model: PlainModel, ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the layers record, and the logits."""
    seen: list[torch.Tensor] = []
    for layer in model.layers:
        layer.first.register_forward_hook(lambda module, args, out: seen.append(out))  # type: ignore[union-attr]
    logits = model(ids)
    return seen, logits


def distil(use_checkpoint: bool, zero_level: int) -> None:
    """A loss on the hidden states of student and teacher, taken from the inspector as BMCook
    does.
    """
    torch.manual_seed(3)
    student, teacher = cpm_model(use_checkpoint, zero_level), cpm_model()
    bmt.init_parameters(student)
    bmt.init_parameters(teacher)
    plain, plain_teacher = plain_twin(student), plain_twin(teacher)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(torch.optim.SGD(student.parameters(), lr=0.1))
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(2):
        ids, targets = data(step)
        with bmt.inspect.inspect_tensor() as inspector:
            logits = student(own(ids))
            num_own = len(inspector._summary)
            with torch.no_grad():
                teacher(own(ids))
        records = inspector._summary
        assert [record["summary_name"] for record in inspector.summary] == [
            f"{number}.hidden" for number in range(2 * LAYERS)
        ]
        assert (
            num_own == LAYERS
            and len(records) == 2 * LAYERS
            and records[0]["name"] == "hidden"
            and records[0]["group"] is None
        )
        ours, theirs = records[:LAYERS], records[LAYERS:]
        assert all(x["requires_grad"] for x in ours) and not any(x["requires_grad"] for x in theirs)
        loss = cross_entropy(logits, own(targets))
        for mine, his in zip(ours, theirs, strict=True):
            loss = loss + F.mse_loss(mine["tensor"], his["tensor"])
        manager.zero_grad()
        manager.backward(loss)
        found, plain_logits = plain_hidden(plain, ids)
        wanted, _ = plain_hidden(plain_teacher, ids)
        whole = cross_entropy(plain_logits, targets) + sum(
            F.mse_loss(x, y.detach()) for x, y in zip(found, wanted, strict=True)
        )
        found[0].retain_grad()
        reference.zero_grad()
        whole.backward()
        models.assert_same(records[0]["tensor"].detach(), own(found[0]).detach(), "hidden")
        assert records[0]["tensor"].grad is not None and found[0].grad is not None
        models.assert_same(records[0]["tensor"].grad, own(found[0].grad), "gradient of hidden")
        models.assert_same_dicts(
            models.full_gradients(student), models.plain_gradients(plain), "distilled"
        )
        manager.step()
        reference.step()
        assert len(inspector.get_summary()) == 2 * LAYERS
    models.assert_same_dicts(student.state_dict(), plain.state_dict(), "after training")


def distil_all_ways() -> None:
    for use_checkpoint in (False, True):
        for zero_level in (2, 3):
            distil(use_checkpoint, zero_level)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_program_of_bmcook(world_size: int) -> None:
    run_ranks(distil_all_ways, world_size)


class Delta(nn.Module):
    """A low-rank addition to a linear map."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.down(x))


def add_deltas(model: nn.Module) -> list[nn.Parameter]:
    """Put a delta beside the first map of each layer by replacing its `forward`, and freeze
    everything else.
    """
    for param in model.parameters():
        param.requires_grad_(False)
    added: list[nn.Parameter] = []
    for number, layer in enumerate(model.layers):  # type: ignore[arg-type]
        module = layer._module if isinstance(layer, bmt.block_layer.CheckpointBlock) else layer
        torch.manual_seed(number)
        delta, original = Delta(), module.first.forward
        module.first.delta = delta
        module.first.forward = lambda x, original=original, delta=delta: original(x) + delta(x)
        added.extend(delta.parameters())
    return added


def tune_deltas() -> None:
    """OpenDelta's way, with BMTrain's wrapper, against the same in plain PyTorch."""
    from bmtrain.wrapper import BMTrainModelWrapper  # type: ignore[import-not-found]

    torch.manual_seed(1)
    plain = PlainModel()
    for param in plain.parameters():
        nn.init.normal_(param)
    model = BMTrainModelWrapper(copy.deepcopy(plain))
    added = add_deltas(plain)
    add_deltas(model)
    model = BMTrainModelWrapper(model)
    assert type(model.layers[0]._module) is not bmt.Block and isinstance(model.layers[0], bmt.Block)
    trained = [param for param in model.parameters() if param.requires_grad]
    assert len(trained) == len(added) == 2 * LAYERS
    optimizer = bmt.optim.AdamOptimizer(trained, lr=1e-2)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer, bmt.lr_scheduler.NoDecay(optimizer, 1e-2, 0, None))
    reference = torch.optim.AdamW(added, lr=1e-2, weight_decay=0.0)
    for step in range(3):
        ids, targets = data(step)
        manager.zero_grad()
        manager.backward(cross_entropy(model(own(ids)), own(targets)))
        manager.step()
        reference.zero_grad()
        cross_entropy(plain(ids), targets).backward()
        reference.step()
    models.assert_same_dicts(model.state_dict(), plain.state_dict(), "tuned", 1e-4)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_program_of_opendelta(world_size: int) -> None:
    run_ranks(tune_deltas, world_size)


# --------------------------------------------------------------------------------------------------
# single names


def states_of_both_libraries() -> None:
    """The manager's state has BMTrain's keys and kinds of values; a state that BMTrain wrote is
    read.
    """
    torch.manual_seed(0)
    model = bmt.Block(nn.Linear(3, 2))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    manager = bmt.optim.OptimManager(loss_scale=64, loss_scale_steps=3)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.Noam(optimizer, 0.1, 1, None))
    for _ in range(4):
        manager.zero_grad()
        manager.backward(model(torch.ones(1, 3)).square().mean())
        manager.step()
    state = manager.state_dict(gather_opt=True)
    assert {"optimizers", "lr_schedulers", "loss_scale", "loss_scale_enabled"} <= set(state)
    assert state["loss_scale"] == 128.0 and state["loss_scale_enabled"] is True
    assert state["lr_schedulers"] == [
        {"start_lr": 0.1, "warmup_iter": 1, "end_iter": None, "num_iter": 4}
    ]
    unscaled = bmt.optim.OptimManager().state_dict()
    assert unscaled["loss_scale"] == 1 and unscaled["loss_scale_enabled"] is False
    theirs = {
        key: state[key]
        for key in ("optimizers", "lr_schedulers", "loss_scale", "loss_scale_enabled")
    }
    for saved, good_steps in (
        (state, 1),
        (theirs, 0),
        (theirs | {"loss_scale": {"value": 128.0, "good_steps": 2}}, 2),
    ):
        fresh = bmt.optim.OptimManager(loss_scale=1, loss_scale_steps=3)
        fresh.add_optimizer(optimizer, bmt.lr_scheduler.Noam(optimizer, 0.5, 1, 7))
        fresh.load_state_dict(saved)
        assert (
            fresh.loss_scale == 128.0
            and fresh._scale is not None
            and fresh._scale.good_steps == good_steps
        )
        assert fresh.lr_schedulers[0].num_iter == 4
    kept = bmt.optim.OptimManager(loss_scale=8)
    kept.load_state_dict(unscaled)
    assert kept.loss_scale == 8  # the state has no scale
    with pytest.raises(CheckpointError, match="optimizers"):
        kept.load_state_dict(state)


def written_config() -> None:
    layer = bmt.BMTrainModelWrapper(nn.Linear(2, 2))
    for value in (False, True):
        bmt.config["save_param_to_cpu"] = value
        assert bmt.global_var.config["save_param_to_cpu"] is value
        assert {x.device for x in layer.state_dict().values()} == {
            torch.device("cpu") if value else bmt.device()
        }
    for key, bad in (("save_param_to_cpu", 1), ("zero_level", 2), ("rank", 0), ("no_such", 1)):
        with pytest.raises(ConfigurationError, match=key):
            bmt.config[key] = bad
    assert (
        bmt.config["zero_level"] == 2
        and bmt.config["num_micro_batches"] == bmt.config["micros"] == 1
    )


def stored_objects() -> None:
    from bmtrain.param_init import init_distributed_parameter, iterate_parameters
    from bmtrain.parameter import OpAllGather
    from bmtrain.store import _save_to_rank0, allgather_object, broadcast_object

    from bmtrain.utils import tp_split_tensor

    rank, size, comm = bmt.rank(), bmt.world_size(), bmt.config["comm"]
    assert allgather_object(rank, comm) == list(range(size))
    assert broadcast_object({"of": rank}, comm, src=size - 1) == {"of": size - 1}
    with pytest.raises(ConfigurationError, match="src="):
        broadcast_object(1, comm, src=size)
    with pytest.raises(ConfigurationError, match="communicator"):
        broadcast_object(1, None)
    model = cpm_model()
    bmt.init_parameters(model)
    state, kept = model.state_dict(), _save_to_rank0(model)
    assert list(kept) == (list(state) if rank == 0 else [])
    models.assert_same_dicts(dict(kept), state if rank == 0 else {}, "_save_to_rank0", 0)
    given = OrderedDict(other=torch.zeros(1))
    assert _save_to_rank0(model, given, "part.") is given
    assert list(given) == ["other", *(f"part.{name}" for name in kept)]
    weight = model.embedding.get_parameter("weight")  # type: ignore[union-attr]
    models.assert_same(
        OpAllGather.apply(weight).detach(), state["embedding.weight"], "OpAllGather", 0
    )
    with pytest.raises(ParameterError, match="OpAllGather"):
        OpAllGather.apply(torch.ones(2))
    assert [*iterate_parameters(model.embedding)] == [weight] and not [
        *iterate_parameters(model.layers[0])  # type: ignore[index]
    ]
    init_distributed_parameter([nn.Parameter(torch.ones(1)), *model.parameters()])
    assert all(not torch.equal(new, state[name]) for name, new in model.state_dict().items())
    assert tp_split_tensor(torch.arange(6).view(2, 3), 1).shape == (2, 3)


def single_names() -> None:
    states_of_both_libraries()
    written_config()
    stored_objects()


@pytest.mark.parametrize("world_size", [1, 2])
def test_single_names(world_size: int) -> None:
    run_ranks(single_names, world_size, init={"zero_level": 2})


def split_tensor() -> torch.Tensor:
    from bmtrain.utils import tp_split_tensor

    whole = torch.arange(8).view(2, 4)
    with pytest.raises(ConfigurationError, match="tp_size=2"):
        tp_split_tensor(torch.ones(3), 0)
    assert torch.equal(tp_split_tensor(whole, 1), tp_split_tensor(whole, -1))
    return tp_split_tensor(whole, 1)


def test_a_tensor_is_split_over_tensor_ranks() -> None:
    assert torch.equal(
        torch.cat(run_ranks(split_tensor, 2, init={"tp_size": 2}), 1), torch.arange(8).view(2, 4)
    )


def positions() -> list[Any]:
    """By position as in 1.0.1."""
    bmt.init_distributed("env://", 5, 2, 4, 1, zero_level=2, device="cpu")
    return [
        bmt.config[key] for key in ("pipe_size", "pipe_enabled", "micros", "tp_size", "zero_level")
    ]


def test_arguments_by_position() -> None:
    assert run_ranks(positions, 2, join=False) == [[2, True, 4, 1, 2]] * 2


def old_loss_scale() -> None:
    """CPM-Live's programs of 0.1.x give factor and steps to `init_distributed`, and "inf" to
    `clip_grad_norm`.
    """
    torch.manual_seed(0)
    model = bmt.Block(nn.Linear(3, 2))
    optimizer = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.0, scale=32)
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.loss_scale(model(torch.ones(1, 3)).square().mean()).backward()
        largest = (
            max(
                float(x.abs().max()) for x in models.full_gradients(model).values() if x is not None
            )
            / optimizer.scale
        )
        norm_type: Any = "inf"
        norm = bmt.optim.clip_grad_norm(
            optimizer.param_groups, 1e9, scale=optimizer.scale, norm_type=norm_type
        )
        assert float(norm) == pytest.approx(largest)
        bmt.optim_step(optimizer)
    assert optimizer.scale == 32 * 8**2
    assert bmt.config["loss_scale_factor"] == 8 and bmt.config["loss_scale_steps"] == 2


def test_loss_scale_of_old_programs() -> None:
    run_ranks(old_loss_scale, 2, init={"loss_scale_factor": 8, "loss_scale_steps": 2})
