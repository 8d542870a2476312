"""Rows as tokens, made once: arrays in files that all processes of a host map.

An index is a folder: `ids.bin`, int32, the ids of all rows one after the other; `in_loss.bin`,
uint8, 1 where the next id is in the loss; `bytes.bin`, uint16, the bytes of the text that each id
stands for; `rows.bin`, int64, where each row ends, negative for texts; and `index.json`, what else
a run says of its data. The name of the folder is a hash of data, tokenizer, chat template and
version.
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
import os
import pathlib
import pickle
import reprlib
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from model_center.dataset.chat import ChatRenderer, ChatTokenizer, Span
from model_center.dataset.conversations import Parsed, parse, parse_pair
from model_center.dataset.indexed import MMapIndexedDataset
from model_center.dataset.packed import document_starts
from model_center.dataset.rows import Row, Source
from model_center.errors import DataError, InputError

IDS, IN_LOSS, BYTES, ROWS, FACTS = "ids.bin", "in_loss.bin", "bytes.bin", "rows.bin", "index.json"
VERSION = 3  # of what is in the files
MOST_BYTES = np.iinfo(np.uint16).max  # of a token that can be written down
BATCH = 256  # rows that are tokenised at a time
# Letters after which a batch ends earlier, and the bytes that the tokenizer takes for each: some
# 400 for a token, of four letters or fewer.
LONG_BATCH, BYTES_FOR_LETTER = 2**22, 100
FEW = 2048  # rows that are not worth other processes
Work = TypeVar("Work")
Done = TypeVar("Done")


class TokenIndex:
    """The tokens of all rows of a source.

    Attributes:
        ids: int32 (tokens,).
        in_loss: uint8 (tokens,), 1 where the next token is in the loss.
        num_bytes: uint16 (tokens,), UTF-8 bytes of the text that each stands for: of a row, all of
            its text together, without the bos and eos around it. None where that is not known.
        starts, stops: int64 (rows,), of each row in them.
        is_text: bool (rows,), of rows that are texts.
        key: a hash of what they were made of.
        unread: how many rows have a field that was not read, by its name.
    """

    def __init__(self, folder: pathlib.Path, last: float = 0.0, *, keep: bool = True) -> None:
        """What is in a folder; with `keep` mapped, else read. See `divide` for `last`."""
        self._folder, self._last = (folder if keep else None), 0.0
        facts = json.loads((folder / FACTS).read_text())
        self.key: str = facts["key"]
        self.unread: dict[str, int] = facts["unread"]
        self.ids: npt.NDArray[np.int32] = _read(folder / IDS, np.int32, keep)
        self.in_loss: npt.NDArray[np.uint8] = _read(folder / IN_LOSS, np.uint8, keep)
        self.num_bytes: npt.NDArray[np.uint16] | None = None
        if facts["bytes_known"]:
            self.num_bytes = _read(folder / BYTES, np.uint16, keep)
        ends = np.fromfile(folder / ROWS, np.int64)
        self.is_text = ends < 0
        self.stops = np.abs(ends)
        self.starts = np.concatenate([[0], self.stops[:-1]]).astype(np.int64)
        if last:
            self.divide(last)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self.stops)

    def __reduce__(self) -> Any:
        """Other processes map the files, and do not get their content."""
        if self._folder is None:
            return super().__reduce__()
        return type(self), (self._folder, self._last)

    def divide(self, last: float) -> None:
        """Make two rows of a single text, the second of which has a share of the tokens."""
        self._last, count = last, len(self.ids)
        place = count - min(max(round(last * count), 1), count - 1)
        self.starts, self.stops = np.array([0, place]), np.array([place, count])
        self.is_text = self.is_text.repeat(2)
        self.key = f"{self.key} at {place}"


def _read(path: pathlib.Path, dtype: Any, keep: bool) -> npt.NDArray[Any]:
    if keep and path.stat().st_size:
        return np.memmap(path, dtype, "r")
    return np.fromfile(path, dtype)


class Encoded(NamedTuple):
    """Rows as tokens: ids, loss mask and bytes of all together, and the length of each."""

    ids: npt.NDArray[np.int32]
    in_loss: npt.NDArray[np.uint8]
    num_bytes: npt.NDArray[np.int64] | None
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
) -> TokenIndex:
    """The tokens of a source, from `cache` if they are there.

    Args:
        source: of rows, or of token data, whose documents are texts as they are.
        tokenizer: with offsets; of token data the one that made them.
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
        return TokenIndex(cache / key)
    try:
        if cache is not None:
            cache.mkdir(parents=True, exist_ok=True)
        made = pathlib.Path(tempfile.mkdtemp(prefix=f".{key}-", dir=cache))
        try:
            _write(made, key, source, encoder, workers, report)
            if cache is None:
                return TokenIndex(made, keep=False)
            with contextlib.suppress(OSError):  # another program was faster
                made.rename(cache / key)
            return TokenIndex(cache / key)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        raise DataError(f"the tokens of {source.name} cannot be written: {error}.") from error


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
    ends, end, bytes_known = array.array("q"), 0, True
    unread: collections.Counter[str] = collections.Counter()
    if source.is_tokens:
        made = _documents(MMapIndexedDataset(str(source.files[0].with_suffix(""))), encoder)
    else:
        made = _encoded(source.rows(), encoder, workers)
    with (
        (folder / IDS).open("wb") as ids,
        (folder / IN_LOSS).open("wb") as in_loss,
        (folder / BYTES).open("wb") as sizes,
    ):
        for one in made:
            one.ids.tofile(ids)
            one.in_loss.tofile(in_loss)
            if one.num_bytes is None or one.num_bytes.max(initial=0) > MOST_BYTES:
                bytes_known = False
            elif bytes_known:
                one.num_bytes.astype(np.uint16).tofile(sizes)
            for length, is_text in zip(one.lengths, one.is_text, strict=True):
                end += length
                ends.append(-end if is_text else end)
            unread += one.unread
            report(len(ends))
    if not ends:
        raise DataError(f"{source.name} holds no rows: expected at least one.")
    with (folder / ROWS).open("wb") as rows:
        ends.tofile(rows)
    facts = {"key": key, "unread": unread, "bytes_known": bytes_known}
    (folder / FACTS).write_text(json.dumps(facts))


