"""The version of both packages: the one place where it is written."""

__version__ = "2.0.0.dev0"
