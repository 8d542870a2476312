"""Errors that users meet: all are a `bmtrain.errors.BMTrainError`.

Every message names the thing, what was got, what was expected and the remedy.
"""

from __future__ import annotations

from bmtrain.errors import BMTrainError


class ConfigError(BMTrainError, ValueError):
    """A configuration, or an argument of a layer or model, that cannot work."""


class ArgumentError(ConfigError, TypeError):
    """An argument that a configuration does not know."""


class InputError(BMTrainError, ValueError):
    """Arguments of a forward pass or of a generation that do not fit the model."""


class IdentifierError(BMTrainError, ValueError):
    """A name of no known model, dataset or task."""


class DataError(BMTrainError, ValueError):
    """Data that is missing, damaged or of another format; the message names the file and place."""


class WeightsError(BMTrainError, RuntimeError):
    """Weights that cannot be found, read, written or matched to the model."""


class ResumeError(BMTrainError, ValueError):
    """A checkpoint of another run than was asked for, or one that `--resume` did not ask for."""


class DivergenceError(BMTrainError, RuntimeError):
    """Losses that stay far above those before. Raised on every rank."""
