"""Checkpoints of shards: the same bits come back at any number of ranks, whole or not at all, and
whatever is refused or fails, the run goes on as if nothing had been asked.
"""

import contextlib
import copy
import json
import math
import os
import pathlib
import shutil
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import on_ranks, run_ranks
from tests.ranks.saves import NO_SPACE, Twin, failing

import bmtrain as bmt
from bmtrain.__main__ import main
from bmtrain.checkpoint import image, shards, writing
from bmtrain.checkpoint.folder import complete, usable
from bmtrain.errors import CheckpointError, ConfigurationError, DamagedError
from bmtrain.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from bmtrain.optim import AdamOptimizer, OptimManager
from bmtrain.shard.slices import local_of

WIDTH = 6


class Layer(torch.nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, dtype=dtype)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, dtype=dtype)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x):
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(bmt.DistributedModule):
    """Blocks, a parameter that is not sharded, a tied one, a buffer."""

    def __init__(self, dtype):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = bmt.PipelineTransformerBlockList([bmt.Block(Layer(dtype)) for _ in range(4)])
        self.head = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.again = self.head
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.plain = torch.nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, x):
        self.count.add_(1)
        return self.head(self.blocks(x)) * self.plain


class Training:
    """The net with an Adam of ours and an SGD of torch's."""

    def __init__(self, dtype):
        self.net, self.dtype = Net(dtype), dtype
        bmt.init_parameters(self.net)
        named = dict(self.net.named_parameters())
        heads = [param for name, param in named.items() if "head" in name]
        others = [param for name, param in named.items() if "head" not in name]
        self.manager = OptimManager(loss_scale=8.0 if dtype == torch.float16 else None)
        first = AdamOptimizer(others, lr=1e-2, weight_decay=0.1)
        self.manager.add_optimizer(first, bmt.lr_scheduler.Cosine(first, 1e-2, 2, 20))
        self.manager.add_optimizer(torch.optim.SGD(heads, lr=1e-2, momentum=0.9))

    def steps(self, count):
        """The losses."""
        losses = []
        for _ in range(count):
            x = torch.randn(4, WIDTH).to(self.dtype)
            self.manager.zero_grad()
            loss = self.net(x).float().square().mean()
            self.manager.backward(loss)
            self.manager.step()
            losses.append(loss.item())
        return losses

    def values(self):
        """Of model, optimizers and schedule. Collective."""
        state = self.manager.state_dict(gather_opt=True)
        found = models.cloned_state(self.net)
        for number, one in enumerate(state["optimizers"]):
            for index, values in one["state"].items():
                for name, value in values.items():
                    found[f"{number}.{index}.{name}"] = torch.as_tensor(value)
        found["lr"] = torch.tensor(float(self.manager.optimizers[0].param_groups[0]["lr"]))
        return found


