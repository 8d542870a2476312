"""Modules importable as `bmtrain.inspect.*`."""
