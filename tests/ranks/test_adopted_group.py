"""A process group that exists already: adopted, not touched, and the process left to its owner."""

from __future__ import annotations

import datetime
import faulthandler
import os
import pathlib
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.faults.ranks import run
from tests.launching.program import compare_with_one_process
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, RanksPartedError
from bmtrain.runtime import world
from bmtrain.runtime.hosts import local_places
from model_center.training.stop import SIGNALS, StopRequest


def theirs(**more: Any) -> None:
    """What somebody else's program does first."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=33), **more)


def manners() -> list[object]:
    """What a guest must not change."""
    return [
        sys.excepthook,
        threading.excepthook,
        faulthandler.is_enabled(),
        [signal.getsignal(number) for number in signal.valid_signals()],
        dict(os.environ),
    ]


def runs_beside_a_group(init: dict[str, Any]) -> None:
    faulthandler.disable()
    theirs()
    before, default = manners(), dist.group.WORLD
    beside = dist.new_group()
    for _ in range(3):
        bmt.init_distributed(device="cpu", timeout=30, **init)
        assert (bmt.rank(), bmt.world_size()) == (dist.get_rank(), dist.get_world_size())
        current = world.current()
        assert current.is_guest and current.launcher is None
        assert (current.local_rank, current.local_size) == (bmt.rank(), bmt.world_size())
        compare_with_one_process()
        assert manners() == before
        world.shutdown()
        world.shutdown()
        assert dist.group.WORLD is default and manners() == before
        for group in (None, beside):  # they still work
            x = torch.ones(1)
            dist.all_reduce(x, group=group)
            assert x.item() == dist.get_world_size()
    dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_values_and_manners(ranks: int) -> None:
    """Gradients and parameters of one process, three runs one after another, and the owner's group
    as it was.
    """
    run_ranks(runs_beside_a_group, ranks, {}, join=False)


def test_meshes_of_several_axes() -> None:
    run_ranks(runs_beside_a_group, 2, {"tp_size": 2}, join=False)
    run_ranks(runs_beside_a_group, 2, {"pipe_size": 2}, join=False)


def counted() -> None:
    """What the owner's bookkeeping holds before and after."""
    theirs()
    groups = torch.distributed.distributed_c10d._world.pg_map
    before = len(groups)
    bmt.init_distributed(device="cpu")
    assert len(groups) > before
    world.shutdown()
    assert len(groups) == before
    dist.destroy_process_group()


def test_nothing_is_left_behind() -> None:
    run_ranks(counted, 2, join=False)


def owner_goes_first(folder: str) -> None:
    """The owner destroys its group, with ours on it, and makes another at another place.

    (At the same place torch's own groups meet the addresses of those before.)
    """

    def again(name: str) -> None:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        theirs(init_method=f"file://{folder}/{name}", rank=rank, world_size=size)

    for name in "ab":
        again(name)
        bmt.init_distributed(device="cpu", timeout=30)
        compare_with_one_process()
        dist.destroy_process_group()
    again("c")
    world.shutdown()  # must not take the new one for its own
    dist.barrier()
    bmt.init_distributed(device="cpu", timeout=30)
    compare_with_one_process()


def test_the_owner_ends_its_group_first(tmp_path: pathlib.Path) -> None:
    run_ranks(owner_goes_first, 2, str(tmp_path), join=False)


