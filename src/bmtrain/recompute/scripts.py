"""TorchScript: whether it has run, and modules that it has compiled.

Its executor rewrites a function after the first calls, which then saves different tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bmtrain.runtime.world import World
from bmtrain.torch_internals import compiled_script, last_script_graph

_NUM_WARM = 4  # calls after which the executor keeps the same graph


class Scripts:
    """Counts sightings of TorchScript on this rank. One per run, from `world.service(Scripts)`.

    TorchScript only tells which graph ran last.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Scripts:
        """Itself: a copy of a block belongs to the same run."""
        return self

    def __init__(self, world: World) -> None:
        self._idle: Any = None  # compiled on the first sighting
        self._graph: Any = None
        self._count = 0

    def count(self) -> int:
        """A counter that grows if TorchScript has run on this thread since the last call."""
        last = last_script_graph()
        if last is not None and last is not self._graph:
            self._count += 1
            # Run a no-op, so that a second call of the same function shows as another last graph.
            if self._idle is None:
                self._idle = torch.jit.CompilationUnit("def idle():\n    return\n").idle
                for _ in range(_NUM_WARM):
                    self._idle()
            self._idle()
            self._graph = last_script_graph()
        return self._count


class Slots(dict[str, Any]):
    """The parameters or buffers of a compiled module, which live outside of Python's dicts.

    It writes its tensors through to the module.
    """

    def __init__(self, module: torch.jit.ScriptModule, entries: Iterable[tuple[str, Any]]) -> None:
        super().__init__(entries)
        self._compiled = compiled_script(module)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        if value is not None:
            self._compiled.setattr(name, value)

    def update(self, *others: Mapping[str, Any], **more: Any) -> None:  # type: ignore[override]  # only the forms used here
        for other in (*others, more):
            for name, value in other.items():
                self[name] = value


def open_slots(module: torch.nn.Module) -> None:
    """Give `module` and its descendants dicts that can be written to, as plain modules have."""
    for found in list(module.modules()):
        part = found.__dict__.get("_actual_script_module", found)  # set by torch.jit.trace
        if isinstance(part, torch.jit.ScriptModule) and not isinstance(
            part.__dict__.get("_parameters"), dict
        ):
            own = part.__dict__
            own["_modules"] = dict(own["_modules"].items())
            own["_parameters"] = Slots(part, own["_parameters"].items())
            own["_buffers"] = Slots(part, own["_buffers"].items())
