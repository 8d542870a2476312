"""The process: its rank, device, groups, seeds and messages."""
