"""What bad input gets: an error of the documented type with name, got, expected and remedy, on
every rank, and no hang.
"""

from __future__ import annotations

import math
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt
from bmtrain.errors import CheckpointError, ConfigurationError, NotInitializedError, ParameterError
from bmtrain.optim import AdamOffloadOptimizer, AdamOptimizer, OptimManager, clip_grad_norm


def before_init() -> None:
    uses: dict[str, Callable[[], object]] = {
        "Block": lambda: bmt.Block(nn.Linear(2, 2)),
        "DistributedParameter": lambda: bmt.DistributedParameter(torch.ones(2)),
        "BMTrainModelWrapper": lambda: bmt.BMTrainModelWrapper(nn.Linear(2, 2)),
        "init_parameters": lambda: bmt.init_parameters(nn.Linear(2, 2)),
        "AdamOptimizer": lambda: AdamOptimizer([nn.Parameter(torch.ones(2))]),
        "AdamOffloadOptimizer": lambda: AdamOffloadOptimizer([nn.Parameter(torch.ones(2))]),
        "OptimManager": OptimManager,
        "clip_grad_norm": lambda: bmt.optim.clip_grad_norm([nn.Parameter(torch.ones(2))], 1.0),
        "sum_loss": lambda: bmt.sum_loss(torch.ones(())),
        "synchronize": bmt.synchronize,
        "load": lambda: bmt.load(nn.Linear(2, 2), "nowhere.pt"),
        "save": lambda: bmt.save(nn.Linear(2, 2), "nowhere.pt"),
        "TransformerBlockList": lambda: bmt.TransformerBlockList([nn.Linear(2, 2)]),
        "see_memory": lambda: bmt.see_memory("now"),
    }
    for name, use in uses.items():
        try:
            use()
        except NotInitializedError as error:
            assert "init_distributed()" in str(error), name
        else:
            raise AssertionError(f"{name} before init_distributed raised nothing")
    assert (bmt.rank(), bmt.world_size()) == (0, 1)


def test_use_before_init() -> None:
    """Everything that needs the process group says so and names the remedy."""
    run_ranks(before_init, 1, join=False)


def second_init() -> None:
    with pytest.raises(RuntimeError, match="second time"):
        bmt.init_distributed(device="cpu")
    bmt.synchronize()


WRONG_VALUES: tuple[dict[str, Any], ...] = (
    {"zero_level": 1},
    {"num_buffers": 1},
    {"num_micro_batches": 0},
    {"reduce_dtype": torch.int32},
    {"num_buffers": 2.5},
    {"compile": "yes"},
    {"fp8": 1},
    {"fp8": None},
    {"timeout": -1},
    {"timeout": 0},
)


def wrong_sizes() -> None:
    sizes: tuple[dict[str, Any], ...] = (
        {"tp_size": 2},
        {"pipe_size": 2},
        {"pipe_size": 3, "tp_size": 2},
    )
    for arguments in sizes:
        with pytest.raises(ConfigurationError, match=r"3 ranks.*(tp_size|pipe_size).*divisible by"):
            bmt.init_distributed(device="cpu", **arguments)
    for arguments in WRONG_VALUES:
        with pytest.raises(ConfigurationError, match=f"{next(iter(arguments))}.*expected"):
            bmt.init_distributed(device="cpu", **arguments)
    os.environ["RANK"] = "two"
    with pytest.raises(ConfigurationError, match=r"RANK.*'two'.*torchrun"):
        bmt.init_distributed(device="cpu")


def test_a_world_that_cannot_be_divided() -> None:
    """On every rank, before any group is made."""
    run_ranks(wrong_sizes, 3, join=False)


