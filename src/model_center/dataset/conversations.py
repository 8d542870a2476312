"""What rows of data mean to a language model: conversations, or plain text.

A row has one of these forms; the first that it has the field of counts.

    {"messages": [{"role": "system" | "user" | "assistant" | "tool", "content": text}, ...]}
    {"conversations": [{"from": "system" | "human" | "gpt", "value": text}, ...]}
    {"instruction": text, "input" | "context": text, "output": text}
    {"prompt" | "question" | "query": text, "response" | "completion" | "answer" | "output": text}
    {"prompt": messages, "completion": messages}, of which the completion is in the loss
    {"text" | "content": text}

as OpenAI, ShareGPT, Alpaca, Dolly, ms-swift and TRL write them. `messages` and `conversations` may
have turns of either kind, or be their JSON. All but texts may have `system`, a text, `history`,
pairs of a question and an answer that came before, and `tools`, functions in OpenAI's format or its
JSON. A message of the assistant may have `tool_calls` in place of a content, and is not in the loss
where one of `FLAGS` says so; in ShareGPT's format a call is said by "function_call" and what the
tool returned by "observation", in ms-swift's by "tool_call" and "tool_response". What is null is
not given. Fields of `REFUSED` would change the loss mask, and are not computed. What else a
message has is for the chat template; what else a row has is counted, so that a run can say what was
not read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

Message = Mapping[str, Any]
Row = Mapping[str, Any]
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "ai": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "tool_response": "tool",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}
CALLS = ("function_call", "tool_call")  # roles whose content is a call
# Of a message: whether it is in the loss, as OpenAI, axolotl, ms-swift and torchtune say it.
FLAGS = {
    **dict.fromkeys(("weight", "loss_weight", "train", "training", "trainable"), True),
    **dict.fromkeys(("train_on_turn", "loss", "loss_mask", "learn", "is_learnt"), True),
    **dict.fromkeys(("masked", "ignore"), False),
}
_SEEN = "a model of language alone does not see it"
_PAIRS = "a better and a worse answer are compared by --objective dpo, orpo, simpo or reward"
_MASKS = "tokens cannot be masked here; say it by the weight of each message"
_TEMPLATE = "it is not given to the chat template; put it into a message, or into the template"
_PIECES = "parts of a message cannot be masked here; make a message of each"
# Of a row, and of a message: what would be lost if it was passed over, and why it is not read.
REFUSED = {
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), _SEEN),
    **dict.fromkeys(("chosen", "rejected", "rejected_response", "kto_tag"), _PAIRS),
    **dict.fromkeys(("rejected_messages", "preferred_output", "non_preferred_output"), _PAIRS),
    **dict.fromkeys(("documents", "chat_template_kwargs"), _TEMPLATE),
}
# Of a row, where they are lists: of tokens or messages. Else a class of texts may be called so.
REFUSED_LISTS = dict.fromkeys(
    ("labels", "mask", "loss_mask", "assistant_masks", "completion_mask"), _MASKS
)
# Of a row: how much it counts.
WEIGHTS = ("weight", "sample_weight", "loss_weight")
SWITCHES = ("label", "train", "training", "trainable")  # where they are true or false
REFUSED_OF_MESSAGE = {
    **REFUSED,
    **dict.fromkeys(("train_detail", "training_detail"), _PIECES),
    "mask": "1 may mean either in the loss or left out of it; use weight",
}
# Of a row of preferences, which are compared alike.
REFUSED_OF_PAIR = {
    **dict.fromkeys(("images", "image", "videos", "video", "audios", "audio"), _SEEN),
    **dict.fromkeys(("kto_tag", "margin"), "pairs are compared without it"),
    **dict.fromkeys(("documents", "chat_template_kwargs"), _TEMPLATE),
}
ANSWERS = ("output", "response", "completion", "answer")
CONTEXTS = ("input", "context")
SYSTEMS = ("system", "system_prompt", "system_message")
PAIR = ("chosen", "rejected")
PROMPTS = ("prompt", "question", "query", "instruction", "conversations", "messages")
_TURN = re.compile(r"\n\n(Human|Assistant):")


class Parsed(NamedTuple):
    """What a row says.

    Attributes:
        messages: of a conversation; none of a text.
        text: of a row that is a text.
        tools: that a conversation may use.
        unread: names of the fields that no form knows.
    """

    messages: Sequence[Message] = ()
    text: str | None = None
    tools: Sequence[Any] | None = None
    unread: Sequence[str] = ()


def parse(row: Row) -> Parsed:
    """The conversation of a row, or its text.

    Raises:
        KeyError, ValueError: for a field that is missing or wrong, or would change the loss mask
            and is not read.
    """
    row = {name: value for name, value in row.items() if value is not None}
    found = next((field for field in FORMS if field in row), None)
    if found is None:
        raise ValueError(
            f"got the fields {', '.join(row)}: expected messages, conversations, instruction and "
            "output, prompt and response, or text."
        )
    _refuse(row, REFUSED)
    _weighs_one(row)
    form = FORMS[found]
    unread = [name for name in row if name not in _names_read(row, found)]
    if form is None:
        others = [name for name in (*SYSTEMS, "history", "tools") if row.get(name)]
        if others:
            raise ValueError(f"got a text with {', '.join(others)}: expected a conversation.")
        return Parsed(text=_text(row, found), unread=unread)
    messages = _checked([_message(message) for message in [*_before(row), *form(row)]])
    return Parsed(messages=messages, tools=_tools(row), unread=unread)


def _weighs_one(row: Row) -> None:
    lists = {name: row[name] for name in REFUSED_LISTS if isinstance(row.get(name), list | tuple)}
    _refuse(lists, REFUSED_LISTS)
    names = [name for name in WEIGHTS if isinstance(row.get(name), int | float) and row[name] != 1]
    names += [name for name in SWITCHES if isinstance(row.get(name), bool)]
    if names:
        raise ValueError(
            f"got {names[0]} {row[names[0]]!r} of a row, but all rows have one weight in the loss: "
            "leave it out, or give it to messages."
        )


def _checked(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    _one_system(messages)
    if not any(is_in_loss(message) for message in messages):
        raise ValueError("no message of the assistant is in the loss: expected one.")
    # templates cannot say where it begins when nothing is before it
    if messages[0]["role"] == "assistant":
        raise ValueError(
            "it begins with an answer of the assistant: expected a message of the user or "
            "system before it."
        )
    return messages


def parse_pair(row: Row) -> tuple[Parsed, Parsed]:
    """The conversations of a row with the better and with the worse answer.

    What both begin with is the prompt, and is not in the loss.

    Raises:
        KeyError, ValueError: as `parse`.
    """
    row = {name: value for name, value in row.items() if value is not None}
    row = _with_answers(row)
    missing = next((name for name in PAIR if name not in row), None)
    if missing is not None:
        raise KeyError(missing)
    _refuse(row, REFUSED_OF_PAIR)
    _weighs_one(row)
    found = next((name for name in PROMPTS if name in row), None)
    before = [_message(turn) for turn in _before(row)]
    given = [] if found is None else [_message(turn) for turn in _prompt(row, found)]
    better, worse = ([_message(turn) for turn in _answers(row, name)] for name in PAIR)
    same = next(
        (n for n, (a, b) in enumerate(zip(better, worse, strict=False)) if a != b),
        min(len(better), len(worse)) - 1,
    )
    shared = better[:same]
    is_whole = all(side[0]["role"] != "assistant" for side in (better, worse))
    if is_whole and found is not None and given[-1] not in shared:
        raise ValueError(
            f"chosen and rejected do not begin with the content of {found}: make them equal."
        )
    # The prompt is said once, by a field of the row or by both answers.
    prompt = [*before, *shared] if is_whole else [*before, *given, *shared]
    prompt = [{**message, "weight": 0} for message in prompt]
    names = {*_names_read(row, found or ""), *PAIR, *REFUSED_OF_PAIR}
    unread = [name for name in row if name not in names]
    first, second = (
        Parsed(_checked([*map(dict, prompt), *own[same:]]), None, _tools(row), rest)
        for own, rest in ((better, unread), (worse, []))
    )
    return first, second


def _with_answers(row: Row) -> Row:
    """A row of ms-swift's or OpenAI's with what they call otherwise under the names of `PAIR`."""
    turns, own = row.get("messages"), dict(row)
    if "preferred_output" in row and isinstance(row.get("input"), Mapping):
        asked = own.pop("input")
        return {
            **asked,
            **own,
            **{
                name: own.pop(theirs)
                for name, theirs in zip(
                    PAIR, ("preferred_output", "non_preferred_output"), strict=True
                )
                if theirs in own
            },
        }
    if "chosen" in row or not turns or not isinstance(turns, list):
        return row
    if "rejected_messages" in row:
        del own["messages"]
        return {**own, "chosen": turns, "rejected": own.pop("rejected_messages")}
    if "rejected_response" in row:
        own |= {"messages": turns[:-1], "chosen": turns[-1]}
        return {**own, "rejected": own.pop("rejected_response")}
    return row


def _prompt(row: Row, found: str) -> list[Any]:
    """The turns of a row before its answers."""
    if isinstance(row[found], list | tuple):
        return list(row[found])
    context = next((_text(row, name) for name in CONTEXTS if row.get(name)), "")
    return [{"role": "user", "content": "\n\n".join(filter(None, (_text(row, found), context)))}]


def _answers(row: Row, name: str) -> list[Any]:
    """The turns of one side of a pair."""
    value = row[name]
    if isinstance(value, Mapping):
        return [value]
    if isinstance(value, list | tuple) and value:
        return list(value)
    text = _text(row, name)
    parts = _TURN.split(text)
    if len(parts) > 1 and not parts[0].strip():  # HH-RLHF's dialogues
        pairs = zip(parts[1::2], parts[2::2], strict=True)
        return [{"from": who.lower(), "value": said.strip()} for who, said in pairs]
    return [{"role": "assistant", "content": text}]


def is_in_loss(message: Message) -> bool:
    """Whether a message is an answer of the assistant, of a weight other than 0."""
    return bool(message["role"] == "assistant" and message.get("weight", 1))


def _turns(name: str) -> Callable[[Row], list[Any]]:
    def form(row: Row) -> list[Any]:
        turns = _unpacked(row, name)
        if not isinstance(turns, list | tuple):
            raise ValueError(f"got {turns!r} as {name}: expected a list of messages.")
        return list(turns)

    return form


def _question_and_answer(field: str, row: Row) -> list[Message]:
    context = next((_text(row, name) for name in CONTEXTS if row.get(name)), "")
    asked = "\n\n".join(filter(None, (_text(row, field), context)))
    answer = next((name for name in ANSWERS if name in row), None)
    if answer is None:
        raise KeyError("output" if field == "instruction" else "response")
    return [
        {"role": "user", "content": asked},
        {"role": "assistant", "content": _text(row, answer)},
    ]


def _of_prompts(row: Row) -> list[Message]:
    """TRL's: only the completion is in the loss where both are messages."""
    if not isinstance(row["prompt"], list):
        return _question_and_answer("prompt", row)
    completion = row["completion"]
    said = (
        completion
        if isinstance(completion, list)
        else [{"role": "assistant", "content": _text(row, "completion")}]
    )
    return [*({**message, "weight": 0} for message in row["prompt"]), *said]


