"""SuperGLUE's files and the items made of them, against prompts and pairs written out here and
tokenised whole.
"""

import collections
import itertools
import json
import pickle
import shutil
from typing import Any

import pytest
import torch
from tests.data_sets.common import DATA, FOLDERS, filled, refused, tokenizer, write_rows
from torch.utils.data import DataLoader

from model_center.dataset import bertdataset, gpt2dataset, llamadataset, superglue, t5dataset
from model_center.dataset.loader import DistributedDataLoader
from model_center.errors import IdentifierError
from model_center.tokenizer import BertTokenizer, LlamaTokenizer

SUPERGLUE = DATA / "superglue"
TABLES = {"bert": bertdataset, "gpt2": gpt2dataset, "llama": llamadataset, "t5": t5dataset}
LENGTHS = {"bert": [256], "t5": [512, 2]}
ALL = [
    (model, task)
    for model, task in itertools.product(TABLES, superglue.TASKS)
    if model != "bert" or task not in {"MultiRC", "ReCoRD"}
]
SPECIAL = "PAD UNK CLS SEP MASK"
GOOD = {"premise": "a", "hypothesis": "b", "label": "entailment"}


def dataset(model, task, split, *lengths, path=SUPERGLUE):
    """A task's split as one of these models reads it."""
    lengths = lengths or tuple(LENGTHS.get(model, [512]))
    table: Any = TABLES[model]
    return table.DATASET[task](path, split, 0, 1, tokenizer(model), *lengths)


def rows(task, split):
    """The lines of a task's file."""
    text = (SUPERGLUE / task / f"{split}.jsonl").read_text("utf-8")
    return [json.loads(line) for line in text.splitlines()]


# Prompts and labels, written out once more.
LABELS = {"contradiction": 0, "not_entailment": 0, "entailment": 1, "neutral": 2}
SENTENCES = "Sentence 1: {} Sentence 2: {}"


def single(task, row):
    """The prompt of a row that is one example."""
    if task == "BoolQ":
        return f"{row['passage']}. {row['question']}?"
    if task in {"CB", "RTE"}:
        both = SENTENCES.format(row["premise"], row["hypothesis"])
        return f"{both} Does sentence 1 entails sentence 2?"
    if task == "COPA":
        asked = f'The {row["question"]} of "{row["premise"]}" was choice'
        return f"Choice 1: {row['choice1']} Choice 2: {row['choice2']} {asked}"
    if task == "WiC":
        both = SENTENCES.format(row["sentence1"], row["sentence2"])
        asked = f"Does the word {row['word']} in sentence 1 express the same meaning as in"
        return f"{both} {asked} sentence 2?"
    target = row["target"]
    return f"{row['text']} Does {target['span2_text']} refers to {target['span1_text']}?"


def examples(task, row):
    """Prompts and labels of a row."""
    if task not in {"MultiRC", "ReCoRD"}:
        return [(single(task, row), int(LABELS.get(row["label"], row["label"])))]
    text = row["passage"]["text"]
    if task == "MultiRC":
        begin = f'{text} Is answer "'
        return [
            (
                f'{begin}{one["text"]}" the answer to the question "{asked["question"]}"?',
                one["label"],
            )
            for asked in row["passage"]["questions"]
            for one in asked["answers"]
        ]
    (asked,) = row["qas"]
    spans = [text[span["start"] : span["end"] + 1] for span in row["passage"]["entities"]]
    names = list(dict.fromkeys(spans))
    right = {answer["text"] for answer in asked["answers"]}
    shown = text.replace("@highlight\n", "- ")
    begin = f"{shown} Question: {asked['query']} Entities: {names} Which entities can be"
    end = "filled in the placeholder? Is it"
    return [(f"{begin} {end} {name}?", int(name in right)) for name in names]


