"""Benchmarks of communication: all_gather, reduce_scatter and send_recv, from 1 KiB up."""

from bmtrain.benchmark.communication import Row, all_gather, reduce_scatter, send_recv

__all__ = ["Row", "all_gather", "reduce_scatter", "send_recv"]
