"""BMTrain's import paths in programs of its users, against plain PyTorch; its gradients of
collectives against its formulas.
"""

import copy
import functools
import importlib
import math
import pathlib
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks import models
from tests.ranks.models import own
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError, ConfigurationError, ParameterError

# -- gradients of collectives


def drawn(seed, *shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


@on_ranks(3)
def test_gradients_of_collectives():
    """Values of all ranks, gradients as BMTrain gives them; backward on one rank alone waits for
    nobody. The first row is the same on all ranks, the last is 0 on the first.
    """
    rank, size = bmt.rank(), bmt.world_size()
    everyone = torch.stack([drawn(place, 4, 3) for place in range(size)])
    everyone[:, 0], everyone[0, 3] = 1.5, 0
    own, weight = everyone[rank], drawn(50 + rank, 4, 3)
    high, low = everyone.amax(0), everyone.amin(0)
    others = torch.cat([everyone[:rank], everyone[rank + 1 :]])
    gathered = drawn(60 + rank, size, 4, 3)
    cases = {
        "sum": (everyone.sum(0), weight),
        "avg": (everyone.mean(0), weight / size),
        "prod": (everyone.prod(0), weight * others.prod(0)),
        "max": (high, weight * (own == high)),
        "min": (low, weight * (own == low)),
        "gather": (everyone, gathered[rank]),
    }
    for op, (value, gradient) in cases.items():
        x = own.clone().requires_grad_()
        if op == "gather":
            out, weight = bmt.distributed.all_gather(x, local_gradient=True), gathered
        else:
            out = bmt.distributed.all_reduce(x, op, local_gradient=True)
        models.assert_same(out.detach(), value, op, 1e-12)
        if rank == size - 1:
            (out * weight).sum().backward()
            models.assert_same(x.grad, gradient, op, 1e-12)
    loss = own.sum().requires_grad_()
    bmt.sum_loss(loss, bmt.config["comm"], local_gradient=True).backward()
    assert grad_of(loss).item() == pytest.approx(1 / size)
    # broadcast: the sum of all ranks' gradients on every rank whose input wants one
    total = sum(drawn(50 + place, 4, 3) for place in range(size))
    for root in range(size):
        for wanting in ({root}, {size - 1}, set(range(size))):
            x = own.clone().requires_grad_(rank in wanting)
            out = bmt.distributed.broadcast(x, root, local_gradient=True)
            models.assert_same(out.detach(), everyone[root], "broadcast", 1e-12)
            (out * drawn(50 + rank, 4, 3)).sum().backward()
            want = {"x": total if rank in wanting else None}
            models.assert_same_dicts({"x": x.grad}, want, "broadcast", 1e-12)
    x = own.clone().requires_grad_()
    bmt.distributed.all_reduce(x).sum().backward()
    assert grad_of(x).eq(size).all(), "complete without the keyword"


# -- whole programs

VOCAB, DIM, LAYERS, ROWS, LENGTH = 17, 12, 3, 6, 5


class PlainLinear(nn.Module):
    """A linear map without bias, scaled as CPM's."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(DIM, DIM))

    def forward(self, x):
        return F.linear(x, self.weight) / math.sqrt(DIM)


class PlainEmbedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(VOCAB, DIM))

    def forward(self, ids):
        return F.embedding(ids, self.weight)

    def projection(self, x):
        return F.linear(x, self.weight)


class Layer(nn.Module):
    """A layer of a language model, whose linear maps are of the kind that `make` gives."""

    def __init__(self, make):
        super().__init__()
        self.first, self.second = make(), make()

    def forward(self, x, mask):
        hidden = self.first(x)
        if bmt.is_initialized():
            bmt.inspect.record_tensor(hidden, "hidden")
        return x + self.second(torch.tanh(hidden)) * mask


class PlainModel(nn.Module):
    """The twin of a model in one process."""

    def __init__(self, model):
        super().__init__()
        self.embedding = PlainEmbedding()
        self.layers = nn.ModuleList(Layer(PlainLinear) for _ in range(LAYERS))
        self.load_state_dict(model.state_dict())

    def forward(self, ids):
        x, mask = self.embedding(ids), (ids > 0).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.embedding.projection(x)


def cpm_model(use_checkpoint=True, zero_level=3):
    """The same model as a program of CPM-Live writes it, by BMTrain's old paths."""
    from bmtrain.block_layer import CheckpointBlock, TransformerBlockList  # type: ignore[import-not-found]
    from bmtrain.layer import DistributedModule  # type: ignore[import-not-found]
    from bmtrain.parameter import DistributedParameter, ParameterInitializer  # type: ignore[import-not-found]

    normal = ParameterInitializer(nn.init.normal_, mean=0.0, std=1.0)

    class Linear(DistributedModule):  # type: ignore[misc]
        def __init__(self, rows=DIM):
            super().__init__()
            self.weight = DistributedParameter(torch.empty(rows, DIM), init_method=normal)

        forward = PlainLinear.forward

    class Embedding(Linear):
        forward, projection = PlainEmbedding.forward, PlainEmbedding.projection

    class Model(DistributedModule):  # type: ignore[misc]
        def __init__(self):
            super().__init__()
            self.embedding = Embedding(VOCAB)
            self.layers = TransformerBlockList(
                [CheckpointBlock(Layer(Linear), use_checkpoint, zero_level) for _ in range(LAYERS)]
            )

        def forward(self, ids):
            mask = (ids > 0).unsqueeze(-1)
            return self.embedding.projection(self.layers(self.embedding(ids), mask))

    model = Model()
    bmt.init_parameters(model)
    return model


def data(step):
    """Tokens and targets (2, ROWS, LENGTH) of all ranks."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (2, ROWS, LENGTH), generator=generator)


def cross_entropy(logits, targets):
    return F.cross_entropy(logits.view(-1, VOCAB), targets.reshape(-1))


@on_ranks(3)
def test_a_program_of_cpm(tmp_path):
    """Initialise, train, inspect, save and go on in a fresh model, as CPM-Bee's program does."""
    from bmtrain.global_var import config  # type: ignore[import-not-found]
    from bmtrain.optim.adam_offload import AdamOffloadOptimizer  # type: ignore[import-not-found]
    from bmtrain.optim.optim_manager import check_overflow, grad_rescale  # type: ignore[import-not-found]
    from bmtrain.param_init import grouped_parameters  # type: ignore[import-not-found]
    from bmtrain.store import allgather_objects, load, save  # type: ignore[import-not-found]
    from bmtrain.synchronize import gather_result, sum_loss, synchronize, wait_loader  # type: ignore[import-not-found]

    from bmtrain import inspect, nccl

    model = cpm_model()
    plain = PlainModel(model)
    assert {name for name, _ in grouped_parameters(model)} == {None}
    loss_func = bmt.loss.FusedCrossEntropy(ignore_index=-100)
    optimizer = AdamOffloadOptimizer(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule: dict[str, Any] = {"start_lr": 1e-2, "warmup_iter": 2, "end_iter": None}
    scheduler = bmt.lr_scheduler.Noam(optimizer, **schedule, num_iter=0)
    manager = models.managed(
        optimizer, scheduler, loss_scale=256, loss_scale_factor=2, loss_scale_steps=2
    )
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    plain_scheduler = bmt.lr_scheduler.Noam(reference, **schedule)

    def train(step):
        ids, targets = data(step)
        wait_loader()
        manager.zero_grad()
        loss = loss_func(model(own(ids)).view(-1, VOCAB), own(targets).reshape(-1).long())
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
        models.assert_same_state(model, plain, f"step {step}")
        synchronize()

    for step in range(4):
        train(step)
    rows = inspect.inspect_model(model, "*layers*")
    assert len(rows) == 2 * LAYERS and "layers.0.first.weight" in inspect.format_summary(rows)
    size = config["world_size"]
    assert allgather_objects({"rank": bmt.rank()}) == [{"rank": rank} for rank in range(size)]
    for length in (*range(4060, 4084), 100_000):  # about the longest that one exchange takes
        found = allgather_objects("x" * (length + bmt.rank()))
        assert found == ["x" * (length + rank) for rank in range(size)]
    assert gather_result(torch.ones(1)).numel() == nccl.commCount(config["comm"]) == size
    params = [param for param in model.parameters() if param.grad is not None]
    grads = [grad_of(param).clone() for param in params]
    grad_rescale(optimizer.param_groups, 2.0)
    for grad, param in zip(grads, params, strict=True):
        assert torch.equal(torch.as_tensor(param.grad), grad / 2)
    file = str(pathlib.Path(tmp_path, "model.pt"))
    save(model, file)
    second = cpm_model(zero_level=2)
    load(second, file)
    models.assert_same_state(second, plain, "loaded")
    with torch.no_grad():
        if bmt.rank() == 0:  # it has elements of every parameter
            params[0].grad.local.fill_(torch.inf)
    with pytest.raises(OverflowError):
        check_overflow(optimizer.param_groups)
    train(4)


def plain_hidden(model, ids):
    """What the layers record, and the logits."""
    seen = []
    for layer in model.layers:
        layer.first.register_forward_hook(lambda module, args, out: seen.append(out))
    logits = model(ids)
    return seen, logits


def distil():
    """A loss on the hidden states of student and teacher, taken from the inspector as BMCook
    does.
    """
    for use_checkpoint, zero_level in ((False, 2), (True, 3)):
        torch.manual_seed(3)
        student, teacher = cpm_model(use_checkpoint, zero_level), cpm_model()
        plain, plain_teacher = PlainModel(student), PlainModel(teacher)
        manager = models.managed(torch.optim.SGD(student.parameters(), lr=0.1), loss_scale=None)
        reference = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            ids, targets = data(step)
            with bmt.inspect.inspect_tensor() as inspector:
                logits = student(own(ids))
                assert len(inspector._summary) == LAYERS
                with torch.no_grad():
                    teacher(own(ids))
            records = inspector._summary
            names = [f"{number}.hidden" for number in range(2 * LAYERS)]
            assert [record["summary_name"] for record in inspector.summary] == names
            assert (records[0]["name"], records[0]["group"]) == ("hidden", None)
            trained = [record["requires_grad"] for record in records]
            assert trained == [True] * LAYERS + [False] * LAYERS
            tensors = [record["tensor"] for record in records]
            loss = cross_entropy(logits, own(targets))
            for mine, his in zip(tensors[:LAYERS], tensors[LAYERS:], strict=True):
                loss = loss + F.mse_loss(mine, his)
            manager.zero_grad()
            manager.backward(loss)
            found, plain_logits = plain_hidden(plain, ids)
            wanted, _ = plain_hidden(plain_teacher, ids)
            whole = cross_entropy(plain_logits, targets)
            for mine, his in zip(found, wanted, strict=True):
                whole = whole + F.mse_loss(mine, his.detach())
            found[0].retain_grad()
            reference.zero_grad()
            whole.backward()
            models.assert_same(tensors[0].detach(), own(found[0]).detach(), "hidden")
            models.assert_same(tensors[0].grad, own(grad_of(found[0])), "gradient of hidden")
            manager.step()
            reference.step()
            assert len(inspector.get_summary()) == 2 * LAYERS
        models.assert_same_state(student, plain, "after training")


def prune():
    """The two larger of four neighbours stay, as BMCook chooses and keeps them: it asks for the
    type of blocks, whose storages it would cut, and takes other modules by their weights.
    """
    from bmtrain.block_layer import CheckpointBlock

    model: Any = cpm_model()
    plain = PlainModel(model)
    assert all(isinstance(layer, CheckpointBlock) for layer in model.layers)
    assert not any(type(layer) == CheckpointBlock for layer in model.modules())  # noqa: E721
    assert type(CheckpointBlock(nn.Linear(2, 2))) is bmt.Block
    optimizers = [torch.optim.SGD(x.parameters(), lr=0.1) for x in (model, plain)]
    manager = models.managed(optimizers[0], loss_scale=8)
    for pruned, optimizer in zip((model, plain), optimizers, strict=True):
        masks = []
        for module in pruned.modules():
            weight: Any = getattr(module, "weight", None)
            if weight is not None:
                fours = weight.data.view(-1, 4).abs()
                mask = torch.zeros_like(fours).scatter_(1, fours.topk(2, 1).indices, 1.0)
                masks.append((weight, mask.view(weight.shape)))
        assert len(masks) == 2 * LAYERS + 1

        def step(masks=masks, old=optimizer.step):
            for weight, mask in masks:
                weight.grad.mul_(mask)
            old()
            with torch.no_grad():
                for weight, mask in masks:
                    weight.mul_(mask)

        optimizer.step = step  # type: ignore[method-assign]
    for number in range(2):
        ids, targets = data(number)
        manager.zero_grad()
        manager.backward(cross_entropy(model(own(ids)), own(targets)))
        manager.step()
        optimizers[1].zero_grad()
        cross_entropy(plain(ids), targets).backward()
        optimizers[1].step()
    state = model.state_dict()
    models.assert_same_dicts(state, plain.state_dict(), "after pruning")
    assert all(value.count_nonzero() * 2 == value.numel() for value in state.values())


@pytest.mark.parametrize("program", [distil, prune])
def test_a_program_of_bmcook(program):
    run_ranks(program, 2)


class Plugged(nn.Module):
    """A frozen model and trained layers beside it, which forwards call that the program has put
    inside of the model's blocks; a switch leaves them out.
    """

    def __init__(self, model, plugs):
        super().__init__()
        self.model, self.plugs, self.is_teacher = model.requires_grad_(False), plugs, False
        for layer, plug in zip(model.layers, plugs, strict=True):
            layer.first.old_forward = layer.first.forward
            layer.first.forward = functools.partial(self.plugged, layer.first, plug)

    def plugged(self, first, plug, x):
        return first.old_forward(x) + (0 if self.is_teacher else plug(x))

    def loss(self, ids, targets):
        self.is_teacher = True
        with torch.inference_mode():
            wanted = self.model(ids)
        self.is_teacher = False
        found = self.model(ids)
        return cross_entropy(found, targets) + F.mse_loss(found, wanted.clone())


@on_ranks(2)
def test_a_program_of_the_compression_plugin():
    for use_checkpoint, zero_level in ((False, 2), (True, 3)):
        torch.manual_seed(4)
        model = cpm_model(use_checkpoint, zero_level)
        plugs = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(LAYERS))
        plain = Plugged(PlainModel(model), copy.deepcopy(plugs))
        bmt.init_parameters(plugs)
        plugged = Plugged(model, plugs)
        manager = models.managed(torch.optim.SGD(plugs.parameters(), lr=0.1), loss_scale=8)
        reference = torch.optim.SGD(plain.plugs.parameters(), lr=0.1)
        for step in range(3):
            ids, targets = data(step)
            manager.zero_grad()
            manager.backward(plugged.loss(own(ids), own(targets)))
            manager.step()
            reference.zero_grad()
            plain.loss(ids, targets).backward()
            reference.step()
            models.assert_same_state(plugs, plain.plugs, f"step {step}")


# -- single names


def states_of_both_libraries():
    """The manager's state has BMTrain's keys and kinds of values; a state that BMTrain wrote is
    read.
    """
    torch.manual_seed(0)
    model = bmt.Block(nn.Linear(3, 2))
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    manager = models.managed(
        optimizer, bmt.lr_scheduler.Noam(optimizer, 0.1, 1, None), loss_scale=64, loss_scale_steps=3
    )
    for _ in range(4):
        manager.zero_grad()
        manager.backward(model(torch.ones(1, 3)).square().mean())
        manager.step()
    state = manager.state_dict(gather_opt=True)
    schedule = {"start_lr": 0.1, "warmup_iter": 1, "end_iter": None, "num_iter": 4}
    theirs = {"optimizers": state["optimizers"], "lr_schedulers": [schedule]}
    theirs |= {"loss_scale": 128.0, "loss_scale_enabled": True}
    assert {key: state[key] for key in theirs} == theirs
    unscaled = bmt.optim.OptimManager().state_dict()
    assert unscaled["loss_scale"] == 1 and unscaled["loss_scale_enabled"] is False
    older = theirs | {"loss_scale": {"value": 128.0, "good_steps": 2}}
    for saved, good_steps in ((state, 1), (theirs, 0), (older, 2)):
        fresh = models.managed(
            optimizer, bmt.lr_scheduler.Noam(optimizer, 0.5, 1, 7), loss_scale=1, loss_scale_steps=3
        )
        fresh.load_state_dict(saved)
        assert (fresh.loss_scale, fresh._scale.good_steps) == (128.0, good_steps)
        assert fresh.lr_schedulers[0].num_iter == 4
    kept = bmt.optim.OptimManager(loss_scale=8)
    kept.load_state_dict(unscaled)
    with pytest.raises(CheckpointError, match="optimizers"):
        kept.load_state_dict(state)
    assert kept.loss_scale == 8  # the first state has no scale, and the second was refused


def written_config():
    layer = bmt.BMTrainModelWrapper(nn.Linear(2, 2))
    for value in (False, True):
        bmt.config["save_param_to_cpu"] = value
        assert bmt.global_var.config["save_param_to_cpu"] is value
        device = torch.device("cpu") if value else bmt.device()
        assert {x.device for x in layer.state_dict().values()} == {device}
    for key, bad in (("save_param_to_cpu", 1), ("zero_level", 2), ("rank", 0)):
        with pytest.raises(ConfigurationError, match=key):
            bmt.config[key] = bad
    assert "own" not in bmt.config
    bmt.config["own"] = layer  # programs keep what is theirs here
    assert bmt.config["own"] is layer and "own" in dict(bmt.config)
    found = [bmt.config[key] for key in ("zero_level", "num_micro_batches", "micros")]
    assert found == [2, 1, 1]


def stored_objects():
    from bmtrain.param_init import init_distributed_parameter, iterate_parameters
    from bmtrain.parameter import OpAllGather
    from bmtrain.store import _save_to_rank0, allgather_object, broadcast_object

    from bmtrain.utils import tp_split_tensor

    rank, size, comm = bmt.rank(), bmt.world_size(), bmt.config["comm"]
    for bad, options, words in ((comm, {"src": size}, f"rank {size}"), (None, {}, "communicator")):
        with pytest.raises(ConfigurationError, match=words):
            broadcast_object(1, bad, **options)
    assert allgather_object(rank, comm) == list(range(size))
    assert broadcast_object({"of": rank}, comm, src=size - 1) == {"of": size - 1}
    model = cpm_model()
    state, kept = model.state_dict(), _save_to_rank0(model)
    assert list(kept) == (list(state) if rank == 0 else [])
    models.assert_same_dicts(dict(kept), state if rank == 0 else {}, "_save_to_rank0", 0)
    given = OrderedDict(other=torch.zeros(1))
    assert _save_to_rank0(model, given, "part.") is given
    assert list(given) == ["other", *(f"part.{name}" for name in kept)]
    weight = model.embedding.get_parameter("weight")
    gathered = OpAllGather.apply(weight).detach()
    models.assert_same(gathered, state["embedding.weight"], "OpAllGather", 0)
    with pytest.raises(ParameterError, match="OpAllGather"):
        OpAllGather.apply(torch.ones(2))
    assert [*iterate_parameters(model.embedding)] == [weight]
    assert not [*iterate_parameters(model.layers[0])]
    init_distributed_parameter([nn.Parameter(torch.ones(1)), *model.parameters()])
    assert all(not torch.equal(new, state[name]) for name, new in model.state_dict().items())
    assert tp_split_tensor(torch.arange(6).view(2, 3), 1).shape == (2, 3)


def state_of_rank_0():
    """Loaded as programs do it, also where the other ranks have another state, or none: what one
    process has, and a layer that no rank wraps.
    """
    from bmtrain.store import DistributedStateDictWrapper

    torch.manual_seed(5)
    plain = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2).bfloat16())
    state: Any = plain.state_dict()
    other = {name: value.flip(0) if value.dim() else value for name, value in state.items()}
    for elsewhere in ({}, other):
        given = DistributedStateDictWrapper(elsewhere if bmt.rank() else state)
        assert [*given] == [*state] and given._metadata == state._metadata
        models.assert_same_dicts(given, state, "DistributedStateDictWrapper", 0)
        for model in (bmt.BMTrainModelWrapper(copy.deepcopy(plain)), copy.deepcopy(plain)):
            with torch.no_grad():
                for value in model.parameters():
                    value.zero_()
            assert not model.load_state_dict(given, strict=False).missing_keys
            models.assert_same_dicts(model.state_dict(), state, "loaded", 0)


