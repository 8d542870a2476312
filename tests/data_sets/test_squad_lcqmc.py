"""SQuAD for T5 and LCQMC for CPM, against the texts of their files written out here; and that
BoolQ's toy set can be learnt.
"""

from __future__ import annotations

import json
import pathlib
import pickle
import types
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from model_center.dataset import bertdataset, cpm1dataset, cpm2dataset, t5dataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.errors import DataError
from model_center.tokenizer import (
    BertTokenizer,
    CPM1Tokenizer,
    CPM2Tokenizer,
    GPT2Tokenizer,
    T5Tokenizer,
)

DATA = pathlib.Path(__file__).parents[1] / "data"
T5 = T5Tokenizer.from_pretrained(DATA / "tokenizers" / "t5")
CPM1: Any = CPM1Tokenizer.from_pretrained(DATA / "tokenizers" / "cpm1")
CPM2: Any = CPM2Tokenizer.from_pretrained(DATA / "tokenizers" / "cpm2")


def squad(split: str, *lengths: int, path: pathlib.Path = DATA / "squad", **options: Any) -> Any:
    """SQuAD as T5 reads it."""
    return t5dataset.DATASET["SQuAD"](path, split, T5, *(lengths or (256, 32)), **options)


def questions(split: str) -> list[tuple[str, str, list[str]]]:
    """Context, question and answers of the stored file."""
    data = json.loads((DATA / "squad" / f"{split}-v1.1.json").read_text(encoding="utf-8"))["data"]
    paragraphs = [paragraph for article in data for paragraph in article["paragraphs"]]
    return [
        (paragraph["context"], asked["question"], [answer["text"] for answer in asked["answers"]])
        for paragraph in paragraphs
        for asked in paragraph["qas"]
    ]


def filled(ids: list[int], length: int, fill: int = 0) -> list[int]:
    return [*ids, *[fill] * (length - len(ids))]


def test_squad_is_trained_as_text_to_text() -> None:
    """Prompt and answer between sentinels, padded; the decoder reads the target one place later."""
    items = squad("train")
    for item, (context, question, answers) in zip(items, questions("train"), strict=True):
        prompt = T5.encode(f"Question: {question} Answer: <extra_id_0> Context: {context}")
        target = T5.encode(f"<extra_id_0> {answers[0]} <extra_id_1>")
        assert {key: value.tolist() for key, value in item.items()} == {
            "input_ids": filled(prompt, 256),
            "attention_mask": filled([1] * len(prompt), 256),
            "decoder_input_ids": filled([0, *target], 32),
            "targets": filled(target, 32, -100),
            "decoder_attention_mask": filled([1] * len(target), 32),
        }
        assert {value.dtype for value in item.values()} == {torch.int64}
    (whole,) = DataLoader(items, len(items))
    (short,) = DataLoader(items, len(items), collate_fn=items.collate)
    assert whole.keys() == short.keys() == items[0].keys()
    for key, value in whole.items():
        encoder = key in ("input_ids", "attention_mask")
        mask = whole["attention_mask" if encoder else "decoder_attention_mask"]
        assert torch.equal(short[key], value[:, : int(mask.sum(1).max())])
        assert short[key].shape[1] < value.shape[1]


def test_squad_is_evaluated_by_texts() -> None:
    """Prompts, and the set of right answers."""
    items = squad("dev")
    expected = [
        (f"Question: {question} Answer: <extra_id_0> Context: {context}", set(answers))
        for context, question, answers in questions("dev")
    ]
    assert [(item["inputs"], item["targets"]) for item in items] == expected
    (batch,) = DataLoader(items, len(items), collate_fn=items.collate)
    assert batch == {
        "inputs": [prompt for prompt, _ in expected],
        "targets": [answers for _, answers in expected],
    }