@contextlib.contextmanager
def small_blocks():
    """Files of many blocks, though models are small."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (shards, image, writing):
            patch.setattr(module, "BLOCK", 200)
        yield


@contextlib.contextmanager
def no_memory_yet(checkpoints):
    """What is saved inside is copied when this is called, on another thread a bit later."""
    lock = checkpoints._memory._lock
    with lock:
        copying = threading.Timer(0.2, lock.release)
        yield copying.start
        copying.join()
        lock.acquire()


def leave(folder, dtype, background):
    """Three steps, a checkpoint, two more steps, which wait until it is copied."""
    training = Training(dtype)
    with small_blocks(), bmt.CheckpointManager(folder, background=background) as checkpoints:
        training.steps(3)
        at_save = training.values()
        checkpoints.reserve(training.net, training.manager)
        with no_memory_yet(checkpoints) if background else contextlib.nullcontext() as copy:
            about: dict[str, Any] = {"facts": {"a": [1, None]}, "state": {"rank": bmt.rank()}}
            checkpoints.save(3, training.net, training.manager, **about)
            if copy is not None:
                copy()
            losses = training.steps(2)
    return at_save, losses


def come_back(folder, dtype):
    training = Training(dtype)
    training.steps(2)  # what is there must not shine through
    with small_blocks(), bmt.CheckpointManager(folder) as checkpoints:
        restored = checkpoints.restore(training.net, training.manager)
        assert restored is not None and restored[:2] == (3, {"a": [1, None]})
        found = training.values()
        losses = training.steps(2)
        alone = Net(torch.float32)  # weights alone, and of another dtype
        bmt.load(alone, checkpoints.folder / "step-00000003")
    for name, value in alone.state_dict().items():
        assert torch.equal(value, found[name].to(value.dtype)), name
    return found, losses, restored.state


@pytest.mark.parametrize(
    ("before", "after", "dtype", "background"),
    [
        ((3, 1, 1), (3, 1, 1), torch.bfloat16, True),
        ((2, 1, 2), (2, 2, 1), torch.float16, True),
        ((2, 2, 1), (3, 1, 1), torch.float32, False),
        pytest.param((4, 2, 2), (2, 2, 1), torch.bfloat16, True, marks=pytest.mark.long),
        pytest.param((1, 1, 1), (4, 2, 2), torch.float32, False, marks=pytest.mark.long),
    ],
)
def test_the_same_bits_come_back(before, after, dtype, background, tmp_path):
    """Weights, optimizers, schedules; with the same ranks also what is drawn from then on."""

    def run(program, sizes, *args):
        init = {"tp_size": sizes[1], "pipe_size": sizes[2]}
        return run_ranks(program, sizes[0], str(tmp_path), dtype, *args, init=init)

    left = run(leave, before, background)
    for rank, (found, losses, state) in enumerate(run(come_back, after)):
        models.assert_same_dicts(found, left[0][0], "restored", 0.0)
        assert state == ({"rank": rank} if before == after else None)
        if before == after:
            assert losses == left[rank][1]


def continues(folder):
    rank, twin, path = bmt.rank(), Twin(), pathlib.Path(folder)
    turned = OptimManager()  # as of a set of parameters, whose order is that of addresses
    turned.add_optimizer(AdamOptimizer(twin.params[::-1] if rank == 1 else twin.params))
    model, manager = twin.model, twin.manager

    def names():
        return [one.name for one in usable(path)]

    with bmt.CheckpointManager(folder, keep=1) as checkpoints:
        twin.step()
        checkpoints.save(1, model, manager).wait()
        asked: list[tuple[str, Callable[[], object]]] = [
            ("different step", lambda: checkpoints.save(2 + rank % 2, model, manager)),
            ("different facts", lambda: checkpoints.save(2, model, facts={"best": rank})),
            ("different only", lambda: checkpoints.save(2, model, only=[f"{rank % 2}.weight"])),
            (
                "different optim_manager",
                lambda: checkpoints.save(2, model, manager if rank else None),
            ),
            ("different optimizers", lambda: checkpoints.save(2, model, turned)),
            (
                "cannot be kept",
                lambda: checkpoints.save(2, model, state={"x": path} if rank else {}),
            ),
            ("no tensor", lambda: checkpoints.save(2, model, only=["x"])),
        ]
        for complaint, save in asked:
            with pytest.raises(CheckpointError, match=complaint):
                save()
            twin.step(complaint)
            assert names() == ["step-00000001"]
        for owner, name, error, on in (
            (writing, "_write_at", NO_SPACE, 1),
            (image.Image, "fill", MemoryError("no memory"), 2),
            (os, "fsync", OSError(5, "Input/output error"), 0),
            (os, "replace", OSError(13, "Permission denied"), 0),
        ):
            own = f"step-00000002/*-{on:05d}-*"
            before = {*path.glob(own)}
            with failing(owner, name, error, on):
                checkpoints.save(2, model, manager).join()
            twin.step("a failed save")
            reason = f"{error.args[-1]}.*what was saved before is intact"
            with pytest.raises(CheckpointError, match=reason):
                checkpoints.save(2, model, manager)  # the first call after a failure tells it
            assert names() == ["step-00000001"]
            assert {*path.glob(own)} == before or name == "replace"
            assert not list(path.glob("step-00000002/manifest*"))
        with failing(image, "new_block", NO_SPACE, 1), pytest.raises(CheckpointError):
            checkpoints._memory._blocks.clear()
            checkpoints.save(2, model, manager).wait()
        with no_memory_yet(checkpoints) as copy:
            saving = checkpoints.save(2, model, manager)
            with torch.no_grad():
                twin.params[0].add_(0)
            copy()
        with pytest.raises(CheckpointError, match="while they were being copied"):
            saving.wait()
        assert names() == ["step-00000001"]
        with no_memory_yet(checkpoints) as copy:
            saving = checkpoints.save(2, model, manager)
            copy()
            checkpoints.wait_copied()
            with torch.no_grad():
                twin.params[0].add_(0)
        saving.wait()
        at_save = twin.reference()
        with no_memory_yet(checkpoints) as copy:
            checkpoints.save(3, model, manager, facts={"best": 1})
            copy()
            twin.step("a step that waits for the copy")
        other = Twin()
        other.step()
        restored = checkpoints.restore(other.model, other.manager)
        assert restored is not None and restored[:2] == (3, {"best": 1})
        other.follow(at_save, "a restore")
        assert names() == ["step-00000003"]
        kinds = [file.suffix for file in path.glob("step-00000003/*")]
        assert sorted(kinds) == [".bin"] * 3 + [".json"] + [".pt"] * 3


def test_a_run_goes_on_after_saves_that_are_refused_or_fail(tmp_path):
    """What ranks ask for differently, full disks, lack of memory, writes while values are copied:
    the checkpoint before stays, the training is that of one process, and the next save is whole.
    """
    run_ranks(continues, 3, str(tmp_path))


@on_ranks(2)
def test_restoring_into_other_optimizers(tmp_path):
    """From torch's AdamW to ours and back, and into a model that is sharded or no longer; what does
    not fit changes nothing: a program may catch the error and go on.
    """
    ours, theirs = AdamOptimizer, torch.optim.AdamW
    with bmt.CheckpointManager(tmp_path) as checkpoints:

        def saved(step, kind=ours, **options):
            twin = Twin(kind, **options)
            for _ in range(2):
                twin.step()
            checkpoints.save(step, twin.model, twin.manager).wait()
            return twin

        def refused(complaint, *groups):
            other = Twin()
            manager = other.manager if not groups else OptimManager()
            for group in groups:
                chosen: Any = [other.params[n] for n in group]
                if isinstance(group, tuple):  # a group of its own for each
                    chosen = [{"params": [param]} for param in chosen]
                manager.add_optimizer(AdamOptimizer(chosen, lr=0.5))
            with pytest.raises(CheckpointError, match=complaint):
                checkpoints.restore(other.model, manager)
            assert manager.optimizers[0].param_groups[0]["lr"] == (0.5 if groups else 0.05)
            other.step(complaint)

        twin = Twin()
        checkpoints.save(1, twin.model).wait()
        refused("holds no optimizers")
        for number, (before, after) in enumerate([(theirs, ours), (ours, theirs)]):
            other = Twin(after)
            twin = saved(2 + number, before)
            assert checkpoints.restore(other.model, other.manager) is not None
            other.follow(twin.reference(), "another kind of Adam")
        wraps: list[Any] = [bmt.BMTrainModelWrapper, torch.nn.Module.train]
        for number, (before, after) in enumerate([wraps, wraps[::-1]]):
            other = Twin(wrap=after)
            twin = saved(7 + number, wrap=before)
            assert checkpoints.restore(other.model, other.manager) is not None
            other.follow(twin.reference(), "sharded or not")
        saved(9)
        refused("1 optimizers, this manager has 2", [0, 1], [2, 3])
        refused("groups of", (0, 1, 2, 3))
        refused("belongs to another model", [1, 0, 2, 3])
        refused(
            "parameters in another order: number 0 was '0.weight' and is '1.weight'", [2, 1, 0, 3]
        )
        manager = OptimManager()
        for params in (twin.params[:2], twin.params[2:]):
            manager.add_optimizer(AdamOptimizer(params))
        checkpoints.save(9, twin.model, manager).wait()
        refused("other parameters.* 0 was '0.weight' and is '1.weight'", [2, 3], [0, 1])
        saved(10, theirs, amsgrad=True)
        refused("saved with another optimizer")
        saved(11, torch.optim.SGD, momentum=0.9)
        refused("saved with another optimizer")
        sgd = saved(11, torch.optim.SGD)
        refused("another optimizer for optimizer 0, without betas, eps of AdamOptimizer")
        with pytest.raises(CheckpointError, match="without betas, eps"):
            Twin().manager.optimizers[0].load_state_dict(sgd.manager.optimizers[0].state_dict())
        other = Twin(torch.optim.SGD, momentum=0.9)
        other.step()
        twin = saved(12, torch.optim.SGD, momentum=0.9)
        # names that a program or a schedule has put there, and a default that the class has since
        for one in (twin, other):
            one.manager.optimizers[0].param_groups[0].update(lr_scale=1.0)
        twin.manager.optimizers[0].param_groups[0].update(initial_lr=0.05)
        checkpoints.save(12, twin.model, twin.manager).wait()
        other.manager.optimizers[0].defaults["since"] = 0.5
        assert checkpoints.restore(other.model, other.manager) is not None
        other.follow(twin.reference(), "SGD with momentum")
        then = models.cloned_state(twin.model)
        checkpoints.save(13, twin.model, twin.manager, only=["0.weight"]).wait()
        twin.step()
        want = {**models.cloned_state(twin.model), "0.weight": then["0.weight"]}
        assert checkpoints.restore(twin.model, twin.manager, only=["0.weight"]) is not None
        models.assert_same_dicts(twin.model.state_dict(), want, "some weights", 0.0)


class Counting(torch.nn.Module):
    """Has state beside its parameters, and a buffer of each rank's own rows."""

    largest: torch.Tensor

    def __init__(self):
        super().__init__()
        self.linear, self.counts = torch.nn.Linear(WIDTH, WIDTH), {"calls": 0, "rank": bmt.rank()}
        self.register_buffer("largest", torch.zeros(1, 1, dtype=torch.uint16))

    def forward(self, x):
        self.counts["calls"] += 1
        self.largest.copy_(torch.maximum(self.largest.int(), (99 * x.detach()).abs().max().int()))
        return self.linear(x) * (self.largest.int() + self.counts["calls"]) / 99

    def get_extra_state(self):
        return self.counts

    def set_extra_state(self, state):
        self.counts = state


