"""Modules that are imported as `bmtrain.inspect.*`."""
