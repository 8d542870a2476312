"""Random states: seed a run; read, write and compare the states of generators."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from bmtrain.runtime.topology import Topology
from bmtrain.torch_internals import in_transform


def seed_everything(seed: int) -> None:
    """Seed torch (all devices), random and numpy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def get_random_state(device: torch.device) -> dict[str, Any]:
    """Torch's random state on the CPU and on `device`."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device.type != "cpu":
        state["device"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore what `get_random_state` returned; a state of a device that is not there is left."""
    torch.set_rng_state(state["cpu"])
    if "device" in state and device.type != "cpu":
        torch.cuda.set_rng_state(state["device"], device)


def random_states(device: torch.device) -> dict[str, Any]:
    """Python's, numpy's and torch's random states, in types that a weights-only load accepts."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    states = get_random_state(device)
    states["python"] = random.getstate()
    states["numpy"] = (kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Put back what `random_states` returned."""
    set_random_state(states, device)
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of `device`."""
    if device.type == "cpu":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    generator: torch.Generator = torch.cuda.default_generators[index]
    return generator


# The Mersenne Twister: 624 words of 32 bits, and the place of the next.
_MT19937, _MT19937_SIZE = np.random.MT19937, 4 * 625


class Draws:
    """Which random numbers modules draw in training: others on ranks with other rows.

    Torch's default generators are the same on all ranks and stay so: models that are made later,
    orders of rows, and what a program decides by them between two layers are alike. While a block
    or a layer runs, that of the device draws numbers of this rank's own, which follow from its
    state. Tensor-parallel ranks draw the same. Once a module gets a parameter in there (adapters
    made in a first forward pass), the rest of the pass draws from the common state, so that its
    first values are alike, too.

    Attributes:
        are_own: whether the generator draws this rank's numbers now.
        generators: the default ones: the CPU's, the device's, those of `random` and of numpy.
        same_rows: whether all ranks have the rows of one process, as `verify` gives them: then all
            draw its numbers.
    """

    def __init__(self, topology: Topology, device: torch.device) -> None:
        self._salt = topology.tp_idx.to_bytes(8, "little")
        self.device, self._generator = device, generator_of(device)
        of_device = [] if device.type == "cpu" else [self._generator]
        self.generators: Sequence[Any] = [torch.default_generator, random, *of_device, np.random]
        self.are_own, self.same_rows = topology.world_size == topology.tp_size, False
        self._of_numpy: tuple[bytes, Any] | None = None  # memory and state of its generator

    def state(self, generator: Any) -> Any:
        """`read_generator`; of numpy's own the same object while nobody draws from it.

        numpy takes a fifth of a millisecond to show its state, and half of that to take one.
        """
        if generator is not np.random or not isinstance(np.random.get_bit_generator(), _MT19937):
            return read_generator(generator)
        memory = ctypes.string_at(np.random.get_bit_generator().ctypes.state_address, _MT19937_SIZE)
        if self._of_numpy is None or self._of_numpy[0] != memory:
            state = read_generator(generator)
            # A second normal number that numpy has kept is drawn without a change of the memory.
            if state["has_gauss"]:
                return state
            self._of_numpy = memory, state
        return self._of_numpy[1]

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Draw numbers of this rank's own inside.

        Afterwards the generator is as before, or one number further if any was drawn.
        """
        generator = self._generator
        # While a CUDA graph is captured no state can be read: its replay is inside of this. Nor can
        # it in a transform of torch.func.
        is_captured = self.device.type != "cpu" and torch.cuda.is_current_stream_capturing()
        if self.are_own or self.same_rows or is_captured or in_transform():
            yield
            return
        before = generator.get_state()
        state = hashlib.blake2b(before.numpy().tobytes(), digest_size=8, salt=self._salt)
        seed = int.from_bytes(state.digest(), "little")
        generator.manual_seed(seed)
        begin = generator.get_state()

        def share(*registered: Any) -> None:
            if generator.initial_seed() == seed:
                generator.set_state(before)

        hook = register_module_parameter_registration_hook(share)
        self.are_own = True
        try:
            yield
        finally:
            hook.remove()
            self.are_own = False
            # Else the module has seeded it, or made parameters.
            if generator.initial_seed() == seed:
                now = generator.get_state().numpy().tobytes()  # torch.equal takes longer
                has_drawn = now != begin.numpy().tobytes()
                generator.set_state(before)
                if has_drawn:
                    torch.rand((), generator=generator, device=self.device)


def is_generator(value: object) -> bool:
    """Whether `value` is a generator of torch, `random` or numpy whose state can be read."""
    kinds = (
        torch.Generator,
        random.Random,
        np.random.Generator,
        np.random.RandomState,
        np.random.BitGenerator,
    )
    return isinstance(value, kinds) and not isinstance(value, random.SystemRandom)


def read_generator(generator: Any) -> Any:
    """The state of a generator.

    Takes any element of `Draws.generators`, and any object for which `is_generator` is true.
    """
    if generator is random or isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    # numpy; the legacy form of the state takes twice as long to read
    get_state = getattr(generator, "get_state", None)
    if get_state is None:
        return getattr(generator, "bit_generator", generator).state
    return get_state(legacy=False)


def write_generator(generator: Any, state: Any) -> None:
    """Restore a state that `read_generator` returned."""
    if generator is random or isinstance(generator, random.Random):
        generator.setstate(state)
    elif getattr(generator, "set_state", None) is not None:
        generator.set_state(state)
    else:
        getattr(generator, "bit_generator", generator).state = state


def is_same_state(a: Any, b: Any) -> bool:
    """Whether two states of one generator are equal; False where a comparison would be slow."""
    if a is b:
        return True
    if isinstance(a, torch.Tensor):  # on the CPU; torch.equal takes ten times as long
        return bool(a.numpy().tobytes() == b.numpy().tobytes())
    if isinstance(a, tuple):
        return bool(a == b)
    inner = a.get("state") if isinstance(a, dict) else None
    if not isinstance(inner, dict) or "key" not in inner:  # not the Mersenne Twister
        return False
    other = b["state"]
    return (
        all(a.get(name) == b.get(name) for name in ("has_gauss", "gauss"))
        and inner["pos"] == other["pos"]
        and bool((inner["key"] == other["key"]).all())
    )
