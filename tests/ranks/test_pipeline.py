"""PipelineTransformerBlockList against the same layers in one process: outputs, hidden states,
gradients, training, files.
"""

import copy
from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.models import own
from tests.ranks.passes import blocks_of
from tests.ranks.runner import on_ranks, run_ranks
from tests.tensors import grad_of
from torch import nn

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, ParameterError
from bmtrain.shard.slices import local_of

WIDTH, LAYERS, ROWS, SEQ = 8, 5, 2, 3
PIPE = {"pipe_size": 2, "num_micro_batches": 4}


class Layer(nn.Module):
    """One residual layer with a mask per sample, a shift for all samples that is trained, and a
    gain.
    """

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(self, x, mask, shift, *, gain=1.0):
        return x + self.factor * gain * mask[:, :, None] * self.down(torch.tanh(self.up(x + shift)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.layers: Any = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x, mask):
        hidden, scale = self.embed(x), torch.sigmoid(x[:, :1, :1])
        # A shape that no batch has, so that nobody takes it for rows.
        shift = (
            self.shift.view(1, 1, WIDTH).expand(1, SEQ, WIDTH) if x.shape[0] != 1 else self.shift
        )
        if isinstance(self.layers, nn.ModuleList):
            inputs = []
            for layer in self.layers:
                inputs.append(hidden)
                hidden = layer(hidden, mask, shift, gain=scale)
            states = torch.stack(inputs)
        else:
            hidden, states = self.layers(hidden, mask, shift, gain=scale, return_hidden_states=True)
        return self.head(hidden), states


def make(pipelined, use_checkpoint=True):
    torch.manual_seed(11)
    model = Model()
    if pipelined:
        model.layers = bmt.PipelineTransformerBlockList(
            [bmt.Block(m, use_checkpoint=use_checkpoint) for m in model.layers]
        )
        model = bmt.BMTrainModelWrapper(model)
    return model


def batch(step, num_ranks):
    generator = torch.Generator().manual_seed(step)
    rows = num_ranks * ROWS
    return torch.randn(rows, SEQ, WIDTH, generator=generator), torch.rand(
        rows, SEQ, generator=generator
    ) > 0.3


def own_rows(step, num_ranks):
    """This rank's part of the batch for so many ranks, on its device."""
    return [own(part).to(bmt.device()) for part in batch(step, num_ranks)]


def on_cpu(values):
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def loss_of(logits, states):
    weights = torch.arange(1.0, LAYERS + 1, device=states.device).view(-1, 1, 1, 1)
    return logits.square().mean() + 0.1 * (weights * states.square()).mean()


def train(use_checkpoint, file, own_adam, steps=3, begin=None):
    """Steps of training; after the third from the file and the states of an optimizer `begin`."""
    model = make(True, use_checkpoint)
    kind = bmt.optim.AdamOptimizer if own_adam else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.01)
    manager = models.managed(optimizer)
    if begin is not None:
        bmt.load(model, file)
        manager.load_state_dict(
            {"optimizers": [begin], "lr_schedulers": [None], "loss_scale": None, "num_steps": 3}
        )
    norms, losses = [], []
    out = {}
    for step in range(0 if begin is None else 3, steps):
        manager.zero_grad()
        logits, states = model(*own_rows(step, 2 if begin else bmt.world_size()))
        if step == 0:
            out.update(on_cpu({"logits": logits, "states": states}))
        manager.backward(loss_of(logits, states))
        losses.append(float(bmt.sum_loss(loss_of(logits, states).detach())))
        norms.append(float(manager.clip_grad_norm(optimizer.param_groups, 0.5)))
        manager.step()
    with torch.no_grad():
        out["evaluated"] = model(*own_rows(9, bmt.world_size()))[0].cpu()
    if begin is None:
        bmt.save(model, file)
    out["full"] = on_cpu(model.state_dict())
    out["whole state"] = manager.state_dict(gather_opt=True)["optimizers"][0]
    out["state"] = out["whole state"]["state"]
    out["sizes"] = {name: local_of(param).numel() for name, param in model.named_parameters()}
    return {**out, "norms": norms, "losses": losses}