def refusals(folder: str) -> None:
    theirs()
    for arguments, words in (
        ({"tp_size": 2 * dist.get_world_size()}, "cannot be split"),
        ({"init_method": "tcp://127.0.0.1:4000"}, "initialised already"),
        ({"init_method": f"file://{folder}/x"}, "initialised already"),
        ({"device": "meta"}, "not supported"),
        ({"zero_level": 1}, "zero_level"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            bmt.init_distributed(**arguments)
        assert not bmt.is_initialized() and dist.is_initialized()
    bmt.init_distributed(device="cpu")
    compare_with_one_process()
    with pytest.raises(RuntimeError, match="second time"):
        bmt.init_distributed(device="cpu")


def test_refusals_leave_the_group(tmp_path: pathlib.Path) -> None:
    run_ranks(refusals, 2, str(tmp_path), join=False)


def one_without_a_device() -> str:
    """Rank 1 has none; all hear of it."""
    theirs()
    if dist.get_rank() == 1:
        vars(world)["_pick_device"] = broken
    with pytest.raises(ConfigurationError) as caught:
        bmt.init_distributed(device="cpu")
    dist.barrier()
    return str(caught.value)


def broken(local_rank: int, wanted: object) -> torch.device:
    raise ConfigurationError("no device here")


def test_a_device_that_one_rank_lacks_is_told_to_all() -> None:
    found = run_ranks(one_without_a_device, 2, join=False)
    assert found == ["rank 1: no device here", "no device here"]


def other_stores(folder: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    theirs(init_method=f"file://{folder}/theirs", rank=rank, world_size=size)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    bmt.init_distributed(device="cpu", timeout=30)
    compare_with_one_process()


def test_no_variables_and_a_store_of_another_kind(tmp_path: pathlib.Path) -> None:
    run_ranks(other_stores, 2, str(tmp_path), join=False)


def in_a_thread(program: Callable[..., None], *args: Any) -> None:
    """Off the main thread, as workers of Ray run it."""
    errors: list[BaseException] = []

    def call() -> None:
        try:
            program(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def test_beside_the_main_thread() -> None:
    run_ranks(in_a_thread, 2, runs_beside_a_group, {}, join=False)
    run_ranks(in_a_thread, 2, own_group_in_a_thread, join=False)


def own_group_in_a_thread() -> None:
    before = sys.excepthook
    bmt.init_distributed(device="cpu", timeout=30)
    assert world.current().is_guest and sys.excepthook is before
    compare_with_one_process()
    world.shutdown()
    assert not dist.is_initialized()


def stops() -> list[bool]:
    """No signal is taken, and patience that ends does not end the process."""
    theirs()
    bmt.init_distributed(device="cpu")
    before = [signal.getsignal(number) for number in SIGNALS]
    request = StopRequest(patience=0.2)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    if bmt.rank() == 1:
        request.request_stop(requeue=True)
    time.sleep(1)
    answers = [request.agreed(), request.is_requeue()]
    request.restore()
    return answers


def test_a_stop_is_asked_for_by_calls_only() -> None:
    assert run_ranks(stops, 2, join=False) == [[True, True]] * 2


def stands_still() -> None:
    """Rank 1 stays away until the watchdogs have told, and longer."""
    theirs()
    bmt.init_distributed(device="cpu", watchdog=1.0, timeout=60)
    world.current().watchdog.step()
    if bmt.rank() == 1:
        time.sleep(10)
    bmt.synchronize()
    compare_with_one_process()
    print("went on")


def test_the_watchdog_reports_and_ends_nothing(tmp_path: pathlib.Path) -> None:
    left = run(stands_still, folder=tmp_path)
    assert left.codes == [0, 0], left.printed
    told = "".join(left.printed)
    assert told.count("the run stands still") == 1 and told.count("went on") == 2
    assert "Nothing is ended" in told and "exit code" not in told
    assert "time.sleep(10)" in told  # where rank 1 was


def fails() -> None:
    """One rank raises: its owner gets the error, and the process goes on."""
    theirs()
    bmt.init_distributed(device="cpu", timeout=3)
    if bmt.rank() == 1:
        with pytest.raises(ZeroDivisionError):
            print(1 // 0)
    else:
        with pytest.raises(RanksPartedError):
            bmt.synchronize()
    x = torch.ones(1)
    dist.all_reduce(x)
    print(f"theirs: {x.item()}")
    raise KeyError("at the end")


def test_errors_are_the_owners(tmp_path: pathlib.Path) -> None:
    left = run(fails, folder=tmp_path)
    for printed in left.printed:
        assert "theirs: 2.0" in printed and "KeyError: 'at the end'" in printed
        assert "this rank failed; the run ends" not in printed
    assert left.codes == [1, 1]


def test_local_places_by_hosts() -> None:
    assert local_places(["a", "b", "a", "a"]) == [(0, 3), (0, 1), (1, 3), (2, 3)]
