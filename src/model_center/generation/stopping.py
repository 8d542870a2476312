"""Where a sequence ends: at its end token, or where its text contains a stop string."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

NUM_BYTES = 256


class TokenTexts(NamedTuple):
    """What each id of a vocabulary adds to a text, as bytes; nothing for special and unknown ones.

    Attributes:
        first: where no token with text precedes it; some tokenizers drop a leading blank
            there.
        later: after a token with text.
    """

    first: tuple[bytes, ...]
    later: tuple[bytes, ...]


class StopStrings:
    """An automaton that reads tokens and knows whether their bytes contain one of some strings.

    Every row of a batch is in a state, a number; the next one is looked up by token, on the device,
    so that neither text nor a loop over rows is needed. A string may begin and end inside of
    tokens.

    Args:
        strings: what to look for; for none, only tokens with text change the state.
        tokens: the bytes of each token, by id.
        device: of the table.

    Source: Aho and Corasick, "Efficient string matching: an aid to bibliographic search" (1975).
    """

    def __init__(self, strings: Sequence[str], tokens: TokenTexts, device: torch.device) -> None:
        automaton = byte_automaton([text.encode() for text in strings])
        self._found = len(automaton)
        # State 0 is that of a sequence without text, the others are the automaton's, one further.
        has_text = torch.tensor([len(text) > 0 for text in tokens.later])
        states = torch.arange(len(automaton))
        first = token_table(states[:1], automaton, tokens.first) + 1
        begun = torch.where(has_text, first, 0)
        later = token_table(states, automaton, tokens.later) + 1
        self._table = torch.cat([begun, later]).to(device, torch.int32)
        self._has_text = has_text.to(device)

    def first(self, prefix: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """States (rows,) before the first new token: whether there is text in front of it.

        Args:
            prefix: int64 (rows, length), the tokens in front.
            mask: bool of the same shape, False where they are padding; None where none is.
        """
        has_text = self._has_text[prefix]
        return (has_text if mask is None else has_text & mask).any(-1).long()

    def next(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """States after these tokens, both int64 of one shape."""
        return self._table[states, tokens].long()

    def found(self, states: torch.Tensor) -> torch.Tensor:
        """bool of the same shape: whether a string was found; it stays found."""
        return states == self._found


class StopCriteria:
    """What ends a sequence.

    Args:
        eos: ids (number,) of end tokens, on the device of the sequences.
        stop: the stop strings; None for none.
    """

    def __init__(self, eos: torch.Tensor, stop: StopStrings | None = None) -> None:
        self._eos, self._stop = eos, stop

    def first(self, prefix: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """States (rows,) of sequences that begin with these tokens, as in `StopStrings.first`."""
        return (
            prefix.new_zeros(len(prefix)) if self._stop is None else self._stop.first(prefix, mask)
        )

    def next(self, states: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(states, bool), each shaped as the arguments: states after the tokens, and who ends."""
        ended = (tokens[..., None] == self._eos).any(-1)
        if self._stop is None:
            return states, ended
        states = self._stop.next(states, tokens)
        return states, ended | self._stop.found(states)


def byte_automaton(patterns: Sequence[bytes]) -> torch.Tensor:
    """Next state by state and byte, int64 (states, 256); 0 is the first, the last stays found."""
    children, is_end = _trie(patterns)
    found = len(children)
    rows = [[0] * NUM_BYTES for _ in children]
    fallback = [0] * found
    queue = deque([0])
    # by length, so that the shorter text that a state falls back to has its row already
    while queue:
        state = queue.popleft()
        back = fallback[state]
        is_end[state] |= is_end[back]
        rows[state] = list(rows[back]) if state else rows[state]
        for byte, child in children[state].items():
            fallback[child] = rows[back][byte] if state else 0
            rows[state][byte] = child
            queue.append(child)
    table = torch.tensor([*rows, [found] * NUM_BYTES])
    ends = torch.tensor([*is_end, True])
    return torch.where(ends[table], found, table)


def _trie(patterns: Sequence[bytes]) -> tuple[list[dict[int, int]], list[bool]]:
    """Of each state the next one by byte, and whether a pattern ends there."""
    children: list[dict[int, int]] = [{}]
    is_end = [False]
    for pattern in patterns:
        state = 0
        for byte in pattern:
            if byte not in children[state]:
                children[state][byte] = len(children)
                children.append({})
                is_end.append(False)
            state = children[state][byte]
        is_end[state] = True
    return children, is_end


def token_table(
    starts: torch.Tensor, automaton: torch.Tensor, tokens: Sequence[bytes]
) -> torch.Tensor:
    """Next state from each of some states by token, int64 (states, tokens): all bytes of a token at
    once.
    """
    order = sorted(range(len(tokens)), key=lambda token: -len(tokens[token]))
    states = starts[:, None].repeat(1, len(tokens))
    sorted_tokens = [tokens[token] for token in order]
    count = len(tokens)
    for place in range(len(sorted_tokens[0]) if sorted_tokens else 0):
        while len(sorted_tokens[count - 1]) <= place:
            count -= 1
        step = torch.tensor([token[place] for token in sorted_tokens[:count]])
        states[:, :count] = automaton[states[:, :count], step]
    table = torch.empty_like(states)
    table[:, torch.tensor(order, dtype=torch.long)] = states
    return table


@functools.lru_cache(maxsize=4)
def texts_of_tokens(tokenizer: Any, size: int) -> TokenTexts:
    """The texts of the first `size` ids.

    The tokenizer is asked for the text of each token by itself and after another one. Tokens that
    are parts of characters have no text of their own; their bytes are read from their names in
    byte-level vocabularies and in SentencePiece's byte fallback (`<0x0A>`).
    """
    special = set(tokenizer.all_special_ids)
    names = {
        token: name
        for name, token in tokenizer.get_vocab().items()
        if token < size and token not in special
    }
    word = next(
        name for name in names.values() if tokenizer.convert_tokens_to_string([name]).isalpha()
    )

    def texts(*before: str) -> tuple[bytes, ...]:
        start = len(tokenizer.convert_tokens_to_string(list(before)))
        found = [b""] * size
        for token, name in names.items():
            text = tokenizer.convert_tokens_to_string([*before, name])
            named = _bytes_of_name(name) if "\ufffd" in text else None
            found[token] = named or text[start:].encode()
        return tuple(found)

    return TokenTexts(texts(), texts(word))


def _bytes_of_name(name: str) -> bytes | None:
    """The bytes that a token's name encodes, or None if it is no name of bytes."""
    if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
        return bytes([int(name[3:5], 16)])
    alphabet = byte_alphabet()
    if not all(letter in alphabet for letter in name):
        return None
    return bytes(alphabet[letter] for letter in name)


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """The byte of each letter in byte-level vocabularies: itself, or letters from U+0100 on.

    Source: the vocabulary format of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {
        chr(256 + place): byte for place, byte in enumerate(others)
    }