def _documents(indexed: MMapIndexedDataset, encoder: Encoder) -> Iterator[Encoded]:
    """Token data as texts, of which each token is predicted from those before it."""
    if indexed.dtype.kind not in "iu":
        raise DataError(f"{indexed} holds {indexed.dtype}: expected ids of tokens.")
    starts, sizes = document_starts(indexed), byte_lengths(encoder.tokenizer)
    for first in range(0, len(starts) - 1, BATCH):
        bounds = starts[first : first + BATCH + 1]
        ids = indexed.tokens[bounds[0] : bounds[-1]].astype(np.int64)
        if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < np.iinfo(np.int32).max:
            raise DataError(f"{indexed} holds numbers that are not token ids.")
        in_loss = np.ones(len(ids), np.uint8)
        in_loss[bounds[1:] - bounds[0] - 1] = 0
        is_known = sizes is not None and int(ids.max(initial=0)) < len(sizes)
        yield Encoded(
            ids=ids.astype(np.int32),
            in_loss=in_loss,
            num_bytes=sizes[ids] if sizes is not None and is_known else None,
            lengths=np.diff(bounds).tolist(),
            is_text=[True] * (len(bounds) - 1),
            unread=collections.Counter(),
        )


def byte_lengths(tokenizer: ChatTokenizer) -> npt.NDArray[np.int64] | None:
    """Bytes of the text of each id; None for a tokenizer whose tokens are not strings of bytes."""
    decoder = json.loads(tokenizer.backend_tokenizer.to_str())["decoder"] or {}
    if decoder.get("type") != "ByteLevel":
        return None
    vocabulary: Mapping[str, int] = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=True)
    found = np.zeros(max(vocabulary.values(), default=-1) + 1, np.int64)
    for token, number in vocabulary.items():
        found[number] = len(token)  # a letter is a byte
    for number, token in tokenizer.backend_tokenizer.get_added_tokens_decoder().items():
        found[number] = 0 if token.special else len(token.content.encode())
    return found


