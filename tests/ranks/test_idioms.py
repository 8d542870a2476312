"""What programs do with parameters and gradients beside training them: as in one process, or
refused on all ranks.
"""

import collections
import copy
import functools
import io
import operator
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from tests.ranks.runner import on_ranks, run_ranks
from tests.ranks.test_whole_parameters import SHARDED, Run, batch, compare, doubles, whole
from torch import distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune

import bmtrain as bmt
from bmtrain.errors import ParameterError
from bmtrain.shard.slices import Slices

IDIOMS = []
REFUSED = []


def idiom(program):
    """One process and many ranks get the same."""
    IDIOMS.append(program)
    return program


def refused(program):
    """Ranks get a ParameterError."""
    REFUSED.append(program)
    return program


# Values
# --------------------------------------------------------------------------------------------------


@idiom
def one_vector(run):
    with torch.no_grad():
        vector = nn.utils.parameters_to_vector(run.params)
        nn.utils.vector_to_parameters(vector * 0.5, run.params)
    own = nn.Parameter(run.matrix.detach().clone())
    (own.square().sum() / run.ranks).backward()
    assert own.grad is not None
    return {**run.state(), "vector": vector, "new": own.detach(), "gradient": own.grad}


@idiom
def initialisation(run):
    torch.manual_seed(9)
    for p in run.params:
        if p.dim() > 1:
            nn.init.orthogonal_(p)
            nn.init.trunc_normal_(p, std=0.02)
            p.data.normal_(0, 0.02)
            nn.init.kaiming_normal_(p)
            p.data.mul_(0.5)
        else:
            p.data.uniform_(-1, 1)
    return {**run.state(), "drawn next": torch.randn(2)}


@idiom
def saved_and_loaded(run):
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    file.seek(0)
    with torch.no_grad():
        for p in run.params:
            p.zero_()
    run.model.load_state_dict(torch.load(file))
    run.back()
    return {**run.state(), **run.grads()}


@idiom
def written_without_versions(run):
    """In inference mode nothing counts writes."""
    with torch.inference_mode():
        p, values = run.matrix, run.model.state_dict()
        p.mul_(2)
        p.data[1].zero_()
        p[0] = 3
        next(value for value in values.values() if value.dim() == 1).fill_(2)
        torch.mul(p, 2, out=p)
        last = [*values.values()][-1]
        torch.add(last, 1, out=last)
        p.add_(p.mean(0))
        nn.init.constant_(next(p for p in run.params if p.dim() == 1 and len(p) > 3), 0.25)
    return run.state()


# Optimizers by hand
# --------------------------------------------------------------------------------------------------


@idiom
def langevin(run):
    torch.manual_seed(5)
    run.back()
    with torch.no_grad():
        for p in run.params:
            p.add_(torch.randn_like(p) * 0.1 - 0.1 * p.grad)
            p.grad.add_(torch.randn(p.shape) * 0.1)
    return {**run.state(), **run.grads(), "drawn next": torch.randn(3)}


@idiom
def sharpness_aware(run):
    optimizer = torch.optim.SGD(run.params, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        run.back()
        norm = torch.norm(torch.stack([p.grad.norm(p=2) for p in run.params]), p=2)
        with torch.no_grad():
            for p in run.params:
                optimizer.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (0.05 / (norm + 1e-12)))
        optimizer.zero_grad()
        run.back()
        for p in run.params:
            p.data = optimizer.state[p]["old"]
        optimizer.step()
    return run.state()


@idiom
def trust_ratios_of_centralised_gradients(run):
    for _ in range(2):
        run.model.zero_grad()
        run.back()
        for p in run.params:
            if p.dim() > 1:
                p.grad.add_(-p.grad.mean(dim=1, keepdim=True))
            weight, grad = p.data.pow(2).sum().sqrt(), p.grad.data.norm()
            ratio = 1.0 if weight == 0 or grad == 0 else float(weight / grad)
            p.data.add_(p.grad.data, alpha=-0.01 * ratio)
    return {**run.state(), **run.grads()}


