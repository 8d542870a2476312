"""Blocks and lists of blocks against the same modules in plain PyTorch: values, gradients,
randomness, hooks, names.
"""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.passes import blocks_of
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import bmtrain as bmt
from bmtrain.errors import ParameterError

MODES = list(itertools.product((2, 3), (False, True)))  # ZeRO level, recomputation


def mode_name(level, recompute):
    return f"ZeRO-{level}, recompute={recompute}, {bmt.world_size()} ranks"


def share(loss):
    """This rank's part of a loss that all ranks compute alike: gradients then sum up to those of
    one process.
    """
    return loss / bmt.world_size()


def compare(make, call, x, level, recompute):
    """Value, gradients of parameters and input, buffers: the Block has what the plain module has.

    Returns the Block.
    """
    what = mode_name(level, recompute)
    torch.manual_seed(1)
    plain = make()
    block = bmt.Block(copy.deepcopy(plain), use_checkpoint=recompute, zero_level=level)
    answers = []
    for module in (plain, block):
        own = x.clone().requires_grad_(x.is_floating_point())
        torch.manual_seed(2)
        loss = call(module, own)
        (loss if module is plain else share(loss)).backward()
        answers.append({"loss": loss.detach(), "gradient of the input": own.grad})
    if answers[1]["gradient of the input"] is not None:
        answers[1]["gradient of the input"] *= bmt.world_size()
    models.assert_same_dicts(answers[1], answers[0], what)
    models.assert_same_gradients(block, plain, what)
    models.assert_same_state(block, plain, f"{what}: state")
    assert list(block.state_dict()) == list(plain.state_dict()), what
    return block


class Lists(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.randn(8), torch.randn(8, 3)])
        self.dict = nn.ParameterDict({"a": torch.randn(3), "unused": torch.randn(2)})

    def forward(self, x):
        for param in self.list:
            x = x * param if param.dim() == 1 else x @ param
        return x * self.dict["a"]


def spectral():
    """Its buffers move in every forward pass and enter the result."""
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 5))
    # far from the weight that the buffers fit, so that every pass moves them
    with torch.no_grad():
        module.get_parameter("parametrizations.weight.original").copy_(torch.randn(5, 8))
    return nn.Sequential(module)


class BufferOnly(nn.Module):
    factor: torch.Tensor
    hidden: torch.Tensor

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor([2.0]))
        self.register_buffer("hidden", torch.tensor([3.0]), persistent=False)

    def forward(self, x):
        return x * self.factor + self.hidden


