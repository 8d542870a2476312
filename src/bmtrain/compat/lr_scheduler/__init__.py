"""Modules importable as `bmtrain.lr_scheduler.*`."""
