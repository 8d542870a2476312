"""Tensor and pipeline parallelism on real GPUs over NCCL, one rank per GPU, against plain PyTorch
in one process on the CPU.
"""

import warnings

import pytest
import torch
from tests.ranks import test_pipeline as pipeline
from tests.ranks import test_placement as placement
from tests.ranks.runner import run_ranks

pytestmark = pytest.mark.gpu


def grids():
    """(ranks, stages, tensor ranks): all ways to use 1, 2 or 4 GPUs."""
    sizes = [(1, 1, 1), (2, 2, 1), (2, 1, 2), (4, 4, 1), (4, 2, 1), (4, 1, 2), (4, 1, 4), (4, 2, 2)]
    return [
        size
        for size in sizes
        if size[0] == max(n for n in (1, 2, 4) if n <= max(1, torch.cuda.device_count()))
    ]


def on_gpus(fn, ranks, *args, init):
    return run_ranks(fn, ranks, *args, device=None, timeout=300, init=init)


@pytest.mark.parametrize(("ranks", "stages", "tp"), grids())
def test_pipelines_train_as_one_process(ranks, stages, tp, tmp_path):
    expected = pipeline.plain(ranks)
    for use_checkpoint, micro_batches in ((True, stages), (False, 2 * stages)):
        init = {"pipe_size": stages, "tp_size": tp, "num_micro_batches": micro_batches}
        results = on_gpus(
            pipeline.train, ranks, use_checkpoint, str(tmp_path / "model.pt"), True, init=init
        )
        pipeline.check(results, *expected)


def gathers_by_itself(*args):
    """A block that calls `all_gather` of bmtrain.distributed says that it runs uncompiled."""
    warnings.filterwarnings("ignore", message=".*it communicates by")
    return placement.run(*args)


@pytest.mark.parametrize(("ranks", "stages", "tp"), [size for size in grids() if size[1] == 1])
@pytest.mark.parametrize("zero_level", [3, 2, None])
def test_split_parameters_train_as_whole_ones(ranks, stages, tp, zero_level, tmp_path):
    norms, params, _ = placement.plain_run(placement.STEPS)
    for result in on_gpus(gathers_by_itself, ranks, zero_level, tmp_path, init={"tp_size": tp}):
        placement.close(result["trained"], (norms, params))