def plain(num_ranks, steps=3):
    model = make(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    norms, losses, out = [], [], {}
    for step in range(steps):
        optimizer.zero_grad()
        logits, states = model(*batch(step, num_ranks))
        if step == 0:
            out = {"logits": logits.detach(), "states": states.detach()}
        loss = loss_of(logits, states)
        loss.backward()
        losses.append(loss.item())
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    out["evaluated"] = model(*batch(9, num_ranks))[0].detach()
    return model, optimizer, {**out, "norms": norms, "losses": losses}


def close(actual, expected, scale=1.0):
    """Tensors, numbers, or containers of them."""
    torch.testing.assert_close(actual, expected, rtol=1e-5 * scale, atol=2e-6 * scale)


def check(results, model, optimizer, expected):
    """What ranks have found is what one process has."""
    ranks = len(results)
    for rank, result in enumerate(results):
        close(result["logits"], expected["logits"].chunk(ranks)[rank])
        close(result["states"], expected["states"].chunk(ranks, 1)[rank])
        close(result["evaluated"], expected["evaluated"].chunk(ranks)[rank])
        close(result["norms"], expected["norms"])
        close(result["full"], model.state_dict())
        for index, param in enumerate(model.parameters()):
            close(result["state"][index]["exp_avg"], optimizer.state[param]["exp_avg"])


@pytest.mark.parametrize(
    ("ranks", "stages", "tp", "micro_batches", "use_checkpoint"),
    [
        (1, 1, 1, 2, False),
        (2, 2, 1, 1, True),
        (3, 3, 1, 3, False),
        (4, 2, 2, 4, True),
        pytest.param(4, 4, 1, 4, True, marks=pytest.mark.long),
    ],
)
def test_trains_as_one_process(ranks, stages, tp, micro_batches, use_checkpoint, tmp_path):
    model, optimizer, expected = plain(ranks)
    init = {"pipe_size": stages, "tp_size": tp, "num_micro_batches": micro_batches}
    results = run_ranks(
        train, ranks, use_checkpoint, str(tmp_path / "model.pt"), use_checkpoint, init=init
    )
    check(results, model, optimizer, expected)
    for result in results:
        close(result["losses"], expected["losses"])
        for index, param in enumerate(model.parameters()):
            state, got = optimizer.state[param], result["state"][index]
            largest = float(state["exp_avg_sq"].max())  # far below what `close` takes for nothing
            torch.testing.assert_close(
                got["exp_avg_sq"], state["exp_avg_sq"], rtol=1e-4, atol=1e-5 * largest
            )
            assert float(got["step"]) == 3
    for name, param in model.named_parameters():
        assert sum(result["sizes"][name] for result in results) == param.numel(), name
        if ".0." in name and stages > 1:  # the first layer is on the ranks of the first stage only
            assert all(result["sizes"][name] == 0 for result in results[ranks // stages :])
    close(torch.load(tmp_path / "model.pt", weights_only=True), model.state_dict())


@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (1, 1)), pytest.param((2, 1), (2, 2), marks=pytest.mark.long)]
)
def test_resumes_with_another_number_of_stages(before, after, tmp_path):
    model, _, _ = plain(2, 5)
    file = str(tmp_path / "model.safetensors")
    sizes = [{"pipe_size": stages} for _, stages in (before, after)]
    first = run_ranks(train, before[0], True, file, True, init=sizes[0])[0]
    given = True, file, True, 5, first["whole state"]
    for result in run_ranks(train, after[0], *given, init=sizes[1]):
        close(result["full"], model.state_dict())


class Pair(nn.Module):
    """Two hidden tensors, of which one takes no gradient, and dropout."""

    def __init__(self):
        super().__init__()
        self.inner, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5)

    def forward(self, x, count):
        return x + self.drop(torch.tanh(self.inner(x))) * (count > 1).float(), count + 1


