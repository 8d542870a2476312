"""Files of BMTrain: model files as its `save` and torch wrote them, optimizer states per rank and
gathered.
"""

import copy
import warnings
from typing import Any

import pytest
import safetensors.torch
import torch
from tests.programs.running import WithMasters
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import sharded_parameter
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer

HALF, FLOAT = torch.float16, torch.float32


class Net(nn.Module):
    """A block, a layer smaller than the world and a parameter of one element."""

    def __init__(self, dtype=FLOAT):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            self.layers = nn.ModuleList([nn.Linear(7, 7, dtype=dtype)])
            self.out = nn.Linear(7, 2, dtype=dtype)
            self.gain = nn.Parameter(torch.tensor(0.7, dtype=dtype))
            self.register_buffer("offset", torch.randn(2, dtype=dtype))

    def forward(self, x):
        return self.out(torch.tanh(self.layers[0](x))) * self.gain + self.offset


def sharded(dtype=FLOAT):
    """Without the values that files have."""
    net = Net(dtype)
    for tensor in net.state_dict().values():
        tensor.fill_(9.0)
    return bmt.BMTrainModelWrapper(net)


def write_model_files(folder):
    """With `_metadata` and without, new and old serialization, views of one storage, names with a
    prefix; what the library says of each when it loads it.
    """
    full = Net().state_dict()
    assert full._metadata  # type: ignore[attr-defined]
    numels = [value.numel() for value in full.values()]
    parts = torch.cat([value.reshape(-1) for value in full.values()]).split(numels)
    views = {
        key: part.view(value.shape) for (key, value), part in zip(full.items(), parts, strict=True)
    }
    kinds = {"metadata": full, "dict": dict(full), "views": views}
    wrapped = [{prefix + key: full[key] for key in full} for prefix in ("module.", "module.model.")]
    for name, content in (kinds | {"wrapped": wrapped[0], "twice": wrapped[1]}).items():
        torch.save(content, folder / f"{name}.pt")
        torch.save(content, folder / f"old_{name}.pt", _use_new_zipfile_serialization=False)
    torch.save(Net(HALF).state_dict(), folder / "half.pt")
    safetensors.torch.save_file(wrapped[0], folder / "wrapped.safetensors")
    told = {"half.pt": "", "wrapped.safetensors": "'module.'"}
    for old in ("", "old_"):
        told |= {f"{old}{name}.pt": "" for name in kinds}
        told |= {f"{old}wrapped.pt": "'module.'", f"{old}twice.pt": "'module.model.'"}
    mixed = {(f"module.{key}" if key != "gain" else key): full[key] for key in full}
    torch.save(mixed, folder / "mixed")
    torch.save({f"module.{key}.x": value for key, value in full.items()}, folder / "other")
    torch.save({**full, "out.weight": full["out.weight"].reshape(-1)[:7]}, folder / "flat")
    return told


def load_each(folder, told):
    net = sharded()
    before = models.cloned_state(net)
    missing = "missing from the file: 'out.weight' .nearest: 'module.out.weight"
    for name, complaint in (
        ("mixed", f"{missing}'"),
        ("other", f"{missing}.x'"),
        ("flat", r"flat does not.*'out.weight' has shape \(2, 7\) in the model and \(7,\).*slice"),
    ):
        with pytest.raises(CheckpointError, match=rf"(?s){complaint}"):
            bmt.load(net, folder / name)
        models.assert_same_dicts(net.state_dict(), before, f"after {name}", 0.0)
    for dtype in (FLOAT, HALF):
        for name, text in told.items():
            net = sharded(dtype)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert bmt.load(net, folder / name) == ([], [])
            lost = "lost precision" if dtype == HALF and name != "half.pt" else ""
            said = [part for part in (text, lost) if part and bmt.rank() == 0]
            messages = [str(warning.message) for warning in caught]
            assert len(said) == len(messages), (name, messages)
            assert all(part in got for part, got in zip(said, messages, strict=True)), messages
            written = Net(HALF if name == "half.pt" else FLOAT).state_dict()
            want = {key: value.to(dtype) for key, value in written.items()}
            models.assert_same_dicts(net.state_dict(), want, name, 0.0)


