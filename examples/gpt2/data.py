"""From text to batches: a vocabulary and tokens, made once and cached, and the order in which
training reads them.

Needs no process group: which rank reads what is arithmetic on a count of samples.
"""

from __future__ import annotations

import array
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from corpus import Corpus, DataError, Document

END_OF_TEXT = "<|endoftext|>"
IGNORED = -100  # target of a position that does not count in the loss
HELD_OUT_SHARE = 0.02  # of the text, in bytes
# the vocabulary is learned from at most about this much of the training text
TOKENIZER_BYTES = 10_000_000
BATCH_BYTES = 2_000_000  # text tokenized at a time

Tokens = npt.NDArray[Any]  # 1-D, uint16 or uint32
Batch = tuple[torch.Tensor, torch.Tensor]  # inputs and targets, both int64 (batch, seq)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenData:
    """A corpus as tokens.

    train, valid: token numbers, 1-D and memory-mapped; documents follow each other, each ended by
    `end_of_text`. fingerprint: digest of all tokens and the vocabulary: equal exactly when training
    would read the same.
    """

    tokenizer: Tokenizer
    train: Tokens
    valid: Tokens
    end_of_text: int
    fingerprint: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Position:
    """How far training has come: optimizer steps done, and sequences read by all ranks together."""

    step: int = 0
    consumed: int = 0


class Split(NamedTuple):
    """Which documents serve which purpose, as limits on the hash of their name.

    Hashes up to `held_out` are for validation; those above, up to `vocabulary`, teach the
    vocabulary too.
    """

    held_out: int
    vocabulary: int
    total_bytes: int


def cache_folder(cache: Path, corpus: Corpus, vocab_size: int) -> Path:
    """Where the tokens of this corpus in a vocabulary of this size lie."""
    return cache / f"{corpus.digest()}-{vocab_size}"


def build_cache(folder: Path, corpus: Corpus, vocab_size: int) -> Iterator[str]:
    """Fill `folder`, unless it is there: learn the vocabulary, write all tokens. Yields what it
    does, piece by piece.

    Everything is written beside and moved into place at the end: a folder that exists is complete.

    Raises:
        DataError: when the corpus holds no text or a file of it is broken.
    """
    if folder.exists():
        return
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield "reading the text"
        split = split_documents(corpus)
        yield f"learning a vocabulary of {vocab_size} tokens"
        tokenizer = train_tokenizer(corpus, split, vocab_size)
        tokenizer.save(str(partial / "tokenizer.json"))
        yield from _write_tokens(partial, corpus, split, tokenizer)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.exists():  # else another run has built the same meanwhile
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def open_cache(folder: Path) -> TokenData:
    """What `build_cache` made."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    facts = json.loads((folder / "facts.json").read_text())
    train, valid = (np.load(folder / f"{part}.npy", mmap_mode="r") for part in ("train", "valid"))
    return TokenData(
        tokenizer=tokenizer,
        train=train,
        valid=valid,
        end_of_text=facts["end_of_text"],
        fingerprint=facts["fingerprint"],
    )


def name_hash(name: str) -> int:
    """A number in [0, 2**64), spread evenly and the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def split_documents(corpus: Corpus) -> Split:
    """Hold out whole documents, those of the smallest hashes, up to `HELD_OUT_SHARE`: at least one,
    never the last.
    """
    hashes, sizes = array.array("Q"), array.array("Q")
    for document in corpus.documents():
        hashes.append(name_hash(document.name))
        sizes.append(len(document.text.encode("utf-8", "surrogatepass")))
    if not hashes:
        raise DataError(
            f"no text in {corpus.root}: its {len(corpus.files)} file(s) hold only white space."
        )
    order = np.argsort(np.asarray(hashes))
    ordered, sums = np.asarray(hashes)[order], np.cumsum(np.asarray(sizes)[order])
    held = min(int(np.searchsorted(sums, HELD_OUT_SHARE * float(sums[-1]))) + 1, len(ordered) - 1)
    before = int(sums[held - 1]) if held else 0
    last = min(int(np.searchsorted(sums, before + TOKENIZER_BYTES)), len(ordered) - 1)
    return Split(int(ordered[held - 1]) if held else -1, int(ordered[last]), int(sums[-1]))


