"""Errors that users meet.

Every message names the thing, what was got, what was expected and the remedy.
"""

from __future__ import annotations


class NotInitializedError(RuntimeError):
    """Something that needs the process group was used before `init_distributed`."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs the process group: call bmtrain.init_distributed() at the start "
            "of the program."
        )


class ConfigurationError(ValueError):
    """An argument or a combination of arguments that cannot work."""


class ParameterError(ValueError):
    """A parameter that cannot be sharded, initialised, loaded or optimised as asked."""


class CheckpointError(RuntimeError):
    """A file that cannot be written, read or matched to the model.

    Raised on every rank when it failed on one.
    """


class RemovedError(AttributeError):
    """A name of BMTrain that has nothing to do here was used.

    An AttributeError, so that programs can ask whether it is there.
    """

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name} is a part of BMTrain that has no meaning here: {remedy}")


class StaleParameterError(RuntimeError):
    """Parameters changed between the forward pass that used them and its backward pass."""


class RecomputationError(RuntimeError):
    """A forward pass cannot be computed again in backward as it was: something that it read has
    changed, or cannot be followed.
    """


class RanksPartedError(RuntimeError):
    """Ranks did different things, or one of them did not come; the message says what each did last.

    Raised on all of them.
    """
