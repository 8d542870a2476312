"""All random states that a training program may draw from, as one value to keep."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bmtrain.runtime.world import device


def random_states() -> dict[str, Any]:
    """Python's, numpy's and torch's random states, in types that a weights-only load accepts."""
    kind, keys, place, has_gauss, gauss = np.random.get_state(legacy=True)
    states: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(keys).astype(np.int64)),
            place,
            has_gauss,
            gauss,
        ),
        "cpu": torch.get_rng_state(),
    }
    if device().type != "cpu":
        states["device"] = torch.cuda.get_rng_state(device())
    return states


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put back what `random_states` returned; a state of a device that is not there is left out."""
    random.setstate(states["python"])
    kind, keys, place, has_gauss, gauss = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), place, has_gauss, gauss))
    torch.set_rng_state(states["cpu"])
    if "device" in states and device().type != "cpu":
        torch.cuda.set_rng_state(states["device"], device())
