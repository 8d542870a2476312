"""Conversations as a chat template writes them, and where in the text the answers are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from model_center.dataset.conversations import Message, is_in_loss
from model_center.dataset.task_dataset import Tokenizer
from model_center.errors import DataError
from model_center.tokenizer.chat_template import rendered

Span = tuple[int, int]
# Unicode's private use: one of them is in no text at hand
MARKS = range(0xE000, 0xF900)
# For tokenizers without a chat template: headings, and each answer ended by `eos_token`. Thoughts
# and calls of tools are written as Qwen 3's template does.
PLAIN = (
    "{{ bos_token or '' }}{% if tools %}{{ '### Tools:\n' + tools | tojson + '\n\n' }}{% endif %}"
    "{% for message in messages %}{{ '### ' + message.role.capitalize() + ':\n' }}"
    "{% set thoughts = message.reasoning_content or message.reasoning or message.thinking %}"
    "{{ '<think>\n' + thoughts + '\n</think>\n\n' if thoughts else '' }}{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}{{ '\n' if message.content or not loop.first }}"
    "{% set call = call.function or call %}{% set given = call.arguments %}"
    """{{ '<tool_call>\n{"name": ' + call.name | tojson + ', "arguments": ' """
    "+ (given if given is string else given | tojson) + '}\n</tool_call>' }}{% endfor %}"
    "{{ (eos_token or '') if message.role == 'assistant' else '' }}{{ '\n\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '### Assistant:\n' }}{% endif %}"
)


class ChatTokenizer(Tokenizer, Protocol):
    """A tokenizer that knows where in the text its tokens are, as transformers' fast ones."""

    is_fast: bool
    bos_token: str | None
    eos_token: str | None
    chat_template: str | Mapping[str, str] | None
    backend_tokenizer: Any  # of the package tokenizers

    def get_added_vocab(self) -> Mapping[str, int]:
        """Tokens beside the model's own, special ones among them."""
        ...

    def apply_chat_template(self, conversation: Sequence[Message], **options: Any) -> str:
        """A conversation as one text."""
        ...


class ChatRenderer:
    """Renders conversations with the tokenizer's chat template, or with `PLAIN` if it has none.

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
        return rendered(self.tokenizer, messages, add_generation_prompt=answer, **options)

    def text_and_answers(self, messages: Sequence[Message]) -> tuple[str, list[Span]]:
        """The conversation as text, and the (start, stop) of its answers with what ends them.

        An answer starts where the template's generation prompt ends, so the model is trained on
        what it has to write after that prompt. The template may render an answer differently than
        as the last message (Qwen 3 drops the thoughts of earlier answers), or not at all; the loss
        then covers what it renders. A generation prompt after an answer is not in the loss.

        Raises:
            DataError: if an answer cannot be found in the text.
            InputError: if the template refuses the conversation, or takes too much.
        """
        text = self.text(messages)
        places = [place for place, message in enumerate(messages) if is_in_loss(message)]
        spans = [self._span(text, messages, place) for place in places]
        return text, [span for span in spans if span is not None]

    def _span(self, text: str, messages: Sequence[Message], place: int) -> Span | None:
        before = self.text(messages[:place], answer=True)
        through = text if place + 1 == len(messages) else self.text(messages[: place + 1])
        if text.startswith(before):
            mark = _mark(text)
            through = through[
                : len(through)
                - self._generation_prompt_length(messages, place, before, through, mark)
            ]
            if text.startswith(through):
                return len(before), len(through.rstrip())
        return self._rewritten(text, messages, place, before)

    def _generation_prompt_length(
        self, messages: Sequence[Message], place: int, before: str, through: str, mark: str
    ) -> int:
        """How many characters at the end of a text, through the answer at `place`, are an
        invitation that the template writes unasked.
        """
        # It would stand at the end of `before`, too, and be there whether asked for or not.
        if not _same_beginning(before[::-1], through[::-1]).strip():
            return 0
        marked = [*messages[:place], {"role": "assistant", "content": mark}]
        tail = self.text(marked).rpartition(mark)[2]
        if self.text(marked, answer=True).rpartition(mark)[2] != tail:
            return 0
        _, shown, another = self.text([*marked, {"role": "user", "content": "a"}]).rpartition(mark)
        if not shown or another.startswith(tail.rstrip()):
            return 0
        # What ends the answer is in both; the headings behind it may begin alike.
        same = _same_beginning(tail, another)
        for token in sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True):
            if same.strip().startswith(token):
                return len(tail) - len(same[: same.find(token) + len(token)])
        return len(tail)

    def _rewritten(
        self, text: str, messages: Sequence[Message], place: int, before: str
    ) -> Span | None:
        """The answer at `place` in a text whose start is no text of the template's.

        With another content in that place, the text differs there and nowhere else.
        """
        mark = _mark(text)
        marked = {"role": "assistant", "content": mark}
        other = self.text([*messages[:place], marked, *messages[place + 1 :]])
        if mark not in other:
            return None
        begin, rest = other.partition(mark)[0], other.rpartition(mark)[2]
        start, stop = len(begin), len(text) - len(rest)
        if not (start <= stop and text.startswith(begin) and text.endswith(rest)):
            raise DataError(
                "the chat template renders other messages differently when an answer changes, so "
                "the answer's tokens cannot be found: use another template."
            )
        last = self.text([*messages[:place], marked])
        last = last[
            : len(last) - self._generation_prompt_length(messages, place, before, last, mark)
        ]
        end = last.rpartition(mark)[2].rstrip()
        invitation = before.removeprefix(self.text(messages[:place]))
        invited = text.rfind(invitation, 0, start) + len(invitation)
        # else it is that of an earlier answer: the template invites in other words than it writes
        if invitation in begin and not (end and end in text[invited:start]):
            start = invited
        return start, stop + len(end) if end and text.startswith(end, stop) else stop


def _mark(text: str) -> str:
    """A character that is not in the text.

    Raises:
        DataError: if all that are tried are.
    """
    found = next((chr(code) for code in MARKS if chr(code) not in text), None)
    if found is None:
        raise DataError(
            "a conversation holds all characters of Unicode's private use: remove one of them."
        )
    return found


def _same_beginning(one: str, other: str) -> str:
    pairs = enumerate(zip(one, other, strict=False))
    return one[: next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))]
