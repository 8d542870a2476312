"""`python -m model_center train --from-scratch`: vocabularies of texts, rows, bits per byte, and what
comes out, beside transformers in one process.
"""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from tests.data_sets.common import tokenizer as stored
from tests.data_sets.common import write_rows, write_tokens
from tests.ranks.runner import run_ranks
from tests.training.lm_programs import (
    COMMAND,
    DATA,
    TINY,
    command,
    losses,
    main,
    results,
    same_learning,
    words_of,
)
from tests.training.their_models import HEADS, tiny_config

from bmtrain.runtime import world
from model_center.dataset.concatenated import ConcatenatedTexts
from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.mixture import MixturePart
from model_center.dataset.packing import PackedSamples
from model_center.errors import ConfigError, DataError, ResumeError
from model_center.generation import generate
from model_center.tokenizer.byte_level import byte_level_bpe, pieces, tokenizer_from
from model_center.training.trained_model import native_class

WORDS = [
    "alpha",
    "beta",
    "gamma",
    "delta",
    "12",
    "345",
    "don't",
    "é",
    "世界",
    "🙂",
    "def",
    "return",
]
LENGTH = 16


def texts(seed, count):
    """Texts of words and other letters, some of them longer than rows, some ending in blanks."""
    draw = np.random.default_rng(seed)
    return [
        " ".join(WORDS[n] for n in draw.integers(0, len(WORDS), draw.integers(2, 40)))
        + "\n" * (number % 3)
        + "  x" * (number % 2)
        for number in range(count)
    ]


def rows(folder, name, seed, count):
    return write_rows(folder / name, *({"text": text} for text in texts(seed, count)))


def configured(folder, kind, first=None, **values):
    """A folder with the configuration of a tiny model, and nothing else; made of the `first` values."""
    config = tiny_config(kind, **(first or {}))
    config.update({"architectures": None, **({"rotary_dim": 8} if kind == "gptj" else {})})
    config.update(values)
    names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    config.architectures = [names[kind]]
    config.save_pretrained(folder / kind)
    return folder / kind


def base(folder, kind, *words):
    """Arguments of a run of a few steps."""
    learnt = rows(folder, "learnt.jsonl", 0, 40)
    measured = rows(folder, "measured.jsonl", 1, 8)
    model = configured(folder, kind) if not (folder / kind).exists() else folder / kind
    how = f"--from-scratch --max-length {LENGTH} --batch-size 2 {TINY}"
    return ["--model-config", model, how, "--data", learnt, "--validation", measured, *words]


