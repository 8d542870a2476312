"""`tokenizer.json`, read by whichever `tokenizers` is installed: all of it, or not at all."""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import tokenizers
from tokenizers import Tokenizer

from bmtrain.checkpoint.files import read_object
from bmtrain.errors import CheckpointError
from model_center.errors import DataError

# What older versions do not know, and read over without a word, with what they do instead.
UNKNOWN = {"ignore_merges": False, "split": True}


def read(file: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a `tokenizer.json`.

    Raises:
        DataError: for one that is damaged, or that the installed `tokenizers` cannot read, or not
            all of.
    """
    return parsed(settings(pathlib.Path(file)), os.fspath(file))


def settings(file: pathlib.Path) -> dict[str, Any]:
    """The object in a JSON file of a tokenizer.

    Raises:
        DataError: if it holds none.
    """
    try:
        return read_object(file)
    except CheckpointError as error:
        raise DataError(str(error)) from error


def with_steps(backend: Tokenizer, **steps: Any) -> Tokenizer:
    """A tokenizer with other steps, each as in a `tokenizer.json`.

    Raises:
        DataError: for steps that the installed `tokenizers` has not got.
    """
    return parsed(json.loads(backend.to_str()) | steps, "the vocabulary")


def parsed(given: dict[str, Any], source: str) -> Tokenizer:
    """The tokenizer of what a `tokenizer.json` says; `source` is named in errors.

    Raises:
        DataError: for what the installed `tokenizers` cannot read, or not all of.
    """
    remedy = "it needs a newer one, and the transformers that goes with that."
    try:
        backend = _accepted(given)
    except Exception as error:  # tokenizers raises no other class
        raise DataError(
            f"tokenizers {tokenizers.__version__} cannot read {source}: {error}; {remedy}"
        ) from error
    lost = _unusual(given) - _unusual(json.loads(backend.to_str()))
    if lost:
        raise DataError(
            f"tokenizers {tokenizers.__version__} does not know {', '.join(sorted(lost))}, without "
            f"which {source} would give other ids; {remedy}"
        )
    return backend


def _accepted(given: dict[str, Any]) -> Tokenizer:
    try:
        return Tokenizer.from_str(json.dumps(given))
    except Exception:
        return Tokenizer.from_str(json.dumps(_older_spelling(given)))


def _older_spelling(given: dict[str, Any]) -> dict[str, Any]:
    """As `tokenizers` before 0.20 wrote it: merges are strings, and blanks have a field more."""
    steps = {name: _with_field(step) for name, step in given.items() if name != "model"}
    model = dict(given["model"])
    if "merges" in model:
        model["merges"] = [
            pair if isinstance(pair, str) else " ".join(pair) for pair in model["merges"]
        ]
    return steps | {"model": model}


def _with_field(step: Any) -> Any:
    if isinstance(step, list):
        return [_with_field(item) for item in step]
    if not isinstance(step, dict):
        return step
    added = (
        {"add_prefix_space": step.get("prepend_scheme") != "never"}
        if step.get("type") == "Metaspace"
        else {}
    )
    return added | {name: _with_field(item) for name, item in step.items()}


def _unusual(given: Any) -> set[str]:
    """The names in UNKNOWN that are there with another value."""
    if isinstance(given, list):
        return set().union(*map(_unusual, given))
    if not isinstance(given, dict):
        return set()
    here = {name for name, usual in UNKNOWN.items() if given.get(name, usual) != usual}
    return here.union(*(_unusual(given[name]) for name in given.keys() - {"vocab", "merges"}))
