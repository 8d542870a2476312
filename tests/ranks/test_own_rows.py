"""Parameters outside of blocks meet tensors of each rank's rows, of their own shape too: values and
gradients of one process.
"""

import pytest
import torch
from tests.ranks.runner import on_ranks
from tests.ranks.test_whole_parameters import doubles, whole
from torch import nn

import bmtrain as bmt
from bmtrain.errors import RanksDivergedError

DIM = 4


class Model(nn.Module):
    """Its own parameters, some of the shape of one row or of one batch."""

    def __init__(self, program):
        super().__init__()
        torch.manual_seed(1)
        self.linear, self.program = nn.Linear(DIM, DIM), program
        self.position, self.row = (
            nn.Parameter(torch.randn(1, 3, DIM)),
            nn.Parameter(torch.randn(DIM)),
        )
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.program(self, x)


def gate(x):
    return torch.sigmoid(x.mean())


PROGRAMS = {
    "positions of a batch of one": lambda m, x: m.linear(x + m.position),
    "subtracted": lambda m, x: m.linear(m.position - x),
    "a row": lambda m, x: x.mean((0, 1)) * m.row,
    "a gated weight": lambda m, x: nn.functional.linear(x, m.linear.weight * gate(x)),
    "a gated number": lambda m, x: x.mean() * m.row + m.scale * gate(x),
    "divided": lambda m, x: m.row / (1.5 + gate(x)),
    "where": lambda m, x: torch.where(x[0, 0] > 0, m.row, -m.row),
    "addcmul": lambda m, x: torch.addcmul(m.row, x[0, 0], m.row),
    "lerp": lambda m, x: torch.lerp(m.row, x[0, 0], gate(x)),
    "lists": lambda m, x: torch.stack(torch._foreach_mul([m.row, m.row], [x[0, 0], x[0, 1]])),
}


def rows():
    """One of each rank: (ranks, 1, 3, DIM)."""
    made = torch.randn(bmt.world_size(), 3, DIM, generator=torch.Generator().manual_seed(3))
    return made[:, None]


@on_ranks(3)
def test_each_rank_computes_with_its_own_rows():
    with doubles():
        for name, program in PROGRAMS.items():
            plain, sharded = Model(program), bmt.BMTrainModelWrapper(Model(program))
            outputs, out = [plain(x) for x in rows()], sharded(rows()[bmt.rank()])
            torch.stack([each.square().sum() for each in outputs]).sum().backward()
            out.square().sum().backward()
            torch.testing.assert_close(whole(out), outputs[bmt.rank()])
            for p, q in zip(sharded.parameters(), plain.parameters(), strict=True):
                assert (p.grad is None) == (q.grad is None), name
                if q.grad is not None:
                    torch.testing.assert_close(
                        whole(p.grad), q.grad, rtol=1e-9, atol=1e-12, msg=f"{name}: {{}}".format
                    )


# By the function that has the number: what a program does with the number of tokens of its rows.
OF_TOKENS = {
    "mul": lambda m, tokens: nn.functional.linear(torch.ones(DIM), m.weight * tokens),
    "mul_": lambda m, tokens: m.weight.grad.mul_(1 / tokens),
    "div_": lambda m, tokens: m.weight.grad.div_(torch.tensor(tokens)),
    "_foreach_div_": lambda m, tokens: torch._foreach_div_([m.weight.grad, m.bias.grad], tokens),
    "add_": lambda m, tokens: m.weight.data.add_(m.weight.grad, alpha=-0.1 / tokens),
    "fill_": lambda m, tokens: tokens > 2 and m.weight.grad.fill_(torch.inf),
}


@pytest.mark.parametrize("name", OF_TOKENS)
@on_ranks(2)
def test_numbers_that_differ_between_ranks_are_refused(name):
    """A number on the host may come of the rows, too."""
    model = bmt.BMTrainModelWrapper(Model(PROGRAMS["a row"]))
    linear = model.get_submodule("linear")
    linear(rows()[bmt.rank()]).sum().backward()
    with pytest.raises(RanksDivergedError, match=rf"\b{name} with "):
        OF_TOKENS[name](linear, bmt.rank() + 2.0)
        bmt.sum_loss(torch.zeros(()))  # whatever comes next
