"""What a person sees of a run: lines, the file of metrics with its units, curves, pictures."""

import contextlib
import datetime
import importlib
import io
import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tensorboard.backend.event_processing import event_accumulator
from tests.modules import importable
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from model_center.__main__ import main
from model_center.arguments import make_parser, parse_args
from model_center.errors import ConfigError, DataError
from model_center.training.curves import open_curves, requested_curves
from model_center.training.metrics_file import FIELDS, read_metrics
from model_center.training.plots import PANELS, draw_runs, points, smoothed
from model_center.training.run_log import METRICS, RunLog, StepReport

ROOT = Path(__file__).resolve().parents[2]


FIGURES = {"grad_norm": 0.5, "lr": 3e-4, "loss_scale": 1.0, "mfu": 0.4567}
FIGURES |= {"tokens_per_second": 12345.6, "memory": 3 * 2**29, "seconds": 0.25}


def report(step, **others):
    return StepReport(step=step, **(FIGURES | {"loss": 2.0 + 1.0 / step} | others))


def logged(folder):
    """What rank 0 prints of three steps and an evaluation; its file goes on from two steps that an
    earlier version wrote, without times and without a file of fields.
    """
    path, printed = Path(folder), io.StringIO()
    if bmt.rank() == 0:
        (path / METRICS).write_text('{"step": 0, "loss": 2.0}\n{"step": 9, "loss": 1.0}\n')
    bmt.synchronize()
    curves = ("tensorboard",)
    with contextlib.redirect_stdout(printed):
        log = RunLog(path, first_step=0, num_steps=3, log_every=1, curves=curves)
        with log:
            log.step(report(1))
            log.step(report(2, skipped=True, mfu=None, seconds=None))
            log.step(report(3, seconds=61.5))
            log.record(3, validation_loss=2.125, epoch=0)
    return printed.getvalue()


def test_a_run_is_seen(tmp_path):
    """The step line has all that the record has; the record has its time, and its units lie
    beside it.
    """
    said, nothing = run_ranks(logged, 2, str(tmp_path))
    assert nothing == ""
    columns, *lines = said.splitlines()
    assert columns.startswith("columns: step, mean loss") and "(MFU)" in columns
    clock = r"\d\d:\d\d:\d\d  step     "
    figures = r"grad norm 0\.50  12,346 tokens/s"
    left = r"\d+m\d\ds left"
    for line, expected in zip(
        lines,
        (
            rf"1/3  loss 3\.0000  lr 3\.00e-04  {figures}  MFU 45\.7%  250 ms/step  1\.50 GiB  {left}",
            rf"2/3  loss 2\.5000  lr 3\.00e-04  {figures}  1\.50 GiB  {left}  SKIPPED",
            rf"3/3  loss 2\.3333  lr 3\.00e-04  {figures}  MFU 45\.7%  61\.50 s/step  1\.50 GiB  {left}",
            r"3/3  validation loss 2\.1250  epoch 0",
        ),
        strict=True,
    ):
        assert re.fullmatch(clock + expected, line), line
    old, *records = read_metrics(tmp_path / METRICS)
    assert old == {"step": 0, "loss": 2.0}
    assert points([old, *records], "loss")[0] == [0, 1, 2, 3]
    found = [(record["step"], record.get("validation_loss")) for record in records]
    assert found == [(1, None), (2, None), (3, None), (3, 2.125)]
    times = [datetime.datetime.fromisoformat(record["time"]) for record in records]
    now = datetime.datetime.now(datetime.timezone.utc)
    assert times == sorted(times)
    assert all(
        datetime.timedelta() <= now - time < datetime.timedelta(minutes=10) for time in times
    )
    described = json.loads((tmp_path / "metrics.fields.json").read_text("utf-8"))
    assert described["format"] == 1
    assert {name for record in records for name in record} <= described["fields"].keys()
    assert described["fields"]["memory"]["unit"] == "bytes"
    events = event_accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(point.step, point.value) for point in events.Scalars("mfu")] == [
        (1, pytest.approx(0.4567)),
        (3, pytest.approx(0.4567)),
    ]


def told(folder, out):
    """A run all of whose ways of telling fail; the steps in its record, and what it says."""
    path, broken = Path(folder), mock.Mock()
    for name in ("add", "close"):
        getattr(broken, name).side_effect = RuntimeError("no network")
    said = []
    with mock.patch("model_center.training.run_log.say", said.append):
        log = RunLog(path, first_step=0, num_steps=3, log_every=1)
        log.curves = [broken]
        log.console.file = out
        with log:
            log.step(report(1))
            path.rename(path.with_name("away"))
            log.step(report(2))
            path.with_name("away").rename(path)
            log.message("you \u4f60\x1b[2J\r")
            log.step(report(3))
            log.to_disk()
    return [record["step"] for record in read_metrics(path / METRICS)], "".join(said)


@pytest.mark.parametrize("error", [None, BrokenPipeError(32, "Broken pipe"), OSError(28, "full")])
def test_telling_ends_nothing(error, tmp_path):
    """A terminal without the letter, a reader that has ended, a full disk, curves without their
    network, a folder that is away: said once on what is left, and the record is whole.
    """
    (tmp_path / "run").mkdir()
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding="ascii", write_through=True)
    if error is not None:
        out = mock.Mock(spec=io.TextIOWrapper, encoding="ascii", isatty=lambda: False)
        out.write.side_effect = error
    with mock.patch("os.dup2") as closed:
        steps, said = told(str(tmp_path / "run"), out)
    assert steps == [1, 2, 3]
    assert closed.called == isinstance(error, BrokenPipeError)
    if error is not None:
        assert re.fullmatch("standard output cannot be written .*: the run continues.\n", said)
        return
    text = raw.getvalue().decode("ascii")
    assert "you \\u4f60\\u001b[2J\\u000d\n" in text and said == ""
    assert text.count("Mock cannot be written (RuntimeError: no network): the run continues") == 1
    assert text.count(f"{METRICS} cannot be written (FileNotFoundError") == 1


