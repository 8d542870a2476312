"""The verbs of model_center.training, against plain PyTorch and plain Python."""

import importlib
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.ranks.runner import on_ranks, run_ranks
from torch.utils.data import Dataset

import bmtrain as bmt
from bmtrain.errors import CheckpointError
from model_center.arguments import make_parser, parse_args
from model_center.errors import ConfigError, ResumeError
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
    resuming,
)
from model_center.training.batches import grouped, num_tokens
from model_center.training.curves import TensorBoard, Wandb, open_curves
from model_center.training.metrics_file import MetricsFile, read_metrics
from model_center.training.optimization import is_decayed
from model_center.training.run_log import Listener

ROWS, WIDTH = 22, 6
Values = list[dict[str, Any]]


class Points(Dataset[dict[str, torch.Tensor]]):
    """Rows with a class; every fifth has none."""

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        label = -100 if index % 5 == 0 else index % 3
        return {"x": torch.randn(WIDTH, generator=generator), "label": torch.tensor(label)}


class Net(torch.nn.Module):
    """Two layers; the same first values everywhere."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.up = Linear(WIDTH, 8, dtype=dtype, bias=True)
        self.down = Linear(8, 3, dtype=dtype, bias=True)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


FLAGS = (
    "--dtype fp32 --batch-size 3 --gradient-accumulation 2 --epochs 2 "
    "--lr 1e-2 --lr-decay-style linear --warmup-iters 0.25 --clip-grad 0.5"
)


def flags(more=""):
    return parse_args(make_parser(), f"{FLAGS} {more}".split())


def net(dtype=torch.float32):
    """A model with its first values."""
    model = Net(dtype)
    bmt.init_parameters(model)
    return model


def steps_of(run):
    """The steps of a pass that are left, each a mean over the labels of all ranks."""
    loss_sum = bmt.loss.FusedCrossEntropy(reduction="sum", ignore_index=-100)
    for batches in run.steps():
        mean = bmt.loss.TokenMean(batch["label"] for batch in batches)
        run.update(mean(loss_sum(run.model(b["x"]), b["label"])) for b in batches)


def training(folder, raises):
    """On a rank: two passes over the points; what a callable hears, and what is said if it
    raises.
    """
    model, args = net(), flags(f"--save {folder}")
    bmt.save(model, os.path.join(folder, "first.pt"))
    heard = []

    def on_step(values):
        heard.append(values)
        if raises:
            raise ConnectionError("nobody there")

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        loader = make_loader(Points(), args, shuffle=False)
        with Run(model, loader, args, on_step=on_step) as run:
            for epoch in run.epochs():
                steps_of(run)
                run.record(epoch=epoch)
    nothing = bmt.loss.TokenMean([torch.full((4,), -100)])
    assert float(nothing(torch.zeros(()))) == 0.0, "a step without labels is no NaN"
    bmt.save(model, os.path.join(folder, "last.pt"))
    return heard, [str(one.message) for one in told if "told of each step" in str(one.message)]


def plain_training(first, rows_of_steps):
    """Losses, gradient norms and the model of plain PyTorch on the same rows, which are no longer
    divided.
    """
    model = torch.nn.ModuleDict({"up": torch.nn.Linear(WIDTH, 8), "down": torch.nn.Linear(8, 3)})
    model.load_state_dict(first)
    groups = [
        {"params": [model[name].weight for name in model], "weight_decay": 1e-2},
        {"params": [model[name].bias for name in model], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups)
    losses, norms, total = [], [], len(rows_of_steps)
    for step, rows in enumerate(rows_of_steps):
        x, labels = (torch.stack([Points()[row][key] for row in rows]) for key in ("x", "label"))
        logits = model["down"](torch.tanh(model["up"](x)))
        loss = torch.nn.functional.cross_entropy(logits, labels, ignore_index=-100)
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


@pytest.mark.parametrize(("ranks", "raises"), [(3, False), (2, True)])
def test_a_run_is_that_of_plain_pytorch(ranks, raises, tmp_path):
    """Micro-batches of unequal size, on ranks of unequal share: each labelled row counts alike. A
    callable hears of every step on every rank; what it raises is told once and changes nothing.
    """
    found = run_ranks(training, ranks, str(tmp_path), raises)
    rows = 6 * ranks
    one_pass = [list(range(start, min(start + rows, ROWS))) for start in range(0, ROWS, rows)]
    losses, norms, model = plain_training(torch.load(tmp_path / "first.pt"), one_pass * 2)
    written = read_metrics(tmp_path / "metrics.jsonl")
    records = [record for record in written if "loss" in record]
    assert [record["loss"] for record in records] == pytest.approx(losses, rel=1e-5)
    assert [record["grad_norm"] for record in records] == pytest.approx(norms, rel=1e-4)
    last = torch.load(tmp_path / "last.pt")
    for name, want in model.state_dict().items():
        torch.testing.assert_close(last[name], want, rtol=1e-4, atol=1e-6)
    epochs = [(record["step"], record["epoch"]) for record in written if "epoch" in record]
    ends = [(record["step"], record["epoch"]) for record in written if "loss" not in record]
    assert ends == [(len(one_pass), 0), (2 * len(one_pass), 1)]
    steps = range(1, 2 * len(one_pass) + 1)
    assert set(epochs) == {(step, (step - 1) // len(one_pass)) for step in steps}
    own = {"memory", "tokens_per_second", "unpadded_tokens_per_second", "seconds"}
    for rank, (heard, words) in enumerate(found):
        assert len(words) == raises and all("('nobody there')" in word for word in words)
        for values, line in zip(heard, written, strict=True):
            assert values.keys() == line.keys() - {"time"}
            assert {name for name in values if values[name] != line[name]} <= (
                own if rank else set()
            )


def short_run(folder, more):
    """On a rank: a run with an evaluation after each pass."""
    args = flags(f"--save {folder} {more}")
    with Run(net(), make_loader(Points(), args, shuffle=False), args) as run:
        for _ in run.epochs():
            steps_of(run)
            run.record(accuracy=0.5)


def test_a_run_goes_on_elsewhere(tmp_path):
    """On other ranks, in the same data: steps are of another size, and each row is still read once
    a pass. A finished run is not touched but for more epochs, and by no other run.
    """
    folder, metrics = str(tmp_path), tmp_path / "metrics.jsonl"
    run_ranks(short_run, 2, folder, "--train-iters 1 --epochs 3")
    run_ranks(short_run, 1, folder, "--resume --gradient-accumulation 1")
    # 12 of 22 rows were read by a step of 12; 10 are left, in 4 steps of 3, and 8 of the next pass
    records = read_metrics(metrics)
    assert [one["step"] for one in records if "accuracy" in one] == [1, 5, 13]
    assert [one["step"] for one in records if "loss" in one] == list(range(1, 14))
    before = metrics.read_text()
    for more, words in (
        ("", r"step-00000013 exists: resume from it with --resume"),
        ("--resume --seed 7", r"another run: seed was 1234 and is 7\. Remedy: give the same"),
    ):
        with pytest.raises(ResumeError, match=words):
            run_ranks(short_run, 2, folder, more)
    run_ranks(short_run, 1, folder, "--resume --gradient-accumulation 1")
    assert metrics.read_text() == before
    run_ranks(short_run, 1, folder, "--resume --gradient-accumulation 1 --epochs 3")
    later = read_metrics(metrics)
    assert later[: len(records)] == records
    assert [one["step"] for one in later if "accuracy" in one] == [1, 5, 13, 21]


def test_another_model_is_said_in_words(monkeypatch):
    """The digests of names and shapes tell a reader nothing."""
    before, step = {"seed": 1, "weights": "ab22ba8a"}, Path("step-1")
    monkeypatch.setattr(resuming, "read_facts", lambda _: {"made_with": before})
    for now, words in (
        ({"seed": 1, "weights": "31597d91"}, r"weights have other names or shapes \(another"),
        ({"seed": 1}, "weights was ab22ba8a and is None"),
    ):
        with pytest.raises(ResumeError, match=f"run: {words}"):
            resuming.check_same_run(step, now)
    resuming.check_same_run(step, {**before, "moments": "fp32"})


def test_what_ends_programs_goes_through():
    """Ctrl-C in a callable is the user's."""
    with pytest.raises(KeyboardInterrupt):
        Listener(mock.Mock(side_effect=KeyboardInterrupt)).receive({})


