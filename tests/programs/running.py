"""A program's steps, plain and sharded in the same process, and the comparison of both."""

import contextlib
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from tests.programs import modules
from torch import nn

import bmtrain as bmt
from bmtrain.runtime import world
from bmtrain.verification.compare import compare
from bmtrain.verification.record import Kind, Record

STEPS = 3
LR = 0.01


class Plain:
    """How one process trains."""

    ranks, rank = 1, 0

    def __init__(self, spec, model):
        self.spec = spec
        self.make_optimizer(model)

    def make_optimizer(self, model):
        self.model = model
        self.optimizer = optimizer_of(self.spec, groups_of(self.spec, model), ours=False)

    def zero_grad(self):
        match self.spec["clear"]:
            case "model":
                self.model.zero_grad()
            case "by_hand":
                forget_gradients(self.model)
            case "in_place":
                for p in self.model.parameters():
                    if p.grad is not None:
                        p.grad.zero_()
            case how:
                self.clear(set_to_none=how == "none")

    def clear(self, set_to_none):
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, loss, last):
        loss.backward()

    def clip(self):
        if self.spec["clip"] == "none":
            return None
        order = float("inf") if self.spec["clip"] == "ours_inf" else 2.0
        return nn.utils.clip_grad_norm_(list(self.model.parameters()), 0.05, norm_type=order)

    def step(self):
        self.optimizer.step()

    def roundtrip(self):
        self.optimizer.load_state_dict(self.optimizer.state_dict())


class Sharded(Plain):
    """How ranks do."""

    def __init__(self, spec, model):
        self.ranks, self.rank = bmt.world_size(), bmt.rank()
        super().__init__(spec, model)

    def make_optimizer(self, model):
        self.model = model
        self.optimizer = optimizer_of(self.spec, groups_of(self.spec, model), ours=True)
        self.manager = bmt.optim.OptimManager() if self.spec["manager"] else None
        if self.manager is not None:
            self.manager.add_optimizer(self.optimizer)

    def clear(self, set_to_none):
        (self.manager or self.optimizer).zero_grad(set_to_none=set_to_none)

    def backward(self, loss, last):
        if self.manager is None:
            (loss / self.ranks).backward()
        else:
            self.manager.backward(loss, reduce_gradients=last or not self.spec["deferred"])

    def clip(self):
        if not self.spec["clip"].startswith("ours"):
            return super().clip()
        order = float("inf") if self.spec["clip"] == "ours_inf" else 2.0
        if self.manager is None:
            return bmt.optim.clip_grad_norm(self.optimizer.param_groups, 0.05, norm_type=order)
        return self.manager.clip_grad_norm(self.optimizer.param_groups, 0.05, norm_type=order)

    def step(self):
        self.optimizer.step() if self.manager is None else self.manager.step()

    def roundtrip(self):
        if self.manager is not None:
            self.manager.load_state_dict(self.manager.state_dict(gather_opt=True))
        else:
            super().roundtrip()


class WithMasters(torch.optim.AdamW):
    """AdamW on fp32 copies of half-precision parameters."""

    def __init__(self, groups, **more):
        self.pairs = [(p, p.detach().float().clone()) for group in groups for p in group["params"]]
        masters = {id(p): master for p, master in self.pairs}
        super().__init__(
            [{**group, "params": [masters[id(p)] for p in group["params"]]} for group in groups],
            **more,
        )
        self.seen = [p.detach().clone() for p, _ in self.pairs]

    def zero_grad(self, set_to_none=True):
        for p, _ in self.pairs:
            p.grad = None if set_to_none or p.grad is None else torch.zeros_like(p)

    @torch.no_grad()
    def step(self, closure=None):
        for (p, master), seen in zip(self.pairs, self.seen, strict=True):
            master.copy_(torch.where(p == seen, master, p.float()))  # the program has written it
            master.grad = None if p.grad is None else p.grad.float()
        super().step()
        for (p, master), seen in zip(self.pairs, self.seen, strict=True):
            if master.grad is not None:
                p.copy_(master)
            seen.copy_(p)


