"""SQuAD for T5 and LCQMC for CPM, against the texts of their files written out here."""

import json
import pickle
import types
from typing import Any

import pytest
import torch
from tests.data_sets.common import DATA, FOLDERS, filled, listed, refused, tokenizer
from torch.utils.data import DataLoader

from model_center.dataset import cpm1dataset, cpm2dataset, t5dataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.tokenizer import CPM1Tokenizer

T5, CPM1, CPM2 = map(tokenizer, ("t5", "cpm1", "cpm2"))


def squad(split, *lengths, path=DATA / "squad", reader=T5, seed=0):
    """SQuAD as T5 reads it."""
    return t5dataset.DATASET["SQuAD"](path, split, reader, *(lengths or (256, 32)), seed)


def questions(split):
    """Prompts and answers of the stored file."""
    data = json.loads((DATA / "squad" / f"{split}-v1.1.json").read_text("utf-8"))["data"]
    found = []
    for paragraph in (paragraph for article in data for paragraph in article["paragraphs"]):
        for asked in paragraph["qas"]:
            answers = [answer["text"] for answer in asked["answers"]]
            begin = f"Question: {asked['question']} Answer: <extra_id_0>"
            found.append((f"{begin} Context: {paragraph['context']}", answers))
    return found


def test_squad_is_trained_as_text_to_text():
    """Prompt and answer between sentinels, padded; the decoder reads the target one place later."""
    items = squad("train")
    for item, (prompt, answers) in zip(items, questions("train"), strict=True):
        ids = T5.encode(prompt)
        target = T5.encode(f"<extra_id_0> {answers[0]} <extra_id_1>")
        assert listed(item) == {
            "input_ids": filled(ids, 256),
            "attention_mask": filled([1] * len(ids), 256),
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


def test_squad_is_evaluated_by_texts():
    """Prompts, and the set of right answers."""
    items = squad("dev")
    expected = [(prompt, set(answers)) for prompt, answers in questions("dev")]
    assert [(item["inputs"], item["targets"]) for item in items] == expected
    (batch,) = DataLoader(items, len(items), collate_fn=items.collate)
    inputs, targets = zip(*expected, strict=True)
    assert batch == {"inputs": [*inputs], "targets": [*targets]}


def test_a_test_split_of_squad(tmp_path):
    """Empty without its file, as in ModelCenter, whose example makes one; like "dev" with it."""
    assert len(squad("test")) == 0 and not list(DistributedDataLoader(squad("test"), batch_size=2))
    dev = (DATA / "squad" / "dev-v1.1.json").read_text("utf-8")
    (tmp_path / "test-v1.1.json").write_text(dev.replace('"question": "', '"question": " \\n'))
    found, expected = list(squad("test", path=tmp_path)), list(squad("dev"))
    assert found == expected and (tmp_path / "test-v1.1.json").read_text() != dev


def test_squad_cuts_ends_and_chooses_one_answer(tmp_path):
    """The end of the context is lost, not the question; the answer is the same every time, another
    by another seed.
    """
    short = squad("train", 24, 4)[0]
    assert len(short["input_ids"]) == 24
    assert short["input_ids"][-1] == T5.eos_token_id
    assert len(short["targets"]) == 4
    answers = [{"text": word} for word in ("harbour", "market", "river")]
    asked = [{"id": n, "question": "q", "answers": answers if n < 9 else []} for n in range(10)]
    content = {"data": [{"paragraphs": [{"context": "c", "qas": asked}]}]}
    for split in ("train", "dev"):
        (tmp_path / f"{split}-v1.1.json").write_text(json.dumps(content))
    targets = [
        [item["targets"].tolist() for item in squad("train", path=tmp_path, seed=seed)]
        for seed in (0, 0, 1)
    ]
    assert targets[0] == targets[1] != targets[2]
    assert len({tuple(row) for row in targets[0][:9]}) == 3
    assert targets[0][9] == filled(T5.encode("<extra_id_0> no answer <extra_id_1>"), 32, -100)
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
def test_bad_squad_files_are_refused(tmp_path, content, complaint):
    """At construction."""
    (tmp_path / "train-v1.1.json").write_text(content)
    with refused(complaint):
        squad("train", path=tmp_path)


def test_bad_arguments_of_squad(tmp_path):
    """A split that is none or not there, lengths, a tokenizer without sentinels for a row."""
    with refused(r"there is no .*dev-v1\.1\.json"):
        squad("dev", path=tmp_path)
    with refused("Splits are 'train' and 'dev'"):
        squad("validation")
    with refused("Splits are 'train' and 'dev'"):
        squad("test", path=tmp_path / "nowhere")
    for lengths, name in (((3, 4), "encoder"), ((4, 3), "decoder")):
        with refused(f"max_{name}_length is 3"):
            squad("train", *lengths)
    other = tokenizer("gpt2")
    assert "<extra_id_0>" in squad("dev", 64, 8, reader=other)[0]["inputs"]
    with refused("no token <extra_id_0>"):
        squad("train", 64, 8, reader=other)[0]


def pairs(split):
    """The cells of LCQMC's stored file, without its header."""
    file = DATA / "paraphrase" / "LCQMC" / f"{split}.tsv"
    return [line.split("\t") for line in file.read_text("utf-8").splitlines()[1:]]


def lcqmc(split, *lengths, path=DATA / "paraphrase"):
    """LCQMC as CPM-1 reads it, or CPM-2, which has a length of the decoder too."""
    table, reader = (cpm2dataset, CPM2) if len(lengths) == 2 else (cpm1dataset, CPM1)
    return table.DATASET["LCQMC"](path, split, 0, 1, reader, *lengths)


def check_dtypes(item, **others):
    """As in ModelCenter: int64 targets, int32 for the rest."""
    expected = dict.fromkeys(item, torch.int32) | {"targets": torch.int64} | others
    assert {key: value.dtype for key, value in item.items()} == expected


def test_lcqmc_for_cpm1_has_a_blank():
    """Seen from both sides; the token before it chooses the class. Padding counts as context."""
    items = lcqmc("train", 64)
    for item, (first, second, label) in zip(items, pairs("train"), strict=True):
        left = [1, *CPM1.encode(f'"{first}"与"{second}"的关系是:')]
        ids = [*left, 0, *CPM1.encode("。")]
        assert listed(item) == {
            "input_tokens": filled(ids, 64),
            "input_length": len(ids),
            "input_context": [place != len(left) for place in range(64)],
            "input_span": [0] * 64,
            "index": [int(place == len(left) - 1) for place in range(64)],
            "targets": int(label),
        }
    check_dtypes(items[0], input_context=torch.bool)
    (whole,) = DataLoader(items, len(items))
    (short,) = DistributedDataLoader(items, batch_size=len(items))
    longest = int(whole["input_length"].max())
    assert longest < 64
    for key, value in whole.items():
        assert torch.equal(short[key], value[:, :longest] if value.dim() == 2 else value)


def test_lcqmc_for_cpm2_ends_in_a_sentinel():
    """With which the decoder starts, and where the class is chosen."""
    items, sentinel = lcqmc("dev", 64, 4), CPM2.get_sentinel_id(0)
    for item, (first, second, label) in zip(items, pairs("dev"), strict=True):
        ids = [*CPM2.encode(f"“{first}”与“{second}”是否有关？"), sentinel]
        assert listed(item) == {
            "enc_input": filled(ids, 64),
            "enc_length": len(ids),
            "dec_input": [sentinel, 0, 0, 0],
            "dec_length": 1,
            "index": [1, 0, 0, 0],
            "targets": int(label),
        }
    check_dtypes(items[0])
    (short,) = DistributedDataLoader(items, batch_size=len(items))
    assert short["enc_input"].shape == (len(items), int(short["enc_length"].max()))
    assert short["dec_input"].shape == short["index"].shape == (len(items), 1)
    assert listed(pickle.loads(pickle.dumps(items))[3]) == listed(items[3])


def test_long_pairs_of_lcqmc_lose_the_end_of_the_longer_text(tmp_path):
    """Never what stands around the texts, and no more than is needed."""
    (tmp_path / "train.tsv").write_text(
        f"text_a\ttext_b\tlabel\n{'好' * 50}\t天{'气' * 20}\t1\n好\t好\t0\n"
        f"天{'气' * 20}\t{'好' * 50}\t1\n{'好' * 50}\t{'天' * 50}\t1\n",
        encoding="utf-8",
    )
    items = lcqmc("train", 30, path=tmp_path)
    for item, first, last in (
        (items[0], '"好好', '气"的关系是:'),
        (items[2], '"天气', '好"的关系是:'),
    ):
        ids = item["input_tokens"].tolist()
        assert item["input_length"] == len(ids) == 30
        begin, end = CPM1.encode(first), CPM1.encode(last)
        assert ids[1 : 1 + len(begin)] == begin and ids[-2 - len(end) : -2] == end
    first, last = CPM1.convert_tokens_to_ids(["好", "天"])
    for length in (29, 30):  # of texts of one length the first keeps one more
        ids = lcqmc("train", length, path=tmp_path)[3]["input_tokens"].tolist()
        assert len(ids) == length and ids.count(first) - ids.count(last) == length % 2
    whole = [1, *CPM1.encode('"好"与"好"的关系是:'), 0, *CPM1.encode("。")]
    assert items[1]["input_tokens"].tolist() == filled(whole, 30)
    other = lcqmc("train", 30, 1, path=tmp_path)
    assert other[0]["enc_length"] == len(other[0]["enc_input"]) == 30
    assert other[0]["enc_input"][-1] == CPM2.get_sentinel_id(0)
    for lengths, complaint in (
        ((8,), "max_length is 8: expected at least"),
        ((30, 0), "max_decoder_length is 0"),
        ((2, 1), "max_encoder_length is 2"),
    ):
        with refused(complaint):
            lcqmc("train", *lengths, path=tmp_path)


def test_words_of_lcqmc_are_looked_up(tmp_path):
    """Two ids of a small vocabulary, if it has them; of one as large as the published,
    ModelCenter's.
    """
    one, two = cpm1dataset.LCQMC_Dataset, cpm2dataset.LCQMC_Dataset
    related = CPM1.convert_tokens_to_ids(["有关", "无关"])
    assert one.get_verbalizer(CPM1) == two.get_verbalizer(CPM2) == related
    lines = (FOLDERS / "cpm1" / "vocab.txt").read_text("utf-8").splitlines()
    few = [line for line in lines if line not in ("有关", "无关", "有", "无", "关")]
    (tmp_path / "vocab.txt").write_text("\n".join(few) + "\n", "utf-8")
    lacking: Any = CPM1Tokenizer.from_pretrained(tmp_path)
    with refused("words of the classes begin with the same token"):
        one.get_verbalizer(lacking)
    large = types.SimpleNamespace(vocab_size=30000)
    assert one.get_verbalizer(large) == [15682, 16357]
    assert two.get_verbalizer(large) == [1744, 24]


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
def test_bad_lcqmc_files_are_refused(tmp_path, text, complaint):
    """At construction, with the line."""
    (tmp_path / "train.tsv").write_text(text, "utf-8")
    for split, words in (
        ("train", complaint),
        ("dev", r"neither .*dev\.tsv nor"),
        ("val", "no split 'val'"),
    ):
        with refused(words):
            lcqmc(split, 64, path=tmp_path)
