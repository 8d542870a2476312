"""Which tokens of a row belong in the loss, found by the contents of its messages.

`ChatRenderer` finds answers by what the template writes around them. Here the contents are searched
for in the finished text, and the generation prompt says where an answer begins: the two ways share
no code, so they do not share a mistake. `certify` compares them.
"""

from __future__ import annotations

import itertools
import json
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from model_center.dataset.chat import MARKS, ChatTokenizer, Span
from model_center.dataset.conversations import Message, Parsed, is_in_loss, parse, parse_pair
from model_center.dataset.padding import Item
from model_center.dataset.rows import Row
from model_center.errors import DataError

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_TAG = re.compile(r"</?[\w|]+>|```\w*")  # what templates put around a content, and take from it


class Expected(NamedTuple):
    """A row with the loss mask that it should have.

    Attributes:
        ids: of its whole text.
        in_loss: of each, whether a model has to predict it; None where both are right: white space,
            and what the template itself writes into an answer.
        lost: what the row says and its text does not, in words.
    """

    ids: list[int]
    in_loss: list[bool | None]
    lost: list[str]


def expected_of(row: Row, tokenizer: ChatTokenizer, *, pairs: bool = False) -> list[Expected]:
    """What should be in the loss of a row: of preferences of the better answer, then of the worse.

    Args:
        row: a conversation or a text, or a pair.
        tokenizer: with a chat template, a fast one.
        pairs: whether it is a row of preferences.

    Raises:
        DataError: for a row that is none of these, or that the template does not write with other
            contents, so that nothing can be said of it.
    """
    try:
        parsed = parse_pair(row.content) if pairs else [parse(row.content)]
    except (KeyError, ValueError) as error:
        raise DataError(f"{row.location}: {error}") from error
    return [_expected(one, row.location, tokenizer) for one in parsed]


def _expected(parsed: Parsed, place: str, tokenizer: ChatTokenizer) -> Expected:
    if parsed.text is not None:
        bos, eos = tokenizer.bos_token or "", tokenizer.eos_token or ""
        text, lost = bos + parsed.text + eos, [] if eos else ["nothing ends a text"]
        zone = len(bos), len(text)
        found = _Found([zone], [zone], lost)
    else:
        try:
            text, found = _Conversation(parsed.messages, parsed.tools, tokenizer).found()
        # a template raises what its author likes
        except Exception as error:
            raise DataError(f"{place}: the template writes no other contents: {error}") from error
    encode: Any = tokenizer
    encoded = encode(text, add_special_tokens=False, return_offsets_mapping=True)
    return Expected(
        list(encoded["input_ids"]),
        [found.of(text, *offsets) for offsets in encoded["offset_mapping"]],
        found.lost,
    )


def difference(
    item: Item, expected: Expected, start: int, *, continues: bool, tokenizer: Any
) -> str | None:
    """The first token of a sample that is not as it should be, in words; None where all are.

    Args:
        item: `input_ids` and `targets`, int64 (length,).
        expected: of its row.
        start: the place of the sample's first token in the row.
        continues: whether the last token predicts what follows in the next sample.
        tokenizer: that says what the tokens are.
    """
    ids, targets = item["input_ids"].tolist(), item["targets"].tolist()
    if len(ids) > len(expected.ids) - start:
        return f"it has {len(ids)} tokens, and its text has {len(expected.ids) - start}"
    for place, (own, target) in enumerate(zip(ids, targets, strict=True)):

        def word(token: int) -> str:
            return repr(tokenizer.decode([token]))

        here = f"token {start + place}, {word(own)}"
        if own != expected.ids[start + place]:
            return f"{here}, is {word(expected.ids[start + place])} in its text"
        following = start + place + 1
        is_seen = following < len(expected.ids) and (continues or place + 1 < len(ids))
        wanted = expected.in_loss[following] if is_seen else False
        if target == -100:
            if wanted:
                return f"token {following}, {word(expected.ids[following])}, is not in the loss" + (
                    _after(expected.ids[:following], tokenizer)
                )
        elif not is_seen or target != expected.ids[following]:
            what = word(expected.ids[following]) if is_seen else "nothing"
            return f"{here}, is trained to predict {word(target)}, but {what} follows it"
        elif wanted is False:
            return (
                f"token {following}, {word(target)}, is in the loss, but no part of an answer"
                + (_after(expected.ids[:following], tokenizer))
            )
    return None


