"""A program that compiles kernels of generation for a GPU (sm_90), which is not needed for it.

Triton's interpreter takes what its compiler does not: variables of loops that change their shape, for
example.
"""

from __future__ import annotations

import types
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bmtrain.kernels import (
    cached_attention,
    cached_attention_triton,
    gated,
    gated_triton,
    largest,
    largest_triton,
    rotary,
    rotary_triton,
    row_products,
    row_products_triton,
)
from bmtrain.kernels.row_products import RowProducts

TARGET = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes that a program may have there
TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64"}


class Compiled:
    """A kernel that is compiled for the arguments of each launch, as Triton specialises for them, in
    place of being launched.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return self.compile

    def compile(self, *args: Any, num_warps: int, **kwargs: Any) -> None:
        names = self.kernel.arg_names
        given = dict(zip(names, args, strict=False)) | kwargs
        signature: dict[str, str] = {}
        constants: dict[str, Any] = {}
        attributes: dict[tuple[int], Any] = {}
        for place, name in enumerate(names):
            value = given[name]
            if isinstance(value, torch.Tensor):
                signature[name] = "*" + TYPES[value.dtype]
            elif isinstance(value, float) and not name.isupper():
                signature[name] = "fp32"
            elif name.isupper() or value is None or value == 1:
                signature[name], constants[name] = "constexpr", value
            else:
                signature[name] = "i32"
            is_number = signature[name] == "i32"
            if isinstance(value, torch.Tensor) or (is_number and value % 16 == 0):
                attributes[place,] = [["tt.divisibility", 16]]
        source = ASTSource(self.kernel, signature, constants, attributes)
        made = triton.compile(source, target=TARGET, options={"num_warps": num_warps})
        assert made.metadata.shared <= SHARED, (self.kernel.__name__, constants)
        print(self.kernel.__name__, made.metadata.shared)


def attend(dtype: torch.dtype, capacity: int, dim: int) -> None:
    """A token that is there, and one that is added with rotary positions."""
    query, key, value = torch.ones(3, 2, 8, dim, dtype=dtype)
    keys, values = torch.ones(2, 2, 2, capacity, dim, dtype=dtype)
    reach, angles = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, dim // 2)
    vectors: Any = {"key": key[:, :2], "value": value[:, :2], "cos": angles, "sin": angles}
    new = cached_attention.NewToken(place=reach[0, :1], **vectors)
    for token in (None, new):
        cached_attention.cached_attention_by_triton(query, keys, values, reach, 0.5, token)


def multiply(dtype: torch.dtype) -> None:
    """With nothing around it, a norm and a gate, a bias and a residual."""
    x, bias = torch.ones(2048, dtype=dtype), torch.ones(32, dtype=dtype)
    cases: list[dict[str, Any]] = [
        {"biases": [None] * 3},
        {"biases": [None] * 2, "norm": x, "eps": 1e-5, "act": "silu"},
        {"biases": [bias], "act": "gelu", "residual": bias},
    ]
    for case in cases:
        weights = [torch.ones(32, 2048, dtype=dtype)] * len(case["biases"])
        row_products.row_products_by_triton(RowProducts(x=x, weights=weights, **case))


def rest(dtype: torch.dtype) -> None:
    """The smaller kernels."""
    heads, keys = torch.ones(2, 3, 4, 16, dtype=dtype), torch.ones(2, 3, 20, 16, dtype=dtype)
    angles, new = torch.ones(4, 8), heads[:, :, :1]
    largest.largest_by_triton(torch.ones(1, 128256, dtype=dtype))
    rotary.rotate_by_triton(heads, heads, angles, angles, False)
    gated.gated_by_triton(heads, heads, "silu")
    cached_attention.store_tokens_by_triton(keys, keys, new, new, torch.zeros(1).long())


def put_in(module: Any, name: str, *kernels: Any) -> None:
    """Kernels are compiled where they would be launched, in this process."""
    found = tuple(map(Compiled, kernels))
    setattr(module, name, mock.Mock(return_value=found if len(found) > 1 else found[0]))


def main() -> None:
    """Compile all of them, with the largest blocks that there are."""
    parts = (largest_triton.largest_of_parts_kernel, largest_triton.largest_of_rows_kernel)
    put_in(largest, "_triton_kernels", *parts)
    put_in(row_products, "_triton_kernel", row_products_triton.row_products_kernel)
    put_in(rotary, "_triton_kernel", rotary_triton.rotate_kernel)
    put_in(gated, "_triton_kernel", gated_triton.gated_kernel)
    attention = vars(cached_attention_triton).items()
    kernels = {name: Compiled(kernel) for name, kernel in attention if name.endswith("kernel")}
    of_attention = types.SimpleNamespace(**kernels)
    cached_attention._triton = mock.Mock(return_value=of_attention)
    attend(torch.bfloat16, 384, 64)
    attend(torch.float32, 5000, 256)
    for dtype in (torch.bfloat16, torch.float32):
        multiply(dtype)
    rest(torch.bfloat16)


if __name__ == "__main__":
    main()
