"""Rows of JSON lines from which a language model learns: conversations, or plain text.

A row is one of

    {"messages": [{"role": "system" | "user" | "assistant" | "tool", "content": text}, ...]}
    {"conversations": [{"from": "system" | "human" | "gpt", "value": text}, ...]}
    {"instruction": text, "input": text, "output": text}
    {"prompt": text, "response" | "completion": text}
    {"text": text}

as OpenAI, ShareGPT and Alpaca write the first three. `input` may be missing. A row of the first
four may have `tools`, a list of functions in OpenAI's format or its JSON, and one of the second to
fourth `system`, a text. A message of the assistant may have `tool_calls` in place of a content, and
is not learnt with `"weight": 0`; in ShareGPT's format a call is said by "function_call" and what
the tool returned by "observation". What else a message has is for the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from model_center.dataset.example import Example

Message = Mapping[str, Any]
Row = Mapping[str, Any]
ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
}


def read(line: str) -> list[Example]:
    """The conversation of a line: `messages` and `tools`, or `text`.

    Raises:
        KeyError, ValueError: for a field that is missing or wrong.
    """
    row = json.loads(line)
    if not isinstance(row, dict):
        raise ValueError(f"got {type(row).__name__}: expected a JSON object.")
    found = next((field for field in FORMATS if field in row), None)
    if found is None:
        raise ValueError(
            f"got the fields {', '.join(row)}: expected messages, conversations, instruction and "
            "output, prompt and response, or text."
        )
    if found == "text":
        return [Example(fields={"text": _text(row, "text")}, label=None)]
    messages = [_message(message) for message in _with_system(row, FORMATS[found](row))]
    if not any(is_learnt(message) for message in messages):
        raise ValueError("there is no answer of the assistant to learn.")
    # templates cannot say where it begins when nothing is before it
    if messages[0]["role"] == "assistant":
        raise ValueError(
            "it begins with an answer of the assistant: expected a message of the user or "
            "system before it."
        )
    return [Example(fields={"messages": messages, "tools": _tools(row)}, label=None)]


def is_learnt(message: Message) -> bool:
    """Whether a message is an answer of the assistant, of a weight other than 0."""
    return bool(message["role"] == "assistant" and message.get("weight", 1))


def _of_sharegpt(row: Row) -> list[Message]:
    return [_turn(turn["from"], turn["value"]) for turn in row["conversations"]]


def _turn(role: str, value: Any) -> Message:
    if role != "function_call":
        return {"role": role, "content": value}
    calls = json.loads(value)
    functions = calls if isinstance(calls, list) else [calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function} for function in functions],
    }


def _of_alpaca(row: Row) -> list[Message]:
    asked = "\n\n".join(filter(None, (row["instruction"], row.get("input"))))
    return _asked_and_answered(asked, row["output"])


def _of_pairs(row: Row) -> list[Message]:
    return _asked_and_answered(
        _text(row, "prompt"), _text(row, "completion" if "completion" in row else "response")
    )


def _asked_and_answered(asked: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


# By the field that tells a format: the messages of a row.
FORMATS: dict[str, Callable[[Row], list[Message]]] = {
    "messages": lambda row: list(row["messages"]),
    "conversations": _of_sharegpt,
    "instruction": _of_alpaca,
    "prompt": _of_pairs,
    "text": lambda row: [],
}


def _with_system(row: Row, messages: list[Message]) -> list[Message]:
    system = "messages" not in row and row.get("system")
    return [{"role": "system", "content": system}, *messages] if system else messages


def _tools(row: Row) -> list[Any] | None:
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) and tools else tools
    if tools and not isinstance(tools, list):
        raise ValueError(f"got the tools {tools!r}: expected a list of functions.")
    return tools or None


def _message(message: Message) -> Message:
    role, content = message["role"], message.get("content")
    if content is None and not message.get("tool_calls"):
        raise KeyError("content")
    if isinstance(content, list):  # OpenAI's parts
        content = "".join([_text(part, "text") for part in content])
    if role not in ROLES or not isinstance(content or "", str):
        raise ValueError(
            f"got the message {message!r}: expected a role of {', '.join(ROLES)} and a text."
        )
    return {**message, "role": ROLES[role], "content": content or ""}


def _text(row: Row, field: str) -> str:
    if not isinstance(row[field], str):
        raise ValueError(f"got {row[field]!r} as {field}: expected a text.")
    return str(row[field])
