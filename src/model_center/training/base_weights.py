"""The frozen weights of a run, which its checkpoints name instead of holding them.

The base of a run is what its frozen parameters were when it began: with adapters, the pretrained
model. A program that goes on makes the base anew, from where it came; a checkpoint has a checksum
of each parameter, and holds those that were written to.
"""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Sequence
from typing import Any

import torch

import bmtrain as bmt
from bmtrain.checkpoint.entries import Entry, entries
from bmtrain.checkpoint.saving import visit
from bmtrain.distributed.agreement import attempt, everyone
from model_center.errors import ResumeError
from model_center.training.resuming import model_path, read_facts

SHOWN = 5  # names in a message
_CHUNK = 2**22  # elements of which a checksum is taken at once, 8 bytes each
_WHOLE_NUMBERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MIX = 0x9E3779B97F4A7C15 - 2**64  # the golden ratio times 2**64: spreads places over all bits


class BaseWeights:
    """The frozen parameters of a model, as they are now. Collective.

    Args:
        model: sharded or not, before anything of a checkpoint is loaded.
        name: where its weights come from, for messages.

    Attributes:
        checksums: of each frozen parameter, by its first name; the same for any number of ranks.
    """

    def __init__(self, model: torch.nn.Module, name: str) -> None:
        self.model, self.name = model, name
        names = {entry.name for entry in entries(model) if _is_frozen(entry)}
        self.checksums = _checksums(model, names)

    def unchanged(self) -> dict[str, int]:
        """The checksums of the parameters that still have the values of the base. Collective."""
        now = _checksums(self.model, self.checksums.keys())
        return {name: value for name, value in self.checksums.items() if now[name] == value}

    def split(self) -> tuple[dict[str, Any], set[str]]:
        """What a checkpoint says of the base, and the names of the tensors that it must hold.

        Collective.
        """
        unchanged = self.unchanged()
        kept = {entry.name for entry in entries(self.model)} - unchanged.keys()
        return {"name": self.name, "checksums": unchanged}, kept

    def load(self, checkpoint: pathlib.Path) -> None:
        """Read the model of a checkpoint onto the base. Collective.

        Raises:
            ResumeError: on every rank, if weights that the checkpoint leaves to its base are others
                here; the model is unchanged.
            CheckpointError: if it is damaged or does not fit the model.
        """
        facts = attempt(lambda: read_facts(checkpoint), everyone())
        about: dict[str, Any] = facts.get("base") or {"name": "", "checksums": {}}
        before: dict[str, int] = about["checksums"]
        differing = [name for name, value in before.items() if self.checksums.get(name) != value]
        if differing:
            raise ResumeError(
                f"{checkpoint} holds what was trained on top of the frozen weights of "
                f"{about['name']!r}. Those of this run, from {self.name!r}, are others: "
                f"{_listed(differing)}. Remedy: make the model from the same weights, or give "
                "another --save."
            )
        kept = {entry.name for entry in entries(self.model)} - before.keys()
        bmt.load(self.model, model_path(checkpoint), only=kept)


def _is_frozen(entry: Entry) -> bool:
    """Whether a tensor is a frozen parameter of which a checksum can be taken."""
    x = entry.tensor
    is_plain = isinstance(x, bmt.DistributedParameter) or (
        type(x.detach()) is torch.Tensor and x.layout is torch.strided and not x.is_quantized
    )
    return isinstance(x, torch.nn.Parameter) and not x.requires_grad and is_plain


def _checksums(model: torch.nn.Module, names: Collection[str]) -> dict[str, int]:
    found: dict[str, int] = {}

    def take(entry: Entry, tensor: torch.Tensor) -> None:
        found[entry.name] = checksum(tensor)

    visit(model, take, only=names)
    return found


def checksum(x: torch.Tensor) -> int:
    """A checksum of all bits of a dense tensor: another one if any one element is another.

    Computed on the tensor's device: the mixed bits of each element times an odd number that belongs
    to its place, summed modulo 2**64.
    """
    flat = x.detach().contiguous().view(-1)
    bits = flat.view(_WHOLE_NUMBERS[min(flat.element_size(), 8)])
    out = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = _mixed(bits[start : start + _CHUNK].to(torch.int64))
        places = torch.arange(start, start + part.numel(), device=x.device)
        out += (part * (_mixed(places) | 1)).sum()
    return int(out)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """Other whole numbers for other ones, of which all bits depend on the low bits of `x` and half
    of them on the high ones.
    """
    x = x * _MIX
    return x ^ ((x >> 32) & 0xFFFFFFFF)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more