class Held(torch.nn.Linear):
    def __init__(self, state):
        super().__init__(1, 1)
        self.state = state

    def get_extra_state(self):
        return self.state

    def set_extra_state(self, state):
        self.state = state


class Adding(Held):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.ones(1)


def counting():
    twin = Twin(wrap=lambda net: torch.nn.Sequential(bmt.Block(Counting())))

    def losses(first, last):
        found = []
        for step in range(first, last):
            generator = torch.Generator().manual_seed(2 * step + bmt.rank())
            loss = twin.model(torch.randn(4, WIDTH, generator=generator)).square().mean()
            twin.manager.zero_grad()
            twin.manager.backward(loss)
            twin.manager.step()
            found.append(loss.item())
        return found

    return twin.model, twin.manager, losses


def values_of(state):
    """A copy that can be pickled."""
    found = copy.deepcopy(dict(state))
    assert found["0.largest"].dtype == torch.uint16
    return {**found, "0.largest": found["0.largest"].int()}


def leave_counts(folder):
    model, manager, losses = counting()
    with bmt.CheckpointManager(f"{folder}/run") as checkpoints:
        losses(0, 3)
        checkpoints.save(3, model, manager)
        bmt.save(model, f"{folder}/model.pt")
        with pytest.raises(CheckpointError, match=r"'0\._extra_state' is a dict.*\.pt for example"):
            bmt.save(model, f"{folder}/model.safetensors")
        with pytest.MonkeyPatch.context() as patch:  # as an earlier version did
            write = writing.as_bytes
            patch.setattr(
                "bmtrain.checkpoint.manager.as_bytes",
                lambda rest: write({name: rest[name] for name in rest if name != "own"}),
            )
            with bmt.CheckpointManager(f"{folder}/older") as older:
                older.save(3, model, manager)
        view = (2 * torch.ones(2, 3, requires_grad=True)).t()
        for name in ("held.pt", "held.safetensors"):
            other = Held(None)
            bmt.save(Held(view), f"{folder}/{name}")
            bmt.load(other, f"{folder}/{name}")
            assert torch.equal(other.state, view)
        with pytest.warns(UserWarning, match="Adding changes its state dict: checkpoints hold"):
            bmt.save(Adding(None), f"{folder}/held.pt")
        with pytest.raises(CheckpointError, match="modules and the program cannot be kept"):
            bmt.save(Held(pathlib.Path(folder)), f"{folder}/held.pt")
        return values_of(model.state_dict()), losses(3, 5)


