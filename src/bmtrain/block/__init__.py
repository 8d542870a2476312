"""Blocks, lists of blocks and the wrapper of whole models: modules gathered as a unit."""
