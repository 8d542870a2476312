"""What tests of data sets share: tokenizers, refusals, rows that are filled up."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from model_center import tokenizer as tokenizers
from model_center.dataset.indexed_builder import make_builder
from model_center.errors import DataError

DATA = Path(__file__).parents[1] / "data"
FOLDERS = DATA / "tokenizers"
CLASSES = {"bert": "Bert", "gpt2": "GPT2", "llama": "Llama", "t5": "T5", "cpm1": "CPM1"}


@functools.cache
def tokenizer(name):
    """The small tokenizer of this folder of tests/data/tokenizers."""
    kind = getattr(tokenizers, f"{CLASSES.get(name, name.upper())}Tokenizer")
    return kind.from_pretrained(FOLDERS / name)


def refused(words):
    """A DataError with these words, a pattern, is raised inside."""
    return pytest.raises(DataError, match=words)


def filled(ids, length, fill=0):
    return [*ids, *[fill] * (length - len(ids))]


def write_rows(file, *rows):
    """A file of these rows as JSON lines, and of texts as they are."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8", errors="surrogateescape")
    return file


def write_tokens(prefix, documents, dtype="int32", marked=None):
    """Token data of documents of sequences of ids; the first `marked` documents end, or all."""
    with make_builder(f"{prefix}.bin", "mmap", dtype) as builder:
        for number, document in enumerate(documents):
            for sequence in document:
                builder.add_item(sequence)
            if marked is None or number < marked:
                builder.end_document()
        builder.finalize(f"{prefix}.idx")
    return str(prefix)


def listed(item):
    """A row of a data set, its values as lists."""
    return {name: np.asarray(value).tolist() for name, value in item.items()}


def overwrite(path, at, content):
    """Damage a file from this byte on."""
    data = bytearray(path.read_bytes())
    data[at : at + len(content)] = content
    path.write_bytes(data)
