"""What a run does about numbers that go wrong: skip, name, go back, end; and a step on replay."""

import contextlib
import io
import math
import re
import shutil
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from torch.utils._pytree import tree_flatten
from torch.utils.data import Dataset

import bmtrain as bmt
from bmtrain.checkpoint.shards import OPTIMIZER, ShardedCheckpoint
from bmtrain.errors import CheckpointError, NonFiniteError
from model_center.arguments import make_parser, parse_args
from model_center.errors import DivergenceError, ResumeError
from model_center.layer import Linear
from model_center.training import Run, make_loader
from model_center.training.metrics_file import read_metrics
from model_center.training.spikes import LEAST, Spikes

ROWS, WIDTH = 96, 6
FLAGS = "--dtype fp32 --batch-size 2 --lr 1e-2 --lr-decay-style constant --warmup-iters 0 "


class Points(Dataset[dict[str, torch.Tensor]]):
    """Rows; those of `marked` say so."""

    def __init__(self, marked):
        self.marked = marked

    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return {"x": x, "marked": torch.tensor(index in self.marked)}


class Break(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * ctx.factor, None


class Net(torch.nn.Module):
    """Three layers, of which the second goes wrong, forward or backward, on marked rows."""

    def __init__(self, fault=""):
        super().__init__()
        self.fault = fault
        self.num_marked = 0
        self.up = bmt.Block(Linear(WIDTH, 8, dtype=torch.float32, bias=True))
        self.middle = torch.nn.Dropout(0.25)
        self.down = Linear(8, 1, dtype=torch.float32, bias=True)

    def forward(self, x, marked):
        x = self.middle(torch.tanh(self.up(x)))
        is_bad = bool(marked.any())
        if is_bad and self.fault == "output":
            x = x * math.inf
        if is_bad and self.fault == "gradient":
            x = Break.apply(x, math.nan)
        out = self.down(x)
        return out

    def loss(self, x, marked):
        """Goes wrong itself, too."""
        loss = self(x, marked).square().mean()
        if not marked.any():
            return loss
        self.num_marked += 1
        if self.fault == "loss":
            return Break.apply(loss * math.nan, 0.0)
        is_off = self.fault == "flaky" and self.num_marked % 2 == 0
        return loss * (1000.0 if self.fault == "spike" else 1.001 if is_off else 1.0)


def started(more, fault="", marked=()):
    """A model, and its run on this rank."""
    args = parse_args(make_parser(), f"{FLAGS} {more}".split())
    args.dataset_name = "points"
    torch.manual_seed(5)  # every run begins alike, as one of its own process does
    model = Net(fault)
    bmt.init_parameters(model)
    return model, Run(model, make_loader(Points(marked), args, shuffle=False), args)


def train(folder, more, fault="", marked=()):
    """A run on this rank, and what it printed; what it raises is returned."""
    outcome: Any = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            model, run = started(f"{more} --save {folder}" if folder else more, fault, marked)
            with run:
                for _ in run.epochs():
                    for batches in run.steps():
                        size = len(batches)
                        run.update(model.loss(**batch) / size for batch in batches)
                        batches.clear()  # a program may do with its list what it likes
            state = run.manager.state_dict(gather_opt=True)
            outcome = (dict(model.state_dict()), state, run.step)
        except (NonFiniteError, DivergenceError, CheckpointError, ResumeError) as error:
            outcome = f"{type(error).__name__}: {error}"
    return outcome, out.getvalue()


def several(jobs):
    return [train(*job) for job in jobs]


def step_rows(step):
    """Two rows that the last rank reads in a step, counted from 1, without accumulation."""
    return 4 * step - 2, 4 * step - 1


def named(job, rank, rows):
    where = {
        "output": r"the first module whose output was not finite is down \(Linear\): (NaN|inf)",
        "loss": "the loss is nan, and all modules' outputs are finite",
        "gradient": r"outputs and loss are finite; backward, the first gradient that is "
        r"not finite is that of the output of middle \(Dropout\): NaN; the first parameter whose gradient is not finite is \S+",
    }[job]
    return rf"In the last one: rank {rank}: {where}.* \(rows {rows} of the data set\)"


def test_the_cause_is_named(tmp_path):
    """After three bad steps in a row the run ends on all ranks, and says which module, rank and
    rows; the last checkpoint is one of finite weights.
    """
    marked = (*step_rows(5), *step_rows(6), *step_rows(7))
    more = "--max-bad-steps 3 --save-iters 2 --train-iters 9"
    faults = ("output", "loss", "gradient")
    jobs = [(str(tmp_path / fault), more, fault, marked) for fault in faults]
    outcomes = run_ranks(several, 2, jobs)
    rows = ", ".join(map(str, step_rows(7)))
    for number, fault in enumerate(faults):
        errors = {outcome[number][0] for outcome in outcomes}
        assert len(errors) == 1, "all ranks say the same"
        (error,) = errors
        assert "3 steps in a row, up to step 7" in error
        assert re.search(named(fault, 1, rows), error), error
        assert error.count("rank ") == 1, f"one rank is to blame: {error}"
        assert max(path.name for path in (tmp_path / fault).glob("step-*")) == "step-00000006"
        left = r"failed after step 7: run the same command with --resume to resume from step (4, or )?6"
        said = [re.search(left, " ".join(one[number][1].split())) for one in outcomes]
        assert said[0] is not None and said[1] is None, "rank 0 says what is left"
        records = read_metrics(tmp_path / fault / "metrics.jsonl")
        assert [record["step"] for record in records if "skipped" in record] == [5, 6, 7]


def spoiled(folder):
    """Two runs whose weights are written after a step; and one that skips step 3, whose finite
    gradient would make Adam's moments infinite, with checkpoints every other step, and in which
    they are made so after it.
    """
    said = []
    for spoil in (1, 3, None):
        more = (
            f"--save-iters 2 --clip-grad 0 --save {folder}"
            if spoil is None
            else "--max-bad-steps 2"
        )
        error = CheckpointError if spoil is None else NonFiniteError
        with contextlib.redirect_stdout(io.StringIO()), pytest.raises(error) as raised:
            model, run = started(more)
            with run:
                for batches in run.steps():
                    factor = 1e25 if spoil is None and run.step == 2 else 1.0
                    run.update(model.loss(**batch) * factor for batch in batches)
                    if spoil is None and run.step == 3:
                        moment = run.optimizer.state[model.down.weight]["exp_avg_sq"]
                        assert bool(moment.local.isfinite().all())
                        moment.local.fill_(math.inf)
                    if run.step == spoil:
                        model.down.weight.data.fill_(math.nan)
        said.append(str(raised.value))
    assert run.step == 4
    return said


def test_what_is_not_finite_is_named_and_not_written(tmp_path):
    """Weights that were not finite before the step, by whatever wrote them. A state of the
    optimizer that is infinite: refused by its name, and the checkpoint before stays, whole.
    """
    for *errors, refused in run_ranks(spoiled, 2, str(tmp_path)):
        for error in errors:
            assert "In the last one: rank 0: before the step, parameter down.weight: NaN" in error
        words = r"not written: state '\w+' of the optimizer for \S+ is no longer finite"
        assert re.search(words, refused)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
    moments = ShardedCheckpoint(tmp_path / "step-00000002", OPTIMIZER).all()
    assert all(bool(moments[f"0.{n}.exp_avg"].isfinite().all()) for n in range(4))


def test_the_rule_of_spikes():
    """By hand: losses around 2 with a median deviation of 0.1."""
    spikes = Spikes(5.0)
    for number in range(LEAST):
        assert not spikes.is_spike(1e9), "nothing to compare with"
        spikes.keep(2.0 + (0.1, -0.1, 0.0, 0.2)[number % 4])
    # sorted: -0.1, 0, 0.1, 0.2, four of each: the median is 0.05, deviations 0.15, 0.05, 0.05, 0.15
    assert spikes.limit() == pytest.approx(2.05 + 5 * 1.4826 * 0.1)
    assert not spikes.is_spike(2.79) and spikes.is_spike(2.8) and spikes.is_spike(1e30)
    assert not spikes.is_spike(math.nan) and spikes.in_a_row == 2
    other = Spikes(5.0)
    other.load_state_dict(spikes.state_dict())
    assert other.limit() == spikes.limit() and other.in_a_row == 2
    spikes.keep(2.1)
    assert spikes.in_a_row == 0
    quiet = Spikes(5.0)
    for _ in range(LEAST):
        quiet.keep(3.0)
    assert quiet.limit() == pytest.approx(3.0 * 1.05), "no deviation: a share of the median counts"


@pytest.mark.long
def test_spikes(tmp_path):
    """Told of; skipped; or taken back with the batches since the last checkpoint. A run that
    stopped on the way and went on is bitwise the one that did not.
    """
    marked, more = step_rows(19), "--save-iters 4 --save-keep 3 --train-iters 22 --on-spike"
    jobs = [
        (str(tmp_path / "warn"), f"{more} warn", "spike", marked),
        (str(tmp_path / "skip"), f"{more} skip", "spike", marked),
        (str(tmp_path / "back"), f"{more} back", "spike", marked),
        (str(tmp_path / "part"), f"{more} back --train-iters 20", "spike", marked),
        (str(tmp_path / "part"), f"{more} back --resume", "spike", marked),
        ("", f"{more} back", "spike", marked),
        (str(tmp_path / "lost"), f"{more} skip --max-bad-steps 2", "spike", (*range(72, 96),)),
        # step 20 is the last of a pass, and shorter than others
        (
            str(tmp_path / "last"),
            f"{more} back --gradient-accumulation 5 --epochs 9",
            "spike",
            (95,),
        ),
    ]
    (outcomes, others) = run_ranks(several, 2, jobs)
    warned, skipped, back, _, resumed, nothing_kept, lost, _ = outcomes
    assert re.search(r"step 19: loss \S+ is above \S+, a spike\.", warned[1])
    assert "a spike: the step is skipped.\n" in skipped[1]
    assert "weights and optimizer are those of step 16 again" in back[1]
    assert "the batches of steps 17 to 19 are left out" in back[1]
    assert "a spike: the step is skipped.\n" in nothing_kept[1], "no checkpoint to go back to"
    steps = [outcome[0][1]["num_steps"] for outcome in (warned, skipped, back, nothing_kept)]
    assert steps == [22, 21, 19, 21]
    same_state(resumed[0], back[0])
    # killed after it went back, before the next checkpoint: it comes to the spike again
    for step in (20, 22):
        shutil.rmtree(tmp_path / "part" / f"step-000000{step}")
    again, said = run_ranks(several, 2, jobs[4:5])[0][0]
    assert "weights and optimizer are those of step 16 again" in said
    same_state(again, back[0])
    assert re.match("DivergenceError: the losses of 2 steps in a row, up to step 20", lost[0])
    assert others[-2][0] == lost[0]
    for name, step in (("back", 19), ("last", 20)):
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        assert [record["step"] for record in records if "skipped" in record] == [step]
    assert [record["epoch"] for record in records] == [(step - 1) // 5 for step in range(1, 23)]


def same_state(one, other):
    leaves = [tree_flatten(state) for state in (one, other)]
    assert leaves[0][1] == leaves[1][1]
    for left, right in zip(leaves[0][0], leaves[1][0], strict=True):
        assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


REPLAYED = "--save-iters 3 --save-keep 3 --train-iters 12"
# A step, what is wrong, and where: step 7 as it was, a bad one, none; a gradient of rank 1 that is
# off once; another loss before.
REPLAYS = [
    *((7, "output", step_rows(9)), (9, "output", step_rows(9)), (99, "output", ())),
    *((8, "flaky", step_rows(8)), (8, "spike", step_rows(7))),
]


def files(folder):
    found = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    return {path: path.read_bytes() for path in found}


def test_replay(tmp_path):
    """A step repeats and is what the log says; a bad one is explained; nothing of the run is
    changed.
    """
    folder = str(tmp_path)
    run_ranks(train, 2, folder, REPLAYED, "output", step_rows(9))
    before = files(tmp_path)
    jobs = [(folder, f"{REPLAYED} --replay-step {step}", *how) for step, *how in REPLAYS]
    found = run_ranks(several, 2, jobs)[0]
    good, bad, _, flaky, other = (said for _, said in found)
    assert "replay of step 7:\n" in good and good.count("the log has the same") == 1
    assert "both times the same bits" in good and "it repeats" in good
    assert "replay of step 9:\n" in bad and bad.count("the log has the same") == 1
    assert "rank 1: the first module whose output was not finite is down" in bad
    assert "(rows 34, 35 of the data set)" in bad
    late = "ResumeError: --replay-step is 99: expected a step of this run, 13 to 12."
    assert found[2][0] == late
    assert re.search(r"differ on rank 1 \(\S+\): its loss, \d gradients \(up\.", flaky), flaky
    assert "it does not repeat: look at the device of rank 1" in flaky
    assert "from step 7 on, losses are not those of the log" in other
    assert "it repeats here, but the log has another result" in other
    assert "starting from scratch" not in good and "resuming from" in good
    assert before == files(tmp_path)
