"""Products with a factor on the device, in place and to another dtype: kernels against twins, twins against
the formula.
"""

import itertools
import math

import pytest
import torch
from tests.tensors import by_kernel, by_torch

from bmtrain.kernels import scale
from bmtrain.kernels.scale import BLOCK_TO, scale_, scale_to
from bmtrain.torch_internals import has_no_memory, without_memory

BOUNDS = [(0, 64), (64, 64), (64, 65), (66, 399), (400, 784)]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Several chunks for each program of a short tensor."""
    monkeypatch.setattr(scale, "NUM_PROGRAMS", 3)
    monkeypatch.setattr(scale, "BLOCK", 64)


@pytest.mark.parametrize("factor", [1.0, 0.37, 0.0, math.nan])
def test_kernel_equals_twin(factor):
    """Every element of the tensors is multiplied and rounded once, none beside them is touched."""
    for names in ("float32", "float16", "bfloat16", "float32 float16"):
        dtypes, results = [getattr(torch, name) for name in names.split()], []
        for run in (by_torch, by_kernel):
            generator = torch.Generator().manual_seed(1)
            flats = [torch.randn(900, generator=generator).to(dtype) for dtype in dtypes]
            before = [(flat.clone(), flat._version) for flat in flats]
            rows = [flat[begin:end] for flat in flats for begin, end in BOUNDS]
            run(scale_, rows, torch.tensor(factor))
            for flat, (old, version) in zip(flats, before, strict=True):
                assert flat._version > version, "written unnoticed"
                assert torch.equal(flat[784:], old[784:]) and flat[65] == old[65]
            results.append(flats)
        for want, got in zip(*results, strict=True):
            # Triton's interpreter cuts off where the device rounds (tests/gpu has exact equality)
            rtol = 2.0**-7 if want.dtype == torch.bfloat16 else 0
            torch.testing.assert_close(got, want, rtol=rtol, atol=0, equal_nan=True)


def test_a_factor_of_one_changes_no_bit():
    """Not even where a product would: NaN, infinities and negative zero stay. Nothing may be given."""
    values = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1.5])
    values.view(torch.int32)[0] = 0x7F800001  # a NaN of which a product makes another one
    before = values.clone().view(torch.int32)
    by_kernel(scale_, [values], torch.tensor(1.0))
    assert torch.equal(values.view(torch.int32), before)
    for run in (by_torch, by_kernel):
        run(scale_, [], torch.tensor(0.5))
        run(scale_, [torch.empty(0)], torch.tensor(0.5))


def test_a_product_is_rounded_to_another_dtype():
    generator, factor = torch.Generator().manual_seed(0), torch.tensor(0.3)
    shapes = [(), (1,), (BLOCK_TO,), (17, 301), (0, 3)]
    for shape, dtype in itertools.product(shapes, (torch.float32, torch.bfloat16, torch.float16)):
        tensor = torch.randn(shape, generator=generator)
        want, got = (run(scale_to, tensor, factor, dtype) for run in (by_torch, by_kernel))
        assert want.dtype == got.dtype == dtype and want.shape == got.shape == shape
        # Triton's interpreter cuts bf16 off where the device rounds.
        rtol = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
        torch.testing.assert_close(got, want, rtol=rtol, atol=0)
        assert torch.equal(want, (tensor.double() * factor.double()).float().to(dtype))
    third = torch.tensor([1 / 3], dtype=torch.float64)
    assert torch.equal(scale_to(third, third[0], torch.float64), third * third)


def test_what_is_traced_has_no_memory_for_a_kernel():
    """As the backward pass of a compiled head on a GPU, where nothing says that it compiles."""
    with without_memory():
        tensor, factor = torch.empty(6, 5, device="cuda"), torch.ones((), device="cuda")
        out = scale_to(tensor, factor, torch.bfloat16)
    assert has_no_memory(out) and not has_no_memory(torch.empty(2))
    assert (out.shape, out.dtype, out.device.type) == (tensor.shape, torch.bfloat16, "cuda")
