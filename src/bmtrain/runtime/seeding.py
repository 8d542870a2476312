"""Random state: seed a run; read, write and compare generator states."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from typing import Any

import torch


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), random, and numpy if the program has imported it."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


# Turns the number under which the CPU's generator knows its seed into another; the low 32 bits, of
# which programs seed numpy, stay.
_MARK = 0x6D61736B << 32


def seed_run(seed: int) -> None:
    """`seed_everything` that `seed_apart` recognises while the program does not seed torch itself.

    The numbers that are drawn are those of `seed`; `torch.initial_seed()` shows the mark.
    """
    seed_everything(seed)
    _rename_seed(torch.initial_seed() ^ _MARK)


def seed_apart(seed: int, place: int, device: torch.device) -> None:
    """Let `device`'s generator draw the numbers of `seed + place` after `seed_run(seed)`.

    At place 0 it goes on as it was. On a GPU the CPU's generator stays alike on all ranks. Nothing
    happens where the program has seeded torch itself, or has restored a state.
    """
    own = torch.Generator().manual_seed(seed).initial_seed()  # torch maps negative ones
    if torch.initial_seed() != own ^ _MARK:
        return
    _rename_seed(own)
    if place:
        drawn_from = default_generators(device)[0 if device.type == "cpu" else 2]
        drawn_from.manual_seed((own + place) % 2**64)


def _rename_seed(number: int) -> None:
    state = torch.get_rng_state()  # begins with the seed, of which nothing is drawn any more
    state[:8] = torch.tensor([number - 2**64 * (number >= 2**63)]).view(torch.uint8)
    torch.set_rng_state(state)


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Torch's random state on the CPU and on `device`."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `get_random_state` returned."""
    torch.set_rng_state(state["cpu"])
    if "device" in state:
        torch.cuda.set_rng_state(state["device"], device)


def default_generators(device: torch.device | None) -> Sequence[Any]:
    """The default generators: the CPU's, the device's, `random`, and numpy's if it is imported."""
    found: list[Any] = [torch.default_generator, random]
    if device is not None and device.type != "cpu":
        found.append(
            torch.cuda.default_generators[
                torch.cuda.current_device() if device.index is None else device.index
            ]
        )
    numpy = sys.modules.get("numpy")
    return found if numpy is None else [*found, numpy.random]


def is_generator(value: object) -> bool:
    """Whether `value` is a generator of torch, `random` or numpy whose state can be read."""
    if isinstance(value, torch.Generator | random.Random):
        return not isinstance(value, random.SystemRandom)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return False
    return isinstance(
        value, numpy.random.Generator | numpy.random.RandomState | numpy.random.BitGenerator
    )


def read_generator(generator: Any) -> Any:
    """The state of a generator.

    Takes any element of `default_generators`, and any object for which `is_generator` is true.
    """
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    # numpy; the legacy form of the state takes twice as long to read
    get_state = getattr(generator, "get_state", None)
    return _bits_of(generator).state if get_state is None else get_state(legacy=False)


def is_same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal; False where a comparison would be slow."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, tuple):
        return bool(a == b)
    inner = a.get("state") if isinstance(a, dict) else None
    if not isinstance(inner, dict) or "key" not in inner:  # not the Mersenne Twister
        return False
    same = (
        all(a.get(name) == b.get(name) for name in ("has_gauss", "gauss"))
        and inner["pos"] == b["state"]["pos"]
    )
    return same and bool((inner["key"] == b["state"]["key"]).all())


def write_generator(generator: Any, state: Any) -> None:
    """Restore a state that `read_generator` returned."""
    if generator is random or isinstance(generator, random.Random):
        generator.setstate(state)
    elif getattr(generator, "set_state", None) is not None:
        generator.set_state(state)
    else:
        _bits_of(generator).state = state


def _bits_of(generator: Any) -> Any:
    return getattr(generator, "bit_generator", generator)