def coded(model, tokenizer, found, packing):
    """Bits per byte of texts in plain transformers, row by row."""
    documents = [
        [0, *tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        for text in found
    ]
    if packing == "concatenated":
        documents = [[number for document in documents for number in document]]
    nats = torch.zeros((), dtype=torch.float64)
    for document in documents:
        for start in range(0, len(document), LENGTH):
            ids = torch.tensor(document[start : start + LENGTH])
            targets = torch.tensor(document[start + 1 : start + LENGTH + 1], dtype=torch.long)
            with torch.no_grad():
                logits = model(input_ids=ids[None]).logits[0, : len(targets)]
            each = F.cross_entropy(logits.double(), targets, reduction="none")
            nats += each[targets != 0].sum()  # nothing is to begin a text
    return float(nats) / math.log(2) / sum(len(text.encode()) for text in found)


# transformers leaves a thread behind
@pytest.mark.fresh
@pytest.mark.parametrize(
    ("kind", "packing", "ranks"),
    [
        ("llama", "separate", 2),
        ("qwen2", "concatenated", 2),
        pytest.param("gpt2", "concatenated", 2, marks=pytest.mark.long),
        pytest.param("mistral", "separate", 1, marks=pytest.mark.long),
        pytest.param("opt", "separate", 2, marks=pytest.mark.long),
        pytest.param("gptj", "separate", 2, marks=pytest.mark.long),
        pytest.param("qwen3", "concatenated", 1, marks=pytest.mark.long),
        pytest.param("qwen3_moe", "separate", 2, marks=pytest.mark.long),
        pytest.param("gemma3_text", "concatenated", 2, marks=pytest.mark.long),
        pytest.param("phi3", "separate", 1, marks=pytest.mark.long),
        pytest.param("mamba", "concatenated", 2, marks=pytest.mark.long),
        pytest.param("phi3", "concatenated", 2, marks=pytest.mark.long),
    ],
)
def test_from_a_configuration_to_a_model(kind, packing, ranks, tmp_path):
    """Bits per byte are those that transformers computes with what was saved; tokenizer, ids of
    special tokens and generation are the same there, and here.
    """
    if (kind, packing) == ("phi3", "concatenated"):  # all rows are longer than the original length
        factors = {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
        scaling = {"rope_scaling": {"type": "longrope", **factors}, "pad_token_id": 0}
        configured(tmp_path, kind, {**HEADS, **scaling, "original_max_position_embeddings": 2})
    words = f"--vocab-size 300 --packing {packing} --train-iters 3 --epochs 2 --samples 1 --save"
    command(*base(tmp_path, kind, words, tmp_path / "run"), ranks=ranks)
    saved = tmp_path / "run" / "model"
    tokenizer = transformers.AutoTokenizer.from_pretrained(saved)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32)
    (found,) = results(tmp_path / "run", "bits_per_byte")
    assert found == pytest.approx(coded(model.eval(), tokenizer, texts(1, 8), packing), rel=1e-5)
    run = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "tokenizer")
    for text in texts(2, 5):
        assert tokenizer.encode(text) == run.encode(text)
        assert tokenizer.decode(tokenizer.encode(text)) == f"<|bos|>{text}"
    config = model.config.get_text_config()
    assert (config.vocab_size, len(tokenizer), tokenizer.chat_template) == (300, 300, None)
    for one in (config, model.generation_config):
        assert (one.bos_token_id, one.eos_token_id, one.pad_token_id) == (0, 1, 2)
    kind_here = native_class(str(saved))
    if kind_here is None:
        return
    ids = torch.tensor([tokenizer.encode("alpha beta")])
    theirs = model.generate(input_ids=ids, max_new_tokens=5, do_sample=False)
    ours = kind_here.from_pretrained(saved, dtype=torch.float32)
    mine = generate(ours.eval(), ids, eos_token_id=1, max_new_tokens=5)
    assert list(mine.rows()[0]) == theirs[0, ids.shape[1] :].tolist()


def go_on(words, folder):
    """On a rank: a run of four steps; one that is ended after two, refuses other texts and another
    vocabulary, goes on, and then on other texts with the vocabulary that it has.
    """

    def train(save, *more):
        world.shutdown()
        main(COMMAND, [*words, *words_of("--save", Path(folder, save), *more)])

    other = ["--data", Path(folder, "other.jsonl")]
    train("whole", "--vocab-size 300 --train-iters 4")
    train("parts", "--vocab-size 300 --train-iters 2")
    for more, said in (
        (["--vocab-size 300", *other], "the texts of --data are others"),
        (["--vocab-size 301"], "--vocab-size was 300 and is 301"),
    ):
        with pytest.raises(ResumeError, match=rf"vocabulary of the run.*{said}.*Remedy"):
            train("parts", "--train-iters 4 --resume", *more)
    train("parts", "--vocab-size 300 --train-iters 4 --resume")
    continues = "--vocab-size 300 --train-iters 5 --resume --continue-with-other-data"
    train("parts", continues, *other)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.long)])
def test_a_run_goes_on_bit_by_bit(ranks, tmp_path):
    """With the vocabulary that it has made, of which no other is made."""
    rows(tmp_path, "other.jsonl", 5, 40)
    words = base(tmp_path, "llama", "--packing concatenated --epochs 2 --samples 1 --eval-iters 2")
    run_ranks(go_on, ranks, words_of(*words), str(tmp_path), join=False, timeout=120)
    parts, whole = tmp_path / "parts", tmp_path / "whole"
    assert len(losses(parts)) == 5
    record = parts / "metrics.jsonl"
    kept = record.read_text().splitlines(keepends=True)
    record.write_text("".join(line for line in kept if json.loads(line)["step"] < 5))
    same_learning(parts, whole)
    vocabularies = [(path / "tokenizer" / "tokenizer.json").read_bytes() for path in (parts, whole)]
    assert vocabularies[0] == vocabularies[1]
    before, after = (
        transformers.AutoTokenizer.from_pretrained(path / "model").get_vocab()
        for path in (whole, parts)
    )
    assert before == after


