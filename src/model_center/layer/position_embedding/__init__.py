"""Positions that attention adds or applies itself."""
