"""The forward passes of a generation on a rank whose weights are whole."""

from __future__ import annotations

import torch

from bmtrain.graphs.repeated import Recorder, Repeated, recorder_for
from bmtrain.torch_internals import has_global_module_hooks, has_hooks, num_dispatch_modes
from model_center.generation.weights import Weights, without_plans
from model_center.model.decoding import Decoding, Work

# The fewest new tokens for which recording a step pays.
FEWEST_TOKENS = 8


class Passes:
    """Passes that compute with `weights`, of which steps are recorded where they can be.

    Args:
        model: the model, whose hooks a recording would not call.
        decoding: its part of the work.
        weights: whole, and held as long as there are passes.

    Attributes:
        is_watched: whether the model has hooks, or torch a mode that looks at operations.
    """

    def __init__(self, model: torch.nn.Module, decoding: Decoding, weights: Weights) -> None:
        self._decoding, self._weights = decoding, weights
        self._device = decoding.prefix.device
        self.is_watched = (
            has_global_module_hooks()
            or num_dispatch_modes() > 0
            or any(has_hooks(module) for module in model.modules())
        )
        self._recorder: Recorder | None = None
        self._repeated: Repeated | None = None
        self._addresses: list[int] = []

    def first(self, num_new: int, copies: int) -> torch.Tensor:
        """Run the prompts, of which `copies` each are to be continued by `num_new` tokens.

        Returns scores (rows, vocab) of what follows.
        """
        decoding = self._decoding
        scores = self._within(lambda: decoding.start(num_new))().repeat_interleave(copies, 0)
        decoding.expand(copies)
        if num_new >= FEWEST_TOKENS and not self.is_watched:
            self._recorder = recorder_for(self._device)
        decoding.fix(self._repeat)
        self._addresses = self._weights.addresses()
        return scores

    def next(self, tokens: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
        """Add a token to each row, as in Decoding."""
        if self._repeated is not None:
            return self._decoding.step(tokens, parents)
        return self._within(lambda: self._decoding.step(tokens, parents))()

    def renew(self) -> None:
        """Before a step, where the program may have put other weights in the place of the old."""
        addresses = self._weights.addresses()
        if addresses != self._addresses and self._repeated is not None:
            self._repeated.forget()
        self._addresses = addresses

    def end(self) -> None:
        """Give back the memory of the recording and of the cache: there are no further passes."""
        if self._repeated is not None:
            self._repeated.forget()
        # it refers to this object: memory would wait for Python's collector
        self._repeated = None
        self._decoding.end()

    def _repeat(self, work: Work) -> Work:
        self._repeated = Repeated(self._within(work), self._recorder)
        return self._repeated

    def _within(self, work: Work) -> Work:
        def bound() -> torch.Tensor:
            with self._weights.bound(), without_plans(self._device):
                return work()

        return bound
