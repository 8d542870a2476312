"""SuperGLUE's files and the items made of them, against prompts and pairs written out here and
tokenised whole.
"""

from __future__ import annotations

import collections
import json
import pathlib
import pickle
import random
import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.data import make
from torch.utils.data import DataLoader

from model_center.dataset import bertdataset, gpt2dataset, llamadataset, superglue, t5dataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.errors import DataError, IdentifierError
from model_center.tokenizer import BertTokenizer, GPT2Tokenizer, LlamaTokenizer, T5Tokenizer

DATA = pathlib.Path(__file__).parents[1] / "data"
SUPERGLUE = DATA / "superglue"
BERT = BertTokenizer.from_pretrained(DATA / "tokenizers" / "bert")
GPT2 = GPT2Tokenizer.from_pretrained(DATA / "tokenizers" / "gpt2")
LLAMA = LlamaTokenizer.from_pretrained(DATA / "tokenizers" / "llama")
T5 = T5Tokenizer.from_pretrained(DATA / "tokenizers" / "t5")
MODELS: dict[str, tuple[Any, Any, list[int]]] = {
    "bert": (bertdataset.DATASET, BERT, [256]),
    "gpt2": (gpt2dataset.DATASET, GPT2, [512]),
    "llama": (llamadataset.DATASET, LLAMA, [512]),
    "t5": (t5dataset.DATASET, T5, [512, 2]),
}
TASKS = ["BoolQ", "CB", "COPA", "MultiRC", "ReCoRD", "RTE", "WiC", "WSC"]
ALL = [
    (model, task)
    for model in MODELS
    for task in TASKS
    if model != "bert" or task not in {"MultiRC", "ReCoRD"}
]


def dataset(
    model: str, task: str, split: str, *lengths: int, path: pathlib.Path = SUPERGLUE
) -> Any:
    """A task's split as one of these models reads it."""
    table, tokenizer, usual = MODELS[model]
    return table[task](path, split, 0, 1, tokenizer, *(lengths or usual))


def rows(task: str, split: str) -> list[dict[str, Any]]:
    """The lines of a task's file."""
    return [
        json.loads(line)
        for line in (SUPERGLUE / task / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
    ]


def write(folder: pathlib.Path, task: str, split: str, lines: list[Any]) -> pathlib.Path:
    """A file of these rows, or of these texts as they are."""
    file = folder / task / f"{split}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(
        "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines),
        encoding="utf-8",
    )
    return folder


# Prompts and labels, written out once more.
def question(row: dict[str, Any]) -> list[tuple[str, int]]:
    return [(f"{row['passage']}. {row['question']}?", int(row["label"]))]


def entails(row: dict[str, Any]) -> list[tuple[str, int]]:
    label = {"contradiction": 0, "not_entailment": 0, "entailment": 1, "neutral": 2}[row["label"]]
    asked = "Does sentence 1 entails sentence 2?"
    return [(f"Sentence 1: {row['premise']} Sentence 2: {row['hypothesis']} {asked}", label)]


def choices(row: dict[str, Any]) -> list[tuple[str, int]]:
    asked = f'The {row["question"]} of "{row["premise"]}" was choice'
    first, second = row["choice1"], row["choice2"]
    return [(f"Choice 1: {first} Choice 2: {second} {asked}", row["label"])]


def word(row: dict[str, Any]) -> list[tuple[str, int]]:
    asked = f"Does the word {row['word']} in sentence 1 express the same meaning as in sentence 2?"
    return [
        (
            f"Sentence 1: {row['sentence1']} Sentence 2: {row['sentence2']} {asked}",
            int(row["label"]),
        )
    ]


def pronoun(row: dict[str, Any]) -> list[tuple[str, int]]:
    target = row["target"]
    return [
        (
            f"{row['text']} Does {target['span2_text']} refers to {target['span1_text']}?",
            int(row["label"]),
        )
    ]


def answers(row: dict[str, Any]) -> list[tuple[str, int]]:
    text, found = row["passage"]["text"], []
    for asked in row["passage"]["questions"]:
        for answer in asked["answers"]:
            prompt = (
                f'{text} Is answer "{answer["text"]}" the answer to the question '
                f'"{asked["question"]}"?'
            )
            found.append((prompt, answer["label"]))
    return found