def find_counts(folder, left):
    model, manager, losses = counting()
    with bmt.CheckpointManager(f"{folder}/run") as checkpoints:
        losses(0, 1)
        assert checkpoints.restore(model, manager) is not None
    rank = bmt.rank() if bmt.world_size() == 2 else 0
    models.assert_equal(values_of(model.state_dict()), left[rank][0], "restored")
    if bmt.world_size() == 2:
        assert losses(3, 5) == left[rank][1]
    for file in ("run/step-00000003", "model.pt", "consolidated.pt"):
        model = bmt.BMTrainModelWrapper(torch.nn.Sequential(Counting()))
        bmt.load(model, f"{folder}/{file}")
        models.assert_equal(values_of(model.state_dict()), left[0][0], file)
    model, manager, _ = counting()
    told = pytest.warns(UserWarning, match="earlier version.*'0._extra_state'")
    older = bmt.CheckpointManager(f"{folder}/older")
    with older, contextlib.nullcontext() if bmt.rank() else told:
        assert older.restore(model, manager) is not None
    state = {**values_of(model.state_dict()), "0._extra_state": left[0][0]["0._extra_state"]}
    models.assert_equal(state, left[0][0], "an older checkpoint")
    with pytest.raises(CheckpointError, match=r"missing from the file: '0\._extra_state'"):
        bmt.load(model, f"{folder}/without.pt")