def groups_of(spec, model):
    named = list(model.named_parameters())
    if spec["groups"] == "one":
        return [{"params": [p for _, p in named]}]
    if spec["groups"] == "dim":
        first = [p for _, p in named if p.dim() >= 2]
        second = [p for _, p in named if p.dim() < 2]
    else:
        first = [p for n, p in named if n.endswith("weight")]
        second = [p for n, p in named if not n.endswith("weight")]
    return [
        group for group in ({"params": first, "lr": LR / 2}, {"params": second}) if group["params"]
    ]


def optimizer_of(spec, groups, ours):
    half, o = spec["dtype"] == "bfloat16", torch.optim
    adam: dict[str, Any] = {"lr": LR, "eps": 1e-4, "weight_decay": 0.1}
    if spec["optimizer"] in ("adam", "offload"):
        if ours:
            return (
                bmt.optim.AdamOptimizer
                if spec["optimizer"] == "adam"
                else bmt.optim.AdamOffloadOptimizer
            )(groups, **adam)
        return WithMasters(groups, **adam) if half else o.AdamW(groups, **adam)
    makers = {
        "sgd": lambda: o.SGD(groups, lr=LR),
        "momentum": lambda: o.SGD(groups, lr=LR, momentum=0.9, nesterov=True, weight_decay=0.1),
        "adamw": lambda: o.AdamW(groups, **adam, foreach=False),
        "adamw_foreach": lambda: o.AdamW(groups, **adam, foreach=True),
        "rmsprop": lambda: o.RMSprop(groups, lr=LR, eps=1e-4, momentum=0.5),
        "nadam": lambda: o.NAdam(groups, lr=LR, eps=1e-4),
        "adagrad": lambda: o.Adagrad(groups, lr=LR, eps=1e-4),
        "adafactor": lambda: o.Adafactor(groups, lr=LR),
        "muon": lambda: Both(groups),
        "lbfgs": lambda: o.LBFGS(
            [p for group in groups for p in group["params"]], lr=0.1, max_iter=3
        ),
    }
    return makers[spec["optimizer"]]()


class Both(torch.optim.Optimizer):
    """Muon for matrices, SGD for the rest, as programs combine them."""

    def __init__(self, groups):
        super().__init__(groups, {"lr": LR})
        params = [p for group in groups for p in group["params"]]
        matrices, others = [p for p in params if p.dim() == 2], [p for p in params if p.dim() != 2]
        self.parts = [torch.optim.SGD(others, lr=LR)] if others else []
        kind = getattr(torch.optim, "Muon", torch.optim.SGD)  # torch 2.8 has no Muon
        self.parts += [kind(matrices, lr=LR)] if matrices else []

    def step(self, closure=None):
        for part in self.parts:
            part.step()


def batch(spec, step, trainer):
    return torch.cat(micro_batches(spec, step, trainer, 1))


def micro_batches(spec, step, trainer, count):
    """Of one process each is what all ranks have together: hooks may make something of every
    one.
    """
    shape, generator = (
        (modules.ROWS, modules.LENGTH),
        torch.Generator().manual_seed(spec.seed + step),
    )
    rows = torch.randint(0, modules.VOCAB, shape, generator=generator)
    if spec["rows"] == "same":
        return list(rows.chunk(count))
    ranks = [own.chunk(count) for own in rows.chunk(spec.ranks)]
    return (
        list(ranks[trainer.rank])
        if trainer.ranks > 1
        else [torch.cat(parts) for parts in zip(*ranks, strict=True)]
    )


def loss_of(spec, model, rows, step):
    out = F.cross_entropy(model(rows, step).flatten(0, 1), rows.flip(1).flatten())
    if spec["penalty"] == "l2":
        out = out + 0.01 * sum(p.square().sum() for p in model.parameters())
    if spec["penalty"] == "orthogonal":
        w = model.head.weight
        out = out + 0.01 * (w @ w.t() - torch.eye(len(w), dtype=w.dtype)).square().sum()
    return out


def freeze(spec, model, step):
    first = next(iter(model.layers[0].parameters()))
    if spec["freeze"] == "after" and step == 0:
        first.requires_grad_(False)
    if spec["freeze"] == "mid":
        first.requires_grad_(step != 1)
    if spec["freeze"] == "attribute":
        model.norm.weight.requires_grad_(False)
        model.head.bias.requires_grad_(step == 2)