def entities(row: dict[str, Any]) -> list[tuple[str, int]]:
    text, (asked,) = row["passage"]["text"], row["qas"]
    names = []
    for span in row["passage"]["entities"]:
        name = text[span["start"] : span["end"] + 1]
        names += [name] if name not in names else []
    right = {answer["text"] for answer in asked["answers"]}
    shown = text.replace("@highlight\n", "- ")
    begin = (
        f"{shown} Question: {asked['query']} Entities: {names} Which entities can be "
        "filled in the placeholder?"
    )
    return [(f"{begin} Is it {name}?", int(name in right)) for name in names]


PROMPTS = dict(
    zip(TASKS, [question, entails, choices, answers, entities, entails, word, pronoun], strict=True)
)


def filled(ids: list[int], length: int, fill: int = 0) -> list[int]:
    return [*ids, *[fill] * (length - len(ids))]


@pytest.mark.parametrize("length", [512, 20])
@pytest.mark.parametrize(("model", "task"), [pair for pair in ALL if pair[0] != "bert"])
def test_prompts_end_where_the_answer_is_expected(model: str, task: str, length: int) -> None:
    """Every row of the dev split, padded with zeros: the last ids of its prompt, its length,
    targets, index and class.
    """
    lengths = [length, 5] if model == "t5" else [length]
    items = dataset(model, task, "dev", *lengths)
    expected = [pair for row in rows(task, "val") for pair in PROMPTS[task](row)]
    assert len(items) == len(expected)
    for item, (prompt, label) in zip(items, expected, strict=True):
        ids = MODELS[model][1].encode(prompt + " <extra_id_0>." * (model == "t5"))[-length:]
        if model == "t5":
            expected_item: dict[str, Any] = {
                "enc_input": filled(ids, length),
                "enc_length": len(ids),
                "dec_input": [0, T5.convert_tokens_to_ids("<extra_id_0>"), 0, 0, 0],
                "dec_length": 2,
                "index": [0, 1, 0, 0, 0],
                "targets": label,
            }
        else:
            expected_item = {
                "input_ids": filled(ids, length),
                "input_length": len(ids),
                "targets": filled(ids[1:], length, -100),
                "index": filled([*[0] * (len(ids) - 1), 1], length),
                "labels": label,
            }
        assert {key: item[key].tolist() for key in expected_item} == expected_item
        assert item.keys() - expected_item.keys() <= {"idx", "group"}
        wide = {key for key, value in item.items() if value.dtype == torch.int64}
        assert wide == item.keys() & {"targets", "labels", "idx", "group"}
        assert all(item[key].dtype == torch.int32 for key in item.keys() - wide)


# What BERT reads.
BERT_TEXTS: dict[str, Callable[[dict[str, Any]], tuple[str, ...]]] = {
    "BoolQ": lambda row: (f"{row['passage']}. {row['question']}",),
    "CB": lambda row: (row["premise"], row["hypothesis"]),
    "RTE": lambda row: (row["premise"], row["hypothesis"]),
    "WiC": lambda row: (row["sentence1"], row["sentence2"]),
    "WSC": lambda row: (pronoun(row)[0][0],),
}


@pytest.mark.parametrize("length", [256, 24, 8])
def test_bert_reads_texts_and_pairs(length: int) -> None:
    """BoolQ and WSC as one text, WiC without its word, both choices of COPA; as its tokenizer pads
    and cuts them.
    """

    def read(*texts: str) -> dict[str, list[int]]:
        return dict(BERT(*texts, max_length=length, padding="max_length", truncation=True))

    for task, texts in BERT_TEXTS.items():
        items = dataset("bert", task, "dev", length)
        for item, row in zip(items, rows(task, "val"), strict=True):
            expected: dict[str, Any] = {**read(*texts(row)), "labels": PROMPTS[task](row)[0][1]}
            assert {key: value.tolist() for key, value in item.items()} == expected
            assert {value.dtype for value in item.values()} == {torch.int64}
    for item, row in zip(dataset("bert", "COPA", "dev", length), rows("COPA", "val"), strict=True):
        for choice in "01":
            asked = f'The {row["question"]} of "{row["premise"]}"'
            expected = read(row[f"choice{int(choice) + 1}"], asked)
            assert {key: item[key + choice].tolist() for key in expected} == expected
        assert item["labels"] == row["label"]


