"""The files of a tokenizer beside a model."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Any


def save_tokenizer(tokenizer: Any, folder: pathlib.Path) -> None:
    """Let a tokenizer write its files, the same ones whatever it was used for before.

    Those of transformers that stand on `tokenizers` keep how the last call truncated and padded,
    and would write it as if every text were to be cut so.
    """
    with _as_loaded(tokenizer):
        tokenizer.save_pretrained(str(folder))


@contextlib.contextmanager
def _as_loaded(tokenizer: Any) -> Iterator[None]:
    backend = getattr(tokenizer, "backend_tokenizer", None)  # None: it does not stand on that
    if backend is None or "truncation_strategy" in tokenizer.init_kwargs:
        yield  # its own file says how to truncate
        return
    truncation, padding = backend.truncation, backend.padding
    backend.no_truncation()
    backend.no_padding()
    try:
        yield
    finally:
        if truncation is not None:
            backend.enable_truncation(**truncation)
        if padding is not None:
            backend.enable_padding(**padding)