@pytest.mark.parametrize(("model", "task"), [pair for pair in ALL if pair[0] != "bert"])
def test_prompts_end_where_the_answer_is_expected(model, task):
    """Every row of the dev split, padded with zeros: the last ids of its prompt, its length,
    targets, index and class.
    """
    expected = [pair for row in rows(task, "val") for pair in examples(task, row)]
    reader, is_t5 = tokenizer(model), model == "t5"
    for length in (512, 20):
        items = dataset(model, task, "dev", *([length, 5] if is_t5 else [length]))
        assert len(items) == len(expected)
        for item, (prompt, label) in zip(items, expected, strict=True):
            ids = reader.encode(prompt + " <extra_id_0>." * is_t5)[-length:]
            want: dict[str, Any] = {
                "input_ids": filled(ids, length),
                "input_length": len(ids),
                "targets": filled(ids[1:], length, -100),
                "index": filled([*[0] * (len(ids) - 1), 1], length),
                "labels": label,
            }
            if is_t5:
                start = [0, reader.convert_tokens_to_ids("<extra_id_0>")]
                want = {
                    "enc_input": want["input_ids"],
                    "enc_length": len(ids),
                    "dec_input": filled(start, 5),
                    "dec_length": 2,
                    "index": [0, 1, 0, 0, 0],
                    "targets": label,
                }
            assert {key: item[key].tolist() for key in want} == want
            assert item.keys() - want.keys() <= {"idx", "group"}
            wide = {key for key, value in item.items() if value.dtype == torch.int64}
            assert wide == item.keys() & {"targets", "labels", "idx", "group"}
            assert all(item[key].dtype == torch.int32 for key in item.keys() - wide)


def test_bert_reads_texts_and_pairs():
    """BoolQ and WSC as one text, WiC without its word, both choices of COPA; as its tokenizer pads
    and cuts them.
    """
    pairs = {"CB": "premise hypothesis", "RTE": "premise hypothesis", "WiC": "sentence1 sentence2"}
    for length, task in itertools.product((256, 24, 8), ["BoolQ", *pairs, "WSC", "COPA"]):

        def read(*texts, length=length):
            how = {"max_length": length, "padding": "max_length", "truncation": True}
            return dict(tokenizer("bert")(*texts, **how))

        for item, row in zip(dataset("bert", task, "dev", length), rows(task, "val"), strict=True):
            ((prompt, label),) = examples(task, row)
            if task == "COPA":
                asked = f'The {row["question"]} of "{row["premise"]}"'
                each = [read(row[f"choice{choice}"], asked) for choice in "12"]
                want = {f"{key}{n}": one[key] for n, one in enumerate(each) for key in one}
            elif task in pairs:
                want = read(*(row[field] for field in pairs[task].split()))
            else:
                want = read(prompt[:-1] if task == "BoolQ" else prompt)
            expected = {**want, "labels": label}
            assert {key: value.tolist() for key, value in item.items()} == expected
            assert {value.dtype for value in item.values()} == {torch.int64}


@pytest.mark.parametrize(("model", "task"), ALL)
def test_batches_are_rows_without_common_padding(model, task):
    """torch's DataLoader stacks the rows as they are; our loader cuts the columns that are padding
    in each, of all keys of a sequence alike. A test split has numbers and no labels.
    """
    items = dataset(model, task, "dev", *([512, 7] if model == "t5" else []))
    (whole,) = DataLoader(items, len(items))
    (same,) = DataLoader(items, len(items), collate_fn=items.collate)
    (short,) = DistributedDataLoader(items, batch_size=len(items))
    assert whole.keys() == short.keys() == same.keys()
    for key, value in whole.items():
        assert torch.equal(value, torch.stack([item[key] for item in items]))
        expected = value
        if value.dim() == 2:
            of_bert = f"attention_mask{key[-1] if key[-1] in '01' else ''}"
            of_t5 = "enc_length" if key == "enc_input" else "dec_length"
            length = {"bert": of_bert, "t5": of_t5}.get(model, "input_length")
            longest = max(int(item[length].sum()) for item in items)
            assert longest < value.shape[1]
            expected = value[:, :longest]
        assert torch.equal(short[key], expected) and torch.equal(same[key], expected)
        assert short[key].dtype == value.dtype and short[key].is_contiguous()
    unlabelled = dataset(model, task, "test")
    batch = unlabelled.collate([*unlabelled])
    assert batch["idx"].tolist() == list(range(len(unlabelled)))
    assert batch.keys() == items[0].keys() - {"targets" if model == "t5" else "labels"} | {"idx"}


