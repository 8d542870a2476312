"""Attention over short sequences: Triton kernels that hold a whole sequence on the chip, and their plain-torch twin.

For a few hundred tokens the time goes into reading and writing q, k, v and their gradients. Forward and backward do so once:
probabilities and the random numbers of dropout stay in registers, and backward is one kernel.

Dropout: torch draws a 32-bit word per query and one per key of each head, and a pair of them is kept if a hash of the sum of
both words lies above a threshold. This costs 4 bytes per token where Philox per pair would cost more time than all the rest.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any, NamedTuple

import torch

MAX_TOKENS = 256
DIMS = (32, 64, 128)
HAS_TRITON = importlib.util.find_spec("triton") is not None


class Tiles(NamedTuple):
    """How a kernel is launched: queries of a tile, warps of a program, stages of its loop, most registers of a thread."""

    queries: int
    warps: int
    stages: int = 1
    registers: int | None = None


# By (keys of a tile, dim): forward, backward. For H200s; each also fits into the 99 KiB of an RTX 3090.
TILES = {
    (64, 32): (Tiles(64, 4), Tiles(64, 4)),
    (64, 64): (Tiles(64, 4), Tiles(64, 4)),
    (64, 128): (Tiles(64, 4), Tiles(64, 4)),
    (128, 32): (Tiles(64, 4), Tiles(32, 8, registers=128)),
    (128, 64): (Tiles(64, 4), Tiles(32, 8, registers=128)),
    (128, 128): (Tiles(64, 4), Tiles(32, 8)),
    (256, 32): (Tiles(64, 4), Tiles(16, 8)),
    (256, 64): (Tiles(64, 4), Tiles(16, 8)),
}


def short_attention_applies(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float = 0.0) -> bool:
    """Whether `short_attention` takes these: on a GPU with Triton, 16-bit floats, equal shapes that fit on the chip."""
    tokens, dim = query.shape[-2], query.shape[-1]
    return (
        HAS_TRITON
        and query.is_cuda
        and query.dtype in {torch.bfloat16, torch.float16}
        and query.dtype == key.dtype == value.dtype
        and query.shape == key.shape == value.shape
        and 0 < tokens <= MAX_TOKENS
        and dim in DIMS
        and (dim < DIMS[-1] or tokens <= MAX_TOKENS // 2)  # gradients of keys and values are summed in registers
        and query.shape[0] * query.shape[1] > 0
        and dropout_p < 1.0
    )


def short_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor | None = None,
    *,
    scale: float | None = None,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """`dropout(softmax(scale q k^T)) v`, every query seeing all valid keys. Differentiable once; never waits for the device.

    Args:
        query, key, value: (batch, heads, tokens, dim) for which `short_attention_applies`, of any strides.
        keys: bool (batch or 1, tokens), False where a key is padding. A sample without any valid key sees all of its keys.
        scale: 1 / sqrt(dim) if None.
        dropout_p: of the probabilities, below 1; drawn from torch's generator of the device.

    Returns (batch, heads, tokens, dim) of the dtype of `query`, which lies in memory as (batch, tokens, heads, dim), as the
    gradients do. Products take inputs and probabilities as they are and sum in fp32; the softmax is fp32.

    Source: Dao et al., "FlashAttention" (2022), for the backward pass by recomputation.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    words = draw_words(query) if dropout_p > 0.0 else None
    return _forward(query, key, value, keys, words, scale, dropout_p)[0]


def short_attention_reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    keys: torch.Tensor | None = None,
    kept: torch.Tensor | None = None,
    *,
    scale: float,
    dropout_p: float = 0.0,
) -> torch.Tensor:
    """The same by the formula, in the dtype of its arguments: what the kernels are tested against.

    Args:
        kept: bool (batch, heads, tokens, tokens), the pairs that dropout keeps; see `keep_mask`.
    """
    scores = (query @ key.transpose(-1, -2)) * scale
    if keys is not None:
        seen = keys | ~keys.any(-1, keepdim=True)
        scores = scores.masked_fill(~seen[:, None, None, :], -math.inf)
    probabilities = scores.softmax(-1)
    if kept is not None:
        probabilities = probabilities * kept / (1 - dropout_p)
    return probabilities @ value


def draw_words(query: torch.Tensor) -> torch.Tensor:
    """int32 (batch, heads, 2, tokens), uniform: a word of each query, then of each key."""
    batch, heads, tokens, _ = query.shape
    return torch.randint(-(2**31), 2**31, (batch, heads, 2, tokens), dtype=torch.int32, device=query.device)


def keep_mask(words: torch.Tensor, dropout_p: float) -> torch.Tensor:
    """bool (batch, heads, queries, keys): the pairs that the kernels keep, given the words of `draw_words`.

    Uniform words have uniform sums, and the hash is a bijection of 32 bits up to its last step: a pair is dropped with the
    probability dropout_p, to 2**-32. Its multipliers are of the "lowbias32" function found by C. Wellons's search (2018).
    """
    queries, keys = words.to(torch.int64).unbind(2)
    x = (queries[..., :, None] + keys[..., None, :]) & 0xFFFFFFFF
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    signed = x - ((x >> 31) << 32)
    return signed >= _threshold(dropout_p)