def bad_modules() -> None:
    with pytest.raises(ConfigurationError, match="compile is 'yes': expected True, False, or None"):
        bmt.Block(nn.Linear(2, 2), compile="yes")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"Block got int: expected a torch\.nn\.Module"):
        bmt.Block(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"zero_level is 1.*expected 2"):
        bmt.Block(nn.Linear(2, 2), zero_level=1)
    with pytest.raises(ConfigurationError, match="mode 'SPAM'"):
        bmt.Block(nn.Linear(2, 2), mode="SPAM")
    whole = nn.Linear(2, 2)
    whole.register_parameter("phase", nn.Parameter(torch.ones(2, dtype=torch.complex64)))
    with pytest.raises(ParameterError, match=r"phase.*complex64.*buffer"):
        bmt.Block(whole)
    with pytest.raises(ParameterError, match="got list: expected a tensor"):
        bmt.DistributedParameter([1.0])  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="BMTrainModelWrapper got str"):
        bmt.BMTrainModelWrapper("model")  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="num_hidden is 0"):
        bmt.TransformerBlockList([nn.Linear(2, 2)], num_hidden=0)
    with pytest.raises(ConfigurationError, match="block list got str"):
        bmt.TransformerBlockList(["layer"])  # type: ignore[list-item]
    with pytest.raises(ConfigurationError, match=r"got 0 positional arguments.*num_hidden=1"):
        bmt.TransformerBlockList([nn.Linear(2, 2)])()
    with pytest.raises(ConfigurationError, match=r"returned 1 values.*num_hidden=2"):
        bmt.TransformerBlockList([nn.Bilinear(2, 2, 2)], num_hidden=2)(
            torch.ones(1, 2), torch.ones(1, 2)
        )
    layer = bmt.BMTrainModelWrapper(nn.Linear(2, 2))
    with pytest.raises(ParameterError, match=r"weight.*to tie two parameters"):
        layer.weight = torch.ones(2, 2)
    with pytest.raises(ParameterError, match="assign=False"):
        layer.load_state_dict(layer.state_dict(), assign=True)
    with pytest.raises(
        ParameterError, match=r"(weight|bias).*float32.*float16.*before it is sharded"
    ):
        layer.half()
    with pytest.raises(ParameterError, match=r"weight.*meta.*init_method.*checkpoint"):
        bmt.init_parameters(bmt.Block(NoReset()))
    with pytest.raises(ConfigurationError, match="BMTrainModelWrapper"):
        bmt.init_parameters(nn.Linear(2, 2))
    with pytest.raises(KeyError, match="world_size"):
        _ = bmt.config["world_sise"]
    with pytest.raises(ConfigurationError, match="cannot be written"):
        bmt.config["rank"] = 3


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


def loading() -> None:
    model = bmt.BMTrainModelWrapper(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)))
    before = model.state_dict()
    with pytest.raises(RuntimeError, match=r"(?s)0\.weight.*\[5, 4\].*\[5, 3\]"):
        model.load_state_dict({**before, "0.weight": torch.ones(5, 4)})
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*1\.bias"):
        model.load_state_dict({name: value for name, value in before.items() if name != "1.bias"})
    with pytest.raises(RuntimeError, match=r"(?s)Unexpected key.*spam"):
        model.load_state_dict({**before, "spam": torch.ones(1)})
    found = model.load_state_dict(
        {"0.weight": torch.ones(5, 3), "spam": torch.ones(1)}, strict=False
    )
    assert found.unexpected_keys == ["spam"] and sorted(found.missing_keys) == [
        "0.bias",
        "1.bias",
        "1.weight",
    ]
    assert torch.equal(model.state_dict()["0.weight"], torch.ones(5, 3))


def bad_losses() -> None:
    model = bmt.Block(nn.Linear(3, 3))
    manager = OptimManager()
    manager.add_optimizer(AdamOptimizer(model.parameters()))
    with pytest.raises(ConfigurationError, match=r"shape \(2, 3\): expected a scalar.*mean"):
        manager.backward(model(torch.ones(2, 3)))
    with pytest.raises(ConfigurationError, match="does not require grad"):
        manager.backward(torch.ones(()))
    with pytest.raises(ConfigurationError, match="got float: expected a scalar loss"):
        manager.backward(1.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="got no loss"):
        manager.backward()
    manager.backward(model(torch.ones(2, 3)).sum())  # nothing was lost


