"""Data as people have it: every form and every file is read alike, or refused with its place."""

import bz2
import copy
import gzip
import json
import lzma
import pickle

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from tests.data_sets.common import refused, tokenizer, write_rows

from model_center.dataset.instructions import InstructionDataset, TooLong
from model_center.dataset.mixture import Mixture, MixturePart, set_aside, weighted
from model_center.dataset.packing import PackedSamples
from model_center.dataset.rows import source
from model_center.dataset.tokenised import FEW, tokens_of

GPT2 = tokenizer("gpt2")
END = "<|endoftext|>"
TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ASKED = f"{END}### User:\na\n\n### Assistant:\n"


def read(path, length=512, **options):
    """What each sample is, and what is learnt of it."""
    data = InstructionDataset(path, GPT2, length, **options)
    found = []
    for item in map(data.__getitem__, range(len(data))):
        assert item["targets"][:-1][item["targets"][:-1] >= 0].tolist() == [
            number
            for number, target in zip(item["input_ids"][1:].tolist(), item["targets"], strict=False)
            if target >= 0
        ]
        learnt = item["targets"][item["targets"] >= 0]
        found.append((GPT2.decode(item["input_ids"]), GPT2.decode(learnt)))
    assert data.lengths.tolist() == [len(data[n]["input_ids"]) for n in range(len(data))]
    assert data.num_loss_tokens.tolist() == [
        int((data[n]["targets"] >= 0).sum()) for n in range(len(data))
    ]
    return found


def one(row, tmp_path):
    (found,) = read(write_rows(tmp_path / "a.jsonl", row))
    return found


