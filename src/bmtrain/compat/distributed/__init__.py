"""Modules that are imported as `bmtrain.distributed.*`."""
