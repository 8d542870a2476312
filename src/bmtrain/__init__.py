"""Sharded training of big transformers with the code of a single-GPU program."""
from bmtrain import optim
from bmtrain.runtime.world import init_distributed, rank, world_size, device, is_initialized
from bmtrain.runtime.log import print_rank, see_memory
from bmtrain.shard.parameter import DistributedParameter, ParameterInitializer, grouped_parameters
from bmtrain.shard.module import DistributedModule
from bmtrain.block.block import Block, CheckpointBlock
from bmtrain.block.stack import TransformerBlockList
from bmtrain.block.wrapper import BMTrainModelWrapper, init_parameters
from bmtrain import lr_scheduler, loss
from bmtrain.optim import optim_step
