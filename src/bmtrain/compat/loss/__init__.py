"""Modules that are imported as `bmtrain.loss.*`."""