@idiom
def gradients_of_tasks(run):
    """Kept from the first pass while the second computes its own: each is projected onto the other
    (Yu et al., 2020).
    """
    run.back()
    kept = [p.grad for p in run.params]
    values = [whole(grad) for grad in kept]
    for p in run.params:
        p.grad = None
    (run.model(batch()[:2]).abs().mean() / run.ranks).backward()
    out = {}
    for number, (old, p) in enumerate(zip(kept, run.params, strict=True)):
        torch.testing.assert_close(whole(old), values[number], rtol=0, atol=0)
        dot = (old * p.grad).sum()
        out[f"dot {number}"] = dot.detach()
        p.grad = old - p.grad * (dot / p.grad.norm() ** 2)
    return {**out, **run.grads()}


@idiom
def some_cleared_some_kept(run):
    run.back()
    kept, run.matrix.grad = run.matrix.grad, None
    before = whole(kept)
    run.back()
    return {"kept": whole(kept), "as it was": before, **run.grads()}


@idiom
def assigned_gradients(run):
    run.back()
    for number, p in enumerate(run.params):
        p.grad = p.grad / 2
        p.grad.data.clamp_(-1e-3, 1e-3)
        if number == 1:
            p.grad = torch.ones(p.shape)
        if number == 2:
            p.grad.data = torch.zeros(p.shape)
        if number == 3:
            p.grad = None
    return run.grads()


@idiom
def averages_by_hand(run):
    """Swapped in for an evaluation."""
    average = {name: p.data.clone() for name, p in run.model.named_parameters()}
    optimizer, out = torch.optim.AdamW(run.params, lr=0.1), {}
    for step in range(2):
        run.steps(optimizer)
        named = dict(run.model.named_parameters())
        for name, p in named.items():
            average[name] = 0.9 * average[name] + 0.1 * p.data
        backup = {name: p.data for name, p in named.items()}
        for name, p in named.items():
            p.data = average[name]
        with torch.no_grad():
            out[f"evaluation {step}"] = run.out()
        out |= run.state(f"average {step} ")
        for name, p in named.items():
            p.data = backup[name]
    return {**out, **run.state()}


@idiom
def lists(run):
    run.back()
    found = [p.grad for p in run.params]
    norms = {
        "norm": torch.stack(torch._foreach_norm(found)).norm(),
        "total": nn.utils.get_total_norm(found),
    }
    with torch.no_grad():
        torch._foreach_mul_(found, 0.5)
        torch._foreach_add_(run.params, found, alpha=-0.1)
        torch._foreach_lerp_(run.params, torch._foreach_mul(run.params, 2.0), 0.1)
    return {**norms, **run.state(), **run.grads()}


@idiom
def averaged_by_hand(run):
    """The function of torch's tutorials, which leaves gradients as they are that ranks have summed
    already; and its neighbours.
    """
    run.back()
    options: dict[str, Any] = {"group": dist.new_group([bmt.rank()]) if run.is_plain else None}
    for number, p in enumerate(run.params):
        if number % 4 == 0:
            dist.all_reduce(p.grad.data, **options)
        elif number % 4 == 1:
            work = dist.all_reduce(p.grad, async_op=True, **options)
            assert work is not None
            work.wait()
        elif number % 4 == 2:
            dist.all_reduce(p.grad.view(-1), **options)
        else:
            time.sleep(0.05 * bmt.rank())  # the sum is there when the last rank has come
            work = dist.all_reduce(p.data.view(-1), async_op=True, **options)
            assert work is not None
            work.wait()
            p.data /= run.ranks
            p.grad *= run.ranks
        p.grad.data /= run.ranks
        dist.broadcast(p.data, bmt.rank() if run.is_plain else 0, **options)
    return {**run.state(), **run.grads()}


# The library's Adam, whose state is laid out in flat tensors
# --------------------------------------------------------------------------------------------------


def adam(run, groups):
    kind = torch.optim.AdamW if run.is_plain else bmt.optim.AdamOptimizer
    return kind(groups, lr=0.1, weight_decay=0.1)


@idiom
def adam_starts_anew(run):
    optimizer = adam(run, run.params)
    run.steps(optimizer, 2)
    optimizer.state = collections.defaultdict(dict)
    run.steps(optimizer, 2)
    optimizer.state.clear()
    run.steps(optimizer)
    optimizer.state.pop(run.matrix)
    return run.steps(optimizer, 2)


