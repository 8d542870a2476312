"""Runs prefill and decode steps on a rank whose weights are whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from bmtrain.torch_internals import has_global_module_hooks, hooks_of, num_dispatch_modes
from model_center.generation.fingerprint import HostStateFingerprint
from model_center.generation.recording import ReplayedWork, recorder_for
from model_center.generation.session import (
    RecordedPrefill,
    RecordedSteps,
    Session,
    round_up_capacity,
)
from model_center.generation.weights import Weights, without_plans
from model_center.model.decoding import Decoding, FixedSteps, Work

# The fewest new tokens for which recording a step pays.
FEWEST_TOKENS = 8
# The most tokens of all prompts with which a first pass waits for the host rather than the device.
MOST_OF_PROMPTS = 2048


class DecodeRunner:
    """Forward passes of one generation; decode steps are recorded and replayed where possible.

    Args:
        model: the model, whose hooks a recording would not call.
        decoding: its part of the work.
        weights: whole, and held until the runner is closed.
        session: of the generation; None if it shares nothing.

    Attributes:
        is_watched: whether the model has hooks, or torch a mode that looks at operations.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        decoding: Decoding,
        weights: Weights,
        session: Session | None = None,
    ) -> None:
        self._model, self._decoding, self._weights = model, decoding, weights
        self._device = decoding.prefix.device
        self.is_watched = (
            has_global_module_hooks()
            or num_dispatch_modes() > 0
            or any(any(hooks_of(module)) for module in model.modules())
        )
        self._session = None if self.is_watched else session
        self._repeated = ReplayedWork(None)
        self._first: RecordedPrefill | None = None
        self._steps: FixedSteps | None = None
        self._places: Sequence[object] = []
        # of the last step that was not replayed; needed by a session only
        self._fingerprint: HostStateFingerprint | None = None

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Run passes inside. On exit recording and cache are freed, or left to the session."""
        try:
            yield
            self._leave()
        except GeneratorExit:  # a stream that was abandoned
            self._leave()
            raise
        finally:
            # they refer to this object: memory would wait for Python's collector
            self._steps, self._first, self._repeated = None, None, ReplayedWork(None)
            self._decoding.end()

    def first(self, num_new: int, copies: int) -> torch.Tensor:
        """Run the prompts, of which `copies` each are to be continued by `num_new` tokens.

        Returns scores (rows, vocab) of what follows.
        """
        decoding, room = self._decoding, num_new
        self._places = self._where()
        kept = self._reusable_steps(num_new, copies)
        if kept is not None:
            self._first = self._first_of(kept, copies)
            if self._first is not None:
                return self._resumed(kept, self._first)
            room = 0  # that of the steps, to which the prompts are copied
        elif self._session is not None:
            length = decoding.prefix.shape[1]
            room = round_up_capacity(length + num_new) - length
        scores = self._within(lambda: decoding.start(room))().repeat_interleave(copies, 0)
        decoding.expand(copies)
        self._steps = decoding.fix(self._do, None if kept is None else kept.steps)
        if kept is not None and self._steps is not None:
            self._repeated, self._fingerprint = kept.repeated, kept.fingerprint
        elif kept is not None and self._session is not None:
            self._session.leave(kept)  # it is for other prompts
        elif num_new >= FEWEST_TOKENS and not self.is_watched:
            self._repeated = ReplayedWork(recorder_for(self._device))
        return scores

    def next(self, tokens: torch.Tensor, parents: torch.Tensor | None) -> torch.Tensor:
        """Add a token to each row, as in Decoding."""
        if self._steps is not None:
            return self._decoding.step(tokens, parents)
        return self._within(lambda: self._decoding.step(tokens, parents))()

    def renew(self) -> None:
        """Called before a step where the program may have replaced weights."""
        places = self._where()
        if places != self._places:
            self._repeated.forget()
            self._first = None
        self._places = places

    def _where(self) -> Sequence[object]:
        """Where the weights are, and the work that comes before that of a replay."""
        if self._device.type == "cpu":
            return self._weights.addresses()
        # a session's memory is written on one stream, and nothing orders it with others
        return [*self._weights.addresses(), torch.cuda.current_stream(self._device)]

    def _reusable_steps(self, num_new: int, copies: int) -> RecordedSteps | None:
        """Recorded steps of the session that this generation can replay."""
        if self._session is None:
            return None
        num_rows, length = self._decoding.prefix.shape
        now = HostStateFingerprint(self._model, self._device)
        return self._session.take(now, num_rows * copies, length + num_new, self._places)

    def _first_of(self, kept: RecordedSteps, copies: int) -> RecordedPrefill | None:
        """The prefill as work that can be replayed for prompts of this shape, if it can be."""
        first, decoding = kept.first, self._decoding
        if copies > 1 or decoding.prefix.numel() > MOST_OF_PROMPTS:
            return None
        prompts = decoding.prompts(kept.steps, None if first is None else first.prompts)
        if prompts is None:
            return None
        is_known = first is not None and first.prompts is prompts
        return (
            first
            if is_known
            else RecordedPrefill(prompts, ReplayedWork(recorder_for(self._device)))
        )

    def _resumed(self, kept: RecordedSteps, first: RecordedPrefill) -> torch.Tensor:
        """Scores after the prefill; the recorded steps of the earlier generation follow."""
        scores = first.repeated(self._within(first.prompts.work))
        self._decoding.resume(self._do, kept.steps)
        self._steps, self._repeated, self._fingerprint = kept.steps, kept.repeated, kept.fingerprint
        return scores

    def _leave(self) -> None:
        """Leave the recorded steps to the session."""
        if (
            self._session is not None
            and self._steps is not None
            and self._fingerprint is not None
            and self._repeated.is_recorded
        ):
            self._session.leave(
                RecordedSteps(
                    self._steps, self._repeated, self._first, self._places, self._fingerprint
                )
            )

    def _do(self, work: Work) -> torch.Tensor:
        return self._repeated(lambda: self._run_or_record(work))

    def _run_or_record(self, work: Work) -> torch.Tensor:
        """Run or record a step, without replaying."""
        if self._session is not None and self._repeated.can_record:
            self._fingerprint = HostStateFingerprint(self._model, self._device)
        return self._within(work)()

    def _within(self, work: Work) -> Work:
        def bound() -> torch.Tensor:
            with self._weights.bound(), without_plans(self._device):
                return work()

        return bound