class Simple(nn.Module):
    """One layer that adds the other argument, or ignores it."""

    def __init__(self, adds=True):
        super().__init__()
        self.inner, self.adds = nn.Linear(WIDTH, WIDTH), adds

    def forward(self, x, more=None):
        return x + torch.tanh(self.inner(x if more is None or not self.adds else x + more))


def layers_of(kind, count=4):
    torch.manual_seed(5)
    return nn.ModuleList([kind() for _ in range(count)])


def pipeline_of(layers, use_checkpoint=True, **options):
    blocks = blocks_of(layers, use_checkpoint=use_checkpoint)
    return bmt.PipelineTransformerBlockList(blocks, **options)


def seeded(seed):
    """Rows of two ranks."""
    return torch.randn(2 * ROWS, SEQ, WIDTH, generator=torch.Generator().manual_seed(seed))


def through(layers, x, *more):
    """One layer after the other."""
    for layer in layers:
        x = layer(x, *more)
    return x


def check_own_gradients(blocks, layers):
    """Of two stages: each rank has the whole gradients of its own layers and no others."""
    theirs = dict(layers.named_parameters())
    for name, param in blocks.named_parameters():
        is_own = int(name.split(".")[0]) // 2 == bmt.rank()
        want = theirs[name].grad if is_own else None
        assert (param.grad is None) == (want is None), name
        if param.grad is not None and want is not None:
            close(local_of(param.grad), want.reshape(-1), 10)


@on_ranks(2, init={"pipe_size": 2})
def test_two_hidden_tensors_and_frozen_stages():
    """What was learned of one shape is not used for another."""
    x, count = seeded(0)[:, 0], torch.arange(4).view(4, 1)
    weights = torch.arange(1.0, WIDTH + 1)
    for frozen in ((), (0, 1), (2, 3), (0, 1, 2)):
        layers = layers_of(Pair).eval()
        for index in frozen:
            layers[index].requires_grad_(False)
        blocks = copy.deepcopy(pipeline_of(layers, num_hidden=2))
        for rows in (1, 2):
            out, counted = blocks(own(x)[:rows], own(count)[:rows])
        (out * weights).sum().backward()
        with torch.no_grad():
            quiet, _ = blocks(own(x), own(count))
        y, number = x, count
        for layer in layers:
            y, number = layer(y, number)
        (y * weights).sum().backward()
        for found in (out, quiet):
            close(found.detach(), own(y).detach())
        assert torch.equal(counted, own(number))
        check_own_gradients(blocks, layers)


@on_ranks(2, init={"pipe_size": 2})
def test_recomputation_replays_dropout():
    answers = []
    for use_checkpoint in (False, True):
        blocks = pipeline_of(layers_of(Pair), use_checkpoint, num_hidden=2)
        torch.manual_seed(7)
        out, _ = blocks(own(seeded(0)), torch.full((ROWS, 1, 1), 2))
        out.square().sum().backward()
        grads = [local_of(param.grad) for param in blocks.parameters() if param.grad is not None]
        answers.append([out, *grads])
    assert not torch.equal(out, blocks.eval()(own(seeded(0)), torch.full((ROWS, 1, 1), 2))[0])
    assert len(answers[0]) == 5
    models.assert_equal(*answers)


def run_all(parts, x, more):
    """Layers before, in and after the pipeline; those in it get `more`."""
    for index, part in enumerate(parts):
        members = part if type(part) is nn.ModuleList else [part]
        x = through(members, x, *[more][: index == 1])
    return x.square().sum()


@on_ranks(2, init=PIPE)
def test_gradients_of_inputs_with_blocks_around_the_pipeline():
    """The first passes teach the order of gathers that the later ones follow."""
    for case in ("both", "one", "frozen", "retained", "frozen retained"):
        parts = [layers_of(Simple, count) for count in (2, 4, 2)]
        parts[1].requires_grad_("frozen" not in case)
        before, after = (bmt.TransformerBlockList(copy.deepcopy(parts[n])) for n in (0, 2))
        lists = [before, pipeline_of(parts[1]), after]
        for step in range(3):
            found = []
            for net, cut in ((parts, lambda x: x), (lists, own)):
                leaves = [cut(seeded(step + n)).requires_grad_() for n in (0, 10)]
                loss = run_all(net, *leaves)
                if case in ("both", "one"):
                    found.append(torch.autograd.grad(loss, leaves[case == "one" :]))
                    continue
                loss.backward(retain_graph="retained" in case)
                if "retained" in case:
                    loss.backward()
                found.append(tuple(map(grad_of, leaves)))
            for want, got in zip(*found, strict=True):
                close(got, own(want), 10)
        if "frozen" not in case and case not in ("both", "one"):
            check_own_gradients(lists[1], parts[1])