SHARED = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
ROWS = {
    "nulls": {"messages": None, "prompt": "a", "response": "b", "text": None},
    "null weights": {"messages": [{**turn, "weight": None} for turn in TALK]},
    "turns of the other kind": {"conversations": TALK},
    "and the other way round": {"messages": SHARED},
    "a name for OpenAI's": {"prompt": "a", "messages": TALK, "prompt_id": 7},
    "other roles": {"conversations": [{"from": "user", "value": "a"}, {"from": "bot", "value": "b"}]},
    "question": {"question": "a", "answer": "b"},
    "query": {"query": "a", "response": "b", "images": [], "history": []},
    "pair": {"prompt": "a", "response": "b", "tools": ""},
    "alpaca": {"instruction": "a", "output": "b"},
    "dolly": {"instruction": "a", "context": "", "response": "b"},
    "trl": {"prompt": TALK[:1], "completion": TALK[1:]},
    "half of trl": {"prompt": TALK[:1], "completion": "b"},
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_a_row_may_be_said_so(row, tmp_path):
    assert one(row, tmp_path) == (f"{ASKED}b{END}\n\n", f"b{END}")


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
EARLIER = [["x", "y"]]
WHOLE = f"{END}### User:\nx\n\n### Assistant:\ny{END}\n\n{ASKED.removeprefix(END)}b{END}\n\n"


@pytest.mark.parametrize(
    ("row", "text", "learnt"),
    [
        ({"instruction": "a", "output": "b", "history": EARLIER}, WHOLE, f"y{END}b{END}"),
        ({"query": "a", "response": "b", "history": EARLIER}, WHOLE, f"y{END}b{END}"),
        (
            {"prompt": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}, *TALK[:1]], "completion": TALK[1:]},
            WHOLE,
            f"b{END}",
        ),
        *(
            (
                {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", **flag}, *TALK]},
                WHOLE,
                f"b{END}",
            )
            for flag in ({"weight": 0}, {"train": False}, {"loss": False}, {"masked": True}, {"loss_mask": 0})
        ),
        (
            {"conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y", "weight": 0}, *SHARED]},
            WHOLE,
            f"b{END}",
        ),
        ({"messages": json.dumps([{"role": "User", "content": "x"}, {"role": "ai", "content": "y"}, *TALK])}, WHOLE, f"y{END}b{END}"),
        (
            {
                "messages": [*TALK[:1], {"role": "assistant", "reasoning_content": "r", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}, {"role": "tool", "content": "t"}, TALK[1]],
                "tools": [{"function": {"name": "f"}}],
            },
            f'{END}### Tools:\n[{{"function": {{"name": "f"}}}}]\n\n{ASKED.removeprefix(END)}<think>\nr\n</think>\n\n{CALL}{END}\n\n### Tool:\nt\n\n### Assistant:\nb{END}\n\n',
            f"<think>\nr\n</think>\n\n{CALL}{END}b{END}",
        ),
        ({"text": f"{WHOLE}", "label": 3, "labels": 3, "loss": 0.5}, f"{END}{WHOLE}{END}", f"{WHOLE}{END}"),
        *(
            (row, f"{END}### System:\ns\n\n{ASKED.removeprefix(END)}b{END}\n\n", f"b{END}")
            for row in (
                {"messages": TALK, "system": "s"},
                {"system_prompt": "s", "question": "a", "response": "b"},
                {"prompt": "a", "completion": "b", "system": "s"},
                {"conversations": [{"from": "system", "value": "s"}, *SHARED]},
            )
        ),
        ({"instruction": "a", "input": "c", "output": "b"}, f"{END}### User:\na\n\nc\n\n### Assistant:\nb{END}\n\n", f"b{END}"),
        ({"messages": [TALK[0], {"role": "assistant", "content": [{"text": "b"}, {"text": "c"}]}]}, f"{ASKED}bc{END}\n\n", f"bc{END}"),
        ({"content": "plain"}, f"{END}plain{END}", f"plain{END}"),
        ({"messages": [TALK[0], {"role": "assistant", "content": "\ue000"}]}, f"{ASKED}\ue000{END}\n\n", f"\ue000{END}"),
    ],
)  # fmt: skip
def test_what_was_passed_over_is_read(row, text, learnt, tmp_path):
    assert one(row, tmp_path) == (text, learnt)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ({"messages": TALK, "images": ["a.png"]}, "got images: a model of language alone"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "got chosen: a better"),
        ({"prompt": "a", "completion": "b", "label": True}, "got label True of a row"),
        ({"messages": TALK, "weight": 0.5}, "got weight 0.5 of a row"),
        ({"messages": TALK, "sample_weight": 0.5}, "got sample_weight 0.5 of a row"),
        ({"messages": TALK, "train": False}, "got train False of a row"),
        ({"messages": TALK, "assistant_masks": [0, 1]}, "got assistant_masks: tokens cannot be masked"),
        ({"text": "a", "labels": [1]}, "got labels: tokens cannot be masked"),
        ({"messages": TALK, "documents": [{"text": "a"}]}, "got documents: it is not given to the chat"),
        ({"messages": TALK, "rejected_messages": TALK}, "got rejected_messages: a better"),
        ({"messages": TALK, "tools": "none"}, "got 'none' as tools: expected a list, or its JSON"),
        ({"messages": [TALK[0], {**TALK[1], "train": True, "weight": 0}]}, "one puts it into the loss, another"),
        ({"messages": [TALK[0], {**TALK[1], "weight": 0.5}]}, "got weight 0.5 of a message"),
        ({"messages": [{**TALK[0], "train": True}, TALK[1]]}, "got train True of a message of the"),
        ({"messages": [TALK[0], {**TALK[1], "mask": 1}]}, "got mask: 1 may mean"),
        ({"messages": [{**TALK[0], "images": ["a.png"]}, TALK[1]]}, "got images: a model"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "as a part of a mes"),
        ({"text": "a", "history": EARLIER}, "got a text with history"),
        ({"query": "a", "response": "b", "history": ["x"]}, "got 'x' in history"),
        ({"messages": [{"role": "system", "content": "t"}, *TALK], "system": "s"}, "two system"),
        ({"messages": 3}, "got 3 as messages"),
        ('{"prompt": "a \\ud83d b", "response": "ok"}\n', r"\\ud83d is half of a surrogate pair"),
        ('{"prompt": ' + "[" * 100_000 + "\n", "nested too deeply"),
        ('{"prompt": ' + "1" * 5000 + ', "response": "a"}\n', "line 1: Exceeds the limit"),
    ],
)  # fmt: skip
def test_what_would_be_lost_is_refused(row, complaint, tmp_path):
    with refused(rf"a\.jsonl, line 1: .*{complaint}|a\.jsonl, {complaint}"):
        one(row, tmp_path)


PAIRS = [{"prompt": f"What is {n}?", "response": str(n)} for n in range(3)]


def as_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


LINES = "".join(json.dumps(row) + "\n" for row in PAIRS).encode()


def as_arrow(path, rows):
    """As `save_to_disk` of datasets writes a split."""
    path.parent.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
        stream.write_table(table)
    for name in ("state.json", "dataset_info.json"):
        path.with_name(name).write_text('{\n"_split": "train"}')


