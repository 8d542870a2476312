"""Stages of blocks on different ranks."""
