"""The programs in the documents of BMTrain, as they stand there, against plain PyTorch."""

import math

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.training import seed_stand_ins as stand_ins
from tests.training.seed_programs import program
from torch import nn

import bmtrain as bmt

HALF = torch.float16
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
