"""Instruction tuning: which tokens are learnt, and that packed rows are their samples side by
side.
"""

from __future__ import annotations

import copy
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch.utils.data import DataLoader

from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.packing import PackedSamples, best_fit, segment_mask, spread
from model_center.errors import DataError
from model_center.tokenizer import CPM1Tokenizer, GPT2Tokenizer, LlamaTokenizer

DATA = pathlib.Path(__file__).parents[1] / "data"
LLAMA: Any = LlamaTokenizer.from_pretrained(DATA / "tokenizers" / "llama")
GPT2: Any = GPT2Tokenizer.from_pretrained(DATA / "tokenizers" / "gpt2")


def items_of(dataset: Any) -> Iterator[dict[str, torch.Tensor]]:
    """All items in order. Python iterates by `__getitem__`, which torch does not declare."""
    return iter(dataset)


def learnt(item: dict[str, torch.Tensor]) -> list[int]:
    """The ids that are to be predicted, each of which must be the next one."""
    for place in (item["targets"] >= 0).nonzero().flatten().tolist():
        assert item["targets"][place] == item["input_ids"][place + 1]
    return item["targets"][item["targets"] >= 0].tolist()


def messages(name: str) -> list[list[dict[str, str]]]:
    """The conversations of a stored file in the "messages" format."""
    return [
        json.loads(line)["messages"]
        for line in (DATA / "chat" / name).read_text(encoding="utf-8").splitlines()
    ]


@pytest.mark.parametrize("name", ["train.jsonl", "val.jsonl"])
def test_a_chat_template_decides_the_text_and_answers_are_learnt(name: str) -> None:
    """The whole conversation is read; each answer, and the token that ends it, is learnt."""
    items = InstructionDataset(DATA / "chat" / name, LLAMA, 512)
    for item, conversation in zip(items_of(items), messages(name), strict=True):
        text = LLAMA.apply_chat_template(conversation, tokenize=False)
        assert item["input_ids"].tolist() == LLAMA.encode(text, add_special_tokens=False)
        assert item["input_length"] == len(item["input_ids"])
        answers = [message["content"] for message in conversation if message["role"] == "assistant"]
        assert LLAMA.decode(learnt(item)).replace(" ", "") == "".join(
            f"{answer}</s>" for answer in answers
        ).replace(" ", "")


def test_without_a_template_there_are_headings() -> None:
    """Alpaca's and ShareGPT's formats, byte for byte as plain text."""
    items = InstructionDataset(DATA / "chat" / "alpaca.jsonl", GPT2, 512)
    asked = "Translate the word into English.\n\nHaus"
    text = f"<|endoftext|>### User:\n{asked}\n\n### Assistant:\nhouse<|endoftext|>\n\n"
    assert items[0]["input_ids"].tolist() == GPT2.encode(text)
    assert GPT2.decode(learnt(items[0])) == "house<|endoftext|>"
    assert GPT2.decode(learnt(items[4])) == "Hello!<|endoftext|>"  # no field "input"
    shared = InstructionDataset(DATA / "chat" / "sharegpt.jsonl", GPT2, 512)
    assert "### System:\nAnswer with one word.\n\n### User:\nWhat colour" in GPT2.decode(
        shared[1]["input_ids"]
    )
    assert GPT2.decode(learnt(shared[1])) == "White.<|endoftext|>Black.<|endoftext|>"


def test_long_conversations_lose_their_end() -> None:
    """Ids and targets alike; the last place has nothing to predict."""
    whole, cut = (
        InstructionDataset(DATA / "chat" / "train.jsonl", GPT2, length) for length in (512, 40)
    )
    for long, short in zip(items_of(whole), items_of(cut), strict=True):
        length = min(40, len(long["input_ids"]))
        assert short["input_ids"].tolist() == long["input_ids"][:40].tolist()
        assert short["targets"].tolist() == [*long["targets"][: length - 1].tolist(), -100]
        assert short["input_length"] == length
    assert any(len(item["input_ids"]) == 40 for item in items_of(cut))


def test_batches_are_padded() -> None:
    """-100 where nothing is to be predicted."""
    items = InstructionDataset(DATA / "chat" / "alpaca.jsonl", GPT2, 512)
    (batch,) = DataLoader(items, len(items), collate_fn=items.collate)
    past = torch.arange(batch["input_ids"].shape[1]) >= batch["input_length"][:, None]
    assert past.any()
    assert (batch["targets"][past] == -100).all()
    assert [row[row >= 0].tolist() for row in batch["targets"]] == [
        learnt(item) for item in items_of(items)
    ]


