"""Session: what generations with a model leave to each other."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from model_center.errors import ConfigError
from model_center.generation.fingerprint import HostStateFingerprint
from model_center.generation.recording import Repeated
from model_center.model.decoding import FixedPrompts, FixedSteps


class First(NamedTuple):
    """The first pass of prompts of the last shape.

    Attributes:
        prompts: its work.
        repeated: its recording, once they have come twice.
    """

    prompts: FixedPrompts
    repeated: Repeated


class Kept(NamedTuple):
    """Steps that were recorded, and what must be as it was for a replay to be right.

    Attributes:
        steps: with the memory of the cache.
        repeated: their recording.
        first: the first pass, recorded under the same fingerprint; None for none.
        places: where the weights were, and on which stream.
        fingerprint: of the host, of which the recording is too.
    """

    steps: FixedSteps
    repeated: Repeated
    first: First | None
    places: Sequence[object]
    fingerprint: HostStateFingerprint


class Session:
    """Generations that leave the cache's memory and the recorded step to the next one; and, of a
    model that several ranks share, the memory of the gathered weights.

        with Session() as session:
            for ids in prompts:
                generate(model, ids, max_new_tokens=128, session=session)

    The next one replays them if it is with the same model, has as many rows, and finds room for its
    tokens; else they are freed before it makes its own. Between two generations weights may be
    written, or put in the place of the old ones, and the model may be changed in any way: each
    computes with what is there. The end of the session frees everything.

    The first pass of short prompts of one shape, without padding, is recorded too, from their third
    generation in a row on.

    There is room for up to a quarter more tokens than a generation needs, so that lengths can
    differ. Generations at the same time, two streams for example, share nothing: the one that ends
    last leaves its own. On the CPU nothing is recorded, and no cache is kept.

    Several ranks gather anew what any of them has written since. Where one has no room for all, and
    go together therefore, each frees what it has kept. Each rank has a session of its own.
    """

    def __init__(self) -> None:
        self._is_open = False
        self._kept: Kept | None = None
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
        """Refuse to generate before its beginning or after its end.

        Raises:
            ConfigError: which says so.
        """
        if not self._is_open:
            raise ConfigError(
                "the session is not open: generate inside of `with Session() as session`."
            )

    def take(
        self, now: HostStateFingerprint, num_rows: int, num_tokens: int, places: Sequence[object]
    ) -> Kept | None:
        """What the last generation has left, if one of so many rows and tokens in each can go on
        with it; else None, and it is freed.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return None
        has_room = _has_room(kept, num_rows, num_tokens)
        is_right = has_room and places == kept.places and now == kept.fingerprint
        return kept if is_right else None

    def has_room(self, num_rows: int, num_tokens: int) -> bool:
        """Whether what the last generation has left is of so many rows and finds room for so many
        tokens in each; else it is freed.
        """
        if self._kept is not None and not _has_room(self._kept, num_rows, num_tokens):
            self._kept = None
        return self._kept is not None

    def hold(self, memory: Sequence[object]) -> None:
        """What owns the memory of gathered weights. What was kept of others is freed."""
        if list(memory) != list(self._memory):
            self.free()
        if self._is_open:
            self._memory = memory

    def free(self) -> None:
        """Keep nothing of what there is."""
        self._kept, self._memory = None, ()

    @contextlib.contextmanager
    def freed_by_errors(self) -> Iterator[None]:
        """An error inside leaves nothing."""
        try:
            yield
        except BaseException:
            self.free()
            raise

    def leave(self, kept: Kept) -> None:
        """What the next generation may go on with; freed if the session has ended."""
        if self._is_open:
            self._kept = kept


def _has_room(kept: Kept, num_rows: int, num_tokens: int) -> bool:
    return num_rows == kept.steps.num_rows and num_tokens <= kept.steps.capacity


def roomy(num_tokens: int) -> int:
    """At least so many tokens, and less than a quarter more beyond 64: few sizes in all."""
    step = max(16, 1 << max(0, (num_tokens - 1).bit_length() - 3))
    return -(-num_tokens // step) * step
