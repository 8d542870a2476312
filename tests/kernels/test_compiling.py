"""Kernels are compiled for a GPU (sm_90), without one: `python -m tests.kernels.test_compiling`.

Triton's interpreter takes what its compiler does not: variables of loops that change their shape, for
example.
"""

import os
import pathlib
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from tests.tensors import by_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from bmtrain.kernels import adam, fp8, gelu, norm, scale, squares, sum_parts
from bmtrain.kernels import cross_entropy as losses
from bmtrain.kernels.blockwise import Blocks
from model_center.kernels import cached_attention, gated, largest, rotary, row_products
from model_center.kernels.row_products import RowProducts

OF_GENERATION = "cached_attention joined_parts store_tokens largest_of_parts largest_of_rows rotate gated row_products"
OF_TRAINING = "adamw scale scale_to squares sum_parts gelu_backward transpose norm norm_backward row_sums row_gradient"
TARGET = GPUTarget("cuda", 90, 32)
SHARED = 227 * 1024  # bytes that a program may have there
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float64: "fp64",
}
TYPES |= {torch.int64: "i64", torch.int32: "i32", torch.int8: "i8", torch.uint8: "u8"}
TYPES |= {torch.float8_e4m3fn: "fp8e4nv"}


def compiled(kernel, *args, num_warps=4, **given):
    """Compile a kernel for the arguments of a launch, as Triton specialises for them, in place of it."""
    given |= dict(zip(kernel.arg_names, args, strict=False))
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for place, name in enumerate(kernel.arg_names):
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
    source = ASTSource(kernel, signature, constants, attributes)
    made = triton.compile(source, target=TARGET, options={"num_warps": num_warps})
    assert made.metadata.shared <= SHARED, (kernel.__name__, constants)
    print(kernel.__name__, made.metadata.shared)


def attend(dtype, capacity, dim):
    """A token that is there, and one that is added with rotary positions."""
    query, key, value = torch.ones(3, 2, 8, dim, dtype=dtype)
    keys, values = torch.ones(2, 2, 2, capacity, dim, dtype=dtype)
    reach, angles = torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, dim // 2)
    vectors: Any = {"key": key[:, :2], "value": value[:, :2], "cos": angles, "sin": angles}
    new = cached_attention.NewToken(place=reach[0, :1], **vectors)
    for token in (None, new):
        cached_attention.cached_attention_by_triton(query, keys, values, reach, 0.5, token)


def multiply(dtype):
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


def generate(dtype):
    """The smaller kernels of generation."""
    heads, keys = torch.ones(2, 3, 4, 16, dtype=dtype), torch.ones(2, 3, 20, 16, dtype=dtype)
    angles, new = torch.ones(4, 8), heads[:, :, :1]
    largest.largest_by_triton(torch.ones(1, 128256, dtype=dtype))
    rotary.rotate_by_triton(heads, heads, angles, angles, False)
    gated.gated_by_triton(heads, heads, "silu")
    cached_attention.store_tokens_by_triton(keys, keys, new, new, torch.zeros(1).long())


def train(dtype):
    """Those of training: optimizers, norms, losses, sums."""
    x, wide = torch.ones(64, 4096, dtype=dtype), torch.ones(64, 4096)
    flat, of_flat = x.flatten(), wide.flatten()
    settings = adam.AdamSettings(lr=0.1, beta1=0.9, beta2=0.95, eps=1e-6, weight_decay=0.1, step=2)
    verdict = torch.ones((), dtype=torch.float64)
    blocks = [Blocks(flat.to(kind), of_flat[:4096]) for kind in (torch.int8, torch.uint8)]
    masters: Any = {of_flat: [of_flat] * 2, None: blocks, flat.short(): [of_flat] * 2}
    for master, moments in masters.items():
        adam.adamw_triton([adam.AdamTensors(flat, flat, master, *moments)], settings, verdict)
    by_kernel(scale.scale_, [flat], verdict.float())
    by_kernel(scale.scale_to, wide, verdict.float(), dtype)
    by_kernel(squares.sum_of_squares, [flat], flat.device)
    by_kernel(sum_parts.sum_parts, flat, flat.expand(2, -1), accumulate=True)
    by_kernel(gelu.gelu_backward, x, x)
    by_kernel(fp8.transposed, x, verdict.float())
    by_kernel(fp8.transposed, x.to(torch.float8_e4m3fn))
    for center, bias in ((None, None), (wide[:, :1], x[0])):
        by_kernel(norm.norm, [x, x], x[0], bias, 1e-5, center is not None)
        terms = [x, x], [x], x[0], center, wide[:, :1], x, center is None, True
        by_kernel(norm.norm_backward, *terms)
    for logits in (x, wide.double()):
        sums: losses.RowSums = by_kernel(losses.row_sums, logits, None, smoothed=False)
        factors = losses.RowFactors(*sums, torch.zeros(64).long())
        by_kernel(losses.row_gradient, logits, sums, factors, None, smoothed=False)


@mock.patch.object(JITFunction, "run", compiled)
def main():
    """Compile all of them, with the largest blocks that there are."""
    attend(torch.bfloat16, 384, 64)
    attend(torch.float32, 5000, 256)
    for dtype in (torch.bfloat16, torch.float32):
        multiply(dtype)
    generate(torch.bfloat16)
    train(torch.bfloat16)


@pytest.mark.long
@pytest.mark.compiler
def test_kernels_are_compiled(tmp_path):
    """In a process without the interpreter, which this one has."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-W", "ignore", "-m", "tests.kernels.test_compiling"]
    root = pathlib.Path(__file__).parents[2]
    done = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = {line.split("_kernel ")[0] for line in done.stdout.splitlines()}
    assert found == {*OF_GENERATION.split(), *OF_TRAINING.split()}


if __name__ == "__main__":
    main()
