"""Modules that are imported as `bmtrain.nn.*`."""
