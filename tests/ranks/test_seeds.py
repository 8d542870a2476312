"""The programs in the documents of BMTrain and ModelCenter, as they stand there, against plain
PyTorch: both APIs, both dtypes.
"""

import math
import re

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.training import seed_stand_ins as stand_ins
from tests.training.seed_programs import program
from torch import nn

import bmtrain as bmt

HALF, FLOAT = torch.float16, torch.float32
long = pytest.mark.long


def execute(text, **names):
    """Run a program's text in which `names` are defined; what it has defined at its end."""
    namespace = {"__name__": "__main__", "torch": torch, "bmtrain": bmt, **names}
    exec(compile(text, "program", "exec"), namespace)
    return namespace


def plain_module():
    """The quick start's original, with values in its `torch.empty`."""
    torch.manual_seed(4)
    model = execute(program("module_plain"), SomeTransformerBlock=stand_ins.SomeTransformerBlock)[
        "MyModule"
    ]()
    with torch.no_grad():
        model.param.normal_()
    return model


def replaced_module(init, fragment, layer, values):
    model = execute(program(init, fragment), SomeTransformerBlock=layer)["MyModule"]()
    model.load_state_dict(values)
    out = model()
    (out.square().sum() / bmt.world_size()).backward()
    return out.detach().cpu(), models.full_gradients(model)


ZERO_2 = program("init_zero_level").replace("zero_level=3", "zero_level=2")


@pytest.mark.parametrize(
    ("init", "fragment", "layer"),
    [
        ("init", "module_blocks", stand_ins.SomeTransformerBlock),
        ("init_zero_level", "module_list", stand_ins.SomeDistributedBlock),
        pytest.param(ZERO_2, "module_list", stand_ins.SomeTransformerBlock, marks=long),
    ],
    ids=["blocks", "list", "list, ZeRO-2"],
)
def test_replaced_modules_are_the_original(init, fragment, layer):
    """Both replacements give the original's output and gradients, whatever parameters the layers
    have.
    """
    plain = plain_module()
    out = plain()
    out.square().sum().backward()
    want = models.plain_gradients(plain)
    for got, grads in run_ranks(
        replaced_module, 3, init, fragment, layer, plain.state_dict(), join=False
    ):
        models.assert_same(got, out.detach(), fragment)
        models.assert_same_dicts(grads, want, fragment)


class Plain:
    """What every program below must do: AdamW in one process, fp32 masters, a loss scale, gradients
    of fp16 weights in fp16.
    """

    def __init__(self, model, scale, weight_decay=0.0):
        self.model, self.scale = model, scale
        self.masters = [param.detach().float().clone() for param in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.0, weight_decay=weight_decay)

    def step(self, losses, lr, max_norm):
        """One step on the mean of the ranks' losses; the norm of the unscaled gradient.

        An overflow halves the scale instead.
        """
        self.model.zero_grad()
        for loss in losses:
            (loss * (self.scale / len(losses))).backward()
        for master, param in zip(self.masters, self.model.parameters(), strict=True):
            master.grad = (
                torch.zeros_like(master) if param.grad is None else param.grad.float() / self.scale
            )
        norm = float(nn.utils.clip_grad_norm_(self.masters, max_norm))
        if not math.isfinite(norm):
            self.scale /= 2
            return norm
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)
        return norm


def assert_same_changes(got, want, before, tolerance):
    """Training has moved the weights by the same vectors."""
    ours, theirs, start = (
        torch.cat([x.detach().double().reshape(-1) for x in parts]) for parts in (got, want, before)
    )
    moved = (theirs - start).norm()
    assert moved > 0
    assert (ours - theirs).norm() <= tolerance * moved, (
        f"off by {(ours - theirs).norm() / moved:g} of what moved"
    )


def masters_of(model, optimizer):
    """Exact whole weights, in the order of `model.parameters()`. Collective."""
    states = optimizer.state_dict(gather=True)["state"]
    whole = dict(model.state_dict())
    weights = [whole[name].clone() for name, _ in model.named_parameters()]
    return [states[index].get("master", weight) for index, weight in enumerate(weights)]


README_PLACES = {
    "other initialization (dataset)": "before, log = {name: x.clone() for name, x in model.state_dict().items()}, []",
    "load data for each rank": "enc_input, enc_length, targets = load_data(iteration)",
    "save checkpoint or print logs": "log.append((global_loss, float(grad_norm), lr_scheduler.current_lr))",
}
README_STEPS = 8


def readme(loop):
    stand_ins.offer_cuda()
    text = program("gpt_model", "gpt_optimizer", loop, places=README_PLACES)
    end = execute(
        text,
        GPT=stand_ins.GPT,
        load_data=stand_ins.load_data,
        range=stand_ins.first_of(README_STEPS),
    )
    return end["before"], end["log"], masters_of(end["model"], end["optimizer"])


