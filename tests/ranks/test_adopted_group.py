"""A process group that exists already: adopted, not touched, and the process left to its owner."""

import datetime
import faulthandler
import os
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist
from tests.faults.ranks import run
from tests.launching.program import compare_with_one_process
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, RanksDivergedError
from bmtrain.runtime import world
from model_center.training.stop import SIGNALS, StopRequest


def theirs(**more):
    """What somebody else's program does first."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=33), **more)


def ours(**more):
    bmt.init_distributed(device="cpu", timeout=30, **more)


def manners():
    """What a guest must not change; his groups are gone with him."""
    signals = [signal.getsignal(number) for number in signal.valid_signals()]
    hooks = [sys.excepthook, threading.excepthook, faulthandler.is_enabled()]
    groups = len(torch.distributed.distributed_c10d._world.pg_map)
    return [*hooks, signals, dict(os.environ), dist.group.WORLD, groups]


def runs_beside_a_group(init):
    faulthandler.disable()
    theirs()
    beside = dist.new_group()
    before = manners()
    for _ in range(2):
        ours(**init)
        assert (bmt.rank(), bmt.world_size()) == (dist.get_rank(), dist.get_world_size())
        current = world.current()
        assert current.is_guest and current.launcher is None
        assert (current.local_rank, current.local_size) == (bmt.rank(), bmt.world_size())
        compare_with_one_process()
        during = manners()
        assert during[:-1] == before[:-1] and during[-1] > before[-1]
        world.shutdown()
        world.shutdown()
        assert manners() == before
        for group in (None, beside):  # they still work
            x = torch.ones(1)
            dist.all_reduce(x, group=group)
            assert x.item() == dist.get_world_size()
    for arguments, words in (
        ({"tp_size": 2 * dist.get_world_size()}, "cannot be split"),
        ({"init_method": "tcp://127.0.0.1:4000"}, "initialised already"),
        ({"init_method": "file:///x"}, "initialised already"),
        ({"device": "meta"}, "expected 'cpu' or 'cuda'"),
        ({"zero_level": 1}, "zero_level"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            bmt.init_distributed(**arguments)
        assert not bmt.is_initialized() and manners() == before
    ours()
    compare_with_one_process()
    with pytest.raises(bmt.errors.AlreadyInitializedError, match="open in this process"):
        ours()
    compare_with_one_process()


def in_a_thread(program, *args):
    """Off the main thread, as workers of Ray run it."""
    errors = []

    def call():
        try:
            program(*args)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]


def own_group():
    before = sys.excepthook
    ours()
    assert world.current().is_guest and sys.excepthook is before
    compare_with_one_process()
    world.shutdown()
    assert not dist.is_initialized()


LONG = pytest.mark.long


@pytest.mark.parametrize(
    ("ranks", "program", "args"),
    [
        (3, runs_beside_a_group, ({},)),
        (2, in_a_thread, (runs_beside_a_group, {"tp_size": 2})),
        pytest.param(2, runs_beside_a_group, ({"pipe_size": 2},), marks=LONG),
        (2, in_a_thread, (own_group,)),
    ],
)
def test_values_and_manners(ranks, program, args):
    """Gradients and parameters of one process, runs one after another, refusals between them, and
    the owner's group as it was; beside the main thread, too.
    """
    run_ranks(program, ranks, *args, join=False)


def owner_goes_first(folder):
    """The owner destroys its group, with ours on it, and makes another at another place.

    (At the same place torch's own groups meet the addresses of those before.) No variables, and
    stores of another kind.
    """
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    for name in "abc":
        theirs(init_method=f"file://{folder}/{name}", rank=rank, world_size=size)
        if name == "c":
            world.shutdown()  # must not take the new one for its own
            dist.barrier()
        ours()
        compare_with_one_process()
        if name != "c":
            dist.destroy_process_group()


def test_the_owner_ends_its_group_first(tmp_path):
    run_ranks(owner_goes_first, 2, str(tmp_path), join=False)


def broken(local_rank, wanted):
    raise ConfigurationError("no device here")


def errors_and_stops():
    """Rank 1 has no device: all hear of it. Then no signal is taken, and patience that ends does
    not end the process.
    """
    theirs()
    picks = vars(world)["_pick_device"]
    if dist.get_rank() == 1:
        vars(world)["_pick_device"] = broken
    with pytest.raises(ConfigurationError) as caught:
        ours()
    vars(world)["_pick_device"] = picks
    dist.barrier()
    ours()
    compare_with_one_process()
    before = [signal.getsignal(number) for number in SIGNALS]
    request = StopRequest(patience=0.2)
    assert [signal.getsignal(number) for number in SIGNALS] == before
    if bmt.rank() == 1:
        request.request_stop(requeue=True)
    time.sleep(0.5)
    answers = [request.agreed(), request.is_requeue()]
    request.restore()
    return [str(caught.value), *answers]


def test_errors_and_stops_are_told_to_all():
    found = run_ranks(errors_and_stops, 2, join=False)
    assert found == [["rank 1: no device here", True, True], ["no device here", True, True]]


def stands_still():
    """Rank 1 stays away until the watchdogs have told, and longer."""
    theirs()
    bmt.init_distributed(device="cpu", watchdog=1.0, timeout=60)
    world.current().watchdog.step()
    if bmt.rank() == 1:
        time.sleep(10)
    bmt.synchronize()
    compare_with_one_process()
    print("went on")


@pytest.mark.long
def test_the_watchdog_reports_and_ends_nothing(tmp_path):
    left = run(stands_still, folder=tmp_path)
    assert left.codes == [0, 0], left.printed
    told = "".join(left.printed)
    assert told.count("the run hangs") == 1 and told.count("went on") == 2
    assert "It is not ended" in told and "exit code" not in told
    assert "time.sleep(10)" in told  # where rank 1 was


def fails():
    """One rank raises: its owner gets the error, and the process goes on."""
    theirs()
    bmt.init_distributed(device="cpu", timeout=3)
    if bmt.rank() == 1:
        with pytest.raises(ZeroDivisionError):
            print(1 // 0)
    else:
        with pytest.raises(RanksDivergedError):
            bmt.synchronize()
    x = torch.ones(1)
    dist.all_reduce(x)
    print(f"theirs: {x.item()}")
    raise KeyError("at the end")


@pytest.mark.long
def test_errors_are_the_owners(tmp_path):
    left = run(fails, folder=tmp_path)
    for printed in left.printed:
        assert "theirs: 2.0" in printed and "KeyError: 'at the end'" in printed
        assert "this rank failed; the run ends" not in printed
    assert left.codes == [1, 1]
