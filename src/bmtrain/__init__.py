"""Sharded training of big transformers with the code of a single-GPU program: the public names.

Start with `init_distributed()`, wrap transformer layers in `Block` (or a whole model in
`BMTrainModelWrapper`), train with `optim.OptimManager`, keep with `save` and `load`.
"""

from bmtrain import benchmark, compat, distributed, inspect, loss, lr_scheduler, nn, optim, utils
from bmtrain.block.block import Block, CheckpointBlock
from bmtrain.block.cuda_graph import cuda_graph
from bmtrain.block.stack import TransformerBlockList
from bmtrain.block.wrapper import BMTrainModelWrapper, init_parameters
from bmtrain.checkpoint import CheckpointManager, load, save
from bmtrain.distributed import nccl
from bmtrain.distributed.results import sum_loss, synchronize, wait_loader
from bmtrain.optim import optim_step
from bmtrain.parallel.pipeline import PipelineTransformerBlockList
from bmtrain.runtime.config import config
from bmtrain.runtime.log import print_rank
from bmtrain.runtime.world import (
    device,
    init_distributed,
    is_initialized,
    rank,
    shutdown,
    unwatched,
    world_size,
)
from bmtrain.shard.listing import grouped_parameters
from bmtrain.shard.module import DistributedModule
from bmtrain.shard.parameter import DistributedParameter, ParameterInitializer
from bmtrain.shard.whole import gather_result
from bmtrain.torch_internals import leave_untraced
from bmtrain.utils import print_block, print_dict, see_memory
from bmtrain.verification import verify
from bmtrain.version import __version__

__all__ = [
    "BMTrainModelWrapper",
    "Block",
    "CheckpointBlock",
    "CheckpointManager",
    "DistributedModule",
    "DistributedParameter",
    "ParameterInitializer",
    "PipelineTransformerBlockList",
    "TransformerBlockList",
    "__version__",
    "benchmark",
    "config",
    "cuda_graph",
    "device",
    "distributed",
    "gather_result",
    "grouped_parameters",
    "init_distributed",
    "init_parameters",
    "inspect",
    "is_initialized",
    "load",
    "loss",
    "lr_scheduler",
    "nccl",
    "nn",
    "optim",
    "optim_step",
    "print_block",
    "print_dict",
    "print_rank",
    "rank",
    "save",
    "see_memory",
    "shutdown",
    "sum_loss",
    "synchronize",
    "unwatched",
    "utils",
    "wait_loader",
    "verify",
    "world_size",
]

compat.make_importable()
_ENGINE = tuple(f"bmtrain.{x}." for x in ("shard", "block", "recompute", "optim", "checkpoint"))
leave_untraced(_ENGINE, in_graphs=("bmtrain.block.", "bmtrain.shard.module"))
