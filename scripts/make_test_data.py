"""What made the synthetic files of `tests/data`: `python scripts/make_test_data.py` writes the same
files again.

Synthetic are the BoolQ task, whose answers follow from the words of the passage so that a tiny
model can learn it, the texts of `corpus/`, and the small tokenizers, trained on all texts of that
folder. The other files are written by hand, in the formats of the published data sets.
"""

from __future__ import annotations

import collections
import io
import itertools
import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import BertTokenizer, GPT2Tokenizer, LlamaTokenizer, T5Tokenizer

DATA = Path(__file__).parents[1] / "tests" / "data"
SUPERGLUE = DATA / "superglue"
TOKENIZERS = DATA / "tokenizers"


def split(text: str) -> list[str]:
    return text.split()


def lines(text: str) -> list[str]:
    return text.strip().splitlines()


def topics(text: str) -> list[tuple[str, str, list[str], list[str]]]:
    """Of five lines each: kind and question, then what is said when the answer is yes, and when it
    is no.
    """
    found = lines(text)
    groups = [found[start : start + 5] for start in range(0, len(found), 5)]
    return [(*head.split(": "), [a, b], [c, d]) for head, a, b, c, d in groups]  # type: ignore[misc]


FIRST = split(
    "Alder Brenn Carrow Dun Elm Farrow Glen Harrow Iver Kings Lang Marl North Oak Pen Rave"
)
SECOND = split("mouth ford wick dale ton bury field haven")
WDATA = lines(
    """
on the south coast
in the north of the county
near the old border
at the foot of the hills
between two rivers
"""
)
FILLERS = lines(
    """
It was built in {year} by a family of merchants.
The oldest part dates from {year}.
Many painters came here after {year}.
A storm in {year} damaged the roof.
The town council bought it in {year}.
It is named after a bishop who died in {year}.
"""
)
# Kind, question, what is said when the answer is yes, and when it is no.
TOPICS = topics(
    """
museum: can you visit the museum of {name}
It is still open and visitors are welcome every day.
Guests are welcome and entry is free.
It closed long ago and nobody may enter.
The rooms were closed and never opened again.
lake: is swimming allowed in the lake of {name}
Swimming is allowed and popular in summer.
Bathing is allowed and children are welcome.
Swimming is forbidden because of the cold water.
Bathing was never permitted and remains forbidden.
railway: do trains still run on the {name} railway
Trains still run every hour.
The line is popular and trains still leave every morning.
The last train left that year and the line was abandoned.
No train ever came back and the station is closed.
bridge: can cars cross the bridge at {name}
Cars are allowed and still cross it every day.
It is open again and drivers are welcome to use it.
Cars are forbidden and the road is closed.
It was abandoned and cars never cross it.
market: is there a market in {name}
The market is still held and is popular with farmers.
Farmers still sell fruit here every week.
The market was abandoned and the square is closed.
It was closed and never came back.
castle: is {name} castle open to the public
The public is welcome and may climb the tower every day.
The gate is open and photographs are allowed.
The gate is closed and climbing the tower is forbidden.
The walls were abandoned and nobody may enter.
ferry: does a ferry still sail from {name}
The ferry still sails and is popular in summer.
A ferry leaves every evening and bicycles are allowed.
The ferry never sailed again and the pier is closed.
The service was abandoned after the war.
garden: are dogs allowed in the garden of {name}
Dogs are welcome on every path.
Dogs are allowed and the garden is popular with families.
Dogs are forbidden on all paths.
Dogs were never permitted and the side gate is closed.
"""
)

PEOPLE = split("Anna Ben Clara David Emma Felix Grace Henry Ida Jonas Lucy Martin")
JOBS = split("baker teacher farmer sailor doctor painter gardener miller")
PLACES = lines(
    """
the harbour
the old mill
the market
the river
the library
the station
the school
"""
)
THINGS = lines(
    """
a red boat
a small dog
a box of apples
a letter
an old map
a broken clock
a basket of bread
"""
)
STORIES = lines(
    """
{a} was a {job} who lived near {place}.
One morning {a} found {thing} beside {place}.
{a} asked {b} what to do with {thing}.
{b} answered that it belonged to the {job} at {place}.
They walked to {place} and waited until evening.
When the rain stopped, {a} gave {thing} to {b}.
The {job} smiled and thanked {a} for coming.
In the end {a} and {b} went home along the road to {place}.
Nobody in the town had ever seen {thing} like this one.
{b} laughed and said that {a} would make a good {job}.
"""
)
ZH_STORIES = lines(
    """
{a}是一名{job}，住在{place}附近。
一天早上，{a}在{place}看见了{b}。
{a}问{b}：今天的天气怎么样？
{b}回答说，今天天气很好，可以去{place}。
他们一起走到{place}，等到晚上才回家。
{b}说，{a}以后也会成为一名{job}。
这本书和那本书的内容是相同的。
这两个问题的意思不同，没有关系。
"""
)
ZH_PEOPLE = split("小明 小红 李华 王芳 张伟 陈静")
ZH_JOBS = split("老师 医生 农民 画家 学生")
ZH_PLACES = split("图书馆 学校 火车站 河边 市场 公园")


