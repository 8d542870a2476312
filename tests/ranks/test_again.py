"""`init_distributed` again: after a run in the same process, and after a failure."""

from __future__ import annotations

import os
import pathlib
import socket
import time
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.waiting import wait_for

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, JoinError, NotInitializedError
from bmtrain.runtime import world


def trained() -> list[torch.Tensor]:
    """The parameters after three steps."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(*[bmt.Block(torch.nn.Linear(6, 6)) for _ in range(2)])
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2)
    manager = bmt.optim.OptimManager(loss_scale=None)
    manager.add_optimizer(optimizer)
    for _ in range(3):
        manager.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(bmt.rank()))
        manager.backward(model(x).square().sum())
        manager.clip_grad_norm(optimizer.param_groups, 1.0)
        manager.step()
    return [bmt.gather_result(param.detach()).clone() for param in model.parameters()]


def run_three_times(init: dict[str, Any]) -> None:
    runs = []
    for _ in range(3):
        bmt.init_distributed(device="cpu", timeout=30, **init)
        runs.append(trained())
        world.shutdown()
        world.shutdown()  # does no harm
        with pytest.raises(NotInitializedError):
            bmt.synchronize()
    for run in runs[1:]:
        for found, expected in zip(run, runs[0], strict=True):
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("hosted", [False, True], ids=["launcher", "rank 0"])
def test_a_run_after_a_run(hosted: bool) -> None:
    """The same numbers, bit by bit, whoever hosts the store."""
    if hosted:
        place = {"init_method": f"tcp://127.0.0.1:{free_port()}"}
        run_ranks(without_agent, 2, place, join=False)
        return
    for ranks in (1, 2):
        run_ranks(run_three_times, ranks, {}, join=False)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


def without_agent(init: dict[str, Any]) -> None:
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    run_three_times(init)


def test_a_run_after_a_run_by_a_file(tmp_path: pathlib.Path) -> None:
    run_ranks(run_three_times, 2, {"init_method": f"file://{tmp_path}/meeting"}, join=False)


def refused(**arguments: Any) -> str:
    with pytest.raises(ConfigurationError) as caught:
        bmt.init_distributed(device="cpu", **arguments)
    assert not bmt.is_initialized()
    return str(caught.value)


def try_again(given_up: str) -> None:
    """Whatever was wrong, mended it works."""
    right = dict(os.environ)
    for name, value, expected in (
        ("MASTER_PORT", "twenty", "whole number"),
        ("MASTER_PORT", "70000", "1 to 65535"),
        ("MASTER_PORT", "", "MASTER_PORT is not set"),
        ("RANK", "2", "from 0 to WORLD_SIZE - 1"),
        ("RANK", "-1", "from 0 to WORLD_SIZE - 1"),
        ("WORLD_SIZE", "two", "whole number"),
    ):
        os.environ[name] = value
        assert expected in refused()
        os.environ.update(right)
    for arguments, expected in (
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": "60"}, "timeout is '60'"),
        ({"watchdog": -1}, "watchdog is -1"),
        ({"watchdog": 61, "timeout": 60}, "up to timeout"),
        ({"watchdog": "on"}, "watchdog is 'on'"),
        ({"tp_size": 3}, "3"),
        ({"init_method": "tcp://127.0.0.1:port"}, "a port from 0"),
        ({"init_method": "tcp://127.0.0.1"}, "with a port"),
    ):
        assert expected in refused(**arguments)
    # nobody is there
    os.environ["MASTER_PORT"] = str(free_port())
    begin = time.monotonic()
    with pytest.raises(JoinError, match=r"could not join the run at 127\.0\.0\.1:\d+ "):
        bmt.init_distributed(device="cpu", timeout=2)
    assert time.monotonic() - begin < 15
    os.environ.update(right)
    # the other one comes too late
    if os.environ["RANK"] == "1":
        wait_for(pathlib.Path(given_up).exists, "rank 0 to give up", seconds=30)
    else:
        with pytest.raises(JoinError):
            bmt.init_distributed(device="cpu", timeout=2)
        pathlib.Path(given_up).touch()
    bmt.init_distributed(device="cpu", timeout=30)
    assert len(trained()) == 4


def test_a_failed_attempt_can_be_repeated(tmp_path: pathlib.Path) -> None:
    run_ranks(try_again, 2, str(tmp_path / "given-up"), join=False)
