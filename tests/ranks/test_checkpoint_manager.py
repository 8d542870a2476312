"""Checkpoints of shards: the same bits come back at any number of ranks, whole or not at all."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.checkpoint import manifest as manifests
from bmtrain.errors import CheckpointError, ConfigurationError
from bmtrain.nn.parallel_linear import ColumnParallelLinear, RowParallelLinear
from bmtrain.snapshot.folder import complete, usable

WIDTH = 6
Sizes = tuple[int, int, int]  # ranks, tp_size, pipe_size


class Layer(torch.nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH, dtype=dtype)
        self.up = ColumnParallelLinear(WIDTH, 4 * WIDTH, dtype=dtype)
        self.down = RowParallelLinear(4 * WIDTH, WIDTH, dtype=dtype)
        self.drop = torch.nn.Dropout(0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Net(bmt.DistributedModule):
    """Blocks, a parameter that is not sharded, a tied one, a buffer."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = bmt.PipelineTransformerBlockList([bmt.Block(Layer(dtype)) for _ in range(4)])
        self.head = torch.nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.again = self.head
        self.count: torch.Tensor
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.plain = torch.nn.Parameter(torch.ones(WIDTH, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return self.head(self.blocks(x)) * self.plain


def make(dtype: torch.dtype) -> tuple[Net, bmt.optim.OptimManager]:
    net = Net(dtype)
    bmt.init_parameters(net)
    named = dict(net.named_parameters())
    heads = [param for name, param in named.items() if "head" in name]
    others = [param for name, param in named.items() if "head" not in name]
    manager = bmt.optim.OptimManager(loss_scale=8.0 if dtype == torch.float16 else None)
    first = bmt.optim.AdamOptimizer(others, lr=1e-2, weight_decay=0.1)
    manager.add_optimizer(first, bmt.lr_scheduler.Cosine(first, 1e-2, 2, 20))
    manager.add_optimizer(torch.optim.SGD(heads, lr=1e-2, momentum=0.9))
    return net, manager


def train(net: Net, manager: bmt.optim.OptimManager, dtype: torch.dtype) -> float:
    x = torch.randn(4, WIDTH).to(dtype)
    manager.zero_grad()
    loss = net(x).float().square().mean()
    manager.backward(loss)
    manager.step()
    return loss.item()


def whole(net: Net, manager: bmt.optim.OptimManager) -> dict[str, torch.Tensor]:
    """All values of model and optimizers. Collective."""
    state = manager.state_dict(gather_opt=True)
    found = {name: value.clone() for name, value in net.state_dict().items()}
    for number, one in enumerate(state["optimizers"]):
        for index, values in one["state"].items():
            for name, value in values.items():
                found[f"{number}.{index}.{name}"] = torch.as_tensor(value)
    found["lr"] = torch.tensor(float(manager.optimizers[0].param_groups[0]["lr"]))
    return found


def leave(
    folder: str, dtype: torch.dtype, background: bool
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Three steps, a checkpoint, two more steps."""
    net, manager = make(dtype)
    with bmt.CheckpointManager(folder, background=background) as checkpoints:
        for _ in range(3):
            train(net, manager, dtype)
        at_save = whole(net, manager)
        checkpoints.save(3, net, manager, facts={"a": [1, None]}, state={"rank": bmt.rank()})
        return at_save, [train(net, manager, dtype) for _ in range(2)]


def come_back(folder: str, dtype: torch.dtype) -> tuple[dict[str, torch.Tensor], list[float], Any]:
    net, manager = make(dtype)
    for _ in range(2):  # what is there must not shine through
        train(net, manager, dtype)
    with bmt.CheckpointManager(folder) as checkpoints:
        restored = checkpoints.restore(net, manager)
        assert restored is not None and restored.step == 3 and restored.facts == {"a": [1, None]}
    found = whole(net, manager)
    return found, [train(net, manager, dtype) for _ in range(2)], restored.state


def settings(sizes: Sizes) -> dict[str, int]:
    return {"tp_size": sizes[1], "pipe_size": sizes[2]}


@pytest.mark.parametrize(
    ("before", "after", "dtype", "background"),
    [
        ((2, 1, 1), (2, 1, 1), torch.bfloat16, True),
        ((1, 1, 1), (2, 2, 1), torch.float32, False),
        ((2, 2, 1), (1, 1, 1), torch.float16, True),
        ((2, 1, 2), (2, 2, 1), torch.bfloat16, True),
        ((4, 2, 2), (2, 1, 1), torch.bfloat16, False),
    ],
)
def test_the_same_bits_come_back(
    before: Sizes, after: Sizes, dtype: torch.dtype, background: bool, tmp_path: pathlib.Path
) -> None:
    """Weights, optimizers, schedules; with the same ranks also what is drawn from then on."""
    left = run_ranks(leave, before[0], str(tmp_path), dtype, background, init=settings(before))
    back = run_ranks(come_back, after[0], str(tmp_path), dtype, init=settings(after))
    for found, losses, state in back:
        assert found.keys() == left[0][0].keys()
        for name, value in left[0][0].items():
            assert torch.equal(found[name], value), name
        assert (state is not None) == (before == after)
        if before == after:
            assert losses == left[0][1]
    if before == after:
        assert [state for _, _, state in back] == [{"rank": rank} for rank in range(before[0])]


def load_alone(folder: str) -> dict[str, torch.Tensor]:
    net = Net(torch.float32)
    bmt.load(net, folder)
    return dict(net.state_dict())


def test_bmt_load_reads_the_weights(tmp_path: pathlib.Path) -> None:
    """Into a model of another dtype too."""
    at_save, _ = run_ranks(leave, 2, str(tmp_path), torch.bfloat16, True, init={"pipe_size": 1})[0]
    found = run_ranks(load_alone, 1, str(tmp_path / "step-00000003"), init={"pipe_size": 1})[0]
    for name, value in found.items():
        assert torch.equal(value, at_save[name].to(value.dtype)), name


def small(folder: str, steps: list[int], **options: Any) -> list[str]:
    net = bmt.BMTrainModelWrapper(torch.nn.Linear(3, 3))
    with bmt.CheckpointManager(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, net)
        checkpoints.wait()
    return [path.name for path in complete(pathlib.Path(folder))]


@pytest.fixture
def alone() -> Iterator[None]:
    bmt.init_distributed(device="cpu")
    yield
    bmt.runtime.world.shutdown()


@pytest.mark.usefixtures("alone")
def test_retention(tmp_path: pathlib.Path) -> None:
    """The last ones stay and those of `keep_every`; what is damaged is not counted."""
    folder = str(tmp_path)
    assert small(folder, [1, 2, 3, 4], keep=2) == ["step-00000003", "step-00000004"]
    found = small(folder, [5, 6, 7, 8, 9], keep=1, keep_every=3)
    assert found == ["step-00000003", "step-00000006", "step-00000009"]
    next((tmp_path / "step-00000009").glob("*.bin")).unlink()
    found = small(folder, [10], keep=2)
    assert found == ["step-00000006", "step-00000009", "step-00000010"]
    assert [path.name for path in usable(tmp_path)] == ["step-00000006", "step-00000010"]


@pytest.mark.usefixtures("alone")
def test_the_same_step_again(tmp_path: pathlib.Path) -> None:
    """The new one replaces the old; files of attempts that were broken off go."""
    leftover = tmp_path / "step-00000001" / "rank-00000-0123abcd.bin"
    leftover.parent.mkdir()
    leftover.write_text("x")
    other = tmp_path / "step-00000001" / "mine.txt"
    other.write_text("x")
    small(str(tmp_path), [1, 1])
    assert not leftover.exists() and other.exists()
    assert len(list((tmp_path / "step-00000001").glob("*.bin"))) == 1


def flip(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut_off(path: pathlib.Path) -> None:
    os.truncate(path, path.stat().st_size - 2)


def make_fifo(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path)


def contradict(path: pathlib.Path) -> None:
    """A piece less than the tensor has."""
    content = json.loads(path.read_text())["manifest"]
    _, found = next(iter(content["tensors"]["model"].items()))
    found[0] = [number + 1 for number in found[0]]
    seal(path, content)


def lead_out(path: pathlib.Path) -> None:
    text = json.dumps(json.loads(path.read_text())["manifest"])
    seal(path, json.loads(text.replace('"rank-', '"../rank-')))


def swap(path: pathlib.Path) -> None:
    """Another step, without which it would be whole."""
    path.write_text(path.read_text().replace('"step": 2', '"step": 3'))


def seal(path: pathlib.Path, content: object) -> None:
    """As if it had been written so."""
    found = {"crc32": zlib.crc32(json.dumps(content).encode()), "manifest": content}
    path.write_text(json.dumps(found))


def empty(path: pathlib.Path) -> None:
    path.write_text("[]")


DAMAGES: list[tuple[str, Callable[[pathlib.Path], None]]] = [
    ("*.bin", flip),
    ("*.bin", cut_off),
    ("*.bin", pathlib.Path.unlink),
    ("*.bin", make_fifo),
    ("*.pt", flip),
    ("*.pt", cut_off),
    ("manifest.json", flip),
    ("manifest.json", cut_off),
    ("manifest.json", contradict),
    ("manifest.json", lead_out),
    ("manifest.json", make_fifo),
    ("manifest.json", swap),
    ("manifest.json", lambda path: seal(path, [])),
    ("manifest.json", lambda path: seal(path, {"format": 1})),
    ("manifest.json", lambda path: seal(path, {"format": 99})),
    ("manifest.json", empty),
]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(("pattern", "damage"), DAMAGES)
def test_a_damaged_one_is_named_and_left_out(
    pattern: str, damage: Callable[[pathlib.Path], None], tmp_path: pathlib.Path
) -> None:
    """The one before is used; where there is none, nothing."""
    small(str(tmp_path), [1, 2])
    before = torch.nn.Linear(3, 3)
    damage(next((tmp_path / "step-00000002").glob(pattern)))
    net = bmt.BMTrainModelWrapper(before)
    with bmt.CheckpointManager(tmp_path) as checkpoints:
        with pytest.warns(UserWarning, match="step-00000002"):
            restored = checkpoints.restore(net)
        assert restored is not None and restored.step == 1
        assert checkpoints.latest() == tmp_path / "step-00000001"
        shutil.rmtree(tmp_path / "step-00000001")
        assert checkpoints.restore(net) is None


@pytest.mark.usefixtures("alone")
def test_another_run_owns_the_folder(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused and named; once closed, the folder is free."""
    monkeypatch.setattr("bmtrain.snapshot.lock.PATIENCE_S", 0.1)
    owner = bmt.CheckpointManager(tmp_path)
    with pytest.raises(CheckpointError, match=f"belongs to another run.*{os.getpid()}"):
        bmt.CheckpointManager(tmp_path)
    owner.close()
    bmt.CheckpointManager(tmp_path).close()


@pytest.mark.usefixtures("alone")
def test_bad_arguments(tmp_path: pathlib.Path) -> None:
    wrong: list[dict[str, Any]] = [{"keep": 0}, {"keep": "2"}, {"keep_every": -1}, {"keep": True}]
    for options in wrong:
        with pytest.raises(ConfigurationError, match="positive whole number"):
            bmt.CheckpointManager(tmp_path, **options)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot use"):
        bmt.CheckpointManager(tmp_path / "file")
    net = torch.nn.Linear(2, 2)
    with bmt.CheckpointManager(tmp_path / "c") as checkpoints:
        with pytest.raises(CheckpointError, match="cannot be kept"):
            checkpoints.save(1, net, state={"x": pathlib.Path("a")})
        with pytest.raises(CheckpointError):
            checkpoints.save(1, net, facts={"x": float("nan")}).wait()
        assert checkpoints.latest() is None


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("facts", "complaint"),
    [
        ({"seen": {1: 2}}, "'seen': {1: 2}, which JSON would give back as {'1': 2}"),
        ({1: 2}, "JSON would give back"),
        ({"betas": (0.9, 0.95)}, r"'betas': \(0.9, 0.95\), which JSON"),
        ({"best": float("inf")}, "JSON cannot hold"),
        ({"count": torch.tensor(3)}, "JSON cannot hold"),
    ],
)
def test_facts_come_back_as_they_were_or_are_refused(
    facts: dict[Any, Any], complaint: str, tmp_path: pathlib.Path
) -> None:
    """At the call, with what to do: nothing is said of a full disk."""
    with (
        bmt.CheckpointManager(tmp_path) as checkpoints,
        pytest.raises(CheckpointError, match=complaint),
    ):
        checkpoints.save(1, torch.nn.Linear(2, 2), facts=facts)
    assert complete(tmp_path) == []


def restore_into_others(folder: str) -> None:
    """Other groups, shapes and numbers of optimizers than those of the checkpoint."""

    def make() -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
        model = bmt.BMTrainModelWrapper(torch.nn.Linear(16, 16))
        return model, list(model.parameters())

    def managed(*groups: Any) -> bmt.optim.OptimManager:
        manager = bmt.optim.OptimManager()
        for group in groups:
            manager.add_optimizer(bmt.optim.AdamOptimizer(group, lr=0.5))
        return manager

    saved, params = make()
    with bmt.CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, saved).wait()
        with pytest.raises(CheckpointError, match="holds no optimizers"):
            checkpoints.restore(saved, managed(params))
        manager = managed(params)
        manager.optimizers[0].param_groups[0]["lr"] = 0.25
        manager.backward(saved(torch.ones(2, 16)).sum())
        manager.step()
        checkpoints.save(2, saved, manager).wait()
        model, (weight, bias) = make()
        before = model.state_dict()
        for other, complaint in (
            (managed([weight], [bias]), "1 optimizers, this manager has 2"),
            (managed([{"params": [weight]}, {"params": [bias]}]), "groups of"),
            (managed([bias, weight]), "belongs to another model"),
        ):
            with pytest.raises(CheckpointError, match=complaint):
                checkpoints.restore(model, other)
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
            assert other.optimizers[0].param_groups[0]["lr"] == 0.5
        assert checkpoints.restore(model, managed([weight, bias])) is not None
        torch.testing.assert_close(model.state_dict(), saved.state_dict(), rtol=0, atol=0)


def test_a_checkpoint_of_other_optimizers_changes_nothing(tmp_path: pathlib.Path) -> None:
    """The model is as it was, too: a program may catch the error, and begin anew."""
    run_ranks(restore_into_others, 2, str(tmp_path))


def go_on_with_another_adam(folder: str) -> None:
    """From torch's AdamW to ours and back; with states that ours has not, it is refused."""

    def make(kind: Any, **options: Any) -> tuple[Any, bmt.optim.OptimManager]:
        torch.manual_seed(0)
        model, manager = bmt.BMTrainModelWrapper(torch.nn.Linear(16, 16)), bmt.optim.OptimManager()
        manager.add_optimizer(kind(model.parameters(), lr=1e-2, weight_decay=0.1, **options))
        return model, manager

    def step(model: Any, manager: bmt.optim.OptimManager) -> None:
        manager.zero_grad()
        manager.backward(model(torch.ones(2, 16)).square().sum())
        manager.step()

    ours, theirs = bmt.optim.AdamOptimizer, torch.optim.AdamW
    with bmt.CheckpointManager(folder) as checkpoints:
        for number, (before, after) in enumerate([(theirs, ours), (ours, theirs)]):
            model, manager = make(before)
            for _ in range(3):
                step(model, manager)
            checkpoints.save(number, model, manager).wait()
            other, its_manager = make(after)
            assert checkpoints.restore(other, its_manager) is not None
            step(model, manager)
            step(other, its_manager)
            torch.testing.assert_close(other.state_dict(), model.state_dict(), rtol=1e-6, atol=1e-7)
        others: list[tuple[Any, dict[str, Any]]] = [
            (theirs, {"amsgrad": True}),
            (torch.optim.SGD, {"momentum": 0.9}),
        ]
        for number, (kind, options) in enumerate(others):
            model, manager = make(kind, **options)
            step(model, manager)
            checkpoints.save(10 + number, model, manager).wait()
            other, its_manager = make(ours)
            with pytest.raises(CheckpointError, match="saved with another optimizer"):
                checkpoints.restore(other, its_manager)


def test_a_checkpoint_of_another_kind_of_optimizer(tmp_path: pathlib.Path) -> None:
    run_ranks(go_on_with_another_adam, 2, str(tmp_path))


def ask_for_different_ones(folder: str) -> None:
    """Refused one after the other; what was there stays, and the run goes on."""
    rank = bmt.rank()
    layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(2))
    model = bmt.BMTrainModelWrapper(torch.nn.ModuleDict({"layers": layers}))
    params = list(model.parameters())
    manager, turned = bmt.optim.OptimManager(), bmt.optim.OptimManager()
    manager.add_optimizer(bmt.optim.AdamOptimizer(params))
    # As of a set of parameters, whose order is that of addresses.
    turned.add_optimizer(bmt.optim.AdamOptimizer(params[::-1] if rank else params))
    with bmt.CheckpointManager(folder) as checkpoints:
        checkpoints.save(1, model, manager).wait()
        checkpoints.save(2, model, manager).wait()
        asked: list[tuple[str, Callable[[], object]]] = [
            ("step", lambda: checkpoints.save(2 - rank, model, manager)),
            ("facts", lambda: checkpoints.save(3, model, manager, facts={"best": rank})),
            ("only", lambda: checkpoints.save(3, model, only=[f"layers.{rank}.weight"])),
            ("optim_manager", lambda: checkpoints.save(3, model, None if rank else manager)),
            ("optimizers", lambda: checkpoints.save(3, model, turned)),
        ]
        for name, save in asked:
            with pytest.raises(CheckpointError, match=f"save got other {name} than rank 0"):
                save()
        assert [path.name for path in usable(pathlib.Path(folder))] == [
            "step-00000001",
            "step-00000002",
        ]
        checkpoints.save(3, model, manager, facts={"best": 1}).wait()
        restored = checkpoints.restore(model, manager)
        assert restored is not None and restored[:2] == (3, {"best": 1})


