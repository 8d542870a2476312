"""Session: the KV cache and the recorded decode step that one generation leaves to the next."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from model_center.errors import ConfigError
from model_center.generation.fingerprint import HostStateFingerprint
from model_center.generation.recording import ReplayedWork
from model_center.model.decoding import FixedPrompts, FixedSteps


class RecordedPrefill(NamedTuple):
    """The prefill of the last shape of prompts.

    Attributes:
        prompts: its work.
        repeated: its recording, once the shape has come twice.
    """

    prompts: FixedPrompts
    repeated: ReplayedWork


class RecordedSteps(NamedTuple):
    """Recorded decode steps, and what must be unchanged for a replay to be valid.

    Attributes:
        steps: with the memory of the cache.
        repeated: their recording.
        first: the prefill, recorded under the same fingerprint; None for none.
        places: where the weights were, and on which stream.
        fingerprint: of the host, of which the recording is too.
    """

    steps: FixedSteps
    repeated: ReplayedWork
    first: RecordedPrefill | None
    places: Sequence[object]
    fingerprint: HostStateFingerprint


class Session:
    """Generations that reuse the KV cache's memory and the recorded decode step of the one before.

    For a model sharded over several ranks they reuse its gathered weights too.

        with Session() as session:
            for ids in prompts:
                generate(model, ids, max_new_tokens=128, session=session)

    A generation replays them if it has the same model, the same number of rows and no more tokens
    than they have room for; otherwise they are freed before it makes its own. Between two
    generations weights may be written or replaced, and the model may be changed in any way: each
    generation sees the changes. The end of the session frees everything.

    The prefill of short prompts of one shape without padding is recorded too, from the third
    generation in a row on.

    The cache has room for up to a quarter more tokens than a generation needs, so that lengths may
    differ. Concurrent generations, two streams for example, share nothing; the session keeps those
    of the one that ends last. On the CPU nothing is recorded and no cache is kept.

    Ranks gather anew whatever any of them has written since. If one rank has no room for whole
    weights, all ranks gather block by block and free what the session holds. Each rank has a
    session of its own.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._kept: RecordedSteps | None = None
        self._memory: Sequence[object] = ()

    def __enter__(self) -> Session:
        self._is_open = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self._is_open = False
        self.free()

    def check(self) -> None:
        """Refuse to generate outside of the `with` block.

        Raises:
            ConfigError: if the session is not open.
        """
        if not self._is_open:
            raise ConfigError(
                "the session is not open: generate inside of `with Session() as session`."
            )

    def take(
        self, now: HostStateFingerprint, num_rows: int, num_tokens: int, places: Sequence[object]
    ) -> RecordedSteps | None:
        """The steps of the last generation, if they are valid for `num_rows` rows of `num_tokens`
        tokens; else None, and they are freed.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        has_room = _has_room(kept, num_rows, num_tokens)
        is_right = has_room and places == kept.places and now == kept.fingerprint
        return kept if is_right else None

    def has_room(self, num_rows: int, num_tokens: int) -> bool:
        """Whether the steps of the last generation have `num_rows` rows and room for `num_tokens`
        tokens in each; else they are freed.
        """
        if self._kept is not None and not _has_room(self._kept, num_rows, num_tokens):
            self._kept = None
        return self._kept is not None

    def hold(self, memory: Sequence[object]) -> None:
        """Keep the owner of the gathered weights; steps recorded with other weights are freed."""
        if list(memory) != list(self._memory):
            self.free()
        if self._is_open:
            self._memory = memory

    def free(self) -> None:
        """Free the recorded steps and the gathered weights."""
        self._kept, self._memory = None, ()

    @contextlib.contextmanager
    def freed_by_errors(self) -> Iterator[None]:
        """Free everything if an error is raised inside."""
        try:
            yield
        except BaseException:
            self.free()
            raise

    def leave(self, kept: RecordedSteps) -> None:
        """Keep recorded steps for the next generation; freed if the session has ended."""
        if self._is_open:
            self._kept = kept


def _has_room(kept: RecordedSteps, num_rows: int, num_tokens: int) -> bool:
    return num_rows == kept.steps.num_rows and num_tokens <= kept.steps.capacity


def round_up_capacity(num_tokens: int) -> int:
    """`num_tokens` rounded up, by less than a quarter beyond 64, so that few sizes occur."""
    step = max(16, 1 << max(0, (num_tokens - 1).bit_length() - 3))
    return -(-num_tokens // step) * step