def halve(p):
    """A hook that may return nothing."""
    p.grad.mul_(0.5)


def hook(spec, model):
    if spec["hooks"] == "module_forward":
        model.layers[0].register_forward_hook(lambda module, args, out: out * 1.1)
    if spec["hooks"] == "module_backward":
        model.layers[0].register_full_backward_hook(
            lambda module, given, got: (given[0] * 0.5,) if given[0] is not None else None
        )
    if spec["hooks"] == "parameter":
        for p in model.parameters():
            if p.requires_grad:
                p.register_hook(lambda grad: grad * 0.5)
    if spec["hooks"] == "accumulated":
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(halve)


class Planned(Exception):
    """What a program raises in the middle of a pass, and catches."""


def forget_gradients(model):
    for p in model.parameters():
        p.grad = None


@torch.enable_grad()
def break_off(what, spec, trainer, step):
    """A pass that does not end in a step; on ranks on all of them alike. Its gradients are cleared.

    A recomputation that fails is a backward pass that fails, in one process as well.
    """
    model = trainer.model
    calls = 0

    def fail(*_):
        raise Planned

    def fail_later(module, args, out):
        nonlocal calls
        calls += 1
        if what == "failed_recomputation" and calls > 1:
            raise Planned
        if out.requires_grad:
            out.register_hook(fail)

    layer, handle = model.layers[len(model.layers) // 2], None
    if what == "failed_forward":
        handle = layer.register_forward_hook(fail)
    elif what != "abandoned_pass":
        inner = [m for m in layer.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]
        is_inside = what == "failed_recomputation" and inner
        handle = (inner[-1] if is_inside else layer).register_forward_hook(fail_later)
    with contextlib.suppress(Planned):
        loss = loss_of(spec, model, batch(spec, step, trainer), step)
        trainer.backward(loss, not spec["deferred"])
    if handle is not None:
        handle.remove()
    if spec["clear"] == "none":
        trainer.zero_grad()
    else:
        forget_gradients(model)


def be_refused(what, trainer):
    """Something that is an error, in one process as on ranks, and changes nothing."""
    model = trainer.model
    try:
        match what:
            case "refused_load":
                state = model.state_dict()
                model.load_state_dict({**state, "scale": state["scale"].new_zeros(5)})
            case "refused_state":
                state = trainer.optimizer.state_dict()
                trainer.optimizer.load_state_dict({**state, "param_groups": []})
            case "refused_gradient":
                model.norm.bias.grad = torch.zeros(modules.DIM + 1)
    except (RuntimeError, ValueError, TypeError):
        return
    raise AssertionError(f"{what} was not refused")


@torch.no_grad()
def happen(what, spec, trainer, record, step):
    """One of the things between steps; in the same way in one process and on ranks."""
    model = trainer.model
    rows = batch(spec, 7, trainer)
    match what:
        case "validate":
            model(rows, step)
        case "failed_forward" | "failed_backward" | "failed_recomputation" | "abandoned_pass":
            break_off(what, spec, trainer, step)
        case "refused_load" | "refused_state" | "refused_gradient":
            be_refused(what, trainer)
        case "roundtrip":
            model.load_state_dict(
                {name: value.clone() for name, value in model.state_dict().items()}
            )
        case "load_changed":
            state = model.state_dict()
            model.load_state_dict(
                {
                    name: value * 0.9 if value.is_floating_point() else value
                    for name, value in state.items()
                }
            )
        case "deepcopy":
            again = modules.copied(model)
            for p in again.parameters():
                p.mul_(0.5)
            record.add(
                step,
                Kind.LOSS,
                "of a copy",
                model(rows, step).float().mean() * 0
                + again.state_dict()["norm.bias"].float().sum(),
            )
        case "write":
            for p in model.parameters():
                p.mul_(0.9)
        case "eval_train":
            model.eval()
            model(rows, step)
            model.train()
        case "average_read":
            for name, value in model.state_dict().items():
                record.add(step, Kind.PARAMETER, f"average of {name}", value * 0.5)
        case "optimizer_roundtrip":
            trainer.roundtrip()
        case "print":
            str(model)
        case "no_gradient_step" if spec["optimizer"] != "lbfgs":
            trainer.zero_grad()
            trainer.step()
        case "write_data":
            for p in model.parameters():
                p.data.mul_(0.9)
        case "average_written":
            average = modules.copied(model)
            for mine, theirs in zip(
                average.state_dict().values(), model.state_dict().values(), strict=True
            ):
                mine.copy_(0.5 * mine + 0.25 * theirs) if mine.is_floating_point() else None
            for name, value in average.state_dict().items():
                record.add(step, Kind.PARAMETER, f"average of {name}", value)
        case "averaged_model":
            averaged = torch.optim.swa_utils.AveragedModel(model)
            averaged.update_parameters(model)
            for name, value in averaged.module.state_dict().items():
                record.add(step, Kind.PARAMETER, f"average of {name}", value)
        case "deepcopy_trained":
            trainer.make_optimizer(modules.copied(model))
        case "count":
            record.add(
                step, Kind.LOSS, "number of elements", sum(p.numel() for p in model.parameters())
            )
            record.add(step, Kind.LOSS, "norm of the norm", model.norm.weight.detach().norm())


def run(spec, trainer):
    """All steps."""
    coarsest = torch.finfo(getattr(torch, spec["dtype"])).eps
    if "script" in spec.layers:  # it computes in fp32 whatever it gets
        coarsest = max(coarsest, torch.finfo(torch.float32).eps)
    if spec["optimizer"] == "muon":  # it orthogonalises in bf16
        coarsest = max(coarsest, torch.finfo(torch.bfloat16).eps)
    record = Record(terms=modules.ROWS * modules.LENGTH * 16, coarsest=coarsest)
    torch.manual_seed(spec.seed)
    record.add_model(0, trainer.model)
    hook(spec, trainer.model)
    for step in range(STEPS):
        for when, what in spec.between:
            if when == step:
                happen(what, spec, trainer, record, step)
        freeze(spec, trainer.model, step)
        modules.Sometimes.step = step
        _train(spec, trainer, record, step)
        record.add_model(step + 1, trainer.model)
        record.add(step + 1, Kind.RANDOM, "torch", torch.get_rng_state())
    return record


def _train(spec, trainer, record, step):
    model = trainer.model
    if spec["optimizer"] == "lbfgs":

        def closure():
            trainer.zero_grad()
            loss = loss_of(spec, trainer.model, batch(spec, step, trainer), step)
            trainer.backward(loss, True)
            return loss

        trainer.optimizer.step(closure)  # torch declares that a float is returned
        return
    trainer.zero_grad()
    for number, rows in enumerate(micro_batches(spec, step, trainer, spec["micro"])):
        loss = loss_of(spec, model, rows, step) / spec["micro"]
        trainer.backward(loss, number == spec["micro"] - 1)
        record.add(
            step + 1,
            Kind.LOSS,
            f"micro-batch {number}",
            bmt.sum_loss(loss.detach()) if spec["micro"] == 1 else 0,
        )
    if (step, "edit_gradients") in spec.between:
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)
    if (step, "drop_a_gradient") in spec.between:
        next(iter(model.parameters())).grad = None
    norm = trainer.clip()
    if norm is not None:
        record.add(step + 1, Kind.NORM, "", norm.float())
    record.add_gradients(step + 1, model)
    trainer.step()


def judge(spec):
    """(verdict, words) of this rank, which joins a run for the program."""
    warnings.simplefilter("ignore")
    bmt.init_distributed(device="cpu", zero_level=spec["level"], timeout=20)
    world.current("a program").draws.same_rows = spec["rows"] == "same"
    modules.UnusedOnOneRank.is_unused = False
    try:
        want = run(spec, Plain(spec, modules.plain(spec)))
    except Exception as error:
        return "invalid", f"the program fails in one process: {type(error).__name__}: {error}"
    modules.UnusedOnOneRank.is_unused = spec.ranks > 1 and bmt.rank() == 0
    got = run(spec, Sharded(spec, modules.sharded(spec)))
    report = compare(want, [got], slack=4.0)
    return ("right" if report else "wrong"), report.text