@on_ranks(2, init={"pipe_size": 2})
def test_gradients_reduced_late_and_blocks_around_the_pipeline():
    states = []
    for late in (False, True):
        blocks = pipeline_of(layers_of(Simple))
        around = bmt.TransformerBlockList(layers_of(Simple, 2))
        manager = models.managed(torch.optim.SGD([*blocks.parameters(), *around.parameters()], 0.1))
        for _ in range(2):
            manager.zero_grad()
            for part in range(3):
                loss = around(blocks(around(own(seeded(part))))).square().mean()
                manager.backward(loss, reduce_gradients=not late or part == 2)
            manager.step()
        states.append([blocks.state_dict(), around.state_dict()])
    close(*states)


@on_ranks(2, init=PIPE)
def test_bad_input_is_an_error_on_every_rank():
    """The next pass is right."""
    make_list = bmt.PipelineTransformerBlockList
    rank, layers = bmt.rank(), layers_of(Layer, LAYERS)
    blocks, shift = pipeline_of(layers), torch.linspace(-1, 1, WIDTH)
    x, mask = own(seeded(0)), torch.ones(ROWS, SEQ)
    three, cuts = seeded(1)[:3], torch.ones(3, SEQ)
    narrow = pipeline_of(nn.ModuleList([nn.Linear(*sizes) for sizes in ((8, 6), *[(6, 6)] * 3)]))
    other = seeded(1).repeat(2, 1, 1)[: 4 + 2 * rank]
    wrong = [
        (lambda: make_list([Layer()]), r"2 stages for 1 layers"),
        (
            lambda: make_list([Simple()] * 2),
            r"'inner.weight' is shared with another pipeline stage",
        ),
        (lambda: blocks(three, cuts, shift), r"3 rows each cannot be cut into 4 micro-batches"),
        (
            lambda: blocks(other, torch.ones(other.shape[:2]), shift),
            r"rank 0 .*tensor \(4, 3, 8\).*rank 1 .*tensor \(6, 3, 8\)",
        ),
        (
            lambda: blocks() if rank else blocks(x, mask, shift),
            r"0 positional arguments.*\(on rank 1\)",
        ),
        (
            lambda: blocks(x, mask, shift, batch_related=["maks"]),
            r"batch_related has 'maks': expected positions 0 to 1 .*or names of",
        ),
        (
            lambda: blocks(x, mask, shift, batch_related=[0, 1]),
            r"batch_related has 1, a tensor of shape \(8,\): expected 2 rows",
        ),
        (lambda: blocks(1.0, mask, shift), "hidden argument 0 is float"),
        (
            lambda: narrow(x, return_hidden_states=True),
            r"before different blocks are .*\(2, 3, 8\).*\(2, 3, 6\)",
        ),
    ]
    for call, words in wrong:
        with pytest.raises((ConfigurationError, ParameterError), match=words):
            call()
        leaf, whole = x.clone().requires_grad_(), seeded(0).requires_grad_()
        for net in (blocks, layers):
            net.zero_grad()
        blocks(leaf, mask, shift).square().sum().backward()
        through(layers, whole, torch.ones(2 * ROWS, SEQ), shift).square().sum().backward()
        close(grad_of(leaf), own(grad_of(whole)), 10)
    assert narrow(x).shape == (2, SEQ, 6)