def test_what_is_decayed():
    """Every matrix, no vector. Of T5, the biases of scores are no weights either."""
    gpt2 = GPT2Config(num_layers=1, tied=False, dtype=torch.float32)
    t5 = T5Config(num_encoder_layers=1, num_decoder_layers=1, dtype=torch.float32)
    with torch.device("meta"):
        models = [GPT2(gpt2), T5(t5)]
    for model in models:
        for name, param in model.named_parameters():
            is_matrix = param.dim() > 1 and "relative_attention_bias" not in name
            assert is_decayed(name) == is_matrix, name
            assert is_matrix or "layernorm" in name or "bias" in name


CODES = {name + kind for name in ("exp_avg", "exp_avg_sq") for kind in ("_codes", "_scales")}
MOMENTS = {"exp_avg", "exp_avg_sq"}
# By flags: the names of the states that a bf16 parameter has.
MADE = {
    "--optimizer adam": {"master", *MOMENTS},
    "--optimizer adam-offload": {"master", *MOMENTS},
    "--optimizer adam-offload --moments 8bit": {"master", *CODES},
    "--optimizer adam-offload --master-weights split --device-states 0.5": {"remainder", *MOMENTS},
    "--moments 8bit": {"master", *CODES},
    "--master-weights split": {"remainder", *MOMENTS},
    "--moments 8bit --master-weights none": CODES,
}


