"""BMTrain's import paths, `from bmtrain.block_layer import Block` for example.

`NAMES` says where the names of each path are defined now, `REMOVED` what to use instead of those
that are no more. A module of the library that has an old path (`bmtrain.utils`,
`bmtrain.optim.adam`, `bmtrain.nn.linear`) has the old names itself.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import sys
import types
from typing import Any, NoReturn

from bmtrain.compat.functions import CheckpointPackage, Removed
from bmtrain.errors import MissingNameError
from bmtrain.runtime.arguments import unknown

# An old module, where its names are now, and these; `old=new` where they are called otherwise. All
# is below `bmtrain`.
NAMES = """
backward                  optim                 optim_step
benchmark.all_gather      benchmark             all_gather
benchmark.reduce_scatter  benchmark             reduce_scatter
benchmark.send_recv       benchmark             send_recv
benchmark.shape           compat.functions      SHAPES
benchmark.utils           benchmark             format_size
block_layer               block.block           Block
block_layer               distributed.results   wait_loader
block_layer               block.stack           TransformerBlockList
block_layer               compat.functions      OpAllGather=OpGather CheckpointBlock
block_layer               utils                 round_up tp_split_tensor
checkpointing             compat.functions      checkpoint
debug                     compat.functions      DEBUG_VARS clear=debug_clear set=debug_set
debug                     compat.functions      get=debug_get append=debug_append
debug                     compat.functions      extend=debug_extend
distributed.ops           distributed.autograd  all_gather all_reduce broadcast reduce_scatter
distributed.ops           distributed.autograd  recv_activations send_activations
distributed.ops           distributed.nccl      NCCLCommunicator commCount commRank recv
distributed.ops           distributed.nccl      ncclSend=send ncclRecv=recv ncclAllGather=allGather
distributed.ops           distributed.nccl      ncclAllReduce=allReduce ncclBroadcast=broadcast
distributed.ops           distributed.nccl      ncclReduceScatter=reduceScatter
distributed.ops           compat.functions      OpAllGather OpAllReduce OpBroadcast
distributed.ops           compat.functions      OpReduceScatter DTYPE_LIST
global_var                runtime.config        ConfigMap=Config config
global_var                runtime.world         rank world_size
init                      runtime.topology      topology=Topology
init                      runtime.world         init_distributed is_initialized
inspect.format            inspect.statistics    format_summary
inspect.model             inspect.parameters    inspect_model inspect_block=inspect_model
inspect.model             inspect.parameters    inspect_checkpoint_block=inspect_model
inspect.model             inspect.parameters   inspect_pipeline_transformer_block_list=inspect_model
inspect.tensor            inspect.tensors       InspectTensor=Inspector inspect_tensor
inspect.tensor            inspect.tensors       record_tensor
inspect.tensor            inspect.tensors       InspectTensorManager=inspect_tensor
init                      utils                 print_dict
optim.optim_manager       lr_scheduler          WarmupLRScheduler
optim.adam_offload        utils                 check_torch_version
optim.optim_manager       utils                 print_rank
layer                     shard.module          DistributedModule
layer                     shard.parameter       DistributedParameter
loss._function            compat.functions      has_inf_nan
lr_scheduler.cosine       lr_scheduler          Cosine
lr_scheduler.exponential  lr_scheduler          Exponential
lr_scheduler.linear       lr_scheduler          Linear
lr_scheduler.no_decay     lr_scheduler          NoDecay
lr_scheduler.noam         lr_scheduler          Noam
lr_scheduler.warmup       lr_scheduler          WarmupLRScheduler
nn.column_parallel_linear nn.parallel_linear    ColumnParallelLinear
nn.parallel_embedding     nn.embedding          VPEmbedding
nn.parallel_linear_func   nn.parallel_linear    OpParallelLinear ReduceType
nn.row_parallel_linear    nn.parallel_linear    RowParallelLinear
optim.adam_offload        optim.offload         AdamOffloadOptimizer
optim.clip_grad           optim.clip            clip_grad_norm
optim.optim_manager       optim.manager         OptimManager
optim.optim_manager       compat.functions      check_overflow grad_rescale
param_init                block.wrapper         init_parameters
param_init                shard.listing         grouped_parameters
param_init                compat.functions      init_distributed_parameter iterate_parameters
parameter                 shard.parameter       DistributedParameter ParameterInitializer
parameter                 compat.functions      OpAllGather=OpGather
pipe_layer                parallel.pipeline     PipelineTransformerBlockList
store                     checkpoint            load save
store                     compat.functions      allgather_objects
store                     compat.functions      allgather_object=allgather_objects DTYPE_LIST
store                     compat.functions      DistributedStateDictWrapper=state_of_rank0
store                     compat.functions      broadcast_object _save_to_rank0=save_to_rank0
synchronize               distributed.results   sum_loss synchronize wait_loader
synchronize               shard.whole           gather_result
wrapper                   block.wrapper         BMTrainModelWrapper
wrapper                   block.wrapper         make_distributed=BMTrainModelWrapper
wrapper                   block.wrapper         model_wrapper_dispatch=BMTrainModelWrapper
"""

# What BMTrain's modules import from each other: programs take names from where they find them.
IMPORTED = """
backward                  config print_rank WarmupLRScheduler
benchmark.all_gather      nccl SHAPES config round_up print_rank format_size
benchmark.reduce_scatter  nccl SHAPES config round_up print_rank format_size
benchmark.send_recv       nccl SHAPES config print_rank format_size
block_layer               config nccl DistributedParameter ZeroContext
distributed.ops           config
hook_func                 config ZeroContext
init                      config nccl synchronize
inspect.model             Block DistributedParameter PipelineTransformerBlockList config nccl
inspect.model             broadcast_object CheckpointBlock
inspect.tensor            config nccl broadcast_object broadcast
layer                     config tp_split_tensor
lr_scheduler.cosine       WarmupLRScheduler
lr_scheduler.exponential  WarmupLRScheduler
lr_scheduler.linear       WarmupLRScheduler
lr_scheduler.no_decay     WarmupLRScheduler
lr_scheduler.noam         WarmupLRScheduler
nn.column_parallel_linear config OpParallelLinear ReduceType
nn.parallel_embedding     config OpParallelLinear all_reduce all_gather
nn.parallel_linear_func   config nccl all_reduce all_gather
nn.row_parallel_linear    config OpParallelLinear ReduceType
optim._distributed        all_reduce all_gather
optim.adam_offload        config nccl state_dict_gather
optim.clip_grad           config nccl
optim.optim_manager       config nccl has_inf_nan
param_init                Block CheckpointBlock DistributedParameter config
parameter                 config nccl round_up all_gather print_rank
pipe_layer                Block ZeroContext config nccl round_up all_gather all_reduce broadcast
pipe_layer                recv_activations send_activations CheckpointBlock
store                     Block PipelineTransformerBlockList TransformerBlockList config nccl
store                     CheckpointBlock
synchronize               config nccl
wrapper                   Block CheckpointBlock DistributedModule DistributedParameter
wrapper                   TransformerBlockList
zero_context              config nccl wait_loader
"""

# A module and names of it, and what does it now. They can be imported; using one raises
# RemovedError.
REMOVED = """
block_layer CheckpointBlockContext OpCheckpointBlock OpTransformerBlockList
a block gathers its parameters while it runs; outside of a pass read one by parameter.gather(), all
by state_dict().

