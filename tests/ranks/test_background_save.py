"""save(non_blocking=True): training goes on while the file is being written, and however the
program ends a whole file stays.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import models
from tests.ranks.runner import ROOT, run_ranks

import bmtrain as bmt
from bmtrain.checkpoint import writer
from bmtrain.errors import CheckpointError

State = dict[str, torch.Tensor]


def net(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 64),
        torch.nn.ModuleList([torch.nn.Linear(64, 64)])[0],
        torch.nn.Linear(64, 3),
    )


class Held:
    """A step of writing that stops until the test lets it go on."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original, self.reached, self.go_on = original, threading.Event(), threading.Event()

    def __call__(self, *args: Any) -> Any:
        self.reached.set()
        if not self.go_on.wait(30):
            raise TimeoutError("nobody let the writer go on")
        return self.original(*args)

    def function(self) -> Callable[..., Any]:
        """For the place of a method: a function, unlike an object, gets the object it is called
        on.
        """

        def held(*args: Any) -> Any:
            return self(*args)

        return held


def train_while_held(folder: str, where: str) -> tuple[State, State, bool]:
    """Rank 0's writer stops in the middle; both ranks train, with all the communication of it,
    before it may go on.
    """
    file = pathlib.Path(folder, "model.pt")
    model = bmt.BMTrainModelWrapper(net(1))
    bmt.save(model, file)
    old = file.read_bytes()
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=0.1)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    at_call = models.cloned_state(model)
    held = Held(getattr(writer._File, where, None) or getattr(os, where))
    target: Any = writer._File if where == "write" else os
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, where, held.function())
        handle = bmt.save(model, file, non_blocking=True)
        if bmt.rank() == 0:
            assert held.reached.wait(30)
        for step in range(3):
            manager.zero_grad()
            manager.backward(model(torch.full((2, 5), step + 1.0)).square().mean())
            manager.step()
        losses = bmt.sum_loss(torch.ones(()))
        assert handle.done == (bmt.rank() != 0) and losses == 1 and file.read_bytes() == old
        later = models.cloned_state(model)
        second_waited = save_again(model, file.with_name("second.pt"), handle, held)
    bmt.synchronize()
    return at_call, later, second_waited


def save_again(
    model: torch.nn.Module, file: pathlib.Path, handle: bmt.checkpoint.Writing, held: Held
) -> bool:
    """The second save begins while the first is held, which is let go on half a second later."""
    released: list[float] = []

    def release() -> None:
        time.sleep(0.5)
        released.append(time.monotonic())
        held.go_on.set()

    thread = threading.Thread(target=release)
    thread.start()
    bmt.save(model, file, non_blocking=True).wait()
    thread.join()
    return handle.done and time.monotonic() >= released[0]


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_goes_on_while_the_file_is_written(
    tmp_path: pathlib.Path, world_size: int, where: str
) -> None:
    """Held in the first byte, before the disk has all, or before the new file takes the old one's
    name.
    """
    for at_call, later, second_waited in run_ranks(
        train_while_held, world_size, str(tmp_path), where
    ):
        assert second_waited
        assert not torch.equal(at_call["0.weight"], later["0.weight"])
        models.assert_same_dicts(
            torch.load(tmp_path / "model.pt"), at_call, "the file of the call", 0.0
        )
        models.assert_same_dicts(torch.load(tmp_path / "second.pt"), later, "the second file", 0.0)
    assert sorted(os.listdir(tmp_path)) == ["model.pt", "second.pt"]


# Ranks are forked from one process that has imported the library; each then ends as an interpreter
# does.
PROGRAM = """
    import atexit, os, signal, sys, time
    import torch
    import bmtrain as bmt

    def end_of(rank, kind, file):
        bmt.init_distributed(device="cpu")
        model = torch.nn.Linear(300, 300)
        model.weight.data.fill_(1.0)
        model = bmt.BMTrainModelWrapper(model)
        bmt.save(model, file)
        model.load_state_dict({"weight": torch.full((300, 300), 2.0), "bias": torch.zeros(300)})
        original = os.fsync
        os.fsync = lambda descriptor: (time.sleep(0.4), original(descriptor))
        if kind == "atexit":
            atexit.register(lambda: bmt.save(model, file, non_blocking=True))
            return
        bmt.save(model, file, non_blocking=True)
        if kind == "exit":
            sys.exit(3)
        if kind == "raise" and rank == 0:
            raise ValueError("the program fails")
        if kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        if kind == "twice":
            bmt.save(model, file, non_blocking=True)

    def start(rank, kind, world_size, port):
        child = os.fork()
        if child:
            return child
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        end_of(rank, kind, f"{kind}-{world_size}.pt")
        return 0

    def main():
        children = {}
        for argument in sys.argv[1:]:
            kind, port = argument.split(":")
            for world_size, rank in ((1, 0), (2, 0), (2, 1)):
                child = start(rank, kind, world_size, port)
                if not child:
                    return
                children.setdefault((kind, world_size), []).append(child)
        for names, own in children.items():
            print(*names, *(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in own), flush=True)

    main()
"""


