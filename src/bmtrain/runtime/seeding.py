"""Random state: seeding a run, and reading, setting and replaying it."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), random, and numpy if the program has imported it."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Torch's random state on the CPU and on `device`."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put back what `get_random_state` read."""
    torch.set_rng_state(state["cpu"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"], device)
