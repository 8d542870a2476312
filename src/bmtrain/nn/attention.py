"""Attention of packed rows: several texts in a row, which do not see one another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from bmtrain.errors import ConfigurationError

_DEVICE = "cuda"  # FlexAttention has a backward pass there only
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
    wanted = (*query.shape[:1], key.shape[2])
    if (
        segments.shape != wanted
        or query.shape[2] != key.shape[2]
        or (window is not None and window < 1)
    ):
        raise ConfigurationError(
            f"segment_attention got segments {tuple(segments.shape)}, query {tuple(query.shape)}, "
            f"key {tuple(key.shape)} and window {window}: expected segments (batch, tokens), as "
            "many keys as queries and a window of at least 1."
        )
    first = first_keys(segments, window)
    is_grouped = query.shape[1] != key.shape[1]
    if torch.compiler.is_compiling() and query.device.type == _DEVICE:
        blocks = block_mask(first.int())
        out = flex_attention(
            query, key, value, block_mask=blocks, scale=scale, enable_gqa=is_grouped
        )
        return out if isinstance(out, torch.Tensor) else out[0]
    places = torch.arange(segments.shape[1], device=segments.device)
    seen = (places >= first[:, :, None]) & (places <= places[:, None])
    return F.scaled_dot_product_attention(
        query, key, value, seen[:, None], scale=scale, enable_gqa=is_grouped
    )


def first_keys(segments: torch.Tensor, window: int | None = None) -> torch.Tensor:
    """The place of the first token that each token sees, int64 (batch, tokens).

    Args:
        segments, window: as of `segment_attention`.
    """
    places = torch.arange(segments.shape[1], device=segments.device)
    begins = F.pad(segments[:, 1:] != segments[:, :-1], (1, 0), value=True)
    first = torch.where(begins, places, 0).cummax(-1).values
    return first if window is None else torch.maximum(first, places - window + 1)


def block_mask(first: torch.Tensor) -> BlockMask:
    """Which blocks of pairs are seen, in part or whole, if a token sees the keys from `first` on.

    Args:
        first: int32 (batch, tokens); never falls along a row, and is at most a token's own place.
    """
    length = first.shape[1]
    number = torch.arange(-(-length // _BLOCK), device=first.device, dtype=torch.int32)
    # Behind the end `first` is the length: the last block is not whole.
    rows = F.pad(first, (0, len(number) * _BLOCK - length), value=length)
    rows = rows.unflatten(1, (len(number), _BLOCK))
    # A block of queries sees blocks of keys from `begin` to its own, from `whole` on whole ones.
    begin, whole = rows[..., 0] // _BLOCK, -(-rows[..., -1] // _BLOCK)
    # A block of keys is seen up to the block `end` of queries, up to `until` by all of them.
    end, until = (
        (edge[:, None, :] <= number[:, None]).sum(-1, dtype=torch.int32) - 1
        for edge in (begin, whole)
    )
    left = (torch.minimum(whole, number) - begin).clamp(min=0)
    after = torch.maximum(until, number)

    own = number[None, :, None]
    counts_and_blocks = (
        (left + 1, torch.where(number < left[..., None], begin[..., None] + number, own)),
        ((number - whole).clamp(min=0), whole[..., None] + number),
        (end - after + 1, torch.where(number == 0, own, after[..., None] + number)),
        ((until - number).clamp(min=0), own + 1 + number),
    )
    shape = len(first), 1, len(number), len(number)
    tables = []
    for count, blocks in counts_and_blocks:
        # What stands behind the count is not read, but has to be a block.
        listed = blocks.clamp(max=len(number) - 1)[:, None].expand(shape)
        tables += [count[:, None], listed.contiguous()]

    def mask_mod(
        row: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (key >= first[row, query])

    return BlockMask((length, length), *tables, (_BLOCK, _BLOCK), mask_mod)
