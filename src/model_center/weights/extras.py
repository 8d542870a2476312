"""What a folder holds beside the tensors of a model, kept so that an export is what came in."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from bmtrain.checkpoint.sources import open_source
from model_center.hub.resolving import ALONGSIDE
from model_center.weights.keymap import KeyMap, TensorPart
from model_center.weights.matching import match, under_any_prefix


@dataclasses.dataclass(frozen=True, eq=False)
class FolderExtras:
    """Files and tensors of a folder that the model does not use, and the names of the others.

    Attributes:
        files: the content of files such as the tokenizer's, by name.
        tensors: of no use to the model, by name: heads of another task, masks. They are mapped from
            the files, which may be removed but not changed in place.
        names: a key map's name of a tensor to the names that the folder has for it, where these
            are others.
    """

    files: Mapping[str, bytes]
    tensors: Mapping[str, torch.Tensor] = dataclasses.field(default_factory=dict)
    names: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)

    def spelled(self, name: str) -> Sequence[str]:
        """The names under which to write the tensor that a key map calls `name`."""
        return self.names.get(name, (name,))


NOTHING = FolderExtras({})


def files_alongside(folder: str | os.PathLike[str]) -> Iterator[pathlib.Path]:
    """The tokenizer's files, settings of generation and of images, the model's card."""
    found = {path for pattern in ALONGSIDE for path in pathlib.Path(folder).glob(pattern)}
    return (path for path in sorted(found) if path.is_file())


def extras_of(folder: str | os.PathLike[str], key_map: KeyMap | None) -> FolderExtras:
    """What to keep of a folder from which a model has been loaded.

    Args:
        key_map: of the folder's own configuration; None where Hugging Face does not have the model.
    """
    files = {path.name: path.read_bytes() for path in files_alongside(folder)}
    if key_map is None:
        return FolderExtras(files)
    source = under_any_prefix(open_source(folder), key_map)
    found = match(key_map, key_map.pieces, source.headers)
    if len(match(KeyMap({}), key_map.pieces, source.headers).pieces) > len(found.pieces):
        return FolderExtras(files)  # in our own names
    names: dict[str, Sequence[str]] = {}
    for name in found.pieces:
        theirs = key_map.pieces.get(name, TensorPart(name)).name
        alike = {spelled for same in key_map.same_as(theirs) for spelled in key_map.spellings(same)}
        there = [held for held in key_map.found_in(source.headers, theirs) if held in alike]
        if there and there != [theirs]:
            names[theirs] = there
    used = {piece.name for piece in found.pieces.values()} | {copy for copy, _ in found.copies}
    return FolderExtras(
        files, {name: source.mapped(name) for name in source.headers if name not in used}, names
    )