def test_model_files_of_every_kind(tmp_path):
    """Into models of fp16 and fp32; what is no prefix, and flat parameters, are explained."""
    run_ranks(load_each, 2, tmp_path, write_model_files(tmp_path))


def inputs(step, dtype):
    return torch.randn(12, 7, generator=torch.Generator().manual_seed(step)).to(dtype)


def loss_of(model, x):
    return (model(x).float() + 0.3).square().mean()


def own_rows(step, dtype=FLOAT):
    return models.own(inputs(step, dtype))


class Plain:
    """AdamW in one process; half-precision weights are the rounded fp32 masters."""

    def __init__(self, dtype):
        self.model, self.dtype = Net(dtype), dtype
        groups = [{"params": [*self.model.parameters()]}]
        # A large eps makes the update a smooth function of the gradient, which fp16 rounds.
        self.optimizer = WithMasters(groups, lr=0.05, weight_decay=0.1, eps=1e-2)
        self.masters = [master for _, master in self.optimizer.pairs]

    def train(self, *numbers):
        for number in numbers:
            self.model.zero_grad()
            loss_of(self.model, inputs(number, self.dtype)).backward()
            self.optimizer.step()

    def state_of_rank(self, world_size, rank, flat=True):
        """What BMTrain's optimizer of that rank saves; nothing of parameters of which it has no
        element.
        """
        states = {}
        numels = [master.numel() for master in self.masters]
        cuts = cut_as_bmtrain(numels, self.dtype.itemsize, world_size, rank)
        for index, (master, cut) in enumerate(zip(self.masters, cuts, strict=True)):
            if cut.start < cut.stop:
                whole = self.optimizer.state[master] | {"_param_fp32": master.detach()}
                whole["exp_avg"] = whole["exp_avg"].to(self.dtype)
                names = ["exp_avg", "exp_avg_sq", *["_param_fp32"] * (self.dtype == HALF)]
                parts = {name: whole[name].reshape(-1)[cut].clone() for name in names}
                if not flat:
                    parts = {name: part.view(master.shape) for name, part in parts.items()}
                states[index] = {"step": int(whole["step"]), **parts}
        group = {"lr": 0.05, "betas": (0.9, 0.999), "eps": 1e-2, "weight_decay": 0.1}
        return {
            "state": states,
            "param_groups": [{**group, "hold_steps": 0, "params": [*range(len(numels))]}],
        }