def boolq(rng: random.Random, count: int) -> Iterator[dict[str, Any]]:
    """`count` rows in the format of SuperGLUE's BoolQ, half of them with the answer yes, in random
    order.
    """
    labels = [index % 2 == 0 for index in range(count)]
    rng.shuffle(labels)
    for index, label in enumerate(labels):
        kind, question, yes, no = rng.choice(TOPICS)
        name = rng.choice(FIRST) + rng.choice(SECOND)
        sentences = [f"{name} has a well known {kind} {rng.choice(WDATA)}."]
        sentences += [
            filler.format(year=rng.randrange(1600, 1990))
            for filler in rng.sample(FILLERS, rng.randint(1, 2))
        ]
        sentences.insert(rng.randint(1, len(sentences)), rng.choice(yes if label else no))
        yield {
            "question": question.format(name=name.lower()),
            "passage": f"{name} -- " + " ".join(sentences),
            "idx": index,
            "label": label,
        }


def story(
    rng: random.Random, frames: Sequence[str], words: Mapping[str, Sequence[str]], length: int
) -> list[str]:
    """`length` sentences about two people."""
    first, second = rng.sample(words["person"], 2)
    chosen = {key: rng.choice(words[key]) for key in words if key != "person"}
    return [frame.format(a=first, b=second, **chosen) for frame in rng.sample(frames, length)]


def corpora() -> None:
    """`corpus/english.txt` and `corpus/chinese.txt`, a document a line, and `corpus/english.jsonl`,
    key "text".
    """
    rng = random.Random(1)
    english = {"person": PEOPLE, "job": JOBS, "place": PLACES, "thing": THINGS}
    chinese = {"person": ZH_PEOPLE, "job": ZH_JOBS, "place": ZH_PLACES}
    stories = [" ".join(story(rng, STORIES, english, rng.randint(4, 8))) for _ in range(120)]
    write_text("corpus/english.txt", "".join(line + "\n" for line in stories))
    write_lines("corpus/english.jsonl", [{"text": line} for line in stories[:20]])
    write_text(
        "corpus/chinese.txt",
        "".join(
            "".join(story(rng, ZH_STORIES, chinese, rng.randint(3, 6))) + "\n" for _ in range(60)
        ),
    )


def write_text(name: str, text: str) -> None:
    """One file of this folder."""
    path = DATA / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, "utf-8")


def write_lines(name: str, rows: Sequence[dict[str, Any]]) -> None:
    """A JSONL file of this folder."""
    write_text(name, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def strings(value: Any) -> Iterator[str]:
    """Every string inside a JSON value, keys aside."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain.from_iterable(map(strings, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(strings, value))


def texts() -> Iterator[str]:
    """All training texts of that folder, in a fixed order."""
    for path in sorted(DATA.glob("**/*")):
        if path.is_relative_to(TOKENIZERS) or path.suffix not in {
            ".jsonl",
            ".json",
            ".txt",
            ".tsv",
        }:
            continue
        text = path.read_text("utf-8")
        if path.suffix == ".jsonl":
            yield from itertools.chain.from_iterable(
                strings(json.loads(line)) for line in text.splitlines()
            )
        elif path.suffix == ".json":
            yield from strings(json.loads(text))
        else:
            yield from (line.replace("\t", " ") for line in text.splitlines())


def is_chinese(text: str) -> bool:
    """Whether most of it is written in Chinese characters."""
    return sum("\u4e00" <= letter <= "\u9fff" for letter in text) * 3 > len(text)


def english_texts() -> list[str]:
    """The texts that are not Chinese, with the question that ends each prompt."""
    prompts = [
        "Question: Answer: Context: Sentence 1: Sentence 2: Choice 1: Choice 2: was choice",
        "No Yes Maybe no yes maybe 1 2",
    ] * 20
    return [text for text in texts() if not is_chinese(text)] + prompts


def bert() -> None:
    """A WordPiece vocabulary: the commonest lower-case words, and characters, alone and inside of
    words.
    """
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    normalizer, splitter = (
        normalizers.BertNormalizer(lowercase=True),
        pre_tokenizers.BertPreTokenizer(),
    )
    split = (splitter.pre_tokenize_str(normalizer.normalize_str(text)) for text in english_texts())
    counts = collections.Counter(word for words in split for word, _ in words)
    letters = sorted({letter for word in counts for letter in word})
    words = [
        word for word in sorted(counts, key=lambda word: (-counts[word], word)) if len(word) > 1
    ][:900]
    vocabulary = [*special, *letters, *(f"##{letter}" for letter in letters), *words]
    write_text("tokenizers/bert/vocab.txt", "".join(f"{word}\n" for word in vocabulary))
    BertTokenizer.from_pretrained(TOKENIZERS / "bert", model_max_length=512).save_pretrained(
        TOKENIZERS / "bert"
    )


def gpt2() -> None:
    """A byte-level BPE: every text has ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(english_texts(), trainer)
    (TOKENIZERS / "gpt2").mkdir(parents=True, exist_ok=True)
    tokenizer.model.save(str(TOKENIZERS / "gpt2"))
    GPT2Tokenizer.from_pretrained(TOKENIZERS / "gpt2", model_max_length=1024).save_pretrained(
        TOKENIZERS / "gpt2"
    )


def piece_model(lines: Sequence[str], **options: Any) -> bytes:
    """A trained SentencePiece model."""
    file = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=file,
        minloglevel=2,
        num_threads=1,
        normalization_rule_name="identity",
        **options,
    )
    return file.getvalue()


