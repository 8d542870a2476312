"""PipelineTransformerBlockList against the same layers in one process: outputs, hidden states,
gradients, training, files.
"""

from __future__ import annotations

import copy
import pathlib
from typing import Any

import pytest
import torch
from tests.ranks.runner import run_ranks
from tests.tensors import own_slice

import bmtrain as bmt
from bmtrain.errors import ConfigurationError, ParameterError
from bmtrain.shard.slices import local_of

WIDTH, LAYERS, ROWS, SEQ = 8, 5, 2, 3
# world size, stages, tensor ranks, micro-batches
GRID = [
    (1, 1, 1, 2),
    (2, 2, 1, 2),
    (2, 2, 1, 4),
    (2, 2, 1, 1),
    (4, 2, 1, 4),
    (3, 3, 1, 3),
    (4, 4, 1, 4),
    (4, 2, 2, 2),
]


class Layer(torch.nn.Module):
    """One residual layer with a mask per sample, a shift for all samples that is trained, and a
    gain.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("factor", torch.tensor(0.5))

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, shift: torch.Tensor, *, gain: Any = 1.0
    ) -> torch.Tensor:
        return x + self.factor * gain * mask[:, :, None] * self.down(torch.tanh(self.up(x + shift)))


class Model(torch.nn.Module):
    def __init__(self, layer: type[torch.nn.Module] = Layer) -> None:
        super().__init__()
        self.embed, self.head = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 4)
        self.shift = torch.nn.Parameter(torch.randn(WIDTH))
        self.layers: Any = torch.nn.ModuleList([layer() for _ in range(LAYERS)])

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, scale = self.embed(x), torch.sigmoid(x[:, :1, :1])
        # A shape that no batch has, so that nobody takes it for rows.
        shift = (
            self.shift.view(1, 1, WIDTH).expand(1, SEQ, WIDTH) if x.shape[0] != 1 else self.shift
        )
        if isinstance(self.layers, torch.nn.ModuleList):
            inputs = []
            for layer in self.layers:
                inputs.append(hidden)
                hidden = layer(hidden, mask, shift, gain=scale)
            states = torch.stack(inputs)
        else:
            hidden, states = self.layers(hidden, mask, shift, gain=scale, return_hidden_states=True)
        return self.head(hidden), states


def make(pipelined: bool, use_checkpoint: bool = True) -> Model:
    torch.manual_seed(11)
    model = Model()
    if pipelined:
        model.layers = bmt.PipelineTransformerBlockList(
            [bmt.Block(m, use_checkpoint=use_checkpoint) for m in model.layers]
        )
        model = bmt.BMTrainModelWrapper(model)
    return model


def batch(step: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    rows = num_ranks * ROWS
    return torch.randn(rows, SEQ, WIDTH, generator=generator), torch.rand(
        rows, SEQ, generator=generator
    ) > 0.3


def own_rows(step: int, num_ranks: int) -> list[torch.Tensor]:
    """This rank's part of the batch for so many ranks, on its device."""
    return [
        part.chunk(bmt.world_size())[bmt.rank()].to(bmt.device()) for part in batch(step, num_ranks)
    ]


def on_cpu(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in values.items()}


