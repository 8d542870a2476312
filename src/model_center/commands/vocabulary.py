"""The vocabulary of a model that is trained from random weights: a given one, or one of its texts.

What is made of texts is made once, by rank 0, and kept in `tokenizer` in --save and in --cache.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import bmtrain as bmt
from bmtrain.checkpoint.folder import usable
from bmtrain.distributed.agreement import attempt, everyone
from bmtrain.distributed.collectives import broadcast_object
from bmtrain.runtime import world
from model_center.config.base import CONFIG_FILE, read_json
from model_center.dataset.rows import Source, source
from model_center.dataset.tokenised import parsed_rows
from model_center.errors import ConfigError, DataError, ResumeError
from model_center.hub.resolving import FILES, resolve
from model_center.optional import package
from model_center.tokenizer.byte_level import (
    GPT2_STEPS,
    byte_level_bpe,
    fewest_tokens,
    pieces,
    tokenizer_from,
)
from model_center.training.trained_model import Vocabulary
from model_center.weights.staging import write_whole
from model_center.weights.tokenizers import save_tokenizer

FOLDER, CONTENT, ORIGIN = "tokenizer", "tokenizer.json", "origin.json"
VERSION = 1  # of how a vocabulary is made of texts
Origin = dict[str, Any]  # what it was made of
# what tokenizers part in different ways
PROBE = "Don't we  know it's 12345? _x=f(y)\n\n\tif naïve:  # 世界，你好\r\n e\u0301 🙂\u00a0end "


def vocabulary_of(
    args: argparse.Namespace, names: Sequence[str], say: Callable[[str], None]
) -> Vocabulary | None:
    """The tokenizer as the flags say, and the ids of the model; None for the model's own.
    Collective.

    Args:
        args: the flags.
        names: of the data, without weights.
        say: is told what is made.

    Raises:
        ConfigError, DataError, IdentifierError, ResumeError: for flags that do not go together,
            texts that do not give so many tokens, and others than those of the run.
    """
    if args.tokenizer is None and args.vocab_size is None:
        attempt(lambda: _check_own(args), everyone(), ConfigError)
        return None
    if not args.from_scratch:
        raise ConfigError(
            "--tokenizer and --vocab-size are for --from-scratch: pretrained weights know the ids "
            "of their own tokenizer."
        )
    config = pathlib.Path(resolve(args.model_config, "config"), CONFIG_FILE)
    if args.tokenizer is None:
        tokenizer: Any = tokenizer_from(_of_texts(args, names, config, say))
    else:
        auto = package("transformers", "--tokenizer", ConfigError).AutoTokenizer
        folder = resolve(args.tokenizer, "tokenizer")
        tokenizer = attempt(lambda: auto.from_pretrained(folder), everyone(), ConfigError)
    attempt(
        lambda: _check_read(tokenizer, config) if bmt.rank() == 0 else None, everyone(), ConfigError
    )
    return Vocabulary(tokenizer, args.vocab_size)


def _read_with_config(tokenizer: Any, config: pathlib.Path) -> Any:
    """A tokenizer as transformers reads it beside a model: of some kinds by a class of its own,
    whatever the tokenizer's files say.
    """
    auto = package("transformers", "--from-scratch", ConfigError).AutoTokenizer
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(tokenizer, pathlib.Path(folder))
        shutil.copyfile(config, pathlib.Path(folder, CONFIG_FILE))
        return auto.from_pretrained(folder)


def _check_read(tokenizer: Any, config: pathlib.Path) -> None:
    read = _read_with_config(tokenizer, config)
    if read.encode(PROBE) != tokenizer.encode(PROBE):
        raise ConfigError(
            f"transformers loads any tokenizer of a {read_json(config).get('model_type')} as a "
            f"{type(read).__name__}, and this one then gives other ids: name a tokenizer of that "
            "class with --tokenizer, or use another model type."
        )


def _steps(config: pathlib.Path) -> dict[str, Any]:
    """How transformers parts words for a model of this kind, where that can be bytes.

    Raises:
        ConfigError: where it cannot.
    """
    smallest = tokenizer_from(byte_level_bpe((), fewest_tokens()))
    read = json.loads(_read_with_config(smallest, config).backend_tokenizer.to_str())
    if (read["decoder"] or {}).get("type") != "ByteLevel":
        raise ConfigError(
            f"transformers loads no byte-level vocabulary for the model type of {config}: "
            "name a tokenizer of its class with --tokenizer."
        )
    return {name: read[name] for name in ("normalizer", "pre_tokenizer")}


def _check_own(args: argparse.Namespace) -> None:
    folder = pathlib.Path(args.model_config)
    files = FILES["tokenizer"][0]
    if args.from_scratch and folder.is_dir() and not any((folder / one).exists() for one in files):
        raise ConfigError(
            f"{folder} holds no tokenizer: train one on the texts with --vocab-size, or name one "
            "with --tokenizer."
        )


def check_size(tokenizer: Any, vocab_size: int) -> None:
    """Refuse a tokenizer with more tokens than the model.

    Raises:
        ConfigError: for one.
    """
    number = len(tokenizer)
    if number > vocab_size:
        raise ConfigError(
            f"the tokenizer has {number:,} tokens, and the model's vocab_size is {vocab_size:,}: "
            f"give --tokenizer with --vocab-size {-(-number // 64) * 64}, or another tokenizer."
        )


def _of_texts(
    args: argparse.Namespace, names: Sequence[str], config: pathlib.Path, say: Callable[[str], None]
) -> str:
    """The `tokenizer.json` of the texts, on all ranks; in the run's folder on all hosts."""
    if args.vocab_size < fewest_tokens():
        raise ConfigError(
            f"--vocab-size {args.vocab_size}: expected {fewest_tokens()} at least, for all bytes "
            "and the special tokens."
        )
    axis = everyone()
    is_first = bmt.rank() == 0
    steps = attempt(lambda: _steps(config) if is_first else {}, axis, ConfigError)
    origin = attempt(lambda: _origin(args, names, steps) if is_first else {}, axis, DataError)
    text = attempt(lambda: _saved_vocabulary(args, origin) if is_first else "", axis, ResumeError)
    text = attempt(
        lambda: text or (_made(args, names, origin, say) if is_first else ""), axis, DataError
    )
    if world.is_initialized():
        everywhere = world.current().mesh.world
        origin, text = broadcast_object((origin, text), 0, everywhere, "the vocabulary")
    keeps = args.save and (not world.is_initialized() or world.current().local_rank == 0)
    attempt(lambda: _keep(args, origin, text) if keeps else None, axis, DataError)
    return text


