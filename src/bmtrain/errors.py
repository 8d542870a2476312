"""Errors raised to users.

Every message names the object, what was given, what was expected and the remedy.
"""

from __future__ import annotations


class NotInitializedError(RuntimeError):
    """An API that needs the process group was used before `init_distributed`."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs the process group: call bmtrain.init_distributed() at the start "
            "of the program."
        )


class ConfigurationError(ValueError):
    """An argument, or a combination of arguments, that is invalid."""


class ArgumentError(ConfigurationError, TypeError):
    """An argument of another type than expected, or one that is not known."""


class NonFiniteError(FloatingPointError):
    """Losses or gradients that stay NaN or infinite. Raised on every rank."""


class JoinError(RuntimeError):
    """The ranks of a run did not find each other in time; `init_distributed` can be tried again."""


class ParameterError(ValueError):
    """A parameter that cannot be sharded, initialised, loaded or optimised as requested."""


class AddressError(ParameterError, NotImplementedError):
    """The address of a sharded tensor was asked for, and no memory holds all of it.

    A NotImplementedError too, as torch raises for tensors without memory: programs that compare
    addresses to find ties do without then.
    """


class CheckpointError(RuntimeError):
    """A file that cannot be written, read or matched to the model.

    Raised on every rank when it fails on any.
    """


class DamagedError(CheckpointError):
    """A checkpoint of a run whose files are not those that were written.

    What cannot be read just now is no damage: that is a plain CheckpointError.
    """


class RemovedError(AttributeError):
    """A name of BMTrain's API that has no counterpart here was used.

    An AttributeError, so that `hasattr` is False for it.
    """

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name} is a part of BMTrain that has no meaning here: {remedy}")


class StaleParameterError(RuntimeError):
    """Parameters were changed between a forward pass that used them and its backward pass."""


class RecomputationError(RuntimeError):
    """Recomputation in backward would not reproduce the forward pass.

    An input of the forward pass has changed since, or its changes cannot be tracked.
    """


class RanksPartedError(RuntimeError):
    """Ranks ran different collectives, or a rank never joined; the message says what each did last.

    Raised on all ranks.
    """
