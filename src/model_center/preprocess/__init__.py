"""`python -m model_center preprocess`: text to token data."""

from model_center.preprocess.command import add_arguments, run

__all__ = ["add_arguments", "run"]
