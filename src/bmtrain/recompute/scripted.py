"""Modules compiled by TorchScript, whose parameters and buffers live outside of Python's dicts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from bmtrain.torch_internals import compiled_script


class Slots(dict[str, Any]):
    """A dict that writes its tensors through to a compiled module."""

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