block_layer ScopedTensorInspectorContext
bmtrain.inspect.inspect_tensor() records, blocks that are recomputed included.

block_layer storage_type_cuda
memory is made by shape, dtype and device: torch.empty(n, dtype=dtype, device=bmtrain.device()).

checkpointing CheckpointFunction
bmtrain.checkpointing.checkpoint(function) recomputes what a function computes.

checkpointing ScopedDebugTensorList ScopedTensorInspectorContext
bmtrain.inspect.inspect_tensor() records, blocks that are recomputed included.

distributed.ops send_meta recv_meta
send_activations and recv_activations carry shape and dtype along.

hook_func zero_pre_forward zero_post_forward zero_pre_backward zero_post_backward PreHookFunc \
PostHookFunc OneStepNoGradFunc
Block(module) gathers, releases and reduces by itself.

loss._function cross_entropy_forward cross_entropy_backward_inplace fused_sumexp \
fused_softmax_inplace cross_entropy_backward cross_entropy_forward_inplace
bmtrain.loss.FusedCrossEntropy computes the loss and its gradient.

nccl getUniqueId commInitRank
init_distributed makes all groups; they are in bmtrain.config, config['comm'] first.

optim._distributed state_dict_gather
optimizer.state_dict(gather=True) has whole tensors.

optim._function adam adam_cpu adam_fp16 adam_bf16
AdamOptimizer and AdamOffloadOptimizer compute the update.

optim._function bf16_from_fp32 fp16_from_fp32
tensor.bfloat16() and tensor.half() convert.