def write_pieces(name: str, data: bytes) -> None:
    """A SentencePiece model in its tokenizer's folder."""
    (TOKENIZERS / name).parent.mkdir(parents=True, exist_ok=True)
    (TOKENIZERS / name).write_bytes(data)


def t5() -> None:
    """Unigram pieces, ids 0 to 2 and a hundred sentinels as T5 has them."""
    data = piece_model(
        english_texts(),
        vocab_size=900,
        model_type="unigram",
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
    )
    write_pieces("t5/spiece.model", data)
    T5Tokenizer.from_pretrained(TOKENIZERS / "t5", model_max_length=512).save_pretrained(
        TOKENIZERS / "t5"
    )


CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}"
    "{{ eos_token if message['role'] == 'assistant' else '' }}{{ '\\n' }}{% endfor %}"
    "{{ '[assistant] ' if add_generation_prompt else '' }}"
)


def llama() -> None:
    """BPE pieces with bytes for what is unknown, ids 0 to 2 as LLaMA has them, and a chat
    template.
    """
    data = piece_model(
        english_texts(),
        vocab_size=900,
        model_type="bpe",
        byte_fallback=True,
        unk_id=0,
        bos_id=1,
        eos_id=2,
        pad_id=-1,
    )
    write_pieces("llama/tokenizer.model", data)
    loaded = LlamaTokenizer.from_pretrained(
        TOKENIZERS / "llama", model_max_length=2048, add_bos_token=True, add_eos_token=False
    )
    loaded.chat_template = CHAT
    loaded.save_pretrained(TOKENIZERS / "llama")


def chinese_words() -> list[str]:
    """ASCII, every character of the Chinese texts, then some words."""
    lines = [text for text in texts() if is_chinese(text)]
    letters = sorted({letter for line in lines for letter in line if letter not in " \n"})
    words = [
        *ZH_PEOPLE,
        *ZH_JOBS,
        *ZH_PLACES,
        *[
            "今天",
            "天气",
            "早上",
            "晚上",
            "关系",
            "内容",
            "相同",
            "不同",
            "无关",
            "有关",
            "相关",
            "问题",
            "是否",
        ],
    ]
    ascii_letters = [chr(code) for code in range(33, 127)]
    return list(dict.fromkeys([*ascii_letters, *"“”与是否有关？的关系。", *letters, *words]))


def cpm() -> None:
    """The vocabularies of CPM-1 and CPM-2: a token a line."""
    words = chinese_words()
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>"]
    write_text(
        "tokenizers/cpm1/vocab.txt",
        "".join(f"{word}\n" for word in [*special, "</_>", "</n>", *words]),
    )
    sentinels = [f"<s_{index}>" for index in range(190)]
    write_text(
        "tokenizers/cpm2/vocab.txt",
        "".join(f"{word}\n" for word in [*special, "\u2582", "\u2583", *words, *sentinels]),
    )


def glm() -> None:
    """Chinese pieces; the special tokens follow the last piece, where those of the published model
    have fixed ids.
    """
    lines = [text for text in texts() if is_chinese(text)]
    data = piece_model(
        lines, vocab_size=500, model_type="unigram", character_coverage=1.0, hard_vocab_limit=False
    )
    write_pieces("glm/vocab.model", data)
    first_special = sentencepiece.SentencePieceProcessor(model_proto=data).get_piece_size()
    write_text(
        "tokenizers/glm/tokenizer_config.json",
        json.dumps({"first_special_id": first_special, "tokenizer_class": "GLMTokenizer"}) + "\n",
    )


def main() -> None:
    """All of them; the tokenizers last, as they are trained on the rest."""
    rng = random.Random(0)
    write_lines("superglue/BoolQ/train.jsonl", list(boolq(rng, 200)))
    write_lines("superglue/BoolQ/val.jsonl", list(boolq(rng, 60)))
    write_lines(
        "superglue/BoolQ/test.jsonl",
        [{key: row[key] for key in ("question", "passage", "idx")} for row in boolq(rng, 12)],
    )
    corpora()
    # a tokenizer.json that is there would be believed before the vocabulary
    shutil.rmtree(TOKENIZERS, ignore_errors=True)
    for make in (bert, gpt2, t5, llama, cpm, glm):
        make()


if __name__ == "__main__":
    main()
