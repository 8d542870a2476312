"""Matrix products of half-precision factors that store and accumulate the result in fp32."""

from __future__ import annotations

import torch


def multiply(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`out = a @ b`.

    Args:
        out: (m, n), in the dtype of the factors or a wider one.
        a, b: (m, k) and (k, n) of one dtype.
    """
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.device.type == "cpu":  # no such kernel: convert the factors
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_product(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """`out += a @ b`; arguments as for `multiply`."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, out=out)
    elif a.device.type == "cpu":
        torch.addmm(out, a.to(out.dtype), b.to(out.dtype), out=out)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