def _origin(args: argparse.Namespace, names: Sequence[str], steps: dict[str, Any]) -> Origin:
    digests = [_texts(name).digest() for name in names]
    own = {"texts": digests, "vocab_size": args.vocab_size, "version": VERSION}
    return own if steps == GPT2_STEPS else {**own, "steps": steps}


def _texts(name: str) -> Source:
    found = source(name)
    if found.is_tokens:
        raise DataError(f"{name} holds tokens: give the tokenizer that made them by --tokenizer.")
    return found


def _saved_vocabulary(args: argparse.Namespace, origin: Origin) -> str:
    """The vocabulary in the run's folder; empty where it is still to be made.

    Raises:
        ResumeError: if the run has one of other texts, or of another size.
    """
    folder = pathlib.Path(args.save, FOLDER) if args.save else None
    if folder is None or not (folder / ORIGIN).is_file():
        return ""
    before = json.loads((folder / ORIGIN).read_text("utf-8"))
    if before == origin or args.continue_with_other_data:
        return (folder / CONTENT).read_text("utf-8")
    if not usable(folder.parent):
        return ""
    sizes = before["vocab_size"], origin["vocab_size"]
    differs = "the texts of --data are others"
    if sizes[0] != sizes[1]:
        differs = f"--vocab-size was {sizes[0]} and is {sizes[1]}"
    raise ResumeError(
        f"the vocabulary of the run in {args.save} differs: {differs}. Remedy: give the same "
        "arguments to resume, or another --save; --continue-with-other-data trains on other texts "
        "with the run's vocabulary."
    )


def _made(
    args: argparse.Namespace, names: Sequence[str], origin: Origin, say: Callable[[str], None]
) -> str:
    """The vocabulary of the texts, from --cache if it is there."""
    key = hashlib.sha256(json.dumps(origin).encode()).hexdigest()[:24]
    cached = pathlib.Path(args.cache, f"{FOLDER}-{key}.json") if args.cache else None
    if cached is not None and cached.is_file():
        return cached.read_text("utf-8")
    say(f"vocabulary: {args.vocab_size:,} tokens are made of {', '.join(names)} ...")
    begin = time.perf_counter()
    steps = origin.get("steps", GPT2_STEPS)
    text = byte_level_bpe(_written(names), args.vocab_size, steps)
    say(f"  in {time.perf_counter() - begin:.0f} s")
    if cached is not None:
        cached.parent.mkdir(parents=True, exist_ok=True)
        write_whole(cached, text)
    return text


def _written(names: Sequence[str]) -> Iterator[str]:
    """All texts in pieces; of conversations what is said."""
    for name in names:
        for row in _texts(name).rows():
            for one in parsed_rows(row):
                said = [message["content"] for message in one.messages]
                for text in said if one.text is None else [one.text]:
                    yield from pieces(text)


def _keep(args: argparse.Namespace, origin: Origin, text: str) -> None:
    """Write the vocabulary into the run's folder, as transformers reads it."""
    folder = pathlib.Path(args.save, FOLDER)
    if (folder / CONTENT).is_file() and (folder / CONTENT).read_text("utf-8") == text:
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ORIGIN).unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        save_tokenizer(tokenizer_from(text), pathlib.Path(made))
        for file in pathlib.Path(made).iterdir():
            file.rename(folder / file.name)
    write_whole(folder / CONTENT, text)
    write_whole(folder / ORIGIN, json.dumps(origin))  # last: then all of it is there