def test_rare_classes_of_cb_come_more_often_for_bert():
    """In train only, each class floor(most frequent / its count) times."""
    counts = collections.Counter(row["label"] for row in rows("CB", "train"))
    items = dataset("bert", "CB", "train")
    most = max(counts.values())
    expected = {superglue.CB_LABELS[key]: count * (most // count) for key, count in counts.items()}
    assert collections.Counter(item["labels"].item() for item in items) == expected
    assert most // min(counts.values()) > 1
    assert len(dataset("bert", "CB", "dev")) == len(rows("CB", "val"))


def test_choices_of_copa_come_both_ways():
    """In train only: the same premise with the choices swapped has the other label."""
    train = rows("COPA", "train")
    row = train[1]
    swapped = {**row, "choice1": row["choice2"], "choice2": row["choice1"]}
    for model in ("gpt2", "llama", "t5"):
        items = dataset(model, "COPA", "train")
        assert len(items) == 2 * len(train)
        assert len(dataset(model, "COPA", "dev")) == len(rows("COPA", "val"))
        key, target = ("enc_input", "targets") if model == "t5" else ("input_ids", "labels")
        for item, asked in ((items[2], row), (items[3], swapped)):
            text = tokenizer(model).decode(item[key], skip_special_tokens=True)
            assert text.startswith(single("COPA", asked)[:30])
        assert (items[2][target], items[3][target]) == (row["label"], 1 - row["label"])


def test_answers_and_entities_belong_to_their_questions():
    """Every row is in the dataset of every rank, once, and groups number the questions."""
    multirc = gpt2dataset.DATASET["MultiRC"](SUPERGLUE, "dev", 1, 4, tokenizer("gpt2"), 512)
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
    found = (first.group, first.fields["entity"], set(first.answers))
    assert found == ("0-0", "Ravewick", {"Tom Pike"})


def test_verbalizers():
    """The first ids of the words, special tokens passed over; words that begin alike are told apart
    by the first token in which they differ; a vocabulary that has neither word is refused, when it
    is asked.
    """
    for model, task in ALL:
        reader, blank = tokenizer(model), " " * (model == "gpt2")
        names = {"CB": "No Yes Maybe", "COPA": "1 2"}.get(task, "No Yes").split()
        ids = TABLES[model].DATASET[task].get_verbalizer(reader)
        assert len(set(ids)) == len(ids) == len(names)
        if task not in {"CB", "COPA"}:
            words = [reader.encode(blank + name, add_special_tokens=False) for name in names]
            assert ids == [word[0] for word in words]
    spaced: Any = LlamaTokenizer.from_pretrained(FOLDERS / "llama", add_prefix_space=True)
    ids = llamadataset.DATASET["COPA"].get_verbalizer(spaced)
    assert [spaced.convert_ids_to_tokens(number).strip("\u2581") for number in ids] == ["1", "2"]
    nothing = BertTokenizer({f"[{word}]": n for n, word in enumerate(SPECIAL.split())})
    for table in TABLES.values():
        with refused("words of the classes begin with the same token"):
            table.DATASET["RTE"].get_verbalizer(nothing)
    rte = t5dataset.DATASET["RTE"](SUPERGLUE, "dev", 0, 1, nothing, 64, 2)
    assert len(rte) == len(rows("RTE", "val"))
    with refused("no token <extra_id_0>"):
        rte[0]
    assert gpt2dataset.DATASET["RTE"](SUPERGLUE, "dev", 0, 1, nothing, 64)[0]["input_length"] > 2


def test_rows_are_read_when_they_are_asked_for(tmp_path):
    """Nothing is tokenised or kept at construction; the dataset pickles and works in loader
    workers. The folder is the root of all tasks, or the task's own; splits are "dev" and "val".
    """
    lines = [{**GOOD, "premise": f"p{number} 你"} for number in range(50)]
    write_rows(tmp_path / "RTE" / "train.jsonl", lines[0], "\n", *lines[1:])
    items = dataset("gpt2", "RTE", "train", path=tmp_path)
    assert len(items) == 50
    assert len(pickle.dumps(items.examples)) < 50 * 60 + 1000
    for number in (37, 49):
        for index in (number, number - 50):
            assert f"p{number}" in tokenizer("gpt2").decode(items[index]["input_ids"])
    for index in (50, -51):
        with pytest.raises(IndexError):
            items[index]
    how: Any = {"num_workers": 2, "multiprocessing_context": "fork"}
    loader = DataLoader(items, 10, collate_fn=items.collate, **how)
    assert [len(batch["labels"]) for batch in loader] == [10] * 5
    shutil.copytree(SUPERGLUE / "RTE", tmp_path / "anywhere")
    own, usual = (
        dataset("gpt2", "RTE", "dev", path=tmp_path / "anywhere"),
        dataset("gpt2", "RTE", "val"),
    )
    for one, other in zip(own, usual, strict=True):
        assert torch.equal(one["input_ids"], other["input_ids"])


def of_multirc(**passage):
    return {"idx": 0, "passage": {"text": "a", **passage}, "qas": []}


@pytest.mark.parametrize(
    ("task", "lines", "complaint"),
    [
        ("RTE", [], "holds no examples"),
        ("RTE", ["\n\n"], "holds no examples"),
        ("RTE", [GOOD, '{"premise": "a", \n'], r"train\.jsonl, line 2: not JSON"),
        (
            "RTE",
            ['{"premise": "a"\n'],
            r"line 1: not JSON \(Expecting ',' delimiter at column 17\)",
        ),
        ("RTE", [GOOD, "[1]\n"], r"line 2: got list: expected a JSON object"),
        ("RTE", [GOOD, '{"premise": "a"}'], r"line 2: there is no field 'hypothesis'"),
        (
            "RTE",
            [{**GOOD, "label": "perhaps"}],
            r"line 1: the label is 'perhaps': expected one of 'not_entailment', 'entailment'",
        ),
        ("RTE", [{**GOOD, "premise": 3}], r"line 1: field 'premise' is 3: expected a text"),
        ("RTE", [GOOD, '{"premise": "a", "hypothesis": "b"}'], r"line 2: there is no label"),
        ("RTE", [GOOD, "\x00\udcff\n"], r"line 2: "),
        ("BoolQ", [GOOD], r"line 1: there is no field 'passage'"),
        ("WSC", ['{"text": "a", "target": 3, "label": true}'], "'target' is 3: expected an object"),
        ("MultiRC", [of_multirc(questions={})], "field 'questions' is {}: expected a list"),
        ("MultiRC", [of_multirc(questions=[{"idx": 0, "question": "q"}])], "no field 'answers'"),
        ("ReCoRD", [of_multirc(entities=[{"start": 0}])], "no field 'end'"),
    ],
)
def test_bad_files_are_refused_at_construction(tmp_path, task, lines, complaint):
    """With the file and the line."""
    write_rows(tmp_path / task / "train.jsonl", *lines)
    with refused(complaint):
        dataset("gpt2", task, "train", path=tmp_path)


def test_bad_arguments_are_named(tmp_path):
    """A task, split, folder, length or tokenizer that will not do. A test split that is missing is
    empty, as in ModelCenter: a dataset without rows, a loader without batches.
    """
    for name, words in (
        ("Boolq", r"no task 'Boolq'.*Did you mean 'BoolQ'"),
        ("SQuAD", "no task 'SQuAD' for this model: expected one of BoolQ, CB"),
    ):
        with pytest.raises(IdentifierError, match=words):
            bertdataset.DATASET[name]
    with refused("no split 'validation': expected one of train, dev"):
        dataset("t5", "RTE", "validation")
    for model, lengths, complaint in (
        ("t5", (64, 1), "max_decoder_length is 1: expected at least 2"),
        ("t5", (3, 2), "max_encoder_length is 3: expected at least 4"),
        ("gpt2", (1,), "max_decoder_length is 1"),
        ("bert", (7,), "max_encoder_length is 7"),
    ):
        with refused(complaint):
            dataset(model, "RTE", "dev", *lengths)
    for model, task in itertools.product(TABLES, ("BoolQ", "CB", "COPA")):
        (tmp_path / task).mkdir(exist_ok=True)
        found = dataset(model, task, "test", path=tmp_path)
        assert len(found) == 0 and found.qids == [] and not found.examples.grouped
        loader = DistributedDataLoader(found, batch_size=2)
        assert len(loader) == 0 and list(loader) == [] and list(loader) == []
        for split, other in (("dev", task), ("test", "RTE")):
            name = {"dev": "val"}.get(split, split)
            where = f"neither {tmp_path}/{other}/{name}.jsonl nor {tmp_path}/{name}.jsonl"
            with refused(f"split '{split}': there is {where}"):
                dataset(model, other, split, path=tmp_path)
