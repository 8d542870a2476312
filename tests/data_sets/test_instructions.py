"""Instruction tuning: which tokens are trained on, and that packed rows are their samples side by
side.
"""

import copy
import json
import random
from typing import Any

import pytest
import torch
from tests.data_sets.common import DATA, refused, tokenizer, write_rows
from torch.utils.data import DataLoader

from model_center.dataset.instructions import InstructionDataset
from model_center.dataset.packing import PackedSamples, best_fit, segment_mask, spread

CHAT = DATA / "chat"
LLAMA, GPT2 = tokenizer("llama"), tokenizer("gpt2")
END = "<|endoftext|>"


def stored(name, reader=GPT2, length=512):
    """The conversations of a stored file."""
    return InstructionDataset(CHAT / name, reader, length)


def items_of(dataset):
    """All items in order. Python iterates by `__getitem__`, which torch does not declare."""
    return iter(dataset)


def learnt(item):
    """The ids that are to be predicted, each of which must be the next one."""
    for place in (item["targets"] >= 0).nonzero().flatten().tolist():
        assert item["targets"][place] == item["input_ids"][place + 1]
    return item["targets"][item["targets"] >= 0].tolist()


def answers(dataset, reader=GPT2):
    """The text that is to be predicted in each item."""
    return [reader.decode(learnt(item)) for item in items_of(dataset)]


def test_a_chat_template_decides_the_text_and_answers_are_learnt():
    """The whole conversation is read; each answer, and the token that ends it, is learnt."""
    for name in ("train.jsonl", "val.jsonl"):
        items = stored(name, LLAMA)
        lines = (CHAT / name).read_text("utf-8").splitlines()
        for item, line, said in zip(items_of(items), lines, answers(items, LLAMA), strict=True):
            messages = json.loads(line)["messages"]
            text = LLAMA.apply_chat_template(messages, tokenize=False)
            assert item["input_ids"].tolist() == LLAMA.encode(text, add_special_tokens=False)
            assert item["input_length"] == len(item["input_ids"])
            want = [one["content"] + "</s>" for one in messages if one["role"] == "assistant"]
            assert said.replace(" ", "") == "".join(want).replace(" ", "")


def test_without_a_template_there_are_headings():
    """Alpaca's and ShareGPT's formats, byte for byte as plain text."""
    items = stored("alpaca.jsonl")
    asked = "Translate the word into English.\n\nHaus"
    text = f"{END}### User:\n{asked}\n\n### Assistant:\nhouse{END}\n\n"
    assert items[0]["input_ids"].tolist() == GPT2.encode(text)
    said = answers(items)
    assert said[0] == f"house{END}"
    assert said[4] == f"Hello!{END}"  # no field "input"
    shared = stored("sharegpt.jsonl")
    begin = "### System:\nAnswer with one word.\n\n### User:\nWhat colour"
    assert begin in GPT2.decode(shared[1]["input_ids"])
    assert answers(shared)[1] == f"White.{END}Black.{END}"


def test_long_conversations_lose_their_end():
    """Ids and targets alike; the last place has nothing to predict. Batches are padded, with -100
    where nothing is to be predicted.
    """
    whole, cut = stored("train.jsonl"), stored("train.jsonl", length=40)
    for long, short in zip(items_of(whole), items_of(cut), strict=True):
        length = min(40, len(long["input_ids"]))
        assert short["input_ids"].tolist() == long["input_ids"][:40].tolist()
        assert short["targets"].tolist() == [*long["targets"][: length - 1].tolist(), -100]
        assert short["input_length"] == length
    assert any(len(item["input_ids"]) == 40 for item in items_of(cut))
    items = stored("alpaca.jsonl")
    (batch,) = DataLoader(items, len(items), collate_fn=items.collate)
    past = torch.arange(batch["input_ids"].shape[1]) >= batch["input_length"][:, None]
    assert past.any() and (batch["targets"][past] == -100).all()
    found = [row[row >= 0].tolist() for row in batch["targets"]]
    assert found == [learnt(item) for item in items_of(items)]