def plain_readme(before, world_size):
    model = stand_ins.GPT(**stand_ins.README_SIZES, dtype=HALF, parts=stand_ins.PLAIN)
    model.load_state_dict(before)
    plain, log = Plain(model, 1024.0, weight_decay=1e-2), []
    for iteration in range(README_STEPS):
        losses = []
        for rank in range(world_size):
            ids, length, targets = stand_ins.batch(iteration, rank, world_size)
            pos = torch.arange(ids.size(1)).repeat(ids.size(0), 1)
            logits = model(ids, pos, pos < length[:, None])
            losses.append(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        norm = plain.step(losses, 1e-3 * iteration / 40**1.5, max_norm=1.0)
        loss = torch.stack(losses).float().mean().item()
        log.append((loss, norm, 1e-3 * (iteration + 1) / 40**1.5))
    return log, plain


@pytest.mark.parametrize(
    ("world_size", "loop"), [(2, "gpt_loop"), pytest.param(3, "gpt_loop_zh", marks=long)]
)
def test_readme_training_loop(world_size, loop):
    """Parts 2 to 4, fp16 and `backward()` without a loss included, train as plain PyTorch does."""
    results = run_ranks(readme, world_size, loop, join=False)
    before = results[0][0]
    want, plain = plain_readme(before, world_size)
    start = [before[name].float() for name, _ in plain.model.named_parameters()]
    for _, log, masters in results:
        assert len(log) == README_STEPS and log == results[0][1]
        for got, expected in zip(log, want, strict=True):
            assert got == pytest.approx(expected, rel=3e-3)
        assert_same_changes(masters, plain.masters, start, 0.05)


LINE = re.compile(r"^loss: (\S+) \| lr: (\S+), scale: +(\S+) \| grad_norm: (\S+) \|$", re.MULTILINE)


def quick_start(dtype):
    stand_ins.offer_sklearn()
    text = program(
        "init", "torch.manual_seed(1)", "model, before = make_model()", "classifier_loop"
    )

    def make_model():
        model = stand_ins.Classifier(dtype)
        bmt.init_parameters(model.body)
        bmt.init_parameters(model.dense)
        return model, models.cloned_state(model)

    loaders = {
        name: Loader(numbers)
        for name, numbers in (("train_dataloader", (0, 1, 2)), ("dev_dataloader", (3, 4)))
    }
    end = execute(text, make_model=make_model, **loaders)
    assert end["acc"] == sum(a == b for a, b in zip(end["pd"], end["gt"], strict=True)) / len(
        end["gt"]
    )
    return (
        end["before"],
        masters_of(end["model"], end["optimizer"]),
        end["pd"],
        end["gt"],
        end["acc"],
    )


class Loader:
    """The batches of these numbers, again and again."""

    def __init__(self, numbers):
        self.numbers = numbers

    def __iter__(self):
        return iter(stand_ins.labelled(self.numbers, bmt.rank(), bmt.world_size()))


def plain_quick_start(before, dtype, world_size):
    model = stand_ins.Classifier(dtype, stand_ins.PLAIN)
    model.load_state_dict(before)
    plain, log, num_steps = Plain(model, 65536.0 if dtype == HALF else 1.0), [], 0
    for _ in range(5):
        for number in range(3):
            losses = []
            for rank in range(world_size):
                (data,) = stand_ins.labelled((number,), rank, world_size)
                losses.append(
                    nn.functional.cross_entropy(
                        model(data["input_ids"], data["attention_mask"]).float(), data["labels"]
                    )
                )
            norm = plain.step(losses, 1e-5 * num_steps / 100**1.5, max_norm=10.0)
            num_steps += math.isfinite(norm)
            log.append(
                (torch.stack(losses).mean().item(), 1e-5 * num_steps / 100**1.5, plain.scale, norm)
            )
    truth = [
        label
        for rank in range(world_size)
        for data in stand_ins.labelled((3, 4), rank, world_size)
        for label in data["labels"].tolist()
    ]
    return log, plain, truth


@long
@pytest.mark.parametrize(("world_size", "dtype"), [(2, HALF), (3, FLOAT)])
def test_model_center_training_loop(world_size, dtype, capsys):
    """Step 4, 0.1.x's API, trains as plain PyTorch does, prints it on rank 0 alone, and evaluates
    all ranks' rows in order.
    """
    results = run_ranks(quick_start, world_size, dtype, join=False)
    printed = capsys.readouterr().out
    before = results[0][0]
    want, plain, truth = plain_quick_start(before, dtype, world_size)
    lines = [tuple(float(number) for number in found) for found in LINE.findall(printed)]
    assert len(lines) == len(want) == 15
    for got, expected in zip(lines, want, strict=True):
        assert got == pytest.approx(expected, rel=1e-3 if dtype == FLOAT else 5e-3, abs=1e-4)
        assert got[1] == pytest.approx(expected[1], rel=1e-3, abs=0), (
            "learning rates are much smaller than 1e-4"
        )
    assert (
        printed.count(f"accuracy: {results[0][4] * 100:.2f}") >= 1
        and printed.count("accuracy:") == 5
    )
    start = [before[name].float() for name, _ in plain.model.named_parameters()]
    for _, masters, predicted, labels, _ in results:
        assert labels == truth and predicted == results[0][2] and len(predicted) == 24
        assert_same_changes(masters, plain.masters, start, 0.1)
