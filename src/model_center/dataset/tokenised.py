"""Rows as tokens, made once: arrays in files that all processes of a host map.

An index is a folder: `ids.bin`, int32, the ids of all rows one after the other; `learnt.bin`,
uint8, 1 where the next id is to be learnt; `rows.bin`, int64, where each row ends, negative for
texts; and `index.json`, what else a run says of its data. The name of the folder is a hash of data,
tokenizer, chat template and version.
"""

from __future__ import annotations

import array
import collections
import concurrent.futures
import contextlib
import functools
import hashlib
import itertools
import json
import multiprocessing
import pathlib
import pickle
import reprlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from model_center.dataset.chat import ChatRenderer, ChatTokenizer, Span
from model_center.dataset.conversations import Parsed, parse, parse_pair
from model_center.dataset.rows import Row, Source
from model_center.errors import DataError, InputError

IDS, LEARNT, ROWS, FACTS = "ids.bin", "learnt.bin", "rows.bin", "index.json"
VERSION = 1  # of what is in the files
BATCH = 256  # rows that are tokenised at a time
FEW = 2048  # rows that are not worth other processes
Work = TypeVar("Work")
Done = TypeVar("Done")


class Tokens:
    """The tokens of all rows of a source.

    Attributes:
        ids: int32 (tokens,).
        learnt: uint8 (tokens,), 1 where the next token is learnt.
        starts, stops: int64 (rows,), of each row in them.
        is_text: bool (rows,), of rows that are texts.
        key: a hash of what they were made of.
        unread: how many rows have a field that was not read, by its name.
    """

    def __init__(self, folder: pathlib.Path, *, keep: bool = True) -> None:
        """What is in a folder; with `keep` mapped, else read."""
        self._folder = folder if keep else None
        facts = json.loads((folder / FACTS).read_text())
        self.key: str = facts["key"]
        self.unread: dict[str, int] = facts["unread"]
        self.ids: npt.NDArray[np.int32] = _read(folder / IDS, np.int32, keep)
        self.learnt: npt.NDArray[np.uint8] = _read(folder / LEARNT, np.uint8, keep)
        ends = np.fromfile(folder / ROWS, np.int64)
        self.is_text = ends < 0
        self.stops = np.abs(ends)
        self.starts = np.concatenate([[0], self.stops[:-1]]).astype(np.int64)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.stops)

    def __reduce__(self) -> Any:
        """Other processes map the files, and do not get their content."""
        if self._folder is None:
            return super().__reduce__()
        return type(self), (self._folder,)


def _read(path: pathlib.Path, dtype: Any, keep: bool) -> npt.NDArray[Any]:
    if keep and path.stat().st_size:
        return np.memmap(path, dtype, "r")
    return np.fromfile(path, dtype)


class Encoded(NamedTuple):
    """Rows as tokens: ids and what is learnt of all together, and the end of each."""

    ids: npt.NDArray[np.int32]
    learnt: npt.NDArray[np.uint8]
    lengths: list[int]
    is_text: list[bool]
    unread: collections.Counter[str]


def tokens_of(
    source: Source,
    tokenizer: ChatTokenizer,
    cache: pathlib.Path | None = None,
    *,
    pairs: bool = False,
    workers: int = 1,
    report: Callable[[int], object] = lambda rows: None,
) -> Tokens:
    """The tokens of a source, from `cache` if they are there.

    Args:
        source: of rows.
        tokenizer: with offsets.
        cache: folder in which they are kept; None to keep nothing.
        pairs: of preferences, each of which is two rows here: the better one, then the worse.
        workers: processes that tokenise, where there are many rows. With more than one the program
            must be one that can be imported again.
        report: is told how many rows are done.

    Raises:
        DataError: naming file and row, for what cannot be read or is no conversation; for a source
            without rows; for a cache that cannot be written.
    """
    encoder = Encoder(tokenizer, pairs=pairs)
    key = _key(source, encoder)
    if cache is not None and (cache / key / FACTS).is_file():
        return Tokens(cache / key)
    try:
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
        made = pathlib.Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache))
        try:
            _write(made, key, source, encoder, workers, report)
            if cache is None:
                return Tokens(made, keep=False)
            with contextlib.suppress(OSError):  # another program was faster
                made.rename(cache / key)
            return Tokens(cache / key)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise DataError(f"the tokens of {source.name} cannot be kept: {error}.") from error


