"""What the ranks must do, or decide, together."""

from __future__ import annotations

import math
import time
from collections.abc import Generator
from pathlib import Path

import torch

import bmtrain as bmt
from corpus import DataError, own_text, standard_library
from data import TokenData, build_cache, cache_folder, open_cache
from options import Options

_WORKING, _DONE, _FAILED = 0, 1, 2
_SECONDS_BETWEEN_LINES = 3.0


def rank_zero_first(work: Generator[str, None, str]) -> str:
    """Run `work` on rank 0 while the others wait; what it returns, on every rank. What it yields is
    printed.

    The others hear from rank 0 after every piece that `work` yields, so that no wait outlasts the
    time limit of a collective, however long the whole takes.

    Raises:
        DataError: on every rank, when `work` raised it. Any other error is raised on rank 0, and
            elsewhere a DataError with its text.
    """
    state, text = _WORKING, ""
    error: Exception | None = None
    shown = -math.inf
    while state == _WORKING:
        if bmt.rank() == 0:
            try:
                text = next(work)
            except StopIteration as end:
                state, text = _DONE, end.value
            except Exception as failure:  # whatever it is, the others must not wait for ever
                state, text, error = _FAILED, str(failure), failure
        state = from_rank_zero(state)
        if state == _WORKING and time.monotonic() - shown > _SECONDS_BETWEEN_LINES:
            bmt.print_rank(f"  {text}", flush=True)
            shown = time.monotonic()
    text = _text_from_rank_zero(text)
    if error is not None:
        raise error
    if state == _FAILED:
        raise DataError(text)
    return text


def from_rank_zero(number: int) -> int:
    """Rank 0's number, on every rank."""
    return int(bmt.distributed.broadcast(torch.tensor([number], device=bmt.device()), 0).item())


def _text_from_rank_zero(text: str) -> str:
    content = bytearray(text.encode())
    buffer = torch.zeros(from_rank_zero(len(content)), dtype=torch.uint8)
    if bmt.rank() == 0 and content:
        buffer = torch.frombuffer(content, dtype=torch.uint8)
    if not len(buffer):
        return ""
    return bytes(bmt.distributed.broadcast(buffer.to(bmt.device()), 0).cpu().tolist()).decode()


def prepare_data(options: Options) -> TokenData:
    """The tokens of the text, made by rank 0 the first time and read by all."""

    def build() -> Generator[str, None, str]:
        corpus = (
            own_text(options.data, options.text_field)
            if options.data is not None
            else standard_library(options.text)
        )
        folder = cache_folder(options.cache_dir, corpus, options.vocab_size)
        yield from build_cache(folder, corpus, options.vocab_size)
        return str(folder)

    folder = rank_zero_first(build())
    return open_cache(Path(folder))
