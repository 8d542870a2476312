"""`bmtrain.inspect.format`: `format_summary` of inspect/statistics.py."""

from bmtrain.inspect.statistics import format_summary

__all__ = ["format_summary"]
