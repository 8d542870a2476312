"""Kernels of norms and of GELU's and norms' gradients on a GPU, and layers compiled with them
beside plain PyTorch.
"""

import pytest
import torch
from tests.kernels import test_norm as norms
from tests.tensors import by_torch
from tests.unit import test_fusions as layers

from bmtrain.compile import backend, fusions
from bmtrain.kernels import norm as kernels
from bmtrain.kernels.gelu import gelu_backward
from bmtrain.kernels.norm import MOST_COLUMNS, norm_backward, norm_backward_op, norm_op

# the compiler's remarks on TF32 and on itself
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICE = "cuda"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (64, 512), (640, 3072), (1000, 3077)])
def test_gelu(shape, dtype):
    """Also where all blocks are full, so that nothing is masked."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    grad, x = (
        2 * torch.randn(shape, generator=generator, device=DEVICE).to(dtype) for _ in range(2)
    )
    got, want = gelu_backward(grad, x), by_torch(gelu_backward, grad, x)
    # One minus the logistic function is off by half an eps of 1, which its factor x u'(x), some 35
    # at x = 5, makes larger.
    room = (
        torch.finfo(dtype).eps * want[0].double().abs()
        + 20 * torch.finfo(torch.float32).eps * grad.double().abs()
    )
    assert ((got[0].double() - want[0].double()).abs() <= room).all()
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-3 + 8 * torch.finfo(dtype).eps)
    assert all(
        torch.equal(one, other) for one, other in zip(got, gelu_backward(grad, x), strict=True)
    ), "other bits each time"


CASES = [
    *norms.CASES,
    {"num_grads": 3, "num_inputs": 1, "centered": True, "residual": True, "rows": 3000, "n": 768},
    {"num_grads": 2, "num_inputs": 2, "centered": False, "residual": True, "rows": 300, "n": 4096},
    {"num_grads": 1, "num_inputs": 2, "centered": True, "residual": True, "rows": 300, "n": 5120},
    {
        "num_grads": 3,
        "num_inputs": 2,
        "centered": True,
        "residual": True,
        "rows": 7,
        "n": MOST_COLUMNS,
    },
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_norms(case, dtype):
    """As many rows ahead as shared memory holds, down to none for the widest in fp32."""
    arguments = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(DEVICE), norms.Case(dtype, **case).arguments
    )
    got, want = norm_backward_op(*arguments), by_torch(norm_backward, *arguments)
    torch.testing.assert_close(got[0], want[0], rtol=torch.finfo(dtype).eps, atol=2e-5)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-3)  # of numbers in fp32
    residual = arguments[5]
    # of its own numbers, rounded as they are
    columns = [tensor for tensor in (got[0], residual) if tensor is not None]
    own = kernels._sums([kernels._rows(tensor, case["n"]) for tensor in columns], case["n"])
    torch.testing.assert_close(got[2], own, rtol=1e-4, atol=1e-3)
    assert all(
        torch.equal(one, other)
        for one, other in zip(got, norm_backward_op(*arguments), strict=True)
    ), "other bits each time"


FORWARD = [
    *norms.FORWARD,
    {"num_inputs": 2, "centered": True, "has_bias": True, "rows": 3000, "n": 5120},
    {"num_inputs": 1, "centered": False, "has_bias": False, "rows": 40000, "n": 1025},
    {"num_inputs": 2, "centered": True, "has_bias": True, "rows": 70, "n": MOST_COLUMNS},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FORWARD, ids=str)
def test_forward_of_norms(case, dtype):
    """Beside plain PyTorch in fp64, the sum of two inputs bit for bit."""
    arguments = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda x: x.to(DEVICE), norms.forward_arguments(dtype, **case)
    )
    got = norm_op(*arguments)
    norms.check_norm(arguments, got)
    assert all(
        torch.equal(one, other) for one, other in zip(got, norm_op(*arguments), strict=True)
    ), "other bits each time"


@pytest.mark.parametrize("narrow", [0, 1024])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("norm", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_layers(norm, dtype, narrow, monkeypatch):
    """With norms as for long rows, whose sums join, and as for short ones, which the compiler
    makes.
    """
    monkeypatch.setattr(fusions, "NARROW", narrow)
    torch._dynamo.reset()
    torch.manual_seed(0)
    module, x = (
        layers.PreNorm(norm).to(DEVICE, dtype),
        torch.randn(40, 8, layers.N, device=DEVICE, dtype=dtype),
    )
    name = "layer_norm" if norm is torch.nn.LayerNorm else "rms_norm"
    assert layers.equal_to_plain(module, x) == sorted([name, name, "linear_gelu"])


def test_masks_of_attention():
    """Each in a graph of its own, as in a model of transformers that is traced whole."""
    torch.manual_seed(0)
    x = layers.X.to(DEVICE, torch.bfloat16)
    for mask in layers.MASKS:
        torch._dynamo.reset()
        module = layers.Attending(mask).to(DEVICE, torch.bfloat16)
        run = torch.compile(module, backend=backend.inductor)
        layers.check_against_plain(run, module, x)
