"""Modules importable as `bmtrain.loss.*`."""