@idiom
def adam_gets_other_parameters(run):
    params = run.params
    optimizer = adam(run, [{"params": params[:3]}, {"params": params[3:5], "lr": 0.03}])
    run.steps(optimizer, 2)
    optimizer.param_groups[0]["params"] += params[5:8]
    with torch.no_grad():
        params[0].mul_(0.5)
    run.steps(optimizer, 2)
    optimizer.param_groups.reverse()
    run.steps(optimizer)
    optimizer.add_param_group({"params": params[8:]})
    optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop(0))
    run.steps(optimizer)
    del optimizer.param_groups[0]
    return run.steps(optimizer, 2)


@idiom
def adam_gets_other_states(run):
    p, optimizer = run.matrix, adam(run, run.params)
    run.steps(optimizer)
    optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
    run.steps(optimizer)
    optimizer.state[p]["exp_avg_sq"] = torch.ones(p.shape)
    run.steps(optimizer)
    theirs = torch.optim.Adam(run.params, lr=0.01)
    run.steps(theirs)
    for each in run.params:
        theirs.state[each]["exp_avg"].mul_(0.5)
        theirs.state[each]["exp_avg_sq"] = torch.zeros_like(each) + 1e-3
    another = torch.optim.Adam(run.params, lr=0.5)
    another.load_state_dict(copy.deepcopy(theirs.state_dict()))
    return run.steps(another)


# Losses
# --------------------------------------------------------------------------------------------------


@idiom
def losses_of_views(run):
    p = run.matrix
    views = p[0].square().sum() + p.T[1].abs().sum() + p.view(-1).std()
    norms = torch.cat([q.view(-1) for q in run.params]).norm() * 0.1
    norms = norms + torch.linalg.matrix_norm(p, ord=2) + torch.linalg.norm(p.t() @ p)
    run.back(views + norms + torch.linalg.svdvals(p).sum())
    return run.grads()


@idiom
def fisher(run):
    run.back()
    weights = [p.grad.detach().clone().pow(2) for p in run.params]
    old = [p.detach().clone() for p in run.params]
    optimizer = torch.optim.SGD(run.params, lr=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        triples = zip(weights, run.params, old, strict=True)
        run.back(sum((weight * (p - before) ** 2).sum() for weight, p, before in triples))
        optimizer.step()
    return run.state()


@idiom
def pruned(run):
    for module in list(run.model.modules()):
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, "weight", amount=0.3)
    run.back()
    return run.grads()


def mean_of_squares(x, p):
    """Compiled by `scripted`."""
    return (x.mean() * p.square() * 2.0).mean() + p.norm() + (x * (p * p).sum()).sum()


@functools.cache
def scripted():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have programs compile instead
        return torch.jit.script(mean_of_squares)


@idiom
def torchscript(run):
    for p in run.params:
        run.back(scripted()(batch()[:, :1], p))
    return run.grads()


@idiom
def numpy(run):
    array = run.matrix.detach().cpu().numpy()
    if not run.is_plain and bmt.device().type == "cpu":  # from a GPU it is a copy anyway
        with pytest.raises(ValueError, match="read-only"):
            array *= 2
    return {"copy": torch.from_numpy(array.copy()), "sum": torch.tensor(array.sum())}


@idiom
def several_passes(run):
    """Of one graph, for some inputs, and of one in which a parameter was trained that is frozen."""
    out = run.out()
    (out.square().mean() / run.ranks).backward(retain_graph=True)
    (out.abs().mean() / run.ranks).backward()
    run.loss().backward(inputs=[run.params[0], run.params[-1]])
    loss = run.loss()
    run.matrix.requires_grad_(False)
    loss.backward()
    return run.grads()


@idiom
def written_through_data_of_data(run):
    """Of parameters too that are not on every rank."""
    found: dict[str, Any] = {}
    ways: Any = (torch.Tensor.detach, operator.attrgetter("data"), copy.copy)
    for number, shown in enumerate(ways):
        with torch.no_grad():
            run.out()
            for param in run.params:
                shown(param.data).mul_(0.8)
            found[f"{number} without gradients"] = run.out()
        run.back()
        found.update({f"{number} {name}": grad for name, grad in run.grads().items()})
    own = nn.Parameter(run.matrix.data)
    (own.square().sum() / run.ranks).backward()
    assert own.grad is not None
    torch.optim.SGD([own], lr=0.1).step()
    return {**found, **run.state(), "gradient": own.grad}


