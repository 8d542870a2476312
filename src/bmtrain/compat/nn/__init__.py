"""Modules importable as `bmtrain.nn.*`."""
