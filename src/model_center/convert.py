"""`python -m model_center convert`: a Hugging Face folder made one of ModelCenter, or back."""

from __future__ import annotations

import argparse
import pathlib
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from bmtrain.checkpoint.entries import entries
from bmtrain.checkpoint.writer import write_file
from bmtrain.errors import printable
from model_center.config.base import CONFIG_FILE, read_json
from model_center.errors import ConfigError, WeightsError
from model_center.hub.resolving import resolve
from model_center.model.base import BaseModel
from model_center.model.registry import CLASSES, model_class
from model_center.weights.export import Exporter, targets_of, with_dtype, written
from model_center.weights.extras import files_alongside
from model_center.weights.keymap import KeyMap
from model_center.weights.loading import OpenCheckpoint, check, open_weights
from model_center.weights.safetensors_writer import SafetensorsWriter, parse_size
from model_center.weights.staging import CONFIG, MODEL_CENTER_FILE, Staging, writing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `run`."""
    parser.description = (
        "Convert a model between Hugging Face's format and ModelCenter's; the dtype of the "
        "weights is kept."
    )
    parser.add_argument(
        "source",
        metavar="SRC",
        help="a folder with config.json and weights, or a name of the Hugging Face hub",
    )
    parser.add_argument(
        "target", metavar="DST", help="the folder to make; it must be empty or not exist"
    )
    parser.add_argument(
        "--to", choices=("hf", "model_center"), required=True, help="the format to write"
    )
    parser.add_argument(
        "--model",
        help="the kind of model, gpt2 for example: ModelCenter's config.json does not name it",
    )
    parser.add_argument(
        "--max-shard-size", default="5GB", help="of one safetensors file (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> None:
    """Convert as the arguments say. Tokenizer files come along.

    Memory: to "hf" one tensor at a time; to "model_center" what has to be cut or turned, the rest
    is copied from file to file.

    Raises:
        ConfigError, IdentifierError, WeightsError: with what was wrong; the target is as it was.
    """
    config_folder = pathlib.Path(resolve(args.source, "config"))
    source, target = pathlib.Path(resolve(args.source, "model")), pathlib.Path(args.target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise WeightsError(f"{target} exists and is not an empty folder: name another.")
    content = read_json(config_folder / CONFIG_FILE)
    kind = _class_of(content, args.model)
    config = kind._CONFIG_TYPE.from_dict(content)
    with torch.device("meta"):
        model = kind(config)
    ties = [entry.names for entry in entries(model)]
    shapes = {name: entry.shape for entry in entries(model) for name in entry.names}
    key_map = kind.key_map(config) if config.model_type else None
    opened = open_weights(source, shapes, key_map)
    missing = check(shapes, ties, opened, key_map)
    staging = Staging(target)
    try:
        with writing(target):
            if args.to == "hf":
                staging.write_json(
                    CONFIG, with_dtype(config.hugging_face_content(), opened.source.headers)
                )
                _to_hugging_face(opened, ties, kind.key_map(config), staging, args.max_shard_size)
            else:
                staging.write_json(CONFIG, config.to_dict())
                write_file(
                    staging.path(MODEL_CENTER_FILE),
                    {
                        name: _without_unused_storage(opened.source.mapped(name))
                        for name in opened.source.headers
                    },
                )
            for folder in dict.fromkeys([config_folder, source]):
                for path in files_alongside(folder):  # tokenizer and generation settings
                    shutil.copyfile(path, staging.path(path.name))
            staging.commit()
    except BaseException:
        staging.abandon()
        raise
    for line in _report(opened, missing, target):
        print(printable(line))


def _class_of(content: Mapping[str, Any], wanted: str | None) -> type[BaseModel]:
    """The class that the configuration or else the user names, Hugging Face's name or ours."""
    if wanted is None and "model_type" not in content:
        raise ConfigError(
            f"config.json names no model_type: give --model, one of {', '.join(sorted(CLASSES))}."
        )
    names = {kind.__name__.lower(): name for name, kind in reversed(CLASSES.items())}
    asked = (
        model_class({"model_type": names.get(wanted.lower(), wanted.lower())})
        if wanted is not None
        else None
    )
    named = model_class(content) if "model_type" in content else None
    if asked is not None and named is not None and asked is not named:
        raise ConfigError(
            f"--model is {wanted!r}, but config.json is of a {content['model_type']!r}."
        )
    return named or asked or model_class(content)


def _to_hugging_face(
    opened: OpenCheckpoint,
    ties: list[tuple[str, ...]],
    key_map: KeyMap,
    staging: Staging,
    max_shard_size: str,
) -> None:
    names = [
        name for tied in ties for name in written(tied, key_map) if name in opened.source.headers
    ]
    targets = targets_of(key_map, {name: opened.source.headers[name] for name in names})
    headers = {name: target.header for name, target in targets.items()}
    exporter = Exporter(
        key_map, targets, SafetensorsWriter(staging.path(), headers, parse_size(max_shard_size))
    )
    for name in names:
        exporter.put([name], opened.source.whole(name))


def _without_unused_storage(values: torch.Tensor) -> torch.Tensor:
    """The values alone: mapped, where the file holds them so; else a copy in memory."""
    is_alone = values.is_contiguous() and values.untyped_storage().nbytes() == values.nbytes
    return values if is_alone else values.clone(memory_format=torch.contiguous_format)


def _report(opened: OpenCheckpoint, missing: list[str], target: pathlib.Path) -> Iterator[str]:
    yield from opened.notes
    if missing:
        yield f"not in the source, and not written: {', '.join(missing)}"
    if opened.unexpected:
        yield (
            "in the source, but no part of the model, and not written: "
            f"{', '.join(opened.unexpected)}"
        )
    yield f"wrote {len(opened.source.headers)} tensors to {target}"
