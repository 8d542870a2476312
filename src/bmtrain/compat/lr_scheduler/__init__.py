"""Modules that are imported as `bmtrain.lr_scheduler.*`."""