@pytest.mark.parametrize(("model", "task"), ALL)
def test_batches_are_rows_without_common_padding(model: str, task: str) -> None:
    """torch's DataLoader stacks the rows as they are; our loader cuts the columns that are padding
    in each, of all keys of a sequence alike.
    """
    lengths = [512, 7] if model == "t5" else MODELS[model][2]
    items = dataset(model, task, "dev", *lengths)
    (whole,) = DataLoader(items, len(items))
    (same,) = DataLoader(items, len(items), collate_fn=items.collate)
    (short,) = DistributedDataLoader(items, batch_size=len(items))
    assert whole.keys() == short.keys() == same.keys()
    for key, value in whole.items():
        assert torch.equal(value, torch.stack([item[key] for item in items]))
        expected = value
        if value.dim() == 2:
            length = {
                "bert": f"attention_mask{key[-1] if key[-1] in '01' else ''}",
                "t5": "enc_length" if key == "enc_input" else "dec_length",
            }.get(model, "input_length")
            longest = max(int(item[length].sum()) for item in items)
            assert longest < value.shape[1]
            expected = value[:, :longest]
        assert torch.equal(short[key], expected) and torch.equal(same[key], expected)
        assert short[key].dtype == value.dtype and short[key].is_contiguous()


@pytest.mark.parametrize(("model", "task"), ALL)
def test_a_test_split_has_numbers_and_no_labels(model: str, task: str) -> None:
    """Its items are those of the dev split but for the labels."""
    items = dataset(model, task, "test")
    batch = items.collate([items[index] for index in range(len(items))])
    target = "targets" if model == "t5" else "labels"
    assert batch["idx"].tolist() == list(range(len(items)))
    assert set(batch) == set(dataset(model, task, "dev")[0]) - {target} | {"idx"}


