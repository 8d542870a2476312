"""Parameters that tensor ranks split: values, gradients, norms, files and optimizer states as
without the split.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.tensors import own_slice, sharded_parameter

import bmtrain as bmt
from bmtrain.errors import ParameterError

ROWS, WIDTH, FEATURES = 3, 6, 8
GRID = [(1, 1), (2, 1), (2, 2), (4, 2), (4, 4)]  # world size, tensor ranks


class Parallel(bmt.DistributedModule):
    """tanh(norm(x) up^T) down^T on the rows of all tensor ranks; `up` is split along dim 0 and
    `down` along dim 1.
    """

    def __init__(self) -> None:
        super().__init__()
        tp = bmt.config["tp_size"]
        self.up = bmt.DistributedParameter(
            torch.empty(FEATURES // tp, WIDTH),
            init_method=torch.nn.init.normal_,
            tp_mode=True,
            tp_split_dim=0,
        )
        self.scale = bmt.DistributedParameter(
            torch.empty(WIDTH), init_method=torch.nn.init.uniform_
        )
        self.down = bmt.DistributedParameter(
            torch.empty(WIDTH, FEATURES // tp),
            init_method=torch.nn.init.normal_,
            tp_mode=True,
            tp_split_dim=1,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tp = bmt.config["tp_comm"]
        rows = bmt.distributed.all_gather(x * self.scale, tp).flatten(0, 1)
        return bmt.distributed.reduce_scatter(
            torch.tanh(rows @ self.up.t()) @ self.down.t(), "sum", tp
        )


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Parameter(torch.empty(FEATURES, WIDTH).normal_())
        self.scale = torch.nn.Parameter(torch.empty(WIDTH).uniform_())
        self.down = torch.nn.Parameter(torch.empty(WIDTH, FEATURES).normal_())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh((x * self.scale) @ self.up.t()) @ self.down.t()


def build(blocked: bool, zero_level: int = 3) -> torch.nn.Module:
    torch.manual_seed(3)
    parts = torch.nn.ModuleList([Parallel(), Parallel()])
    for part in parts:
        bmt.init_parameters(part)
    model: torch.nn.Module = torch.nn.Sequential(*parts)
    if blocked:
        model = bmt.TransformerBlockList(
            [bmt.Block(part, use_checkpoint=True, zero_level=zero_level) for part in parts]
        )
    if bmt.device().type != "cpu":  # where the same seed gives other numbers
        model.load_state_dict(plain_model().state_dict())
    return model


def plain_model() -> torch.nn.Module:
    torch.manual_seed(3)
    return torch.nn.Sequential(Plain(), Plain())


def batch(step: int) -> torch.Tensor:
    """Rows of all four ranks of the largest world; a smaller world takes more rows a rank."""
    return torch.randn(4 * ROWS, WIDTH, generator=torch.Generator().manual_seed(step))


def train(
    model: torch.nn.Module, manager: Any, optimizer: torch.optim.Optimizer, steps: range
) -> list[float]:
    norms = []
    for step in steps:
        x = batch(step).chunk(bmt.world_size())[bmt.rank()].to(bmt.device())
        manager.zero_grad()
        manager.backward(model(x).square().mean())
        norms.append(float(manager.clip_grad_norm(optimizer.param_groups, 1.0)))
        manager.step()
    return norms


def run(blocked: bool, zero_level: int, folder: str, own_adam: bool) -> dict[str, Any]:
    model = build(blocked, zero_level)
    start = {name: value.clone() for name, value in model.state_dict().items()} if blocked else {}
    kind: Any = bmt.optim.AdamOptimizer if own_adam else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    norms = train(model, manager, optimizer, range(4))
    bmt.save(model, pathlib.Path(folder) / "model.pt")
    bmt.save(model, pathlib.Path(folder) / "model.safetensors")
    state = manager.state_dict(gather_opt=True)
    sizes = {name: own_slice(param).numel() for name, param in model.named_parameters()}
    whole = {
        name: sharded_parameter(param).gather_all().detach().cpu().clone()
        for name, param in model.named_parameters()
    }
    return {"start": start, "norms": norms, "state": state, "whole": whole, "sizes": sizes}


def resume(file: str, state: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build(True)
    bmt.load(model, file)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2, weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    manager.load_state_dict(state)
    norms = train(model, manager, optimizer, range(4, 7))
    return norms, {
        name: sharded_parameter(param).gather_all().detach().cpu().clone()
        for name, param in model.named_parameters()
    }


def plain_run(
    steps: int,
) -> tuple[dict[str, torch.Tensor], list[float], torch.nn.Module, torch.optim.Optimizer]:
    model = plain_model()
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    norms = []
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return start, norms, model, optimizer


@pytest.mark.parametrize(("ranks", "tp"), GRID)
@pytest.mark.parametrize(("blocked", "zero_level"), [(True, 3), (True, 2), (False, 3)])
def test_split_parameters_train_as_whole_ones(
    ranks: int, tp: int, blocked: bool, zero_level: int, tmp_path: pathlib.Path
) -> None:
    start, norms, model, optimizer = plain_run(4)
    results = run_ranks(
        run, ranks, blocked, zero_level, str(tmp_path), blocked, init={"tp_size": tp}
    )
    for result in results:
        for name, value in result["start"].items():
            assert torch.equal(value, start[name]), name
        torch.testing.assert_close(result["norms"], norms, rtol=1e-5, atol=1e-6)
        for (name, expected), index in zip(model.named_parameters(), range(6), strict=True):
            torch.testing.assert_close(
                result["whole"][name], expected.detach(), rtol=1e-5, atol=1e-6
            )
            ours, theirs = (
                result["state"]["optimizers"][0]["state"][index],
                optimizer.state[expected],
            )
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-7)
            assert float(ours["step"]) == 4
    # Each element is owned by exactly one rank.
    for name, expected in model.named_parameters():
        assert sum(result["sizes"][name] for result in results) == expected.numel(), name
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    for name, expected in model.named_parameters():
        torch.testing.assert_close(saved[name], expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (1, 1)), ((1, 1), (4, 2)), ((4, 2), (4, 4)), ((4, 4), (2, 1))]
)
@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
def test_files_do_not_depend_on_the_split(
    before: tuple[int, int], after: tuple[int, int], suffix: str, tmp_path: pathlib.Path
) -> None:
    _, norms, model, _ = plain_run(7)
    first = run_ranks(run, before[0], True, 3, str(tmp_path), True, init={"tp_size": before[1]})[0]
    results = run_ranks(
        resume,
        after[0],
        str(tmp_path / f"model.{suffix}"),
        first["state"],
        init={"tp_size": after[1]},
    )
    for later, whole in results:
        torch.testing.assert_close(later, norms[4:], rtol=1e-5, atol=1e-6)
        for name, expected in model.named_parameters():
            torch.testing.assert_close(whole[name], expected.detach(), rtol=1e-5, atol=1e-6)


def states() -> None:
    model = build(True)
    full = {name: torch.randn_like(value) for name, value in plain_model().state_dict().items()}
    full = {name: bmt.distributed.broadcast(value, 0) for name, value in full.items()}
    model.load_state_dict(full)
    for name, value in model.state_dict().items():
        assert torch.equal(value, full[name]), name
    param = sharded_parameter(dict(model.named_parameters())["0.down"])
    assert param._original_shape == (WIDTH, FEATURES // 2) and param._tp_original_shape == (
        WIDTH,
        FEATURES,
    )
    assert torch.equal(param.gather(), full["0.down"].chunk(2, 1)[bmt.config["tp_rank"]])
    slices = bmt.distributed.all_gather(param.local, bmt.config["tp_comm"])
    assert torch.equal(param.tp_gather(), slices.view(-1))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.down"):
        model.load_state_dict({**full, "0.down": full["0.down"].chunk(2, 1)[0]})
    with pytest.raises(ParameterError, match=r"tp_split_dim is 2 .*expected 0 to 1"):
        bmt.DistributedParameter(torch.empty(2, 2), tp_mode=True, tp_split_dim=2)


@pytest.mark.parametrize("ranks", [2, 4])
def test_whole_tensors_in_and_out(ranks: int) -> None:
    run_ranks(states, ranks, init={"tp_size": 2})
