"""save(non_blocking=True): training goes on while the file is being written, a failure is told on
all ranks and the next save succeeds, and however the program ends a whole file stays.
"""

import os
import pathlib
import shutil
import textwrap

import pytest
import torch
from tests.children import ran
from tests.ranks import models
from tests.ranks.runner import new_store, run_ranks
from tests.ranks.saves import NO_SPACE, Held, Twin, failing

import bmtrain as bmt
from bmtrain.checkpoint import Writing, saving, writer
from bmtrain.checkpoint import folder as folders
from bmtrain.errors import CheckpointError


def train_while_held(folder):
    """Rank 0's writer stops in the middle; both ranks train, with all the communication of it,
    before it may go on.
    """
    twin, file, second = Twin(), *(pathlib.Path(folder, f"{name}.pt") for name in "ab")
    for owner, name in ((writer._File, "write"), (os, "fsync"), (os, "replace")):
        bmt.save(twin.model, file)
        old, at_call, held = file.read_bytes(), models.cloned_state(twin.model), Held(owner, name)
        with held.patched():
            first = bmt.save(twin.model, file, non_blocking=True)
            assert bmt.rank() or held.reached.wait(30)
            for _ in range(2):
                twin.step(f"a step while {name} is held")
            assert first.done == (bmt.rank() != 0) and file.read_bytes() == old
            held.go_on(after=0.3)
            writing = bmt.save(twin.model, second, non_blocking=True)
            assert first.done and (bmt.rank() or held.let.is_set()), "the second save waits"
            bmt.load(twin.model, file)  # and so does this
            assert writing.done
        for wanted, path in ((at_call, file), (twin.plain.state_dict(), second)):
            models.assert_same_dicts(torch.load(path), wanted, path.name)
        twin.model.load_state_dict(twin.plain.state_dict())
    with bmt.CheckpointManager(file.with_name("c")) as checkpoints:
        held, reference = Held(os, "replace"), twin.reference()
        with held.patched():
            first = checkpoints.save(1, twin.model, twin.manager)
            for _ in range(2):
                twin.step("a step while a checkpoint is written")
            assert not list(file.parent.glob("*/*/manifest.json"))
            held.go_on(after=0.3)
            checkpoints.save(2, twin.model, twin.manager)
            assert first.done
        for step, wanted in ((1, reference), (2, twin.reference())):
            other, path = Twin(), checkpoints.folder / f"step-{step:08d}"
            assert checkpoints.latest() == checkpoints.folder / "step-00000002"
            assert checkpoints.restore(other.model, other.manager, path=path) is not None
            other.follow(wanted, f"restoring {step}")
    bmt.save(twin.model, second, non_blocking=True)  # nobody waits for it but the end of the run


def test_training_goes_on_while_the_file_is_written(tmp_path):
    """Held in the first byte, before the disk has all, or before the new file takes the old one's
    name; what is written is what was there at the call.
    """
    run_ranks(train_while_held, 2, str(tmp_path))
    assert sorted(os.listdir(tmp_path)) == ["a.pt", "b.pt", "c"]
    assert torch.load(tmp_path / "b.pt").keys() == torch.load(tmp_path / "a.pt").keys()


def fail_in_background(folder):
    twin, file = Twin(), pathlib.Path(folder, "a.pt")
    other = file.with_name("b.pt")
    surfaces = [
        lambda handle: bmt.save(twin.model, other),
        lambda handle: bmt.load(twin.model, other),
        Writing.wait,
    ]
    for surface in surfaces:
        with failing(saving, "write_file", NO_SPACE):
            handle = bmt.save(twin.model, file, non_blocking=True)
            handle.join()
        for ask in (surface, Writing.wait, Writing.wait):
            with pytest.raises(
                CheckpointError, match=r"a\.pt: No space left on device; what was saved before"
            ):
                ask(handle)
        twin.step("a failed save")
        bmt.save(twin.model, other)  # it is told once, but by its handle
        bmt.load(twin.model, other)
        twin.step("a save")
        other.unlink(missing_ok=True)
    flushed = r"was written, but its folder could not be flushed.*\(Input/output"
    with (
        failing(writer, "flush_to_disk", OSError(5, "Input/output error")),
        pytest.raises(CheckpointError, match=flushed),
    ):
        bmt.save(twin.model, file)
    fresh = Twin()
    bmt.load(fresh.model, file)
    fresh.plain = twin.plain
    fresh.compare("a load")
    path = file.with_name("c")
    with bmt.CheckpointManager(path, background=False, keep=1) as checkpoints:
        for step, (owner, name) in enumerate(
            [(folders, "flush_to_disk"), (folders, "usable"), (shutil, "rmtree")], 1
        ):
            twin.step("a save")
            with failing(owner, name, OSError(5, "Input/output error")):
                checkpoints.save(step, twin.model, twin.manager)
            fresh = Twin()
            assert checkpoints.restore(fresh.model, fresh.manager) is not None
            fresh.follow(twin.reference(), "a restore")
        checkpoints.save(4, twin.model)
    assert [one.name for one in path.glob("step*")] == ["step-00000004"]


def test_a_failure_in_the_background_is_told(tmp_path, capsys):
    """At once on rank 0; to the next save or load, and by every wait. A folder that cannot be
    flushed is told otherwise: the new file is there.
    """
    run_ranks(fail_in_background, 2, str(tmp_path))
    assert capsys.readouterr().out.count("No space left") == 3


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


@pytest.mark.parametrize(
    "kinds",
    [("end", "raise"), pytest.param(("exit", "term", "twice", "atexit"), marks=pytest.mark.long)],
)
def test_however_the_program_ends(tmp_path, kinds):
    """At its end, sys.exit, an exception and in atexit functions: the new file; after SIGTERM the
    old one, whole.
    """
    stores = [new_store() for _ in kinds]
    arguments = [f"{kind}:{store.port}" for kind, store in zip(kinds, stores, strict=True)]
    done = ran("-c", textwrap.dedent(PROGRAM), *arguments, cwd=tmp_path, timeout=100)
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
            # Signals end the process at once.
            assert value == (1.0 if kind == "term" else 2.0), f"{kind}, {world_size} ranks"
    assert ("ValueError: the program fails" in done.stderr) == ("raise" in kinds)
