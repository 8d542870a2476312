"""What the tests of files and checkpoints share: a training beside one of plain PyTorch, and steps
of a write that fail or wait.
"""

import contextlib
import copy
import threading

import pytest
import torch
from tests.ranks import models

import bmtrain as bmt

DIM = 20
NO_SPACE = OSError(28, "No space left on device")


class Twin:
    """A model trained on all ranks, and the same one in one process of plain PyTorch."""

    def __init__(self, kind=bmt.optim.AdamOptimizer, wrap=bmt.BMTrainModelWrapper, **options):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(DIM, DIM) for _ in range(2)]
        self.plain = torch.nn.Sequential(*layers)
        self.model = wrap(copy.deepcopy(self.plain))
        self.params = list(self.model.parameters())
        reference = kind if kind.__module__.startswith("torch") else torch.optim.AdamW
        settings = {"lr": 0.05, "weight_decay": 0.1, **options}
        self.stepper = reference(self.plain.parameters(), **settings)
        self.manager = bmt.optim.OptimManager()
        self.manager.add_optimizer(kind(self.params, **settings))
        self.num_steps = 0

    def step(self, what=""):
        """A step of both, after which all values are the same."""
        x = torch.randn(6, DIM, generator=torch.Generator().manual_seed(self.num_steps))
        self.num_steps += 1
        self.stepper.zero_grad()
        self.plain(x).square().mean().backward()
        self.stepper.step()
        self.manager.zero_grad()
        own = models.own(x)
        self.manager.backward(self.model(own).square().mean())
        self.manager.step()
        self.compare(what)

    def compare(self, what, tolerance=1e-5):
        models.assert_same_state(self.model, self.plain, f"after {what}", tolerance)

    def reference(self):
        """A copy of the plain side as it is now."""
        return copy.deepcopy((self.plain, self.stepper, self.num_steps))

    def follow(self, reference, what):
        """Be where that one was: values now, and two steps from there."""
        self.plain, self.stepper, self.num_steps = reference
        self.compare(what)
        for number in (1, 2):
            self.step(f"{what} and {number} steps")


@contextlib.contextmanager
def failing(owner, name, error, on=0):
    """A function raises on one rank."""

    def fail(*args, **options):
        raise type(error)(*error.args)  # anew: a global one would keep its frames

    with pytest.MonkeyPatch.context() as patch:
        if bmt.rank() == on:
            patch.setattr(owner, name, fail)
        yield


class Held:
    """A step of writing, a function of `owner`, that stops until `go_on`."""

    def __init__(self, owner, name):
        self.owner, self.name = owner, name
        self.reached, self.let = threading.Event(), threading.Event()

    @contextlib.contextmanager
    def patched(self):
        original = getattr(self.owner, self.name)

        def held(*args):
            self.reached.set()
            assert self.let.wait(30), "nobody let the writer go on"
            return original(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.owner, self.name, held)
            yield

    def go_on(self, after=0.0):
        """At once, or after some seconds from now."""
        threading.Timer(after, self.let.set).start()
