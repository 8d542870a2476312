"""Small models at defaults on a GPU, where they are recorded: losses and weights of plain PyTorch."""

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.ranks.runner import run_ranks
from torch import nn

import bmtrain as bmt

pytestmark = pytest.mark.gpu


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
        self.scale = 1.0

    def forward(self, x, scale=1.0):
        return super().forward(x) * self.scale * scale


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        self.tokens, self.rnn = nn.Embedding(20, 8), kind(8, 6, batch_first=True, **options)
        self.head = nn.Linear(12 if self.rnn.bidirectional else 6, 8)

    def forward(self, x):
        self.rnn.flatten_parameters()
        ids = torch.arange(20, device=x.device).view(4, 5)
        rows = nn.utils.rnn.pack_padded_sequence(self.tokens(ids), [5, 4, 4, 2], batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(rows)[0], batch_first=True)
        return self.head(hidden).mean(1) + x


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 8, generator=generator, dtype=torch.float64).to(bmt.device())


def plainly(nets, opts, step):
    (nets[0](batch(step)) - 1).square().mean().backward()
    opts[0].step()


def adversarial(nets, opts, step):
    """Another model runs, and runs backward, before the first one's backward pass."""
    maker, judge = nets
    made = maker(batch(step))
    (F.softplus(-judge(batch(step + 50))) + F.softplus(judge(made.detach()))).mean().backward()
    opts[1].step()
    judge.zero_grad()
    F.softplus(-judge(made)).mean().backward()
    opts[0].step()


def penalised(nets, opts, step):
    x = batch(step).requires_grad_()
    (slope,) = torch.autograd.grad(nets[0](x).sum(), x, create_graph=True)
    (slope.square().sum() + nets[0](batch(step)).mean()).backward()
    opts[0].step()


def gradients_of_arguments(nets, opts, step):
    """Kept by the program, while the model goes on."""
    first = nn.functional.normalize(batch(step)).requires_grad_()
    x = first * 2
    x.retain_grad()
    (nets[0](x) - 1).square().mean().backward()
    opts[0].step()
    KEPT.append(x.grad)


def numbers(nets, opts, step):
    """That vary, of the host."""
    nets[0].scale = 1 + step / 10
    (nets[0](batch(step), torch.tensor(1 + step / 7)) - 1).square().mean().backward()
    opts[0].step()


KEPT: list[Any] = []
PROGRAMS: dict[str, Any] = {
    "lstm": (plainly, lambda: [Recurrent(nn.LSTM, num_layers=2)]),
    "gru": (plainly, lambda: [Recurrent(nn.GRU, bidirectional=True)]),
    "adversarial": (adversarial, lambda: [Net(), Net()]),
    "penalised": (penalised, lambda: [Net()]),
    "gradients_of_arguments": (gradients_of_arguments, lambda: [Net()]),
    "numbers": (numbers, lambda: [Net()]),
}


def as_plain_pytorch(name):
    step_of, make = PROGRAMS[name]
    torch.manual_seed(0)
    plain = [net.double().to(bmt.device()) for net in make()]
    found = []
    warnings.filterwarnings("ignore", ".* runs (block by block|uncompiled)")  # recurrent ones
    for nets in (plain, [bmt.BMTrainModelWrapper(net) for net in copy.deepcopy(plain)]):
        KEPT.clear()
        opts = [torch.optim.AdamW(net.parameters(), lr=1e-2, eps=1e-4) for net in nets]
        for step in range(8):
            step_of(nets, opts, step)
            for net in nets:
                net.zero_grad()
        copies = copy.deepcopy(nets)
        states = [x.to("cpu") for net in (*nets, *copies) for x in net.state_dict().values()]
        found.append([*states, *[x.to("cpu") for x in KEPT]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", PROGRAMS)
def test_small_models_train_as_plain_pytorch(name):
    run_ranks(as_plain_pytorch, 1, name, device=None, timeout=200)
