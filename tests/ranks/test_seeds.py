"""The programs in the documents of BMTrain and ModelCenter, as they stand there, against plain
PyTorch: both APIs, both dtypes.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.training import seed_stand_ins as stand_ins
from tests.training.seed_programs import program
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError

State = dict[str, torch.Tensor]
HALF, FLOAT = torch.float16, torch.float32


def execute(text: str, **names: Any) -> dict[str, Any]:
    """Run a program's text in which `names` are defined; what it has defined at its end."""
    namespace = {"__name__": "__main__", "torch": torch, "bmtrain": bmt, **names}
    exec(compile(text, "program", "exec"), namespace)
    return namespace


def plain_module() -> nn.Module:
    """The quick start's original, with values in its `torch.empty`."""
    torch.manual_seed(4)
    model: nn.Module = execute(
        program("module_plain"), SomeTransformerBlock=stand_ins.SomeTransformerBlock
    )["MyModule"]()
    with torch.no_grad():
        model.param.normal_()  # type: ignore[operator]
    return model


def replaced_module(
    init: str, fragment: str, layer: type[nn.Module], values: State
) -> tuple[torch.Tensor, Any]:
    model = execute(program(init, fragment), SomeTransformerBlock=layer)["MyModule"]()
    model.load_state_dict(values)
    out = model()
    (out.square().sum() / bmt.world_size()).backward()
    return out.detach().cpu(), models.full_gradients(model)


@pytest.mark.parametrize("layer", [stand_ins.SomeTransformerBlock, stand_ins.SomeDistributedBlock])
@pytest.mark.parametrize(
    ("init", "fragment"),
    [
        ("init", "module_blocks"),
        ("init_zero_level", "module_list"),
        (program("init_zero_level").replace("zero_level=3", "zero_level=2"), "module_list"),
    ],
    ids=["blocks", "list", "list, ZeRO-2"],
)
def test_replaced_modules_are_the_original(
    init: str, fragment: str, layer: type[nn.Module]
) -> None:
    """Both replacements give the original's output and gradients, at 1 and 3 ranks, whatever
    parameters the layers have.
    """
    plain = plain_module()
    out = plain()
    out.square().sum().backward()
    want = models.plain_gradients(plain)
    for world_size in (1, 3):
        for got, grads in run_ranks(
            replaced_module, world_size, init, fragment, layer, plain.state_dict(), join=False
        ):
            models.assert_same(got, out.detach(), fragment)
            models.assert_same_dicts(grads, want, fragment)


class Plain:
    """What every program below must do: AdamW in one process, fp32 masters, a loss scale, gradients
    of fp16 weights in fp16.
    """

    def __init__(
        self,
        model: nn.Module,
        scale: float,
        *,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        growth: int = 1024,
    ) -> None:
        self.model, self.scale, self.growth, self.good_steps = model, scale, growth, 0
        self.masters = [param.detach().float().clone() for param in model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=0.0, eps=eps, weight_decay=weight_decay)

    def step(self, losses: list[torch.Tensor], lr: float, max_norm: float) -> float:
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
            self.scale, self.good_steps = self.scale / 2, 0
            return norm
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        self.good_steps += 1
        if self.good_steps == self.growth:
            self.scale, self.good_steps = self.scale * 2, 0
        with torch.no_grad():
            for master, param in zip(self.masters, self.model.parameters(), strict=True):
                param.copy_(master)
        return norm


def assert_same_changes(
    got: list[torch.Tensor], want: list[torch.Tensor], before: list[torch.Tensor], tolerance: float
) -> None:
    """Training has moved the weights by the same vectors."""
    ours, theirs, start = (
        torch.cat([x.detach().double().reshape(-1) for x in parts]) for parts in (got, want, before)
    )
    moved = (theirs - start).norm()
    assert moved > 0
    assert (ours - theirs).norm() <= tolerance * moved, (
        f"off by {(ours - theirs).norm() / moved:g} of what moved"
    )


def masters_of(model: nn.Module, optimizer: bmt.optim.AdamOptimizer) -> list[torch.Tensor]:
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
Log = Sequence[tuple[float, ...]]


def readme(loop: str) -> tuple[State, Log, list[torch.Tensor]]:
    stand_ins.offer_cuda()
    text = program("gpt_model", "gpt_optimizer", loop, places=README_PLACES)
    end = execute(
        text,
        GPT=stand_ins.GPT,
        load_data=stand_ins.load_data,
        range=stand_ins.first_of(README_STEPS),
    )
    return end["before"], end["log"], masters_of(end["model"], end["optimizer"])


