"""The kernels of attention over short sequences. Imported only where there is a GPU: see kernels/short_attention.py.

A program holds all keys and values of one head of one sample on the chip, so that a softmax needs one pass. Scores are in units
of log 2, for which GPUs have an instruction. Shapes in comments: Q queries of a tile, K keys, D features.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _load_rows(base: tl.tensor, stride: tl.tensor, rows: tl.tensor, tokens: tl.tensor, DIM: tl.constexpr) -> tl.tensor:
    """(rows, DIM); zeros beyond the last token."""
    at = rows[:, None] * stride + tl.arange(0, DIM)[None, :]
    return tl.load(base + at, mask=rows[:, None] < tokens, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_rows(base: tl.tensor, stride: tl.tensor, rows: tl.tensor, tokens: tl.tensor, x: tl.tensor, DIM: tl.constexpr) -> None:
    at = rows[:, None] * stride + tl.arange(0, DIM)[None, :]
    tl.store(base + at, x.to(base.dtype.element_ty), mask=rows[:, None] < tokens)


@triton.jit  # type: ignore[untyped-decorator]
def _hiding(keys: tl.tensor, stride: tl.tensor, tokens: tl.tensor, KEYS: tl.constexpr) -> tl.tensor:
    """(K,) to add to scores: 0 for a key that is seen, else -inf. Without any valid key all are seen."""
    j = tl.arange(0, KEYS)
    seen = j < tokens
    if keys is not None:
        valid = tl.load(keys + j * stride, mask=seen, other=0).to(tl.int32)
        seen = seen & ((valid != 0) | (tl.max(valid, 0) == 0))
    return tl.where(seen, 0.0, float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _load_words(words: tl.tensor, at: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    return tl.load(words + at, mask=at < tokens, other=0).to(tl.uint32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def _kept(x: tl.tensor, threshold: tl.tensor) -> tl.tensor:
    """Of sums of a query's and a key's word: which pairs survive dropout. The arithmetic of `keep_mask`."""
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15)) * 0x846CA68B
    return x.to(tl.int32, bitcast=True) >= threshold


@triton.jit  # type: ignore[untyped-decorator]
def forward_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    query: tl.tensor, key: tl.tensor, value: tl.tensor, keys: tl.tensor, words: tl.tensor, out: tl.tensor, lse: tl.tensor,
    q_batch: tl.tensor, q_head: tl.tensor, q_token: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor, k_token: tl.tensor,
    v_batch: tl.tensor, v_head: tl.tensor, v_token: tl.tensor, keys_batch: tl.tensor, keys_token: tl.tensor,
    heads: tl.tensor, tokens: tl.tensor, scale: tl.tensor, boost: tl.tensor, threshold: tl.tensor,
    BLOCKS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """One tile of queries of one head of one sample: the output, and the log2 of each softmax's sum."""
    pair = (tl.program_id(0) // BLOCKS).to(tl.int64)
    batch, head = pair // heads, pair % heads
    rows, columns = (tl.program_id(0) % BLOCKS) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, KEYS)
    q = _load_rows(query + batch * q_batch + head * q_head, q_token, rows, tokens, DIM)
    k = _load_rows(key + batch * k_batch + head * k_head, k_token, columns, tokens, DIM)
    v = _load_rows(value + batch * v_batch + head * v_head, v_token, columns, tokens, DIM)
    scores = tl.dot(q, tl.trans(k)) * (scale * 1.4426950408889634)  # (Q, K)
    scores += _hiding(None if keys is None else keys + batch * keys_batch, keys_token, tokens, KEYS)[None, :]
    highest = tl.max(scores, 1)
    p = tl.exp2(scores - highest[:, None])
    total = tl.sum(p, 1)
    tl.store(lse + pair * tokens + rows, highest + tl.log2(total), mask=rows < tokens)
    if words is not None:
        own = words + pair * 2 * tokens
        pairs = _load_words(own, rows, tokens)[:, None] + _load_words(own + tokens, columns, tokens)[None, :]
        p = tl.where(_kept(pairs, threshold), p, 0.0)
    mixed = tl.dot(p.to(v.dtype), v) * (boost / total)[:, None]
    _store_rows(out + (batch * tokens * heads + head) * DIM, heads * DIM, rows, tokens, mixed, DIM)


@triton.jit  # type: ignore[untyped-decorator]
def backward_kernel(  # noqa: PLR0913 (a kernel has no objects to group its arguments in)
    grad: tl.tensor, query: tl.tensor, key: tl.tensor, value: tl.tensor, keys: tl.tensor, words: tl.tensor, lse: tl.tensor,
    grad_query: tl.tensor, grad_key: tl.tensor, grad_value: tl.tensor,
    g_batch: tl.tensor, g_head: tl.tensor, g_token: tl.tensor, q_batch: tl.tensor, q_head: tl.tensor, q_token: tl.tensor,
    k_batch: tl.tensor, k_head: tl.tensor, k_token: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_token: tl.tensor,
    keys_batch: tl.tensor, keys_token: tl.tensor,
    heads: tl.tensor, tokens: tl.tensor, scale: tl.tensor, boost: tl.tensor, threshold: tl.tensor,
    BLOCKS: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr, DIM: tl.constexpr,
) -> None:  # fmt: skip
    """All of one head of one sample: a program per (batch, head), a loop over tiles of queries.

    Pairs lie as (K, Q): two of the three products that probabilities enter then take them from registers.
    """
    pair = tl.program_id(0).to(tl.int64)
    batch, head = pair // heads, pair % heads
    columns = tl.arange(0, KEYS)
    k = _load_rows(key + batch * k_batch + head * k_head, k_token, columns, tokens, DIM)
    v = _load_rows(value + batch * v_batch + head * v_head, v_token, columns, tokens, DIM)
    hiding = _hiding(None if keys is None else keys + batch * keys_batch, keys_token, tokens, KEYS)[:, None]
    into = (batch * tokens * heads + head) * DIM
    dk, dv = tl.zeros((KEYS, DIM), tl.float32), tl.zeros((KEYS, DIM), tl.float32)
    for start in range(0, BLOCKS * QUERIES, QUERIES):
        rows = start + tl.arange(0, QUERIES)
        q = _load_rows(query + batch * q_batch + head * q_head, q_token, rows, tokens, DIM)
        g = _load_rows(grad + batch * g_batch + head * g_head, g_token, rows, tokens, DIM)
        sums = tl.load(lse + pair * tokens + rows, mask=rows < tokens, other=0.0)
        p = tl.exp2(tl.dot(k, tl.trans(q)) * (scale * 1.4426950408889634) + hiding - sums[None, :])  # (K, Q)
        dp, dropped = tl.dot(v, tl.trans(g)), p
        if words is not None:
            own = words + pair * 2 * tokens
            pairs = _load_words(own, rows, tokens)[None, :] + _load_words(own + tokens, columns, tokens)[:, None]
            kept = _kept(pairs, threshold)
            dp, dropped = tl.where(kept, dp * boost, 0.0), tl.where(kept, p, 0.0)
        dv += tl.dot(dropped.to(g.dtype), g)
        ds = (p * (dp - tl.sum(p * dp, 0)[None, :])).to(q.dtype)
        dk += tl.dot(ds, q)
        _store_rows(grad_query + into, heads * DIM, rows, tokens, tl.dot(tl.trans(ds), k) * scale, DIM)
    _store_rows(grad_key + into, heads * DIM, columns, tokens, dk * scale, DIM)
    _store_rows(grad_value + into, heads * DIM, columns, tokens, dv * boost, DIM)
