"""The verbs of model_center.training, against plain PyTorch and plain Python."""

from __future__ import annotations

import importlib
import os
import pathlib
import signal
import sys
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing import event_accumulator
from tests.ranks.runner import run_ranks
from torch.utils.data import Dataset

import bmtrain as bmt
from bmtrain.errors import CheckpointError
from model_center.arguments import make_parser, parse_args
from model_center.errors import ConfigError
from model_center.layer import Linear
from model_center.model import GPT2, T5, GPT2Config, T5Config
from model_center.training import (
    Checkpoints,
    Run,
    StopRequest,
    make_loader,
    make_manager,
    make_optimizer,
    make_scheduler,
)
from model_center.training.batches import grouped, num_tokens
from model_center.training.curves import TensorBoard, Wandb
from model_center.training.metrics_file import MetricsFile, read_metrics
from model_center.training.optimization import is_decayed

ROWS, WIDTH = 22, 6


class Points(Dataset[dict[str, torch.Tensor]]):
    """Rows with a class; every fifth has none."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {
            "x": torch.randn(WIDTH, generator=generator),
            "label": torch.tensor(-100 if index % 5 == 0 else index % 3),
        }


class Net(torch.nn.Module):
    """Two layers; the same first values everywhere."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.up, self.down = (
            Linear(WIDTH, 8, dtype=dtype, bias=True),
            Linear(8, 3, dtype=dtype, bias=True),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


FLAGS = (
    "--dtype fp32 --batch-size 3 --gradient-accumulation 2 --epochs 2 "
    "--lr 1e-2 --lr-decay-style linear --warmup-iters 0.25 --clip-grad 0.5"
)


def flags(more: str = "") -> Any:
    return parse_args(make_parser(), f"{FLAGS} {more}".split())


def training(folder: str) -> None:
    """On a rank: two passes over the points."""
    model = Net()
    bmt.init_parameters(model)
    bmt.save(model, os.path.join(folder, "first.pt"))
    args = flags(f"--save {folder}")
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum", ignore_index=-100)
    with Run(model, make_loader(Points(), args, shuffle=False), args) as run:
        for epoch in run.epochs():
            for batches in run.steps():
                mean = bmt.loss.TokenMean(batch["label"] for batch in batches)
                run.update(mean(loss_sum(model(batch["x"]), batch["label"])) for batch in batches)
            run.record(epoch=epoch)
    bmt.save(model, os.path.join(folder, "last.pt"))


def plain_training(
    first: dict[str, torch.Tensor], rows_of_steps: list[list[int]]
) -> tuple[list[float], list[float], torch.nn.Module]:
    """Losses, gradient norms and the model of plain PyTorch on the same rows, which are no longer
    divided.
    """
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(WIDTH, 8), "down": torch.nn.Linear(8, 3)})
    model.load_state_dict(first)
    decayed = [param for name, param in model.named_parameters() if not name.endswith("bias")]
    biases = [param for name, param in model.named_parameters() if name.endswith("bias")]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 1e-2}, {"params": biases, "weight_decay": 0.0}]
    )
    losses, norms, total = [], [], len(rows_of_steps)
    for step, rows in enumerate(rows_of_steps):
        x, labels = (torch.stack([Points()[row][key] for row in rows]) for key in ("x", "label"))
        loss = torch.nn.functional.cross_entropy(
            model["down"](torch.tanh(model["up"](x))), labels, ignore_index=-100
        )
        warm = round(0.25 * total)
        lr = 1e-2 * step / warm if step < warm else 1e-2 * (total - step) / (total - warm)
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms, model


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_run_is_that_of_plain_pytorch(ranks: int, tmp_path: pathlib.Path) -> None:
    """Micro-batches of unequal size, on ranks of unequal share: each labelled row counts alike."""
    run_ranks(training, ranks, str(tmp_path))
    rows = 6 * ranks
    one_pass = [list(range(start, min(start + rows, ROWS))) for start in range(0, ROWS, rows)]
    losses, norms, model = plain_training(torch.load(tmp_path / "first.pt"), one_pass * 2)
    records = [record for record in read_metrics(tmp_path / "metrics.jsonl") if "loss" in record]
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-4)
    for name, want in model.state_dict().items():
        torch.testing.assert_close(
            torch.load(tmp_path / "last.pt")[name], want, rtol=1e-4, atol=1e-6
        )
    epochs = [
        (record["step"], record["epoch"])
        for record in read_metrics(tmp_path / "metrics.jsonl")
        if "epoch" in record
    ]
    assert epochs == [(len(one_pass), 0), (2 * len(one_pass), 1)]


