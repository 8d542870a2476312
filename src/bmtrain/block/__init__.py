"""Modules that are gathered together: blocks, lists of blocks, and the wrapper of whole models."""