@idiom
def compiled_by_the_program(run):
    """Functions that call the model and read parameters. One of both, under a function mode as the
    tests on GPUs have it, gives another value by torch, for a plain model too.
    """
    # of torch, about itself, when its compiler is imported
    warnings.filterwarnings("ignore", category=DeprecationWarning)

    @torch.compile(backend="eager")
    def loss(x):
        return run.model(x).square().mean()

    @torch.compile(backend="eager")
    def penalty():
        return sum(p.square().sum() for p in run.params)

    ((loss(batch()) + penalty()) / run.ranks).backward()
    optimizer = torch.optim.SGD(run.params, lr=0.1)

    @torch.compile(backend="eager")
    def step(x):
        run.model[0].eval().zero_grad()
        (loss(x) / run.ranks).backward()
        nn.utils.clip_grad_norm_(run.model[2].parameters(), 0.01)
        optimizer.step()
        return run.model[0].state_dict()

    found = run.grads()
    return {**found, **step(batch()), **run.state("then "), **run.grads()}


@idiom
def old_values_in_buffers(run):
    """As elastic weight consolidation has it; saved, and loaded again."""
    for name, param in [*run.model.named_parameters()]:
        run.model.register_buffer(f"old_{name}".replace(".", "_"), param.detach().clone())
    old = [*run.model.buffers()]
    run.back(sum((2 * p - q).square().sum() for p, q in zip(run.params, old, strict=True)))
    state = run.state()
    run.model.load_state_dict({name: value * 2 for name, value in state.items()})
    return {**state, **run.grads(), **run.state("loaded ")}


# Refused
# --------------------------------------------------------------------------------------------------


@refused
def gradients_of_gradients_of_parameters(run):
    found = torch.autograd.grad(run.loss(), run.params, create_graph=True)
    torch.stack([grad.square().sum() for grad in found]).sum().backward()
    return run.grads()


@refused
def a_graph_of_gradients(run):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have programs call torch.autograd.grad
        run.loss().backward(create_graph=True)
    penalty = torch.stack([p.grad.square().sum() for p in run.params]).sum()
    run.model.zero_grad()
    penalty.backward()
    return run.grads()


@refused
def hooks_of_nodes(run):
    seen = []
    torch.autograd.graph.register_multi_grad_hook(run.params, lambda grads: seen.append(len(grads)))
    run.back()
    return {"calls": torch.tensor(seen)}


@refused
def one_rank_writes_by_message(run):
    if not run.is_plain:
        try:
            dist.send(run.matrix.data, (bmt.rank() + 1) % bmt.world_size())
        except ValueError as error:  # torch 2.8 first asks whether a rank sends to itself
            raise ParameterError(str(error)) from error
    return run.state()


def by_hand(param):
    param.grad = torch.zeros(param.shape, dtype=param.dtype)


def by_descriptor(param):
    descriptor: Any = torch.Tensor.grad
    descriptor.__set__(param, torch.zeros(param.shape, dtype=param.dtype))


def by_other_name(param):
    param._grad = torch.zeros(param.shape, dtype=param.dtype)


def apart(param):
    gradient = param.grad
    param.grad = None
    gradient.detach_().mul_(0.5)
    param.grad = gradient


CLEARING = (
    lambda param: param.grad.detach_().zero_(),
    lambda param: param.grad.data.zero_(),
    lambda param: param.grad.requires_grad_(False).fill_(0),
    lambda param: setattr(param, "_grad", None),
    lambda param: delattr(param, "grad"),
    lambda param: param.grad.detach().mul_(0.5),
    lambda param: param.grad.__setitem__(..., 0),
    by_hand,
    by_descriptor,
    by_other_name,
    apart,
)


@torch.library.custom_op("bmtrain_tests::clip", mutates_args=())
def clip(x: torch.Tensor, most: float) -> torch.Tensor:
    """By the norm of the whole tensor; torch's function of this name is element-wise."""
    return x * min(1.0, most / float(x.norm()))


def norm(x):
    """A function of a program that asks its arguments first, as torch's do."""
    if torch.overrides.has_torch_function((x,)):
        return torch.overrides.handle_torch_function(norm, (x,), x)
    return x.abs().cumsum(0)[-1]