def plain_readme(before: State, world_size: int) -> tuple[Log, Plain]:
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
    ("world_size", "loop"), [(1, "gpt_loop"), (2, "gpt_loop"), (3, "gpt_loop_zh")]
)
def test_readme_training_loop(world_size: int, loop: str) -> None:
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


def quick_start(
    dtype: torch.dtype,
) -> tuple[State, list[torch.Tensor], list[int], list[int], float]:
    stand_ins.offer_sklearn()
    text = program(
        "init", "torch.manual_seed(1)", "model, before = make_model()", "classifier_loop"
    )

    def make_model() -> tuple[nn.Module, State]:
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

    def __init__(self, numbers: tuple[int, ...]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Any:
        return iter(stand_ins.labelled(self.numbers, bmt.rank(), bmt.world_size()))


def plain_quick_start(
    before: State, dtype: torch.dtype, world_size: int
) -> tuple[Log, Plain, list[int]]:
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


@pytest.mark.parametrize(("world_size", "dtype"), [(1, FLOAT), (1, HALF), (2, HALF), (3, FLOAT)])
def test_model_center_training_loop(
    world_size: int, dtype: torch.dtype, capsys: pytest.CaptureFixture[str]
) -> None:
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


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of the 0.1.x loop.

    A large eps makes the update a smooth function of the gradient, which fp16 rounds.
    """

    dtype: torch.dtype
    offload: bool
    lr: float = 5e-3
    eps: float = 1e-3
    num_steps: int = 7
    bad_step: int = 3
    growth: int = 3
    max_norm: float = 0.5


def make_classifier(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    model = stand_ins.Classifier(dtype)
    bmt.init_parameters(model)
    return model


def make_optimizer(model: nn.Module, case: Case) -> Any:
    kind = bmt.optim.AdamOffloadOptimizer if case.offload else bmt.optim.AdamOptimizer
    return kind(
        model.parameters(),
        lr=case.lr,
        eps=case.eps,
        weight_decay=0.1,
        scale=1024,
        scale_factor=2,
        scale_steps=case.growth,
    )


def old_loss(model: nn.Module, step: int) -> torch.Tensor:
    (data,) = stand_ins.labelled((step,), bmt.rank(), bmt.world_size())
    loss = bmt.loss.FusedCrossEntropy()(
        model(data["input_ids"], data["attention_mask"]), data["labels"]
    )
    return loss


def old_loop(case: Case) -> tuple[State, Log, list[torch.Tensor]]:
    """The loss of the last rank overflows once."""
    model = make_classifier(case.dtype)
    before, optimizer, log = models.cloned_state(model), make_optimizer(model, case), []
    lr_scheduler = bmt.lr_scheduler.NoDecay(optimizer, case.lr, 0, -1)
    for step in range(case.num_steps):
        optimizer.zero_grad()
        loss = old_loss(model, step)
        if step == case.bad_step and bmt.rank() == bmt.world_size() - 1:
            loss = loss * math.inf
        loss = optimizer.loss_scale(loss)
        loss.backward()
        norm = bmt.optim.clip_grad_norm(
            optimizer.param_groups, case.max_norm, scale=optimizer.scale, norm_type=2
        )
        weights = models.cloned_state(model)
        bmt.optim_step(optimizer, lr_scheduler)
        if step == case.bad_step:
            models.assert_same_dicts(model.state_dict(), weights, "after a skipped step", 0.0)
        log.append((float(norm), optimizer.scale, float(lr_scheduler.num_iter)))
    return before, log, masters_of(model, optimizer)


def plain_old_loop(before: State, case: Case, world_size: int) -> tuple[Log, Plain]:
    model = stand_ins.Classifier(case.dtype, stand_ins.PLAIN)
    model.load_state_dict(before)
    plain, log, iteration = (
        Plain(model, 1024.0, eps=case.eps, weight_decay=0.1, growth=case.growth),
        [],
        0,
    )
    for step in range(case.num_steps):
        losses = []
        for rank in range(world_size):
            (data,) = stand_ins.labelled((step,), rank, world_size)
            losses.append(
                nn.functional.cross_entropy(
                    model(data["input_ids"], data["attention_mask"]).float(), data["labels"]
                )
            )
        if step == case.bad_step:
            losses[-1] = losses[-1] * math.inf
        norm = plain.step(losses, case.lr, case.max_norm)
        iteration += math.isfinite(norm)
        log.append((norm, plain.scale, float(iteration)))
    return log, plain


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_first_api_trains_as_torch_does(
    world_size: int, dtype: torch.dtype, offload: bool
) -> None:
    """Norms, scales, schedule and exact weights, with an overflow on one rank in the middle that
    all ranks skip.
    """
    case = Case(dtype, offload)
    results = run_ranks(old_loop, world_size, case)
    before = results[0][0]
    want, plain = plain_old_loop(before, case, world_size)
    assert [scale for _, scale, _ in want] == [1024, 1024, 2048, 1024, 1024, 1024, 2048]
    start = [before[name].float() for name, _ in plain.model.named_parameters()]
    for _, log, masters in results:
        for step, (got, expected) in enumerate(zip(log, want, strict=True)):
            if step == case.bad_step:
                assert not math.isfinite(got[0]) and got[1:] == expected[1:]
            else:
                assert got == pytest.approx(expected, rel=1e-4 if dtype == FLOAT else 3e-3), step
        assert_same_changes(masters, plain.masters, start, 1e-4 if dtype == FLOAT else 5e-3)


def mixed(
    case: Case, kind: str, manager_scale: float | None
) -> tuple[State, Log, list[torch.Tensor]]:
    """Steps of the loop above by the old calls or the new ones."""
    model = make_classifier(case.dtype)
    before, optimizer, log = models.cloned_state(model), make_optimizer(model, case), []
    lr_scheduler = bmt.lr_scheduler.NoDecay(optimizer, case.lr, 0, -1)
    manager = bmt.optim.OptimManager(loss_scale=manager_scale, loss_scale_steps=case.growth)
    manager.add_optimizer(optimizer, lr_scheduler)
    for step in range(case.num_steps):
        new_backward, new_clip, new_step = (
            letter == "n" for letter in (kind if kind != "all" else "nnonoonoo"[step : step + 3])
        )
        manager.zero_grad()
        loss = old_loss(model, step)
        if step == case.bad_step:
            loss = loss * (math.inf if bmt.rank() == 0 else 1.0)
        if new_backward:
            manager.backward(loss)
        else:
            optimizer.loss_scale(loss).backward()
        if new_clip:
            norm = manager.clip_grad_norm(optimizer.param_groups, case.max_norm)
        else:
            norm = bmt.optim.clip_grad_norm(
                optimizer.param_groups, case.max_norm, scale=optimizer.scale
            )
        if new_step:
            manager.step()
        else:
            bmt.optim_step(optimizer, lr_scheduler)
        assert optimizer.scale == manager.loss_scale
        log.append((float(norm), optimizer.scale, float(lr_scheduler.num_iter)))
    return before, log, masters_of(model, optimizer)


@pytest.mark.parametrize("kind", ["noo", "non", "nno", "onn", "oon", "all"])
@pytest.mark.parametrize("dtype", [FLOAT, HALF])
def test_both_apis_in_one_program(dtype: torch.dtype, kind: str) -> None:
    """Backward, clipping and step each by the old call or the new one: the manager's scale is the
    optimizer's.
    """
    case = Case(dtype, offload=False)
    results = run_ranks(mixed, 2, case, kind, 1024.0)
    before = results[0][0]
    want, plain = plain_old_loop(before, case, 2)
    start = [before[name].float() for name, _ in plain.model.named_parameters()]
    for _, log, masters in results:
        for step, (got, expected) in enumerate(zip(log, want, strict=True)):
            compared = slice(1, None) if step == case.bad_step else slice(None)
            assert got[compared] == pytest.approx(
                expected[compared], rel=1e-4 if dtype == FLOAT else 3e-3
            ), (kind, step)
        assert_same_changes(masters, plain.masters, start, 1e-4 if dtype == FLOAT else 5e-3)


def without_a_scale() -> list[str]:
    """A manager without a loss scale: the old calls scale by 1 for ever."""
    case = dataclasses.replace(Case(FLOAT, offload=False), bad_step=-1, num_steps=4, growth=1)
    _, log, new = mixed(case, "nnn", None)
    _, _, old = mixed(case, "ooo", None)
    assert [scale for _, scale, _ in log] == [1.0] * 4
    for a, b in zip(new, old, strict=True):
        assert torch.equal(a, b)
    model = make_classifier(FLOAT)
    optimizer, manager = make_optimizer(model, case), bmt.optim.OptimManager(loss_scale=8.0)
    manager.add_optimizer(optimizer)
    weights = copy.deepcopy(models.cloned_state(model))
    with pytest.raises(
        ConfigurationError, match=r"loss_scale\(\) has scaled already.*loss\.backward\(\)"
    ) as caught:
        manager.backward(optimizer.loss_scale(old_loss(model, 0)))
    models.assert_same_dicts(model.state_dict(), weights, "after the error", 0.0)
    manager.backward(old_loss(model, 0))
    return [str(caught.value)]


def test_a_loss_scaled_twice_is_an_error() -> None:
    """On every rank, before backward runs; without a loss scale both APIs are the same, bit by
    bit.
    """
    assert len({tuple(messages) for messages in run_ranks(without_a_scale, 2)}) == 1
