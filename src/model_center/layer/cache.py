"""Keys and values of tokens that went through the model before, allocated once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from model_center.errors import InputError
from model_center.kernels.cached_attention import store_tokens

KeyValues = tuple[torch.Tensor, torch.Tensor]


class LayerCache(Sequence[torch.Tensor]):
    """The cache of a layer: a pair (keys, values), each (batch, heads, length, dim_head).

    Keys are kept as the attention used them: rotary positions are applied already, heads are those
    of keys, not of queries.

    Args:
        capacity: number of tokens to allocate room for at the first `append`; more than that moves
            to a larger place.
        in_place: whether new tokens are written beside the others; False leaves all tensors that
            were given or returned as they are.
        cross: the cache of the cross-attention of the same decoder layer, whose keys never change.
    """

    def __init__(
        self, capacity: int = 0, cross: LayerCache | None = None, *, in_place: bool = True
    ) -> None:
        self.length = 0
        self.cross = cross
        self._capacity, self._in_place = capacity, in_place
        self._memory: KeyValues | None = None
        self._place: torch.Tensor | None = None
        self._is_kept = False  # whether autograd, or who gave it, has the memory too

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
        """A cache that holds these, each (batch, heads, length, dim_head), and leaves them so."""
        cache = cls(in_place=False)
        cache.append(keys, values)
        return cache

    @property
    def pair(self) -> KeyValues | None:
        """(keys, values); None if nothing went through the layer."""
        return None if self._memory is None else self._valid(self.length)

    @property
    def capacity(self) -> int:
        """Number of tokens that there is room for where they are."""
        return 0 if self._memory is None else self._memory[0].shape[2]

    @property
    def fixed(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
        """Once `fix` was called the memory of keys and of values, and the place of a new token."""
        if self._place is None or self._memory is None:
            return None
        return (*self._memory, self._place)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KeyValues:
        """Add tokens (batch, heads, new, dim_head); returns all so far, as views of the memory.

        Once `fix` was called, one token is written at the given position, and the whole memory
        is returned.

        Raises:
            InputError: for other numbers of rows, heads or channels than before.
        """
        if self._memory is not None:
            _check_alike(self._memory[0].shape, keys.shape)
        if self.fixed is not None:
            held_keys, held_values, place = self.fixed
            store_tokens(held_keys, held_values, keys, values, place)
            return held_keys, held_values
        start, self.length = self.length, self.length + keys.shape[2]
        # autograd keeps what queries read, even keys without gradient: it must not change
        if torch.is_grad_enabled() or not self._in_place:
            if start > 0:
                old = self._valid(start)
                keys, values = torch.cat([old[0], keys], 2), torch.cat([old[1], values], 2)
            self._memory = keys, values
            self._is_kept = True
            return self._memory
        memory = self._room_for(self.length, keys, values, start)
        for place, new in zip(memory, (keys, values), strict=True):
            place[:, :, start : self.length] = new
        return self._valid(self.length)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows (new batch,) of the batch, in this order."""
        if self._memory is not None:
            keys, values = self._memory
            self._memory, self._is_kept = (
                (keys.index_select(0, rows), values.index_select(0, rows)),
                False,
            )
        if self.cross is not None:
            self.cross.select(rows)

    def reorder(self, rows: torch.Tensor, start: int) -> None:
        """Give each row the tokens from `start` on of one of `rows` (batch,), in place."""
        if self._memory is not None and self.length > start:
            for place in self._memory:
                place[:, :, start : self.length] = place[:, :, start : self.length].index_select(
                    0, rows
                )

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        self.length = min(self.length, length)

    def fix(self, place: torch.Tensor) -> None:
        """From now on write each new token to `place`, int64 (1,), which its owner sets.

        The memory stays where it is. `length` is no longer counted by `append`, but by `advance`.
        """
        self._place = place
        self._clear_rest()

    def take(self, other: LayerCache) -> None:
        """Hold what another cache holds, of as many rows and with room here, in the same memory."""
        self.length = other.length
        if self._memory is not None:
            for place, given in zip(self._memory, other, strict=True):
                place[:, :, : self.length] = given
            self._clear_rest()

    def advance(self) -> None:
        """Count a token that was written to the place.

        Raises:
            InputError: if there is no room for it.
        """
        if self._memory is not None:
            if self.length >= self.capacity:
                raise InputError(
                    f"the KV cache is full: it has room for {self.capacity} tokens; make a "
                    "larger one."
                )
            self.length += 1

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]  # a pair is not cut into slices
        return self._valid(self.length)[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._valid(self.length))

    def _clear_rest(self) -> None:
        for memory in self._memory or ():
            # a product of what was in the memory with a probability of zero may be NaN
            memory[:, :, self.length :] = 0

    def _valid(self, length: int) -> KeyValues:
        if self._memory is None:
            raise IndexError("the cache is empty: no token went through the layer yet.")
        keys, values = self._memory
        return keys[:, :, :length], values[:, :, :length]

    def _room_for(
        self, length: int, keys: torch.Tensor, values: torch.Tensor, start: int
    ) -> KeyValues:
        """Memory of at least `length` tokens, which holds the first `start` ones."""
        memory = self._memory
        if memory is None:
            capacity = max(self._capacity, length)
        elif memory[0].shape[2] >= length and not self._is_kept:
            return memory
        else:
            capacity = max(length, 2 * start)  # so that token by token costs linear time
        made = [
            like.new_empty(like.shape[0], like.shape[1], capacity, like.shape[3])
            for like in (keys, values)
        ]
        if memory is not None:
            for place, old in zip(made, memory, strict=True):
                place[:, :, :start] = old[:, :, :start]
        self._memory, self._is_kept = (made[0], made[1]), False
        return self._memory


