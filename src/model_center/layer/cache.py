"""Keys and values of tokens that went through the model before, allocated once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from model_center.errors import InputError

KeyValues = tuple[torch.Tensor, torch.Tensor]


class LayerCache(Sequence[torch.Tensor]):
    """The cache of a layer: a pair (keys, values), each (batch, heads, length, dim_head).

    Keys are kept as the attention used them: rotary positions are applied already, heads are those
    of keys, not of queries.

    Args:
        capacity: number of tokens to allocate room for at the first `append`; more than that moves
            to a larger place.
        cross: the cache of the cross-attention of the same decoder layer, whose keys never change.
    """

    def __init__(self, capacity: int = 0, cross: LayerCache | None = None) -> None:
        self.length = 0
        self.cross = cross
        self._capacity = capacity
        self._memory: KeyValues | None = None
        self._is_kept = False  # whether autograd, or who gave it, has the memory too

    @classmethod
    def of(cls, keys: torch.Tensor, values: torch.Tensor) -> LayerCache:
        """A cache that holds these, each (batch, heads, length, dim_head)."""
        cache = cls(keys.shape[2])
        cache.append(keys, values)
        return cache

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> KeyValues:
        """Add tokens (batch, heads, new, dim_head); returns all so far, as views of the memory.

        Raises:
            InputError: for another number of rows than that of the tokens before.
        """
        if self._memory is not None and len(self._memory[0]) != len(keys):
            raise InputError(
                f"the cache holds {len(self._memory[0])} rows: expected as many in the new "
                f"tokens, got {len(keys)}."
            )
        start, self.length = self.length, self.length + keys.shape[2]
        # autograd keeps what queries read, even keys without gradient: it must not change
        if torch.is_grad_enabled():
            self._memory = (
                (keys, values) if start == 0 else _joined(self._valid(start), (keys, values))
            )
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

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]  # a pair is not cut into slices
        return self._valid(self.length)[index]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self._valid(self.length))

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
    """The caches of all layers, in order: what models return as `past_key_values` and take again.

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

    @classmethod
    def of(
        cls, pairs: Sequence[LayerCache | KeyValues | None] | KeyValueCache, num_layers: int
    ) -> KeyValueCache:
        """What a program passes as `past_key_values`: a cache, or a pair or None per layer.

        Raises:
            ValueError: for another number of layers.
        """
        if len(pairs) != num_layers:
            raise ValueError(f"past_key_values has {len(pairs)} layers: expected {num_layers}.")
        if isinstance(pairs, KeyValueCache):
            return pairs
        cache = cls(0)
        cache._layers = [_layer_of(pair) for pair in pairs]
        return cache

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self._layers[0].length if self._layers else 0

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

    def __len__(self) -> int:
        return len(self._layers)

    def __getitem__(self, index: int) -> LayerCache:  # type: ignore[override]  # layer by layer
        return self._layers[index]


def _layer_of(pair: LayerCache | KeyValues | None) -> LayerCache:
    if pair is None:
        return LayerCache()
    return pair if isinstance(pair, LayerCache) else LayerCache.of(pair[0], pair[1])


def _joined(old: KeyValues, new: KeyValues) -> KeyValues:
    return torch.cat([old[0], new[0]], 2), torch.cat([old[1], new[1]], 2)
