"""Modules importable as `bmtrain.distributed.*`."""