def verbs():
    """Those of ring attention, by the names that it imports; tests/ranks/test_communication.py has
    what they do.
    """
    from bmtrain.distributed.ops import ncclAllReduce, ncclRecv, ncclSend  # type: ignore[import-not-found]
    from bmtrain.nccl import allReduce, recv, send  # type: ignore[import-not-found]

    assert (ncclSend, ncclRecv, ncclAllReduce) == (send, recv, allReduce)


def older_forms(folder):
    """Arguments by BMTrain's names, attributes that programs read, and arguments of 0.1 and 0.2 that
    have no effect here.
    """
    from bmtrain.benchmark.utils import format_size  # type: ignore[import-not-found]

    zeros = bmt.ParameterInitializer(func=nn.init.zeros_)
    layers = [bmt.Block(inner_module=bmt.nn.Linear(3, 3, init_method=zeros)) for _ in range(2)]
    model = bmt.TransformerBlockList(layers, 1, True)
    bmt.init_parameters(model=model)
    assert [len(params) for _, params in bmt.grouped_parameters(model=model)] == [4]
    x = torch.ones(2, 3)
    models.assert_same(model(x), torch.zeros(2, 3), "of zeros", 0)
    models.assert_same(layers[0](input=x), torch.zeros(2, 3), "by its name", 0)
    bmt.save(model=model, file_name=folder / "model.pt")
    bmt.load(model=model, file_name=folder / "model.pt", strict=True)
    assert len(bmt.inspect.inspect_model(model, param_name="*weight")) == 2
    with bmt.inspect.inspect_tensor() as inspector:
        bmt.inspect.record_tensor(x, "x", None, False)
    assert torch.equal(inspector.get_tensor("x"), x) and format_size(x=2048) == "2 KiB"
    root = bmt.distributed.broadcast(src=x * bmt.rank(), root=1)
    assert root.eq(1).all()
    logits, targets = torch.eye(3), torch.arange(3)
    loss = bmt.loss.FusedCrossEntropy(ignore_index=-100, inplace=True)(logits, targets)
    models.assert_same(loss, nn.functional.cross_entropy(torch.eye(3), targets), "loss")
    manager: Any = bmt.optim.OptimManager(loss_scale=4, loss_scale_factor=3, loss_scale_steps=5)
    manager.add_optimizer(bmt.optim.AdamOptimizer(model.parameters()))
    names = ["loss_scale_enabled", "loss_scale_factor", "loss_scale_steps"]
    names += ["min_loss_scale", "max_loss_scale", "steps_since_last_scale"]
    assert [getattr(manager, name) for name in names] == [True, 3, 5, 1, float("inf"), 0]
    manager.backward(model(x).square().mean())
    manager.step()
    assert manager.steps_since_last_scale == 1
    for name in ("loss_scale", *names):
        with pytest.raises(ConfigurationError, match=r"OptimManager\(loss_scale="):
            setattr(manager, name, 1)
    manager.load_state_dict(state_dict=manager.state_dict())


