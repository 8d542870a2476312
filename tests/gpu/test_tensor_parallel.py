"""Tensor-parallel layers and loss on real GPUs over NCCL, one rank per GPU."""

import warnings

import pytest
import torch
from tests.ranks import test_tensor_parallel as layers
from tests.ranks.runner import run_ranks

import bmtrain as bmt

pytestmark = pytest.mark.gpu
# ranks, tp_size
MESHES = [mesh for mesh in [(1, 1), (2, 2), (4, 4), (4, 2)] if mesh[0] <= torch.cuda.device_count()]


@pytest.mark.parametrize(("ranks", "tp_size"), MESHES)
@pytest.mark.parametrize("program", [layers.columns, layers.rows, layers.embeddings, layers.blocks])
def test_layers(program, ranks, tp_size):
    """The values and gradients of one process on the CPU."""
    run_ranks(program, ranks, device=None, timeout=300, init={"tp_size": tp_size})


def compiled_quietly(level, recompute):
    # the compiler's own use of what torch has deprecated
    warnings.filterwarnings("ignore", module=r"torch\.")
    layers.compiled("inductor", level, recompute)


@pytest.mark.parametrize(("ranks", "tp_size"), MESHES[1:])
@pytest.mark.parametrize(("level", "recompute"), [(2, False), (3, False), (3, True)])
def test_compiled_blocks(level, recompute, ranks, tp_size):
    """The operations inside code that the compiler has made."""
    run_ranks(
        compiled_quietly,
        ranks,
        level,
        recompute,
        device=None,
        timeout=300,
        init={"tp_size": tp_size},
    )


def by_default_quietly():
    warnings.filterwarnings("ignore", module=r"torch\.")
    split = layers.Branches(bmt.nn.ColumnParallelLinear, bmt.nn.RowParallelLinear)
    block = layers.started(bmt.Block(split))
    for number in range(3):
        block.zero_grad()
        values = {name: value.clone() for name, value in block.state_dict().items()}
        given = layers.rows_of_all(4, 3, layers.IN)
        layers.check(block, given, layers.branches, f"pass {number}")
        block.load_state_dict(values)
    assert not block._runner._is_refused and block._runner._programs


@pytest.mark.parametrize(("ranks", "tp_size"), MESHES[1:])
def test_compiles_by_default(ranks, tp_size):
    """Without a word, by the compiler itself."""
    run_ranks(by_default_quietly, ranks, device=None, timeout=300, init={"tp_size": tp_size})


@pytest.mark.parametrize(("ranks", "tp_size"), MESHES[1:])
def test_memory_is_held_while_it_travels(ranks, tp_size):
    """Large enough that rows are under way while others are multiplied, and memory comes and goes
    between.
    """
    run_ranks(
        layers.churning, ranks, 20, 8192, 2048, device=None, timeout=300, init={"tp_size": tp_size}
    )