def test_squad_cuts_ends_and_chooses_one_answer(tmp_path: pathlib.Path) -> None:
    """The end of the context is lost, not the question; the answer is the same every time, another
    by another seed.
    """
    short = squad("train", 24, 4)[0]
    assert len(short["input_ids"]) == 24
    assert short["input_ids"][-1] == T5.eos_token_id
    assert len(short["targets"]) == 4
    asked = [
        {
            "id": str(number),
            "question": "q",
            "answers": [{"text": word} for word in ["harbour", "market", "river"]],
        }
        for number in range(9)
    ]
    asked.append({"id": "none", "question": "q", "answers": []})
    content = {"data": [{"paragraphs": [{"context": "c", "qas": asked}]}]}
    (tmp_path / "train-v1.1.json").write_text(json.dumps(content))
    targets = [
        [item["targets"].tolist() for item in squad("train", path=tmp_path, seed=seed)]
        for seed in (0, 0, 1)
    ]
    assert targets[0] == targets[1] != targets[2]
    assert len({tuple(row) for row in targets[0][:9]}) == 3
    assert targets[0][9] == filled(T5.encode("<extra_id_0> no answer <extra_id_1>"), 32, -100)
    (tmp_path / "dev-v1.1.json").write_text(json.dumps(content))
    assert squad("dev", path=tmp_path)[9]["targets"] == {"no answer"}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not of SQuAD's format"),
        ("[]", "not of SQuAD's format"),
        ('{"data": [{"paragraphs": [{"qas": [{}]}]}]}', "there is no field 'answers'"),
        ('{"data": []}', "holds no questions"),
    ],
)
def test_bad_squad_files_are_refused(tmp_path: pathlib.Path, content: str, complaint: str) -> None:
    """At construction."""
    (tmp_path / "train-v1.1.json").write_text(content)
    with pytest.raises(DataError, match=complaint):
        squad("train", path=tmp_path)
    with pytest.raises(DataError, match=r"there is no .*dev-v1\.1\.json"):
        squad("dev", path=tmp_path)
    with pytest.raises(DataError, match="Splits are 'train' and 'dev'"):
        squad("test")
    other = GPT2Tokenizer.from_pretrained(DATA / "tokenizers" / "gpt2")
    assert (
        "<extra_id_0>"
        in t5dataset.DATASET["SQuAD"](DATA / "squad", "dev", other, 64, 8)[0]["inputs"]
    )
    with pytest.raises(DataError, match="no token <extra_id_0>"):
        t5dataset.DATASET["SQuAD"](DATA / "squad", "train", other, 64, 8)[0]


