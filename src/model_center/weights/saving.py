"""Writing a model as a folder that transformers, or ModelCenter, loads."""

from __future__ import annotations

import contextlib
import os
import pathlib
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

import bmtrain as bmt
from bmtrain.checkpoint.entries import Entry, entries
from bmtrain.checkpoint.saving import collect, visit
from bmtrain.checkpoint.source import Header
from bmtrain.checkpoint.writer import write_file
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.runtime import log
from model_center.errors import WeightsError
from model_center.weights.export import Exporter, targets_of, with_dtype, written
from model_center.weights.extras import NOTHING, FolderExtras
from model_center.weights.keymap import KeyMap
from model_center.weights.safetensors_writer import SafetensorsWriter, parse_size
from model_center.weights.staging import CONFIG, MODEL_CENTER_FILE, Staging, writing
from model_center.weights.tokenizers import save_tokenizer

T = TypeVar("T")
Changes = Mapping[str, Callable[[torch.Tensor], torch.Tensor]]  # of tensors, by our names


def save_hugging_face(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    key_map: KeyMap,
    hf_config: Mapping[str, Any],
    max_shard_size: int | str = "5GB",
    tokenizer: Any = None,
    origin: FolderExtras = NOTHING,
    changes: Changes = types.MappingProxyType({}),
) -> None:
    """Write config.json and safetensors files by `key_map`, on rank 0. Collective.

    Storages are gathered one at a time, and tensors written one at a time: neither a GPU nor rank
    0's memory holds the model. Tensors that the key map does not list keep their own names, of
    which a warning tells: transformers does not use them.

    Args:
        folder: made if it is not there; weights that are there are replaced, when all is written.
        hf_config: content of config.json; its dtype becomes that of the tensors.
        max_shard_size: of one file, bytes or "5GB".
        tokenizer: saved beside by its `save_pretrained`, if given.
        origin: of the model: its files and unused tensors are written too, and names spelled as
            there.
        changes: what becomes of tensors that are not written as they are.

    Raises:
        WeightsError: on every rank, if the files cannot be written or the format cannot hold the
            model. What was there before is there still.
    """
    headers = {
        name: Header(entry.shape, entry.tensor.dtype)
        for entry in entries(model)
        for name in written(entry.names, key_map)
    }
    with _staged(folder, with_dtype(hf_config, headers), tokenizer, origin) as staging:
        exporter = _on_writer(
            staging, lambda staging: _exporter(staging, key_map, headers, max_shard_size, origin)
        )
        take = _taking(exporter, pathlib.Path(folder), changes) if exporter else _skip
        visit(model, take, WeightsError)
    extra = [name for name in headers if name not in key_map.pieces]
    if extra and bmt.rank() == 0:
        log.warn(
            f"{folder}: kept under our names, which transformers does not use: {', '.join(extra)}."
        )


def _skip(entry: Entry, tensor: torch.Tensor) -> None:
    """What ranks do that write nothing."""


def save_model_center(
    model: torch.nn.Module,
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    tokenizer: Any = None,
    origin: FolderExtras = NOTHING,
) -> None:
    """Write config.json and pytorch_model.pt under our names, on rank 0. Collective.

    Rank 0 needs host memory for the whole model. Otherwise as `save_hugging_face`.
    """
    with _staged(folder, config, tokenizer, origin) as staging:
        tensors = collect(model, keep=staging is not None)
        _on_writer(staging, lambda staging: write_file(staging.path(MODEL_CENTER_FILE), tensors))


def _taking(
    exporter: Exporter, folder: pathlib.Path, changes: Changes
) -> Callable[[Entry, torch.Tensor], None]:
    def take(entry: Entry, tensor: torch.Tensor) -> None:
        change = next((changes[name] for name in entry.names if name in changes), None)
        with writing(folder):
            exporter.put(entry.names, tensor if change is None else change(tensor))

    return take


def _exporter(
    staging: Staging,
    key_map: KeyMap,
    headers: Mapping[str, Header],
    max_shard_size: int | str,
    origin: FolderExtras,
) -> Exporter:
    """An exporter that has written what the model itself does not hold."""
    targets = targets_of(key_map, headers)
    sizes = {name: target.header for own, target in targets.items() for name in origin.spelled(own)}
    # Heads follow the model into another dtype; of several dtypes none is theirs.
    floats = {header.dtype for header in headers.values() if header.dtype.is_floating_point}
    dtype = floats.pop() if len(floats) == 1 else None
    unused = {
        name: tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
        for name, tensor in origin.tensors.items()
        if name not in sizes
    }
    sizes |= {name: Header(tuple(x.shape), x.dtype) for name, x in unused.items()}
    writer = SafetensorsWriter(staging.path(), sizes, parse_size(max_shard_size))
    for name, tensor in unused.items():
        writer.write(name, tensor)
    return Exporter(key_map, targets, writer, origin)


def _on_writer(staging: Staging | None, step: Callable[[Staging], T]) -> T | None:
    """`step(staging)` on the rank that writes; None on the others.

    Its error is one of all ranks.
    """

    def run() -> T | None:
        if staging is None:
            return None
        with writing(staging.folder):
            return step(staging)

    return attempt(run, everyone(), WeightsError)


@contextlib.contextmanager
def _staged(
    folder: str | os.PathLike[str], config: Mapping[str, Any], tokenizer: Any, origin: FolderExtras
) -> Iterator[Staging | None]:
    """A folder with all but the weights, put in place after the body on rank 0, None elsewhere.

    Errors are those of all ranks.
    """
    path = pathlib.Path(folder)
    staging = attempt(
        lambda: _begin(path, config, tokenizer, origin) if bmt.rank() == 0 else None,
        everyone(),
        WeightsError,
    )
    try:
        yield staging
        _on_writer(staging, Staging.commit)
    except BaseException:
        if staging is not None:
            staging.abandon()
        raise


def _begin(
    folder: pathlib.Path, config: Mapping[str, Any], tokenizer: Any, origin: FolderExtras
) -> Staging:
    staging = Staging(folder)
    try:
        with writing(folder):
            staging.write_json(CONFIG, config)
            for name, content in origin.files.items():
                staging.path(name).write_bytes(content)
            if tokenizer is not None:
                save_tokenizer(tokenizer, staging.path())
    except BaseException:
        staging.abandon()
        raise
    return staging
