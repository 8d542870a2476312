"""Parameters that tensor ranks split: values, gradients, norms, files and optimizer states as
without the split.
"""

from typing import Any

import pytest
import torch
from tests.ranks import models
from tests.ranks.runner import run_ranks
from tests.tensors import own_slice, sharded_parameter

import bmtrain as bmt
from bmtrain.errors import ParameterError

ROWS, WIDTH, FEATURES, STEPS = 12, 6, 8, 4


class Parallel(bmt.DistributedModule):
    """tanh(norm(x) up^T) down^T on the rows of all tensor ranks; `up` is split along dim 0 and
    `down` along dim 1.
    """

    def __init__(self):
        super().__init__()
        part, new, init = FEATURES // bmt.config["tp_size"], bmt.DistributedParameter, torch.nn.init
        split: dict[str, Any] = {"init_method": init.normal_, "tp_mode": True}
        self.up = new(torch.empty(part, WIDTH), tp_split_dim=0, **split)
        self.scale = new(torch.empty(WIDTH), init_method=init.uniform_)
        self.down = new(torch.empty(WIDTH, part), tp_split_dim=1, **split)

    def forward(self, x):
        tp = bmt.config["tp_comm"]
        rows = bmt.distributed.all_gather(x * self.scale, tp).flatten(0, 1)
        out = torch.tanh(rows @ self.up.t()) @ self.down.t()
        return bmt.distributed.reduce_scatter(out, "sum", tp)


class Plain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Parameter(torch.empty(FEATURES, WIDTH).normal_())
        self.scale = torch.nn.Parameter(torch.empty(WIDTH).uniform_())
        self.down = torch.nn.Parameter(torch.empty(WIDTH, FEATURES).normal_())

    def forward(self, x):
        return torch.tanh((x * self.scale) @ self.up.t()) @ self.down.t()


def plain_model():
    torch.manual_seed(3)
    return torch.nn.Sequential(Plain(), Plain())


def build(zero_level):
    """Of blocks, or without a level of none."""
    torch.manual_seed(3)
    parts = [Parallel(), Parallel()]
    for part in parts:
        bmt.init_parameters(part)
    model: Any = torch.nn.Sequential(*parts)
    if zero_level is not None:
        model = bmt.TransformerBlockList([bmt.Block(x, zero_level=zero_level) for x in parts])
    if bmt.device().type != "cpu":  # where the same seed gives other numbers
        model.load_state_dict(plain_model().state_dict())
    return model


def adam(model, kind=bmt.optim.AdamOptimizer):
    manager = models.managed(kind(model.parameters(), lr=1e-2, weight_decay=0.01))
    return manager


def losses(model, steps):
    for step in steps:
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        own = models.own(x) if bmt.is_initialized() else x
        yield model(own.to(next(model.parameters()).device)).square().mean()


def train(model, manager, steps):
    """Norms of gradients, and whole parameters."""
    norms = []
    for loss in losses(model, steps):
        manager.zero_grad()
        manager.backward(loss)
        norms.append(float(manager.clip_grad_norm(model.parameters(), 1.0)))
        manager.step()
    params = map(sharded_parameter, model.parameters())
    return norms, [param.gather_all().detach().cpu().clone() for param in params]


def run(zero_level, folder):
    model = build(zero_level)
    start = list(model.state_dict().values()) if zero_level else []
    start = [value.clone() for value in start]
    manager = adam(model, bmt.optim.AdamOptimizer if zero_level else torch.optim.AdamW)
    trained = train(model, manager, range(STEPS))
    for suffix in ("pt", "safetensors"):
        bmt.save(model, folder / f"model.{suffix}")
    state = manager.state_dict(gather_opt=True)
    sizes = [own_slice(param).numel() for param in model.parameters()]
    return {"start": start, "trained": trained, "state": state, "sizes": sizes}


def resume(file, state):
    model = build(3)
    bmt.load(model, file)
    manager = adam(model)
    manager.load_state_dict(state)
    return train(model, manager, range(STEPS, STEPS + 3))


def plain_run(steps):
    model = plain_model()
    optimizer, norms = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01), []
    for loss in losses(model, range(steps)):
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
    return norms, [param.detach() for param in model.parameters()], optimizer


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("ranks", "tp", "zero_level", "after"),
    [(2, 2, 2, (1, 1, "pt")), (4, 2, 3, (2, 1, "safetensors")), (2, 1, None, (4, 4, "pt"))],
)
def test_split_parameters_train_as_whole_ones(ranks, tp, zero_level, after, tmp_path):
    """Files do not depend on the split: another one resumes from them."""
    norms, params, optimizer = plain_run(STEPS)
    results = run_ranks(run, ranks, zero_level, tmp_path, init={"tp_size": tp})
    for result in results:
        for value, first in zip(result["start"], plain_model().parameters(), strict=False):
            assert torch.equal(value, first)
        close(result["trained"], (norms, params))
        states = result["state"]["optimizers"][0]["state"]
        for ours, theirs in zip(states.values(), optimizer.state.values(), strict=True):
            for key in ("exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(ours[key], theirs[key], rtol=1e-5, atol=1e-7)
            assert float(ours["step"]) == STEPS
    # Each element is owned by exactly one rank.
    numels = [sum(sizes) for sizes in zip(*[result["sizes"] for result in results], strict=True)]
    assert numels == [param.numel() for param in params]
    close(list(torch.load(tmp_path / "model.pt", weights_only=True).values()), params)
    norms, params, _ = plain_run(STEPS + 3)
    size, tp, suffix = after
    args = (tmp_path / f"model.{suffix}", results[0]["state"])
    for resumed in run_ranks(resume, size, *args, init={"tp_size": tp}):
        close(resumed, (norms[STEPS:], params))


def states():
    model = build(3)
    full = {name: torch.randn_like(value) for name, value in plain_model().state_dict().items()}
    full = {name: bmt.distributed.broadcast(value, 0) for name, value in full.items()}
    model.load_state_dict(full)
    down = full["0.down"].chunk(2, 1)
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.down"):
        model.load_state_dict({**full, "0.down": down[0]})
    with pytest.raises(ParameterError, match=r"tp_split_dim is 2 .*expected 0 to 1"):
        bmt.DistributedParameter(torch.empty(2, 2), tp_mode=True, tp_split_dim=2)
    models.assert_equal(model.state_dict(), full)
    param = sharded_parameter(dict(model.named_parameters())["0.down"])
    assert param._original_shape == (WIDTH, FEATURES // 2)
    assert param._tp_original_shape == (WIDTH, FEATURES)
    assert torch.equal(param.gather(), down[bmt.config["tp_rank"]])
    slices = bmt.distributed.all_gather(param.local, bmt.config["tp_comm"])
    assert torch.equal(param.tp_gather(), slices.view(-1))


def test_whole_tensors_in_and_out():
    run_ranks(states, 4, init={"tp_size": 2})