def _encoded(rows: Iterator[Row], encoder: Encoder, workers: int) -> Iterator[Encoded]:
    batches = _batches(rows)
    yield from map(encoder, itertools.islice(batches, FEW // BATCH) if workers > 1 else batches)
    if workers > 1:
        with tempfile.NamedTemporaryFile() as file:  # a tokenizer is too large for every batch
            pickle.dump(encoder, file)
            file.flush()
            yield from in_order(functools.partial(_encoded_by, file.name), batches, workers)


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Lists of rows that are tokenised together; a batch of books would fill the memory."""
    batch: list[Row] = []
    letters = 0
    for row in rows:
        batch.append(row)
        letters += sum(len(value) for value in row.content.values() if isinstance(value, str))
        if len(batch) == BATCH or letters >= LONG_BATCH:
            yield batch
            batch, letters = [], 0
    if batch:
        yield batch


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
            DataError: naming file and row, for one that is no conversation, which the chat template
                refuses, or whose text is too long for the memory of this host.
        """
        found = [(one, row) for row in rows for one in parsed_rows(row, pairs=self.pairs)]
        parsed = [one for one, _ in found]
        written = [self._written(*pair) for pair in found]
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        for (text, _), (_, row) in zip(written, found, strict=True):
            needed = BYTES_FOR_LETTER * len(text)
            if needed > memory:
                raise DataError(
                    f"{row.location}: a text of {len(text):,} letters, for which the tokenizer "
                    f"needs some {needed / 2**30:.0f} GiB of memory; this host has "
                    f"{memory / 2**30:.0f}. Divide it into documents, for example one on each line "
                    "of a .jsonl file."
                )
        encode: Any = self.tokenizer  # which takes several texts, too
        encoded = encode(
            [text for text, _ in written],
            add_special_tokens=False,
            return_offsets_mapping=True,
            verbose=False,  # of texts that are longer than a row: they are cut
        )
        lengths, masks, sizes = [], [], []
        for (text, spans), offsets, one in zip(
            written, encoded["offset_mapping"], parsed, strict=True
        ):
            begin, end = np.array(offsets, np.int64).reshape(-1, 2).T
            own = np.zeros(len(begin) + 1, np.uint8)  # of the row's tokens, and of none behind them
            for start, stop in spans:
                own[:-1] |= (begin < stop) & (start < end)
            masks.append(own[1:])
            sizes.append(_bytes_of(text, end, *self._around(one)))
            lengths.append(len(begin))
        return Encoded(
            ids=np.fromiter(itertools.chain.from_iterable(encoded["input_ids"]), np.int32),
            in_loss=np.concatenate(masks),
            num_bytes=np.concatenate(sizes),
            lengths=lengths,
            is_text=[one.text is not None for one in parsed],
            unread=collections.Counter(name for one in parsed for name in one.unread),
        )

    def _written(self, parsed: Parsed, row: Row) -> tuple[str, list[Span]]:
        """The text of a row, and the (start, stop) of what the loss covers of it."""
        if parsed.text is not None:
            bos, eos = self._around(parsed)
            text = bos + parsed.text + eos
            return text, [(len(bos), len(text))]
        try:
            return ChatRenderer(self.tokenizer, parsed.tools).text_and_answers(parsed.messages)
        except (InputError, DataError) as error:
            raise DataError(
                f"{row.location}: {error} The conversation is {reprlib.repr(parsed.messages)}."
            ) from error

    def _around(self, parsed: Parsed) -> tuple[str, str]:
        """What is written before and behind the text of a row, and is none of it."""
        if parsed.text is None:
            return "", ""
        return self.tokenizer.bos_token or "", self.tokenizer.eos_token or ""


def _bytes_of(
    text: str, ends: npt.NDArray[np.int64], before: str, behind: str
) -> npt.NDArray[np.int64]:
    """(tokens,): the bytes of a text that tokens stand for, each of which ends at a letter of it.

    A letter is counted once, at the first token that reaches it, and what no token holds at the
    next one: the sum is that of the text, without `before` and `behind`.
    """
    letters = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    sizes = 1 + (letters >= 2**7) + (letters >= 2**11) + (letters >= 2**16)
    sizes[: len(before)] = 0
    sizes[len(letters) - len(behind) :] = 0
    upto = np.concatenate([[0], sizes.cumsum()])
    reached = np.maximum.accumulate(ends)
    reached[-1:] = len(letters)
    return np.diff(upto[reached], prepend=0)


def parsed_rows(row: Row, *, pairs: bool = False) -> Sequence[Parsed]:
    """What a row says; of a pair both conversations.

    Raises:
        DataError: naming file and row, for what is of no known form.
    """
    try:
        return parse_pair(row.content) if pairs else [parse(row.content)]
    except KeyError as error:
        raise DataError(
            f"{row.location}: there is no field {error} beside {', '.join(row.content)}: rename "
            "the fields (docs/site/en/guides/fine-tuning.md has all forms of rows)."
        ) from error
    except (ValueError, TypeError, AttributeError) as error:
        raise DataError(f"{row.location}: {error}") from error