@pytest.mark.parametrize(
    ("words", "error", "complaint"),
    [
        ("", ConfigError, "holds no tokenizer: train one on the texts with --vocab-size"),
        ("--vocab-size 100", ConfigError, "expected 259 at least"),
        ("--vocab-size 5000", DataError, r"yield a vocabulary of \d+ tokens, not of 5,000"),
        ("--tokenizer GPT2 --vocab-size 64", ConfigError, "tokens, and the model's vocab_size is"),
        ("--vocab-size 300 --data EMPTY", DataError, "tokens, not of 300"),
        ("--vocab-size 300 --data TOKENS", DataError, "tokens: give the tokenizer that made them"),
        (
            "--vocab-size 300 --packing concatenated --data CHAT",
            DataError,
            "conversations cannot be concatenated",
        ),
    ],
)
def test_what_cannot_be_trained(words, error, complaint, tmp_path):
    """Is said before anything is made, and does not keep the next run."""
    places = {
        "GPT2": DATA / "tokenizers" / "gpt2",
        "EMPTY": write_rows(tmp_path / "empty.jsonl", {"text": ""}),
        "TOKENS": write_tokens(tmp_path / "tokens", [[[3, 4, 5]]]),
        "CHAT": DATA / "chat" / "train.jsonl",
    }
    for name, place in places.items():
        words = words.replace(name, str(place))
    run = base(tmp_path, "llama", "--save", tmp_path / "run", "--train-iters 1")
    with pytest.raises(error, match=complaint):
        command(*run, words, ranks=1)
    assert not list(tmp_path.glob("run/step-*"))
    if words == "--vocab-size 5000":
        command(*run, "--vocab-size 300", ranks=1)
        assert len(losses(tmp_path / "run")) == 1


def test_pretrained_weights_keep_their_tokenizer(tmp_path):
    run = [word for word in words_of(*base(tmp_path, "llama")) if word != "--from-scratch"]
    with pytest.raises(ConfigError, match="are for --from-scratch"):
        command(*run, "--vocab-size 300", ranks=1)


# --- the data


def test_a_vocabulary_is_made_of_texts():
    """The same one from any pieces of them, exactly as large as asked, and exact on any text."""
    found = texts(0, 60)
    text = byte_level_bpe(found, 305)
    whole = "\n".join(found)
    parted = [whole[start : start + 2000] for start in range(0, len(whole), 2000)]
    assert "".join(parted) == "".join(pieces(whole))
    assert byte_level_bpe(found, 305) == text
    tokenizer = tokenizer_from(text)
    assert len(tokenizer) == 305 and tokenizer.encode("") == [tokenizer.bos_token_id]
    for one in [*texts(3, 9), "\x00\ufeff tab\t\r\n", "ê̸"]:
        assert tokenizer.decode(tokenizer.encode(one)[1:]) == one
    steps = json.loads(stored("gpt2").backend_tokenizer.to_str())["pre_tokenizer"]
    assert json.loads(text)["pre_tokenizer"] == steps  # words are parted as GPT-2 does it


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_bytes_of_what_is_learnt(name, tmp_path):
    """All bytes of a text, whatever the length of rows, but those of a first token that nothing
    predicts.
    """
    tokenizer = copy.deepcopy(stored(name))  # it is changed below
    given = [*texts(4, 12), "", " ", "é" * 40, "  \n lead"]
    path = write_rows(tmp_path / "a.jsonl", *({"text": text} for text in given))
    expected = [len(text.encode()) for text in given]
    for length in (2, 7, 64):
        data = InstructionDataset(path, tokenizer, length)
        found = [
            sum(data.num_bytes(n) or 0 for n in data.samples_of(row)) for row in range(len(given))
        ]
        assert found == expected
        assert PackedSamples(data, length).num_bytes() == sum(expected)
        parts = [MixturePart(data, range(len(given)))]
        assert ConcatenatedTexts(parts, length, shuffle=False).num_bytes() == sum(expected)
    tokenizer.bos_token = None
    data = InstructionDataset(path, tokenizer, 7)
    first = data.tokens.num_bytes
    assert first is not None
    begins = [int(first[data.tokens.starts[row]]) for row in range(len(given))]
    for row, (size, begin) in enumerate(zip(expected, begins, strict=True)):
        assert sum(data.num_bytes(n) or 0 for n in data.samples_of(row)) == size - begin