def cut_as_bmtrain(numels, itemsize, world_size, rank):
    """A block's parameters one after the other, each from a multiple of 512 bytes on, in equal
    parts; others part by part.
    """
    aligned = [-(-numel * itemsize // 512) * 512 // itemsize for numel in numels[1:3]]
    slices = []
    share, offset = -(-sum(aligned) // world_size), 0
    for index, numel in enumerate(numels):  # the order of `Net().parameters()`
        begin = 0
        if index in (1, 2):
            size, begin = share, offset
            offset += aligned[index - 1]
        else:
            size = -(-numel // world_size)
        edges = (min(max(edge * size - begin, 0), numel) for edge in (rank, rank + 1))
        slices.append(slice(*edges))
    return slices


def go_on(folder, dtype, kind):
    """Load the model and this rank's optimizer file, and train on: weights at the end, whole states
    after loading, loss scale.
    """
    model = sharded(dtype)
    bmt.load(model, folder / "model.pt")
    make = {"adam": AdamOptimizer, "offload": AdamOffloadOptimizer}[kind]
    optimizer = make(model.parameters(), lr=1.0)
    manager = models.managed(
        optimizer,
        bmt.lr_scheduler.NoDecay(optimizer, 0.05, 0, -1),
        loss_scale=4.0 if dtype == HALF else None,
    )
    manager.load_state_dict(torch.load(folder / f"optimizer-{bmt.rank()}.pt", weights_only=True))
    loaded = copy.deepcopy(optimizer.state_dict(gather=True)["state"])
    for number in range(3, 6):
        manager.zero_grad()
        manager.backward(loss_of(model, own_rows(number, dtype)))
        manager.step()
    return models.cloned_state(model), loaded, manager.loss_scale


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("dtype", "kind", "form"),
    [
        (HALF, "adam", "slices"),
        pytest.param(FLOAT, "offload", "slices", marks=LONG),
        pytest.param(HALF, "offload", "slices", marks=LONG),
        pytest.param(HALF, "adam", "flat", marks=LONG),
        pytest.param(HALF, "adam", "whole", marks=LONG),
    ],
)
def test_optimizer_states_of_bmtrain_go_on(tmp_path, dtype, kind, form):
    """A run of BMTrain goes on here as in plain PyTorch: cut at its own places, with as many ranks,
    or gathered under its names, flat or of the parameter's shape.
    """
    plain, num_ranks = Plain(dtype), 3
    plain.train(0, 1, 2)
    torch.save(plain.model.state_dict(), tmp_path / "model.pt")
    schedule = {"start_lr": 0.05, "warmup_iter": 0, "end_iter": -1, "num_iter": 3}
    for rank in range(num_ranks):
        cut = (num_ranks, rank) if form == "slices" else (1, 0)
        content = {
            "optimizers": [plain.state_of_rank(*cut, flat=form != "whole")],
            "lr_schedulers": [schedule],
            "loss_scale": 512.0,
            "loss_scale_enabled": True,
        }
        torch.save(content, tmp_path / f"optimizer-{rank}.pt")
    for state in plain.optimizer.state.values():  # BMTrain keeps it in fp16
        state["exp_avg"] = state["exp_avg"].to(dtype).float()
    saved = copy.deepcopy(
        [{**plain.optimizer.state[m], "master": m.detach()} for m in plain.masters]
    )
    plain.train(3, 4, 5)
    tolerance = 1e-5 if dtype == FLOAT else 2e-3
    for state, loaded, scale in run_ranks(go_on, num_ranks, tmp_path, dtype, kind):
        for index, want in enumerate(saved):
            names = {"exp_avg", "exp_avg_sq", "step", *(["master"] if dtype == HALF else [])}
            assert loaded[index].keys() == names
            for name, value in loaded[index].items():
                assert torch.as_tensor(value).equal(
                    torch.as_tensor(want[name]).to(torch.as_tensor(value).dtype)
                ), (index, name)
        models.assert_same_dicts(state, plain.model.state_dict(), f"{kind} {dtype}", tolerance)
        assert scale == (512.0 if dtype == HALF else 1.0)


def refused_states(cases):
    model, plain = bmt.BMTrainModelWrapper(Net()), Plain(FLOAT)
    options: Any = {"lr": 0.05, "weight_decay": 0.1, "eps": 1e-2}
    optimizer = AdamOptimizer(model.parameters(), **options)
    manager = models.managed(optimizer)
    for number, (states, parts) in enumerate(cases):
        manager.zero_grad()
        manager.backward(loss_of(model, own_rows(number)))
        manager.step()
        plain.train(number)
        models.assert_same_state(model, plain.model, f"before {parts}")
        with pytest.raises(CheckpointError) as caught:
            optimizer.load_state_dict(states[bmt.rank()])
        assert all(part in str(caught.value) for part in parts), caught.value


def test_states_that_do_not_fit_are_refused_on_every_rank():
    """And training goes on as in one process."""
    plain = Plain(FLOAT)
    plain.train(0)
    of_three, of_two = ([plain.state_of_rank(n, rank) for rank in range(2)] for n in (3, 2))
    cases = [(of_three, ["'exp_avg' of parameter", "elements on the ranks", "gather=True"])]
    cases[0][1].append("as many processes as saved it")
    cases.append(([of_two[0], {**of_two[1], "state": {}}], ["elements on the ranks"]))
    shorter = [{**of_two[1]["param_groups"][0], "params": [0, 1]}]
    text = "groups of [2] parameters, this one of [5]"
    cases.append(([of_two[0], {**of_two[1], "param_groups": shorter}], [text]))
    turned = plain.state_of_rank(1, 0)
    turned["state"][3]["exp_avg"] = torch.zeros(7, 2)
    text = "'exp_avg' of parameter 3 has shape (7, 2), the parameter (2, 7)"
    cases.append(([turned, turned], [text]))
    cases.append(([of_two[0], {"spam": 1}], ["no optimizer state"]))
    run_ranks(refused_states, 2, [*cases, cases[-1]])


class Split(bmt.DistributedModule):
    """Tensor-parallel parameters, cut along either dim, beside an ordinary one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        for dim, (name, shape) in enumerate((("rows", (3, 5)), ("columns", (5, 4)))):
            whole = torch.empty(shape)
            options: Any = {"init_method": nn.init.normal_, "tp_mode": True, "tp_split_dim": dim}
            setattr(self, name, bmt.DistributedParameter(whole, **options))
        self.bias = bmt.DistributedParameter(torch.empty(11), init_method=nn.init.normal_)
        bmt.init_parameters(self)


def parallel_states():
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
    theirs, differ = copy.deepcopy(own), False
    for index, param in enumerate(map(sharded_parameter, model.parameters())):
        axis = param.storage_of.axis
        here = torch.tensor([param.local.numel()])
        sizes = bmt.distributed.all_gather(here, axis).flatten().tolist()
        assert sum(sizes) == param._original_shape.numel()
        share = -(-sum(sizes) // axis.size)
        for name in ("exp_avg", "exp_avg_sq"):
            padded = torch.zeros(max(sizes))
            padded[: param.local.numel()] = own["state"][index][name]
            rows = bmt.distributed.all_gather(padded, axis)
            flat = torch.cat([row[:size] for row, size in zip(rows, sizes, strict=True)])
            cut = flat[axis.index * share : (axis.index + 1) * share].clone()
            theirs["state"][index][name] = cut
            differ |= len(cut) != param.local.numel()
    assert differ
    for saved in (own, whole, theirs):
        again = AdamOptimizer(model.parameters(), lr=0.5)
        again.load_state_dict(saved)
        for index, state in again.state_dict()["state"].items():
            for name, value in state.items():
                want = torch.as_tensor(own["state"][index][name])
                assert want.equal(torch.as_tensor(value)), (index, name)
        assert again.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("pipe_size", [1, pytest.param(2, marks=LONG)])
def test_states_of_tensor_parallel_parameters(pipe_size):
    run_ranks(parallel_states, 4, init={"tp_size": 2, "pipe_size": pipe_size})


@on_ranks(2)
def test_torchs_own_state_of_one_element():
    """A gathered state's numbers stay numbers, though the parameter is one too. torch's own
    optimizer, whose step is a tensor, over a parameter of one element.
    """
    plain, model = Net(), bmt.BMTrainModelWrapper(Net())
    reference = torch.optim.NAdam(plain.parameters(), lr=0.05)
    manager = models.managed(torch.optim.NAdam(model.parameters(), lr=0.05))
    for number in range(5):
        if number == 3:  # two steps, and again
            state, weights = manager.state_dict(gather_opt=True), models.cloned_state(model)
        for twice in (True, False) if number == 4 else (False,):
            manager.zero_grad()
            manager.backward(loss_of(model, own_rows(number)))
            manager.step()
            if twice:
                model.load_state_dict(weights)
                manager.load_state_dict(state)
                manager.zero_grad()
                manager.backward(loss_of(model, own_rows(3)))
                manager.step()
        reference.zero_grad()
        loss_of(plain, inputs(number, FLOAT)).backward()
        reference.step()
    models.assert_same_state(model, plain, "NAdam")
