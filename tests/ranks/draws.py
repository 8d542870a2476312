"""Steps of blocks from seeds and from restored states of the generators, compared number by
number.
"""

import dataclasses
import random

import torch
from tests.ranks import models

import bmtrain as bmt
from bmtrain.runtime import seeding

SEED = 7
State = dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step has computed, and the generators' states after its forward pass."""

    value: torch.Tensor
    gradients: list[torch.Tensor]
    state: State


def step(blocks, x, start):
    """A forward and a backward pass, the generators seeded or restored before.

    Backward must leave them alone, and so Python's.
    """
    x = x.clone().requires_grad_()
    blocks.zero_grad()
    if isinstance(start, int):
        torch.manual_seed(start)
    else:
        seeding.set_random_state(start, bmt.device())
    of_python = random.getstate()
    h = x * 1.5
    for block in blocks:
        h = block(h)
    state = seeding.get_random_state(bmt.device())
    h.float().square().mean().backward()
    assert x.grad is not None
    after = seeding.get_random_state(bmt.device())
    assert all(torch.equal(after[name], state[name]) for name in state), (
        "backward has drawn from the program's generators"
    )
    assert random.getstate() == of_python, "Python's generator has moved"
    return Step(
        h.detach(),
        [x.grad, *(p.grad.clone() for p in blocks.parameters() if p.grad is not None)],
        state,
    )


def assert_alike(got, want, what, tolerance, of_value=0.0):
    """Generators went as far; values and gradients are the same up to a tolerance, of the largest.

    Other masks are off by 1.
    """
    for name, state in want.state.items():
        assert torch.equal(got.state[name], state), (
            f"{what}: the generator {name!r} ended elsewhere, {_words(got)} for {_words(want)}"
        )
    models.assert_same(got.value, want.value, f"{what}: value", of_value)
    for number, (mine, theirs) in enumerate(zip(got.gradients, want.gradients, strict=True)):
        models.assert_same(mine, theirs, f"{what}: gradient {number}", tolerance)


def assert_repeatable(blocks, inputs, what, tolerance=0.0):
    """Every input twice from a seed, the first time compiling; then twice from the state after
    that; at last the first input again.

    Values must be the same bits, gradients up to the tolerance (kernels of attention may add in any
    order). Returns the first step.
    """
    firsts = []
    for number, x in enumerate(inputs):
        name = f"{what}, input {number} {tuple(x.shape)}"
        firsts.append(step(blocks, x, SEED))
        assert_alike(step(blocks, x, SEED), firsts[-1], f"{name}, seeded a second time", tolerance)
        onward = step(blocks, x, firsts[-1].state)
        assert not torch.equal(onward.value, firsts[-1].value), f"{name}: every step draws the same"
        assert_alike(step(blocks, x, firsts[-1].state), onward, f"{name}, restored", tolerance)
    assert_alike(
        step(blocks, inputs[0], SEED),
        firsts[0],
        f"{what}, after other inputs, seeded again",
        tolerance,
    )
    return firsts[0]


def _words(one):
    """The last bytes of the states: on a GPU seed and offset."""
    return ", ".join(
        f"{name}: {state[-16:].view(torch.int64).tolist()}" for name, state in one.state.items()
    )
