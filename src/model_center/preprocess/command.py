"""The command: its arguments, the processes that do the work, and the files that come of it."""

from __future__ import annotations

import argparse
import collections
import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import rich.console
import rich.progress

from model_center.dataset.indexed_builder import MMapIndexedDatasetBuilder, make_builder
from model_center.dataset.rows import COMPRESSED, READERS, TEXTS, kind_of
from model_center.dataset.tokenised import in_order
from model_center.errors import DataError
from model_center.preprocess import documents
from model_center.preprocess.documents import Batch, batches, check_files
from model_center.preprocess.encode import (
    TOKENIZERS,
    Encoded,
    Recipe,
    encode,
    end_of_document,
    load_tokenizer,
)

DESCRIPTION = """Turn text files, a document on each line, or JSONL files into token data:
PREFIX.bin and PREFIX.idx, as MMapIndexedDataset reads them. Documents keep their order, whatever
the number of workers."""

# What CPM-1 was trained on: `<n>` in the text is a line break, every document starts with id 1 and
# ends with <eod>, unknown characters are left out, documents of fewer than 32 tokens are skipped,
# the others cut into pieces of 512, and a last piece of fewer than 32 is dropped; int32. Arguments
# that are given as well go first.
PRESETS: dict[str, dict[str, Any]] = {
    "": {"dtype": "auto"},
    "cpm1": {
        "dtype": "int32",
        "tokenizer_type": "cpm1",
        "newline": "<n>",
        "prefix": (1,),
        "append_eod": True,
        "drop_unknown": True,
        "max_chars": 5_000_000,
        "min_tokens": 32,
        "split_length": 512,
        "min_tail": 32,
    },
}