def test_packed_rows_are_their_samples() -> None:
    """Every sample once, whole, with positions of its own; twice the same rows."""
    samples = InstructionDataset(DATA / "chat" / "train.jsonl", LLAMA, 100)
    packed = PackedSamples(samples, 160)
    assert sorted(number for row in packed.rows for number in row) == list(range(len(samples)))
    assert packed.num_without_answer == 0
    assert len(packed) < len(samples)
    assert packed.rows == PackedSamples(samples, 160).rows
    for item, numbers in zip(items_of(packed), packed.rows, strict=True):
        assert item["input_length"] == len(item["input_ids"]) <= 160
        for segment, number in enumerate(numbers, start=1):
            here = item["segments"] == segment
            assert item["input_ids"][here].tolist() == samples[number]["input_ids"].tolist()
            assert item["targets"][here].tolist() == samples[number]["targets"].tolist()
            assert item["position_ids"][here].tolist() == list(range(int(here.sum())))
    batch = packed.collate([packed[index] for index in range(len(packed))])
    padding = torch.arange(batch["input_ids"].shape[1]) >= batch["input_length"][:, None]
    assert ((batch["segments"] == 0) == padding).all()


def test_a_model_sees_samples_apart_in_a_packed_row() -> None:
    """Logits of a packed row are those of its samples alone, by transformers' GPT-2 given positions
    and the mask.
    """
    samples = InstructionDataset(DATA / "chat" / "alpaca.jsonl", GPT2, 128)
    packed = PackedSamples(samples, 256)
    (numbers, *_), row = packed.rows, packed[0]
    assert len(numbers) > 1
    torch.manual_seed(0)
    config = transformers.GPT2Config(  # type: ignore[call-arg]  # every configuration takes attn_implementation
        vocab_size=len(GPT2),
        n_embd=32,
        n_layer=2,
        n_head=2,
        n_positions=256,
        attn_implementation="eager",
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    mask = segment_mask(row["segments"][None])
    bias = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)[:, None]
    with torch.no_grad():
        together = model(
            row["input_ids"][None], position_ids=row["position_ids"][None], attention_mask=bias
        ).logits[0]
        for segment, number in enumerate(numbers, start=1):
            alone = model(samples[number]["input_ids"][None]).logits[0]
            torch.testing.assert_close(
                together[row["segments"] == segment], alone, rtol=1e-4, atol=1e-5
            )


def test_rows_are_filled_well() -> None:
    """Each place once, no row too long, no two rows that would fit into one, and near to the least
    number of rows.
    """
    rng = random.Random(0)
    for room in (7, 64, 512):
        lengths = [rng.randint(1, room) for _ in range(300)]
        rows = best_fit(lengths, room)
        assert sorted(place for row in rows for place in row) == list(range(300))
        filled = sorted(sum(lengths[place] for place in row) for row in rows)
        assert filled[-1] <= room
        assert filled[0] + filled[1] > room
        assert len(rows) <= 1.23 * sum(lengths) / room + 1
        assert rows == sorted(rows) == best_fit(lengths, room)
    assert spread([[0, 1, 2], [3], [4, 5]], 3) == [[0, 1, 2], [3], [4, 5]]
    assert spread([[0, 1, 2, 4], [3]], 4) == [[0], [1], [2, 4], [3]]
    assert spread([[0, 1], [3]], 9) == [[0], [1], [3]]
    assert best_fit([], 4) == []
    assert best_fit([4, 4, 1], 4) == [[0], [1], [2]]