def test_state_beside_tensors_comes_back(tmp_path):
    """What `get_extra_state` returns, in every file; with the same ranks that of each, and buffers
    that differ.
    """
    left = run_ranks(leave_counts, 2, str(tmp_path))
    consolidate = [str(tmp_path / name) for name in ("run", "consolidated.pt")]
    assert main(["consolidate", *consolidate]) == 0
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    models.assert_equal(values_of(state), left[0][0], "a file of torch")
    del state["0._extra_state"]
    torch.save(state, tmp_path / "without.pt")
    for size in (2, 3):
        run_ranks(find_counts, size, str(tmp_path), left)


def not_finite(folder):
    twin = Twin()
    twin.step()
    checkpoints = bmt.CheckpointManager(folder, keep=1)
    model: Any = twin.model
    manager = twin.manager
    checkpoints.save(1, model, manager).wait()
    model.register_buffer("mask", torch.full((3,), -math.inf))
    model.register_parameter("frozen", torch.nn.Parameter(torch.ones(3) * math.inf, False))
    state = manager.optimizers[0].state[twin.params[0]]["exp_avg"]
    for name, tensor, value in (
        ("parameter or buffer 0.weight", twin.params[0], math.inf),
        ("parameter or buffer mask", model.get_buffer("mask"), math.nan),
        ("parameter or buffer frozen", model.get_parameter("frozen"), math.nan),
        ("state 'exp_avg' of the optimizer for 0.weight", state, -math.inf),
    ):
        own = local_of(tensor).detach()
        before = own.clone()
        if bmt.rank() == 1:
            own[-1] = value
        with pytest.raises(CheckpointError, match=f"{name} is no longer finite"):
            checkpoints.save(2, model, manager)
        own.copy_(before)
    group = manager.optimizers[0].param_groups[0]
    rate, group["lr"] = group["lr"], math.nan if bmt.rank() else 0.05
    with pytest.raises(
        CheckpointError, match="the learning rate of group 0, nan, is no longer finite"
    ):
        checkpoints.save(2, model, manager)
    group["lr"] = rate
    assert [path.name for path in usable(checkpoints.folder)] == ["step-00000001"]
    del model.mask, model.frozen
    twin.step("what is not saved")
    checkpoints.save(2, model, manager).wait()
    other = Twin()
    assert checkpoints.restore(other.model, other.manager) == (2, {}, None)
    other.follow(twin.reference(), "a restore")
    with pytest.MonkeyPatch.context() as patch:  # as an older version did
        patch.setattr("bmtrain.checkpoint.manager.check_finite", lambda *_, **__: None)
        with torch.no_grad():
            state[-1:] = math.inf
        checkpoints.save(3, model, manager).wait()
    with pytest.raises(CheckpointError, match=r"state 'exp_avg'.*is no longer finite"):
        checkpoints.restore(other.model, other.manager)
    checkpoints.close()