@pytest.mark.parametrize(
    ("config", "plain"),
    [
        (GPT2Config(num_layers=1, tied=False, dtype=torch.float32), ("layernorm", "bias")),
        (
            T5Config(num_encoder_layers=1, num_decoder_layers=1, dtype=torch.float32),
            ("layernorm", "bias"),
        ),
    ],
)
def test_what_is_decayed(config: Any, plain: tuple[str, ...]) -> None:
    """Every matrix, no vector. Of T5, the biases of scores are no weights either."""
    with torch.device("meta"):
        model: torch.nn.Module = (GPT2 if isinstance(config, GPT2Config) else T5)(config)
    for name, param in model.named_parameters():
        assert is_decayed(name) == (param.dim() > 1 and "relative_attention_bias" not in name), name
        assert is_decayed(name) or any(part in name for part in plain)


CODES = {name + kind for name in ("exp_avg", "exp_avg_sq") for kind in ("_codes", "_scales")}
# By flags: the class, and the names of the states that a bf16 parameter has.
MADE: dict[str, tuple[str, set[str]]] = {
    "--optimizer adam": ("AdamOptimizer", {"master", "exp_avg", "exp_avg_sq"}),
    "--optimizer adam-offload": ("AdamOffloadOptimizer", {"master", "exp_avg", "exp_avg_sq"}),
    "--optimizer adam-offload --moments 8bit": ("AdamOffloadOptimizer", {"master", *CODES}),
    "--optimizer adam-offload --master-weights split --device-states 0.5": (
        "AdamOffloadOptimizer",
        {"remainder", "exp_avg", "exp_avg_sq"},
    ),
    "--moments 8bit": ("AdamOptimizer", {"master", *CODES}),
    "--master-weights split": ("AdamOptimizer", {"remainder", "exp_avg", "exp_avg_sq"}),
    "--moments 8bit --master-weights none": ("AdamOptimizer", CODES),
}


def groups() -> None:
    model = Net(torch.bfloat16)
    bmt.init_parameters(model)
    dict(model.named_parameters())["up.weight"].requires_grad_(False)
    for words, (kind, names) in MADE.items():
        optimizer = make_optimizer(model, flags(words))
        assert type(optimizer).__name__ == kind
        groups = optimizer.param_groups
        assert [(len(group["params"]), group["weight_decay"]) for group in groups] == [
            (1, 1e-2),
            (2, 0.0),
        ]
        assert isinstance(optimizer, bmt.optim.AdamOptimizer | bmt.optim.AdamOffloadOptimizer)
        assert {*optimizer.sharded_state_dict()["state"][0]} - {"step"} == names, words
    for param in model.parameters():
        param.requires_grad_(False)
    with pytest.raises(
        ConfigError, match="no parameter of Net is to be trained: all have requires_grad=False"
    ):
        make_optimizer(model, flags())


def test_optimizers() -> None:
    run_ranks(groups, 1)