@idiom
def named_as_functions_of_torch(run):
    clipping = torch.ops.bmtrain_tests.clip
    with torch.no_grad():
        first, second = clipping(run.matrix, 0.5), clipping.default(run.matrix, 0.5)
        return {"a": first, "b": second, "c": clip(run.matrix, 0.5), "d": norm(run.matrix)}


@idiom
def cleared_by_hand(run):
    """As programs did before `zero_grad` had an argument, and in all other ways."""
    found = {}
    for number, clear in enumerate(CLEARING):
        optimizer = torch.optim.SGD(run.params, lr=0.1, momentum=0.9)
        for _ in range(2):
            for param in run.params:
                if param.grad is not None:
                    clear(param)
            run.back()
            optimizer.step()
        found.update({f"{number} {name}": x for name, x in {**run.state(), **run.grads()}.items()})
    return found


@idiom
def detached_teacher(run):
    """As mean teachers and the package ema-pytorch have it."""
    teacher = copy.deepcopy(run.model)
    for param in teacher.parameters():
        param.detach_()
    assert not any(param.requires_grad for param in teacher.parameters())
    optimizer = torch.optim.AdamW(run.params)
    for _ in range(2):
        run.steps(optimizer)
        for mean, param in zip(teacher.parameters(), run.params, strict=True):
            mean.lerp_(param.data, 0.1)
        run.back((teacher(batch()) - run.out()).square().sum())
    run.matrix.detach_()
    run.steps(optimizer)
    return {**run.state(), **{f"mean {k}": whole(v) for k, v in teacher.state_dict().items()}}


@refused
def rows_by_vmap(run):
    return {"out": torch.func.vmap(run.model)(batch()).detach()}


@refused
def tangents(run):
    with forward_ad.dual_level():
        out = run.model(forward_ad.make_dual(batch(), batch()))
        return {"out": forward_ad.unpack_dual(out).tangent}


@refused
def saved_tensors_without_hooks(run):
    with torch.autograd.graph.disable_saved_tensors_hooks("the program has none"):
        return {"out": run.out().detach()}


@idiom
def other_values_for_one_call(run):
    """And the gradients of each row."""
    values = {name: whole(p).to(p.device) * 0.5 for name, p in run.model.named_parameters()}

    def loss(values, row):
        out = torch.func.functional_call(run.model, values, (row[None],))
        return out.square().mean()

    gradients = torch.func.vmap(torch.func.grad(loss), (None, 0))(values, batch())
    out = torch.func.functional_call(run.model, values, (batch(),)).detach()
    return {"out": out, **gradients}


@idiom
def gradients_by_func(run):
    # On GPUs kernels under a transform cannot take slices: refused, with this cure.
    values = {
        name: p.gather().detach() if p.is_cuda and not run.is_plain else p.detach()
        for name, p in run.model.named_parameters()
    }
    return torch.func.grad(
        lambda values: torch.func.functional_call(run.model, values, (batch(),)).square().mean()
    )(values)


def all_idioms():
    with doubles(), warnings.catch_warnings():
        for number, program in enumerate(IDIOMS):
            compare(program, [SHARDED[number % 2]])  # one way to shard each, in turn
        # of torch, about its own rules of forward-mode AD
        warnings.filterwarnings("ignore", message=".*torch.jit.script.* is deprecated")
        for program in REFUSED:
            assert compare(program, may_refuse=True) > 0


def test_idioms_give_what_one_process_gets():
    run_ranks(all_idioms, 3, timeout=200)