# As Qwen 3's: thoughts of answers before the last question are left out, the last answer begins
# with its thoughts or empty ones, results of tools are a user's turn.
QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\\n' + (tools | tojson) + '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=messages | length - 1) %}
{%- for message in messages %}
    {%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- set thoughts = message.reasoning_content or '' %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or thoughts) %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n' + (call.function | tojson) + '\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>' + message.content }}
        {{- '</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def rewriting(template: str = QWEN3) -> Any:
    tokenizer = copy.deepcopy(GPT2)
    tokenizer.chat_template = template
    return tokenizer


def items_from(
    folder: pathlib.Path, tokenizer: Any, *rows: dict[str, Any], length: int = 4096
) -> InstructionDataset:
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "rows.jsonl").write_text(text, encoding="utf-8")
    return InstructionDataset(folder / "rows.jsonl", tokenizer, length)


def turns(*texts: str) -> list[dict[str, Any]]:
    """Of user and assistant in turn."""
    return [
        {"role": "assistant" if place % 2 else "user", "content": text}
        for place, text in enumerate(texts)
    ]


def test_a_template_may_rewrite_earlier_messages(tmp_path: pathlib.Path) -> None:
    """What is learnt is what the template writes of the whole conversation: earlier answers without
    thoughts, the last one with them.
    """
    tokenizer = rewriting()
    talk = turns("2+2?", "<think>\nfour\n</think>\n\n4", "3+3?", "6", "4+4?", "8")
    talk[5]["reasoning_content"] = "eight"
    (item,) = items_of(items_from(tmp_path, tokenizer, {"messages": talk}))
    text = tokenizer.decode(item["input_ids"])
    assert text == tokenizer.apply_chat_template(talk, tokenize=False)
    assert text.count("<think>") == 1
    expected = "4<|im_end|>6<|im_end|><think>\neight\n</think>\n\n8<|im_end|>"
    assert tokenizer.decode(learnt(item)) == expected


def test_calls_of_tools_are_answers(tmp_path: pathlib.Path) -> None:
    """What tools return is not learnt; thoughts of a call before the last question are left out."""
    call = {"name": "add", "arguments": {"a": 2, "b": 3}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    asked = [
        {"role": "user", "content": "2+3?"},
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "a sum",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5."},
    ]
    later = [*asked, *turns("Sure?", "Yes.")]
    shared = {
        "tools": json.dumps(tools),
        "conversations": [
            {"from": "human", "value": "2+3?"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "It is 5."},
        ],
    }
    tokenizer = rewriting()
    rows: list[dict[str, Any]] = [
        {"messages": asked, "tools": tools},
        {"messages": later, "tools": tools},
        shared,
    ]
    items = items_from(tmp_path, tokenizer, *rows)
    made = "<tool_call>\n" + json.dumps(call) + "\n</tool_call><|im_end|>"
    last = "<think>\n\n</think>\n\n"
    assert [tokenizer.decode(learnt(item)) for item in items_of(items)] == [
        f"<think>\na sum\n</think>\n\n{made}{last}It is 5.<|im_end|>",
        f"{made}It is 5.<|im_end|>{last}Yes.<|im_end|>",
        f"{made}{last}It is 5.<|im_end|>",
    ]
    assert all('"name": "add"' in tokenizer.decode(item["input_ids"]) for item in items_of(items))


def test_other_templates_that_rewrite(tmp_path: pathlib.Path) -> None:
    """Numbers in front, answers that are not shown, invitations in other words, no end of a
    turn.
    """
    loop = "{% for message in messages %}"
    cases = {
        "{{ messages | length }}" + loop + "{{ message.content }};{% endfor %}": "b;d;",
        loop
        + "{% if loop.last or message.role == 'user' %}{{ message.content }}.{% endif %}"
        + "{% endfor %}": "d.",
        "{{ messages | length }}"
        + loop
        + "[{{ message.role }}]{{ message.content }}<|endoftext|>{% endfor %}"
        + "{% if add_generation_prompt %}[now]{% endif %}": "b<|endoftext|>d<|endoftext|>",
        "{{ messages | length }}"
        + loop
        + "[{{ message.role }}]{{ message.content }}{% endfor %}"
        + "{% if add_generation_prompt %}[assistant]{% endif %}": "bd",
    }
    for template, expected in cases.items():
        tokenizer = rewriting(template)
        (item,) = items_of(items_from(tmp_path, tokenizer, {"messages": turns(*"abcd")}))
        assert tokenizer.decode(learnt(item)) == expected, template


def test_answers_that_are_not_to_be_learnt(tmp_path: pathlib.Path) -> None:
    """`weight` 0, as OpenAI's fine-tuning has it."""
    talk = turns("a", "wrong", "b", "right")
    talk[1]["weight"] = 0
    (item,) = items_of(items_from(tmp_path, GPT2, {"messages": talk}))
    assert GPT2.decode(learnt(item)) == "right<|endoftext|>"


def test_pairs_and_texts(tmp_path: pathlib.Path) -> None:
    """A question and its answer; a text, of which all is learnt."""
    rows: list[dict[str, Any]] = [
        {"prompt": "2+2?", "response": "4"},
        {"prompt": "2+2?", "completion": "4", "system": "Count."},
        {"text": "Once upon a time"},
        {"messages": [*turns("a"), {"role": "assistant", "content": [{"text": "b"}]}]},
    ]
    items = items_from(tmp_path, GPT2, *rows)
    assert [GPT2.decode(learnt(item)) for item in items_of(items)] == [
        "4<|endoftext|>",
        "4<|endoftext|>",
        "Once upon a time<|endoftext|>",
        "b<|endoftext|>",
    ]
    assert "### System:\nCount." in GPT2.decode(items[1]["input_ids"])
    assert GPT2.decode(items[2]["input_ids"]) == "<|endoftext|>Once upon a time<|endoftext|>"


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1: no JSON"),
        ("[]", "line 1: got list"),
        (
            '{"body": "a"}',
            "line 1: got the fields body: expected messages, conversations, instruction and",
        ),
        ('{"messages": []}', "line 1: there is no answer"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "line 1: there is no answer"),
        ('{"messages": [{"role": "judge", "content": "a"}]}', "line 1: got the message .*judge"),
        ('{"messages": [{"role": "user"}]}', "line 1: there is no field 'content'"),
        ('{"messages": ["a"]}', "line 1: "),
        ('{"instruction": "a"}', "line 1: there is no field 'output'"),
        ('{"conversations": [{"from": "gpt", "value": 3}]}', "line 1: got the message"),
        ('{"conversations": [{"from": "gpt", "value": "a"}]}', "line 1: it begins with an answer"),
        ('{"text": 3}', "line 1: got 3 as text: expected a text"),
        ('{"prompt": "a"}', "line 1: there is no field 'response'"),
        ('{"prompt": "a", "response": "b", "tools": {"a": 1}}', "line 1: got the tools"),
    ],
)
def test_bad_conversations_are_refused(tmp_path: pathlib.Path, line: str, complaint: str) -> None:
    """At construction, with file and line."""
    (tmp_path / "a.jsonl").write_text(line + "\n")
    with pytest.raises(DataError, match=complaint):
        InstructionDataset(tmp_path / "a.jsonl", GPT2, 64)


