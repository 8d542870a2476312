"""Language models on real GPUs: the kernels that attention chooses there, and what tests/ranks runs
on the CPU, over NCCL.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.gpu.test_programs import run_compiled_on_gpus, run_on_gpus
from tests.models import parity
from tests.ranks import test_generation, test_model_center

import bmtrain as bmt
from model_center.generation.engine import generate
from model_center.layer.dense_attention import Attention
from model_center.layer.mask import AttentionMask
from model_center.layer.scaled_dot_product import attend, attend_visibly
from model_center.model.base import BaseModel

pytestmark = pytest.mark.gpu
SIZES = [size for size in (1, 2, 4) if size <= torch.cuda.device_count()]
BATCH, HEADS, TOKENS, DIM = 3, 4, 96, 64


def keys_of(side: str) -> torch.Tensor:
    """Valid keys (BATCH, TOKENS): all, half of them, none in the last row."""
    valid = torch.ones(BATCH, TOKENS, dtype=torch.bool, device="cuda")
    valid[1, : TOKENS // 2] = False
    valid[2] = False
    return valid.flip(1) if side == "right" else valid


MASKS: dict[str, Callable[[], AttentionMask]] = {
    "none": AttentionMask,
    "causal": lambda: AttentionMask(causal=True),
    "window": lambda: AttentionMask(causal=True, window=17),
    "keys": lambda: AttentionMask(keys=keys_of("right")),
    "causal, right": lambda: AttentionMask(causal=True, keys=keys_of("right")),
    "causal, left": lambda: AttentionMask(causal=True, keys=keys_of("left")),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("key_heads", [HEADS, 2])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_kernels_compute_what_the_formula_says(
    name: str, biased: bool, key_heads: int, dtype: torch.dtype
) -> None:
    """Values and gradients, also where a row sees nothing: finite, and right to the precision of
    the dtype.
    """
    torch.manual_seed(0)
    shapes = [
        (BATCH, HEADS, TOKENS, DIM),
        (BATCH, key_heads, TOKENS, DIM),
        (BATCH, key_heads, TOKENS, DIM),
    ]
    wide = [torch.randn(shape, device="cuda", requires_grad=True) for shape in shapes]
    if biased:
        wide.append(torch.randn(1, HEADS, TOKENS, TOKENS, device="cuda", requires_grad=True))
    narrow = [x.detach().to(dtype).requires_grad_() for x in wide]
    mask, towards = MASKS[name](), torch.randn(shapes[0], device="cuda")

    def arguments(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        return (*tensors[:3], mask, *tensors[3:])

    expected, _ = attend_visibly(*arguments(wide))
    found = attend(*arguments(narrow))
    (expected * towards).sum().backward()
    (found.float() * towards).sum().backward()
    pairs = [
        (found, expected),
        *((one.grad, other.grad) for one, other in zip(narrow, wide, strict=True)),
    ]
    for one, other in pairs:
        assert one is not None and other is not None and bool(torch.isfinite(one).all())
        error, eps = one.float() - other, torch.finfo(dtype).eps
        assert error.norm() <= 2 * eps * other.norm()
        assert error.abs().max() <= 4 * eps * other.abs().max()


def test_no_mask_is_made_where_causality_says_it_all() -> None:
    """8192 tokens in one long row: all pairs would be 64 MiB a head."""
    with torch.device("cuda"):
        layer = Attention(256, 64, 4, dtype=torch.bfloat16)
        x = torch.randn(1, 8192, 256, dtype=torch.bfloat16)
    mask = AttentionMask(causal=True)
    # makes what is made once: gradients, workspaces of the matrix library
    layer(x[:, :8], x[:, :8], mask).sum().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer(x, x, mask).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 60 * 2**20


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", test_model_center.CLASSES)
def test_training(
    name: str, size: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharded over GPUs, compiled, in every mode, as one process on the CPU: scores, gradients,
    parameters after some steps.
    """
    monkeypatch.setattr(test_model_center, "run_ranks", run_compiled_on_gpus)
    test_model_center.test_training(name, size, tmp_path)


def searched(model: BaseModel, rank: int) -> list[Any]:
    """Tokens of the searches that draw nothing: devices draw differently."""
    ids, mask = (x.to(next(model.parameters()).device) for x in test_generation.prompts(rank))
    options = test_generation.WORK[rank][2]
    return [
        generate(model, ids, mask, **options, **search).rows()
        for search in test_generation.SEARCHES[:2]
    ]


def searched_on_its_gpu(folder: pathlib.Path, name: str) -> list[Any]:
    return searched(test_generation.made(folder, name), bmt.rank())


@pytest.mark.parametrize("size", [size for size in SIZES if size <= len(test_generation.WORK)])
@pytest.mark.parametrize("name", test_generation.CLASSES)
def test_generation_on_gpus(size: int, name: str, tmp_path: pathlib.Path) -> None:
    """Ranks with other prompts, lengths and ends get what one process on the CPU gets."""
    torch.manual_seed(0)
    model_class = test_generation.CLASSES[name]
    sizes = {
        **test_generation.SIZES,
        **({"num_layers": 3, "position_size": 20} if name == "gpt2" else {}),
    }
    alone = parity.randomized(model_class(model_class._CONFIG_TYPE(**sizes)), std=0.3)
    alone.save_pretrained(tmp_path / name, format="model_center")
    found = run_on_gpus(searched_on_its_gpu, size, tmp_path, name)
    assert found == [searched(alone, rank) for rank in range(size)]