def test_ranks_that_ask_for_different_ones_are_refused(tmp_path: pathlib.Path) -> None:
    run_ranks(ask_for_different_ones, 2, str(tmp_path))


@pytest.mark.usefixtures("alone")
def test_a_run_that_went_back_keeps_what_it_writes(tmp_path: pathlib.Path) -> None:
    """Later steps are still in the folder: the newest checkpoint is not the oldest step."""
    net = bmt.BMTrainModelWrapper(torch.nn.Linear(3, 3))
    with bmt.CheckpointManager(tmp_path, keep=2) as checkpoints:
        for step in (10, 20, 30):
            checkpoints.save(step, net).wait()
        with pytest.warns(UserWarning, match="step-00000030 is of a later step than 11"):
            checkpoints.save(11, net).wait()
        assert [one.name for one in usable(tmp_path)] == [
            "step-00000011",
            "step-00000020",
            "step-00000030",
        ]
        assert checkpoints.restore(net, path=tmp_path / "step-00000011") == (11, {}, None)


@pytest.mark.usefixtures("alone")
def test_a_write_while_it_is_copied_is_refused(tmp_path: pathlib.Path) -> None:
    """Or waited for."""
    net = bmt.BMTrainModelWrapper(torch.nn.Linear(3, 3))
    with bmt.CheckpointManager(tmp_path) as checkpoints:
        blocks = Slow(checkpoints)
        writing = checkpoints.save(1, net)
        with torch.no_grad():
            net.weight.add_(1)
        blocks.release()
        with pytest.raises(CheckpointError, match="while they were being copied"):
            writing.wait()
        assert complete(tmp_path) == []
        checkpoints.save(1, net)
        checkpoints.wait_copied()
        with torch.no_grad():
            net.weight.add_(1)
        checkpoints.wait()
        assert len(complete(tmp_path)) == 1


class Slow:
    """Host memory that is there only after `release`."""

    def __init__(self, checkpoints: bmt.CheckpointManager) -> None:
        self._lock = checkpoints._memory._lock
        self._lock.acquire()

    def release(self) -> None:
        self._lock.release()


def test_manifests_contradictions() -> None:
    """Each is found."""
    facts = manifests.TensorFacts((4, 2), torch.float32, 0, 2, ())
    files = {"a": manifests.FileFacts(32, (0,))}
    good = [manifests.Piece("a", 0, 0, 4, 0), manifests.Piece("a", 16, 0, 4, 1)]
    for pieces, is_good in [
        (good, True),
        (good[:1], False),
        ([*good, good[0]], False),
        ([good[0], manifests.Piece("a", 20, 0, 4, 1)], False),
        ([good[0], manifests.Piece("a", -4, 0, 4, 1)], False),
        ([good[0], manifests.Piece("a", 16, 1, 4, 1)], False),
    ]:
        one = manifests.TensorFacts(facts.shape, facts.dtype, 0, 2, tuple(pieces))
        if is_good:
            one.check(files)
        else:
            with pytest.raises(ValueError):
                one.check(files)