@on_ranks(1)
def test_optimizers():
    model = net(torch.bfloat16)
    dict(model.named_parameters())["up.weight"].requires_grad_(False)
    for words, names in MADE.items():
        optimizer = make_optimizer(model, flags(words))
        assert isinstance(optimizer, bmt.optim.AdamOptimizer | bmt.optim.AdamOffloadOptimizer)
        is_offloaded = isinstance(optimizer, bmt.optim.AdamOffloadOptimizer)
        assert is_offloaded == ("adam-offload" in words)
        found = [(len(group["params"]), group["weight_decay"]) for group in optimizer.param_groups]
        assert found == [(1, 1e-2), (2, 0.0)]
        assert {*optimizer.sharded_state_dict()["state"][0]} - {"step"} == names, words
    model.requires_grad_(False)
    words = "no parameter of Net is to be trained: all have requires_grad=False"
    with pytest.raises(ConfigError, match=words):
        make_optimizer(model, flags())


# Style, step, last rate, and the rate at that step of 100, of which 20 warm up.
RATES = [
    *(("constant", 60, 0.0, 1e-2), ("linear", 60, 0.0, 5e-3), ("cosine", 60, 0.0, 5e-3)),
    *(("noam", 60, 0.0, 1e-2 / 60**0.5), ("linear", 100, 2e-3, 2e-3), ("linear", 60, 2e-3, 6e-3)),
    *(("cosine", 100, 2e-3, 2e-3), ("cosine", 120, 2e-3, 2e-3), ("cosine", 60, 2e-3, 6e-3)),
    *(("wsd", 20, 2e-3, 1e-2), ("wsd", 90, 2e-3, 1e-2), ("wsd", 95, 2e-3, 6e-3)),
    ("wsd", 150, 2e-3, 2e-3),
]


