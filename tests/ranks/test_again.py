"""`init_distributed` again: after a run in the same process, and after a failure."""

import os
import time

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import free_port, run_ranks
from tests.waiting import wait_for

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, JoinError, NotInitializedError
from bmtrain.runtime import world


def trained():
    """The parameters after three steps."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(*[bmt.Block(torch.nn.Linear(6, 6)) for _ in range(2)])
    manager = models.managed(bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2), loss_scale=None)
    for _ in range(3):
        manager.zero_grad()
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(bmt.rank()))
        manager.backward(model(x).square().sum())
        manager.clip_grad_norm(model.parameters(), 1.0)
        manager.step()
    return [bmt.gather_result(param.detach()).clone() for param in model.parameters()]


def run_three_times(init, has_agent=True):
    if not has_agent:
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    runs = []
    for _ in range(3):
        bmt.init_distributed(device="cpu", timeout=30, **init)
        runs.append(trained())
        world.shutdown()
        world.shutdown()  # does no harm
        with pytest.raises(NotInitializedError):
            bmt.synchronize()
    torch.testing.assert_close(runs[1:], runs[:1] * 2, rtol=0, atol=0)


@pytest.mark.parametrize("host", ["launcher", "rank 0", "file", "alone"])
def test_a_run_after_a_run(host, tmp_path):
    """The same numbers, bit by bit, whoever hosts the store."""
    places = {"rank 0": f"tcp://127.0.0.1:{free_port()}", "file": f"file://{tmp_path}/meeting"}
    init = {"init_method": places[host]} if host in places else {}
    run_ranks(run_three_times, 1 if host == "alone" else 2, init, host != "rank 0", join=False)


WRONG_ENVIRONMENT = (
    ("MASTER_PORT", "twenty", "whole number"),
    ("MASTER_PORT", "70000", "1 to 65535"),
    ("MASTER_PORT", "", "MASTER_PORT is not set"),
    ("RANK", "2", "from 0 to the number of ranks - 1"),
    ("RANK", "-1", "from 0 to the number of ranks - 1"),
    ("WORLD_SIZE", "two", "whole number"),
)
WRONG_ARGUMENTS = (
    ({"timeout": 0}, "timeout is 0"),
    ({"timeout": float("nan")}, "timeout is nan"),
    ({"timeout": "60"}, "timeout is '60'"),
    ({"watchdog": -1}, "watchdog is -1"),
    ({"watchdog": 61, "timeout": 60}, "up to timeout"),
    ({"watchdog": "on"}, "watchdog is 'on'"),
    ({"tp_size": 3}, "3"),
    ({"init_method": "tcp://127.0.0.1:port"}, "a port from 0"),
    ({"init_method": "tcp://127.0.0.1"}, "with a port"),
)


def refuse(expected, **arguments):
    with pytest.raises(ConfigurationError, match=expected):
        bmt.init_distributed(device="cpu", **arguments)
    assert not bmt.is_initialized()


def try_again(given_up):
    """Whatever was wrong, mended it works."""
    right = dict(os.environ)
    for name, value, expected in WRONG_ENVIRONMENT:
        os.environ[name] = value
        refuse(expected)
        os.environ.update(right)
    for arguments, expected in WRONG_ARGUMENTS:
        refuse(expected, **arguments)
    # nobody is there
    os.environ["MASTER_PORT"] = str(free_port())
    begin = time.monotonic()
    with pytest.raises(JoinError, match=r"could not join the run at 127\.0\.0\.1:\d+ "):
        bmt.init_distributed(device="cpu", timeout=2)
    assert time.monotonic() - begin < 15
    os.environ.update(right)
    # the other one comes too late
    if os.environ["RANK"] == "1":
        wait_for(given_up.exists, "rank 0 to give up", seconds=30)
    else:
        with pytest.raises(JoinError):
            bmt.init_distributed(device="cpu", timeout=2)
        given_up.touch()
    bmt.init_distributed(device="cpu", timeout=30)
    assert len(trained()) == 4


def test_a_failed_attempt_can_be_repeated(tmp_path):
    run_ranks(try_again, 2, tmp_path / "given-up", join=False)
