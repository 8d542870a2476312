"""A program that compiles kernels of generation for a GPU (sm_90), which is not needed for it.

Triton's interpreter takes what its compiler does not: variables of loops that change their shape,
for example.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
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
    """A kernel that is compiled for the arguments of each launch, as Triton specialises for them,
    in place of being launched.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
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
    reach = torch.zeros(2, 2, dtype=torch.int64)
    new = cached_attention.NewToken(
        key=key[:, :2],
        value=value[:, :2],
        place=reach[0, :1],
        cos=torch.ones(2, dim // 2),
        sin=torch.ones(2, dim // 2),
    )
    cached_attention.cached_attention_by_triton(query, keys, values, reach, 0.5)
    cached_attention.cached_attention_by_triton(query, keys, values, reach, 0.5, new)


def multiply(dtype: torch.dtype) -> None:
    """With nothing around it, a norm and a gate, a bias and a residual."""
    x = torch.ones(2048, dtype=dtype)
    weight, bias = torch.ones(32, 2048, dtype=dtype), torch.ones(32, dtype=dtype)
    for case in (
        RowProducts(x=x, weights=[weight] * 3, biases=[None] * 3),
        RowProducts(x=x, weights=[weight] * 2, biases=[None] * 2, norm=x, eps=1e-5, act="silu"),
        RowProducts(x=x, weights=[weight], biases=[bias], act="gelu", residual=bias),
    ):
        row_products.row_products_by_triton(case)


def rest(dtype: torch.dtype) -> None:
    """The smaller kernels."""
    heads, keys = torch.ones(2, 3, 4, 16, dtype=dtype), torch.ones(2, 3, 20, 16, dtype=dtype)
    angles, place = torch.ones(4, 8), torch.zeros(1, dtype=torch.int64)
    largest.largest_by_triton(torch.ones(1, 128256, dtype=dtype))
    rotary.rotate_by_triton(heads, heads, angles, angles, False)
    gated.gated_by_triton(heads, heads, "silu")
    cached_attention.store_tokens_by_triton(keys, keys, heads[:, :, :1], heads[:, :, :1], place)


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """Inside, kernels are compiled where they would be launched."""
    attention = {
        name: Compiled(kernel)
        for name, kernel in vars(cached_attention_triton).items()
        if name.endswith("kernel")
    }
    of_parts = Compiled(largest_triton.largest_of_parts_kernel)
    of_rows = Compiled(largest_triton.largest_of_rows_kernel)
    products = Compiled(row_products_triton.row_products_kernel)
    places = (
        (cached_attention, "_triton", types.SimpleNamespace(**attention)),
        (largest, "_triton_kernels", (of_parts, of_rows)),
        (row_products, "_triton_kernel", products),
        (rotary, "_triton_kernel", Compiled(rotary_triton.rotate_kernel)),
        (gated, "_triton_kernel", Compiled(gated_triton.gated_kernel)),
    )
    with contextlib.ExitStack() as stack:
        for module, name, kernels in places:
            stack.enter_context(mock.patch.object(module, name, mock.Mock(return_value=kernels)))
        yield


def main() -> None:
    """Compile all of them, with the largest blocks that there are."""
    with compiling():
        attend(torch.bfloat16, 384, 64)
        attend(torch.float32, 5000, 256)
        for dtype in (torch.bfloat16, torch.float32):
            multiply(dtype)
        rest(torch.bfloat16)


if __name__ == "__main__":
    main()