def checkpointed():
    """The decorator of 0.1 under both its names: gradients of plain PyTorch, computed twice."""
    checkpoint: Any = importlib.import_module("bmtrain.checkpointing").checkpoint

    torch.manual_seed(1)
    plain = nn.Linear(3, 3)
    model, x, calls = bmt.BMTrainModelWrapper(copy.deepcopy(plain)), torch.randn(2, 3), []
    plain(x).tanh().sum().backward()
    for decorate in (checkpoint, vars(bmt)["checkpoint"]):
        model.zero_grad()

        @decorate
        def layer(x):
            calls.append(1)
            return model(x).tanh()

        layer(x).sum().backward()
        gradients = {
            name: grad / bmt.world_size() for name, grad in models.full_gradients(model).items()
        }
        models.assert_same_dicts(
            gradients, {n: p.grad for n, p in plain.named_parameters()}, "recomputed"
        )
    assert len(calls) == 4


@on_ranks(2, init={"zero_level": 2})
def test_single_names(tmp_path):
    older_forms(tmp_path)
    checkpointed()
    states_of_both_libraries()
    written_config()
    stored_objects()
    state_of_rank_0()
    verbs()


def split_tensor():
    from bmtrain.utils import tp_split_tensor

    whole = torch.arange(8).view(2, 4)
    with pytest.raises(ConfigurationError, match="tp_size=2"):
        tp_split_tensor(torch.ones(3), 0)
    assert torch.equal(tp_split_tensor(whole, 1), tp_split_tensor(whole, -1))
    return tp_split_tensor(whole, 1)