def test_token_data_are_texts(tmp_path):
    """Rows are what the same texts give, byte for byte."""
    tokenizer: Any = tokenizer_from(byte_level_bpe(texts(0, 40), 300))
    path = rows(tmp_path, "a.jsonl", 6, 20)
    whole = InstructionDataset(path, tokenizer, 9)
    tokens = whole.tokens
    places = zip(tokens.starts, tokens.stops, strict=True)
    write_tokens(tmp_path / "b", [[tokens.ids[start:stop]] for start, stop in places], np.uint16)
    for name in ("b", "b.bin"):
        data = InstructionDataset(tmp_path / name, tokenizer, 9)
        assert len(data) == len(whole) and data.num_rows == 20
        for number in range(len(data)):
            own, other = data[number], whole[number]
            assert own["input_ids"].equal(other["input_ids"])
            learnt = other["targets"] != -100
            assert own["targets"][learnt].equal(other["targets"][learnt])
        # a letter that two samples share is the first one's where it was read as a text
        for row in range(20):
            sizes = [[one.num_bytes(n) or 0 for n in one.samples_of(row)] for one in (data, whole)]
            assert sum(sizes[0]) == sum(sizes[1]) == len(texts(6, 20)[row].encode())


@pytest.mark.parametrize("bos", ["<|endoftext|>", None])
def test_concatenated_rows(bos, tmp_path):
    """Every token is a target once, in the order of the epoch, but the first, and what begins
    texts; ranks that would have no row get one without a target.
    """
    tokenizer = copy.deepcopy(stored("gpt2"))
    tokenizer.bos_token = bos
    data = InstructionDataset(rows(tmp_path, "a.jsonl", 7, 15), tokenizer, 9)
    other = InstructionDataset(rows(tmp_path, "b.jsonl", 8, 5), tokenizer, 9)
    parts = [MixturePart(data, [3, 1, 4, 1, 9]), MixturePart(other, range(5))]
    for length, seed in ((1, 0), (9, 3), (10_000, 3)):
        packed = ConcatenatedTexts(parts, length, seed=seed)
        orders = []
        for epoch in (0, 1):
            packed.set_epoch(epoch)
            items = [packed[number] for number in range(len(packed))]
            assert all(len(item["input_ids"]) == length for item in items[:-1])
            ids = torch.cat([item["input_ids"] for item in items]).tolist()
            targets = torch.cat([item["targets"] for item in items]).tolist()
            documents = _documents([*ids, tokenizer.eos_token_id], parts)
            stream = [number for document in documents for number in document]
            begins = [place == 0 for document in documents for place in range(len(document))]
            assert ids == stream[:-1]
            assert targets == [
                -100 if begin and bos else number
                for number, begin in zip(stream[1:], begins[1:], strict=True)
            ]
            assert sum(target != -100 for target in targets) == packed.overview().num_loss_tokens
            orders.append(documents)
        assert orders[0] != orders[1]
        packed.set_epoch(0)
        again = [packed[n]["input_ids"] for n in range(len(packed))]
        assert torch.cat(again).tolist() == [n for one in orders[0] for n in one][:-1]
    made_up = ConcatenatedTexts(parts, 10_000, least=3)
    assert len(made_up) == 3
    assert [bool((made_up[n]["targets"] != -100).any()) for n in range(3)] == [True, False, False]


def _documents(ids, parts):
    """The texts that a stream is of: each of the parts as often as it is there."""
    left = [
        part.samples.tokens.ids[part.samples.tokens.starts[n] : part.samples.tokens.stops[n]]
        for part in parts
        for n in part.numbers
    ]
    waiting = [one.tolist() for one in left]
    found: list[list[int]] = []
    while ids:
        document = next(one for one in waiting if ids[: len(one)] == one)
        waiting.remove(document)
        found.append(document)
        ids = ids[len(document) :]
    assert not waiting
    return found