pipe_layer PipePreFunction PipePostFunction StagePreFunction StagePostFunction PipeContext \
OpMicroForward OpPipeTransformerBlockList
PipelineTransformerBlockList moves activations and gradients between stages by itself
(distributed/stages.py).

store DistributedTensorWrapper
values of DistributedStateDictWrapper are whole tensors.

store async_save_to_file
bmtrain.save(model, file, non_blocking=True) writes in the background.

pipe_layer CheckpointBlockContext ScopedTensorInspectorContext
Block(module) gathers its parameters and is recorded by bmtrain.inspect.inspect_tensor().

utils load_nccl_pypi
torch.distributed brings its NCCL along; leave the call out.

zero_context ZeroContext
Block(module) gathers, releases and reduces by itself; parameter.gather() gives one tensor.
"""

# Where programs look for names, beside the modules of these tables.
PACKAGES = (
    "bmtrain bmtrain.distributed bmtrain.inspect bmtrain.loss bmtrain.lr_scheduler bmtrain.nccl "
    "bmtrain.nn bmtrain.optim"
)

# NCCL's numbers of dtypes and operations, in their order.
NCCL_NUMBERS = (
    "Int8 Char Bool, Uint8, Int32 Int, Uint32, Int64, Uint64, Float16 Half, Float32 Float, "
    "Float64 Double, BFloat16",
    "Sum, Prod, Max, Min, Avg",
)


def make_importable() -> None:
    """Make the modules of these tables, and set them as attributes, as importing BMTrain does."""
    contents: dict[str, dict[str, Any]] = {}
    for line in NAMES.strip().splitlines():
        path, home, *names = line.split()
        found = vars(importlib.import_module(f"bmtrain.{home}"))
        for name in names:
            old, _, now = name.partition("=")
            contents.setdefault(f"bmtrain.{path}", {})[old] = found[now or old]
    for entry in REMOVED.strip().split("\n\n"):
        first, remedy = entry.split("\n", 1)
        path, *names = first.split()
        for name in names:
            facts = {"__qualname__": f"bmtrain.{path}.{name}", "remedy": remedy.replace("\n", " ")}
            placeholder = Removed(name, (), {**facts, "__doc__": f"Not here: {remedy}"})
            contents.setdefault(f"bmtrain.{path}", {})[name] = placeholder
    contents["bmtrain.nccl.enums"] = {
        f"nccl{name}": number
        for kind in NCCL_NUMBERS
        for number, names in enumerate(kind.split(","))
        for name in names.split()
    }
    nccl = importlib.import_module("bmtrain.distributed.nccl")
    known: dict[str, Any] = {"nccl": nccl}
    for own in contents.values():
        known = own | known
    for line in IMPORTED.strip().splitlines():
        path, *names = line.split()
        contents[f"bmtrain.{path}"] |= {name: known[name] for name in names}
    sys.modules["bmtrain.nccl"] = nccl
    # An empty path makes a package of it, for nccl.enums.
    vars(nccl).update(contents["bmtrain.nccl.enums"], __path__=[])
    for path in ("bmtrain.nccl", "bmtrain.utils"):
        vars(sys.modules[path]).update(contents.pop(path))
    for path, own in contents.items():
        module = sys.modules[path] = types.ModuleType(
            path, f"BMTrain's `{path}`: bmtrain.compat says where its names are now."
        )
        names = sorted(name for name in own if not name.startswith("_"))
        vars(module).update(own, __all__=names, __spec__=importlib.machinery.ModuleSpec(path, None))
        parent, _, last = path.rpartition(".")
        # What has the name already stays: `bmtrain.synchronize` is a function.
        vars(sys.modules[parent]).setdefault(last, module)
    for path in (*PACKAGES.split(), *contents):
        vars(sys.modules[path])["__getattr__"] = functools.partial(look_for, path)
    sys.modules["bmtrain.checkpoint"].__class__ = CheckpointPackage


def look_for(path: str, name: str) -> NoReturn:
    """Raise for a name that a module lacks, with the place where it is, or the nearest name.

    Raises:
        MissingNameError: an AttributeError, so that `hasattr` is False.
    """
    if name.startswith("_"):  # Python itself probes for such names
        raise AttributeError(name)
    places = [*PACKAGES.split(), *(key for key in sys.modules if key.startswith("bmtrain"))]
    home = next((x for x in places if name in vars(sys.modules[x]).get("__all__", ())), None)
    raise MissingNameError(
        unknown(path, [name], dir(sys.modules[path]))
        if home is None
        else f"{path} has no {name!r}: import it from {home}."
    )