class Mixed(nn.Module):
    """Parameters of three dtypes in one block, one of each shape."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(8, 9)
        self.b = nn.Linear(9, 5).bfloat16()
        self.c = nn.Parameter(torch.randn(5, 3).half())
        self.tiny = nn.Parameter(torch.randn(1, dtype=torch.float64))

    def forward(self, x):
        h = self.b(torch.tanh(self.a(x)).bfloat16())
        return ((h.half() @ self.c).float() * self.tiny).float()


def squared(module, x):
    out = module(x)
    out = out[0] if isinstance(out, tuple) else out
    return (out * torch.linspace(-1, 2, out.shape[-1])).square().mean()


def twice(module, x):
    return squared(module, module(x))


def made():
    """Weights of a recurrent module are computed; one moves its buffers whenever it is read."""
    lstm = parametrizations.weight_norm(nn.LSTM(8, 7, batch_first=True), "weight_ih_l0")
    return parametrizations.spectral_norm(lstm, "weight_hh_l0")


def in_reentrant(module, x):
    return squared(lambda y: checkpoint(module, y * 2, use_reentrant=True), x)


def in_checkpoint(module, x):
    return squared(lambda y: checkpoint(module, y * 2, use_reentrant=False), x)


def sequence():
    return torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(3))


def dropping():
    steps = (nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 8), nn.Dropout(0.1))
    return nn.Sequential(nn.Dropout(0.3), *steps)


CASES = {
    "attention": (
        lambda: nn.MultiheadAttention(8, 2, batch_first=True),
        lambda m, x: squared(lambda y: m(y, y, y), x),
    ),
    "lstm": (lambda: nn.LSTM(8, 7, num_layers=2, batch_first=True, bidirectional=True), squared),
    "made lstm": (made, squared),
    # a bias before the norm has no gradient
    "convolution": (
        lambda: nn.Sequential(nn.Conv1d(5, 7, 3, padding=1, bias=False), nn.BatchNorm1d(7)),
        squared,
    ),
    "parameter lists": (Lists, squared),
    "spectral norm": (spectral, squared),
    "buffers only": (BufferOnly, squared),
    "frozen": (lambda: nn.Linear(8, 8).requires_grad_(False), squared),
    "twice": (lambda: nn.Sequential(nn.Linear(8, 13), nn.Tanh(), nn.Linear(13, 8)), twice),
    # runs twice, and moves its statistics twice
    "user's reentrant checkpoint": (
        lambda: nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(5)),
        in_reentrant,
    ),
    "user's checkpoint": (lambda: nn.Linear(8, 6), in_checkpoint),
    "dropout twice": (dropping, twice),
    "mixed dtypes": (Mixed, squared),
}


def run_case(name, modes):
    make, call = CASES[name]
    for mode in modes:
        block = compare(make, call, sequence(), *mode)
        first = models.full_gradients(block)
        if name in ("convolution", "made lstm", "spectral norm", "frozen") or not first:
            continue  # buffers have moved, or there is no gradient
        torch.manual_seed(2)
        share(call(block, sequence().requires_grad_())).backward()
        doubled = {key: None if grad is None else grad * 2 for key, grad in first.items()}
        models.assert_same_dicts(models.full_gradients(block), doubled, f"again: {mode}")


@pytest.mark.parametrize("name", CASES)
def test_a_block_computes_what_its_module_computes(name):
    """Values, gradients, state and names, twice, for every kind of module, two modes each."""
    # Half precision: a loss divided by 3 rounds elsewhere, one divided by 2 does not.
    ranks, first = 2 if name == "mixed dtypes" else 3, list(CASES).index(name) % 2
    run_ranks(run_case, ranks, name, [MODES[first], MODES[3 - first]])


@on_ranks(1)
def test_a_block_on_one_rank():
    for name in ("attention", "spectral norm", "twice", "dropout twice", "mixed dtypes"):
        run_case(name, MODES)


def feed(level, recompute):
    """A plain net of three layers and its sharded twin."""
    torch.manual_seed(4)
    plain = nn.Sequential(
        *(nn.Sequential(nn.Linear(6, 11), nn.Tanh(), nn.Linear(11, 6)) for _ in range(3))
    )
    return plain, nn.Sequential(*blocks_of(plain, use_checkpoint=recompute, zero_level=level))


ROWS = torch.linspace(-2, 2, 24).view(4, 6)


def passes(level, recompute):
    """Without gradients, of two losses, for the input alone."""
    plain, sharded = feed(level, recompute)
    x = torch.randn(3, 6)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for _ in range(2):
                models.assert_same(sharded(x), plain(x), context.__name__)
        models.check_pass(sharded, plain, ROWS)
    sharded(x)  # a graph that is never used
    models.check_pass(sharded, plain, ROWS)
    grads = []
    for module, part in ((plain, 1), (sharded, bmt.world_size())):
        module.zero_grad()
        own = x.clone().requires_grad_()
        grads += torch.autograd.grad(module(own).square().sum(), own)
        assert all(param.grad is None for param in module.parameters())
        out = module(x) / part
        out.sum().backward(retain_graph=True)
        out.square().mul(part).sum().backward()
    models.assert_same(grads[1], grads[0], "autograd.grad")
    models.assert_same_gradients(sharded, plain, "two losses")
    models.check_pass(sharded, plain, ROWS)


def copies(level, recompute):
    """Of a block and a model, whose changes do not reach the original; states are loaded."""
    plain, sharded = feed(level, recompute)
    block, wrapped = copy.deepcopy(sharded[0]), copy.deepcopy(bmt.BMTrainModelWrapper(sharded))
    models.check_pass(wrapped, plain, ROWS)
    with torch.no_grad():
        for param in itertools.chain(wrapped.parameters(), block.parameters()):
            param.zero_()
        for param in plain.parameters():
            param.mul_(3)
    assert not any(value.any() for value in block.state_dict().values())
    models.assert_same(wrapped(torch.ones(1, 6)), torch.zeros(1, 6), "changed copy")
    net = bmt.BMTrainModelWrapper(sharded)
    net.load_state_dict(plain.state_dict())
    for got, want in ((net, plain), (net[0], plain[0])):
        state = got.state_dict()
        models.assert_same_dicts(state, want.state_dict(), "loaded", 0.0)
        assert all(x.device.type == "cpu" and not x.requires_grad for x in state.values())
    models.check_pass(net, plain, ROWS)
    names = [name for name, _ in plain.named_parameters()]
    assert names == [name for name, _ in net.named_parameters()]


def hooks(level, recompute):
    """All kinds, on a module inside and on the block's own, registered before and after: full
    weights, values, counts.
    """
    for early, is_copied in ((True, True), (False, False), (False, True)):
        torch.manual_seed(1)
        inner = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        plain = nn.ModuleDict({"whole": nn.Linear(6, 6), "part": inner})
        sharded = copy.deepcopy(plain)
        seen = [{}, {}]
        for notes, net in zip(seen, (plain, sharded), strict=True):
            made = dict(net)
            if early:
                watch(net, notes)
            for name in plain if net is sharded else ():
                net[name] = bmt.Block(net[name], zero_level=level, use_checkpoint=recompute)
            if not early:
                watch(net, notes)
            part = bmt.world_size() if net is sharded else 1
            # hooks look up the module that they are called with
            assert all({net[name]: name}[module] == name for name, module in made.items())
            used = copy.deepcopy(net) if is_copied else net
            x = torch.linspace(-1, 1, 12).view(2, 6).requires_grad_()
            loss = used["part"](used["whole"](x)).square().sum()
            (loss / part).backward()
        assert sorted(seen[0]) == sorted(seen[1])
        for key, (value,) in seen[0].items():
            got = seen[1][key]
            # Those of the inner modules run again when their forward pass does, which stops at the
            # last tensor that is needed.
            again = recompute and "forward" in key and (early or "part" in key)
            assert len(got) in ((1, 2) if again else (1,)), (key, len(got))
            scale = bmt.world_size() if "backward" in key and "weight" not in key else 1
            for each in got:
                models.assert_same(each * scale, value, f"{key}, {early=}, {is_copied=}")


def watch(net, seen):
    """Note down what hooks of all kinds see, and the weight that they find."""
    for name, module in (("whole", net["whole"]), ("part", net["part"].get_submodule("0"))):
        for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):

            def hook(module, *values, key=f"{name} {kind}"):
                tensors = [value[0] if isinstance(value, tuple) else value for value in values]
                for place, tensor in enumerate([module.weight, *tensors]):
                    found = seen.setdefault(f"{key} {place or 'weight'}", [])
                    found.append(tensor.detach().clone())

            getattr(module, f"register_{kind}_hook")(hook)


class Tripled(nn.Sequential):
    """Its results are tripled after its hooks have run."""

    def __call__(self, *args):
        return super().__call__(*args) * 3


def increased(_, args) -> Any:
    return (args[0] + 1,)


def doubled(_, grads: Any, __):
    return (grads[0] * 2,)


def hooked(kind):
    """With hooks of its own from before it becomes a block."""
    module = kind(nn.Linear(6, 6), nn.Tanh())
    module.register_forward_hook(lambda module, args, out: out + module[0].bias)
    module.register_full_backward_hook(doubled)
    return module


def global_hooks(level, recompute):
    """They run once in a call of a block, as of any module, before its own ones."""
    num_calls = [0]

    def double(_, args, out):
        num_calls[0] += 1
        return out * 2

    def call(module, x):
        num_calls[0] = 0
        handle = module.register_forward_hook(lambda _, args, out: out.sin())
        loss = module(x).square().sum()
        handle.remove()
        assert num_calls[0] == 3
        return loss

    registry = nn.modules.module
    with (
        registry.register_module_forward_hook(double),
        registry.register_module_forward_pre_hook(increased),
        registry.register_module_full_backward_hook(doubled),
    ):
        for kind in (nn.Sequential, Tripled):
            make = functools.partial(hooked, kind)
            compare(make, call, torch.randn(4, 6), level, recompute)


class OwnWays(nn.Module):
    """Saves, loads and lists its parameters in ways of its own."""

    _version = 3

    def __init__(self):
        super().__init__()
        self.base, self.added = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.scale, self.loaded, self.num_cleared = 1.0, None, 0
        self.shift = torch.ones(6)
        self.type: Any = "a method's name"

    def forward(self, x):
        return (self.base(x) + self.added(x)) * self.scale + self.shift

    def parameters(self, recurse=True):
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_parameters(self, *args, **kwargs):
        return (x for x in super().named_parameters(*args, **kwargs) if "base" not in x[0])

    def zero_grad(self, set_to_none=True):
        self.num_cleared += 1
        super().zero_grad(set_to_none)

    def _apply(self, fn, recurse=True):
        self.shift = fn(self.shift)
        return super()._apply(fn, recurse)

    def double(self):
        self.scale *= 2
        return super().to(torch.float32)

    def modules(self, *args, **kwargs):
        return (x for x in super().modules(*args, **kwargs) if x is not self.base)

    def load_state_dict(self, state_dict, *args, **kwargs):
        state_dict["step"] = state_dict.pop("old")
        return super().load_state_dict(state_dict, *args, **kwargs)

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "step"] = torch.ones(())

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.loaded = local_metadata["version"], state_dict.pop(prefix + "step").item()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)

    def state_dict(self, *args, prefix="", **kwargs):
        state = super().state_dict(*args, prefix=prefix, **kwargs)
        del state[prefix + "base.bias"]
        return state


def own_ways(level, recompute):
    """What a module's class saves, loads and lists is what its block does."""
    torch.manual_seed(1)
    plain = nn.Sequential(OwnWays(), nn.Linear(6, 6))
    sharded = copy.deepcopy(plain)
    block: Any = bmt.Block(sharded[0], zero_level=level, use_checkpoint=recompute)
    nets = (plain, nn.Sequential(block, sharded[1]))
    x = torch.randn(4, 6)
    for net in (*nets, *map(copy.deepcopy, nets)):
        first: Any = net[0]
        first.scale = 2.0
        state: Any = net.state_dict()
        assert [*state] == ["0._extra_state", "0.step", "0.base.weight", "0.added.weight", *LAST]
        assert state._metadata["0"] == {"version": 3}
        state["0.base.weight"] = torch.ones(6, 6)
        first.scale = 1.0
        assert net.load_state_dict(state, strict=False).missing_keys == ["0.base.bias"]
        assert first.loaded == (3, 1.0) and first.scale == 2.0
        assert [name for name, _ in first.named_parameters()] == ["added.weight"]
        assert first.type == "a method's name"
        first.type = len
        assert first.type is len
        assert [*first.modules()] == [first, first.added]
        net._apply(lambda x: x + 1 if x.shape == (6,) and not x.requires_grad else x)
        assert first.double() is first
        assert first.scale == 4.0 and first.shift.tolist() == [2.0] * 6
        state = first.state_dict()
        state["old"] = 0 * state.pop("step")
        first.load_state_dict(state, strict=False)
        assert first.loaded == (3, 0.0) and first.scale == 4.0
        net(x).sum().backward()
        first.zero_grad()
        assert first.num_cleared == 1 and first.base.weight.grad is not None
        assert [param.grad for param in first.parameters()] == [None]
        models.assert_same(net(x), plain(x), mode_name(level, recompute))