WRITE = {
    "a.jsonl": lambda path: write_rows(path, *PAIRS),
    "b.jsonl": lambda path: path.write_text(
        "\n" + "".join(json.dumps(row) + "\r\n" for row in PAIRS), "utf-8-sig"
    ),
    "c.json": lambda path: path.write_text(json.dumps(PAIRS, indent=1), "utf-8-sig"),
    "d.json": lambda path: write_rows(path, *PAIRS),
    "e.parquet": lambda path: as_parquet(path, [*PAIRS]),
    "f.csv": lambda path: path.write_text(
        "prompt,response\n" + "".join(f'"{row["prompt"]}",{row["response"]}\n' for row in PAIRS)
    ),
    "g.tsv": lambda path: path.write_text(
        "prompt\tresponse\n" + "".join("\t".join(row.values()) + "\n" for row in PAIRS)
    ),
    "h.jsonl.GZ": lambda path: path.write_bytes(gzip.compress(LINES)),
    "h2.jsonl.xz": lambda path: path.write_bytes(lzma.compress(LINES)),
    "h3.jsonl.bz2": lambda path: path.write_bytes(bz2.compress(b"\xef\xbb\xbf" + LINES)),
    "h4.jsonl.zst": lambda path: path.write_bytes(
        b"".join(pyarrow.compress(half, "zstd", asbytes=True) for half in (LINES[:9], LINES[9:]))
    ),
    "h5/data.arrow": lambda path: as_arrow(path, [*PAIRS]),
    "i.dat": lambda path: write_rows(path, *PAIRS),
}


def test_files_of_all_kinds_are_one_data_set(tmp_path):
    """By themselves and as a folder, in which texts are documents and what is of no kind is told."""
    for name, write in WRITE.items():
        write(tmp_path / name)
        assert read(tmp_path / name) == read(tmp_path / "a.jsonl"), name
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    (tmp_path / ".hidden.jsonl").write_text("{")
    (folder / "z.txt").write_text("Once upon a time", "utf-8-sig")
    whole = read(tmp_path)
    text = f"{END}Once upon a time{END}"
    pairs = read(tmp_path / "a.jsonl")
    # sorted by name, so that the folder "deep" comes after d.json
    assert whole == [*pairs * 4, (text, text.removeprefix(END)), *pairs * 8]
    (tmp_path / "README.md").write_text("# About it")  # is a document where nothing is described
    passed_over = {path.name for path in source(tmp_path).passed_over}
    assert passed_over == {"README.md", "i.dat", "state.json", "dataset_info.json"}
    assert source(tmp_path / "deep").files == (folder / "z.txt",)
    (folder / "README.md").write_text("# A text")
    assert source(tmp_path / "deep").files == (folder / "README.md", folder / "z.txt")


def test_a_split_is_named(tmp_path):
    """Of a DatasetDict on disk; a test split would be trained on."""
    (tmp_path / "dataset_dict.json").write_text("{}")
    as_arrow(tmp_path / "train" / "data.arrow", [*PAIRS])
    assert read(tmp_path) == read(tmp_path / "train")
    as_arrow(tmp_path / "test" / "data.arrow", [*PAIRS])
    with refused("holds the splits test, train: name the folder of one"):
        source(tmp_path)


def test_a_cell_may_be_a_document(tmp_path):
    row = {"prompt": "a", "response": "b " * 70_000}
    (tmp_path / "a.csv").write_text(f"prompt,response\na,{row['response']}\n")
    whole = write_rows(tmp_path / "a.jsonl", row)
    assert read(tmp_path / "a.csv", 200_000) == read(whole, 200_000)
    (tmp_path / "b.csv").write_text((tmp_path / "a.csv").read_text() + f"a,{row['response']}\n")
    first, second = (source(tmp_path / name).rows() for name in ("a.csv", "b.csv"))
    found = [next(first), next(second), *first, *second]  # the second goes on after the first
    assert [each.content for each in found] == [row] * 3