GUIDE = (ROOT / "docs/site/en/guides/watching.md").read_text("utf-8")


def test_the_guide_describes_every_field():
    """With its unit, as the file beside the metrics does."""
    for name, (unit, _) in FIELDS.items():
        assert re.search(rf"^\| `{name}` \| {re.escape(unit)} \|", GUIDE, re.MULTILINE), name


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", ()),
        ("--curves tensorboard,wandb", ("tensorboard", "wandb")),
        ("--curves wandb:mine", ("wandb:mine",)),
        ("--tensorboard --wandb mine", ("tensorboard", "wandb:mine")),
        ("--curves wandb:mine --wandb mine", ("wandb:mine", "wandb:mine")),
    ],
)
def test_curves_by_one_flag(arguments, expected):
    args = parse_args(make_parser(), ["--save", "runs", *arguments.split()])
    assert requested_curves(args) == expected


@pytest.mark.parametrize("text", ["tensorbord", "tensorboard:mine", "wandb:", "wandb,,plots"])
def test_curves_of_another_name(text, capsys):
    with pytest.raises(SystemExit):
        parse_args(make_parser(), ["--save", "runs", "--curves", text])
    assert "is none of tensorboard, wandb, wandb:PROJECT" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="expected 'tensorboard', 'wandb' or 'wandb:PROJECT'"):
        open_curves(["lines"], Path(), 0)


def test_smoothing():
    """The weighted mean of all values so far, written out."""
    values = np.random.default_rng(0).normal(size=40)
    span = 7
    expected = [
        np.average(values[: last + 1], weights=np.exp(-np.arange(last, -1, -1) / span))
        for last in range(40)
    ]
    assert smoothed(values.tolist(), span) == pytest.approx(expected)
    assert smoothed([3.0, 3.0, 3.0], 5) == pytest.approx([3.0, 3.0, 3.0])


def test_pictures(tmp_path, capsys):
    """Of one run and of two: both axes named, with units; a raw and a smoothed curve; what is not
    finite or not there is left out.
    """
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        records = [
            {"step": step, "loss": 3.0 / step, "lr": 1e-3, "grad_norm": 1.0, "memory": 2**30}
            for step in range(1, 100)
        ]
        records += [{"step": 100, "loss": float("nan")}, {"step": 50, "validation_loss": 0.5}]
        text = "".join(json.dumps(record) + "\n" for record in records)
        (tmp_path / name / METRICS).write_text(text, "utf-8")
    out = tmp_path / "both.svg"
    assert main(["plot", str(tmp_path / "one"), str(tmp_path / "two"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out)
    picture = out.read_text("utf-8")
    drawn = [panel for panel in PANELS if panel.field not in ("mfu", "tokens_per_second")]
    assert picture.count(">optimizer step<") == len(drawn)
    for panel in drawn:
        assert f">{panel.axis}<" in picture
    assert "model FLOPs utilisation" not in picture
    title = f"{tmp_path / 'two'}: 99 steps, loss 0.03, held-out 0.50"
    for word in (title, f"{tmp_path / 'one'}, smoothed", f"{tmp_path / 'two'}, held-out text"):
        assert word in picture
    assert main(["plot", str(tmp_path / "one")]) == 0
    assert (tmp_path / "one" / "curves.png").read_bytes().startswith(b"\x89PNG")
    draw_runs({"one": read_metrics(tmp_path / "one" / METRICS)}, tmp_path / "one.svg")
    assert ">smoothed over 3 steps<" in (tmp_path / "one.svg").read_text("utf-8")


def test_nothing_to_draw(tmp_path, capsys):
    assert main(["plot", str(tmp_path / "none")]) == 1
    assert f"no metrics at {tmp_path / 'none'}" in capsys.readouterr().err
    with pytest.raises(DataError, match="no steps to draw in the metrics of empty"):
        draw_runs({"empty": [{"step": 1, "validation_loss": 2.0}]}, tmp_path / "x.png")


def test_samples_and_flops_of_the_example(tmp_path):
    """What was written after the checkpoint is taken back, as metrics are. 6 for each element of a
    matrix and token, and half the square of attention.
    """
    with importable(ROOT / "examples" / "gpt2"):
        options, reports = (importlib.import_module(name) for name in ("options", "report"))
        given = options.parse_options(["--preset", "cpu"], "cpu")
    path = tmp_path / "samples.txt"
    parts = [f"=== after step {step}\ntext\n=== of {step}\n" for step in (2, 4, 10)]
    path.write_text("".join(parts), "utf-8")
    for step, kept in ((4, parts[:2]), (0, [])):
        reports.keep_samples(path, step)
        assert path.read_text("utf-8") == "".join(kept)
    matrices = 4 * (4 * 128 * 128 + 2 * 128 * 512) + 2048 * 128
    assert given.flops_per_token() == 6 * matrices + 4 * (12 * 128 * 128) // 2