def test_what_is_not_finite_is_refused_on_all_ranks(tmp_path):
    """Of what is not trained only NaN. The last good checkpoint stays."""
    run_ranks(not_finite, 2, str(tmp_path))


@pytest.fixture
def alone():
    bmt.init_distributed(device="cpu")
    yield
    bmt.runtime.world.shutdown()


def linear(value=0.0, width=3):
    model = torch.nn.Linear(width, 3)
    torch.nn.init.constant_(model.weight, value)
    return bmt.BMTrainModelWrapper(model)


def small(folder, steps, **options):
    """Steps whose checkpoints have a manifest after these saves of a weight of that value."""
    with bmt.CheckpointManager(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, linear(step))
    return [int(path.name[-8:]) for path in complete(folder)]


@pytest.mark.usefixtures("alone")
def test_retention(tmp_path):
    """The last ones stay, those of `keep_every`, and the one just written, though later steps are
    there; damaged ones do not count, and what attempts have left goes.
    """
    assert small(tmp_path, [1, 2, 3, 4], keep=2) == [3, 4]
    assert small(tmp_path, [5, 6, 7, 8, 9], keep=1, keep_every=3) == [3, 6, 9]
    damaged, attempt = (tmp_path / f"step-0000000{number}" for number in (9, 7))
    next(damaged.glob("*.bin")).unlink()
    attempt.mkdir()
    (attempt / "rank-00000-0a.bin").touch()
    leftover, mine = (tmp_path / "step-00000010" / name for name in ("rank-00000-0a.bin", "mine"))
    leftover.parent.mkdir()
    leftover.write_text("x")
    mine.write_text("x")
    assert small(tmp_path, [10, 10], keep=2) == [6, 9, 10]
    assert not leftover.exists() and mine.exists() and not attempt.exists()
    assert len(list(damaged.iterdir())) == 2
    assert len(list(leftover.parent.glob("*.bin"))) == 1
    assert [path.name for path in usable(tmp_path)] == ["step-00000006", "step-00000010"]
    with pytest.warns(UserWarning, match="step-00000010 is of a later step than 8"):
        assert small(tmp_path, [8], keep=1) == [8, 9, 10]
    with bmt.CheckpointManager(tmp_path) as checkpoints:
        net = linear()
        assert checkpoints.latest(before=9) == tmp_path / "step-00000008"
        assert checkpoints.restore(net, path=str(tmp_path / "step-00000008")) == (8, {}, None)
        assert net.state_dict()["weight"].eq(8).all()


@pytest.mark.usefixtures("alone")
def test_files_hold_nothing_of_what_was_saved_before(tmp_path):
    """The memory that a copy goes through is kept; what is between tensors is zero."""
    with bmt.CheckpointManager(tmp_path) as checkpoints:
        for step, only in ((1, None), (2, ["bias"])):
            checkpoints.save(step, linear(3.3, width=9), only=only).wait()
    (file,) = (tmp_path / "step-00000002").glob("*.bin")
    content = file.read_bytes()
    assert len(content) > 12 and content[12:] == bytes(len(content) - 12)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def make_fifo(path):
    path.unlink()
    os.mkfifo(path)


def replaced(old, new, seal=True):
    """Another text in the manifest, or a new text alone; sealed as if it had been written so."""

    def damage(path):
        text = json.dumps(json.loads(path.read_text())["manifest"])
        assert old in text
        text = text.replace(old, new) if old else new
        crc = zlib.crc32(text.encode()) if seal else 0
        path.write_text(f'{{"crc32": {crc}, "manifest": {text}}}')

    return damage


