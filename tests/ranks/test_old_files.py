"""Files of BMTrain: model files as its `save` and torch wrote them, optimizer states per rank and
gathered.
"""

from __future__ import annotations

import collections
import copy
import pathlib
import warnings
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import sharded_parameter
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager

State = dict[str, torch.Tensor]
HALF, FLOAT = torch.float16, torch.float32


class Net(nn.Module):
    """A block, a layer smaller than the world and a parameter of one element."""

    def __init__(self, dtype: torch.dtype = FLOAT) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = nn.ModuleList([nn.Linear(7, 7, dtype=dtype)])
            self.out = nn.Linear(7, 2, dtype=dtype)
            self.gain = nn.Parameter(torch.tensor(0.7, dtype=dtype))
            self.register_buffer("offset", torch.randn(2, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(self.layers[0](x))) * self.gain + self.offset


def sharded(dtype: torch.dtype = FLOAT, fill: float | None = None) -> nn.Module:
    net = Net(dtype)
    if fill is not None:
        for tensor in net.state_dict().values():
            tensor.fill_(fill)
    return bmt.BMTrainModelWrapper(net)


def load_each(files: list[str], dtype: torch.dtype) -> list[tuple[State, list[str]]]:
    out = []
    for file in files:
        net = sharded(dtype, fill=9.0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert bmt.load(net, file) == ([], [])
        out.append((models.cloned_state(net), [str(warning.message) for warning in caught]))
    return out


def write_model_files(folder: pathlib.Path, dtype: torch.dtype) -> dict[str, str]:
    """All the ways, and what the library says of each when it loads it."""
    full = Net(dtype).state_dict()
    assert full._metadata  # type: ignore[attr-defined]
    flat = torch.cat([value.reshape(-1) for value in full.values()])
    offsets = [0, *torch.tensor([value.numel() for value in full.values()]).cumsum(0).tolist()]
    views = {
        name: flat[begin:].as_strided(v.shape, v.stride())
        for (name, v), begin in zip(full.items(), offsets, strict=False)
    }
    wrapped = {f"module.{name}": value for name, value in full.items()}
    twice = collections.OrderedDict((f"module.model.{name}", value) for name, value in full.items())
    files = {
        "metadata.pt": full,
        "dict.pt": dict(full),
        "views.pt": views,
        "wrapped.pt": wrapped,
        "twice.pt": twice,
    }
    for name, content in files.items():
        torch.save(content, folder / name)
        torch.save(content, folder / f"old_{name}", _use_new_zipfile_serialization=False)
    safetensors.torch.save_file(wrapped, folder / "wrapped.safetensors")
    told = {name: "" for file in files for name in (file, f"old_{file}")} | {
        "wrapped.safetensors": ""
    }
    for name in told:
        told[name] = (
            "'module.'" if "wrapped" in name else "'module.model.'" if "twice" in name else ""
        )
    return told


@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_model_files_of_every_kind(tmp_path: pathlib.Path, dtype: torch.dtype) -> None:
    """With `_metadata` and without, new and old serialization, views of one storage, names with a
    prefix; fp16 and fp32.
    """
    told = write_model_files(tmp_path, dtype)
    want = Net(dtype).state_dict()
    for rank, results in enumerate(
        run_ranks(load_each, 2, [str(tmp_path / name) for name in told], dtype)
    ):
        for (name, text), (state, messages) in zip(told.items(), results, strict=True):
            models.assert_same_dicts(state, want, name, 0.0)
            assert len(messages) == (rank == 0 and bool(text)), (name, messages)
            assert all(text in message for message in messages), (name, messages)


def load_other_dtype(file: str, dtype: torch.dtype) -> tuple[State, int]:
    ((state, messages),) = load_each([file], dtype)
    return state, len(messages)


@pytest.mark.parametrize(("written", "read"), [(HALF, FLOAT), (FLOAT, HALF)])
def test_fp16_files_fit_fp32_models_and_the_other_way(
    tmp_path: pathlib.Path, written: torch.dtype, read: torch.dtype
) -> None:
    torch.save(Net(written).state_dict(), tmp_path / "model.pt")
    for rank, (state, told) in enumerate(
        run_ranks(load_other_dtype, 2, str(tmp_path / "model.pt"), read)
    ):
        for name, value in Net(written).state_dict().items():
            models.assert_same(state[name], value.to(read), name, 0.0)
        assert told == (rank == 0 and read == HALF)  # precision is lost


def refused(file: str) -> str:
    net = sharded()
    before = models.cloned_state(net)
    with pytest.raises(CheckpointError) as caught:
        bmt.load(net, file)
    models.assert_same_dicts(net.state_dict(), before, "after a refused load", 0.0)
    return str(caught.value)


def test_what_is_no_prefix_and_flat_parameters_are_explained(tmp_path: pathlib.Path) -> None:
    full = Net().state_dict()
    mixed = {(f"module.{name}" if name != "gain" else name): value for name, value in full.items()}
    torch.save(mixed, tmp_path / "mixed.pt")
    torch.save({f"module.{name}.x": value for name, value in full.items()}, tmp_path / "other.pt")
    torch.save({**full, "out.weight": full["out.weight"].reshape(-1)[:7]}, tmp_path / "flat.pt")
    for message in run_ranks(refused, 2, str(tmp_path / "mixed.pt")):
        assert "missing from the file: 'out.weight' (nearest: 'module.out.weight')" in message
    for message in run_ranks(refused, 2, str(tmp_path / "other.pt")):
        assert "missing from the file: 'out.weight' (nearest: 'module.out.weight.x')" in message
    for message in run_ranks(refused, 2, str(tmp_path / "flat.pt")):
        assert (
            "'out.weight' has shape (2, 7) in the model and (7,)" in message
            and "slice" in message
            and "flat.pt" in message
        )


def inputs(step: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return (model(x).float() + 0.3).square().mean()


class Plain:
    """AdamW in one process; half-precision weights are the rounded fp32 masters."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.model = Net(dtype)
        self.masters = [param.detach().float().clone() for param in self.model.parameters()]
        # A large eps makes the update a smooth function of the gradient, which fp16 rounds.
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.05, weight_decay=0.1, eps=1e-2)

    def step(self, number: int) -> None:
        self.model.zero_grad()
        loss_of(
            self.model,
            inputs(number, self.masters[0].dtype).to(next(self.model.parameters()).dtype),
        ).backward()
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = param.grad.float()  # type: ignore[union-attr]
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)


def cut_as_bmtrain(numels: list[int], itemsize: int, world_size: int, rank: int) -> list[slice]:
    """A block's parameters one after the other, each from a multiple of 512 bytes on, in equal
    parts; others part by part.
    """
    single, block = (numels[0], *numels[3:]), numels[1:3]  # the order of `Net().parameters()`
    slices, offset = [], 0
    aligned = [-(-numel * itemsize // 512) * 512 // itemsize for numel in block]
    share = -(-sum(aligned) // world_size)
    for numel, room in zip(block, aligned, strict=True):
        begin, end = (
            min(max(edge - offset, 0), numel) for edge in (rank * share, (rank + 1) * share)
        )
        slices.append(slice(begin, end))
        offset += room
    shares = [-(-numel // world_size) for numel in single]
    alone = [
        slice(min(rank * n, numel), min((rank + 1) * n, numel))
        for numel, n in zip(single, shares, strict=True)
    ]
    return [alone[0], *slices, *alone[1:]]


def bmtrain_state(plain: Plain, world_size: int, rank: int) -> dict[str, Any]:
    """What BMTrain's optimizer of that rank saves; nothing of parameters of which it has no
    element.
    """
    params = list(plain.model.parameters())
    is_half = params[0].dtype == HALF
    states: dict[int, dict[str, Any]] = {}
    cuts = cut_as_bmtrain(
        [param.numel() for param in params], params[0].element_size(), world_size, rank
    )
    for index, (master, part) in enumerate(zip(plain.masters, cuts, strict=True)):
        if part.start == part.stop:
            continue
        whole = plain.optimizer.state[master]
        state = {
            "step": int(whole["step"]),
            "exp_avg": whole["exp_avg"].reshape(-1)[part].to(params[0].dtype),
        }
        states[index] = {**state, "exp_avg_sq": whole["exp_avg_sq"].reshape(-1)[part].clone()}
        if is_half:
            states[index]["_param_fp32"] = master.detach().reshape(-1)[part].clone()
    group = {
        "lr": 0.05,
        "betas": (0.9, 0.999),
        "eps": 1e-2,
        "weight_decay": 0.1,
        "hold_steps": 0,
        "params": [*range(len(params))],
    }
    return {"state": states, "param_groups": [group]}


def trained(dtype: torch.dtype, num_steps: int) -> Plain:
    plain = Plain(dtype)
    for number in range(num_steps):
        plain.step(number)
    return plain


def round_moment(plain: Plain) -> None:
    """BMTrain keeps the first moment of fp16 parameters in fp16."""
    for master in plain.masters:
        state = plain.optimizer.state[master]
        state["exp_avg"] = state["exp_avg"].to(next(plain.model.parameters()).dtype).float()


def go_on(
    folder: str, dtype: torch.dtype, kind: str
) -> tuple[State, dict[int, dict[str, Any]], float]:
    """Load the model and this rank's optimizer file, and train on: weights at the end, whole states
    after loading, loss scale.
    """
    model = sharded(dtype, fill=9.0)
    bmt.load(model, f"{folder}/model.pt")
    optimizer = {"adam": AdamOptimizer, "offload": AdamOffloadOptimizer}[kind](
        model.parameters(), lr=1.0
    )
    manager = OptimManager(loss_scale=4.0 if dtype == HALF else None)
    manager.add_optimizer(optimizer, bmt.lr_scheduler.NoDecay(optimizer, 0.05, 0, -1))
    files = pathlib.Path(folder)
    file = files / f"optimizer-{bmt.rank()}.pt"
    manager.load_state_dict(
        torch.load(file if file.exists() else files / "optimizer.pt", weights_only=True)
    )
    loaded = copy.deepcopy(optimizer.state_dict(gather=True)["state"])
    for number in range(3, 6):
        manager.zero_grad()
        manager.backward(loss_of(model, inputs(number, dtype).chunk(bmt.world_size())[bmt.rank()]))
        manager.step()
    return models.cloned_state(model), loaded, manager.loss_scale


def manager_state(optimizer: dict[str, Any]) -> dict[str, Any]:
    schedule = {"start_lr": 0.05, "warmup_iter": 0, "end_iter": -1, "num_iter": 3}
    return {
        "optimizers": [optimizer],
        "lr_schedulers": [schedule],
        "loss_scale": 512.0,
        "loss_scale_enabled": True,
    }


def check_going_on(folder: pathlib.Path, dtype: torch.dtype, kind: str, world_size: int) -> None:
    plain = trained(dtype, 3)
    round_moment(plain)
    saved = copy.deepcopy(
        [{**plain.optimizer.state[m], "step": 3, "master": m.detach()} for m in plain.masters]
    )
    for number in range(3, 6):
        plain.step(number)
    tolerance = 1e-5 if dtype == FLOAT else 2e-3
    for state, loaded, scale in run_ranks(go_on, world_size, str(folder), dtype, kind):
        for index, want in enumerate(saved):
            assert sorted(loaded[index]) == [
                "exp_avg",
                "exp_avg_sq",
                *(["master"] if dtype == HALF else []),
                "step",
            ]
            for name, value in loaded[index].items():
                assert torch.equal(torch.as_tensor(value), torch.as_tensor(want[name])), (
                    kind,
                    index,
                    name,
                )
        models.assert_same_dicts(state, plain.model.state_dict(), f"{kind} {dtype}", tolerance)
        assert scale == (512.0 if dtype == HALF else 1.0)


@pytest.mark.parametrize("kind", ["adam", "offload"])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("world_size", [1, 3])
def test_slices_of_bmtrain_go_on(
    tmp_path: pathlib.Path, world_size: int, dtype: torch.dtype, kind: str
) -> None:
    """A run of BMTrain, cut at its own places, goes on here with as many ranks, as in plain
    PyTorch.
    """
    plain = trained(dtype, 3)
    torch.save(plain.model.state_dict(), tmp_path / "model.pt")
    for rank in range(world_size):
        torch.save(
            manager_state(bmtrain_state(plain, world_size, rank)), tmp_path / f"optimizer-{rank}.pt"
        )
    check_going_on(tmp_path, dtype, kind, world_size)


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("world_size", [1, 3])
def test_gathered_states_of_bmtrain_go_on(
    tmp_path: pathlib.Path, world_size: int, flat: bool
) -> None:
    """Whole states under BMTrain's names, flat or of the parameter's shape, at any world size."""
    plain = trained(HALF, 3)
    torch.save(plain.model.state_dict(), tmp_path / "model.pt")
    whole = bmtrain_state(plain, 1, 0)
    if not flat:
        for state, master in zip(whole["state"].values(), plain.masters, strict=True):
            state |= {
                name: value.view(master.shape)
                for name, value in state.items()
                if isinstance(value, torch.Tensor)
            }
    torch.save(manager_state(whole), tmp_path / "optimizer.pt")
    check_going_on(tmp_path, HALF, "adam", world_size)


def refused_state(states: list[dict[str, Any]]) -> str:
    model = sharded()
    optimizer = AdamOptimizer(model.parameters(), lr=0.05)
    OptimManager().add_optimizer(optimizer)
    loss_of(model, inputs(0, FLOAT)).backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(states[bmt.rank()])
    after = optimizer.state_dict()
    for index, state in before["state"].items():
        assert all(
            torch.equal(torch.as_tensor(state[name]), torch.as_tensor(after["state"][index][name]))
            for name in state
        )
    return str(caught.value)


def test_states_that_do_not_fit_are_refused_on_every_rank() -> None:
    plain = trained(FLOAT, 1)
    of_three = [bmtrain_state(plain, 3, rank) for rank in range(2)]
    for message in run_ranks(refused_state, 2, of_three):
        for part in (
            "'exp_avg' of parameter",
            "elements on the ranks",
            "as many processes as saved it",
            "gather=True",
        ):
            assert part in message, message
    of_two = [bmtrain_state(plain, 2, rank) for rank in range(2)]
    one_is_lost = [of_two[0], {**of_two[1], "state": {}}]
    for message in run_ranks(refused_state, 2, one_is_lost):
        assert "elements on the ranks" in message
    one_is_shorter = [
        of_two[0],
        {**of_two[1], "param_groups": [{**of_two[1]["param_groups"][0], "params": [0, 1]}]},
    ]
    for message in run_ranks(refused_state, 2, one_is_shorter):
        assert "groups of [2] parameters, this one of [5]" in message
    turned = copy.deepcopy(bmtrain_state(plain, 1, 0))
    turned["state"][3]["exp_avg"] = torch.zeros(7, 2)
    for message in run_ranks(refused_state, 2, [turned, turned]):
        assert "'exp_avg' of parameter 3 has shape (7, 2), the parameter (2, 7)" in message
    for message in run_ranks(refused_state, 2, [of_two[0], {"spam": 1}]):
        assert "no optimizer state" in message


class Split(bmt.DistributedModule):
    """Tensor-parallel parameters, cut along either dim, beside an ordinary one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows = bmt.DistributedParameter(
            torch.empty(3, 5), init_method=nn.init.normal_, tp_mode=True, tp_split_dim=0
        )
        self.columns = bmt.DistributedParameter(
            torch.empty(5, 4), init_method=nn.init.normal_, tp_mode=True, tp_split_dim=1
        )
        self.bias = bmt.DistributedParameter(torch.empty(11), init_method=nn.init.normal_)
        bmt.init_parameters(self)


def parallel_states() -> None:
    """Own slices, whole states, and slices cut at other places all give the same state back."""
    model = Split()
    optimizer = AdamOptimizer(model.parameters(), lr=0.1)
    for _ in range(3):
        for name, param in model.named_parameters():
            first = 1.0 if name == "bias" else 1.0 + 100 * bmt.config["tp_rank"]
            # no two slices have the same
            param.grad = torch.arange(first, first + param.numel()).view(param.shape)
        optimizer.step()
    own, whole = copy.deepcopy(optimizer.state_dict()), optimizer.state_dict(gather=True)
    theirs = copy.deepcopy(own)
    for index, param in enumerate(map(sharded_parameter, model.parameters())):
        axis = param.storage_of.axis
        sizes = (
            bmt.distributed.all_gather(torch.tensor([param.local.numel()]), axis).flatten().tolist()
        )
        assert sum(sizes) == param._original_shape.numel()
        share = -(-sum(sizes) // axis.size)
        cut = slice(axis.index * share, (axis.index + 1) * share)
        for name in ("exp_avg", "exp_avg_sq"):
            padded = torch.zeros(max(sizes))
            padded[: param.local.numel()] = own["state"][index][name]
            rows = bmt.distributed.all_gather(padded, axis)
            flat = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
            theirs["state"][index][name] = flat[cut].clone()
    assert any(
        theirs["state"][i]["exp_avg"].numel() != own["state"][i]["exp_avg"].numel()
        for i in range(3)
    )
    for saved in (own, whole, theirs):
        again = AdamOptimizer(model.parameters(), lr=0.5)
        again.load_state_dict(saved)
        for index, state in again.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(
                    torch.as_tensor(value), torch.as_tensor(own["state"][index][name])
                ), (index, name)
        assert again.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("init", [{"tp_size": 2}, {"tp_size": 2, "pipe_size": 2}])
def test_states_of_tensor_parallel_parameters(init: dict[str, int]) -> None:
    run_ranks(parallel_states, 4, init=init)


def native_round_trip() -> State:
    """torch's own optimizer, whose step is a tensor, over a parameter of one element."""
    model = sharded()
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.05)
    manager = OptimManager()
    manager.add_optimizer(optimizer)

    def train(numbers: range) -> None:
        for number in numbers:
            manager.zero_grad()
            manager.backward(
                loss_of(model, inputs(number, FLOAT).chunk(bmt.world_size())[bmt.rank()])
            )
            manager.step()

    train(range(3))
    state, weights = copy.deepcopy(manager.state_dict(gather_opt=True)), models.cloned_state(model)
    train(range(3, 5))
    want = models.cloned_state(model)
    model.load_state_dict(weights)
    manager.load_state_dict(state)
    train(range(3, 5))
    models.assert_same_dicts(model.state_dict(), want, "after a round trip", 0.0)
    return want


@pytest.mark.parametrize("world_size", [1, 2])
def test_torchs_own_state_of_one_element(world_size: int) -> None:
    """A gathered state's numbers stay numbers, though the parameter is one too."""
    plain = Net()
    reference = torch.optim.NAdam(plain.parameters(), lr=0.05)
    for number in range(5):
        reference.zero_grad()
        loss_of(plain, inputs(number, FLOAT)).backward()
        reference.step()
    for state in run_ranks(native_round_trip, world_size):
        models.assert_same_dicts(state, plain.state_dict(), "NAdam")
