"""The product that is rounded to another dtype: kernel against twin, twin against the formula."""

from __future__ import annotations

import itertools

import torch

from bmtrain.kernels.scale import BLOCK_TO as BLOCK
from bmtrain.kernels.scale import scale_to, scale_to_by_triton
from bmtrain.torch_internals import has_no_memory, without_memory


def test_kernel_equals_twin() -> None:
    generator, factor = torch.Generator().manual_seed(0), torch.tensor(0.3)
    shapes: list[tuple[int, ...]] = [(), (1,), (BLOCK,), (17, 301), (0, 3)]
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16, torch.float16)):
        tensor = torch.randn(shape, generator=generator)
        want, got = (run(tensor, factor, dtype) for run in (scale_to, scale_to_by_triton))
        assert want.dtype == got.dtype == dtype and want.shape == got.shape == shape
        # Triton's interpreter cuts bf16 off where the device rounds.
        rtol = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
        torch.testing.assert_close(got, want, rtol=rtol, atol=0)
        assert torch.equal(want, (tensor.double() * factor.double()).float().to(dtype))
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert torch.equal(scale_to(third, third[0], torch.float64), third * third)


def test_what_is_traced_has_no_memory_for_a_kernel() -> None:
    """As the backward pass of a compiled head on a GPU, where nothing says that it compiles."""
    with without_memory():
        tensor, factor = torch.empty(6, 5, device="cuda"), torch.ones((), device="cuda")
        out = scale_to(tensor, factor, torch.bfloat16)
    assert has_no_memory(out) and not has_no_memory(torch.empty(2))
    assert (out.shape, out.dtype, out.device.type) == (tensor.shape, torch.bfloat16, "cuda")