def train_tokenizer(corpus: Corpus, split: Split, vocab_size: int) -> Tokenizer:
    """A byte-level byte-pair encoding learned from training documents: any text comes back
    unchanged.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = (
        _clean(doc.text)
        for doc in corpus.documents()
        if split.held_out < name_hash(doc.name) <= split.vocabulary
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _clean(text: str) -> str:
    """Lone surrogates, which JSON allows and UTF-8 does not, become question marks."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _document_batches(corpus: Corpus) -> Iterator[list[Document]]:
    batch: list[Document] = []
    size = 0
    for document in corpus.documents():
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_tokens(
    folder: Path, corpus: Corpus, split: Split, tokenizer: Tokenizer
) -> Iterator[str]:
    """Write train.npy, valid.npy and facts.json."""
    dtype = np.dtype(np.uint16 if tokenizer.get_vocab_size() <= 2**16 else np.uint32)
    end = np.array([tokenizer.token_to_id(END_OF_TEXT)], dtype)
    # Text that happens to spell the end-of-text token is encoded as the characters it is.
    tokenizer.encode_special_tokens = True
    digest = hashlib.sha256((folder / "tokenizer.json").read_bytes())
    counts = {"train": 0, "valid": 0}
    done = 0
    with (folder / "train.raw").open("wb") as train, (folder / "valid.raw").open("wb") as valid:
        for batch in _document_batches(corpus):
            for document, encoding in zip(
                batch, tokenizer.encode_batch([_clean(doc.text) for doc in batch]), strict=True
            ):
                part = "train" if name_hash(document.name) > split.held_out else "valid"
                tokens = np.concatenate([np.array(encoding.ids, dtype), end])
                (train if part == "train" else valid).write(tokens.tobytes())
                digest.update(part.encode() + tokens.tobytes())
                counts[part] += len(tokens)
                done += len(document.text.encode("utf-8", "surrogatepass"))
            yield f"turning text into tokens: {min(done / split.total_bytes, 1):.0%}"
    for part, count in counts.items():
        _raw_to_npy(folder / f"{part}.raw", folder / f"{part}.npy", dtype, count)
    facts = {"fingerprint": digest.hexdigest(), "end_of_text": int(end[0]), "tokens": counts}
    (folder / "facts.json").write_text(json.dumps(facts, indent=2) + "\n")


def _raw_to_npy(raw: Path, target: Path, dtype: np.dtype[Any], count: int) -> None:
    """Put the .npy header, which needs the count, before the tokens."""
    with target.open("wb") as file, raw.open("rb") as source:
        np.lib.format.write_array_header_1_0(
            file, {"descr": dtype.str, "fortran_order": False, "shape": (count,)}
        )
        shutil.copyfileobj(source, file)
        file.flush()
        os.fsync(file.fileno())
    raw.unlink()


def rank_position(consumed: int, micro: int, batch_size: int, rank: int, world_size: int) -> int:
    """The first sample of `rank`'s micro-batch `micro` in a step that starts after `consumed`
    samples of all ranks.

    One step reads one contiguous run of samples, so after a resume on another number of processes
    nothing is read twice and nothing is left out.
    """
    return consumed + (micro * world_size + rank) * batch_size


class TrainingSequences:
    """Training tokens cut into sequences, in an order shuffled anew for each pass.

    The order depends on nothing but (tokens, seq_len, seed): to go on, the count of samples read is
    enough.

    Raises:
        DataError: when the tokens do not fill one sequence.
    """

    def __init__(self, tokens: Tokens, seq_len: int, seed: int) -> None:
        self.tokens = tokens
        self.seq_len = seq_len
        self.seed = seed
        self.num_sequences = (len(tokens) - 1) // seq_len
        if self.num_sequences < 1:
            raise DataError(
                f"the training text is {len(tokens)} tokens long, shorter than one "
                f"sequence of {seq_len} "
                "tokens and its next token: give more text or a smaller --seq-len."
            )
        self._epoch = -1
        self._order: npt.NDArray[np.int64] = np.empty(0, np.int64)

    def sequence(self, sample: int) -> int:
        """Which sequence the sample number `sample`, counted from the start of training, reads."""
        epoch, place = divmod(sample, self.num_sequences)
        if epoch != self._epoch:
            self._order = np.random.default_rng([self.seed, epoch]).permutation(self.num_sequences)
            self._epoch = epoch
        return int(self._order[place])

    def batch(self, position: int, batch_size: int) -> Batch:
        """Samples position .. position + batch_size - 1; targets are the inputs one token later."""
        return cut(
            self.tokens, [self.sequence(position + i) for i in range(batch_size)], self.seq_len
        )


def validation_batches(
    tokens: Tokens, seq_len: int, batch_size: int, rank: int, world_size: int, limit: int
) -> Iterator[Batch]:
    """This rank's share of at most `limit` held-out sequences, spread evenly over the held-out
    text.

    All ranks get equally many batches of equal size, since they call the model together; what fills
    the last ones up has targets `IGNORED`. Empty when the held-out text is shorter than one
    sequence.
    """
    num_sequences = max((len(tokens) - 1) // seq_len, 0)
    chosen = np.linspace(0, num_sequences - 1, min(limit, num_sequences)).astype(int).tolist()
    for first in range(0, len(chosen), batch_size * world_size):
        start = rank_position(first, 0, batch_size, rank, world_size)
        mine = chosen[start : start + batch_size]
        inputs, targets = cut(tokens, mine + [0] * (batch_size - len(mine)), seq_len)
        targets[len(mine) :] = IGNORED
        yield inputs, targets


def cut(tokens: Tokens, sequences: list[int], seq_len: int) -> Batch:
    """The given sequences as (inputs, targets), both int64 (len(sequences), seq_len)."""
    rows = [tokens[number * seq_len : (number + 1) * seq_len + 1] for number in sequences]
    both = torch.from_numpy(np.stack(rows).astype(np.int64))
    return both[:, :-1].contiguous(), both[:, 1:].contiguous()