def test_structs_of_tables_have_nulls(tmp_path):
    """Arguments of another row's call are none of this one's."""
    calls = [{"a": 1}, {"b": "x"}]
    rows = [
        {"messages": [TALK[0], {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": call}}]}]}
        for call in calls
    ]  # fmt: skip
    as_parquet(tmp_path / "a.parquet", rows)
    found = [row.content["messages"][1] for row in source(tmp_path / "a.parquet").rows()]
    assert found == [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": call}}]}
        for call in calls
    ]


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        (
            "a.jsonl",
            b'{"text": "a"}\n{"text": "\xff"}\n',
            r"line 2: not UTF-8 \(invalid start byte",
        ),
        ("a.json", b'[\n{"text": "a"},\n]', r"a\.json: not JSON .* at line 3, column 1"),
        ("a.json", b'[{"text": "a"}, 3]', "row 2: got int: expected a JSON object"),
        ("a.json", b'{"data": [\n]}', "line 1: not JSON"),
        ("a.parquet", b"PAR1", "a.parquet, behind row 0: "),
        ("a.csv", b"text\na\nb,c\n", "line 3: more cells than names"),
        ("a.csv", b'text\n"a\n', "line 2: unexpected end of data"),
        ("a.csv", b"text,b,text,,\na,b,c,,\n", "line 1: got the name text twice: rename a column"),
        ("a.csv", b"text\n\xff\n", "not UTF-8 .*: save the text as UTF-8"),
        ("a.arrow", b"ARROW1", "a.arrow, behind row 0: "),
        (
            "a.jsonl.gz",
            gzip.compress(b"{", mtime=0)[:10] + b"\xff" * 20,
            "a.jsonl.gz cannot be read: ",
        ),
        ("a.jsonl.xz", lzma.compress(b"{" * 99)[:40] + b"a" * 40, "a.jsonl.xz cannot be read: "),
        ("a.jsonl.zst", b"{}", "a.jsonl.zst cannot be read: "),
        ("a.txt", b"\xff", "a.txt: not UTF-8"),
        ("a.jsonl.gz", b"{}", "a.jsonl.gz cannot be read: Not a gzipped file"),
        ("a.jsonl", b"\n", "holds no rows: expected at least one"),
        ("folder/a.bin", b"", "holds no data: expected files that end with"),
    ],
)
def test_bad_files_are_named(name, content, complaint, tmp_path):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    with refused(complaint):
        read(path.parent if "/" in name else path)


def test_a_name_of_the_hub():
    """Needs its package."""
    with refused("there is no file nowhere/rows.jsonl: expected a file, a folder, or a name"):
        source("nowhere/rows.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(__import__("sys").modules, "datasets", None)
        with refused("there is no file or folder org/name:test, and a data set of the hub needs"):
            next(source("org/name:test").rows())


def test_texts_go_on_in_the_next_sample(tmp_path):
    """Each token but the first is learnt once, whatever the length; both ends of a document that is
    set aside are.
    """
    texts = [f"Document {n}. " + "abc def " * (17 * n) for n in range(4)]
    path = write_rows(tmp_path / "a.jsonl", *({"text": text} for text in texts), PAIRS[0])
    whole = InstructionDataset(path, GPT2, 10_000)
    for length in (2, 7, 64):
        data = InstructionDataset(path, GPT2, length)
        assert data.num_rows == 5 and data.num_cut <= 1
        for row in range(4):
            items = [data[number] for number in data.samples_of(row)]
            for key in ("input_ids", "targets"):
                assert torch.cat([item[key] for item in items]).equal(whole[row][key])
            assert all(len(item["input_ids"]) == length for item in items[:-1])
        packed = PackedSamples(data, length)
        learnt = sum(int((packed[n]["targets"] >= 0).sum()) for n in range(len(packed)))
        assert learnt == sum(data.num_loss_tokens) >= sum(whole.num_loss_tokens[:4])
        rest, aside = set_aside(MixturePart(data, range(5)), 0.4, 3)
        assert len(Mixture([rest])) + len(Mixture([aside])) == len(data)
        assert {*rest.numbers}.isdisjoint(aside.numbers) and len(aside.numbers) == 2


def test_a_share_of_a_single_text(tmp_path):
    """Its end is set aside, and no token of it is learnt, but for the first one as what follows the
    rest; of a single conversation nothing can be.
    """
    path = tmp_path / "a.txt"
    path.write_text("Of all these words some are kept. " * 40)
    whole = InstructionDataset(path, GPT2, 10_000)[0]["input_ids"]
    for length in (16, 10_000):
        for cache in (None, tmp_path / "cache"):
            data = InstructionDataset(path, GPT2, length, cache=cache)
            key = data.tokens.key
            parts = set_aside(MixturePart(data, range(data.num_rows)), 0.25, 3)
            assert data.tokens.key != key
            rest, aside = (
                [mixture[number] for number in range(len(mixture))]
                for mixture in (Mixture([part]) for part in parts)
            )
            ids = [torch.cat([item["input_ids"] for item in side]) for side in (rest, aside)]
            assert torch.cat(ids).equal(whole) and len(ids[1]) == round(0.25 * len(whole))
            assert torch.cat([item["targets"] for item in rest]).equal(whole[1 : len(ids[0]) + 1])
            other = pickle.loads(pickle.dumps(data.tokens))
            assert list(other.starts) == list(data.tokens.starts) == [0, len(ids[0])]
    one = InstructionDataset(write_rows(tmp_path / "a.jsonl", PAIRS[0]), GPT2, 64)
    with refused("a.jsonl is one row, of which no share can be set aside"):
        set_aside(MixturePart(one, range(1)), 0.25, 3)
    with refused("a.jsonl: a weight of 0.5 leaves none of 1 rows"):
        weighted(MixturePart(one, range(1)), 0.5, 3)


def test_conversations_that_do_not_fit(tmp_path):
    """Are cut, dropped or refused, and counted."""
    rows = [
        PAIRS[0],
        {"prompt": "a", "response": "word " * 99},
        {"prompt": "w " * 99, "response": "b"},
    ]
    path = write_rows(tmp_path / "a.jsonl", *rows)
    whole = InstructionDataset(path, GPT2, 10_000)
    cut = InstructionDataset(path, GPT2, 40)
    assert (cut.num_cut, cut.num_dropped) == (2, 0) and len(cut) == 3
    assert cut.tokens_lost == sum(whole.lengths) - len(whole[0]["input_ids"]) - 80
    assert PackedSamples(cut, 40).num_without_answer == 1
    dropped = InstructionDataset(path, GPT2, 40, TooLong.DROP)
    assert (dropped.num_cut, dropped.num_dropped, len(dropped)) == (0, 2, 1)
    assert dropped[0]["targets"].equal(whole[0]["targets"])
    with refused(rf"a\.jsonl, line 2: the conversation has {whole.lengths[1]} tokens, and 2 of 3"):
        InstructionDataset(path, GPT2, 40, TooLong.REFUSE)
    assert len(InstructionDataset(path, GPT2, 10_000, TooLong.REFUSE)) == 3


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.long)])
def test_tokens_are_made_once(workers, tmp_path):
    """By other processes as by one; found again where the data lie elsewhere, and not for other
    data, another tokenizer or another template.
    """
    count = 600 + (FEW if workers > 1 else 0)  # fewer are not worth other processes
    rows = [{"prompt": f"What is {n}?", "response": str(n)} for n in range(count)]
    path, cache = write_rows(tmp_path / "a.jsonl", *rows), tmp_path / "cache"
    seen = []
    alone = tokens_of(source(path), GPT2)
    made = tokens_of(source(path), GPT2, cache, workers=workers, report=seen.append)
    assert seen[-1] == len(made) == len(rows) and seen == sorted(seen)
    for name in ("ids", "in_loss", "starts", "stops", "is_text"):
        assert np.array_equal(vars(alone)[name], vars(made)[name]), name
    again = pickle.loads(pickle.dumps(made))
    assert np.array_equal(again.ids, made.ids) and len(pickle.dumps(made)) < 300
    moved = path.rename(tmp_path / "moved.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model_center.dataset.tokenised._write", None)  # not to be called
        assert tokens_of(source(moved), GPT2, cache).key == made.key
    other = copy.deepcopy(GPT2)
    other.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    assert tokens_of(source(moved), other, cache).key != made.key
    write_rows(moved, *rows[1:])
    assert tokens_of(source(moved), GPT2, cache).key != made.key
    assert len([*cache.iterdir()]) == 3
    broken = write_rows(tmp_path / "b.jsonl", *rows, '{"prompt": 3, "response": "a"}\n')
    with refused(rf"b\.jsonl, line {len(rows) + 1}: got 3 as prompt"):
        tokens_of(source(broken), GPT2, cache)
    assert len([*cache.iterdir()]) == 3
    with refused(r"the tokens of .*b\.jsonl cannot be written: .*Not a directory"):
        tokens_of(source(broken), GPT2, broken / "cache")


def test_long_texts(tmp_path, monkeypatch):
    """A few at a time, with the same tokens; one that no memory holds is refused, by file and row."""
    rows = [{"text": f"{n} is a number. " * (1 + n % 9)} for n in range(40)]
    path = write_rows(tmp_path / "a.jsonl", *rows)
    whole, seen = tokens_of(source(path), GPT2), []
    with monkeypatch.context() as patch:
        patch.setattr("model_center.dataset.tokenised.LONG_BATCH", 400)
        parts = tokens_of(source(path), GPT2, report=seen.append)
        assert np.array_equal(parts.ids, whole.ids) and np.array_equal(parts.stops, whole.stops)
        assert seen[-1] == len(rows) and 5 < len(seen) < len(rows)
        patch.setattr("os.sysconf", lambda name: 2**8)  # pages of so many bytes
        write_rows(path, *rows, {"text": "long " * 2000})
        with refused(
            r"a\.jsonl, line 41: a text of 10,026 letters, for .* Divide it into documents"
        ):
            tokens_of(source(path), GPT2)
        write_rows(path, *rows)
        assert np.array_equal(tokens_of(source(path), GPT2).ids, whole.ids)