@on_ranks(2)
def test_scripts_outside_of_blocks_get_whole_tensors():
    """None of their operators sees slices, which kernels that are fused on a GPU could not read.

    Also a function that was fused before, and then is called with slices.
    """
    refused = mock.Mock(side_effect=AssertionError("a script was given slices"))
    with doubles():
        for shard in SHARDED:
            run, plain = Run(shard), Run()
            for each in (run, plain):
                for _ in range(3):
                    scripted()(batch()[:, :1], torch.ones_like(plain.params[0]))
                with mock.patch.object(Slices, "__torch_dispatch__", refused):
                    outs = [scripted()(batch()[:, :1], p=param) for param in each.params]
                each.back(sum(outs))
            torch.testing.assert_close(run.grads(), plain.grads())


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Compiled by TorchScript, as in CPM-Bee."""
    variance = hidden.to(torch.float32).pow(2).mean(dim=-1, keepdim=True)
    return (hidden * torch.rsqrt(variance + eps)).to(hidden.dtype) * weight


class ScriptedNorm(bmt.DistributedModule):
    def __init__(self, script, kind):
        super().__init__()
        self.script, self.weight = script, kind(torch.linspace(0.5, 1.5, 8))

    def forward(self, x):
        return self.script(x, self.weight, eps=1e-6)


def scripted_norms():
    """A norm in a block and one after it, whose script is fused on a GPU by then; five steps."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch would have programs compile instead
        script = torch.jit.script(rms_norm)
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), ScriptedNorm(script, nn.Parameter))
    plain.append(ScriptedNorm(script, nn.Parameter))
    inner = nn.Sequential(nn.Linear(8, 8), ScriptedNorm(script, bmt.DistributedParameter))
    inner[0].load_state_dict(plain[0].state_dict())
    last = ScriptedNorm(script, bmt.DistributedParameter)
    block: Any = bmt.Block(inner, use_checkpoint=False, compile=False)
    plain.to(bmt.device())
    for number in range(5):
        generator = torch.Generator().manual_seed(number)
        x = torch.randn(4, 8, generator=generator, device="cpu").to(bmt.device())
        want, got = plain(x), last(block(x))
        torch.testing.assert_close(got, want)
        want.square().mean().backward()
        (got.square().mean() / bmt.world_size()).backward()
        for each in ([*plain.parameters()], [*block.parameters(), *last.parameters()]):
            optimizer = torch.optim.SGD(each, lr=0.1)
            optimizer.step()
            optimizer.zero_grad()
    pairs: Any = ((last, plain[2]), (block[1], plain[1]))
    for one, known in pairs:
        torch.testing.assert_close(one.weight.full_tensor(), known.weight.detach())


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_scripted_norms_outside_of_blocks(ranks):
    run_ranks(scripted_norms, ranks)


@on_ranks(2)
def test_whole_values_are_handed_over():
    """Whole values under DTensor's name: of parameters, gradients and states of optimizers."""
    for shard in SHARDED:
        expected, run = Run(), Run(shard)
        states = {}
        for each in (expected, run):
            optimizer = torch.optim.AdamW(each.params)
            each.steps(optimizer)
            states[each] = [optimizer.state[param]["exp_avg"] for param in each.params]
        for want, param, first, state in zip(
            expected.params, run.params, states[expected], states[run], strict=True
        ):
            pairs = ((want, param), (want.grad, param.grad), (first, state))
            for whole_one, own in pairs:
                full = own.full_tensor()
                assert type(full) is torch.Tensor and not full.requires_grad
                raw = full.detach().contiguous().view(-1).view(torch.uint8)
                torch.testing.assert_close(
                    raw.view(full.dtype).view(full.shape), whole_one.detach()
                )
            before = param.full_tensor()
            before.zero_()  # a copy
            assert param.full_tensor().any()


class Reading(torch.utils.data.Dataset[float]):
    """A data set that looks at the model, as a normaliser may."""

    def __init__(self, param):
        self.param = param

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return float(self.param.detach().sum()) + index


@on_ranks(2)
def test_models_and_parameters_stay_in_their_process():
    """In a file of the model itself, and in a worker that is forked. The run goes on."""
    for shard in SHARDED:
        run = Run(shard)
        for pickled in (run.model, run.model[0]):
            with pytest.raises(ParameterError, match=r"bmtrain\.save|state_dict"):
                torch.save(pickled, io.BytesIO())
        loader = torch.utils.data.DataLoader(
            Reading(run.matrix), num_workers=1, multiprocessing_context="fork"
        )
        with pytest.raises(ParameterError, match="forked process"):
            list(loader)
        assert len(list(torch.utils.data.DataLoader(Reading(run.matrix)))) == 2
        copied = copy.deepcopy(run.model)
        run.back()
        copied(batch()).square().mean().backward()
        for param, other in zip(run.params, copied.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad.full_tensor() / 2)