def test_packed_rows_are_their_samples():
    """Every sample once, whole, with positions of its own; twice the same rows."""
    samples = stored("train.jsonl", LLAMA, 100)
    packed = PackedSamples(samples, 160)
    assert sorted(number for row in packed.rows for number in row) == list(range(len(samples)))
    assert packed.num_without_answer == 0
    assert len(packed) < len(samples)
    assert packed.rows == PackedSamples(samples, 160).rows
    for item, numbers in zip(items_of(packed), packed.rows, strict=True):
        assert item["input_length"] == len(item["input_ids"]) <= 160
        for segment, number in enumerate(numbers, start=1):
            here = item["segments"] == segment
            for key in ("input_ids", "targets"):
                assert item[key][here].tolist() == samples[number][key].tolist()
            assert item["position_ids"][here].tolist() == list(range(int(here.sum())))
    batch = packed.collate([*items_of(packed)])
    padding = torch.arange(batch["input_ids"].shape[1]) >= batch["input_length"][:, None]
    assert ((batch["segments"] == 0) == padding).all()
    for numbers, mask in zip(batch["segments"], segment_mask(batch["segments"]), strict=True):
        seen = (numbers[:, None] == numbers).tril()  # its own sample, up to itself
        assert torch.equal(mask, seen)
    assert len(PackedSamples(samples, 160, least=99)) == len(samples)
    filled, count = PackedSamples(samples, 160), len(packed)
    filled.fill_up(count + 2)
    assert len(filled) == count + 2 and (filled[count + 1]["targets"] == -100).all()
    assert torch.equal(filled[count + 1]["input_ids"], packed[0]["input_ids"])
    partly = PackedSamples(stored("train.jsonl", length=50), 64)
    assert 0 < partly.num_without_answer < len(partly.samples)


def test_rows_are_filled_well():
    """Each place once, no row too long, no two rows that would fit into one, and near to the least
    number of rows.
    """
    rng = random.Random(0)
    for room in (7, 64, 512):
        lengths = [rng.randint(1, room) for _ in range(300)]
        rows = best_fit(lengths, room)
        assert sorted(place for row in rows for place in row) == list(range(300))
        full = sorted(sum(lengths[place] for place in row) for row in rows)
        assert full[-1] <= room < full[0] + full[1]
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


def rewriting(template=QWEN3):
    reader = copy.deepcopy(GPT2)
    reader.chat_template = template
    return reader


def items_from(folder, *rows, reader=GPT2):
    return InstructionDataset(write_rows(folder / "a.jsonl", *rows), reader, 4096)


def turns(*texts):
    """Of user and assistant in turn."""
    roles = "user", "assistant"
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(texts)]


def test_a_template_may_rewrite_earlier_messages(tmp_path):
    """What is learnt is what the template writes of the whole conversation: earlier answers without
    thoughts, the last one with them.
    """
    reader = rewriting()
    talk = turns("2+2?", "<think>\nfour\n</think>\n\n4", "3+3?", "6", "4+4?", "8")
    talk[5]["reasoning_content"] = "eight"
    items = items_from(tmp_path, {"messages": talk}, reader=reader)
    text = reader.decode(items[0]["input_ids"])
    assert text == reader.apply_chat_template(talk, tokenize=False)
    assert text.count("<think>") == 1
    assert answers(items) == ["4<|im_end|>6<|im_end|><think>\neight\n</think>\n\n8<|im_end|>"]


def test_calls_of_tools_are_answers(tmp_path):
    """What tools return is not learnt; thoughts of a call before the last question are left out."""
    call = {"name": "add", "arguments": {"a": 2, "b": 3}}
    tools = [{"type": "function", "function": {"name": "add"}}]
    made: dict[str, Any] = {"role": "assistant", "content": None, "reasoning_content": "a sum"}
    made["tool_calls"] = [{"type": "function", "function": call}]
    asked = [*turns("2+3?"), made, {"role": "tool", "content": "5"}]
    asked.append({"role": "assistant", "content": "It is 5."})
    said = {"human": "2+3?", "function_call": json.dumps(call), "observation": "5"}
    shared = [{"from": who, "value": text} for who, text in (said | {"gpt": "It is 5."}).items()]
    several = [
        {**one, "value": f"[{json.dumps(call)}]"} if n == 1 else one for n, one in enumerate(shared)
    ]
    names = {"human": "user", "function_call": "tool_call", "observation": "tool_response"}
    swift = [
        {"role": names.get(one["from"], "assistant"), "content": one["value"]} for one in shared
    ]
    rows = [
        {"messages": asked, "tools": tools},
        {"messages": [*asked, *turns("Sure?", "Yes.")], "tools": tools},
        {"conversations": shared, "tools": json.dumps(tools)},
        {"conversations": several, "tools": tools},
        {"messages": swift, "tools": tools},
    ]
    items = items_from(tmp_path, *rows, reader=rewriting())
    wrote = "<tool_call>\n" + json.dumps(call) + "\n</tool_call><|im_end|>"
    last = "<think>\n\n</think>\n\n"
    plain = f"{wrote}{last}It is 5.<|im_end|>"
    thought = f"<think>\na sum\n</think>\n\n{plain}"
    later = f"{wrote}It is 5.<|im_end|>{last}Yes.<|im_end|>"
    assert answers(items) == [thought, later, plain, plain, plain]
    assert all('"name": "add"' in GPT2.decode(item["input_ids"]) for item in items_of(items))