PIECE = "[0, 0, 0, 9, 0]"  # file, offset, start, stop, part: of the weight
DAMAGES: list[tuple[str, Callable[[pathlib.Path], object]]] = [
    ("*.bin", flip),
    ("*.bin", pathlib.Path.unlink),
    ("*.bin", make_fifo),
    ("*.bin", lambda path: os.truncate(path, path.stat().st_size - 2)),
    ("*.pt", flip),
    ("manifest.json", flip),
    ("manifest.json", make_fifo),
    ("manifest.json", lambda path: os.truncate(path, path.stat().st_size - 2)),
    ("manifest.json", lambda path: path.write_text("[]")),
    ("manifest.json", replaced('"step": 2', '"step": 3', seal=False)),
    *(
        ("manifest.json", replaced(*change))
        for change in [
            ("", "[]"),
            ("", '{"format": 1}'),
            ('"rank-', '"../rank-'),
            ("[3, 3]", "[4, 4]"),
            ("float32", "float31"),
            (f"0, 1, [{PIECE}", f"0, 2, [{PIECE}"),
            (PIECE, f"{PIECE}, {PIECE}"),
            (PIECE, "[0, 0, 1, 9, 0]"),
            (PIECE, "[0, 0, 0, 8, 0]"),
            (PIECE, "[0, -4, 0, 9, 0]"),
            (PIECE, "[0, 9999, 0, 9, 0]"),
            (PIECE, "[0, 0, 0, 9, 1]"),
            (f"0, 1, [{PIECE}", f"0, 1000000000000, [{PIECE}"),
            ('"step": 2', '"step": 1e400'),
            ('"step": 2', '"step": 1e300'),
            ('"step": 2', '"step": -5'),
            ("[3, 3]", "[-3, -3]"),
            ('"ties": {"model": {}}', '"ties": {"model": {"x": "y"}}'),
        ]
    ),
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("pattern", "damage"),
    [
        pytest.param(*case, marks=() if number % 3 == 2 or number in {0, 4} else pytest.mark.long)
        for number, case in enumerate(DAMAGES)
    ],
)
def test_a_damaged_one_is_named_and_left_out(pattern, damage, tmp_path):
    """The one before is used, and only then does it no longer count; where there is none, nothing
    begins anew. No way of loading takes it. The step can be saved again.
    """
    small(tmp_path, [1, 2])
    path = tmp_path / "step-00000002"
    damage(next(path.glob(pattern)))
    net = linear(7)
    with bmt.CheckpointManager(tmp_path) as checkpoints:
        with pytest.raises(CheckpointError, match=r"step-00000002.*Nothing was changed"):
            checkpoints.restore(net, path=path)
        with pytest.warns(UserWarning, match="step-00000002"):
            assert checkpoints.latest() == tmp_path / "step-00000001"
        assert (path / "manifest.json").exists() and net.state_dict()["weight"].eq(7).all()
        if pattern == "*.bin" or "manifest" in pattern:
            with pytest.raises(CheckpointError, match="step-00000002"):
                bmt.load(linear(), path)
        with pytest.warns(UserWarning, match="step-00000002"):
            assert checkpoints.restore(net) == (1, {}, None)
        assert net.state_dict()["weight"].eq(1).all()
        assert not (path / "manifest.json").exists()
        assert checkpoints.latest() == tmp_path / "step-00000001"
        shutil.rmtree(tmp_path / "step-00000001")
        with pytest.raises(CheckpointError, match=r"none of the checkpoints.*set aside as damaged"):
            checkpoints.restore(net)
        assert net.state_dict()["weight"].eq(1).all()
        checkpoints.save(2, linear(5))
        assert checkpoints.restore(net) == (2, {}, None)
        assert net.state_dict()["weight"].eq(5).all()