LAST = ("1.weight", "1.bias")


class Descent(nn.Module):
    """Follows the gradient of a learned energy, which torch.func takes."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Linear(6, 1)

    def forward(self, x):
        return x - torch.func.grad(lambda x: self.energy(x).tanh().sum())(x)


def gradients_by_func(level, recompute):
    """Torch allows no hooks of saved tensors there: refused where a block needs them."""
    x = torch.randn(4, 6)
    if level == 2 and not recompute:
        compare(Descent, lambda module, x: module(x).square().sum(), x, level, recompute)
        return
    block = bmt.Block(Descent(), zero_level=level, use_checkpoint=recompute)
    with pytest.raises(ParameterError, match="takes gradients"):
        block(x)
    models.assert_same(block.energy(x), nn.functional.linear(x, *block.parameters()), "later")


class Outside(nn.Module):
    """Modules outside of lists that read their weights in ways of their own."""

    def __init__(self):
        super().__init__()
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(6, 8))
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.recurrent = nn.LSTM(8, 5, batch_first=True)
        self.attention = nn.MultiheadAttention(5, 1, batch_first=True)
        head: Any = nn.Linear(5, 6)
        self.head, forward = head, head.forward
        # a function that knows the module as it was
        head.forward = lambda x: forward(x) * 2

    def forward(self, x):
        h = self.recurrent(self.spectral(self.normed(x)))[0]
        return self.head(h + self.attention(h, h, h, need_weights=False)[0])


def outside_of_lists():
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        made.append(Outside())
    plain, model = made[0], bmt.BMTrainModelWrapper(made[1])
    x = torch.randn(2, 3, 6)
    assert isinstance(model, Outside) and isinstance(model.recurrent, nn.LSTM)
    assert model.__class__ is Outside and list(model.state_dict()) == list(plain.state_dict())
    for _ in range(2):
        models.check_pass(model, plain, x)
        with torch.no_grad():
            for module in (plain, model):
                for param in module.parameters():
                    param.add_(grad_of(param) * 1e-2)
    models.assert_same_state(model, plain, "state")


class Stubborn(nn.Module):
    """Its dropout never trains."""

    def __init__(self):
        super().__init__()
        self.dropout, self.note = nn.Dropout(0.5), "kept"

    def train(self, mode=True):
        super().train(mode)
        self.dropout.training = False
        return self

    def forward(self, x):
        return self.dropout(x)


def as_the_module():
    """Training modes, classes, attributes: what is set on a block is set on the module inside."""
    ones = torch.ones(99)
    lone = bmt.Block(nn.Dropout(0.5))
    inside = nn.Sequential(nn.Dropout(0.5), nn.Linear(4, 4))
    net = bmt.BMTrainModelWrapper(nn.ModuleDict({"list": nn.ModuleList([inside])}))
    for mode in (False, True):
        assert lone.train(mode).training is mode and (lone(ones) == 0).any().item() is mode
        net.train(mode)
        assert inside.training is inside[0].training is mode
    stubborn: Any = bmt.Block(Stubborn()).train()
    assert torch.equal(stubborn(ones), ones) and stubborn.note == "kept"
    inner: Any = nn.Sequential(nn.Linear(4, 3))
    inner.flag = None
    block = bmt.Block(inner)
    block.flag, block.use_checkpoint = "set", False
    assert inner.flag == "set" and "use_checkpoint" not in inner.__dict__
    block.flag = nn.Linear(2, 2)  # a module in the place of an attribute
    assert inner.flag is block.flag and "flag" in dict(block.named_children())
    del block.flag
    assert not any(name == "flag" for name, _ in inner.named_children())
    with pytest.raises(AttributeError, match="flag"):
        _ = block.flag
    block._inner = block._module = child = nn.Linear(2, 2)  # names that a block has itself
    assert block._inner is block._module is inner and inner._inner is inner._module is child
    del block._inner, block._module
    assert not {"_inner", "_module"} & dict(inner.named_children()).keys()
    block.note = "a plain attribute"
    del block.note
    assert not hasattr(inner, "note")
    with pytest.raises(AttributeError, match="note"):
        del block.note
    assert isinstance(block, nn.Sequential) and isinstance(block, bmt.Block)
    assert not isinstance(block, nn.Linear) and inner[0].in_features == 4
    out = copy.deepcopy(block)(torch.ones(1, 4))
    assert out.shape == (1, 3) and out.grad_fn.name() == "AddmmBackward0"  # not a copy


class Returning(nn.Module):
    """Returns its parameter, whole and in part, in every kind of container."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(6, 5))

    def forward(self, x):
        row = self.weight[2]
        outs = {
            "tensor": self.weight,
            "view": self.weight[1:3].T,
            "dict": {"x": x, "w": [row]},
            "dataclass": models.Answer(x, {"w": [row]}),
        }
        return outs[self.kind]