class KeyValueCache(Sequence[LayerCache]):
    """The caches of all layers, in order, which are filled in place: given as `past_key_values`, a
    model adds its tokens to them and returns them. A model that is given none, or (keys, values) of
    each layer, returns a list of such pairs instead, and changes nothing.

    Args:
        num_layers: how many.
        capacity: tokens to allocate room for at once; the length of a generation, if it is known.
        cross_attention: whether each layer has a cross-attention too.
    """

    def __init__(self, num_layers: int, capacity: int = 0, cross_attention: bool = False) -> None:
        self._layers = [
            LayerCache(capacity, LayerCache() if cross_attention else None)
            for _ in range(num_layers)
        ]
        self._place: torch.Tensor | None = None

    @classmethod
    def of(
        cls, pairs: Sequence[LayerCache | KeyValues | None] | KeyValueCache, num_layers: int
    ) -> KeyValueCache:
        """What a program passes as `past_key_values`: a cache, or a pair or None per layer.

        Raises:
            InputError: for another number of layers, or of tokens in some of them.
        """
        if len(pairs) != num_layers:
            raise InputError(f"past_key_values has {len(pairs)} layers: expected {num_layers}.")
        if isinstance(pairs, KeyValueCache):
            return pairs
        cache = cls(0)
        cache._layers = [layer_of(pair, index) for index, pair in enumerate(pairs)]
        lengths = {layer.length for layer in cache._layers if layer.length}
        if len(lengths) > 1:
            raise InputError(
                f"past_key_values has layers of {sorted(lengths)} tokens: expected one."
            )
        return cache

    @property
    def pairs(self) -> list[KeyValues | None]:
        """(keys, values) of each layer; None for a layer without attention."""
        return [layer.pair for layer in self._layers]

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return max((layer.length for layer in self._layers), default=0)

    @property
    def capacity(self) -> int:
        """Number of tokens that there is room for."""
        rooms = [layer.capacity for layer in self._layers if layer.length]
        return min(rooms, default=0)

    def select(self, rows: torch.Tensor) -> None:
        """Keep these rows (new batch,) of the batch, in this order."""
        for layer in self._layers:
            layer.select(rows)

    def reorder(self, rows: torch.Tensor, start: int) -> None:
        """Give each row the tokens from `start` on of one of `rows` (batch,), in place.

        So beams of one prompt change places without new memory, and without a copy of the prompt or
        of the encoder's keys.
        """
        for layer in self._layers:
            layer.reorder(rows, start)

    def truncate(self, length: int) -> None:
        """Forget all tokens from `length` on."""
        for layer in self._layers:
            layer.truncate(length)

    def fix(self, place: torch.Tensor) -> None:
        """As in LayerCache, for all layers; `place` is the number of tokens held."""
        self._place = place
        for layer in self._layers:
            layer.fix(place)

    def take(self, other: KeyValueCache) -> None:
        """As in LayerCache, for all layers; once it is fixed `place` is set too."""
        for layer, given in zip(self._layers, other, strict=True):
            layer.take(given)
        if self._place is not None:
            self._place.fill_(self.length)

    def hold(self, length: int) -> None:
        """So many tokens are there: a recording has written them."""
        for layer in self._layers:
            layer.length = length

    def advance(self) -> None:
        """As in LayerCache, for all layers."""
        for layer in self._layers:
            layer.advance()

    @property
    def next_position(self) -> int | torch.Tensor:
        """Where the next token goes: `length`, or once it is fixed the tensor that says it."""
        return self.length if self._place is None else self._place

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> LayerCache:  # type: ignore[override]  # layer by layer
        return self._layers[index]


def layer_of(past: LayerCache | KeyValues | None, index: int = 0) -> LayerCache:
    """The cache that a program passes for layer `index`.

    Raises:
        InputError: for another thing than a cache, or keys and values of one shape.
    """
    if past is None or isinstance(past, LayerCache):
        return LayerCache(in_place=False) if past is None else past
    given = list(past)
    shapes = [tuple(part.shape) for part in given if isinstance(part, torch.Tensor)]
    if len(given) != 2 or len(shapes) != 2 or shapes[0] != shapes[1] or len(shapes[0]) != 4:
        raise InputError(
            f"past_key_values has {shapes or given} for layer {index}: expected keys and values, "
            "both (batch, heads, tokens, dim_head)."
        )
    return LayerCache.of(given[0], given[1])


def _check_alike(held: torch.Size, new: torch.Size) -> None:
    if len(held) != len(new) or held[0] != new[0]:
        raise InputError(
            f"the cache holds {held[0]} rows: expected as many in the new tokens, got {new[0]}."
        )
    if held[1] != new[1] or held[3] != new[3]:
        raise InputError(
            f"the cache holds {held[1]} heads of {held[3]} channels: the layer has {new[1]} of "
            f"{new[3]}."
        )