JSON_LINES = {".jsonl", ".ndjson", ".json"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments; those of the recipe are None where not given, so that a preset may say."""
    parser.description = DESCRIPTION
    add = parser.add_argument
    files = (
        "text, a document per line, or JSONL (*.jsonl, *.ndjson, *.json), also with "
        f"{', '.join(COMPRESSED)}"
    )
    add("--input", nargs="+", required=True, metavar="FILE", help=files)
    add("--output", required=True, metavar="PREFIX", help="where PREFIX.bin and PREFIX.idx go")
    named = "a folder, an identifier of model_center or a name on the hub"
    add("--tokenizer", required=True, metavar="NAME", help=named)
    kind = "whose tokenizer the folder holds (default: as transformers sees)"
    add("--tokenizer-type", choices=["auto", *TOKENIZERS], help=kind)
    rules = "the rules by which a model's data were made"
    add("--preset", choices=[name for name in PRESETS if name], default="", help=rules)
    add("--key", metavar="NAME", help="key of the text in JSONL (default: text)")
    end = "end every document with the tokenizer's eos"
    add("--append-eod", action="store_true", default=None, help=end)
    cut = "cut documents into sequences of at most N tokens"
    add("--split-length", type=int, metavar="N", help=cut)
    small = "of the file (default: uint16 if all ids fit)"
    add("--dtype", choices=["auto", "uint16", "int32"], help=small)
    add("--workers", type=int, default=1, metavar="N", help="processes that tokenise (default: 1)")


def run(args: argparse.Namespace) -> None:
    """Write the token data that the arguments ask for, or nothing.

    Raises:
        DataError: for arguments that cannot work, a tokenizer that is not there, and text that
            cannot be read, with file and line.
    """
    if args.workers < 1:
        raise DataError(f"workers is {args.workers}: expected a number from 1 on.")
    if args.output.endswith(("/", os.sep)):
        raise DataError(
            f"output {args.output} is a folder: expected the beginning of file names too, "
            f"{args.output}corpus."
        )
    for path in args.input:
        if kind_of(Path(path)) in {*READERS} - JSON_LINES - TEXTS:
            raise DataError(
                f"input {path} is a table: give its texts as JSONL, or train on it by "
                f"python -m model_center train --data {path}."
            )
    total = check_files(args.input)
    preset = PRESETS[args.preset]
    recipe = _recipe(args, {name: value for name, value in preset.items() if name != "dtype"})
    end_of_document(recipe)  # loads the tokenizer: it fails here rather than in every worker
    dtype = _dtype(
        args.dtype or preset["dtype"], len(load_tokenizer(recipe.tokenizer, recipe.tokenizer_type))
    )
    console = rich.console.Console(file=sys.stderr, soft_wrap=True)
    with (
        _folder(Path(args.output).parent),
        make_builder(f"{args.output}.bin", "mmap", dtype) as builder,
    ):
        with rich.progress.Progress(
            *_COLUMNS, console=console, transient=True, disable=not console.is_terminal
        ) as progress:
            task = progress.add_task("tokens", total=total)
            counts: collections.Counter[str] = collections.Counter()
            for batch, encoded in _encoded(
                recipe, batches(args.input, documents.BATCH_BYTES), args.workers
            ):
                counts += _add(builder, encoded)
                progress.advance(task, batch.num_bytes)
        if not counts["documents"]:
            raise DataError(
                f"no document in {', '.join(args.input)}: {counts['skipped']} lines, all "
                "empty or too short."
            )
        builder.finalize(f"{args.output}.idx")
    console.print(
        f"{args.output}.bin, .idx: {counts['documents']:,} documents, {counts['sequences']:,} "
        f"sequences, {counts['tokens']:,} tokens of {dtype}; {counts['skipped']:,} lines skipped.",
        highlight=False,
    )


_COLUMNS = (
    rich.progress.BarColumn(),
    rich.progress.DownloadColumn(),
    rich.progress.TransferSpeedColumn(),
    rich.progress.TimeRemainingColumn(),
)


def _recipe(args: argparse.Namespace, preset: dict[str, Any]) -> Recipe:
    """The preset, and over it what was given."""
    json_lines = {kind_of(Path(path)) in JSON_LINES for path in args.input}
    if len(json_lines) > 1:
        raise DataError(f"input {', '.join(args.input)} is text and JSONL: give files of one kind.")
    if args.key and json_lines == {False}:
        raise DataError(
            f"--key {args.key} is for JSONL files (*.jsonl, *.json), but the input is "
            f"{args.input[0]}."
        )
    given = {
        "tokenizer_type": args.tokenizer_type,
        "append_eod": args.append_eod,
        "split_length": args.split_length,
        "key": (args.key or "text") if json_lines == {True} else None,
    }
    return Recipe(
        tokenizer=args.tokenizer,
        **preset | {name: value for name, value in given.items() if value is not None},
    )


def _dtype(name: str, num_ids: int) -> np.dtype[Any]:
    """Of the file: as said, or the smaller one that holds ids below `num_ids`."""
    return np.dtype(name if name != "auto" else np.uint16 if num_ids <= 2**16 else np.int32)


def _add(builder: MMapIndexedDatasetBuilder, encoded: Encoded) -> collections.Counter[str]:
    """Add every document; returns counts of documents, sequences, tokens and skipped lines."""
    counts = collections.Counter(documents=len(encoded.documents), skipped=encoded.skipped)
    for document in encoded.documents:
        for sequence in document:
            builder.add_item(sequence)
            counts["tokens"] += len(sequence)
        builder.end_document()
        counts["sequences"] += len(document)
    return counts


def _encoded(
    recipe: Recipe, source: Iterator[Batch], workers: int
) -> Iterator[tuple[Batch, Encoded]]:
    """Every batch with what it becomes, in order; workers are a few batches ahead."""
    if workers == 1:
        yield from ((batch, encode(recipe, batch)) for batch in source)
        return
    yield from in_order(functools.partial(_with, recipe), source, workers)


def _with(recipe: Recipe, batch: Batch) -> tuple[Batch, Encoded]:
    return batch, encode(recipe, batch)


@contextlib.contextmanager
def _folder(path: Path) -> Iterator[None]:
    """The folder exists inside the block; after an error, those that were made for it are gone."""
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        for folder in made:
            folder.rmdir()
        raise