LOOP = "{% for message in messages %}"
MARKED = "{{ messages | length }}" + LOOP + "[{{ message.role }}]{{ message.content }}"
TURN = LOOP + "<{{ message.role }}>{{ message.content }}" + END + "\n{% endfor %}"
INVITED = "{% endfor %}{% if add_generation_prompt %}"


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages | length }}" + LOOP + "{{ message.content }};{% endfor %}", "b;d;"),
        (
            LOOP + "{% if loop.last or message.role == 'user' %}{{ message.content }}.{% endif %}"
            "{% endfor %}",
            "d.",
        ),
        (f"{MARKED}{END}{INVITED}[now]{{% endif %}}", f"b{END}d{END}"),
        (f"{MARKED}{INVITED}[assistant]{{% endif %}}", "bd"),
        (f"{MARKED}{END}{{% endfor %}}[assistant]", f"b{END}d{END}"),
        (f"{MARKED}{{% endfor %}}[assistant]", "bd"),
        (TURN + "<assistant>", f"b{END}d{END}"),
    ],
    ids=[
        "number in front",
        "hidden answers",
        "other invitation",
        "no end of a turn",
        "invites unasked, number in front",
        "invites unasked, no end of a turn",
        "invites unasked",
    ],
)
def test_other_templates_that_rewrite(template, expected, tmp_path):
    rows = {"messages": turns(*"abcd")}
    assert answers(items_from(tmp_path, rows, reader=rewriting(template))) == [expected]


def test_pairs_and_texts(tmp_path):
    """A question and its answer; a text, of which all is learnt; an answer of weight 0, as OpenAI's
    fine-tuning has it, is not.
    """
    talk = turns("a", "wrong", "b", "right")
    talk[1]["weight"] = 0
    rows = [
        {"prompt": "2+2?", "response": "4", "tools": ""},
        {"prompt": "2+2?", "completion": "4", "system": "Count."},
        {"text": "Once upon a time"},
        {
            "messages": [
                *turns("a"),
                {"role": "assistant", "content": [{"text": "b"}, {"text": "c"}]},
            ]
        },
        {"messages": talk},
    ]
    items = items_from(tmp_path, *rows)
    expected = ["4", "4", "Once upon a time", "bc", "right"]
    assert answers(items) == [text + END for text in expected]
    texts = [GPT2.decode(item["input_ids"]) for item in items_of(items)]
    assert "### System:\nCount." in texts[1]
    assert texts[2] == f"{END}Once upon a time{END}"
    for name in ("bos_token", "eos_token"):
        reader = copy.deepcopy(GPT2)
        setattr(reader, name, None)
        (item,) = items_of(items_from(tmp_path, rows[2], reader=reader))
        expected = ["Once upon a time", END][:: 1 if name == "bos_token" else -1]
        assert reader.decode(item["input_ids"]) == "".join(expected)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 1: not JSON"),
        ("[]", "line 1: got list"),
        (
            '{"body": "a"}',
            "line 1: got the fields body: expected messages, conversations, instruction and",
        ),
        ('{"messages": []}', "line 1: no message of the assistant is in the loss"),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            "line 1: no message of the assistant is in the loss",
        ),
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
def test_bad_conversations_are_refused(tmp_path, line, complaint):
    """At construction, with file and line."""
    with refused(complaint):
        items_from(tmp_path, line + "\n")


def test_a_conversation_that_the_template_refuses_is_shown(tmp_path):
    """With the file, and what the template says."""
    strict = rewriting(
        "{% if messages[0].role != 'user' %}{{ raise_exception('no system here') }}{% endif %}"
    )
    messages = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    with refused(
        r"a\.jsonl, line 1: the chat template .* refuses a conversation: no system here\. "
        r".*'role': 'system'"
    ):
        items_from(tmp_path, {"messages": messages}, reader=strict)
    # its text of one message tells nothing of where that is in the text of several
    counting = rewriting(
        LOOP + "{{ message.content | length }}{{ message.content }}"
        "{{ messages | map(attribute='content') | join | length }}{% endfor %}"
    )
    talk = {"messages": turns("a", "bb", "c", "dd")}
    with refused("renders other messages differently"):
        items_from(tmp_path, talk, reader=counting)


def test_bad_arguments_are_named(tmp_path):
    """No file, a slow tokenizer, rows shorter than samples, answers out of reach."""
    with refused(r"no file .*b\.jsonl"):
        InstructionDataset(tmp_path / "b.jsonl", GPT2, 64)
    with refused("CPM1Tokenizer does not report the offsets of tokens"):
        stored("val.jsonl", tokenizer("cpm1"))
    with refused("max_length is 1: expected at least 2"):
        stored("val.jsonl", length=1)
    with refused("samples have up to 64 tokens, rows 32"):
        PackedSamples(stored("val.jsonl", length=64), 32)
    with refused("no sample has an answer within its first 4 tokens"):
        PackedSamples(stored("val.jsonl", length=4), 32)
