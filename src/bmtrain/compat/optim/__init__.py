"""Modules importable as `bmtrain.optim.*`."""