def positions():
    """By position as in 1.0.1."""
    bmt.init_distributed("env://", 5, 2, 4, 1, zero_level=2, device="cpu")
    names = ("pipe_size", "pipe_enabled", "micros", "tp_size", "zero_level")
    return [bmt.config[key] for key in names]


def test_sizes_of_the_mesh():
    """A tensor is split over tensor ranks; arguments of `init_distributed` by position."""
    parts = run_ranks(split_tensor, 2, init={"tp_size": 2})
    assert torch.equal(torch.cat(parts, 1), torch.arange(8).view(2, 4))
    assert run_ranks(positions, 2, join=False) == [[2, True, 4, 1, 2]] * 2


@on_ranks(2, init={"loss_scale_factor": 8, "loss_scale_steps": 2})
def test_loss_scale_of_old_programs():
    """CPM-Live's programs of 0.1.x give factor and steps to `init_distributed`, and "inf" to
    `clip_grad_norm`.
    """
    torch.manual_seed(0)
    model, norm_type = bmt.Block(nn.Linear(3, 2)), "inf"
    optimizer: Any = bmt.optim.AdamOffloadOptimizer(model.parameters(), lr=0.0, scale=32)
    for _ in range(4):
        optimizer.zero_grad()
        optimizer.loss_scale(model(torch.ones(1, 3)).square().mean()).backward()
        gradients = [x for x in models.full_gradients(model).values() if x is not None]
        largest = max(float(x.abs().max()) for x in gradients) / optimizer.scale
        options: dict[str, Any] = {"scale": optimizer.scale, "norm_type": norm_type}
        norm = bmt.optim.clip_grad_norm(optimizer.param_groups, 1e9, **options)
        assert float(norm) == pytest.approx(largest)
        bmt.optim_step(optimizer)
    assert optimizer.scale == 32 * 8**2 and optimizer.steps_since_last_scale == 0
    optimizer.justify_scale(16)
    assert optimizer.scale == 16
    with pytest.raises(ConfigurationError, match="justify_scale"):
        optimizer.justify_scale(0)
    assert bmt.config["loss_scale_factor"] == 8 and bmt.config["loss_scale_steps"] == 2