def test_however_the_program_ends(tmp_path: pathlib.Path) -> None:
    """At its end, sys.exit, an exception, SIGTERM and in atexit functions: the new file, or else
    the old one, whole.
    """
    kinds = ("end", "exit", "raise", "term", "twice", "atexit")
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    stores = [
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
        for _ in kinds
    ]
    arguments = [f"{kind}:{store.port}" for kind, store in zip(kinds, stores, strict=True)]
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), *arguments]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ends = {
        tuple(line.split()[:2]): [int(code) for code in line.split()[2:]]
        for line in done.stdout.splitlines()
    }
    expected = {"end": 0, "exit": 3, "raise": 1, "term": -15, "twice": 0, "atexit": 0}
    for kind in kinds:
        for world_size in (1, 2):
            codes = ends[kind, str(world_size)]
            assert codes[0] == expected[kind], f"{kind}, {world_size} ranks: {codes}\n{done.stderr}"
            state = torch.load(tmp_path / f"{kind}-{world_size}.pt", weights_only=True)
            value = state["weight"].unique().item()
            # Signals, and errors where other ranks must be stopped, end the process at once: the
            # old file stays.
            is_sudden = kind == "term" or (kind == "raise" and world_size == 2)
            assert value == (1.0 if is_sudden else 2.0), f"{kind}, {world_size} ranks"
    assert "ValueError: the program fails" in done.stderr


def fails(path: pathlib.Path, tensors: object) -> None:
    raise OSError(28, "No space left on device")


def ask_again(file: str) -> list[str]:
    """What a handle says of a failed write: to the next save, and whenever it is asked."""
    model = bmt.BMTrainModelWrapper(net(0))
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "write_file", fails)
        handle = bmt.save(model, file, non_blocking=True)
        for ask in (lambda: bmt.save(model, file), handle.wait, handle.wait):
            with pytest.raises(CheckpointError) as caught:
                ask()
            said.append(str(caught.value))
    return said


def test_a_failed_write_is_told_by_every_wait(tmp_path: pathlib.Path) -> None:
    for said in run_ranks(ask_again, 2, str(tmp_path / "model.pt")):
        assert len(said) == 3
        assert all("No space left on device" in text for text in said)


def flush_but_the_folder(path: pathlib.Path) -> None:
    if path.is_dir():
        raise OSError(5, "Input/output error")


def save_into_a_folder_that_fails(file: str) -> str:
    model = bmt.BMTrainModelWrapper(net(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "flush_to_disk", flush_but_the_folder)
        with pytest.raises(CheckpointError) as caught:
            bmt.save(model, file)
    return str(caught.value)


def checkpoint_into_a_folder_that_fails(folder: str) -> str:
    model = bmt.BMTrainModelWrapper(net(1))
    with bmt.CheckpointManager(folder, background=False) as checkpoints:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "flush_to_disk", flush_but_the_folder)
            with pytest.raises(CheckpointError) as caught:
                checkpoints.save(1, model)
        other = bmt.BMTrainModelWrapper(net(2))
        assert checkpoints.restore(other) is not None
    models.assert_same_dicts(models.cloned_state(other), models.cloned_state(model), "it is there")
    return str(caught.value)


def test_a_folder_that_cannot_be_flushed(tmp_path: pathlib.Path) -> None:
    """The new file is there; that it was left as it was would be wrong."""
    file = tmp_path / "model.pt"
    torch.save({}, file)
    for said in run_ranks(save_into_a_folder_that_fails, 2, str(file)):
        assert "has taken its place" in said and "intact" not in said
    for said in run_ranks(checkpoint_into_a_folder_that_fails, 2, str(tmp_path / "checkpoints")):
        assert "has taken its place" in said and "intact" not in said
    assert torch.load(file, weights_only=True).keys() == net(1).state_dict().keys()
