"""Attention of packed rows: several texts in a row, which do not see one another."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bmtrain.errors import ConfigurationError

_PLAIN = ("cpu", "meta")  # where FlexAttention has no backward pass
_BLOCK = 128  # queries, and keys, that the kernel skips or takes together


def segment_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: torch.Tensor,
    *,
    window: int | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention in which a token sees the tokens of its own segment up to itself.

    In compiled code on a GPU, that of blocks by default, by torch's FlexAttention: pairs of other
    segments cost nothing, no tensor of all pairs is made, keys and values are not repeated for the
    heads that share them, and rows of other segments use the same code. Elsewhere by
    `scaled_dot_product_attention` with a mask of all pairs.

    Args:
        query: (batch, heads, tokens, dim).
        key, value: (batch, key heads, tokens, dim); each serves heads / key heads of the queries'.
        segments: (batch, tokens). A segment is a run of equal numbers.
        window: the number of last tokens that a token sees, itself included; None for all.
        scale: of the scores; 1 / sqrt(dim) if None.

    Returns (batch, heads, tokens, dim).

    Raises:
        ConfigurationError: for other shapes, or a window below 1.
    """
    if segments.shape != (len(key), key.shape[2]) or (window is not None and window < 1):
        raise ConfigurationError(
            f"segment_attention got segments {tuple(segments.shape)}, keys {tuple(key.shape)} and "
            f"window {window}: expected segments (batch, tokens) and a window of at least 1."
        )
    first, places = first_keys(segments), torch.arange(key.shape[2], device=key.device)
    if window is not None:
        first = torch.maximum(first, places - window + 1)
    options: dict[str, Any] = {"scale": scale, "enable_gqa": query.shape[1] != key.shape[1]}
    if torch.compiler.is_compiling() and query.device.type not in _PLAIN:
        found: Any = flex_attention(query, key, value, block_mask=block_mask(first), **options)
        return found
    seen = (places >= first[..., None]) & (places <= places[:, None])
    return F.scaled_dot_product_attention(query, key, value, seen[:, None], **options)


def first_keys(segments: torch.Tensor) -> torch.Tensor:
    """The place of the first token of each token's segment, int64 (batch, tokens).

    Args:
        segments: as of `segment_attention`.
    """
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    places = torch.arange(segments.shape[1], device=segments.device)
    return torch.where(begins, places, 0).cummax(-1).values


def block_mask(first: torch.Tensor) -> BlockMask:
    """Which blocks of pairs are seen, in part or whole, if a token sees the keys from `first` on.

    Args:
        first: (batch, tokens); never falls along a row, and is at most a token's own place.
    """
    length = first.shape[1]
    count = -(-length // _BLOCK)
    number = torch.arange(count, device=first.device)
    # Behind the end `first` is the length: the last block is not whole.
    rows = F.pad(first, (0, count * _BLOCK - length), value=length).unflatten(1, (count, _BLOCK))
    # A block of queries sees blocks of keys from `begin` to its own, from `whole` on whole ones.
    begin, whole = rows[..., 0] // _BLOCK, -(-rows[..., -1] // _BLOCK)
    # A block of keys is seen by the blocks of queries up to `end`, up to `until` by whole ones.
    end, until = ((edge[:, None] <= number[:, None]).sum(-1) - 1 for edge in (begin, whole))
    after = torch.maximum(until, number)

    def table(
        start: torch.Tensor, size: torch.Tensor, is_partial: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = start[..., None] + number
        if is_partial:  # the block itself, and those from `start + 1` on
            blocks = torch.where(number == 0, number[:, None], blocks)
        # What stands behind the size is not read, but has to be a block.
        sizes, blocks = size.clamp(min=int(is_partial)), blocks.clamp(max=count - 1)
        return sizes[:, None].int(), blocks[:, None].int()

    def sees(row: Any, _: Any, query: Any, key: Any) -> Any:
        return (key <= query) & (key >= first[row, query])

    return BlockMask(
        (length, length),
        *table(begin - 1, torch.minimum(whole, number) - begin + 1, True),
        *table(whole, number - whole, False),
        *table(after, end - after + 1, True),
        *table((number + 1).expand_as(end), until - number, False),
        (_BLOCK, _BLOCK),
        sees,
    )
