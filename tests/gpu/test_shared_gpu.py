"""Two ranks on one GPU, for machines that have only one.

Streams, kernels and memory are the GPU's. Collectives go through the host over Gloo, because NCCL
wants a GPU for each rank; they read and write on the stream that they are issued on, as NCCL's do,
so that a missing wait of the engine gives other numbers here too.
"""

import contextlib
import functools
import warnings
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tests.gpu import test_engine, test_recompute
from tests.gpu.test_programs import drawn_on_the_cpu, on_its_gpu, with_its_data
from tests.ranks import test_idioms, test_whole_parameters
from tests.ranks.runner import run_ranks

import bmtrain as bmt
from bmtrain.distributed import collectives, transport
from bmtrain.runtime import world

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() > 1, reason="two GPUs run these over NCCL"),
]


def to_the_device(out, values):
    """Copy in the order of the current stream, without waiting for it."""
    values = values.to(out.dtype).view(out.shape)
    out.copy_(values.pin_memory() if out.is_cuda else values, non_blocking=True)


def all_gather_flat(out, x, group=None):
    parts = torch.empty(out.shape, dtype=out.dtype, device="cpu").chunk(dist.get_world_size(group))
    dist.all_gather(list(parts), x.cpu(), group=group)
    to_the_device(out, torch.cat(parts))


def reduce_scatter_flat(out, x, op=dist.ReduceOp.SUM, group=None):
    total = x.cpu().to(torch.promote_types(x.dtype, torch.float32))
    dist.all_reduce(total, op=op, group=group)
    to_the_device(out, total.chunk(dist.get_world_size(group))[dist.get_rank(group)])


def gather_shards(fulls, shards, axis):
    """One after another: torch crashes where Gloo gathers several tensors of a GPU at once."""
    for full, shard in zip(fulls, shards, strict=True):
        all_gather_flat(full, shard, group=axis.communicators.gather)


def reduce_shards(shards, fulls, axis):
    for shard, full in zip(shards, fulls, strict=True):
        reduce_scatter_flat(shard, full, group=axis.communicators.reduce)


def sharing(program, *args):
    """The program on the one GPU."""
    start = dist.init_process_group
    with contextlib.ExitStack() as patches:
        for target, name, new in [
            (world, "_pick_device", lambda local_rank, wanted: torch.device("cuda", 0)),
            (world, "_gpu_name", lambda chosen: ""),
            (
                dist,
                "init_process_group",
                lambda _, **options: start("cpu:gloo,cuda:gloo", **options),
            ),
            *(
                (module, function.__name__, function)
                for module, function in [
                    (collectives, all_gather_flat),
                    (collectives, reduce_scatter_flat),
                    (transport, gather_shards),
                    (transport, reduce_shards),
                ]
            ),
        ]:
            patches.enter_context(mock.patch.object(target, name, new))
        bmt.init_distributed(transport="collective")
        warnings.filterwarnings("ignore", module=r"torch\.")  # the compiler's
        return program(*args)


def share(program, *args):
    run_ranks(functools.partial(sharing, program), 2, *args, device=None, timeout=300, join=False)


@pytest.mark.parametrize(
    "program",
    [test_engine.compare_odd, test_engine.compare_compiled, test_recompute.compare_levels],
)
def test_the_engine(program):
    share(program)


@pytest.mark.parametrize("program", [*test_whole_parameters.PROGRAMS, test_idioms.all_idioms])
def test_parameters_look_whole(program):
    share(on_its_gpu, functools.partial(drawn_on_the_cpu, with_its_data), program)