def loss_of(logits: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    weights = torch.arange(1.0, LAYERS + 1, device=states.device).view(-1, 1, 1, 1)
    return logits.square().mean() + 0.1 * (weights * states.square()).mean()


def train(use_checkpoint: bool, file: str, own_adam: bool, steps: int = 3) -> dict[str, Any]:
    model = make(True, use_checkpoint)
    kind: Any = bmt.optim.AdamOptimizer if own_adam else torch.optim.AdamW
    optimizer = kind(model.parameters(), lr=1e-2, weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    norms, losses = [], []
    out: dict[str, Any] = {}
    for step in range(steps):
        manager.zero_grad()
        logits, states = model(*own_rows(step, bmt.world_size()))
        if step == 0:
            out.update(on_cpu({"logits": logits, "states": states}))
        manager.backward(loss_of(logits, states))
        losses.append(float(bmt.sum_loss(loss_of(logits, states).detach())))
        norms.append(float(manager.clip_grad_norm(optimizer.param_groups, 0.5)))
        manager.step()
    with torch.no_grad():
        out["evaluated"] = model(*own_rows(9, bmt.world_size()))[0].cpu()
    bmt.save(model, file)
    out["full"] = on_cpu(model.state_dict())
    out["state"] = manager.state_dict(gather_opt=True)["optimizers"][0]["state"]
    out["sizes"] = {name: local_of(param).numel() for name, param in model.named_parameters()}
    return {**out, "norms": norms, "losses": losses}


def plain(num_ranks: int, steps: int = 3) -> tuple[Model, torch.optim.Optimizer, dict[str, Any]]:
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
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        optimizer.step()
    out["evaluated"] = model(*batch(9, num_ranks))[0].detach()
    return model, optimizer, {**out, "norms": norms, "losses": losses}


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("ranks", "stages", "tp", "micro_batches"), GRID)
@pytest.mark.parametrize("use_checkpoint", [True, False])
def test_trains_as_one_process(
    ranks: int,
    stages: int,
    tp: int,
    micro_batches: int,
    use_checkpoint: bool,
    tmp_path: pathlib.Path,
) -> None:
    model, optimizer, expected = plain(ranks)
    init = {"pipe_size": stages, "tp_size": tp, "num_micro_batches": micro_batches}
    results = run_ranks(
        train, ranks, use_checkpoint, str(tmp_path / "model.pt"), use_checkpoint, init=init
    )
    for rank, result in enumerate(results):
        close(result["logits"], expected["logits"].chunk(ranks)[rank])
        close(result["states"], expected["states"].chunk(ranks, 1)[rank])
        close(result["evaluated"], expected["evaluated"].chunk(ranks)[rank])
        close(result["norms"], expected["norms"])
        close(result["losses"], expected["losses"])
        for index, (name, param) in enumerate(model.named_parameters()):
            close(result["full"][name], param.detach())
            state = optimizer.state[param]
            close(result["state"][index]["exp_avg"], state["exp_avg"])
            largest = float(state["exp_avg_sq"].max())  # far below what `close` takes for nothing
            torch.testing.assert_close(
                result["state"][index]["exp_avg_sq"],
                state["exp_avg_sq"],
                rtol=1e-4,
                atol=1e-5 * largest,
            )
            assert float(result["state"][index]["step"]) == 3
    for name, param in model.named_parameters():
        assert sum(result["sizes"][name] for result in results) == param.numel(), name
        if ".0." in name and stages > 1:  # the first layer is on the ranks of the first stage only
            assert all(result["sizes"][name] == 0 for result in results[ranks // stages :])
    saved = torch.load(tmp_path / "model.pt", weights_only=True)
    assert saved.keys() == model.state_dict().keys()
    for name, value in model.state_dict().items():
        close(saved[name], value)


def resume(file: str, state: dict[str, Any], steps: range) -> dict[str, torch.Tensor]:
    model = make(True)
    bmt.load(model, file)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2, weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    manager.load_state_dict(
        {"optimizers": [state], "lr_schedulers": [None], "loss_scale": None, "num_steps": 3}
    )
    for step in steps:
        manager.zero_grad()
        manager.backward(loss_of(*model(*own_rows(step, 2))))
        manager.clip_grad_norm(optimizer.param_groups, 0.5)
        manager.step()
    return model.state_dict()


def whole_state(file: str) -> dict[str, Any]:
    model = make(True)
    optimizer = bmt.optim.AdamOptimizer(model.parameters(), lr=1e-2, weight_decay=0.01)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(optimizer)
    for step in range(3):
        manager.zero_grad()
        manager.backward(loss_of(*model(*own_rows(step, 2))))
        manager.clip_grad_norm(optimizer.param_groups, 0.5)
        manager.step()
    bmt.save(model, file)
    return manager.state_dict(gather_opt=True)["optimizers"][0]


@pytest.mark.parametrize(
    ("before", "after"), [((2, 2), (1, 1)), ((1, 1), (2, 2)), ((2, 1), (2, 2))]
)
def test_goes_on_with_another_number_of_stages(
    before: tuple[int, int], after: tuple[int, int], tmp_path: pathlib.Path
) -> None:
    model, _, _ = plain(2, 5)
    file = str(tmp_path / "model.safetensors")
    state = run_ranks(whole_state, before[0], file, init={"pipe_size": before[1]})[0]
    for full in run_ranks(resume, after[0], file, state, range(3, 5), init={"pipe_size": after[1]}):
        for name, value in model.state_dict().items():
            close(full[name], value)


class Pair(torch.nn.Module):
    """Two hidden tensors, of which one takes no gradient, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, WIDTH)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.drop(torch.tanh(self.inner(x))) * (count > 1).float(), count + 1


def pair_model(frozen: tuple[int, ...]) -> list[torch.nn.Module]:
    torch.manual_seed(5)
    layers: list[torch.nn.Module] = [Pair() for _ in range(4)]
    for index in frozen:
        layers[index].requires_grad_(False)
    return layers


def pairs(frozen: tuple[int, ...], dropout: bool, use_checkpoint: bool = True) -> dict[str, Any]:
    members = [bmt.Block(layer, use_checkpoint=use_checkpoint) for layer in pair_model(frozen)]
    blocks = bmt.PipelineTransformerBlockList(members, num_hidden=2)
    blocks.train(dropout)
    generator = torch.Generator().manual_seed(bmt.rank())
    x, count = torch.randn(2, WIDTH, generator=generator), torch.arange(2).view(2, 1) + bmt.rank()
    blocks = copy.deepcopy(blocks)
    # another shape first: what was learned of one shape is not used for the other
    for rows in (1, 2):
        out, counted = blocks(x[:rows], count[:rows])
    (out * torch.arange(1.0, WIDTH + 1)).sum().backward()
    engine_grads = {
        name: None if p.grad is None else own_slice(p.grad).clone()
        for name, p in blocks.named_parameters()
    }
    with torch.no_grad():
        quiet, _ = blocks(x, count)
    return {
        "x": x,
        "count": count,
        "out": out.detach(),
        "counted": counted,
        "grads": engine_grads,
        "quiet": quiet,
    }


@pytest.mark.parametrize("frozen", [(), (0, 1), (2, 3), (0, 1, 2)])
def test_two_hidden_tensors_and_frozen_stages(frozen: tuple[int, ...]) -> None:
    results = run_ranks(pairs, 2, frozen, False, init={"pipe_size": 2})
    layers = pair_model(frozen)
    x, count = (torch.cat([result[key] for result in results]) for key in ("x", "count"))
    for layer in layers:
        x, count = layer.eval()(x, count)
    (x * torch.arange(1.0, WIDTH + 1)).sum().backward()
    for rank, result in enumerate(results):
        close(result["out"], x.detach().chunk(2)[rank])
        close(result["quiet"], x.detach().chunk(2)[rank])
        assert torch.equal(result["counted"], count.chunk(2)[rank])
    for index, layer in enumerate(layers):
        for name, param in layer.named_parameters():
            grad = results[index // 2]["grads"][f"{index}.{name}"]
            assert (grad is None) == (index in frozen)
            if grad is not None and param.grad is not None:
                close(grad, param.grad.reshape(-1))
            assert results[1 - index // 2]["grads"][f"{index}.{name}"] is None


def test_recomputation_replays_dropout() -> None:
    kept, recomputed = (
        run_ranks(pairs, 2, (), True, use_checkpoint, init={"pipe_size": 2})
        for use_checkpoint in (False, True)
    )
    for one, other in zip(kept, recomputed, strict=True):
        assert not torch.equal(one["out"], one["quiet"])
        assert torch.equal(one["out"], other["out"])
        for name, grad in one["grads"].items():
            assert (grad is None and other["grads"][name] is None) or torch.equal(
                grad, other["grads"][name]
            ), name


def deferred(defer: bool) -> dict[str, Any]:
    blocks = bmt.PipelineTransformerBlockList(pair_model(()), num_hidden=2).eval()
    around = bmt.TransformerBlockList(
        [bmt.Block(torch.nn.Linear(WIDTH, WIDTH)), bmt.Block(torch.nn.Linear(WIDTH, WIDTH))]
    )
    params = [*blocks.parameters(), *around.parameters()]
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(params, lr=0.1))
    for _ in range(2):
        manager.zero_grad()
        for part in range(3):
            x = torch.randn(
                2, WIDTH, generator=torch.Generator().manual_seed(bmt.rank() + 7 * part)
            )
            x, _ = blocks(around(x), torch.ones(2, 1))
            manager.backward(around(x).square().mean(), reduce_gradients=not defer or part == 2)
        manager.step()
    return {
        **blocks.state_dict(),
        **{"around." + name: value for name, value in around.state_dict().items()},
    }


def test_gradients_reduced_late_and_blocks_around_the_pipeline() -> None:
    at_once, late = (
        run_ranks(deferred, 2, False, init={"pipe_size": 2}),
        run_ranks(deferred, 2, True, init={"pipe_size": 2}),
    )
    for name, value in at_once[0].items():
        close(late[0][name], value)
        assert torch.equal(late[0][name], late[1][name])


def wrong(case: str) -> None:
    make_list = bmt.PipelineTransformerBlockList
    x, mask, shift = torch.randn(3, SEQ, WIDTH), torch.ones(3, SEQ), torch.zeros(WIDTH)
    if case == "stages":
        with pytest.raises(ConfigurationError, match=r"2 stages for 1 layers"):
            make_list([Layer()])
    elif case == "shared":
        layer = Layer()
        with pytest.raises(
            ParameterError, match=r"'up.weight' is shared with another pipeline stage"
        ):
            make_list([layer, layer])
    blocks = make_list([Layer() for _ in range(LAYERS)])
    if case == "rows":  # 2 ranks with 3 rows in 4 micro-batches
        with pytest.raises(
            ConfigurationError, match=r"3 rows each cannot be cut into 4 micro-batches"
        ):
            blocks(x, mask, shift)
    elif case == "shapes":
        x = x[: 2 + 2 * bmt.rank()].repeat(2, 1, 1)
        with pytest.raises(
            ConfigurationError, match=r"rank 0 .*tensor \(4, 3, 8\).*rank 1 .*tensor \(6, 3, 8\)"
        ):
            blocks(x, torch.ones(x.shape[:2]), shift)
    elif case == "one rank":
        with pytest.raises(ConfigurationError, match=r"0 positional arguments.*\(on rank 1\)"):
            _ = blocks(x[:2], mask[:2], shift) if bmt.rank() == 0 else blocks()
    elif case == "unknown name":
        with pytest.raises(
            ConfigurationError,
            match=r"batch_related has 'maks': expected positions 0 to 1 .*or names of",
        ):
            blocks(x, mask, shift, batch_related=["maks"])
    elif case == "no rows":
        with pytest.raises(
            ConfigurationError,
            match=r"batch_related has 1, a tensor of shape \(8,\): expected 3 rows",
        ):
            blocks(x, mask, shift, batch_related=[0, 1])
    elif case == "scalar":
        with pytest.raises(ConfigurationError, match="hidden argument 0 is float"):
            blocks(1.0, mask, shift)
    elif case == "states":
        narrowing = make_list(
            [torch.nn.Linear(*sizes) for sizes in ((8, 6), (6, 6), (6, 6), (6, 6))]
        )
        with pytest.raises(
            ConfigurationError, match=r"\(1, 3, 8\).*before one block and \(1, 3, 6\)"
        ):
            narrowing(x[:2], return_hidden_states=True)
        assert narrowing(x[:2]).shape == (2, SEQ, 6)
    out = blocks(x[:2], mask[:2], shift)  # goes on after the error
    assert out.shape == (2, SEQ, WIDTH)


@pytest.mark.parametrize(
    "case",
    [
        "stages",
        "shared",
        "rows",
        "shapes",
        "one rank",
        "unknown name",
        "no rows",
        "scalar",
        "states",
    ],
)
def test_bad_input_is_an_error_on_every_rank(case: str) -> None:
    run_ranks(wrong, 2, case, init={"pipe_size": 2, "num_micro_batches": 4})


def marked() -> None:
    """Rows as many as features: without the mark the shift would be taken for one value per
    sample.
    """
    torch.manual_seed(0)
    layer, x = Layer(), torch.randn(WIDTH, SEQ, WIDTH)
    blocks = bmt.PipelineTransformerBlockList([layer, Layer()])
    mask, shift = torch.ones(WIDTH, SEQ), torch.randn(WIDTH)
    whole = [
        bmt.distributed.all_gather(x).flatten(0, 1),
        bmt.distributed.all_gather(mask).flatten(0, 1),
    ]
    torch.manual_seed(0)
    expected = whole[0]
    plain_layers = [Layer()]
    torch.randn(WIDTH, SEQ, WIDTH)
    plain_layers.append(Layer())
    for plain_layer in plain_layers:
        expected = plain_layer(expected, whole[1], shift)
    close(blocks(x, mask, shift, batch_related=[0]), expected.chunk(2)[bmt.rank()])


def test_the_caller_may_say_what_has_rows() -> None:
    run_ranks(marked, 2, init={"pipe_size": 2})


class Simple(torch.nn.Module):
    """One layer that adds the other argument, or ignores it."""

    def __init__(self, adds: bool = True) -> None:
        super().__init__()
        self.inner, self.adds = torch.nn.Linear(WIDTH, WIDTH), adds

    def forward(self, x: torch.Tensor, more: torch.Tensor | None = None) -> torch.Tensor:
        return x + torch.tanh(self.inner(x if more is None or not self.adds else x + more))


def simple_layers(count: int, frozen: bool = False) -> list[torch.nn.Module]:
    return [Simple().requires_grad_(not frozen) for _ in range(count)]


def seeded(seed: int) -> torch.Tensor:
    """Rows of two ranks."""
    return torch.randn(2 * ROWS, SEQ, WIDTH, generator=torch.Generator().manual_seed(seed))


def run_all(parts: list[Any], x: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Layers before, in and after the pipeline; those in it get `more`."""
    for index, part in enumerate(parts):
        for layer in part if isinstance(part, list) else [part]:
            x = layer(x, more) if index == 1 else layer(x)
    return x.square().sum()


def input_gradients(case: str) -> list[tuple[torch.Tensor, ...]]:
    torch.manual_seed(3)
    before = bmt.TransformerBlockList(simple_layers(2))
    inside = bmt.PipelineTransformerBlockList(simple_layers(4, frozen="frozen" in case))
    parts, found = [before, inside, bmt.TransformerBlockList(simple_layers(2))], []
    for step in range(3):  # the first passes teach the order of gathers that the later ones follow
        x, more = (seeded(seed).chunk(2)[bmt.rank()].requires_grad_() for seed in (step, step + 10))
        loss = run_all(parts, x, more)
        if case == "both":
            found.append(torch.autograd.grad(loss, [x, more]))
        elif case == "one":
            found.append(torch.autograd.grad(loss, [more]))
        else:
            loss.backward(retain_graph="retained" in case)
            if "retained" in case:
                loss.backward()
            found.append((x.grad, more.grad))  # type: ignore[arg-type]  # backward has been here
    return found


@pytest.mark.parametrize("case", ["both", "one", "frozen", "retained", "frozen retained"])
def test_gradients_of_inputs_with_blocks_around_the_pipeline(case: str) -> None:
    results = run_ranks(input_gradients, 2, case, init={"pipe_size": 2, "num_micro_batches": 4})
    torch.manual_seed(3)
    parts = [simple_layers(2), simple_layers(4), simple_layers(2)]
    for step in range(3):
        x, more = seeded(step).requires_grad_(), seeded(step + 10).requires_grad_()
        grads = torch.autograd.grad(
            run_all(parts, x, more) * (2 if "retained" in case else 1),
            [more] if case == "one" else [x, more],
        )
        for rank, result in enumerate(results):
            for grad, expected in zip(result[step], grads, strict=True):
                torch.testing.assert_close(grad, expected.chunk(2)[rank], rtol=1e-4, atol=1e-5)


class Shifted(torch.nn.Module):
    """Layers of which some use what a parameter outside of them gives."""

    def __init__(self, users: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.shift = torch.nn.Parameter(torch.randn(WIDTH))
        self.layers: Any = torch.nn.ModuleList([Simple(adds=index in users) for index in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shift = torch.sin(self.shift).view(1, 1, WIDTH)
        for layer in self.layers if isinstance(self.layers, torch.nn.ModuleList) else [self.layers]:
            x = layer(x, shift)
        return x.square().mean()


def shifted(users: tuple[int, ...], sharded: bool) -> dict[str, torch.Tensor | None]:
    model = Shifted(users)
    model.layers = bmt.PipelineTransformerBlockList(model.layers)
    if sharded:
        model = bmt.BMTrainModelWrapper(model)
    manager = bmt.optim.OptimManager()
    manager.add_optimizer(torch.optim.SGD(model.parameters(), lr=1.0))
    manager.backward(model(seeded(0).chunk(2)[bmt.rank()]))
    manager.step()
    grad = dict(model.named_parameters())["shift"].grad
    return {**model.state_dict(), "grad": None if grad is None else local_of(grad)}


@pytest.mark.parametrize("users", [(0,), (3,), ()])
@pytest.mark.parametrize("sharded", [True, False])
def test_an_argument_that_some_stages_ignore(users: tuple[int, ...], sharded: bool) -> None:
    model = Shifted(users)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(seeded(0)).backward()
    optimizer.step()
    for result in run_ranks(shifted, 2, users, sharded, init={"pipe_size": 2}):
        assert (result.pop("grad") is None) == (model.shift.grad is None)
        for name, value in model.state_dict().items():
            close(result[name], value)


class Counting(torch.nn.Module):
    """A layer with running statistics, in a block of its own."""

    def __init__(self, wrap: Any) -> None:
        super().__init__()
        self.norm, self.inside = torch.nn.BatchNorm1d(WIDTH), wrap(torch.nn.Linear(WIDTH, WIDTH))
        self.register_buffer("last", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x.detach().mean()
        return x + self.inside(self.norm(x))


def counting(file: str) -> dict[str, torch.Tensor]:
    torch.manual_seed(6)
    blocks = bmt.PipelineTransformerBlockList([Counting(bmt.Block) for _ in range(4)])
    for step in range(2):
        blocks(seeded(step)[:, 0].chunk(2)[bmt.rank()]).square().sum().backward()
    bmt.save(blocks, file)
    return on_cpu(blocks.state_dict())


def test_buffers_are_saved_as_their_stage_has_them_and_blocks_may_contain_blocks(
    tmp_path: pathlib.Path,
) -> None:
    results = run_ranks(
        counting, 2, str(tmp_path / "model.pt"), init={"pipe_size": 2, "num_micro_batches": 2}
    )
    torch.manual_seed(6)
    layers = torch.nn.ModuleList([Counting(lambda module: module) for _ in range(4)])
    for step in range(2):
        for rows in seeded(step)[:, 0].chunk(2):
            x = rows
            for layer in layers:
                x = layer(x)
    for found in (*results, torch.load(tmp_path / "model.pt", weights_only=True)):
        assert found.keys() == layers.state_dict().keys()
        for name, value in layers.state_dict().items():
            close(found[name], value)


class Adapted(torch.nn.Module):
    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner, self.more = inner, torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.more(x)


def adapted() -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    torch.manual_seed(8)
    blocks = bmt.PipelineTransformerBlockList(simple_layers(4))
    model = bmt.BMTrainModelWrapper(torch.nn.Sequential(blocks))
    for layer in blocks:
        layer.inner = Adapted(layer.get_submodule("inner"))
    bmt.BMTrainModelWrapper(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(seeded(0).chunk(2)[bmt.rank()]).square().sum().backward()
    optimizer.step()
    return on_cpu(blocks.state_dict()), {
        name: local_of(param).numel() for name, param in blocks.named_parameters()
    }


def test_modules_put_in_later_join_the_stage() -> None:
    results = run_ranks(adapted, 2, init={"pipe_size": 2})
    torch.manual_seed(8)
    layers = torch.nn.ModuleList(simple_layers(4))
    for layer in layers:
        layer.inner = Adapted(layer.inner)  # type: ignore[arg-type]  # a module
    optimizer = torch.optim.SGD(layers.parameters(), lr=0.1)
    x = seeded(0)
    for layer in layers:
        x = layer(x)
    x.square().sum().backward()
    optimizer.step()
    for values, _ in results:
        for name, value in layers.state_dict().items():
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)
    for name, param in layers.named_parameters():
        assert [sizes[name] for _, sizes in results] == (
            [param.numel(), 0] if name[0] in "01" else [0, param.numel()]
        )