@on_ranks(2, init={"pipe_size": 2})
def test_the_caller_may_say_what_has_rows():
    """Rows as many as features: without the mark the shift would be taken for one value per
    sample.
    """
    layers, shift = layers_of(Layer, 2), torch.linspace(-1, 1, WIDTH)
    x, mask = torch.stack([seeded(n).flatten(0, 1)[:SEQ] for n in range(16)]), torch.ones(16, SEQ)
    mask[3] = 0
    out = pipeline_of(layers)(own(x), own(mask), shift, batch_related=[0])
    close(out, own(through(layers, x, mask, shift)))


class Shifted(nn.Module):
    """Layers of which some use what a parameter outside of them gives."""

    def __init__(self, users):
        super().__init__()
        torch.manual_seed(4)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.layers: Any = nn.ModuleList([Simple(adds=index in users) for index in range(4)])

    def forward(self, x):
        shift = torch.sin(self.shift).view(1, 1, WIDTH)
        layers = self.layers if isinstance(self.layers, nn.ModuleList) else [self.layers]
        return through(layers, x, shift).square().mean()


@on_ranks(2, init={"pipe_size": 2})
def test_an_argument_that_some_stages_ignore():
    for users, sharded in (((0,), True), ((3,), False), ((3,), True), ((), False), ((), True)):
        reference, model = Shifted(users), Shifted(users)
        reference(seeded(0)).backward()
        torch.optim.SGD(reference.parameters(), lr=1.0).step()
        model.layers = bmt.PipelineTransformerBlockList(model.layers)
        if sharded:
            model = bmt.BMTrainModelWrapper(model)
        manager = models.managed(torch.optim.SGD(model.parameters(), lr=1.0))
        manager.backward(model(own(seeded(0))))
        manager.step()
        grad = dict(model.named_parameters())["shift"].grad
        assert (grad is None) == (reference.shift.grad is None)
        close(model.state_dict(), reference.state_dict())


class Counting(nn.Module):
    """A layer with running statistics, in a block of its own, and an extra state."""

    seen = None

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.norm, self.inside = nn.BatchNorm1d(WIDTH), wrap(nn.Linear(WIDTH, WIDTH))
        self.register_buffer("last", None)

    def forward(self, x):
        self.last = self.seen = x.detach().mean()
        return x + self.inside(self.norm(x))

    def get_extra_state(self):
        return {"seen": self.seen}

    def set_extra_state(self, state):
        self.seen = state["seen"]


@on_ranks(2, init={"pipe_size": 2, "num_micro_batches": 2})
def test_buffers_are_saved_as_their_stage_has_them(tmp_path):
    """And blocks may contain blocks."""
    file = tmp_path / "model.pt"
    layers = layers_of(Counting)
    blocks = bmt.PipelineTransformerBlockList(layers_of(lambda: Counting(bmt.Block)))
    for step in range(2):
        blocks(own(seeded(step)[:, 0])).square().sum().backward()
        for rows in seeded(step)[:, 0].chunk(2):
            through(layers, rows)
    bmt.save(blocks, str(file))
    bmt.synchronize()
    for found in (blocks.state_dict(), torch.load(file, weights_only=True)):
        close(found, layers.state_dict())


class Adapted(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.more = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.inner(x) + self.more(x)


@on_ranks(2, init={"pipe_size": 2})
def test_modules_put_in_later_join_the_stage():
    layers = layers_of(Simple)
    blocks = pipeline_of(layers)
    model = bmt.BMTrainModelWrapper(nn.Sequential(blocks))
    for net in (layers, blocks):
        torch.manual_seed(8)
        for layer in net:
            layer.inner = Adapted(layer.get_submodule("inner"))
    bmt.BMTrainModelWrapper(model)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (layers, model)]
    model(own(seeded(0))).square().sum().backward()
    through(layers, seeded(0)).square().sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    close(blocks.state_dict(), layers.state_dict(), 10)
    check_own_gradients(blocks, layers)
    for name, param in blocks.named_parameters():
        is_own = int(name[0]) // 2 == bmt.rank()
        assert local_of(param).numel() == is_own * dict(layers.named_parameters())[name].numel()
