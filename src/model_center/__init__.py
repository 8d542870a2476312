"""Models on top of bmtrain: nothing but the version yet, the one of bmtrain, as both come in one distribution."""

from bmtrain.version import __version__

__all__ = ["__version__"]
