"""Conversations as a chat template writes them, and where in the text the answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from model_center.dataset.conversations import Message, is_learnt
from model_center.dataset.task_dataset import Tokenizer
from model_center.errors import DataError

Span = tuple[int, int]
MARK = "\ue000"  # of Unicode's private use: no text has it
# For tokenizers without a chat template: headings, and each answer ended by `eos_token`.
PLAIN = (
    "{{ bos_token or '' }}{% for message in messages %}"
    "{{ '### ' + message.role.capitalize() + ':\n' + message.content }}"
    "{{ (eos_token or '') if message.role == 'assistant' else '' }}{{ '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows where in the text its tokens are, as transformers' fast ones."""

    is_fast: bool
    bos_token: str | None
    eos_token: str | None
    chat_template: str | Mapping[str, str] | None

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> str:
        """A conversation as one text."""
        ...


class Writer:
    """Writes conversations by the chat template of a tokenizer, or by `PLAIN` without one.

    Args:
        tokenizer: whose template it is.
        tools: what the assistant may call, in OpenAI's format.
    """

    def __init__(self, tokenizer: ChatTokenizer, tools: Sequence[Any] | None = None) -> None:
        self.tokenizer, self.tools = tokenizer, tools

    def text(self, messages: Sequence[Message], *, answer: bool = False) -> str:
        """The conversation as text; with `answer`, up to where the next answer begins."""
        options: dict[str, Any] = {} if self.tools is None else {"tools": self.tools}
        if not self.tokenizer.chat_template:
            options["chat_template"] = PLAIN
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=answer, **options
        )

    def text_and_answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The conversation as text, and the (start, stop) of its answers with what ends them.

        A model learns what it is to write where it is asked: an answer starts where the template's
        invitation ends. It may be shown otherwise than when it was the last message (Qwen 3 leaves
        the thoughts of earlier answers out), or not at all; then what is shown is learnt.

        Raises:
            DataError: if an answer cannot be found in the text.
        """
        text = self.text(messages)
        if MARK in text:
            raise DataError(f"a conversation holds the character U+E000: {text!r}.")
        spans = [
            self._span(text, messages, place)
            for place, message in enumerate(messages)
            if is_learnt(message)
        ]
        return text, [span for span in spans if span is not None]

    def _span(self, text: str, messages: Sequence[Message], place: int) -> Span | None:
        before = self.text(messages[:place], answer=True)
        through = self.text(messages[: place + 1])
        if text.startswith(before) and text.startswith(through):
            return len(before), len(through.rstrip())
        return self._rewritten(text, messages, place, before)

    def _rewritten(
        self, text: str, messages: Sequence[Message], place: int, before: str
    ) -> Span | None:
        """The answer at `place` in a text whose start is no text of the template's.

        With another content in that place, the text differs there and nowhere else.
        """
        marked = {"role": "assistant", "content": MARK}
        other = self.text([*messages[:place], marked, *messages[place + 1 :]])
        if MARK not in other:
            return None
        begin, rest = other.partition(MARK)[0], other.rpartition(MARK)[2]
        start, stop = len(begin), len(text) - len(rest)
        if not (start <= stop and text.startswith(begin) and text.endswith(rest)):
            raise DataError("it writes other messages otherwise when an answer is another.")
        end = self.text([*messages[:place], marked]).rpartition(MARK)[2].rstrip()
        invitation = before.removeprefix(self.text(messages[:place]))
        invited = text.rfind(invitation, 0, start) + len(invitation)
        # else it is that of an earlier answer: the template invites in other words than it writes
        if invitation in begin and not (end and end in text[invited:start]):
            start = invited
        return start, stop + len(end) if end and text.startswith(end, stop) else stop
