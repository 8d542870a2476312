"""`bmtrain.inspect.format`: `format_summary` of inspect/summary.py."""

from bmtrain.inspect.summary import format_summary

__all__ = ["format_summary"]