def cannot_read(folder):
    path, on = pathlib.Path(folder), bmt.world_size() - 1
    twin, other = Twin(), Twin()

    def names():
        return sorted(str(one.relative_to(path)) for one in path.rglob("*"))

    def refused(complaint):
        before = names()
        with pytest.raises(CheckpointError, match=complaint):
            checkpoints.restore(other.model, other.manager)
        other.step(complaint)
        bmt.synchronize()
        assert names() == before

    with bmt.CheckpointManager(folder) as checkpoints:
        for step in (1, 2):
            twin.step()
            checkpoints.save(step, twin.model, twin.manager).wait()
        newest = path / "step-00000002"
        for owner, name, error in (
            (shards, "read_into", OSError(5, "Input/output error")),
            (shards, "read_into", MemoryError("no memory")),
            (shards, "check_file", CheckpointError("Permission denied")),
            (shards, "read_text", CheckpointError(f"cannot load {newest}: Too many open files.")),
            (shards, "check_file", DamagedError("rank-00000.bin has 3 bytes")),
            (shards, "check_block", DamagedError("other bytes")),
        ):
            if on or not isinstance(error, DamagedError):  # one rank believes its own eyes
                with failing(owner, name, error, on):
                    refused(error.args[-1])
        with failing(pathlib.Path, "iterdir", OSError(5, "Input/output error")):
            refused(f"{path.name}: Input/output error")
        if bmt.rank() == 0:
            text = (newest / "manifest.json").read_text()
            replaced('"format": 1', '"format": 99')(newest / "manifest.json")
        bmt.synchronize()
        refused("step-00000002.*format is 99.*update bmtrain")
        if bmt.rank() == 0:
            (newest / "manifest.json").write_text(text)
        bmt.synchronize()
        assert checkpoints.restore(other.model, other.manager) == (2, {}, None)
        other.follow(twin.reference(), "a restore")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_what_cannot_be_read_just_now_is_not_damaged(num_ranks, tmp_path):
    """Nor is what one rank alone sees: nothing is renamed, nothing begins anew, and it can be tried
    again.
    """
    run_ranks(cannot_read, num_ranks, str(tmp_path))


@pytest.mark.usefixtures("alone")
def test_another_run_owns_the_folder(tmp_path, monkeypatch):
    """It is refused and named; once closed, or left by an error, the folder is free."""
    monkeypatch.setattr("bmtrain.checkpoint.folder.PATIENCE_S", 0.1)
    with pytest.raises(ZeroDivisionError), bmt.CheckpointManager(tmp_path) as owner:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=f"belongs to another run.*{os.getpid()}"):
                bmt.CheckpointManager(tmp_path)
        owner.save(1, linear(1)).wait()
        raise ZeroDivisionError
    with bmt.CheckpointManager(tmp_path):
        pass
    bmt.CheckpointManager(tmp_path).close()


@pytest.mark.usefixtures("alone")
def test_bad_arguments(tmp_path):
    """Refused at the call, with what to do; nothing is written, and the manager works on."""
    wrong: list[dict[str, Any]] = [{"keep": 0}, {"keep": "2"}, {"keep_every": -1}, {"keep": True}]
    for options in wrong:
        with pytest.raises(ConfigurationError, match="a whole number above 0"):
            bmt.CheckpointManager(tmp_path, **options)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot use"):
        bmt.CheckpointManager(tmp_path / "file")
    facts: list[tuple[dict[Any, Any], str]] = [
        ({"seen": {1: 2}}, "'seen': {1: 2}, which JSON would give back as {'1': 2}"),
        ({1: 2}, "JSON would give back"),
        ({"betas": (0.9, 0.95)}, r"'betas': \(0.9, 0.95\), which JSON"),
        (
            {"long": ("a" * 200,)},
            r"'long': \('a{118}, which JSON would give back as \['a{118}\. Facts",
        ),
        ({"best": math.inf}, "JSON cannot hold"),
        ({"count": torch.tensor(3)}, "JSON cannot hold"),
    ]
    with bmt.CheckpointManager(tmp_path / "c") as checkpoints:
        for given, complaint in facts:
            with pytest.raises(CheckpointError, match=complaint):
                checkpoints.save(1, linear(), facts=given)
            assert checkpoints.latest() is None
        checkpoints.save(1, linear())
        assert checkpoints.latest() is not None