def weight_in(out):
    found = out.extra if isinstance(out, models.Answer) else out
    return found["w"][0] if isinstance(found, dict) else found


def returned_parameters(level, recompute):
    for kind in ("tensor", "view", "dict", "dataclass"):
        torch.manual_seed(0)
        plain = nn.ModuleList([Returning(kind) for _ in range(6)])
        sharded = blocks_of(plain, use_checkpoint=recompute, zero_level=level)
        outs = [torch.stack([weight_in(m(torch.ones(2))) for m in net]) for net in (plain, sharded)]
        models.assert_same(outs[1].detach(), outs[0].detach(), f"returned {kind}")
        outs[0].square().sum().backward()
        share(outs[1].square().sum()).backward()
        models.assert_same_gradients(sharded, plain, kind)


class Pair(nn.Module):
    """Two hidden values and two further arguments."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y, gain, *, shift):
        return torch.tanh(self.a(x) * gain + y), y + self.b(x) + shift


def lists():
    """Threaded hidden values, rest arguments, hidden states with gradients, sharing, iteration,
    indexing.
    """
    torch.manual_seed(7)
    shared = Pair()
    plain = nn.ModuleList([Pair(), shared, Pair(), shared])
    copied = copy.deepcopy(plain)
    blocks = bmt.TransformerBlockList(
        [copied[0], bmt.Block(copied[1], zero_level=2), copied[2], copied[3]], num_hidden=2
    )
    x, y, shift = torch.randn(3, 2, 6).unbind(0)
    hidden, by_hand = [(x, y)], (x, y)
    for layer, block in zip(plain, blocks, strict=True):
        hidden.append(layer(*hidden[-1], 1.5, shift=shift))
        by_hand = block(*by_hand, 1.5, shift=shift)
    want = (*hidden.pop(), *[torch.stack(states) for states in zip(*hidden, strict=True)])
    got = blocks(x, y, 1.5, shift=shift, return_hidden_states=True)
    for other in (got, blocks(x, y, 1.5, shift=shift), by_hand):
        for one, expected in zip(other, want, strict=other is got):
            models.assert_same(one, expected, "output")
    losses = [
        torch.stack([out.square().sum() * (i + 1) for i, out in enumerate(outs)]).sum()
        for outs in (want, got)
    ]
    losses[0].backward()
    share(losses[1]).backward()
    models.assert_same_gradients(blocks, plain, "lists")
    assert len(blocks) == 4 and blocks[-1] is list(blocks)[3]
    assert [*blocks[:2]] == list(blocks)[:2]
    assert blocks.state_dict().keys() == plain.state_dict().keys()
    lone = bmt.TransformerBlockList([nn.Linear(6, 6) for _ in range(3)])
    out, states = lone(x, return_hidden_states=True)
    models.assert_same(lone(x), out, "without hidden states")
    assert states.shape == (3, 2, 6) and torch.equal(states[0], x)


@pytest.mark.parametrize(
    "program",
    [passes, copies, hooks, global_hooks, own_ways, gradients_by_func, returned_parameters],
)
@on_ranks(2)
def test_program_in_all_modes(program):
    """What the function of this name states, against plain PyTorch."""
    for mode in MODES:
        program(*mode)


@pytest.mark.parametrize(
    "program", [pytest.param(outside_of_lists, marks=pytest.mark.fresh), as_the_module, lists]
)
def test_program(program):
    """What the function of this name states, against plain PyTorch."""
    run_ranks(program, 3)


def micro_batches(num_ranks):
    """(64, ranks, 4, 16)"""
    made = torch.randn(64, num_ranks, 4, 16, generator=torch.Generator().manual_seed(1))
    return made.bfloat16()


def narrow_layer():
    torch.manual_seed(3)
    return nn.Linear(16, 16, bias=False).bfloat16()


def loss_of(layer, x):
    return (layer(x).float() + 3).square().sum()


WIDE = torch.float32
SETTINGS = {  # accumulate_dtype, reduce_dtype, whether reductions are deferred
    "narrow": (None, None, False),
    "wide": (WIDE, WIDE, False),
    "deferred": (WIDE, WIDE, True),
    "only accumulate": (WIDE, None, False),
}


def accumulate(setting):
    accumulate_dtype, reduce_dtype, deferred = SETTINGS[setting]
    block = bmt.Block(narrow_layer(), accumulate_dtype=accumulate_dtype, reduce_dtype=reduce_dtype)
    manager = models.managed(bmt.optim.AdamOptimizer(block.parameters()))
    inputs = micro_batches(bmt.world_size())
    for number, x in enumerate(inputs):
        loss = loss_of(block, x[bmt.rank()])
        manager.backward(loss, reduce_gradients=not deferred or number == len(inputs) - 1)
    (grad,) = models.full_gradients(block).values()
    assert grad is not None and grad.dtype == torch.bfloat16
    return grad.double() * bmt.world_size()


def accumulate_all():
    return {name: accumulate(name) for name in SETTINGS}


def test_fp32_accumulation_is_closer_to_the_truth():
    """64 micro-batches of bf16 gradients: fp32 sums end at the bf16 rounding of the truth, bf16
    sums far from it.
    """
    layer, exact = narrow_layer(), torch.zeros(16, 16, dtype=torch.float64)
    for x in micro_batches(2).flatten(0, 1):
        layer.zero_grad()
        loss_of(layer, x).backward()
        exact += grad_of(layer.weight).double()
    errors = {
        name: ((grad - exact).abs().max() / exact.abs().max()).item()
        for name, grad in run_ranks(accumulate_all, 2)[0].items()
    }
    assert errors["wide"] < 2**-8, errors
    assert errors["deferred"] < 2**-8, errors
    assert errors["only accumulate"] < 2**-7, errors
    assert errors["narrow"] > 3 * errors["wide"], errors