def pairs(split: str) -> list[list[str]]:
    """The cells of LCQMC's stored file, without its header."""
    lines = (
        (DATA / "paraphrase" / "LCQMC" / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
    )
    return [line.split("\t") for line in lines[1:]]


def test_lcqmc_for_cpm1_has_a_blank() -> None:
    """Seen from both sides; the token before it chooses the class. Padding counts as context."""
    items = cpm1dataset.DATASET["LCQMC"](DATA / "paraphrase", "train", 0, 1, CPM1, 64)
    assert len(items) == len(pairs("train"))
    for item, (first, second, label) in zip(items, pairs("train"), strict=True):
        left = [1, *CPM1.encode(f'"{first}"与"{second}"的关系是:')]
        ids = [*left, 0, *CPM1.encode("。")]
        assert {key: value.tolist() for key, value in item.items()} == {
            "input_tokens": filled(ids, 64),
            "input_length": len(ids),
            "input_context": [place != len(left) for place in range(64)],
            "input_span": [0] * 64,
            "index": [int(place == len(left) - 1) for place in range(64)],
            "targets": int(label),
        }
    check_dtypes(items[0], {"input_context": torch.bool})
    (whole,) = DataLoader(items, len(items))
    (short,) = DistributedDataLoader(items, batch_size=len(items))
    longest = int(whole["input_length"].max())
    assert longest < 64
    for key, value in whole.items():
        assert torch.equal(short[key], value[:, :longest] if value.dim() == 2 else value)


def check_dtypes(item: dict[str, torch.Tensor], others: dict[str, torch.dtype]) -> None:
    """As in ModelCenter: int64 targets, int32 for the rest."""
    expected = dict.fromkeys(item, torch.int32) | {"targets": torch.int64} | others
    assert {key: value.dtype for key, value in item.items()} == expected


def test_lcqmc_for_cpm2_ends_in_a_sentinel() -> None:
    """With which the decoder starts, and where the class is chosen."""
    items = cpm2dataset.DATASET["LCQMC"](DATA / "paraphrase", "dev", 0, 1, CPM2, 64, 4)
    for item, (first, second, label) in zip(items, pairs("dev"), strict=True):
        ids = [*CPM2.encode(f"“{first}”与“{second}”是否有关？"), CPM2.get_sentinel_id(0)]
        assert {key: value.tolist() for key, value in item.items()} == {
            "enc_input": filled(ids, 64),
            "enc_length": len(ids),
            "dec_input": [CPM2.get_sentinel_id(0), 0, 0, 0],
            "dec_length": 1,
            "index": [1, 0, 0, 0],
            "targets": int(label),
        }
    check_dtypes(items[0], {})
    (short,) = DistributedDataLoader(items, batch_size=len(items))
    assert short["enc_input"].shape == (len(items), int(short["enc_length"].max()))
    assert short["dec_input"].shape == short["index"].shape == (len(items), 1)
    assert (
        pickle.loads(pickle.dumps(items))[3]["enc_input"].tolist() == items[3]["enc_input"].tolist()
    )


def test_long_pairs_of_lcqmc_lose_the_end_of_the_longer_text(tmp_path: pathlib.Path) -> None:
    """Never what stands around the texts, and no more than is needed."""
    (tmp_path / "train.tsv").write_text(
        f"text_a\ttext_b\tlabel\n{'好' * 50}\t天{'气' * 20}\t1\n好\t好\t0\n", encoding="utf-8"
    )
    items = cpm1dataset.DATASET["LCQMC"](tmp_path, "train", 0, 1, CPM1, 30)
    assert items[0]["input_length"] == len(items[0]["input_tokens"]) == 30
    begin, end = CPM1.encode('"好好'), CPM1.encode('气"的关系是:')
    assert items[0]["input_tokens"].tolist()[1 : 1 + len(begin)] == begin
    assert items[0]["input_tokens"].tolist()[-2 - len(end) : -2] == end
    whole = [1, *CPM1.encode('"好"与"好"的关系是:'), 0, *CPM1.encode("。")]
    assert items[1]["input_tokens"].tolist() == filled(whole, 30)
    other = cpm2dataset.DATASET["LCQMC"](tmp_path, "train", 0, 1, CPM2, 30, 1)
    assert other[0]["enc_length"] == len(other[0]["enc_input"]) == 30
    assert other[0]["enc_input"][-1] == CPM2.get_sentinel_id(0)
    with pytest.raises(DataError, match="max_length is 8: expected at least"):
        cpm1dataset.DATASET["LCQMC"](tmp_path, "train", 0, 1, CPM1, 8)


def test_words_of_lcqmc_are_looked_up(tmp_path: pathlib.Path) -> None:
    """Two ids of a small vocabulary, if it has them; of one as large as the published,
    ModelCenter's.
    """
    related = CPM1.convert_tokens_to_ids(["有关", "无关"])
    assert cpm1dataset.LCQMC_Dataset.get_verbalizer(CPM1) == related
    assert cpm2dataset.LCQMC_Dataset.get_verbalizer(CPM2) == related
    lines = (DATA / "tokenizers" / "cpm1" / "vocab.txt").read_text(encoding="utf-8").splitlines()
    few = [line for line in lines if line not in ("有关", "无关", "有", "无", "关")]
    (tmp_path / "vocab.txt").write_text("\n".join(few) + "\n", encoding="utf-8")
    lacking: Any = CPM1Tokenizer.from_pretrained(tmp_path)
    items = cpm1dataset.LCQMC_Dataset(DATA / "paraphrase", "train", 0, 1, lacking, 64)
    assert items[0]["input_length"] > 10
    with pytest.raises(DataError, match="does not tell the words of the classes apart"):
        items.get_verbalizer(lacking)
    large: Any = types.SimpleNamespace(vocab_size=30000)
    assert cpm1dataset.LCQMC_Dataset.get_verbalizer(large) == [15682, 16357]
    assert cpm2dataset.LCQMC_Dataset.get_verbalizer(large) == [1744, 24]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("好\t好\t1\n", "begins with .*: expected the header"),
        ("text_a\ttext_b\tlabel\n", "holds no examples"),
        ("text_a\ttext_b\tlabel\n好\t1\n", "line 2: there is no label"),
        (
            "text_a\ttext_b\tlabel\n好\t好\t1\n好\t好\t2\n",
            "line 3: got .*: expected two texts and the label 0 or 1",
        ),
        ("text_a\ttext_b\tlabel\n好\n", "line 2: got .*: expected two texts"),
    ],
)
def test_bad_lcqmc_files_are_refused(tmp_path: pathlib.Path, text: str, complaint: str) -> None:
    """At construction, with the line."""
    (tmp_path / "train.tsv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=complaint):
        cpm1dataset.DATASET["LCQMC"](tmp_path, "train", 0, 1, CPM1, 64)
    with pytest.raises(DataError, match=r"neither .*dev\.tsv nor"):
        cpm1dataset.DATASET["LCQMC"](tmp_path, "dev", 0, 1, CPM1, 64)
    with pytest.raises(DataError, match="no split 'val'"):
        cpm1dataset.DATASET["LCQMC"](tmp_path, "val", 0, 1, CPM1, 64)


def test_the_stored_boolq_can_be_learnt() -> None:
    """A tiny BERT of transformers, from scratch: half of the dev rows right before, nine of ten
    after 60 steps.
    """
    tokenizer = BertTokenizer.from_pretrained(DATA / "tokenizers" / "bert")
    train, dev = (
        bertdataset.DATASET["BoolQ"](DATA / "superglue", split, 0, 1, tokenizer, 128)
        for split in ("train", "dev")
    )
    (batch,) = DataLoader(dev, len(dev), collate_fn=dev.collate)
    assert batch["labels"].float().mean() == 0.5
    torch.manual_seed(2)
    config = transformers.BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    model = transformers.BertForSequenceClassification(config)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loader = DataLoader(train, 16, shuffle=True, collate_fn=train.collate, drop_last=True)
    for _ in range(5):
        for rows in loader:
            optimizer.zero_grad()
            model(**rows).loss.backward()
            optimizer.step()
    with torch.no_grad():
        assert (model(**batch).logits.argmax(-1) == batch["labels"]).float().mean() > 0.9