def _key(source: Source, encoder: Encoder) -> str:
    """A hash of all that decides about the tokens."""
    tokenizer = encoder.tokenizer
    parts = [VERSION, source.digest(), type(tokenizer).__name__, tokenizer.chat_template]
    parts += [tokenizer.bos_token, tokenizer.eos_token, tokenizer.backend_tokenizer.to_str()]
    parts += ["pairs"] if encoder.pairs else []
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def _write(
    folder: pathlib.Path,
    key: str,
    source: Source,
    encoder: Encoder,
    workers: int,
    report: Callable[[int], object],
) -> None:
    ends, end = array.array("q"), 0
    unread: collections.Counter[str] = collections.Counter()
    with (folder / IDS).open("wb") as ids, (folder / LEARNT).open("wb") as learnt:
        for one in _encoded(source.rows(), encoder, workers):
            one.ids.tofile(ids)
            one.learnt.tofile(learnt)
            for length, is_text in zip(one.lengths, one.is_text, strict=True):
                end += length
                ends.append(-end if is_text else end)
            unread += one.unread
            report(len(ends))
    if not ends:
        raise DataError(f"{source.name} holds no rows: expected at least one.")
    with (folder / ROWS).open("wb") as rows:
        ends.tofile(rows)
    (folder / FACTS).write_text(json.dumps({"key": key, "unread": unread}))


def _encoded(rows: Iterator[Row], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    batches = iter(lambda: list(itertools.islice(rows, BATCH)), [])
    yield from map(encoder, itertools.islice(batches, FEW // BATCH) if workers > 1 else batches)
    if workers > 1:
        with tempfile.NamedTemporaryFile() as file:  # a tokenizer is too large for every batch
            pickle.dump(encoder, file)
            file.flush()
            yield from in_order(functools.partial(_encoded_by, file.name), batches, workers)


def _encoded_by(file: str, rows: Sequence[Row]) -> Encoded:
    return _loaded(file)(rows)


@functools.cache
def _loaded(file: str) -> Encoder:
    encoder: Encoder = pickle.loads(pathlib.Path(file).read_bytes())
    return encoder


def in_order(work: Callable[[Work], Done], given: Iterable[Work], workers: int) -> Iterator[Done]:
    """What becomes of each, in order, made by other processes, which are a few ahead."""
    iterator = iter(given)
    first = list(itertools.islice(iterator, 1))
    if not first:  # nothing that processes are worth
        return
    # Not forked: tokenizers and progress bars have threads, which a fork would leave behind holding
    # their locks.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, context) as pool:
        waiting: collections.deque[concurrent.futures.Future[Done]] = collections.deque()
        try:
            for one in itertools.chain(first, iterator):
                waiting.append(pool.submit(work, one))
                if len(waiting) > 4 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


class Encoder:
    """Makes tokens of rows.

    Args:
        tokenizer: a fast one of transformers.
        pairs: whether rows are preferences, each of which becomes two.
    """

    def __init__(self, tokenizer: ChatTokenizer, *, pairs: bool = False) -> None:
        self.tokenizer, self.pairs = tokenizer, pairs

    def __call__(self, rows: Sequence[Row]) -> Encoded:
        """Rows as tokens.

        Raises:
            DataError: naming file and row, for one that is no conversation, or which the chat
                template refuses.
        """
        found = [(one, row) for row in rows for one in _parsed(row, pairs=self.pairs)]
        parsed = [one for one, _ in found]
        written = [self._written(*pair) for pair in found]
        encode: Any = self.tokenizer  # which takes several texts, too
        encoded = encode(
            [text for text, _ in written], add_special_tokens=False, return_offsets_mapping=True
        )
        lengths, masks = [], []
        for (_, spans), offsets in zip(written, encoded["offset_mapping"], strict=True):
            begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
            own = np.zeros(len(begin) + 1, np.uint8)  # of the row's tokens, and of none behind them
            for start, stop in spans:
                own[:-1] |= (begin < stop) & (start < end)
            masks.append(own[1:])
            lengths.append(len(begin))
        return Encoded(
            ids=np.fromiter(itertools.chain.from_iterable(encoded["input_ids"]), np.int32),
            learnt=np.concatenate(masks),
            lengths=lengths,
            is_text=[one.text is not None for one in parsed],
            unread=collections.Counter(name for one in parsed for name in one.unread),
        )

    def _written(self, parsed: Parsed, row: Row) -> tuple[str, list[Span]]:
        """The text of a row, and the (start, stop) of what is learnt of it."""
        if parsed.text is not None:
            bos, eos = self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""
            text = bos + parsed.text + eos
            return text, [(len(bos), len(text))]
        try:
            return ChatRenderer(self.tokenizer, parsed.tools).text_and_answers(parsed.messages)
        except (InputError, DataError) as error:
            raise DataError(
                f"{row.place}: {error} The conversation is {reprlib.repr(parsed.messages)}."
            ) from error


def _parsed(row: Row, *, pairs: bool) -> Sequence[Parsed]:
    try:
        return parse_pair(row.content) if pairs else [parse(row.content)]
    except KeyError as error:
        raise DataError(f"{row.place}: there is no field {error}.") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{row.place}: {error}") from error