def schedules() -> None:
    model = Net()
    bmt.init_parameters(model)
    optimizer = make_optimizer(model, flags())
    for style, want in (
        ("constant", 1e-2),
        ("linear", 5e-3),
        ("cosine", 5e-3),
        ("noam", 1e-2 / 60**0.5),
    ):
        scheduler = make_scheduler(
            optimizer, flags(f"--lr-decay-style {style} --warmup-iters 20 --start-step 60"), 100
        )
        assert scheduler.current_lr == pytest.approx(want), style
    assert (
        make_scheduler(
            optimizer, flags("--lr-decay-iters 80 --start-step 80 --warmup-iters 0"), 100
        ).current_lr
        == 0
    )
    for style, step, want in (
        ("linear", 100, 2e-3),
        ("linear", 60, 6e-3),
        ("cosine", 100, 2e-3),
        ("cosine", 120, 2e-3),
        ("cosine", 60, 6e-3),
        ("wsd", 20, 1e-2),
        ("wsd", 90, 1e-2),
        ("wsd", 95, 6e-3),
        ("wsd", 150, 2e-3),
    ):
        options = f"--lr-decay-style {style} --warmup-iters 20 --lr-end 2e-3 --start-step {step}"
        assert make_scheduler(optimizer, flags(options), 100).current_lr == pytest.approx(want)
    for wrong, total, complaint in (
        ("--warmup-iters 20", 10, "is to rise for 20 steps and to fall for -10, which ends at"),
        ("--lr-decay-style wsd --wsd-decay 90 --warmup-iters 20", 100, "for 20 .* to fall for 90"),
        ("--lr-end 1", 100, "falls from 0.01 to 1.0: give --lr-end at most --lr"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            make_scheduler(optimizer, flags(wrong), total)
    scheduler = make_scheduler(optimizer, flags(), 10)
    scales = [
        make_manager(optimizer, scheduler, flags(more)).loss_scale
        for more in ("", "--dtype fp16", "--dtype fp16 --loss-scale 0")
    ]
    assert scales == [1, 65536, 1]


def test_schedules() -> None:
    run_ranks(schedules, 1)


def unwritable(folder: str) -> None:
    model = Net()
    bmt.init_parameters(model)
    optimizer = make_optimizer(model, flags())
    manager = make_manager(optimizer, make_scheduler(optimizer, flags(), 10), flags())
    pathlib.Path(folder, "file").touch()
    with pytest.raises(CheckpointError, match=r"Not a directory|File exists"):
        Checkpoints(pathlib.Path(folder, "file"))
    checkpoints = Checkpoints(pathlib.Path(folder, "good"), keep=2)
    for step in (1, 2, 3):
        checkpoints.save({"step": step}, model, manager, {})
    checkpoints.close()  # rank 0 removes what is too old after the others have gone on
    found = sorted(path.name for path in checkpoints.folder.iterdir())
    assert found == ["lock", "step-00000002", "step-00000003"]
    assert checkpoints.latest() == checkpoints.folder / "step-00000003"
    bmt.synchronize()  # all have looked
    checkpoints.clear()
    assert checkpoints.latest() is None


def test_checkpoints(tmp_path: pathlib.Path) -> None:
    """What cannot be written on rank 0 is an error on all; the last ones are kept."""
    run_ranks(unwritable, 2, str(tmp_path))


def without_log(folder: str) -> None:
    model = Net()
    bmt.init_parameters(model)
    file = pathlib.Path(folder, "file")
    file.touch()
    for flag, kind in (("--log-dir", ConfigError), ("--save", CheckpointError)):
        args = flags(f"{flag} {file}")
        with pytest.raises(kind, match=r"(File exists|Not a directory)"):
            Run(model, make_loader(Points(), args, shuffle=False), args)


def test_a_log_that_cannot_be_written_is_told_on_all_ranks(tmp_path: pathlib.Path) -> None:
    run_ranks(without_log, 2, str(tmp_path))


def test_metrics_are_taken_back(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "folder" / "metrics.jsonl"
    file = MetricsFile(path, lambda record: True)
    for step in range(5):
        file.add({"step": step})
    with path.open("a") as text:
        text.write('{"step": 5, "lo')  # the process died here
    MetricsFile(path, lambda record: record["step"] <= 2).add({"step": 3, "new": True})
    assert read_metrics(path) == [{"step": 0}, {"step": 1}, {"step": 2}, {"step": 3, "new": True}]


def test_curves_are_tensorboards(tmp_path: pathlib.Path) -> None:
    curves = TensorBoard(tmp_path, first_step=0)
    for step in (1, 2):
        curves.add(step, {"loss": 1.0 / step, "name": "not a number"})
    curves.close()
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 0.5)]


def test_tensorboard_is_missing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(f"No module named {name}")

    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(
        ConfigError,
        match=r"--curves tensorboard needs the package tensorboard \(.*\): pip install tensorboard",
    ):
        TensorBoard(tmp_path, first_step=0)


class FakeWandb:
    """What is asked of the package `wandb`."""

    def __init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.finished = 0
        self.id = "abc"

    def init(self, **options: Any) -> FakeWandb:
        self.started.append(options)
        return self

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


def test_wandb_goes_on(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second time under the number that it had the first time."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for step in (1, 2):
        curves = Wandb(tmp_path / "run", "mine")
        curves.add(step, {"loss": 0.5, "name": "not a number"})
        curves.close()
    assert [(options["project"], options["id"]) for options in fake.started] == [
        ("mine", None),
        ("mine", "abc"),
    ]
    assert fake.logged == [(1, {"loss": 0.5}), (2, {"loss": 0.5})] and fake.finished == 2
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(
        ConfigError, match=r"--curves wandb needs the package wandb \(.*\): pip install wandb"
    ):
        Wandb(tmp_path / "run", "mine")


def test_groups_of_batches() -> None:
    """Nothing is asked for before it is needed."""
    asked: list[int] = []

    def source() -> Any:
        for number in range(5):
            asked.append(number)
            yield number

    groups_of_two = grouped(source(), 2)
    assert next(groups_of_two) == [0, 1] and asked == [0, 1]
    assert list(groups_of_two) == [[2, 3], [4]]


def test_the_size_of_a_batch() -> None:
    assert (
        num_tokens(
            {
                "ids": torch.zeros(2, 7),
                "texts": ["a", "b"],
                "pair": (torch.zeros(2), [torch.zeros(3)]),
            }
        )
        == 14
    )
    assert num_tokens(["text"]) == 0


def stopping() -> list[bool]:
    request = StopRequest()
    answers = [request.agreed()]
    if bmt.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    answers.append(request.agreed())
    request.restore()
    return [*answers, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]


def test_one_rank_stops_all() -> None:
    assert run_ranks(stopping, 2) == [[False, True, True]] * 2