# By the field that tells a form: the messages of a row; None for texts.
FORMS: dict[str, Callable[[Row], list[Any]] | None] = {
    "messages": _turns("messages"),
    "conversations": _turns("conversations"),
    "instruction": lambda row: _question_and_answer("instruction", row),
    "prompt": _of_prompts,
    "question": lambda row: _question_and_answer("question", row),
    "query": lambda row: _question_and_answer("query", row),
    "text": None,
    "content": None,
}


def _names_read(row: Row, found: str) -> set[str]:
    """The fields that `parse` reads or refuses in a row of a form."""
    names = {found, *SYSTEMS, *REFUSED, "history", "tools", "functions"}
    names |= {name for name in WEIGHTS if isinstance(row.get(name), int | float)}
    if found in {"instruction", "prompt", "question", "query"}:
        names |= {*[name for name in ANSWERS if name in row][:1]}
        names |= {*[name for name in CONTEXTS if row.get(name)][:1]}
        names |= {name for name in CONTEXTS if not row.get(name)}
    return names


def _refuse(fields: Row, refused: Mapping[str, str]) -> None:
    for name, reason in refused.items():
        if fields.get(name) not in (None, "", [], {}):
            raise ValueError(f"got {name}: {reason}.")


def _before(row: Row) -> list[Message]:
    """What a row says before its own messages."""
    system = next((_text(row, name) for name in SYSTEMS if row.get(name)), None)
    before: list[Message] = [{"role": "system", "content": system}] if system else []
    for pair in _unpacked(row, "history") or ():
        if isinstance(pair, Mapping):
            before.append(pair)
            continue
        if not (isinstance(pair, list | tuple) and len(pair) == 2):
            raise ValueError(f"got {pair!r} in history: expected a question and its answer.")
        asked, answer = pair
        before += [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return before


def _one_system(messages: list[dict[str, Any]]) -> None:
    """A system message of the row and the same one of its messages are one."""
    if len(messages) < 2 or messages[0]["role"] != "system" or messages[1]["role"] != "system":
        return
    if messages[0]["content"] != messages[1]["content"]:
        raise ValueError("got two system messages at its beginning: expected one.")
    del messages[0]


def _tools(row: Row) -> list[Any] | None:
    tools = _unpacked(row, "tools")
    if not tools and row.get("functions"):  # as OpenAI named them before
        tools = [{"type": "function", "function": function} for function in row["functions"]]
    if tools and not isinstance(tools, list):
        raise ValueError(f"got the tools {tools!r}: expected a list of functions.")
    return tools or None


def _unpacked(row: Row, name: str) -> Any:
    """A list, or its JSON, as tables have it."""
    value = row.get(name)
    if not isinstance(value, str) or not value:
        return value
    try:
        return json.loads(value)
    except json.JSONDecodeError as error:
        raise ValueError(f"got {value!r} as {name}: expected a list, or its JSON.") from error


def _message(turn: Any) -> dict[str, Any]:
    """A turn of either kind as {"role", "content", ...}; "weight" 0 if not in the loss."""
    if not isinstance(turn, Mapping):
        raise ValueError(f"got {turn!r} as a message: expected an object.")
    message = {name: value for name, value in turn.items() if value is not None}
    _refuse(message, REFUSED_OF_MESSAGE)
    role = message.pop("from", None) if "role" not in message else message.pop("role")
    if role is None:
        raise KeyError("role")
    role = role.lower() if isinstance(role, str) else role
    content = message.pop("value", None) if "content" not in message else message.pop("content")
    calls = message.pop("function_call", None)
    if role in CALLS:
        calls, content = (json.loads(content) if isinstance(content, str) else content), None
    if calls is not None:
        functions = calls if isinstance(calls, list) else [calls]
        message["tool_calls"] = [{"type": "function", "function": one} for one in functions]
    if content is None and "refusal" in message:
        content = message.pop("refusal")
    if content is None and not message.get("tool_calls"):
        raise KeyError("content")
    if isinstance(content, list):  # OpenAI's parts
        content = "".join(map(_text_of_part, content))
    if role not in ROLES or not isinstance(content or "", str):
        raise ValueError(
            f"got the message {turn!r}: expected a role of {', '.join(ROLES)} and a text."
        )
    named = {name: message.pop(name) for name in FLAGS if name in message}
    if len({bool(value) is FLAGS[name] for name, value in named.items()}) > 1:
        raise ValueError(
            f"got {named} of a message: one puts it into the loss, another leaves it out."
        )
    for name, value in named.items():
        if value not in (0, 1):
            raise ValueError(f"got {name} {value!r} of a message: expected 0, 1, false or true.")
        in_loss = bool(value) is FLAGS[name]
        if in_loss and ROLES[role] != "assistant" and FLAGS[name] and "weight" not in name:
            raise ValueError(
                f"got {name} {value!r} of a message of the {role}: only messages of the assistant "
                "can be in the loss."
            )
        if not in_loss:
            message["weight"] = 0
    return {**message, "role": ROLES[role], "content": content or ""}


def _text_of_part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
        raise ValueError(f"got {part!r} as a part of a message: expected a text.")
    return str(part["text"])


def _text(row: Row, field: str) -> str:
    if not isinstance(row[field], str):
        raise ValueError(f"got {row[field]!r} as {field}: expected a text.")
    return str(row[field])