def test_a_conversation_that_the_template_refuses_is_shown(tmp_path: pathlib.Path) -> None:
    """With the file, and what the template says."""
    strict = copy.deepcopy(LLAMA)
    strict.chat_template = (
        "{% if messages[0].role != 'user' %}{{ raise_exception('no system here') }}{% endif %}"
    ) + LLAMA.chat_template
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(
        DataError,
        match=r"a\.jsonl: the chat template .* refuses a conversation: no system here "
        r".*'role': 'system'",
    ):
        InstructionDataset(tmp_path / "a.jsonl", strict, 64)[0]


def test_bad_arguments_are_named(tmp_path: pathlib.Path) -> None:
    """No file, a slow tokenizer, rows shorter than samples, answers out of reach or not to be
    found.
    """
    with pytest.raises(DataError, match=r"no file .*b\.jsonl"):
        InstructionDataset(tmp_path / "b.jsonl", GPT2, 64)
    slow: Any = CPM1Tokenizer.from_pretrained(DATA / "tokenizers" / "cpm1")
    with pytest.raises(DataError, match="CPM1Tokenizer does not tell where tokens come from"):
        InstructionDataset(DATA / "chat" / "val.jsonl", slow, 64)
    samples = InstructionDataset(DATA / "chat" / "val.jsonl", GPT2, 64)
    with pytest.raises(DataError, match="samples have up to 64 tokens, rows 32"):
        PackedSamples(samples, 32)
    with pytest.raises(DataError, match="no sample has an answer within its first 4 tokens"):
        PackedSamples(InstructionDataset(DATA / "chat" / "val.jsonl", GPT2, 4), 32)
    # its text of one message tells nothing of where that is in the text of several
    counting = rewriting(
        "{% for message in messages %}{{ message.content | length }}{{ message.content }}"
        "{{ messages | map(attribute='content') | join | length }}{% endfor %}"
    )
    with pytest.raises(DataError, match="writes other messages otherwise"):
        items_from(tmp_path, counting, {"messages": turns("a", "bb", "c", "dd")})[0]
    marked = items_from(tmp_path, GPT2, {"messages": turns("a", "\ue000")})
    with pytest.raises(DataError, match=r"holds the character U\+E000"):
        marked[0]
    partly = PackedSamples(InstructionDataset(DATA / "chat" / "train.jsonl", GPT2, 50), 64)
    assert 0 < partly.num_without_answer < len(partly.samples)