def bad_optimizers() -> None:
    for kind in (AdamOptimizer, AdamOffloadOptimizer):
        with pytest.raises(ValueError, match="empty parameter list"):
            kind([])
        with pytest.raises(
            ParameterError,
            match=rf"{kind.__name__}.*\(2, 3\) on meta.*computes on cpu.*move the model",
        ):
            kind([nn.Parameter(torch.ones(2, 3, device="meta"))])
        for wrong in (
            {"lr": -1},
            {"betas": (1.0, 0.9)},
            {"eps": -1},
            {"weight_decay": -1},
            {"hold_steps": -1},
        ):
            with pytest.raises(ConfigurationError, match=next(iter(wrong))):
                kind([nn.Parameter(torch.ones(1))], **wrong)
    manager = OptimManager()
    with pytest.raises(ConfigurationError, match="add_optimizer got str"):
        manager.add_optimizer("adam")  # type: ignore[arg-type]
    optimizer = AdamOptimizer([nn.Parameter(torch.ones(1))])
    manager.add_optimizer(optimizer)
    with pytest.raises(ConfigurationError, match="has already"):
        manager.add_optimizer(optimizer)
    out_of_range: list[dict[str, Any]] = [
        {"loss_scale": 0},
        {"loss_scale": -2},
        {"loss_scale": 1, "loss_scale_factor": 1},
        {"grad_scale": 0},
        {"grad_scale": math.nan},
    ]
    for values in out_of_range:
        with pytest.raises(ConfigurationError, match=r"expected"):
            OptimManager(**values)
    with pytest.raises(ConfigurationError, match="norm_type is 0"):
        manager.clip_grad_norm(optimizer.param_groups, 1.0, norm_type=0)
    for max_norm in (0, -1.0, math.nan):
        with pytest.raises(ConfigurationError, match="max_norm is"):
            manager.clip_grad_norm(optimizer.param_groups, max_norm)
    for scale in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ConfigurationError, match="scale is"):
            clip_grad_norm(optimizer.param_groups, 1.0, scale=scale)
    with pytest.raises(CheckpointError, match="2 optimizers, this manager 1"):
        manager.load_state_dict({"optimizers": [{}, {}], "lr_schedulers": [None]})
    with pytest.raises(CheckpointError, match="'state' and 'param_groups'"):
        optimizer.load_state_dict({"spam": 1})
    with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters.*\[1\]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0, 1]}]})
    block = bmt.Block(nn.Linear(3, 2))
    sharded = AdamOptimizer(block.parameters())
    state = sharded.state_dict(gather=True)
    state["state"][0]["exp_avg"] = torch.ones(3, 3)
    with pytest.raises(CheckpointError, match=r"exp_avg.*parameter 0.*\(3, 3\).*\(2, 3\)"):
        sharded.load_state_dict(state)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("program", [second_init, bad_modules, loading, bad_losses, bad_optimizers])
def test_bad(program: Callable[[], None], world_size: int) -> None:
    """Each bad argument is refused on every rank, with what was got and what was expected."""
    run_ranks(program, world_size, timeout=30)


SCRIPT = """
import time, torch, bmtrain as bmt
bmt.init_distributed()
block = bmt.Block(torch.nn.Linear(4, 4))
if bmt.rank() == 1:
    raise KeyError("the culprit")
block(torch.ones(1, 4)).sum().backward()
time.sleep(300)
"""


def test_a_rank_that_raises_ends_the_job(tmp_path: pathlib.Path) -> None:
    """Under torchrun the others, who wait in a collective, are ended within seconds; the first
    traceback is the culprit's.
    """
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    source = pathlib.Path(__file__).parents[2] / "src"
    environment = {
        **os.environ,
        "PYTHONPATH": str(source),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
    ]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=80, check=False
    )
    elapsed = time.monotonic() - begin
    assert done.returncode != 0
    assert (
        "[rank 1] this rank failed" in done.stderr and "KeyError: 'the culprit'" in done.stderr
    ), done.stderr
    assert done.stderr.index("Traceback") > done.stderr.index("[rank 1] this rank failed"), (
        done.stderr
    )
    assert elapsed < 40, f"took {elapsed:.0f} s"