def test_rare_classes_of_cb_come_more_often_for_bert() -> None:
    """In train only, each class floor(most frequent / its count) times."""
    counts = collections.Counter(row["label"] for row in rows("CB", "train"))
    items = dataset("bert", "CB", "train")
    most = max(counts.values())
    expected = {
        superglue.CB_LABELS[label]: count * (most // count) for label, count in counts.items()
    }
    assert collections.Counter(item["labels"].item() for item in items) == expected
    assert most // min(counts.values()) > 1
    assert len(dataset("bert", "CB", "dev")) == len(rows("CB", "val"))


@pytest.mark.parametrize("model", ["gpt2", "llama", "t5"])
def test_choices_of_copa_come_both_ways(model: str) -> None:
    """In train only: the same premise with the choices swapped has the other label."""
    items = dataset(model, "COPA", "train")
    train = rows("COPA", "train")
    assert len(items) == 2 * len(train)
    assert len(dataset(model, "COPA", "dev")) == len(rows("COPA", "val"))
    key, target = ("enc_input", "targets") if model == "t5" else ("input_ids", "labels")
    tokenizer = MODELS[model][1]
    swapped = {**train[1], "choice1": train[1]["choice2"], "choice2": train[1]["choice1"]}
    assert tokenizer.decode(items[2][key], skip_special_tokens=True).startswith(
        choices(train[1])[0][0][:30]
    )
    assert tokenizer.decode(items[3][key], skip_special_tokens=True).startswith(
        choices(swapped)[0][0][:30]
    )
    assert (items[2][target], items[3][target]) == (train[1]["label"], 1 - train[1]["label"])


def test_answers_and_entities_belong_to_their_questions() -> None:
    """Every row is in the dataset of every rank, once, and groups number the questions."""
    multirc = gpt2dataset.DATASET["MultiRC"](SUPERGLUE, "dev", 1, 4, GPT2, 512)
    expected = [
        f"{row['idx']}-{asked['idx']}"
        for row in rows("MultiRC", "val")
        for asked in row["passage"]["questions"]
        for _ in asked["answers"]
    ]
    assert multirc.qids == expected
    numbers = {name: number for number, name in enumerate(dict.fromkeys(expected))}
    assert [item["group"].item() for item in multirc] == [numbers[name] for name in expected]
    assert [item["idx"].item() for item in multirc] == list(range(len(expected)))
    record = dataset("t5", "ReCoRD", "train")
    # one right entity each
    assert sum(item["targets"].item() for item in record) == len(rows("ReCoRD", "train"))
    first = record.examples[0]
    assert (first.group, first.fields["entity"], set(first.answers)) == (
        "0-0",
        "Ravewick",
        {"Tom Pike"},
    )


@pytest.mark.parametrize(
    ("table", "tokenizer", "words"),
    [
        (gpt2dataset, GPT2, [" No", " Yes"]),
        (llamadataset, LLAMA, ["No", "Yes"]),
        (t5dataset, T5, ["No", "Yes"]),
    ],
)
def test_verbalizers_are_the_first_ids_of_their_words(
    table: Any, tokenizer: Any, words: list[str]
) -> None:
    """Special tokens are passed over, whether or not the tokenizer puts any in front."""
    first = [tokenizer.encode(word, add_special_tokens=False)[0] for word in words]
    for task in TASKS:
        if task in {"CB", "COPA"}:
            ids = table.DATASET[task].get_verbalizer(tokenizer)
            assert len(set(ids)) == len(ids) == {"CB": 3, "COPA": 2}[task]
        else:
            assert table.DATASET[task].get_verbalizer(tokenizer) == first


def test_words_that_begin_alike_are_told_apart() -> None:
    """By the first token in which they differ; a vocabulary that has neither word is refused."""
    tokenizer: Any = LlamaTokenizer.from_pretrained(
        DATA / "tokenizers" / "llama", add_prefix_space=True
    )
    ids = llamadataset.DATASET["COPA"].get_verbalizer(tokenizer)
    assert [tokenizer.convert_ids_to_tokens(number).strip("\u2581") for number in ids] == ["1", "2"]
    nothing = BertTokenizer({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4})
    for table in (bertdataset, gpt2dataset, llamadataset, t5dataset):
        with pytest.raises(DataError, match="does not tell the words of the classes apart"):
            table.DATASET["RTE"].get_verbalizer(nothing)


def test_a_missing_word_matters_when_it_is_asked_for() -> None:
    """Datasets are made with any tokenizer; those of T5 need a sentinel for a row."""
    nothing = BertTokenizer({"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4})
    rte = t5dataset.DATASET["RTE"](SUPERGLUE, "dev", 0, 1, nothing, 64, 2)
    assert len(rte) == len(rows("RTE", "val"))
    with pytest.raises(DataError, match="no token <extra_id_0>"):
        rte[0]
    assert gpt2dataset.DATASET["RTE"](SUPERGLUE, "dev", 0, 1, nothing, 64)[0]["input_length"] > 2


def test_the_stored_boolq_is_that_of_its_program() -> None:
    """As many yes as no; the test split has no labels."""
    rng = random.Random(0)
    assert rows("BoolQ", "train") == list(make.boolq(rng, 200))
    assert rows("BoolQ", "val") == list(make.boolq(rng, 60))
    assert sum(row["label"] for row in rows("BoolQ", "train")) == 100
    assert not any("label" in row for row in rows("BoolQ", "test"))


def test_a_folder_of_one_task_will_do(tmp_path: pathlib.Path) -> None:
    """The root of all tasks, or the task's own folder; split names "dev" and "val"."""
    shutil.copytree(SUPERGLUE / "RTE", tmp_path / "anywhere")
    own = dataset("gpt2", "RTE", "dev", path=tmp_path / "anywhere")
    assert all(
        torch.equal(one["input_ids"], other["input_ids"])
        for one, other in zip(own, dataset("gpt2", "RTE", "val"), strict=True)
    )


def test_rows_are_read_when_they_are_asked_for(tmp_path: pathlib.Path) -> None:
    """Nothing is tokenised or kept at construction; the dataset pickles and works in loader
    workers.
    """
    lines = [
        {"premise": f"p{number} 你", "hypothesis": "h", "label": "entailment"}
        for number in range(50)
    ]
    items = dataset(
        "gpt2", "RTE", "train", path=write(tmp_path, "RTE", "train", [lines[0], "\n", *lines[1:]])
    )
    assert len(items) == 50
    assert len(pickle.dumps(items.examples)) < 50 * 60 + 1000
    assert "p37" in GPT2.decode(items[37]["input_ids"])
    assert "p49" in GPT2.decode(items[-1]["input_ids"])
    with pytest.raises(IndexError):
        items[50]
    loader = DataLoader(
        items, 10, collate_fn=items.collate, num_workers=2, multiprocessing_context="fork"
    )
    assert [len(batch["labels"]) for batch in loader] == [10] * 5


GOOD = {"premise": "a", "hypothesis": "b", "label": "entailment"}


@pytest.mark.parametrize(
    ("task", "lines", "complaint"),
    [
        ("RTE", [], "holds no examples"),
        ("RTE", ["\n\n"], "holds no examples"),
        ("RTE", [GOOD, '{"premise": "a", \n'], r"train\.jsonl, line 2: no JSON"),
        ("RTE", ['{"premise": "a"\n'], r"line 1: no JSON \(Expecting ',' delimiter at column 17\)"),
        ("RTE", [GOOD, "[1]\n"], r"line 2: got list: expected a JSON object"),
        (
            "RTE",
            [GOOD, {"premise": "a", "label": "entailment"}],
            r"line 2: there is no field 'hypothesis'",
        ),
        (
            "RTE",
            [{**GOOD, "label": "perhaps"}],
            r"line 1: the label is 'perhaps': expected one of 'not_entailment', " r"'entailment'",
        ),
        ("RTE", [{**GOOD, "premise": 3}], r"line 1: field 'premise' is 3: expected a text"),
        ("RTE", [GOOD, {"premise": "a", "hypothesis": "b"}], r"line 2: there is no label"),
        ("BoolQ", [GOOD], r"line 1: there is no field 'passage'"),
        (
            "WSC",
            [{"text": "a", "target": 3, "label": True}],
            "field 'target' is 3: expected an object",
        ),
        (
            "MultiRC",
            [{"idx": 0, "passage": {"text": "a", "questions": {}}}],
            "field 'questions' is {}: expected a list",
        ),
        (
            "MultiRC",
            [{"idx": 0, "passage": {"text": "a", "questions": [{"idx": 0, "question": "q"}]}}],
            "no field 'answers'",
        ),
        (
            "ReCoRD",
            [{"idx": 0, "passage": {"text": "a", "entities": [{"start": 0}]}, "qas": []}],
            "no field 'end'",
        ),
        ("RTE", [GOOD, "\x00\udcff\n"], r"line 2: "),
    ],
)
def test_bad_files_are_refused_at_construction(
    tmp_path: pathlib.Path, task: str, lines: list[Any], complaint: str
) -> None:
    """With the file and the line."""
    file = tmp_path / task / "train.jsonl"
    file.parent.mkdir()
    texts = [line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines]
    file.write_bytes("".join(texts).encode("utf-8", "surrogateescape"))
    with pytest.raises(DataError, match=complaint):
        dataset("gpt2", task, "train", path=tmp_path)


def test_bad_arguments_are_named(tmp_path: pathlib.Path) -> None:
    """A task, split, folder, length or tokenizer that will not do."""
    with pytest.raises(IdentifierError, match=r"no task 'Boolq'.*Did you mean 'BoolQ'"):
        bertdataset.DATASET["Boolq"]
    with pytest.raises(
        IdentifierError, match="no task 'SQuAD' for this model: expected one of BoolQ, CB"
    ):
        bertdataset.DATASET["SQuAD"]
    with pytest.raises(
        DataError, match=f"neither {tmp_path}/RTE/val.jsonl nor {tmp_path}/val.jsonl"
    ):
        dataset("t5", "RTE", "dev", path=tmp_path)
    with pytest.raises(DataError, match="no split 'validation': expected one of train, dev"):
        dataset("t5", "RTE", "validation")
    with pytest.raises(DataError, match="max_decoder_length is 1: expected at least 2"):
        dataset("t5", "RTE", "dev", 64, 1)
    with pytest.raises(DataError, match="max_encoder_length is 3"):
        dataset("bert", "RTE", "dev", 3)


@pytest.mark.parametrize("model", MODELS)
def test_a_test_split_that_is_missing_is_empty(model: str, tmp_path: pathlib.Path) -> None:
    """As in ModelCenter: a dataset without rows, a loader without batches. Other splits must be
    there.
    """
    for task in ("BoolQ", "CB", "COPA"):
        (tmp_path / task).mkdir()
        found = dataset(model, task, "test", path=tmp_path)
        assert len(found) == 0 and found.qids == []
        loader = DistributedDataLoader(found, batch_size=2)
        assert len(loader) == 0 and list(loader) == [] and list(loader) == []
        with pytest.raises(DataError, match="split 'dev': there is neither"):
            dataset(model, task, "dev", path=tmp_path)
    with pytest.raises(DataError, match="split 'test': there is neither"):
        dataset(model, "RTE", "test", path=tmp_path)