def _threshold(dropout_p: float) -> int:
    """The least signed 32-bit number that is kept."""
    return min(round(dropout_p * 2**32) - 2**31, 2**31 - 1)


@torch.library.custom_op(
    "bmtrain::short_attention",
    mutates_args=(),
    schema="(Tensor query, Tensor key, Tensor value, Tensor? keys, Tensor? words, float scale, float dropout_p) -> "
    "(Tensor, Tensor)",
)
def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor | None, words: torch.Tensor | None,
    scale: float, dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """The output, and the log2 of each softmax's sum: fp32 (batch, heads, tokens)."""
    # Triton exists only where CUDA does and takes long to import: it is loaded by the first call on a GPU.
    from bmtrain.kernels.short_attention_triton import forward_kernel

    (batch, heads, tokens, dim), size = query.shape, _tile_keys(query)
    tiles, (out, lse) = TILES[size, dim][0], _outputs(query)
    query, key, value, keys = _rows(query), _rows(key), _rows(value), _bytes(keys, query)
    blocks = -(-tokens // tiles.queries)
    with torch.cuda.device(query.device):
        forward_kernel[(batch * heads * blocks,)](
            query, key, value, keys, words, out, lse, *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *_strides(keys), heads, tokens, scale, 1 / (1 - dropout_p), _threshold(dropout_p),
            BLOCKS=blocks, QUERIES=tiles.queries, KEYS=size, DIM=dim, **_options(tiles),
        )  # fmt: skip
    return out, lse


@torch.library.custom_op(
    "bmtrain::short_attention_backward",
    mutates_args=(),
    schema="(Tensor grad, Tensor query, Tensor key, Tensor value, Tensor lse, Tensor? keys, Tensor? words, float scale, "
    "float dropout_p) -> (Tensor, Tensor, Tensor)",
)
def _backward(  # noqa: PLR0913 (an operation of torch takes tensors and numbers, no objects)
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lse: torch.Tensor,
    keys: torch.Tensor | None, words: torch.Tensor | None, scale: float, dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The gradients of query, key and value."""
    from bmtrain.kernels.short_attention_triton import backward_kernel

    (batch, heads, tokens, dim), size = query.shape, _tile_keys(query)
    tiles, gradients = TILES[size, dim][1], _gradients(query)
    grad, query, key, value, keys = _rows(grad), _rows(query), _rows(key), _rows(value), _bytes(keys, query)
    with torch.cuda.device(query.device):
        backward_kernel[(batch * heads,)](
            grad, query, key, value, keys, words, lse, *gradients,
            *grad.stride()[:3], *query.stride()[:3], *key.stride()[:3], *value.stride()[:3],
            *_strides(keys), heads, tokens, scale, 1 / (1 - dropout_p), _threshold(dropout_p),
            BLOCKS=-(-tokens // tiles.queries), QUERIES=tiles.queries, KEYS=size, DIM=dim, **_options(tiles),
        )  # fmt: skip
    return gradients


def _tile_keys(query: torch.Tensor) -> int:
    """The least length of a tile that holds all keys: a power of two, from 64 on, which the tensor cores want."""
    return max(64, 1 << (query.shape[2] - 1).bit_length())


def _options(tiles: Tiles) -> dict[str, Any]:
    limit = {} if tiles.registers is None else {"maxnreg": tiles.registers}
    return {"num_warps": tiles.warps, "num_stages": tiles.stages, **limit}


def _rows(x: torch.Tensor) -> torch.Tensor:
    """`x` with the features of a token side by side; as it is where they are."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _bytes(keys: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    return None if keys is None else keys.expand(query.shape[0], query.shape[2]).view(torch.uint8)


def _strides(keys: torch.Tensor | None) -> tuple[int, ...]:
    return (0, 0) if keys is None else keys.stride()


def _empty(query: torch.Tensor) -> torch.Tensor:
    """Of the shape of `query`, heads of a token side by side in memory, as the layers around attention have them."""
    batch, heads, tokens, dim = query.shape
    return query.new_empty(batch, tokens, heads, dim).transpose(1, 2)


def _outputs(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return _empty(query), query.new_empty(query.shape[:3], dtype=torch.float32)


def _gradients(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _empty(query), _empty(query), _empty(query)


@_forward.register_fake
def _(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _outputs(query)


@_backward.register_fake
def _(grad: torch.Tensor, query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _gradients(query)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    *tensors, ctx.scale, ctx.dropout_p = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)  # no zeros for the sums, which nobody differentiates


def _backward_of(ctx: Any, grad: torch.Tensor, _: None) -> tuple[torch.Tensor | None, ...]:
    query, key, value, keys, words, lse = ctx.saved_tensors
    gradients = _backward(grad, query, key, value, lse, keys, words, ctx.scale, ctx.dropout_p)
    return (*gradients, None, None, None, None)


_forward.register_autograd(_backward_of, setup_context=_keep_inputs)