@on_ranks(1)
def test_schedules():
    optimizer = make_optimizer(net(), flags())
    for style, step, last, want in RATES:
        more = f"--lr-decay-style {style} --warmup-iters 20 --start-step {step} --lr-end {last}"
        found = make_scheduler(optimizer, flags(more), 100).current_lr
        assert found == pytest.approx(want), (style, step)
    ended = flags("--lr-decay-iters 80 --start-step 80 --warmup-iters 0")
    assert make_scheduler(optimizer, ended, 100).current_lr == 0
    for wrong, total, complaint in (
        ("--warmup-iters 20", 10, "warms up for 20 steps and decays for -10, but ends at"),
        ("--lr-decay-style wsd --wsd-decay 90 --warmup-iters 20", 100, "for 20 .* decays for 90"),
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


@on_ranks(2)
def test_checkpoints(tmp_path):
    """What cannot be written on rank 0 is an error on all, a log too; the last ones are kept."""
    model, file = net(), tmp_path / "file"
    optimizer = make_optimizer(model, flags())
    manager = make_manager(optimizer, make_scheduler(optimizer, flags(), 10), flags())
    file.touch()
    for flag, kind in (("--log-dir", ConfigError), ("--save", CheckpointError)):
        args = flags(f"{flag} {file}")
        with pytest.raises(kind, match=r"(File exists|Not a directory)"):
            Run(model, make_loader(Points(), args, shuffle=False), args)
    checkpoints = Checkpoints(tmp_path / "good", keep=2)
    for step in (1, 2, 3):
        checkpoints.save({"step": step}, model, manager, {})
    checkpoints.close()  # rank 0 removes what is too old after the others have gone on
    found = sorted(path.name for path in checkpoints.folder.iterdir())
    assert found == ["lock", "step-00000002", "step-00000003"]
    assert checkpoints.latest() == checkpoints.folder / "step-00000003"
    bmt.synchronize()  # all have looked
    checkpoints.clear()
    assert checkpoints.latest() is None


def test_metrics_are_taken_back(tmp_path):
    path = tmp_path / "folder" / "metrics.jsonl"
    file = MetricsFile(path, 0)
    for step in range(5):
        file.add({"step": step})
    with path.open("a") as text:
        text.write('{"step": 5, "lo')  # the process died here
    MetricsFile(path, 2).add({"step": 3, "new": True})
    assert read_metrics(path) == [{"step": 0}, {"step": 1}, {"step": 2}, {"step": 3, "new": True}]


def test_each_measurement_is_there_once(tmp_path):
    """What was measured after the last step stays, and what is measured again replaces it, though
    the folder is away for a while. Damaged lines are named, and kept beside.
    """
    folder = tmp_path / "run"
    path, away = folder / "metrics.jsonl", tmp_path / "away"
    step, a, b = {"step": 1, "loss": 2.0}, {"step": 1, "on": "a", "x": 1}, {"step": 1, "on": "b"}
    file = MetricsFile(path, 0)
    for record in (step, a, b, {"step": 2, "loss": 1.0}):
        file.add(record)
    damaged = path.read_bytes().replace(b"2.0}\n", b'2.0}\n\xff\x00\n[3]\n{"a": 1}\n')
    path.write_bytes(damaged)
    with pytest.warns(UserWarning, match=r"metrics.jsonl: 3 lines cannot be read.*damaged"):
        file = MetricsFile(path, 1)
    assert path.with_name("metrics.jsonl.damaged").read_bytes() == damaged
    assert read_metrics(path) == [step, a, b]
    folder.rename(away)
    for number in (1, 2):
        with pytest.raises(FileNotFoundError):
            file.add({"step": number, "on": "a", "x": torch.tensor(number + 0.5)})
    away.rename(folder)
    file.add({"step": 3, "loss": 0.5})
    again = [{"step": number, "on": "a", "x": number + 0.5} for number in (1, 2)]
    assert read_metrics(path) == [step, b, *again, {"step": 3, "loss": 0.5}]


def test_tensorboard_is_missing(tmp_path):
    with (
        mock.patch.dict(sys.modules),
        mock.patch.object(importlib, "import_module", side_effect=ImportError("not there")),
        pytest.raises(
            ConfigError,
            match=r"--curves tensorboard needs the package tensorboard \(not there\): pip install "
            "tensorboard",
        ),
    ):
        sys.modules.pop("torch.utils.tensorboard", None)
        TensorBoard(tmp_path, first_step=0)


def test_wandb_goes_on(tmp_path):
    """The second time under the number that it had the first time; without a project, which is left
    to what the package is set up for. A name that is there twice counts once.
    """
    fake = mock.Mock()
    fake.init.return_value = fake
    fake.id = "abc"
    with mock.patch.dict(sys.modules, wandb=fake):
        for step in (1, 2):
            (curves,) = open_curves(["wandb:mine"] * 2, tmp_path / "run", 0)
            curves.add(step, {"loss": 0.5, "name": "not a number"})
            curves.close()
        open_curves(["wandb"], tmp_path / "other", 0)
    started = [(call.kwargs["project"], call.kwargs["id"]) for call in fake.init.mock_calls]
    assert started == [("mine", None), ("mine", "abc"), (None, None)]
    logged = [mock.call({"loss": 0.5}, step=step) for step in (1, 2)]
    assert fake.log.mock_calls == logged and fake.finish.call_count == 2
    words = r"--curves wandb needs the package wandb \(.*\): pip install wandb"
    with mock.patch.dict(sys.modules, wandb=None), pytest.raises(ConfigError, match=words):
        Wandb(tmp_path / "run", "mine")


def test_groups_of_batches():
    """Nothing is asked for before it is needed. The size of a batch is that of its largest
    tensor.
    """
    source = iter(range(5))
    groups_of_two = grouped(source, 2)
    assert next(groups_of_two) == [0, 1] and next(source) == 2
    assert list(groups_of_two) == [[3, 4]]
    assert list(grouped(range(3), 2)) == [[0, 1], [2]]
    pair = (torch.zeros(2), [torch.zeros(3)])
    assert num_tokens({"ids": torch.zeros(2, 7), "texts": ["a", "b"], "pair": pair}) == 14
    assert num_tokens(["text"]) == 0


def stopping():
    request = StopRequest()
    answers = [request.agreed()]
    if bmt.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    answers.append(request.agreed())
    request.restore()
    return [*answers, signal.getsignal(signal.SIGTERM) is signal.SIG_DFL]


def test_one_rank_stops_all():
    assert run_ranks(stopping, 2) == [[False, True, True]] * 2
