"""Errors raised to users: all are a BMTrainError, those of `model_center` too.

Every message names the object, what was given, what was expected and the remedy.
"""

from __future__ import annotations

_CONTROLS = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_HARMLESS = {code: f"\\u{code:04x}" for code in _CONTROLS if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """A text of others as a terminal may show it: what would control it is written out."""
    return text.translate(_HARMLESS)


def first_line(error: BaseException) -> str:
    """What an error says first; its type if it says nothing."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class BMTrainError(Exception):
    """What the library raises to its users; each is an error of Python's of that kind as well.

    A message may quote files and data: as a text it is `printable`.
    """

    def __str__(self) -> str:
        return printable(super().__str__())


class NotInitializedError(BMTrainError, RuntimeError):
    """An API that needs the process group was used before `init_distributed`."""

    def __init__(self, what: str) -> None:
        super().__init__(
            f"{what} needs the process group: call bmtrain.init_distributed() at the start "
            "of the program."
        )


class AlreadyInitializedError(BMTrainError, RuntimeError):
    """`init_distributed` was called while a run of this process is open."""


class ConfigurationError(BMTrainError, ValueError):
    """An argument, or a combination of arguments, that is invalid."""


class ArgumentError(ConfigurationError, TypeError):
    """An argument of another type than expected."""


class UnknownNameError(BMTrainError, KeyError):
    """A name that `bmtrain.config` or an Inspector does not have; the message lists others."""


class NonFiniteError(BMTrainError, FloatingPointError):
    """Losses or gradients that stay NaN or infinite. Raised on every rank."""


class JoinError(BMTrainError, RuntimeError):
    """The ranks of a run did not find each other in time; `init_distributed` can be tried again."""


class ParameterError(BMTrainError, ValueError):
    """A parameter that cannot be sharded, initialised, loaded or optimised as requested."""


class AddressError(ParameterError, NotImplementedError):
    """The address of a sharded tensor was asked for, and no memory holds all of it.

    A NotImplementedError too, as torch raises for tensors without memory: programs that compare
    addresses to find ties do without then.
    """


class CheckpointError(BMTrainError, RuntimeError):
    """A file that cannot be written, read or matched to the model.

    Raised on every rank when it fails on any.
    """


class DamagedError(CheckpointError):
    """A checkpoint of a run whose files are not those that were written.

    What cannot be read just now is no damage: that is a plain CheckpointError.
    """


class RemovedError(BMTrainError, AttributeError):
    """A name of BMTrain's API that has no counterpart here was used.

    An AttributeError, so that `hasattr` is False for it.
    """

    def __init__(self, name: str, remedy: str) -> None:
        super().__init__(f"{name} is a part of BMTrain that has no meaning here: {remedy}")


class MissingNameError(BMTrainError, AttributeError):
    """A module was asked for a name that it does not have; the message says which one has it."""


class StaleParameterError(BMTrainError, RuntimeError):
    """Parameters were changed between a forward pass that used them and its backward pass."""


class RecomputationError(BMTrainError, RuntimeError):
    """Recomputation in backward would not reproduce the forward pass.

    An input of the forward pass has changed since, or its changes cannot be tracked.
    """


class RanksDivergedError(BMTrainError, RuntimeError):
    """Ranks ran different collectives, or a rank never joined; the message says what each did last.

    Raised on all ranks.
    """


RanksPartedError = RanksDivergedError  # its name before