def _after(ids: Sequence[int], tokenizer: Any) -> str:
    return f" (it follows {tokenizer.decode(ids[-12:])!r})"


class _Found(NamedTuple):
    """Spans of a text that are in the loss, and those outside of which nothing is."""

    said: list[Span]
    zones: list[Span]
    lost: list[str]

    def of(self, text: str, start: int, stop: int) -> bool | None:
        """Whether a token of the text is in the loss; None if both are right."""
        if not text[start:stop].strip():
            inside = any(a < stop and start < b for a, b in self.zones)
            beside = any(not text[min(b, start) : max(b, start)].strip() for _, b in self.zones)
            return None if inside or beside else False
        if any(
            a < stop and start < b and text[max(a, start) : min(b, stop)].strip()
            for a, b in self.said
        ):
            return True
        return None if any(a < stop and start < b for a, b in self.zones) else False


class _Conversation:
    """A conversation, and the same one with marks in place of its contents."""

    def __init__(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, tokenizer: ChatTokenizer
    ) -> None:
        self.messages, self.tools, self.tokenizer = messages, tools, tokenizer
        self.text = self._written(messages)
        self._mark = next(chr(code) for code in MARKS if chr(code) not in self.text)
        self._marked = [
            {**message, "content": self._of(number)} if message["content"] else message
            for number, message in enumerate(messages)
        ]
        self._places: dict[int, Span] = {}  # of each content
        self._spans: dict[int, list[Span]] = {}  # of what is said of it
        self._lost: list[str] = []

    def found(self) -> tuple[str, _Found]:
        """The text, and what is where in it."""
        self._find_contents()
        said, zones, has_end = [], [], False
        ordered = sorted(self._places.values())
        for number, message in enumerate(self.messages):
            own = self._places.get(number)
            before = [self._places[n][1] for n in range(number) if n in self._places]
            low = max(before, default=0)
            high = min(
                (start for start, _ in ordered if start >= (own[1] if own else low)),
                default=len(self.text),
            )
            spans = self._spans.get(number, []) + self._find_others(number, low, high)
            if not is_in_loss(message):
                continue
            begin = self._answer_begins(number)
            spans = [(max(start, begin), stop) for start, stop in spans if stop > begin]
            if not spans:
                continue
            last = max(stop for _, stop in spans)
            end, behind = self._end_of(number, last, high)
            has_end |= end is not None
            said += spans if end is None else [*spans, end]
            zones.append((begin, behind))
        if zones and not has_end:
            self._lost.append("nothing ends an answer: the model will not learn to stop")
        return self.text, _Found(said, zones, self._lost)

    def _find_contents(self) -> None:
        """Go through the text and the marked one side by side."""
        pieces = re.split(f"{self._mark}(\\d+){self._mark}", self._written(self._marked))
        numbers = [int(number) for number in pieces[1::2]]
        for number, message in enumerate(self.messages):
            if message["content"] and number not in numbers:
                self._lose(number, message["content"])
        cursor = 0
        for number, gap, after in zip(numbers, pieces[::2], pieces[2::2], strict=False):
            content = self.messages[number]["content"]
            start = cursor + len(_common(gap, self.text[cursor : cursor + len(gap)]))
            for form in (
                content,
                content.strip(),
                content.lstrip(),
                content.rstrip(),
                _escaped(content),
            ):
                stop = start + len(form)
                is_last = number == numbers[-1]
                follows = (
                    self.text[stop:] == after if is_last else self.text.startswith(after, stop)
                )
                if start == cursor + len(gap) and self.text.startswith(form, start) and follows:
                    self._spans.setdefault(number, []).append((start, stop))
                    break
            else:
                stop = self._find_lines(number, content, (cursor, start), after)
            self._places.setdefault(number, (start, stop))
            cursor = stop

    def _find_lines(self, number: int, content: str, low: Span, after: str) -> int:
        """Look for the lines of a content that the template has changed; returns its end.

        `low` is where the last content ends, and up to where all is as with another content.
        """
        ends = [after, *re.findall(r"^\s*\S+", after)]
        found = (self.text.find(end, low[1]) for end in ends if end)
        stop = next((place for place in found if place >= 0), len(self.text))
        if not after.strip():
            stop = len(self.text)
        spans = self._lines(number, content, low[0], stop)
        self._spans.setdefault(number, []).extend(spans)
        return stop

    def _lines(self, number: int, content: str, low: int, high: int) -> list[Span]:
        """Where its lines are, one after the other; the first that is not there is told."""
        spans: list[Span] = []
        missing = []
        for line in filter(None, (line.strip() for line in content.splitlines())):
            places = [(self.text.find(form, low, high), form) for form in (line, _escaped(line))]
            place, form = max(places, key=lambda pair: pair[0] >= 0)
            if place >= 0:
                low = place + len(form)
                spans.append((place, low))
            elif not _TAG.fullmatch(line):
                missing.append(line)
        if missing:
            self._lose(number, missing[0])
        return spans

    def _find_others(self, number: int, low: int, high: int) -> list[Span]:
        """Thoughts and calls of a message, which are beside its content."""
        message = self.messages[number]
        spans: list[Span] = []
        for name in THOUGHTS:
            if isinstance(message.get(name), str):
                spans += self._lines(number, message[name], low, high)
        for leaf in _leaves(message.get("tool_calls")):
            spans += self._lines(number, leaf, low, high)
        if number == 0 and self.tools:
            for tool in self.tools:
                function = tool.get("function", tool)
                if isinstance(function, Mapping) and str(function.get("name", "")) not in self.text:
                    self._lost.append(f"the template leaves out the tool {function['name']}")
        return spans

    def _answer_begins(self, number: int) -> int:
        """Where the text behind the last content before it is no longer what a model is asked
        with.
        """
        asked = self._written(self._marked[:number], asks=True)
        numbers = re.findall(f"{self._mark}(\\d+){self._mark}", asked)
        anchor = (
            self._places[int(numbers[-1])][1] if numbers and int(numbers[-1]) in self._places else 0
        )
        invitation = asked.rpartition(self._mark)[2]
        return anchor + len(_common(invitation, self.text[anchor:]))

    def _end_of(self, number: int, begin: int, high: int) -> tuple[Span | None, int]:
        """The token that ends an answer, behind what it says, None if none does; and how far what
        the template writes of the answer goes.
        """
        until = [*self._marked[:number], {"role": "assistant", "content": self._of(number)}]
        tail = self._written(until).rpartition(self._mark)[2]
        tokens = {*self.tokenizer.get_added_vocab(), *filter(None, [self.tokenizer.eos_token])}
        token = max((one for one in tokens if tail.lstrip().startswith(one)), key=len, default=None)
        # an invitation that stands there whether one is asked for or not
        if self._written(until, asks=True).rpartition(self._mark)[2] == tail:
            another = self._written([*until, {"role": "user", "content": self._of(number)}])
            tail = _common(tail, another.split(self._mark)[-3])
            if token and not tail.lstrip().startswith(token):
                token = None
        if token is None:
            return None, begin + len(_common(tail, self.text[begin:high]))
        place = self.text.find(token, begin, high)
        between = self.text[begin:place]
        if place < 0 or (between.strip() and not self.messages[number].get("tool_calls")):
            return None, begin
        return (place, place + len(token)), place + len(token)

    def _lose(self, number: int, what: str) -> None:
        role = self.messages[number]["role"]
        said = f"message {number + 1}, of the {role}: the template leaves out {reprlib.repr(what)}"
        self._lost.append(said)

    def _of(self, number: int) -> str:
        return f"{self._mark}{number}{self._mark}"

    def _written(self, messages: Sequence[Message], *, asks: bool = False) -> str:
        options: dict[str, Any] = {} if self.tools is None else {"tools": self.tools}
        return self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=asks, **options
        )


def _common(one: str, other: str) -> str:
    pairs = zip(one, other, strict=False)
    return "".join(a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _leaves(value: Any) -> Iterator[str]:
    """The names and texts of calls."""
    if isinstance(value, str):
        try:
            inner = json.loads(value)
        except ValueError:
            inner = None
        if isinstance(inner, dict | list):
            yield from _leaves(inner)
        else:
            yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            if key not in {"type", "id"}:
                yield from _leaves(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
