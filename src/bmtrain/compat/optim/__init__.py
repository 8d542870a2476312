"""Modules that are imported as `bmtrain.optim.*`."""
